"""Expressions: what does the source say? Names are resolved, functions expanded, calls and subscripts checked; what
comes of the operands is for `kgen.dsl.check.operations`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import CALLABLE_OPS, COMPOSITE_REDUCTIONS, CONSTANTS, OPERATORS, REDUCTIONS
from kgen.dsl.check.operations import Operations, Stop, as_index, cast, coerce, index_value, number
from kgen.dsl.check.scope import Scope
from kgen.dsl.check.signature import TensorParam, combine
from kgen.dsl.diagnostics import suggestion
from kgen.dsl.dtypes import BOOL, DTYPES, F32, I64
from kgen.dsl.source import Span

# Functions that call functions twice double with each level; a hand-written kernel stays far below this.
MAX_EXPANSIONS = 4096

_INDEX_OPS = ("+", "-", "*", "//", "%")


class Expressions(Operations):
    """Elaborates expressions in a scope. Every method returns a typed `ir.Expr` or reports and raises `Stop`."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._calls: list[str] = []  # functions being expanded, for recursion
        self.expansions = 0  # of functions, in this kernel

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
        return self._reduced(kind, value, over, e.span)

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


def index_set(axes: frozenset[str]) -> str:
    """`{m, n}`, as messages write it."""
    return "{" + ", ".join(sorted(axes)) + "}"


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
