"""Which element does a thread hold? The definitions of thread digits and indices, and the masks at ragged edges."""

from __future__ import annotations

from dataclasses import replace

from kgen.codegen.cuda.context import ROW, Context
from kgen.codegen.cuda.memory import outer_part
from kgen.codegen.cuda.plan import Space
from kgen.codegen.cuda.text import COND, CExpr, binary, cast, integer
from kgen.codegen.layout import AxisLayout
from kgen.codegen.schedule import Loop
from kgen.dsl import ir


def masks(ctx: Context, space: Space) -> list[str]:
    """The conditions under which a vector of `space` exists: its slots may reach beyond the extent."""
    out: list[str] = []
    for a in ctx.ordered(space):
        reach = a.slots * a.threads * a.vector
        if a.name == ROW:
            if reach > a.extent:
                out.append(f"{ctx.thread(a.digit)} < {a.extent // a.vector}")
            ctx.frame.symbols.add(ROW)
            ctx.prologue |= {"#points"} if a.slots > 1 else {"#points", ROW}
            out.append(f"{ctx.temporary('p')} < {ctx.temporary('points')}")
            continue
        whole = ctx.kernel.axis(a.name).extent.constant
        if ctx.at_edge and a.peel is not None:
            out.append(at_edge(ctx))
            continue
        if ctx.loop is not None and ctx.loop[0] == a.name and ctx.loop[1] is not None:
            if reach > a.extent:
                out.append(f"{ctx.base(a.name)} < {ctx.loop[1]} + {ctx.chunk_constant(a.name)}")
            if a.peel is not None:
                out.append(f"{ctx.base(a.name)} < {ctx.peeled('end')}")
            elif whole % a.extent:
                out.append(f"{ctx.base(a.name)} < {ctx.extent_constant(a.name)}")
        elif a.peel is not None:
            out.append(f"{ctx.base(a.name)} < {ctx.peeled('end')}")
        elif reach > whole:
            out.append(f"{ctx.base(a.name)} < {ctx.extent_constant(a.name)}")
    return out


def chunks(ctx: Context, step: Loop) -> str:
    """The header of a pass over the chunks of an axis: those of a peeled one begin with its first whole vector."""
    v, first, end = ctx.temporary(f"{step.axis}_chunk"), "0", ctx.extent_constant(step.axis)
    if ctx.peel is not None:
        first, end = "0" if ctx.peel.lead is None else ctx.peeled("head"), ctx.peeled("end")
    by = ctx.chunk_constant(step.axis)
    if not step.down:
        return f"for (int {v} = {first}; {v} < {end}; {v} += {by})"
    if first == "0":
        return f"for (int {v} = ({end} - 1) / {by} * {by}; {v} >= 0; {v} -= {by})"
    last = f"{first} + ({end} - 1 - {first}) / {by} * {by}"
    return f"for (int {v} = {last}; {v} >= {first}; {v} -= {by})"


def at_edge(ctx: Context) -> str:
    """The condition under which the thread has an element of the edge of a peeled row."""
    assert ctx.peel is not None  # the caller looked
    return f"{ctx.peeled('edge')} < {ctx.extent_constant(ctx.peel.axis)}"


def peeled(ctx: Context) -> list[str]:
    """Where the whole vectors of a peeled row begin and end, and which element around them the thread has: to be
    defined behind the pointers to rows."""
    if ctx.peel is None:
        return []
    (a,) = ctx.layout.axes
    head, end, edge, extent = (*map(ctx.peeled, ("head", "end", "edge")), ctx.extent_constant(a.name))
    thread, lead, v = ctx.thread(a.digit), ctx.peel.lead, a.vector
    mine = f"// the one of this thread, if < {extent}"
    if lead is None:
        out = [
            f"// Aligned vectors of the row end at {end}; each element behind them has a thread.",
            f"const int {end} = {extent} / {v} * {v};",
            f"const int {edge} = {end} + {thread};  {mine}",
        ]
    else:
        # From offsets, as the tensor begins aligned: of a pointer that is made a number the compiler believes anything.
        offset = outer_part(ctx, lead.tensor, lead.at, {}) or integer(0)
        count = f"({v} - {binary('%', offset, integer(v))}) % {v}"
        if ctx.kernel.axis(a.name).extent.constant < v - 1:
            count = f"min(int({count}), {extent})"
        less = f" - {v}" if ctx.peel.shifted else ""
        out = [
            f"// Aligned vectors of the row lie from {head} up to {end}; each element around them has a thread.",
            f"const int {head} = {count};",
            f"const int {end} = {head} + ({extent} - {head}) / {v} * {v}{less};"
            + (f"  // one less, as load_shifted reads {v} elements more" if less else ""),
            f"const int {edge} = {thread} < {head} ? {thread} : {end} + ({thread} - {head});  {mine}",
        ]
    if a.name in ctx.prologue:
        out.append(f"const int {ctx.names[a.name]} = {_tile_index(ctx, a)};")
    return out


