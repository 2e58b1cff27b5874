"""Which neighbouring parallel indices may be one index, and what is the kernel then?

Where every tensor that either of two parallel indices subscripts has both, side by side and over their whole extents
(`x[m, n]` with `x: T[*M, N]`), and memory is laid out so that one stride serves both, the pair is one index `mn` over a
dimension `MN`: no division to recover the two, and vectors that run over the ends of rows. An elementwise kernel on
contiguous tensors thus has a single flat index.

`candidates` judges by the text alone. Whether the strides of a call allow it is the caller's question.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kgen.codegen.names import fresh, taken_names
from kgen.dsl import ir
from kgen.dsl.affine import Poly

Group = tuple[str, ...]  # parallel indices, outermost first


@dataclass(frozen=True)
class Merge:
    """`axes` became the index `axis` over the dimension `dim`, whose value is the product of their extents.

    `places`: for each tensor that they subscript, where the first of their dimensions is.
    """

    axes: Group
    axis: str
    dim: str
    extent: Poly
    places: tuple[tuple[str, int], ...]


def candidates(kernel: ir.Kernel) -> tuple[tuple[str, str], ...]:
    """Pairs of parallel indices, consecutive in order of declaration, that may be merged as far as the kernel says."""
    parallel = kernel.parallel
    return tuple((a.name, b.name) for a, b in itertools.pairwise(parallel) if _mergeable(kernel, a, b))


def places(kernel: ir.Kernel, pair: tuple[str, str]) -> tuple[tuple[str, int], ...]:
    """For a candidate pair: the tensors that it subscripts, each with the dimension that the first index subscripts."""
    found: dict[str, int] = {}
    for access in ir.accesses(kernel.body):
        place = _place(access.at, pair[0], pair[1])
        if place is not None:
            found[access.tensor] = place
    return tuple(found.items())


def collapse(kernel: ir.Kernel, groups: Sequence[Group]) -> tuple[ir.Kernel, tuple[Merge, ...]]:
    """`kernel` with each group merged into one index. Every two neighbours in a group must be a candidate pair.

    The new dimensions are the kernel's last; dimensions that nothing mentions any more stay declared, as values may use
    them.
    """
    merges = []
    for group in groups:
        kernel, merge = _collapse(kernel, group)
        merges.append(merge)
    return kernel, tuple(merges)


def _collapse(kernel: ir.Kernel, group: Group) -> tuple[ir.Kernel, Merge]:
    axes = [kernel.axis(name) for name in group]
    taken = taken_names(kernel)
    axis = fresh("".join(group), taken)
    dim = fresh("".join(a.extent.as_symbol or a.name.upper() for a in axes), taken)
    extent = Poly.const(1)
    for a in axes:
        extent = extent * a.extent
    merge = Merge(group, axis, dim, extent, places(kernel, (group[0], group[1])))
    at = dict(merge.places)
    rewrite = _Rewrite(frozenset(group), axis, at, len(group))
    new_axis = ir.Axis(axis, Poly.sym(dim), "parallel", axes[0].span, merged=True)
    return (
        replace(
            kernel,
            dims=(*kernel.dims, dim),
            tensors=tuple(_merged(t, at[t.name], len(group), dim) if t.name in at else t for t in kernel.tensors),
            axes=tuple(
                new_axis if a.name == group[0] else a for a in kernel.axes if a.name == group[0] or a.name not in group
            ),
            body=tuple(rewrite.stmt(s) for s in kernel.body),
        ),
        merge,
    )


def _merged(t: ir.Tensor, place: int, count: int, dim: str) -> ir.Tensor:
    shape = (*t.shape[:place], Poly.sym(dim), *t.shape[place + count :])
    return replace(t, shape=shape, star=t.star and place > 0)


# ---- what allows it ------------------------------------------------------------------------------------------------


def _mergeable(kernel: ir.Kernel, a: ir.Axis, b: ir.Axis) -> bool:
    place: dict[str, int] = {}
    touched: set[str] = set()
    for access in ir.accesses(kernel.body):
        name, at = access.tensor, access.at
        symbols = ir.subscript_symbols(at)
        if a.name not in symbols and b.name not in symbols:
            touched.add(name)
            continue
        i = _place(at, a.name, b.name)
        shape = kernel.tensor(name).shape
        if i is None or place.setdefault(name, i) != i or shape[i] != a.extent or shape[i + 1] != b.extent:
            return False
    if not place or touched & place.keys():
        return False
    for s in kernel.body:
        if isinstance(s, ir.Accumulate) and (a.name in s.over) != (b.name in s.over):
            return False
        if any(isinstance(e, ir.IndexValue) and {a.name, b.name} & e.axes for e in ir.walk(s.value)):
            return False
    return True


def _place(at: Sequence[Poly | ir.Expr], a: str, b: str) -> int | None:
    """Where subscripts `a, b` stand side by side in `at`, neither occurring anywhere else in it."""
    names = [s.as_symbol if isinstance(s, Poly) else None for s in at]
    elsewhere = [s.symbols for s, n in zip(at, names, strict=True) if isinstance(s, Poly) and n is None]
    if names.count(a) != 1 or names.count(b) != 1 or any({a, b} & s for s in elsewhere):
        return None
    i = names.index(a)
    return i if i + 1 < len(names) and names[i + 1] == b else None


# ---- rewriting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rewrite:
    """Puts index `axis` for the `count` indices `group`, whose subscripts start at `at[tensor]`."""

    group: frozenset[str]
    axis: str
    at: dict[str, int]
    count: int

    def stmt(self, s: ir.Stmt) -> ir.Stmt:
        if isinstance(s, ir.Let):
            return replace(s, value=self.expr(s.value))
        at = tuple(p for p in self.subscripts(s.tensor, s.at) if isinstance(p, Poly))
        if isinstance(s, ir.Store):
            return replace(s, at=at, value=self.expr(s.value))
        over = tuple(dict.fromkeys(self.axis if a in self.group else a for a in s.over))
        return replace(s, at=at, value=self.expr(s.value), over=over)

    def expr(self, e: ir.Expr) -> ir.Expr:
        if isinstance(e, ir.Const | ir.Scalar | ir.IndexValue):
            return e
        axes = frozenset(self.axis if a in self.group else a for a in e.axes)
        if isinstance(e, ir.Ref):
            return replace(e, axes=axes)
        if isinstance(e, ir.Op):
            return replace(e, axes=axes, args=tuple(self.expr(a) for a in e.args))
        if isinstance(e, ir.Load):
            return replace(e, axes=axes, at=tuple(self.subscripts(e.tensor, e.at)))
        return replace(e, axes=axes, arg=self.expr(e.arg))

    def subscripts(self, tensor: str, at: Sequence[Poly | ir.Expr]) -> list[Poly | ir.Expr]:
        out = [s if isinstance(s, Poly) else self.expr(s) for s in at]
        if tensor in self.at:
            i = self.at[tensor]
            out[i : i + self.count] = [Poly.sym(self.axis)]
        return out
