"""Which comparisons of an index with a label can be made in 32 bits?

`where(v == target[m], ...)` compares every element of a row with a 64-bit value: two instructions and a widening each.
A label that is no index of the row is equal to none, so it may stand as -1, and the label fits 32 bits. It is narrowed
once for the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kgen.codegen.names import fresh, taken_names
from kgen.codegen.normalize import with_children
from kgen.dsl import ir
from kgen.dsl.dtypes import BOOL, I32, I64

NONE = -1  # a label that is no index


def narrow(kernel: ir.Kernel) -> ir.Kernel:
    """`kernel`, which is in normal form, with labels as wide as the indices they are compared with."""
    narrower = _Narrower(kernel)
    return replace(kernel, body=tuple(new for s in kernel.body for new in narrower.statement(s)))


@dataclass(frozen=True)
class Label(ir.Cast):
    """A label that this pass has narrowed: an index of its axis, or -1."""

    @property
    def wide(self) -> ir.Expr:
        """The value that it was made of, which is the same where it is an index."""
        assert isinstance(self.arg, ir.Op)  # as `_Narrower` makes it
        return self.arg.args[1]


class _Narrower:
    def __init__(self, kernel: ir.Kernel) -> None:
        # Extents of the tile indices, which are known: an index is less than 2**31.
        self.extents = {a.name: a.extent.constant for a in kernel.tiles}
        self.taken = taken_names(kernel)
        self.labels: dict[tuple[str, int], ir.Let] = {}

    def statement(self, s: ir.Stmt) -> Iterator[ir.Stmt]:
        """The labels that `s` needs first, then `s`."""
        new: list[ir.Let] = []
        value = self._expression(s.value, s, new)
        yield from new
        yield s if value is s.value else replace(s, value=value)

    def _expression(self, e: ir.Expr, s: ir.Stmt, new: list[ir.Let]) -> ir.Expr:
        children = ir.children(e)
        changed = tuple(self._expression(c, s, new) for c in children)
        if any(a is not b for a, b in zip(children, changed, strict=True)):
            e = with_children(e, changed)
        if isinstance(e, ir.Op) and e.fn in ("eq", "ne"):
            a, b = e.args
            if (extent := self._comparable(a, b)) is not None:
                return replace(e, args=(a, self._label(b, extent, s, new)))
            if (extent := self._comparable(b, a)) is not None:
                return replace(e, args=(self._label(a, extent, s, new), b))
        return e

    def _comparable(self, index: ir.Expr, label: ir.Expr) -> int | None:
        """The extent of the tile index that `index` is, where `label` is an i64 value without it."""
        axis = index.index.as_symbol if isinstance(index, ir.IndexValue) else None
        if axis not in self.extents or not isinstance(label, ir.Ref) or label.dtype != I64 or axis in label.axes:
            return None
        return self.extents[axis]

    def _label(self, e: ir.Expr, extent: int, s: ir.Stmt, new: list[ir.Let]) -> ir.Expr:
        assert isinstance(e, ir.Ref)  # `_comparable` looked
        key = e.name, extent
        if key not in self.labels:

            def op(fn: str, a: ir.Expr, b: ir.Expr) -> ir.Op:
                return ir.Op(fn, (a, b), BOOL, e.axes, e.span)

            def constant(value: int) -> ir.Const:
                return ir.Const(value, I64, e.span)

            inside = op("and", op("ge", e, constant(0)), op("lt", e, constant(extent)))
            label = ir.Op("where", (inside, e, constant(NONE)), I64, e.axes, e.span)
            value = Label(I32, label, I32, e.axes, e.span)
            self.labels[key] = ir.Let(fresh(f"{e.name}_label", self.taken), value, s.span)
            new.append(self.labels[key])
        let = self.labels[key]
        return ir.Ref(let.name, I32, e.axes, e.span)
