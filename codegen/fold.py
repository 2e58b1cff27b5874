"""What is left of statements when some of their conditions are known?

No value changes: a choice that is made is the operand that it would have given, and of arithmetic only `x - 0.0` goes,
which is `x` whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import copysign

from kgen.codegen.normalize import with_children
from kgen.codegen.phases import live
from kgen.dsl import ir
from kgen.dsl.dtypes import BOOL

Known = Callable[[ir.Expr], "ir.Expr | None"]  # what stands for an expression, if anything does


def truth(value: bool, like: ir.Expr) -> ir.Const:
    """`value` in place of the condition `like`."""
    return ir.Const(value, BOOL, like.span)


def folded(e: ir.Expr, known: Known) -> ir.Expr:
    """`e` with what is known of its subexpressions in their place, and without the choices that are made thereby."""
    found = known(e)
    if found is not None:
        return found
    before = ir.children(e)
    after = tuple(folded(a, known) for a in before)
    if all(a is b for a, b in zip(before, after, strict=True)):
        return e
    e = with_children(e, after)
    if isinstance(e, ir.Load):
        return replace(e, axes=e.axes & ir.subscript_symbols(e.at) | _axes(after))
    return _simplified(replace(e, axes=_axes(after)) if isinstance(e, ir.Op | ir.Cast) else e)


def settled(body: tuple[ir.Stmt, ...], axis: str, known: Known) -> tuple[ir.Stmt, ...]:
    """The statements of a pass along `axis` with what is `known` of the values that are not reduced. What does not vary
    along the axis any more stands where it was used, and what nothing uses is gone."""
    values: dict[str, ir.Expr] = {}

    def own(e: ir.Expr) -> ir.Expr | None:
        found = values.get(e.name) if isinstance(e, ir.Ref) else None
        return known(e) if found is None else found

    out: list[ir.Stmt] = []
    reduced = {s.name for s in body if isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce)}
    for s in body:
        value = s.value if isinstance(s.value, ir.Reduce) else folded(s.value, own)
        if isinstance(s, ir.Let) and s.name not in reduced:
            if axis not in value.axes or isinstance(value, ir.Ref):
                values[s.name] = value
                continue
            if value is not s.value:
                values[s.name] = ir.Ref(s.name, value.dtype, value.axes, s.span)
        out.append(s if value is s.value else replace(s, value=value))
    return live(out, reduced)


def _axes(operands: tuple[ir.Expr, ...]) -> frozenset[str]:
    return frozenset[str]().union(*(e.axes for e in operands))


def _simplified(e: ir.Expr) -> ir.Expr:
    """`e`, some of whose operands may have become constants."""
    if isinstance(e, ir.Cast) and isinstance(e.arg, ir.Const) and e.arg.dtype == BOOL:
        return ir.Const(float(e.arg.value) if e.dtype.kind == "float" else int(e.arg.value), e.dtype, e.span)
    if not isinstance(e, ir.Op):
        return e
    first, *rest = e.args
    if e.fn == "where" and isinstance(first, ir.Const):
        return rest[0] if first.value else rest[1]
    if e.fn == "not" and isinstance(first, ir.Const):
        return truth(not first.value, e)
    if e.fn in ("and", "or"):
        settles = e.fn == "or"  # the operand that decides
        constants = [bool(a.value) for a in e.args if isinstance(a, ir.Const)]
        if settles in constants:
            return truth(settles, e)
        left = [a for a in e.args if not isinstance(a, ir.Const)]
        return truth(not settles, e) if not left else left[0] if len(left) == 1 else e
    if e.fn == "sub" and isinstance(zero := rest[0], ir.Const) and zero.value == 0 and copysign(1.0, zero.value) > 0:
        return first
    return e
