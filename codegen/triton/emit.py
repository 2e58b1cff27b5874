"""The emitted module: which statements does a scheduled kernel become, in which order, and under which names?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kgen.codegen.layout import vector_limit
from kgen.codegen.names import Names
from kgen.codegen.origins import cited
from kgen.codegen.program import Program, Stage
from kgen.codegen.schedule import Choice, Element, Finish, Leave, Loop, Partial, Scheduled, Step, Straight, Sums
from kgen.codegen.templating import render
from kgen.codegen.triton.arguments import Arguments
from kgen.codegen.triton.barriers import Barriers
from kgen.codegen.triton.blocks import ROW, THREAD, Blocks, Value, align, power_of_two_factor
from kgen.codegen.triton.caching import given_up_last
from kgen.codegen.triton.expressions import Expressions
from kgen.codegen.triton.held import HeldChunks
from kgen.codegen.triton.identity import MaskedLanes, Number
from kgen.codegen.triton.index import Definition, Indices, program_indices
from kgen.codegen.triton.memory import Memory
from kgen.codegen.triton.module import about, helpers, used, words
from kgen.codegen.triton.reductions import Accumulator, Running, finished, masked, reduced
from kgen.codegen.triton.reserved import RESERVED
from kgen.codegen.triton.sums import PartialSum, loop_range, partition, share
from kgen.codegen.triton.text import COMPARE, Line, Text, call, method
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.garbage import collected_later
from kgen.dsl.source import Span


@collected_later()
def emit(scheduled: Scheduled) -> Program:
    """The Triton module of `scheduled`: one `@triton.jit` function, the helpers that it uses, and nothing of kgen.

    Arguments are in the order of `kernel_args`. A kernel that sums over programs becomes several: `Program.then`.
    """
    program = _Emitter(scheduled).program()
    return replace(program, then=tuple(emit(s) for s in scheduled.then)) if scheduled.then else program


class _Emitter:
    def __init__(self, scheduled: Scheduled) -> None:
        self.scheduled = scheduled
        self.given_up_last = given_up_last(scheduled)
        self.in_chunks: Loop | None = None  # the pass over chunks that what is emitted stands in
        self.kernel, self.variant = scheduled.kernel, scheduled.variant
        kernel = self.kernel
        lets = [s.name for step in scheduled.steps for s in step.body if isinstance(s, ir.Let)]
        users = (*kernel.dims, *(a.name for a in kernel.axes), *(p.name for p in kernel.scalars), *lets)
        self.names = Names(users, RESERVED)
        self.entry = self.names.fresh(kernel.name)  # a kernel may be called as one of its dimensions is
        self.args = Arguments(kernel, self.variant, self.names)
        self.sum_names: dict[str, str] = {}  # of the values of finished sums, and of what outlives a loop
        self.blocks = Blocks(scheduled)
        self.indices = Indices(kernel, self.blocks, self._spelling)
        self.expressions = Expressions(self.blocks, self.indices, self._spelling)
        self.masks = {
            k: self.names.fresh(f"mask_{self.names[k]}") for k, d in self.blocks.dims.items() if d.ragged and k != ROW
        }
        self.memory = Memory(
            kernel,
            self.variant,
            self.blocks,
            self.indices,
            self.args,
            self.expressions.value,
            self.masks,
            self.names.fresh,
        )
        self.held = HeldChunks(scheduled, self.memory, self.names.fresh)
        self.chunk_starts: dict[str, str] = {}  # names of the loop variables
        self.thread_views: dict[str, str] = {}  # by text of a chunk of this loop: the name of the block by threads
        self.outlive: dict[str, str] = {}  # by value of this loop: the variable that holds its last one
        self.sums: dict[tuple[str, tuple[Poly, ...]], PartialSum] = {}  # by target
        self.barriers = Barriers(scheduled, self.blocks)
        self.said: str | None = None

    # -- names ---------------------------------------------------------------------------------------------------
    def _spelling(self, name: str) -> str:
        return self.sum_names.get(name) or self.names[name]

    # -- the program's own indices -------------------------------------------------------------------------------
    def _multiple(self) -> int:
        axes = self.scheduled.row_axes
        return power_of_two_factor(axes[-1].extent, self.variant) if axes else 1

    def _prelude(self) -> list[Definition]:
        start = Text("tl.program_id(0)")
        if self.variant.wide or not self.blocks.flat:
            start = method(start, "to", "tl.int64")
        found, mask = program_indices(
            self.indices, self._spelling, self.names.fresh, start, self._multiple(), self.kernel.parallel
        )
        if mask:
            self.masks[ROW] = mask
        return [*self.args.sizes(), *found, *self._tiles()]

    def _tiles(self) -> list[Definition]:
        out: list[Definition] = []
        for a in self.kernel.tiles:
            if a.name not in self.blocks.looped:
                out += self._tile(a, "")
        return out

    def _tile(self, axis: ir.Axis, start: str) -> list[Definition]:
        """The index along a tile axis and its mask; `start` is the first index of a chunk."""
        dim, name = self.blocks.dims[axis.name], self.names[axis.name]
        lanes = f"tl.arange(0, {dim.size})"
        out = [Definition(name, f"{start} + {lanes}" if start else lanes)]
        if dim.ragged:
            condition = Text(f"{name} < {dim.extent}", COMPARE)
            chunk = self.scheduled.schedule.chunk(axis.name)
            if start and chunk is not None and chunk < dim.size:
                # The block is a power of two, the chunk is not: the next chunk begins inside this block.
                condition = Text(f"({condition}) & ({lanes} < {chunk})")
            out.append(Definition(self.masks[axis.name], str(condition)))
        return out

    # -- statements ----------------------------------------------------------------------------------------------
    def body(self) -> list[Line]:
        if self.scheduled.sums is not None:
            return self._sum_body(self.scheduled.sums)
        prelude = self._prelude()
        lines = self._steps(self.scheduled.steps)
        prelude += [Definition(name, address) for (_, address), name in self.memory.rows.items()]
        out = [Line(t) for t in used(prelude, (line.text for line in lines))]
        return [*out, Line(""), *lines] if out else lines

    def _steps(self, steps: Iterable[Step]) -> list[Line]:
        lines: list[Line] = []
        for step in steps:
            ragged = frozenset(k for k, d in self.blocks.dims.items() if d.ragged)
            lanes = MaskedLanes(self.kernel, step.body, ragged, self.held.others)
            if isinstance(step, Leave):
                condition = self.expressions.value(step.condition).text
                lines += [
                    Line(f"if {condition}:  # what is stored is there already", step.condition.span),
                    Line("    return", step.condition.span),
                ]
            elif isinstance(step, Choice):
                lines += self._choice(step)
            elif isinstance(step, Element):
                lines += self._element(step, lanes)
            elif isinstance(step, Loop):
                lines += self._loop(step, lanes)
            else:
                for s in step.body:
                    lines += self._statement(s, lanes)
        return lines

    def _choice(self, step: Choice) -> list[Line]:
        """One of two ways."""
        span = step.condition.span
        before = [*self.barriers.in_front_of(step), *self._comment(span)]
        stored, behind = self.barriers.stored, set[str]()
        for head, steps in ((f"if {self.expressions.value(step.condition).text}:", step.yes), ("else:", step.no)):
            self.barriers.stored, self.said = set(stored), None
            inside = self._steps(steps)
            before += [Line(head, span), *(Line(f"    {s.text}" if s.text else "", s.span) for s in inside)]
            behind |= self.barriers.stored
        self.barriers.stored, self.said = behind, None
        return before

    def _element(self, step: Element, lanes: MaskedLanes) -> list[Line]:
        """The element of a row's label, which is stored behind the pass over the row."""
        self.said = None
        out = [
            Line("# The element of the label, which the pass has stored as any other."),
            Line("tl.debug_barrier()"),
        ]
        for s in step.body:
            if isinstance(s, ir.Store):
                lines = self.memory.store_element(s, step.axis, step.label)
                out += [*self._comment(s.span), *(Line(t, s.span) for t in lines)]
            else:
                out += self._statement(s, lanes)
        return out

    def _sum_body(self, sums: Sums) -> list[Line]:
        """The loop over a program's share of the rows, with blocks of sums around it."""
        own = share(self.scheduled, sums, self.indices, self._spelling, self.names.fresh, self._multiple())
        if own.mask:
            self.masks[ROW] = own.mask
        before: list[Line] = []
        once = [step for step in self.scheduled.steps if isinstance(step, Straight) and step.once]
        before += self._steps(once)
        added = [s for step in self.scheduled.steps for s in step.body if isinstance(s, ir.Accumulate)]
        for s in added:
            total = PartialSum.of(s, self.names.fresh(f"{s.tensor}_sum"), self.blocks)
            self.sums[s.tensor, s.at] = total
            before += [*self._comment(s.span), Line(total.start(self.blocks), s.span)]
        self.said = None
        inside = self._steps(step for step in self.scheduled.steps if step not in once)
        if sums.zeroed:
            inside.append(Line("tl.debug_barrier()  # the next row adds to what this one has stored"))
        behind: list[Line] = []
        self.said = None
        for s in added:
            total = self.sums[s.tensor, s.at]
            self.sum_names[total.name] = total.name
            self.expressions.bound[total.name] = total.kept
            axes = ir.target_symbols(s) & self.blocks.axes
            value = ir.Ref(total.name, s.value.dtype, axes, s.span)
            behind += self._comment(s.span)
            texts = [*total.finish(), *self.memory.store(ir.Store(s.tensor, s.at, value, s.span))]
            behind += [Line(t, s.span) for t in texts]
        definitions = [*self.args.sizes(), *own.definitions, *self._tiles()]
        definitions += [Definition(name, address) for (_, address), name in self.memory.rows.items()]
        still, moving = partition(definitions, own.variable)
        head = used(moving, (line.text for line in inside))
        texts = [own.header, *head, *(line.text for line in (*before, *inside, *behind))]
        loop = [*(Line(t) for t in head), *([Line("")] if head else []), *inside]
        own_lines = [Line(t) for t in used(still, texts)]
        out = [
            *own_lines,
            *([Line("")] if own_lines else []),
            *before,
            Line(own.header),
            *(Line(f"    {line.text}" if line.text else "", line.span) for line in loop),
        ]
        return [*out, Line(""), *behind] if behind else out

    def _statement(self, s: ir.Stmt, lanes: MaskedLanes) -> list[Line]:
        out = self._comment(s.span)
        if isinstance(s, ir.Let):
            name = self.names[s.name]
            if isinstance(s.value, ir.Load):
                lines, dims = self._load(s.name, s.value, lanes.other.get(s.name))
            else:
                v = self._let(s.value, lanes)
                lines, dims = [f"{name} = {v.text}"], v.dims
            self.expressions.bound[s.name] = dims
            return [*out, *(Line(t, s.span) for t in lines)]
        if isinstance(s, ir.Accumulate):
            total = self.sums[s.tensor, s.at]
            return [*out, Line(total.step(self.expressions.value(s.value), self.memory.mask, self.blocks), s.span)]
        sums = self.scheduled.sums
        again = self.in_chunks is not None and not self.scheduled.schedule.held  # passes find rows in the caches
        streamed = again and (sums is None or s.tensor not in sums.zeroed)
        return [*out, *self.barriers.before(s), *(Line(t, s.span) for t in self.memory.store(s, streamed=streamed))]

    def _load(self, load: str, e: ir.Load, other: Number | None) -> tuple[list[str], tuple[str, ...]]:
        name, last = self.names[load], load in self.given_up_last
        if self.in_chunks is None or load not in self.scheduled.held:
            return self.memory.load(name, e, other, given_up_last=last)
        return self.held.take(load, name, e, f"{self.chunk_starts[self.in_chunks.axis]} // {self.in_chunks.chunk}")

    def _let(self, e: ir.Expr, lanes: MaskedLanes) -> Value:
        if isinstance(e, Finish):  # the lanes of partial results are neutral where they are masked
            return finished(e, self.expressions.value(e.arg))
        if isinstance(e, ir.Reduce):
            arg = self._masked_argument(e, lanes)
            return reduced(e, arg, self.blocks, self._position(e, arg.dims))
        return self.expressions.scalar_or_block(e)

    def _masked_argument(self, e: ir.Reduce, lanes: MaskedLanes) -> Value:
        dims = self.blocks.of(e.arg.axes)
        arg = self.expressions.value(e.arg)
        if arg.dims != dims or arg.text.literal:
            # The argument has lost an index on the way (`sum(where(c, 1.0, 1.0), n)`): give it its shape back.
            own = align(self.expressions.scalar_or_block(e.arg), dims)
            arg = Value(call("tl.broadcast_to", own, self.blocks.shape(dims)), dims)
        condition = None if lanes.holds_identity(e) else self.memory.mask(dims, only=frozenset(e.over))
        return masked(e, arg, condition)

    def _position(self, e: ir.Reduce, dims: tuple[str, ...]) -> Text | None:
        """The index along the axis of an argmax or argmin, in the shape of its argument."""
        if e.kind not in ("argmax", "argmin"):
            return None
        index = Value(Text(self.names[e.over[0]]), (e.over[0],))
        text = align(index, dims)
        return text if index.dims == dims else call("tl.broadcast_to", text, self.blocks.shape(dims))

    def _loop(self, step: Loop, lanes: MaskedLanes) -> list[Line]:
        axis = self.kernel.axis(step.axis)
        self.said = None  # what stands before the loop does not tell what is in it
        if step.axis not in self.chunk_starts:
            self.chunk_starts[step.axis] = self.names.fresh(f"{self.names[step.axis]}0")
        start = self.chunk_starts[step.axis]
        self.thread_views, self.outlive = {}, {}
        before = self._loads_ahead(step, lanes)
        self.in_chunks = step
        inside: list[Line] = []
        after: list[Line] = []
        header: Span | None = None
        before += self.barriers.in_front_of(step)
        for s in step.body:
            header = header or s.span
            e = s.value
            if not (isinstance(s, ir.Let) and isinstance(e, ir.Reduce) and step.axis in e.over):
                inside += self._statement(s, lanes)
                continue
            if isinstance(e, Partial):
                running, lines = self._running(s.name, e, step, lanes)
                before += [Line(t, s.span) for t in running.start()]
                inside += [*self._comment(s.span), *(Line(t, s.span) for t in lines)]
                continue
            acc = self._accumulator(s.name, e)
            before += [Line(t, s.span) for t in acc.start(self.blocks)]
            inside += self._comment(s.span)
            index = Value(Text(self.names[e.over[0]]), (e.over[0],))
            inside += [Line(t, s.span) for t in acc.step(self._masked_argument(e, lanes), index, self.blocks)]
            result = acc.finish(self.blocks)
            self.expressions.bound[s.name] = result.dims
            after.append(Line(f"{self.names[s.name]} = {result.text}", s.span))
        self.in_chunks = None
        prelude = used(self._tile(axis, start), (line.text for line in inside))
        inside = [*(Line(t) for t in prelude), *inside]
        self.said = None
        self.sum_names |= self.outlive
        counter = start
        if step.down:
            last = (axis.extent.constant - 1) // step.chunk * step.chunk
            counter = self.names.fresh(f"{self.names[step.axis]}_done")
            remark = "# from the last chunk back: what was read last is still in the cache"
            inside.insert(0, Line(f"{start} = {last} - {counter}  {remark}", header))
        loads = any(isinstance(s.value, ir.Load) for s in step.body)
        return [
            *before,
            Line(f"for {counter} in {self._chunks(f'0, {axis.extent.constant}, {step.chunk}', loads)}:", header),
            *(Line(f"    {line.text}" if line.text else "", line.span) for line in inside),
            *after,
        ]

    def _loads_ahead(self, step: Loop, lanes: MaskedLanes) -> list[Line]:
        """The loop in front of the pass `step` that loads what is held from there on."""
        loads = self.held.ahead(step)
        if not loads:
            return []
        axis, start = self.kernel.axis(step.axis), self.chunk_starts[step.axis]
        before = self.held.start(loads)
        inside: list[Line] = []
        for s in loads:
            inside += self._comment(s.span)
            lines = self.held.load(s, lanes.other.get(s.name), given_up_last=s.name in self.given_up_last)
            inside += [Line(t, s.span) for t in lines]
        self.said = None
        prelude = used(self._tile(axis, start), (line.text for line in inside))
        return [
            *(Line(t) for t in before),
            Line(f"for {start} in {self._chunks(f'0, {axis.extent.constant}, {step.chunk}', True)}:", loads[0].span),
            *(Line(f"    {t}") for t in prelude),
            *(Line(f"    {line.text}", line.span) for line in inside),
        ]

    def _chunks(self, bounds: str, loads: bool) -> str:
        # What is held is found by the number of the chunk, which must be known: such a pass is unrolled.
        unrolled = f"tl.static_range({bounds})"
        stages = self.scheduled.schedule.stages if loads else 1
        return unrolled if self.scheduled.held else loop_range(bounds, stages)

    def _running(self, name: str, e: Partial, step: Loop, lanes: MaskedLanes) -> tuple[Running, list[str]]:
        """A partial reduction of a loop, and the statements that take in a chunk."""
        spelled, size = self.names[name], self.blocks.dims[step.axis].size
        vector = min(vector_limit(self.kernel, self.variant, step.axis), size)
        threads = min(self.blocks.dims[THREAD].size, size // vector)
        against = None if e.shift is None else self.names.fresh(f"{spelled}_against")
        running = Running(e, spelled, against, size // (threads * vector), threads, vector)
        self.expressions.bound[name] = (THREAD,)
        # Masked lanes hold -inf, which adds nothing to a sum of exponentials either.
        text = str(self._masked_argument(e if e.of is None else replace(e, kind="max", arg=e.of), lanes).text)
        lines: list[str] = []
        if text not in self.thread_views:
            hint = f"{text}_by_thread" if text.isidentifier() else f"{spelled}_of"
            self.thread_views[text] = self.names.fresh(hint)
            lines.append(f"{self.thread_views[text]} = {running.view(Text(text))}  # slots, threads, lanes")
        chunk = Text(self.thread_views[text])
        if e.shift is None or against is None:
            return running, [*lines, running.larger(chunk)]
        terms = self.names.fresh(f"{spelled}_terms")
        lines += running.add_exponentials(chunk, Text(self.names[e.shift]), terms)
        self.outlive[e.shift] = against
        return running, lines

    def _accumulator(self, name: str, e: ir.Reduce) -> Accumulator:
        position = self.names.fresh(f"{name}_at") if e.kind in ("argmax", "argmin") else None
        return Accumulator(e, self.names.fresh(f"{name}_acc"), position, self.blocks.of(e.arg.axes))

    def _comment(self, span: Span) -> list[Line]:
        """The source line, unless the statement before came from the same one."""
        text = cited(span)
        if text == self.said or not text:
            return []
        self.said = text
        return [Line(f"# {text}", span)]

    # -- the file ------------------------------------------------------------------------------------------------
    def program(self) -> Program:
        body = self.body()
        code = "\n".join(line.text for line in body)
        called = helpers(code)
        entry = self.entry
        runtime = [self.args.identifier(a) for a in self.args.all if a.kind != "tensor"]
        source = render(
            "triton/kernel.py.j2",
            about=about(self.scheduled, self.args.pointer),
            libdevice="libdevice" in words("\n".join((code, *called))),
            helpers=called,
            unspecialized=runtime,
            entry=entry,
            parameters=self.args.parameters(),
            body=[line.text for line in body],
        )
        total = source.count("\n")
        spans = (*(None for _ in range(total - len(body))), *(line.span for line in body))
        stage = Stage(self.kernel, self.variant, self.scheduled.sums) if self.scheduled.staged else None
        return Program("triton", entry, source, self.args.all, self.scheduled.schedule, 0, spans, stage)
