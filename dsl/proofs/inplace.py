"""Is every element of an `inout` tensor read before it is overwritten, and only by the program that overwrites it?

A load counts where it stands in program order. A `Let` is a value and not a view: one that loads an `inout` tensor
before its store may be used after it, so an emitter must evaluate it before that store (`loads_before_store` lists
them), never sink or repeat it behind the store. Whether two arguments share memory is the runtime's question.
"""

from __future__ import annotations

from collections.abc import Iterator

from kgen.dsl import ir
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.proofs.elements import Prover

Write = ir.Store | ir.Accumulate


def check_inplace(prover: Prover, diagnostics: Diagnostics) -> None:
    """Report K0411 (a load after a store) and K0412 (a load of what another program may overwrite)."""
    kernel = prover.kernel
    for tensor in kernel.tensors:
        if tensor.role != "inout":
            continue
        writes = [s for s in kernel.body if isinstance(s, Write) and s.tensor == tensor.name]
        for position, load in _loads(kernel, tensor.name):
            earlier = next((s for s in writes if kernel.body.index(s) < position), None)
            if earlier is not None:
                diagnostics.error(
                    "K0411",
                    f"'{tensor.name}' is read after it has been overwritten",
                    load.span,
                    help=f"read it into a name before the store: old = {load.span.text or tensor.name + '[...]'}",
                    notes=(f"the store is at {earlier.span}",),
                )
                continue
            for s in writes:
                _check_own_program(prover, load, s, diagnostics)


def needs_barrier(kernel: ir.Kernel) -> frozenset[str]:
    """The `inout` tensors of a checked kernel of which a program reads an element in one thread and overwrites it in
    another: a barrier must stand between the last load of such a tensor and its first store.

    Where a load has the very subscripts of the store, the point (and so the thread) that reads is the one that writes.
    """
    prover = Prover(kernel)
    found: set[str] = set()
    for tensor in kernel.tensors:
        if tensor.role != "inout":
            continue
        writes = [s for s in kernel.body if isinstance(s, Write) and s.tensor == tensor.name]
        for _, load in _loads(kernel, tensor.name):
            if any(load.at != s.at and not prover.disjoint(load.at, s.at) for s in writes):
                found.add(tensor.name)
    return frozenset(found)


def loads_before_store(kernel: ir.Kernel) -> frozenset[str]:
    """The names of the `Let`s that load an `inout` tensor (directly, not through another name) and are used by a
    statement after the first store to it: they must be held in registers from before that store."""
    held: set[str] = set()
    for tensor in kernel.tensors:
        if tensor.role != "inout":
            continue
        stores = [i for i, s in enumerate(kernel.body) if isinstance(s, Write) and s.tensor == tensor.name]
        if not stores:
            continue
        lets = {s.name for s in kernel.body if isinstance(s, ir.Let) and _reads(s.value, tensor.name)}
        for s in kernel.body[stores[0] + 1 :]:
            held |= {e.name for e in ir.walk(s.value) if isinstance(e, ir.Ref)} & lets
    return frozenset(held)


def _reads(e: ir.Expr, tensor: str) -> bool:
    return any(isinstance(x, ir.Load) and x.tensor == tensor for x in ir.walk(e))


def _loads(kernel: ir.Kernel, tensor: str) -> Iterator[tuple[int, ir.Load]]:
    for position, s in enumerate(kernel.body):
        for e in ir.walk(s.value):
            if isinstance(e, ir.Load) and e.tensor == tensor:
                yield position, e


def _check_own_program(prover: Prover, load: ir.Load, s: Write, diagnostics: Diagnostics) -> None:
    parallel = [a.name for a in prover.kernel.parallel]
    if set(parallel) <= prover.same_where_equal(load.at, s.at, parallel) or prover.disjoint(load.at, s.at):
        return
    names = ", ".join(sorted(set(parallel) - prover.same_where_equal(load.at, s.at, parallel)))
    written = f"{s.tensor}[{', '.join(map(str, s.at))}]"
    diagnostics.error(
        "K0412",
        f"this may read an element of '{s.tensor}' that another program has overwritten",
        load.span,
        label=f"a program with another {names} may have stored {written} already",
        help=f"read where the program itself writes, make {names} a tile index, or write to an output",
        notes=(f"the store is at {s.span}",),
    )
