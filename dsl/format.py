"""The canonical layout of `.kdsl` text: `format_source`, and the syntax tree as text in the same layout.

Four spaces a block, one space around operators, one blank line between items, lines of up to 100 columns. Comments,
docstrings, the spelling of numbers and the user's brackets are kept. Formatting formatted text changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lark import Token

from kgen.dsl import ast
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.lexing import OPERAND_ENDS, SUITE_HEADS, Line, logical_lines, normalised
from kgen.dsl.parser import parse, tokens
from kgen.dsl.printing import docstring_lines, expr_text, function_text, kernel_text, module_text
from kgen.dsl.source import SourceFile
from kgen.dsl.tree import docstring_text

WIDTH = 100

_OPENERS = {"LPAR", "LSQB"}
_CLOSERS = {"RPAR", "RSQB"}
_TIGHT_BEFORE = {"RPAR", "RSQB", "_COMMA", "COLON", "QMARK", "_DOT", "KEYWORD_EQUAL"}
_TIGHT_AFTER = {"LPAR", "LSQB", "_DOT", "KEYWORD_EQUAL"}
_SIGNATURES = ("KERNEL", "BACKWARD", "OP")
# Operators by how loosely they bind; a long expression is broken at the loosest it has.
_LEVELS = ({"OR"}, {"AND"}, {"COMPARE"}, {"PLUS", "MINUS"}, {"STAR", "SLASH", "DOUBLE_SLASH", "PERCENT", "AT"})


def format_source(text: str, path: str = "<string>") -> str:
    """`text` in canonical layout, with LF line ends.

    Raises:
        DslError: if the text does not parse; it is then left alone.
    """
    source = normalised(SourceFile(path, text))
    diagnostics = Diagnostics()
    parse(source, diagnostics)
    diagnostics.raise_if_errors()
    return _lay_out(source)


def format_expr(expr: ast.Expr) -> str:
    """An expression on one line, with only the brackets it needs."""
    return expr_text(expr)


def format_function(function: ast.Function) -> str:
    """A function in canonical layout, ending in a newline."""
    return _lay_out(SourceFile("<function>", function_text(function) + "\n"))


def format_kernel(kernel: ast.Kernel) -> str:
    """A kernel in canonical layout, ending in a newline."""
    return _lay_out(SourceFile("<kernel>", kernel_text(kernel) + "\n"))


def format_module(module: ast.Module) -> str:
    """A module in canonical layout; comments are not part of the tree and are gone."""
    return _lay_out(SourceFile(module.path, module_text(module)))


def _lay_out(source: SourceFile) -> str:
    raw = tokens(source)
    lines = logical_lines(raw, source, Diagnostics())
    return _Writer([t for t in raw if t.type == "COMMENT"]).run(lines)


@dataclass
class _Block:
    column: int
    level: int


class _Writer:
    """Goes through lines and comments in order, and writes each at its place."""

    def __init__(self, comments: list[Token]) -> None:
        self.comments = comments
        self.next_comment = 0
        self.out: list[str] = []
        self.blocks = [_Block(0, 0)]
        self.last_line = 0  # the line of the source that the last thing written ended on
        self.last_kind = ""  # what began it: a token type, COMMENT, or "" at the start of the file
        self.opened = False  # whether it opened a block

    def run(self, lines: list[Line]) -> str:
        for line in lines:
            first = line.tokens[0]
            remaining = [b for b in self.blocks if b.column < line.indent]
            level = remaining[-1].level + 1 if remaining else 0
            self.leading_comments(first, level)
            self.blocks = [*remaining, _Block(line.indent, level)]
            self.line(line, level)
        self.leading_comments(None, 0)
        return "\n".join(self.out) + ("\n" if self.out else "")

    # ---- comments

    def take(self, until: Callable[[Token], bool]) -> list[Token]:
        start = self.next_comment
        while self.next_comment < len(self.comments) and until(self.comments[self.next_comment]):
            self.next_comment += 1
        return self.comments[start : self.next_comment]

    def leading_comments(self, first: Token | None, level: int) -> None:
        """Comments on lines of their own, before the line that `first` begins."""
        for comment in self.take(lambda c: first is None or _start(c) < _start(first)):
            column = (comment.column or 1) - 1
            own = max((b.level for b in self.blocks if b.column <= column), default=0)
            place = max(level, own) if first is None or not self.opened else level
            self.space(comment, "COMMENT", place, before=first)
            self.out.append("    " * place + _comment(comment))
            self.last_line, self.last_kind, self.opened = comment.line or 0, "COMMENT", False

    # ---- blank lines

    def space(self, token: Token, kind: str, level: int, before: Token | None = None) -> None:
        """One blank line where the source has some, between items, and nowhere under the head of a block."""
        if not self.out or self.opened:
            return
        blank = (token.line or 0) > self.last_line + 1
        if level == 0 and kind != "COMMENT" and self.last_kind != "COMMENT":
            alike = kind == self.last_kind and kind in ("FROM", "FN")
            blank = blank or not alike
        elif level == 0 and kind == "COMMENT" and self.last_kind not in ("COMMENT", "FROM", "FN"):
            blank = blank or before is not None
        if blank:
            self.out.append("")

    # ---- lines

    def line(self, line: Line, level: int) -> None:
        first, last = line.tokens[0], line.tokens[-1]
        self.space(first, first.type, level)
        inner = self.take(lambda c: _start(c) < _start(last))
        trailing = self.take(lambda c: c.line == last.end_line)
        note = f"  {_comment(trailing[0])}" if trailing else ""
        indent = "    " * level
        for deeper, part in enumerate(_split_suite(_keywords_marked(line.tokens))):
            notes = [c for c in inner if _start(part[0]) < _start(c) < _start(part[-1])]
            if notes:
                self.out += _kept(part, notes, level + deeper)
            else:
                self.out += _wrapped(part, indent + "    " * deeper)
        self.out[-1] += note
        self.last_line, self.last_kind = last.end_line or 0, first.type
        self.opened = last.type == "COLON"


def _start(token: Token) -> tuple[int, int]:
    return token.line or 0, token.column or 0


def _comment(token: Token) -> str:
    text = token.value.rstrip()
    return f"# {text[1:]}" if text[1:2].isalnum() else text


def _split_suite(line: list[Token]) -> list[list[Token]]:
    """A line in two where a statement stands behind the colon of its `if`, `else`, `for`, `kernel` or `backward`."""
    if line[0].type in SUITE_HEADS:
        colon = _at_depth_0(line, {"COLON"})[0]
        if colon + 1 < len(line):
            return [line[: colon + 1], line[colon + 1 :]]
    return [line]


def _keywords_marked(line: list[Token]) -> list[Token]:
    """The `=` of keyword arguments, which stand without spaces, as tokens of their own kind."""
    if line[0].type in _SIGNATURES:
        return line
    outside = {id(line[i]) for i in _at_depth_0(line, {"EQUAL"})}
    return [
        Token.new_borrow_pos("KEYWORD_EQUAL", t.value, t) if t.type == "EQUAL" and id(t) not in outside else t
        for t in line
    ]


# ---- one line


def _spaced(previous: Token, token: Token, unary: bool) -> bool:
    """Whether a space stands between two tokens; `unary`: the first is a sign or the star of `*M`."""
    if unary or previous.type in _TIGHT_AFTER or token.type in _TIGHT_BEFORE:
        return False
    return not (token.type in _OPENERS and previous.type in ("NAME", "RSQB"))


def _without_last_commas(line: list[Token]) -> list[Token]:
    """Tokens without the commas that stand right before a closing bracket."""
    followers = [*line[1:], None][: len(line)]  # none of an empty row
    return [
        token
        for token, following in zip(line, followers, strict=True)
        if token.type != "_COMMA" or following is None or following.type not in _CLOSERS
    ]


def _joined(line: list[Token]) -> str:
    """Tokens on one line, without a comma before a closing bracket."""
    out: list[str] = []
    previous: Token | None = None
    unary = False
    for token in _without_last_commas(line):
        if previous is not None and _spaced(previous, token, unary):
            out.append(" ")
        unary = token.type in ("MINUS", "STAR") and (previous is None or previous.type not in OPERAND_ENDS)
        out.append(token.value.lower() if token.type.startswith("CAPITAL_") else token.value)
        previous = token
    return "".join(out)


def _kept(line: list[Token], comments: list[Token], level: int) -> list[str]:
    """A line with comments inside its brackets: the user's line breaks stay, indented by depth of brackets."""
    rows: list[list[Token]] = []
    for token in sorted([*line, *comments], key=_start):
        if rows and rows[-1][-1].end_line == token.line:
            rows[-1].append(token)
        else:
            rows.append([token])
    out = []
    depth = 0
    before: Token | None = None
    for row in rows:
        code = _without_last_commas([t for t in row if t.type != "COMMENT"])
        closing = 0
        while closing < len(code) and code[closing].type in _CLOSERS:
            closing += 1
        indent = "    " * (level + depth - closing)
        text = _joined_after(before, code)
        notes = [_comment(t) for t in row if t.type == "COMMENT"]
        out.append(indent + "  ".join([text, *notes] if text else notes))
        depth += sum(t.type in _OPENERS for t in code) - sum(t.type in _CLOSERS for t in code)
        before = code[-1] if code else before
    return out


