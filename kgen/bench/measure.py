"""Times of one case: every call made ready, ours held against float64, then all of them in the same rounds."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kgen.bench.peers import COMPILED, PEERS, NotInstalled
from kgen.bench.timing import interleaved, within
from kgen.bench.work import BACKENDS, PEER_ERROR, Call, Make, Run, Shape, Work, relative_error, worst

Record = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How to measure: on what, how often, which backends and peers, and how long a call may take to be ready."""

    device: torch.device
    rounds: int = 60
    backends: tuple[str, ...] = BACKENDS
    peers: tuple[str, ...] = PEERS
    ready_s: float = 30.0
    compile_s: float = 40.0


def said(error: BaseException) -> str:
    """On one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what is not in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """The most bytes of the GPU that a call takes at a time; None elsewhere."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def ready(work: Work, make: Callable[[], Run], device: torch.device, own: bool) -> tuple[Run, Record]:
    """A run that works and is right, and what was found of it. Raises ValueError for a wrong result."""
    run = make()
    if run.reset is not None:
        run.reset()
    if own:
        for output in work.outputs:
            output.fill_(float("nan"))
    found: Record = {}
    judged = work.check(run.results(run.call()))
    if own:
        found["worst"] = worst(judged)
        if not found["worst"] <= 1.0:
            raise ValueError(f"wrong: off by up to {found['worst']:.3g} times the bound")
    else:
        found["error_by_norm"] = relative_error(judged)
        if not found["error_by_norm"] <= PEER_ERROR:
            raise ValueError(f"computes something else: off by {found['error_by_norm']:.2g} of the result")
    if run.reset is not None:
        run.reset()
    peak = peak_bytes(run.call, device)  # a second call: some fail only when repeated
    if peak is not None:
        found["peak_bytes"] = peak + (sum(o.nbytes for o in work.outputs) if own else 0)
    return run, found


def copy_of(size: int, device: torch.device) -> Run:
    """A copy that moves `size` bytes, half of them read and half written."""
    source = torch.empty(size // 4, dtype=torch.int16, device=device).random_()
    target = torch.empty_like(source)
    return Run(lambda: target.copy_(source))


@dataclass(frozen=True)
class Case:
    """A row of the table: an op, a direction, a shape, and what is asked of each backend, in times of the copy.

    `reads` and `writes` count tensors of the size of the largest, `operations` those in floating point on each of its
    elements, a function such as exp counted once.
    """

    op: str
    direction: str
    shape: Shape
    reads: int
    writes: int
    operations: int
    make: Make
    bars: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def name(self) -> str:
        """What tells this row from all others."""
        return f"{self.op} {self.direction} {'x'.join(map(str, self.shape))}"

    def blank(self) -> Record:
        """The row without results."""
        return {
            "op": self.op, "direction": self.direction, "shape": "x".join(map(str, self.shape)),
            "moves": f"{_count(self.reads, 'read')}, {_count(self.writes, 'write')}", "floor": "copy",
            "bars": dict(self.bars), "bytes": None, "flops": None, "results": {},
        }  # fmt: skip

    def perform(self, plan: Plan, until: float = math.inf, tell: Tell = lambda _: None) -> list[Record]:
        """The row. Its `results` have a time for the copy and each way that works, an `error` for each that does not.

        `until`, a `time.monotonic`: nothing is made ready and no round is begun after it. Raises what making the
        operands raises, TimeoutError where the time is up before.
        """
        with within(min(60.0, until - time.monotonic())):
            work = self.make(self.shape, torch.Generator(plan.device).manual_seed(0))
            runs = {"copy": copy_of(self.bytes_of(work), plan.device)}
        results: dict[str, Record] = {}
        for name, (make, own) in _ways(work, plan).items():
            began = time.monotonic()
            try:
                with within(min(plan.compile_s if name == COMPILED else plan.ready_s, until - began)):
                    runs[name], results[name] = ready(work, make, plan.device, own)
            except NotInstalled as error:
                results[name] = {"error": str(error)}
            except Exception as error:  # the others are still worth their time
                results[name] = {"error": said(error)}
                tell(f"{self.name}, {name}: {results[name]['error']}")
                release(plan.device)
            results[name]["ready_s"] = round(time.monotonic() - began, 3)
        if len(runs) > 1:
            resets = {name: run.reset for name, run in runs.items() if run.reset is not None}
            calls = {name: run.call for name, run in runs.items()}
            times = interleaved(calls, plan.device, plan.rounds, reset=resets, until=until)
            for name, record in times.items():
                of_floor = record["median_us"] / times["copy"]["median_us"]
                results[name] = results.get(name, {}) | record | {"of_floor": of_floor}
        sizes = {"bytes": self.bytes_of(work), "flops": self.operations * work.elements}
        return [self.blank() | sizes | {"results": results}]

    def bytes_of(self, work: Work) -> int:
        """What must move at least, in bf16; weights, labels and what is saved for a row are small beside it."""
        return torch.bfloat16.itemsize * (self.reads + self.writes) * work.elements


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _ways(work: Work, plan: Plan) -> dict[str, tuple[Callable[[], Run], bool]]:
    """What makes each run, and whether it is ours."""

    def ours(backend: str) -> Callable[[], Run]:
        return lambda: work.ours(backend)

    ways = {b: (ours(b), True) for b in plan.backends}
    return ways | {name: (work.peers[name], False) for name in plan.peers if name in work.peers}
