"""Processes that are the ranks of a process group, and shards of a case of tests/linear_loss_kit.py for them."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from linear_loss_kit import Case
from torch import distributed

from kgen import ops
from kgen.runtime import events
from kgen.runtime.loading import load_packaged

PATIENCE = 100.0  # seconds until a rank that waits, or does not answer, is given up


class Ranks:
    """`world` processes in one group, each of which runs what it is sent. `of(n)` are the first n of them, a group of
    their own."""

    def __init__(self, world: int, folder: Path, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["kgen.ops"])  # imported once, with torch, not by each rank
        self.world = world
        self._ends, self._processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            p = context.Process(target=_serve, args=(theirs, rank, world, str(folder / "store"), device), daemon=True)
            p.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(p)

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """What `function(group, argument)` gives on the first `len(arguments)` ranks, one argument for each. An
        exception is given as its text. Raises AssertionError where a rank does not answer."""
        for end, a in zip(self._ends, arguments, strict=False):
            end.send_bytes(pickle.dumps((function, len(arguments), a)))
        by = time.monotonic() + PATIENCE
        out = []
        for end in self._ends[: len(arguments)]:
            assert end.poll(max(0.0, by - time.monotonic())), "a rank does not answer"
            out.append(pickle.loads(end.recv_bytes()))
        return out

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for p in self._processes:
            p.join(5.0)
            if p.is_alive():
                p.kill()


def _serve(end: Any, rank: int, world: int, store: str, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE),
    )
    groups = {n: distributed.new_group(list(range(n))) for n in range(1, world)}
    groups[world] = None  # the default one
    while True:
        try:
            function, count, argument = pickle.loads(end.recv_bytes())
        except EOFError:
            break
        try:
            result = function(groups[count], argument)
        except Exception:
            result = traceback.format_exc()
        end.send_bytes(pickle.dumps(result))
    distributed.destroy_process_group()


# ---- what they run ---------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One call on one rank: a case whose weight and bias are a shard, and which gradients are wanted."""

    case: Case
    first: int
    classes: int
    wanted: tuple[str, ...] = ("x", "w", "bias")
    upstream: Any = 1.0  # a number, or a tensor of the shape of the loss
    more: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None


@dataclass
class Outcome:
    """The loss, the gradients that were wanted by name, and how often the ranks met in each direction."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    met: tuple[int, int]


def outcome(group: Any, job: Job, device: str = "cpu") -> Outcome:
    """The call of `job`."""
    c = job.case
    given = {n: t.to(device) for n, t in (("x", c.x), ("w", c.w), ("bias", c.bias)) if t is not None}
    wanted = [n for n in job.wanted if n in given]
    for n in wanted:
        given[n].requires_grad_()
    options: dict[str, Any] = {
        k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in {**c.options, **job.more}.items()
    }
    with torch.autocast(device, job.autocast) if job.autocast else nullcontext(), events.launches() as forward:
        loss = ops.vocab_parallel_linear_cross_entropy(
            given["x"],
            given["w"],
            c.target.to(device),
            bias_shard=given.get("bias"),
            first_class=job.first,
            num_classes=job.classes,
            group=group,
            **options,
        )
    assert loss.dtype == torch.float32 and loss.requires_grad == bool(wanted)
    found: dict[str, torch.Tensor] = {}
    with events.launches() as backward:
        if wanted:
            up = torch.as_tensor(job.upstream, dtype=torch.float32, device=device).expand(loss.shape)
            gradients = torch.autograd.grad(loss, [given[n] for n in wanted], up)
            found = {n: g.cpu() for n, g in zip(wanted, gradients, strict=True)}
    return Outcome(loss.detach().cpu(), found, (_met(forward), _met(backward)))


def outcome_on_gpu(group: Any, job: Job) -> Outcome:
    """The same on the rank's GPU."""
    return outcome(group, job, "cuda")


def twice(group: Any, job: Job) -> list[torch.Tensor]:
    """The gradients of two backward passes of one call, the first of which keeps the graph."""
    c = job.case
    x, w = c.x.requires_grad_(), c.w.requires_grad_()
    loss = ops.vocab_parallel_linear_cross_entropy(
        x, w, c.target, first_class=job.first, num_classes=job.classes, group=group, **c.options, **job.more
    )
    first = torch.autograd.grad(loss, (x, w), torch.full(loss.shape, 1.0), retain_graph=True)
    return [*first, *torch.autograd.grad(loss, (x, w), torch.full(loss.shape, 2.0))]


def without_chunk(group: Any, job: Job) -> None:
    """The op itself, which needs chunks that ranks agree on."""
    c = job.case
    op = load_packaged("parallel_linear_cross_entropy.kdsl").parallel_linear_cross_entropy
    op(c.x, c.w, c.target, first=job.first, classes=job.classes, group=group)


def captured(group: Any, job: Job) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The loss and the gradients of x and w on a GPU, by a captured graph for values that came after it, and by a call.
    Raises RuntimeError where the call waits for the device."""
    c = job.case
    x, w, target = c.x.cuda().requires_grad_(), c.w.cuda().requires_grad_(), c.target.cuda()

    def call() -> list[torch.Tensor]:
        loss = ops.vocab_parallel_linear_cross_entropy(
            x, w, target, first_class=job.first, num_classes=job.classes, group=group, **c.options, **job.more
        )
        return [loss.detach(), *torch.autograd.grad(loss, (x, w))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
        results = call()
    with torch.no_grad():
        x.neg_()
    graph.replay()
    return [t.cpu() for t in results], [t.cpu() for t in call()]


def _met(launches: Sequence[events.Launch]) -> int:
    return sum(": all_" in x.kernel for x in launches)


def shared_out(c: Case, shards: Sequence[int], classes: int | None = None, **job: Any) -> list[Job]:
    """The jobs of ranks that hold so many rows of the weight each."""
    starts = [0, *accumulate(shards)]
    whole = starts.pop()
    assert whole == c.w.shape[0]
    jobs = []
    for first, n in zip(starts, shards, strict=True):
        bias = None if c.bias is None else c.bias[first : first + n].clone()
        own = Case(c.x, c.w[first : first + n].clone(), c.target, bias, c.options)
        jobs.append(Job(own, first, classes or whole, **job))
    return jobs
