"""Hold every kernel on a GPU against float64.

    python benchmarks/gpu_check.py --seconds 480 --out gpu-out --commit HASH

Every packaged kernel and every case of tests/unplanned_cases.py, on the CUDA and the Triton backend, over dtypes,
widths, row counts, layouts and kinds of values, under the derived bound of `kgen.codegen.tolerance`. Outputs are full
of NaN beforehand; what surrounds inputs and outputs must not change; a second call must give the same bits. Worker
processes compile and run independently; one that a kernel takes down is replaced, and the kernel is named. Before that
RMSNorm is timed beside a copy of the same bytes.

Leaves `gpu-results.json` and `gpu-results.md` in the folder of --out. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import gpu_cases as cases
import torch

from kgen.runtime.differential import answer, ask, guilty

BACKENDS = ("cuda", "triton")
Record = dict[str, Any]


# ---- workers -------------------------------------------------------------------------------------------------------


def work(pipe: Connection, device_name: str, limit: int, rows: tuple[int, ...], seed: int, big: Any) -> None:
    """Answer tasks with records until told None. A CUDA error that leaves the process unusable ends it."""
    torch.set_num_threads(1)
    device = torch.device(device_name)
    found = cases.targets()
    while (task := pipe.recv()) is not None:
        for record in perform(found[task.target], task, device, limit, rows, seed, big):
            pipe.send(record)
            if record["status"] != "refused" and "CUDA" in record.get(
                "message", ""
            ):  # as torch, CuPy and Triton name it
                pipe.send("broken")
                os._exit(1)
        pipe.send("done")


def perform(
    target: cases.Target, task: cases.Task, device: torch.device, limit: int, rows: tuple[int, ...], seed: int, big: Any
) -> Iterable[Record]:
    """All calls of one task on both backends."""
    base = {"target": target.name, "dtype": task.dtype, "width": task.width, "layout": task.layout}
    kernel = target.load()
    for m, values, fits in cases.calls(target, task, limit, rows):
        record = base | {"rows": m, "values": values}
        if not fits:
            yield record | {"status": "skipped", "backend": "both"}
            continue
        large = m * task.width > 1 << 24
        if large:
            big.acquire()  # a few large references fill the memory
        try:
            given = cases.arguments(target, task, m, values, device, seed)
            question = ask(kernel, given, task.layout, max_elements=1 << (24 if device.type == "cuda" else 20))
            answers = {}
            for backend in BACKENDS:
                began = time.perf_counter()
                answers[backend] = got = answer(question, backend, repeat=m == 97 and values == "normal")
                yield record | {
                    "backend": backend, "status": got.status, "ratio": got.ratio, "message": got.message[:600],
                    "free": got.free, "total": got.total, "seconds": time.perf_counter() - began,
                }  # fmt: skip
            if blame := guilty(answers):
                yield record | {"backend": "both", "status": "blame", "message": ", ".join(blame)}
        except Exception as error:  # the check itself failed: said in the report, and the next call goes on
            yield record | {
                "backend": "both",
                "status": "check failed",
                "message": f"{type(error).__name__}: {error}"[:600],
            }
        finally:
            if large:
                big.release()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


class Pool:
    """Worker processes, each with one task at a time."""

    def __init__(self, count: int, devices: list[str], arguments: tuple[Any, ...]) -> None:
        self.context = mp.get_context("spawn")
        self.devices = itertools.cycle(devices)
        self.arguments = (*arguments, self.context.Semaphore(2 * len(devices)))
        self.workers: dict[Connection, Any] = {}
        self.busy: dict[Connection, tuple[cases.Task, float]] = {}
        for _ in range(count):
            self.start()

    def start(self) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(theirs, next(self.devices), *self.arguments), daemon=True)
        process.start()
        theirs.close()
        self.workers[ours] = process

    def drop(self, pipe: Connection) -> None:
        process = self.workers.pop(pipe)
        self.busy.pop(pipe, None)
        process.kill()
        process.join()
        pipe.close()

    def run(self, queue: list[cases.Task], until: float, patience: float) -> tuple[list[Record], int]:
        """Records, and how many tasks were begun. None is begun after `until`."""
        records: list[Record] = []
        begun, told = 0, time.time()
        found = cases.targets()
        while True:
            for pipe in list(self.workers):
                if pipe not in self.busy and begun < len(queue) and time.time() < until:
                    pipe.send(queue[begun])
                    self.busy[pipe] = (queue[begun], time.time())
                    begun += 1
            if not self.busy or time.time() > until + patience:
                return records, begun
            for pipe in wait(list(self.busy), timeout=1.0):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    message = "broken"
                if message == "done":
                    del self.busy[pipe]
                elif message == "broken":
                    self.lost(pipe, records, found, "the process ended")
                else:
                    records.append(message)
            for pipe, (_, since) in list(self.busy.items()):
                if time.time() - since > patience:
                    self.lost(pipe, records, found, f"no end after {patience:.0f} s")
            if time.time() - told > 30:
                told = time.time()
                count = Counter(r["status"] for r in records)
                print(f"{begun} of {len(queue)} tasks begun; {dict(count)}", flush=True)

    def lost(self, pipe: Connection, records: list[Record], found: list[cases.Target], why: str) -> None:
        task = self.busy[pipe][0]
        records.append({
            "target": found[task.target].name, "dtype": task.dtype, "width": task.width, "layout": task.layout,
            "rows": -1, "values": "", "backend": "both", "status": "crashed", "message": why,
        })  # fmt: skip
        self.drop(pipe)
        self.start()

    def close(self) -> None:
        for pipe in list(self.workers):
            self.drop(pipe)


# ---- timing --------------------------------------------------------------------------------------------------------


def timing(device: torch.device, m: int = 16384, n: int = 4096, rounds: int = 100) -> Record:
    """RMSNorm forward, bf16, beside a copy of the same bytes: medians in microseconds over interleaved rounds.

    Three sets of buffers are rotated, so that no input is in the L2 cache. The results are checked first.
    """
    kernel = cases._load("ops/rms_norm.kdsl")["rms_norm"]
    g = torch.Generator(device).manual_seed(0)
    xs = [torch.randn(m, n, generator=g, device=device, dtype=torch.bfloat16) for _ in range(3)]
    w = torch.randn(n, generator=g, device=device, dtype=torch.bfloat16)
    ys = [torch.empty_like(x) for x in xs]
    question = ask(kernel, {"x": xs[0], "w": w})
    runs: dict[str, Any] = {"copy": lambda i: ys[i].copy_(xs[i])}
    out: Record = {"rows": m, "width": n, "dtype": "bf16", "rounds": rounds, "bytes": 2 * xs[0].numel() * 2}
    for backend in BACKENDS:
        got = answer(question, backend)
        if got.status != "ok":
            out[backend] = {"error": got.message}
            continue
        runs[backend] = lambda i, b=backend: kernel(xs[i], w, backend=b, out=ys[i])
    torch.cuda.synchronize(device)
    for name in runs:
        for i in range(6):
            runs[name](i % 3)
    torch.cuda.synchronize(device)
    events: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    names = list(runs)
    for round_ in range(rounds):
        for k in range(len(names)):  # a new order each round, so that none profits from what ran before it
            name = names[(k + round_) % len(names)]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            runs[name]((round_ + k) % 3)
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize(device)
    for name, pairs in events.items():
        times = sorted(a.elapsed_time(b) * 1e3 for a, b in pairs)
        median = statistics.median(times)
        out[name] = {
            "median_us": median, "p10_us": times[len(times) // 10], "p90_us": times[len(times) * 9 // 10],
            "GB_per_s": out["bytes"] / median / 1e3,
        }  # fmt: skip
    for backend in BACKENDS:
        if "median_us" in out.get(backend, {}):
            out[backend]["of_copy"] = out["copy"]["median_us"] / out[backend]["median_us"]
    return out


# ---- report --------------------------------------------------------------------------------------------------------


def machine(device: torch.device, commit: str) -> Record:
    """What this ran on."""
    facts: Record = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("triton", "cupy"):
        try:
            facts[name] = __import__(name).__version__
        except ImportError:
            facts[name] = "not installed"
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        from cupy_backends.cuda.api import runtime  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        from cupy_backends.cuda.libs import nvrtc

        facts["driver (CUDA)"] = runtime.driverGetVersion()
        facts["NVRTC"] = ".".join(map(str, nvrtc.getVersion()))
        try:
            facts["driver"] = Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
        except OSError:
            facts["driver"] = "not told"
    else:
        facts["device"] = "CPU: host executor and Triton interpreter"
    return facts


def table(records: list[Record]) -> list[list[str]]:
    """One line for each target and backend: calls, worst ratio, what went wrong."""
    rows = []
    by: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        if r["backend"] in BACKENDS:
            by[r["target"], r["backend"]].append(r)
    for (target, backend), each in by.items():
        count = Counter(r["status"] for r in each)
        good = [r for r in each if r["status"] == "ok"]
        worst = max((r["ratio"] for r in good), default=0.0)
        free = sum(r["free"] for r in good) / max(1, sum(r["total"] for r in good))
        rows.append([
            target, backend, str(count["ok"]), str(count["wrong"]), str(count["crashed"]), str(count["refused"]),
            f"{worst:.3f}", f"{free:.1%}",
        ])  # fmt: skip
    return rows


HEAD = ["kernel", "backend", "ok", "wrong", "crashed", "refused", "worst error / bound", "free"]


def failures(records: list[Record]) -> list[Record]:
    """What must not be: wrong values, crashes, and checks that could not be made."""
    return [r for r in records if r["status"] in ("wrong", "crashed", "check failed")]


def listed(records: list[Record], most: int) -> list[str]:
    """Failures, those of one kernel, backend and kind together with the first of them in full."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for r in failures(records):
        groups[r["target"], r["backend"], r["status"], r["dtype"]].append(r)
    lines = []
    for (target, backend, status, dtype), each in groups.items():
        r = each[0]
        widths = ", ".join(map(str, sorted({e["width"] for e in each})[:12]))
        layouts = ", ".join(sorted({e["layout"] for e in each}))
        lines.append(
            f"{target}, {backend}, {dtype}: {len(each)} {status} at widths {widths} ({layouts}); first [{r['rows']}, "
            f"{r['width']}] {r['layout']} {r['values']}: {r['message']}"
        )
    return lines[:most]


