"""Which elements of a tensor do two subscripts name: the same, different ones, the same only in one program?

The questions behind races, double writes and in-place updates. All answers are sound and incomplete: `False` (or an
absent index) means "not shown".
"""

from __future__ import annotations

from collections.abc import Iterable

from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.proofs.prove import Facts

Subscripts = tuple[Poly | ir.Expr, ...]


class Prover:
    """The facts of one kernel, made once for each set of indices in scope.

    A statement runs for every value of the parallel indices and of the tile indices that it names; each of those then
    has an extent of at least 1. An index that it does not name says nothing: with `t in D - R` and R == D only
    the statements with `t` have nothing to do.
    """

    def __init__(self, kernel: ir.Kernel) -> None:
        self.kernel = kernel
        self._extents = {a.name: a.extent for a in kernel.axes}
        self._parallel = frozenset(a.name for a in kernel.parallel)
        self._subscripts = tuple(dict.fromkeys(p for at in _all_subscripts(kernel) for p in at if isinstance(p, Poly)))
        self._cache: dict[tuple[frozenset[str], bool, frozenset[Poly]], Facts] = {}
        self._injective: dict[Subscripts, frozenset[str]] = {}

    def axes(self, *subscripts: Subscripts) -> frozenset[str]:
        """The indices that occur in affine subscripts."""
        names = {n for at in subscripts for p in at if isinstance(p, Poly) for n in p.symbols}
        return frozenset(names & self._extents.keys())

    def facts(self, *subscripts: Subscripts, paired: bool = False, extra: Iterable[str] = ()) -> Facts:
        """What holds where all of these are used (and where the indices `extra` have a value)."""
        scope = self._parallel | self.axes(*subscripts) | frozenset(extra)
        own = {p for at in subscripts for p in at if isinstance(p, Poly)}
        key = (scope, paired, frozenset(own.difference(self._subscripts)))
        if key not in self._cache:
            indices = {a.name: a.extent for a in self.kernel.axes if a.name in scope}
            outside = self._extents.keys() - scope
            about = [p for p in self._subscripts if not p.symbols & outside]
            about += sorted(key[2], key=str)
            self._cache[key] = Facts(self.kernel, indices, about, paired=paired)
        return self._cache[key]

    def same_where_equal(self, left: Subscripts, right: Subscripts, axes: Iterable[str]) -> frozenset[str]:
        """The indices of `axes` that must agree wherever `left`, at one point, and `right`, at any other point and in
        any program, name the same element."""
        facts = self.facts(left, right, paired=True)
        equal = _equal_parts(facts, left, right)
        return frozenset(a for a in axes if all(p in equal for p in facts.parts(a)))

    def injective(self, at: Subscripts) -> frozenset[str]:
        """The indices in `at` that its value does not determine: empty if different points are different elements."""
        if at not in self._injective:
            axes = self.axes(at)
            self._injective[at] = axes - self.same_where_equal(at, at, axes)
        return self._injective[at]

    def disjoint(self, left: Subscripts, right: Subscripts) -> bool:
        """Whether `left` and `right` never name the same element, whatever the points and the programs."""
        facts = self.facts(left, right, paired=True)
        equal = _equal_parts(facts, left, right)
        return any(_never_zero(facts, d) for d in _differences(facts, left, right, equal))


def _all_subscripts(kernel: ir.Kernel) -> Iterable[Subscripts]:
    for s in kernel.body:
        for e in ir.walk(s.value):
            if isinstance(e, ir.Load):
                yield e.at
        if isinstance(s, ir.Store | ir.Accumulate):
            yield s.at


def _differences(facts: Facts, left: Subscripts, right: Subscripts, equal: Iterable[str]) -> list[Poly]:
    """`left - right` for each dimension with affine subscripts. The right one has its own indices, but for `equal`."""
    together = {v + "'": Poly.sym(v) for v in equal}
    return [
        (facts.normalise(a) - facts.prime(facts.normalise(b))).substitute(together)
        for a, b in zip(left, right, strict=True)
        if isinstance(a, Poly) and isinstance(b, Poly)
    ]


def _equal_parts(facts: Facts, left: Subscripts, right: Subscripts) -> frozenset[str]:
    """The index variables v for which `left == right` implies v == v'.

    In a difference `c*(v - v') + rest`, v and v' differ by at least 1 or not at all: if c is larger than |rest| can
    get, they are equal. What was found helps with the next: y[g*128 + i] gives g first, then i.
    """
    parts = sorted(v for v in facts.index_parts if not v.endswith("'"))
    equal = {v for v in parts if facts.prove_nonneg(-facts.highest(v))}
    found = True
    while found:
        found = False
        for difference in _differences(facts, left, right, equal):
            for v in parts:
                slope, other = difference.coefficient(v), difference.coefficient(v + "'")
                if v in equal or slope is None or other is None or not slope.terms or slope + other != Poly.const(0):
                    continue
                rest = difference - slope * (Poly.sym(v) - Poly.sym(v + "'"))
                if any(
                    facts.prove_nonneg(size - 1 - rest) and facts.prove_nonneg(size - 1 + rest)
                    for size in (slope, -slope)
                ):
                    equal.add(v)
                    found = True
                    break
            if found:
                break
    return frozenset(equal)


def _never_zero(facts: Facts, p: Poly) -> bool:
    """Whether p is never 0: it has one sign, or it is no multiple of something that divides its other terms."""
    if facts.prove_positive(p) or facts.prove_positive(-p):
        return True
    moduli = [Poly.const(abs(c)) for mono, c in p.terms if mono and abs(c) > 1]
    for v in sorted(p.symbols & facts.index_parts):
        slope = p.coefficient(v)
        if slope is not None and len(slope.terms) == 1 and not slope.is_constant:
            moduli.append(slope if slope.terms[0][1] > 0 else -slope)
    for modulus in dict.fromkeys(moduli):
        _, rest = p.divide_terms(modulus)
        if modulus.is_constant and rest.is_constant:
            rest = Poly.const(rest.constant % modulus.constant)
        for r in (rest, -rest):
            if facts.prove_positive(r) and facts.prove_positive(modulus - r):
                return True
    return False
