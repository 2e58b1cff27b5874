"""Products of host programs on a GPU: dtypes of results, and the memory that they take."""

from __future__ import annotations

import pytest
import torch
from linear_loss_kit import randn

import kgen

pytestmark = pytest.mark.gpu
WIDE = """
op wide(x: T[B, H], w: T[V, H], row: T[V], all: T[B, V]) -> (y: f32[B, V], z: f32[B, V]):
    forward:
        y = x @ w.T + row
        z = x @ w.T + all
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_in_f32_of_16_bits_widens_no_operand(dtype: torch.dtype) -> None:
    rows, width, classes = 64, 4096, 1000
    x, w = randn(rows, width).to(dtype), randn(classes, width, seed=1).to(dtype)
    row, every = randn(classes, seed=2).to(dtype), randn(rows, classes, seed=3).to(dtype)
    given = [t.cuda() for t in (x, w, row, every)]
    op = kgen.loads(WIDE).wide
    op(*given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = op(*given)
    torch.cuda.synchronize()
    # The results, and what the allocator rounds up to; w in f32 would be eight times as much.
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4 * rows * classes + 2**20
    size = x.double().abs() @ w.double().abs().T
    for a, c in zip(found, (row, every), strict=True):
        assert a.dtype == torch.float32
        bound = 2.0**-24 * (width + 16) * (size + c.double().abs())
        assert ((a.cpu() - (x.double() @ w.double().T + c.double())).abs() <= bound).all()
