"""A machine for the tuner without a GPU, and times that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kgen.runtime import tune
from kgen.runtime.ahead import Choices
from kgen.runtime.loading import load_packaged
from kgen.runtime.tune import Job, Machine, Options, Outcome
from kgen.runtime.tune_cases import Case, case
from kgen.runtime.tune_measure import MakeTimer, Run
from kgen.runtime.tune_search import Timer

CPU = torch.device("cpu")


class Clock:
    """A clock that goes on by `step` seconds each time it is asked."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def timer_of(us: Callable[[int], float], ran: list[int] | None = None) -> MakeTimer:
    """A timer by which the candidate with number i takes `us(i)`; it does make the calls, if `ran` is to tell."""

    def make(runs: Sequence[Run], reset: Run) -> Timer:
        def measure(which: Sequence[int], rounds: int) -> dict[int, list[float]]:
            if ran is not None:
                for i in which:
                    reset()
                    runs[i]()
                    ran.append(i)
            return {i: [us(i)] * rounds for i in which}

        return measure

    return make


def machine(us: Callable[[int], float] = lambda i: 10.0 - i, ran: list[int] | None = None) -> Machine:
    return Machine(CPU, "cpu", "", 4, timer=timer_of(us, ran), compilers=False)


def norm(direction: str = "forward", rows: int = 24, width: int = 256) -> Case:
    return case(load_packaged("rms_norm.kdsl")["rms_norm"], Choices({"M": rows, "N": width}, "f32"), direction)


def outcomes(jobs: Sequence[Job], on: Machine | None = None, **options: Any) -> list[Outcome]:
    return list(tune.tune(jobs, on or machine(), Options(**{"most": 4, **options})))
