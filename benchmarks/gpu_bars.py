"""Time the shipped kernels on a GPU beside a copy of the same bytes, torch and Liger.

    python benchmarks/gpu_bars.py --out gpu-out --commit HASH

Forward and derived backward of RMSNorm, cross entropy in place, SwiGLU and softmax, in bf16, on both backends. A result
counts as a ratio to `torch.Tensor.copy_` of as many bytes in the same interleaved rounds. Results are held against
float64 before they are timed. A call is timed by CUDA events behind a write of 1 GiB, which clears the L2 cache and
lasts longer than the host needs to launch. `--device cpu` runs tiny sizes, to try the script.

Leaves `gpu-bars.json` and `gpu-bars.md` in the folder of --out. Exit code 1 if a kernel of ours failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "TORCHINDUCTOR_COMPILE_THREADS", "1"
)  # one kernel at a time: a pool of workers starts slower; read by torch

import gpu_check
import torch
import torch._functorch.config as functorch_config
from bar_items import ITEMS, Call, Item
from timing import interleaved, within

Record = dict[str, Any]


def ready(item: Item, backend: str) -> Call:
    """The call on one backend, compiled and right. Raises ValueError for a wrong result."""
    call = item.ours(backend)
    item.reset()
    for output in item.outputs:
        output.fill_(float("nan"))
    for got, ref, bound in item.expected(call()):
        off = (got.double() - ref).abs()
        if not bool((off <= bound).all()):  # NaN is no answer either
            raise ValueError(f"wrong: off by up to {float((off / bound).max()):.3g} times the bound")
    return call


def measure(runs: dict[str, Call], item: Item, device: torch.device, rounds: int) -> dict[str, Record]:
    """Times of `runs`, each also as a multiple of the copy's."""
    out: dict[str, Record] = {**interleaved(runs, device, rounds, reset=item.reset)}
    for record in out.values():
        record["of_copy"] = record["median_us"] / out["copy"]["median_us"]
    return out


def perform(item: Item, device: torch.device, rounds: int, compile_s: float) -> dict[str, Record]:
    """All that can be timed of one item; an error for each that cannot."""
    source = torch.zeros(item.bytes // 4, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    errors: dict[str, Record] = {}
    took: dict[str, float] = {}
    ways = {b: (lambda b=b: ready(item, b), 30.0) for b in gpu_check.BACKENDS} | {
        "eager": (item.eager, 10.0), "torch.compile": (item.compiled, compile_s), "Liger": (item.liger, 10.0),
    }  # fmt: skip
    for name, (make, limit) in ways.items():
        began = time.time()
        try:
            with within(limit):
                call = make()
                call()
                call()  # some fail only when repeated
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            runs[name] = call
        except Exception as error:  # the others are still worth their time
            errors[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
        took[name] = time.time() - began
        print(f"  {name}: ready in {took[name]:.1f} s {errors.get(name, '')}", flush=True)
    results = measure(runs, item, device, rounds) | errors
    for name, seconds in took.items():
        results[name]["ready_s"] = seconds
    return results


COLUMNS = ("copy", *gpu_check.BACKENDS, "eager", "torch.compile", "Liger")
HEAD = ["", "bytes", "bar", *COLUMNS]


def table(items: list[Record]) -> list[list[str]]:
    """A line for each item: microseconds, and how many times the copy that is."""
    rows = []
    for item in items:
        cells = []
        for name in COLUMNS:
            r = item["results"].get(name, {})
            cells.append(f"{r['median_us']:.1f} ({r['of_copy']:.2f}x)" if "median_us" in r else "-")
        bar = f"{item['bar']}x" if item["bar"] else ""
        rows.append([f"{item['name']} {item['rows']}x{item['width']}", item["moves"], bar, *cells])
    return rows


def report(facts: Record, items: list[Record], folder: Path, rounds: int) -> None:
    """Write both files."""
    (folder / "gpu-bars.json").write_text(json.dumps({"machine": facts, "rounds": rounds, "items": items}, indent=1))
    lines = [
        "# Times on a GPU",
        "",
        "Made by `benchmarks/gpu_bars.py`.",
        "",
        *(f"- {k}: {v}" for k, v in facts.items()),
    ]
    lines += [
        "", f"bf16; device time in microseconds, median of {rounds} interleaved rounds, L2 cleared before each call; "
        "in brackets the time as a multiple of `torch.Tensor.copy_` of the same bytes. Our results were held against "
        "float64 first. RMSNorm backward is the derived kernel.", "",
        "| " + " | ".join(HEAD) + " |", "| " + " | ".join("---" for _ in HEAD) + " |",
    ]  # fmt: skip
    lines += ["| " + " | ".join(row) + " |" for row in table(items)]
    failed = [
        f"- {i['name']} {i['rows']}x{i['width']}, {name}: {r['error']}"
        for i in items
        for name, r in i["results"].items()
        if "error" in r
    ]
    (folder / "gpu-bars.md").write_text("\n".join([*lines, "", "## Not timed", "", *(failed or ["None."])]) + "\n")


def main() -> int:
    """Run all items."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=Path, default=Path("gpu-out"))
    a.add_argument("--commit", default="not told", help="for the report")
    a.add_argument("--device", default="cuda", help="cuda, or cpu for a trial")
    a.add_argument("--rounds", type=int, default=60)
    a.add_argument("--seconds", type=float, default=60, help="no item is begun after it")
    a.add_argument("--compile-seconds", type=float, default=35, help="for all of torch.compile; 0 leaves it out")
    o = a.parse_args()
    began, compile_left = time.time(), o.compile_seconds
    device = torch.device(o.device)
    small = device.type == "cpu"
    o.out.mkdir(parents=True, exist_ok=True)
    functorch_config.donated_buffer = False  # which forbids a second backward through the same graph
    facts, items = gpu_check.machine(device, o.commit), []
    for name, moves, m, n, bar, make in ITEMS:
        if small:
            m, n = m // 1024, n // 256
        record: Record = {"name": name, "moves": moves, "rows": m, "width": n, "bar": bar, "results": {}}
        items.append(record)
        left = o.seconds - (time.time() - began)
        print(f"{name} {m}x{n}, {left:.0f} s left", flush=True)
        try:
            if left < 0:
                raise TimeoutError("no time left")
            item = make(m, n, torch.Generator(device).manual_seed(0))
            limit = min(20.0, compile_left, left - 10)
            record["results"] = perform(item, device, o.rounds, limit)
            compile_left -= record["results"]["torch.compile"]["ready_s"]
            del item
        except Exception as error:  # the other items are still worth their time
            record["results"] = {b: {"error": f"{type(error).__name__}: {error}"[:600]} for b in gpu_check.BACKENDS}
        record["seconds"] = time.time() - began
        gc.collect()
        if not small:
            torch.cuda.empty_cache()
        report(facts, items, o.out, o.rounds)
    text = table(items)
    sizes = [max(map(len, column)) for column in zip(HEAD, *text, strict=True)]
    for row in (HEAD, *text):
        print("  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)))
    print(f"{time.time() - began:.0f} s")
    return int(any("error" in i["results"].get(b, {}) for i in items for b in gpu_check.BACKENDS))


if __name__ == "__main__":
    sys.exit(main())
