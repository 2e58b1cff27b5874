"""Expressions: how is a value computed from its operands?

Operands broadcast by name in the IR; here each is given the dimensions of the result, with `[:, None]` where it has
fewer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from kgen.codegen.triton.blocks import Blocks, Value, align
from kgen.codegen.triton.index import Indices
from kgen.codegen.triton.intrinsics import TYPES, cast, spell, typed
from kgen.codegen.triton.text import Text, literal, method
from kgen.dsl import ir
from kgen.dsl.dtypes import BOOL, F32, F64, I32, I64, DType

# Functions that are printed as calls and take numbers as well as blocks.
_CALLS = frozenset(("div", "floordiv", "maximum", "minimum", "mod", "pow", "where"))
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_I32_LIMIT = 2**31


class Expressions:
    """Prints expressions without loads and reductions, which are statements of their own."""

    def __init__(self, blocks: Blocks, indices: Indices, spelling: Callable[[str], str]) -> None:
        self.blocks, self.indices, self.spelling = blocks, indices, spelling
        self.bound: dict[str, tuple[str, ...]] = {}  # block dimensions of the `Let`s printed so far

    def value(self, e: ir.Expr) -> Value:
        """`e` as Python."""
        if isinstance(e, ir.Const):
            return Value(literal(_value(e)))
        if isinstance(e, ir.Scalar):
            text = Text(self.spelling(e.name))
            return Value(method(text, "to", TYPES[e.dtype.name]) if self._narrow(e) else text)
        if isinstance(e, ir.Ref):
            return Value(Text(self.spelling(e.name)), self.bound[e.name])
        if isinstance(e, ir.IndexValue):
            return self._index(e, widen=True)
        if isinstance(e, ir.Cast):
            return self._cast(e)
        if isinstance(e, ir.Op):
            return self._op(e)
        raise TypeError(f"{type(e).__name__} is a statement of its own in normal form")

    def scalar_or_block(self, e: ir.Expr) -> Value:
        """`e` as a Triton value even where it is a bare literal, so that it has the IR's type on its own."""
        v = self.value(e)
        return Value(typed(_value(e), e.dtype)) if v.text.literal and isinstance(e, ir.Const) else self._widened(v, e)

    def _widened(self, v: Value, e: ir.Expr) -> Value:
        return Value(typed(_constant(e), e.dtype)) if v.text.literal else v

    def _narrow(self, e: ir.Scalar) -> bool:
        """Whether the parameter is of a storage type that is computed with in a wider one."""
        return next(p for p in self.indices.kernel.scalars if p.name == e.name).dtype != e.dtype

    def _index(self, e: ir.IndexValue, widen: bool) -> Value:
        if e.index.is_constant or not widen:
            return self.indices.code(e.index)
        if not self._small(e):
            return self.indices.code(e.index, wide=True)
        v = self.indices.code(e.index)
        return Value(method(v.text, "to", "tl.int64"), v.dims)

    def _small(self, e: ir.Expr) -> bool:
        """Whether `e` is index arithmetic that is exact in 32 bits: it is compared and converted as it is."""
        if not isinstance(e, ir.IndexValue):
            return False
        limit = self.indices.bound(e.index)
        return limit is not None and limit < _I32_LIMIT

    def _literal(self, v: Value, e: ir.Expr, fn: str, alone: bool) -> Value:
        """The bare literal `v` of `e` as an operand of `fn`, given its type where Triton would take another one.
        `alone`: no operand beside it has a type."""
        value = _constant(e)
        if fn in _CALLS:
            # Triton makes a literal i32 or f32 by itself, then promotes it to the type of the other operand.
            fits = _natural(value) == e.dtype if alone else e.dtype.kind != "float" or _survives(value, e.dtype)
        else:
            fits = not alone  # an operator gives it the type of the other operand
        return v if fits else Value(typed(value, e.dtype))

    def _cast(self, e: ir.Cast) -> Value:
        if isinstance(e.arg, ir.Const):
            value = _value(e.arg)
            if e.arg.dtype == F32 and e.to == F64:
                value = ctypes.c_float(value).value  # what the constant is in its own type
            if e.to == e.to.compute:
                return Value(literal(_converted(value, e.to)))
            return Value(method(typed(_converted(value, e.to), e.to), "to", TYPES[e.dtype.name]))
        v = (
            self._index(e.arg, widen=False)
            if isinstance(e.arg, ir.IndexValue) and self._small(e.arg)
            else self.value(e.arg)
        )
        if v.text.literal:
            v = Value(typed(_constant(e.arg), e.arg.dtype))
        source = I32 if self._small(e.arg) else e.arg.dtype
        return Value(cast(v.text, source, e.to), v.dims)

    def _op(self, e: ir.Op) -> Value:
        narrow = e.fn in _COMPARISONS
        parts = [
            self._index(a, widen=False) if narrow and isinstance(a, ir.IndexValue) and self._small(a) else self.value(a)
            for a in e.args
        ]
        first = 1 if e.fn == "where" else 0
        alone = all(p.text.literal for p in parts[first:])
        for i in range(first, len(parts)):
            if parts[i].text.literal:
                parts[i] = self._literal(parts[i], e.args[i], e.fn, alone)
        dims = self.blocks.order(k for p in parts for k in p.dims)
        texts = [align(p, dims) for p in parts]
        return Value(spell(e.fn, texts, e.dtype, e.args[-1].dtype), dims)


def _natural(value: float | int | bool) -> DType:
    """The type that Triton gives a literal on its own."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return I32 if -(2**31) <= value < 2**31 else I64
    normal = 2.0**-126 <= abs(value) < 2.0**128
    return F32 if normal or value != value or value in (0.0, float("inf"), float("-inf")) else F64


def _survives(value: float | int | bool, dtype: DType) -> bool:
    """Whether a float literal has the right value and type after it was made by itself and promoted to `dtype`."""
    if _natural(value) != F32:
        return dtype == F64
    return dtype == F32 or value != value or ctypes.c_float(value).value == value


def _constant(e: ir.Expr) -> float | int | bool:
    """The value of an expression that is printed as a bare literal."""
    if isinstance(e, ir.Const):
        return _value(e)
    if isinstance(e, ir.IndexValue):
        return e.index.constant
    assert isinstance(e, ir.Cast)
    return _converted(_constant(e.arg), e.to)


def _value(e: ir.Const) -> float | int | bool:
    return _converted(e.value, e.dtype)


def _converted(value: float | int | bool, to: DType) -> float | int | bool:
    if to.kind == "float":
        return float(value)
    if to.kind == "bool":
        return bool(value)
    wrapped = int(value) % (1 << to.bits)
    return wrapped - (1 << to.bits) if to.signed and wrapped >> (to.bits - 1) else wrapped
