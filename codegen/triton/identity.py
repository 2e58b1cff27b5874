"""Masked lanes: what do the lanes beyond a ragged edge hold, and does a reduction have to select them away?

A load may give its masked lanes a value (`other=`). Where that value, taken through the arithmetic, arrives at a
reduction as its identity, nothing more is to be done: zeros stay zeros under `x * x`. Otherwise the reduction selects
the identity itself. Values are followed exactly or not at all: what memory cannot hold is no `other`, the masked lanes
of one axis are not those of another, and nothing is said of what would be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kgen.codegen.triton.intrinsics import identity
from kgen.dsl import ir

Number = float | int | bool

_FOLD: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a, "abs": abs,
    "maximum": max, "minimum": min, "exp": math.exp, "exp2": lambda a: 2.0**a, "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "and": lambda a, b: a and b, "or": lambda a, b: a or b, "not": lambda a: not a,
    "where": lambda c, a, b: a if c else b,
}  # fmt: skip


class MaskedLanes:
    """The choice of `other` for the loads of one straight stretch of statements."""

    def __init__(
        self,
        kernel: ir.Kernel,
        body: Iterable[ir.Stmt],
        ragged: frozenset[str],
        held: Mapping[str, Number | None] | None = None,
    ) -> None:
        """`body`: statements of `kernel`. `ragged`: the tile indices whose blocks have masked lanes. `held`: what those
        of loads have that are made already, None for anything."""
        self.kernel = kernel
        self.ragged = ragged
        self.lets = {s.name: s.value for s in body if isinstance(s, ir.Let)}
        self.held = {} if held is None else held
        self.other: dict[str, Number] = {n: v for n, v in self.held.items() if v is not None and n in self.lets}
        for value in self.lets.values():
            if isinstance(value, ir.Reduce) and ragged.intersection(value.over):
                self._choose(value)

    def holds_identity(self, e: ir.Reduce) -> bool:
        """Whether the masked lanes of the argument are the identity of the reduction, given the chosen `other`s."""
        return self._settles(e, self.other)

    def _choose(self, e: ir.Reduce) -> None:
        """Give the loads below `e` that are still free the identity, or zero, if that settles the reduction."""
        wanted = identity(e.kind, e.arg.dtype)
        free = [n for n in self._loads(e.arg) if n not in self.other and n not in self.held]
        for fill in (wanted, 0.0 if isinstance(wanted, float) else 0):
            trial = {**self.other, **{n: self._fill(n, fill) for n in free if self._can_hold(n, fill)}}
            if self._settles(e, trial):
                self.other = trial
                return

    def _settles(self, e: ir.Reduce, other: dict[str, Number]) -> bool:
        """Whether `other` takes the masked lanes of the argument of `e` to the identity."""
        edge = self.ragged.intersection(e.over)
        masked = {n: v for n, v in other.items() if edge <= self.lets[n].axes}  # others hold elements there
        return _same(self._fold(e.arg, masked), identity(e.kind, e.arg.dtype))

    def _can_hold(self, name: str, value: Number) -> bool:
        """Whether an element of the tensor that `name` is loaded from can be `value`."""
        load = self.lets[name]
        assert isinstance(load, ir.Load)  # as `_loads` says
        dtype = self.kernel.tensor(load.tensor).dtype
        if dtype.kind != "int":
            return True
        low = -(1 << (dtype.bits - 1)) if dtype.signed else 0
        return low <= value < low + (1 << dtype.bits)

    def _fill(self, name: str, value: Number) -> Number:
        kind = self.lets[name].dtype.kind
        return float(value) if kind == "float" else (bool(value) if kind == "bool" else value)

    def _loads(self, e: ir.Expr) -> list[str]:
        out: list[str] = []
        for n in ir.walk(e):
            if isinstance(n, ir.Ref) and n.name in self.lets:
                value = self.lets[n.name]
                if isinstance(value, ir.Load):
                    if all(not isinstance(s, ir.Expr) for s in value.at):  # a gather reads NaN, not `other`
                        out.append(n.name)
                else:
                    out += self._loads(value)
        return out

    def _fold(self, e: ir.Expr, other: dict[str, Number]) -> Number | None:
        """The value of `e` in masked lanes; None if it is not known, or NaN, which Python's `max` does not keep."""
        value = self._exactly(e, other)
        return None if isinstance(value, float) and math.isnan(value) else value

    def _exactly(self, e: ir.Expr, other: dict[str, Number]) -> Number | None:
        if isinstance(e, ir.Const):
            return e.value
        if isinstance(e, ir.Ref):
            if e.name in other:
                return other[e.name]
            value = self.lets.get(e.name)
            return None if value is None else self._fold(value, other)
        if isinstance(e, ir.Cast):
            arg = self._fold(e.arg, other)
            if arg is None or (isinstance(arg, float) and not math.isfinite(arg) and e.to.kind != "float"):
                return None
            if e.to.kind == "float":
                return float(arg) if arg in (0, 1) or not math.isfinite(arg) else None
            return bool(arg) if e.to.kind == "bool" else int(arg) if arg in (0, 1) else None
        if isinstance(e, ir.Op) and e.fn in _FOLD:
            args = [self._fold(a, other) for a in e.args]
            if any(a is None for a in args):
                return None
            try:
                return _FOLD[e.fn](*args)
            except (OverflowError, ValueError):
                return None
        return None


def _same(a: Number | None, b: Number) -> bool:
    # -0.0 is an identity of a sum as good as 0.0: it changes no value but the sign of an empty sum.
    return a is not None and a == b
