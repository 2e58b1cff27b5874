"""SwiGLU and both forms of GeGLU, forward and backward. Shapes are [rows, width]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kgen.bench.peers import LIGER, attribute, forward, gradient, torchs
from kgen.bench.work import Judged, Results, Run, Shape, Work, backward, blocks, bound, randn
from kgen.runtime.loading import load_packaged

_TANH = math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class Gate:
    """An activation: torch's, its derivative, the operations on an element of the gated product and of its gradients,
    and the class of Liger, if it has one."""

    kernel: str
    plain: Callable[[torch.Tensor], torch.Tensor]
    derivative: Callable[[torch.Tensor], torch.Tensor]
    operations: tuple[int, int]
    liger: tuple[str, str] | None


def _d_silu(x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _d_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtr(x) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _d_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(_TANH * (x + 0.044715 * x**3))
    return (1 + t) / 2 + x / 2 * (1 - t * t) * _TANH * (1 + 3 * 0.044715 * x * x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


SWIGLU = Gate("swiglu", F.silu, _d_silu, (6, 12), ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction"))
GEGLU = Gate("geglu", F.gelu, _d_gelu, (6, 14), None)
GEGLU_TANH = Gate("geglu_tanh", _gelu_tanh, _d_gelu_tanh, (10, 21), ("liger_kernel.ops.geglu", "LigerGELUMulFunction"))


def gated(gate: Gate, shape: Shape, g: torch.Generator) -> Work:
    """y = activation(a) * b."""
    m, n = shape
    a, b = randn(g, m, n), randn(g, m, n)
    y = torch.empty_like(a)
    kernel = getattr(load_packaged("swiglu.kdsl"), gate.kernel)

    def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return gate.plain(a) * b

    def check(got: Results) -> Iterator[Judged]:
        (found,) = got
        assert found is not None
        for s in blocks(m, n):
            p, q = a[s].double(), b[s].double()
            ref = gate.plain(p) * q
            yield found[s], ref, bound(ref, p * q)

    peers = torchs(plain, (a, b))
    if gate.liger is not None:
        of = gate.liger
        peers[LIGER] = lambda: forward(lambda a, b: attribute(LIGER, *of).apply(a, b), (a, b))
    return Work(a.numel(), check, lambda backend: Run(lambda: kernel(a, b, backend=backend, out=y)), peers, (y,))


def gated_backward(gate: Gate, shape: Shape, g: torch.Generator) -> Work:
    """Both gradients: the derived kernel alone."""
    m, n = shape
    a, b, dy = (randn(g, m, n) for _ in range(3))
    outputs, ours = backward("swiglu.kdsl", gate.kernel, [a, b], (0, 1), (dy,))

    def plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return gate.plain(a) * b

    def check(got: Results) -> Iterator[Judged]:
        da, db = got
        assert da is not None and db is not None
        for s in blocks(m, n):
            p, q, d = a[s].double(), b[s].double(), dy[s].double()
            ref = d * q * gate.derivative(p)
            yield da[s], ref, bound(ref, d * q * (1 + p.abs()))  # a derivative is at most 1.13, of terms up to |x|
            ref = d * gate.plain(p)
            yield db[s], ref, bound(ref, d * p)

    peers = torchs(plain, (a, b), (dy,))
    if gate.liger is not None:
        of = gate.liger
        # It leaves both gradients in the memory of what was saved.
        peers[LIGER] = lambda: gradient(lambda a, b: attribute(LIGER, *of).apply(a, b), (a, b), (dy,), restore=True)
    return Work(a.numel(), check, ours, peers, outputs)
