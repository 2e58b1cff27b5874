"""Time the cross entropy of a linear layer, forward and backward, beside its three matrix products, and its memory.

    python benchmarks/linear_loss_bars.py --out gpu-out

A result is the median of interleaved rounds as a ratio to three `torch.mm` of the same shapes in bf16: logits, gradient
of x, gradient of the weight. Memory is the peak above the arguments. `--device cpu` runs tiny sizes, to try the script.
Leaves `linear-loss-bars.json` in the folder of --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kgen import ops

MIB = 2**20


@dataclass
class Setting:
    """Tokens, width, classes; options of the call; what is aimed at: a ratio of times and MiB above the arguments."""

    tokens: int
    width: int
    classes: int
    workspace_mb: float
    accumulate: str = "auto"
    ratio: float | None = None
    memory_mb: float | None = None


SETTINGS = (
    Setting(8192, 4096, 128256, 512, ratio=1.08, memory_mb=1600),
    Setting(8192, 4096, 128256, 272, ratio=1.13, memory_mb=1350),
    Setting(8192, 4096, 128256, 62, "param", memory_mb=1130),
    Setting(8192, 4096, 128256, 512, "f32"),
    Setting(4096, 4096, 128256, 512),
    Setting(16384, 2048, 32000, 126, ratio=1.12, memory_mb=320),
    Setting(16384, 2048, 32000, 512),
)
TINY = (Setting(64, 16, 100, 0.01), Setting(64, 16, 100, 0.001, "param"))


def timed(runs: dict[str, Callable[[], Any]], rounds: int, cuda: bool) -> dict[str, float]:
    """Median milliseconds of each of `runs`, over interleaved rounds."""
    spans: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        run()
        if cuda:
            torch.cuda.synchronize()
        spans[name].clear()
    for _ in range(rounds):
        for name, run in runs.items():
            if not cuda:
                run()
                spans[name].append(1.0)
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            spans[name].append(start.elapsed_time(end))
    return {name: statistics.median(s) for name, s in spans.items()}


def measure(s: Setting, device: str, backend: str, rounds: int) -> dict[str, Any]:
    """Time and memory of one setting."""
    cuda = device == "cuda"
    g = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=g)

    x, w = randn(s.tokens, s.width).requires_grad_(), (randn(s.classes, s.width) / s.width**0.5).requires_grad_()
    target = torch.randint(0, s.classes, (s.tokens,), device=device, generator=g)

    def step() -> None:
        x.grad = w.grad = None
        ops.linear_cross_entropy(
            x, w, target, backend=backend, workspace_mb=s.workspace_mb, accumulate=s.accumulate
        ).backward()

    step()
    used = 0.0
    if cuda:
        x.grad = w.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        used = (torch.cuda.max_memory_allocated() - before) / MIB
    x.grad = w.grad = None
    logits = torch.empty(s.tokens, s.classes, device=device, dtype=torch.bfloat16)
    a, b = x.detach(), w.detach()
    dx, dw = torch.empty_like(a), torch.empty_like(b)

    def products() -> None:
        torch.mm(a, b.T, out=logits)
        torch.mm(logits, b, out=dx)
        torch.mm(logits.T, a, out=dw)

    times = timed({"ours": step, "products": products}, rounds, cuda)
    ratio = times["ours"] / times["products"]
    return {"setting": asdict(s), "backend": backend, "ms": times, "ratio": ratio, "peak_mib": used}


def main() -> None:
    """Measure every setting and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-out"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="cuda,triton")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    found = []
    for s in SETTINGS if args.device == "cuda" else TINY:
        for backend in args.backend.split(","):
            one = measure(s, args.device, backend, args.rounds)
            found.append(one)
            aim = f" (aim {s.ratio})" if s.ratio else ""
            limit = f" (aim {s.memory_mb:.0f})" if s.memory_mb else ""
            print(
                f"{s.tokens}x{s.width}x{s.classes} {backend:6} {s.accumulate:5} workspace {s.workspace_mb:g} MiB: "
                f"{one['ms']['ours']:.2f} ms, {one['ratio']:.3f}x of the products{aim}, "
                f"{one['peak_mib']:.0f} MiB{limit}",
                flush=True,
            )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "linear-loss-bars.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
