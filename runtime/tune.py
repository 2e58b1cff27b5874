"""`kgen tune`: which schedule of a kernel is the fastest at given sizes on this device?

For each case and backend the candidates (`kgen.codegen.candidates`) are compiled by other processes; those that compile
without spilling are run on arguments of the tuner's own, held against the float64 interpreter under the derived bound,
and timed beside the default (`kgen.runtime.tune_search`). A result is kept as soon as it is there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kgen.codegen.candidates import MOST
from kgen.codegen.pipeline import MULTIPROCESSORS
from kgen.codegen.program import Program
from kgen.dsl.errors import KgenError
from kgen.runtime.backends.base import Executor, Generated
from kgen.runtime.backends.launch import Built
from kgen.runtime.cache import CACHE
from kgen.runtime.errors import BackendError
from kgen.runtime.installation import device_name
from kgen.runtime.registry import executor_for
from kgen.runtime.tune_cases import Case
from kgen.runtime.tune_compile import Compilers, Made, Order, inline
from kgen.runtime.tune_measure import Check, MakeTimer, calls_of, device_timer
from kgen.runtime.tune_search import search
from kgen.runtime.tuned import subject
from kgen.runtime.tuned_store import Result, add, driver_of, knob_data, load, user_path

# With limited time, so many candidates of every job are compiled before the others.
_WAVE = 12


@dataclass(frozen=True)
class Machine:
    """Where candidates run. `timer` None: by the clock of the device; `compilers`: whether there is a compiler to ask
    ahead (else programs are compiled as they are loaded)."""

    device: torch.device
    name: str
    driver: str
    num_sms: int = MULTIPROCESSORS
    capability: int = 90
    timer: MakeTimer | None = None
    compilers: bool = True

    @staticmethod
    def gpu() -> Machine:
        """The current GPU. Raises BackendError where there is none."""
        if not torch.cuda.is_available():
            raise BackendError(
                "kgen tune measures on a GPU, and torch sees none here; kgen tune --show lists what is known already"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        p = torch.cuda.get_device_properties(device)
        return Machine(device, device_name(device), driver_of(device), p.multi_processor_count, 10 * p.major + p.minor)


@dataclass(frozen=True)
class Job:
    """A case to tune on one backend."""

    case: Case
    backend: str

    @property
    def name(self) -> str:
        """What people are told."""
        return f"{self.case.name} on {self.backend}"


@dataclass(frozen=True)
class Outcome:
    """What became of a job: `tuned` or `known` (from before) with a result, `failed` (why is in `problems`), or `out of
    time`. Of a result, `problems` are candidates that were wrong: bugs, all of them. `figures`: candidates by what
    their knobs are, with their median in microseconds or why they were left out."""

    job: Job
    state: str
    result: Result | None = None
    problems: tuple[str, ...] = ()
    figures: tuple[dict[str, Any], ...] = ()


@dataclass
class Options:
    """seconds: for all jobs together; those that come later have what earlier ones left. again: tune what is known.
    workers: processes that compile; 0: as many as there are CPU cores. most: candidates of a job."""

    seconds: float | None = None
    again: bool = False
    workers: int = 0
    most: int = MOST
    clock: Callable[[], float] = field(default=time.monotonic)
    keep: bool = True  # in the user's file


def unique(jobs: Sequence[Job]) -> list[Job]:
    """`jobs` without those that measure the same as an earlier one: a training form may be the kernel itself."""
    found = {(subject(j.case.where, j.backend), tuple(j.case.where.dims.items())): j for j in reversed(jobs)}
    return [j for j in jobs if j in found.values()]


def tune(jobs: Sequence[Job], machine: Machine, options: Options | None = None) -> Iterator[Outcome]:
    """Tune `jobs`; an outcome of each, as soon as it is there. Those whose candidates are compiled come first."""
    options = options or Options()
    # What time did not suffice for is done again.
    known = {} if options.again else {r.key: r for r in load(user_path(machine.name)) if r.complete}
    left: list[Job] = []
    for job in jobs:
        result = known.get(_blank(job, machine).key)
        if result is None:
            left.append(job)
        else:
            yield Outcome(job, "known", result)
    if not left:
        return
    orders = [
        Order(j.case.where.kernel, j.case.where.variant, j.backend, machine.num_sms, machine.capability, options.most)
        for j in left
    ]
    ends = math.inf if options.seconds is None else options.clock() + options.seconds
    source: _Inline | Compilers = _Inline(orders)
    if machine.compilers:
        source = Compilers(orders, options.workers, None if options.seconds is None else _WAVE)
    turn = _Turn(options.clock, ends)
    with source:
        todo = list(range(len(left)))
        check: Check | None = None
        while todo:
            at = turn.next(todo, source)
            todo.remove(at)
            job = left[at]
            if check is None or check.case is not job.case:
                check = Check(job.case, machine.device)
            began = options.clock()
            share = (ends - began) / (len(todo) + 1)
            try:
                made = source.take(at, share) if share > 0 else None
                if made is None:
                    outcome = Outcome(job, "out of time")
                else:
                    outcome = _tuned(job, machine, *made, check, began + share, options.clock)
                    turn.took(options.clock() - began)
            except KgenError as error:
                outcome = Outcome(job, "failed", problems=(str(error),))
            except Exception as error:  # of one job: the others are measured all the same
                outcome = Outcome(job, "failed", problems=(f"{type(error).__name__}: {error}",))
            if outcome.result is not None and options.keep:
                add(machine.name, [outcome.result])
            yield outcome


class _Inline:
    """Candidates that are made when they are asked for, as `Compilers` has them."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = orders

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def ready(self, i: int) -> bool:
        return True

    def take(self, i: int, seconds: float) -> tuple[list[Made], int] | None:
        return inline(self._orders[i]), 0


