"""What to write in an op where a line of it does not fit the grammar. What is written in kernels is
`kgen.dsl.syntax_errors`' business."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token

# Words of other languages that stand first in a line.
FOREIGN = {
    "return": "assign the output, as in y = x @ w.T",
    "while": "the only loop is for c in chunks(B):",
    "let": "write name = expression",
    "var": "write name = expression",
    "pass": "leave the block out",
    "assert": "write require condition, above the sections of the op",
    "print": "values of an op are not known when its program is made; store what you want to see to an output",
}
STATEMENTS = "statements are name = expression, y[c] = expression, name += expression, a call, for and if"
DECLARATIONS = "indices are declared in kernels: an op is a program on whole tensors"

_ELEMENTS = "what is computed of single elements stands in a kernel, which is called here"
_ARITHMETIC = {"PLUS", "MINUS", "STAR", "SLASH", "DOUBLE_SLASH", "PERCENT", "DOUBLE_STAR"}
_LOGIC = {"COMPARE", "AND", "OR", "NOT"}
_FORM = "a statement is written name = expression, y[c] = expression or name += expression"


def begins_in_op(starts: set[str]) -> bool:
    """Whether a line that may begin with the tokens `starts` stands inside an op."""
    return "NAME" in starts and "PARALLEL" not in starts


def strays(line: Sequence[Token]) -> bool:
    """Whether a line that stands where the sections of an op do is a statement of one."""
    first, following = line[0], line[1].type if len(line) > 1 else ""
    if first.type == "FOR":
        return True
    if first.type != "NAME" or first.value in ("forward", "backward"):
        return False
    ends = line[-1].type == "COLON"  # as the header of a section does
    return following in ("EQUAL", "PLUS_EQUAL", "_COMMA", "LSQB") or (following in ("LPAR", "COLON") and not ends)


def advice(token: Token, before: Sequence[Token], opened: str) -> str | None:
    """What to do about `token` behind the tokens `before` of its line; `opened` is the innermost bracket, if any. None
    where the advice for kernels serves."""
    kind, first = token.type, before[0].type if before else token.type
    if first == "FOR":
        return "a loop is written for c in chunks(B):"
    if first == "ELSE" and kind == "IF":
        return "write elif condition:"
    if first in ("IF", "ELIF", "REQUIRE", "EXAMPLE"):
        return None
    if kind == "EQUAL" and opened == "LPAR":
        return "an argument is a tensor, a scalar or name=value, and no assignment"
    if kind == "EQUAL" and any(t.type == "EQUAL" for t in before):
        return "a line assigns once"
    if kind == "COLON" and opened == "LSQB":
        return "there are no slices but chunks: x[c] in for c in chunks(B):"
    if kind in ("IF", "ELSE") and before:
        return "a choice by what is known beforehand is a statement, if flag:; one by element stands in a kernel"
    if kind == "AT" and any(t.type == "AT" for t in before):
        return "a statement has one product: give the other a name above, or, of a sum, write += for each"
    if kind in _ARITHMETIC and any(t.type == "AT" for t in before):
        return f"a product may have one matrix or row added, a @ b + c; {_ELEMENTS}"
    if kind == "MINUS" or (before and before[-1].type == "MINUS"):
        return f"a minus stands before numbers alone; {_ELEMENTS}"
    if kind in _ARITHMETIC or kind in _LOGIC:
        return f"the only operators are a @ b, a @ b + c and +=; {_ELEMENTS}"
    if kind == "_COMMA" and not opened:
        return "only a call of a kernel gives several values, as in a, b = k(x)"
    if kind in ("LPAR", "LSQB"):
        return "tensors have no methods: .T is the transpose, and kernels are called by their name, as in k(a)"
    if kind in ("NAME", "NUMBER") and opened and before[-1].type not in ("LPAR", "LSQB", "_COMMA"):
        return "put a comma between the two"
    return None if kind == "NEWLINE" else _FORM
