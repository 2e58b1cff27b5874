"""Rows that a program asks L2 for: which, from where, and never one that does not exist."""

from __future__ import annotations

import re

import cuda_kit
import pytest
import torch
from cuda_kit import Call, call

import kgen
from kgen.codegen import cuda
from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel

NORM = """
kernel norm(x: T[*M, N], w: T[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * rsqrt(mean(x[m, n] * x[m, n], n) + 1.0) * w[n]
"""
GRAD = """
kernel grad(x: T[*M, N], d_y: f32[*M, N], r: f32[*M]) -> (d_w: f32[N]):
    parallel m in M
    tile n in N
    d_w[n] += sum(x[m, n] * d_y[m, n], n) * r[m] + x[m, n]
"""
HEADS = """
kernel heads(x: f32[B, S, D]) -> (d_w: f32[D]):
    parallel b in B, s in S
    tile d in D
    d_w[d] += x[b, s, d] * max(x[b, s, d], d)
"""
STRIDED = """
kernel strided(x: f32[*M, 2 * N]) -> (y: f32[*M]):
    parallel m in M
    tile n in N
    y[m] = sum(x[m, 2 * n], n)
"""


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def source(c: Call, knobs: Knobs | None = None) -> str:
    where, _ = cuda_kit.prepare(c)
    return cuda.emit(schedule_kernel(where.kernel, where.variant, "cuda", knobs=knobs, num_sms=100)).source


def asked(text: str) -> list[str]:
    """The lines of the block that asks for a row."""
    found = re.search(r"// To L2: .*?\n(.*?)\n\n", text, re.S)
    return [line.strip() for line in found[1].split("\n")] if found else []


def test_a_persistent_program_asks_for_its_next_row() -> None:
    text = source(call(GRAD, "grad", x=randn(7, 4096, dtype=torch.bfloat16), d_y=randn(7, 4096), r=randn(7)))
    assert asked(text) == [
        "if (m < M - SPLITS) {",
        "const int m_ahead = m + SPLITS;",
        "const bf16* x_ahead = x + m_ahead * x_stride0;",
        "const float* d_y_ahead = d_y + m_ahead * d_y_stride0;",
        "for (int n_line = tid * 64; n_line < N; n_line += THREADS * 64) {",
        "prefetch_l2(x_ahead + n_line);",
        "}",
        "for (int n_line_2 = tid * 32; n_line_2 < N; n_line_2 += THREADS * 32) {",
        "prefetch_l2(d_y_ahead + n_line_2);",
        "}",
        "}",
    ]


def test_several_indices_are_taken_apart_for_the_row_ahead_too() -> None:
    lines = asked(source(call(HEADS, "heads", x=randn(3, 10, 4096)[:, :5])))
    assert lines[:4] == [
        "if (p < points - SPLITS) {",
        "const int p_ahead = p + SPLITS;",
        "const int b_ahead = p_ahead / S;",
        "const int s_ahead = p_ahead % S;",
    ]
    assert lines[4] == "const float* x_ahead = x + b_ahead * x_stride0 + s_ahead * x_stride1;"


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_program_with_a_row_asks_for_that_of_one_that_follows(ahead: int) -> None:
    c = call(NORM, "norm", x=randn(5, 2048, dtype=torch.bfloat16), w=randn(2048, dtype=torch.bfloat16))
    lines = asked(source(c, Knobs(ahead=ahead)))
    assert lines[:2] == [f"if (m < M - {100 * ahead}) {{", f"const int m_ahead = m + {100 * ahead};"]
    assert [line for line in lines if "prefetch" in line] == ["prefetch_l2(x_ahead + n_line);"]  # w is every row's


def test_what_does_not_lie_in_a_row_or_is_shared_by_rows_is_not_asked_for() -> None:
    assert not asked(source(call(NORM, "norm", x=randn(5, 64), w=randn(64)), Knobs(ahead=1, rows=2, threads=64)))
    assert not asked(source(call(STRIDED, "strided", x=randn(5, 512)), Knobs(ahead=1, rows=1, threads=128)))
    assert not asked(source(call(NORM, "norm", x=randn(5, 2048), w=randn(2048)), Knobs(ahead=0)))


@pytest.mark.parametrize("m", [1, 2, 9])
def test_results_stay_the_same(m: int) -> None:
    c = call(NORM, "norm", x=randn(m, 1000), w=randn(1000))
    where, _ = cuda_kit.prepare(c)
    made = schedule_kernel(where.kernel, where.variant, "cuda", knobs=Knobs(ahead=1), num_sms=2)
    cuda_kit.check(c, 1000, made.schedule, seed=1)


@pytest.mark.parametrize("m", [1, 133, 300])  # rows for 132 programs: some of them ask for a second and a third
def test_sums_stay_the_same(m: int) -> None:
    arguments = (randn(m, 260, dtype=torch.bfloat16), randn(m, 260), randn(m))
    results: list[torch.Tensor] = []
    for ahead in (0, 1):
        text = GRAD.replace("    parallel", f"    schedule cuda: blocks = 1, rows = 1, ahead = {ahead}\n    parallel")
        kernel = kgen.loads(text).grad
        program = kernel.prepare(*arguments, backend="cuda").program
        assert program is not None and bool(asked(program.source)) == (ahead > 0)
        results.append(kernel(*arguments, backend="cuda"))
    x, d_y, r = (t.double() for t in arguments)
    expected = ((x * d_y).sum(1, keepdim=True) * r[:, None] + x).sum(0)
    assert torch.equal(*results)
    cuda_kit.agree({"d_w": results[0]}, {"d_w": expected}, 260 + m)
