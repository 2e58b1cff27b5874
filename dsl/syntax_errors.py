"""What an unexpected token means, in the user's words: what was found, what was expected, and what to do."""

from __future__ import annotations

import difflib

from lark import Token
from lark.parsers.lalr_interactive_parser import InteractiveParser

from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.host.advice import DECLARATIONS, FOREIGN, STATEMENTS, advice, begins_in_op, strays
from kgen.dsl.lexing import KEYWORDS, Line, token_span
from kgen.dsl.source import SourceFile

_ITEM_STARTS = {"KERNEL", "BACKWARD", "FN", "OP", "FROM", "STRING"}
_HEADS = ("KERNEL", "BACKWARD", "OP")
_STATEMENT_STARTS = {"PARALLEL", "TILE", "REQUIRE", "EXAMPLE", "SCHEDULE", "IF", "ELIF", "ELSE", "FOR"}
_OPERATORS = {
    "PLUS", "MINUS", "STAR", "SLASH", "DOUBLE_SLASH", "PERCENT", "DOUBLE_STAR", "COMPARE", "AND", "OR"
}  # fmt: skip

# How each kind of line is written.
_FORMS = {
    "KERNEL": "kernel name(x: T[*M, N], eps: f32 = 1e-6) -> (y: T[*M, N]):",
    "BACKWARD": "backward name(x: T[*M, N], d_y: T[*M, N]) -> (d_x: T[*M, N]):",
    "OP": "op name(x: T[*B, N], w: T[M, N]) -> (y: T[*B, M]):",
    "FN": "fn name(a, b) = a * b",
    "FROM": "from module import name, name",
    "PARALLEL": "parallel m in M, n in N",
    "TILE": "tile n in N",
    "REQUIRE": "require N % 2 == 0",
    "EXAMPLE": "example M = 16384, N = 4096",
    "SCHEDULE": "schedule cuda when N <= 4096: threads = 256, rows = 1",
    "IF": "if condition:",
    "ELIF": "elif condition:",
    "ELSE": "else:",
    "FOR": "for k in K by BK:",
}

_WORDS = {
    "IN": "'in'",
    "BY": "'by'",
    "IMPORT": "'import'",
    "EQUAL": "'='",
    "COLON": "':'",
    "LPAR": "'('",
    "LSQB": "'['",
    "_COMMA": "','",
    "RPAR": "')'",
    "RSQB": "']'",
    "_ARROW": "'->'",
    "NEWLINE": "the end of the line",
}

# Words of other languages that stand first in a line, and what to write here.
_FOREIGN = {
    "return": "store the result to an output, as in y[m, n] = ...",
    "def": "write fn name(a, b) = ... for a function, or kernel name(...) -> (...): for a kernel",
    "while": "the only loop is for k in K by BK:",
    "let": "write name = expression",
    "var": "write name = expression",
    "const": "write name = expression; const marks parameters",
    "pass": "leave the block out",
    "assert": "write require condition",
    "import": "write from module import name",
    "class": "a file holds fn and kernel items only",
}


