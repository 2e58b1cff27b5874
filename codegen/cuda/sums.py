"""A sum over programs: the loop over a program's share of the rows, with partial sums in registers around it.

In front of the loop stand the thread's number, the program's share and what is the same in all rows; the loop begins
with the indices and pointers of its row; behind it the threads that hold parts of the same sum combine them, and the
sums are stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from kgen.codegen.cuda import indices
from kgen.codegen.cuda.context import ROW, Context, Holder
from kgen.codegen.cuda.expr import constant
from kgen.codegen.cuda.prefetch import RowLoop, emit_prefetch
from kgen.codegen.cuda.reduce import Accumulator, define, finish
from kgen.codegen.cuda.text import CExpr, Lines, binary, compute_type, integer
from kgen.codegen.schedule import Sums
from kgen.dsl import ir

_WORD = re.compile(r"[A-Za-z_]\w*")


def emit_sums(
    ctx: Context,
    sums: Sums,
    steps: Callable[[bool], None],
    stores: Callable[[tuple[ir.Stmt, ...]], None],
    pointers: Callable[[], list[str]],
) -> list[str]:
    """Emit the kernel's body into `ctx.lines`; what stands in front of it is returned.

    `steps` emits the statements of a row, or (True) those that are the same in all rows, `stores` the given ones,
    `pointers` are the definitions of the pointers asked for so far.
    """
    added = [s for step in ctx.steps for s in step.body if isinstance(s, ir.Accumulate)]
    for s in added:
        ctx.partials[s.tensor, s.at] = _accumulator(ctx, sums, s)
    loop = _Loop(ctx, sums)
    header = loop.header()
    if ctx.schedule.cluster > 1:
        ctx.turn = ctx.names.fresh("turn")
        ctx.meets = True  # in front of the loop
    with ctx.capture() as once:
        steps(True)
    ctx.visible.append(set())
    with ctx.capture() as row:
        row.depth += 1
        if loop.rows is not None and not sums.columns and sums.split is not None and ctx.schedule.ahead:
            emit_prefetch(ctx, loop.rows, "the next row" if ctx.schedule.ahead == 1 else "a row further on")
        steps(False)
        if ctx.scheduled.barriers or (ctx.shared_bytes and ctx.turn is None):
            ctx.barrier()  # the next row writes the slots again
        if ctx.shared_bytes and ctx.turn is not None:
            ctx.lines.span = None
            ctx.lines.add(f"{ctx.turn} ^= 1;")
    ctx.visible.pop()
    ctx.meets = ctx.turn is not None and bool(ctx.shared_bytes or ctx.scheduled.barriers)
    ctx.behind_rows = True
    with ctx.capture() as behind:
        _combine(ctx, sums, added)
        stores(tuple(ir.Store(s.tensor, s.at, _partial(ctx, s), s.span) for s in added))
    inside = loop.inside()
    in_row = {*loop.names, *_defined(inside)}
    moving = [p for p in pointers() if in_row & set(_WORD.findall(p.split(" = ", 1)[1]))]
    share = loop.share()
    before, tiles = indices.thread_and_tiles(ctx)
    still = [p for p in pointers() if p not in moving]
    ctx.lines = Lines()
    if once.items:
        ctx.lines.extend(once)
        ctx.lines.gap()
    for s in added:
        ctx.lines.comment(s.span)
        acc = ctx.partials[s.tensor, s.at]
        define(ctx, acc.holder, constant(0, s.value.dtype))
    ctx.lines.span = None
    if ctx.meets:
        ctx.lines.add(f"{ctx.helper('cluster_wait')}();")
        if ctx.shared_bytes:
            ctx.lines.add(f"int {ctx.turn} = 0;  // which slots this row has: some may still read those of the last")
    if sums.down:
        ctx.lines.add("// From the last one back: what the launch before has read last is still in the cache.")
    with ctx.lines.block(header):
        for line in (*inside, *moving):
            ctx.lines.add(line)
        ctx.lines.extend(row)
    if behind.items:
        ctx.lines.gap()
    ctx.lines.extend(behind)
    return [*before, *share, *tiles, *still]


def sums_remark(ctx: Context, sums: Sums) -> str:
    """What the head of the file says about the grid."""
    over = ", ".join(sums.over)
    if sums.split is None:
        return f"Adds up the {sums.dim} partial sums, always in the same order."
    who = "programs" if ctx.schedule.cluster == 1 else "clusters"
    return f"Persistent: {sums.dim} {who} share out {over} and write a partial sum each, which another kernel adds up."


def _accumulator(ctx: Context, sums: Sums, s: ir.Accumulate) -> Accumulator:
    """The variable of a sum: of the shape of the thread's part of the target; a scalar where threads share out what is
    summed."""
    space = ctx.space(s)
    if ctx.flat and not sums.columns:
        space = frozenset()
    axes = ir.target_symbols(s)
    lanes = ctx.lane_axis(space, axes) is not None
    name = ctx.names.fresh(f"{s.tensor}_sum")
    holder = Holder(name, compute_type(s.value.dtype), ctx.looped_slots(space), lanes)
    ctx.holders[name] = holder
    return Accumulator(ir.Reduce("sum", s.value, (ROW,), s.value.dtype, axes, s.span), holder, None)


def _partial(ctx: Context, s: ir.Accumulate) -> ir.Ref:
    """The finished sum as a value over the indices of the target."""
    axes = ir.target_symbols(s) & ctx.indices
    return ir.Ref(ctx.partials[s.tensor, s.at].holder.name, s.value.dtype, axes, s.span)


def _combine(ctx: Context, sums: Sums, added: list[ir.Accumulate]) -> None:
    """Combine the threads that took different rows of the program's share."""
    if added and not sums.columns:
        ctx.lines.span = added[0].span
        finish(ctx, [ctx.partials[s.tensor, s.at] for s in added])


