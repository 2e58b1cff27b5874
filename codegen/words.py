"""How many 32-bit words of its rows does a Triton program hold, and do its warps have registers for them?

Triton's compiler lays values out and spills what does not fit; these estimates say beforehand what would. They count
what an element of a row takes of all its tiles, whatever is alive when, against the words that a block of a certain
size was seen to have room for (`ladders.TRITON_TILES`, `ladders.TRITON_SUM_TILES`).
"""

from __future__ import annotations

from kgen.codegen import ladders
from kgen.codegen.machines import thread_registers
from kgen.codegen.schedule import Schedule
from kgen.codegen.values import WORD, largest_block, one_by_one, packed_words, padded, quotients, value_words
from kgen.codegen.variant import Variant
from kgen.dsl import ir


def row_words(kernel: ir.Kernel) -> int:
    """32-bit words of the values that a program has one of for each row."""
    tiles = {a.name for a in kernel.tiles}
    return sum(
        value_words(s.value) for s in kernel.body if isinstance(s, ir.Let) and s.value.axes and not s.value.axes & tiles
    )


def tile_words(kernel: ir.Kernel, value: ir.Expr) -> float:
    """Words of an element of a tile, as `ladders.TRITON_TILES` counts them: a load as memory has it, half as much again
    where it is masked in full words; of bools, which the compiler packs, four to a word."""
    if not isinstance(value, ir.Load):
        return value.dtype.itemsize / WORD
    words = packed_words(kernel, value)
    return words * (1.5 if words >= 1 else 1)


def warps_hold(kernel: ir.Kernel, block: int, address: float = 0.0) -> bool:
    """Whether the tiles of a kernel whose largest block has `block` elements fit the registers of its warps; each
    element that is loaded has `address` registers beside it."""
    return _all_tiles(kernel, address) * block <= ladders.TRITON_TILES * ladders.TRITON_LARGE


def small_threads_hold(kernel: ir.Kernel, block: int) -> bool:
    """Whether they fit 32 warps, whose threads have 64 registers: of one load of the row, as the addresses of another
    take registers too, and with those of quotients."""
    tiles, rows = {a.name for a in kernel.tiles}, {a.name for a in kernel.parallel}
    loads = [e for s in kernel.body if isinstance(e := s.value, ir.Load) and e.axes & tiles and e.axes & rows]
    words = _all_tiles(kernel) + ladders.TRITON_QUOTIENT * sum(1 for _ in quotients(kernel.body, tiles))
    return len(loads) <= 1 and words * block <= ladders.TRITON_TILES * ladders.TRITON_LARGE


def _all_tiles(kernel: ir.Kernel, address: float = 0.0) -> float:
    """Words of all values of an element together."""
    tiles = {a.name for a in kernel.tiles}
    total = 0.0
    for s in kernel.body:
        if isinstance(s, ir.Let) and s.value.axes & tiles and not isinstance(s.value, ir.Reduce):
            total += tile_words(kernel, s.value) + (address if isinstance(s.value, ir.Load) else 0.0)
    return total


def warps_hold_sums(kernel: ir.Kernel, variant: Variant, block: int) -> bool:
    """Whether a program of `ladders.TRITON_SUM_WARPS` warps that has its multiprocessor to itself holds rows of `block`
    elements and the sums beside them, all else made again (`kgen.codegen.again`)."""
    vectors = not one_by_one(kernel, variant)
    return vectors and sum_words(kernel) * block <= ladders.TRITON_SUM_TILES * ladders.TRITON_SUM_LARGE


def sum_words(kernel: ir.Kernel) -> float:
    """Words that an element takes from a row's first statement to its last: those of the loads of the row, as memory
    has them, and of the sums."""
    tiles, parallel = {a.name for a in kernel.tiles}, {a.name for a in kernel.parallel}
    total = 0.0
    for s in kernel.body:
        if isinstance(s, ir.Accumulate) and ir.target_symbols(s) & tiles:
            total += value_words(s.value)
        elif isinstance(s.value, ir.Load) and s.value.axes & tiles and s.value.axes & parallel:
            total += packed_words(kernel, s.value)
    return total


def tight(kernel: ir.Kernel, schedule: Schedule) -> bool:
    """Whether rows that a program of a sum holds whole, and the sums, take half of its registers or more."""
    if not kernel.tiles or schedule.chunks:
        return False
    block = largest_block(kernel, padded(kernel, schedule)) * schedule.rows
    return 2 * sum_words(kernel) * block / schedule.threads >= thread_registers(schedule.threads)
