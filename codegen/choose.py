"""Default schedules: how is this kernel spread over the machine unless someone says otherwise?

Reads sizes off the kernel in normal form and looks the rest up in `kgen.codegen.ladders`. A tile that
would not fit a program's registers is taken in chunks along its longest axis that may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from kgen.codegen import ladders
from kgen.codegen.choose_triton import triton_flat, triton_row
from kgen.codegen.knobs import Knobs, turned
from kgen.codegen.layout import (
    Peel,
    accesses,
    ceil_power,
    floor_power,
    held,
    layout,
    peel,
    vector_axis,
    vector_limit,
)
from kgen.codegen.machines import MOST_REGISTERS, programs_by_registers
from kgen.codegen.online import paired, steps_of
from kgen.codegen.registers import (
    other_registers,
    pass_registers,
    tile_registers,
    trial_registers,
    waiting_registers,
)
from kgen.codegen.resident import resident, stages_held
from kgen.codegen.rows import (
    beside,
    exponentials,
    in_place,
    legal,
    loaded_row_bytes,
    met,
    narrow_rows,
    ordered,
    stores_exponentials,
    stores_rows,
    whole_row_bytes,
)
from kgen.codegen.schedule import Schedule, ScheduleError, Step, Sums
from kgen.codegen.sums import has_sums
from kgen.codegen.values import largest_block, padded
from kgen.codegen.variant import Variant
from kgen.codegen.words import tight
from kgen.dsl import ir

_CLUSTERS_SINCE = 90  # compute capability


def choose(
    kernel: ir.Kernel,
    variant: Variant,
    backend: str,
    *,
    num_sms: int = 132,
    rows_hint: int | None = None,
    sums: Sums | None = None,
    leaves: bool = False,
    knobs: Knobs | None = None,
    capability: int = _CLUSTERS_SINCE,
    shares: int | None = None,
) -> Schedule:
    """The default schedule of `kernel`, which is in normal form, on `backend` (`cuda` or `triton`), with `knobs` in
    place of its sizes. Raises ScheduleError where they do not fit.

    `rows_hint`: about how many rows a call has; with few, a program takes fewer so that all of `num_sms` work.
    `sums`: how its sums over programs are spread, if it has any. `leaves`: whether programs may have nothing to do.
    `capability`: the compute capability of the device, 90 for sm_90. `shares`: of a kernel that adds up the shares of a
    sum, how many there are at most, where that is known.
    """
    asked = knobs or Knobs()
    # Whoever sets chunks has passes that read again, unless they are to be held.
    hold = 0 if asked.hold is None and asked.chunks else asked.hold
    schedule = _default(
        kernel, variant, backend, num_sms, rows_hint, sums, leaves, capability, asked.peel, hold, shares
    )
    out = schedule if knobs is None else turned(kernel, variant, backend, schedule, knobs, sums, num_sms)
    if knobs is not None and knobs.stages is None and backend == "triton" and sums is not None and not out.chunks:
        # Those of the default are of other rows or threads, perhaps.
        out = replace(out, stages=stages_held(kernel, variant, out, capability))
    if out.cluster > 1 and capability < _CLUSTERS_SINCE:
        raise ScheduleError(
            f"a schedule of {kernel.name} asks for a cluster of {out.cluster} thread blocks; the device is of "
            f"sm_{capability}, and those before sm_{_CLUSTERS_SINCE} have no clusters"
        )
    return out


def _default(
    kernel: ir.Kernel,
    variant: Variant,
    backend: str,
    num_sms: int,
    rows_hint: int | None,
    sums: Sums | None,
    leaves: bool,
    capability: int,
    wish: int | None,
    hold: int | None,
    shares: int | None,
) -> Schedule:
    if sums is not None and sums.split is None and kernel.tiles:
        return _block_finish(kernel, backend, shares)
    if sums is not None and not kernel.tiles:
        return _flat_sum(kernel, variant, backend, sums)
    if backend == "triton":
        schedule = triton_row(kernel, variant, capability, hold) if kernel.tiles else triton_flat(leaves)
    else:
        schedule = (
            _cuda_row(kernel, variant, num_sms, capability, wish)
            if kernel.tiles
            else _cuda_flat(kernel, variant, leaves)
        )
    return schedule if rows_hint is None or sums is not None else _spread(kernel, schedule, backend, rows_hint, num_sms)


def _spread(kernel: ir.Kernel, schedule: Schedule, backend: str, rows: int, num_sms: int) -> Schedule:
    """Fewer rows a program while there are multiprocessors without one."""
    while schedule.rows > 1 and -(-rows // schedule.rows) < num_sms:
        fewer = replace(schedule, rows=schedule.rows // 2)
        if backend == "cuda" and (kernel.tiles or fewer.rows < fewer.threads * fewer.vector):
            fewer = replace(fewer, threads=fewer.threads // 2)
        if fewer.threads < 32:
            break
        schedule = fewer
    return schedule


# ---- sums over programs --------------------------------------------------------------------------------------------


def sum_blocks(
    kernel: ir.Kernel,
    variant: Variant,
    backend: str,
    schedule: Schedule,
    steps: tuple[Step, ...],
    capability: int,
) -> int:
    """Programs of a sum that a multiprocessor holds at a time, all of which are started at once: as many as make
    `SUM_THREADS` threads, fewer where their registers would not fit."""
    most = max(1, ladders.SUM_THREADS // schedule.threads)
    if backend == "triton" and kernel.tiles and not schedule.chunks:
        return 1 if tight(kernel, schedule) else resident(kernel, variant, schedule, capability)
    if schedule.cluster > 1:
        most = min(most, ladders.SUM_CLUSTER_BLOCKS)
    if backend == "triton" or not kernel.tiles:
        return most
    registers = tile_registers(kernel, variant, steps, layout(kernel, variant, schedule)) + other_registers(variant)
    return max(1, min(most, programs_by_registers(schedule.threads, registers)))


def _flat_sum(kernel: ir.Kernel, variant: Variant, backend: str, sums: Sums) -> Schedule:
    finish = sums.split is None
    vector = vector_limit(kernel, variant, kernel.parallel[-1].name)
    if sums.columns:
        threads = ladders.FINISH_THREADS if finish else ladders.FLAT_THREADS
        points = 1 if finish else vector
    else:
        threads, points = ladders.FLAT_THREADS, vector
    if backend == "triton":
        return Schedule(threads, threads * max(points, 1 if finish else 4), name="flat")
    return Schedule(threads, threads * points, points, name="flat")


def _block_finish(kernel: ir.Kernel, backend: str, shares: int | None) -> Schedule:
    """A block of columns a program; its threads share out the rows of the workspace, of which there are `shares`."""
    width = prod(a.extent.constant for a in kernel.tiles)
    threads = ladders.FINISH_BLOCK_THREADS
    if backend == "cuda":
        return Schedule(threads, threads // width, name="finish")
    # Triton's threads take several rows each, in flight together.
    rows = threads // width * ladders.TRITON_FINISH_ROWS
    if shares is not None:
        rows = min(rows, max(ladders.TRITON_FINISH_ROWS, ceil_power(shares)))
    return Schedule(max(32, rows * width // ladders.TRITON_FINISH_ROWS), rows, name="finish")


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def _cuda_flat(kernel: ir.Kernel, variant: Variant, leaves: bool) -> Schedule:
    vector = vector_limit(kernel, variant, kernel.parallel[-1].name) if kernel.parallel else 1
    loaded = {a.tensor.name: a.tensor.dtype.itemsize for a in accesses(kernel) if a.tensor.role != "out"}
    slots = ladders.LEAVING_SLOTS if leaves else ladders.FLAT_SLOTS[vector * sum(loaded.values())]
    threads = ladders.FLAT_THREADS
    return Schedule(threads, threads * vector * slots, vector, name="flat")


def _cuda_row(kernel: ir.Kernel, variant: Variant, num_sms: int, capability: int, wish: int | None) -> Schedule:
    return _ahead(kernel, _cuda_threads(kernel, variant, capability, wish), num_sms)


def _peeling(kernel: ir.Kernel, variant: Variant, wish: int | None) -> Peel | None:
    """How rows are peeled, if they are: `wish` is what a knob says of it."""
    found = None if wish == 0 else peel(kernel, variant)
    if found is None or wish == 1:
        return found
    return found if kernel.axis(found.axis).extent.constant >= ladders.PEELED_VECTORS * found.vector else None


def _cuda_threads(kernel: ir.Kernel, variant: Variant, capability: int, wish: int | None) -> Schedule:
    axis = vector_axis(kernel, variant)
    vector = vector_limit(kernel, variant, axis) if axis is not None else 1
    peeling = _peeling(kernel, variant, wish)
    peeled = peeling is not None
    if peeling is not None:
        vector = peeling.vector
    sums = has_sums(kernel)
    # Measured of whole vectors; what is loaded element by element is bound by that.
    vectors = sums and axis is not None and vector > 1 and not peeled
    if vectors and axis is not None and len(kernel.tiles) == 1:
        row = _sum_row(kernel, variant, axis, vector)
        if row is not None:
            return row
    # In place, and where exponentials would be held that are wider than the row, passes over chunks are better than a
    # row that has its multiprocessor to itself: two programs run at a time, and a row is read again from the caches.
    passes = in_place(kernel) or (exponentials(kernel) and narrow_rows(kernel))
    if sums:
        threads = ladders.SUM_ROW_THREADS[whole_row_bytes(kernel)]
    elif passes and whole_row_bytes(kernel) > ladders.ROW_WHOLE_BEFORE_PASSES:
        threads = 1024
    else:
        threads = ladders.ROW_THREADS[loaded_row_bytes(kernel)]
        if exponentials(kernel):
            threads = min(threads, ladders.ROW_EXPONENTIAL_THREADS)
    while True:
        schedule = _packed(kernel, variant, Schedule(threads, 1, vector, name="row", peeled=peeled))
        if schedule.threads == 1024 and schedule.rows == 1 and passes:
            break
        if _fits(kernel, variant, schedule):
            return schedule
        if threads == 1024 or schedule.rows > 1:
            break
        threads *= 2
    if capability >= _CLUSTERS_SINCE and (sums or _clusters_pay(kernel)):
        several = vectors and met(kernel) > 1
        for spread in _clusters(kernel, vector, peeled, several):
            if _cluster_fits(kernel, variant, spread) or (several and _room(kernel, variant, spread)):
                return spread
    at_once = None if peeled or capability < ladders.POLICIES_SINCE else _at_once(kernel, variant, vector)
    if at_once is not None:
        return at_once
    for looped in _looped(kernel, variant, vector, peeled):
        if _fits(kernel, variant, looped):
            return looped
        schedule = looped
    return schedule  # nothing fits: the last is the smallest


def _sum_row(kernel: ir.Kernel, variant: Variant, axis: str, vector: int) -> Schedule | None:
    """A program for rows of sums along a single tile axis that leaves few of its threads idle at the end of a row, if
    one holds it: with the threads that the ladder says, or half of them. (512 hold more than 1024, which have 64
    registers each.) A row that is reduced several times has nothing in flight again and again: there a second program
    on the multiprocessor is worth more than threads, and even a single one of 256 more than a cluster."""
    n = kernel.axis(axis).extent.constant
    most = min(ladders.SUM_ROW_THREADS[whole_row_bytes(kernel)], ceil_power(-(-n // vector)))
    rows = [
        _packed(kernel, variant, Schedule(threads, 1, width, name="row"))
        for threads, width in product((most, most // 2, most // 4, most // 8), (vector, max(1, vector // 2)))
        if threads and n >= ladders.SUM_BUSY * -(-n // (threads * width)) * threads * width
    ]
    fitting = (s for s in rows if _fits(kernel, variant, s))
    if met(kernel) < 2:
        return next((s for s in fitting if 2 * s.team >= most), None)
    room = {s: _room(kernel, variant, s) for s in rows}
    two = (s for s in rows if room[s] > 1)
    small = (s for s in rows if room[s] and s.threads <= 256)
    return next((s for way in (two, fitting, small) for s in way), None)


def _room(kernel: ir.Kernel, variant: Variant, schedule: Schedule) -> int:
    """For how many programs of sums a multiprocessor has the registers; 0 where a thread would spill. To choose threads
    by, with all that a thread was seen to take; `sum_blocks` says how many there are of threads that are chosen, and
    the compiler is told so."""
    kernel = paired(kernel, schedule)
    steps, lay = steps_of(kernel, schedule), layout(kernel, variant, schedule)
    tiles = tile_registers(kernel, variant, steps, lay) + waiting_registers(kernel, variant, steps, lay)
    registers = int(ladders.SUM_MORE_REGISTERS * tiles) + ladders.OTHER_REGISTERS
    return programs_by_registers(schedule.threads, registers) if registers <= MOST_REGISTERS else 0


def _ahead(kernel: ir.Kernel, schedule: Schedule, num_sms: int) -> Schedule:
    """With the distance over which rows are asked for ahead of their use."""
    if has_sums(kernel):
        return replace(schedule, ahead=ladders.SUM_AHEAD)
    far = num_sms * ladders.ROW_AHEAD[loaded_row_bytes(kernel)]
    return replace(schedule, ahead=-(-far // schedule.cluster) if schedule.rows == 1 else 0)


def _clusters(kernel: ir.Kernel, vector: int, peeled: bool, several: bool) -> Iterator[Schedule]:
    """Clusters that may hold a row, in order of preference: of few CTAs first where they meet `several` times."""
    if not has_sums(kernel):
        ways = [(1024 if met(kernel) == 1 else ladders.CLUSTER_THREADS, cluster) for cluster in (2, 4, 8)]
    elif several:
        ways = [(threads, cluster) for cluster in (2, 4, 8) for threads in (512, 256, 1024)]
    else:
        ways = [(threads, cluster) for threads in ladders.SUM_CLUSTER_THREADS for cluster in (2, 4, 8)]
    for threads, cluster in ways:
        yield Schedule(threads, 1, vector, name="row", cluster=cluster, peeled=peeled)


def _clusters_pay(kernel: ir.Kernel) -> bool:
    """Whether a row without sums over programs that does not fit a CTA is better held by a cluster than taken in
    chunks."""
    if whole_row_bytes(kernel) <= ladders.CLUSTER_BYTES or in_place(kernel):
        return False
    if met(kernel) == 1:
        return True
    return stores_rows(kernel) > 0 and not (stores_exponentials(kernel) and narrow_rows(kernel))


def _cluster_fits(kernel: ir.Kernel, variant: Variant, schedule: Schedule) -> bool:
    """Whether the CTAs of a cluster hold a row, and a multiprocessor two of them where they meet several times."""
    if has_sums(kernel) or met(kernel) == 1:
        return _fits(kernel, variant, schedule)
    words = -(-loaded_row_bytes(kernel) // (4 * schedule.team))
    return (
        words <= ladders.CLUSTER_ROW_WORDS and trial_registers(kernel, variant, schedule) <= ladders.CLUSTER_REGISTERS
    )


def _packed(kernel: ir.Kernel, variant: Variant, schedule: Schedule) -> Schedule:
    """No more threads a row than it can use, and several short rows."""
    extents = held(kernel, schedule)
    lay = layout(kernel, variant, schedule)
    used = prod(
        max(ceil_power(-(-extents[a.name] // a.vector)) for a in lay.axes if a.digit == d)
        for d in range(len(lay.digits) - 1)
    )
    # The elements around the whole vectors of a peeled row have a thread each.
    used = max([used, *(ceil_power(a.peel.edge) for a in lay.axes if a.peel is not None)])
    a_row = min(schedule.threads, used)
    if has_sums(kernel):
        rows = max(1, ladders.SUM_SHORT_ROW_THREADS // a_row)
    else:
        fewest = floor_power(ladders.SHORT_ROW_BYTES // max(1, min(loaded_row_bytes(kernel), ladders.SHORT_ROW_BYTES)))
        rows = max(1, ladders.SHORT_ROW_THREADS // a_row, min(fewest, ladders.SHORT_ROW_MOST // a_row))
    return replace(schedule, threads=a_row * rows, rows=rows)


def _looped(kernel: ir.Kernel, variant: Variant, vector: int, peeled: bool) -> Iterator[Schedule]:
    """Schedules with chunks, from larger to smaller ones: first along the longest axis alone, then others too."""
    whole = held(kernel, Schedule(32, 1))
    threads = _loop_threads(kernel, variant, vector, peeled)
    most = ladders.LOOP_SLOTS_IN_PLACE if in_place(kernel) and met(kernel) else ladders.LOOP_SLOTS[threads]
    if has_sums(kernel):
        threads, most = min(threads, ladders.LOOP_SUM_THREADS), ladders.LOOP_SUM_SLOTS
    room = ladders.LOOP_REGISTERS_IN_PLACE[threads]
    chunks: dict[str, int] = {}
    for axis in sorted(whole, key=lambda a: -whole[a]):
        grain = vector if peeled else vector_limit(kernel, variant, axis)
        others = beside(kernel, axis, {**whole, **chunks})
        fitting: int | None = None
        for slots in (most >> i for i in range(most.bit_length())):
            chunk = max(grain, floor_power(max(1, threads * vector * slots // others)))
            trial = {**chunks, axis: chunk}
            if chunk >= whole[axis] or not legal(kernel, trial):
                continue
            fitting = chunk
            looped = Schedule(threads, 1, vector, ordered(kernel, trial), "looped", peeled=peeled)
            if (
                slots <= ladders.LOOP_SLOTS[threads]
                or trial_registers(kernel, variant, looped) + pass_registers(paired(kernel, looped)) <= room
            ):
                yield looped
        if fitting is not None:
            chunks[axis] = fitting


def _loop_threads(kernel: ir.Kernel, variant: Variant, vector: int, peeled: bool) -> int:
    """Threads of a program that takes its row in chunks."""
    size = whole_row_bytes(kernel)
    if in_place(kernel):
        return ladders.LOOP_THREADS_IN_PLACE[size]
    threads = ladders.LOOP_THREADS[size]
    if threads == 1024 or size <= ladders.LOOP_SMALL:
        return threads
    # Two programs are worth it where the compiler has no reason to take more than the 64 registers that leave room for
    # both: it spills some of a third value that passes reduce, and of functions, to stay within them.
    axis = kernel.tiles[0]
    chunk = min(threads * vector * ladders.LOOP_SLOTS[threads], floor_power(max(1, axis.extent.constant - 1)))
    trial = Schedule(threads, 1, vector, ((axis.name, chunk),), "looped", peeled=peeled)
    if len(kernel.tiles) > 1 or met(kernel) > 2 or pass_registers(paired(kernel, trial)):
        return 1024
    if not legal(kernel, {axis.name: chunk}) or trial_registers(kernel, variant, trial) > ladders.LOOP_TWO_REGISTERS:
        return 1024
    return threads


def _at_once(kernel: ir.Kernel, variant: Variant, vector: int) -> Schedule | None:
    """A schedule by which every pass has all of a row at once, and loads it anew: where what is made of the row is
    stored beside it, and a multiprocessor has room for two programs. The loads of the first pass see to it that L1 has
    the row for the others (`kgen.codegen.cuda.caching`)."""
    threads, axis = ladders.AT_ONCE_THREADS, kernel.tiles[0]
    extent = axis.extent.constant
    few = whole_row_bytes(kernel) <= ladders.ROW_WHOLE_BEFORE_PASSES
    if len(kernel.tiles) > 1 or few or extent % (threads * vector) == 0:
        return None
    if has_sums(kernel) or in_place(kernel) or not stores_rows(kernel) or not exponentials(kernel):
        return None
    at_once = Schedule(threads, 1, vector, ((axis.name, extent),), "looped")
    return at_once if trial_registers(kernel, variant, at_once) <= ladders.AT_ONCE_REGISTERS else None


# ---- registers -----------------------------------------------------------------------------------------------------


def _fits(kernel: ir.Kernel, variant: Variant, schedule: Schedule) -> bool:
    held = ladders.ROW_REGISTERS
    if has_sums(kernel) and schedule.cluster > 1:
        held = ladders.SUM_CLUSTER_REGISTERS
    elif schedule.chunks and in_place(kernel):
        held = ladders.LOOP_REGISTERS_IN_PLACE
    return trial_registers(kernel, variant, schedule) <= held[schedule.threads]


def refuse_oversize(
    kernel: ir.Kernel, variant: Variant, backend: str, schedule: Schedule, steps: tuple[Step, ...]
) -> None:
    """Raise `ScheduleError` where a program would hold far more than the backend can compile."""
    if not kernel.tiles:
        return
    if backend == "triton":
        size = largest_block(kernel, padded(kernel, schedule)) * schedule.rows
        most, what = ladders.TRITON_LARGEST, "elements a program"
    else:
        size = tile_registers(kernel, variant, steps, layout(kernel, variant, schedule))
        most, what = ladders.REGISTERS_LARGEST, "registers a thread"
    if size > most:
        raise ScheduleError(
            f"{kernel.name}: its tiles need {size} {what} on {backend}, more than {most}; "
            f"spread one of {', '.join(a.name for a in kernel.tiles)} over programs, or reduce fewer together"
        )
