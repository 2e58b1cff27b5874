"""The rows of the linear cross entropy: the default, and the largest chunks within each memory that has a bar.

Forward and backward through autograd, beside three matrix products of the same operands in the same rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kgen.bench.linear import SHAPES, SLOW, Bar, Entry, ours, peers, prepare, settings, small
from kgen.bench.linear_problem import MIB, Problem, Shape
from kgen.bench.measure import Plan, Record, Tell, release, said, synchronize
from kgen.bench.peers import LIGER, NotInstalled
from kgen.bench.timing import interleaved, within

OP = "linear_cross_entropy"
DEFAULT = "default"
LONG = 4  # a call lasts milliseconds, not microseconds: so many times fewer rounds


@dataclass(frozen=True)
class LinearCase:
    """All rows of one shape, tokens x hidden x vocab: they share operands and rounds."""

    shape: Shape
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        """What tells this from other cases."""
        return f"{OP} {self.shape}"

    def blank(self) -> Record:
        """A row without results."""
        return {
            "op": OP, "direction": DEFAULT, "shape": str(self.shape), "moves": "three matrix products",
            "floor": "gemms", "bars": {}, "bytes": None, "flops": None, "results": {},
        }  # fmt: skip

    def perform(self, plan: Plan, until: float = math.inf, tell: Tell = lambda _: None) -> list[Record]:
        """The rows; see `kgen.bench.measure.perform`."""
        threads = torch.get_num_threads()
        if plan.device.type == "cpu":
            torch.set_num_threads(1)  # tiny products are slowest when threads wait for each other
        try:
            return _perform(self, plan, until, tell)
        finally:
            torch.set_num_threads(threads)


def linear_cases(shapes: list[tuple[int, ...]] | None = None, *, trial: bool = False) -> list[LinearCase]:
    """The listed shapes, or those of `shapes` that have three sizes; `trial`: the first of them, tiny."""
    if shapes is not None:
        there = {str(s): bars for s, bars in SHAPES.items()}
        given = [Shape(*s) for s in shapes if len(s) == 3]
        return [LinearCase(s, there.get(str(s), ())) for s in given]
    listed = [LinearCase(s, bars) for s, bars in (small(SHAPES) if trial else SHAPES).items()]
    return listed[:1] if trial else listed


def _perform(case: LinearCase, plan: Plan, until: float, tell: Tell) -> list[Record]:
    with within(min(60.0, until - time.monotonic())):
        p = Problem(case.shape, plan.device)
        gemms = p.gemms()
    skipped: list[str] = []
    with within(min(60.0, until - time.monotonic())):
        found = settings(p, case.bars, plan.backends, skipped)
    for what in skipped:
        tell(what)
    entries = {
        (key, backend): replace(ours(p, backend, *key), limit=plan.ready_s)
        for key in found
        for backend in plan.backends
    }
    others: dict[str, Entry] = {e.name: e for e in peers(p) if e.name in plan.peers}
    calls: dict[str, Callable[[], Any]] = {"gemms": gemms}
    records: dict[str, Record] = {"gemms": {}}
    once = _once(gemms, plan.device)
    every: dict[str, int] = {}
    for name, e in [*((_key(*k), e) for k, e in entries.items()), *others.items()]:
        began = time.monotonic()
        try:
            with within(min(e.limit, until - began)):
                calls[name], told = prepare(p, e)
            if told["once_ms"] > SLOW * once and plan.device.type == "cuda":
                every[name] = 3
            records[name] = _record(told, e)
        except NotInstalled as error:
            records[name] = {"error": str(error)}
        except Exception as error:  # the others are still worth their time
            records[name] = {"error": said(error)}
            tell(f"{case.name}, {name}: {records[name]['error']}")
            release(plan.device)
        records[name]["ready_s"] = round(time.monotonic() - began, 3)
    rounds = max(3, plan.rounds // LONG)
    times = interleaved(calls, plan.device, rounds, every=every, until=until) if len(calls) > 1 else {}
    for name, record in times.items():
        records[name] |= record | {"of_floor": record["median_us"] / times["gemms"]["median_us"]}
    rows: list[Record] = []
    for key, caps in found.items():
        own = {backend: records[_key(key, backend)] for backend in plan.backends}
        rows += [
            _row(case, own, records, list(others), mib) for mib in ([None, *caps] if key == (None, "auto") else caps)
        ]
    return rows


def _flops(s: Shape) -> int:
    """Of the three products."""
    return 6 * s.tokens * s.hidden * s.vocab


def _key(setting: tuple[float | None, str], backend: str) -> str:
    workspace_mb, accumulate = setting
    return f"{backend}, {'default' if workspace_mb is None else f'{workspace_mb:.4g} MiB'}, {accumulate}"


def _once(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a second call."""
    call()
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3


def _record(told: Record, e: Entry) -> Record:
    out = {k: v for k, v in told.items() if k not in ("peak_mib", "once_ms")}
    if "peak_mib" in told:
        out["peak_bytes"] = round(told["peak_mib"] * MIB)
    return out | ({"workspace_mb": e.workspace_mb, "accumulate": e.accumulate} if e.backend else {})


def _row(
    case: LinearCase, own: dict[str, Record], records: dict[str, Record], others: list[str], mib: float | None
) -> Record:
    """The default, or what keeps within so many MiB, beside the peers that do so, too."""
    row = case.blank() | {"flops": _flops(case.shape), "gradients_mib": case.shape.gradient_bytes / MIB}
    there = {n: records[n] for n in others}
    if mib is not None:
        bar = next(b for b in case.bars if b.mib == mib)
        there = {n: r for n, r in there.items() if r.get("peak_bytes", math.inf) <= mib * MIB}
        row |= {"direction": f"within {mib:.4g} MiB", "cap_mib": mib}
        row["bars"] = {} if bar.limit is None else dict.fromkeys(own, bar.limit)
        if bar.limit is None:
            row["below"] = LIGER
    return row | {"results": {"gemms": records["gemms"]} | own | there}
