"""The calling convention: which arguments does the emitted function take, and how many programs are launched?

Both backends take the same list. Whatever the generated code has no use for is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from kgen.codegen.normalize import normalize
from kgen.codegen.program import Arg
from kgen.codegen.schedule import Schedule, Sums
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import I32, I64


def kernel_args(kernel: ir.Kernel, variant: Variant) -> tuple[Arg, ...]:
    """The arguments of `kernel` (in normal form or not): tensors, dimensions, strides, scalars, each in declared order.

    Left out are tensors that no live statement touches, dimensions that are compile-time or do not occur, and
    strides that are 1 by proof or whose subscript is always 0. A stride is i64 where a parallel index or
    a gathered value moves along it, i32 where only tile indices do (i64 too in a `wide` variant).
    A dimension of the row index is i32 (i64 if `wide`), any other i64.
    """
    normal = normalize(kernel, variant)
    uses = _Uses.of(normal)
    wide = I64 if variant.wide else I32
    rows = frozenset[str]().union(*(a.extent.symbols for a in normal.parallel))
    args = [Arg("tensor", t.name, t.dtype) for t in normal.tensors if t.name in uses.subscripts]
    dims = rows | uses.dims
    for d in normal.dims:
        rank = variant.star_rank(d)
        if d in dims or rank > 1:
            dtype = wide if d in rows else I64
            args += [Arg("dim", d, dtype, part=part) for part in range(rank)]
    parallel = {a.name for a in normal.parallel}
    for t in normal.tensors:
        for axis, subscripts in enumerate(uses.subscripts.get(t.name, ())):
            if all(isinstance(s, Poly) and s == Poly.const(0) for s in subscripts):
                continue
            tile_only = all(isinstance(s, Poly) and not s.symbols & parallel for s in subscripts)
            dtype = wide if tile_only else I64
            args += [Arg("stride", t.name, dtype, axis, part) for part in _strided(t, axis, variant)]
    return (*args, *(Arg("scalar", p.name, p.dtype) for p in normal.scalars if p.name in uses.scalars))


def grid_size(kernel: ir.Kernel, variant: Variant, schedule: Schedule, dims: Mapping[str, int]) -> int:
    """The number of programs: the product of the parallel extents over `schedule.rows`, rounded up.

    `dims` gives the dimensions' values; those that the variant knows may be left out. 0 where there is nothing to do.
    """
    known = {**dict(variant.dims), **dims}
    points = 1
    for a in kernel.parallel:
        points *= max(0, a.extent.evaluate(known))
    return -(-points // schedule.rows)


def split_count(kernel: ir.Kernel, schedule: Schedule, sums: Sums, dims: Mapping[str, int]) -> int:
    """Into how many shares the summed points go: as many as `schedule.programs` asks for, but none without a point."""
    over = _points(sums.over_axes(kernel), dims)
    steps = over if sums.columns else -(-over // schedule.rows)
    return max(1, min(most_shares(kernel, schedule, sums, dims), steps))


def most_shares(kernel: ir.Kernel, schedule: Schedule, sums: Sums, dims: Mapping[str, int]) -> int:
    """Into how many shares a sum goes that has points enough; `dims` has the sizes of what is kept."""
    return max(1, schedule.programs // max(1, _programs_a_share(kernel, schedule, sums, dims)))


def sum_grid(kernel: ir.Kernel, schedule: Schedule, sums: Sums, dims: Mapping[str, int]) -> int:
    """The number of programs of a stage; `dims` has the number of shares too."""
    return _programs_a_share(kernel, schedule, sums, dims) * (dims[sums.dim] if sums.split is not None else 1)


def _programs_a_share(kernel: ir.Kernel, schedule: Schedule, sums: Sums, dims: Mapping[str, int]) -> int:
    kept = _points(sums.kept_axes(kernel), dims)
    return -(-kept // schedule.rows) if sums.columns else kept


def _points(axes: tuple[ir.Axis, ...], dims: Mapping[str, int]) -> int:
    return prod(max(0, a.extent.evaluate(dims)) for a in axes)


def _strided(t: ir.Tensor, axis: int, variant: Variant) -> range:
    """The parts of dimension `axis` of `t` that have a stride argument; all but the last for a unit innermost one."""
    star = t.shape[0].as_symbol if t.star and axis == 0 else None
    parts = variant.star_rank(star) if star is not None else 1
    unit = axis == len(t.shape) - 1 and variant.tensor(t.name).unit
    return range(parts - 1 if unit else parts)


@dataclass
class _Uses:
    """What the statements of a kernel touch: the subscripts of each tensor, by dimension, and the names in index
    arithmetic."""

    subscripts: dict[str, list[list[Poly | ir.Expr]]] = field(default_factory=dict)
    dims: set[str] = field(default_factory=set)
    scalars: set[str] = field(default_factory=set)

    @staticmethod
    def of(kernel: ir.Kernel) -> _Uses:
        uses = _Uses()
        for access in ir.accesses(kernel.body):
            per_axis = uses.subscripts.setdefault(access.tensor, [[] for _ in access.at])
            for axis, s in enumerate(access.at):
                per_axis[axis].append(s)
                # A gathered subscript is compared with the extent that it must stay below.
                uses.dims |= s.symbols if isinstance(s, Poly) else kernel.tensor(access.tensor).shape[axis].symbols
        for s in kernel.body:
            for e in ir.walk(s.value):
                if isinstance(e, ir.IndexValue):
                    uses.dims |= e.index.symbols
                elif isinstance(e, ir.Scalar):
                    uses.scalars.add(e.name)
        return uses
