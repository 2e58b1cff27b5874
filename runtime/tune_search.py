"""The fastest of several schedules, with as few measurements as will tell: successive halving.

Short interleaved rounds of all, longer ones of the better third, and so on; then the best two and the default beside
each other, at length, on fresh measurements. Knows numbers and a timer, nothing of kernels.
"""

from __future__ import annotations

import math
import statistics
import time as clocks
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Times of `rounds` interleaved rounds of the schedules with these numbers, each in order.
Timer = Callable[[Sequence[int], int], Mapping[int, Sequence[float]]]

FIRST = 5  # rounds of all
FINAL = 40  # rounds of the last three
FINALISTS = 2  # beside the default


@dataclass(frozen=True)
class Found:
    """What a search found: the schedule `best` (0: the default stays) with its median, that of the default, and the
    spread, which the two differ by more than where the default does not stay. `medians`: of all, as far as they were
    measured. `finished`: whether time sufficed for every round."""

    best: int
    us: float
    default_us: float
    spread_us: float
    medians: Mapping[int, float]
    finished: bool


def search(
    count: int,
    timer: Timer,
    *,
    until: float = math.inf,
    clock: Callable[[], float] = clocks.monotonic,
    first: int = FIRST,
    final: int = FINAL,
) -> Found:
    """The fastest of schedules 0 .. `count` - 1, where 0 is the default.

    After `until`, a time of `clock`, nothing is begun but a short comparison of what was best so far.
    """
    samples: dict[int, list[float]] = {i: [] for i in range(count)}
    others = list(range(1, count))
    which = [0, *others]
    rounds = first
    while True:
        _measure(samples, timer, which, rounds)
        others.sort(key=lambda i: statistics.median(samples[i]))
        finished = clock() < until
        if len(others) <= FINALISTS or not finished:
            break
        which = others = others[: max(FINALISTS, len(others) // 3)]
        rounds *= 2
    last = others[:FINALISTS]
    closing = {i: list[float]() for i in (0, *last)}
    if last:
        _measure(closing, timer, list(closing), final if finished else first)
    else:
        closing = {0: samples[0]}
    medians = {i: statistics.median(s) for i, s in samples.items() if s}
    medians |= {i: statistics.median(s) for i, s in closing.items()}
    best = min(last, key=lambda i: medians[i], default=0)
    spread = max(_spread(closing[0]), _spread(closing[best]))
    if medians[0] - medians[best] <= spread:
        best = 0
    return Found(best, medians[best], medians[0], spread, medians, finished)


def _measure(samples: dict[int, list[float]], timer: Timer, which: Sequence[int], rounds: int) -> None:
    for i, times in timer(which, rounds).items():
        samples[i] += times


def _spread(times: Sequence[float]) -> float:
    """The range of the middle half of `times`."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low
