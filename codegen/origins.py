"""Which statement of a user's file does generated code come from, and how does a comment say so?

A comment names the file and the line of a statement, and shows the statement on one line. The text of a derived kernel
is no file that a user has: above its statements stand comments that name the lines they are derived from
(`derived_comment`), and what is generated from it cites those.
"""

from __future__ import annotations

import re
from functools import lru_cache

from kgen.dsl.source import SourceFile, Span

# A statement that is longer is cut.
LONGEST = 120
_DERIVED_FROM = re.compile(r"\s*# (?P<place>\S[^:]*:\d+)(?P<text>: .*)?")


def cited(span: Span) -> str:
    """`file.kdsl:7: y[m, n] = x[m, n] * r`; "" for what is in no file. Has no character that ends a comment."""
    place, text = _statement(span)
    if not text:
        return ""
    return f"{place}: {text}"


def place(span: Span) -> str:
    """`file.kdsl:7`, the line of the user's that the statement at `span` comes from."""
    return _statement(span)[0].partition(",")[0]


def position(span: Span) -> str:
    """Where `span` is, for messages: with its path and column, but for what is derived."""
    return place(span) if span.source.derived else str(span)


def file_name(span: Span) -> str:
    """The file of the user's that `span` is in, or that it is derived from."""
    if span.source.derived:
        found = next((m for line in span.source.lines if (m := _DERIVED_FROM.fullmatch(line))), None)
        if found is not None:
            return found["place"].rpartition(":")[0]
    return _file_name(span.source.path)


def derived_comment(span: Span, statement: str) -> str:
    """The comment above `statement` of a derived kernel, which comes from what stands at `span`; "" for nowhere."""
    where, text = place(span), _statement(span)[1]
    if not text:
        return ""
    return f"# {where}" if text == statement else f"# {where}: {text}"


def without_places(text: str) -> str:
    """The text of a derived kernel, to be edited: its comments show statements, and name no lines."""
    lines = []
    for line in text.split("\n"):
        found = _DERIVED_FROM.fullmatch(line)
        if found is None:
            lines.append(line)
        elif found["text"]:
            lines.append(line.replace(f"# {found['place']}: ", "# ", 1))
    return "\n".join(lines)


def _statement(span: Span) -> tuple[str, str]:
    """Where the statement at `span` is, and its text."""
    source = span.source
    if not 1 <= span.line <= len(source.lines):
        return _file_name(source.path), ""
    first, text = _logical(source)[span.line - 1]
    own = f"{_file_name(source.path)}:{first}"
    if not source.derived:
        return own, text
    for k in range(first - 1, 0, -1):
        found = _DERIVED_FROM.fullmatch(source.line(k))
        if found is not None:
            # Right under its place alone stands the user's statement itself.
            same = k == first - 1 and not found["text"]
            return found["place"] + ("" if same else f", {source.derived}"), text
    return own, text


@lru_cache(maxsize=64)
def _logical(source: SourceFile) -> tuple[tuple[int, str], ...]:
    """For each line of `source` the first of the lines that belong together, as brackets say, and the text of them all
    without comments, on one line."""
    out: list[tuple[int, str]] = []
    pieces: list[str] = []
    first, depth, quoted = 1, 0, False
    for number, line in enumerate(source.lines, 1):
        code, depth, quoted = _code(line, depth, quoted)
        pieces.append(" ".join(code.split()))
        if depth > 0 and number < len(source.lines):
            continue
        out += [(first, _joined(pieces))] * len(pieces)
        first, depth, pieces = number + 1, 0, []
    return tuple(out)


def _code(line: str, depth: int, quoted: bool) -> tuple[str, int, bool]:
    """A line without its comment; how many brackets are open behind it, and whether a docstring is."""
    at = 0
    while at < len(line):
        if line.startswith('"""', at):
            quoted, at = not quoted, at + 3
            continue
        if not quoted:
            if line[at] == "#":
                return line[:at], depth, quoted
            depth += (line[at] in "([") - (line[at] in ")]")
        at += 1
    return line, depth, quoted


def _joined(pieces: list[str]) -> str:
    text = " ".join(p for p in pieces if p)
    if len(pieces) > 1:
        text = _bare(re.sub(r"(?<=[(\[]) ", "", re.sub(r",? (?=[)\]])", "", text)))
    text = "".join(c if c.isprintable() else " " for c in text).rstrip("\\ ")  # which would go on in C
    return text if len(text) <= LONGEST else text[: LONGEST - 4].rstrip("\\ ") + " ..."


def _bare(text: str) -> str:
    """A statement without the brackets around its value, which let it stand on several lines."""
    head, equals, value = text.partition(" = ")
    if not (value.startswith("(") and value.endswith(")")):
        return text
    depth = 0
    for c in value[:-1]:
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text
    return f"{head}{equals}{value[1:-1]}"


def _file_name(path: str) -> str:
    name = path.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(c if c.isprintable() else " " for c in name)
