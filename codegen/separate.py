"""Which values of a row must be known before its elements can be taken one by one?

A sum over programs keeps an element of its target in registers from the first row to the last. A row that no program
can hold whole is therefore cut: what is *reduced* along it is made first, by an ordinary kernel over rows, and stored,
a number a row. What is left, the stores along the row and the sums, needs of an element only what has the same tile
indices and the numbers of its row: the tile indices are then spread over programs, as any other.

Refuses (None) what cannot be cut so: a sum whose terms are reduced along other tile indices than all, stores that have
no sum beside them, and tensors that would be overwritten before another launch, or another element, has read them.
It does not ask whether the cut pays: `kgen.codegen.pipeline` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kgen.codegen.normalize import with_children
from kgen.codegen.phases import refs
from kgen.dsl import ir
from kgen.dsl.affine import Poly


@dataclass(frozen=True)
class Separated:
    """rows: the kernel that stores `values`, tensors with a number a row, and what the kernel stores once a row; None
    where nothing of that is needed. parts: kernels without tile indices, each with sums over the same indices for
    targets with the same tile indices; stores along the row stand in one of them."""

    rows: ir.Kernel | None
    values: tuple[ir.Tensor, ...]
    parts: tuple[ir.Kernel, ...]


def separated(kernel: ir.Kernel, fresh: Callable[[str], str]) -> Separated | None:
    """`kernel`, which is in normal form and has sums over programs, cut; None where it cannot be. `fresh` makes the
    names of tensors."""
    tiles = frozenset(a.name for a in kernel.tiles)
    groups: dict[tuple[frozenset[str], frozenset[str]], list[ir.Accumulate | ir.Store]] = {}
    for s in kernel.body:
        if isinstance(s, ir.Accumulate):
            groups.setdefault((ir.target_symbols(s) & tiles, frozenset(s.over)), []).append(s)
    once = [s for s in kernel.body if isinstance(s, ir.Store) and not ir.target_symbols(s) & tiles]
    for s in kernel.body:
        if isinstance(s, ir.Store) and ir.target_symbols(s) & tiles:
            # Behind all sums of these elements: a tensor in place is read before it is overwritten.
            beside = [key for key in groups if key[0] == ir.target_symbols(s) & tiles]
            if not beside:
                return None
            groups[beside[-1]].append(s)
    order = sorted(groups, key=lambda key: any(isinstance(s, ir.Store) for s in groups[key]))
    values = _RowValues(kernel, fresh)
    parts: list[ir.Kernel] = []
    for key in order:
        # Stores first: what they need is then no longer held beside the sums.
        body = values.body(sorted(groups[key], key=lambda s: isinstance(s, ir.Accumulate)), key[0])
        if body is None:
            return None
        axes = tuple(replace(a, kind="parallel") for a in kernel.axes if a.name not in tiles - key[0])
        parts.append(replace(kernel, tensors=(*kernel.tensors, *values.tensors), axes=axes, body=body))
    rows = None
    if once or values.stores:
        lets = (s for s in kernel.body if isinstance(s, ir.Let))
        rows = replace(kernel, body=(*lets, *values.stores, *once))
    stages = [*([] if rows is None else [rows]), *parts]
    return Separated(rows, tuple(values.tensors), tuple(parts)) if _reads_before_it_writes(kernel, stages) else None


class _RowValues:
    """The numbers of a row that others need, as tensors and the stores to them."""

    def __init__(self, kernel: ir.Kernel, fresh: Callable[[str], str]) -> None:
        self.kernel = kernel
        self.fresh = fresh
        self.tiles = frozenset(a.name for a in kernel.tiles)
        self.lets = {s.name: s for s in kernel.body if isinstance(s, ir.Let)}
        self.reduced: set[str] = set()  # names that come from a reduction
        for s in self.lets.values():
            if isinstance(s.value, ir.Reduce) or refs(s.value) & self.reduced:
                self.reduced.add(s.name)
        self.tensors: list[ir.Tensor] = []
        self.stores: list[ir.Store] = []
        self.known: dict[str, ir.Load] = {}  # by name of the `Let`

    def body(self, statements: Iterable[ir.Stmt], kept: frozenset[str]) -> tuple[ir.Stmt, ...] | None:
        """`statements`, and what they need, without a reduction; None where that is not to be had of elements with the
        tile indices `kept` and of numbers of the row."""
        lets: dict[str, ir.Let] = {}
        targets: list[ir.Stmt] = []
        for s in statements:
            value = self._value(s.value, lets, s)
            if value is None:
                return None
            targets.append(replace(s, value=value))
        body = (*(lets[name] for name in self.lets if name in lets), *targets)
        return None if any(s.value.axes & self.tiles - kept for s in body) else body

    def _value(self, e: ir.Expr, lets: dict[str, ir.Let], s: ir.Stmt) -> ir.Expr | None:
        """`e`, which `s` needs, from loads alone; the `Let`s below it are put into `lets`."""
        if isinstance(e, ir.Ref) and e.name in lets:
            return replace(e, axes=lets[e.name].value.axes)
        if not e.axes & self.tiles and refs(e) & self.reduced:
            return self._number(e, s)
        if isinstance(e, ir.Reduce):  # that leaves other tile indices
            return None
        if isinstance(e, ir.Ref):
            let = self.lets[e.name]
            value = self._value(let.value, lets, let)
            if value is None:
                return None
            lets[e.name] = replace(let, value=value)
            return replace(e, axes=value.axes)
        kids = [self._value(k, lets, s) for k in ir.children(e)]
        made = tuple(k for k in kids if k is not None)
        if len(made) < len(kids):
            return None
        return _with_axes(with_children(e, made), made)

    def _number(self, e: ir.Expr, s: ir.Stmt) -> ir.Load:
        """A load of `e`, a number of each row."""
        if isinstance(e, ir.Ref) and e.name in self.known:
            return self.known[e.name]
        rows = self.kernel.parallel
        at = tuple(Poly.sym(a.name) for a in rows)
        name = self.fresh(f"{e.name if isinstance(e, ir.Ref) else _owner(s)}_of_row")
        self.tensors.append(ir.Tensor(name, e.dtype, tuple(a.extent for a in rows), "out", False, False, s.span))
        self.stores.append(ir.Store(name, at, e, self.lets[e.name].span if isinstance(e, ir.Ref) else s.span))
        load = ir.Load(name, at, e.dtype, frozenset(a.name for a in rows), e.span)
        if isinstance(e, ir.Ref):
            self.known[e.name] = load
        return load


def _with_axes(e: ir.Expr, kids: tuple[ir.Expr, ...]) -> ir.Expr:
    """`e`, whose operands `kids` may have got indices, with theirs: numbers of a row are stored for every row, also
    those that are the same in all."""
    return replace(e, axes=e.axes.union(*(k.axes for k in kids))) if kids else e


def _owner(s: ir.Stmt) -> str:
    return s.name if isinstance(s, ir.Let) else s.tensor


def _reads_before_it_writes(kernel: ir.Kernel, stages: list[ir.Kernel]) -> bool:
    """Whether every load, in whichever of `stages`, sees the memory that the kernel was given."""
    inout = {t.name for t in kernel.tensors if t.role == "inout"}
    for i, stage in enumerate(stages):
        for s in stage.body:
            if not isinstance(s, ir.Store) or s.tensor not in inout:
                continue
            if any(s.tensor == load.tensor for later in stages[i + 1 :] for load in _loads(later)):
                return False
            # Other elements are read by other programs, or in other turns of a program's loop. Of rows they are not:
            # what a program over rows reads before it stores, its schedule sees to.
            if not stage.tiles and any(s.tensor == load.tensor and s.at != load.at for load in _loads(stage)):
                return False
    return True


def _loads(kernel: ir.Kernel) -> Iterable[ir.Load]:
    return (e for s in kernel.body for e in ir.walk(s.value) if isinstance(e, ir.Load))
