"""Default schedules of Triton's programs: how many warps, how many rows, and what of a row at a time?

As `kgen.codegen.choose` for CUDA: sizes are read off the kernel in normal form, and looked up in
`kgen.codegen.ladders`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from kgen.codegen import ladders
from kgen.codegen.hold import holding
from kgen.codegen.layout import ceil_power, floor_power, held, tile_bytes, vector_axis, vector_limit
from kgen.codegen.resident import sum_stages
from kgen.codegen.rows import beside, in_place, legal, met, narrow_rows, ordered, own_row_bytes, read_once, stores_rows
from kgen.codegen.schedule import Schedule
from kgen.codegen.sums import has_sums
from kgen.codegen.values import largest_block, padded, quotients
from kgen.codegen.variant import Variant
from kgen.codegen.words import row_words, small_threads_hold, warps_hold, warps_hold_sums
from kgen.dsl import ir


def triton_flat(leaves: bool) -> Schedule:
    """The schedule of a kernel without tile indices; `leaves`: its programs may have nothing to do."""
    threads = 32 * ladders.TRITON_FLAT_WARPS
    if leaves:
        # As many elements a thread as on CUDA, of 2 bytes.
        return Schedule(threads, threads * 8 * ladders.LEAVING_SLOTS, name="flat")
    return Schedule(threads, ladders.TRITON_FLAT_ROWS, name="flat")


def triton_row(kernel: ir.Kernel, variant: Variant, capability: int, hold: int | None) -> Schedule:
    """The schedule of a kernel with tile indices; `hold` is what a knob says of rows that are held in chunks."""
    if has_sums(kernel):
        return _with_sums(kernel, variant, capability)
    if hold != 0 and len(kernel.tiles) == 1 and not in_place(kernel):
        found = holding(kernel, variant)
        if found is not None:
            return found
    once = read_once(kernel)
    chunks, block = _chunks(
        kernel,
        lambda block, chunked: _fits(kernel, block, once, chunked),
        lambda axis: _most(kernel, variant, axis, once),
    )
    if chunks:
        warps = ladders.TRITON_ONCE_WARPS if once else _loop_warps(kernel, variant, chunks, block)
        return _looped(kernel, warps, chunks)
    rows = _rows(kernel, variant, block, ladders.TRITON_SHORT_ROWS)
    return Schedule(32 * _whole_warps(kernel, block, rows), rows, name="row")


def _chunks(
    kernel: ir.Kernel, fits: Callable[[int, bool], bool], most: Callable[[str], int]
) -> tuple[dict[str, int], int]:
    """Along which indices a row is taken in chunks, and of how many elements, none where a program holds it; and the
    elements of the largest block then. `fits` says whether a program holds a block of so many, of a row that is taken
    in chunks or not; `most` how many a chunk along an index may have."""
    whole = padded(kernel, Schedule(32, 1))
    chunks: dict[str, int] = {}
    for axis in sorted(whole, key=lambda a: -whole[a]):
        if fits(largest_block(kernel, {**whole, **chunks}), bool(chunks)):
            break
        chunk = max(1, most(axis) // ceil_power(beside(kernel, axis, {**whole, **chunks})))
        if chunk < whole[axis] and legal(kernel, {**chunks, axis: chunk}):
            chunks[axis] = chunk
    return chunks, largest_block(kernel, {**whole, **chunks})


def _looped(kernel: ir.Kernel, warps: int, chunks: dict[str, int]) -> Schedule:
    schedule = Schedule(32 * warps, 1, chunks=ordered(kernel, chunks), name="looped")
    return replace(schedule, stages=_chunk_stages(kernel, schedule))


def _rows(kernel: ir.Kernel, variant: Variant, block: int, short: int) -> int:
    """How many rows of `block` elements a program takes: `short` elements of them, but no more than it has registers
    for the values of a row, which each thread of a warp has that has elements of the row."""
    rows = floor_power(max(1, short // block))
    axis = vector_axis(kernel, variant)
    sharing = min(32, max(1, block // (1 if axis is None else vector_limit(kernel, variant, axis))))
    while rows > 1 and rows * row_words(kernel) * sharing > ladders.TRITON_ROW_WORDS:
        rows //= 2
    return rows


def _enough(kernel: ir.Kernel, elements: int, warps: int) -> int:
    """`warps`, or, of rows that nothing is stored of, so many that a thread has no more words of `elements` than
    `warps_hold` allows those of a large block."""
    while stores_rows(kernel) == 0 and warps < ladders.TRITON_LARGE_WARPS:
        if warps_hold(kernel, elements * ladders.TRITON_LARGE_WARPS // warps):
            break
        warps *= 2
    return warps


# ---- rows that are held whole --------------------------------------------------------------------------------------


def _fits(kernel: ir.Kernel, block: int, once: bool, chunked: bool) -> bool:
    """Whether a program holds rows, or chunks of them, with a largest block of `block` elements; `once`: rows that are
    read once."""
    if not chunked and in_place(kernel) and own_row_bytes(kernel) > ladders.TRITON_WHOLE_IN_PLACE:
        return False
    limit = min(ladders.TRITON_WHOLE, ladders.TRITON_ONCE) if once else ladders.TRITON_WHOLE
    return block <= limit and warps_hold(kernel, block)


def _whole_warps(kernel: ir.Kernel, block: int, rows: int) -> int:
    """Warps of a program that holds `rows` rows with a largest block of `block` elements."""
    warps = ladders.TRITON_WARPS[block * rows]
    there = largest_block(kernel, held(kernel, Schedule(32, 1)))
    # Of shorter rows a program has several, as many as so many threads have registers for.
    if block >= ladders.TRITON_PADDED_BEYOND and there < ladders.TRITON_FILLED * block:
        places = block * rows // (32 * warps // 2)
        if places <= ladders.TRITON_PADDED_PLACES and warps_hold(kernel, 32 * ladders.TRITON_LARGE_WARPS * places):
            warps //= 2
    return _enough(kernel, block * rows, warps)


# ---- rows in chunks ------------------------------------------------------------------------------------------------


def _most(kernel: ir.Kernel, variant: Variant, axis: str, once: bool) -> int:
    """The most elements of a chunk along `axis`; `once` as for `_fits`."""
    if once:
        return ladders.TRITON_ONCE_CHUNK
    if in_place(kernel):
        most = ladders.TRITON_IN_PLACE_EACH * 32 * _in_place_warps(kernel)
        large = small_threads_hold(kernel, most)
    else:
        most = ladders.TRITON_CHUNK[own_row_bytes(kernel)]
        large = narrow_rows(kernel) and _light(kernel, most)
    if most > ladders.TRITON_LARGE // 2 and not large:
        most = ladders.TRITON_LARGE // 2
    address = 0.0
    if vector_limit(kernel, variant, axis) == 1:
        address = ladders.TRITON_ADDRESS
        if narrow_rows(kernel):
            warps = _in_place_warps(kernel) if in_place(kernel) else ladders.TRITON_ONE_BY_ONE_WARPS
            most = min(most, 32 * warps * ladders.TRITON_ONE_BY_ONE_EACH)
    while most > ladders.TRITON_SUM_CHUNK and not warps_hold(kernel, most, address):
        most //= 2
    return most


def _loop_warps(kernel: ir.Kernel, variant: Variant, chunks: Iterable[str], block: int) -> int:
    """Warps of a program that takes its row in chunks, the largest block of which has `block` elements, in several
    passes."""
    single = narrow_rows(kernel) and any(vector_limit(kernel, variant, axis) == 1 for axis in chunks)
    if in_place(kernel):
        warps, each = _in_place_warps(kernel), ladders.TRITON_IN_PLACE_EACH
        # Chunks that were made smaller, as values take more registers, have fewer, or half as many elements a thread.
        half = 2 * block >= 32 * warps * each and small_threads_hold(kernel, block)
        return warps if half else max(4, block // (32 * (ladders.TRITON_ONE_BY_ONE_EACH if single else each)))
    if single:
        return max(4, block // (32 * ladders.TRITON_ONE_BY_ONE_EACH))
    wide = own_row_bytes(kernel) > ladders.TRITON_WIDE and block >= ladders.TRITON_LARGE // 2
    return 32 if wide and _light(kernel, block) else ladders.TRITON_LOOP_WARPS[block]


def _in_place_warps(kernel: ir.Kernel) -> int:
    """Warps for a row that is overwritten: as its bytes say, where it is along one index."""
    return ladders.TRITON_WARPS_IN_PLACE[own_row_bytes(kernel) if len(kernel.tiles) == 1 else 0]


def _light(kernel: ir.Kernel, block: int) -> bool:
    """Whether the 64 registers a thread of 32 warps hold `block` elements and what passes do: what those of norms and
    softmaxes do, for which that was seen. With a third reduction, or an exact quotient of an element, some spill."""
    few = met(kernel) <= 2 and not any(True for _ in quotients(kernel.body, {a.name for a in kernel.tiles}))
    return few and len(kernel.tiles) == 1 and small_threads_hold(kernel, block)


def _chunk_stages(kernel: ir.Kernel, schedule: Schedule) -> int:
    """Stages of a loop over chunks: as many as the ladder says, but with room in shared memory for what is loaded
    ahead."""
    chunks = dict(schedule.chunks)
    loads = [s.value for s in kernel.body if isinstance(s.value, ir.Load) and s.value.axes & chunks.keys()]
    extents = padded(kernel, schedule)
    ahead = sum(tile_bytes(kernel.tensor(e.tensor), e.axes, extents) for e in loads)
    return max(1, min(ladders.TRITON_STAGES, 1 + ladders.TRITON_STAGED_BYTES // max(1, ahead)))


# ---- rows beside sums over programs --------------------------------------------------------------------------------


def _with_sums(kernel: ir.Kernel, variant: Variant, capability: int) -> Schedule:
    """Of a kernel that sums over programs: a block of sums, which are not packed, is held beside the row from the first
    row to the last."""
    beside_row = 3

    def fits(block: int, _: bool = False) -> bool:
        return block * beside_row <= ladders.TRITON_SUM_WHOLE and warps_hold(kernel, block)

    whole = largest_block(kernel, padded(kernel, Schedule(32, 1)))
    if not fits(whole) and warps_hold_sums(kernel, variant, whole):
        return Schedule(32 * ladders.TRITON_SUM_WARPS, 1, name="row")
    chunks, block = _chunks(kernel, fits, lambda _: ladders.TRITON_SUM_CHUNK)
    if chunks:
        return _looped(kernel, _enough(kernel, block, ladders.TRITON_SUM_ROW_WARPS[block]), chunks)
    rows = _rows(kernel, variant, block, ladders.TRITON_SUM_SHORT_ROWS)
    warps = _enough(kernel, block * rows, ladders.TRITON_SUM_ROW_WARPS[block * rows])
    schedule = Schedule(32 * warps, rows, name="row")
    return replace(schedule, stages=sum_stages(kernel, variant, schedule, capability)) if rows == 1 else schedule
