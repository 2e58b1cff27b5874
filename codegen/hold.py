"""What of a row in chunks does a program hold for later passes, rather than load it in each of them?

A row that is too wide for one block may still fit the registers of a program as memory has it, at 16 bits an element
half of what its values take. A program of Triton then loads each chunk in the first pass that needs it and keeps it
for the others (`Schedule.held`); what is computed of it is computed again. Weights, which all rows share, come from the
caches in each pass. Its loops over chunks are unrolled, as registers cannot be indexed.

Whether it fits is estimated here. What `kgen.codegen.words` asks of a row without chunks, whether all values of all its
elements fit together, does not serve: the values of one chunk stand beside a row that stays packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kgen.codegen import ladders
from kgen.codegen.layout import ceil_power, tile_bytes
from kgen.codegen.machines import thread_registers
from kgen.codegen.online import paired, steps_of
from kgen.codegen.operations import CHEAP
from kgen.codegen.phases import refs
from kgen.codegen.rows import exponentials, met, row_loads
from kgen.codegen.schedule import Loop, Schedule, ScheduleError, Step
from kgen.codegen.values import one_by_one, packed_words
from kgen.codegen.variant import Variant
from kgen.codegen.words import tile_words
from kgen.dsl import ir

# Of a thread, with which a multiprocessor runs as many threads as a program that has it to itself: what the compiler is
# told, and what `fits` is for.
REGISTERS = thread_registers(ladders.TRITON_HELD_ALONE)
# What is computed of an element in a few instructions, with a register or two beside it, as far as it was measured.
_LIGHT = CHEAP - {"isnan"} | {"exp", "exp2"}
# What is computed in many instructions.
_FUNCTIONS = frozenset(("exp", "log", "log2", "log1p", "sin", "cos", "tanh", "erf", "pow"))


def held_loads(kernel: ir.Kernel, steps: Iterable[Step]) -> frozenset[str]:
    """The loads of `kernel`'s rows (`rows.row_loads`), by name, that several passes over the same chunks make."""
    seen: set[str] = set()
    again: set[str] = set()
    for step in steps:
        if not isinstance(step, Loop):
            continue
        made = {s.name for s in step.body if isinstance(s, ir.Let)}
        # All chunks are loaded before any is used: their places must be known.
        known = {n for n, e in row_loads(kernel, step.body, {step.axis}).items() if not refs(e) & made}
        again |= known & seen
        seen |= known
    return frozenset(again)


def from_memory(steps: Iterable[Step], held: frozenset[str]) -> Iterator[tuple[Step, list[ir.Let]]]:
    """Each step with the loads that it makes: those `held` only where they come first."""
    there: set[str] = set()
    for step in steps:
        loads = [s for s in step.body if isinstance(s, ir.Let) and isinstance(s.value, ir.Load)]
        yield step, [s for s in loads if s.name not in there]
        there |= held & {s.name for s in loads}


def holding(kernel: ir.Kernel, variant: Variant) -> Schedule | None:
    """The schedule of `kernel`, which has one tile index and no sums over programs, in which a program holds a row in
    chunks; None where it would not help or the registers would not suffice."""
    (axis,) = kernel.tiles
    reductions = met(kernel)
    if one_by_one(kernel, variant) and exponentials(kernel):
        # Softmax of 2**28 elements takes 327 us of 16383 columns whole and 373 held, 428 of 33001 in chunks and 499
        # held, 419 of 50257 and 516.
        return None
    own = row_loads(kernel, kernel.body, {axis.name})
    widest = (tile_bytes(kernel.tensor(e.tensor), {axis.name}, {axis.name: axis.extent.constant}) for e in own.values())
    if max(widest, default=0) <= ladders.TRITON_HELD_BEYOND[reductions]:
        return None  # a block holds it as well
    for trial in _trials(kernel, variant, axis, frozenset(own), reductions):
        try:
            again = held_loads(kernel, steps_of(paired(kernel, trial), trial))
            trial = replace(trial, held=True)
            steps = steps_of(kernel, trial)
        except ScheduleError:
            return None
        if not again or not _simple(steps, again):
            return None  # one pass over the row is enough, or the estimate below is not for such
        words = _words(kernel, again) * axis.extent.constant
        if trial.threads == ladders.TRITON_HELD_ALONE and words <= ladders.TRITON_HELD_ALONE_BEYOND:
            return None  # passes find it in the caches
        if fits(kernel, variant, trial, steps):
            return trial
    return None


def _simple(steps: tuple[Step, ...], held: frozenset[str]) -> bool:
    """Whether passes do what those of norms and softmaxes do, which registers are estimated for: an exact quotient, a
    function but the exponential or the place of an extreme takes more of them for each element, and what two passes
    load that is not `held` the compiler holds, wider than it lies in memory."""
    seen: set[str] = set()
    for step in steps:
        if not isinstance(step, Loop):
            continue
        reductions = [s.value for s in step.body if isinstance(s.value, ir.Reduce)]
        if len(reductions) > 1 or any(e.kind in ("argmax", "argmin") for e in reductions):
            return False
        for s in step.body:
            if isinstance(s, ir.Let) and isinstance(s.value, ir.Load):
                if s.name in seen:
                    return False
                seen |= {s.name} - held
            elif any(isinstance(e, ir.Op) and e.fn not in _LIGHT and step.axis in e.axes for e in ir.walk(s.value)):
                return False
    return True


