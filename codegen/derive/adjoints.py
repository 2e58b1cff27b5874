"""Which gradient does each load of a wanted tensor receive?

Reverse mode over the graph of values. A gradient carries the indices of its value and possibly more *parallel*
ones: a value that lacks a tile axis of its user sums over it at once (the adjoint of a broadcast), the sum over
programs is left to the statement that stores the gradient. Integer and bool values carry no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kgen.codegen.derive.algebra import Algebra
from kgen.codegen.derive.graph import Graph, Node
from kgen.codegen.derive.rules import OPS, REDUCTIONS, STEPS
from kgen.dsl.affine import Poly
from kgen.dsl.source import Span


@dataclass(frozen=True)
class Write:
    """`tensor[at...] = value`, or `+=` where `summed`."""

    tensor: str
    at: tuple[Poly, ...]
    value: Node
    summed: bool
    span: Span


def differentiable_operands(a: Node) -> tuple[Node, ...]:
    """The operands that a small change passes through."""
    if a.kind == "op":
        return () if a.dtype.kind != "float" or a.fn in STEPS else a.args[1:] if a.fn == "where" else a.args
    if a.kind == "cast":
        return a.args if a.dtype.kind == "float" and a.args[0].dtype.kind == "float" else ()
    if a.kind == "reduce":
        return a.args if a.reduction[0] in REDUCTIONS and a.dtype.kind == "float" else ()
    return ()


def ordered(roots: Iterable[Node]) -> list[Node]:
    """Everything that `roots` are made of, operands before their users."""
    found: set[Node] = set()
    stack = list(roots)
    while stack:
        a = stack.pop()
        if a not in found:
            found.add(a)
            stack += a.args
    return sorted(found, key=lambda a: a.serial)


class Sweep:
    """One run of reverse mode. `names` are the user's names of values; `hints` collects names for gradients. With
    `whole` a gradient that cancels stays."""

    def __init__(self, graph: Graph, tiles: frozenset[str], names: dict[Node, str], *, whole: bool = False) -> None:
        self.graph = graph
        self.tiles = tiles
        self.names = names
        self.hints: dict[Node, str] = {}
        self.active: set[Node] = set()
        self._algebra = None if whole else Algebra()

    def run(self, outputs: list[Write], cotangents: dict[str, Node], wanted: frozenset[str]) -> dict[Node, Node]:
        """The gradient of each load of a `wanted` tensor that is not zero, and of one that is where a tensor has no
        other. `cotangents` maps the place in `outputs`, as text, to the load of that output's gradient. `active` has
        then all values that a small change of a wanted tensor passes to, if only to cancel."""
        graph = self.graph
        values = ordered(w.value for w in outputs)
        active = self.active = set[Node]()
        for a in values:
            hit = a.kind == "load" and a.tensor in wanted and a.dtype.kind == "float"
            if hit or any(b in active for b in differentiable_operands(a)):
                active.add(a)
        received: dict[Node, list[Node]] = {a: [] for a in active}
        for w in outputs:
            if w.value in active:
                graph.span = w.span
                g = cotangents[place(w)]
                received[w.value].append(self._fitted(g, w.value, g.axes))
        gradients: dict[Node, Node] = {}
        for z in reversed(values):
            if z not in active or not received[z]:
                continue
            graph.span = z.span
            total = graph.total(received[z])
            if total.value == 0 or (self._algebra is not None and self._algebra.is_zero(total)):
                continue
            if z in self.names:
                self.hints.setdefault(total, f"d_{self.names[z]}")
            if z.kind == "load":
                gradients[z] = total
                continue
            self._propagate(z, total, active, received)
        reached = {z.tensor for z in gradients}
        passed = {w.value for w in outputs if w.value in active}
        for z in reversed(values):
            if z in passed:
                passed.update(a for a in differentiable_operands(z) if a in active)
        zeros = [z for z in values if z in passed and z.kind == "load" and z.tensor not in reached]
        return gradients | {z: graph.const(0.0, z.dtype) for z in zeros}

    def _propagate(self, z: Node, dz: Node, active: set[Node], received: dict[Node, list[Node]]) -> None:
        graph = self.graph
        if sum(a in active for a in z.args) > 1:
            dz = graph.freeze(dz)
        if z.kind == "cast":
            parts: tuple[Node | None, ...] = (dz,)
        else:
            parts = (OPS[z.fn] if z.kind == "op" else REDUCTIONS[z.reduction[0]])(graph, z, dz)
        user = z.axes | (frozenset(z.reduction[1]) if z.kind == "reduce" else frozenset())
        for a, g in zip(z.args, parts, strict=True):
            if g is not None and a in active:
                received[a].append(self._fitted(graph.cast(g, a.dtype), a, user))

    def _fitted(self, g: Node, value: Node, user: frozenset[str]) -> Node:
        """`g`, for a use of `value` that runs over the axes `user`, summed over the tile axes that `value` lacks."""
        missing = (user - value.axes) & self.tiles
        return self.graph.sum(self.graph.cast(g, value.dtype), missing) if missing else self.graph.cast(g, value.dtype)


def place(w: Write) -> str:
    """The target of a write as text."""
    return f"{w.tensor}[{', '.join(map(str, w.at))}]"
