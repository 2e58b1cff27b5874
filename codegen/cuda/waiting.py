"""Weights that wait for room in the registers (`Plan.waiting`): how long before its use is a vector of them loaded?

They are no `__restrict__` tensors, so that no compiler loads all of them first. It moves no load of theirs over a store
either, which may change them for all it knows: where a slot loaded what it uses, every slot would wait for the latency
of L2. So vectors are loaded some slots ahead. The first ones are right behind the reduction that the stores wait for,
or, where the registers allow, in front of the barrier of it, behind which they have arrived; the others are in the
loop over slots, each a fixed number of slots before its use.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

from kgen.codegen import ladders
from kgen.codegen.cuda import indices
from kgen.codegen.cuda.context import Context, Frame, Holder
from kgen.codegen.cuda.memory import address, pack_of, read_pack
from kgen.codegen.cuda.plan import Nest, Plan
from kgen.codegen.cuda.prelude import Pack
from kgen.codegen.cuda.text import CExpr, binary, compute_type, integer
from kgen.codegen.layout import AxisLayout
from kgen.codegen.machines import programs_by_registers, thread_registers
from kgen.codegen.operations import DIVISIONS
from kgen.codegen.phases import statement_axes
from kgen.codegen.registers import other_registers, tile_registers
from kgen.dsl import ir


class Waiting:
    """The waiting loads of one body. `ahead`: of those under way, by name, how many slots before its use each is."""

    def __init__(self, ctx: Context, plan: Plan) -> None:
        self.ctx = ctx
        self.plan = plan
        self.ahead: dict[str, int] = {}

    def before_barrier(self, nests: list[Nest]) -> None:
        """In front of the barrier that `nests` are behind: the loads of the first that has any, if there is room."""
        found = self._first(nests)
        if found is not None and self.ctx.scheduled.sums is not None:
            nest, axis, packs = found
            self._start_one_of(nest, axis, packs, (axis.slots, _slots_ahead(axis, packs)))

    def behind_barrier(self, nests: list[Nest]) -> None:
        """The same right behind the barrier, where a program has no sums."""
        found = self._first(nests)
        if found is None or not _alone(self.ctx, found[0]):
            return
        nest, axis, packs = found
        if len(packs) > 1 and _divides(nest):
            return
        slots = _slots_ahead(axis, packs)
        if self.ctx.schedule.cluster > 1:
            self._start_one_of(nest, axis, packs, (slots, 1))
        else:
            self._start(nest, axis, packs, slots)

    def _start_one_of(self, nest: Nest, axis: AxisLayout, packs: dict[str, Pack], slots: tuple[int, ...]) -> None:
        """The loads of the first of these numbers of slots that the registers have room for. The compiler keeps what an
        earlier phase loaded if it can, or moves loads to the other side of a cluster's barrier, and holds the elements
        of 16 bits that it has unpacked beside the words."""
        words = _words(packs) + sum(p.lanes for p in packs.values() if p.dtype.itemsize < 4)
        room = _room(self.ctx)
        fitting = [n for n in slots if words * n <= room]
        if fitting:
            self._start(nest, axis, packs, fitting[0])

    def advance(self, nest: Nest) -> None:
        """In the loop over the slots of `nest`: the loads for a later slot of it."""
        ctx = self.ctx
        moving = [s for s in nest.items if isinstance(s, ir.Let) and s.name in self.ahead]
        (axis,) = self._loops(nest) if moving else (None,)
        if axis is None or self.ahead[moving[0].name] == axis.slots:
            return
        slots, slot = self.ahead[moving[0].name], CExpr(ctx.slot(axis.name), "int")
        threads = ctx.team() if axis.threads == ctx.schedule.team else integer(axis.threads)
        step = binary("*", integer(slots), threads) if axis.threads > 1 else integer(slots)
        step = binary("*", step, integer(axis.vector)) if axis.vector > 1 else step
        ctx.lines.span = moving[0].span
        with ctx.block(f"if ({slot} < {axis.slots} - {slots})"):
            later = ctx.temporary(f"{axis.name}_ahead")
            ctx.lines.add(f"const int {later} = {binary('+', ctx.base(axis.name), step)};")
            with ctx.names.spelled({axis.name: later}):
                conditions = indices.masks(ctx, nest.space)
                with ctx.block(f"if ({' && '.join(conditions)})") if conditions else nullcontext():
                    for let in moving:
                        self._load(let, f"{slot} + {slots}")

    def done(self, nest: Nest) -> None:
        """Behind `nest`: its loads begin anew where another phase makes them."""
        for s in nest.items:
            if isinstance(s, ir.Let):
                self.ahead.pop(s.name, None)

    # -- which -----------------------------------------------------------------------------------------------------
    def _loops(self, nest: Nest) -> list[AxisLayout]:
        return [a for a in self.ctx.ordered(nest.space) if a.slots > 1]

    def _packs(self, nest: Nest) -> dict[str, Pack]:
        """The waiting loads of `nest` that are to be loaded ahead, with their packs: of a nest that stores, in one loop
        over slots."""
        ctx = self.ctx
        out: dict[str, Pack] = {}
        stores = any(isinstance(s, ir.Store) for s in nest.items)
        # Beside the vectors of a peeled row there are elements to hold; of rows in chunks several programs run at once.
        if len(self._loops(nest)) != 1 or not stores or ctx.loop is not None or ctx.peel is not None:
            return out
        for s in nest.items:
            if not isinstance(s, ir.Let) or s.name not in self.plan.waiting - self.plan.kept:
                continue
            assert isinstance(s.value, ir.Load)  # as waiting says
            lanes = ctx.lane_axis(ctx.space(s), statement_axes(s))
            pack = pack_of(ctx, ctx.kernel.tensor(s.value.tensor), s.value.at, lanes)
            if pack is not None:
                out[s.name] = pack
        return out

    def _first(self, nests: list[Nest]) -> tuple[Nest, AxisLayout, dict[str, Pack]] | None:
        for nest in nests:
            packs = self._packs(nest)
            if packs.keys() - self.ahead.keys():
                return nest, self._loops(nest)[0], packs
            if packs:
                return None
        return None

    # -- text ------------------------------------------------------------------------------------------------------
    def _start(self, nest: Nest, axis: AxisLayout, packs: dict[str, Pack], slots: int) -> None:
        """The loads of the first `slots` slots."""
        ctx = self.ctx
        loads = [s for s in nest.items if isinstance(s, ir.Let) and s.name in packs]
        tensors = dict.fromkeys(s.value.tensor for s in loads if isinstance(s.value, ir.Load))
        ctx.lines.span = None
        how = "Before any store" if slots == axis.slots else f"{slots} slot{'s' * (slots > 1)} ahead of its use"
        ctx.lines.add(f"// {how}, as a load waits for the stores in front of it: {', '.join(tensors)}.")
        for let in loads:
            pack = packs[let.name]
            name, type = ctx.names.fresh(f"{let.name}_raw"), ctx.pack(pack)
            ctx.holders[let.name] = Holder(name, compute_type(pack.dtype), (axis.name,), True, pack)
            ctx.lines.span = let.span
            ctx.lines.add(f"{type} {name}[{axis.slots}];")
            self.ahead[let.name] = slots
        ctx.frame = Frame(nest.space)
        slot = ctx.slot(axis.name)
        ctx.visible.append(set())
        with ctx.capture() as inner:
            inner.depth += 1
            with ExitStack() as stack:
                if conditions := indices.masks(ctx, nest.space):
                    stack.enter_context(ctx.block(f"if ({' && '.join(conditions)})"))
                for let in loads:
                    self._load(let, slot)
        ctx.visible.pop()
        ctx.lines.add("#pragma unroll")
        with ctx.block(f"for (int {slot} = 0; {slot} < {slots}; ++{slot})"):
            for line in indices.definitions(ctx, axis, ctx.frame.symbols):
                ctx.lines.add(line)
            ctx.lines.extend(inner)
        ctx.frame = Frame(frozenset())

    def _load(self, let: ir.Let, slot: str) -> None:
        ctx, load, h = self.ctx, let.value, self.ctx.holders[let.name]
        assert isinstance(load, ir.Load) and h.pack is not None  # as `_packs` says
        place = address(ctx, ctx.kernel.tensor(load.tensor), load.at, {})
        # A program that has a multiprocessor to itself: so does L1 what each of its rows reads.
        staying = ctx.scheduled.sums is None and ctx.schedule.cluster == 1
        ctx.lines.add(f"{h.name}[{slot}] = {read_pack(ctx, let, h.pack, place, staying=staying)};")


def _room(ctx: Context) -> int:
    """About how many 32-bit registers a thread has beside its tiles, of a sum over programs or of a program that has a
    multiprocessor to itself."""
    used = tile_registers(ctx.kernel, ctx.variant, ctx.scheduled.steps, ctx.layout) + other_registers(ctx.variant)
    blocks = 1 if ctx.scheduled.sums is None else ctx.scheduled.sums.blocks
    return thread_registers(ctx.schedule.threads, blocks) - used


def _alone(ctx: Context, nest: Nest) -> bool:
    """Whether a program without sums has its multiprocessor to itself, as a thread holds that much of a row. Others
    would run while it waits, and more registers leave less room for them."""
    held = ctx.layout.elements(nest.space) + ladders.FEWEST_REGISTERS
    return ctx.scheduled.sums is None and programs_by_registers(ctx.schedule.threads, held) < 2


def _divides(nest: Nest) -> bool:
    """Whether `nest` divides element by element: the exact quotient takes registers of its own."""
    ops = (e for s in nest.items for e in ir.walk(s.value) if isinstance(e, ir.Op))
    return any(e.fn in DIVISIONS and e.axes >= nest.space for e in ops)


def _words(packs: dict[str, Pack]) -> int:
    """32-bit registers that a slot of all of them fills."""
    return sum(max(1, p.lanes * p.dtype.itemsize // 4) for p in packs.values())


def _slots_ahead(axis: AxisLayout, packs: dict[str, Pack]) -> int:
    return min(axis.slots, max(1, ladders.WAITING_WORDS // _words(packs)))
