"""Which schedules of a kernel are worth measuring? Powers of two around the default one, the likely best first.

Pure: nothing is compiled and nothing is timed. `candidates` gives schedules that the kernel allows; a model of what a
program costs (`estimate`) puts them in order and leaves out those that no device could run well, so that a search with
little time has tried what matters. The default schedule is always the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from math import log2, prod
from typing import Any

from kgen.codegen import ladders
from kgen.codegen.hold import REGISTERS as HELD_REGISTERS
from kgen.codegen.knobs import MOST_BLOCKS, Knobs
from kgen.codegen.layout import (
    At,
    accesses,
    ceil_power,
    elements,
    held,
    layout,
    tile_bytes,
    vector_axis,
    vector_limit,
)
from kgen.codegen.machines import architecture, programs_by_registers, thread_registers
from kgen.codegen.normalize import statement_axes
from kgen.codegen.pipeline import (
    CAPABILITY,
    MULTIPROCESSORS,
    OF_ROWS,
    is_by_elements,
    prepare,
    schedule_kernel,
    schedule_prepared,
)
from kgen.codegen.registers import tile_registers
from kgen.codegen.schedule import Element, Loop, Schedule, Scheduled, ScheduleError, usual
from kgen.codegen.values import packed_words, padded
from kgen.codegen.variant import Variant
from kgen.codegen.words import tile_words
from kgen.dsl import ir

MOST = 32  # candidates of one kernel, the default among them

# Estimates of registers are this much too high where a schedule just fits.
_SLACK = 1.15
# Of the words that `ladders.TRITON_TILES` counts, the share that is not live with all others: 160 fit 128 registers.
_TRITON_LIVE = 1.25
_SM = architecture(CAPABILITY)  # whatever the device: an order is all that is asked for
# Bytes that must be in flight for a multiprocessor to have its share of the bandwidth (`ladders.FLAT_SLOTS`).
_IN_FLIGHT = 32 << 10
# A pass over a row that was read before finds most of it in the L2 cache.
_AGAIN = 0.4
# What a step away from the default costs, as a share: the ladders are measured, the model is not.
_STEP = 0.03


@dataclass(frozen=True)
class Candidate:
    """A schedule to measure: its knobs (None: the default), the kernel with it applied, and what the model says of it:
    a time relative to that of memory traffic alone."""

    knobs: Knobs | None
    scheduled: Scheduled
    cost: float


def candidates(
    kernel: ir.Kernel,
    variant: Variant,
    backend: str,
    *,
    num_sms: int = MULTIPROCESSORS,
    capability: int = CAPABILITY,
    most: int = MOST,
) -> tuple[Candidate, ...]:
    """At most `most` schedules of `kernel` for `variant`: the default, then others by what they are estimated to cost.

    No two of them are the same program. Raises ScheduleError where the kernel has no schedule at all.
    """
    default = schedule_kernel(kernel, variant, backend, num_sms=num_sms, capability=capability)
    prepared = prepare(kernel, variant)  # which takes as long as all the rest
    first = Candidate(None, default, 0.0)
    seen = {_sameness(default)}
    found: list[Candidate] = []

    def scheduled(knobs: Knobs) -> Scheduled:
        return schedule_prepared(prepared, backend, num_sms=num_sms, capability=capability, knobs=knobs)

    space = _space(default, backend)
    if is_by_elements(prepared, default):
        space = _by_elements(default)
        with suppress(ScheduleError):
            space = chain(space, _space(scheduled(OF_ROWS), backend))
    for knobs in space:
        try:
            made = scheduled(knobs)
        except ScheduleError:
            continue
        same = _sameness(made)
        if same in seen:
            continue
        seen.add(same)
        cost = estimate(made, backend)
        if cost is not None:
            found.append(Candidate(knobs, made, cost + _STEP * _distance(default.schedule, made.schedule)))
    # Sorting is stable: equals stay in order of the space, whose first are those near the default.
    return (first, *sorted(found, key=lambda c: c.cost)[: most - 1])


def _sameness(s: Scheduled) -> tuple[Any, ...]:
    """What tells the programs of two schedules of one kernel apart."""
    own = s.schedule
    shape: tuple[Any, ...] = (own.threads, own.rows, own.chunks, own.programs, own.stages, own.ahead, own.cluster)
    shape += (own.registers,)
    vector = max((a.vector for a in _axes(s)), default=1)
    return (*shape, vector, own.peeled, own.held, *(_sameness(t) for t in s.then))


def _axes(s: Scheduled) -> Iterable[Any]:
    lay = layout(s.kernel, s.variant, s.schedule)
    return (*lay.axes, lay.row)


def _distance(a: Schedule, b: Schedule) -> float:
    """Doublings between two schedules."""
    steps = abs(log2(a.threads / b.threads)) + abs(log2(a.rows / b.rows)) + abs(log2(a.vector / b.vector))
    steps += abs(log2(a.programs / b.programs)) if a.programs and b.programs else 0.0
    steps += abs(log2(a.stages / b.stages)) + abs(log2(a.cluster / b.cluster)) + (a.held != b.held)
    before, after = dict(a.chunks), dict(b.chunks)
    for axis in before.keys() | after.keys():
        if axis in before and axis in after:
            steps += abs(log2(before[axis] / after[axis]))
        else:
            steps += 1.0
    return steps


# ---- the space -----------------------------------------------------------------------------------------------------


def _space(default: Scheduled, backend: str) -> Iterator[Knobs]:
    """The knobs to try, not all of which the kernel allows."""
    if not default.kernel.tiles:
        yield from _flat(default, backend)
    elif backend == "cuda":
        yield from _cuda_tiles(default)
    else:
        yield from _triton_tiles(default)


def _by_elements(default: Scheduled) -> Iterator[Knobs]:
    """Of a kernel whose rows no program holds: threads of both its launches, and programs of the second."""
    elements = next(s for s in (default, *default.then) if s.sums is not None)
    for threads in _around(elements.schedule.threads, 64, 1024, 2):
        yield from _blocks(elements, Knobs(threads=threads))


def _around(n: int, least: int, most: int, steps: int = 2) -> list[int]:
    """Powers of two from `n` on, outwards."""
    out = [n]
    for i in range(1, steps + 1):
        out += [n >> i, n << i]
    return [v for v in out if least <= v <= most and v]


def _flat(default: Scheduled, backend: str) -> Iterator[Knobs]:
    s = default.schedule
    if backend == "cuda":
        slots = max(1, s.rows // (s.threads * s.vector))
        for threads, some in product(_around(s.threads, 64, 1024), _around(slots, 1, 8, 3)):
            yield from _blocks(default, Knobs(threads=threads, rows=threads * s.vector * some))
        if s.vector > 1:
            for some in _around(slots, 1, 8):
                yield Knobs(threads=s.threads, rows=s.threads * s.vector // 2 * some, vector=s.vector // 2)
    else:
        for threads, points in product(_around(s.threads, 32, 512), _around(s.rows, 128, 16384, 3)):
            yield from _blocks(default, Knobs(threads=threads, rows=points))


def _cuda_tiles(default: Scheduled) -> Iterator[Knobs]:
    s = default.schedule
    kernel, variant = default.kernel, default.variant
    own = s.threads // s.rows  # threads a row
    axis = vector_axis(kernel, variant)
    widest = s.vector if s.peeled else vector_limit(kernel, variant, axis) if axis is not None else 1
    if s.peeled:
        yield Knobs(peel=0)
    for ahead in (0, 1, 2, 4):
        yield Knobs(ahead=ahead)
    longest = max(a.extent.constant for a in kernel.tiles)
    for a_row, rows in product(_around(own, 1, 1024, 4), (1, 2, 4, 8, 16)):
        if 32 <= a_row * rows <= 1024:
            knobs = Knobs(threads=a_row * rows, rows=rows, chunks=_whole(default))
            yield from _blocks(default, knobs)
            if rows == 1 and default.sums is None:
                yield replace(knobs, ahead=1)
    for threads in _around(max(own, 256), 64, 1024, 3):
        for chunks in _chunkings(default, [threads * widest * slots for slots in (1, 2, 4, 8)]):
            yield from _blocks(default, Knobs(threads=threads, rows=1, chunks=chunks))
    for threads, cluster in product((1024, 512, 256), (1, 2, 4, 8)):
        # No smaller ones than give each thread a vector.
        if s.cluster > 1 or (cluster > 1 and threads * cluster * widest <= longest):
            yield from _blocks(default, Knobs(threads=threads, rows=1, chunks=_whole(default), cluster=cluster))
    if s.vector > 1:
        for threads in _around(s.threads, 32, 1024, 1):
            yield Knobs(threads=threads, rows=s.rows, vector=s.vector // 2)


def _triton_tiles(default: Scheduled) -> Iterator[Knobs]:
    s = default.schedule
    if s.held:
        yield Knobs(hold=0)
    for threads, each in product((1024, 512, 256), (4, 8, 16)):
        for chunks in _chunkings(default, [threads * each]):
            knobs = Knobs(threads=threads, rows=1, chunks=chunks, hold=1)
            yield knobs
            if threads < ladders.TRITON_HELD_ALONE:
                yield replace(knobs, registers=HELD_REGISTERS)
    for threads, rows in product(_around(s.threads, 32, 1024, 3), (1, 2, 4, 8, 16, 32)):
        for knobs in _blocks(default, Knobs(threads=threads, rows=rows, chunks=_whole(default))):
            yield from _stages(knobs) if default.sums is not None else (knobs,)
    for threads in (128, 256, 512, 1024):
        for chunks in _chunkings(default, [1 << i for i in range(10, 16)]):
            for knobs in _blocks(default, Knobs(threads=threads, rows=1, chunks=chunks)):
                yield from _stages(knobs)


def _whole(default: Scheduled) -> tuple[tuple[str, int], ...]:
    """Chunks that leave every index whole: none, but of those that the default takes in chunks the whole extent."""
    return tuple((axis, default.kernel.axis(axis).extent.constant) for axis, _ in default.schedule.chunks)


def _chunkings(default: Scheduled, elements: list[int]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Chunks along the longest index of about so many elements, and, of a kernel with several in chunks, those that it
    has with one of them changed."""
    kernel = default.kernel
    extents = {a.name: a.extent.constant for a in kernel.tiles}
    before = dict(default.schedule.chunks)
    longest = max(extents, key=lambda a: extents[a])
    for axis in dict.fromkeys((longest, *before)):
        beside = prod(n for a, n in held(kernel, default.schedule).items() if a != axis) if len(extents) > 1 else 1
        for n in elements:
            for chunk in dict.fromkeys((n, max(16, n // ceil_power(max(1, beside))))):
                if chunk < extents[axis]:
                    yield tuple(({a: extents[a] for a in before} | {axis: chunk}).items())
                    if len(before) > 1:
                        yield tuple((before | {axis: chunk}).items())


def _blocks(default: Scheduled, knobs: Knobs) -> Iterator[Knobs]:
    """`knobs`, and for a sum over programs several numbers of them a multiprocessor."""
    yield knobs
    if default.sums is not None:
        threads = knobs.threads or default.schedule.threads
        for blocks in (1, 2, 4, 8, 16):
            if blocks <= MOST_BLOCKS and blocks * threads <= _SM.threads:
                yield replace(knobs, blocks=blocks)


def _stages(knobs: Knobs) -> Iterator[Knobs]:
    """`knobs`, and with the loads of more iterations of a loop in flight, for the usual number of programs."""
    yield knobs
    for stages in (1, 2, 3, 4):
        if knobs.blocks is None:
            yield replace(knobs, stages=stages)


# ---- the model -----------------------------------------------------------------------------------------------------


def estimate(s: Scheduled, backend: str) -> float | None:
    """About how long `s` takes, in units of its memory traffic at full bandwidth if every byte moved once; None for
    what would surely spill. Partial sums of a program and what all rows share do not count beside rows."""
    row = {a.name: a.extent.constant for a in s.kernel.tiles}
    # Launches over rows and over their elements count together; of others the first is much like those behind it.
    launches = [t for t in (s, *s.then) if t.sums is None or t.sums.split is not None] if s.sums is None else [s]
    moved = 0.0
    once: dict[tuple[str, At], float] = {}
    for one in launches:
        found = _launch(one, backend, row)
        if found is None:
            return None
        moved += found
        for a in accesses(one.kernel):
            if _streams(one, a.axes) and not a.once:
                extents = _row_extents(one, row)
                once[a.tensor.name, a.at] = tile_bytes(a.tensor, a.axes, extents)
    return moved / max(sum(once.values()), 1)


def _launch(s: Scheduled, backend: str, row: Mapping[str, int]) -> float | None:
    """About how long one launch takes: bytes of a row, at the bandwidth that its programs use. None if it spills."""
    threads = s.schedule.threads
    together = s.sums.blocks if s.sums is not None and s.schedule.programs else 1
    at_most = thread_registers(threads, together if backend == "cuda" else 1)
    registers = _registers(s, backend)
    if registers > at_most * _SLACK:
        return None
    programs = min(_SM.threads // threads, _SM.programs, max(1, programs_by_registers(threads, registers)))
    if s.schedule.programs and s.sums is not None:
        programs = min(programs, together)
    moved, in_flight = _traffic(s, row)
    in_flight /= s.schedule.cluster  # on each of its multiprocessors
    used = min(1.0, programs * in_flight / _IN_FLIGHT) if in_flight else 1.0
    return moved / max(used, 0.05)


def _row_extents(s: Scheduled, row: Mapping[str, int]) -> dict[str, int]:
    """Extents of the tile indices, or of those of `row` that a flat kernel spreads over programs."""
    flat = {a.name: row[a.name] for a in s.kernel.parallel if a.name in row}
    return {a.name: a.extent.constant for a in s.kernel.tiles} or flat


def _streams(s: Scheduled, axes: frozenset[str]) -> bool:
    """Whether a value with these indices is another one in every row."""
    if s.sums is not None and s.sums.split is not None:
        return bool(axes & {*s.sums.over})
    return not s.staged or bool(axes & {a.name for a in s.kernel.parallel})


def _registers(s: Scheduled, backend: str) -> float:
    """About how many registers a thread takes. What Triton's values take together, less what is not live with all
    others: coarser than the estimates that default schedules rest on, which are for some kinds of schedule each, where
    this has to rank any two."""
    if backend == "triton":
        return max(ladders.OTHER_REGISTERS, _triton_words(s) / s.schedule.threads / _TRITON_LIVE)
    lay = layout(s.kernel, s.variant, s.schedule)
    if not s.kernel.tiles:
        return ladders.OTHER_REGISTERS + 2 * lay.row.vector * lay.row.slots
    return ladders.OTHER_REGISTERS + tile_registers(s.kernel, s.variant, s.steps, lay)


def _triton_words(s: Scheduled) -> float:
    """32-bit words of all blocks of a program, as `ladders.TRITON_TILES` counts them."""
    extents = padded(s.kernel, s.schedule)
    whole = {a.name: a.extent.constant for a in s.kernel.tiles}
    parallel = {a.name for a in s.kernel.parallel}
    total = 0.0
    for statement in s.kernel.body:
        value, axes = statement.value, statement_axes(statement)
        if isinstance(value, ir.Reduce) or isinstance(statement, ir.Store):
            continue
        rows = s.schedule.rows if axes & parallel and not isinstance(statement, ir.Accumulate) else 1
        if isinstance(value, ir.Load) and isinstance(statement, ir.Let) and statement.name in s.held:
            total += packed_words(s.kernel, value) * elements(axes, whole)  # beside the chunk, as memory has it
        total += tile_words(s.kernel, value) * rows * elements(axes, extents)
    return total


def _traffic(s: Scheduled, row: Mapping[str, int]) -> tuple[float, float]:
    """(bytes that are moved for a row, bytes that a program has in flight)."""
    kernel = s.kernel
    parallel = {a.name for a in kernel.parallel}
    whole = _row_extents(s, row)
    # Of a flat kernel a program has some points of a row, else one row or more.
    rows = s.schedule.rows / prod(whole.values()) if not kernel.tiles else s.schedule.rows
    part = held(kernel, s.schedule)

    def size(tensor: str, axes: frozenset[str], extents: Mapping[str, int]) -> float:
        return tile_bytes(kernel.tensor(tensor), axes, extents)

    moved = in_flight = 0.0
    seen: set[str] = set()
    for step in usual(s.steps):
        if isinstance(step, Element):
            continue
        flying = 0.0
        extents = {**whole, step.axis: part[step.axis]} if isinstance(step, Loop) else whole
        for statement in step.body:
            if isinstance(statement, ir.Let):
                if not isinstance(statement.value, ir.Load) or not _streams(s, statement.value.axes):
                    continue
                tensor, axes = statement.value.tensor, statement.value.axes
                again = statement.name in seen
                if again and statement.name in s.held:
                    continue
                seen.add(statement.name)
                shared = 1.0 if axes & parallel else 1.0 / rows  # by the rows of a program
                moved += size(tensor, axes, whole) * shared * (_AGAIN if again else 1.0)
                if axes & parallel:
                    flying += size(tensor, axes, extents) * rows
            elif isinstance(statement, ir.Store):
                names = ir.target_symbols(statement)
                moved += size(statement.tensor, names & frozenset(a.name for a in kernel.axes), whole)
        in_flight = max(in_flight, flying)
    return moved, in_flight
