"""Calls of the chunked cross entropy, on the cases of linear_loss_kit.py, and what they take and give."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from linear_loss_kit import Case, excess, judge, randn
from torch.utils._python_dispatch import TorchDispatchMode

from kgen import ops
from kgen.ops import functional

ROWS, WIDTH, CLASSES = 33, 24, 37


def op(name: str) -> Any:
    """One of the two ops."""
    return functional._loaded("fused_linear_cross_entropy", name)


def call(c: Case, **more: Any) -> torch.Tensor:
    """The function on a case."""
    return ops.linear_cross_entropy(c.x, c.w, c.target, c.bias, **{**c.options, **more})


def outcome(c: Case, upstream: torch.Tensor, **more: Any) -> list[torch.Tensor]:
    """The loss and the gradients of all that may have one."""
    given = [t.detach().clone().requires_grad_() for t in c.floats]
    own = Case(given[0], given[1], c.target, given[2] if c.bias is not None else None, c.options)
    loss = call(own, **more)
    assert loss.dtype == torch.float32
    up = upstream.to(loss.dtype).expand(loss.shape)
    found = torch.autograd.grad(loss, given, up)
    assert torch.equal(up.nan_to_num(), upstream.to(loss.dtype).expand(loss.shape).nan_to_num())
    assert all(torch.equal(a, b) for a, b in zip(given, c.floats, strict=True))  # nothing was modified
    assert [g.dtype for g in found] == [t.dtype for t in given]
    return [loss.detach(), *found]


def check(c: Case, upstream: torch.Tensor, stored: torch.dtype | None = None, **more: Any) -> None:
    """The outcome within its bounds."""
    right = judge(c, upstream, stored)
    for name, a, e, b in zip(("loss", "x", "w", "bias"), outcome(c, upstream, **more), right.expected, right.bound,
                             strict=False):  # fmt: skip
        assert excess(a, e, b) <= 1.0, (name, excess(a, e, b))


def workspace(c: Case, chunks: int) -> float:
    """A budget in MiB for so many chunks: a row of logits and its loss, z and scales are what grows."""
    rows = -(-c.target.numel() // chunks)
    return (rows + 0.5) * c.w.shape[0] * c.x.element_size() / 2**20


UPSTREAM = {"mean": torch.tensor(3.7), "sum": torch.tensor(-0.5), "none": randn(ROWS, seed=8)}

OPTIONS = [
    {k: v for k, v, on in zip(
        ("class_weight", "token_weight", "label_smoothing", "z_loss", "softcap"),
        (randn(CLASSES, seed=9).abs() + 0.25, randn(ROWS, seed=10), 0.1, 0.02, 2.5),
        chosen, strict=True) if on}
    for chosen in itertools.product((False, True), repeat=5)
]  # fmt: skip


_ALLOCATING = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty_strided,  # a gradient that autograd copies
    torch.ops.aten.zeros,
    torch.ops.aten.clone,
    torch.ops.aten._to_copy,
)


class Allocations(TorchDispatchMode):
    """The shapes of all memory that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATING:
            self.shapes.append(tuple(result.shape))
        return result