def _joined_after(before: Token | None, line: list[Token]) -> str:
    """Like `_joined` for a row that goes on an expression: its commas stay, and a leading `-` may be binary."""
    if not line:
        return ""
    text = _joined([*([before] if before is not None else []), *line])
    if before is not None:
        text = text.removeprefix(_joined([before])).lstrip()
    return text


# ---- long lines


def _wrapped(line: list[Token], indent: str) -> list[str]:
    """A logical line as one line, or as several if it is longer than `WIDTH`."""
    if line[0].type == "STRING":
        return docstring_lines(docstring_text(line[0].value), indent)
    text = indent + _joined(line)
    if len(text) <= WIDTH:
        return [text]
    if line[0].type in _SIGNATURES:
        return _wrapped_signature(line, indent)
    tail = [line[-1]] if line[-1].type == "COLON" else []
    body = line[: len(line) - len(tail)]
    start = _value_start(body)
    if start is None:
        return [text]
    return _exploded(body[:start], body[start:], tail, indent)


def _value_start(line: list[Token]) -> int | None:
    """Where the part of a line begins that can be broken over several; None if there is none."""
    kind = line[0].type
    if kind in ("REQUIRE", "IF", "ELIF"):
        return 1
    if kind == "FROM":
        return next(i for i, t in enumerate(line) if t.type == "IMPORT") + 1
    if kind in ("PARALLEL", "TILE", "FOR", "EXAMPLE", "SCHEDULE"):
        return None
    assigns = next((i for i, t in enumerate(line) if t.type in ("EQUAL", "PLUS_EQUAL")), None)
    if assigns is None:  # a call, a declaration or the head of a section
        return 0 if line[-1].type == "RPAR" else None
    start = assigns + 1
    # Of several values only the last is broken: brackets around all of them would make no value.
    return start + max((i + 1 for i in _at_depth_0(line[start:], {"_COMMA"})), default=0)


