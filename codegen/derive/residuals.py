"""Which values does the forward kernel save for the backward one, instead of their being computed again?

Those that cost a reduction and are one number a program: floats that carry every parallel index and no tile index. Of
a chain of such values only the last that the backward needs is saved. A reduction that the
elements of a tile are compared with is not saved, unless it only selects what was loaded: computed in another kernel
a maximum may differ in its last bit, and no element would equal it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kgen.codegen.derive.adjoints import ordered
from kgen.codegen.derive.graph import Node

# Ops that give the same bits wherever they are computed.
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_EXACT = frozenset(("abs", "neg", "maximum", "minimum", "where", "sign", "floor", "ceil", "round", "trunc"))


def to_save(roots: Iterable[Node], forward: set[Node], parallel: frozenset[str]) -> list[Node]:
    """The values of the `forward` kernel to save for what `roots` are made of, in order of computation."""
    roots = list(roots)
    nodes = ordered(roots)
    reduced: set[Node] = set()
    compared: set[Node] = set()
    for a in nodes:
        if a.kind == "reduce" or any(b in reduced for b in a.args):
            reduced.add(a)
        if a.fn in _COMPARISONS:
            compared.update(
                b for b in a.args if b.kind == "reduce" and a.axes - b.axes and b in forward and not _exact(b)
            )
    saved: set[Node] = set()
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        a = stack.pop()
        if a in seen:
            continue
        seen.add(a)
        whole = a.axes == parallel and a.dtype.kind == "float" and a.kind != "load"
        if whole and a in forward and a in reduced and a not in compared:
            saved.add(a)
        else:
            stack += a.args
    return sorted(saved, key=lambda a: a.serial)


def _exact(a: Node) -> bool:
    """Whether a value is only selected, never rounded."""
    return all(
        b.kind in ("load", "const", "scalar", "index", "cast") or b.fn in _EXACT or b.dtype.kind != "float"
        for b in ordered((a,))
        if b.kind != "reduce" or b.reduction[0] not in ("max", "min")
    )