class SyntaxExplainer:
    """Reports the lines that the grammar refuses."""

    def __init__(self, source: SourceFile, diagnostics: Diagnostics) -> None:
        self.source = source
        self.diagnostics = diagnostics
        self.strayed = False  # whether a statement outside of the sections of this op was reported

    def error(self, code: str, message: str, token: Token, help: str) -> None:
        span = token_span(self.source, token)
        self.diagnostics.error(code, message, span, help=help)

    def precheck(self, line: Line, at_top: bool) -> bool:
        """Whether the line may begin as it does where it stands; if not, that is reported."""
        first = line.tokens[0]
        if at_top and first.type not in _ITEM_STARTS:
            self.explain_top_level(line)
            return False
        if not at_top and first.type in ("KERNEL", "BACKWARD", "FN", "FROM", "OP"):
            kind = "import" if first.type == "FROM" else first.value
            article = "an" if kind[0] in "io" else "a"
            self.error(
                "K0125",
                f"{article} {kind} cannot stand inside another item",
                first,
                "begin it at column 1, after the end of that item",
            )
            return False
        return True

    def explain_top_level(self, line: Line) -> None:
        """Report a line at column 1 that begins no item."""
        first = line.tokens[0]
        following = line.tokens[1].type if len(line.tokens) > 1 else ""
        guess = _guess(first.value, ("kernel", "backward", "op", "fn", "from"))
        if first.value in _FOREIGN:
            help = _FOREIGN[first.value]
        elif first.value == "backward":
            help = f"this line is written {_FORMS['BACKWARD']}"
        elif first.type == "NAME" and following == "NAME" and guess:
            help = f"did you mean '{guess}'?"
        elif first.type in _STATEMENT_STARTS or any(t.type in ("EQUAL", "PLUS_EQUAL") for t in line.tokens):
            help = "indent statements by four spaces under the kernel they belong to"
        else:
            help = "a file holds a docstring, then items that begin with from, fn, kernel, backward or op"
        self.error("K0118", f"{_found(first)} cannot begin a line outside a kernel", first, help)

    def explain(self, saved: InteractiveParser, line: Line, token: Token) -> None:
        """Report that `token` of `line` does not fit; `saved` is the parser before the line."""
        parser = saved.copy(deepcopy_values=False)
        starts = parser.accepts()
        in_op = begins_in_op(starts)
        before: list[Token] = []
        for earlier in line.tokens:
            if earlier is token:
                break
            parser.feed_token(earlier)
            before.append(earlier)
        accepts = parser.accepts()
        first = line.tokens[0]
        at_sections = begins_in_op(starts) and "EXAMPLE" in starts
        if at_sections and strays(line.tokens):
            self.stray(line)
            return
        if not before and token.type in ("ELIF", "ELSE"):
            self.error(
                "K0122",
                f"'{token}' belongs to no 'if'",
                token,
                "align it with its if, directly after the block of that if",
            )
        elif first.value == "schedule" and [t.type for t in before] == ["NAME"] and token.type == "COLON":
            self.error("K0110", "expected a backend, found ':'", token, f"it is written {_FORMS['SCHEDULE']}")
        elif in_op and token.type == "NEWLINE" and len(before) == 1 and first.value in FOREIGN:
            self.unknown_statement(first, in_op)
        elif token.type == "NEWLINE" and "COLON" in accepts and first.type != "SCHEDULE":
            self.missing_colon(line)
        elif token.type == "AT" and "STAR" in accepts:
            self.error(
                "K0101",
                "'@' is not an operator of kernels",
                token,
                "it is the library's matrix product in an op; in a kernel sum(a[m, k] * b[k, n], k) is one",
            )
        elif len(before) == 1 and first.type == "NAME" and token.type in ("NAME", "NUMBER"):
            self.unknown_statement(first, in_op)
        elif at_sections and before and before[-1].type == "COLON":
            self.error(
                "K0110",
                f"expected the end of the line, found {_found(token)}",
                token,
                "put the statements of a section on lines of their own, indented under it",
            )
        elif in_op and not before and token.type in ("PARALLEL", "TILE"):
            self.error("K0110", f"{_found(token)} begins no statement of an op", token, DECLARATIONS)
        elif token.value in KEYWORDS and "NAME" in accepts and "NUMBER" not in accepts:
            self.error(
                "K0111",
                f"'{token}' is a keyword and cannot be used as a name",
                token,
                f"choose another name, such as {token.value.lower()}_",
            )
        else:
            expected = _expected(accepts, before)
            help = advice(token, before, _innermost_bracket(before)) if in_op else None
            self.error(
                "K0110",
                f"expected {expected}, found {_found(token)}",
                token,
                help or _help(token, before, accepts),
            )

    def unknown_statement(self, first: Token, in_op: bool) -> None:
        """Report a line of the form `word name ...`, where `word` is no keyword."""
        known = (
            ("require", "example", "elif", "else")
            if in_op
            else ("parallel", "tile", "require", "example", "schedule", "elif", "else")
        )
        guess, foreign = _guess(first.value, known), FOREIGN if in_op else _FOREIGN
        if first.value in foreign:
            help = foreign[first.value]
        elif guess:
            help = f"did you mean '{guess}'?"
        elif in_op:
            help = STATEMENTS
        else:
            help = "statements are parallel, tile, require, if, for, name = expression and y[m] = expression"
        self.error("K0126", f"'{first}' begins no statement", first, help)

    def stray(self, line: Line) -> None:
        """Report a statement that stands in no section of an op, once for all of them."""
        if not self.strayed:
            span = token_span(self.source, line.tokens[0]).to(token_span(self.source, line.tokens[-1]))
            help = "begin a section above it, forward: or backward(d_y):, and indent the statements under that"
            self.diagnostics.error("K0609", "a statement outside the sections of an op", span, help=help)
        self.strayed = True

    def missing_colon(self, line: Line) -> None:
        """Report a block header without its colon, behind its last token."""
        self.error(
            "K0123",
            f"this {line.tokens[0]} line must end with ':'",
            line.tokens[-1],
            f"it is written {_form(line)}",
        )