def page(facts: Record, records: list[Record], begun: int, total: int, timed: Record | None, seconds: float) -> str:
    """The report in Markdown."""
    lines = ["# Results on a GPU", "", "Made by `benchmarks/gpu_check.py`.", ""]
    lines += [f"- {k}: {v}" for k, v in facts.items()]
    count = Counter(r["status"] for r in records if r["backend"] in BACKENDS)
    lines += [
        "", "## What ran", "",
        f"{begun} of {total} combinations of kernel, dtype, width and layout in {seconds:.0f} s, each with rows "
        f"{', '.join(map(str, sorted({r['rows'] for r in records if r['rows'] >= 0})))}; with 97 rows also NaN and "
        f"infinities, large values and zeros, and a second call that must give the same bits. "
        f"{sum(count.values())} calls: {', '.join(f'{v} {k}' for k, v in count.items())}.",
        "", f"Widths: {', '.join(str(w) for w in sorted({r['width'] for r in records}))}.",
        f"Layouts: {', '.join(sorted({r['layout'] for r in records}))}.",
        f"Dtypes: {', '.join(sorted({r['dtype'] for r in records}))}.",
        "", "`worst error / bound` is of the calls that passed: a 16-bit output that rounds to nearest reaches 1. "
        "`free` elements "
        "have no bound (an overflow or a NaN on the way). A refusal is a KgenError that says what cannot be done.",
        "", "| " + " | ".join(HEAD) + " |", "| " + " | ".join("---" for _ in HEAD) + " |",
    ]  # fmt: skip
    lines += ["| " + " | ".join(row) + " |" for row in table(records)]
    skipped = Counter((r["target"], r["rows"]) for r in records if r["status"] == "skipped")
    lines += ["", "## What was skipped", "", f"- {total - begun} combinations for lack of time."]
    lines += [
        f"- {t}: {n} calls of {rows} rows, which pass the limit of elements."
        for (t, rows), n in sorted(skipped.items())
    ]
    refused = Counter((r["target"], r["backend"], r["message"][:200]) for r in records if r["status"] == "refused")
    lines += ["", "## Refused", ""] + [f"- {t}, {b} ({n}): {m}" for (t, b, m), n in sorted(refused.items())]
    bad = [f"- {line}" for line in listed(records, 200)]
    lines += ["", "## Wrong", "", *(bad or ["None."])]
    if timed:
        lines += ["", "## RMSNorm beside a copy", ""]
        lines += [
            f"{timed['rows']} x {timed['width']} {timed['dtype']}, forward; {timed['bytes'] / 1e6:.0f} MB move; "
            f"{timed['rounds']} "
            "interleaved rounds, buffers rotated, device time of one launch by events.",
            "", "| | median, us | p10 | p90 | GB/s | speed of the copy reached |",
            "| --- | --- | --- | --- | --- | --- |",
        ]  # fmt: skip
        for name in ("copy", *BACKENDS):
            t = timed.get(name, {})
            if "median_us" in t:
                reached = f"{t['of_copy']:.1%}" if "of_copy" in t else ""
                lines.append(
                    f"| {name} | {t['median_us']:.1f} | {t['p10_us']:.1f} | {t['p90_us']:.1f} "
                    f"| {t['GB_per_s']:.0f} | {reached} |"
                )
            else:
                lines.append(f"| {name} | {t.get('error', 'not run')} | | | | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the check."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--seconds", type=float, default=480, help="time for the checks, timing and starting apart")
    a.add_argument("--out", type=Path, default=Path("gpu-out"))
    a.add_argument("--commit", default="not told", help="for the report")
    a.add_argument("--device", default="cuda", help="cuda or cpu")
    a.add_argument("--workers", type=int, default=0, help="processes; 0 takes as many as there are cores, less two")
    a.add_argument("--widths", help="for example 1,7,64; default: all")
    a.add_argument("--rows", help="default: all")
    a.add_argument("--only", help="names of targets, separated by ;")
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--patience", type=float, default=120, help="seconds after which a task is given up")
    a.add_argument("--no-timing", action="store_true")
    o = a.parse_args()
    device = torch.device(o.device)
    widths = tuple(map(int, o.widths.split(","))) if o.widths else cases.WIDTHS
    rows = tuple(map(int, o.rows.split(","))) if o.rows else cases.ROWS
    found = cases.targets()
    queue = cases.tasks(found, widths, o.seed)
    if o.only:
        queue = [t for t in queue if found[t.target].name in o.only.split(";")]
    o.out.mkdir(parents=True, exist_ok=True)
    facts = machine(device, o.commit)
    timed = None
    if device.type == "cuda" and not o.no_timing:
        try:
            timed = timing(device)
            print(json.dumps(timed, indent=1), flush=True)
        except Exception as error:  # the checks are worth more than the timing
            print(f"timing failed: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()
    workers = o.workers or max(1, (os.cpu_count() or 2) - 2)
    began = time.time()
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if o.device == "cuda" else [o.device]
    pool = Pool(min(workers, len(queue)), devices, (cases.MAX_ELEMENTS, rows, o.seed))
    try:
        records, begun = pool.run(queue, began + o.seconds, o.patience)
    finally:
        pool.close()
    seconds = time.time() - began
    (o.out / "gpu-results.md").write_text(page(facts, records, begun, len(queue), timed, seconds))
    kept = [r for r in records if r["status"] not in ("ok", "skipped")]
    summary = [dict(zip(HEAD, row, strict=True)) for row in table(records)]
    (o.out / "gpu-results.json").write_text(
        json.dumps({"machine": facts, "summary": summary, "not ok": kept[:5000], "timing": timed}, indent=1)
    )
    for line in listed(records, 40):
        print(line[:400])
    sizes = [max(map(len, column)) for column in zip(HEAD, *table(records), strict=True)]
    for row in (HEAD, *table(records)):
        print("  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)))
    count = Counter(r["status"] for r in records)
    print(f"{begun} of {len(queue)} tasks in {seconds:.0f} s: {dict(count)}")
    return 1 if failures(records) else 0


if __name__ == "__main__":
    sys.exit(main())
