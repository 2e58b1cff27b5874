"""Many calls of one kernel on several backends: what `kgen diff` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kgen.dsl.diagnostics import KgenError
from kgen.runtime.cases import Trial, arguments, smaller, trials
from kgen.runtime.differential import Answer, answer, ask, guilty
from kgen.runtime.kernel import Kernel

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
    """The results of one kernel. `refusals` are the messages of calls that a backend refused."""

    kernel: str
    tallies: dict[str, Tally]
    trials: int = 0
    failures: list[Failure] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)


def examine_kernel(
    kernel: Kernel,
    backends: Sequence[str],
    device: torch.device,
    *,
    dtypes: tuple[str, ...] = (),
    quick: bool = False,
    seed: int = 0,
    most_failures: int = 3,
    given: Sequence[Trial] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Report:
    """Run `given`, or the trials of `kgen.runtime.cases`, and make what fails smaller. Stops at `most_failures`."""
    report = Report(kernel.name, {b: Tally() for b in backends})
    larger = 1 << (21 if device.type == "cuda" else 16)
    chosen = trials(kernel, dtypes=dtypes, quick=quick, seed=seed, max_elements=larger) if given is None else given
    for trial in chosen:
        report.trials += 1
        answers = run(kernel, trial, backends, device)
        for backend, a in answers.items():
            tally = report.tallies[backend]
            if a.status == "ok":
                tally.ok += 1
                tally.worst = max(tally.worst, a.ratio)
            elif a.status == "refused":
                tally.refused += 1
                report.refusals.setdefault(backend, a.message)
            else:
                tally.wrong += 1
        if guilty(answers):
            small, answers = shrink(kernel, trial, answers, device)
            report.failures.append(
                Failure(small, trial, tuple(guilty(answers)), {b: a.message for b, a in answers.items() if a.message})
            )
            if len(report.failures) >= most_failures:
                break
        progress()
    return report


def run(kernel: Kernel, trial: Trial, backends: Sequence[str], device: torch.device) -> dict[str, Answer]:
    """The answer of each backend to one trial. Where the question itself cannot be put, all have `refused`."""
    try:
        question = ask(kernel, arguments(kernel, trial, device), trial.layout)
    except KgenError as error:
        return {b: Answer("refused", message=str(error)) for b in backends}
    return {b: answer(question, b) for b in backends}


def shrink(
    kernel: Kernel, trial: Trial, answers: Mapping[str, Answer], device: torch.device
) -> tuple[Trial, dict[str, Answer]]:
    """A smaller trial on which the same backends fail, and their answers to it."""
    bad = [b for b, a in answers.items() if a.status in ("wrong", "crashed")]
    best, found = trial, dict(answers)
    left = _SHRINKS
    again = True
    while again and left > 0:
        again = False
        for candidate in smaller(kernel, best):
            left -= 1
            now = run(kernel, candidate, list(answers), device)
            if all(now[b].status in ("wrong", "crashed") for b in bad):
                best, found, again = candidate, now, True
                break
            if left <= 0:
                break
    return best, found