def _form(line: Line) -> str:
    """How a line that opens a block is written."""
    first, words = line.tokens[0], {t.value for t in line.tokens}
    if first.type == "NAME":
        return "forward: or backward(d_y):"
    return "for c in chunks(B):" if first.type == "FOR" and "chunks" in words else _FORMS[first.type]


def _guess(word: str, among: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, among, n=1, cutoff=0.6)
    return close[0] if close else ""


def _found(token: Token) -> str:
    if token.type == "NEWLINE":
        return "the end of the line"
    if token.type == "STRING":
        return "a docstring"
    if token.type == "NUMBER":
        shown = token.value if len(token.value) <= 40 else token.value[:30] + "..."
        return f"the number {shown}"
    if token.value in KEYWORDS and token.type not in ("TRUE", "FALSE", "CAPITAL_TRUE", "CAPITAL_FALSE"):
        return f"the keyword '{token}'"
    return f"'{token}'"


def _expected(accepts: set[str], before: list[Token]) -> str:
    words: list[str] = []
    if "PLUS" in accepts:
        words.append("an operator")
        order = ["_COMMA", "RPAR", "RSQB", "BY", "COLON", "NEWLINE"]
        if before and before[0].type == "NAME" and all(t.type != "EQUAL" for t in before):
            order.insert(0, "EQUAL")
    elif "NUMBER" in accepts:
        words.append("an expression")
        order = ["RPAR", "RSQB"]
    else:
        if "NAME" in accepts:
            words.append(_kind_of_name(before))
        order = [w for w in _WORDS if w in accepts]
    words += [_WORDS[kind] for kind in order if kind in accepts]
    if not words:
        return "something else"
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _kind_of_name(before: list[Token]) -> str:
    if not before:
        return "a name"
    first, last = before[0].type, before[-1].type
    if first in _HEADS:
        if last == first:
            return "the name of the op" if first == "OP" else "the name of the kernel"
        if last == "COLON" or before[-1].value in ("inout", "const", "|"):
            return "a type"
        return "the name of a parameter"
    if first == "FN":
        return "the name of the function" if last == "FN" else "the name of a parameter"
    if first == "FROM":
        return "a function's name" if any(t.type == "IMPORT" for t in before) else "a module's name"
    return "an index name" if first in ("PARALLEL", "TILE", "FOR") else "a name"


def _help(token: Token, before: list[Token], accepts: set[str]) -> str:
    kind, first = token.type, before[0].type if before else token.type
    operand_before = "PLUS" in accepts
    opened = _innermost_bracket(before)
    if kind == "EQUAL" and opened == "LPAR" and first not in _HEADS:
        return "arguments are given by position, without names; equality is written =="
    if kind == "EQUAL" and first in ("IF", "ELIF", "REQUIRE"):
        return "equality is written =="
    if kind == "EQUAL" and any(t.type == "EQUAL" for t in before):
        return "a line assigns once; equality is written =="
    if kind in ("IF", "ELSE") and operand_before:
        return "write where(condition, a, b) for a choice by element"
    if kind == "FOR" and before:
        return "there are no comprehensions; reduce over an index instead, as in sum(x[m, n], n)"
    if kind == "COLON" and opened == "LSQB" and first not in _HEADS:
        return "there are no slices: a subscript names one index for each dimension, as in x[m, n + 1]"
    if kind == "_DOT":
        return "names have no attributes and functions are called by their plain name, as in exp(a)"
    if kind == "_BAR":
        return "conditions are combined with 'or'"
    if kind == "PLUS" and not operand_before:
        return "there is no unary plus; remove it"
    if kind in ("LPAR", "LSQB") and operand_before:
        return "only a name can be called or subscripted; for a product write *"
    if kind == "NEWLINE" and "NUMBER" in accepts:
        return "finish the expression; it may go on over several lines inside ( )"
    if kind in ("NAME", "NUMBER") and operand_before:
        if opened:
            return "put a comma or an operator between the two"
        return "put an operator between the two, or begin a new line"
    if first in _FORMS:
        return f"this line is written {_FORMS[first]}"
    return "a statement is written name = expression, or y[m, n] = expression"


def _innermost_bracket(before: list[Token]) -> str:
    stack: list[str] = []
    for token in before:
        if token.type in ("LPAR", "LSQB"):
            stack.append(token.type)
        elif token.type in ("RPAR", "RSQB") and stack:
            stack.pop()
    return stack[-1] if stack else ""
