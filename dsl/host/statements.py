"""Statements of host programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kgen.dsl import ast
from kgen.dsl.affine import Poly
from kgen.dsl.check.signature import TensorParam, index_poly, literal_value
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host import ast as host
from kgen.dsl.host import ir
from kgen.dsl.host.collectives import is_collective
from kgen.dsl.host.expressions import Expressions
from kgen.dsl.host.scope import GRADIENT, Loop, Scope, Stop
from kgen.dsl.host.state import ONE_OR_THE_OTHER, whole_in_loop
from kgen.dsl.host.values import assigned

_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


class Statements:
    """Elaborates a section, statement by statement; a mistake costs the statement it is in."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.expressions = Expressions(scope)

    def block(self, statements: tuple[host.Stmt, ...]) -> None:
        """Elaborate `statements` in order."""
        handlers: dict[type, Callable[..., None]] = {
            host.Declare: self._declare,
            host.Assign: self._assign,
            host.Accumulate: self._accumulate,
            host.Perform: self._perform,
            host.If: self._if,
            host.Chunks: self._chunks,
            ast.Require: self._require,
        }
        for s in statements:
            try:
                handlers[type(s)](s)
            except Stop:
                self.poison(s)

    def poison(self, s: host.Stmt) -> None:
        """Remember what a broken statement would have named, so that its uses are not reported too."""
        for inner in (*s.body, *s.orelse) if isinstance(s, host.If) else s.body if isinstance(s, host.Chunks) else ():
            self.poison(inner)
        targets = (
            s.targets if isinstance(s, host.Assign)
            else (s.target,) if isinstance(s, host.Accumulate)
            else (ast.Name(s.name, s.name_span),) if isinstance(s, host.Declare)
            else ()
        )  # fmt: skip
        for t in targets:
            name = t.id if isinstance(t, ast.Name) else t.tensor
            self.scope.failed.add(name)
            if name in self.scope.names:
                self.scope.state.assume(self.scope.names[name].tensor)

    def _require(self, s: ast.Require) -> None:
        raise self.scope.fail(
            "K0609", "'require' stands before the sections of an op", s.span, "move it above `forward:`"
        )

    # -- names ---------------------------------------------------------------------------------------------------
    def _free(self, name: str, at: ast.Name) -> None:
        kind = self.scope.kind(name)
        if kind is not None:
            raise self.scope.fail(
                "K0607", f"'{name}' is {kind} and cannot be assigned", at.span, "choose another name for the value"
            )

    def _declare(self, s: host.Declare) -> None:
        scope = self.scope
        self._free(s.name, ast.Name(s.name, s.name_span))
        if s.name in scope.names or s.name in scope.results:
            raise scope.fail("K0615", f"'{s.name}' is declared twice", s.name_span, "give one another name")
        t = s.type
        if not isinstance(t, ast.TensorType) or t.inout or t.optional:
            raise scope.fail("K0615", "a declaration has the form g: f32[V, H]", s.span, "give it a dtype and a shape")
        if t.dtype not in DTYPES and t.dtype not in scope.signature.dtype_vars:
            known = ", ".join([*scope.signature.dtype_vars, *DTYPES])
            raise scope.fail("K0605", f"'{t.dtype}' is no dtype of this op", t.span, f"dtypes here: {known}")
        shape = []
        for d in t.dims:
            if d.star:
                raise scope.fail(
                    "K0604", "a star in a declaration", d.span, "starred dimensions are one here: leave the star out"
                )
            poly = index_poly(d.expr, self._dimension, scope.diagnostics)
            if poly is None:
                scope.broken = True
                raise Stop()
            shape.append(poly)
        scope.bind(s.name, scope.tensor(s.name, t.dtype, tuple(shape), "value", s.name_span))

    def _dimension(self, name: ast.Name) -> Poly:
        found = self.scope.dim(name.id)
        if found is None:
            dims = ", ".join(self.scope.signature.dims) or "none"
            raise self.scope.fail(
                "K0601", f"'{name.id}' is not a dimension", name.span, f"dimensions of this op: {dims}"
            )
        return found

    def _result(self, name: str) -> ir.View | None:
        """The tensor of an output or a gradient, made at its first use; None for any other name."""
        scope = self.scope
        p = scope.results.get(name)
        if p is None:
            return None
        if name not in scope.names:
            self._store_for(name, p)
        return scope.names[name]

    def _store_for(self, name: str, p: TensorParam) -> None:
        """A new tensor for an output or a gradient."""
        scope = self.scope
        scope.bind(name, scope.tensor(name, p.dtype, scope.shape(p), "value", p.span, inside=False))
        scope.storage[name] = scope.names[name].tensor

    def _target(self, t: host.Target) -> ir.View | None:
        """The tensor that an assignment stores into; None where it names a new value."""
        scope = self.scope
        if isinstance(t, ast.Name):
            self._free(t.id, t)
            p = scope.results.get(t.id)
            if p is not None:
                return self._anew(t, p)
            # A declared tensor is filled by its first assignment; any other assignment names a new value.
            held = scope.names.get(t.id)
            if held is None or scope.state.touched(held.tensor):
                return None
            if scope.state.outer(held.tensor):
                raise scope.fault(whole_in_loop(t.id, t.span, scope.state.index))
            return self._stored(t, held)
        if t.tensor in scope.failed:
            raise Stop()
        base = self._result(t.tensor) or scope.names.get(t.tensor)
        if base is None:
            raise scope.fail(
                "K0601",
                f"'{t.tensor}' is not declared",
                t.tensor_span,
                f"declare it, as in {t.tensor}: f32[...]; a whole value needs no declaration",
            )
        return self._stored(t, self.expressions.sliced(scope.current(t.tensor, base, t.tensor_span), t))

    def _anew(self, t: ast.Name, p: TensorParam) -> ir.View:
        """The tensor of an output or a gradient that is assigned as a whole: what it was before stays what it is."""
        scope = self.scope
        if scope.loops:
            raise scope.fault(whole_in_loop(t.id, t.span, scope.state.index))
        held = self._result(t.id)
        assert held is not None
        if scope.state.touched(held.tensor):
            if scope.storage.get(t.id) == held.tensor and scope.state.summed(held.tensor):
                raise scope.fail("K0607", f"'{t.id}' is a sum and is also assigned", t.span, ONE_OR_THE_OTHER)
            before, version = scope.names[t.id], scope.seen.get(t.id, 0)
            self._store_for(t.id, p)
            # Until it is assigned the name stands for what it did.
            held = scope.names[t.id]
            scope.names[t.id], scope.seen[t.id] = before, version
        return self._stored(t, held)

    def _stored(self, t: host.Target, v: ir.View) -> ir.View:
        """`v`, if it may be stored to."""
        scope = self.scope
        if scope.tensors[v.tensor].role != "value":
            raise scope.fail("K0607", f"'{v.tensor}' is an argument and cannot be assigned", t.span, "use a new name")
        return replace(v, span=t.span)

    # -- values --------------------------------------------------------------------------------------------------
    def _assign(self, s: host.Assign) -> None:
        scope = self.scope
        hints = tuple(t.id if isinstance(t, ast.Name) else t.tensor for t in s.targets)
        plain = is_collective(s.value, scope)
        if isinstance(s.value, host.Call) and s.value.func not in (*DTYPES, *scope.signature.dtype_vars) and not plain:
            targets = tuple(self._target(t) for t in s.targets)
            made = self.expressions.calls.call(s.value, targets, hints)
        elif len(s.targets) > 1:
            raise scope.fail(
                "K0603", f"{len(s.targets)} targets but one value", s.span, "only a kernel has several outputs"
            )
        else:
            target = self._target(next(iter(s.targets)))
            made = [self._one(s, target, hints[0])]
        for t, v in zip(s.targets, made, strict=True):
            if isinstance(t, ast.Name):
                scope.bind(t.id, v)

    def _one(self, s: host.Assign, target: ir.View | None, hint: str) -> ir.View:
        scope, e = self.scope, s.value
        if isinstance(e, host.Product | host.Call):
            return self.expressions.into(e, target, hint)
        source = self.expressions.view(e)
        if target is not None:
            self.expressions.fits(target, source.shape, source.dtype, s.span)
        if target is None or isinstance(next(iter(s.targets)), ast.Name):
            return source  # another name for it
        self.expressions.apart(target, [source], s.span)
        scope.emit(ir.Convert(target, source, s.span))
        return target

    def _accumulate(self, s: host.Accumulate) -> None:
        scope = self.scope
        name = s.target.id if isinstance(s.target, ast.Name) else s.target.tensor
        base = self._result(name) or scope.names.get(name)
        if base is None:
            if name in scope.failed:
                raise Stop()
            kind = scope.kind(name)
            hint = f"declare it, as in {name}: f32[...]" if kind is None else "sum into a tensor of your own"
            raise scope.fail("K0601", f"'{name}' is {kind or 'not declared'}", s.target.span, hint)
        target = scope.current(name, replace(base, span=s.target.span), s.target.span)
        if isinstance(s.target, ast.Subscript):
            target = self.expressions.sliced(target, s.target)
        if scope.tensors[target.tensor].role != "value":
            raise scope.fail(
                "K0607", f"'{name}' is an argument and cannot be added to", s.target.span, "use a new name"
            )
        if isinstance(s.value, host.Product) and s.value.plus is None:
            self.expressions.product(s.value, target, name, add=True)
        else:
            value = self.expressions.value(s.value)
            self.expressions.fits(target, value.shape, None, s.span)
            if any(d.kind != "float" for n in (target, value) for d in scope.dtypes(n.dtype)):
                raise scope.fail("K0605", "'+=' of values that are not floats", s.span, "sum floating-point tensors")
            self.expressions.apart(target, [value], s.span)
            scope.emit(ir.Sum(target, value, s.span))

    def _perform(self, s: host.Perform) -> None:
        scope = self.scope
        callee = scope.callees.get(s.call.func)
        idle = callee is not None and not any(t.role == "inout" for t in callee.signature.tensors)
        if idle or is_collective(s.call, scope):
            raise scope.fail(
                "K0603",
                f"'{s.call.func}' writes nothing in place, so that this call has no effect",
                s.span,
                "give its output a name, as in a = " + s.span.text.split("\n")[0],
            )
        self.expressions.calls.call(s.call, (), (), drop=True)

    # -- structure -----------------------------------------------------------------------------------------------
    def _chunks(self, s: host.Chunks) -> None:
        scope = self.scope
        if s.function != "chunks":
            raise scope.fail(
                "K0611", f"a loop over '{s.function}'", s.function_span, "loops are written for c in chunks(B):"
            )
        if s.dim not in scope.signature.dims:
            dims = ", ".join(scope.signature.dims)
            raise scope.fail("K0611", f"'{s.dim}' is not a dimension", s.dim_span, f"dimensions of this op: {dims}")
        if scope.loops:
            raise scope.fail("K0611", "a loop over chunks inside another", s.span, "loop over one dimension")
        if scope.kind(s.index) is not None or s.index in scope.names:
            raise scope.fail("K0615", f"'{s.index}' already means something else", s.span, "rename the index")
        loop = Loop(s.index, scope.unique(s.index), s.dim)
        outer, names, seen = scope.body, dict(scope.names), dict(scope.seen)
        scope.body = []
        scope.loops.append(loop)
        scope.state.enter(loop.chunk, s.index)
        self.block(s.body)
        scope.state.leave()
        scope.loops.pop()
        outer.append(ir.Loop(loop.chunk, s.dim, tuple(scope.body), s.span))
        scope.body = outer
        # What the loop named is gone, and what it named anew means what it did before; a result that was first stored
        # in the loop remains.
        for n in set(scope.names) - set(scope.results):
            if n not in names:
                del scope.names[n]
            elif scope.names[n] is not names[n]:
                scope.names[n], scope.seen[n] = names[n], seen.get(n, 0)

    def _if(self, s: host.If) -> None:
        taken, by_gradients = self.opened(s)
        self.block(taken)
        self.closed(s, by_gradients)

    def opened(self, s: host.If) -> tuple[tuple[host.Stmt, ...], bool]:
        """The statements of the branch that is taken, and whether gradients were asked for; `closed` comes behind them.
        Raises Stop for a condition that has no value."""
        scope = self.scope
        asked, scope.asked = scope.asked, {}
        truth = self.truth(s.condition)
        by_gradients, scope.asked = bool(scope.asked), asked | scope.asked
        scope.values.choices += by_gradients
        return s.body if truth else s.orelse, by_gradients

    def closed(self, s: host.If, by_gradients: bool) -> None:
        """The end of a choice. What both branches of one by gradients assign counts as one value."""
        scope = self.scope
        scope.values.choices -= by_gradients
        if not by_gradients:
            return
        signatures = {n: c.signature for n, c in scope.callees.items()}
        for name in assigned(s.body, signatures) & assigned(s.orelse, signatures):
            held = dict.get(scope.names, name)
            if held is not None:
                scope.names[name] = scope.values.either(held, str(s.span), name)

    def truth(self, e: ast.Expr) -> bool:
        """The value of a condition on this path."""
        scope = self.scope
        if isinstance(e, ast.Unary) and e.op == "not":
            return not self.truth(e.operand)
        if isinstance(e, ast.Binary) and e.op in ("and", "or"):
            left = self.truth(e.left)
            return left if (e.op == "and") != left else self.truth(e.right)
        if isinstance(e, ast.Number) and isinstance(e.value, bool):
            return e.value
        if isinstance(e, ast.Name):
            p = scope.inputs.get(e.id)
            if p is not None and p.optional:
                return scope.is_present(p)
            own = scope.inputs.get(e.id.removeprefix(GRADIENT)) if e.id.startswith(GRADIENT) else None
            if own is not None:
                return scope.is_present(own) and scope.is_wanted(own.name)
            s = scope.scalars.get(e.id)
            if s is not None and s.const and s.dtype == "bool":
                value = scope.const(e.id)
                return scope.choices.decide(e.id) if value is None else bool(value)
        if isinstance(e, ast.Binary) and e.op in _RELATIONS:
            a, b = self._operand(e.left), self._operand(e.right)
            return scope.choices.decide(e.span.text) if a is None or b is None else _RELATIONS[e.op](a, b)
        raise self._open(e)

    def _operand(self, e: ast.Expr) -> int | float | bool | None:
        value = literal_value(e)
        if value is not None:
            return value
        if isinstance(e, ast.Name) and e.id in self.scope.scalars and self.scope.scalars[e.id].const:
            return self.scope.const(e.id)
        raise self._open(e)

    def _open(self, e: ast.Expr) -> Stop:
        return self.scope.fail(
            "K0613",
            "this condition is not known before the program runs",
            e.span,
            "ask for const parameters, for optional tensors (`if bias:`) and for gradients (`if d_x:`)",
        )


def gradient_of(p: TensorParam) -> TensorParam:
    """The gradient of a parameter, as a result that the backward section may assign."""
    return TensorParam(GRADIENT + p.name, p.dtype, p.shape, p.star, "out", False, p.span)
