"""Typed operations: in which dtype are typed values combined, and what are composite reductions written out? What the
source says to combine is for `kgen.dsl.check.expressions` to find."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import REDUCTIONS, SCALAR_OPS
from kgen.dsl.check.scope import Scope
from kgen.dsl.dtypes import BOOL, F32, I32, I64, DType, promote
from kgen.dsl.source import Span


class Stop(Exception):
    """Raised inside one statement after its mistake was reported; the statement is given up, the kernel goes on."""


class Operations:
    """Makes operations in a scope. Every method returns a typed `ir.Expr` or reports and raises `Stop`."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def fail(self, code: str, message: str, span: Span, help: str = "", label: str = "") -> Stop:
        """Report a mistake; the caller raises what this returns."""
        self.scope.broken = True
        self.scope.diagnostics.error(code, message, span, help=help, label=label, notes=self.scope.path_notes())
        return Stop()

    def _fold(self, op: str, a: ir.Expr, b: ir.Expr, span: Span) -> ir.Expr | None:
        """Arithmetic on two literals, done exactly as Python does it; None where it is left to run time."""
        if not (isinstance(a, ir.Const) and isinstance(b, ir.Const)) or op not in ("+", "-", "*", "/", "//", "%"):
            return None
        x, y = a.value, b.value
        if op in ("//", "%") and (isinstance(x, float) or isinstance(y, float)):
            return None
        if op in ("/", "//", "%") and y == 0:
            raise self.fail("K0226", "division by a constant zero", span, "change the divisor")
        try:
            value = {
                "+": x + y,
                "-": x - y,
                "*": x * y,
                "/": x / y if y else 0,
                "//": x // y if y else 0,
                "%": x % y if y else 0,
            }[op]
        except OverflowError:
            raise self.fail("K0226", "this constant is out of range", span, "use a smaller literal") from None
        return number(value, span)

    def _apply(self, fn: str, args: Sequence[ir.Expr], span: Span, spelled: str | None = None) -> ir.Expr:
        """A scalar op with the operands cast to what it computes in."""
        spec = SCALAR_OPS[fn]
        if fn == "where":
            cond = self._want_bool(args[0], "where")
            a, b = self._common(args[1], args[2], keep_bool=True)
            return self._op(fn, (cond, a, b), a.dtype, span)
        operands = tuple(self._numeric(a) if fn not in ("eq", "ne") else a for a in args)
        if len(operands) == 2:
            operands = self._common(operands[0], operands[1], keep_bool=fn in ("eq", "ne"))
        dtype = operands[0].dtype
        if fn in ("floordiv", "mod") and dtype.kind == "float":
            raise self.fail(
                "K0208",
                f"'{spelled or fn}' needs integers, got {dtype}",
                span,
                "for floats write floor(a / b) or a - b * floor(a / b)",
            )
        if spec.result == "float" and dtype.kind != "float":
            operands = tuple(coerce(a, F32) for a in operands)
            dtype = F32
        if spec.result == "bool":
            dtype = BOOL
        if fn in ("isnan", "isinf") and operands[0].dtype.kind != "float":
            operands = (coerce(operands[0], F32),)
        if fn == "pow" and isinstance(b := operands[-1], ir.Const) and b.value in (2, 3):
            return self._product(operands[0], int(b.value), dtype, span)
        return self._op(fn, operands, dtype, span)

    def _product(self, a: ir.Expr, count: int, dtype: DType, span: Span) -> ir.Expr:
        """`a` times itself: a power by way of a logarithm would cost some 40 instructions, and be less exact."""
        if isinstance(a, ir.Op | ir.Cast | ir.Reduce):
            a = self.scope.bind("base", a, a.span)
        square = self._op("mul", (a, a), dtype, span)
        return square if count == 2 else self._op("mul", (square, a), dtype, span)

    def _op(self, fn: str, args: tuple[ir.Expr, ...], dtype: DType, span: Span) -> ir.Op:
        axes = frozenset().union(*(a.axes for a in args))
        return ir.Op(fn, args, dtype, axes, span)

    def _common(self, a: ir.Expr, b: ir.Expr, *, keep_bool: bool = False) -> tuple[ir.Expr, ir.Expr]:
        """Both operands in the dtype they are combined in. A literal takes the other's dtype where it can."""
        if keep_bool and a.dtype == BOOL and b.dtype == BOOL:
            return a, b
        if weak(a) and not weak(b) and not (a.dtype.kind == "float" and b.dtype.kind != "float"):
            dtype = promote(b.dtype, b.dtype)
        elif weak(b) and not weak(a) and not (b.dtype.kind == "float" and a.dtype.kind != "float"):
            dtype = promote(a.dtype, a.dtype)
        else:
            dtype = promote(a.dtype, b.dtype)
        if dtype == I32 and any(isinstance(x, ir.Const) and not -(2**31) <= x.value < 2**31 for x in (a, b)):
            dtype = I64
        return coerce(a, dtype), coerce(b, dtype)

    def _numeric(self, a: ir.Expr) -> ir.Expr:
        return coerce(a, I32) if a.dtype == BOOL else a

    def _want_bool(self, a: ir.Expr, op: str) -> ir.Expr:
        if a.dtype != BOOL:
            raise self.fail("K0208", f"'{op}' needs a bool, got {a.dtype}", a.span, "compare first, for example a != 0")
        return a

    # -- reductions ----------------------------------------------------------------------------------------------------
    def _reduced(self, kind: str, value: ir.Expr, over: tuple[str, ...], span: Span) -> ir.Expr:
        """The reduction `kind` of `value`, of the language or composite, which is written out."""
        if kind in REDUCTIONS:
            return self._reduce(kind, value, over, span)
        value = coerce(value, F32) if value.dtype.kind != "float" else value
        return getattr(self, f"_{kind}")(value, over, span)

    def _reduce(self, kind: str, value: ir.Expr, over: tuple[str, ...], span: Span) -> ir.Expr:
        dtype = I64 if kind in ("argmax", "argmin") else value.dtype
        return ir.Reduce(kind, value, over, dtype, value.axes - frozenset(over), span)

    def _count(self, over: tuple[str, ...], dtype: DType, span: Span) -> ir.Expr:
        count = Poly.const(1)
        for name in over:
            count = count * self.scope.axes[name].extent
        return coerce(index_value(count, self.scope, span), dtype)

    def _mean(self, value: ir.Expr, over: tuple[str, ...], span: Span) -> ir.Expr:
        total = self._reduce("sum", value, over, span)
        return self._apply("div", (total, self._count(over, value.dtype, span)), span)

    def _var(self, value: ir.Expr, over: tuple[str, ...], span: Span) -> ir.Expr:
        # Two passes over the deviations: E[x^2] - E[x]^2 cancels.
        value = self._shared("var_of", value, span)
        mean = self._shared("var_mean", self._mean(value, over, span), span)
        deviation = self._shared("deviation", self._apply("sub", (value, mean), span), span)
        return self._mean(self._apply("mul", (deviation, deviation), span), over, span)

    def _logsumexp(self, value: ir.Expr, over: tuple[str, ...], span: Span) -> ir.Expr:
        value = self._shared("lse_of", value, span)
        peak = self._shared("peak", self._reduce("max", value, over, span), span)
        # A row whose maximum is infinite is shifted by nothing: -inf - -inf would be NaN where the answer is -inf.
        zero = ir.Const(0.0, value.dtype, span)
        shift = self._shared(
            "shift", self._apply("where", (self._apply("isinf", (peak,), span), zero, peak), span), span
        )
        total = self._reduce("sum", self._apply("exp", (self._apply("sub", (value, shift), span),), span), over, span)
        return self._apply("add", (shift, self._apply("log", (total,), span)), span)

    def _softmax(self, value: ir.Expr, over: tuple[str, ...], span: Span) -> ir.Expr:
        value = self._shared("softmax_of", value, span)
        peak = self._shared("peak", self._reduce("max", value, over, span), span)
        e = self._shared("e", self._apply("exp", (self._apply("sub", (value, peak), span),), span), span)
        # One division a row; it costs ten times what the product does, and half a unit in the last place more.
        one = ir.Const(1.0, value.dtype, span)
        share = self._apply("div", (one, self._reduce("sum", e, over, span)), span)
        return self._apply("mul", (e, share), span)

    def _shared(self, hint: str, value: ir.Expr, span: Span) -> ir.Expr:
        """`value` under a name of its own where it is used more than once and is not already a leaf."""
        if isinstance(value, ir.Op | ir.Cast | ir.Reduce):
            return self.scope.bind(hint, value, span)
        return value