def definitions(ctx: Context, axis: AxisLayout, used: set[str]) -> list[str]:
    """The lines that define the index along `axis` in the current slot; along the row, those of `used` made of it."""
    if axis.name != ROW:
        return [f"const int {ctx.names[axis.name]} = {_tile_index(ctx, axis)};"] if axis.name in used else []
    position = _position(ctx, axis)
    type = ctx.index_type
    p = ctx.temporary("p")
    first = first_row(ctx)
    start = binary("+", first, position) if position.text != "0" else first
    return [f"const {type} {p} = {start};", *split(ctx, CExpr(p, type), used, ctx.row_axes)]


def prologue(ctx: Context) -> list[str]:
    """What the body turned out to need, defined at the top of the kernel."""
    need = ctx.prologue
    tail: list[str] = []
    if ctx.flat:
        if need & (ctx.parallel | {ROW}):
            tail = definitions(ctx, ctx.layout.row, need)
    elif need & (ctx.parallel | {"#live"}):
        tail = _row_index(ctx, ctx.schedule.rows)
    before, indices = thread_and_tiles(ctx)
    return before + tail + indices


def thread_and_tiles(ctx: Context) -> tuple[list[str], list[str]]:
    """What the body needs of the thread's number and the number of points, and of the tile indices."""
    need = ctx.prologue
    out: list[str] = []
    indices: list[str] = []
    for a in ctx.layout.axes:
        if a.name in need and a.peel is None:
            indices.append(f"const int {ctx.names[a.name]} = {_tile_index(ctx, a)};")
    # Digits are asked for by the lines above, so they are defined last and written first.
    digits: list[str] = []
    for d, count in enumerate(ctx.layout.digits):
        if f"#digit{d}" in need:
            digits.append(f"const int {ctx.thread(d)} = {_digit(ctx, d, count)};")
    tid = ctx.temporary("tid")
    if need & {"#lane", "#warp"} or digits:
        need.add("#tid")
    if "#tid" in need:
        out.append(f"const int {tid} = {ctx.number()};")
    out += digits
    if "#lane" in need:
        out.append(f"const int {ctx.temporary('lane')} = {tid} % 32;")
    if "#warp" in need:
        out.append(f"const int {ctx.temporary('warp')} = {tid} / 32;")
    if "#points" in need:
        out.append(f"const {ctx.index_type} {ctx.temporary('points')} = {ctx.rows_total()};")
    return out, indices


def _digit(ctx: Context, d: int, count: int) -> str:
    stride = ctx.layout.stride(d)
    tid = ctx.temporary("tid")
    text = tid if stride == 1 else f"{tid} / {stride}"
    return text if stride * count == ctx.schedule.team else f"{text} % {count}"


def _position(ctx: Context, a: AxisLayout) -> CExpr:
    """The first element of the thread's vector in the current slot."""
    thread = CExpr(ctx.thread(a.digit), "int") if a.threads > 1 else None
    total = thread
    if a.slots > 1:
        threads = ctx.team() if a.threads == ctx.schedule.team else integer(a.threads)
        slot = CExpr(ctx.slot(a.name), "int")
        total = binary("*", slot, threads) if a.threads > 1 else slot
        if thread is not None:
            total = binary("+", total, thread)
    if total is None:
        return integer(0)
    return binary("*", total, integer(a.vector)) if a.vector > 1 else total


