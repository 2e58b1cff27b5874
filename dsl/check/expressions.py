"""Expressions: names resolved, functions expanded, dtypes and index sets settled, composite reductions written out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import CALLABLE_OPS, COMPOSITE_REDUCTIONS, CONSTANTS, OPERATORS, REDUCTIONS, SCALAR_OPS
from kgen.dsl.check.scope import Scope
from kgen.dsl.check.signature import TensorParam, combine
from kgen.dsl.dtypes import BOOL, DTYPES, F32, I32, I64, DType, promote
from kgen.dsl.source import Span

# Functions that call functions twice double with each level; a hand-written kernel stays far below this.
MAX_EXPANSIONS = 4096

_INDEX_OPS = ("+", "-", "*", "//", "%")


class Stop(Exception):
    """Raised inside one statement after its mistake was reported; the statement is given up, the kernel goes on."""


class Expressions:
    """Elaborates expressions in a scope. Every method returns a typed `ir.Expr` or reports and raises `Stop`."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._calls: list[str] = []  # functions being expanded, for recursion
        self.expansions = 0  # of functions, in this kernel

    def fail(self, code: str, message: str, span: Span, help: str = "", label: str = "") -> Stop:
        """Report a mistake; the caller raises what this returns."""
        self.scope.broken = True
        self.scope.diagnostics.error(code, message, span, help=help, label=label, notes=self.scope.path_notes())
        return Stop()

    def expr(self, e: ast.Expr, env: Mapping[str, ir.Expr] | None = None) -> ir.Expr:
        """The typed form of `e`. `env` holds the arguments while the body of a `fn` is expanded."""
        if isinstance(e, ast.Number):
            return number(e.value, e.span)
        if isinstance(e, ast.Name):
            return self._name(e, env)
        if isinstance(e, ast.Unary):
            return self._unary(e, env)
        if isinstance(e, ast.Binary):
            return self._binary(e.op, self.expr(e.left, env), self.expr(e.right, env), e.span)
        if isinstance(e, ast.Call):
            return self._call(e, env)
        if env is not None:
            raise self.fail("K0210", "a function cannot subscript a tensor", e.span, "pass the element as an argument")
        return self._load(e)

    # -- names ---------------------------------------------------------------------------------------------------------
    def _name(self, e: ast.Name, env: Mapping[str, ir.Expr] | None) -> ir.Expr:
        if env is not None:
            if e.id in env:
                return env[e.id]
            if e.id in CONSTANTS:
                return ir.Const(CONSTANTS[e.id], F32, e.span)
            raise self.fail("K0201", f"unknown name '{e.id}'", e.span, "a function sees only its own parameters")
        scope = self.scope
        if e.id in scope.failed:
            raise Stop
        if e.id in scope.values:
            return replace(scope.values[e.id], span=e.span)
        poly = scope.poly_name(e.id)
        if poly is not None:
            return index_value(poly, scope, e.span)
        if e.id in scope.scalars:
            param = scope.scalars[e.id]
            dtype = scope.dtype(param.dtype) or F32
            value = scope.const(e.id)
            if value is not None:
                return ir.Const(value, dtype.compute, e.span)
            return ir.Scalar(e.id, dtype.compute, e.span)
        if e.id in scope.tensors:
            free = list(scope.axes.values())
            subs: list[str] = []
            for extent in scope.shape(scope.tensors[e.id]):
                axis = next((a for a in free if a.extent == extent), None)
                subs.append(axis.name if axis else "...")
                free = [a for a in free if a is not axis]
            help = f"write {e.id}[{', '.join(subs)}]"
            raise self.fail("K0210", f"tensor '{e.id}' is used without a subscript", e.span, help)
        if e.id in CONSTANTS:
            return ir.Const(CONSTANTS[e.id], F32, e.span)
        known = [*scope.values, *scope.axes, *scope.tensors, *scope.scalars, *scope.signature.dims]
        raise self.fail("K0201", f"unknown name '{e.id}'", e.span, suggestion(e.id, known))

    # -- operators -----------------------------------------------------------------------------------------------------
    def _unary(self, e: ast.Unary, env: Mapping[str, ir.Expr] | None) -> ir.Expr:
        a = self.expr(e.operand, env)
        if e.op == "not":
            return self._op("not", (self._want_bool(a, "not"),), BOOL, e.span)
        if isinstance(a, ir.Const) and not isinstance(a.value, bool):
            return ir.Const(-a.value, a.dtype, e.span)
        if isinstance(a, ir.IndexValue):
            return index_value(-a.index, self.scope, e.span)
        a = self._numeric(a)
        return self._op("neg", (a,), a.dtype, e.span)

    def _binary(self, op: str, a: ir.Expr, b: ir.Expr, span: Span) -> ir.Expr:
        fn = OPERATORS[op]
        if fn in ("and", "or"):
            return self._op(fn, (self._want_bool(a, op), self._want_bool(b, op)), BOOL, span)
        if op in _INDEX_OPS:
            pa, pb = as_index(a), as_index(b)
            # Two plain literals are folded below, where 7 // 2 on constants of any dtype is handled alike.
            if pa is not None and pb is not None and not (isinstance(a, ir.Const) and isinstance(b, ir.Const)):
                return index_value(combine(op, pa, pb), self.scope, span)
        folded = self._fold(op, a, b, span)
        if folded is not None:
            return folded
        return self._apply(fn, (a, b), span, spelled=op)

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

    # -- calls ---------------------------------------------------------------------------------------------------------
    def _call(self, e: ast.Call, env: Mapping[str, ir.Expr] | None) -> ir.Expr:
        name = e.func
        if name in self.scope.functions:
            return self._expand(self.scope.functions[name], e, env)
        if name in REDUCTIONS or name in COMPOSITE_REDUCTIONS:
            return self._reduction(e, env)
        dtype = self.scope.dtype(name)
        if dtype is not None:
            self._arity(e, 1)
            return cast(self.expr(e.args[0], env), dtype, e.span)
        if name in CALLABLE_OPS:
            self._arity(e, CALLABLE_OPS[name].arity)
            return self._apply(name, [self.expr(a, env) for a in e.args], e.span)
        known = [*self.scope.functions, *CALLABLE_OPS, *COMPOSITE_REDUCTIONS, *REDUCTIONS, *DTYPES]
        raise self.fail("K0202", f"unknown function '{name}'", e.func_span, suggestion(name, known))

    def _arity(self, e: ast.Call, expected: int) -> None:
        if len(e.args) != expected:
            plural = "" if expected == 1 else "s"
            raise self.fail(
                "K0205",
                f"'{e.func}' takes {expected} argument{plural}, got {len(e.args)}",
                e.span,
                "see docs/language.md",
            )

    def _expand(self, fn: ast.Function, e: ast.Call, env: Mapping[str, ir.Expr] | None) -> ir.Expr:
        self._arity(e, len(fn.params))
        if fn.name in self._calls:
            chain = " -> ".join([*self._calls, fn.name])
            raise self.fail(
                "K0221",
                f"function '{fn.name}' calls itself ({chain})",
                e.func_span,
                "functions cannot be recursive",
            )
        self.expansions += 1
        if self.expansions > MAX_EXPANSIONS:
            raise self.fail(
                "K0227",
                f"this kernel expands more than {MAX_EXPANSIONS} function calls",
                e.func_span,
                "name a value that several calls share, or split the kernel",
            )
        args = {}
        for param, arg in zip(fn.params, e.args, strict=True):
            value = self.expr(arg, env)
            # An argument used more than once is computed once.
            shared = _uses(fn.body, param) > 1 and isinstance(value, ir.Op | ir.Cast | ir.Reduce)
            args[param] = self.scope.bind(f"{fn.name}_{param}", value, arg.span) if shared else value
        self._calls.append(fn.name)
        try:
            return self.expr(fn.body, args)
        finally:
            self._calls.pop()

    # -- reductions ----------------------------------------------------------------------------------------------------
    def _reduction(self, e: ast.Call, env: Mapping[str, ir.Expr] | None) -> ir.Expr:
        kind = e.func
        if len(e.args) < 2:
            raise self.fail(
                "K0205",
                f"'{kind}' takes a value and the indices to reduce, got {len(e.args)} argument",
                e.span,
                f"write {kind}(value, n)",
            )
        value = self.expr(e.args[0], env)
        over = tuple(self._reduced_axis(kind, a, value, env) for a in e.args[1:])
        if len(set(over)) != len(over):
            raise self.fail("K0206", f"'{kind}' names an index twice", e.span, "name each index once")
        if kind in ("any", "all"):
            value = self._want_bool(value, kind)
        else:
            value = self._numeric(value)
        if kind in ("argmax", "argmin") and len(over) != 1:
            raise self.fail("K0205", f"'{kind}' takes exactly one index", e.span, f"write {kind}(value, n)")
        if kind in REDUCTIONS:
            return self._reduce(kind, value, over, e.span)
        value = coerce(value, F32) if value.dtype.kind != "float" else value
        return getattr(self, f"_{kind}")(value, over, e.span)

    def _reduced_axis(self, kind: str, a: ast.Expr, value: ir.Expr, env: Mapping[str, ir.Expr] | None) -> str:
        index = self.expr(a, env)
        name = index.index.as_symbol if isinstance(index, ir.IndexValue) else None
        axis = self.scope.axes.get(name) if name is not None else None
        if axis is None:
            fix = {"max": "maximum", "min": "minimum"}.get(kind)
            hint = f"for the larger or smaller of two values write {fix}(a, b)" if fix else f"write {kind}(value, n)"
            raise self.fail("K0206", f"'{kind}' reduces over indices, and this is not one", a.span, hint)
        if axis.name not in value.axes:
            have = index_set(value.axes)
            raise self.fail(
                "K0206",
                f"the value has no index '{axis.name}' to reduce",
                a.span,
                f"it has {have}",
                label=f"indices {have}",
            )
        if axis.kind == "parallel":
            extent = f"{axis.extent}"
            count = f"({extent})" if " " in extent else extent
            added = {"sum": "value", "mean": f"value / {count}"}.get(kind)  # programs only ever add up
            raise self.fail(
                "K0207",
                f"'{axis.name}' is spread over programs and cannot be reduced inside one",
                a.span,
                f"declare it with `tile {axis.name} in {extent}`"
                + (f", or sum over programs with `out[...] += {added}`" if added else ""),
            )
        return axis.name

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

    # -- loads ---------------------------------------------------------------------------------------------------------
    def tensor(self, e: ast.Subscript) -> TensorParam:
        """The tensor that `e` subscripts, with the number of subscripts checked."""
        tensor = self.scope.tensors.get(e.tensor)
        if tensor is None:
            if e.tensor in self.scope.values:
                raise self.fail(
                    "K0210",
                    f"'{e.tensor}' is a value, not a tensor",
                    e.tensor_span,
                    "a value carries its indices; leave the subscript out",
                )
            raise self.fail(
                "K0201",
                f"unknown tensor '{e.tensor}'",
                e.tensor_span,
                suggestion(e.tensor, self.scope.tensors),
            )
        rank = len(tensor.shape)
        if len(e.indices) != rank:
            plural = "" if rank == 1 else "s"
            hint = " (a starred dimension takes one flattened index)" if tensor.star else ""
            shape = ", ".join(("*" if tensor.star and i == 0 else "") + str(p) for i, p in enumerate(tensor.shape))
            raise self.fail(
                "K0209",
                f"'{e.tensor}' takes {rank} subscript{plural}, got {len(e.indices)}",
                e.span,
                f"its shape is [{shape}]{hint}",
            )
        if not self.scope.is_present(tensor):
            raise self.fail(
                "K0212",
                f"'{e.tensor}' is optional and absent here",
                e.span,
                f"guard its use with `if {tensor.follows or e.tensor}:`",
            )
        return tensor

    def _load(self, e: ast.Subscript) -> ir.Expr:
        tensor = self.tensor(e)
        dtype = self.scope.dtype(tensor.dtype) or F32
        at = tuple(self.subscript(i) for i in e.indices)
        axes: frozenset[str] = frozenset()
        for s in at:
            axes |= (s.symbols & self.scope.axes.keys()) if isinstance(s, Poly) else s.axes
        return ir.Load(e.tensor, at, dtype.compute, axes, e.span)

    def subscript(self, e: ast.Expr) -> Poly | ir.Expr:
        """A subscript: affine, or an integer value (a gather), as i64 so that it is compared before it is narrowed."""
        value = self.expr(e)
        poly = as_index(value)
        if poly is not None:
            return poly
        if value.dtype.kind != "int":
            raise self.fail(
                "K0214",
                f"a subscript must be an integer, got {value.dtype}",
                e.span,
                "convert it, for example i64(value)",
            )
        return coerce(value, I64)


# ---- helpers without state -----------------------------------------------------------------------------------------


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


def index_set(axes: frozenset[str]) -> str:
    """`{m, n}`, as messages write it."""
    return "{" + ", ".join(sorted(axes)) + "}"


def suggestion(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    """Help for an unknown name: the nearest known one, or what there is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    shown = ", ".join(list(known)[:12]) + (", ..." if len(known) > 12 else "")
    return f"known here: {shown}" if shown else ""


def _uses(e: ast.Expr, name: str) -> int:
    if isinstance(e, ast.Name):
        return int(e.id == name)
    if isinstance(e, ast.Unary):
        return _uses(e.operand, name)
    if isinstance(e, ast.Binary):
        return _uses(e.left, name) + _uses(e.right, name)
    if isinstance(e, ast.Call):
        # A reduction written in terms of its argument may use it several times.
        weight = 2 if e.func in COMPOSITE_REDUCTIONS else 1
        return weight * sum(_uses(a, name) for a in e.args)
    return 0
