"""The prover: what it must be able to prove, and that whatever it proves is true for all small sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import F32
from kgen.dsl.proofs import Facts, needs_barrier
from kgen.dsl.proofs.elements import Prover
from kgen.dsl.proofs.races import covered
from kgen.dsl.proofs.simplex import maximise
from kgen.dsl.source import NOWHERE


class _Term:
    """Lets `poly` read Python syntax."""

    def __init__(self, p: Poly) -> None:
        self.p = p

    def __add__(self, other: Any) -> _Term:
        return _Term(self.p + _p(other))

    def __sub__(self, other: Any) -> _Term:
        return _Term(self.p - _p(other))

    def __rsub__(self, other: int) -> _Term:
        return _Term(_p(other) - self.p)

    def __mul__(self, other: Any) -> _Term:
        return _Term(self.p * _p(other))

    def __floordiv__(self, other: Any) -> _Term:
        return _Term(self.p.floordiv(_p(other)))

    def __mod__(self, other: Any) -> _Term:
        return _Term(self.p.mod(_p(other)))

    __radd__, __rmul__ = __add__, __mul__


def _p(x: Any) -> Poly:
    return x.p if isinstance(x, _Term) else Poly.const(x)


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> _Term:
        return _Term(Poly.sym(name))


def poly(text: str) -> Poly:
    return _p(eval(text, {}, _Names()))


def requirement(text: str) -> ir.Requirement:
    left, op, right = next(text.partition(op) for op in ("==", "!=", "<=", ">=", "<", ">") if op in text)
    return ir.Requirement(op, poly(left), poly(right), NOWHERE)


def kernel(
    parallel: Mapping[str, str] | None = None,
    tiles: Mapping[str, str] | None = None,
    requires: tuple[str, ...] = (),
    shape: tuple[str, ...] = (),
    loads: tuple[tuple[str, ...], ...] = (),
    stores: tuple[tuple[str, ...], ...] = (),
    role: str = "inout",
) -> ir.Kernel:
    """A kernel over one tensor `y` that has these loads and stores and computes nothing of interest."""
    axes = tuple(
        ir.Axis(name, poly(extent), kind, NOWHERE)
        for kind, group in (("parallel", parallel or {}), ("tile", tiles or {}))
        for name, extent in group.items()
    )
    names = {a.name for a in axes}
    body: list[ir.Stmt] = []
    for n, at in enumerate(loads):
        subscripts = tuple(poly(s) for s in at)
        used = frozenset(x for s in subscripts for x in s.symbols if x in names)
        body.append(ir.Let(f"v{n}", ir.Load("y", subscripts, F32, used, NOWHERE), NOWHERE))
    zero = ir.Const(0.0, F32, NOWHERE)
    body += [ir.Store("y", tuple(poly(s) for s in at), zero, NOWHERE) for at in stores]
    dims = sorted({s for p in [*(a.extent for a in axes), *map(poly, shape)] for s in p.symbols})
    y = ir.Tensor("y", F32, tuple(map(poly, shape)), role, False, False, NOWHERE)
    conditions = tuple(map(requirement, requires))
    return ir.Kernel("k", "", tuple(dims), (y,), (), axes, conditions, tuple(body), (), (), NOWHERE)


# (claim, indices, requirements)
PROVABLE = [
    ("d + D // 2 < D", {"d": "D // 2"}, ()),
    ("2*d + 1 < D", {"d": "D // 2"}, ()),
    ("g*128 + i < C", {"g": "C // 128", "i": "128"}, ()),
    ("g*(C // G) + i < C", {"g": "G", "i": "C // G"}, ()),
    ("d + R // 2 < D", {"d": "R // 2"}, ("R <= D",)),
    ("R + t < D", {"t": "D - R"}, ("R <= D",)),
    ("h*D + d < H*D", {"h": "H", "d": "D"}, ()),
    ("((b*H + h)*S + s)*(D // 2) + d < B*H*S*(D // 2)", {"b": "B", "h": "H", "s": "S", "d": "D // 2"}, ()),
    ("n // 2 < N // 2 + 1", {"n": "N"}, ()),
    ("n // 2 < (N + 1) // 2", {"n": "N"}, ()),
    ("n // 2 < N // 2", {"n": "N"}, ("N % 2 == 0",)),
    ("n % K < K", {"n": "N"}, ("K >= 1",)),
    ("K - 1 - k < K", {"k": "K"}, ()),
    ("0 - 1 < K - 1 - k", {"k": "K"}, ()),
    ("d + 3*(D // 4) < D", {"d": "D // 4"}, ()),
    ("d + (D + 1) // 2 < D", {"d": "D // 2"}, ()),
    ("2*n < N", {"n": "(N + 1) // 2"}, ()),
    ("(n % K)*J + n // K < J*K", {"n": "J*K"}, ()),
    ("h // (H // G) < G", {"h": "H"}, ("H % G == 0",)),
    ("h // G < K", {"h": "H"}, ("H == K*G",)),
    ("2*(n // 2) + n % 2 < N", {"n": "N"}, ()),
    ("(n // 4)*4 + n // 2 % 2*2 + n % 2 < N", {"n": "N"}, ()),
    ("n + k < N", {"n": "N - K + 1", "k": "K"}, ()),
    ("n*S + k < (N - 1)*S + K", {"n": "N", "k": "K"}, ()),
    ("n // B < (N + B - 1) // B", {"n": "N"}, ("B >= 1",)),
    ("c*B + i < N", {"c": "N // B", "i": "B"}, ()),
    ("i*j < I*J", {"i": "I", "j": "J"}, ()),
    ("0 < N", {}, ("N != 0",)),
    ("N % 6 < 1", {}, ("N % 2 == 0", "N % 3 == 0")),
    ("N // 4 * 4 + 3 < N + 4", {}, ("N % 4 == 0",)),
]


def claim(text: str) -> Poly:
    """`left < right` as a polynomial that must be >= 0."""
    left, right = text.split("<")
    return poly(right) - poly(left) - 1


@pytest.mark.parametrize(("text", "indices", "requires"), PROVABLE, ids=[c[0] for c in PROVABLE])
def test_provable(text: str, indices: dict[str, str], requires: tuple[str, ...]) -> None:
    p = claim(text)
    facts = Facts(kernel(requires=requires), {i: poly(e) for i, e in indices.items()}, [p])
    assert facts.prove_nonneg(p)
    # Without the room that makes it true, by one, it is not proved (most of these are tight).
    assert not facts.prove_nonneg(p - 1000)


NOT_TRUE = [
    ("d + D // 2 < D", {"d": "D // 2 + 1"}, ()),
    ("2*d + 2 < D", {"d": "D // 2"}, ()),
    ("g*128 + i < C", {"g": "C // 128", "i": "129"}, ()),
    ("d + R // 2 < D", {"d": "R // 2"}, ()),
    ("n // 2 < N // 2", {"n": "N"}, ()),
    ("0 < N", {}, ()),
    ("h // (H // G) < G", {"h": "H"}, ("H >= G", "G >= 1")),
    ("N % 6 < 1", {}, ("N % 2 == 0",)),
    ("i*j + 1 < I*J", {"i": "I", "j": "J"}, ()),
]


@pytest.mark.parametrize(("text", "indices", "requires"), NOT_TRUE, ids=[c[0] for c in NOT_TRUE])
def test_what_is_not_true_is_not_proved(text: str, indices: dict[str, str], requires: tuple[str, ...]) -> None:
    p = claim(text)
    facts = Facts(kernel(requires=requires), {i: poly(e) for i, e in indices.items()}, [p])
    assert not facts.prove_nonneg(p)


# ---- against brute force -------------------------------------------------------------------------------------------

EXTENTS = ["N", "K", "N // 2", "N - K", "(N + 1) // 2", "N // K", "K + 1", "3", "N % 3", "N*K"]
REQUIRES = ["K <= N", "N % 2 == 0", "N % K == 0", "K >= 1", "N != 0", "N == 2*K", "N < 5"]
TERMS = ["i", "j", "2*i", "i // 2", "i % 2", "j % K", "i // K", "i*K", "j*N", "K - j", "(i + j) // 2", "i*j", "i // 4"]
DIMS = ["0", "1", "K", "N", "N // 2", "N % K", "N // K", "N*K", "3*K"]

requires_sets = st.lists(st.sampled_from(REQUIRES), max_size=2, unique=True).map(tuple)
subscripts = st.tuples(
    st.lists(st.sampled_from(TERMS), min_size=1, max_size=2),
    st.lists(st.sampled_from(DIMS), max_size=2),
    st.integers(-2, 2),
).map(lambda t: " + ".join([*t[0], *t[1], str(t[2])]))


def holds(r: ir.Requirement, env: Mapping[str, int]) -> bool:
    a, b = r.left.evaluate(env), r.right.evaluate(env)
    return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[r.op]


def dimensions(k: ir.Kernel, most: int) -> Iterator[dict[str, int]]:
    """Every size up to `most` that the kernel's requirements, shapes and extents allow."""
    for n, kk in product(range(most + 1), repeat=2):
        env = {"N": n, "K": kk}
        try:
            ok = all(holds(r, env) for r in k.requires) and all(
                s.evaluate(env) >= 0 for t in k.tensors for s in t.shape
            )
            for a in k.axes:
                a.extent.evaluate(env)
        except ZeroDivisionError:
            continue
        if ok:
            yield env


