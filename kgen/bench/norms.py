"""RMSNorm, its sum with a residual, and LayerNorm. Shapes are [rows, width]; peers round once where they let us ask."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kgen import ops
from kgen.bench.peers import LIGER, QUACK, attribute, forward, gradient, torchs
from kgen.bench.work import (
    BF16_ROUNDING,
    F32_ROUNDING,
    Judged,
    Results,
    Run,
    Shape,
    Work,
    backward,
    blocks,
    bound,
    randn,
    roundings,
)

EPS = 1e-6
_LIGER = "liger_kernel.ops.rms_norm", "LigerRMSNormFunction"


def _plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, w.shape, w, EPS)


def _liger(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return attribute(LIGER, *_LIGER).apply(x, w, EPS, 0.0, "gemma", False)


def _quack(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return attribute(QUACK, "quack.rmsnorm", "rmsnorm")(x, w, eps=EPS)


def rms_norm(shape: Shape, g: torch.Generator) -> Work:
    """y = x / rms(x) * w."""
    m, n = shape
    x, w = randn(g, m, n), randn(g, n)
    y = torch.empty_like(x)

    def check(got: Results) -> Iterator[Judged]:
        (found,) = got
        assert found is not None
        for b in blocks(m, n):
            d = x[b].double()
            ref = d * (d.square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double()
            yield found[b], ref, bound(ref, ref, n)

    peers = torchs(_plain, (x, w)) | {
        LIGER: lambda: forward(_liger, (x, w)),
        QUACK: lambda: forward(_quack, (x, w)),
    }
    return Work(x.numel(), check, lambda b: Run(lambda: ops.rms_norm(x, w, EPS, backend=b, out=y)), peers, (y,))


def rms_norm_backward(shape: Shape, g: torch.Generator) -> Work:
    """Both gradients: the derived kernel alone."""
    m, n = shape
    x, w, dy = randn(g, m, n), randn(g, n), randn(g, m, n)
    outputs, ours = backward("rms_norm.kdsl", "rms_norm", [x, w, EPS, 0.0, False], (0, 1), (dy,))

    def check(got: Results) -> Iterator[Judged]:
        dx, dw = got
        assert dx is not None and dw is not None
        sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
        deep = m / sms + 8 * sms  # rows of one program, then the programs: at most 8 on each multiprocessor
        total, sizes = (torch.zeros(n, dtype=torch.float64, device=x.device) for _ in range(2))
        for b in blocks(m, n):
            d = x[b].double()
            s = (d.square().mean(-1, keepdim=True) + EPS).rsqrt()
            terms = dy[b].double() * d * s
            total += terms.sum(0)
            sizes += terms.abs_().sum(0)
            wdy = w.double() * dy[b].double()
            ref = s * wdy - (wdy * d).sum(-1, keepdim=True) * s**3 / n * d
            size = (s * wdy).abs() + (wdy * d).abs().sum(-1, keepdim=True) * s**3 / n * d.abs()
            # This row's sum, and half of the root's in each of three factors.
            yield dx[b], ref, bound(ref, size, n, n, n)
        yield dw, total, total.abs() * BF16_ROUNDING + sizes * (deep * F32_ROUNDING + roundings(n))

    peers = torchs(_plain, (x, w), (dy,)) | {
        LIGER: lambda: gradient(_liger, (x, w), (dy,)),
        QUACK: lambda: gradient(_quack, (x, w), (dy,)),
    }
    return Work(x.numel(), check, ours, peers, outputs)


def add_rms_norm(shape: Shape, g: torch.Generator) -> Work:
    """h = x + residual and y = h / rms(h) * w."""
    m, n = shape
    x, residual, w = randn(g, m, n), randn(g, m, n), randn(g, n)
    y, h = torch.empty_like(x), torch.empty_like(x)

    def plain(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x + residual
        return F.rms_norm(h, w.shape, w, EPS), h

    def liger(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        function = attribute(LIGER, "liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
        return function.apply(x, residual, w, EPS, 0.0, "gemma", False)

    def quack(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attribute(QUACK, "quack.rmsnorm", "rmsnorm")(x, w, residual=residual, eps=EPS, prenorm=True)

    def check(got: Results) -> Iterator[Judged]:
        found, total = got
        assert found is not None and total is not None
        for b in blocks(m, n):
            exact = x[b].double() + residual[b].double()
            yield total[b], exact, bound(exact, exact)
            d = (x[b].float() + residual[b].float()).bfloat16().double()  # the norm is that of the rounded sum
            ref = d * (d.square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double()
            yield found[b], ref, bound(ref, ref, n)

    peers = torchs(plain, (x, residual, w)) | {
        LIGER: lambda: forward(liger, (x, residual, w)),
        QUACK: lambda: forward(quack, (x, residual, w)),
    }

    def ours(backend: str) -> Run:
        return Run(lambda: ops.add_rms_norm(x, residual, w, EPS, backend=backend, out=(y, h)))

    return Work(x.numel(), check, ours, peers, (y, h))


def layer_norm(shape: Shape, g: torch.Generator) -> Work:
    """y = (x - mean) / deviation * w + b."""
    m, n = shape
    x, w, bias = randn(g, m, n), randn(g, n), randn(g, n)
    y, eps = torch.empty_like(x), 1e-5
    w32, bias32 = w.float(), bias.float()

    def plain(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, w.shape, w, bias, eps)

    def liger(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return attribute(LIGER, "liger_kernel.ops.layer_norm", "LigerLayerNormFunction").apply(x, w, bias, eps)

    def quack(x: torch.Tensor) -> torch.Tensor:
        return attribute(QUACK, "quack.rmsnorm", "layernorm_fwd")(x, w32, bias32, eps)  # it takes these in f32 alone

    def check(got: Results) -> Iterator[Judged]:
        (found,) = got
        assert found is not None
        for b in blocks(m, n):
            d = x[b].double()
            c = d - d.mean(-1, keepdim=True)
            scale = (c.square().mean(-1, keepdim=True) + eps).rsqrt() * w.double()
            ref = c * scale + bias.double()
            size = (d.abs() + d.abs().mean(-1, keepdim=True)) * scale.abs() + bias.double().abs()
            yield found[b], ref, bound(ref, size, n, n)

    peers = torchs(plain, (x, w, bias)) | {
        LIGER: lambda: forward(liger, (x, w, bias)),
        QUACK: lambda: forward(quack, (x,)),
    }

    def ours(backend: str) -> Run:
        return Run(lambda: ops.layer_norm(x, w, bias, eps, backend=backend, out=y))

    return Work(x.numel(), check, ours, peers, (y,))
