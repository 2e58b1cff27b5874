"""How `kgen tune` runs a candidate: whether its results are right, and how long its calls take."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kgen.codegen.interpret import interpret
from kgen.codegen.tolerance import compare, error_bound
from kgen.dsl import ir
from kgen.runtime.backends.launch import Built, Launch
from kgen.runtime.tune_cases import Arguments, Case
from kgen.runtime.tune_search import Timer

# Elements of the largest tensor of the call that is held against the interpreter. It has the same compiled kernel.
CHECKED = 1 << 22
CHECKED_ON_CPU = 1 << 16
_FLUSH = 512 << 20  # bytes written before each call: they clear the L2 cache and last longer than a launch

Run = Callable[[], Any]
# A timer of `runs` with a `reset` before each of them that does not count.
MakeTimer = Callable[[Sequence[Run], Run], Timer]


# ---- is it right? ----------------------------------------------------------------------------------------------------


class Check:
    """A call of a case with few rows, and what must come out of it; made when it is first asked for."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self._made: tuple[Case, Arguments, dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None

    def problem(self, built: Built) -> str:
        """What is wrong with the results of `built`; nothing where every one is within its bound."""
        if self._made is None:
            limit = CHECKED if self.device.type == "cuda" else CHECKED_ON_CPU
            if any(isinstance(s, ir.Accumulate) for s in self.case.body.body):
                limit *= 16  # so that a program takes several rows of its sum
            small = self.case.smaller(limit)
            arguments = small.arguments(self.device, seed=1)
            tensors = {t.name: x for t, x in zip(small.body.tensors, arguments.tensors, strict=True) if t.role != "out"}
            scalars = {s.name: v for s, v in zip(small.body.scalars, arguments.scalars, strict=True)}
            with torch.no_grad():
                expected = interpret(small.body, tensors, scalars, precision="f64")
                bound = error_bound(small.body, tensors, scalars)
            self._made = small, arguments, expected, bound
        small, arguments, expected, bound = self._made
        own = [_own(t.role, x) for t, x in zip(small.body.tensors, arguments.tensors, strict=True)]
        launch, _ = built.prepare(small.where)
        launch(own, arguments.scalars, [x.data_ptr() for x in own])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = []
        for t, x in zip(small.body.tensors, own, strict=True):
            if t.role != "in":
                c = compare(x, expected[t.name], bound[t.name])
                found += [] if c.ok else [f"{t.name} {c}"]
        return "; ".join(found)


def _own(role: str, x: torch.Tensor) -> torch.Tensor:
    if role == "in":
        return x
    if role == "inout":
        return x.clone()
    # What is not written must show.
    return torch.full_like(x, math.nan if x.is_floating_point() else 1 if x.dtype == torch.bool else -77)


# ---- how long does it take? ------------------------------------------------------------------------------------------


def calls_of(launches: Sequence[Launch], case: Case, a: Arguments) -> tuple[list[Run], Run]:
    """A call of each launch on the same tensors, and what brings back those that are changed in place."""
    changed = [(x, x.clone()) for t, x in zip(case.body.tensors, a.tensors, strict=True) if t.role == "inout"]
    addresses = a.addresses

    def reset() -> None:
        for x, before in changed:
            x.copy_(before)

    def run(launch: Launch) -> Run:
        return lambda: launch(a.tensors, a.scalars, addresses)

    return [run(la) for la in launches], reset


def device_timer(device: torch.device) -> MakeTimer:
    """Microseconds on `device`, with its L2 cache cleared before each call: by events of a GPU, elsewhere by the
    clock."""
    cuda = device.type == "cuda"
    flush = torch.empty(_FLUSH if cuda else 1, dtype=torch.uint8, device=device)

    def make(runs: Sequence[Run], reset: Run) -> Timer:
        warm: set[int] = set()

        def measure(which: Sequence[int], rounds: int) -> Mapping[int, Sequence[float]]:
            for i in set(which) - warm:
                reset()
                runs[i]()
            warm.update(which)
            out: dict[int, list[float]] = {i: [] for i in which}
            collected = gc.isenabled()
            gc.disable()
            try:
                for r in range(rounds):
                    spans: list[tuple[int, Any, Any]] = []
                    for k in range(len(which)):  # a new order each round: none profits from what ran before it
                        i = which[(k + r) % len(which)]
                        reset()
                        flush.zero_()
                        if cuda:
                            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                            begin.record()
                            runs[i]()
                            end.record()
                            spans.append((i, begin, end))
                        else:
                            began = time.perf_counter()
                            runs[i]()
                            out[i].append((time.perf_counter() - began) * 1e6)
                    if cuda:
                        torch.cuda.synchronize(device)
                        for i, begin, end in spans:
                            out[i].append(begin.elapsed_time(end) * 1e3)
            finally:
                if collected:
                    gc.enable()
            return out

        return measure

    return make