def points(k: ir.Kernel, env: Mapping[str, int], names: list[str]) -> Iterator[dict[str, int]]:
    """Every value of the indices `names` at those sizes."""
    for values in product(*(range(k.axis(n).extent.evaluate(env)) for n in names)):
        yield {**env, **dict(zip(names, values, strict=True))}


def value(at: tuple[str, ...], env: Mapping[str, int]) -> tuple[int, ...] | None:
    try:
        return tuple(poly(s).evaluate(env) for s in at)
    except ZeroDivisionError:
        return None


@settings(deadline=None)  # brute force over all sizes takes what it takes
@given(st.sampled_from(EXTENTS), st.sampled_from(EXTENTS), requires_sets, subscripts, st.sampled_from(DIMS))
def test_what_is_proved_is_true(i: str, j: str, requires: tuple[str, ...], left: str, right: str) -> None:
    k = kernel({"i": i, "j": j}, requires=requires)
    p = poly(right) - poly(left)
    for q in (p, -p, p + 2):
        facts = Facts(k, {a.name: a.extent for a in k.axes}, [q])
        if facts.prove_nonneg(q):
            for env in dimensions(k, 7):
                for point in points(k, env, ["i", "j"]):
                    try:
                        assert q.evaluate(point) >= 0, point
                    except ZeroDivisionError:
                        continue