def _wrapped_signature(line: list[Token], indent: str) -> list[str]:
    """One parameter a line, and one output a line if the outputs do not fit behind the closing bracket."""
    opener = next(i for i in _at_depth_0(line, {"LPAR"}))
    closer = _matching(line, opener)
    rest = line[closer:]
    head = indent + _joined(line[: opener + 1])
    params = _elements(line[opener + 1 : closer], indent + "    ")
    tail = indent + _joined(rest)
    if len(tail) <= WIDTH or len(rest) < 4:
        return [head, *params, tail] if params else [head + tail.strip()]
    opener = next(i for i, t in enumerate(rest) if t.type == "LPAR")
    closer = _matching(rest, opener)
    outputs = _elements(rest[opener + 1 : closer], indent + "    ")
    between = _joined(rest[: opener + 1])
    first = [head, *params, indent + between] if params else [head + between]
    return [*first, *outputs, indent + _joined(rest[closer:])]


def _exploded(head: list[Token], value: list[Token], tail: list[Token], indent: str) -> list[str]:
    """`head value tail` with `value` broken inside its own brackets, or inside a pair put around it."""
    opener = 1 if len(value) > 1 and value[0].type == "NAME" else 0
    if not (value[opener].type in _OPENERS and _matching(value, opener) == len(value) - 1):
        value = [Token("LPAR", "("), *value, Token("RPAR", ")")]
        opener = 0
    inside = value[opener + 1 : -1]
    if not inside:
        return [indent + _joined([*head, *value, *tail])]
    first = indent + _joined([*head, *value[: opener + 1]])
    last = indent + _joined([value[-1], *tail])
    return [first, *_inside(inside, indent + "    "), last]


