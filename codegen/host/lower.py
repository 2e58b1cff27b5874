"""From a program to its plan: what is needed at all, which buffers there are, and how long each of them lives.

Meaning is the program's (`kgen.dsl.host.ir`); here it is only decided what is left out because nothing asks for it,
where a conversion is none, in what dtype sums are held, and when memory is taken and given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kgen.codegen.host import plan
from kgen.dsl.dtypes import DTYPES, F32, F64, DType
from kgen.dsl.host import ir

# How sums over chunks are held: in the dtype of the tensor, in f32 and rounded once, or (the reference) in f64.
SUMS = {"param": None, "f32": F32, "f64": F64}


def lower(program: ir.Program, dtypes: Mapping[str, DType], wanted: frozenset[str], accumulate: str) -> plan.Plan:
    """The plan of `program` for dtype variables as in `dtypes`, the gradients of the parameters `wanted`, and sums held
    as `accumulate`, one of `SUMS`, says."""
    return _Lowering(program, dtypes, wanted, SUMS[accumulate]).run()


class _Lowering:
    def __init__(
        self, program: ir.Program, dtypes: Mapping[str, DType], wanted: frozenset[str], wide: DType | None
    ) -> None:
        self.program = program
        self.dtypes = dtypes
        self.wide = wide
        self.gradients = {n: t for n, t in program.gradients.items() if n in wanted}
        self.buffers: dict[str, plan.Buffer] = {}
        self.alias: dict[str, ir.View] = {}
        self.homes = ir.homes(program)  # what each iteration of a loop has anew -> the chunk of the loop
        self.held: dict[str, str] = {}  # a sum -> the wider buffer that it is summed in
        self.sums: list[str] = []

    def run(self) -> plan.Plan:
        p = self.program
        forward, backward = self._live(p.forward, p.backward if self.gradients else ())
        self._find_aliases([*forward, *backward])
        self._find_reduced([*forward, *backward])
        forward, backward = self._without_aliases(forward), self._without_aliases(backward)
        made = {v.tensor for s in forward for v, how in self._views(s) if how != "read"}
        used = {v.tensor for s in backward for v, _ in self._views(s)} | set(self.gradients.values())
        outputs = tuple(p.outputs.items())
        saved = tuple(sorted(made & used))
        inputs = {n for n, t in p.tensors.items() if t.role == "in"}
        changed = {v.tensor for s in backward for v, how in self._views(s) if how != "read"}
        handed = (changed | set(self.gradients.values())) & set(saved)
        self._plan_sums([*forward, *backward])
        owns = [plan.Own(n, n in p.outputs.values()) for n in sorted(handed)]
        steps = self._section(forward, keep={t for _, t in outputs} | set(saved), there=set())
        back = self._section(backward, keep=set(self.gradients.values()), there=set(saved))
        return plan.Plan(
            name=p.name,
            buffers=self.buffers,
            forward=steps,
            outputs=outputs,
            backward=(*owns, *back),
            upstream=tuple((n, t) for n, t in p.upstream.items() if t in used),
            gradients=tuple(self.gradients.items()),
            saved=saved,
            saved_inputs=tuple(n for n in p.tensors if n in inputs & used),
            sums=tuple(self.sums),
            kernels={s.kernel: p.kernels[s.kernel] for s in _flat([*forward, *backward]) if isinstance(s, ir.Launch)},
        )

    # -- what is needed ------------------------------------------------------------------------------------------
    def _live(
        self, forward: Sequence[ir.Stmt], backward: Sequence[ir.Stmt]
    ) -> tuple[tuple[ir.Stmt, ...], tuple[ir.Stmt, ...]]:
        """The statements that outputs and wanted gradients depend on."""
        needed = {*self.program.outputs.values(), *self.gradients.values()}
        everything = [s for s in _flat([*forward, *backward]) if not isinstance(s, ir.Loop)]
        before = -1
        while len(needed) != before:
            before = len(needed)
            for s in everything:
                if _writes(s) & needed:
                    needed |= {v.tensor for v, _ in ir.views(s)}

        def keep(body: Sequence[ir.Stmt]) -> tuple[ir.Stmt, ...]:
            out: list[ir.Stmt] = []
            for s in body:
                if isinstance(s, ir.Loop):
                    inner = keep(s.body)
                    if inner:
                        out.append(replace(s, body=inner))
                elif _writes(s) & needed:
                    out.append(s)
            return tuple(out)

        return keep(forward), keep(backward)

    # -- conversions that are none -------------------------------------------------------------------------------
    def dtype(self, name: str) -> DType:
        """The dtype that a dtype or dtype variable is here."""
        return DTYPES[name] if name in DTYPES else self.dtypes[name]

    def _find_aliases(self, body: Sequence[ir.Stmt]) -> None:
        """Conversions to the dtype that is there already, of what nothing changes afterwards."""
        writes: dict[str, int] = {}
        for s in _flat(body):
            for n in _writes(s):
                writes[n] = writes.get(n, 0) + 1
        results = {*self.program.outputs.values(), *self.gradients.values()}
        for s in _flat(body):
            if not isinstance(s, ir.Convert) or self.dtype(s.target.dtype) != self.dtype(s.source.dtype):
                continue
            whole = not s.target.chunks and not s.target.transposed
            source = self.program.tensors[s.source.tensor]
            steady = writes.get(source.name, 0) == (source.role == "value")
            if whole and steady and writes[s.target.tensor] == 1 and s.target.tensor not in results:
                self.alias[s.target.tensor] = s.source

    def _find_reduced(self, body: Sequence[ir.Stmt]) -> None:
        """Values that nothing uses once the ranks have reduced them: the result takes their buffer."""
        results = {*self.program.outputs.values(), *self.gradients.values()}
        order = [(s, loop) for s, loop in _placed(body) if not isinstance(s, ir.Loop)]
        for at, (s, loop) in enumerate(order):
            if not isinstance(s, ir.AllReduce) or s.target.chunks or s.target.tensor in results:
                continue
            source = self._seen(s.source)
            uses = [
                (k, inside, v, how)
                for k, (other, inside) in enumerate(order)
                for v, how in self._views(other)
                if v.tensor == source.tensor
            ]
            own = self.program.tensors[source.tensor].role == "value" and source.tensor not in results
            # In a loop each iteration must make the value anew, or it would reduce what is reduced.
            _, _, first, how = uses[0]
            fresh = loop is None or (how == "write" and not first.chunks)
            over = all(k <= at and (loop is None or x is loop) for k, x, _, _ in uses)
            if own and fresh and over and not source.chunks:
                self.alias[s.target.tensor] = source

    def _without_aliases(self, body: Sequence[ir.Stmt]) -> tuple[ir.Stmt, ...]:
        return tuple(
            replace(s, body=self._without_aliases(s.body)) if isinstance(s, ir.Loop) else s
            for s in body
            if not (isinstance(s, ir.Convert) and s.target.tensor in self.alias)
        )

    def _views(self, s: ir.Stmt) -> Iterator[tuple[ir.View, str]]:
        for v, how in ir.views(s):
            yield self._seen(v), how

    def _seen(self, v: ir.View) -> ir.View:
        """`v` of the tensor that holds what it shows."""
        while v.tensor in self.alias:
            base = self.alias[v.tensor]
            flip = len(base.shape) - 1
            chunks = tuple((flip - a, c) for a, c in v.chunks) if base.transposed else v.chunks
            v = replace(
                v, tensor=base.tensor, chunks=(*base.chunks, *chunks), transposed=v.transposed != base.transposed
            )
        return v

    # -- sums ----------------------------------------------------------------------------------------------------
    def _plan_sums(self, body: Sequence[ir.Stmt]) -> None:
        """How sums over chunks are held. Sums of other kinds have as many roundings as statements."""
        for s, loop in _placed(body):
            if loop is None or not _added(s) or self._by_itself(s, loop):
                continue
            assert isinstance(s, ir.Product | ir.Sum)
            t = self.program.tensors[s.target.tensor]
            own = self.dtype(t.dtype)
            if self.wide is not None and own.bits < self.wide.bits:
                if t.name not in self.held:
                    self.held[t.name] = name = self._unused(f"{t.name}_sum")
                    self.buffers[name] = plan.Buffer(name, self.wide, t.shape)
            elif own.bits < F32.bits and t.name not in self.sums:
                self.sums.append(t.name)

    def _by_itself(self, s: ir.Stmt, loop: ir.Loop) -> bool:
        """Whether an addition in `loop` goes to memory that no other iteration adds to."""
        assert isinstance(s, ir.Product | ir.Sum)
        return self.homes.get(s.target.tensor) == loop.chunk or any(c == loop.chunk for _, c in s.target.chunks)

    def _widely(self, s: ir.Stmt, loop: ir.Loop | None) -> list[str]:
        """The tensor that a statement adds to, if it adds to the wider buffer of it."""
        alone = loop is not None and bool(_added(s)) and self._by_itself(s, loop)
        return [] if alone else [n for n in _added(s) if n in self.held]

    def _unused(self, name: str) -> str:
        while name in self.program.tensors or name in self.buffers:
            name += "_"
        return name

    # -- steps ---------------------------------------------------------------------------------------------------
    def _section(self, body: Sequence[ir.Stmt], keep: set[str], there: set[str]) -> tuple[plan.Step, ...]:
        """Steps with their buffers: each is there from the first statement that writes it to the last that uses it.
        `there` holds values before the first."""
        adds: dict[str, int] = {}
        for s in _flat(body):
            for n in _added(s):
                # What is there already is one more thing that is added up.
                adds[n] = adds.get(n, 1 if n in there else 0) + 1
        touched = [{v.tensor for v, _ in self._views(s)} for s in body]
        owned = {n for names in touched for n in names if self.program.tensors[n].role == "value"}
        first = {n: next(i for i, names in enumerate(touched) if n in names) for n in owned}
        last = {n: max(i for i, names in enumerate(touched) if n in names) for n in owned}
        added = [{n for x, loop in _placed([s]) for n in self._widely(x, loop)} for s in body]
        changed = [{n for x in _flat([s]) for n in _writes(x)} - added[i] for i, s in enumerate(body)]
        out: list[plan.Step] = []
        whole, wide = set(there), set[str]()  # sums that their tensor holds, and those that the wider buffer holds
        for i, s in enumerate(body):
            for n in sorted(owned):
                if first[n] == i and n not in there:
                    out += self._new(n, adds, self.held[n] if n in added[i] else n)
            for n in sorted(added[i] & whole - wide):
                out += self._widened(n)
            out += self._statement(s, adds, None)
            done = sorted(n for n in owned if last[n] == i and n not in keep)
            # What is done with makes room for the sums in their own dtype.
            out += [plan.Free(n) for n in done if n not in added[i]]
            for n in sorted(added[i]):
                # What is added next goes on from the wider sum, unless something else changes the tensor before.
                after = next((k for k in range(i + 1, len(body)) if n in added[k] | changed[k]), None)
                goes_on = after is not None and n in added[after]
                out += self._settled(n, n not in whole, not goes_on)
                wide = wide | {n} if goes_on else wide - {n}
            whole |= touched[i]
            out += [plan.Free(n) for n in done if n in added[i]]
        return tuple(out)

    def _new(self, name: str, adds: Mapping[str, int], held: str) -> list[plan.Step]:
        """Memory for a tensor that holds nothing yet, in the buffer `held`."""
        t = self.program.tensors[name]
        self.buffers[name] = plan.Buffer(name, self.dtype(t.dtype), t.shape)
        steps: list[plan.Step] = [plan.Alloc(self.buffers[held])]
        if adds.get(name, 0) > 1 and name not in self.homes:
            steps.append(plan.Zero(plan.View(held)))
        return steps

    def _widened(self, name: str) -> list[plan.Step]:
        """A wider buffer with what the tensor holds, for a sum that goes on."""
        held = self.held[name]
        return [plan.Alloc(self.buffers[held]), plan.Convert(plan.View(held), plan.View(name))]

    def _settled(self, name: str, first: bool, last: bool) -> list[plan.Step]:
        """The sum as it stands, rounded to its own dtype."""
        held = self.held[name]
        steps: list[plan.Step] = [plan.Alloc(self.buffers[name])] if first else []
        steps.append(plan.Convert(plan.View(name), plan.View(held)))
        return [*steps, plan.Free(held)] if last else steps

    def _statement(self, s: ir.Stmt, adds: Mapping[str, int], loop: ir.Loop | None) -> list[plan.Step]:
        if isinstance(s, ir.Loop):
            return self._loop(s, adds)
        if isinstance(s, ir.Launch):
            arguments = tuple((n, self._view(a) if isinstance(a, ir.View) else a) for n, a in s.arguments)
            return [plan.Launch(s.kernel, arguments, tuple(self._view(r) for r in s.results))]
        if isinstance(s, ir.Convert):
            return [plan.Convert(self._view(s.target), self._view(s.source))]
        if isinstance(s, ir.AllReduce):
            out = self._view(s.target)
            copy = [] if s.target.tensor in self.alias else [plan.Convert(out, self._view(s.source))]
            return [*copy, plan.AllReduce(out, s.kind)]
        accumulate, first = False, None
        if _added(s):
            several = adds[s.target.tensor] > 1
            over = loop is not None and not self._by_itself(s, loop)
            accumulate = several or over
            first = loop.chunk if over and not several and loop is not None else None
        out = self._view(s.target, summed=bool(self._widely(s, loop)))
        if isinstance(s, ir.Sum):
            return [plan.Add(out, self._view(s.source), accumulate, first)]
        plus = None if s.plus is None else self._view(s.plus)
        return [plan.Matmul(out, self._view(s.left), self._view(s.right), plus, accumulate, first)]

    def _loop(self, s: ir.Loop, adds: Mapping[str, int]) -> list[plan.Step]:
        begun: dict[str, int] = {}  # the sums that each iteration has anew: additions so far
        body: list[plan.Step] = []
        for inner in s.body:
            for n in _added(inner):
                if n in self.homes:
                    begun[n] = begun.get(n, 0) + 1
            body += self._statement(inner, {**adds, **begun}, s)
        # What the first iteration would have made is zero where there is none.
        empty = tuple(plan.Zero(b.out) for b in body if isinstance(b, plan.Matmul | plan.Add) and b.first)
        return [plan.Loop(s.chunk, s.dim, tuple(body), empty)]

    def _view(self, v: ir.View, *, summed: bool = False) -> plan.View:
        v = self._seen(v)
        return plan.View(self.held.get(v.tensor, v.tensor) if summed else v.tensor, v.chunks, v.transposed)


def _flat(body: Sequence[ir.Stmt]) -> Iterator[ir.Stmt]:
    """Every statement, those in loops too."""
    for s in body:
        yield s
        if isinstance(s, ir.Loop):
            yield from _flat(s.body)


def _placed(body: Sequence[ir.Stmt], loop: ir.Loop | None = None) -> Iterator[tuple[ir.Stmt, ir.Loop | None]]:
    """Every statement with the loop that it stands in."""
    for s in body:
        yield s, loop
        if isinstance(s, ir.Loop):
            yield from _placed(s.body, s)


def _writes(s: ir.Stmt) -> set[str]:
    return set() if isinstance(s, ir.Loop) else {v.tensor for v, how in ir.views(s) if how != "read"}


def _added(s: ir.Stmt) -> list[str]:
    """The tensor that a statement adds to, if it does."""
    return [s.target.tensor] if isinstance(s, ir.Sum) or (isinstance(s, ir.Product) and s.add) else []
