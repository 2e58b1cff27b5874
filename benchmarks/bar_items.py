"""What `gpu_bars.py` times: each item with its check against float64 and what runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kgen import ops
from kgen.ops.functional import _loaded
from kgen.runtime.autograd import training

BF16_ROUNDING = 2.0**-8
F32_ROUNDING = 2.0**-24
FEW = 1e2  # roundings of f32 in an element besides those of sums; exp(x) of |x| < 20 has most of them
EPS = 1e-6

Call = Callable[[], Any]
Expected = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # got, in float64, largest difference


@dataclass
class Item:
    """One row of the table: the call of a backend, its check, and what runs beside it, each made when its turn comes.

    `outputs` are what `ours` write; `reset` restores what a call overwrites, outside of the time.
    """

    bytes: int
    ours: Callable[[str], Call]
    expected: Callable[[Any], Expected]
    eager: Callable[[], Call]
    compiled: Callable[[], Call]
    liger: Callable[[], Call]
    outputs: tuple[torch.Tensor, ...] = ()
    reset: Call = lambda: None


Make = Callable[[int, int, torch.Generator], Item]


def randn(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Random bf16."""
    return torch.randn(shape, generator=g, device=g.device, dtype=torch.bfloat16)


def some(m: int) -> list[int]:
    """The rows that are checked: the first and last, and some between."""
    return sorted({0, 1, m // 3, m // 2, m - 2, m - 1})


def relative(got: torch.Tensor, ref: torch.Tensor, summands: int) -> Expected:
    """A bf16 result that comes from products and one sum of `summands` terms of one sign."""
    return [(got, ref, ref.abs() * (BF16_ROUNDING + (summands + FEW) * F32_ROUNDING))]


# ---- what is timed -------------------------------------------------------------------------------------------------


def plain_rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """torch's."""
    return F.rms_norm(x, w.shape, w, EPS)


def rms_norm(m: int, n: int, g: torch.Generator) -> Item:
    """RMSNorm forward."""
    x, w = randn(g, m, n), randn(g, n)
    y, rows = torch.empty_like(x), some(m)

    def expected(got: torch.Tensor) -> Expected:
        d = x[rows].double()
        return relative(got[rows], d * (d.square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double(), n)

    def liger() -> Call:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]  # optional

        return lambda: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)

    compiled = torch.compile(plain_rms_norm, dynamic=False)
    return Item(
        2 * x.nbytes, lambda backend: lambda: ops.rms_norm(x, w, EPS, backend=backend, out=y), expected,
        lambda: lambda: plain_rms_norm(x, w), lambda: lambda: compiled(x, w), liger, (y,),
    )  # fmt: skip


def rms_norm_backward(m: int, n: int, g: torch.Generator) -> Item:
    """The derived backward of RMSNorm, both gradients: the kernel alone, without autograd around it."""
    x, w, dy = randn(g, m, n), randn(g, n), randn(g, m, n)
    dx, dw, rows = torch.empty_like(x), torch.empty_like(w), some(m)
    t = training(_loaded("rms_norm", "rms_norm"), [x, w, EPS, 0.0, False], (0, 1))
    if list(t.derived.residuals) != ["saved_r"] or t.gradients != {0: 0, 1: 1}:
        raise RuntimeError(f"another backward than this script knows: {t.derived.residuals}, {t.gradients}")
    r = (x.double().square().mean(-1) + EPS).rsqrt().float()
    places = {"saved": [x, w, r], "cotangent": [dy], "scalar": {3: 0.0}}
    arguments = [places[where][i] for where, i in t.arguments]

    def expected(got: Any) -> Expected:
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
        deep = m / sms + 8 * sms  # rows of one program, then the programs: at most 8 on each multiprocessor
        terms = dy.double() * x.double() * r.double()[:, None]
        ref_w = terms.sum(0)
        bound_w = ref_w.abs() * BF16_ROUNDING + terms.abs_().sum(0) * (deep + FEW) * F32_ROUNDING
        d, s = x[rows].double(), r[rows].double()[:, None]
        wdy = w.double() * dy[rows].double()
        ref = s * wdy - (wdy * d).sum(-1, keepdim=True) * s**3 / n * d
        size = (s * wdy).abs() + (wdy * d).abs().sum(-1, keepdim=True) * s**3 / n * d.abs()
        return [
            (got[0][rows], ref, ref.abs() * BF16_ROUNDING + size * (n + FEW) * F32_ROUNDING),
            (got[1], ref_w, bound_w),
        ]

    def torchs(function: Any) -> Call:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = function(a, b)
        return lambda: torch.autograd.grad(y, (a, b), dy, retain_graph=True)

    def liger() -> Call:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]  # optional

        return torchs(lambda a, b: LigerRMSNormFunction.apply(a, b, EPS, 0.0, "llama", False))

    return Item(
        3 * x.nbytes, lambda backend: lambda: t.backward(*arguments, backend=backend, out=(dx, dw)), expected,
        lambda: torchs(plain_rms_norm), lambda: torchs(torch.compile(plain_rms_norm, dynamic=False)), liger, (dx, dw),
    )  # fmt: skip


