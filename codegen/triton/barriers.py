"""Barriers: where must the threads of a program wait, so that every element is read before any is overwritten?"""

from __future__ import annotations

from math import prod

from kgen.codegen.schedule import Scheduled, Step
from kgen.codegen.triton.blocks import Blocks
from kgen.codegen.triton.text import Line
from kgen.dsl import ir


class Barriers:
    """What stands before the first store to each tensor in place that other threads have loaded from. `stored`: the
    tensors that were stored to so far; who prints one of several ways starts each with those before all."""

    def __init__(self, scheduled: Scheduled, blocks: Blocks) -> None:
        self.stored: set[str] = set()
        # By tensor in place: its loads, by name, of elements that other threads may overwrite.
        self.shared: dict[str, set[str]] = {}
        inout = {t.name for t in scheduled.kernel.tensors if t.role == "inout"}
        for s in scheduled.kernel.body:
            if isinstance(s, ir.Let) and isinstance(s.value, ir.Load) and s.value.tensor in inout:
                lanes = prod(blocks.dims[k].size for k in blocks.of(s.value.axes))
                # A block with fewer lanes than the program has threads is loaded by several of them.
                if s.name in scheduled.barriers or lanes < scheduled.schedule.threads:
                    self.shared.setdefault(s.value.tensor, set()).add(s.name)

    def before(self, s: ir.Stmt) -> list[Line]:
        """What stands before `s`."""
        if isinstance(s, ir.Let) or s.tensor in self.stored:
            return []
        self.stored.add(s.tensor)
        if s.tensor not in self.shared:
            return []
        return [Line("tl.debug_barrier()  # every element is read before any is overwritten", s.span)]

    def in_front_of(self, step: Step) -> list[Line]:
        """What stands in front of a loop or a choice, rather than in it: one barrier is enough where nothing that it
        loads is overwritten by other threads."""
        made = {s.name for s in step.body if isinstance(s, ir.Let)}
        stores = (s for s in step.body if not isinstance(s, ir.Let) and not self.shared.get(s.tensor, set()) & made)
        return [line for s in stores for line in self.before(s)]
