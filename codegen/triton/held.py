"""Chunks that a program holds from pass to pass (`kgen.codegen.hold`): a tuple of blocks, as memory has them.

A loop of its own loads them, so that all are under way before the first is waited for. Where a block's elements have 16
bits, each pass takes them through `_packed`. Without it the compiler, which unrolls the passes, takes what one has
converted to f32 for what the next one needs, and holds that: twice the registers, and what does not fit is spilled.
"""

from __future__ import annotations

from collections.abc import Callable

from kgen.codegen.schedule import Loop, Scheduled
from kgen.codegen.triton.identity import Number
from kgen.codegen.triton.memory import Memory
from kgen.dsl import ir


class HeldChunks:
    """Prints the loads of chunks that are held. `fresh` makes names of the module."""

    def __init__(self, scheduled: Scheduled, memory: Memory, fresh: Callable[[str], str]) -> None:
        self.scheduled, self.memory, self.fresh = scheduled, memory, fresh
        self.tuples: dict[str, str] = {}  # by name of a load: that of the tuple of its chunks
        self.dims: dict[str, tuple[str, ...]] = {}
        self.others: dict[str, Number | None] = {}  # what their masked lanes have, None for anything

    def ahead(self, step: Loop) -> list[ir.Let]:
        """The held loads of which the pass `step` is the first to need any: they are made in front of it."""
        loads = (s for s in step.body if isinstance(s, ir.Let) and s.name in self.scheduled.held)
        return [s for s in loads if s.name not in self.tuples]

    def start(self, loads: list[ir.Let]) -> list[str]:
        """The statements in front of the loop that makes `loads`."""
        self.tuples |= {s.name: self.fresh(f"{s.name}_held") for s in loads}
        return [f"{self.tuples[s.name]} = ()  # its chunks as memory has them, for all passes" for s in loads]

    def load(self, s: ir.Let, other: Number | None, *, given_up_last: bool) -> list[str]:
        """The lines that load a chunk of `s`, its masked lanes `other`."""
        assert isinstance(s.value, ir.Load)  # what is held
        own = self.fresh(f"{s.name}_chunk")
        lines, self.dims[s.name] = self.memory.load(own, s.value, other, given_up_last=given_up_last, widened=False)
        self.others[s.name] = other
        return [*lines, f"{self.tuples[s.name]} += ({own},)"]

    def take(self, load: str, name: str, e: ir.Load, chunk: str) -> tuple[list[str], tuple[str, ...]]:
        """The lines that make a block called `name` of the held `load` of `e`, its chunk number `chunk`, and its
        dimensions."""
        block = f"{self.tuples[load]}[{chunk}]"
        packed = self.memory.kernel.tensor(e.tensor).dtype.bits == 16
        return [f"{name} = {f'_packed({block})' if packed else block}{self.memory.widening(e)}"], self.dims[load]
