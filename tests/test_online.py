"""Sums of exponentials in one pass with their maximum: which are found, and what infinities, NaN and chunks make of
them."""

from __future__ import annotations

from typing import Any

import cuda_kit
import pytest
import torch
import triton_kit
from cuda_kit import Call, call

from kgen.codegen.interpret import interpret
from kgen.codegen.normalize import normalize
from kgen.codegen.online import pair
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Loop, Schedule
from kgen.codegen.tolerance import compare, error_bound

HEAD = "kernel k(x: T[*M, N]) -> (y: T[*M, N]):\n    parallel m in M\n    tile n in N\n    "
SOFTMAX = HEAD + "y[m, n] = softmax(x[m, n], n)"
LOG_SOFTMAX = HEAD + "c = x[m, n] - max(x[m, n], n)\n    y[m, n] = c - log(sum(exp(c), n))"
VIA_LSE = HEAD + "y[m, n] = exp(x[m, n] - logsumexp(x[m, n], n))"
CAPPED = HEAD + "u = 3.0 * tanh(x[m, n] / 3.0)\n    e = exp(u - max(u, n))\n    y[m, n] = e / sum(e, n) + e"
PAIRED = {"softmax": SOFTMAX, "log_softmax": LOG_SOFTMAX, "via_lse": VIA_LSE, "capped": CAPPED}

NOT_PAIRED = {
    "another maximum": HEAD + "y[m, n] = sum(exp(x[m, n] - max(2.0 * x[m, n], n)), n) * x[m, n]",
    "a minimum": HEAD + "y[m, n] = sum(exp(x[m, n] - min(x[m, n], n)), n) * x[m, n]",
    "two reductions": HEAD + "s = max(x[m, n], n) + sum(x[m, n], n)\n    y[m, n] = sum(exp(x[m, n] - s), n) * x[m, n]",
    "no shift": HEAD + "y[m, n] = sum(exp(x[m, n]), n) * x[m, n]",
}

INF, NAN = float("inf"), float("nan")
LOWEST = torch.finfo(torch.float32).min
# Rows in which a chunk, a thread or the whole has nothing finite, or something that is not.
SPECIAL = (
    (),
    (-INF,) * 32,
    (-INF,) * 31 + (2.0,),
    (1.0,) + (-INF,) * 31,
    (INF,),
    (INF, INF),
    (1.0,) * 20 + (INF,),
    (NAN,),
    (0.0,) * 17 + (NAN, INF),
    (LOWEST,) * 32,
    (LOWEST, -INF, -LOWEST),
    (3e38, -3e38),
    (-100.0,) * 8 + (100.0,) * 24,
    (100.0,) * 8 + (-100.0,) * 24,
    (-INF,) * 8 + (5.0,) * 8 + (-INF,) * 16,
)
CHUNKS = (4, 8, 16)


def rows(n: int = 32) -> torch.Tensor:
    """[rows, n] in f32: the special values first in each row, random ones behind them."""
    x = torch.randn(len(SPECIAL), n, generator=torch.Generator().manual_seed(3))
    for row, values in zip(x, SPECIAL, strict=True):
        row[: len(values)] = torch.tensor(values)
    return x


def agrees(c: Call, got: dict[str, torch.Tensor]) -> None:
    """Within the derived bound of float64, NaN and infinities where they are there."""
    bounds = error_bound(c.kernel, c.tensors, c.scalars)
    for name, expected in interpret(c.kernel, c.tensors, c.scalars, precision="f64").items():
        found = compare(got[name], expected, bounds[name])
        assert found.ok, str(found)


@pytest.mark.parametrize("text", PAIRED.values(), ids=PAIRED)
@pytest.mark.parametrize("chunk", [None, *CHUNKS])
def test_special_rows_on_cuda(text: str, chunk: int | None) -> None:
    c = call(text, "k", x=rows())
    chunks = () if chunk is None else (("n", chunk),)
    agrees(c, cuda_kit.run(c, Schedule(32, 1, 1, chunks)))


@pytest.mark.parametrize("text", PAIRED.values(), ids=PAIRED)
@pytest.mark.parametrize("chunk", [None, *CHUNKS])
def test_special_rows_on_triton(text: str, chunk: int | None) -> None:
    c = call(text, "k", x=rows())
    chunks = () if chunk is None else (("n", chunk),)
    agrees(c, triton_kit.run(c, Schedule(32, 1, 1, chunks)))


@pytest.mark.parametrize("kit", [cuda_kit, triton_kit])
@pytest.mark.parametrize("n", [1, 7, 1000, 1024])
@pytest.mark.parametrize("text", PAIRED.values(), ids=PAIRED)
def test_wide_programs_over_ragged_rows(text: str, n: int, kit: Any) -> None:
    c = call(text, "k", x=4 * torch.randn(3, n, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16))
    run = cuda_kit.run if kit is cuda_kit else triton_kit.run
    agrees(c, run(c))
    agrees(c, run(c, Schedule(128, 1, 8, (("n", 256),))))


@pytest.mark.parametrize("text", PAIRED.values(), ids=PAIRED)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_looped_row_is_read_twice(text: str, backend: str) -> None:
    where, _ = cuda_kit.prepare(call(text, "k", x=torch.zeros(1, 1024)))
    s = schedule_kernel(where.kernel, where.variant, backend, override=Schedule(64, 1, 4, (("n", 256),)))
    assert sum(isinstance(step, Loop) for step in s.steps) == 2


