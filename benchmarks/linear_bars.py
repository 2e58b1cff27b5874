"""Time and memory of the fused linear cross entropy on a GPU, beside its three matrix products and what others have.

    python benchmarks/linear_bars.py --out gpu-out --commit HASH --seconds 190

`kgen.ops.linear_cross_entropy` in bf16, mean, both gradients, on both backends: by default, at the largest chunks whose
measured peak stays within given MiB, over a range of chunks, with each way to accumulate, and the forward pass alone.
A result counts as a multiple of three `torch.mm` of the same operands in the same interleaved rounds (`timing.py`), at
its peak of memory above the inputs, gradients counted. Every result of ours is held against float64 first, under bounds
derived in `linear_problem.py`. Peers: eager torch, torch.compile of it, Liger and cut-cross-entropy where installed.

What decides about bars comes first; what the time does not suffice for is listed. `--device cpu` runs tiny sizes.

Leaves `linear-bars.json`, `linear-bars.md` and, with matplotlib, `linear-bars.png` in the folder of --out. Exit code 1
if a call of ours failed or was wrong; a missed bar is a line of the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of workers starts slower; read by torch

import linear_report
import torch
import torch.nn.functional as F
from linear_problem import Gradients, Problem, Shape

from kgen import ops
from kgen.bench.machine import machine
from kgen.bench.timing import interleaved, within

MIB = 2**20
BACKENDS = ("cuda", "triton")
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # into how many chunks the tokens are divided in a search
CURVE = (1, 2, 4, 8, 16, 32)  # and in the picture
SLOW = 2.0  # times the matrix products, from which a call is made in one round of three
Record = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """At most `limit` times the matrix products, or less than Liger's time where None, within `mib` above inputs."""

    mib: float
    limit: float | None


SHAPES: dict[Shape, tuple[Bar, ...]] = {
    Shape(8192, 4096, 128256): (Bar(1600, 1.08), Bar(1350, 1.13), Bar(1130, None)),
    Shape(4096, 4096, 128256): (Bar(1540, 1.06),),
    Shape(16384, 2048, 32000): (Bar(320, 1.12),),
}


@dataclass
class Entry:
    """One row: `make` gives a call that returns the loss, or the loss and both gradients."""

    name: str
    make: Callable[[], Callable[[], Any]]
    limit: float  # seconds until it must be ready
    backend: str | None = None  # of ours
    workspace_mb: float | None = None
    accumulate: str | None = None
    forward: bool = False
    caps: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class Group:
    """Rows that are timed in the same rounds, beside the matrix products."""

    title: str
    shape: Shape
    entries: Callable[[Problem], Iterator[Entry]]


