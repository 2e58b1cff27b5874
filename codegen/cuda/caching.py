"""Which loads of a pass over chunks does the text mark as those that L1 and L2 are to give up last?

A row in chunks is read from memory in the first pass and from the caches in those behind it, as far as it is still
there. What a program's own row is loaded from in a pass is marked where a later pass reads it again; the last pass does
not hold on to what nobody reads any more. `kgen.codegen.ladders` has what it gains, and that it pays only where L1 has
room for the rows of all programs on the multiprocessor.
"""

from __future__ import annotations

from kgen.codegen import ladders
from kgen.codegen.layout import Layout, tile_bytes
from kgen.codegen.machines import architecture, programs_by_registers
from kgen.codegen.registers import tile_registers
from kgen.codegen.rows import own_loads
from kgen.codegen.schedule import Choice, Loop, Scheduled, Step
from kgen.dsl import ir


def read_again(scheduled: Scheduled, steps: tuple[Step, ...], layout: Layout) -> tuple[frozenset[str], ...]:
    """The marked loads of each of `steps`, which are those of `scheduled`, by name; none where devices have no policy
    of L2."""
    none = (frozenset[str](),) * len(steps)
    if scheduled.capability < ladders.POLICIES_SINCE:
        return none
    own = [_own_rows(scheduled.kernel, step) for step in steps]
    marked = [
        {name: load for name, load in loads.items() if any(_reads(later, load) for later in own[i + 1 :])}
        for i, loads in enumerate(own)
    ]
    rows = {(load.tensor, load.at): load for loads in marked for load in loads.values()}
    if not _fit(scheduled, steps, layout, tuple(rows.values())):
        return none
    return tuple(frozenset(loads) for loads in marked)


def _own_rows(kernel: ir.Kernel, step: Step) -> dict[str, ir.Load]:
    """The loads of a pass, or a choice of passes, of its own rows. There are none where programs loop over rows, as
    which of them a program takes is an index too."""
    if isinstance(step, Choice):
        return {n: e for inner in (*step.yes, *step.no) for n, e in _own_rows(kernel, inner).items()}
    return own_loads(kernel, step.body, {step.axis}) if isinstance(step, Loop) else {}


def _reads(loads: dict[str, ir.Load], load: ir.Load) -> bool:
    return any((e.tensor, e.at) == (load.tensor, load.at) for e in loads.values())


def _fit(scheduled: Scheduled, steps: tuple[Step, ...], layout: Layout, rows: tuple[ir.Load, ...]) -> bool:
    """Whether L1 has room for these rows of all programs that a multiprocessor may hold at a time, and a thread for
    what it takes to mark their loads."""
    kernel, schedule = scheduled.kernel, scheduled.schedule
    arch = architecture(scheduled.capability)
    held = tile_registers(kernel, scheduled.variant, steps, layout)
    # As __launch_bounds__ says. Those of less than 256 threads, which spill from 255 on, have their loads marked too.
    most = arch.registers // schedule.threads
    if held + ladders.OTHER_REGISTERS + ladders.STAYING_REGISTERS > most:
        return False
    registers = min(held + ladders.FEWEST_REGISTERS, most)
    programs = max(1, min(arch.threads // schedule.threads, programs_by_registers(schedule.threads, registers)))
    tiles = {a.name: a.extent.constant for a in kernel.tiles}
    row = schedule.rows * sum(tile_bytes(kernel.tensor(e.tensor), e.axes, tiles) for e in rows)
    return programs * row <= arch.l1 - ladders.L1_SHARED
