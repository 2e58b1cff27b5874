"""Which loads that derivation has moved to another place are no longer proved to be in bounds?

`x[m, n // 2]` at the place `N - 1 - n` is `x[m, (N - 1 - n) // 2]`: in bounds, but the prover does not reason that far.
Such a subscript becomes a value, `maximum((N - 1 - n) // 2, 0)`: a gather, which needs no proof and reads the same
element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kgen.codegen.derive.adjoints import Write, ordered
from kgen.codegen.derive.graph import Graph, Node
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import I64
from kgen.dsl.proofs.bounds import in_bounds
from kgen.dsl.proofs.elements import Prover


def within_reach(
    graph: Graph,
    kernel: ir.Kernel,
    tensors: Iterable[ir.Tensor],
    axes: Sequence[ir.Axis],
    writes: Sequence[Write],
    forward: set[Node],
) -> list[Write]:
    """`writes` with each subscript that is not proved a gather. `tensors` are all that may be loaded; what is in
    `forward` was proved."""
    by_name = {t.name: t for t in tensors}
    prover = Prover(replace(kernel, axes=tuple(axes), tensors=tuple(by_name.values()), body=()))
    new: dict[Node, Node] = {}
    for a in ordered(w.value for w in writes):
        if a.kind != "load" or a in forward:
            continue
        tensor = by_name[a.tensor]
        at = [
            s if not isinstance(s, Poly) or _inside(prover, tensor, i, s) else _value(graph, s)
            for i, s in enumerate(a.at)
        ]
        if any(isinstance(s, Node) and isinstance(old, Poly) for s, old in zip(at, a.at, strict=True)):
            new[a] = graph.load(a.tensor, at, a.dtype, a.span)
    if not new:
        return list(writes)
    memo: dict[Node, Node] = {}
    return [replace(w, value=graph.replace(w.value, new, memo)) for w in writes]


def _inside(prover: Prover, tensor: ir.Tensor, position: int, p: Poly) -> bool:
    line = replace(tensor, shape=(tensor.shape[position],))
    return in_bounds(prover, line, (p,))


def _value(graph: Graph, p: Poly) -> Node:
    return graph.op("maximum", graph.index(p), graph.const(0, I64), dtype=I64)
