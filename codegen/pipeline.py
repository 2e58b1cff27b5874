"""The way from a checked kernel to what an emitter prints, as the list of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kgen.codegen import ladders
from kgen.codegen.abi import most_shares
from kgen.codegen.again import loaded_again
from kgen.codegen.alternate import alternated
from kgen.codegen.choose import choose, refuse_oversize, sum_blocks
from kgen.codegen.hold import held_loads
from kgen.codegen.idle import idle
from kgen.codegen.kept import kept
from kgen.codegen.knobs import Knobs, check, check_peeled, written
from kgen.codegen.labelled import labels_apart
from kgen.codegen.late import weights_late
from kgen.codegen.layout import digits
from kgen.codegen.narrow import narrow
from kgen.codegen.normalize import normalize, required_dims
from kgen.codegen.online import paired, steps_of
from kgen.codegen.overwrite import barriers
from kgen.codegen.resident import registers_told
from kgen.codegen.rows import legal
from kgen.codegen.schedule import Schedule, Scheduled, ScheduleError
from kgen.codegen.sums import Stage, ahead_of_rows, spill_looped, stages, stages_by_elements
from kgen.codegen.unswitch import unswitched
from kgen.codegen.variant import Variant
from kgen.codegen.words import tight
from kgen.dsl import ir
from kgen.dsl.garbage import collected_later

# Of a device that is not there: an H100 or an H200.
MULTIPROCESSORS = 132
CAPABILITY = 90
# Knobs that leave all to the ladders, but for programs that have rows.
OF_ROWS = Knobs(rows=1)


@collected_later()
def schedule_kernel(
    kernel: ir.Kernel,
    variant: Variant,
    backend: str,
    *,
    num_sms: int = MULTIPROCESSORS,
    rows_hint: int | None = None,
    knobs: Knobs | None = None,
    override: Schedule | None = None,
    capability: int = CAPABILITY,
) -> Scheduled:
    """`kernel` in normal form for `variant`, with the default schedule of `backend` (`cuda` or `triton`) turned by
    `knobs`, else by what the kernel's source sets, or with all of `override`. `num_sms`, `capability`: multiprocessors
    and compute capability of the device, 90 for sm_90.

    Raises `ScheduleError` where any of them does not fit the kernel.
    """
    prepared = prepare(kernel, variant)
    rule = written(kernel, variant, backend) if knobs is None and override is None else None
    try:
        return schedule_prepared(
            prepared,
            backend,
            num_sms=num_sms,
            rows_hint=rows_hint,
            knobs=knobs or rule,
            override=override,
            capability=capability,
        )
    except ScheduleError as error:
        if rule is None:
            raise
        raise ScheduleError(f"{error}; it is set by {rule.by}") from None


@dataclass(frozen=True)
class Prepared:
    """A kernel before it has a schedule: in normal form for `variant`, and as `stages`."""

    kernel: ir.Kernel
    variant: Variant
    stages: tuple[Stage, ...]

    @cached_property
    def by_elements(self) -> tuple[Stage, ...] | None:
        """The stages where no program holds a row, if there are such."""
        return stages_by_elements(self.kernel, self.variant)


def prepare(kernel: ir.Kernel, variant: Variant) -> Prepared:
    """`kernel` before a schedule for `variant`. Raises `ScheduleError` where the size of a tile is not known."""
    missing = [d for d in required_dims(kernel) if variant.dim(d) is None]
    if missing:
        raise ScheduleError(
            f"{kernel.name}: the value of {', '.join(missing)} must be known to compile it, as it sizes a tile"
        )
    normal = normalize(kernel, variant)
    return Prepared(normal, variant, stages(normal, variant))


def schedule_prepared(
    prepared: Prepared,
    backend: str,
    *,
    num_sms: int = MULTIPROCESSORS,
    rows_hint: int | None = None,
    knobs: Knobs | None = None,
    override: Schedule | None = None,
    capability: int = CAPABILITY,
) -> Scheduled:
    """As `schedule_kernel`, of what `prepare` gave, whatever the kernel's source sets."""
    if override is not None:
        check(prepared.stages[0].kernel, backend, override)

    def scheduled(stage: Stage, several: bool, own: Knobs | None, shares: int | None = None) -> Scheduled:
        # A schedule from outside is for the kernel's own loop: for every stage that makes partial sums, not for those
        # that add them up.
        ends = stage.sums is not None and stage.sums.split is None
        out = _scheduled(
            stage, backend, num_sms, rows_hint, None if ends else own, None if ends else override, capability, shares
        )
        return replace(out, staged=several)

    def launches(cut: tuple[Stage, ...], first: Scheduled | None, own: Sequence[Knobs | None]) -> Scheduled:
        made = [first] if first is not None else []
        for stage, chosen in zip(cut[len(made) :], own[len(made) :], strict=True):
            made.append(scheduled(stage, len(cut) > 1, chosen, _shares(stage, made)))
        return replace(made[0], then=tuple(made[1:]))

    cut = prepared.stages
    out = scheduled(cut[0], len(cut) > 1, knobs)
    if override is None and sums_in_memory(out) and (knobs is None or not _of_rows(knobs)):
        others = prepared.by_elements
        if others is not None:
            return launches(others, None, [None if knobs is None else _fitting(knobs, s) for s in others])
    return launches(cut, out, [knobs] * len(cut))


