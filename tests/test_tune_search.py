"""The search for the fastest schedule, on made-up times: it finds the best, believes no noise and keeps to its time."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from kgen.runtime.tune_search import FINAL, Found, search


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timer:
    """Calls that take `us` each, give or take `noise` of it; how often each was measured is in `calls`."""

    def __init__(self, us: Sequence[float], noise: float = 0.0, clock: Clock | None = None, seed: int = 0) -> None:
        self.us, self.noise, self.clock = us, noise, clock
        self.calls: Counter[int] = Counter()
        self.rounds: list[tuple[tuple[int, ...], int]] = []
        self.lot = random.Random(seed)

    def __call__(self, which: Sequence[int], rounds: int) -> Mapping[int, Sequence[float]]:
        self.rounds.append((tuple(which), rounds))
        out: dict[int, list[float]] = {i: [] for i in which}
        for _ in range(rounds):
            for i in which:
                self.calls[i] += 1
                out[i].append(self.us[i] * (1 + self.noise * self.lot.uniform(-1, 1)))
                if self.clock is not None:
                    self.clock.now += self.us[i] / 1e6
        return out


@pytest.mark.parametrize("best", [1, 7, 19, 31])
def test_the_best_of_many_is_found(best: int) -> None:
    us = [100.0 + 3 * i for i in range(32)]
    us[best] = 80.0
    timer = Timer(us, noise=0.02)
    found = search(32, timer)
    assert found.best == best
    assert abs(found.us - 80) < 1 and abs(found.default_us - 100) < 1.5
    assert found.finished and len(found.medians) == 32
    # Most of the time goes to those that matter.
    assert timer.calls[best] > 10 * timer.calls[min(set(range(1, 32)) - {best}, key=lambda i: timer.calls[i])]
    assert sum(timer.calls.values()) < 32 * FINAL


def test_the_default_stays_where_it_is_the_best() -> None:
    found = search(5, Timer([10.0, 12.0, 11.0, 15.0, 13.0], noise=0.01))
    assert found.best == 0 and found.us == found.default_us


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_reason_to_leave_the_default(seed: int) -> None:
    """All are equally fast; the one that seems fastest is so by less than measurements vary."""
    found = search(24, Timer([100.0] * 24, noise=0.1, seed=seed))
    assert found.best == 0


def test_a_gain_within_the_spread_does_not_count_and_one_beyond_it_does() -> None:
    def tried(us: float) -> Found:
        return search(2, Timer([100.0, us], noise=0.04, seed=3))

    assert tried(99.0).best == 0
    assert tried(90.0).best == 1
    assert 3 < tried(90.0).spread_us < 8  # half of the range of +- 4 %


def test_the_default_alone() -> None:
    timer = Timer([5.0])
    assert search(1, timer) == Found(0, 5.0, 5.0, 0.0, {0: 5.0}, True)


def test_out_of_time_the_best_so_far_is_still_held_against_the_default() -> None:
    us = [100.0] * 30
    us[11] = 50.0
    clock = Clock()
    timer = Timer(us, noise=0.01, clock=clock)
    found = search(30, timer, until=1e-4, clock=clock)
    assert found.best == 11 and not found.finished
    assert len(timer.rounds) == 2 and len(timer.rounds[0][0]) == 30
    assert timer.rounds[0][1] == timer.rounds[1][1] < FINAL
    assert 0 in timer.rounds[1][0] and 11 in timer.rounds[1][0]
    whole = Timer(us, noise=0.01)
    search(30, whole)
    assert sum(timer.calls.values()) < sum(whole.calls.values()) / 2


def test_what_is_compared_in_the_end_is_measured_anew() -> None:
    """A lucky first measurement, which is why a schedule came so far, must not count."""

    class Lucky(Timer):
        def __call__(self, which: Sequence[int], rounds: int) -> Mapping[int, Sequence[float]]:
            out = super().__call__(which, rounds)
            return {i: [t / 2 if i == 2 and len(self.rounds) == 1 else t for t in s] for i, s in out.items()}

    found = search(3, Lucky([100.0] * 3))
    assert found.best == 0
    assert found.medians[2] == 100.0


def test_medians_are_of_all_rounds() -> None:
    timer = Timer([10.0, 20.0, 30.0, 40.0, 50.0, 60.0], noise=0.2)
    found = search(6, timer)
    assert statistics.fmean(abs(found.medians[i] - 10 * (i + 1)) / (10 * (i + 1)) for i in range(6)) < 0.1
