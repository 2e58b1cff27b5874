"""Proofs about a kernel's index arithmetic: bounds, races, coverage and in-place order. Reads tile IR only."""

from __future__ import annotations

from kgen.dsl import ir
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.proofs.bounds import check_bounds
from kgen.dsl.proofs.elements import Prover
from kgen.dsl.proofs.inplace import check_inplace, loads_before_store, needs_barrier
from kgen.dsl.proofs.prove import Facts
from kgen.dsl.proofs.races import check_writes

__all__ = ["Facts", "loads_before_store", "needs_barrier", "prove_kernel"]


def prove_kernel(kernel: ir.Kernel, diagnostics: Diagnostics) -> None:
    """Report every subscript, store or in-place read of `kernel` that is not shown to be sound.

    Assumes what `kgen.dsl.check` has settled: names, index sets, dtypes, and as many subscripts as dimensions.
    """
    prover = Prover(kernel)
    check_bounds(prover, diagnostics)
    check_writes(prover, diagnostics)
    check_inplace(prover, diagnostics)
