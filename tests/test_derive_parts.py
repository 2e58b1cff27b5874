"""Loads that read a part of a tensor: every other element has a gradient of zero."""

from __future__ import annotations

import random

import pytest
import torch
from derive_kit import call, derived_of, gradients, kernel_of, worst

from kgen.codegen.derive import DeriveError, derive
from kgen.codegen.derive.graph import Graph
from kgen.codegen.interpret import interpreted_gradients
from kgen.dsl.parser import parse_text

# Both sides compute in float64; a few hundred roundings of terms that partly cancel.
TOLERANCE = 1e-8


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(body: str, head: str = "", y: str = "T[M]", w: str = "", kind: str = "tile") -> str:
    """A kernel of rows `x` with an index `n` over `head`."""
    tile = f"    {kind} n in {head}\n" if head else ""
    target = "o[m, n]" if "," in y else "o[m]"
    return f"kernel f(x: T[M, N]{w}) -> (o: {y}):\n    parallel m in M\n{tile}    {target} = {body}\n"


def needs(text: str, requirement: str) -> str:
    return text.replace("    parallel m", f"    require {requirement}\n    parallel m")


# With sizes of x; empty parts and odd halves among them.
PARTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "one": (needs(rows("x[m, 1]"), "N >= 2"), (2, 9)),
    "two": (needs(rows("x[m, 1] * x[m, 3]"), "N >= 4"), (4, 9)),
    "one beside all": (needs(rows("x[m, N - 1] * sum(x[m, n], n)", "N"), "N >= 1"), (1, 9)),
    "all but the last": (rows("sum(x[m, n] * n, n)", "N - 1"), (0, 1, 2, 9)),
    "all but the first": (rows("sum(x[m, n + 1] * n, n)", "N - 1"), (0, 1, 2, 9)),
    "neighbours": (rows("sum((x[m, n + 1] - x[m, n]) * exp(x[m, n]) * n, n)", "N - 1"), (0, 1, 2, 9)),
    "upper half": (rows("sum(x[m, n + N // 2], n)", "N // 2"), (0, 1, 8, 9)),
    "lower half": (rows("sum(sin(x[m, n]), n)", "N // 2"), (0, 1, 8, 9)),
    "both halves": (rows("sum(x[m, n + N // 2] * x[m, n], n)", "N // 2"), (0, 1, 8, 9)),
    "even": (rows("sum(x[m, 2 * n] * n, n)", "N // 2"), (0, 1, 8, 9)),
    "odd": (rows("sum(x[m, 2 * n + 1] * x[m, 2 * n], n)", "N // 2"), (0, 1, 8, 9)),
    "mirrored half": (rows("sum(x[m, N - 1 - n] * x[m, n] * n, n)", "N // 2"), (0, 1, 8, 9)),
    "against the middle": (rows("sum(x[m, N // 2 - 1 - n] * n, n)", "N // 2"), (0, 1, 8, 9)),
    "stencil": (
        needs(
            rows("x[m, n] * w[0] + x[m, n + 1] * w[1] + x[m, n + 2] * w[2]", "N - 2", "T[M, N - 2]", ", w: T[K]"),
            "K == 3",
        ),
        (2, 3, 9),
    ),
    "convolution": (
        needs(
            rows("sum(x[m, n + k] * w[k], k)", "N - K + 1, k in K", "T[M, N - K + 1]", ", w: T[K]"), "N >= K"
        ),
        (3, 4, 9),
    ),
    "convolution of softmax": (
        needs(
            rows("sum(x[m, n + k] * softmax(w[k], k), k)", "N - K + 1, k in K", "T[M, N - K + 1]", ", w: T[K]"),
            "N >= K",
        ),
        (3, 9),
    ),
    "a spread row and column": (needs(rows("x[m, m + 1]"), "N >= M + 1"), (4, 9)),
    "one row": (
        "kernel f(x: T[M, N]) -> (o: T[N]):\n    require M >= 2\n    tile n in N\n    o[n] = x[1, n]\n", (5, 0)
    ),
}  # fmt: skip


def error(text: str, n: int) -> float:
    """The largest relative error of any gradient, against autograd of the interpreter."""
    arguments = {"x": randn(3, n)} | ({"w": randn(3, seed=1)} if "w: T[K]" in text else {})
    c = call(parse_text(text, "test.kdsl"), "f", arguments)
    mine, seeds = gradients(c, derived_of(c))
    right = interpreted_gradients(c.kernel, c.tensors, c.scalars, sorted(arguments), seeds)
    return max(worst(mine[name], right[name]) for name in arguments)


@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str) -> None:
    text, sizes = PARTS[name]
    for n in sizes:
        assert error(text, n) < TOLERANCE, n


@pytest.mark.parametrize("seed", range(30))
def test_random_parts(seed: int) -> None:
    """Sums of products of loads at `a * n + c`, also from the end, and of single elements."""
    rng = random.Random(seed)
    used = ["n", "n + 1", "n + 2", "n + 3", "N - 1 - n", "N - 2 - n", "2 * n", "2 * n + 1", "1", "N - 3", "n + N // 3"]
    loads = [f"x[m, {s}]" for s in rng.sample(used, rng.randint(1, 3))]
    text = needs(rows(f"sum({' * '.join(loads)} * n, n)", rng.choice(("N // 2 - 1", "N // 3", "N // 4"))), "N >= 6")
    assert error(text, rng.choice((6, 7, 11, 12))) < TOLERANCE, text


def test_a_part_costs_no_comparison_of_all_with_all() -> None:
    for name in ("all but the last", "neighbours", "upper half", "stencil", "convolution"):
        backward = derive(kernel_of(PARTS[name][0]), frozenset("x")).backward
        axes = [a.name for a in backward.axes if a.kind == "tile"]
        assert len(axes) == (2 if name == "convolution" else 1), name
    (line,) = [t for t in derive(kernel_of(PARTS["one"][0]), frozenset("x")).backward_text.splitlines() if "d_x[" in t]
    assert line.strip() == "d_x[m, n] = where(n == 1, d_o[m], 0.0)"


def test_a_part_without_its_limits_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = PARTS["neighbours"]
    plain = Graph.where
    for fn in ("lt", "ge"):
        monkeypatch.setattr(Graph, "where", lambda g, c, a, b, fn=fn: a if c.fn == fn else plain(g, c, a, b))
        assert error(text, 9) > 1e-4


@pytest.mark.parametrize(
    ("body", "extent", "label", "help"),
    [
        ("x[m, n]", "N - 1", "some elements are not named", "add `require N >= 1`, or make 'n' a tile index"),
        ("x[m, 2 * n]", "N // 2", "some elements are not named", "make 'n' a tile index"),
        ("x[m, n] * x[m, n // 2]", "N", "name an element more than once", "tell its elements apart"),
    ],
)
def test_what_a_spread_index_stands_in_the_way_of(body: str, extent: str, label: str, help: str) -> None:
    text = rows(body, extent, f"T[M, {extent}]", kind="parallel")
    with pytest.raises(DeriveError) as caught:
        derive(kernel_of(text), frozenset("x"))
    (found,) = caught.value.diagnostics
    assert found.code == "K0505" and label in found.label and help in (found.help or "")
    # The advice is good.
    derive(kernel_of(text.replace("    parallel n", "    tile n")), frozenset("x"))
    if "require" in help:
        derive(kernel_of(needs(text, "N >= 1")), frozenset("x"))
