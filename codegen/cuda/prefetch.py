"""What is read next: asked for while a program works on the rows before, so that it lies in L2 by then.

Where threads wait for each other, and while they store, nothing that a program reads is in flight. Prefetches take no
registers, and nobody waits for them. A persistent program asks for its own next row; one that has a single row, for
that of the program that will follow it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.codegen.cuda import indices
from kgen.codegen.cuda.context import Context
from kgen.codegen.cuda.memory import outer_part, storage_type
from kgen.codegen.cuda.text import CExpr, binary, integer
from kgen.codegen.layout import contiguous
from kgen.dsl import ir
from kgen.dsl.affine import Poly

LINE = 128  # bytes that one prefetch brings


@dataclass(frozen=True)
class RowLoop:
    """Rows: `variable` runs up to, not including, `points`, and flattens the indices `over`; the row `far` on is asked
    for."""

    variable: str
    points: CExpr
    far: CExpr
    over: tuple[ir.Axis, ...]


def row_ahead(ctx: Context) -> RowLoop | None:
    """Of a program that has a single row: the row that it asks for, if the schedule says so."""
    schedule, axes = ctx.schedule, ctx.row_axes
    if not schedule.ahead or ctx.flat or schedule.rows > 1 or len(axes) != 1:
        return None
    ctx.prologue.add(axes[0].name)
    return RowLoop(ctx.names[axes[0].name], ctx.rows_total(), integer(schedule.ahead), axes)


def emit_prefetch(ctx: Context, loop: RowLoop, what: str) -> None:
    """Lines at the start of a row: they bring to L2 what another row, `what`, reads along one tile axis."""
    wanted = _streamed(ctx, loop)
    if not wanted:
        return
    ctx.prologue.add("#tid")
    ctx.lines.span = None
    ctx.lines.add(f"// To L2: {what}.")
    with ctx.block(f"if ({loop.variable} < {binary('-', loop.points, loop.far)})"):
        ahead = CExpr(ctx.names.fresh(f"{loop.variable}_ahead"), ctx.index_type)
        ctx.lines.add(
            f"const {ctx.index_type} {ahead} = {binary('+', CExpr(loop.variable, ctx.index_type), loop.far)};"
        )
        spelled = {loop.over[0].name: ahead.text}
        if len(loop.over) > 1:
            spelled = {a.name: ctx.names.fresh(f"{a.name}_ahead") for a in loop.over}
        with ctx.names.spelled(spelled):
            pointers = {load: _pointer(ctx, load) for load in wanted}
            used = {a.name for a in loop.over} if len(loop.over) > 1 else set[str]()
            for line in indices.split(ctx, ahead, used, loop.over):
                ctx.lines.add(line)
        for load, (name, value) in pointers.items():
            type = storage_type(ctx.kernel.tensor(load.tensor).dtype)
            ctx.lines.add(f"const {type}* {name} = {value};")
        for axis, elements in dict.fromkeys(_grain(ctx, load) for load in wanted):
            line, by = ctx.names.fresh(f"{axis}_line"), f"{ctx.team()} * {elements}"
            extent = ctx.extent_constant(axis)
            start = f"{ctx.temporary('tid')} * {elements}"
            with ctx.block(f"for (int {line} = {start}; {line} < {extent}; {line} += {by})"):
                for load, (name, _) in pointers.items():
                    if _grain(ctx, load) == (axis, elements):
                        ctx.lines.add(f"{ctx.helper('prefetch_l2')}({name} + {line});")
    ctx.lines.gap()


def _streamed(ctx: Context, loop: RowLoop) -> list[ir.Load]:
    """The loads that move with the row, and lie next to each other along the only tile axis that they have."""
    over = {a.name for a in loop.over}
    out: list[ir.Load] = []
    for s in (s for step in ctx.steps for s in step.body):
        load = s.value
        if not isinstance(s, ir.Let) or not isinstance(load, ir.Load) or load in out or not load.axes & over:
            continue
        axis = _axis(ctx, load)
        if axis is not None and contiguous(ctx.kernel.tensor(load.tensor), load.at, axis, ctx.variant):
            out.append(load)
    return out


def _axis(ctx: Context, load: ir.Load) -> str | None:
    """The tile axis whose index is the last subscript, if no other subscript is more than parallel indices."""
    *first, last = load.at
    axis = last.as_symbol if isinstance(last, Poly) else None
    if axis is None or axis not in {a.name for a in ctx.kernel.tiles}:
        return None
    plain = all(isinstance(s, Poly) and s.symbols & ctx.indices <= ctx.parallel for s in first)
    return axis if plain else None


def _grain(ctx: Context, load: ir.Load) -> tuple[str, int]:
    """(axis, elements of a line)."""
    axis = _axis(ctx, load)
    assert axis is not None  # `_streamed` looked
    return axis, LINE // ctx.kernel.tensor(load.tensor).dtype.itemsize


def _pointer(ctx: Context, load: ir.Load) -> tuple[str, CExpr]:
    """(name, value) of the pointer to the row ahead."""
    tensor = ctx.kernel.tensor(load.tensor)
    outer = outer_part(ctx, tensor, load.at, {})
    assert outer is not None  # it moves with the row
    return ctx.names.fresh(f"{tensor.name}_ahead"), binary("+", CExpr(ctx.names[tensor.name], "long long"), outer)
