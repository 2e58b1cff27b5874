"""Diagnostics: one format, from the parser to the compilers below us.

A phase never raises at its first finding; it appends to a `Diagnostics` and goes on where it can.
`Diagnostics.raise_if_errors` then reports all of a file's mistakes at once, sorted by position.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kgen.dsl.errors import KgenError
from kgen.dsl.source import Span


@dataclass(frozen=True)
class Diagnostic:
    """One mistake, or what may be one (a code with W): a code of `docs/errors.md`, a message, the place, and what to do
    about it."""

    code: str
    message: str
    span: Span
    label: str = ""
    help: str = ""
    notes: tuple[str, ...] = ()

    def render(self) -> str:
        """The message as the terminal shows it: header, source line, caret, notes, help."""
        span = self.span
        gutter = " " * len(str(span.line))
        line = span.source.line(span.line)
        # Tabs and unprintable characters are shown one wide so that the caret stays under its column.
        shown = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in line)
        start = span.column - 1
        stop = span.end_column - 1 if span.end_line == span.line else len(shown)
        caret = " " * start + "^" * max(1, stop - start)
        label = f" {self.label}" if self.label else ""
        out = [
            f"{'warning' if self.code.startswith('W') else 'error'}[{self.code}]: {self.message}",
            f"{gutter}--> {span}",
            f"{gutter} |",
            f"{span.line} | {shown}".rstrip(),
            f"{gutter} | {caret}{label}",
        ]
        out += [f"{gutter} = note: {note}" for note in self.notes]
        if self.help:
            out.append(f"{gutter} = help: {self.help}")
        return "\n".join(out)

    def brief(self) -> str:
        """The message, code and place on one line."""
        return f"{self.message} [{self.code}] at {self.span}"


class DslError(KgenError):
    """The mistakes found in one source file (`.diagnostics`), rendered in order of position."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n\n".join(d.render() for d in self.diagnostics))


@dataclass
class Diagnostics:
    """A collector; the same finding reported through several specialisations is kept once."""

    items: list[Diagnostic] = field(default_factory=list)

    def error(
        self, code: str, message: str, span: Span, *, label: str = "", help: str = "", notes: tuple[str, ...] = ()
    ) -> None:
        """Record a mistake, unless the same code was already reported at the same place."""
        self.add(Diagnostic(code, message, span, label, help, notes))

    def add(self, found: Diagnostic) -> None:
        """The same."""
        if not any(d.code == found.code and d.span == found.span for d in self.items):
            self.items.append(found)

    def sorted(self) -> list[Diagnostic]:
        """Findings in order of position."""
        return sorted(self.items, key=lambda d: (d.span.source.path, d.span.line, d.span.column, d.code))

    def raise_if_errors(self) -> None:
        """Raise `DslError` with everything found, if anything was."""
        if self.items:
            raise DslError(self.sorted())


def suggestion(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    """Help for an unknown name: the nearest known one, or what there is."""
    near = difflib.get_close_matches(name, list(known), n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    shown = ", ".join(list(known)[:12]) + (", ..." if len(known) > 12 else "")
    return f"known here: {shown}" if shown else ""
