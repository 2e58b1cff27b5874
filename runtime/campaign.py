"""Many calls of one kernel, forwards or of its gradients, on several backends: what `kgen diff` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kgen.dsl.errors import KgenError
from kgen.runtime.cases import Trial, question, smaller, trials, without_gradient
from kgen.runtime.differential import Answer, Question, answer, guilty
from kgen.runtime.gradients import answers, departs
from kgen.runtime.kernel import Kernel

# Who is to blame where a backward does not compute the derivative of its kernel.
BY_HAND = "the backward written by hand"
DERIVED = "the derivation"

# Values of which the derivative is asked: of zeros for its ties. What overflows or vanishes may do so in two ways.
_JUDGED = ("normal", "zeros")

# Calls that making a failing trial smaller may take.
_SHRINKS = 24


@dataclass
class Tally:
    """What became of the calls on one backend."""

    ok: int = 0
    wrong: int = 0
    refused: int = 0
    worst: float = 0.0


@dataclass(frozen=True)
class Failure:
    """A trial that went wrong, made as small as was cheap: what each backend to blame did with it."""

    trial: Trial
    first: Trial
    guilty: tuple[str, ...]
    messages: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "trial": self.trial.to_json(),
            "found as": self.first.to_json(),
            "guilty": list(self.guilty),
            "messages": dict(self.messages),
        }


@dataclass
class Report:
    """The results of one kernel in one direction: `trials` calls of the `planned` ones, fewer where time was up.

    `refusals` are the messages of calls that a backend refused, `underived` says why an input has no gradient.
    """

    kernel: str
    direction: str
    tallies: dict[str, Tally]
    planned: int = 0
    trials: int = 0
    out_of_time: bool = False
    failures: list[Failure] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    underived: dict[str, str] = field(default_factory=dict)


def examine_kernel(
    kernel: Kernel,
    backends: Sequence[str],
    device: torch.device,
    *,
    direction: str = "forward",
    dtypes: tuple[str, ...] = (),
    quick: bool = False,
    seed: int = 0,
    most_failures: int = 3,
    seconds: float | None = None,
    given: Sequence[Trial] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Report:
    """Run `given`, or the trials of `kgen.runtime.cases`, and make what fails smaller.

    Begins no further trial after `most_failures`, or when `seconds` are over; of more than 0 there is at least one.
    """
    began = time.monotonic()
    report = Report(kernel.name, direction, {b: Tally() for b in backends})
    larger = 1 << (21 if device.type == "cuda" else 16)
    if given is None:
        how: dict[str, Any] = {"dtypes": dtypes, "quick": quick, "seed": seed, "max_elements": larger}
        given = trials(kernel, direction=direction, **how)
        if direction == "backward":
            report.underived = {name: why.diagnostics[0].brief() for name, why in without_gradient(kernel).items()}
    report.planned = len(given)
    for trial in given:
        # Where there is any time, one call is made: a few are better than none, and finding them takes time too.
        if seconds is not None and time.monotonic() - began >= seconds and (report.trials or not seconds):
            report.out_of_time = True
            break
        report.trials += 1
        found = run(kernel, trial, backends, device)
        for backend, tally in report.tallies.items():
            a = found[backend]
            if a.status == "ok":
                tally.ok += 1
                tally.worst = max(tally.worst, a.ratio)
            elif a.status == "refused":
                tally.refused += 1
                report.refusals.setdefault(backend, a.message)
            else:
                tally.wrong += 1
        if guilty(found):
            small, found = shrink(kernel, trial, found, backends, device)
            messages = {b: a.message for b, a in found.items() if a.message}
            report.failures.append(Failure(small, trial, tuple(guilty(found)), messages))
            if len(report.failures) >= most_failures:
                break
        progress()
    return report


def run(kernel: Kernel, trial: Trial, backends: Sequence[str], device: torch.device) -> dict[str, Answer]:
    """The answer of each backend to one trial; where the backward kernel is not the derivative, that of `BY_HAND` or
    `DERIVED` too. Where the question itself cannot be put, all have `refused`."""
    try:
        asked = question(kernel, trial, device)
        if isinstance(asked, Question):
            return {b: answer(asked, b) for b in backends}
        problem = departs(asked) if trial.values in _JUDGED else ""
        found = dict(answers(asked, backends))
        if problem:
            found[BY_HAND if asked.training.derived.by_hand else DERIVED] = Answer("wrong", message=problem)
        return found
    except KgenError as error:
        return {b: Answer("refused", message=str(error)) for b in backends}


def shrink(
    kernel: Kernel, trial: Trial, found: Mapping[str, Answer], backends: Sequence[str], device: torch.device
) -> tuple[Trial, dict[str, Answer]]:
    """A smaller trial on which the same backends fail, and their answers to it."""
    bad = [b for b, a in found.items() if a.status in ("wrong", "crashed")]
    best, found = trial, dict(found)
    left = _SHRINKS
    again = True
    while again and left > 0:
        again = False
        for candidate in smaller(kernel, best):
            left -= 1
            now = run(kernel, candidate, backends, device)
            if all(b in now and now[b].status in ("wrong", "crashed") for b in bad):
                best, found, again = candidate, now, True
                break
            if left <= 0:
                break
    return best, found
