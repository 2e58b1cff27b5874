"""`schedule` statements: sizes that exist and fit together, conditions that are known when a kernel is compiled.

A rule sets sizes of one backend's schedule where its condition holds; of several the first that holds counts. Which
sizes suit a kernel depends on those of a call, so most of that is checked when it is compiled (`kgen.codegen.knobs`);
here is refused what is wrong for every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.check.operations import Stop
from kgen.dsl.check.scope import Scope
from kgen.dsl.check.signature import index_poly
from kgen.dsl.diagnostics import Diagnostics, suggestion
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.knobs import BACKENDS, CHUNK, KNOBS, REGISTER_FILE, WARP, WHOLE, Knob, power_of_two
from kgen.dsl.proofs.prove import Facts
from kgen.dsl.source import Span

_EXAMPLE_CHUNK = 1024
_RELATIONS = ("==", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class Rule:
    """A rule, and whether it counts on every path and for every dtype where its condition on sizes holds."""

    rule: ir.ScheduleRule
    always: bool


class Schedules:
    """Makes the rules of one kernel from its statements, which are all elaborated."""

    def __init__(self, scope: Scope, fail: Callable[..., Stop]) -> None:
        self.scope = scope
        self.fail = fail
        self.tiles = [a for a in scope.axes.values() if a.kind == "tile"]
        self.consts = {s.name for s in scope.signature.scalars if s.const and DTYPES[s.dtype].kind == "int"}
        self.known = frozenset[str]().union(*(a.extent.symbols for a in self.tiles)) | self.consts

    def rules(self) -> list[Rule]:
        """The rules of this path, in order; those whose dtype is another one are left out."""
        out: list[Rule] = []
        for statement, always in self.scope.schedules:
            try:
                rule = self._rule(statement, always)
            except Stop:
                continue
            if rule is not None:
                out.append(rule)
        return out

    def _rule(self, s: ast.Schedule, always: bool) -> Rule | None:
        if s.backend not in BACKENDS:
            message = f"there is no backend '{s.backend}' that has schedules"
            raise self.fail("K0240", message, s.backend_span, suggestion(s.backend, BACKENDS))
        sizes, chunks = self._settings(s)
        self._together(s, dict(sizes), dict(chunks))
        when: list[ir.Requirement] = []
        dtypes = False
        for c in _conjuncts(s.condition):
            held = self._dtype(c)
            if held is None:
                when.append(self._comparison(c))
            elif not held:
                return None
            dtypes |= held is not None
        rule = ir.ScheduleRule(s.backend, tuple(when), tuple(sizes), tuple(chunks), s.span)
        return Rule(rule, always and not dtypes)

    # -- sizes ---------------------------------------------------------------------------------------------------
    def _settings(self, s: ast.Schedule) -> tuple[list[tuple[str, int]], list[tuple[str, int | None]]]:
        sizes: list[tuple[str, int]] = []
        chunks: list[tuple[str, int | None]] = []
        seen: set[tuple[str, str | None]] = set()
        for x in s.settings:
            knob = KNOBS.get(x.name)
            if knob is None or s.backend not in knob.backends:
                raise self._unknown(s, x, knob)
            if (x.name, x.index) in seen:
                raise self.fail("K0242", f"'{x.name}' is set twice", x.span, "keep one of the two")
            seen.add((x.name, x.index))
            self._index(x)
            if x.value == WHOLE and x.name == CHUNK:
                chunks.append((x.index or "", None))
                continue
            n = self._number(s, x, knob)
            if x.name == CHUNK:
                chunks.append((x.index or "", n))
            else:
                sizes.append(("threads", WARP * n) if x.name == "warps" else (x.name, n))
        return sizes, chunks

    def _unknown(self, s: ast.Schedule, x: ast.Setting, knob: Knob | None) -> Stop:
        there = [k.name for k in KNOBS.values() if s.backend in k.backends]
        listed = f"there are {', '.join(there)}"
        if knob is not None:
            instead = {"threads": "write warps, of 32 threads", "warps": "write threads, 32 a warp"}.get(x.name, listed)
            return self.fail("K0241", f"'{x.name}' is no knob of {s.backend}", x.name_span, instead)
        return self.fail("K0241", f"there is no knob '{x.name}'", x.name_span, suggestion(x.name, there))

    def _index(self, x: ast.Setting) -> None:
        """A chunk is of a tile index, all else of none."""
        if x.name != CHUNK:
            if x.index is not None:
                raise self.fail("K0242", f"'{x.name}' has no index", x.span, f"write {x.name} = {x.value}")
            return
        names = [a.name for a in self.tiles]
        listed = f"tile indices: {', '.join(names) or 'none, so nothing is taken in chunks'}"
        if x.index is None:
            raise self.fail("K0243", "a chunk is of a tile index", x.span, f"write chunk[n] = {x.value}; {listed}")
        if x.index not in names:
            span = x.index_span or x.span
            raise self.fail("K0243", f"'{x.index}' is not a tile index", span, suggestion(x.index, names) or listed)

    def _number(self, s: ast.Schedule, x: ast.Setting, knob: Knob) -> int:
        n = x.value
        power = knob.power or (x.name == CHUNK and s.backend == "triton")
        if not isinstance(n, int):
            message = f"'{x.name}' is {n}, which is no whole number"
            raise self.fail("K0242", message, x.value_span, _allowed(knob, power, knob.least))
        if not knob.least <= n <= knob.most or (power and not power_of_two(n)):
            raise self.fail("K0242", f"'{x.name}' cannot be {n}", x.value_span, _allowed(knob, power, n))
        return n

    def _together(self, s: ast.Schedule, sizes: dict[str, int], chunks: dict[str, int | None]) -> None:
        spans = {x.name: x.span for x in s.settings}
        threads, rows = sizes.get("threads"), sizes.get("rows")
        if s.backend == "cuda" and rows is not None:
            most, least = threads or KNOBS["threads"].most, threads or KNOBS["threads"].least
            if self.tiles and rows > most:
                message = f"{rows} rows do not share out among {most} threads"
                more = "" if threads is not None else f", of which a program has at most {most}"
                raise self.fail("K0242", message, spans["rows"], f"take no more rows than threads{more}")
            if not self.tiles and rows < least:
                message = f"{least} threads have {rows} points to take"
                more = "" if threads is not None else f": a program has at least {least}"
                raise self.fail("K0242", message, spans["rows"], f"take a point a thread, or more{more}")
        self._cluster(s, sizes, spans)
        if sizes.get("stages", 1) > 1 and not any(isinstance(b, ir.Accumulate) for b in self.scope.body):
            looped = [a.name for a in self.tiles if chunks.get(a.name, 0) is not None]
            if not looped:
                raise self.fail("K0242", "'stages' is for loops, and here is none", spans["stages"], self._or_chunks())
        if "registers" in sizes and (threads or WARP) * sizes["registers"] > REGISTER_FILE:
            warps = (threads or WARP) // WARP
            message = f"{warps} warps have no {sizes['registers']} registers a thread"
            raise self.fail("K0242", message, spans["registers"], f"write {REGISTER_FILE // (warps * WARP)}, or fewer")
        if "blocks" in sizes and not any(isinstance(b, ir.Accumulate) for b in self.scope.body):
            hint = "remove it: how many programs there are follows from rows"
            raise self.fail("K0242", "'blocks' is for kernels that sum over programs", spans["blocks"], hint)
        if "ahead" in sizes and not self.tiles:
            hint = "remove it: only a kernel with tile indices asks ahead"
            raise self.fail("K0242", "'ahead' is for kernels with tile indices", spans["ahead"], hint)
        if "peel" in sizes and not self.tiles:
            hint = "remove it: only a kernel with tile indices has rows to peel"
            raise self.fail("K0242", "'peel' is for kernels with tile indices", spans["peel"], hint)
        self._hold(sizes, chunks, spans)
        chunked = [x for x in s.settings if x.name == CHUNK and x.value != WHOLE]
        if rows is not None and rows > 1 and any(isinstance(b, ir.Accumulate) for b in self.scope.body):
            summed = {n for b in self.scope.body if isinstance(b, ir.Accumulate) for p in b.at for n in p.symbols}
            wrong = next((x for x in chunked if x.index in summed), None)
            if wrong is not None:
                message = f"sums along '{wrong.index}' in chunks are of one row at a time"
                raise self.fail("K0242", message, spans["rows"], "write rows = 1")

    def _or_chunks(self) -> str:
        """What to do about a size that is for chunks, where all tile indices are set to be whole."""
        if not self.tiles:
            return "remove it: there is no tile index to take in chunks"
        n = self.tiles[0].name
        return f"remove it, or write a size in place of {WHOLE}, such as chunk[{n}] = {_EXAMPLE_CHUNK}"

    def _hold(self, sizes: dict[str, int], chunks: dict[str, int | None], spans: dict[str, Span]) -> None:
        """What several passes over the chunks of a row read is held. Whether a row is taken in chunks at all may depend
        on its size; whether there would be a second pass over it does not."""
        if "hold" not in sizes:
            return
        looped = [a.name for a in self.tiles if chunks.get(a.name, 0) is not None]
        if not looped:
            raise self.fail("K0242", "'hold' is for rows in chunks, and here is none", spans["hold"], self._or_chunks())
        if any(isinstance(b, ir.Accumulate) for b in self.scope.body):
            hint = "remove it: beside the sums there is no room for a row"
            raise self.fail("K0242", "'hold' is for kernels that do not sum over programs", spans["hold"], hint)
        # With several tile indices, stores in place may be put off to a pass of their own.
        put_off = len(looped) > 1 and any(t.role == "inout" for t in self.scope.tensors.values())
        if sizes["hold"] and not put_off and not _passes_wait(self.scope.body, frozenset(looped)):
            message = "'hold' is for rows that several passes read, and here one pass is all"
            names = ", ".join(looped)
            hint = f"remove it: nothing along {names} is computed from a reduction over {names}"
            raise self.fail("K0242", message, spans["hold"], hint)

    def _cluster(self, s: ast.Schedule, sizes: dict[str, int], spans: dict[str, Span]) -> None:
        """A cluster holds one row whole."""
        n = sizes.get("cluster", 1)
        if n == 1:
            return
        if not self.tiles:
            hint = "remove it: a cluster holds a row together"
            raise self.fail("K0242", "'cluster' is for kernels with tile indices", spans["cluster"], hint)
        if sizes.get("rows", 1) > 1:
            message = f"a cluster of {n} takes one row"
            raise self.fail("K0242", message, spans["rows"], "write rows = 1, or remove the cluster")
        chunk = next((x for x in s.settings if x.name == CHUNK and x.value != WHOLE), None)
        if chunk is not None:
            hint = f"write chunk[{chunk.index}] = {WHOLE}, or remove the cluster"
            raise self.fail("K0242", f"a cluster of {n} holds a row whole", chunk.span, hint)

    # -- conditions ----------------------------------------------------------------------------------------------
    def _dtype(self, c: ast.Expr) -> bool | None:
        """Whether a comparison of a dtype variable with a dtype holds on this path; None for any other condition."""
        if not (isinstance(c, ast.Binary) and isinstance(c.left, ast.Name) and isinstance(c.right, ast.Name)):
            return None
        variables = self.scope.signature.dtype_vars
        var, name = (c.left, c.right) if c.left.id in variables else (c.right, c.left)
        if var.id not in variables:
            return None
        if c.op not in ("==", "!=") or name.id not in DTYPES:
            hint = f"write {var.id} == bf16, or another dtype"
            raise self.fail("K0244", f"'{c.span.text}' compares a dtype variable with no dtype", c.span, hint)
        if DTYPES[name.id] not in variables[var.id]:
            allowed = ", ".join(map(str, variables[var.id]))
            hint = f"{var.id} stands for one of {allowed}"
            raise self.fail("K0245", f"{var.id} is never {name.id}", c.span, hint)
        return (self.scope.dtype(var.id) == DTYPES[name.id]) == (c.op == "==")

    def _comparison(self, c: ast.Expr) -> ir.Requirement:
        if not (isinstance(c, ast.Binary) and c.op in _RELATIONS):
            hint = "write comparisons of sizes and dtypes, joined by `and`, such as N <= 4096 and T == bf16"
            raise self.fail("K0244", "a schedule's condition is a comparison", c.span, hint)
        left, right = (index_poly(x, self._size, self.scope.diagnostics) for x in (c.left, c.right))
        if left is None or right is None:
            self.scope.broken = True  # reported by index_poly
            raise Stop
        return ir.Requirement(c.op, left, right, c.span)

    def _size(self, name: ast.Name) -> Poly | None:
        poly = None if name.id in self.scope.axes else self.scope.poly_name(name.id)
        there = sorted(self.known & {*self.scope.signature.dims, *self.consts})
        listed = (
            f"sizes that are known then: {', '.join(there)}" if there else "it has no tile index, and so no such size"
        )
        if poly is None:
            raise self.fail(
                "K0244", f"'{name.id}' is no size that is known when the kernel is compiled", name.span, listed
            )
        if not poly.symbols <= self.known:
            message = f"'{name.id}' is a run-time size: a new one compiles nothing, and changes no schedule"
            raise self.fail("K0244", message, name.span, listed)
        return poly


def _allowed(knob: Knob, power: bool, near: int) -> str:
    """What may be written for `knob`, with the allowed size next to `near`."""
    if (knob.least, knob.most) == (0, 1):
        return f"write 0 or 1 ({knob.meaning})"
    kind = "a power of two" if power else "a whole number"
    limits = f"from {knob.least} on" if knob.name == CHUNK else f"from {knob.least} to {knob.most}"
    size = max(knob.least, min(near, knob.most))
    if power:
        size = 1 << (size.bit_length() - 1)  # the next one down
    other = f", or {WHOLE}" if knob.name == CHUNK else ""
    return f"write {kind} {limits}, such as {size}{other} ({knob.meaning})"


def _passes_wait(body: Iterable[ir.Stmt], tiles: frozenset[str]) -> bool:
    """Whether something along one of `tiles` is stored or reduced that comes from a reduction over one of them: if not,
    all chunks of a row are gone through once, whatever the sizes are."""
    reduced: set[str] = set()  # what comes from a reduction

    def waits(e: ir.Expr) -> bool:
        return any(
            bool(tiles.intersection(n.over))
            if isinstance(n, ir.Reduce)
            else isinstance(n, ir.Ref) and n.name in reduced
            for n in ir.walk(e)
        )

    for s in body:
        if any(isinstance(n, ir.Reduce) and tiles.intersection(n.over) and waits(n.arg) for n in ir.walk(s.value)):
            return True
        if isinstance(s, ir.Let):
            reduced |= {s.name} if waits(s.value) else set()
        elif tiles & (s.value.axes | ir.target_symbols(s)) and waits(s.value):
            return True
    return False


def _conjuncts(e: ast.Expr | None) -> Iterator[ast.Expr]:
    if isinstance(e, ast.Binary) and e.op == "and":
        yield from _conjuncts(e.left)
        yield from _conjuncts(e.right)
    elif e is not None:
        yield e


# ---- rules that never count ----------------------------------------------------------------------------------------


def reached(kernel: ir.Kernel) -> tuple[ir.ScheduleRule, ...]:
    """The rules of `kernel` that may count, as far as `check_reached` sees."""
    bare, out = replace(kernel, requires=()), list[ir.ScheduleRule]()
    for rule in kernel.schedules:
        if not any(_covers(bare, r, rule) for r in out):
            out.append(rule)
    return tuple(out)


def check_reached(kernel: ir.Kernel, rules: list[Rule], diagnostics: Diagnostics) -> None:
    """Report rules whose condition contradicts itself, and those behind one that holds wherever they do."""
    # What a path requires says nothing about the others, on which the rule may count.
    kernel = replace(kernel, requires=())
    for i, own in enumerate(rules):
        when = own.rule.when
        wrong = next((c for k, c in enumerate(when) if _implies(kernel, when[:k] + when[k + 1 :], _negated(c))), None)
        if wrong is not None:
            message = f"this never holds beside the rest of the condition: {wrong.span.text}"
            help = "change one of the comparisons, or remove the statement"
            diagnostics.error("K0245", message, wrong.span, help=help)
            continue
        before = next((r.rule for r in rules[:i] if r.always and _covers(kernel, r.rule, own.rule)), None)
        if before is not None:
            diagnostics.error(
                "K0246",
                "this schedule is never taken: one before it holds wherever it does",
                own.rule.span,
                help="put the narrower condition first, or remove one of them",
                notes=(f"the one before is at {before.span}",),
            )


def _covers(kernel: ir.Kernel, first: ir.ScheduleRule, rule: ir.ScheduleRule) -> bool:
    """Whether `first`, of the same backend, is shown to hold wherever `rule` does."""
    return first.backend == rule.backend and all(_implies(kernel, rule.when, [c]) for c in first.when)


def _implies(kernel: ir.Kernel, when: tuple[ir.Requirement, ...], any_of: list[ir.Requirement]) -> bool:
    """Whether one of `any_of` is shown to hold wherever all of `when` do."""
    facts = Facts(kernel, about=[p for c in any_of for p in (c.left, c.right)], requires=when)
    return any(_shown(facts, c) for c in any_of)


def _shown(facts: Facts, c: ir.Requirement) -> bool:
    a, b = c.left, c.right
    match c.op:
        case "<":
            return facts.prove_positive(b - a)
        case "<=":
            return facts.prove_nonneg(b - a)
        case ">":
            return facts.prove_positive(a - b)
        case ">=":
            return facts.prove_nonneg(a - b)
        case "==":
            return facts.prove_equal(a, b)
        case _:
            return facts.prove_positive(a - b) or facts.prove_positive(b - a)


def _negated(c: ir.Requirement) -> list[ir.Requirement]:
    """The comparison that holds where `c` does not."""
    other = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}[c.op]
    return [replace(c, op=other)]
