"""Is a polynomial a non-negative combination of products of known inequalities? If so it is at least 0.

The certificate is p = bound + sum of (non-negative number) * (product of facts, or a monomial), where bound > -1 is
enough as p is a whole number. Which products are tried is decided here; `simplex` finds the numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction

from kgen.dsl.affine import Monomial, Poly, Sym
from kgen.dsl.proofs.simplex import maximise

# Products of facts that a proof may use: enough for three dimensions in a subscript, few enough to take milliseconds.
MAX_PRODUCTS = 160


def is_combination(p: Poly, facts: Sequence[Poly], equal: Sequence[Poly], signed: Collection[str]) -> bool:
    """Whether p >= 0 follows from `facts` (each >= 0) and `equal` (each 0); variables not in `signed` are >= 0.

    No polynomial may hold a floor division or modulo, and p is not constant.
    """
    wanted = {mono: c for mono, c in p.terms if mono}
    known = set(wanted)
    columns: list[dict[Monomial, int]] = []
    seen: set[Poly] = set()

    def add(product: Poly, *, both: bool = False) -> None:
        if product in seen or not product.terms or len(columns) >= MAX_PRODUCTS:
            return
        seen.add(product)
        terms = dict(product.terms)
        known.update(m for m in terms if m)
        columns.append(terms)
        if both:
            columns.append({m: -c for m, c in terms.items()})

    for _ in range(2):
        targets = sorted(known, key=str)
        for f, both in [(f, False) for f in facts] + [(e, True) for e in equal]:
            for factor in _factors(f, targets):
                if both or factor.symbols.isdisjoint(signed):
                    add(f * factor, both=both)
    degree = max(len(m) for m in wanted)
    for i, f in enumerate(facts):
        for g in facts[i:]:
            product = f * g
            if max((len(m) for m, _ in product.terms), default=0) <= degree and any(
                m in known for m, _ in product.terms if m
            ):
                add(product)
    monos = sorted(known, key=str)
    row = {m: i for i, m in enumerate(monos)}
    rows: list[dict[int, int]] = [{} for _ in monos]
    objective: dict[int, int] = {}
    for j, terms in enumerate(columns):
        for mono, c in terms.items():
            if mono:
                rows[row[mono]][j] = c
            else:
                objective[j] = -c
    column = len(columns)
    for mono in monos:
        if not any(isinstance(a, Sym) and a.name in signed for a in mono):
            rows[row[mono]][column] = 1
            column += 1
    return maximise(rows, [wanted.get(m, 0) for m in monos], objective, Fraction(-1 - p.constant))


def _factors(f: Poly, targets: Iterable[Monomial]) -> Iterator[Poly]:
    """1 and the monomials by which a term of `f` must be multiplied to become one of `targets`."""
    yield Poly.const(1)
    for mono, _ in f.terms:
        if not mono:
            continue
        for target in targets:
            left = list(target)
            for atom in mono:
                if atom not in left:
                    break
                left.remove(atom)
            else:
                if left:
                    yield Poly(((tuple(left), 1),))
