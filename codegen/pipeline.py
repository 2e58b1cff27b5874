"""The way from a checked kernel to what an emitter prints, as the list of passes."""

from __future__ import annotations

from kgen.codegen.choose import choose, refuse_oversize
from kgen.codegen.layout import digits
from kgen.codegen.normalize import normalize, required_dims
from kgen.codegen.overwrite import barriers
from kgen.codegen.phases import phases
from kgen.codegen.schedule import Schedule, Scheduled, ScheduleError
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
    normal = normalize(kernel, variant)
    if override is not None:
        _check(normal, override)
    schedule = override or choose(normal, variant, backend, num_sms=num_sms, rows_hint=rows_hint)
    steps = phases(normal, schedule)
    refuse_oversize(normal, variant, backend, schedule, steps)
    return Scheduled(normal, variant, schedule, steps, barriers(normal, digits(normal, variant)))


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