@pytest.mark.parametrize("text", NOT_PAIRED.values(), ids=NOT_PAIRED)
def test_other_sums_are_left_alone(text: str) -> None:
    where, _ = cuda_kit.prepare(call(text, "k", x=torch.zeros(1, 64)))
    normal = normalize(where.kernel, where.variant)
    assert pair(normal, "n") == normal


TWO = """
kernel k(x: T[*M, N]) -> (y: T[*M, N], l: f32[*M], z: f32[*M]):
    parallel m in M
    tile n in N
    y[m, n] = softmax(x[m, n], n)
    l[m] = logsumexp(x[m, n], n)
    z[m] = sum(exp(x[m, n] - 0.5 * max(x[m, n], n)), n)
"""
SHIFTS = (
    HEAD
    + """top = max(x[m, n], n)
    a = exp(x[m, n] - where(isinf(top), 0.0, top))
    b = exp(x[m, n] - 0.5 * top)
    c = exp(x[m, n] - minimum(top, 30.0))
    y[m, n] = a + 2.0 * b + 3.0 * c + sum(a, n) + sum(b, n) * sum(c, n)"""
)
AXES = """
kernel k(x: T[*M, I, N]) -> (y: T[*M, I, N], s: f32[*M], l: f32[*M, I]):
    parallel m in M
    tile i in I, n in N
    y[m, i, n] = softmax(x[m, i, n], n)
    t = max(x[m, i, n], i, n)
    s[m] = sum(exp(x[m, i, n] - t), n, i)
    l[m, i] = logsumexp(x[m, i, n], n)
"""
BEHIND = """
kernel k(x: T[*M, N], z: T[*M, K]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N, k in K
    y[m, n] = softmax(x[m, n], n) * sum(softmax(z[m, k], k) * z[m, k], k)
"""


@pytest.mark.parametrize("kit", [cuda_kit, triton_kit])
@pytest.mark.parametrize("schedule", [None, Schedule(32, 1, 1, (("n", 8),))], ids=str)
@pytest.mark.parametrize("text", [TWO, SHIFTS], ids=["two", "shifts"])
def test_several_sums_of_one_maximum(text: str, schedule: Schedule | None, kit: Any) -> None:
    x = 30 * rows()
    agrees(call(text, "k", x=x), kit.run(call(text, "k", x=x), schedule))


@pytest.mark.parametrize("kit", [cuda_kit, triton_kit])
@pytest.mark.parametrize("shape", [(2, 4, 64), (1, 64, 4), (2, 8, 128), (1, 3, 7)])
@pytest.mark.parametrize("axis", [None, "i", "n"])
def test_several_tile_axes(shape: tuple[int, ...], axis: str | None, kit: Any) -> None:
    c = call(AXES, "k", x=torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    agrees(c, kit.run(c, None if axis is None else Schedule(32, 1, 1, ((axis, 2),))))


@pytest.mark.parametrize("kit", [cuda_kit, triton_kit])
def test_used_behind_a_loop_over_another_axis(kit: Any) -> None:
    g = torch.Generator().manual_seed(4)
    c = call(BEHIND, "k", x=torch.randn(2, 24, generator=g), z=torch.randn(2, 70, generator=g))
    agrees(c, kit.run(c, Schedule(32, 1, 1, (("k", 16),))))


@pytest.mark.parametrize("kit", [cuda_kit, triton_kit])
@pytest.mark.parametrize("schedule", [None, Schedule(64, 1, 1, (("n", 64),))], ids=str)
def test_equal_elements_have_equal_shares(schedule: Schedule | None, kit: Any) -> None:
    g = torch.Generator().manual_seed(6)
    x = torch.randn(8, 5, generator=g)[:, torch.randint(0, 5, (256,), generator=g)]
    y = kit.run(call(SOFTMAX, "k", x=x), schedule)["y"]
    for row, share in zip(x, y, strict=True):
        for value in row.unique():
            assert share[row == value].unique().numel() == 1


LABEL = """
kernel k(x: T[*M, N], t: i64[*M]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = where(n == t[m], 1.0, x[m, n]) + where(t[m] != n, 0.0, 2.0)
"""
LABELS = (0, 31, 32, -1, 5, -(2**63), 2**63 - 1, 2**32, 2**32 + 5, -(2**31), 2**31 - 1, -(2**32) + 5)


@pytest.mark.parametrize("kit", [cuda_kit, triton_kit])
def test_a_label_is_compared_in_all_its_bits(kit: Any) -> None:
    t = torch.tensor(LABELS)
    x = torch.randn(len(LABELS), 32, generator=torch.Generator().manual_seed(1))
    c = call(LABEL, "k", x=x, t=t)
    run, emitted = (cuda_kit.run, cuda_kit.compiled) if kit is cuda_kit else (triton_kit.run, triton_kit.emitted)
    assert "t_m_label" in emitted(c).source
    expected = torch.where(torch.arange(32) == t[:, None], 3.0, x)
    assert torch.equal(run(c)["y"], expected)