# ---- values without a scope ------------------------------------------------------------------------------------------


def number(value: int | float | bool, span: Span) -> ir.Const:
    """A literal in the compute dtype it has when nothing else decides."""
    if isinstance(value, bool):
        return ir.Const(value, BOOL, span)
    if isinstance(value, int):
        return ir.Const(value, I32 if -(2**31) <= value < 2**31 else I64, span)
    return ir.Const(value, F32, span)


def weak(e: ir.Expr) -> bool:
    """Whether `e` takes the dtype of what it is combined with: literals and index arithmetic against floats."""
    return isinstance(e, ir.Const) and e.dtype != BOOL


def as_index(e: ir.Expr) -> Poly | None:
    """The polynomial, if `e` is index arithmetic or an integer literal."""
    if isinstance(e, ir.IndexValue):
        return e.index
    if isinstance(e, ir.Const) and isinstance(e.value, int) and not isinstance(e.value, bool):
        return Poly.const(e.value)
    return None


def index_value(poly: Poly, scope: Scope, span: Span) -> ir.IndexValue:
    """Index arithmetic as a value."""
    return ir.IndexValue(poly, I64, poly.symbols & frozenset(scope.axes), span)


def coerce(e: ir.Expr, dtype: DType) -> ir.Expr:
    """`e` in compute dtype `dtype`, by an implicit conversion."""
    if e.dtype == dtype:
        return e
    if isinstance(e, ir.Const):
        value = float(e.value) if dtype.kind == "float" else int(e.value)
        return ir.Const(value, dtype, e.span)
    return ir.Cast(dtype, e, dtype, e.axes, e.span)


def cast(e: ir.Expr, dtype: DType, span: Span) -> ir.Expr:
    """`dtype(e)` as the user wrote it: narrow dtypes round (or wrap) even when held in a wider one."""
    if dtype == dtype.compute and e.dtype == dtype:
        return e
    if isinstance(e, ir.Const) and dtype == dtype.compute and dtype.kind == "float":
        return ir.Const(float(e.value), dtype, span)
    return ir.Cast(dtype, e, dtype.compute, e.axes, span)