def _trials(
    kernel: ir.Kernel, variant: Variant, axis: ir.Axis, own: frozenset[str], reductions: int
) -> Iterator[Schedule]:
    """What to try, in order of preference: few threads, so that they wait little for each other, then large chunks.
    `own`: the loads of a row."""
    aligned = not one_by_one(kernel, variant)
    n = axis.extent.constant
    words = int(n * (_words(kernel, own) if aligned else len(own)))
    most = ladders.TRITON_HELD_ALONE // 2
    if reductions > 1 and words <= most // 2 * ladders.TRITON_HELD_ROW_MOST:
        most //= 2
    threads = max(32, min(most, ceil_power(-(-words // ladders.TRITON_HELD_ROW))))
    while threads <= ladders.TRITON_HELD_ALONE:
        # For softmax of 33000 columns the compiler would use 105 without need, and a multiprocessor run one program.
        alone = threads == ladders.TRITON_HELD_ALONE
        told = 0 if alone else REGISTERS
        sizes = [threads * each for each in (ladders.TRITON_HELD_EACH if aligned else ladders.TRITON_HELD_EACH[::-1])]
        several = [c for c in sizes if n > (ladders.TRITON_HELD_CHUNKS - 1) * c]
        for chunk in several or [c for c in sizes if n > c]:
            yield Schedule(threads, 1, chunks=((axis.name, chunk),), name="looped", registers=told)
        threads *= 2


def fits(kernel: ir.Kernel, variant: Variant, schedule: Schedule, steps: tuple[Step, ...]) -> bool:
    """Whether `REGISTERS` a thread hold the row of `schedule`, and what its `steps` need beside, by estimate."""
    (axis,) = kernel.tiles
    chunk = schedule.chunk(axis.name)
    assert chunk is not None  # a row is held in chunks
    each, n = chunk // schedule.threads, axis.extent.constant
    names = held_loads(kernel, steps)
    if one_by_one(kernel, variant):
        # What is loaded element by element has a register each; those of the last chunk that no thread has take none.
        beside = max(_each_by_itself(kernel, step, names) for step in steps if isinstance(step, Loop))
        return len(names) * -(-n // schedule.threads) + beside * each <= ladders.TRITON_HELD_ELEMENTS
    row = _words(kernel, names) * -(-n // (schedule.threads * each)) * each
    beside = _each_of_vectors(kernel, steps, names, ragged=n % chunk > 0) * each + _once(kernel, steps)
    return row <= ladders.TRITON_HELD_MOST and row + beside <= ladders.TRITON_HELD_WORDS[schedule.threads]


def _each_of_vectors(kernel: ir.Kernel, steps: tuple[Step, ...], names: frozenset[str], *, ragged: bool) -> float:
    """Registers for an element of a chunk beside the row: for what is loaded or computed of it, whichever is more, for
    each row that is unpacked beside the first, and for the masks of what is computed."""
    lets = [s for step in steps if isinstance(step, Loop) for s in step.body if isinstance(s, ir.Let)]
    tiles = {a.name for a in kernel.tiles}
    computed = any(s.value.axes & tiles and not isinstance(s.value, ir.Load | ir.Reduce) for s in lets)
    others = {s.name for s in lets if isinstance(s.value, ir.Load) and s.value.axes & tiles} - names
    words = (
        max(_words(kernel, frozenset(others)), 1.0 if computed else 0.0)
        + _words(kernel, names)
        - _words(kernel, frozenset(sorted(names)[:1]))
    )
    return words + (ladders.TRITON_HELD_MASK if ragged and computed else 0.0)


def _once(kernel: ir.Kernel, steps: tuple[Step, ...]) -> float:
    """Registers beside the row for each reduction behind the first, and for a function of a row's values."""
    lets = [s for step in steps for s in step.body if isinstance(s, ir.Let)]
    tiles = {a.name for a in kernel.tiles}
    reductions = len({s.name for s in lets if isinstance(s.value, ir.Reduce)})
    functions = any(
        isinstance(e, ir.Op) and e.fn in _FUNCTIONS and not e.axes & tiles
        for step in steps
        for s in step.body
        for e in ir.walk(s.value)
    )
    return ladders.TRITON_HELD_REDUCTION * (reductions - 1) + (ladders.TRITON_HELD_FUNCTION if functions else 0)


def _each_by_itself(kernel: ir.Kernel, step: Loop, names: frozenset[str]) -> float:
    """Registers for an element of a chunk in the pass `step`, beside the row, where it is loaded by itself: of all its
    values, what it loads with an address each, partial results and what is computed for them. Not all of them count
    for vectors (`_each_of_vectors`), for which the limits are others."""
    words = 0.0
    for s in step.body:
        if isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce):
            words += 1 if isinstance(s.value.arg, ir.Ref) else 2
        elif isinstance(s, ir.Let) and step.axis in s.value.axes:
            words += tile_words(kernel, s.value)
            if isinstance(s.value, ir.Load) and s.name not in names:
                words += ladders.TRITON_HELD_ADDRESS
    return words


def _words(kernel: ir.Kernel, names: frozenset[str]) -> float:
    """32-bit words of the loads `names` for each element of a tile, as memory has them."""
    loads = (s.value for s in kernel.body if isinstance(s, ir.Let) and s.name in names)
    return sum(packed_words(kernel, e) for e in loads if isinstance(e, ir.Load))
