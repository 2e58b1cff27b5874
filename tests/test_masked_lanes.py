"""What the lanes beyond a ragged edge hold in Triton: the identity of a reduction, or it selects it."""

from __future__ import annotations

import pytest
import torch
import triton_kit
from cuda_kit import call

from kgen.codegen.schedule import Schedule

SMALL = """
kernel reduced(x: DTYPE[M, N]) -> (y: i64[M]):
    parallel m in M
    tile n in N
    y[m] = KIND(x[m, n], n)
"""
# For the least x, x has +inf in masked lanes, and for its greatest sum with w, w has -inf: both together are NaN.
INFINITIES = """
kernel apart(x: T[M, N], w: T[N], c: T[M, N]) -> (least: T[M], at: i64[M]):
    parallel m in M
    tile n in N
    least[m] = min(x[m, n], n)
    at[m] = argmax(maximum(c[m, n], x[m, n] + w[n]), n)
"""
# w is 0 beyond the edge of n, and has its elements beyond that of k.
EDGES = """
kernel across(w: T[N], c: T[K], g: T[M]) -> (a: T[M], b: T[M, N]):
    parallel m in M
    tile k in K, n in N
    a[m] = g[m] * sum(w[n], n)
    b[m, n] = g[m] * sum(w[n] * exp(c[k]), k)
"""
# Loads can hold the identity of both sums.
PLAIN = """
kernel plain(x: T[M, N], q: i8[M, N]) -> (s: T[M], most: T[M], count: i64[M]):
    parallel m in M
    tile n in N
    s[m] = sum(x[m, n] * x[m, n], n)
    most[m] = max(2.0 * x[m, n] + f32(q[m, n]), n)
    count[m] = sum(q[m, n], n)
"""
SCHEDULES = (None, Schedule(32, 1), Schedule(64, 2), Schedule(32, 1, chunks=(("n", 16),), name="looped"))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["max", "min", "sum", "prod", "argmax", "argmin"])
def test_small_integers_cannot_hold_the_identity_of_wide_ones(
    kind: str, dtype: torch.dtype, schedule: Schedule | None
) -> None:
    """`max` of i8 is one of i32, whose lowest value is 0 in memory."""
    name = f"{'i' if dtype.is_signed else 'u'}{8 * dtype.itemsize}"
    text = SMALL.replace("DTYPE", name).replace("KIND", kind)
    for low in (-9, 2) if dtype.is_signed else (2,):
        x = torch.randint(low, low + 4, (3, 37), generator=torch.Generator().manual_seed(low)).to(dtype)
        triton_kit.check(call(text, "reduced", x=x if kind != "prod" else x % 2 + 1), override=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
def test_values_of_two_reductions_do_not_meet_as_nan(schedule: Schedule | None) -> None:
    c = call(INFINITIES, "apart", x=randn(4, 37), w=randn(37), c=randn(5, 37)[1:])
    triton_kit.check(c, override=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
def test_one_edge_is_not_another(schedule: Schedule | None) -> None:
    triton_kit.check(call(EDGES, "across", w=randn(5), c=randn(3), g=randn(4)), terms=5, override=schedule)


def test_where_loads_can_hold_it_nothing_is_selected() -> None:
    x, q = randn(4, 37), torch.randint(-9, 9, (4, 37), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    c = call(PLAIN, "plain", x=x, q=q)
    triton_kit.check(c, terms=37)
    source = triton_kit.emitted(c).source
    assert source.count("tl.where(") == 1  # for `most`: of x there is 0, for the sum before it
    c = call(SMALL.replace("DTYPE", "i32").replace("KIND", "max"), "reduced", x=q.to(torch.int32))
    assert "other=-2147483648" in triton_kit.emitted(c).source and "tl.where" not in triton_kit.emitted(c).source
