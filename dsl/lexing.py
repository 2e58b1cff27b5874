"""From text to logical lines: newlines, indentation, brackets, and the spelling of numbers and names.

Does not know the grammar: which line may follow which is the parser's question.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lark import Token
from lark.lark import PostLex

from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.source import SourceFile, Span

MAX_BRACKETS = 200
MAX_INT = 2**63 - 1

KEYWORDS = {
    "kernel", "fn", "op", "parallel", "tile", "require", "example", "if", "elif", "else", "for", "in", "by", "from",
    "import", "inout", "const", "and", "or", "not", "true", "false", "True", "False",
}  # fmt: skip

# Tokens that can only begin a line: met inside a bracket, they show that the bracket was never closed.
LINE_STARTS = {
    "KERNEL", "BACKWARD", "FN", "OP", "PARALLEL", "TILE", "REQUIRE", "EXAMPLE", "SCHEDULE", "IF", "ELIF", "ELSE", "FOR",
    "FROM",
}  # fmt: skip
# Lines that end in a colon, behind which one statement may stand.
SUITE_HEADS = {"KERNEL", "BACKWARD", "IF", "ELIF", "ELSE", "FOR"}
# Tokens that end an operand: a sign behind one is binary.
OPERAND_ENDS = {
    "NAME", "NUMBER", "RPAR", "RSQB", "QMARK", "TRUE", "FALSE", "CAPITAL_TRUE", "CAPITAL_FALSE"
}  # fmt: skip
_OPERAND_STARTS = {"NAME", "NUMBER", "TRUE", "FALSE", "CAPITAL_TRUE", "CAPITAL_FALSE"}

_CLOSER = {"LPAR": "RPAR", "LSQB": "RSQB"}

_DIGITS = r"[0-9](?:_?[0-9])*"
_INT = re.compile(r"[1-9](?:_?[0-9])*|0(?:_?0)*")
_HEX = re.compile(r"0[xX](?:_?[0-9a-fA-F])+")
_FLOAT = re.compile(rf"(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?|{_DIGITS}[eE][+-]?{_DIGITS}")


class KeepErrorTokens(PostLex):
    """Keeps the terminals that no rule uses; without it Lark drops them from the lexer."""

    always_accept = ("COMMENT", "NEWLINE", "BAD_TEXT", "BAD_OPERATOR", "BAD_CHARACTER")

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        """The stream as it is; layout is a separate step because it reports mistakes."""
        return stream


@dataclass
class Line:
    """A logical line: its tokens without the newline, and how far it is indented (in columns).

    `bad` is set when a mistake in it was already reported, so that the parser does not report its consequences.
    """

    tokens: list[Token]
    indent: int
    newline: Token
    bad: bool = False


def normalise_newlines(text: str) -> str:
    """`text` without a byte-order mark and with every CRLF and lone CR as LF."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def normalised(source: SourceFile) -> SourceFile:
    """`source` with `normalise_newlines` applied; positions count in the result."""
    text = normalise_newlines(source.text)
    return source if text == source.text else SourceFile(source.path, text, source.derived)


def token_span(source: SourceFile, token: Token) -> Span:
    """Where `token` stands. Lark counts lines and columns from 1, with an exclusive end, as `Span` does."""
    line, column = token.line or 1, token.column or 1
    return Span(source, line, column, token.end_line or line, token.end_column or column)


def number_value(text: str) -> int | float | None:
    """The value of a number literal; None if it is misspelt. May be infinite, or beyond 64 bits."""
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _INT.fullmatch(text):
        # Python refuses to convert very long decimal strings; anything this long is out of range anyway.
        return int(text) if len(text) <= 400 else 10**400
    if _FLOAT.fullmatch(text):
        return float(text)
    return None