class _Turn:
    """Which job is next? One that is compiled; where what is left of the time is needed to measure, the first."""

    def __init__(self, clock: Callable[[], float], ends: float) -> None:
        self._clock, self._ends = clock, ends
        self._taken: list[float] = [1.5]  # seconds to measure a job: a guess, then what it took

    def took(self, seconds: float) -> None:
        self._taken.append(seconds)

    def next(self, todo: Sequence[int], source: _Inline | Compilers) -> int:
        while True:
            for i in todo:
                if source.ready(i):
                    return i
            if self._clock() + statistics.mean(self._taken) * len(todo) > self._ends:
                return todo[0]
            time.sleep(0.01)


def _blank(job: Job, machine: Machine) -> Result:
    """The result of `job` without figures."""
    case = job.case
    dtypes = {n: str(d) for n, d in case.spec.dtypes.items()}
    at = subject(case.where, job.backend)
    return Result(at, case.name, dtypes, dict(case.dims), {}, 0.0, 0.0, driver=machine.driver)


def _tuned(
    job: Job,
    machine: Machine,
    made: Sequence[Made],
    late: int,
    check: Check,
    until: float,
    clock: Callable[[], float],
) -> Outcome:
    executor = executor_for(job.backend, machine.device)
    missing = executor.why_unavailable(machine.device)
    if missing is not None:
        raise BackendError(missing)
    figures: list[dict[str, Any]] = []
    problems: list[str] = []
    usable: list[Made] = []
    built: list[Built] = []
    skipped: Counter[str] = Counter({"not compiled in time": late} if late else {})

    def leave_out(m: Made, why: str) -> None:
        skipped[why.split(":")[0].split(" ")[0]] += 1
        figures.append({**_figures(m, job), "left out": why})

    for m in made:
        if m.problem:
            leave_out(m, m.problem)
            continue
        if built and clock() > until:
            leave_out(m, "late: time was up before it was checked")
            continue
        try:
            one = load_candidate(executor, m.planned.program, job.case, machine.device)
            wrong = check.problem(one)
        except KgenError as error:
            if m.planned.knobs is None:
                raise
            leave_out(m, f"refused: {str(error).splitlines()[0][:200]}")
            continue
        if wrong:
            text = f"{job.name} with {_said(m)} is WRONG: {wrong}"
            if m.planned.knobs is None:
                raise KgenError(text)
            problems.append(text)
            leave_out(m, f"wrong: {wrong}")
            continue
        usable.append(m)
        built.append(one)
    arguments = job.case.arguments(machine.device)
    runs, reset = calls_of([b.prepare(job.case.where)[0] for b in built], job.case, arguments)
    timer = (machine.timer or device_timer(machine.device))(runs, reset)
    found = search(len(runs), timer, until=until, clock=clock)
    for i, m in enumerate(usable):
        figures.append({**_figures(m, job), "us": round(found.medians[i], 3)} if i in found.medians else {})
    best = usable[found.best].planned
    complete = found.finished and not late and not skipped["late"]
    blank = _blank(job, machine)
    result = Result(
        blank.subject, blank.name, blank.dtypes, blank.dims, knob_data(best.knobs, job.case.where.kernel), found.us,
        found.default_us, found.spread_us, len(usable), machine.driver, dict(skipped), complete,
    )  # fmt: skip
    order = sorted((f for f in figures if f), key=lambda f: f.get("us", math.inf))
    return Outcome(job, "tuned", result, tuple(problems), tuple(order))


def load_candidate(executor: Executor, program: Program, case: Case, device: torch.device) -> Built:
    """`program`, made for `case`, ready to run."""
    assert isinstance(executor, Generated)  # of a backend that has programs
    return executor.load(program, case.where, device, CACHE)


def _said(m: Made) -> str:
    knobs = m.planned.knobs
    return "the default schedule" if knobs is None else ", ".join(f"{n} {v}" for n, v in knobs.data().items())


def _figures(m: Made, job: Job) -> dict[str, Any]:
    s = m.planned.program.schedule
    shown = {"threads": s.threads, "rows": s.rows, "chunks": dict(s.chunks), "programs": s.programs}
    if job.backend == "cuda":
        shown |= {"vector": s.vector} | ({"cluster": s.cluster} if s.cluster > 1 else {})
        shown |= {"peeled": True} if s.peeled else {}
    shown |= {"held": True} if s.held else {}
    out: dict[str, Any] = {"default": m.planned.knobs is None, "schedule": shown}
    return out | ({"registers": max(r.registers for r in m.resources)} if m.resources else {})


def speedup(results: Sequence[Result]) -> float:
    """The geometric mean of how many times faster the tuned schedules are."""
    return statistics.geometric_mean([r.default_us / r.us for r in results]) if results else 1.0
