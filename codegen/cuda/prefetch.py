"""What is read next: asked for while a program works on the rows before, so that it lies in L2 by then.

Where threads wait for each other, and while they store, nothing that a program reads is in flight. Prefetches take no
registers, and nobody waits for them. A persistent program asks for its own next row; one that has a single row, for
that of the program that will follow it on the device.

Asked for is what one row alone reads: loads with every index that rows flatten. What several rows share (a weight
`w[n]`, a table `cos[s, d]` under `parallel b, s`) is small beside that, and the first of them has brought it; what is
to stay in L2 (`kgen.codegen.kept`) is loaded with a policy, which prefetches do not have; and of what is looked up
(`cos[p, d]` with p a position) nobody knows the address yet.

It has to lie in runs without gaps: of `x[m, n]` a row has one, over n; of `q[b, s, i, d]` and `q[b, s, i, d + 64]` one
over both for each i. Runs that touch are one, so that each line is asked for once. Where a row has many, each is a line
at least, as lines would be asked for again and again; and in a persistent program nothing is asked for then, since
their addresses take registers that its sums need: the gradients of RoPE's tables spill 72 bytes a thread instead of 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kgen.codegen.cuda import indices
from kgen.codegen.cuda.context import Context
from kgen.codegen.cuda.memory import outer_part, storage_type
from kgen.codegen.cuda.text import CExpr, binary, integer
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


@dataclass(frozen=True)
class _Part:
    """What a row reads of `tensor` at the subscripts `at`, of all but the last dimension: of that, the elements from
    `first` up to, not including, `end`, for each value of the tile indices `outer` among `at`. `axis`: the tile axis
    along which they lie."""

    tensor: ir.Tensor
    at: tuple[Poly, ...]
    outer: tuple[str, ...]
    axis: str
    first: int
    end: int

    @property
    def elements(self) -> int:
        """Elements of a line."""
        return LINE // self.tensor.dtype.itemsize

    @property
    def lines(self) -> int:
        """Lines for one value of each outer index."""
        return -(-(self.end - self.first) // self.elements)

    @property
    def shape(self) -> tuple[object, ...]:
        """Parts for which this is equal have equally many lines."""
        return self.outer, self.axis, self.end - self.first, self.elements


def row_ahead(ctx: Context) -> RowLoop | None:
    """Of a program that has a single row: the row that it asks for, if the schedule says so."""
    schedule, axes = ctx.schedule, ctx.row_axes
    if not schedule.ahead or ctx.flat or schedule.rows > 1 or not axes:
        return None
    variable = ctx.temporary("p")
    if len(axes) == 1:
        ctx.prologue.add(axes[0].name)
        variable = ctx.names[axes[0].name]
    return RowLoop(variable, ctx.rows_total(), integer(schedule.ahead), axes)


def emit_prefetch(ctx: Context, loop: RowLoop, what: str) -> None:
    """Lines at the start of a row: they bring to L2 what another row, `what`, alone reads."""
    parts = _parts(ctx, loop)
    if not parts:
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
            pointers = {(p.tensor.name, p.at): _pointer(ctx, p) for p in parts}
            used = {a.name for a in loop.over} if len(loop.over) > 1 else set[str]()
            for line in indices.split(ctx, ahead, used, loop.over):
                ctx.lines.add(line)
        for (tensor, _), (name, value) in pointers.items():
            ctx.lines.add(f"const {storage_type(ctx.kernel.tensor(tensor).dtype)}* {name} = {value};")
        for shape in dict.fromkeys(p.shape for p in parts):
            alike = [p for p in parts if p.shape == shape]
            _emit_lines(ctx, [(CExpr(pointers[p.tensor.name, p.at][0], "long long"), p) for p in alike])
    ctx.lines.gap()


def _emit_lines(ctx: Context, asked: list[tuple[CExpr, _Part]]) -> None:
    """Ask for the lines of parts that have equally many, each behind its pointer to the row ahead."""
    part = asked[0][1]
    tid, elements = CExpr(ctx.temporary("tid"), "int"), part.elements
    if not part.outer:
        line, by = CExpr(ctx.names.fresh(f"{part.axis}_line"), "int"), f"{ctx.team()} * {elements}"
        length = part.end - part.first
        end = ctx.extent_constant(part.axis) if length == ctx.kernel.axis(part.axis).extent.constant else length
        head = f"for (int {line} = {tid} * {elements}; {line} < {end}; {line} += {by})"
    else:
        extents = [ctx.kernel.axis(axis).extent.constant for axis in part.outer]
        count = " * ".join([*map(ctx.extent_constant, part.outer), *([str(part.lines)] if part.lines > 1 else [])])
        ctx.lines.add(f"// {f'{part.lines} lines' if part.lines > 1 else 'A line'} of each {', '.join(part.outer)}.")
        line, head = tid, f"if ({tid} < {count})"
        if prod(extents) * part.lines > ctx.schedule.team:
            line = CExpr(ctx.names.fresh("line"), "int")
            head = f"for (int {line} = {tid}; {line} < {count}; {line} += {ctx.team()})"
    with ctx.block(head):
        for pointer, p in asked:
            place = binary("+", pointer, _offset(ctx, p, line) if p.outer else line)
            place = binary("+", place, integer(p.first)) if p.first else place
            ctx.lines.add(f"{ctx.helper('prefetch_l2')}({place});")


def _offset(ctx: Context, part: _Part, line: CExpr) -> CExpr:
    """Where line number `line` of a part with outer tile indices begins, from its first element of the row on."""
    total, rest = None, line
    if part.lines > 1:
        total = binary("*", binary("%", line, integer(part.lines)), integer(part.elements))
        rest = binary("/", line, integer(part.lines))
    for axis in reversed(part.outer):
        index = rest
        if axis != part.outer[0]:
            extent = CExpr(ctx.extent_constant(axis), "int")
            index, rest = binary("%", rest, extent), binary("/", rest, extent)
        stride = ctx.stride(part.tensor.name, part.at.index(Poly.sym(axis)))
        term = index if stride is None else binary("*", index, stride)
        total = term if total is None else binary("+", term, total)
    assert total is not None  # it has outer indices
    return total


def _pointer(ctx: Context, part: _Part) -> tuple[str, CExpr]:
    """(name, value) of the pointer to what the row ahead has of the tensor."""
    fixed = tuple(Poly.const(0) if s.as_symbol in part.outer else s for s in part.at)
    outer = outer_part(ctx, part.tensor, (*fixed, Poly.const(0)), {})
    assert outer is not None  # it moves with the row
    tensor = part.tensor.name
    return ctx.names.fresh(f"{tensor}_ahead"), binary("+", CExpr(ctx.names[tensor], "long long"), outer)


# ---- what is asked for ---------------------------------------------------------------------------------------------


def _parts(ctx: Context, loop: RowLoop) -> list[_Part]:
    """What only the row itself reads, and lies in runs."""
    over = {a.name for a in loop.over}
    last: dict[tuple[str, tuple[Poly, ...]], dict[tuple[str, int], set[int]]] = {}
    for s in (s for step in ctx.steps for s in step.body):
        load = s.value
        if not isinstance(s, ir.Let) or not isinstance(load, ir.Load) or s.name in ctx.scheduled.kept:
            continue
        if (along := _along(ctx, load)) is not None and over <= load.axes:
            *at, _ = (p for p in load.at if isinstance(p, Poly))
            axis, factor, offset = along
            last.setdefault((load.tensor, tuple(at)), {}).setdefault((axis, factor), set()).add(offset)
    out: list[_Part] = []
    for (tensor, at), subscripts in last.items():
        out += _merged(ctx, ctx.kernel.tensor(tensor), at, subscripts)
    return out


def _along(ctx: Context, load: ir.Load) -> tuple[str, int, int] | None:
    """(axis, factor, offset) where the last subscript is factor * axis + offset, of a tile axis along which memory is
    contiguous, and the others are made of parallel indices or are each another tile index; None otherwise."""
    tensor, tiles = ctx.kernel.tensor(load.tensor), {a.name for a in ctx.kernel.tiles}
    *first, last = load.at or (None,)
    if not isinstance(last, Poly) or len(last.symbols) != 1 or not ctx.variant.tensor(tensor.name).unit:
        return None
    (axis,) = last.symbols
    factor = last.coefficient(axis)
    if axis not in tiles or factor is None or not factor.is_constant or factor.constant < 1:
        return None
    met = {axis}
    for i, s in enumerate(first):
        if not isinstance(s, Poly):
            return None
        if s.symbols & tiles:
            parts = ctx.variant.star_rank(str(tensor.shape[0])) if tensor.star and i == 0 else 1
            if s.as_symbol is None or s.as_symbol in met or parts > 1:
                return None
            met.add(s.as_symbol)
    return axis, factor.constant, last.constant


def _merged(
    ctx: Context, tensor: ir.Tensor, at: tuple[Poly, ...], subscripts: dict[tuple[str, int], set[int]]
) -> list[_Part]:
    """The parts of `tensor` at `at`, where the last subscripts are `factor * axis + offset`, for (axis, factor) and
    offsets of `subscripts`. With a factor above 1 it takes as many offsets to read all elements of a run."""
    tiles = {a.name: a.extent.constant for a in ctx.kernel.tiles}
    outer = tuple(name for s in at if (name := s.as_symbol) in tiles and name is not None)
    if outer and ctx.scheduled.sums is not None:
        return []
    runs: list[tuple[int, int, str]] = []
    for (axis, factor), offsets in subscripts.items():
        whole = (k for k in sorted(offsets) if offsets >= {*range(k, k + factor)})
        runs += [(k, k + factor * tiles[axis], axis) for k in whole]
    out: list[_Part] = []
    for first, end, axis in sorted(runs, key=lambda run: run[:2]):
        if out and first <= out[-1].end:
            before = out.pop()
            first, end, axis = before.first, max(before.end, end), before.axis
        out.append(_Part(tensor, at, outer, axis, first, end))
    return [p for p in out if not outer or p.end - p.first >= p.elements]
