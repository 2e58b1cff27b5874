"""Results of `kgen bench` with figures that are made up, for tests of what is told of them."""

from __future__ import annotations

from typing import Any

from kgen.bench.result import SCHEMA

Record = dict[str, Any]


def call(us: float, spread: float = 0.01, **more: Any) -> Record:
    """A call of `us` microseconds, whose deciles lie `spread` of it below and above."""
    return {
        "median_us": us, "p10_us": us * (1 - spread), "p90_us": us * (1 + spread), "host_us": 9.0, "calls": 60, **more,
    }  # fmt: skip


def row(op: str, direction: str, shape: str, floor: str, calls: dict[str, Record], **more: Any) -> Record:
    """A row whose floor takes 100 us, with its multiples filled in."""
    results = {floor: call(100.0)} | calls
    for found in results.values():
        if "median_us" in found:
            found["of_floor"] = found["median_us"] / 100.0
    return {
        "op": op, "direction": direction, "shape": shape, "moves": "1 read, 1 write", "floor": floor, "bars": {},
        "bytes": 400_000_000, "flops": 400_000_000, "results": results, **more,
    }  # fmt: skip


def result(rows: list[Record], **more: Any) -> Record:
    """A whole result."""
    machine = {"date": "2026-01-01 00:00 UTC", "commit": "abc1234", "torch": "2.11", "device": "Some GPU"}
    return {
        "schema": SCHEMA, "machine": machine, "rounds": 60, "backends": ["cuda", "triton"], "trial": False,
        "rows": rows, "not reached": [], "seconds": 12.0, **more,
    }  # fmt: skip


def norm(cuda: float, width: int = 4096, spread: float = 0.01, **more: Any) -> Record:
    """RMSNorm with ours at `cuda` us on CUDA and 104 on Triton, Liger at 110, and bars of 1.03 and 1.05."""
    calls = {
        "cuda": call(cuda, spread, worst=0.9, peak_bytes=2**20), "triton": call(104.0, spread), "Liger": call(110.0),
        "QuACK": {"error": "not installed"},
    }  # fmt: skip
    return row(
        "rms_norm", "forward", f"16384x{width}", "copy", calls, **({"bars": {"cuda": 1.03, "triton": 1.05}} | more)
    )


def linear(cuda: float, peak_mib: float, cap: float | None, **more: Any) -> Record:
    """The linear cross entropy at a time and a peak, within `cap` MiB or by default, Liger at 118 us and 1129 MiB."""
    calls = {
        "cuda": call(cuda, peak_bytes=round(peak_mib * 2**20)), "Liger": call(118.0, peak_bytes=1129 * 2**20),
    }  # fmt: skip
    direction = "default" if cap is None else f"within {cap:.4g} MiB"
    extra: Record = {"bytes": None, "gradients_mib": 1066.0} | ({} if cap is None else {"cap_mib": cap}) | more
    return row("linear_cross_entropy", direction, "8192x4096x128256", "gemms", calls, **extra)


def whole() -> Record:
    """A result with all kinds of rows."""
    failed = norm(100.0, width=8192)
    failed["results"]["triton"] = {"error": "ValueError: wrong: off by up to 3 times the bound"}
    rows = [norm(102.0), norm(104.0, width=16384), failed]
    rows += [linear(104.0, 1500.0, None), linear(109.0, 1500.0, 1600.0, bars={"cuda": 1.08})]
    return result(rows, **{"not reached": ["rope forward 1x1x1x1x2"]})
