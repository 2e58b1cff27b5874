"""How many programs of a sum over programs does a multiprocessor hold in Triton, and how much have they in flight?

All programs of such a sum are started at once, each with a share of the rows. More than a multiprocessor holds would
wait for the others and then run beside empty places, with partial sums of their own to store and to add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kgen.codegen import ladders
from kgen.codegen.again import loaded_again
from kgen.codegen.layout import elements, held, tile_bytes
from kgen.codegen.machines import (
    ARCHITECTURES,
    MOST_REGISTERS,
    REGISTER_FILE,
    REGISTER_UNIT,
    architecture,
    programs_by_registers,
)
from kgen.codegen.normalize import statement_axes
from kgen.codegen.phases import refs
from kgen.codegen.schedule import Schedule
from kgen.codegen.values import largest_block, most_alive, one_by_one, packed_words, padded, quotients, value_words
from kgen.codegen.variant import Variant
from kgen.codegen.words import tight
from kgen.dsl import ir


def resident(kernel: ir.Kernel, variant: Variant, schedule: Schedule, capability: int) -> int:
    """About how many programs with `schedule`, which hold rows of `kernel` whole, a multiprocessor of `capability` (90
    for sm_90) holds at a time: as many as make `ladders.SUM_THREADS` threads, and whose registers and staged rows fit;
    1 at least."""
    most = ladders.SUM_THREADS // schedule.threads
    registers = programs_by_registers(schedule.threads, estimated_registers(kernel, variant, schedule))
    machine = architecture(capability)
    shared = machine.shared // (staged_bytes(kernel, schedule) + machine.reserved + ladders.TRITON_SCRATCH)
    return max(1, min(most, registers, shared))


def sum_stages(kernel: ir.Kernel, variant: Variant, schedule: Schedule, capability: int) -> int:
    """Of how many rows the loop of a program is to have the loads in flight: the fewest that bring a multiprocessor to
    `ladders.TRITON_SUM_FLIGHT` bytes, else those that come nearest."""
    best, most = 1, 0
    for stages in range(1, _most_stages(kernel, variant, schedule, capability) + 1):
        trial = replace(schedule, stages=stages)
        flight = bytes_in_flight(kernel, trial, resident(kernel, variant, trial, capability))
        if flight > most:
            best, most = stages, flight
        if flight >= ladders.TRITON_SUM_FLIGHT:
            break
    return best


def stages_held(kernel: ir.Kernel, variant: Variant, schedule: Schedule, capability: int) -> int:
    """The stages of `schedule`, but no more than shared memory has room for."""
    return min(schedule.stages, _most_stages(kernel, variant, schedule, capability))


def least_shared(capabilities: Iterable[int]) -> int:
    """Of several compute capabilities, or of all that Triton stages loads on where there are none, that with the least
    shared memory a program: what fits there fits all."""
    known = (int(name.removeprefix("sm_")) for name in ARCHITECTURES)
    some = list(capabilities) or [c for c in known if c >= ladders.TRITON_STAGES_SINCE]
    return min(some, key=lambda c: (architecture(c).program_shared, c))


def registers_told(schedule: Schedule, blocks: int) -> int:
    """What Triton's compiler is told of registers (`Schedule.registers`) for a default schedule of a sum over programs,
    of which a multiprocessor is to hold `blocks`: where rows are staged, as many as let those fit. It would rather
    spill 8 bytes of RMSNorm in f32, of 2304 columns, than use more than 64, where 128 fit."""
    if schedule.stages == 1 or schedule.chunks:
        return 0
    fit = REGISTER_FILE // (schedule.threads * blocks)
    return min(MOST_REGISTERS, fit - fit % REGISTER_UNIT)


def bytes_in_flight(kernel: ir.Kernel, schedule: Schedule, programs: int) -> int:
    """Bytes of rows that `programs` have asked for while one of them works on a row: without stages that of the others,
    which is nothing where it is alone, else a stage less than there are of each."""
    parallel = {a.name for a in kernel.parallel}
    extents = held(kernel, schedule)
    row = sum(size for e, size in _loads(kernel, kernel.body, extents) if e.axes & parallel)
    if schedule.stages == 1 and programs == 1:
        return 0
    return programs * schedule.rows * row * max(1, schedule.stages - 1)


def staged_bytes(kernel: ir.Kernel, schedule: Schedule) -> int:
    """Bytes of shared memory, at most, for the stages of a program's loop: of all that it loads for a row, weights too,
    a stage less than there are, in blocks padded to powers of two; what is loaded again (`kgen.codegen.again`), once
    more."""
    parallel = {a.name for a in kernel.parallel}
    extents = padded(kernel, schedule)
    body = loaded_again(kernel, kernel.body) if tight(kernel, schedule) else kernel.body
    block = sum(size * (schedule.rows if e.axes & parallel else 1) for e, size in _loads(kernel, body, extents))
    return (schedule.stages - 1) * block


def estimated_registers(kernel: ir.Kernel, variant: Variant, schedule: Schedule) -> int:
    """About how many 32-bit registers a thread has, as they are allotted.

    Loads of a row come first and lie packed, as in memory, until they are used; then, and as any other value that is
    used more than once, they take a register an element until their last use, which makes room for what is made of
    them. Sums are held throughout; of several rows at a time they are blocks with rows, and so is what is added.
    Elements that are moved one by one have their addresses and masks beside them, and exact quotients registers of
    their own.
    """
    extents = padded(kernel, schedule)
    tiles, parallel = extents.keys(), {a.name for a in kernel.parallel}
    uses: dict[str, list[int]] = {}
    for at, s in enumerate(kernel.body):
        for name in refs(s.value):
            uses.setdefault(name, []).append(at)

    def size(axes: frozenset[str]) -> int:
        return elements(axes, extents) * (schedule.rows if axes & parallel else 1)

    sums = sum(
        size(statement_axes(s) | parallel) * value_words(s.value)
        for s in kernel.body
        if isinstance(s, ir.Accumulate) and statement_axes(s) & tiles
    ) * (2 if schedule.rows > 1 else 1)
    spans: list[tuple[int, int, float]] = []
    for at, s in enumerate(kernel.body):
        if not isinstance(s, ir.Let) or not s.value.axes & tiles or s.name not in uses:
            continue
        first, last = uses[s.name][0], uses[s.name][-1]
        count = size(s.value.axes)
        if isinstance(s.value, ir.Load):
            spans.append((0, first, count * packed_words(kernel, s.value)))
        elif isinstance(s.value, ir.Reduce) or len(uses[s.name]) > 1:
            first = at
        else:
            continue  # computed where it is used
        spans.append((first, last, count * value_words(s.value)))
    divided = ladders.TRITON_SUM_QUOTIENT * sum(size(e.axes) for e in quotients(kernel.body, tiles))
    addresses = ladders.TRITON_ADDRESS * schedule.rows * largest_block(kernel, extents) * one_by_one(kernel, variant)
    tile = -(-int(sums + most_alive(spans) + divided + addresses) // schedule.threads)
    found = ladders.TRITON_OTHER_REGISTERS + (ladders.TRITON_STAGE_REGISTERS if schedule.stages > 1 else 0) + tile
    return min(MOST_REGISTERS + 1, found + -found % REGISTER_UNIT)


def _most_stages(kernel: ir.Kernel, variant: Variant, schedule: Schedule, capability: int) -> int:
    """Up to how many stages a program's shared memory holds. Elements are not staged one by one: those of 2 bytes
    cannot be, and of those of 4 the addresses would take more registers."""
    if one_by_one(kernel, variant):
        return 1
    a_stage = staged_bytes(kernel, replace(schedule, stages=2))
    room = architecture(capability).program_shared - ladders.TRITON_SCRATCH
    return max(1, min(ladders.TRITON_SUM_MOST_STAGES, 1 + room // max(1, a_stage)))


def _loads(kernel: ir.Kernel, body: tuple[ir.Stmt, ...], extents: dict[str, int]) -> Iterator[tuple[ir.Load, int]]:
    """The loads along tile indices in `body`, and the bytes of one row of each."""
    for s in body:
        e = s.value
        if isinstance(e, ir.Load) and e.axes & extents.keys():
            yield e, tile_bytes(kernel.tensor(e.tensor), e.axes, extents)
