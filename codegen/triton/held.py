"""Chunks that a program holds from pass to pass (`kgen.codegen.hold`): a tuple of blocks, as memory has them.

Where a block's elements have 16 bits, each pass that takes them goes through `_packed`. Without it the compiler, which
unrolls the passes, takes what one has converted to f32 for what the next one needs, and holds that: twice the
registers, and what does not fit is spilled.
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

    def start(self, step: Loop) -> list[str]:
        """The statements in front of the pass `step`."""
        names = [s.name for s in step.body if isinstance(s, ir.Let) and s.name in self.scheduled.held]
        made = [n for n in names if n not in self.tuples]
        self.tuples |= {n: self.fresh(f"{n}_held") for n in made}
        return [f"{self.tuples[n]} = ()  # its chunks as memory has them, for the passes behind this one" for n in made]

    def load(
        self, load: str, name: str, e: ir.Load, other: Number | None, chunk: str, *, given_up_last: bool
    ) -> tuple[list[str], tuple[str, ...]]:
        """The lines that make a block called `name` of the held `load` of `e`, and its dimensions: from memory, its
        masked lanes `other`, in the first pass, and from what is held as number `chunk` in others."""
        widening, tuple_name = self.memory.widening(e), self.tuples[load]
        if load in self.dims:
            block = f"{tuple_name}[{chunk}]"
            packed = self.memory.kernel.tensor(e.tensor).dtype.bits == 16
            return [f"{name} = {f'_packed({block})' if packed else block}{widening}"], self.dims[load]
        own = self.fresh(f"{load}_loaded") if widening else name
        lines, dims = self.memory.load(own, e, other, given_up_last=given_up_last, widened=False)
        self.dims[load], self.others[load] = dims, other
        lines.append(f"{tuple_name} += ({own},)")
        return [*lines, *([f"{name} = {own}{widening}"] if widening else [])], dims
