"""What does one operation of the IR cost? Its kind, and the instructions that a special function takes of each unit."""

from __future__ import annotations

from dataclasses import dataclass

ADDS = frozenset({"add", "sub"})
MULS = frozenset({"mul"})
DIVISIONS = frozenset({"div"})
# One instruction each.
CHEAP = frozenset((
    "add", "sub", "mul", "neg", "abs", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not",
    "where", "isnan",
))  # fmt: skip


@dataclass(frozen=True)
class Instructions:
    """Of one operation in f32: `special`, those of the special-function units (MUFU), and `f32`, those of the units for
    multiply-add (FFMA, FMUL, FADD)."""

    special: int
    f32: int


# In the machine code for sm_90 of NVRTC 13.0 and Triton 3.6, whichever has less; ranges of arguments that are treated
# apart (subnormals, infinities) are not counted. tests/test_cost.py counts again.
SPECIAL = {
    "exp": Instructions(1, 1),
    "exp2": Instructions(1, 0),
    "expm1": Instructions(1, 15),
    "log": Instructions(0, 15),
    "log2": Instructions(0, 17),
    "log1p": Instructions(0, 16),
    "sqrt": Instructions(1, 5),
    "rsqrt": Instructions(1, 2),
    "sigmoid": Instructions(2, 7),
    "tanh": Instructions(2, 9),
    "erf": Instructions(1, 14),
    "sin": Instructions(0, 12),
    "cos": Instructions(0, 12),
    "pow": Instructions(1, 43),
}
DIVISION = Instructions(1, 6)

# What an operation is counted as; comparisons, choices, rounding, signs and logic are `other`.
FLOPS = ("add", "mul", "division", "special")
KINDS = (*FLOPS, "other", "integer")


def kind(fn: str, floating: bool) -> str:
    """One of `KINDS`: what the operation `fn` counts as, on floating-point operands or on integers and bools."""
    if fn in SPECIAL:
        return "special"
    if not floating:
        return "integer"
    return "add" if fn in ADDS else "mul" if fn in MULS else "division" if fn in DIVISIONS else "other"
