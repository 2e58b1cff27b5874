"""Source text and positions: what every node, diagnostic and generated comment points back to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SourceFile:
    """One `.kdsl` text. `path` is what messages show; it need not exist on disk.

    `derived` is "" for what a user wrote; else what the kernel in the text is to the one it is derived from, `training`
    or `backward`, and comments above its statements name the lines that they come from (`kgen.codegen.origins`).
    """

    path: str
    text: str
    derived: str = ""
    lines: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(self.text.split("\n")))

    def line(self, number: int) -> str:
        """The text of line `number` (1-based); empty beyond the end."""
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""


@dataclass(frozen=True)
class Span:
    """A half-open region of a source file; lines and columns are 1-based, `end_column` is exclusive."""

    source: SourceFile = field(repr=False, compare=False)
    line: int
    column: int
    end_line: int
    end_column: int

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`."""
        return Span(self.source, self.line, self.column, other.end_line, other.end_column)

    @property
    def text(self) -> str:
        """The source text covered, first line only when it runs over several."""
        line = self.source.line(self.line)
        end = self.end_column - 1 if self.end_line == self.line else len(line)
        return line[self.column - 1 : end]

    def __str__(self) -> str:
        return f"{self.source.path}:{self.line}:{self.column}"


NOWHERE = Span(SourceFile("<built-in>", ""), 1, 1, 1, 1)