two_subscripts = st.lists(subscripts, min_size=1, max_size=2).map(tuple)


@settings(deadline=None)  # brute force over all sizes takes what it takes
@given(st.sampled_from(EXTENTS), st.sampled_from(EXTENTS), requires_sets, two_subscripts, two_subscripts)
def test_what_is_said_of_elements_is_true(
    i: str, j: str, requires: tuple[str, ...], left: tuple[str, ...], right: tuple[str, ...]
) -> None:
    right = (right * 2)[: len(left)]
    k = kernel({"i": i}, {"j": j}, requires=requires)
    prover = Prover(k)
    a, b = tuple(map(poly, left)), tuple(map(poly, right))
    injective = not prover.injective(a)
    disjoint = prover.disjoint(a, b)
    own_program = prover.same_where_equal(a, b, ["i"]) == {"i"}
    if not (injective or disjoint or own_program):
        return
    in_a = sorted(prover.axes(a) | {"i"})
    in_b = sorted(prover.axes(b) | {"i"})
    for env in dimensions(k, 6):
        first = [(p, value(left, p)) for p in points(k, env, in_a)]
        second = [(p, value(right, p)) for p in points(k, env, in_b)]
        if injective:
            used = sorted(prover.axes(a))
            seen = {tuple(p[n] for n in used): v for p, v in first if v is not None}
            assert len(set(seen.values())) == len(seen), env
        where: dict[tuple[int, ...], set[int]] = {}
        for p, v in second:
            if v is not None:
                where.setdefault(v, set()).add(p["i"])
        for p, v in first:
            if v is not None and v in where:
                assert not disjoint, (p, env)
                assert not own_program or where[v] == {p["i"]}, (p, env)


