"""Calls of the linear cross entropy: ours under budgets of memory, what others have, and the bars.

Times are multiples of three `torch.mm` of the same operands; peaks of memory are above the inputs, gradients counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from kgen import ops
from kgen.bench.linear_problem import MIB, Gradients, Problem, Shape
from kgen.bench.measure import Record, said, synchronize
from kgen.bench.peers import COMPILED, CUT, EAGER, LIGER, QUACK, attribute, fresh

PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # into how many chunks the tokens are divided in a search
SLOW = 2.0  # times the matrix products, from which a call is made in one round of three


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


def settings(
    p: Problem, bars: tuple[Bar, ...], backends: tuple[str, ...], skipped: list[str]
) -> dict[tuple[float | None, str], list[float]]:
    """workspace_mb and accumulate of the default and of what each bar asks for, with the MiB of those bars.

    What could not be found is added to `skipped`, in words.
    """
    found: dict[tuple[float | None, str], list[float]] = {(None, "auto"): []}
    failures: list[str] = []
    for backend in backends:  # the peak is the same on each, up to what a kernel needs
        search = Search(p, backend)
        try:
            search.observed(None, "auto")  # takes what is compiled and what a library keeps
            search = Search(p, backend)
            for bar in bars:
                try:
                    found.setdefault(search.under(bar.mib), []).append(bar.mib)
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
    return found


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
        function = attribute(LIGER, "liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")()
        return torchs(lambda x, w, target: function(w, x, target))

    def quack() -> Callable[[], Any]:
        return torchs(attribute(QUACK, "quack.linear_cross_entropy", "chunked_linear_cross_entropy"))

    def cut() -> Callable[[], Any]:
        return torchs(attribute(CUT, "cut_cross_entropy", "linear_cross_entropy"))

    yield Entry(LIGER, liger, 20.0)
    yield Entry(EAGER, lambda: torchs(plain), 15.0)
    yield Entry("eager, loss in bf16", lambda: torchs(plain_bf16), 15.0)
    yield Entry(COMPILED, lambda: torchs(fresh(plain)), 30.0)
    yield Entry(QUACK, quack, 45.0)  # it tries its kernels first
    yield Entry(CUT, cut, 30.0)


# ---- ready to be timed ---------------------------------------------------------------------------------------------


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