class Clock:
    """What is left of the time."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


# ---- ours ----------------------------------------------------------------------------------------------------------


def backward(loss: torch.Tensor, p: Problem) -> Gradients:
    """The loss and both gradients."""
    dx, dw = torch.autograd.grad(loss, (p.x, p.w))
    return loss, dx, dw


def ours(p: Problem, backend: str, workspace_mb: float | None, accumulate: str, forward: bool = False) -> Entry:
    """One setting of `kgen.ops.linear_cross_entropy`."""

    def loss() -> torch.Tensor:
        return ops.linear_cross_entropy(
            p.x, p.w, p.target, accumulate=accumulate, workspace_mb=workspace_mb, backend=backend
        )

    def alone() -> torch.Tensor:
        with torch.no_grad():
            return loss()

    what = "kgen, forward alone" if forward else "kgen"
    call = alone if forward else lambda: backward(loss(), p)
    return Entry(what, lambda: call, 45.0, backend, workspace_mb, accumulate, forward)


def budget(shape: Shape, rows: int) -> float:
    """MiB for `rows` logits and what little comes with each: the next whole number, of small ones the next 64th."""
    mib = rows * shape.row_bytes / MIB
    return float(math.floor(mib) + 1) if mib >= 16 else mib * 65 / 64


class Search:
    """Finds the settings with the largest chunks under a peak, by measuring peaks."""

    def __init__(self, p: Problem, backend: str) -> None:
        self.p, self.backend = p, backend
        self._seen: dict[tuple[float | None, str], tuple[int, int]] = {}

    def observed(self, workspace_mb: float | None, accumulate: str) -> tuple[int, int]:
        """Peak in bytes and rows of a chunk."""
        key = (workspace_mb, accumulate)
        if key not in self._seen:
            self._seen[key] = self.p.observe(ours(self.p, self.backend, *key).make())
        return self._seen[key]

    def under(self, mib: float) -> tuple[float | None, str]:
        """workspace_mb and accumulate; the default, then `auto`, where they do as well. Raises ValueError."""
        found: list[tuple[int, tuple[float | None, str]]] = []
        for key in self._candidates():
            peak, rows = self.observed(*key)
            if peak <= mib * MIB:
                found.append((rows, key))
        if not found:
            least = min(peak for peak, _ in self._seen.values()) / MIB
            raise ValueError(f"no setting stays within {mib:.4g} MiB; the least peak seen is {least:.4g} MiB")
        return max(found, key=lambda f: f[0])[1]  # the first of those with the largest chunks

    def _candidates(self) -> Iterator[tuple[float | None, str]]:
        yield None, "auto"
        for accumulate in ("auto", "param"):
            for parts in PARTS:
                yield budget(self.p.shape, -(-self.p.shape.tokens // parts)), accumulate


def barred(p: Problem, bars: tuple[Bar, ...], backends: tuple[str, ...], skipped: list[str]) -> Iterator[Entry]:
    """The default, the settings that bars ask for, and Liger, which one of them is about."""
    settings: dict[tuple[float | None, str], list[float]] = {(None, "auto"): []}
    failures: list[str] = []
    for backend in backends:  # the peak is the same on each, up to what a kernel needs
        search = Search(p, backend)
        try:
            search.observed(None, "auto")  # takes what is compiled and what a library keeps
            search = Search(p, backend)
            for bar in bars:
                try:
                    settings.setdefault(search.under(bar.mib), []).append(bar.mib)
                except ValueError as error:
                    skipped.append(f"{p.shape}, settings for {bar.mib:.4g} MiB: {error}")
            break
        except TimeoutError as error:
            skipped.append(f"{p.shape}, settings for bars: {said(error)}")
            break
        except Exception as error:  # the other backend may do
            failures.append(f"{backend}: {said(error)}")
    else:
        skipped.append(f"{p.shape}, settings for bars: no backend could be asked ({'; '.join(failures)})")
    for key, caps in settings.items():
        for backend in backends:
            yield replace(ours(p, backend, *key), caps=caps)
    yield from (e for e in peers(p) if e.name == "Liger")


def accumulated(p: Problem, backends: tuple[str, ...]) -> Iterator[Entry]:
    """Each way to hold the gradient of w, in few chunks and in many, and the forward pass alone."""
    for backend in backends:
        yield ours(p, backend, None, "auto", forward=True)
    for workspace_mb in (None, budget(p.shape, -(-p.shape.tokens // 32))):
        for accumulate in ("auto", "param", "f32"):
            for backend in backends:
                yield ours(p, backend, workspace_mb, accumulate)


def curve(p: Problem, backends: tuple[str, ...]) -> Iterator[Entry]:
    """Chunks of many sizes."""
    for parts in CURVE:
        for backend in backends:
            yield ours(p, backend, budget(p.shape, -(-p.shape.tokens // parts)), "param")


# ---- what others have ----------------------------------------------------------------------------------------------


def plain(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """torch's, with the loss in f32 as models have it."""
    return F.cross_entropy(F.linear(x, w).float(), target)


def plain_bf16(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """torch's, in bf16 throughout."""
    return F.cross_entropy(F.linear(x, w), target)


def peers(p: Problem) -> Iterator[Entry]:
    """All of them, installed or not."""

    def torchs(function: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        return lambda: backward(function(p.x, p.w, p.target), p)

    def liger() -> Callable[[], Any]:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]  # optional
            LigerFusedLinearCrossEntropyLoss,
        )

        function = LigerFusedLinearCrossEntropyLoss()
        return torchs(lambda x, w, target: function(w, x, target))

    def cut() -> Callable[[], Any]:
        from cut_cross_entropy import (  # pyright: ignore[reportMissingImports]  # optional
            linear_cross_entropy,
        )

        return torchs(linear_cross_entropy)

    def compiled() -> Callable[[], Any]:
        torch._dynamo.reset()
        return torchs(torch.compile(plain, dynamic=False, fullgraph=True))

    yield Entry("Liger", liger, 20.0)
    yield Entry("eager", lambda: torchs(plain), 15.0)
    yield Entry("eager, loss in bf16", lambda: torchs(plain_bf16), 15.0)
    yield Entry("torch.compile", compiled, 30.0)
    yield Entry("cut-cross-entropy", cut, 30.0)


