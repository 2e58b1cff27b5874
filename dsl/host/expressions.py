"""Expressions of host programs: what they give, and the statements that compute it."""

from __future__ import annotations

from dataclasses import replace

from kgen.dsl import ast
from kgen.dsl.affine import Poly
from kgen.dsl.check.signature import literal_value
from kgen.dsl.diagnostics import suggestion
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host import ast as host
from kgen.dsl.host import ir
from kgen.dsl.host.collectives import collective, is_collective
from kgen.dsl.host.scope import Scope, Stop
from kgen.dsl.source import Span


class Expressions:
    """Elaborates expressions; what they need computed is appended to the scope's body."""

    def __init__(self, scope: Scope) -> None:
        from kgen.dsl.host.calls import Calls  # which elaborates its arguments here

        self.scope = scope
        self.calls = Calls(scope, self)

    def value(self, e: host.Expr, hint: str = "value") -> ir.View:
        """The tensor that `e` is, computed where it is none yet; `hint` names a new one."""
        if isinstance(e, host.Product | host.Call):
            return self.into(e, None, hint)
        return self.view(e)

    # -- what is there already -----------------------------------------------------------------------------------
    def view(self, e: host.Expr) -> ir.View:
        """A tensor by name, a slice of one, or a transpose."""
        if isinstance(e, ast.Name):
            return self.named(e)
        if isinstance(e, ast.Subscript):
            base = self.named(ast.Name(e.tensor, e.tensor_span))
            return self.sliced(base, e)
        if isinstance(e, host.Attribute):
            if e.name != "T":
                raise self.scope.fail(
                    "K0614", f"there is no attribute '{e.name}'", e.span, "the transpose is a.T; there are no others"
                )
            return self.transposed(self.value(e.operand), e.span)
        if isinstance(e, host.Product | host.Call):
            return self.value(e)
        raise self.scope.fail(
            "K0614", "a number stands where a tensor is needed", e.span, "numbers are arguments of kernels"
        )

    def named(self, e: ast.Name) -> ir.View:
        """What a name stands for. Raises Stop where it is no tensor that holds anything."""
        scope = self.scope
        found = scope.names.get(e.id)
        if found is None:
            if e.id in scope.failed:
                raise Stop()
            if e.id in scope.inputs:
                raise scope.fail(
                    "K0612", f"optional tensor '{e.id}' may be absent here", e.span, f"use it under `if {e.id}:`"
                )
            if e.id in scope.scalars or scope.dim(e.id) is not None:
                raise scope.fail(
                    "K0614", f"'{e.id}' is no tensor", e.span, "scalars and dimensions are arguments of kernels"
                )
            hint = suggestion(e.id, sorted({*scope.names, *scope.inputs}))
            if e.id in scope.results:
                hint = "an output or gradient can be read once it is assigned"
            raise scope.fail("K0601", f"unknown name '{e.id}'", e.span, hint)
        scope.holding(e.id, found, e.span)
        return replace(found, span=e.span)

    def sliced(self, base: ir.View, e: ast.Subscript) -> ir.View:
        """`base` narrowed to the chunks that the subscript names, each along the dimension it is a chunk of."""
        scope = self.scope
        shape, chunks = list(base.shape), list(base.chunks)
        for i in e.indices:
            loop = next((x for x in scope.loops if isinstance(i, ast.Name) and i.id == x.index), None)
            if loop is None:
                raise scope.fail(
                    "K0611",
                    f"'{i.span.text}' is no chunk",
                    i.span,
                    "a subscript names the index of a loop around it, as in for c in chunks(B): ... x[c]",
                )
            axes = [k for k, d in enumerate(shape) if d == Poly.sym(loop.dim)]
            if len(axes) != 1:
                have = "has it more than once" if axes else f"has the shape {self.scope.shown(tuple(shape))}"
                raise scope.fail(
                    "K0611",
                    f"'{loop.index}' is a chunk of dimension {loop.dim}, and '{e.tensor}' {have}",
                    e.span,
                    f"slice a tensor with one dimension {loop.dim}",
                )
            shape[axes[0]] = Poly.sym(loop.chunk)
            # Chunks are kept by the axes of the tensor as it lies in memory.
            chunks.append((len(shape) - 1 - axes[0] if base.transposed else axes[0], loop.chunk))
        return replace(base, chunks=tuple(chunks), shape=tuple(shape), span=e.span)

    def transposed(self, v: ir.View, span: Span) -> ir.View:
        """The transpose of a matrix."""
        if len(v.shape) != 2:
            raise self.scope.fail(
                "K0604", f".T of a tensor of shape {self.scope.shown(v.shape)}", span, "only a matrix has a transpose"
            )
        return replace(v, transposed=not v.transposed, shape=v.shape[::-1], span=span)

    # -- what is computed ----------------------------------------------------------------------------------------
    def into(self, e: host.Product | host.Call, target: ir.View | None, hint: str = "value") -> ir.View:
        """Compute `e` into `target`, or into a new tensor."""
        if isinstance(e, host.Product):
            return self.product(e, target, hint, add=False)
        if e.func in DTYPES or e.func in self.scope.signature.dtype_vars:
            return self.convert(e, target, hint)
        if is_collective(e, self.scope):
            return collective(e, self, target, hint)
        return self.calls.call(e, (target,), (hint,))[0]

    def product(self, e: host.Product, target: ir.View | None, hint: str, *, add: bool) -> ir.View:
        """`left @ right + plus`, into `target` where one is given."""
        scope = self.scope
        left, right = self.value(e.left), self.value(e.right)
        for v in (left, right):
            if len(v.shape) != 2:
                raise scope.fail(
                    "K0604",
                    "'@' takes matrices",
                    v.span,
                    "the shape is " + self.scope.shown(v.shape),
                    label="no matrix",
                )
            if any(d.kind != "float" for d in scope.dtypes(v.dtype)):
                raise scope.fail("K0605", f"'@' of {v.dtype} values", v.span, "it takes floating-point matrices")
        if left.shape[1] != right.shape[0]:
            raise scope.fail(
                "K0604",
                "the inner dimensions of '@' differ",
                e.span,
                "transpose one with .T" if left.shape[1] in right.shape else "they must be one dimension",
                label=f"{scope.shown(left.shape)} @ {scope.shown(right.shape)}",
            )
        self.same_dtype(left, right, "@")
        shape = (left.shape[0], right.shape[1])
        plus = None
        if e.plus is not None:
            plus = self.value(e.plus)
            if plus.shape not in (shape, shape[1:]):
                raise scope.fail(
                    "K0604",
                    f"a tensor of shape {scope.shown(plus.shape)} is added to a product of shape {scope.shown(shape)}",
                    plus.span,
                    f"add a matrix {scope.shown(shape)}, or a row {scope.shown(shape[1:])}",
                )
            self.same_dtype(left, plus, "+")
        if target is None:
            target = scope.tensor(hint, left.dtype, shape, "value", e.span)
        self.fits(target, shape, None, e.span)
        if any(d.kind != "float" for d in scope.dtypes(target.dtype)):
            raise scope.fail("K0605", f"a product stored as {target.dtype}", e.span, "store it in a float tensor")
        self.apart(target, [v for v in (left, right, plus) if v is not None], e.span)
        scope.emit(ir.Product(target, left, right, plus, add, e.span))
        return target

    def convert(self, e: host.Call, target: ir.View | None, hint: str) -> ir.View:
        """`T(a)`: `a` itself where it has that dtype."""
        scope = self.scope
        if e.keywords or len(e.args) != 1:
            raise scope.fail("K0603", f"{e.func}(...) converts one tensor", e.span, f"write {e.func}(a)")
        source = self.value(e.args[0])
        # A transpose is converted as its matrix lies in memory.
        plain = self.transposed(source, source.span) if source.transposed else source
        if target is None:
            made = scope.tensor(hint, e.func, plain.shape, "value", e.span)
            scope.emit(ir.Convert(made, plain, e.span))
            return self.transposed(made, e.span) if source.transposed else made
        self.fits(target, source.shape, e.func, e.span)
        self.apart(target, [source], e.span)
        scope.emit(ir.Convert(target, source, e.span))
        return target

    # -- rules ---------------------------------------------------------------------------------------------------
    def same_dtype(self, a: ir.View, b: ir.View, sign: str) -> None:
        """Report operands that may differ in dtype."""
        if a.dtype != b.dtype:
            raise self.scope.fail(
                "K0605",
                f"'{sign}' of {a.dtype} and {b.dtype}",
                a.span.to(b.span) if a.span.line == b.span.line else b.span,
                f"convert one: {a.dtype}({b.span.text})",
            )

    def fits(self, target: ir.View, shape: tuple[Poly, ...], dtype: str | None, span: Span) -> None:
        """Report a value that does not have the shape, or the dtype, of what it is stored in."""
        if target.shape != shape:
            shown = self.scope.shown
            raise self.scope.fail(
                "K0604",
                f"a value of shape {shown(shape)} is stored in one of shape {shown(target.shape)}",
                span,
                "store all of it: the shapes must be the same",
            )
        if dtype is not None and target.dtype != dtype:
            raise self.scope.fail(
                "K0605",
                f"a value of dtype {dtype} is stored in a tensor of dtype {target.dtype}",
                span,
                f"convert it: {target.dtype}(...)",
            )

    def apart(self, target: ir.View, read: list[ir.View], span: Span) -> None:
        """Report a statement that reads memory that it writes."""
        for v in read:
            if v.tensor == target.tensor:
                raise self.scope.fail(
                    "K0608",
                    f"'{v.span.text}' is read and written by one statement",
                    span,
                    "store the result under another name",
                )

    def scalar(self, e: host.Expr) -> ir.Argument | None:
        """A scalar parameter or a literal; None for anything else."""
        if isinstance(e, ast.Name) and e.id in self.scope.scalars:
            return ir.ScalarArg(e.id)
        if isinstance(e, ast.Number | ast.Unary):
            number = literal_value(e)
            if number is not None:
                return ir.ConstArg(number)
        return None