def _inside(inside: list[Token], indent: str) -> list[str]:
    """What stands between two brackets: on one line if it fits, else one element or operand a line."""
    text = indent + _joined([*inside, Token("RPAR", ")")])[:-1]
    if len(text) <= WIDTH:
        return [text]
    if _at_depth_0(inside, {"_COMMA"}):
        return _elements(inside, indent)
    return _operands(inside, indent)


def _elements(inside: list[Token], indent: str) -> list[str]:
    """Elements between commas, each on lines of its own and with a comma behind it."""
    out: list[str] = []
    start = 0
    for end in [*_at_depth_0(inside, {"_COMMA"}), len(inside)]:
        element = inside[start:end]
        start = end + 1
        if element:
            out += _operands(element, indent)
            out[-1] += ","
    return out


def _operands(expr: list[Token], indent: str) -> list[str]:
    """An expression inside brackets, broken before each of its loosest operators where it does not fit."""
    text = indent + _joined(expr)
    if len(text) <= WIDTH - 1:
        return [text]
    for level in _LEVELS:
        cuts = [i for i in _at_depth_0(expr, level) if i > 0 and expr[i - 1].type in OPERAND_ENDS]
        if cuts:
            break
    else:
        return _group(expr, indent)
    out: list[str] = []
    for start, end in zip([0, *cuts], [*cuts, len(expr)], strict=True):
        out += _group(expr[start:end], indent)
    return out


def _group(piece: list[Token], indent: str) -> list[str]:
    """One operand with the operator before it; broken inside its own brackets if it is too long."""
    text = indent + _joined_piece(piece)
    if len(text) < WIDTH or piece[-1].type not in _CLOSERS:
        return [text]
    closer = len(piece) - 1
    opener = max(i for i in _at_depth_0(piece, _OPENERS) if _matching(piece, i) == closer)
    inside = piece[opener + 1 : closer]
    if not inside:
        return [text]
    first = indent + _joined_piece(piece[: opener + 1])
    return [first, *_inside(inside, indent + "    "), indent + piece[closer].value]


def _joined_piece(piece: list[Token]) -> str:
    """A piece that may begin with a binary operator, which keeps its space."""
    if len(piece) > 1 and piece[0].type in ("MINUS", "STAR"):
        return f"{piece[0]} {_joined(piece[1:])}"
    return _joined(piece)


def _at_depth_0(line: list[Token], kinds: set[str]) -> list[int]:
    """Positions of tokens of `kinds` outside all brackets (an opening bracket itself counts as outside)."""
    found = []
    depth = 0
    for position, token in enumerate(line):
        depth -= token.type in _CLOSERS
        if depth == 0 and token.type in kinds:
            found.append(position)
        depth += token.type in _OPENERS
    return found


def _matching(line: list[Token], opener: int) -> int:
    """The position of the bracket that closes the one at `opener`."""
    depth = 0
    for position in range(opener, len(line)):
        depth += (line[position].type in _OPENERS) - (line[position].type in _CLOSERS)
        if depth == 0:
            return position
    raise ValueError("unbalanced brackets")