def cross_entropy_(m: int, n: int, g: torch.Generator) -> Item:
    """Cross entropy: the loss of each row, and logits that become the gradient of their mean."""
    given, rows = randn(g, m, n), some(m)
    x, target = given.clone(), torch.randint(0, n, (m,), generator=g, device=g.device)
    scale = torch.full((), 1 / m, device=g.device)
    leaf = given.clone().requires_grad_()

    def expected(loss: torch.Tensor) -> Expected:
        d, t = given[rows].double(), target[rows, None]
        lse, s = d.logsumexp(-1), float(scale)
        p, hot = (d - lse[:, None]).exp() * s, torch.zeros_like(d).scatter_(1, t, s)
        bound = (p - hot).abs() * BF16_ROUNDING + (p + hot) * (n + FEW) * F32_ROUNDING
        ref = lse - d.gather(1, t)[:, 0]
        return [(x[rows], p - hot, bound), (loss[rows], ref, (1 + lse.abs() + ref.abs()) * (n + FEW) * F32_ROUNDING)]

    def torchs(function: Any) -> Call:
        return lambda: torch.autograd.grad(function(leaf, target), leaf)

    def plain(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target)

    def liger() -> Call:
        from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]  # optional
            liger_cross_entropy,
        )

        return torchs(liger_cross_entropy)

    return Item(
        2 * x.nbytes, lambda backend: lambda: ops.cross_entropy_(x, target, scale, backend=backend), expected,
        lambda: torchs(plain), lambda: torchs(torch.compile(plain, dynamic=False)), liger,
        reset=lambda: x.copy_(given),
    )  # fmt: skip


def swiglu(m: int, n: int, g: torch.Generator) -> Item:
    """SwiGLU forward."""
    a, b = randn(g, m, n), randn(g, m, n)
    y, rows = torch.empty_like(a), some(m)

    def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.silu(a) * b

    def liger() -> Call:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]  # optional

        return lambda: LigerSiLUMulFunction.apply(a, b)

    compiled = torch.compile(plain, dynamic=False)
    return Item(
        3 * a.nbytes, lambda backend: lambda: ops.swiglu(a, b, backend=backend, out=y),
        lambda got: relative(got[rows], F.silu(a[rows].double()) * b[rows].double(), 1),
        lambda: lambda: plain(a, b), lambda: lambda: compiled(a, b), liger, (y,),
    )  # fmt: skip


def softmax(m: int, n: int, g: torch.Generator) -> Item:
    """Softmax forward."""
    x = randn(g, m, n)
    y, rows = torch.empty_like(x), some(m)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def liger() -> Call:
        from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]  # optional
            liger_softmax,
        )

        return lambda: liger_softmax(x)

    compiled = torch.compile(plain, dynamic=False)
    return Item(
        2 * x.nbytes, lambda backend: lambda: ops.softmax(x, backend=backend, out=y),
        lambda got: relative(got[rows], x[rows].double().softmax(-1), n),
        lambda: lambda: plain(x), lambda: lambda: compiled(x), liger, (y,),
    )  # fmt: skip


# Name, bytes in words, rows, width, the most times the copy it may take; the bars first, in case time runs out.
ITEMS: list[tuple[str, str, int, int, float | None, Make]] = [
    ("RMSNorm backward dx, dw", "2 reads, 1 write", 16384, 4096, 1.5, rms_norm_backward),
    ("cross entropy in place", "1 read, 1 write", 8192, 32000, 1.4, cross_entropy_),
    ("RMSNorm backward dx, dw", "2 reads, 1 write", 8192, 8192, None, rms_norm_backward),
    ("RMSNorm forward", "1 read, 1 write", 16384, 4096, None, rms_norm),
    ("SwiGLU forward", "2 reads, 1 write", 8192, 14336, None, swiglu),
    ("softmax forward", "1 read, 1 write", 8192, 32000, None, softmax),
]
