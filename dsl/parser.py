"""From text to syntax tree: `parse`, `parse_text`.

The file is cut into logical lines (dsl/lexing.py) which are fed one by one to Lark's LALR parser. A line with a mistake
is reported, replaced by a harmless one, and parsing goes on, so that all mistakes of a file come out at once. Names,
types and shapes are not looked at here.
"""

from __future__ import annotations

from lark import Lark, Token, UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from kgen.dsl import ast, tables
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.lexing import Line, logical_lines, normalised, token_span
from kgen.dsl.locks import lock
from kgen.dsl.source import SourceFile
from kgen.dsl.syntax_errors import SyntaxExplainer
from kgen.dsl.tree import TreeBuilder

MAX_BLOCKS = 50
MAX_ERRORS = 100

_ITEM_STARTS = {"KERNEL", "BACKWARD", "FN", "FROM", "OP"}

# There is one tree builder in a process (`tables`); a parse holds the lock because it knows the file it works on.
_lock = lock()


def parse_text(text: str, path: str = "<string>") -> ast.Module:
    """Parse `text`; `path` is what messages show.

    Raises:
        DslError: with every syntax error found.
    """
    diagnostics = Diagnostics()
    module = parse(SourceFile(path, text), diagnostics)
    diagnostics.raise_if_errors()
    return module


def parse(source: SourceFile, diagnostics: Diagnostics) -> ast.Module:
    """Parse `source`, appending mistakes (codes K01xx) to `diagnostics`.

    The module holds the items without mistakes; when there were any, names may be missing from it, so a caller should
    stop before the checker. Positions count in the text with newlines normalised (`dsl.lexing.normalised`).
    """
    source = normalised(source)
    known = _parsed.get(source)
    if known is not None:
        return known
    lark, builder = tables.parser()
    found = Diagnostics()
    lines = logical_lines(tokens(source), source, found)
    with _lock:
        builder.begin(source, found)
        module = _Driver(lark, builder, source, found).run(lines)
    if not found.items:
        if len(_parsed) >= MAX_PARSED:
            _parsed.clear()
        _parsed[source] = module
    for d in found.items:
        diagnostics.add(d)
    return module


# Sources without a mistake that this process has read: a file that several import is read once.
_parsed: dict[SourceFile, ast.Module] = {}
MAX_PARSED = 64


def tokens(source: SourceFile) -> list[Token]:
    """The tokens of a `normalised` source, comments and newlines included, before any check of their spelling."""
    lark, _ = tables.parser()
    thread = lark.parse_interactive(source.text).lexer_thread
    # The basic lexer does not look at the parser's state, so there is none to give.
    return list(thread.lex(None))  # pyright: ignore[reportArgumentType]