class _Loop:
    """The loop over a program's share of the summed points. `variable` is its index."""

    rows: RowLoop | None = None  # where it takes one row after the other; known once there is a header

    def __init__(self, ctx: Context, sums: Sums) -> None:
        self.ctx = ctx
        self.sums = sums
        self.over = sums.over_axes(ctx.kernel)
        self.blocks = sums.block_axes(ctx.kernel)
        self.one_by_one = sums.columns or (not ctx.flat and ctx.schedule.rows == 1)
        if not self.one_by_one:
            self.variable = ctx.temporary("first_p")
        elif len(self.over) == 1:
            self.variable = ctx.names[self.over[0].name]
        else:
            self.variable = ctx.temporary("q" if sums.columns else "p")

    def header(self) -> str:
        """`for (...)`."""
        ctx, v = self.ctx, self.variable
        points = ctx.points_of(self.over)
        if not self.sums.columns and (not self.one_by_one or not points.text.isalnum()):
            ctx.prologue.add("#points")
            points = CExpr(ctx.temporary("points"), ctx.index_type)
        first, step = integer(0), integer(1)
        if self.sums.split is not None:
            first, step = CExpr(ctx.names[self.sums.split], ctx.index_type), ctx.size(self.sums.dim, 0)
            ctx.prologue.add(self.sums.split)
        if self.one_by_one:
            far = step if ctx.schedule.ahead <= 1 else binary("*", integer(ctx.schedule.ahead), step)
            self.rows = RowLoop(v, points, far, self.over)
        else:
            rows = CExpr(indices.rows_constant(ctx), "int")
            first = binary("*", first, rows) if self.sums.split is not None else first
            step = binary("*", step, rows) if self.sums.split is not None else rows
        if self.sums.down:
            first = binary("-", binary("-", points, integer(1)), first)
            return f"for ({ctx.index_type} {v} = {first}; {v} >= 0; {v} -= {step})"
        forward = f"++{v}" if step.text == "1" else f"{v} += {step}"
        return f"for ({ctx.index_type} {v} = {first}; {v} < {points}; {forward})"

    def inside(self) -> list[str]:
        """What the loop begins with: the indices of the row."""
        ctx, need = self.ctx, self.ctx.prologue
        if self.one_by_one:
            if len(self.over) == 1:
                return []
            return indices.split(ctx, CExpr(self.variable, ctx.index_type), need, self.over)
        if ctx.flat:
            row = ctx.layout.row
            return indices.definitions(ctx, row, need) if row.slots == 1 else []
        return indices.row_of_group(ctx, CExpr(self.variable, ctx.index_type)) if need & {*self.names, "#live"} else []

    @property
    def names(self) -> set[str]:
        """Identifiers that change from row to row before the loop's own definitions."""
        return {self.variable, *(self.ctx.names[a.name] for a in self.over)}

    def share(self) -> list[str]:
        """Which share a program has, and its point of the indices that are not summed over."""
        ctx, need, type = self.ctx, self.ctx.prologue, self.ctx.index_type
        out: list[str] = []
        if self.sums.columns and need & (ctx.rowwise | {ROW}):
            out = indices.definitions(ctx, ctx.layout.row, need)
        if self.sums.split is None:
            number = replace(ctx.program(), type="int")
            return indices.split(ctx, number, need, self.blocks) if self.blocks else out
        block = CExpr(ctx.temporary("block"), type)
        out = indices.split(ctx, block, need, self.blocks) + out if self.blocks else out
        name, splits = ctx.names[self.sums.split], ctx.size(self.sums.dim, 0)
        if not self.sums.columns and not self.blocks:
            return [f"const {type} {name} = {ctx.program()};", *out]
        return [
            f"const {type} {name} = {ctx.program()} % {splits};",
            f"const {type} {block} = {ctx.program()} / {splits};",
            *out,
        ]


def _defined(lines: list[str]) -> set[str]:
    """The names that lines of the form `const type name = value;` define."""
    return {line.split(" = ", 1)[0].split()[-1] for line in lines}
