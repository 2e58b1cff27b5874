"""Weights that Triton loads behind the reductions that they would be held across."""

from __future__ import annotations

import re

import pytest
import sums_kit
import torch
import triton_kit
from cuda_kit import Call, call

from kgen.codegen import ladders

NORM = """kernel norm(x: T[*M, N], w: T[N], b: T[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    c = x[m, n] - mean(x[m, n], n)
    y[m, n] = c * rsqrt(mean(c * c, n) + 1e-5) * w[n] + b[n]
"""
# The weight is needed in front of both reductions, or between them.
FIRST = NORM.replace("x[m, n] - mean(x[m, n], n)", "x[m, n] * w[n] - mean(x[m, n], n)")
BETWEEN = NORM.replace("mean(c * c, n)", "mean(c * c * w[n], n)")
# What is made of weights alone has a name.
NAMED = NORM.replace("    c =", "    g = w[n] + 1.0\n    h = g * g + w[n]\n    c =").replace(
    "* w[n] + b", "* g + h + b"
)
# What each row has to itself, and what is overwritten, is loaded first.
ROWS = NORM.replace("b: T[N]", "b: T[*M, N]").replace("b[n]", "b[m, n]")
# What is looked up waits for its positions, which come first with it.
LOOKED_UP = NORM.replace("w: T[N]", "w: i64[N], t: T[V]").replace("w[n]", "t[w[n]]")
# A single row, which overwrites its weight before what that was is used.
OVERWRITTEN = """kernel norm(x: T[N], w: inout T[N], b: T[N]) -> (y: T[N]):
    tile n in N
    old = w[n]
    c = x[n] - mean(x[n], n)
    d = c * rsqrt(mean(c * c, n) + 1e-5)
    w[n] = d
    y[n] = d * old + b[n]
"""
SUMS = """kernel norm(x: T[*M, N], w: T[N], b: T[N]) -> (y: f32[N]):
    parallel m in M
    tile n in N
    c = x[m, n] - mean(x[m, n], n)
    y[n] += c * rsqrt(mean(c * c, n) + 1e-5) * w[n] + b[n]
"""


def given(text: str, n: int, **shapes: tuple[int, ...]) -> Call:
    sizes = {"x": (3, n), "w": (n,), "b": (n,), **shapes}
    g = torch.Generator().manual_seed(n)
    tensors = {k: torch.randn(*s, generator=g).to(torch.bfloat16) for k, s in sizes.items()}
    if "w: i64" in text:
        tensors["w"] = torch.randint(0, sizes["t"][0], (n,), generator=g)
    return call(text, "norm", **tensors)


def order(text: str, n: int = 256, **shapes: tuple[int, ...]) -> list[str]:
    """The loads and reductions of the first launch of the Triton text, in order."""
    c = given(text, n, **shapes)
    program = triton_kit.emitted(c)
    got = triton_kit.run(c) if len(program.launches) == 1 else sums_kit.run(c, "triton")
    sums_kit.within_bounds(c, got)
    found = re.finditer(r"tl\.load\(\s*(\w)_|tl\.(sum)\(", program.launches[0].source)
    return [m[1] or m[2] for m in found]


@pytest.mark.parametrize("n", [256, 200])
def test_behind_several_reductions(n: int) -> None:
    assert order(NORM, n) == ["x", "sum", "sum", "w", "b"]


def test_not_behind_their_first_use() -> None:
    assert order(FIRST) == ["x", "w", "sum", "sum", "b"]
    assert order(BETWEEN) == ["x", "w", "sum", "sum", "b"]


def test_what_is_computed_of_weights_alone_comes_late_too() -> None:
    assert order(NAMED) == ["x", "sum", "sum", "w", "b"]
    assert order(NAMED.replace("c * c, n", "c * c * h, n")) == ["w", "x", "sum", "sum", "b"]


def test_what_is_overwritten_is_loaded_first() -> None:
    assert order(OVERWRITTEN, x=(256,)) == ["w", "x", "sum", "sum", "b"]


def test_what_is_looked_up_is_loaded_first() -> None:
    assert order(LOOKED_UP, t=(7,)) == ["x", "w", "t", "sum", "sum", "b"]


def test_sums_over_programs_hold_weights_for_all_their_rows() -> None:
    assert order(SUMS)[:3] == ["x", "w", "b"]


def test_rows_are_loaded_first() -> None:
    assert order(ROWS, b=(3, 256)) == ["x", "b", "sum", "sum", "w"]


def test_across_as_many_as_the_ladder_says(monkeypatch: pytest.MonkeyPatch) -> None:
    once = NORM.replace(" - mean(x[m, n], n)", "")
    assert order(once) == ["x", "w", "b", "sum"]
    monkeypatch.setattr("kgen.codegen.late.HELD_ACROSS", 0)
    assert order(once) == ["x", "sum", "w", "b"]
    monkeypatch.setattr("kgen.codegen.late.HELD_ACROSS", 2)
    assert order(NORM) == ["x", "w", "b", "sum", "sum"]
    assert ladders.HELD_ACROSS == 1
