"""What a listing says of itself: what it was compiled for, what it relies on, and how many programs are launched.

Both emitters put it above their code, and what is ejected has it in its documentation: the words are the same.
"""

from __future__ import annotations

from collections.abc import Collection

from kgen.codegen.schedule import Scheduled
from kgen.codegen.variant import Variant
from kgen.dsl import ir


def literal_text(value: object) -> str:
    """A constant as `.kdsl` has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def choices(kernel: ir.Kernel, variant: Variant) -> str:
    """`T = bf16, flag = false, N = 4096`: dtypes, constants and sizes that are compiled in; empty without any."""
    facts = [f"{n} = {d}" for n, d in kernel.dtypes] + [f"{n} = {literal_text(v)}" for n, v in kernel.consts]
    return ", ".join([*facts, *(f"{d} = {n}" for d, n in variant.dims)])


def memory(kernel: ir.Kernel, variant: Variant, tensors: Collection[str]) -> list[str]:
    """What is assumed of the strides and addresses of `tensors`, a phrase each."""
    there = [t for t in kernel.tensors if t.name in tensors]
    unit = [t.name for t in there if t.shape and variant.tensor(t.name).unit]
    out = [f"innermost stride 1: {', '.join(unit)}"] if unit else []
    aligned = {t.name: variant.tensor(t.name).align for t in there}
    for b in sorted({b for b in aligned.values() if b > 1}, reverse=True):
        names = ", ".join(t for t, v in aligned.items() if v == b)
        out.append(f"address and other strides multiples of {b} bytes: {names}")
    return out


def compiled_for(scheduled: Scheduled, tensors: Collection[str]) -> list[str]:
    """Sentences above a listing, of whose arguments `tensors` are: what it was compiled for and relies on."""
    kernel, variant = scheduled.kernel, scheduled.variant
    facts = choices(kernel, variant)
    out = [f"compiled for {facts}"] if facts else []
    out += memory(kernel, variant, tensors)
    unknown = [(d, m) for d, m in variant.multiples if variant.dim(d) is None and d in kernel.dims]
    multiples = [f"{d} of {m}" for d, m in unknown if m > 1]
    if multiples:
        out.append(f"multiples: {', '.join(multiples)}")
    return [f"{text[0].upper()}{text[1:]}." for text in out]


def grid(scheduled: Scheduled, ceil: str) -> str:
    """How many blocks a launch has, in one dimension, as an expression; `ceil` has places for dividend and divisor."""
    kernel, sums, s = scheduled.kernel, scheduled.sums, scheduled.schedule
    axes, per, split = kernel.parallel, s.rows, ""
    if sums is not None:
        axes = sums.row_axes(kernel) if sums.columns else sums.block_axes(kernel)
        per = s.rows if sums.columns else 1
        split = sums.dim if sums.split is not None else ""
    points = " * ".join(f"({a.extent})" if len(a.extent.terms) > 1 else str(a.extent) for a in axes)
    programs = ceil.format(points, per) if points and per > 1 else points
    return " * ".join(t for t in (str(s.cluster) if s.cluster > 1 else "", split, programs) if t) or "1"
