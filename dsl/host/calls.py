"""Calls of kernels from host programs, held against the kernel's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kgen.dsl import ast
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import CALLABLE_OPS, COMPOSITE_REDUCTIONS, REDUCTIONS
from kgen.dsl.diagnostics import suggestion
from kgen.dsl.dtypes import DTYPES, VARIABLE_DTYPES
from kgen.dsl.host import ast as host
from kgen.dsl.host import ir
from kgen.dsl.host.scope import Scope, Stop, shape_text
from kgen.dsl.signature import ScalarParam, Signature, TensorParam

if TYPE_CHECKING:
    from kgen.dsl.host.expressions import Expressions


class Calls:
    """Elaborates calls: arguments by position and name, dtypes, shapes, what is written."""

    def __init__(self, scope: Scope, expressions: Expressions) -> None:
        self.scope = scope
        self.expressions = expressions

    def call(
        self, e: host.Call, targets: tuple[ir.View | None, ...], hints: tuple[str, ...], *, drop: bool = False
    ) -> list[ir.View]:
        """The outputs of the call, each in its target or in a new tensor. `drop`: they are not used."""
        scope = self.scope
        callee = scope.callees.get(e.func)
        if callee is None:
            raise self.unknown(e)
        signature = callee.signature
        if drop:
            targets, hints = (None,) * len(signature.outputs), tuple(o.name for o in signature.outputs)
        elif len(targets) != len(signature.outputs):
            outputs = ", ".join(o.name for o in signature.outputs) or "none"
            raise scope.fail(
                "K0603",
                f"'{e.func}' has {len(signature.outputs)} outputs, and {len(targets)} are taken",
                e.span,
                f"its outputs: {outputs}",
            )
        given = self.bound(e, signature)
        arguments: list[tuple[str, ir.Argument]] = []
        tensors: list[tuple[TensorParam, ir.View]] = []
        for p in signature.params:
            if p.name not in given:
                continue
            value = given[p.name]
            if isinstance(p, ScalarParam):
                arguments.append((p.name, self.scalar(e, p, value)))
                continue
            view = self.tensor(e, p, value)
            if view is not None:
                arguments.append((p.name, view))
                tensors.append((p, view))
        variables = self.dtypes(e, signature, tensors)
        leading = self.leading(e, tensors)
        dims = self.dims(e, tensors, dict(arguments))
        results = []
        for o, target, hint in zip(signature.outputs, targets, hints, strict=True):
            shape = tuple(p.substitute(dims) for p in o.shape)
            if o.star:
                shape = (*leading.get(o.shape[0], shape[:1]), *shape[1:])
            dtype = o.dtype if o.dtype in DTYPES else variables.get(o.dtype)
            if target is None:
                if dtype is None:
                    raise scope.fail(
                        "K0605",
                        f"the dtype of output '{o.name}' follows from no argument",
                        e.span,
                        f"store it in a tensor that is declared, as in {hint}: f32{scope.shown(shape)}",
                    )
                target = scope.tensor(hint, dtype, shape, "value", e.span)
            self.expressions.fits(target, shape, dtype, e.span)
            results.append(target)
        updated = tuple(p.name for p, _ in tensors if p.role == "inout")
        self.check_writes(e, tensors, results)
        scope.used.add(e.func)
        scope.emit(ir.Launch(e.func, tuple(arguments), updated, tuple(results), e.span), dims)
        return results

    def unknown(self, e: host.Call) -> Stop:
        """Report a call of what is no kernel."""
        known = sorted(self.scope.callees)
        if e.func in self.scope.ops:
            message, hint = f"'{e.func}' is an op", "ops call kernels only: write its statements here"
        elif e.func in {*CALLABLE_OPS, *REDUCTIONS, *COMPOSITE_REDUCTIONS}:
            message = f"'{e.func}' is a function of elements"
            hint = "write a kernel that computes it, and call that"
        else:
            message = f"unknown kernel '{e.func}'"
            hint = suggestion(e.func, known) if known else "define it in this file, or import it"
        return self.scope.fail("K0602", message, e.func_span, hint)

    def bound(self, e: host.Call, signature: Signature) -> dict[str, host.Expr]:
        """The arguments by parameter."""
        scope = self.scope
        names = [p.name for p in signature.params]
        if len(e.args) > len(names):
            raise scope.fail(
                "K0603",
                f"'{e.func}' takes {len(names)} arguments, got {len(e.args)}",
                e.args[len(names)].span,
                f"its parameters: {', '.join(names)}",
            )
        given = dict(zip(names, e.args, strict=False))
        for k in e.keywords:
            if k.name not in names:
                raise scope.fail("K0603", f"'{e.func}' has no parameter '{k.name}'", k.span, suggestion(k.name, names))
            if k.name in given:
                raise scope.fail("K0603", f"'{k.name}' is given twice", k.span, "remove one of the two")
            given[k.name] = k.value
        for p in signature.params:
            needed = not p.optional if isinstance(p, TensorParam) else p.default is None
            if p.name not in given and needed:
                raise scope.fail("K0603", f"'{e.func}' needs '{p.name}'", e.span, f"add {p.name}=...")
        return given

    def scalar(self, e: host.Call, p: ScalarParam, value: host.Expr) -> ir.Argument:
        """A scalar argument: a scalar parameter of the op, or a literal."""
        scope = self.scope
        found = self.expressions.scalar(value)
        if found is None:
            raise scope.fail(
                "K0603",
                f"parameter '{p.name}' of '{e.func}' is a scalar",
                value.span,
                "pass a scalar parameter of the op, or a number",
            )
        kind = DTYPES[p.dtype].kind if p.dtype in DTYPES else "float"
        if isinstance(found, ir.ScalarArg):
            own = scope.scalars[found.name]
            if p.const and not own.const:
                raise scope.fail(
                    "K0603",
                    f"parameter '{p.name}' of '{e.func}' is const",
                    value.span,
                    f"declare `{own.name}: const {own.dtype}`",
                )
            mine = DTYPES[own.dtype].kind if own.dtype in DTYPES else "float"
            fits = mine == kind or (mine, kind) == ("int", "float")
        else:
            assert isinstance(found, ir.ConstArg)
            mine = type(found.value).__name__
            fits = mine == kind or (mine, kind) == ("int", "float")
        if not fits:
            raise scope.fail("K0605", f"'{p.name}' of '{e.func}' is {p.dtype}", value.span, f"pass a {kind}")
        # An integer for a float is that float, so that s=1 and s=1.0 are one call.
        return ir.ConstArg(float(found.value)) if isinstance(found, ir.ConstArg) and kind == "float" else found

    def tensor(self, e: host.Call, p: TensorParam, value: host.Expr) -> ir.View | None:
        """A tensor argument; None for an optional tensor that is absent and may be."""
        scope = self.scope
        if isinstance(value, ast.Name):
            own = scope.inputs.get(value.id)
            if own is not None and own.optional and not scope.is_present(own):
                if not p.optional:
                    raise scope.fail(
                        "K0612",
                        f"optional tensor '{value.id}' may be absent here, and '{e.func}' needs it",
                        value.span,
                        f"call it under `if {value.id}:`",
                    )
                return None
        if self.expressions.scalar(value) is not None:
            raise scope.fail("K0603", f"parameter '{p.name}' of '{e.func}' is a tensor", value.span, "pass a tensor")
        return self.expressions.value(value, p.name)

    def dtypes(self, e: host.Call, signature: Signature, tensors: list[tuple[TensorParam, ir.View]]) -> dict[str, str]:
        """What the kernel's dtype variables stand for."""
        scope = self.scope
        out: dict[str, str] = {}
        for p, v in tensors:
            allowed = (DTYPES[p.dtype],) if p.dtype in DTYPES else signature.dtype_vars.get(p.dtype, VARIABLE_DTYPES)
            odd = [d for d in scope.dtypes(v.dtype) if d not in allowed]
            if odd:
                listed = ", ".join(map(str, allowed))
                raise scope.fail(
                    "K0605",
                    f"parameter '{p.name}' of '{e.func}' takes {listed}; this may be {odd[0]}",
                    v.span,
                    f"convert it: {allowed[0]}({v.span.text})",
                )
            if p.dtype not in DTYPES and out.setdefault(p.dtype, v.dtype) != v.dtype:
                raise scope.fail(
                    "K0605",
                    f"'{p.name}' of '{e.func}' has dtype {p.dtype}, which is {out[p.dtype]} by another argument; "
                    f"this is {v.dtype}",
                    v.span,
                    f"convert it: {out[p.dtype]}({v.span.text})",
                )
        return out

    def dims(
        self, e: host.Call, tensors: list[tuple[TensorParam, ir.View]], arguments: dict[str, ir.Argument]
    ) -> dict[str, Poly]:
        """What the kernel's dimensions are here, found where they stand alone and checked everywhere."""
        scope = self.scope
        out: dict[str, Poly] = {}
        for name, a in arguments.items():
            if isinstance(a, ir.ConstArg) and isinstance(a.value, int):
                out[name] = Poly.const(a.value)
            elif isinstance(a, ir.ScalarArg) and (known := scope.dim(a.name)) is not None:
                out[name] = known
        flat = [(p, v, self.flattened(e, p, v)) for p, v in tensors]
        for p, _, shape in flat:
            for poly, size in zip(p.shape, shape, strict=True):
                if poly.as_symbol is not None:
                    out.setdefault(poly.as_symbol, size)
        for p, v, shape in flat:
            expected = tuple(poly.substitute(out) for poly in p.shape)
            if expected != shape:
                raise scope.fail(
                    "K0604",
                    f"parameter '{p.name}' of '{e.func}' has the shape {shape_text(p.shape)}, "
                    f"here {scope.shown(expected)}",
                    v.span,
                    "pass a tensor of that shape",
                    label=f"shape {self.scope.shown(v.shape)}",
                )
        return out

    def leading(self, e: host.Call, tensors: list[tuple[TensorParam, ir.View]]) -> dict[Poly, tuple[Poly, ...]]:
        """What is behind each starred dimension of the kernel: the leading dimensions of the tensors passed for it."""
        out: dict[Poly, tuple[Poly, ...]] = {}
        by: dict[Poly, str] = {}
        for p, v in tensors:
            extra = len(v.shape) - len(p.shape)
            if not p.star or extra < -1:
                continue
            own = v.shape[: extra + 1]
            if out.setdefault(p.shape[0], own) != own:
                raise self.scope.fail(
                    "K0604",
                    f"parameter '{p.name}' of '{e.func}' has other leading dimensions than '{by[p.shape[0]]}', "
                    f"{self.scope.shown(out[p.shape[0]])}",
                    v.span,
                    "pass tensors whose dimensions in the place of the starred one are the same",
                    label=f"shape {self.scope.shown(v.shape)}",
                )
            by.setdefault(p.shape[0], p.name)
        return out

    def flattened(self, e: host.Call, p: TensorParam, v: ir.View) -> tuple[Poly, ...]:
        """The shape of `v` with the dimensions behind a star as one."""
        extra = len(v.shape) - len(p.shape)
        if extra == 0 or (p.star and extra >= -1):
            if not p.star or extra == 0:
                return v.shape
            product = Poly.const(1)
            for d in v.shape[: extra + 1]:
                product = product * d
            return (product, *v.shape[extra + 1 :])
        raise self.scope.fail(
            "K0604",
            f"parameter '{p.name}' of '{e.func}' has the shape {shape_text(p.shape)}",
            v.span,
            f"pass a tensor with {len(p.shape)} dimensions",
            label=f"shape {self.scope.shown(v.shape)}",
        )

    def check_writes(self, e: host.Call, tensors: list[tuple[TensorParam, ir.View]], results: list[ir.View]) -> None:
        """What is written is the program's own, and no other argument."""
        scope = self.scope
        written = [v for p, v in tensors if p.role == "inout"]
        for v in written:
            if scope.tensors[v.tensor].role != "value":
                what = "an argument of the op" if scope.tensors[v.tensor].role == "in" else "an incoming gradient"
                raise scope.fail(
                    "K0607",
                    f"'{e.func}' writes to '{v.span.text}', which is {what}",
                    v.span,
                    "copy it with a kernel first",
                )
        everything = [v for _, v in tensors] + results
        for v in (*written, *results):
            same = [other for other in everything if other.tensor == v.tensor]
            if len(same) > 1:
                raise scope.fail(
                    "K0608",
                    f"'{same[0].span.text}' is written by this call and is also another argument",
                    v.span if v in written else e.span,
                    "pass a tensor of its own",
                )
