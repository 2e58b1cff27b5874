"""Sizes that kernels of this kind are known to get wrong: none at all, one, odd ones, and more than a tile can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autograd_kit import as_tuple, randn, worst
from known_kit import OPS, agree, expected

import kgen
from kgen import ops
from kgen.runtime import events

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDTHS = (4, 5, 7, 16, 31, 63, 65, 96, 129, 1000, 1023, 1025)


def of_width(name: str, width: int, backend: str) -> None:
    """One op and its gradients on rows of `width` elements."""
    op = OPS[name]
    tensors = {n: t.requires_grad_() for n, t in op.tensors(width).items()}
    results = as_tuple(op.call(**tensors, backend=backend))
    seeds = [randn(*r.shape, seed=70 + i) for i, r in enumerate(results)]
    found = torch.autograd.grad(results, list(tensors.values()), seeds)
    agree([*(r.detach() for r in results), *found], expected(op, tensors, seeds), 6 * width)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_widths_that_divide_nothing(name: str, backend: str) -> None:
    for width in WIDTHS:
        of_width(name, width, backend)


@pytest.mark.parametrize("name", OPS)
def test_widths_that_divide_nothing_in_cuda(name: str) -> None:
    """Over all ops every width is there twice; each is a run of g++."""
    turn = list(OPS).index(name)
    for width in (WIDTHS[turn % len(WIDTHS)], WIDTHS[(turn + 5) % len(WIDTHS)]):
        of_width(name, width, "cuda")


@pytest.mark.parametrize("name", [n for n in OPS if n != "cross_entropy"])  # test_cross_entropy.py has its own
def test_no_rows(name: str, backend: str) -> None:
    """Empty results, gradients of zero rows, and zeros for every weight; nothing is launched."""
    op = OPS[name]
    for lead in ((0, 3), (2, 0)):
        tensors = {n: randn(*(s if len(s) == 1 else (*lead, *s[2:]))).requires_grad_() for n, s in op.shapes(8).items()}
        with events.launches() as seen:
            results = as_tuple(op.call(**tensors, backend=backend))
            seeds = [torch.full_like(r, torch.nan) for r in results]
            found = torch.autograd.grad(results, list(tensors.values()), seeds)
        assert not seen
        assert all(r.numel() == 0 and r.shape[:2] == lead for r in results)
        for g, t in zip(found, tensors.values(), strict=True):
            assert g.shape == t.shape
            assert torch.equal(g, torch.zeros_like(t))


def test_no_columns(backend: str) -> None:
    for x in (torch.empty(3, 0), torch.empty(0, 0)):
        for op in (ops.softmax, ops.log_softmax, ops.rms_norm, ops.layer_norm):
            leaf = x.clone().requires_grad_()
            y = op(leaf, backend=backend)
            assert y.shape == x.shape
            y.backward(torch.empty_like(y))
            assert leaf.grad is not None
            assert leaf.grad.shape == x.shape
    loss = ops.cross_entropy(torch.empty(2, 0), torch.tensor([0, -100]), reduction="none", backend=backend)
    assert loss.isnan().tolist() == [True, False], "no class, so no label is one"


TOTALS = """
kernel constant(x: T[N], c: f32) -> (s: f32[]):
    parallel n in N
    s[] += where(x[n] > 1e30, x[n], c)

kernel rows(x: T[*M, N], c: f32) -> (s: f32[*M]):
    parallel m in M
    tile n in N
    s[m] = sum(where(x[m, n] > 1e30, x[m, n], c), n)
"""


def test_sums_of_a_constant(backend: str) -> None:
    """c * N for every N: an element behind the last would add another c."""
    constant = kgen.loads(TOTALS).constant
    for n in range(1, 66):
        assert constant(torch.zeros(n), 0.25, backend=backend) == 0.25 * n
    rows = kgen.loads(TOTALS).rows
    for n in (1, 2, 3, 33, 65):
        assert torch.equal(rows(torch.zeros(3, n), 0.25, backend=backend), torch.full((3,), 0.25 * n))


@pytest.mark.parametrize("width", [65537, 2**20 + 1])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_rows_longer_than_any_block(width: int, backend: str) -> None:
    x = randn(2, width)
    assert worst(ops.rms_norm(x, backend=backend), F.rms_norm(x.double(), (width,), None, 1e-6), width) <= 1.0
    assert worst(ops.softmax(x, backend=backend), x.double().softmax(-1), width) <= 1.0
    target = torch.tensor([width - 1, 7])
    loss: Any = ops.cross_entropy(x, target, reduction="none", backend=backend)
    assert worst(loss, F.cross_entropy(x.double(), target, reduction="none"), width) <= 1.0


@pytest.mark.parametrize("rows", [65535, 65537])
def test_many_rows(rows: int, backend: str) -> None:
    """More programs than a second grid dimension has; the last rows as well as the first."""
    x, unwritten = randn(rows, 3), torch.full((rows, 3), torch.nan)
    y = ops.layer_norm(x, backend=backend, out=unwritten)
    exact, xd = F.layer_norm(x.double(), (3,)), x.double()
    # The mean is off by roundings of the largest element, which the spread divides.
    size = xd.abs().amax(-1, keepdim=True) / xd.std(-1, correction=0, keepdim=True).clamp(min=1e-3)
    assert ((y - exact).abs() <= 16 * 2.0**-24 * (exact.abs() + size)).all()
    y = ops.swiglu(x, x, backend=backend, out=unwritten.fill_(torch.nan))
    assert worst(y, F.silu(xd) * xd, 64) <= 1.0
