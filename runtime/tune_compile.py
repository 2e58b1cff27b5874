"""Candidates made and compiled by other processes, ahead of the device that measures them.

No compiler here needs a GPU. What was compiled is in the caches of kgen and Triton afterwards, where the process that
measures finds it; it gets the generated programs, and what each takes of the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kgen.codegen.candidates import MOST, candidates
from kgen.codegen.knobs import Knobs
from kgen.codegen.program import Program
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.errors import KgenError
from kgen.runtime.backends.base import emitter
from kgen.runtime.nvrtc import Resources

# Each holds torch, Triton and a compiler: half a gigabyte and more.
_MOST_WORKERS = 32


@dataclass(frozen=True)
class Order:
    """What to compile: a kernel with merged indices, for a variant, on a backend and a device."""

    kernel: ir.Kernel
    variant: Variant
    backend: str
    num_sms: int
    capability: int  # 90 for sm_90
    most: int = MOST


@dataclass(frozen=True)
class Planned:
    """A candidate as a program, with those behind it."""

    knobs: Knobs | None
    program: Program


@dataclass(frozen=True)
class Made:
    """A candidate after its compiler was done with it: the resources of each launch, or why it is left out."""

    planned: Planned
    resources: tuple[Resources, ...] = ()
    problem: str = ""


# ---- in any process --------------------------------------------------------------------------------------------------


def plan(order: Order) -> list[Planned]:
    """The candidates of `order` as programs, the default first, no program twice. Raises KgenError where not even that
    can be made."""
    emit = emitter(order.backend)
    out: list[Planned] = []
    seen: set[tuple[Any, ...]] = set()
    on = {"num_sms": order.num_sms, "capability": order.capability}
    for c in candidates(order.kernel, order.variant, order.backend, most=order.most, **on):
        program = _bare(emit(c.scheduled))
        same = tuple(
            (p.source, p.schedule.threads, p.schedule.rows, p.schedule.programs, p.shared_bytes)
            for p in program.launches
        )
        if same not in seen:
            seen.add(same)
            out.append(Planned(c.knobs, program))
    return out


def _bare(p: Program) -> Program:
    """`p` without its line map, which is as long as the source and of no use here."""
    return replace(p, lines=(), then=tuple(map(_bare, p.then)))


def compile_program(order: Order, planned: Planned) -> Made:
    """`planned` compiled, unless it spills or its compiler refuses it."""
    try:
        used = tuple(_resources(order, p) for p in planned.program.launches)
    except Exception as error:  # of a compiler, whatever it raises: the others go on
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Made(planned, problem=f"does not compile: {first[:200]}")
    spilled = sum(r.spill_store_bytes + r.spill_load_bytes for r in used)
    if spilled and planned.knobs is not None:  # the default is what there is to beat, spills or not
        return Made(planned, used, f"spills {spilled} bytes a thread")
    return Made(planned, used)


def _resources(order: Order, p: Program) -> Resources:
    from kgen.runtime.cache import CACHE, temporary_folder

    if order.backend == "cuda":
        from kgen.runtime.backends.cuda import compiled

        _, meta = compiled(p, f"sm_{order.capability}", CACHE)
        return Resources(**meta)
    from kgen.runtime.foreign_caches import before_triton_compiles
    from kgen.runtime.triton_compile import compile_triton

    before_triton_compiles()
    variant = p.stage.variant if p.stage is not None else order.variant
    folder = CACHE.folder("triton") or temporary_folder("triton")
    return compile_triton(p, variant, order.capability, folder).resources


def cores() -> int:
    """The CPU cores that this process may use, at most `_MOST_WORKERS`: in a container fewer than the machine has."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max 100000" where there is no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return min(count, _MOST_WORKERS)


def _begin() -> None:
    """To be called first in a process that compiles: Ctrl-C is for the one that measures, and when that is gone, this
    one has nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- in the process that measures ------------------------------------------------------------------------------------


@dataclass
class _Work:
    """The state of one order: its plan, which may fail, and the compilations that are begun or wait their turn."""

    plan: Future[list[Planned]]
    compiling: list[Future[Made]] = field(default_factory=list)
    waiting: list[Planned] = field(default_factory=list)
    planned: bool = False


class Compilers:
    """A pool of processes that work through `orders`, in their order. A context manager; leaving it stops them.

    wave: how many candidates of every order are compiled before any of the others; None: all of an order at once.
    """

    def __init__(self, orders: Iterable[Order], workers: int = 0, wave: int | None = None) -> None:
        self._orders = list(orders)
        self._wave = wave
        self._lock = threading.RLock()
        # Spawned: a fork would copy whatever CUDA and Triton have begun here.
        self._pool = ProcessPoolExecutor(workers or cores(), multiprocessing.get_context("spawn"), _begin)
        self._work: list[_Work] = []

    def __enter__(self) -> Compilers:
        self._work = [_Work(self._pool.submit(plan, order)) for order in self._orders]
        for i, work in enumerate(self._work):
            work.plan.add_done_callback(lambda done, i=i: self._compile(i, done))
        return self

    def __exit__(self, *_: Any) -> None:
        workers = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in workers:  # what they are at is of no use to anyone
            process.terminate()

    def _compile(self, i: int, done: Future[list[Planned]]) -> None:
        with self._lock, suppress(RuntimeError):  # the pool is being shut down
            work = self._work[i]
            work.waiting = [] if done.cancelled() or done.exception() else done.result()
            self._submit(i, self._wave)
            work.planned = True
            if all(w.planned for w in self._work):
                for k in range(len(self._work)):
                    self._submit(k, None)

    def _submit(self, i: int, most: int | None) -> None:
        work = self._work[i]
        some, work.waiting = work.waiting[:most], work.waiting[most:] if most is not None else []
        work.compiling += [self._pool.submit(compile_program, self._orders[i], p) for p in some]

    def ready(self, i: int) -> bool:
        """Whether every candidate of order `i` is compiled, or it has none."""
        with self._lock:
            work = self._work[i]
            return work.planned and not work.waiting and all(f.done() for f in work.compiling)

    def take(self, i: int, seconds: float) -> tuple[list[Made], int] | None:
        """What is compiled of order `i` by now, and how many candidates are not: they are given up. None if not even
        the default schedule is, after so many `seconds`. Raises KgenError where it has no program."""
        work = self._work[i]
        seconds = min(max(0.0, seconds), threading.TIMEOUT_MAX)
        try:
            planned = work.plan.result(seconds)
            with self._lock:
                work.waiting = []
            if not work.compiling:  # the callback is yet to run
                return None
            first = work.compiling[0].result(seconds)
        except TimeoutError:
            return None
        if first.problem:
            raise KgenError(f"the default schedule {first.problem}")
        with self._lock:
            made = [f.result() for f in work.compiling if f.done()]
            for f in work.compiling:
                f.cancel()
        return made, len(planned) - len(made)


def inline(order: Order) -> list[Made]:
    """The candidates of `order` made here, none of them compiled: for executors that compile as they load."""
    return [Made(p) for p in plan(order)]
