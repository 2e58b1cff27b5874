"""Hold every kernel on a GPU against float64, forwards and gradients.

    python benchmarks/gpu_check.py --seconds 400 --out gpu-out --commit HASH

Every packaged kernel and every case of tests/unplanned_cases.py, on the CUDA and the Triton backend, over dtypes,
widths, row counts, layouts and kinds of values, under the derived bound of `kgen.codegen.tolerance`. Outputs are full
of NaN beforehand; what surrounds inputs and outputs must not change; two more calls must give the same bits. Gradients
of every kernel that has one, over the same and over layouts of what comes in (`gpu_calls.py`). Kernels and directions
share the time. Worker processes compile and run independently; one that a kernel takes down is replaced, and the kernel
is named. Before that RMSNorm is timed beside a copy of the same bytes.

    python benchmarks/gpu_check.py --device cpu --seconds 60 --widths 7,33 --rows 0,1,5 --only 'rms_norm;swiglu'

runs the same on the CPU, on the host executor and Triton's interpreter. `--inject term` breaks the generated code,
which must be found.

Leaves `gpu-results.json` and `gpu-results.md` in the folder of --out. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import gpu_cases as cases
import torch
from gpu_calls import BACKENDS, Options, Record
from gpu_pool import Pool
from gpu_report import HEAD, failures, listed, not_reached, page, table

from kgen.bench.machine import machine
from kgen.runtime.differential import answer, ask
from kgen.runtime.injection import MUTATIONS


def timing(device: torch.device, m: int = 16384, n: int = 4096, rounds: int = 100) -> Record:
    """RMSNorm forward, bf16, beside a copy of the same bytes: medians in microseconds over interleaved rounds.

    Three sets of buffers are rotated, so that no input is in the L2 cache. The results are checked first.
    """
    kernel = cases.targets()[0].load()
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


def main() -> int:
    """Run the check."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--seconds", type=float, default=400, help="time for the checks, timing and starting apart")
    a.add_argument("--out", type=Path, default=Path("gpu-out"))
    a.add_argument("--commit", default="not told", help="for the report")
    a.add_argument("--device", default="cuda", help="cuda or cpu")
    a.add_argument("--workers", type=int, default=0, help="processes; 0 takes as many as there are cores, less two")
    a.add_argument("--widths", help="for example 1,7,64; default: all")
    a.add_argument("--rows", help="for example 0,1,133; default: all")
    a.add_argument("--only", help="names of targets, separated by ;")
    a.add_argument("--direction", choices=cases.DIRECTIONS, help="default: both")
    a.add_argument("--inject", choices=MUTATIONS, help="break the generated code on purpose")
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--patience", type=float, default=120, help="seconds after which a task is given up")
    a.add_argument("--no-timing", action="store_true")
    o = a.parse_args()
    device = torch.device(o.device)
    directions = (o.direction,) if o.direction else cases.DIRECTIONS
    given = tuple(map(int, o.widths.split(","))) if o.widths else None
    widths = {d: given or cases.WIDTHS[d] for d in directions}
    rows: dict[str, tuple[int, ...]] = (
        dict.fromkeys(cases.DIRECTIONS, tuple(map(int, o.rows.split(",")))) if o.rows else dict(cases.ROWS)
    )
    found = cases.targets()
    if unknown := set(o.only.split(";") if o.only else ()) - {t.name for t in found}:
        a.error(f"no target is called {', '.join(sorted(unknown))}; there are {'; '.join(t.name for t in found)}")
    names = set(o.only.split(";")) if o.only else {t.name for t in found}
    queue = cases.tasks(found, names, widths, o.seed)
    if not queue:
        a.error("nothing to run: no target has these widths and directions")
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
    limit = cases.MAX_ELEMENTS if device.type == "cuda" else cases.CPU_MAX_ELEMENTS
    pool = Pool(min(workers, len(queue)), devices, Options(limit, rows, o.seed), o.inject)
    try:
        records, begun = pool.run(queue, found, o.seconds, o.patience)
    finally:
        pool.close()
    seconds = time.time() - began
    (o.out / "gpu-results.md").write_text(page(facts, records, queue, begun, timed, seconds, limit))
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
    for what in not_reached(records, queue, found):
        print(f"not one call was right: {what}")
    count = Counter(r["status"] for r in records)
    print(f"{begun} of {len(queue)} tasks in {seconds:.0f} s: {dict(count)}")
    return 1 if failures(records) else 0


if __name__ == "__main__":
    sys.exit(main())
