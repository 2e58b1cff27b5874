"""The parts of a generated module around its function's body: what is said at the top, which helpers and which of the
definitions in front of the body are there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from kgen.codegen.origins import file_name
from kgen.codegen.schedule import Scheduled, Sums
from kgen.codegen.templating import environment
from kgen.codegen.triton.index import Definition
from kgen.codegen.triton.reserved import HELPERS

_WORD = re.compile(r"[A-Za-z_]\w*")


def about(scheduled: Scheduled, tensors: Iterable[str]) -> list[str]:
    """Comment lines: what the file computes, what it was compiled for and how to launch it. `tensors`: those of the
    kernel that are its arguments."""
    kernel, variant = scheduled.kernel, scheduled.variant
    there = frozenset(tensors)
    doc = [_printable(line) for line in kernel.doc.strip().split("\n")[:1] if line]
    file = file_name(kernel.span)
    facts = [f"{k} = {v}" for k, v in kernel.dtypes] + [f"{k} = {v}" for k, v in (*kernel.consts, *variant.dims)]
    out = [f"{kernel.name} of {file}: {doc[0]}" if doc else f"{kernel.name} of {file}"]
    if facts:
        out.append(f"Compiled for {', '.join(facts)}.")
    unit = [t.name for t in kernel.tensors if t.name in there and variant.tensor(t.name).unit]
    aligned = {t.name: variant.tensor(t.name).align for t in kernel.tensors if t.name in there}
    by_bytes = sorted({b for b in aligned.values() if b > 1}, reverse=True)
    if unit:
        out.append(f"Innermost stride 1: {', '.join(unit)}.")
    for b in by_bytes:
        names = ", ".join(t for t, v in aligned.items() if v == b)
        out.append(f"Address and other strides multiples of {b} bytes: {names}.")
    unknown = [(d, m) for d, m in variant.multiples if variant.dim(d) is None and d in kernel.dims]
    multiples = [f"{d} of {m}" for d, m in unknown if m > 1]
    if multiples:
        out.append(f"Multiples: {', '.join(multiples)}.")
    rows = " * ".join(f"({a.extent})" if len(a.extent.terms) > 1 else str(a.extent) for a in kernel.parallel) or "1"
    per = scheduled.schedule.rows
    grid = rows if per == 1 else f"triton.cdiv({rows}, {per})"
    if scheduled.sums is not None:
        grid = _sum_grid(scheduled, scheduled.sums)
    most = scheduled.schedule.registers
    told = f", maxnreg={most}" if most else ""
    out.append(f"Launch: grid ({grid},), num_warps={scheduled.schedule.threads // 32}{told}.")
    return out


def _sum_grid(scheduled: Scheduled, sums: Sums) -> str:
    axes = sums.row_axes(scheduled.kernel) if sums.columns else sums.block_axes(scheduled.kernel)
    blocks = " * ".join(f"({a.extent})" if len(a.extent.terms) > 1 else str(a.extent) for a in axes)
    if sums.columns:
        blocks = f"triton.cdiv({blocks}, {scheduled.schedule.rows})"
    return " * ".join(t for t in (sums.dim if sums.split is not None else "", blocks) if t) or "1"


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
