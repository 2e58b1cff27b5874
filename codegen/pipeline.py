"""The way from a checked kernel to what an emitter prints, as the list of passes."""

from __future__ import annotations

from dataclasses import replace

from kgen.codegen.choose import choose, refuse_oversize, sum_blocks
from kgen.codegen.idle import idle
from kgen.codegen.layout import digits
from kgen.codegen.narrow import narrow
from kgen.codegen.normalize import normalize, required_dims
from kgen.codegen.online import paired, steps_of
from kgen.codegen.overwrite import barriers
from kgen.codegen.schedule import Schedule, Scheduled, ScheduleError
from kgen.codegen.sums import Stage, spill_looped, stages
from kgen.codegen.variant import Variant
from kgen.dsl import ir


def schedule_kernel(
    kernel: ir.Kernel,
    variant: Variant,
    backend: str,
    *,
    num_sms: int = 132,
    rows_hint: int | None = None,
    override: Schedule | None = None,
) -> Scheduled:
    """`kernel` in normal form for `variant`, with the default schedule of `backend` (`cuda` or `triton`) or `override`.

    Raises `ScheduleError` where `override` does not fit the kernel.
    """
    missing = [d for d in required_dims(kernel) if variant.dim(d) is None]
    if missing:
        raise ScheduleError(
            f"{kernel.name}: the value of {', '.join(missing)} must be known to compile it, as it sizes a tile"
        )
    first, *then = stages(normalize(kernel, variant), variant)
    if override is not None:
        _check(first.kernel, override)
    scheduled = _scheduled(first, backend, num_sms, rows_hint, override)
    # A schedule from outside is for the kernel's own loop: for every stage that makes partial sums, not for those that
    # add them up.
    rest = (
        _scheduled(s, backend, num_sms, rows_hint, override if s.sums is not None and s.sums.split else None)
        for s in then
    )
    return replace(scheduled, then=tuple(rest))


def _scheduled(stage: Stage, backend: str, num_sms: int, rows_hint: int | None, override: Schedule | None) -> Scheduled:
    kernel, variant, sums = narrow(stage.kernel), stage.variant, stage.sums
    leaves = idle(kernel)
    if leaves is not None:
        kernel = leaves.kernel
    schedule = override or choose(
        kernel, variant, backend, num_sms=num_sms, rows_hint=rows_hint, sums=sums, leaves=leaves is not None
    )
    # In Triton what a thread has of several rows would be a block of rows and threads.
    if backend == "cuda" or schedule.rows == 1:
        kernel = paired(kernel, schedule)
    steps = steps_of(kernel, schedule)
    if sums is not None:
        blocks = sum_blocks(kernel, variant, backend, schedule, steps)
        if not schedule.programs:
            schedule = replace(schedule, programs=num_sms * blocks)
        kernel, sums = spill_looped(kernel, replace(sums, blocks=blocks), schedule)
        steps = steps_of(kernel, schedule)
    refuse_oversize(kernel, variant, backend, schedule, steps)
    if leaves is not None:
        steps = leaves.steps(steps)
    return Scheduled(kernel, variant, schedule, steps, barriers(kernel, digits(kernel, variant)), sums)


def _check(kernel: ir.Kernel, schedule: Schedule) -> None:
    """Refuse sizes that no emitter could print."""

    def refuse(problem: str) -> None:
        raise ScheduleError(f"a schedule of {kernel.name} is not valid: {problem}")

    for what, value, most in (
        ("threads", schedule.threads, 1024),
        ("rows", schedule.rows, 1 << 20),
        ("vector", schedule.vector, 16),
    ):
        if value < 1 or value & (value - 1) or value > most:
            refuse(f"{what} is {value}, expected a power of two up to {most}")
    if schedule.threads < 32:
        refuse(f"threads is {schedule.threads}, expected at least 32")
    tiles = {a.name for a in kernel.tiles}
    if tiles and schedule.rows > schedule.threads:
        refuse(f"{schedule.rows} rows do not share out among {schedule.threads} threads")
    for axis, chunk in schedule.chunks:
        if axis not in tiles:
            refuse(
                f"it takes {axis} in chunks, which is not a tile index (those are {', '.join(sorted(tiles)) or 'none'})"
            )
        if chunk < 1:
            refuse(f"the chunk of {axis} is {chunk}, expected at least 1")
