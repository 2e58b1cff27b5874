"""Blocks: which dimensions has the block that holds a value, how long are they, and which of their lanes count?

A value with the indices S is a block with one dimension for the program's rows (if S has a parallel index and the
program takes several), then one for each tile index in S in order of declaration. Sizes are powers of two; where an
extent is not, the lanes beyond it are masked.

A flat kernel over several indices whose innermost extent is a multiple of a vector has two dimensions instead of one:
vectors and lanes of a vector. The indices are then divided out once a vector, and the lanes are contiguous by
construction.

Partial results of a loop (`kgen.codegen.schedule.Partial`) have one dimension: the threads of the program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from kgen.codegen.schedule import Scheduled
from kgen.codegen.triton.text import Text
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.affine import Poly

ROW, LANE, THREAD = "<row>", "<lane>", "<thread>"  # not identifiers, so that no index can be called like them


@dataclass(frozen=True)
class Dim:
    """A dimension of a block: `size` lanes, a power of two, of which `extent` count (None: the rest of a run-time
    count). `ragged` says whether lanes have to be masked."""

    key: str
    size: int
    extent: int | None
    ragged: bool


@dataclass(frozen=True)
class Value:
    """An expression and the keys of its block's dimensions, in canonical order; no dimensions is a scalar."""

    text: Text
    dims: tuple[str, ...] = ()


class Blocks:
    """The block dimensions of one scheduled kernel."""

    def __init__(self, scheduled: Scheduled) -> None:
        kernel, rows = scheduled.kernel, scheduled.schedule.rows
        self.flat = not kernel.tiles
        self.rows = rows
        self.vector = flat_vector(scheduled) if self.flat else 1
        self.looped = {a.name for a in kernel.tiles if _chunk(scheduled, a) is not None}
        self.axes = frozenset(a.name for a in kernel.axes)
        self._parallel = {a.name for a in kernel.parallel}
        # The parallel indices that the rows of a program run over; the others are the same in the whole program.
        self._rowwise = {a.name for a in scheduled.row_axes}
        self._innermost = scheduled.row_axes[-1].name if scheduled.row_axes else None
        dims: list[Dim] = []
        if kernel.parallel and rows > 1:
            # Whether the last program is full depends on the run-time number of rows, if it is not known.
            points = prod((a.extent for a in scheduled.row_axes), start=Poly.const(1))
            ragged = not points.is_constant or points.constant % rows != 0
            dims.append(Dim(ROW, rows // self.vector, None, ragged))
            if self.vector > 1:
                dims.append(Dim(LANE, self.vector, self.vector, ragged=False))
        for a in kernel.tiles:
            extent = a.extent.constant
            take = _chunk(scheduled, a) or extent
            size = power_of_two_above(take)
            dims.append(Dim(a.name, size, extent, ragged=extent % take != 0 or size != take))
        if self.looped:
            # What a thread has of a chunk, by thread (`kgen.codegen.schedule.Partial`).
            dims.append(Dim(THREAD, scheduled.schedule.threads, scheduled.schedule.threads, ragged=False))
        self.dims = {d.key: d for d in dims}

    def of(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The dimensions of a value with the indices `axes`."""
        keys: set[str] = set()
        for a in axes:
            if a not in self._parallel:
                keys.add(a)
            elif self.vector > 1 and a == self._innermost:
                keys |= {ROW, LANE}
            elif a in self._rowwise:
                keys.add(ROW)
        return self.order(keys)

    def order(self, keys: Iterable[str]) -> tuple[str, ...]:
        """`keys` in canonical order, those without a dimension (the row of a one-row program) left out."""
        wanted = set(keys)
        return tuple(k for k in self.dims if k in wanted)

    def shape(self, dims: tuple[str, ...]) -> str:
        """The shape of a block, as Python source."""
        sizes = [str(self.dims[k].size) for k in dims]
        return f"[{', '.join(sizes)}]"


def align(value: Value, dims: tuple[str, ...]) -> Text:
    """`value` with `[:, None]` put in such that it broadcasts to a block of `dims`, which hold its own."""
    if not value.dims or value.dims == dims:
        return value.text
    inside = ", ".join(":" if k in value.dims else "None" for k in dims)
    return Text(f"{value.text.within(9)}[{inside}]")


def power_of_two_above(n: int) -> int:
    """The smallest power of two that is at least `n` (1 for an empty extent)."""
    return 1 << max(0, n - 1).bit_length()


def power_of_two_factor(p: Poly, variant: Variant) -> int:
    """A power of two, at most 16, that divides `p` for every value of its indices and run-time dimensions."""
    multiples = dict(variant.multiples)
    out = 16
    for mono, c in p.terms:
        factor = c & -c
        for atom in mono:
            factor *= multiples.get(getattr(atom, "name", ""), 1)
        out = min(out, factor)
    return out


def _chunk(scheduled: Scheduled, axis: ir.Axis) -> int | None:
    chunk = scheduled.schedule.chunk(axis.name)
    return chunk if chunk is not None and chunk < axis.extent.constant else None


def flat_vector(scheduled: Scheduled) -> int:
    """Lanes of a vector in a flat kernel: 16 bytes of the narrowest tensor along the innermost index, as far as the
    extent divides; 1 where one index is all there is, as a plain block is then contiguous already."""
    variant = scheduled.variant
    if len(scheduled.row_axes) < 2:
        return 1
    inner = scheduled.row_axes[-1]
    sizes = [
        t.dtype.itemsize
        for t, at in accesses(scheduled)
        if at
        and variant.tensor(t.name).unit
        and isinstance(at[-1], Poly)
        and at[-1].coefficient(inner.name) == Poly.const(1)
    ]
    if not sizes:
        return 1
    return min(16 // min(sizes), power_of_two_factor(inner.extent, variant), scheduled.schedule.rows)


def accesses(scheduled: Scheduled) -> list[tuple[ir.Tensor, tuple[Poly | ir.Expr, ...]]]:
    """Every load and store of the program: tensor and subscripts."""
    body = (s for step in scheduled.steps for s in step.body)
    return [(scheduled.kernel.tensor(a.tensor), a.at) for a in ir.accesses(body)]
