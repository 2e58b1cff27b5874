"""Weights that Triton loads behind the reductions that they would be held across."""

from __future__ import annotations

import re

import pytest
import torch
import triton_kit
from cuda_kit import call

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


def order(text: str, n: int = 256, **shapes: tuple[int, ...]) -> list[str]:
    """The loads and reductions of the Triton text, in order."""
    sizes = {"x": (3, n), "w": (n,), "b": (n,), **shapes}
    g = torch.Generator().manual_seed(n)
    c = call(text, "norm", **{k: torch.randn(*s, generator=g).to(torch.bfloat16) for k, s in sizes.items()})
    triton_kit.check(c)
    found = re.finditer(r"tl\.load\(\s*(\w)_|tl\.(sum)\(", triton_kit.emitted(c).source)
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
