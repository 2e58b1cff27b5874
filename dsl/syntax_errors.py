"""What an unexpected token means, in the user's words: found what, expected what, and what to do."""

from __future__ import annotations

from lark import Token
from lark.parsers.lalr_interactive_parser import InteractiveParser

from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.lexing import Line, token_span
from kgen.dsl.source import SourceFile


class SyntaxExplainer:
    """Reports lines that the grammar refuses."""

    def __init__(self, source: SourceFile, diagnostics: Diagnostics) -> None:
        self.source = source
        self.diagnostics = diagnostics

    def precheck(self, line: Line, at_top: bool) -> bool:
        """Whether the line is worth parsing; if not, why not is reported."""
        return True

    def explain(self, saved: InteractiveParser, line: Line, token: Token) -> None:
        """Report that `token` of `line` does not fit; `saved` is the parser before the line."""
        self.diagnostics.error("K0110", f"unexpected '{token.value.strip()}'", token_span(self.source, token))