def _shares(stage: Stage, made: Sequence[Scheduled]) -> int | None:
    """Into how many shares `made` divide at most what `stage` adds up, where that is known."""
    if stage.sums is None or stage.sums.split is not None:
        return None
    for m in made:
        sums = m.sums
        if (
            sums is not None
            and sums.dim == stage.sums.dim
            and all(a.extent.is_constant for a in sums.kept_axes(m.kernel))
        ):
            return most_shares(m.kernel, m.schedule, sums, {})
    return None


def is_by_elements(prepared: Prepared, scheduled: Scheduled) -> bool:
    """Whether `scheduled`, of `prepared`, has launches for rows that no program holds."""
    first = prepared.stages[0]
    return (
        first.sums is not None and bool(first.kernel.tiles) and (scheduled.sums is None or not scheduled.kernel.tiles)
    )


def sums_in_memory(s: Scheduled) -> bool:
    """Whether sums of a chunk are read and written for every row: what the rows are made of is rather read twice."""
    return s.sums is not None and bool(s.sums.zeroed)


def _of_rows(knobs: Knobs) -> bool:
    """Whether `knobs` say how a program holds its rows."""
    return bool(knobs.chunks) or knobs.rows is not None or knobs.cluster is not None


def _fitting(knobs: Knobs, stage: Stage) -> Knobs:
    """Those of `knobs` that there are for a stage of a kernel whose rows no program holds."""
    if stage.sums is None:
        return replace(knobs, blocks=None)
    return replace(knobs, ahead=None, peel=None)


def _scheduled(
    stage: Stage,
    backend: str,
    num_sms: int,
    rows_hint: int | None,
    knobs: Knobs | None,
    override: Schedule | None,
    capability: int,
    shares: int | None,
) -> Scheduled:
    kernel, variant, sums = narrow(stage.kernel), stage.variant, stage.sums
    leaves = idle(kernel)
    if leaves is not None:
        kernel = leaves.kernel
    schedule = override or choose(
        kernel,
        variant,
        backend,
        num_sms=num_sms,
        rows_hint=rows_hint,
        sums=sums,
        leaves=leaves is not None,
        knobs=knobs,
        capability=capability,
        shares=shares,
    )
    several = tuple((a, n) for a, n in schedule.chunks if n < kernel.axis(a).extent.constant)
    # Triton's blocks of a whole axis are held. So is an axis in CUDA whose passes cannot each have it all at once.
    if backend == "triton" or (several != schedule.chunks and not legal(kernel, dict(schedule.chunks))):
        schedule = replace(schedule, chunks=several)
    check_peeled(kernel, variant, schedule)
    # In Triton what a thread has of several rows would be a block of rows and threads.
    if backend == "cuda" or schedule.rows == 1:
        kernel = paired(kernel, schedule)
    steps = steps_of(kernel, schedule)
    if sums is not None:
        own = None if knobs is None else knobs.blocks
        blocks = own or sum_blocks(kernel, variant, backend, schedule, steps, capability)
        if not schedule.programs:
            schedule = replace(schedule, programs=max(1, num_sms * blocks // schedule.cluster))
        if backend == "triton" and knobs is None and override is None:
            schedule = replace(schedule, registers=registers_told(schedule, blocks))
        kernel, sums = spill_looped(kernel, replace(sums, blocks=blocks, multiprocessors=num_sms), schedule)
        steps = ahead_of_rows(kernel, sums, steps_of(kernel, schedule))
    if backend == "triton" and sums is not None and sums.split is not None and tight(kernel, schedule):
        steps = tuple(replace(s, body=loaded_again(kernel, s.body)) for s in steps)
    if backend == "triton" and sums is None:
        steps = weights_late(kernel, steps)
    refuse_oversize(kernel, variant, backend, schedule, steps)
    held = held_loads(kernel, steps) if schedule.held else frozenset[str]()
    if schedule.held and (sums is not None or not held):
        why = "it sums over programs" if sums is not None else "no two passes over chunks load the same of a row"
        raise ScheduleError(f"a schedule of {kernel.name} is not valid: it has nothing to hold, as {why}")
    if not held:
        steps = alternated(kernel, steps)
    if leaves is not None:
        steps = leaves.steps(steps)
    if sums is None and not held:
        kernel, steps = labels_apart(kernel, schedule, unswitched(kernel, schedule, steps))
    overwritten = barriers(kernel, digits(kernel, variant))
    # Triton makes of it what the device has.
    policies = backend == "triton" or capability >= ladders.POLICIES_SINCE
    staying = kept(kernel, sums) if policies else frozenset[str]()
    return Scheduled(kernel, variant, schedule, steps, capability, overwritten, staying, held, sums)
