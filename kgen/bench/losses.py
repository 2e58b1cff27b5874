"""Softmax, and cross entropy that leaves the gradient in the logits. Shapes are [rows, classes]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from kgen import ops
from kgen.bench.peers import COMPILED, EAGER, LIGER, QUACK, attribute, forward, fresh, torchs
from kgen.bench.work import Judged, Results, Run, Shape, Work, blocks, bound, randn, roundings


def softmax(shape: Shape, g: torch.Generator) -> Work:
    """y = softmax(x)."""
    m, n = shape
    x = randn(g, m, n)
    y = torch.empty_like(x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    def check(got: Results) -> Iterator[Judged]:
        (found,) = got
        assert found is not None
        for b in blocks(m, n):
            ref = x[b].double().softmax(-1)
            yield found[b], ref, bound(ref, ref, n)

    def liger(x: torch.Tensor) -> torch.Tensor:
        return attribute(LIGER, "liger_kernel.ops.softmax", "LigerSoftmaxFunction").apply(x)

    def quack(x: torch.Tensor) -> torch.Tensor:
        return attribute(QUACK, "quack.softmax", "softmax")(x)

    peers = torchs(plain, (x,)) | {LIGER: lambda: forward(liger, (x,)), QUACK: lambda: forward(quack, (x,))}
    return Work(x.numel(), check, lambda b: Run(lambda: ops.softmax(x, backend=b, out=y)), peers, (y,))


def cross_entropy(shape: Shape, g: torch.Generator) -> Work:
    """The loss of each row, and logits that become the gradient of their mean.

    Liger and QuACK overwrite the logits, too; QuACK's gradient is that of the sum, which spares it a factor.
    """
    m, n = shape
    given = randn(g, m, n)
    x, target = given.clone(), torch.randint(0, n, (m,), generator=g, device=g.device)
    scale = torch.full((), 1 / m, device=g.device)

    def check(got: Results) -> Iterator[Judged]:
        d_logits, loss = got
        for b in blocks(m, n):
            d, t, s = given[b].double(), target[b, None], float(scale)
            lse = d.logsumexp(-1, keepdim=True)
            ref = lse - d.gather(1, t)
            if d_logits is not None:
                p, hot = (d - lse).exp_().mul_(s), torch.zeros_like(d).scatter_(1, t, s)
                yield d_logits[b], p - hot, bound(p - hot, p + hot, n)
            if loss is not None:
                yield loss[b, None], ref, (1 + lse.abs() + ref.abs()) * roundings(n)

    def reset() -> None:
        x.copy_(given)

    def plain(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target)

    def leaf_run(function: Any, overwrites: bool = False) -> Run:
        leaf = given.clone().requires_grad_()

        def put_back() -> None:
            leaf.data.copy_(given)

        return Run(
            lambda: torch.autograd.grad(function(leaf, target), leaf), put_back if overwrites else None,
            lambda grads: (grads[0], None),
        )  # fmt: skip

    def liger() -> Run:
        function = attribute(LIGER, "liger_kernel.transformers.functional", "liger_cross_entropy")
        return leaf_run(function, overwrites=True)

    def quack() -> Run:
        function = attribute(QUACK, "quack.cross_entropy", "cross_entropy_fwd")
        own = given.clone()

        def call() -> Any:
            with torch.no_grad():
                return function(own, target, return_dx=True, inplace_backward=True)

        return Run(call, lambda: own.copy_(given), lambda r: (None, r[0]))

    def ours(backend: str) -> Run:
        return Run(lambda: ops.cross_entropy_(x, target, scale, backend=backend), reset, lambda loss: (x, loss))

    peers = {
        EAGER: lambda: leaf_run(plain), COMPILED: lambda: leaf_run(fresh(plain)), LIGER: liger, QUACK: quack,
    }  # fmt: skip
    return Work(x.numel(), check, ours, peers)
