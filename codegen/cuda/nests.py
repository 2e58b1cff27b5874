"""One nest: the loops over the slots and lanes of some axes around the statements over them."""

from __future__ import annotations

from contextlib import ExitStack

from kgen.codegen.cuda import indices
from kgen.codegen.cuda.context import Context, Frame, Holder
from kgen.codegen.cuda.expr import expression
from kgen.codegen.cuda.memory import (
    Address,
    address,
    gather_subscripts,
    loaded,
    missing_value,
    narrowed,
    outer_part,
    pack_of,
    packed_value,
    read_element,
    read_pack,
    storage_type,
)
from kgen.codegen.cuda.pairs import Paired, paired
from kgen.codegen.cuda.plan import Nest, Plan
from kgen.codegen.cuda.prelude import Pack
from kgen.codegen.cuda.reduce import Accumulator, array_shape, declare, rescale, take
from kgen.codegen.cuda.text import CExpr, compute_type, conditional
from kgen.codegen.cuda.waiting import Waiting
from kgen.codegen.phases import statement_axes
from kgen.codegen.schedule import Finish
from kgen.dsl import ir
from kgen.dsl.affine import Poly


class NestEmitter:
    """Emits the nests of one body. `accumulators`: reductions whose variables are defined; new ones are added."""

    def __init__(
        self, ctx: Context, plan: Plan, accumulators: dict[str, Accumulator], *, inside_edge: bool = False
    ) -> None:
        """inside_edge: all stands in a block in which the thread has an element of the edge of a peeled row."""
        self.ctx = ctx
        self.inside_edge = inside_edge
        self.plan = plan
        self.accumulators = accumulators
        self.waiting = Waiting(ctx, plan)
        self.rows: dict[str, str] = {}  # gathers of a whole row: the pointer to it
        self.ranges: dict[str, str] = {}  # those that are not loaded in packs: whether the row is in range
        self.guards: dict[int, str] = {}
        self.pairs: dict[str, Paired] = {}  # reductions of the current nest that take whole packs
        self.in_block = False  # whether the statements of the current nest stand in a loop or condition of their own

    def emit(self, nest: Nest) -> None:
        """The nest at the current place; along a whole row that is peeled, for the thread's element of the edge too."""
        self.part(nest)
        if self.ctx.peel is not None and self.ctx.peel.axis in nest.space and self.ctx.loop is None:
            with self.ctx.edge():
                self.part(nest)

    def part(self, nest: Nest) -> None:
        """Declarations of what outlives the nest, then the loops."""
        ctx = self.ctx
        items = [s for s in nest.items if not (isinstance(s, ir.Let) and ctx.is_visible(s.name))]
        if not items:
            return
        stored = {s.tensor for s in items if not isinstance(s, ir.Let)}
        if stored & ctx.unsynced:
            ctx.barrier()
        self.waiting.behind_barrier([nest])
        ctx.frame = Frame(nest.space)
        conditions = [] if self.inside_edge else indices.masks(ctx, nest.space)
        self.guards = {id(s): self._guard(s) for s in items if not isinstance(s, ir.Let)}
        lasting = any(isinstance(s, ir.Let) and (s.name in self.plan.kept or _is_reduce(s)) for s in items)
        if len(set(self.guards.values())) == 1 and not lasting:
            conditions = [c for c in (next(iter(self.guards.values())), *conditions) if c]
            self.guards = dict.fromkeys(self.guards, "")
        loops = [a for a in ctx.ordered(nest.space) if a.slots > 1]
        self.in_block = bool(loops or conditions)
        for s in items:
            if isinstance(s, ir.Let):
                self._declare(s, nest)
        self.pairs = self._paired(items)
        for p in self.pairs.values():
            p.declare(ctx)
        ctx.visible.append(set())
        with ctx.capture() as inner:
            inner.depth += len(loops)
            with ExitStack() as stack:
                if conditions:
                    stack.enter_context(ctx.block(f"if ({' && '.join(conditions)})"))
                self.waiting.advance(nest)
                self._statements(items)
        constants = ctx.visible.pop()
        if not self.in_block:
            ctx.visible[-1] |= constants
        with ExitStack() as stack:
            for a in loops:
                i = ctx.slot(a.name)
                ctx.lines.add("#pragma unroll")
                stack.enter_context(ctx.block(f"for (int {i} = 0; {i} < {a.slots}; ++{i})"))
            for a in loops:
                for line in indices.definitions(ctx, a, ctx.frame.symbols):
                    ctx.lines.add(line)
            ctx.lines.extend(inner)
        ctx.frame = Frame(frozenset())
        for p in self.pairs.values():
            p.finish(ctx)
        self.waiting.done(nest)
        for s in items:
            if isinstance(s, ir.Let) and isinstance(s.value, ir.Load) and s.name in ctx.scheduled.barriers:
                ctx.unsynced.add(s.value.tensor)

    def _guard(self, s: ir.Stmt) -> str:
        """When a thread stores: it is the first of those that hold the value, and its row exists."""
        ctx = self.ctx
        taken = {a.digit for a in ctx.ordered(ctx.space(s))}
        conditions: list[str] = []
        if not ctx.flat and not ctx.behind_rows:
            taken.add(ctx.layout.row.digit)
            if ctx.schedule.rows > 1:
                ctx.prologue.add("#live")
                conditions.append(ctx.temporary("live"))
        if isinstance(s, ir.Accumulate):
            return " && ".join(conditions)  # all threads that hold the value add it to their own copy of the sum
        free = [d for d, n in enumerate(ctx.layout.digits) if n > 1 and d not in taken]
        conditions += [f"{ctx.thread(d)} == 0" for d in free]
        return " && ".join(conditions)

    # -- what outlives the nest ----------------------------------------------------------------------------------
    def _declare(self, let: ir.Let, nest: Nest) -> None:
        """The variable of a value that outlives the nest, unless it is a constant of the block around."""
        ctx = self.ctx
        ctx.lines.span = let.span
        if isinstance(let.value, Finish):
            return  # defined at its value, see `_statement`
        if let.name in self.waiting.ahead:
            return
        if isinstance(let.value, ir.Reduce):
            if let.name not in self.accumulators:
                self.accumulators[let.name] = declare(ctx, let)
            elif self.accumulators[let.name].against is not None:
                rescale(ctx, self.accumulators[let.name])
            return
        pack = self._pack(let)
        if pack is not None:
            self._declare_pack(let, pack, nest, self._row(let) if self._gathers_rows(let) else None)
            return
        if self._gathers_rows(let):
            self.ranges[let.name] = self._row(let)
        if let.name in self.plan.kept and ctx.at_edge and self.in_block:
            self._declare_edge(let)
        elif let.name in self.plan.kept and (self.in_block or self._varies(let)):
            slots = ctx.looped_slots(nest.space)
            h = Holder(ctx.names[let.name], compute_type(let.value.dtype), slots, self._varies(let))
            ctx.holders[let.name] = h
            ctx.lines.add(f"{h.type} {h.name}{_sizes(ctx, h)};")

    def _declare_edge(self, let: ir.Let) -> None:
        """The variable of the value at the edge of a peeled row. What is loaded is held as it lies in memory, so that
        nothing waits for it where it is loaded."""
        ctx = self.ctx
        name, type = ctx.names.fresh(f"{let.name}_edge"), compute_type(let.value.dtype)
        h = Holder(name, type)
        if isinstance(let.value, ir.Load) and not _is_gather(let):
            dtype = ctx.kernel.tensor(let.value.tensor).dtype
            h = Holder(name, type, converted=loaded(ctx, dtype, CExpr(name, "")))
            type = storage_type(dtype)
        ctx.edges[let.name] = h
        ctx.lines.add(f"{type} {name};")

    def _declare_pack(self, let: ir.Let, pack: Pack, nest: Nest, in_range: str | None) -> None:
        ctx = self.ctx
        type = ctx.pack(pack)
        kept = let.name in self.plan.kept
        missing = missing_value(pack.dtype) if in_range else None
        slots = ctx.looped_slots(nest.space) if kept else ()
        name = ctx.names.fresh(f"{let.name}_raw")
        h = Holder(name, compute_type(pack.dtype), slots, True, pack, in_range, missing)
        ctx.holders[let.name] = h
        if kept and self.in_block:
            ctx.lines.add(f"{type} {h.name}{_sizes(ctx, h)};")

    def _paired(self, items: list[ir.Stmt]) -> dict[str, Paired]:
        """The reductions of `items`, by name, that take the packs of their argument as they are."""
        reductions = [s for s in items if isinstance(s, ir.Let) and s.name in self.accumulators and _is_reduce(s)]
        found = {s.name: paired(self.ctx, s, self.accumulators[s.name], self._lanes_of(s)) for s in reductions}
        return {name: p for name, p in found.items() if p is not None}

    def _row(self, let: ir.Let) -> str:
        """For a gather of a whole row: a pointer to it, and the name of the variable that says that it is in range."""
        ctx, load = self.ctx, let.value
        assert isinstance(load, ir.Load)  # the caller looked
        ctx.lines.comment(let.span)
        values, ok = gather_subscripts(ctx, load)
        in_range = ctx.in_range.get(ok.text, "")
        if not ctx.is_visible(f"#{in_range}"):
            in_range = ctx.in_range[ok.text] = ctx.names.fresh(f"{let.name}_in_range")
            ctx.lines.add(f"const bool {in_range} = {ok};")
            ctx.visible[-1].add(f"#{in_range}")
        tensor = ctx.kernel.tensor(load.tensor)
        row = self.rows[let.name] = ctx.names.fresh(f"{load.tensor}_row")
        start = Address(ctx.names[tensor.name], outer_part(ctx, tensor, load.at, values))
        ctx.lines.add(f"const {storage_type(tensor.dtype)}* {row} = {start.pointer};")
        return in_range

    def _gathers_rows(self, let: ir.Let) -> bool:
        """Whether `let` loads a tile from a place that one value for the whole tile says."""
        ctx = self.ctx
        if not isinstance(let.value, ir.Load) or ctx.flat or not ctx.space(let):
            return False
        values = [s for s in let.value.at if not isinstance(s, Poly)]
        tiles = ctx.indices - ctx.parallel
        return bool(values) and not any(s.axes & tiles for s in values)

    def _varies(self, s: ir.Stmt) -> bool:
        """Whether `s` is done lane by lane."""
        return self.ctx.lane_axis(self.ctx.space(s), statement_axes(s)) is not None

    def _pack(self, s: ir.Stmt) -> Pack | None:
        """The pack that a load fills or a store writes; None where elements are moved one by one."""
        ctx = self.ctx
        if isinstance(s, ir.Let):
            if not isinstance(s.value, ir.Load):
                return None
            if _is_gather(s) and not self._gathers_rows(s):
                return None
            return pack_of(ctx, ctx.kernel.tensor(s.value.tensor), s.value.at, self._lanes_of(s))
        if isinstance(s, ir.Accumulate):
            return None
        return pack_of(ctx, ctx.kernel.tensor(s.tensor), s.at, self._lanes_of(s))

    def _lanes_of(self, s: ir.Stmt) -> str | None:
        return self.ctx.lane_axis(self.ctx.space(s), statement_axes(s))

    # -- inside --------------------------------------------------------------------------------------------------
    def _statements(self, items: list[ir.Stmt]) -> None:
        """First what is the same in all lanes and whole vectors, then the loop over lanes, then stores of vectors."""
        ctx = self.ctx
        by_lane: list[ir.Stmt] = []
        for s in items:
            pack = self._pack(s) if isinstance(s, ir.Let) else None
            if isinstance(s, ir.Let) and s.name in self.waiting.ahead:
                continue
            if pack is not None:
                assert isinstance(s, ir.Let)  # as above
                self._load_pack(s, pack)
            elif isinstance(s, ir.Let) and s.name in self.pairs:
                ctx.lines.comment(s.span)
                ctx.lines.add(self.pairs[s.name].take(ctx))
            elif self._varies(s):
                by_lane.append(s)
            else:
                self._statement(s, "")
        if not by_lane:
            return
        stores = [(s, p) for s in by_lane if not isinstance(s, ir.Let) and (p := self._pack(s)) is not None]
        outs: dict[int, str] = {}
        for s, pack in stores:
            ctx.pack(pack, writes=True)
            outs[id(s)] = ctx.names.fresh(f"{s.tensor}_out")
            ctx.lines.span = s.span
            ctx.lines.add(f"{compute_type(pack.dtype)} {outs[id(s)]}[{pack.lanes}];")
        lane_axis = self._lanes_of(by_lane[0])
        assert lane_axis is not None  # as by_lane says
        outside = dict(ctx.frame.locals)
        ctx.frame.lane, ctx.frame.lane_axis = ctx.temporary("v"), lane_axis
        v = ctx.frame.lane
        ctx.lines.add("#pragma unroll")
        with ctx.block(f"for (int {v} = 0; {v} < {ctx.axis(lane_axis).vector}; ++{v})"):
            for s in by_lane:
                self._statement(s, outs.get(id(s), ""))
        ctx.frame.lane = ctx.frame.lane_axis = None
        ctx.frame.locals = outside
        for s, pack in stores:
            place = address(ctx, ctx.kernel.tensor(s.tensor), s.at, {})
            ctx.lines.span = s.span
            guard = f"if ({g}) " if (g := self.guards[id(s)]) else ""
            value = f"{pack.name}::of({outs[id(s)]})"
            if ctx.streamed(s.tensor):
                stream = f"{ctx.helper('store_streaming')}<{pack.bytes}>"
                ctx.lines.add(f"{guard}{stream}({place.pointer}, {value}.word);")
            else:
                ctx.lines.add(f"{guard}*({pack.name}*)({place.pointer}) = {value};")

    def _load_pack(self, let: ir.Let, pack: Pack) -> None:
        ctx, load = self.ctx, let.value
        assert isinstance(load, ir.Load)  # the caller looked
        row = self.rows.get(let.name)
        values = {i: CExpr("0", "int") for i, s in enumerate(load.at) if not isinstance(s, Poly)}
        place = address(ctx, ctx.kernel.tensor(load.tensor), load.at, values, row=row)
        value = read_pack(ctx, let, pack, place)
        h = ctx.holders[let.name]
        ctx.lines.comment(let.span)
        if let.name in self.plan.kept and self.in_block:
            where = h.name + "".join(f"[{ctx.slot(a)}]" for a in h.slots)
            ctx.lines.add(f"{f'if ({h.in_range}) ' if h.in_range else ''}{where} = {value};")
        elif h.in_range:
            ctx.lines.add(f"{pack.name} {h.name};")
            ctx.lines.add(f"if ({h.in_range}) {h.name} = {value};")
            ctx.visible[-1].add(let.name)
        else:
            ctx.lines.add(f"const {pack.name} {h.name} = {value};")
            ctx.visible[-1].add(let.name)

    def _statement(self, s: ir.Stmt, out: str) -> None:
        ctx = self.ctx
        ctx.lines.comment(s.span)
        if not isinstance(s, ir.Let):
            self._store(s, out)
        elif isinstance(s.value, Finish):
            self.accumulators[s.name] = declare(ctx, s, expression(s.value.arg, ctx))
        elif isinstance(s.value, ir.Reduce):
            acc = self.accumulators[s.name]
            where = "".join(f"[{ctx.slot(a)}]" for a in acc.holder.slots)
            where += f"[{ctx.frame.lane}]" if acc.holder.lanes else ""
            value = expression(s.value.arg, ctx)
            position = ctx.symbol(s.value.over[0]) if acc.at is not None else None
            ctx.lines.add(take(ctx, acc, where, value, position))
        elif isinstance(s.value, ir.Load):
            self._define(s, self._element(s, s.value))
        else:
            self._define(s, expression(s.value, ctx))

    def _raw(self, let: ir.Let) -> bool:
        """Whether `let` fills a variable that holds an element as it lies in memory."""
        ctx = self.ctx
        return (
            ctx.at_edge and let.name in self.plan.kept and self.in_block and ctx.edges[let.name].converted is not None
        )

    def _element(self, let: ir.Let, load: ir.Load) -> CExpr:
        """One element from memory."""
        ctx = self.ctx
        tensor = ctx.kernel.tensor(load.tensor)
        if all(isinstance(s, Poly) for s in load.at):
            return read_element(ctx, let, tensor, address(ctx, tensor, load.at, {}), raw=self._raw(let))
        if let.name in self.ranges:
            values = {i: CExpr("0", "int") for i, s in enumerate(load.at) if not isinstance(s, Poly)}
            place = address(ctx, tensor, load.at, values, row=self.rows[let.name])
            ok = CExpr(self.ranges[let.name], "bool")
            return conditional(ok, read_element(ctx, let, tensor, place), missing_value(tensor.dtype))
        values, ok = gather_subscripts(ctx, load)
        element = read_element(ctx, let, tensor, address(ctx, tensor, load.at, values))
        return conditional(ok, element, missing_value(tensor.dtype))

    def _define(self, let: ir.Let, value: CExpr) -> None:
        ctx = self.ctx
        varies = ctx.frame.lane is not None
        if let.name in self.plan.kept and (self.in_block or varies):
            h = (ctx.edges if ctx.at_edge else ctx.holders)[let.name]
            where = "".join(f"[{ctx.slot(a)}]" for a in h.slots) + (f"[{ctx.frame.lane}]" if h.lanes else "")
            ctx.lines.add(f"{h.name}{where} = {value};")
            return
        type = compute_type(let.value.dtype)
        ctx.lines.add(f"const {type} {ctx.local(let.name, type)} = {value};")
        if not varies:
            ctx.visible[-1].add(let.name)
            (ctx.edges if ctx.at_edge else ctx.holders)[let.name] = Holder(ctx.names[let.name], type)

    def _store(self, s: ir.Store | ir.Accumulate, out: str) -> None:
        ctx = self.ctx
        guard = f"if ({g}) " if (g := self.guards[id(s)]) else ""
        if isinstance(s, ir.Accumulate):
            acc = ctx.partials[s.tensor, s.at]
            where = "".join(f"[{ctx.slot(a)}]" for a in acc.holder.slots)
            where += f"[{ctx.frame.lane}]" if acc.holder.lanes else ""
            ctx.lines.add(f"{guard}{take(ctx, acc, where, expression(s.value, ctx), None)}")
            return
        tensor = ctx.kernel.tensor(s.tensor)
        if out:
            ctx.lines.add(f"{out}[{ctx.frame.lane}] = {packed_value(ctx, s.value, tensor.dtype)};")
            return
        value = narrowed(ctx, s.value, tensor.dtype)
        ctx.lines.add(f"{guard}{address(ctx, tensor, s.at, {}).element} = {value};")


def _is_reduce(s: ir.Stmt) -> bool:
    return isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce)


def _is_gather(let: ir.Let) -> bool:
    return isinstance(let.value, ir.Load) and any(not isinstance(s, Poly) for s in let.value.at)


def _sizes(ctx: Context, h: Holder) -> str:
    return "".join(f"[{n}]" for n in array_shape(ctx, h))
