"""What of a row in chunks does a program hold for later passes, rather than load it in each of them?

A row that is too wide for one block may still fit the registers of a program as memory has it, at 16 bits an element
half of what its values take. A program of Triton then loads each chunk in the first pass that needs it and keeps it
for the others (`Schedule.held`); what is computed of it is computed again. Weights, which all rows share, come from the
caches in each pass. Its loops over chunks are unrolled, as registers cannot be indexed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kgen.codegen import ladders
from kgen.codegen.layout import vector_limit
from kgen.codegen.online import paired, steps_of
from kgen.codegen.phases import refs
from kgen.codegen.schedule import Loop, Schedule, ScheduleError, Step
from kgen.codegen.variant import Variant
from kgen.codegen.words import tile_words
from kgen.dsl import ir

_WORD = 4  # bytes


def held_loads(kernel: ir.Kernel, steps: Iterable[Step]) -> frozenset[str]:
    """The loads of `kernel`'s own rows, by name, that several passes over the same chunks make."""
    rows = {a.name for a in kernel.parallel}
    seen: set[str] = set()
    again: set[str] = set()
    for step in steps:
        made = {s.name for s in step.body if isinstance(s, ir.Let)}
        for s in step.body:
            e = s.value
            if not isinstance(step, Loop) or not isinstance(e, ir.Load):
                continue
            # All chunks are loaded before any is used: their places must be known.
            known = not any(refs(at) & made for at in e.at if isinstance(at, ir.Expr))
            if known and step.axis in e.axes and rows <= e.axes:
                assert isinstance(s, ir.Let)  # normal form
                (again if s.name in seen else seen).add(s.name)
    return frozenset(again)


def from_memory(steps: Iterable[Step], held: frozenset[str]) -> Iterator[tuple[Step, list[ir.Let]]]:
    """Each step with the loads that it makes: those `held` only where they come first."""
    there: set[str] = set()
    for step in steps:
        loads = [s for s in step.body if isinstance(s, ir.Let) and isinstance(s.value, ir.Load)]
        yield step, [s for s in loads if s.name not in there]
        there |= held & {s.name for s in loads}


def holding(kernel: ir.Kernel, variant: Variant) -> Schedule | None:
    """The schedule of `kernel`, which has one tile index and no sums over programs, in which a program of 32 warps
    holds a wide row in chunks; None where it would not help or the registers would not suffice."""
    (axis,) = kernel.tiles
    threads = ladders.TRITON_HELD_THREADS
    for each in ladders.TRITON_HELD_EACH:
        trial = Schedule(threads, 1, chunks=((axis.name, threads * each),), name="looped")
        try:
            again = held_loads(kernel, steps_of(paired(kernel, trial), trial))
            trial = replace(trial, held=True)
            steps = steps_of(kernel, trial)
        except ScheduleError:
            return None
        words = _words(kernel, again)
        if words * axis.extent.constant <= ladders.TRITON_HELD_BEYOND:
            return None  # one pass over the row is enough, or passes find it in the caches
        if _fits(kernel, variant, axis, each, steps):
            return trial
    return None


def _fits(kernel: ir.Kernel, variant: Variant, axis: ir.Axis, each: int, steps: tuple[Step, ...]) -> bool:
    """Whether the registers hold a row of which a thread has `each` elements of every chunk."""
    names = held_loads(kernel, steps)
    vectors = vector_limit(kernel, variant, axis.name) > 1
    # What is loaded element by element has a register each; those of the last chunk that no thread has take none.
    grain = each if vectors else 1
    slots = -(-axis.extent.constant // (ladders.TRITON_HELD_THREADS * grain)) * grain
    row = _words(kernel, names) if vectors else len(names)
    beside = max(_beside(kernel, step, names, vectors) for step in steps if isinstance(step, Loop))
    most = ladders.TRITON_HELD_WORDS if vectors else ladders.TRITON_HELD_ELEMENTS
    return row * slots + beside * each <= most


def _beside(kernel: ir.Kernel, step: Loop, names: frozenset[str], vectors: bool) -> float:
    """Words for each element of a chunk in a pass, beside the row: its values, what it loads, partial results and what
    is computed for them."""
    words = 0.0
    for s in step.body:
        if isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce):
            words += 1 if isinstance(s.value.arg, ir.Ref) else 2
        elif isinstance(s, ir.Let) and step.axis in s.value.axes:
            words += tile_words(kernel, s.value)
            if isinstance(s.value, ir.Load) and s.name not in names and not vectors:
                words += ladders.TRITON_HELD_ADDRESS
    return words


def _words(kernel: ir.Kernel, names: frozenset[str]) -> float:
    """32-bit words of the loads `names` for each element of a tile, as memory has them."""
    loads = (s.value for s in kernel.body if isinstance(s, ir.Let) and s.name in names)
    return sum(kernel.tensor(e.tensor).dtype.itemsize / _WORD for e in loads if isinstance(e, ir.Load))