# ---- stores and coverage -------------------------------------------------------------------------------------------

COVERED = [
    (("D",), {"d": "D // 2"}, (("d",), ("d + D // 2",)), ("D % 2 == 0",), True),
    (("D",), {"d": "D // 2"}, (("d",), ("d + D // 2",)), (), False),
    (("D",), {"d": "D // 2"}, (("2*d",), ("2*d + 1",)), ("D % 2 == 0",), True),
    (("D",), {"d": "R", "t": "D - R"}, (("d",), ("R + t",)), ("R <= D",), True),
    (("D",), {"d": "D // 2", "t": "D % 2"}, (("d",), ("d + D // 2",), ("2*(D // 2) + t",)), (), True),
    (("C",), {"g": "G", "i": "C // G"}, (("g*(C // G) + i",),), ("C % G == 0",), True),
    (("C",), {"g": "G", "i": "C // G"}, (("g*(C // G) + i",),), ("G >= 1",), False),
    (("N // 2", "2"), {"n": "N"}, (("n // 2", "n % 2"),), ("N % 2 == 0",), True),
]


@pytest.mark.parametrize(("shape", "parallel", "stores", "requires", "expected"), COVERED)
def test_coverage(
    shape: tuple[str, ...],
    parallel: dict[str, str],
    stores: tuple[tuple[str, ...], ...],
    requires: tuple[str, ...],
    expected: bool,
) -> None:
    k = kernel(parallel, requires=requires, shape=shape, stores=stores, role="out")
    writes = [s for s in k.body if isinstance(s, ir.Store)]
    assert covered(Prover(k), k.tensors[0], writes) is expected


# ---- barriers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "stores", "expected"),
    [
        ((("m", "n"),), (("m", "n"),), False),
        ((("m", "N - 1 - n"),), (("m", "n"),), True),
        ((("m", "0"),), (("m", "n"),), True),
        ((("m", "d"), ("m", "d + N // 2")), (("m", "d"), ("m", "d + N // 2")), False),
        ((("m", "d + N // 2"),), (("m", "d"),), False),
        ((("m", "n"),), (("m", "d"),), True),
    ],
)
def test_a_barrier_is_needed_where_another_thread_reads(
    loads: tuple[tuple[str, ...], ...], stores: tuple[tuple[str, ...], ...], expected: bool
) -> None:
    k = kernel({"m": "M"}, {"n": "N", "d": "N // 2"}, shape=("M", "N"), loads=loads, stores=stores)
    assert needs_barrier(k) == ({"y"} if expected else frozenset())


# ---- the linear programme ------------------------------------------------------------------------------------------


def test_maximise() -> None:
    # max x + y with x + 2y + s = 4, 3x + y + t = 6: 14/5 at (8/5, 6/5).
    rows, rhs, objective = [{0: 1, 1: 2, 2: 1}, {0: 3, 1: 1, 3: 1}], [4, 6], {0: 1, 1: 1}
    assert maximise(rows, rhs, objective, Fraction(14, 5) - Fraction(1, 10**9))
    assert not maximise(rows, rhs, objective, Fraction(14, 5))


def test_maximise_without_a_solution() -> None:
    assert not maximise([{0: 1, 1: 1}], [-1], {0: 1}, Fraction(-100))  # x + y = -1
    assert not maximise([{}], [1], {}, Fraction(-100))  # 0 = 1
    assert maximise([{0: 1, 1: -1}], [0], {0: 1}, Fraction(100))  # x = y, unbounded
