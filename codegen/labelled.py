"""Which elements of a row are compared with its label although only one can be equal to it?

`y[m, v] = p - where(v == t, a, 0.0)` compares and selects in every element of a pass over chunks. The pass stores what
it would if no element were the label's, and behind it one more statement stores that of the label, unless the row has
none. Its value is the same expression with the label in place of `v`: what is loaded along `v` is loaded at the label,
in front of everything, as the pass may overwrite it.

Only passes over chunks, where a program has one row: see `kgen.codegen.unswitch`. As multiples of a copy of the same
bytes, Triton's cross entropy in place of 4096x128256 takes 1.25 so and 1.32 before, that of 8192x32000 1.10 and 1.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kgen.codegen.fold import Known, folded, settled, truth
from kgen.codegen.hoist import hoist
from kgen.codegen.names import fresh, taken_names
from kgen.codegen.narrow import Label
from kgen.codegen.phases import below, live, refs
from kgen.codegen.schedule import Choice, Element, Loop, Partial, Schedule, Step, Straight
from kgen.dsl import ir
from kgen.dsl.affine import Poly


def labels_apart(kernel: ir.Kernel, schedule: Schedule, steps: tuple[Step, ...]) -> tuple[ir.Kernel, tuple[Step, ...]]:
    """`steps` of a kernel without sums over programs with such elements stored behind their pass, and `kernel` with
    what is loaded for them."""
    if schedule.rows > 1:
        return kernel, steps
    passes = _Passes(kernel, steps)
    done = passes.steps(steps)
    if not passes.loads:
        return kernel, done

    def body(statements: tuple[ir.Stmt, ...]) -> tuple[ir.Stmt, ...]:
        """With the new loads of a label behind it."""
        loads = ((s, *passes.loads.get(s.name, ())) if isinstance(s, ir.Let) else (s,) for s in statements)
        return tuple(s for one in loads for s in one)

    done = tuple(replace(s, body=body(s.body)) if isinstance(s, Straight) else s for s in done)
    return replace(kernel, body=body(kernel.body)), done


class _Unfit(Exception):
    """The value of an element cannot be had by itself."""


class _Passes:
    def __init__(self, kernel: ir.Kernel, steps: tuple[Step, ...]) -> None:
        self.kernel = kernel
        self.tiles = frozenset(a.name for a in kernel.tiles)
        self.taken = taken_names(kernel) | {s.name for step in steps for s in step.body if isinstance(s, ir.Let)}
        self.lets: dict[str, ir.Let] = {}  # values of the row so far
        self.stored: set[str] = set()  # tensors
        self.loads: dict[str, list[ir.Let]] = {}  # new ones, by label

    def steps(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        out: list[Step] = []
        for step in steps:
            if isinstance(step, Choice):
                outside, stored = dict(self.lets), set(self.stored)
                yes = self.steps(step.yes)
                self.lets, self.stored = outside | self._loaded(), stored
                step = replace(step, yes=yes, no=self.steps(step.no))
                self.lets = outside | self._loaded()
            new = tuple(self._pass(step)) if isinstance(step, Loop) else (step,)
            out += new
            for s in (s for one in new for s in one.body):
                if not isinstance(s, ir.Let):
                    self.stored.add(s.tensor)
                elif not isinstance(step, Choice) and not s.value.axes & self.tiles:
                    self.lets[s.name] = s
        return tuple(out)

    def _loaded(self) -> dict[str, ir.Let]:
        """The new loads, by name: they stand in front of all passes, so every way has them."""
        return {s.name: s for loads in self.loads.values() for s in loads}

    def _pass(self, step: Loop) -> Iterator[Step]:
        """The pass, and the elements apart behind it, if there are such."""
        label = self._label(step)
        if label is None:
            yield step
            return
        # What is the same in the whole row has a name, as the element needs it too.
        *before, loop = hoist((step,), lambda axes: bool(axes & self.tiles), self.taken)
        assert isinstance(loop, Loop)  # as it was
        try:
            element = _At(self, loop, label).element()
        except _Unfit:
            yield step
            return
        loop = replace(loop, body=settled(loop.body, step.axis, _comparisons(step.axis, label.name, False)))
        used = frozenset[str]().union(*(refs(s.value) for s in (*loop.body, *element.body)))
        for values in before:
            if body := live(values.body, used):
                yield Straight(body)
        yield loop
        yield element

    def _label(self, step: Loop) -> ir.Let | None:
        """The only label that `step` compares elements with, where nothing that it adds up or hands on depends on
        that."""
        lets = {s.name: s.value for s in step.body if isinstance(s, ir.Let)}
        reduced = [e for e in lets.values() if isinstance(e, ir.Reduce)]
        if any(isinstance(e, Partial) for e in reduced):
            return None
        names = _names(step.axis, (s.value for s in step.body)) & self.lets.keys()
        labels = [let for name in names if isinstance((let := self.lets[name]).value, Label)]
        below_sums = (lets[n] for e in reduced for n in below(e, lets))
        if len(labels) != 1 or labels[0].name in _names(step.axis, (*reduced, *below_sums)):
            return None
        return labels[0]


def _names(axis: str, values: Iterable[ir.Expr]) -> set[str]:
    """What `values` compare the index `axis` with, by name."""
    found = (_compared(n, axis) for e in values for n in ir.walk(e))
    return {ref.name for ref in found if ref is not None}


def _compared(e: ir.Expr, axis: str) -> ir.Ref | None:
    """The named value that `e` compares the index `axis` with."""
    if isinstance(e, ir.Op) and e.fn in ("eq", "ne"):
        for index, label in (e.args, e.args[::-1]):
            if isinstance(index, ir.IndexValue) and index.index.as_symbol == axis and isinstance(label, ir.Ref):
                return label
    return None


def _comparisons(axis: str, label: str, equal: bool) -> Known:
    """Comparisons of the index `axis` with `label`."""

    def known(e: ir.Expr) -> ir.Expr | None:
        ref = _compared(e, axis)
        if ref is None or ref.name != label or not isinstance(e, ir.Op):
            return None
        return truth(equal == (e.fn == "eq"), e)

    return known


class _At:
    """The values of a pass at its label."""

    def __init__(self, passes: _Passes, loop: Loop, label: ir.Let) -> None:
        self.passes = passes
        self.loop = loop
        self.axis = loop.axis
        self.label = label
        self.ref = ir.Ref(label.name, label.value.dtype, label.value.axes, label.span)
        self.compared = _comparisons(loop.axis, label.name, True)
        self.values: dict[str, ir.Expr] = {}  # by name of a value along the axis
        self.own: list[ir.Stmt] = []
        self.new: list[ir.Let] = []  # loads

    def element(self) -> Element:
        """The stores that the label decides about. Raises `_Unfit`."""
        lets = {s.name: s.value for s in self.loop.body if isinstance(s, ir.Let)}
        stores = [s for s in self.loop.body if isinstance(s, ir.Store) and self._decides(s, lets)]
        needed = frozenset[str]().union(*(below(s.value, lets) for s in stores))
        used = Counter(n for s in stores for n in refs(s.value))
        used += Counter(n for name in needed for n in refs(lets[name]))
        for s in self.loop.body:
            if isinstance(s, ir.Let) and s.name in needed:
                self.values[s.name] = self._value(s, used[s.name])
        for s in stores:
            if [p for p in s.at if p.symbols & self.passes.tiles] != [Poly.sym(self.axis)] or self._leading(s):
                raise _Unfit
            self.own.append(replace(s, value=self._put(s.value)))
        body = live(self.own)
        used = frozenset[str]().union(*(refs(s.value) for s in body))
        new = [s for s in live(self.new, used) if isinstance(s, ir.Let)]
        if new:
            self.passes.loads.setdefault(self.label.name, []).extend(new)
            self.passes.lets |= {s.name: s for s in new}
        return Element(self.axis, self.ref, body)

    def _leading(self, access: ir.Store | ir.Load) -> bool:
        """Whether the axis stands for any number of dimensions, of which no value is a subscript."""
        first = access.at[0]
        return self.passes.kernel.tensor(access.tensor).star and isinstance(first, Poly) and self.axis in first.symbols

    def _decides(self, s: ir.Store, lets: dict[str, ir.Expr]) -> bool:
        return self.label.name in _names(self.axis, (s.value, *(lets[n] for n in below(s.value, lets))))

    def _value(self, s: ir.Let, uses: int) -> ir.Expr:
        """The value of `s` at the label: by its name if it has one, or is used several times."""
        if isinstance(s.value, ir.Load):
            return self._loaded(s, s.value)
        value = self._put(s.value)
        there = self._there(value)
        if there is not None or uses < 2 or isinstance(value, ir.Ref | ir.Const):
            return there or value
        let = ir.Let(fresh(f"{s.name}_at_label", self.passes.taken), value, s.span)
        self.own.append(let)
        return ir.Ref(let.name, value.dtype, value.axes, s.span)

    def _put(self, e: ir.Expr) -> ir.Expr:
        """`e` with the label for the index."""
        value = folded(e, self._known)
        if value.axes & self.passes.tiles:
            raise _Unfit
        return value

    def _known(self, e: ir.Expr) -> ir.Expr | None:
        if isinstance(e, ir.Ref):
            return self.values.get(e.name)
        if isinstance(e, ir.IndexValue) and self.axis in e.index.symbols:
            assert isinstance(self.label.value, Label)  # the caller looked
            return self.label.value.wide if e.index.as_symbol == self.axis else None
        return self.compared(e)

    def _loaded(self, s: ir.Let, load: ir.Load) -> ir.Expr:
        """The element of a load at the label: as the kernel loads it already, or by a load of its own."""
        assert isinstance(self.label.value, Label)  # the caller looked
        if load.at and self._leading(load):
            raise _Unfit
        for index in (self.label.value.wide, self.ref):
            at = tuple(self._subscript(p, index) for p in load.at)
            axes = frozenset[str]().union(*(p.symbols if isinstance(p, Poly) else p.axes for p in at))
            own = replace(load, at=at, axes=axes & frozenset(a.name for a in self.passes.kernel.axes))
            if own.axes & self.passes.tiles:
                raise _Unfit
            name = self._there(own)
            if name is not None:
                return name
        # In front of everything, right behind the label.
        so_far = list(self.passes.lets)
        there = {*so_far[: so_far.index(self.label.name) + 1], *(n.name for n in self.new)}
        if load.tensor in self.passes.stored or not refs(own) <= there:
            raise _Unfit
        let = ir.Let(fresh(f"{s.name}_at_label", self.passes.taken), own, s.span)
        self.new.append(let)
        return ir.Ref(let.name, own.dtype, own.axes, s.span)

    def _subscript(self, p: Poly | ir.Expr, index: ir.Expr) -> Poly | ir.Expr:
        if not isinstance(p, Poly):
            return self._put(p)
        if self.axis not in p.symbols:
            return p
        if p.as_symbol != self.axis:
            raise _Unfit
        return index

    def _there(self, value: ir.Expr) -> ir.Ref | None:
        """The name of what the row has computed or loaded already."""
        lets = (*self.passes.lets.values(), *self.new)
        name = next((s.name for s in lets if ir.same(s.value, value)), None)
        return None if name is None else ir.Ref(name, value.dtype, value.axes, value.span)
