"""The scalar functions and reductions of the language: name, arity, result dtype and meaning, once.

Backends spell each op their own way (`codegen/cuda`, `codegen/triton`, `codegen/interpret.py`); this table is what
they must all agree on, and the tests go through it op by op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarOp:
    """`result` is `same` (the promoted dtype of the operands), `float` (integers convert to f32 first) or `bool`."""

    name: str
    arity: int
    result: str
    meaning: str


def _table(*rows: tuple[str, int, str, str]) -> dict[str, ScalarOp]:
    return {name: ScalarOp(name, arity, result, meaning) for name, arity, result, meaning in rows}


# Ops that a user calls by name.
CALLABLE_OPS = _table(
    ("exp", 1, "float", "e**a; the hardware base-2 exponential of a*log2(e)"),
    ("exp2", 1, "float", "2**a; the hardware base-2 exponential"),
    ("expm1", 1, "float", "exp(a) - 1, accurate near 0"),
    ("log", 1, "float", "natural logarithm"),
    ("log2", 1, "float", "base-2 logarithm"),
    ("log1p", 1, "float", "log(1 + a), accurate near 0"),
    ("sqrt", 1, "float", "square root, IEEE round-to-nearest"),
    ("rsqrt", 1, "float", "1 / sqrt(a), within 2 ulp"),
    ("sigmoid", 1, "float", "1 / (1 + exp(-a))"),
    ("tanh", 1, "float", "hyperbolic tangent"),
    ("erf", 1, "float", "error function"),
    ("sin", 1, "float", "sine of a in radians"),
    ("cos", 1, "float", "cosine of a in radians"),
    ("pow", 2, "float", "a**b for a >= 0, or b a whole number"),
    ("abs", 1, "same", "absolute value"),
    ("sign", 1, "same", "-1, 0 or 1; NaN for NaN"),
    ("floor", 1, "float", "largest whole number <= a"),
    ("ceil", 1, "float", "smallest whole number >= a"),
    ("round", 1, "float", "nearest whole number, ties to even"),
    ("trunc", 1, "float", "whole number toward zero"),
    ("maximum", 2, "same", "larger of the two; NaN if either is NaN"),
    ("minimum", 2, "same", "smaller of the two; NaN if either is NaN"),
    ("isnan", 1, "bool", "whether a is NaN"),
    ("isinf", 1, "bool", "whether a is +inf or -inf"),
    ("where", 3, "where", "where(c, a, b): a if c else b, elementwise"),
)

# Ops that operators stand for.
OPERATOR_OPS = _table(
    ("add", 2, "same", "a + b"),
    ("sub", 2, "same", "a - b"),
    ("mul", 2, "same", "a * b"),
    ("div", 2, "float", "a / b, IEEE round-to-nearest"),
    ("floordiv", 2, "same", "a // b, floored; integers only; b == 0 is undefined"),
    ("mod", 2, "same", "a % b, with the sign of b; integers only; b == 0 is undefined"),
    ("neg", 1, "same", "-a"),
    ("eq", 2, "bool", "a == b"),
    ("ne", 2, "bool", "a != b"),
    ("lt", 2, "bool", "a < b"),
    ("le", 2, "bool", "a <= b"),
    ("gt", 2, "bool", "a > b"),
    ("ge", 2, "bool", "a >= b"),
    ("and", 2, "bool", "both; operands are bool"),
    ("or", 2, "bool", "either; operands are bool"),
    ("not", 1, "bool", "negation; the operand is bool"),
)

SCALAR_OPS = CALLABLE_OPS | OPERATOR_OPS

OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "//": "floordiv", "%": "mod", "**": "pow",
    "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "and": "and", "or": "or",
}  # fmt: skip

# Reductions of the IR. `mean`, `var`, `logsumexp` and `softmax` are written in terms of these by the checker.
REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin")
COMPOSITE_REDUCTIONS = ("mean", "var", "logsumexp", "softmax")

# Names with a value, unless the kernel gives them another meaning.
CONSTANTS = {"inf": math.inf, "nan": math.nan, "pi": math.pi}