def _tile_index(ctx: Context, a: AxisLayout) -> CExpr:
    position = _position(ctx, a)
    if ctx.loop is not None and ctx.loop[0] == a.name and ctx.loop[1] is not None:
        first = CExpr(ctx.loop[1], "int")
    elif a.peel is not None and a.peel.lead is not None:
        first = CExpr(ctx.peeled("head"), "int")
    else:
        return position
    return binary("+", first, position) if position.text != "0" else first


def first_row(ctx: Context) -> CExpr:
    """The row index of the program's first row, in the current step of a loop over rows."""
    if ctx.scheduled.sums is not None and not ctx.scheduled.sums.columns:
        return CExpr(ctx.temporary("first_p"), ctx.index_type)
    return binary("*", _block(ctx), CExpr(rows_constant(ctx), "int"))


def _block(ctx: Context) -> CExpr:
    if ctx.scheduled.sums is not None and ctx.scheduled.sums.split is not None:
        ctx.prologue.add("#block")
        return CExpr(ctx.temporary("block"), ctx.index_type)
    program = ctx.program()
    return cast("long long", program) if ctx.variant.wide else replace(program, type="int")


def rows_constant(ctx: Context) -> str:
    """The named constant that is the number of rows a program takes at a time."""
    ctx.constants["ROWS"] = (str(ctx.schedule.rows), "")
    return "ROWS"


def _row_index(ctx: Context, rows: int) -> list[str]:
    """The row of a row kernel and its parallel indices. Rows beyond the last repeat it, but store nothing."""
    type, p = ctx.index_type, ctx.temporary("p")
    single = ctx.kernel.parallel[0].name if len(ctx.kernel.parallel) == 1 else None
    if rows == 1:
        out: list[str] = []
        start = _block(ctx)
    else:
        points, first = ctx.rows_total(), ctx.names.fresh("first_p")
        row = CExpr(ctx.thread(ctx.layout.row.digit), "int")
        if not points.text.isalnum():
            ctx.prologue.add("#points")
            points = CExpr(ctx.temporary("points"), type)
        live = ctx.temporary("live")
        out = [
            f"const {type} {first} = {binary('+', binary('*', _block(ctx), CExpr(rows_constant(ctx), 'int')), row)};",
            f"const bool {live} = {first} < {points};",
        ]
        start = CExpr(f"{live} ? {first} : {points} - 1", type, COND)
    if not ctx.prologue & ctx.parallel:
        return out
    if single is not None:
        return [*out, f"const {type} {ctx.names[single]} = {start};"]
    return [*out, f"const {type} {p} = {start};", *split(ctx, CExpr(p, type), ctx.prologue, ctx.row_axes)]


def row_of_group(ctx: Context, first: CExpr) -> list[str]:
    """In a loop over groups of rows, the first of which is `first`: the thread's row and its parallel indices."""
    type, p, live = ctx.index_type, ctx.temporary("p"), ctx.temporary("live")
    points = CExpr(ctx.temporary("points"), type)
    row = CExpr(ctx.thread(ctx.layout.row.digit), "int")
    out = [f"const bool {live} = {binary('+', first, row)} < {points};"]
    if not ctx.prologue & ctx.rowwise:
        return out
    start = f"{live} ? {binary('+', first, row)} : {points} - 1"
    if len(ctx.row_axes) == 1:
        return [*out, f"const {type} {ctx.names[ctx.row_axes[0].name]} = {start};"]
    return [*out, f"const {type} {p} = {start};", *split(ctx, CExpr(p, type), ctx.prologue, ctx.row_axes)]


def split(ctx: Context, p: CExpr, used: set[str], axes: tuple[ir.Axis, ...]) -> list[str]:
    """Those of the parallel indices `axes` that are in `used`, from their flattened index `p`, the last fastest."""
    out: list[str] = []
    rest = p
    for k in range(len(axes) - 1, -1, -1):
        extent = ctx.extent(axes[k])
        if axes[k].name in used:
            value = binary("%", rest, extent) if k else rest
            out.insert(0, f"const {p.type} {ctx.names[axes[k].name]} = {value};")
        if k:
            rest = binary("/", rest, extent)
    return out
