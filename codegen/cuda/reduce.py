"""How do threads combine their parts of a reduction? Within a thread, then a warp by shuffles, then the program.

A reduction over some axes combines the threads whose numbers differ in the bits of those axes' digits. Bits below 5 are
lanes of one warp: shuffles. The others are warps: one slot a warp in shared memory, one barrier, and every
thread combines the slots again in the same order, so all have the same bits. Reductions that are finished at one
place share the barrier.

In a cluster warps are numbered through all its blocks, the rank of the block first. Each warp writes its slot into the
shared memory of every block, so that behind the barrier, which is then the cluster's, all is read from the own one. In
a loop over rows two sets of slots take turns: what is written two rows later, all have read, as they have met since.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

from kgen.codegen.cuda.context import Context, Holder
from kgen.codegen.cuda.expr import constant, exponential, extreme
from kgen.codegen.cuda.text import CExpr, binary, cast, compute_type
from kgen.codegen.online import largest
from kgen.codegen.schedule import Partial
from kgen.dsl import ir
from kgen.dsl.dtypes import BOOL, DType

WARP = 32
# Up to so many warps each thread adds up all slots; above, a lane takes one slot and the warp shuffles.
SERIAL_SLOTS = 8
SHARED_LIMIT = 40 << 10  # bytes of slots at one place; beyond it they are used in turns


@dataclass(frozen=True)
class Accumulator:
    """A reduction and its variable. `at`: for argmax and argmin, the variable of the position, which is the result.
    `against`: for a partial sum of exponentials in a loop, the variable of the shift that they were taken against."""

    reduce: ir.Reduce
    holder: Holder
    at: Holder | None
    against: str | None = None

    @property
    def dtype(self) -> DType:
        """The dtype of what is combined."""
        return self.reduce.arg.dtype if self.at is not None else self.reduce.dtype


def identity(kind: str, dtype: DType) -> CExpr:
    """The value that leaves the reduction unchanged."""
    if kind in ("any", "all"):
        return constant(kind == "all", BOOL)
    if kind in ("sum", "prod"):
        return constant(int(kind == "prod"), dtype)
    low = kind in ("max", "argmax")
    if dtype.kind == "float":
        return constant(float("-inf") if low else float("inf"), dtype)
    if dtype == BOOL:
        return constant(not low, BOOL)
    return constant(-(1 << (dtype.bits - 1)) if low else (1 << (dtype.bits - 1)) - 1, dtype)


def declare(ctx: Context, let: ir.Let, start: CExpr | None = None) -> Accumulator:
    """Define the variable of a reduction, at its identity or at `start`."""
    e = let.value
    assert isinstance(e, ir.Reduce)
    ranked = e.kind in ("argmax", "argmin")
    dtype = e.arg.dtype if ranked else e.dtype
    rest = ctx.space(let) - frozenset(e.over)
    slots, lanes = ctx.looped_slots(rest), ctx.lane_axis(rest, e.axes) is not None
    name = ctx.names[let.name]
    best = Holder(ctx.names.fresh(f"{let.name}_best") if ranked else name, compute_type(dtype), slots, lanes)
    at = Holder(name, "int", slots, lanes) if ranked else None
    define(ctx, best, start or identity(e.kind, dtype))
    if at is not None:
        define(ctx, at, CExpr("0x7fffffff", "int"))
    ctx.holders[let.name] = at or best
    return Accumulator(e, best, at, _against(ctx, e, best))


def _against(ctx: Context, e: ir.Reduce, total: Holder) -> str | None:
    if not isinstance(e, Partial) or e.shift is None:
        return None
    name = ctx.names.fresh(f"{total.name}_against")
    lowest = constant(-largest(e.dtype), e.dtype)
    ctx.lines.add(f"{total.type} {name} = {lowest};  // what the sum so far is taken against")
    return name


def rescale(ctx: Context, acc: Accumulator) -> None:
    """Lines in front of a chunk: what is summed so far is taken against the shift of this chunk."""
    assert isinstance(acc.reduce, Partial) and acc.reduce.shift is not None  # as `against` says
    shift = ctx.ref(acc.reduce.shift)
    before = binary("-", CExpr(str(acc.against), acc.holder.type), shift)
    if ctx.loop is None or ctx.loop[1] is not None:  # else nothing is summed yet
        ctx.lines.add("// the sum so far, against the maximum as it is now")
        ctx.lines.add(f"{acc.holder.name} *= {exponential(before, acc.dtype, ctx)};")
    ctx.lines.add(f"{acc.against} = {shift};")


def define(ctx: Context, h: Holder, start: CExpr) -> None:
    """Define the variable of `h`, every element at `start`."""
    shape = array_shape(ctx, h)
    if not shape:
        ctx.lines.add(f"{h.type} {h.name} = {start};")
        return
    sizes = "".join(f"[{n}]" for n in shape)
    if start.text in ("0", "0.0f", "0.0", "false"):
        ctx.lines.add(f"{h.type} {h.name}{sizes} = {{}};")
        return
    ctx.lines.add(f"{h.type} {h.name}{sizes};")
    for_each(ctx, h, lambda where: ctx.lines.add(f"{h.name}{where} = {start};"))


def array_shape(ctx: Context, h: Holder) -> tuple[int, ...]:
    """The sizes of the variable of `h`, a pack or lanes innermost left out if it is a pack."""
    lanes = (_vector(ctx, h),) if h.lanes and h.pack is None else ()
    return (*(ctx.axis(a).slots for a in h.slots), *lanes)


def _vector(ctx: Context, h: Holder) -> int:
    return max(a.vector for a in ctx.layout.axes) if not ctx.flat else ctx.layout.row.vector


def for_each(ctx: Context, h: Holder, body: Callable[[str], None]) -> None:
    """Lines for each element of `h`: `body` is called with the subscripts, inside the loops over them."""
    loops = [(ctx.slot(a), ctx.axis(a).slots) for a in h.slots]
    if h.lanes:
        loops.append((ctx.temporary("v"), _vector(ctx, h)))
    _loops(ctx, loops, lambda: body("".join(f"[{name}]" for name, _ in loops)))


def _loops(ctx: Context, loops: list[tuple[str, int]], body: Callable[[], None]) -> None:
    if not loops:
        body()
        return
    (name, count), *rest = loops
    ctx.lines.add("#pragma unroll")
    with ctx.block(f"for (int {name} = 0; {name} < {count}; ++{name})"):
        _loops(ctx, rest, body)


def take(ctx: Context, acc: Accumulator, where: str, value: CExpr, position: CExpr | None) -> str:
    """The statement that takes `value` (at `position`) into element `where` of the accumulator."""
    name = acc.holder.name + where
    match acc.reduce.kind:
        case "sum":
            return f"{name} += {value};"
        case "prod":
            return f"{name} *= {value};"
        case "any":
            return f"{name} |= {value};"
        case "all":
            return f"{name} &= {value};"
        case "max" | "min":
            if acc.dtype == BOOL:
                return f"{name} {'|' if acc.reduce.kind == 'max' else '&'}= {value};"
            fn = "maximum" if acc.reduce.kind == "max" else "minimum"
            return f"{name} = {extreme(fn, CExpr(name, acc.holder.type), value, acc.dtype, ctx)};"
    assert acc.at is not None
    helper = ctx.helper(f"{acc.reduce.kind}_take")
    if value.type != acc.holder.type:
        value = cast(acc.holder.type, value)  # an index may be an int where the language has an i64
    return f"{helper}({name}, {acc.at.name}{where}, {value}, {position});"


# ---- between threads -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bits:
    """Bits `low` up to, not including, `high` of the thread number (as powers of two)."""

    low: int
    high: int


def _bits(ctx: Context, acc: Accumulator) -> list[_Bits]:
    """The bits of the thread number over which `acc` is combined, neighbours joined, lowest first."""
    lay = ctx.layout
    out: list[_Bits] = []
    for d in sorted({ctx.axis(a).digit for a in acc.reduce.over}):
        low, high = lay.stride(d), lay.stride(d) * lay.digits[d]
        if low == high:
            continue
        if out and out[-1].high == low:
            out[-1] = _Bits(out[-1].low, high)
        else:
            out.append(_Bits(low, high))
    return out


def finish(ctx: Context, accumulators: list[Accumulator], meanwhile: Callable[[], None] | None = None) -> bool:
    """Combine the threads' parts of the given reductions, the partial ones left out; whether that took a barrier, in
    front of which `meanwhile` emits what goes on while threads wait there."""
    slots: list[Slots] = []
    for acc in accumulators:
        if isinstance(acc.reduce, Partial):
            continue
        bits = _bits(ctx, acc)
        within = [_Bits(b.low, min(b.high, WARP)) for b in bits if b.low < WARP]
        if within:
            for_each(ctx, acc.holder, lambda where, acc=acc, within=within: _shuffle(ctx, acc, where, within))
        above = [_Bits(max(b.low // WARP, 1), b.high // WARP) for b in bits if b.high > WARP]
        if above:
            slots.append(_slots(ctx, acc, within, above))
    if not slots:
        return False
    if any(s.remote for s in slots):
        ctx.meet()
    if meanwhile is not None:
        meanwhile()
    sets = 1 if ctx.turn is None else 2
    if sum(s.bytes for s in slots) * sets <= SHARED_LIMIT:
        turn = f"[{ctx.turn}]" if sets > 1 else ""
        for s in slots:
            s.declare(ctx, (sets, *s.shape) if sets > 1 else s.shape)
        for s in slots:
            for_each(ctx, s.acc.holder, lambda where, s=s: s.write(ctx, where, turn + where))
        _barrier(ctx, slots)
        for s in slots:
            for_each(ctx, s.acc.holder, lambda where, s=s: s.read(ctx, where, turn + where))
    else:
        for s in slots:
            s.declare(ctx, ())
            for_each(ctx, s.acc.holder, lambda where, s=s: s.in_turn(ctx, where))
    return True


def _barrier(ctx: Context, slots: list[Slots]) -> None:
    """Behind what was written to `slots`: the threads meet that read them."""
    if ctx.schedule.cluster == 1 or any(s.remote for s in slots) or ctx.unsynced:
        ctx.barrier()
    else:
        ctx.lines.add("__syncthreads();")


def _slots(ctx: Context, acc: Accumulator, within: list[_Bits], above: list[_Bits]) -> Slots:
    """The shared memory of `acc`: which lanes of a warp write, and where."""
    lane = ctx.temporary("lane")
    if len(within) == 1:
        low, high = within[0].low, within[0].high
        lanes = WARP * low // high
        over = (f"{lane} / {high} * {low}" if low > 1 else f"{lane} / {high}") if high < WARP else ""
        below = f"{lane} % {low}" if low > 1 else ""
        number = " + ".join(t for t in (over, below) if t)
        writer = f"{lane} == 0" if lanes == 1 else f"{lane} / {low} % {high // low} == 0"
    else:  # every lane has a value of its own, or says again what another says
        lanes, number, writer = WARP, lane, ""
    holders = (acc.holder, acc.at) if acc.at else (acc.holder,)
    arrays = tuple((ctx.names.fresh(f"{h.name}_slots"), h) for h in holders)
    shape = array_shape(ctx, acc.holder)
    warps = ctx.schedule.team // WARP
    remote = above[-1].high * WARP > ctx.schedule.threads
    return Slots(acc, above, warps, lanes, number, writer, arrays, shape, remote)


def _shuffle(ctx: Context, acc: Accumulator, where: str, ranges: list[_Bits]) -> None:
    bit = ctx.temporary("bit")
    for r in ranges:
        until = f"{bit} > 0" if r.low == 1 else f"{bit} >= {r.low}"
        if r.high == 2 * r.low:
            with ctx.block("") if acc.at is not None else nullcontext():
                _from_lane(ctx, acc, where, str(r.low))
            continue
        ctx.lines.add("#pragma unroll")
        with ctx.block(f"for (int {bit} = {r.high // 2}; {until}; {bit} /= 2)"):
            _from_lane(ctx, acc, where, bit)


def _from_lane(ctx: Context, acc: Accumulator, where: str, bit: str) -> None:
    def other(h: Holder) -> CExpr:
        value = f"(int){h.name}{where}" if h.type == "bool" else f"{h.name}{where}"
        return CExpr(f"__shfl_xor_sync(0xffffffff, {value}, {bit})", "int" if h.type == "bool" else h.type)

    if acc.at is None:
        ctx.lines.add(take(ctx, acc, where, other(acc.holder), None))
        return
    # Both are fetched before either changes.
    x, i = ctx.temporary("x"), ctx.temporary("i")
    ctx.lines.add(f"const {acc.holder.type} {x} = {other(acc.holder)};")
    ctx.lines.add(f"const int {i} = {other(acc.at)};")
    ctx.lines.add(take(ctx, acc, where, CExpr(x, acc.holder.type), CExpr(i, "int")))


_SIZES = {"float": 4, "int": 4, "double": 8, "long long": 8, "bool": 1}


@dataclass(frozen=True)
class Slots:
    """The slots in shared memory of one reduction: `[elements of the accumulator][lanes][warps]`.

    `above`: the bits of the warp number that are combined. `lanes`: how many lanes of a warp hold different values;
    `number` is the lane's number among them, `writer` the condition under which it writes (empty: always). `remote`:
    whether warps of other blocks of the cluster have parts, so that slots are written to all of its blocks.
    """

    acc: Accumulator
    above: list[_Bits]
    warps: int
    lanes: int
    number: str
    writer: str
    arrays: tuple[tuple[str, Holder], ...]
    shape: tuple[int, ...]
    remote: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of shared memory for all elements."""
        return prod(self.shape) * self.warps * self.lanes * sum(_SIZES[h.type] for _, h in self.arrays)

    def declare(self, ctx: Context, shape: tuple[int, ...]) -> None:
        """The arrays, for elements of `shape`."""
        sizes = (*shape, *((self.lanes,) if self.lanes > 1 else ()), self.warps)
        for name, h in self.arrays:
            ctx.lines.add(f"__shared__ {h.type} {name}{''.join(f'[{n}]' for n in sizes)};")
            ctx.shared_bytes += prod(sizes) * _SIZES[h.type]

    def write(self, ctx: Context, where: str, slot: str) -> None:
        """One slot a warp: element `where` of the accumulator to element `slot` of the arrays."""
        if self.remote:
            self._write_all(ctx, where, slot)
            return
        ctx.prologue |= {"#lane", "#warp"} if self.writer or self.lanes > 1 else {"#warp"}
        warp = ctx.temporary("warp")
        head = f"if ({self.writer}) " if self.writer else ""
        if len(self.arrays) == 1:
            name, h = self.arrays[0]
            ctx.lines.add(f"{head}{name}{slot}{self._lane}[{warp}] = {h.name}{where};")
            return
        with ctx.block(head.rstrip()) if head else nullcontext():
            for name, h in self.arrays:
                ctx.lines.add(f"{name}{slot}{self._lane}[{warp}] = {h.name}{where};")

    def _write_all(self, ctx: Context, where: str, slot: str) -> None:
        """The same to all blocks of the cluster: where the lanes of a warp agree on its value, a lane to each."""
        ctx.prologue |= {"#lane", "#warp"}
        warp, rank = ctx.temporary("warp"), ctx.temporary("rank")
        if self.lanes == 1:
            rank, head = ctx.temporary("lane"), f"if ({ctx.temporary('lane')} < CLUSTER)"
        else:
            ctx.lines.add("#pragma unroll")
            head = f"for (int {rank} = 0; {rank} < CLUSTER; ++{rank})" + (f" if ({self.writer})" if self.writer else "")
        stores: list[str] = []
        for name, h in self.arrays:
            ctx.helper(f"store_to_block_{h.type}")
            stores.append(f"store_to_block(&{name}{slot}{self._lane}[{warp}], {rank}, {h.name}{where});")
        if len(stores) == 1:
            ctx.lines.add(f"{head} {stores[0]}")
            return
        with ctx.block(head):
            for line in stores:
                ctx.lines.add(line)

    def read(self, ctx: Context, where: str, slot: str) -> None:
        """Combine the slots of all warps that hold parts of the same element, in the order of their numbers."""
        warp, lane, i = ctx.temporary("warp"), ctx.temporary("lane"), ctx.temporary("i")
        count = prod(b.high // b.low for b in self.above)
        first = self._first(warp)
        if count > SERIAL_SLOTS and self.lanes == 1 and len(self.above) == 1 and self.above[0].low == 1:
            ctx.prologue.add("#lane")
            part = lane if count >= WARP else f"{lane} % {count}"
            index = f"{first} + {part}" if first else part
            for name, h in self.arrays:
                ctx.lines.add(f"{h.name}{where} = {name}{slot}[{index}];")
            if count > WARP:
                ctx.lines.add("#pragma unroll")
                with ctx.block(f"for (int {i} = {WARP}; {i} < {count}; {i} += {WARP})"):
                    values = [CExpr(f"{name}{slot}[{index} + {i}]", h.type) for name, h in self.arrays]
                    ctx.lines.add(take(ctx, self.acc, where, values[0], values[-1]))
            _shuffle(ctx, self.acc, where, [_Bits(1, min(count, WARP))])
            return
        # The first slot, then the others: a zero would be one more term.
        for name, h in self.arrays:
            ctx.lines.add(f"{h.name}{where} = {name}{slot}{self._lane}[{first or 0}];")
        ctx.lines.add("#pragma unroll")
        with ctx.block(f"for (int {i} = 1; {i} < {count}; ++{i})"):
            index = " + ".join(t for t in (first, self._step(i)) if t)
            values = [CExpr(f"{name}{slot}{self._lane}[{index}]", h.type) for name, h in self.arrays]
            ctx.lines.add(take(ctx, self.acc, where, values[0], values[-1]))

    def in_turn(self, ctx: Context, where: str) -> None:
        """Write, wait, read, wait: for slots that serve one element after the other."""
        self.write(ctx, where, "")
        _barrier(ctx, [self])
        self.read(ctx, where, "")
        _barrier(ctx, [self])

    @property
    def _lane(self) -> str:
        return f"[{self.number}]" if self.lanes > 1 else ""

    def _first(self, warp: str) -> str:
        """The least number of a warp that holds a part of the thread's element; empty for 0."""
        free: list[str] = []
        low = 1
        for b in (*self.above, _Bits(self.warps, self.warps)):
            if b.low > low:  # bits low .. b.low of the warp number are not combined
                text = warp if low == 1 else f"{warp} / {low}"
                text = text if b.low == self.warps else f"{text} % {b.low // low}"
                free.append(text if low == 1 else f"{text} * {low}")
            low = b.high
        return " + ".join(free)

    def _step(self, i: str) -> str:
        """The distance of the i-th such warp from the first."""
        parts: list[str] = []
        below = 1
        for b in self.above:
            count = b.high // b.low
            text = i if below == 1 else f"{i} / {below}"
            text = text if b is self.above[-1] else f"{text} % {count}"
            parts.append(text if b.low == 1 else f"{text} * {b.low}")
            below *= count
        return " + ".join(parts)
