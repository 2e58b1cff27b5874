"""Is this value zero for every input, whatever the tensors hold?

Values are written as sums of products of powers of *atoms*: loads, scalars, results of ops that are not arithmetic, and
sums over tile axes of products that carry those axes. So `sum(e / sum(e, n), n) - 1` is recognised. A softmax does not
depend on the maximum that it subtracts: the gradient of that maximum is such a zero, and its terms are left out of
the derived kernel. Where a value is not finite the formula and zero may differ; the forward result is then NaN as well.

Sound and incomplete: `False` means "not shown".
"""

from __future__ import annotations

from collections.abc import Hashable

from kgen.codegen.derive.graph import Node

# A product of atoms with exponents, and a sum of such products with their coefficients.
Monomial = frozenset[tuple[Hashable, int]]
Terms = dict[Monomial, float]

MAX_TERMS = 64
# Coefficients are numbers such as 1/ln 2, combined a few times in float64.
EPSILON = 1e-12

_ONE: Monomial = frozenset()


class _TooLarge(Exception):
    pass


class Algebra:
    """Canonical forms, remembered from question to question."""

    def __init__(self) -> None:
        self._memo: dict[Node, Terms] = {}
        self._axes: dict[Hashable, frozenset[str]] = {}

    def is_zero(self, a: Node) -> bool:
        """Whether `a` is shown to be zero."""
        try:
            terms = self._terms(a)
        except _TooLarge:
            return False
        return not terms

    def _terms(self, a: Node) -> Terms:
        if a not in self._memo:
            terms = self._expand(a)
            if len(terms) > MAX_TERMS:
                raise _TooLarge
            self._memo[a] = terms
        return self._memo[a]

    def _expand(self, a: Node) -> Terms:
        if a.value is not None:
            return {_ONE: float(a.value)} if a.value else {}
        if a.fn in ("add", "sub"):
            return _sum(self._terms(a.args[0]), self._terms(a.args[1]), 1 if a.fn == "add" else -1)
        if a.fn == "neg":
            return {m: -c for m, c in self._terms(a.args[0]).items()}
        if a.fn == "mul":
            return _product(self._terms(a.args[0]), self._terms(a.args[1]))
        if a.fn == "div":
            return _product(self._terms(a.args[0]), self._inverse(a.args[1]))
        if a.kind == "cast" and a.args[0].kind == "index":
            return self._atom(("index", a.args[0].data), a.axes)
        if a.kind == "reduce" and a.reduction[0] == "sum":
            return self._reduced(a)
        return self._atom(a, a.axes)

    def _atom(self, key: Hashable, axes: frozenset[str], power: int = 1) -> Terms:
        self._axes[key] = axes
        return {frozenset(((key, power),)): 1.0}

    def _inverse(self, a: Node) -> Terms:
        terms = self._terms(a)
        if len(terms) == 1:
            ((m, c),) = terms.items()
            return {frozenset((k, -p) for k, p in m): 1 / c}
        return self._atom(("sum of", frozenset(terms.items())), a.axes, -1)

    def _reduced(self, a: Node) -> Terms:
        over = frozenset(a.reduction[1])
        out: Terms = {}
        for m, c in self._terms(a.args[0]).items():
            inside = frozenset((k, p) for k, p in m if self._axes[k] & over)
            axes = frozenset[str]().union(*(self._axes[k] for k, _ in inside))
            # Axes that no factor carries multiply by their extent, which the atom stands for.
            total = self._atom(("sum", over, inside), axes - over)
            out = _sum(out, _product({m - inside: c}, total))
        return out


def _sum(a: Terms, b: Terms, sign: int = 1) -> Terms:
    out = dict(a)
    for m, c in b.items():
        total = out.get(m, 0.0) + sign * c
        if abs(total) <= EPSILON * abs(c):
            out.pop(m, None)
        else:
            out[m] = total
    return out


def _product(a: Terms, b: Terms) -> Terms:
    if len(a) * len(b) > MAX_TERMS**2:
        raise _TooLarge
    out: Terms = {}
    for m, c in a.items():
        for n, d in b.items():
            powers = dict(m)
            for key, p in n:
                powers[key] = powers.get(key, 0) + p
            out = _sum(out, {frozenset((k, p) for k, p in powers.items() if p): c * d})
    return out
