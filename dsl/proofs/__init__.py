"""Proofs about a kernel's index arithmetic: bounds, races, coverage and in-place order. Reads tile IR only."""

from __future__ import annotations

from kgen.dsl import ir
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.proofs.bounds import check_bounds
from kgen.dsl.proofs.claims import Claims, claims_of
from kgen.dsl.proofs.elements import Prover
from kgen.dsl.proofs.inplace import check_inplace, loads_before_store, needs_barrier
from kgen.dsl.proofs.prove import Facts
from kgen.dsl.proofs.races import check_writes

__all__ = ["Facts", "is_proved", "loads_before_store", "needs_barrier", "prove_kernel"]


def prove_kernel(kernel: ir.Kernel, diagnostics: Diagnostics) -> None:
    """Report every subscript, store or in-place read of `kernel` that is not shown to be sound.

    Assumes what `kgen.dsl.check` has settled: names, index sets, dtypes, and as many subscripts as dimensions.
    """
    claims = claims_of(kernel)
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
    return claims_of(kernel) in _proved


# What this process has proved. A kernel is elaborated for several dtypes and along many paths, and only some of them
# differ in a subscript.
_proved: dict[Claims, None] = {}
MAX_PROVED = 2048