def others(p: Problem) -> Iterator[Entry]:
    """Those that no bar is about."""
    return (e for e in peers(p) if e.name != "Liger")


# ---- rounds --------------------------------------------------------------------------------------------------------


def said(error: Exception) -> str:
    """On one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prepare(p: Problem, e: Entry) -> tuple[Callable[[], Any], Record]:
    """The call, compiled, held against float64 and measured in memory. Raises ValueError for a wrong result."""
    call = e.make()
    call()
    row: Record = {}
    rows = peak = 0
    if e.backend is not None:
        peak, rows = p.observe(call)
        row = {"peak_mib": peak / MIB, "chunk": rows, "chunks": -(-p.shape.tokens // rows)}
    elif p.device.type == "cuda":
        row = {"peak_mib": p.peak(call) / MIB}
    p.spoil()
    if e.forward:
        loss = call()
        off = (loss.double() - p.reference.loss).abs()
        row |= {"loss_error": float(off / p.reference.loss.abs()), "worst": float(off / p.reference.loss_bound)}
        # What is left beside the logits is far from half a gradient.
        if peak - rows * p.shape.row_bytes > p.x.nbytes / 2 and p.device.type == "cuda":
            raise ValueError(f"memory of a gradient is taken without one asked for: {peak / MIB:.1f} MiB")
    else:
        row |= p.judge(call(), rows if e.backend is not None else None)
    if not row.get("worst", 0.0) <= 1.0:
        raise ValueError(f"wrong: off by up to {row['worst']:.3g} times the bound")
    synchronize(p.device)
    began = time.perf_counter()
    call()
    synchronize(p.device)
    return call, row | {"once_ms": (time.perf_counter() - began) * 1e3}


def perform(group: Group, p: Problem, clock: Clock, rounds: int, skipped: list[str]) -> Record:
    """Rows of one group, timed beside the matrix products; an error in each that could not be."""
    began = time.monotonic()
    gemms = p.gemms()
    calls: dict[str, Callable[[], Any]] = {"gemms": gemms}
    every: dict[str, int] = {}
    rows: list[Record] = []
    gemms()
    synchronize(p.device)
    started = time.perf_counter()
    gemms()
    synchronize(p.device)
    once = (time.perf_counter() - started) * 1e3
    with within(min(60.0, clock.left() - 8)):
        entries = list(group.entries(p))
    for k, e in enumerate(entries):
        row: Record = {
            "name": e.name, "backend": e.backend, "workspace_mb": e.workspace_mb, "accumulate": e.accumulate,
            "forward": e.forward, "caps": e.caps,
        }  # fmt: skip
        rows.append(row)
        ready = time.monotonic()
        try:
            if clock.left() < 8:
                raise TimeoutError("no time left")
            with within(min(e.limit, clock.left() - 5)):
                call, found = prepare(p, e)
            row |= found
            calls[str(k)] = call
            every[str(k)] = 3 if found["once_ms"] > SLOW * once and p.device.type == "cuda" else 1
        except Exception as error:  # the others are still worth their time
            row["error"] = said(error)
            if e.backend is None and isinstance(error, ImportError):
                row["error"] = "not installed"
            if "no time left" in row["error"]:
                skipped.append(f"{p.shape}, {group.title}: {linear_report.label(row)}")
        row["ready_s"] = time.monotonic() - ready
        print(f"  {linear_report.label(row)}: {row['ready_s']:.1f} s {row.get('error', '')}", flush=True)
        if "error" in row:
            gc.collect()
            if p.device.type == "cuda":
                torch.cuda.empty_cache()
    # A share of what is left, so that no group takes all of it.
    times: Record = interleaved(
        calls, p.device, rounds, every=every, until=time.monotonic() + max(1.0, clock.left() / 3)
    )
    for k, row in enumerate(rows):
        if str(k) in times:
            row |= times[str(k)]
            row["of_gemms"] = row["median_us"] / times["gemms"]["median_us"]
    return {
        "group": group.title, "shape": str(p.shape), "gradients_mib": p.shape.gradient_bytes / MIB,
        "gemms": times["gemms"], "rows": rows, "seconds": time.monotonic() - began,
    }  # fmt: skip


def small(shapes: dict[Shape, tuple[Bar, ...]]) -> dict[Shape, tuple[Bar, ...]]:
    """Tiny shapes, with bars that leave room for as large a part of the tokens at once."""
    out: dict[Shape, tuple[Bar, ...]] = {}
    for s, bars in shapes.items():
        t = Shape(s.tokens // 128, s.hidden // 128, s.vocab // 1024)

        def scaled(bar: Bar, s: Shape = s, t: Shape = t) -> Bar:
            part = (bar.mib * MIB - s.gradient_bytes) / (s.row_bytes * s.tokens)
            room = t.gradient_bytes + 64 * t.tokens + part * t.row_bytes * t.tokens  # losses and factors of rows
            return replace(bar, mib=room / MIB)

        out[t] = tuple(map(scaled, bars))
    return out


def plan(shapes: dict[Shape, tuple[Bar, ...]], backends: tuple[str, ...], skipped: list[str]) -> list[Group]:
    """Groups, the most important first."""
    first = next(iter(shapes))
    return [
        *(Group("bars", s, lambda p, b=b: barred(p, b, backends, skipped)) for s, b in shapes.items()),
        Group("accumulate", first, lambda p: accumulated(p, backends)),
        *(Group("peers", s, others) for s in shapes),
        *(Group("chunks", s, lambda p: curve(p, backends)) for s in shapes),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run all groups."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=Path, default=Path("gpu-out"))
    a.add_argument("--commit", default="not told", help="for the report")
    a.add_argument("--device", default="cuda", help="cuda, or cpu for a trial")
    a.add_argument("--seconds", type=float, default=190, help="for everything but the start of Python")
    a.add_argument("--rounds", type=int, default=12)
    a.add_argument("--backends", default=",".join(BACKENDS), help="of ours")
    a.add_argument("--groups", default="bars,accumulate,peers,chunks", help="which are run")
    a.add_argument("--shapes", type=int, default=len(SHAPES), help="only so many, from the first")
    o = a.parse_args(arguments)
    clock, device = Clock(o.seconds), torch.device(o.device)
    backends, wanted = tuple(o.backends.split(",")), o.groups.split(",")
    if unknown := set(backends) - set(BACKENDS):
        a.error(f"no backend is called {', '.join(sorted(unknown))}; there are {', '.join(BACKENDS)}")
    if device.type == "cpu":
        torch.set_num_threads(1)  # tiny products are slowest when threads wait for each other
    skipped: list[str] = []
    shapes = dict(list((small(SHAPES) if device.type == "cpu" else SHAPES).items())[: max(1, o.shapes)])
    groups = [g for g in plan(shapes, backends, skipped) if g.title in wanted]
    if not groups:
        a.error("nothing to run: --groups names none of bars, accumulate, peers, chunks")
    o.out.mkdir(parents=True, exist_ok=True)
    result: Record = {
        "machine": machine(device, o.commit) | linear_report.versions(), "rounds": o.rounds, "groups": [], "bars": [],
        "not reached": skipped, "trial": device.type == "cpu",
    }  # fmt: skip
    problems: dict[Shape, Problem] = {}
    for g in groups:
        print(f"{g.shape}, {g.title}: {clock.left():.0f} s left", flush=True)
        try:
            if clock.left() < 12 and device.type == "cuda":
                raise TimeoutError("no time left")
            if g.shape not in problems:
                with within(min(40.0, clock.left())):
                    problems[g.shape] = Problem(g.shape, device)
                    _ = problems[g.shape].reference
            result["groups"].append(perform(g, problems[g.shape], clock, o.rounds, skipped))
        except Exception as error:  # the other groups are still worth their time
            skipped.append(f"{g.shape}, {g.title}, all of it: {said(error)}")
            problems.pop(g.shape, None)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        result["bars"] = [
            {"shape": str(s), "mib": b.mib, "limit": b.limit, "backend": backend}
            | linear_report.verdict(result["groups"], str(s), b.mib, b.limit, backend)
            for s, bars in shapes.items()
            for b in bars
            for backend in backends
        ]
        (o.out / "linear-bars.json").write_text(json.dumps(result, indent=1))
        (o.out / "linear-bars.md").write_text(linear_report.page(result))
    if said_of_picture := linear_report.picture(result, o.out / "linear-bars.png"):
        print(said_of_picture)
    print("\n".join(linear_report.summary(result)))
    print(f"{o.seconds - clock.left():.0f} s")
    rows = [r for g in result["groups"] for r in g["rows"] if r["backend"]]
    return int(not rows or any("error" in r and "no time left" not in r["error"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