class _Driver:
    """Feeds lines to the parser and keeps the indentation."""

    def __init__(self, lark: Lark, builder: TreeBuilder, source: SourceFile, diagnostics: Diagnostics) -> None:
        self.source = source
        self.diagnostics = diagnostics
        self.builder = builder
        self.parser: InteractiveParser = lark.parse_interactive("")
        self.explainer = SyntaxExplainer(source, diagnostics)
        # Columns of the open blocks. A virtual block is one that should not be there: no INDENT was fed for it.
        self.margins: list[int] = [0]
        self.virtual: list[bool] = [False]
        self.previous: Line | None = None
        self.expects_block = False

    def run(self, lines: list[Line]) -> ast.Module:
        if lines and lines[0].indent > 0:
            self.unexpected_indent(lines[0])
            self.margins = [lines[0].indent]
        skip_below: int | None = None
        for number, line in enumerate(lines):
            if len(self.diagnostics.items) >= MAX_ERRORS:
                return ast.Module(self.source.path, "", (), (), ())
            if skip_below is not None:
                if line.indent > skip_below:
                    continue
                skip_below = None
            if self.layout(line):
                following = lines[number + 1] if number + 1 < len(lines) else None
                opens = following is not None and following.indent > line.indent
                skip = self.line(line, opens)
            else:
                skip = True
            if skip:
                skip_below = self.margins[-1]
        if self.expects_block:
            self.missing_block()
        while len(self.margins) > 1:
            self.dedent()
        end = Token("$END", "", 0, 1, 1)
        return self.parser.feed_token(end)

    # ---- indentation

    def layout(self, line: Line) -> bool:
        """Open or close blocks before `line`; False if the line and what is indented under it must be left out."""
        if self.expects_block:
            if line.indent > self.margins[-1]:
                self.indent(line)
                return True
            self.missing_block()
        elif line.indent > self.margins[-1]:
            self.unexpected_indent(line)
            if len(self.margins) == 1:
                return False
            self.margins.append(line.indent)
            self.virtual.append(True)
            return True
        while line.indent < self.margins[-1] and len(self.margins) > 1:
            if line.indent > self.margins[-2] and line.tokens[0].type not in _ITEM_STARTS:
                break  # between two blocks: taken to belong to the inner one
            self.dedent()
        if line.indent != self.margins[-1]:
            self.diagnostics.error(
                "K0107",
                "this line's indentation matches no block around it",
                token_span(self.source, line.tokens[0]),
                help="align it with a line above: blocks are indented by four spaces",
            )
        return True

    def indent(self, line: Line) -> None:
        self.margins.append(line.indent)
        self.virtual.append(False)
        self.expects_block = False
        self.feed("INDENT", line.tokens[0])
        if len(self.margins) == MAX_BLOCKS + 2:
            self.diagnostics.error(
                "K0120",
                f"blocks are nested more than {MAX_BLOCKS} deep",
                token_span(self.source, line.tokens[0]),
                help="combine the conditions with 'and'",
            )

    def dedent(self) -> None:
        self.margins.pop()
        if not self.virtual.pop():
            assert self.previous is not None
            self.feed("DEDENT", self.previous.newline)

    def unexpected_indent(self, line: Line) -> None:
        self.diagnostics.error(
            "K0108",
            "this line is indented more than the one before it, which opens no block",
            token_span(self.source, line.tokens[0]),
            help="align it with the line above"
            if self.previous is not None
            else "begin the first line at column 1, and every fn and kernel too",
        )

    def missing_block(self) -> None:
        assert self.previous is not None
        self.diagnostics.error(
            "K0109",
            "nothing is indented under this line",
            token_span(self.source, self.previous.tokens[-1]),
            label="a block was expected after this ':'",
            help="write forward: under it, and its statements under that"
            if self.previous.tokens[0].type == "OP"
            else "indent the statements of the block by four spaces",
        )
        self.explainer.strayed = True  # they may be those that follow
        self.expects_block = False
        newline = self.previous.newline
        self.feed("INDENT", newline)
        self.feed_statement(newline)
        self.feed("DEDENT", newline)

    # ---- lines

    def line(self, line: Line, opens: bool) -> bool:
        """Feed one line; True if what is indented under it must be left out."""
        at_top = len(self.margins) == 1
        self.explainer.strayed &= not at_top
        self.previous = line
        self.builder.depth.clear()
        if not line.bad:
            saved = self.parser.copy(deepcopy_values=False)
            mistakes = len(self.diagnostics.items)
            if self.explainer.precheck(line, at_top):
                token = line.newline
                try:
                    for token in line.tokens:
                        self.parser.feed_token(token)
                    token = line.newline
                    self.parser.feed_token(token)
                    self.expects_block = line.tokens[-1].type == "COLON"
                    if len(self.diagnostics.items) > mistakes:
                        self.builder.spoil(line)
                    return False
                except UnexpectedToken:
                    self.parser = saved.copy(deepcopy_values=False)
                    self.explainer.explain(saved, line, token)
        return self.replace(line, at_top, opens)

    def replace(self, line: Line, at_top: bool, opens: bool) -> bool:
        """Feed a harmless line instead of a wrong one, one that opens a block if something is indented under it."""
        self.builder.spoil(line)
        start = line.tokens[0]
        if at_top:
            if not (opens and start.type in ("KERNEL", "BACKWARD")):
                return opens
            for kind in ("KERNEL", "NAME", "LPAR", "RPAR", "COLON", "NEWLINE"):
                self.feed(kind, start)
            self.expects_block = True
        elif opens:
            for kind in ("IF", "TRUE", "COLON", "NEWLINE"):
                self.feed(kind, start)
            self.expects_block = True
        else:
            self.feed_statement(start)
        return False

    def feed_statement(self, at: Token) -> None:
        for kind in ("REQUIRE", "TRUE", "NEWLINE"):
            self.feed(kind, at)

    def feed(self, kind: str, at: Token) -> None:
        self.parser.feed_token(Token.new_borrow_pos(kind, "", at))
