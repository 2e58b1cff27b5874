"""RoPE of queries and keys, forward and backward. Shapes are [batch, tokens, heads of q, heads of k, features]."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kgen.bench.peers import LIGER, QUACK, attribute, gradient, torchs
from kgen.bench.work import Judged, Results, Run, Shape, Work, backward, blocks, bound, randn
from kgen.runtime.loading import load_packaged

Pair = tuple[torch.Tensor, torch.Tensor]


def _tables(tokens: int, features: int, g: torch.Generator) -> Pair:
    """cos and sin, [tokens, features] in bf16, as Llama makes them."""
    powers = torch.arange(0, features, 2, device=g.device, dtype=torch.float64) / features
    angle = torch.arange(tokens, device=g.device, dtype=torch.float64)[:, None] * 10_000.0**-powers
    angle = torch.cat((angle, angle), -1)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def _half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _operands(shape: Shape, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, tokens, hq, hk, features = shape
    cos, sin = _tables(tokens, features, g)
    return randn(g, batch, tokens, hq, features), randn(g, batch, tokens, hk, features), cos, sin


def _judge(found: torch.Tensor, given: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Iterator[Judged]:
    """Rotated values of `given`, [batch, tokens, heads, features]."""
    batch, tokens, heads, features = given.shape
    c, s = cos.double()[:, None], sin.double()[:, None]
    for i in range(batch):
        for b in blocks(tokens, heads * features):
            d = given[i, b].double()
            a, z = d * c[b], _half(d) * s[b]
            yield found[i, b], a + z, bound(a + z, a.abs() + z.abs())


def _liger(cos: torch.Tensor, sin: torch.Tensor):
    def call(q: torch.Tensor, k: torch.Tensor) -> Pair:
        function = attribute(LIGER, "liger_kernel.ops.rope", "LigerRopeFunction")
        a, b = function.apply(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None])
        return a.transpose(1, 2), b.transpose(1, 2)

    return call


def _quack(cos: torch.Tensor, sin: torch.Tensor):
    half = cos.shape[-1] // 2
    c, s = cos[:, :half].contiguous(), sin[:, :half].contiguous()

    def call(q: torch.Tensor, k: torch.Tensor) -> Pair:
        function = attribute(QUACK, "quack.rotary", "apply_rotary_emb")
        return function(q, c, s), function(k, c, s)

    return call


def _plain(cos: torch.Tensor, sin: torch.Tensor):
    def call(q: torch.Tensor, k: torch.Tensor) -> Pair:
        c, s = cos[:, None], sin[:, None]
        return q * c + _half(q) * s, k * c + _half(k) * s

    return call


def rope(shape: Shape, g: torch.Generator) -> Work:
    """q and k, rotated."""
    q, k, cos, sin = _operands(shape, g)
    outputs = torch.empty_like(q), torch.empty_like(k)
    kernel = load_packaged("rope.kdsl").rope

    def check(got: Results) -> Iterator[Judged]:
        for found, given in zip(got, (q, k), strict=True):
            assert found is not None
            yield from _judge(found, given, cos, sin)

    def liger() -> Run:
        a, b = q.clone(), k.clone()  # it rotates in place

        def reset() -> None:
            a.copy_(q)
            b.copy_(k)

        return Run(lambda: _liger(cos, sin)(a, b), reset)

    def quack() -> Run:
        call = _quack(cos, sin)
        return Run(lambda: call(q, k))

    peers = torchs(_plain(cos, sin), (q, k)) | {LIGER: liger, QUACK: quack}

    def ours(backend: str) -> Run:
        return Run(lambda: kernel(q, k, cos, sin, backend=backend, out=outputs))

    return Work(q.numel() + k.numel(), check, ours, peers, outputs)


def rope_backward(shape: Shape, g: torch.Generator) -> Work:
    """The gradients of q and k: the derived kernel alone."""
    q, k, cos, sin = _operands(shape, g)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    outputs, ours = backward("rope.kdsl", "rope", [q, k, cos, sin, None, False], (0, 1), (dq, dk))

    def check(got: Results) -> Iterator[Judged]:
        for found, given in zip(got, (dq, dk), strict=True):
            assert found is not None
            yield from _judge(found, given, cos, -sin)  # turned back

    peers = torchs(_plain(cos, sin), (q, k), (dq, dk)) | {
        LIGER: lambda: gradient(_liger(cos, sin), (q, k), (dq, dk), restore=True),
        QUACK: lambda: gradient(_quack(cos, sin), (q, k), (dq, dk)),
    }
    return Work(q.numel() + k.numel(), check, ours, peers, outputs)
