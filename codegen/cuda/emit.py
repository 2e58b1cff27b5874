"""A scheduled kernel to the text of one `.cu` file.

The body is emitted first; what it turned out to need (indices, thread digits, row pointers, helpers) is then defined
in front of it, so that nothing is defined that nobody uses.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from kgen.codegen import ladders
from kgen.codegen.about import compiled_for, grid
from kgen.codegen.cuda import caching, indices
from kgen.codegen.cuda.context import Context, Holder
from kgen.codegen.cuda.element import emit_element
from kgen.codegen.cuda.expr import expression
from kgen.codegen.cuda.memory import kept_policy, storage_type
from kgen.codegen.cuda.nests import NestEmitter
from kgen.codegen.cuda.plan import Nest, Plan, Shape, Space, plan
from kgen.codegen.cuda.prefetch import emit_prefetch, row_ahead
from kgen.codegen.cuda.prelude import prelude
from kgen.codegen.cuda.reduce import Accumulator, declare, finish
from kgen.codegen.cuda.sums import emit_sums, sums_remark
from kgen.codegen.machines import thread_registers
from kgen.codegen.origins import file_name
from kgen.codegen.phases import refs
from kgen.codegen.program import Arg, Program, Stage
from kgen.codegen.registers import sum_registers
from kgen.codegen.schedule import (
    Choice,
    Element,
    Leave,
    Loop,
    Partial,
    Schedule,
    Scheduled,
    Step,
    Straight,
    Sums,
    decided_by,
)
from kgen.codegen.templating import render
from kgen.dsl import ir
from kgen.dsl.dtypes import BOOL
from kgen.dsl.garbage import collected_later
from kgen.dsl.source import Span

_BEGIN = "// ---- device primitives ----"
_END = "// ---- end of device primitives ----"


@collected_later()
def emit(scheduled: Scheduled) -> Program:
    """The CUDA program of `scheduled`: source for NVRTC without any include, and what a launch must know.

    A kernel that sums over programs becomes several: `Program.then`.
    """
    program = _Emitter(scheduled).program()
    return replace(program, then=tuple(emit(s) for s in scheduled.then)) if scheduled.then else program


def host_source(program: Program) -> str:
    """The program without its device primitives: the text for a compiler that gets them from a header."""
    begin, end = program.source.find(_BEGIN), program.source.find(_END)
    if begin < 0:
        return program.source
    return program.source[:begin] + program.source[end + len(_END) :].lstrip("\n")


def _bounds(schedule: Schedule, sums: Sums | None) -> str:
    """What the compiler is told of a block's threads, and of how many blocks a multiprocessor is to have. Of a cluster
    that meets several times it is to have two: left alone, NVRTC spills 8 bytes of log-softmax, of 65544 columns, to
    have three."""
    if sums is not None and sums.split is not None:
        return f"THREADS, {sums.blocks}"
    if sums is None and schedule.cluster > 1 and schedule.threads <= ladders.CLUSTER_THREADS:
        return f"THREADS, {ladders.CLUSTER_BLOCKS}"
    return "THREADS"


class _Emitter:
    def __init__(self, scheduled: Scheduled) -> None:
        self.ctx = Context(scheduled)
        self.steps = self.ctx.steps
        ctx = self.ctx
        carried = 0 if ctx.flat else sum_registers(ctx.kernel, ctx.layout)
        self.shape = Shape(ctx.space, self._slots, self._words, self._streamed, carried)
        self.staying = caching.read_again(scheduled, self.steps, ctx.layout)
        self.waiting = set[str]()  # tensors that are read slot by slot, see `Plan`

    def program(self) -> Program:
        """The whole file."""
        ctx = self.ctx
        sums = ctx.scheduled.sums
        if sums is None:
            if (ahead := row_ahead(ctx)) is not None:
                emit_prefetch(ctx, ahead, "the row of a program that follows")
            self._steps()
            vectors = indices.peeled(ctx)  # which asks for what the others define
            before = [*indices.prologue(ctx), *self._pointers(), *vectors]
        else:
            before = emit_sums(ctx, sums, self._steps, self._stores, self._pointers)
        if "kept_policy" in ctx.helpers:
            # First: made where it is used it takes more registers.
            before.insert(0, f"const unsigned long long {kept_policy(ctx)} = kept_policy();")
        if ctx.meets:
            before.insert(0, f"{ctx.helper('cluster_arrive')}();")
        head: list[tuple[str, Span | None]] = [(f"    {line}", None) for line in before]
        body = ctx.lines
        if head and body.items:
            head.append(("", None))
        ctx.constants["THREADS"] = (str(ctx.schedule.threads), "")
        if ctx.schedule.cluster > 1:
            ctx.constants["CLUSTER"] = (str(ctx.schedule.cluster), "")
        lines = [*head, *body.items]
        text = "\n".join(line for line, _ in body.items)
        ctx.helpers |= {name for name in ("INFINITY", "NAN") if re.search(rf"\b{name}\b", text)}
        primitives, helpers = prelude(ctx.helpers, ctx.packs, ctx.scheduled.capability)
        dtypes = {a.dtype.name for a in ctx.args}
        source = render(
            "cuda/kernel.cu.j2",
            header=self._header(),
            typedefs=dtypes & {"f16", "bf16"},
            primitives=primitives,
            primitives_begin=_BEGIN,
            primitives_end=_END,
            helpers=helpers,
            cluster="CLUSTER, 1, 1" if ctx.schedule.cluster > 1 else "",
            bounds=_bounds(ctx.schedule, sums),
            constants=[(name, *value) for name, value in ctx.constants.items()],
            entry=ctx.entry,
            parameters=[self._parameter(a) for a in ctx.args],
            body=[text for text, _ in lines],
        )
        above = source[: source.rindex("\n{\n") + 3].count("\n")
        spans: list[Span | None] = [*[None] * above, *(span for _, span in lines), None]
        return Program(
            backend="cuda",
            entry=ctx.entry,
            source=source,
            args=ctx.args,
            schedule=ctx.schedule,
            shared_bytes=0,
            lines=tuple(spans),
            stage=Stage(ctx.kernel, ctx.variant, sums) if ctx.scheduled.staged else None,
        )

    # -- steps ---------------------------------------------------------------------------------------------------
    def _steps(self, once: bool = False) -> None:
        """The steps of a row, or those that are the same in all rows."""
        for i, step in enumerate(self.steps):
            if (isinstance(step, Straight) and step.once) == once:
                self.ctx.staying = self.staying[i]
                self._step(step, self._escaping(step, self.steps[i + 1 :]))

    def _stores(self, stores: tuple[ir.Stmt, ...]) -> None:
        """Statements behind the loop of a sum over programs."""
        self._body(stores, set(), {})

    def _escaping(self, step: Step, later: tuple[Step, ...]) -> set[str]:
        """Values that `step` makes and `later` steps use."""
        made = {s.name for s in step.body if isinstance(s, ir.Let)}
        used = set[str]()
        for other in later:
            own = {s.name for s in other.body if isinstance(s, ir.Let)}
            used |= {n for s in other.body for n in refs(s.value)} - own
            used |= {n for e in decided_by(other) for n in refs(e)}
        return made & used

    def _choice(self, step: Choice) -> None:
        """One of two ways, which all threads of the program take together."""
        ctx = self.ctx
        ctx.lines.gap()
        ctx.lines.comment(step.condition.span)
        outside, unsynced, behind = dict(ctx.holders), set(ctx.unsynced), set[str]()
        condition = expression(step.condition, ctx)
        for head, steps in ((f"if ({condition})", step.yes), ("} else", step.no)):
            ctx.holders, ctx.unsynced = dict(outside), set(unsynced)
            if steps is step.no:
                ctx.lines.items.pop()  # the brace that the head has
            with ctx.block(head):
                for i, inner in enumerate(steps):
                    self._step(inner, self._escaping(inner, steps[i + 1 :]))
            behind |= ctx.unsynced
        ctx.holders, ctx.unsynced = outside, behind

    def _step(self, step: Step, escaping: set[str]) -> None:
        ctx = self.ctx
        if isinstance(step, Leave):
            ctx.lines.span = step.condition.span
            ctx.lines.add(f"if ({expression(step.condition, ctx)}) return;  // what is stored is there already")
            return
        if isinstance(step, Choice):
            self._choice(step)
            return
        if isinstance(step, Element):
            emit_element(ctx, step)
            return
        if not isinstance(step, Loop):
            self._body(step.body, escaping, {})
            return
        accumulators: dict[str, Accumulator] = {}
        for s in step.body:
            if isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce) and step.axis in s.value.over:
                ctx.lines.span = s.span
                accumulators[s.name] = declare(ctx, s)
        finished = dict(accumulators)
        peeled = ctx.peel is not None
        if peeled:
            self._edge_loads(step, escaping, accumulators)
        ctx.lines.gap()
        several = step.chunk < ctx.kernel.axis(step.axis).extent.constant
        ctx.loop, ctx.loop_symbols = (step.axis, ctx.temporary(f"{step.axis}_chunk") if several else None), set()
        outside = dict(ctx.holders)
        ctx.lines.span = None
        if step.down:
            ctx.lines.add("// From the last chunk back: what was read last is still in the caches.")
        if several:
            # The vectors of one chunk are the loads in flight; NVRTC unrolls short loops whole, until registers spill.
            ctx.lines.add("#pragma unroll 1")
        else:
            ctx.lines.add(f"// All of {step.axis} at once{', to be read again' if ctx.staying else ''}.")
        with ctx.block(indices.chunks(ctx, step) if several else ""):
            with ctx.capture() as inner:
                if self._body(step.body, escaping, accumulators):
                    ctx.barrier()  # the slots are written again in the next pass
            for line in indices.definitions(ctx, ctx.layout.axis(step.axis), ctx.loop_symbols):
                ctx.lines.add(line)
            ctx.lines.extend(inner)
        ctx.loop = None
        ctx.holders = {**outside, **{n: ctx.holders[n] for n in finished}}
        if peeled:
            self._edge(step, escaping, accumulators)
        for acc in finished.values():
            if acc.against is not None and isinstance(acc.reduce, Partial) and acc.reduce.shift is not None:
                ctx.holders[acc.reduce.shift] = Holder(acc.against, acc.holder.type)
        finish(ctx, list(finished.values()))

    def _body(self, body: tuple[ir.Stmt, ...], escaping: set[str], accumulators: dict[str, Accumulator]) -> bool:
        """The statements of a step; whether threads met at a barrier for a reduction."""
        ctx = self.ctx
        todo = self._plan(body, escaping, accumulators)
        nests = NestEmitter(ctx, todo, accumulators)
        self.waiting |= {s.value.tensor for s in body if isinstance(s.value, ir.Load) and _name(s) in todo.waiting}
        met = False
        for nest in self._prefetch(todo):
            nests.emit(nest)
        for i, phase in enumerate(todo.phases):
            for nest in phase.nests:
                ctx.lines.gap()
                nests.emit(nest)
            if phase.reductions:
                ctx.lines.span = phase.reductions[0].span
                parts = [accumulators[r.name] for r in phase.reductions]
                following = [nest for later in todo.phases[i + 1 : i + 2] for nest in later.nests]
                met |= finish(ctx, parts, partial(nests.waiting.before_barrier, following))
                nests.waiting.behind_barrier(following)
                if phase is not todo.phases[-1]:
                    self._stay_packed(body, todo)
        return met

    def _plan(self, body: tuple[ir.Stmt, ...], escaping: set[str], accumulators: dict[str, Accumulator]) -> Plan:
        overwritten = {t.name for t in self.ctx.kernel.tensors if t.role == "inout"}
        return plan(body, self.shape, escaping, set(accumulators), overwritten)

    def _edge_loads(self, step: Loop, escaping: set[str], accumulators: dict[str, Accumulator]) -> None:
        """In front of a pass over the chunks of a peeled row: its loads at the edge, which nothing waits for yet."""
        ctx = self.ctx
        todo = self._plan(step.body, escaping, accumulators)
        ctx.edges = {}
        ctx.lines.gap()
        with ctx.edge():
            for nest in self._prefetch(todo):
                NestEmitter(ctx, todo, accumulators).part(nest)

    def _edge(self, step: Loop, escaping: set[str], accumulators: dict[str, Accumulator]) -> None:
        """Behind the pass: one chunk more, of the elements of the edge."""
        ctx = self.ctx
        todo = self._plan(step.body, escaping, accumulators)
        nests = NestEmitter(ctx, todo, accumulators, inside_edge=True)
        outside = dict(ctx.holders)
        ctx.lines.gap()
        ctx.lines.span = None
        ctx.lines.add("// What is left of the row.")
        with ctx.edge(), ctx.block(f"if ({indices.at_edge(ctx)})"):
            for phase in todo.phases:
                assert not phase.reductions  # all of the only tile axis, and finished behind the pass
                for nest in phase.nests:
                    nests.part(nest)
        ctx.holders = outside

    def _stay_packed(self, body: tuple[ir.Stmt, ...], todo: Plan) -> None:
        """Between two phases: large tiles stay as they were loaded. NVRTC would hold on to the elements that it has
        unpacked, which take more registers than a thread has."""
        ctx = self.ctx
        room = thread_registers(ctx.schedule.threads)
        for s in body:
            if not isinstance(s, ir.Let) or s.name not in todo.kept or s.name not in ctx.holders:
                continue
            h = ctx.holders[s.name]
            if (
                h.pack is not None
                and h.pack.dtype.itemsize < 4
                and h.slots
                and ctx.layout.elements(s.value.axes) * 2 > room
            ):
                ctx.lines.add(f"{ctx.helper('stay_packed')}({h.name});")

    def _prefetch(self, todo: Plan) -> list[Nest]:
        nests: dict[frozenset[str], Nest] = {}
        for load in todo.prefetch:
            space = self.ctx.space(load)
            nests.setdefault(space, Nest(space)).items.append(load)
        return list(nests.values())

    def _slots(self, space: Space) -> int:
        """Slots of `space` in one thread, its element of the edge of a peeled row among them."""
        ctx = self.ctx
        return ctx.slots(space) + (ctx.peel is not None and ctx.peel.axis in space)

    def _words(self, load: ir.Let) -> int:
        """32-bit registers that the raw tile of `load` fills in a thread."""
        assert isinstance(load.value, ir.Load)  # asked for loads only
        dtype = self.ctx.kernel.tensor(load.value.tensor).dtype
        elements = self.ctx.layout.elements(load.value.axes)
        return -(-elements * max(dtype.itemsize, 2) // 4)

    def _streamed(self, load: ir.Let) -> bool:
        return bool(load.value.axes & self.ctx.parallel)

    # -- the file ------------------------------------------------------------------------------------------------
    def _pointers(self) -> list[str]:
        ctx = self.ctx
        out: list[str] = []
        for (tensor, outer), name in ctx.pointers.items():
            t = ctx.kernel.tensor(tensor)
            const = "const " if t.role == "in" else ""
            out.append(f"{const}{storage_type(t.dtype)}* {name} = {ctx.names[tensor]} + {outer};")
        return out

    def _parameter(self, a: Arg) -> str:
        ctx = self.ctx
        if a.kind == "tensor":
            const = "const " if ctx.kernel.tensor(a.name).role == "in" else ""
            # What waits for room would not wait where no store could change it.
            fixed = not self.waiting or (const and a.name not in self.waiting)
            return f"{const}{storage_type(a.dtype)}* {'__restrict__ ' if fixed else ''}{ctx.param('tensor', a.name)}"
        type = "bool" if a.dtype == BOOL else storage_type(a.dtype)
        return f"{type} {ctx.param(a.kind, a.name, a.axis, a.part)}"

    def _header(self) -> list[str]:
        ctx = self.ctx
        k, s = ctx.kernel, ctx.schedule
        tensors = k.tensors
        if ctx.scheduled.sums is not None:  # a stage need not touch all that the kernel does
            touched = {a.name for a in ctx.args if a.kind == "tensor"}
            tensors = tuple(t for t in tensors if t.name in touched)
        inputs = ", ".join(_signature(t) for t in tensors if t.role != "out")
        outputs = ", ".join(_signature(t) for t in tensors if t.role == "out")
        out = [*k.doc.strip().splitlines(), ""] if k.doc.strip() else []
        out.append(
            f"{k.name}({inputs})" + (f" -> ({outputs})" if outputs else "") + f", generated from {file_name(k.span)}."
        )
        threads = f"{s.threads} threads a block"
        if s.cluster > 1:
            threads += f", {s.cluster} blocks a cluster (sm_90 or later)"
        if ctx.flat:
            a = ctx.layout.row
            points = a.slots * a.vector
            vectors = f" in vectors of {a.vector}" if a.vector > 1 else ""
            out.append(f"{threads}, each with {points} point{'s' if points > 1 else ''}{vectors}.")
        else:
            rows = f"{s.rows} rows" if s.rows > 1 else "one row"
            vectors = [f"vectors of {a.vector} along {a.name}" for a in ctx.layout.axes if a.vector > 1]
            out.append(", ".join([threads, rows, *vectors]) + ".")
            if ctx.peel is not None:
                out.append(f"Elements of {ctx.peel.axis} that are in no whole vector are taken one by one.")
        if ctx.scheduled.sums is not None:
            out.append(sums_remark(ctx, ctx.scheduled.sums))
        out += compiled_for(ctx.scheduled, {a.name for a in ctx.args if a.kind == "tensor"})
        out.append(f"Launch: {_launch(ctx.scheduled)}.")
        if self.waiting:
            held = ", ".join(sorted(self.waiting))
            out.append(f"Not __restrict__: the outputs, nor {held}, so that these are loaded where they are used.")
        return [line.rstrip().rstrip("\\").rstrip() for line in out]


def _name(s: ir.Stmt) -> str:
    return s.name if isinstance(s, ir.Let) else ""


def _launch(scheduled: Scheduled) -> str:
    s = scheduled.schedule
    cluster = f", clusters of {s.cluster} blocks, which are compiled in" if s.cluster > 1 else ""
    return f"grid {grid(scheduled, 'ceil({} / {})')}, block {s.threads}{cluster}, no dynamic shared memory"


def _signature(t: ir.Tensor) -> str:
    shape = ", ".join(("*" if t.star and i == 0 else "") + str(p) for i, p in enumerate(t.shape))
    return f"{t.name}: {t.dtype}[{shape}]"
