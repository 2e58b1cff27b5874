"""Index arithmetic against plain Python integers: canonical forms must not change any value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgen.dsl.affine import FloorDiv, Mod, Poly

NAMES = ("a", "b", "K", "N")

# An expression is a nested tuple (operator, left, right), a name or a number, so that it can be evaluated both ways.
Tree = Any
leaves = st.one_of(st.sampled_from(NAMES), st.integers(-6, 6))
trees = st.recursive(
    leaves,
    lambda sub: st.one_of(
        st.tuples(st.sampled_from(("+", "-", "*")), sub, sub),
        st.tuples(st.sampled_from(("//", "%")), sub, st.one_of(st.sampled_from(NAMES), st.integers(-6, 6), sub)),
    ),
    max_leaves=7,
)
environments = st.fixed_dictionaries({name: st.integers(-7, 9) for name in NAMES})


def build(tree: Tree) -> Poly:
    if isinstance(tree, str):
        return Poly.sym(tree)
    if isinstance(tree, int):
        return Poly.const(tree)
    op, left, right = tree[0], build(tree[1]), build(tree[2])
    if op in "+-*":
        return {"+": left + right, "-": left - right, "*": left * right}[op]
    return left.floordiv(right) if op == "//" else left.mod(right)


def plain(tree: Tree, env: dict[str, int]) -> int:
    if isinstance(tree, str):
        return env[tree]
    if isinstance(tree, int):
        return tree
    op, left, right = tree[0], plain(tree[1], env), plain(tree[2], env)
    if op in "+-*":
        return {"+": left + right, "-": left - right, "*": left * right}[op]
    return left // right if op == "//" else left % right


def is_canonical(p: Poly) -> bool:
    """Terms sorted, no zero coefficient, no term twice."""
    monos = [mono for mono, _ in p.terms]
    return p == Poly._of(dict(p.terms)) and len(set(monos)) == len(monos)


@given(trees, environments)
def test_a_polynomial_has_the_value_of_its_expression(tree: Tree, env: dict[str, int]) -> None:
    try:
        expected = plain(tree, env)
    except ZeroDivisionError:
        return  # a division by 0 may cancel, for example in 0*(a // 0)
    p = build(tree)
    assert is_canonical(p)
    assert p.evaluate(env) == expected


@given(trees, environments)
def test_the_text_of_a_polynomial_is_python_for_it(tree: Tree, env: dict[str, int]) -> None:
    p = build(tree)
    try:
        expected = p.evaluate(env)
    except ZeroDivisionError:
        return
    assert eval(str(p), {}, dict(env)) == expected


@given(trees, st.dictionaries(st.sampled_from(NAMES), trees, max_size=2), environments)
def test_substitution_commutes_with_evaluation(tree: Tree, replace: dict[str, Tree], env: dict[str, int]) -> None:
    p = build(tree)
    try:
        inner = {name: build(t).evaluate(env) for name, t in replace.items()}
        expected = p.evaluate(env | inner)
    except ZeroDivisionError:
        return
    assert p.substitute({name: build(t) for name, t in replace.items()}).evaluate(env) == expected
    assert p.substitute(inner).evaluate(env) == expected


@given(trees, st.sampled_from(NAMES), environments)
def test_a_coefficient_is_the_slope(tree: Tree, name: str, env: dict[str, int]) -> None:
    p = build(tree)
    slope = p.coefficient(name)
    if slope is None:
        return
    assert name not in slope.symbols
    try:
        at = [p.evaluate(env | {name: value}) for value in (-3, 0, 1, 5)]
        a = slope.evaluate(env)
    except ZeroDivisionError:
        return
    assert [x - at[1] for x in at] == [-3 * a, 0, a, 5 * a]


@given(trees, trees)
def test_sums_and_products_do_not_depend_on_the_order(left: Tree, right: Tree) -> None:
    a, b = build(left), build(right)
    assert a + b == b + a
    assert a * b == b * a
    assert a - b == -(b - a)
    assert a * (b + 1) == a * b + a


a, b, g, i, K, N = (Poly.sym(n) for n in ("a", "b", "g", "i", "K", "N"))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (a * 2 + 1, a + 1 + a),
        ((g * K + i).floordiv(K), g + i.floordiv(K)),
        ((g * 128 + i).mod(128), i.mod(128)),
        ((K * a).floordiv(K * 2), a.floordiv(2)),
        ((K * a).mod(K * 2), K * a.mod(2)),
        ((a * 2 + 1).floordiv(4), a.floordiv(2)),
        ((a * 2 + 1).mod(4), a.mod(2) * 2 + 1),
        (a.floordiv(2).floordiv(3), a.floordiv(6)),
        ((a.floordiv(2) + 1).floordiv(3), (a + 2).floordiv(6)),
        ((N * N).floordiv(N), N),
        (N.mod(N), Poly.const(0)),
        (N.mod(1), Poly.const(0)),
        (Poly.const(-7).floordiv(2), Poly.const(-4)),
        (Poly.const(-7).mod(3), Poly.const(2)),
    ],
    ids=str,
)
def test_spellings_of_one_value_are_equal(left: Poly, right: Poly) -> None:
    assert left == right


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (a.floordiv(2), "a // 2"),
        (-a.floordiv(2), "-(a // 2)"),
        (a + N.floordiv(2), "(N // 2) + a"),
        (a * 2 + 1, "2*a + 1"),
        ((a + 1).mod(K), "(a + 1) % K"),
        (Poly.const(0), "0"),
        (Poly.const(-3), "-3"),
        (a - b, "a - b"),
    ],
    ids=str,
)
def test_text(p: Poly, text: str) -> None:
    assert str(p) == text


def test_a_division_by_zero_is_an_error_of_evaluation() -> None:
    for p in (a.floordiv(0), a.mod(0), Poly.const(3).floordiv(0), Poly.const(0).mod(0)):
        with pytest.raises(ZeroDivisionError):
            p.evaluate({"a": 1})


def test_names_inside_divisions_count() -> None:
    p = a.floordiv(K) + b
    assert p.symbols == {"a", "b", "K"}
    assert p.coefficient("a") is None
    assert p.coefficient("b") == Poly.const(1)
    assert FloorDiv(a, K) != Mod(a, K)
