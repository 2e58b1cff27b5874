"""Does every element of an output get written exactly once, and by one program?

A store must name a different element at every point (each parallel index is in the target), two stores to one tensor
must not meet, and together they must cover an output. Whether the value of a store fits its target is the
checker's question; whether in-place reads come in time is `inplace`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.proofs.bounds import can_hold, describe, divisibility, in_bounds, relation
from kgen.dsl.proofs.elements import Prover
from kgen.dsl.proofs.prove import Facts

Write = ir.Store | ir.Accumulate


def check_writes(prover: Prover, diagnostics: Diagnostics) -> None:
    """Report K0401 (programs race), K0402 (an element written twice by one store), K0403 (by two stores), K0404 (an
    output is read), K0405 (never written), K0406 (written in part) and K0407 (`=` and `+=` mixed)."""
    kernel = prover.kernel
    _check_no_read_of_outputs(kernel, diagnostics)
    for tensor in kernel.tensors:
        writes = [s for s in kernel.body if isinstance(s, Write) and s.tensor == tensor.name]
        if not writes:
            if tensor.role in ("out", "inout"):
                _report_unwritten(tensor, diagnostics)
            continue
        before = len(diagnostics.items)
        for s in writes:
            _check_store(prover, s, diagnostics)
        _check_pairs(prover, writes, diagnostics)
        sound = len(diagnostics.items) == before and all(in_bounds(prover, tensor, s.at) for s in writes)
        if tensor.role == "out" and sound:
            _check_coverage(prover, tensor, writes, diagnostics)


def _check_no_read_of_outputs(kernel: ir.Kernel, diagnostics: Diagnostics) -> None:
    for s in kernel.body:
        for e in ir.walk(s.value):
            if isinstance(e, ir.Load) and kernel.tensor(e.tensor).role == "out":
                diagnostics.error(
                    "K0404",
                    f"output '{e.tensor}' is read",
                    e.span,
                    label="it has no value before the kernel has run",
                    help=f"use the value that was stored, or declare `{e.tensor}: inout ...` among the inputs",
                )


def _report_unwritten(tensor: ir.Tensor, diagnostics: Diagnostics) -> None:
    inout = tensor.role == "inout"
    diagnostics.error(
        "K0405",
        f"{'inout tensor' if inout else 'output'} '{tensor.name}' is never written",
        tensor.span,
        help="drop `inout`, or store to it" if inout else f"store to it: {tensor.name}[...] = ..., or remove it",
    )


def target(s: Write) -> str:
    """The target of a store as text."""
    return f"{s.tensor}[{', '.join(map(str, s.at))}]"


def _check_store(prover: Prover, s: Write, diagnostics: Diagnostics) -> None:
    kernel = prover.kernel
    used = prover.axes(s.at)
    facts = prover.facts(s.at)
    missing = [a for a in kernel.parallel if a.name not in used and not facts.prove_equal(a.extent, Poly.const(1))]
    if isinstance(s, ir.Store) and missing:
        names = ", ".join(a.name for a in missing)
        one = len(missing) == 1
        diagnostics.error(
            "K0401",
            f"programs race on {target(s)}",
            s.span,
            label=f"every value of parallel {'index' if one else 'indices'} {names} writes the same element",
            help=f"put {names} in the target, or sum over the programs with `{target(s)} += ...`",
        )
        return
    twice = prover.injective(s.at)
    if twice:
        names = ", ".join(sorted(twice))
        diagnostics.error(
            "K0402",
            f"{target(s)} may write one element more than once",
            s.span,
            label=f"the subscripts do not tell different values of {names} apart",
            help="give each index a subscript of its own, or strides that its neighbours' extents fit into",
        )


def _check_pairs(prover: Prover, writes: list[Write], diagnostics: Diagnostics) -> None:
    mixed = next((s for s in writes[1:] if type(s) is not type(writes[0])), None)
    if mixed is not None:
        diagnostics.error(
            "K0407",
            f"'{mixed.tensor}' is both stored to and summed into",
            mixed.span,
            help="use two outputs",
            notes=(f"the other statement is at {writes[0].span}",),
        )
        return
    for a, b in combinations(writes, 2):
        if prover.disjoint(a.at, b.at):
            continue
        same = a.at == b.at
        summed = isinstance(b, ir.Accumulate)
        diagnostics.error(
            "K0403",
            f"{target(b)} {'writes' if same else 'may write'} an element that {target(a)} has written",
            b.span,
            help="add the values up in one `+=`"
            if summed
            else "store each element once, and keep what is needed again in a name",
            notes=(f"the first is at {a.span}",),
        )
        return


def covered(prover: Prover, tensor: ir.Tensor, writes: Sequence[Write], extra: Sequence[ir.Requirement] = ()) -> bool:
    """Whether `writes` reach all of `tensor`, given that each is in bounds and none writes an element twice.

    Then it is enough that they write as many elements as there are. An extent below 0 would be counted wrongly, so
    all are shown to be at least 0.
    """
    extents = _extents(prover, writes)
    everything = [*tensor.shape, *(x for e in extents for x in e)]
    facts = Facts(prover.kernel, {}, everything, requires=extra)
    return all(facts.prove_nonneg(x) for e in extents for x in e) and facts.prove_equal(
        _count(extents), _product(tensor.shape)
    )


def _extents(prover: Prover, writes: Sequence[Write]) -> list[list[Poly]]:
    """For each store, how far each index in its target runs."""
    return [[prover.kernel.axis(n).extent for n in sorted(prover.axes(s.at))] for s in writes]


def _check_coverage(prover: Prover, tensor: ir.Tensor, writes: Sequence[Write], diagnostics: Diagnostics) -> None:
    if covered(prover, tensor, writes):
        return
    extents = _extents(prover, writes)
    help = f"add a store for the rest of '{tensor.name}'"
    candidates = divisibility([*tensor.shape, *(x for e in extents for x in e)])
    if len(writes) == 1:
        candidates += [relation("==", x, n) for x, n in zip(extents[0], tensor.shape, strict=False) if x != n]
    for condition in candidates:
        if can_hold(condition) and covered(prover, tensor, writes, [condition]):
            help = f"add `{describe(condition)}`, or a store for the rest"
            break
    diagnostics.error(
        "K0406",
        f"output '{tensor.name}' is not shown to be written everywhere",
        writes[-1].span,
        label=f"{_count(extents)} of {_product(tensor.shape)} elements",
        help=help,
    )


def _count(extents: Sequence[Sequence[Poly]]) -> Poly:
    return sum((_product(e) for e in extents), Poly.const(0))


def _product(factors: Sequence[Poly]) -> Poly:
    result = Poly.const(1)
    for f in factors:
        result = result * f
    return result