def indent_width(prefix: str) -> tuple[int, int]:
    """The width of leading white space with tab stops at 8, and with a tab counted as 1.

    Two lines are indented consistently if both measures order them the same way.
    """
    wide = narrow = 0
    for char in prefix:
        if char == "\t":
            wide = (wide // 8 + 1) * 8
            narrow += 1
        elif char == "\f":
            wide = narrow = 0
        else:
            wide += 1
            narrow += 1
    return wide, narrow


def logical_lines(raw: Iterable[Token], source: SourceFile, diagnostics: Diagnostics) -> list[Line]:
    """Group tokens into logical lines, with mistakes of spelling and of brackets reported."""
    return _Layout(list(raw), source, diagnostics).run()


class _Layout:
    def __init__(self, raw: list[Token], source: SourceFile, diagnostics: Diagnostics) -> None:
        self.raw = raw
        self.source = source
        self.diagnostics = diagnostics
        self.lines: list[Line] = []
        self.tokens: list[Token] = []
        self.brackets: list[Token] = []
        self.bad = False
        self.unknown_names: set[str] = set()
        self.margins: list[tuple[int, int]] = []

    def run(self) -> list[Line]:
        self.check_nul()
        at_start = True
        for number, token in enumerate(self.raw):
            kind = token.type
            if kind == "NEWLINE":
                at_start = True
                if self.tokens and not self.brackets:
                    self.close(token)
                continue
            if kind == "COMMENT":
                continue
            if at_start and self.heads(number, "backward"):
                kind = token.type = "BACKWARD"
            elif (at_start or self.behind_suite_colon()) and self.heads(number, "schedule"):
                kind = token.type = "SCHEDULE"
            elif kind == "NAME" and token.value == "when" and self.behind_backend():
                kind = token.type = "WHEN"
            if at_start and self.brackets:
                self.check_unclosed(token)
            at_start = False
            self.check(token)
            self.tokens.append(token)
        if self.tokens:
            last = self.tokens[-1]
            if self.brackets:
                self.report_unclosed()
            self.close(Token("NEWLINE", "\n", last.end_pos, last.end_line, last.end_column))
        return self.lines

    def heads(self, number: int, word: str) -> bool:
        """Whether a token that begins a line is `word` before a name: no other line begins so."""
        token, after = self.raw[number], self.raw[number + 1 : number + 2]
        return token.type == "NAME" and token.value == word and bool(after) and after[0].type == "NAME"

    def behind_suite_colon(self) -> bool:
        """Whether a statement may follow on the line so far, which is the head of a block."""
        heads = bool(self.tokens) and self.tokens[0].type in SUITE_HEADS
        return heads and not self.brackets and self.tokens[-1].type == "COLON"

    def behind_backend(self) -> bool:
        """Whether the line so far ends in `schedule NAME`."""
        return [t.type for t in self.tokens[-2:]] == ["SCHEDULE", "NAME"]

    def error(self, code: str, message: str, token: Token, *, label: str = "", help: str = "") -> None:
        self.bad = True
        self.diagnostics.error(code, message, token_span(self.source, token), label=label, help=help)

    def close(self, newline: Token) -> None:
        first = self.tokens[0]
        prefix = self.source.line(first.line or 1)[: (first.column or 1) - 1]
        wide, narrow = indent_width(prefix)
        wide = self.check_tabs(wide, narrow, first)
        end = Token("NEWLINE", "\n", newline.start_pos, newline.line, newline.column)
        end.end_line, end.end_column = newline.line, (newline.column or 1) + 1
        self.lines.append(Line(self.tokens, wide, end, self.bad))
        self.tokens, self.brackets, self.bad = [], [], False

    def check_tabs(self, wide: int, narrow: int, first: Token) -> int:
        """The line's indentation: `wide`, or that of the line above where the two cannot be compared."""
        while self.margins and self.margins[-1][0] > wide:
            self.margins.pop()
        if self.margins:
            last_wide, last_narrow = self.margins[-1]
            if (wide == last_wide) != (narrow == last_narrow) or (wide > last_wide and narrow <= last_narrow):
                self.error(
                    "K0107",
                    "tabs and spaces are mixed so that the indentation is ambiguous",
                    first,
                    label="how far this line is indented depends on the width of a tab",
                    help="indent every line with four spaces",
                )
                self.bad = False
                opens = bool(self.lines) and self.lines[-1].tokens[-1].type == "COLON"
                if not (opens and wide > last_wide):
                    return last_wide
        if not self.margins or wide > self.margins[-1][0]:
            self.margins.append((wide, narrow))
        return wide

    # ---- brackets

    def check_unclosed(self, token: Token) -> None:
        """End the line where a physical line cannot belong to the bracket that is still open."""
        prefix = self.source.line(token.line or 1)[: (token.column or 1) - 1]
        first = self.tokens[0]
        start = indent_width(self.source.line(first.line or 1)[: (first.column or 1) - 1])[0]
        dedented = indent_width(prefix)[0] <= start
        last = self.tokens[-1].type
        if token.type in LINE_STARTS or (dedented and last in OPERAND_ENDS and token.type in _OPERAND_STARTS):
            self.report_unclosed()
            previous = self.tokens[-1]
            self.close(Token("NEWLINE", "\n", previous.end_pos, previous.end_line, previous.end_column))

    def report_unclosed(self) -> None:
        opener = self.brackets[-1]
        closer = ")" if opener.type == "LPAR" else "]"
        self.error("K0106", f"'{opener}' is never closed", opener, help=f"add the matching '{closer}'")

    def check_bracket(self, token: Token) -> None:
        if token.type in _CLOSER:
            self.brackets.append(token)
            if len(self.brackets) == MAX_BRACKETS + 1:
                self.error(
                    "K0120",
                    f"brackets are nested more than {MAX_BRACKETS} deep",
                    token,
                    help="name parts of the expression with assignments of their own",
                )
        elif not self.brackets:
            if not self.bad:
                self.error("K0106", f"'{token}' closes nothing", token, help="remove it, or add the opening bracket")
            self.bad = True
        elif _CLOSER[self.brackets[-1].type] != token.type:
            opener = self.brackets.pop()
            if not self.bad:
                closer = ")" if opener.type == "LPAR" else "]"
                self.error(
                    "K0106",
                    f"'{token}' does not match the '{opener}' opened at line {opener.line}, column {opener.column}",
                    token,
                    help=f"write '{closer}' here, or check the brackets in between",
                )
            self.bad = True
        else:
            self.brackets.pop()

    # ---- spelling

    def check(self, token: Token) -> None:
        kind = token.type
        if kind == "NAME":
            if not token.isascii():
                self.check_ascii(token)
        elif kind == "NUMBER":
            self.check_number(token)
        elif kind in ("LPAR", "LSQB", "RPAR", "RSQB"):
            self.check_bracket(token)
        elif kind.startswith("BAD_"):
            self.check_bad(token)

    def check_ascii(self, token: Token) -> None:
        if token.value in self.unknown_names:
            return
        self.unknown_names.add(token.value)
        char = next(c for c in token.value if not c.isascii())
        bad = self.bad
        self.error(
            "K0104",
            f"the name '{token}' has a character outside ASCII: '{char}' (U+{ord(char):04X})",
            token,
            help="names are made of a-z, A-Z, 0-9 and _; any character is fine in a comment",
        )
        self.bad = bad

    def check_number(self, token: Token) -> None:
        value = number_value(token.value)
        shown = token.value if len(token.value) <= 40 else token.value[:30] + "..."
        bad = self.bad
        if value is None:
            self.error("K0102", f"'{shown}' is not a number", token, help=_number_help(token.value))
        elif isinstance(value, float):
            digits = re.split("[eE]", token.value)[0]
            if math.isinf(value):
                self.error("K0103", f"the number {shown} is too large", token, help="the largest is about 1.8e308")
            elif value == 0.0 and re.search("[1-9]", digits):
                self.error("K0103", f"the number {shown} is too small", token, help="it rounds to 0.0; write that")
        elif value > MAX_INT and not (value == MAX_INT + 1 and self.after_minus()):
            self.error(
                "K0103",
                f"the integer {shown} does not fit in 64 bits",
                token,
                help="the largest integer is 9223372036854775807; write 1e30 for a float",
            )
        self.bad = bad

    def after_minus(self) -> bool:
        """Whether the number about to be added stands right behind a sign (and not a subtraction)."""
        if not self.tokens or self.tokens[-1].type != "MINUS":
            return False
        return len(self.tokens) < 2 or self.tokens[-2].type not in OPERAND_ENDS

    def check_nul(self) -> None:
        """Report the first NUL wherever it stands: comments and docstrings reach generated code."""
        for number, text in enumerate(self.source.lines, 1):
            if "\0" in text:
                column = text.index("\0") + 1
                self.diagnostics.error(
                    "K0101",
                    "the file holds a NUL character",
                    Span(self.source, number, column, number, column + 1),
                    help="it may not be a text file, or may be UTF-16: save it as UTF-8",
                )
                return

    def check_bad(self, token: Token) -> None:
        if token.value == "\0":
            self.bad = True  # reported by check_nul
        if self.bad:
            return
        if token.type == "BAD_TEXT":
            self.report_text(token)
        elif token.type == "BAD_OPERATOR":
            self.error("K0101", f"'{token}' is not an operator of this language", token, help=_operator_help(token))
        else:
            char = token.value
            name = unicodedata.name(char, "a control character")
            shown = f"'{char}'" if char.isprintable() and not char.isspace() else f"U+{ord(char):04X} ({name})"
            self.error("K0101", f"unexpected character {shown}", token, help=_character_help(char))

    def report_text(self, token: Token) -> None:
        text = token.value
        if text.startswith('"""'):
            end = min(len(text), 3)
            span = token_span(self.source, token)
            span = Span(self.source, span.line, span.column, span.line, span.column + end)
            self.bad = True
            self.diagnostics.error("K0105", "this docstring is never closed", span, help='end it with """')
        else:
            self.error(
                "K0105",
                "quoted text is not part of the language, except for docstrings",
                token,
                help='write docstrings as """text""", and notes as # comments',
            )


def _number_help(text: str) -> str:
    lower = text.lower()
    if lower.startswith("0x"):
        return "a hexadecimal number is 0x followed by digits 0-9, a-f, such as 0x1f"
    if lower.startswith(("0b", "0o")):
        return "write it in decimal, or in hexadecimal as 0x1f"
    if "__" in text or text.endswith("_"):
        return "a single underscore may stand between two digits, as in 1_000"
    if text.isdigit():
        return "remove the leading zeros"
    if lower.endswith(("f", "l", "u")):
        return "numbers take no suffix; their type follows from the expression"
    return "numbers look like 16, 0x1f, 1.5 or 1e-6; a name cannot begin with a digit"


def _operator_help(token: str) -> str:
    words = {
        "&&": "write 'and'",
        "||": "write 'or'",
        "!": "write 'not'",
        "<>": "write '!='",
        ":=": "write '='",
    }
    if token in words:
        return words[token]
    if token == "++":
        return "write + once"
    return "only += exists, to sum over parallel indices; give the new value a name of its own with ="


def _character_help(char: str) -> str:
    plain = {
        "&": "conditions are combined with 'and'; there are no operators on bits",
        "~": "a condition is negated with 'not'",
        "^": "a power is written a ** b",
        ";": "put each statement on a line of its own",
        "\\": "a line goes on without a mark inside ( ) or [ ]",
        "{": "blocks are made by indentation, as in Python",
        "}": "blocks are made by indentation, as in Python",
        "$": "names are made of a-z, A-Z, 0-9 and _",
        "\u2212": "write the ASCII minus sign -",
        "\u2013": "write the ASCII minus sign -",
        "\u00d7": "write *",
        "\u2264": "write <=",
        "\u2265": "write >=",
        "\u2260": "write !=",
        "\u2192": "write ->",
    }
    if char in plain:
        return plain[char]
    if char.isspace() or unicodedata.category(char) in ("Cf", "Zs"):
        return "replace it with a plain space, or remove it"
    if unicodedata.category(char) in ("Pi", "Pf"):
        return 'write docstrings between """ and """ in plain ASCII quotes'
    return "remove it; outside comments and docstrings the language uses ASCII only"
