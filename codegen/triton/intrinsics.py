"""Scalar functions: how is each one spelled in Triton, such that it keeps the numerics contract?

f32 division and square root are the IEEE ones (`tl.div_rn`, `tl.sqrt_rn`; `/` and `tl.sqrt` are approximate for f32 and
exact for f64). The f32 exponentials are the hardware's instruction, which flushes subnormal results to 0; `tl.exp` and
libdevice's spend three more on those. `tl.rsqrt` is the hardware's, `erf` of f32 is ours (`kgen.codegen.erf`); other
transcendental functions are libdevice's. Integer `//` and `%` floor. Everything here takes operands that are already
broadcast against each other.
"""

from __future__ import annotations

from kgen.codegen.triton.text import Text, binary, call, literal, method, unary
from kgen.dsl.dtypes import BOOL, F32, DType

TYPES = {
    "f16": "tl.float16", "bf16": "tl.bfloat16", "f32": "tl.float32", "f64": "tl.float64", "i8": "tl.int8",
    "u8": "tl.uint8", "i16": "tl.int16", "i32": "tl.int32", "i64": "tl.int64", "bool": "tl.int1",
}  # fmt: skip

# Types of a scalar or pointee in a Triton signature.
SIGNATURE = {
    "f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "i8": "i8", "u8": "u8", "i16": "i16", "i32": "i32",
    "i64": "i64", "bool": "i1",
}  # fmt: skip

_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|",
}  # fmt: skip

_TL = {"exp": "tl.exp", "exp2": "tl.exp2", "rsqrt": "tl.rsqrt", "abs": "tl.abs", "sigmoid": "tl.sigmoid",
       "floor": "tl.floor", "ceil": "tl.ceil"}  # fmt: skip

_LIBDEVICE = {"expm1": "expm1", "log": "log", "log2": "log2", "log1p": "log1p", "tanh": "tanh", "erf": "erf",
              "sin": "sin", "cos": "cos", "pow": "pow", "round": "rint", "trunc": "trunc"}  # fmt: skip

# Functions of `templates/triton/helpers.py.j2`; the second ones in f32 alone.
_HELPER = {"floordiv": "_floordiv", "mod": "_mod", "sign": "_sign"}
_HELPER_F32 = {"exp": "_exp", "exp2": "_exp2", "erf": "_erf"}


def typed(value: float | int | bool, dtype: DType) -> Text:
    """A scalar constant of exactly `dtype`: a bare literal takes its type from the other operand, and alone it is
    i32 or f32."""
    return call("tl.full", "[]", literal(value), TYPES[dtype.name])


def spell(fn: str, args: list[Text], dtype: DType, operand: DType) -> Text:
    """`fn(args)` with result type `dtype`; `operand` is the type of the arguments (of the branches, for `where`).

    Raises KeyError for a function that `kgen.dsl.builtins.SCALAR_OPS` does not list.
    """
    if fn in _OPERATORS:
        return binary(_OPERATORS[fn], args[0], args[1])
    if fn == "neg":
        # Triton subtracts from +0, which makes +0 of +0.
        return binary("*", args[0], literal(-1.0)) if dtype.kind == "float" else unary("-", args[0])
    if fn == "not":
        return unary("~", args[0])
    if fn == "div":
        return call("tl.div_rn", *args) if dtype.bits == 32 else binary("/", args[0], args[1])
    if fn == "sqrt":
        return call("tl.sqrt_rn" if dtype.bits == 32 else "tl.sqrt", *args)
    if fn in ("maximum", "minimum"):
        return call(f"_{fn}" if operand.kind == "float" else f"tl.{fn}", *args)
    if fn == "where":
        return call("tl.where", *args)
    if fn == "isnan":
        return binary("!=", args[0], args[0])
    if fn == "isinf":
        return binary("==", call("tl.abs", args[0]), literal(float("inf")))
    if fn in _HELPER_F32 and dtype == F32:
        return call(_HELPER_F32[fn], *args)
    if fn in _TL:
        return call(_TL[fn], *args)
    if fn in _LIBDEVICE:
        return call(f"libdevice.{_LIBDEVICE[fn]}", *args)
    return call(_HELPER[fn], *args)


def cast(arg: Text, source: DType, to: DType) -> Text:
    """`arg` of compute type `source` rounded to `to` and held in `to.compute`."""
    out = stored(arg, source, to)
    return out if to == to.compute else method(out, "to", TYPES[to.compute.name])


def stored(arg: Text, source: DType, to: DType) -> Text:
    """`arg` of compute type `source` converted to `to`. Floats become narrow integers by way of i32: they saturate
    there, as the hardware conversion does, and wrap from there on."""
    if to == source:
        return arg
    if to == BOOL:
        return binary("!=", arg, literal(0.0 if source.kind == "float" else 0))
    if source.kind == "float" and to.kind == "int" and to != to.compute:
        arg = method(arg, "to", TYPES[to.compute.name])
    return method(arg, "to", TYPES[to.name])


def lowest(dtype: DType) -> float | int | bool:
    """The least value of `dtype`: minus infinity, the most negative integer, False."""
    if dtype.kind == "float":
        return float("-inf")
    if dtype.kind == "bool":
        return False
    return -(1 << (dtype.bits - 1)) if dtype.signed else 0


def highest(dtype: DType) -> float | int | bool:
    """The greatest value of `dtype`."""
    if dtype.kind == "float":
        return float("inf")
    if dtype.kind == "bool":
        return True
    return (1 << (dtype.bits - (1 if dtype.signed else 0))) - 1


def identity(kind: str, dtype: DType) -> float | int | bool:
    """The value that does not change a reduction of `kind` over values of `dtype`."""
    if kind == "sum":
        return 0.0 if dtype.kind == "float" else 0
    if kind == "prod":
        return 1.0 if dtype.kind == "float" else 1
    if kind in ("any", "all"):
        return kind == "all"
    return lowest(dtype) if kind in ("max", "argmax") else highest(dtype)
