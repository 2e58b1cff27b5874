"""A store of f64, which f32 cannot hold, to a dtype of 16 bits rounds once, not to f32 first."""

from __future__ import annotations

import math

import pytest
import torch

import kgen

BITS = {"bf16": 8, "f16": 11}  # of a significand
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
BACKENDS = ("cuda", "triton", "reference")
KERNEL = """kernel narrow(x: f64[*M, N]) -> (y: {to}[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n]
"""


def nearest(value: float, bits: int) -> float:
    """The value with so many bits that is nearest to `value`, of two the one whose last bit is zero."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)  # round: to even


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("to", BITS)
def test_beside_ties(to: str, backend: str) -> None:
    """Rounded to f32, these are ties."""
    half = 2.0 ** -BITS[to]
    ties = [(1 + k * half) * sign for k in (1, 3, 5, 7, 9, 11) for sign in (1, -1)]
    values = [tie + off for tie in ties for off in (-(2.0**-45), 0.0, 2.0**-45)]
    x = torch.tensor([values], dtype=torch.float64)
    y = kgen.loads(KERNEL.format(to=to)).narrow(x, backend=backend)
    assert y.dtype == DTYPES[to] and y[0].tolist() == [nearest(v, BITS[to]) for v in values]
    assert x.float().to(y.dtype)[0].tolist() != y[0].tolist()
