"""Is every affine subscript inside its dimension, and does every division have a positive divisor?

Gathers are not checked here: out of range they read no memory, by definition.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.proofs.elements import Prover, Subscripts
from kgen.dsl.proofs.prove import Facts, divisions
from kgen.dsl.source import NOWHERE, Span


def check_bounds(prover: Prover, diagnostics: Diagnostics) -> None:
    """Report K0301 for a subscript that may leave its dimension, K0302 for a gather in a starred one, K0303 for a
    divisor that may be 0."""
    kernel = prover.kernel
    settled: set[tuple[Poly, Poly]] = set()  # a load and a store at one place have one proof, or one cause
    for access in ir.accesses(kernel.body):
        name, at, span = access.tensor, access.at, access.span
        tensor = kernel.tensor(name)
        for position, (subscript, extent) in enumerate(zip(at, tensor.shape, strict=True)):
            if isinstance(subscript, Poly):
                if (subscript, extent) in settled or not _check_divisors(prover, subscript, span, diagnostics):
                    continue
                settled.add((subscript, extent))
                if not _inside(prover.facts((subscript,)), subscript, extent):
                    _report(prover, tensor, position, subscript, span, diagnostics)
            elif tensor.star and position == 0:
                diagnostics.error(
                    "K0302",
                    f"the leading dimensions of '{name}' are subscripted by a value",
                    span,
                    label=f"'*{extent}' stands for any number of dimensions",
                    help=f"declare them one by one, for example {name}: {tensor.dtype}[{extent}, ...]",
                )
    for s in kernel.body:
        for e in ir.walk(s.value):
            if isinstance(e, ir.IndexValue):
                _check_divisors(prover, e.index, e.span, diagnostics)
    for axis in kernel.axes:
        _check_divisors(prover, axis.extent, axis.span, diagnostics, everywhere=True)


def in_bounds(prover: Prover, tensor: ir.Tensor, at: Subscripts) -> bool:
    """Whether all affine subscripts are proved to lie inside `tensor`."""
    return all(
        _inside(prover.facts((subscript,)), subscript, extent)
        for subscript, extent in zip(at, tensor.shape, strict=True)
        if isinstance(subscript, Poly)
    )


def _inside(facts: Facts, subscript: Poly, extent: Poly) -> bool:
    return facts.prove_nonneg(subscript) and facts.prove_positive(extent - subscript)


def _check_divisors(prover: Prover, p: Poly, span: Span, diagnostics: Diagnostics, *, everywhere: bool = False) -> bool:
    every_axis = [a.name for a in prover.kernel.axes] if everywhere else ()
    for _, den in divisions(p):
        facts = prover.facts((p, den), extra=every_axis)
        if not (facts.prove_positive(den) or facts.prove_positive(-den)):
            diagnostics.error(
                "K0303",
                f"the divisor {den} may be 0",
                span,
                label=f"in {p}",
                help=f"add `require {den} >= 1`" if not prover.axes((den,)) else "divide by something positive",
            )
            return False
    return True


def _report(
    prover: Prover, tensor: ir.Tensor, position: int, subscript: Poly, span: Span, diagnostics: Diagnostics
) -> None:
    extent = tensor.shape[position]
    label = f"dimension {position} of '{tensor.name}' has extent {extent}"
    bounds = _range(prover, prover.facts((subscript,)), subscript)
    if bounds is not None and bounds[0] != bounds[1]:
        label = f"{subscript} goes from {bounds[0]} to {bounds[1]}; {label}"
    diagnostics.error(
        "K0301",
        f"subscript {subscript} of '{tensor.name}' may be out of bounds",
        span,
        label=label,
        help=_advice(prover, subscript, bounds, extent),
    )


def _range(prover: Prover, facts: Facts, subscript: Poly) -> tuple[Poly, Poly] | None:
    """The least and the largest value in the user's own names, where each index has a known direction."""
    low = high = subscript
    for name in sorted(prover.axes((subscript,))):
        slope = subscript.coefficient(name)
        if slope is None or prover.axes((slope,)):
            return None
        last = prover.kernel.axis(name).extent - 1
        if facts.prove_nonneg(slope):
            low, high = low.substitute({name: 0}), high.substitute({name: last})
        elif facts.prove_nonneg(-slope):
            low, high = low.substitute({name: last}), high.substitute({name: 0})
        else:
            return None
    return low, high


def _advice(prover: Prover, subscript: Poly, bounds: tuple[Poly, Poly] | None, extent: Poly) -> str:
    """A `require` that is enough, if there is one that can be met; else what else to change."""
    kernel = prover.kernel
    axes = prover.axes((subscript,))
    indices = {a.name: a.extent for a in kernel.axes if a.name in axes or a.kind == "parallel"}
    candidates = divisibility([*indices.values(), extent, subscript], without=axes)
    if bounds is not None:
        low, high = bounds
        candidates += [relation("<=", high + 1, extent), relation("<=", Poly.const(0), low)]
    for condition in candidates:
        facts = Facts(kernel, indices, [subscript, extent], requires=[condition])
        if can_hold(condition) and _inside(facts, subscript, extent):
            return f"add `{describe(condition)}`"
    name = min(axes, default=None)
    if name is None:
        return f"subscripts go from 0 to {extent - 1}"
    own = kernel.axis(name).extent
    return f"subscripts go from 0 to {extent - 1}: change the subscript, or the extent {own} of '{name}'"


def divisibility(polys: list[Poly], without: Collection[str] = ()) -> list[ir.Requirement]:
    """`a % b == 0` for each division `a // b` or `(a + constant) // b` in `polys` that does not mention `without`."""
    found = [
        ir.Requirement("==", (num - num.constant).mod(den), Poly.const(0), NOWHERE)
        for p in polys
        for num, den in divisions(p)
        if not (num.symbols | den.symbols) & set(without)
    ]
    return [r for r in dict.fromkeys(found) if not r.left.is_constant]


def can_hold(condition: ir.Requirement) -> bool:
    """Whether a condition holds for some dimensions of ordinary size: one that never does is no advice."""
    names = sorted(condition.left.symbols | condition.right.symbols)
    for sizes in product((8, 128, 3, 640), repeat=min(len(names), 4)):
        env = dict.fromkeys(names, 8) | dict(zip(names, sizes, strict=False))
        left, right = condition.left.evaluate(env), condition.right.evaluate(env)
        if {"==": left == right, "<=": left <= right}[condition.op]:
            return True
    return False


def relation(op: str, left: Poly, right: Poly) -> ir.Requirement:
    """`left op right` with each term on the side where its sign is +."""
    difference = left - right
    plus = Poly(tuple((m, c) for m, c in difference.terms if c > 0))
    minus = Poly(tuple((m, -c) for m, c in difference.terms if c < 0))
    return ir.Requirement(op, plus, minus, NOWHERE)


def describe(requirement: ir.Requirement) -> str:
    """A requirement as a user would write it."""
    op, left, right = requirement.op, requirement.left, requirement.right
    if left.is_constant:
        op, left, right = {"<=": ">=", "<": ">", "==": "=="}[op], right, left
    return f"require {left} {op} {right}"
