"""Python text: lines, and expressions with their binding strength, so that parentheses appear exactly where they are
needed."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.dsl.source import Span

# Binding strengths of Python, weakest first.
LAMBDA, COMPARE, BIT_OR, BIT_XOR, BIT_AND, SHIFT, SUM, PRODUCT, UNARY, ATOM = range(10)

_BINARY = {
    "==": COMPARE, "!=": COMPARE, "<": COMPARE, "<=": COMPARE, ">": COMPARE, ">=": COMPARE,
    "|": BIT_OR, "^": BIT_XOR, "&": BIT_AND, "+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT,
    "//": PRODUCT, "%": PRODUCT,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of the module, and what it comes from in the source."""

    text: str
    span: Span | None = None


@dataclass(frozen=True)
class Text:
    """An expression and the strength of its outermost operator; `literal` says that it is a bare Python number."""

    text: str
    strength: int = ATOM
    literal: bool = False

    def __str__(self) -> str:
        return self.text

    def within(self, strength: int) -> str:
        """The text, parenthesised if it binds more weakly than `strength`."""
        return self.text if self.strength >= strength else f"({self.text})"


def binary(op: str, left: Text, right: Text) -> Text:
    """`left op right`. Grouping is kept: float addition and multiplication are not associative."""
    strength = _BINARY[op]
    # Python chains comparisons, so neither side may be one.
    lhs = left.within(strength + 1 if strength == COMPARE else strength)
    return Text(f"{lhs} {op} {right.within(strength + 1)}", strength)


def unary(op: str, arg: Text) -> Text:
    """`op arg` for the prefix operators `-` and `~`."""
    return Text(f"{op}{arg.within(UNARY + 1 if arg.text.startswith(op) else UNARY)}", UNARY)


def call(function: str, *args: Text | str, **keywords: Text | str) -> Text:
    """`function(args, key=value)`."""
    parts = [str(a) for a in args] + [f"{k}={v}" for k, v in keywords.items()]
    return Text(f"{function}({', '.join(parts)})")


def method(arg: Text, name: str, *args: str) -> Text:
    """`arg.name(args)`."""
    return Text(f"{arg.within(ATOM)}.{name}({', '.join(args)})")


def literal(value: float | int | bool) -> Text:
    """A Python literal of the value; infinities and NaN, which have no literal, as `float("inf")`."""
    if isinstance(value, bool):
        return Text(str(value), ATOM, literal=True)
    if isinstance(value, float):
        if value != value:
            return Text('float("nan")', ATOM, literal=True)
        if value in (float("inf"), float("-inf")):
            return Text(f'float("{value}")', ATOM, literal=True)
    text = repr(value)
    return Text(text, UNARY if text.startswith("-") else ATOM, literal=True)
