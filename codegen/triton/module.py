"""The parts of a generated module around its function's body: what is said at the top, which helpers and which of the
definitions in front of the body are there."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from kgen.codegen.about import compiled_for, grid
from kgen.codegen.origins import file_name
from kgen.codegen.schedule import Scheduled
from kgen.codegen.templating import environment
from kgen.codegen.triton.index import Definition
from kgen.codegen.triton.reserved import HELPERS

_WORD = re.compile(r"[A-Za-z_]\w*")


def about(scheduled: Scheduled, tensors: Collection[str]) -> list[str]:
    """Comment lines: what the file computes, what it was compiled for and how to launch it. `tensors`: those of the
    kernel that are its arguments."""
    kernel, schedule = scheduled.kernel, scheduled.schedule
    doc = [_printable(line) for line in kernel.doc.strip().split("\n")[:1] if line]
    file = file_name(kernel.span)
    told = f", maxnreg={schedule.registers}" if schedule.registers else ""
    return [
        f"{kernel.name} of {file}: {doc[0]}" if doc else f"{kernel.name} of {file}",
        *compiled_for(scheduled, tensors),
        f"Launch: grid ({grid(scheduled, 'triton.cdiv({}, {})')},), num_warps={schedule.threads // 32}{told}.",
    ]


def used(definitions: list[Definition], lines: Iterable[str]) -> list[str]:
    """The definitions that the lines use, directly or through one another, in order."""
    found = words("\n".join(lines))
    kept: list[str] = []
    for d in reversed(definitions):
        if d.name in found:
            found |= set(_WORD.findall(d.text))
            kept.append(f"{d.name} = {d.text}")
            if d.note:
                kept.append(f"# {d.note}")
    return kept[::-1]


def helpers(code: str) -> list[str]:
    """The texts of the helpers that `code` calls, directly or through one another, in order."""
    macros = environment().get_template("triton/helpers.py.j2").module
    found = words(code)
    texts: list[str] = []
    for name in reversed(HELPERS):
        if name in found:
            macro: Callable[[], str] = getattr(macros, f"helper{name}")
            texts.append(macro())
            found |= words(texts[-1])
    return texts[::-1]


def words(code: str) -> set[str]:
    """The identifiers of `code` outside of comments."""
    # Generated code has no string with `#`.
    return set(_WORD.findall("\n".join(line.split("#", 1)[0] for line in code.split("\n"))))


def _printable(text: str) -> str:
    """One line of text that cannot end a comment."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip()
