"""Time on the host that a call takes before it returns, beside torch, a bare launch and Liger; and how soon a process
that compiles nothing has its first result.

    python benchmarks/host_time.py --out gpu-out --commit HASH

Each op on tensors so small that the device is done before the host: its launch alone, as a plan (outputs allocated,
addresses written, launched), as a function without gradients, with them (forward and backward apart), under
torch.compile, and as the replay of a CUDA graph, on both backends. A sample is the mean over some calls between two
`perf_counter`, begun with the queue of the device empty; ways take turns, in a new order each round. The fastest round
counts, as what holds a host up only adds; the median is told behind it.

The clock of a host's CPU drifts, by up to 1.7 within the rounds of one op. So torch's own rms_norm of one small tensor
takes its turn in the rounds of each op: where it takes longer than where the bars were set, bars are as much higher.

`--device cpu` is a trial on the executors of the CPU, whose times mean nothing: they compute on the host.

Leaves `host-time.json` and `host-time.md` in the folder of --out. Exit code 1 if a call of ours failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_items
import host_start
import torch
from gpu_calls import BACKENDS
from host_items import Call, Item

from kgen.bench.machine import machine
from kgen.bench.timing import within

Record = dict[str, Any]

# The most microseconds that a call may take on the host of an H200, in a phase of its clock where the yardstick takes
# no more than this.
BARS = {"plan": 6.0, "function": 12.0, "forward with gradients": 25.0}
YARDSTICK, YARDSTICK_US = "torch's rms_norm", 11.0
WAYS = ("launch", "plan", "function", "forward with gradients", "backward", "torch.compile", "graph replay")
PEERS = ("eager", "eager with gradients", "eager backward", "Liger", "Liger with gradients", "Liger backward")


def ways(item: Item, backend: str, device: torch.device, compiles: bool) -> dict[str, Callable[[], Call]]:
    """How to make each call of ours."""

    def function() -> Call:
        call = without_grad(lambda: item.ours(*item.inputs, backend=backend))
        call()
        return call

    def compiled() -> Call:
        run = torch.compile(lambda *inputs: item.ours(*inputs, backend=backend), dynamic=False, fullgraph=True)
        call = without_grad(lambda: run(*item.inputs))
        call()
        return call

    out: dict[str, Callable[[], Call]] = {
        "launch": lambda: item.launch(backend),
        "plan": lambda: item.plan(backend),
        "function": function,
        "forward with gradients": lambda: forward(item, lambda *inputs: item.ours(*inputs, backend=backend)),
        "backward": lambda: backward(item, lambda *inputs: item.ours(*inputs, backend=backend)),
    }
    if compiles:
        out["torch.compile"] = compiled
    if device.type == "cuda":
        out["graph replay"] = lambda: replay(without_grad(lambda: item.ours(*item.inputs, backend=backend)))
    return out


def peers(item: Item) -> dict[str, Callable[[], Call]]:
    """How to make the calls beside ours."""

    def plain(make: Callable[[], Callable[..., Any] | None]) -> Call:
        run = _needed(make())
        return without_grad(lambda: run(*item.inputs))

    out: dict[str, Callable[[], Call]] = {}
    for name, make in (("eager", lambda: item.eager), ("Liger", item.liger)):
        out[name] = lambda make=make: plain(make)
        out[f"{name} with gradients"] = lambda make=make: forward(item, _needed(make()))
        out[f"{name} backward"] = lambda make=make: backward(item, _needed(make()))
    return out


def _needed(run: Callable[..., Any] | None) -> Callable[..., Any]:
    if run is None:
        raise ImportError("it has none")
    return run


def without_grad(call: Call) -> Call:
    """`call`, in a grad mode that is off while it is timed as well."""
    call.grad = False  # type: ignore[attr-defined]
    return call


def forward(item: Item, run: Callable[..., Any]) -> Call:
    """The call that records gradients."""
    inputs = item.needing_grad()
    return lambda: run(*inputs)


def backward(item: Item, run: Callable[..., Any]) -> Call:
    """The gradient of every input that has one, by torch.autograd, again and again through one graph."""
    inputs = item.needing_grad()
    results = run(*inputs)
    results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    given = [torch.ones_like(r) for r in results]
    return lambda: torch.autograd.grad(results, wanted, given, retain_graph=True, allow_unused=True)


def replay(call: Call) -> Call:
    """The replay of a CUDA graph that holds the call."""
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()

    def run(_: Any = kept) -> None:
        graph.replay()

    return run


# ---- measuring -----------------------------------------------------------------------------------------------------


def timed(runs: dict[str, Call], device: torch.device, rounds: int, calls: int) -> dict[str, Record]:
    """Median, least and 90th percentile of the time of one call of each of `runs`, in microseconds."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for name in names:
        sample(runs[name], device, calls)
    collected = gc.isenabled()
    gc.disable()
    try:
        for round_ in range(rounds):
            for k in range(len(names)):
                name = names[(k + round_) % len(names)]
                samples[name].append(sample(runs[name], device, calls))
            gc.collect(0)
    finally:
        if collected:
            gc.enable()
    return {
        name: {"us": statistics.median(s), "least_us": min(s), "p90_us": sorted(s)[len(s) * 9 // 10]}
        for name, s in samples.items()
    }


def sample(call: Call, device: torch.device, calls: int) -> float:
    """Microseconds of one call: the mean over `calls` of them, with the queue empty before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with torch.set_grad_enabled(getattr(call, "grad", True)):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls * 1e6


def made(makes: dict[str, Callable[[], Call]], limit: float) -> tuple[dict[str, Call], dict[str, Record]]:
    """The calls that can be made, each called twice, and an error for each that cannot."""
    runs: dict[str, Call] = {}
    errors: dict[str, Record] = {}
    for name, make in makes.items():
        try:
            with within(limit):
                call = make()
                with torch.set_grad_enabled(getattr(call, "grad", True)):
                    call()
                    call()
            runs[name] = call
        except Exception as error:  # the others are still worth their time
            errors[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return runs, errors


def perform(item: Item, device: torch.device, o: argparse.Namespace) -> Record:
    """All times of one op, of its peers and of each backend, in the same rounds."""
    makes: dict[str, Callable[[], Call]] = {}
    for backend in BACKENDS:
        for way, make in ways(item, backend, device, o.compile).items():
            makes[f"{backend}: {way}"] = make
    makes |= peers(item) | {YARDSTICK: lambda: without_grad(host_items.yardstick(device))}
    runs, errors = made(makes, o.limit)
    return timed(runs, device, o.rounds, o.calls) | errors


# ---- the report ----------------------------------------------------------------------------------------------------


def cell(found: Record, most: float | None = None) -> str:
    """A time, of the fastest round and in the median, marked where it is over `most`."""
    if "us" not in found:
        return "-"
    over = " (over)" if most is not None and found["least_us"] > most else ""
    return f"{found['least_us']:.1f} / {found['us']:.1f}{over}"


def most(way: str, found: Record) -> float | None:
    """The most microseconds of `way` in the rounds with the results `found`; None for a way that has no bar."""
    return BARS[way] * max(1.0, found.get(YARDSTICK, {}).get("least_us", 0.0) / YARDSTICK_US) if way in BARS else None


def tables(result: Record) -> list[str]:
    """The report in Markdown."""
    facts, bare, ops = result["machine"], result["bare"], result["ops"]
    lines = ["# Host time of a call", "", "Made by `benchmarks/host_time.py`.", ""]
    lines += [f"- {k}: {v}" for k, v in facts.items()]
    lines += ["", "Microseconds on the host until a call returns: of the fastest round, and the median of all.", ""]
    lines += [
        "Tensors are so small that the device is done before the host. *launch*: addresses and scalars are written",
        "and the driver is called, on outputs that are there. *plan*: that, and outputs are allocated, about 1.2 us",
        "each. *function*: the call of `kgen.ops` without gradients; with them it also keeps what the backward pass",
        "needs. *torch.compile*: the call inside a compiled function. *graph replay*: of a CUDA graph that holds it.",
        "",
        f"The clock of the host drifts: {YARDSTICK} of one small tensor, taken in the rounds of each op, tells",
        "how fast it was. A figure is marked (over) where its fastest round is above the bar times",
        f"max(1, {YARDSTICK} / {YARDSTICK_US:.0f}), as that took {YARDSTICK_US:.0f} us where the bars were set.",
        "",
    ]
    lines += ["| op | backend | " + " | ".join((*WAYS, YARDSTICK)) + " |", "|" + " --- |" * (len(WAYS) + 3)]
    bars = [f"{BARS[w]:.0f}" if w in BARS else "" for w in WAYS]
    lines += ["| bar |  | " + " | ".join((*bars, f"{YARDSTICK_US:.0f}")) + " |"]
    for name, found in ops.items():
        for backend in BACKENDS:
            own = [cell(found.get(f"{backend}: {w}", {}), most(w, found)) for w in WAYS]
            lines.append(f"| {name} | {backend} | " + " | ".join((*own, cell(found.get(YARDSTICK, {})))) + " |")
    lines += ["", "Beside it, in the same rounds:", "", "| op | " + " | ".join(PEERS) + " |"]
    lines += ["|" + " --- |" * (len(PEERS) + 1)]
    lines += [f"| {name} | " + " | ".join(cell(found.get(p, {})) for p in PEERS) + " |" for name, found in ops.items()]
    lines += ["", "A function without gradients as a multiple of eager torch:", ""]
    for name, found in ops.items():
        eager = found.get("eager", {}).get("least_us")
        of = {b: found.get(f"{b}: function", {}).get("least_us") for b in BACKENDS}
        told = ", ".join(f"{b} {us / eager:.2f}x" for b, us in of.items() if us and eager)
        lines.append(f"- {name}: {told or '-'}")
    lines += ["", "Bare:", "", *(f"- {name}: {cell(found)}" for name, found in bare.items())]
    if start := host_start.told(result["start"]):
        lines += ["", *start]
    lines += ["", "## Not timed", ""]
    if not start:
        lines.append("- The first result of a process of its own.")
    failed: dict[str, list[str]] = {}
    for name, found in (*ops.items(), ("bare", bare)):
        for way, r in found.items():
            if "error" in r:
                failed.setdefault(r["error"], []).append(f"{name}, {way}")
    lines += [f"- {'; '.join(which)}: {error}" for error, which in failed.items()]
    lines += [f"- {line}" for line in host_start.failed(result["start"])]
    return lines if lines[-1] else [*lines, "None."]


def main() -> int:
    """Run everything."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=Path, default=Path("gpu-out"))
    a.add_argument("--commit", default="not told", help="for the report")
    a.add_argument("--device", default="cuda", help="cuda, or cpu for a trial")
    a.add_argument("--rounds", type=int, default=50)
    a.add_argument("--calls", type=int, default=100, help="in one sample")
    a.add_argument("--only", default="", help="ops, separated by commas")
    a.add_argument("--rows", type=int, default=64)
    a.add_argument("--width", type=int, default=256)
    a.add_argument("--limit", type=float, default=60, help="seconds in which a call must be ready")
    a.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    a.add_argument("--no-start", dest="start", action="store_false", help="leave the second process out")
    o = a.parse_args()
    began, device = time.time(), torch.device(o.device)
    o.out.mkdir(parents=True, exist_ok=True)
    result: Record = {"machine": machine(device, o.commit), "rounds": o.rounds, "calls": o.calls, "ops": {}}
    x = torch.zeros(o.rows, o.width, dtype=torch.bfloat16, device=device)
    makes = {
        "torch.empty_like": lambda: host_items.empty(x),
        YARDSTICK: lambda: without_grad(host_items.yardstick(device)),
    }
    if device.type == "cuda":
        makes |= {
            "Triton kernel": lambda: host_items.bare_triton(x),
            "CuPy RawKernel": lambda: host_items.bare_cupy(x),
        }
    runs, errors = made(makes, o.limit)
    result["bare"] = timed(runs, device, o.rounds, o.calls) | errors
    result["start"] = {}

    def keep() -> None:
        (o.out / "host-time.json").write_text(json.dumps(result, indent=1))
        (o.out / "host-time.md").write_text("\n".join(tables(result)) + "\n")

    for item in host_items.items(device, o.rows, o.width):
        if o.only and item.name not in o.only.split(","):
            continue
        result["ops"][item.name] = perform(item, device, o)
        print(f"{item.name}: {time.time() - began:.0f} s", flush=True)
        keep()  # as far as it came, where time runs out
        torch.compiler.reset()
    if o.start:  # last, as it takes longest
        result["start"] = host_start.measure(device, BACKENDS)
        keep()
    print("\n".join(tables(result)))
    ours = [r for found in result["ops"].values() for way, r in found.items() if ":" in way]
    return int(any("error" in r for r in ours) or bool(host_start.failed(result["start"])))


if __name__ == "__main__":
    sys.exit(main())
