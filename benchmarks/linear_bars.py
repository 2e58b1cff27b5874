"""Time and memory of the fused linear cross entropy on a GPU, beside its three matrix products and what others have.

    python benchmarks/linear_bars.py --out gpu-out --commit HASH --seconds 190

`kgen.ops.linear_cross_entropy` in bf16, mean, both gradients, on both backends: by default, at the largest chunks whose
measured peak stays within given MiB, over a range of chunks, with each way to accumulate, and the forward pass alone.
A result counts as a multiple of three `torch.mm` of the same operands in the same interleaved rounds, at its peak of
memory above the inputs, gradients counted. Every result of ours is held against float64 first, under bounds derived in
`kgen.bench.linear_problem`. Peers: eager torch, torch.compile of it; Liger, QuACK, cut-cross-entropy where installed.

What decides about bars comes first; what the time does not suffice for is listed. `--device cpu` runs tiny sizes.

Leaves `linear-bars.json`, `linear-bars.md` and, with matplotlib, `linear-bars.png` in the folder of --out. Exit code 1
if a call of ours failed or was wrong; a missed bar is a line of the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of workers starts slower; read by torch

import linear_report
import torch

from kgen.bench.linear import SHAPES, SLOW, Bar, Entry, budget, ours, peers, prepare, settings, small
from kgen.bench.linear_problem import MIB, Problem, Shape
from kgen.bench.machine import machine
from kgen.bench.measure import said, synchronize
from kgen.bench.peers import versions
from kgen.bench.timing import interleaved, within
from kgen.bench.work import BACKENDS

CURVE = (1, 2, 4, 8, 16, 32)  # into how many chunks the tokens are divided in the picture
Record = dict[str, Any]


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


# ---- rows of the groups --------------------------------------------------------------------------------------------


def barred(p: Problem, bars: tuple[Bar, ...], backends: tuple[str, ...], skipped: list[str]) -> Iterator[Entry]:
    """The default, the settings that bars ask for, and Liger, which one of them is about."""
    for key, caps in settings(p, bars, backends, skipped).items():
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


def others(p: Problem) -> Iterator[Entry]:
    """Those that no bar is about."""
    return (e for e in peers(p) if e.name != "Liger")


# ---- rounds --------------------------------------------------------------------------------------------------------


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
        "machine": machine(device, o.commit) | versions(), "rounds": o.rounds, "groups": [], "bars": [],
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
