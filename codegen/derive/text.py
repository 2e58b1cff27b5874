"""The tile IR as `.kdsl` text, which reads back as the same IR."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kgen.codegen.origins import derived_comment, place
from kgen.dsl import ast, ir
from kgen.dsl.affine import FloorDiv, Poly, Sym
from kgen.dsl.builtins import OPERATORS
from kgen.dsl.dtypes import BOOL, F64, I32, promote
from kgen.dsl.format import format_source
from kgen.dsl.knobs import CHUNK, WARP, WHOLE
from kgen.dsl.printing import docstring_lines, expr_text
from kgen.dsl.source import NOWHERE

_SPELLED = {fn: op for op, fn in OPERATORS.items()}
# Ops whose operands the checker brings to a common dtype.
_MIXED = frozenset(_SPELLED) - {"and", "or"} | {"maximum", "minimum"}


def to_kdsl(kernel: ir.Kernel, *, comments: bool = False) -> str:
    """`kernel` as a file of the language: specialised as the IR is, so dtypes are concrete and nothing is optional.

    With `comments`, a line of comment above each group of statements names the line that they come from, and shows it
    (`kgen.codegen.origins`).
    """
    lines = [f"kernel {kernel.name}({_params(kernel)}) -> ({_outputs(kernel)}):"]
    if kernel.doc:
        lines += docstring_lines(kernel.doc, "    ")
    for r in kernel.requires:
        lines.append(f"    require {_poly_text(r.left)} {r.op} {_poly_text(r.right)}")
    for rule in kernel.schedules:
        statement = _schedule(rule)
        lines += [f"    {derived_comment(rule.span, statement)}"] if comments else []
        lines.append(f"    {statement}")
    lines += [
        f"    {kind} {', '.join(f'{a.name} in {_poly_text(a.extent)}' for a in group)}"
        for kind, group in _grouped(kernel.axes)
    ]
    last = ""
    for s in kernel.body:
        origin, statement = place(s.span), _statement(s)
        comment = derived_comment(s.span, statement)
        if comments and comment and origin != last:
            lines.append(f"    {comment}")
        last = origin
        lines.append("    " + statement)
    return format_source("\n".join(lines) + "\n")


def _schedule(rule: ir.ScheduleRule) -> str:
    """A `schedule` statement; on dtypes it has no condition, as they are concrete."""
    when = " and ".join(f"{_poly_text(c.left)} {c.op} {_poly_text(c.right)}" for c in rule.when)
    triton = rule.backend == "triton"
    settings = [f"warps = {n // WARP}" if k == "threads" and triton else f"{k} = {n}" for k, n in rule.sizes]
    settings += [f"{CHUNK}[{axis}] = {WHOLE if n is None else n}" for axis, n in rule.chunks]
    return f"schedule {rule.backend}{f' when {when}' if when else ''}: {', '.join(settings)}"


def _grouped(axes: Iterable[ir.Axis]) -> list[tuple[str, list[ir.Axis]]]:
    groups: list[tuple[str, list[ir.Axis]]] = []
    for a in axes:
        if not groups or groups[-1][0] != a.kind:
            groups.append((a.kind, []))
        groups[-1][1].append(a)
    return groups


def _params(kernel: ir.Kernel) -> str:
    tensors = [tensor_text(t) for t in kernel.tensors if t.role != "out"]
    return ", ".join([*tensors, *map(_scalar, kernel.scalars)])


def _outputs(kernel: ir.Kernel) -> str:
    return ", ".join(tensor_text(t) for t in kernel.tensors if t.role == "out")


def tensor_text(t: ir.Tensor) -> str:
    """The declaration of a tensor as a required parameter or as an output."""
    dims = ", ".join(("*" if t.star and i == 0 else "") + _poly_text(p) for i, p in enumerate(t.shape))
    return f"{t.name}: {'inout ' if t.role == 'inout' else ''}{t.dtype}[{dims}]"


def _scalar(s: ir.ScalarParam) -> str:
    return f"{s.name}: {s.dtype}" + ("" if s.default is None else f" = {expr_text(number(s.default))}")


def _statement(s: ir.Stmt) -> str:
    value = expr_text(expression(s.value))
    if isinstance(s, ir.Let):
        return f"{s.name} = {value}"
    target = f"{s.tensor}[{', '.join(map(_poly_text, s.at))}]"
    return f"{target} {'+=' if isinstance(s, ir.Accumulate) else '='} {value}"


# ---- expressions -----------------------------------------------------------------------------------------------------


def expression(e: ir.Expr) -> ast.Expr:
    """The syntax of an expression. Conversions that the checker makes by itself are left out."""
    if isinstance(e, ir.Const):
        return number(e.value)
    if isinstance(e, ir.Scalar | ir.Ref):
        return _name(e.name)
    if isinstance(e, ir.IndexValue):
        return poly_syntax(e.index)
    if isinstance(e, ir.Load):
        at = tuple(poly_syntax(s) if isinstance(s, Poly) else expression(s) for s in e.at)
        return ast.Subscript(e.tensor, at, NOWHERE, NOWHERE)
    if isinstance(e, ir.Reduce):
        return _call(e.kind, expression(e.arg), *map(_name, e.over))
    if isinstance(e, ir.Cast):
        return _call(e.to.name, expression(e.arg))
    args = _operands(e)
    if e.fn in ("neg", "not"):
        return ast.Unary("-" if e.fn == "neg" else "not", args[0], NOWHERE)
    if e.fn in _SPELLED:
        return ast.Binary(_SPELLED[e.fn], args[0], args[1], NOWHERE)
    return _call(e.fn, *args)


def _operands(e: ir.Op) -> list[ast.Expr]:
    free = list(e.args[1:] if e.fn == "where" else e.args)
    if len(free) == 2 and (e.fn in _MIXED or e.fn == "where"):
        a, b = free
        shown = [_implied(a, b), _implied(b, a)]
        if all(isinstance(x, ir.Const) for x in free):
            # Two literals settle the dtype between themselves: f64 must be said.
            shown = [_call(x.dtype.name, s) if x.dtype == F64 else s for x, s in zip(free, shown, strict=True)]
        return ([expression(e.args[0])] if e.fn == "where" else []) + shown
    return [_call(F64.name, expression(a)) if _lone_double(e, a) else expression(a) for a in e.args]


def _lone_double(e: ir.Op, a: ir.Expr) -> bool:
    return isinstance(a, ir.Const) and a.dtype == F64 and not any(b.dtype == F64 and b is not a for b in e.args)


def _implied(a: ir.Expr, other: ir.Expr) -> ast.Expr:
    """`a` as an operand beside `other`, without a conversion that follows from `other`'s dtype."""
    if (
        isinstance(a, ir.Cast)
        and a.to == a.dtype == other.dtype
        and not isinstance(a.arg, ir.Const)
        and not isinstance(other, ir.Const | ir.Cast | ir.IndexValue)
        and a.arg.dtype != BOOL
        and promote(a.arg.dtype, other.dtype) == a.to
        and a.to != I32
    ):
        return expression(a.arg)
    return expression(a)


