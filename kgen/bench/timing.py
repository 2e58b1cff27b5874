"""Times of calls beside each other: interleaved rounds, cleared L2 cache, and limits on how long anything may take."""

from __future__ import annotations

import gc
import math
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

FLUSH = 1 << 30  # bytes written before each call: they clear the L2 cache and last longer than a launch
WARM = 3  # rounds before those that count
LEAST = 3  # rounds that count, also where time runs out
Call = Callable[[], Any]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so long."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"given up after {seconds:.0f} s")

    if seconds < 1:
        raise TimeoutError("skipped, no time left")
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interleaved(
    runs: Mapping[str, Call],
    device: torch.device,
    rounds: int,
    *,
    reset: Call | Mapping[str, Call] = lambda: None,
    every: Mapping[str, int] | None = None,
    until: float = math.inf,
) -> dict[str, dict[str, float]]:
    """Median, deciles and host time in microseconds of each of `runs`, with the number of `calls`.

    On a GPU by CUDA events, elsewhere by the clock. `reset` runs before each call, outside of its time; of a mapping,
    what it has for that call. A call of which `every` says n is made in one round of n. No round is begun after
    `until`, a `time.monotonic`, once `LEAST` are done.
    """
    cuda = device.type == "cuda"
    flush = torch.empty(FLUSH if cuda else 1, dtype=torch.uint8, device=device)
    spans: dict[str, list[Any]] = defaultdict(list)
    host: dict[str, list[float]] = defaultdict(list)
    names = list(runs)
    resets = reset if isinstance(reset, Mapping) else dict.fromkeys(names, reset)
    collected = gc.isenabled()
    gc.disable()
    try:
        for round_ in range(-WARM, rounds):
            if round_ >= LEAST and time.monotonic() > until:
                break
            for k in range(len(names)):  # a new order each round, so that none profits from what ran before it
                name = names[(k + round_) % len(names)]
                if round_ % (every or {}).get(name, 1):
                    continue
                before = resets.get(name)
                if before is not None:
                    before()
                flush.zero_()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
                began = time.perf_counter()
                if cuda:
                    events[0].record()
                runs[name]()
                if cuda:
                    events[1].record()
                took = (time.perf_counter() - began) * 1e6
                if round_ >= 0:
                    host[name].append(took)
                    spans[name].append(events)
            if cuda:
                torch.cuda.synchronize(device)  # or the queue fills, and the host waits
            gc.collect(0)  # what hangs in cycles may hold memory of the device
    finally:
        if collected:
            gc.enable()
    out: dict[str, dict[str, float]] = {}
    for name in names:
        times = sorted(a.elapsed_time(b) * 1e3 for a, b in spans[name]) if cuda else sorted(host[name])
        out[name] = {
            "median_us": statistics.median(times), "p10_us": times[len(times) // 10],
            "p90_us": times[len(times) * 9 // 10], "host_us": statistics.median(host[name]), "calls": len(times),
        }  # fmt: skip
    return out
