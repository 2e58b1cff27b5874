"""Residual add and RMS norm in one kernel, against float64 and against the two kernels it stands for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kgen
from kgen import ops


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("width", [1, 2, 33, 1000])
@pytest.mark.parametrize(
    ("dtype", "stream"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_as_add_and_norm(backend: str, width: int, dtype: torch.dtype, stream: torch.dtype) -> None:
    x, residual = randn(5, width, dtype=dtype), randn(5, width, dtype=stream, seed=1)
    w = randn(width, dtype=dtype, seed=2)
    y, h = ops.add_rms_norm(x, residual, w, backend=backend)
    assert y.dtype == dtype
    assert torch.equal(h, (x.float() + residual.float()).to(stream)), "the sum is rounded once"
    expected = F.rms_norm(h.double(), (width,), w.double(), 1e-6)
    # The sum of squares is off by at most a rounding a term, and y is rounded once.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    assert ((y.double() - expected).abs() <= (unit + (width + 16) * 2.0**-24) * expected.abs()).all()


@pytest.mark.parametrize("casting", ["none", "llama", "gemma"])
def test_to_the_bit_what_two_kernels_give(backend: str, casting: str) -> None:
    x, residual, w = (randn(4, 96, dtype=torch.bfloat16, seed=s) for s in (0, 1, 2))
    y, h = ops.add_rms_norm(x, residual, w[0], casting=casting, backend=backend)
    assert torch.equal(h, x + residual)
    assert torch.equal(y, ops.rms_norm(h, w[0], casting=casting, backend=backend))
    y, h = ops.add_rms_norm(x, residual, backend=backend)
    assert torch.equal(y, ops.rms_norm(h, backend=backend))


@pytest.mark.parametrize("read", [("y",), ("h",), ("y", "h")])
@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,), (0,), (2,)])
def test_gradients_from_both_outputs(backend: str, read: tuple[str, ...], wanted: tuple[int, ...]) -> None:
    if read == ("h",) and wanted == (2,):
        return  # the sum does not depend on the weight
    inputs = randn(2, 3, 33), randn(2, 3, 33, seed=1), randn(33, seed=2)
    upstream = {"y": randn(2, 3, 33, seed=3), "h": randn(33, 3, 2, seed=4).transpose(0, 2)}

    def total(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        found: dict[str, torch.Tensor] = dict(zip(("y", "h"), outputs, strict=True))
        return torch.stack([(found[n] * upstream[n].to(found[n].dtype)).sum() for n in read]).sum()

    mine = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    total(ops.add_rms_norm(mine[0], mine[1], mine[2], backend=backend)).backward()
    theirs = [t.double().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    s = theirs[0] + theirs[1]
    total((F.rms_norm(s, (33,), theirs[2], 1e-6), s)).backward()
    for i, (a, b, t) in enumerate(zip(mine, theirs, inputs, strict=True)):
        assert torch.equal(a.detach(), t), "an input was modified"
        assert (a.grad is not None) == (i in wanted)
        if a.grad is not None:
            # Some dozens of roundings of terms of size up to 10, in sums of 33 elements or 6 rows.
            expected = torch.zeros_like(t).double() if b.grad is None else b.grad
            torch.testing.assert_close(a.grad.double(), expected, rtol=64 * 2.0**-24, atol=640 * 2.0**-24)


def test_the_residual_receives_a_gradient_when_only_the_norm_is_used(backend: str) -> None:
    residual = randn(3, 8).requires_grad_()
    y, _ = ops.add_rms_norm(randn(3, 8, seed=1), residual, randn(8, seed=2), backend=backend)
    y.square().sum().backward()
    assert residual.grad is not None
    assert residual.grad.any()


def test_strides_and_out(backend: str) -> None:
    x, residual = randn(40, 3).t(), randn(3, 80, seed=1)[:, ::2]
    out = torch.full((2, 3, 40), torch.nan)
    y, h = ops.add_rms_norm(x, residual, backend=backend, out=(out[0], out[1]))
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(out[0], F.rms_norm(h, (40,), None, 1e-6), rtol=64 * 2.0**-24, atol=0)
    assert y.data_ptr() == out.data_ptr()


def test_nothing_to_do(backend: str) -> None:
    w = randn(8).requires_grad_()
    y, h = ops.add_rms_norm(torch.empty(0, 8), torch.empty(0, 8), w, backend=backend)
    assert y.shape == h.shape == (0, 8)
    y.sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, torch.zeros(8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.add_rms_norm(randn(3, 4), randn(3, 5)), "N"),
        (lambda: ops.add_rms_norm(randn(3, 4), randn(4)), "residual"),
        (lambda: ops.add_rms_norm(randn(3, 4), randn(3, 4), casting="gpt"), "add_rms_norm: casting"),
        (lambda: ops.add_rms_norm(randn(3, 4), randn(3, 4), offset=1.0), "add_rms_norm: offset"),
    ],
)
def test_mistakes_are_named(call, message: str) -> None:
    with pytest.raises(kgen.KgenError, match=message):
        call()
