"""CUDA C text: expressions that know their precedence, and lines that know their source."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kgen.codegen.origins import cited
from kgen.dsl.dtypes import DType
from kgen.dsl.source import Span

# Binding strengths of C++ operators; higher binds tighter.
PRIMARY, UNARY, MUL, ADD, SHIFT, REL, EQ, BITAND, AND, OR, COND = 100, 90, 80, 70, 65, 60, 55, 50, 40, 35, 30

_BINARY = {
    "*": MUL, "/": MUL, "%": MUL, "+": ADD, "-": ADD, "<": REL, "<=": REL, ">": REL, ">=": REL,
    "==": EQ, "!=": EQ, "&&": AND, "||": OR, "&": BITAND,
}  # fmt: skip
_ASSOCIATIVE = {"&&", "||"}


@dataclass(frozen=True)
class CExpr:
    """A C expression. `type` is its C type as the language sees it: float, double, int, long long or bool."""

    text: str
    type: str
    level: int = PRIMARY

    def at(self, level: int) -> str:
        """The text as an operand of an operator that binds with `level`, parenthesised where it binds weaker."""
        return self.text if self.level >= level else f"({self.text})"

    def __str__(self) -> str:
        return self.text


def common(a: str, b: str) -> str:
    """The type of an arithmetic operation on operands of C types `a` and `b`."""
    for t in ("double", "float", "long long"):
        if t in (a, b):
            return t
    return "int"


def binary(op: str, a: CExpr, b: CExpr) -> CExpr:
    """`a op b` with the parentheses that it needs and no other."""
    level = _BINARY[op]
    whole = op == "+" and {a.type, b.type} <= {"int", "long long"}
    right = level if op in _ASSOCIATIVE or whole else level + 1
    # `a - -b` and `a + -b` are read wrongly without the parentheses.
    right_text = f"({b})" if b.text.startswith("-") else b.at(right)
    result = "bool" if level in (REL, EQ, AND, OR) else common(a.type, b.type)
    # C does not need these, a reader does.
    left_text = f"({a})" if op == "||" and a.level == AND else a.at(level)
    if op == "||" and b.level == AND:
        right_text = f"({b})"
    return CExpr(f"{left_text} {op} {right_text}", result, level)


def unary(op: str, a: CExpr) -> CExpr:
    """`-a` or `!a`."""
    text = f"({a})" if a.text.startswith(op) else a.at(UNARY)
    return CExpr(op + text, "bool" if op == "!" else common(a.type, "int"), UNARY)


def call(name: str, type: str, *args: CExpr) -> CExpr:
    """`name(args...)`."""
    return CExpr(f"{name}({', '.join(a.text for a in args)})", type)


def cast(type: str, a: CExpr) -> CExpr:
    """`(type)a`, or `a` where it is of that type already."""
    return a if a.type == type else CExpr(f"({type}){a.at(UNARY)}", type, UNARY)


def conditional(c: CExpr, a: CExpr, b: CExpr) -> CExpr:
    """`c ? a : b`."""
    type = a.type if a.type == b.type else common(a.type, b.type)
    return CExpr(f"{c.at(COND + 1)} ? {a.at(COND + 1)} : {b.at(COND)}", type, COND)


def integer(value: int, wide: bool = False) -> CExpr:
    """A whole number; of type long long where `wide` or where an int cannot hold it."""
    if value == -(1 << 63):
        return CExpr("-0x7fffffffffffffffLL - 1", "long long", ADD)
    if value == -(1 << 31) and not wide:
        return CExpr("-0x7fffffff - 1", "int", ADD)
    wide = wide or not -(1 << 31) <= value < 1 << 31
    text = f"{value}LL" if wide else str(value)
    return CExpr(text, "long long" if wide else "int", UNARY if value < 0 else PRIMARY)


def floating(value: float, double: bool = False) -> CExpr:
    """A float or double literal: the shortest that reads back as the nearest value of the type."""
    type = "double" if double else "float"
    if math.isnan(value):
        return CExpr("NAN", type)
    if not double:
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = math.copysign(math.inf, value)
    if math.isinf(value):
        return CExpr("-INFINITY", type, UNARY) if value < 0 else CExpr("INFINITY", type)
    text = repr(value) if double else _shortest_f32(value)
    if not any(c in text for c in ".e"):
        text += ".0"
    level = UNARY if text.startswith("-") else PRIMARY
    return CExpr(text if double else f"{text}f", type, level)


def _shortest_f32(value: float) -> str:
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        # A double that rounds to the value need not: C reads the decimal with one rounding, so compare nearest floats.
        if struct.unpack("f", struct.pack("f", float(text)))[0] == value:
            return repr(float(text))
    return repr(value)


# ---- types ---------------------------------------------------------------------------------------------------------

COMPUTE_TYPES = {"f32": "float", "f64": "double", "i32": "int", "i64": "long long", "bool": "bool"}

# The C type of an element in memory. f16 and bf16 are typedefs of `unsigned short`.
STORAGE_TYPES = {
    **COMPUTE_TYPES, "f16": "f16", "bf16": "bf16", "i8": "signed char", "u8": "unsigned char", "i16": "short",
    "bool": "unsigned char",
}  # fmt: skip


def compute_type(dtype: DType) -> str:
    """The C type in which values of `dtype` are computed with."""
    return COMPUTE_TYPES[dtype.compute.name]


# ---- lines ---------------------------------------------------------------------------------------------------------


@dataclass
class Lines:
    """The lines of a function body, each with the source it comes from."""

    items: list[tuple[str, Span | None]] = field(default_factory=list)
    depth: int = 1
    span: Span | None = None
    _said: list[tuple[str, int]] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Append one line at the current depth."""
        self.items.append(("    " * self.depth + text if text else "", self.span if text else None))

    def extend(self, other: Lines) -> None:
        """Append lines that were collected apart; a first comment that repeats the one above is left out."""
        text, depth = self._said[-1] if self._said else ("", 0)
        again = text and self.items[-1][0] and other.items and other.items[0][0] == "    " * depth + text
        self.items.extend(other.items[1:] if again else other.items)
        self._said.append(other._said[-1] if other._said else ("", 0))

    def gap(self) -> None:
        """An empty line, unless at the start of a block or after another."""
        if self.items and self.items[-1][0] and not self.items[-1][0].endswith("{"):
            self.items.append(("", None))
            self.forget()

    def comment(self, span: Span) -> None:
        """Say which source line follows, once for consecutive statements of one line in one block."""
        self.span = span
        text = f"// {cited(span)}"
        if text == "// " or (self._said and self._said[-1] == (text, self.depth)):
            return
        self._said.append((text, self.depth))
        self.add(text)

    def forget(self) -> None:
        """The next comment is written even if it repeats the last."""
        self._said.append(("", 0))

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """`head {` ... `}` around what is added inside."""
        self.add(f"{head} {{".lstrip())
        self.forget()
        self.depth += 1
        yield
        self.depth -= 1
        self.forget()
        self.add("}")