def _call(fn: str, *args: ast.Expr) -> ast.Expr:
    return ast.Call(fn, args, NOWHERE, NOWHERE)


def _name(name: str) -> ast.Expr:
    return ast.Name(name, NOWHERE)


def number(value: float | int | bool) -> ast.Expr:
    """A number as syntax, with its sign."""
    if isinstance(value, float) and not math.isfinite(value):
        word = _name("nan" if math.isnan(value) else "inf")
        return ast.Unary("-", word, NOWHERE) if value < 0 else word
    negative = not isinstance(value, bool) and (value < 0 or (isinstance(value, float) and math.copysign(1, value) < 0))
    return ast.Unary("-", ast.Number(-value, NOWHERE), NOWHERE) if negative else ast.Number(value, NOWHERE)


# ---- index arithmetic ------------------------------------------------------------------------------------------------


def _poly_text(p: Poly) -> str:
    return expr_text(poly_syntax(p))


def poly_syntax(p: Poly) -> ast.Expr:
    """Index arithmetic as syntax: terms with a `+` first, so that it seldom begins with a sign."""
    if not p.terms:
        return ast.Number(0, NOWHERE)
    total: ast.Expr | None = None
    for mono, c in sorted(p.terms, key=lambda t: t[1] < 0):
        factors: list[ast.Expr] = [_atom(a) for a in mono]
        if abs(c) != 1 or not mono:
            factors.insert(0, ast.Number(abs(c), NOWHERE))
        term = factors[0]
        for f in factors[1:]:
            term = ast.Binary("*", term, f, NOWHERE)
        if total is None:
            total = ast.Unary("-", term, NOWHERE) if c < 0 else term
        else:
            total = ast.Binary("-" if c < 0 else "+", total, term, NOWHERE)
    assert total is not None
    return total


def _atom(a: object) -> ast.Expr:
    if isinstance(a, Sym):
        return _name(a.name)
    assert not isinstance(a, str) and hasattr(a, "num")
    op = "//" if isinstance(a, FloorDiv) else "%"
    return ast.Binary(op, poly_syntax(a.num), poly_syntax(a.den), NOWHERE)  # type: ignore[attr-defined]  # FloorDiv | Mod
