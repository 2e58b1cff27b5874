"""Statements: indices declared, values bound, stores checked against the index sets of what they store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.check.expressions import Expressions, index_set
from kgen.dsl.check.operations import Stop, as_index, cast
from kgen.dsl.check.scope import Scope
from kgen.dsl.check.signature import TensorParam, index_poly, literal_value
from kgen.dsl.dtypes import BOOL, F64
from kgen.dsl.source import Span

_RELATIONS = ("==", "!=", "<", "<=", ">", ">=")


class Statements:
    """Elaborates the body of one kernel, statement by statement; a mistake costs the statement it is in."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.expressions = Expressions(scope)
        self.fail = self.expressions.fail
        self._branches = 0  # compile-time `if`s around the current statement

    def body(self, statements: tuple[ast.Stmt, ...]) -> None:
        """Elaborate the body of the kernel, from where this path leaves the one before (`Choices`)."""
        choices = self.scope.choices
        for position in range(choices.resume(self._restore), len(statements)):
            choices.mark(position, self._save)
            self.block(statements[position : position + 1])
        choices.mark(len(statements), self._save)

    def _save(self) -> tuple[Any, ...]:
        return self.expressions.expansions, self.scope.save()

    def _restore(self, saved: tuple[Any, ...]) -> None:
        self.expressions.expansions, known = saved
        self.scope.restore(known)

    def block(self, statements: tuple[ast.Stmt, ...]) -> None:
        """Elaborate `statements` in order."""
        for s in statements:
            handler: Callable[[ast.Stmt], None] = getattr(self, f"_{type(s).__name__.lower()}")
            try:
                handler(s)
            except Stop:
                self._poison(s)

    def _poison(self, s: ast.Stmt) -> None:
        """Remember the names that a broken statement would have bound, so that their uses are not reported too."""
        if isinstance(s, ast.Assign):
            for target in s.targets:
                if isinstance(target, ast.Name) and not self.scope.is_taken(target.id):
                    self.scope.failed.add(target.id)

    # -- declarations --------------------------------------------------------------------------------------------------
    def _bind(self, s: ast.Bind) -> None:
        scope = self.scope
        for b in s.bindings:
            if b.index in scope.axes:
                self.fail("K0200", f"index '{b.index}' is declared twice", b.span, "give one of them another name")
                continue
            if scope.is_taken(b.index) or b.index in scope.values:
                self.fail(
                    "K0200",
                    f"'{b.index}' already means something else here",
                    b.span,
                    "give the index another name",
                )
                continue
            extent = index_poly(b.extent, self._dimension, scope.diagnostics)
            scope.axes[b.index] = ir.Axis(b.index, extent if extent is not None else Poly.const(1), s.kind, b.span)

    def _dimension(self, name: ast.Name) -> Poly | None:
        if name.id in self.scope.axes:
            raise self.fail(
                "K0219",
                f"the extent mentions index '{name.id}'",
                name.span,
                "an extent is the same for every program",
            )
        poly = self.scope.poly_name(name.id)
        if poly is None:
            dims = ", ".join(self.scope.signature.dims) or "none"
            raise self.fail("K0201", f"'{name.id}' is not a dimension", name.span, f"dimensions of this kernel: {dims}")
        return poly

    def _require(self, s: ast.Require) -> None:
        self._requirement(s.condition)

    def _requirement(self, e: ast.Expr) -> None:
        if isinstance(e, ast.Binary) and e.op == "and":
            self._requirement(e.left)
            self._requirement(e.right)
            return
        if not (isinstance(e, ast.Binary) and e.op in _RELATIONS):
            raise self.fail(
                "K0213",
                "'require' needs a comparison of dimensions",
                e.span,
                "for example require D % 2 == 0",
            )
        sides = [index_poly(x, self._dimension, self.scope.diagnostics) for x in (e.left, e.right)]
        if sides[0] is not None and sides[1] is not None:
            self.scope.requires.append(ir.Requirement(e.op, sides[0], sides[1], e.span))

    def _example(self, s: ast.Example) -> None:
        for size in s.sizes:
            if size.name in self.scope.axes or self.scope.poly_name(size.name) is None:
                dims = ", ".join(self.scope.signature.dims) or "none"
                self.fail("K0201", f"'{size.name}' is not a dimension", size.span, f"dimensions of this kernel: {dims}")
            value = literal_value(size.value)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                self.fail("K0219", "an example size must be a positive integer", size.value.span, "write a literal")

    def _schedule(self, s: ast.Schedule) -> None:
        # Indices may be declared behind it: looked at when all statements are elaborated.
        self.scope.schedules.append((s, self._branches == 0))

    # -- compile-time branches -----------------------------------------------------------------------------------------
    def _if(self, s: ast.If) -> None:
        taken = s.body if self._truth(s.condition) else s.orelse
        self._branches += 1
        self.block(taken)
        self._branches -= 1

    def _truth(self, e: ast.Expr) -> bool:
        """The value of a compile-time condition on this path."""
        if isinstance(e, ast.Unary) and e.op == "not":
            return not self._truth(e.operand)
        if isinstance(e, ast.Binary) and e.op in ("and", "or"):
            left = self._truth(e.left)
            if (e.op == "and") != left:
                return left
            return self._truth(e.right)
        scope = self.scope
        if isinstance(e, ast.Name) and e.id in scope.tensors:
            if not scope.tensors[e.id].optional:
                raise self.fail(
                    "K0213",
                    f"'{e.id}' is not optional",
                    e.span,
                    f"declare it as {scope.tensors[e.id].dtype}[...]?",
                )
            return scope.is_present(scope.tensors[e.id])
        if (
            isinstance(e, ast.Name)
            and e.id in scope.scalars
            and scope.scalars[e.id].dtype == "bool"
            and scope.scalars[e.id].const
        ):
            value = scope.const(e.id)
            return scope.choices.decide(e.id) if value is None else bool(value)
        if isinstance(e, ast.Number) and isinstance(e.value, bool):
            return e.value
        if isinstance(e, ast.Binary) and e.op in _RELATIONS:
            return self._comparison(e)
        raise self.fail(
            "K0213",
            "this condition is not known at compile time",
            e.span,
            "use const parameters and optional tensors here; elementwise, write where(c, a, b)",
        )

    def _comparison(self, e: ast.Binary) -> bool:
        sides = [self._const_operand(x) for x in (e.left, e.right)]
        a, b = sides
        if a is None or b is None:
            return self.scope.choices.decide(e.span.text)
        return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[e.op]

    def _const_operand(self, e: ast.Expr) -> int | float | bool | None:
        """The value of an operand of a compile-time comparison; None where a const parameter is still open."""
        if isinstance(e, ast.Number):
            return e.value
        if isinstance(e, ast.Unary) and e.op == "-":
            inner = self._const_operand(e.operand)
            return None if inner is None else -inner
        if isinstance(e, ast.Name) and e.id in self.scope.scalars and self.scope.scalars[e.id].const:
            return self.scope.const(e.id)
        if isinstance(e, ast.Binary) and e.op in ("+", "-", "*", "//", "%"):
            a, b = self._const_operand(e.left), self._const_operand(e.right)
            if a is None or b is None:
                return None
            if e.op in ("//", "%") and b == 0:
                raise self.fail("K0226", "division by a constant zero", e.span, "change the divisor")
            return {"+": a + b, "-": a - b, "*": a * b, "//": a // b if b else 0, "%": a % b if b else 0}[e.op]
        raise self.fail(
            "K0213",
            "this condition is not known at compile time",
            e.span,
            "compare const parameters with literals; elementwise, write where(c, a, b)",
        )

    def _for(self, s: ast.For) -> None:
        raise self.fail(
            "K0222",
            "sequential loops are not part of the language yet",
            s.span,
            "declare the index with `tile` and reduce over it",
        )

    # -- values and stores ---------------------------------------------------------------------------------------------
    def _assign(self, s: ast.Assign) -> None:
        values = [self.expressions.expr(v) for v in s.values]
        for target, value in zip(s.targets, values, strict=True):
            if isinstance(target, ast.Name):
                self._assign_name(target, value, s.span)
            else:
                self._store(target, value, s.span)

    def _assign_name(self, target: ast.Name, value: ir.Expr, span: Span) -> None:
        if self.scope.is_taken(target.id):
            kind = (
                "an index" if target.id in self.scope.axes
                else "a tensor" if target.id in self.scope.tensors
                else "a parameter" if target.id in self.scope.scalars
                else "a dimension"
            )  # fmt: skip
            hint = (
                f"write {target.id}[...] = value to store into it"
                if kind == "a tensor"
                else "choose another name for the value"
            )
            raise self.fail("K0224", f"'{target.id}' is {kind} and cannot be assigned", target.span, hint)
        self.scope.assign(target.id, value, span)

    def _target(self, e: ast.Subscript) -> tuple[TensorParam, tuple[Poly, ...], frozenset[str]]:
        """The tensor, the affine subscripts and the index set of a store's target."""
        tensor = self.expressions.tensor(e)
        if tensor.role == "in":
            raise self.fail(
                "K0211",
                f"'{tensor.name}' is an input and cannot be stored to",
                e.span,
                f"declare it `{tensor.name}: inout {tensor.dtype}[...]`, or store to an output",
            )
        at = []
        for i in e.indices:
            poly = as_index(self.expressions.expr(i))
            if poly is None:
                raise self.fail(
                    "K0215",
                    "the target of a store must be affine in the indices",
                    i.span,
                    "a value as a subscript is allowed in loads only",
                )
            at.append(poly)
        axes = frozenset(name for p in at for name in p.symbols if name in self.scope.axes)
        return tensor, tuple(at), axes

    def _store(self, target: ast.Subscript, value: ir.Expr, span: Span) -> None:
        tensor, at, axes = self._target(target)
        self._no_foreign(value, axes, frozenset(), tensor)
        self.scope.body.append(ir.Store(tensor.name, at, self._stored(tensor, value, once=True), span))

    def _accumulate(self, s: ast.Accumulate) -> None:
        tensor, at, axes = self._target(s.target)
        value = self.expressions.expr(s.value)
        over = tuple(a.name for a in self.scope.axes.values() if a.kind == "parallel" and a.name not in axes)
        self._no_foreign(value, axes, frozenset(over), tensor)
        if tensor.role == "inout":
            raise self.fail(
                "K0211",
                f"'+=' into inout tensor '{tensor.name}'",
                s.span,
                "sum into an output and add it where it is used",
            )
        self.scope.body.append(ir.Accumulate(tensor.name, at, self._stored(tensor, value), over, s.span))

    def check_sums(self) -> None:
        """Refuse sums over programs where each statement that adds to an output already names every program.

        One of several may: `out[0] += a` beside `out[m + 1] += b`. Sums beside stores are refused as such (K0407).
        """
        sums = [s for s in self.scope.body if isinstance(s, ir.Accumulate)]
        real = {
            s.tensor for s in self.scope.body if isinstance(s, ir.Store) or (isinstance(s, ir.Accumulate) and s.over)
        }
        for tensor in dict.fromkeys(s.tensor for s in sums if s.tensor not in real):
            self.fail(
                "K0228",
                f"'+=' into '{tensor}' has no parallel index to sum over",
                next(s.span for s in sums if s.tensor == tensor),
                "write `=`; `+=` sums over the parallel indices that its target lacks",
            )

    def _no_foreign(self, value: ir.Expr, axes: frozenset[str], summed: frozenset[str], tensor: TensorParam) -> None:
        foreign = value.axes - axes - summed
        if not foreign:
            return
        name = sorted(foreign)[0]
        axis = self.scope.axes[name]
        text = value.span.text
        hint = (
            f"reduce it first, for example sum({text}, {name})" if axis.kind == "tile"
            else f"sum over programs with `{tensor.name}[...] += {text}`, or add {name} to the target"
        )  # fmt: skip
        raise self.fail(
            "K0203",
            f"value still carries {axis.kind} index '{name}'",
            value.span,
            hint,
            label=f"indices {index_set(value.axes)}, but the target has {index_set(axes)}",
        )

    def _stored(self, tensor: TensorParam, value: ir.Expr, once: bool = False) -> ir.Expr:
        """`value` in the compute dtype of the tensor it goes into; the store rounds it from there. `once`: nothing is
        added to it before, so that an f64, which f32 does not hold, is rounded to the tensor's own dtype at once."""
        dtype = self.scope.dtype(tensor.dtype)
        if dtype is None or value.dtype == dtype.compute:
            return value
        lossy = dtype.kind != "float" and value.dtype.kind == "float"
        odd = (dtype == BOOL) != (value.dtype == BOOL) and not isinstance(value, ir.Const)
        if lossy or odd:
            raise self.fail(
                "K0216",
                f"a value of {value.dtype} does not fit '{tensor.name}', which is {dtype}",
                value.span,
                f"convert it explicitly: {dtype}(value)",
            )
        return cast(
            value, dtype if once and value.dtype == F64 and dtype.kind == "float" else dtype.compute, value.span
        )
