"""What does a kernel claim of its subscripts? All that the proofs read of it, in a form that can be compared.

Positions and dtypes take no part: kernels that differ in these alone have the same proofs.
"""

from __future__ import annotations

from collections.abc import Hashable

from kgen.dsl import ir
from kgen.dsl.affine import Poly

Claims = tuple[Hashable, ...]


def claims_of(kernel: ir.Kernel) -> Claims:
    """Those of a kernel. Of a subscript that is a value the proofs read only that it is one."""
    return (
        tuple((a.name, a.kind, a.extent) for a in kernel.axes),
        tuple((r.op, r.left, r.right) for r in kernel.requires),
        tuple((t.name, t.role, t.star, t.shape) for t in kernel.tensors),
        *(_said(s)[0] for s in kernel.body),
    )


def index_names(s: ir.Stmt) -> frozenset[str]:
    """The names in the index arithmetic that a statement computes with."""
    return _said(s)[1]


# Paths of a check that part late have most of their statements in common: each is looked at once. It is kept beside
# what it says, so that its id stays its own.
_known: dict[int, tuple[ir.Stmt, Claims, frozenset[str]]] = {}
MAX_KNOWN = 64


def _said(s: ir.Stmt) -> tuple[Claims, frozenset[str]]:
    known = _known.get(id(s))
    if known is None or known[0] is not s:
        claims: list[Hashable] = [type(s).__name__]
        names: set[str] = set()
        for e in ir.walk(s.value):
            if isinstance(e, ir.Load):
                claims.append((e.tensor, *(p if isinstance(p, Poly) else None for p in e.at)))
            elif isinstance(e, ir.IndexValue):
                claims.append(e.index)
                names |= e.index.symbols
        if not isinstance(s, ir.Let):
            claims.append((s.tensor, *s.at))
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        known = _known[id(s)] = s, tuple(claims), frozenset(names)
    return known[1:]
