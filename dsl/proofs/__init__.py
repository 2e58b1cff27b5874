"""Proofs about a kernel's index arithmetic: bounds, races, coverage and in-place order. Reads tile IR only."""

from __future__ import annotations

from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.proofs.bounds import check_bounds
from kgen.dsl.proofs.elements import Prover
from kgen.dsl.proofs.inplace import check_inplace, loads_before_store, needs_barrier
from kgen.dsl.proofs.prove import Facts
from kgen.dsl.proofs.races import check_writes

__all__ = ["Facts", "is_proved", "loads_before_store", "needs_barrier", "prove_kernel"]


def prove_kernel(kernel: ir.Kernel, diagnostics: Diagnostics) -> None:
    """Report every subscript, store or in-place read of `kernel` that is not shown to be sound.

    Assumes what `kgen.dsl.check` has settled: names, index sets, dtypes, and as many subscripts as dimensions.
    """
    claims = _claims(kernel)
    if claims in _proved:
        return
    prover, found = Prover(kernel), Diagnostics()
    check_bounds(prover, found)
    check_writes(prover, found)
    check_inplace(prover, found)
    if not found.items:
        if len(_proved) >= MAX_PROVED:
            _proved.clear()
        _proved[claims] = None
    for d in found.items:
        diagnostics.add(d)


def is_proved(kernel: ir.Kernel) -> bool:
    """Whether this process has proved of another kernel all that `prove_kernel` would prove of this one."""
    return _claims(kernel) in _proved


# What this process has proved. A kernel is elaborated for several dtypes and along many paths, and only some of them
# differ in a subscript.
_proved: dict[tuple[object, ...], None] = {}
MAX_PROVED = 2048


def _claims(kernel: ir.Kernel) -> tuple[object, ...]:
    """All of a kernel that the proofs read, positions and dtypes aside. Of a subscript that is a value they read only
    that it is one."""
    body: list[object] = []
    for s in kernel.body:
        for e in ir.walk(s.value):
            if isinstance(e, ir.Load):
                body.append((e.tensor, *(p if isinstance(p, Poly) else None for p in e.at)))
            elif isinstance(e, ir.IndexValue):
                body.append(e.index)
        body.append((type(s).__name__, *(() if isinstance(s, ir.Let) else (s.tensor, *s.at))))
    return (
        tuple((a.name, a.kind, a.extent) for a in kernel.axes),
        tuple((r.op, r.left, r.right) for r in kernel.requires),
        tuple((t.name, t.role, t.star, t.shape) for t in kernel.tensors),
        *body,
    )
