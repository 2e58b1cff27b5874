"""Phases: which statements run once, which in a pass over the chunks of an axis, and in which order?

The *level* of a value is the number of reductions over looped axes that must be finished, one after the other, before
it can be computed. At each level stand the statements that run once, then one pass a looped axis. Values along a looped
axis are computed again in every pass that needs them; whatever a pass needs of the others is finished before it.

Does not choose what is looped (`kgen.codegen.choose`); refuses what cannot be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kgen.codegen.normalize import statement_axes
from kgen.codegen.schedule import Loop, Schedule, ScheduleError, Step, Straight
from kgen.dsl import ir
from kgen.dsl.affine import Poly


def phases(kernel: ir.Kernel, schedule: Schedule) -> tuple[Step, ...]:
    """The steps of `kernel`, which is in normal form. Raises `ScheduleError` where `schedule.chunks` cannot be met."""
    looped = {axis: chunk for axis, chunk in schedule.chunks if chunk <= kernel.axis(axis).extent.constant}
    return _Phases(kernel, looped).steps() if looped else (Straight(kernel.body),)


@dataclass(frozen=True)
class _Place:
    """When a statement runs: after `level` reductions; `axis` is the pass, or None for the statements before it."""

    level: int
    axis: str | None


class _Phases:
    def __init__(self, kernel: ir.Kernel, looped: dict[str, int]) -> None:
        self.kernel = kernel
        self.looped = looped
        self.lets = {s.name: s for s in kernel.body if isinstance(s, ir.Let)}
        self.uses = {s.name: refs(s.value) for s in self.lets.values()}
        self.level: dict[str, int] = {}
        for s in self.lets.values():
            self._one_axis(statement_axes(s), s)
            self.level[s.name] = self._level(self.uses[s.name])
        self.stores = [s for s in kernel.body if not isinstance(s, ir.Let)]
        for s in self.stores:
            self._one_axis(statement_axes(s), s)
        self.places = [_Place(self._level(refs(s.value)), self._axis(s)) for s in self.stores]
        self._order_overwrites()

    def steps(self) -> tuple[Step, ...]:
        out: list[Step] = []
        for place in self._sequence():
            body = self._body(place)
            if body and place.axis is None:
                out.append(Straight(body))
            elif body and place.axis is not None:
                out.append(Loop(place.axis, self.looped[place.axis], body))
        return tuple(out)

    def _sequence(self) -> Iterator[_Place]:
        last = max([*self.level.values(), *(p.level for p in self.places)], default=0)
        for level in range(last + 1):
            for axis in (None, *self.looped):
                yield _Place(level, axis)

    def _one_axis(self, axes: frozenset[str], s: ir.Stmt) -> None:
        both = [a for a in self.looped if a in axes]
        if len(both) > 1:
            raise ScheduleError(
                f"a schedule of {self.kernel.name} cannot take both {both[0]} and {both[1]} in chunks: "
                f"line {s.span.line} has values along both; leave one of them whole"
            )

    def _axis(self, s: ir.Stmt) -> str | None:
        """The looped axis of the pass that `s` belongs to."""
        axes = statement_axes(s)
        return next((a for a in self.looped if a in axes), None)

    def _finishes(self, name: str) -> bool:
        """Whether `name` is an accumulator of a pass: a reduction over a looped axis."""
        value = self.lets[name].value
        return isinstance(value, ir.Reduce) and any(a in self.looped for a in value.over)

    def _level(self, names: Iterable[str]) -> int:
        return max((self.level[n] + self._finishes(n) for n in names), default=0)

    # -- what a pass holds ---------------------------------------------------------------------------------------
    def _body(self, place: _Place) -> tuple[ir.Stmt, ...]:
        here = [s for s, p in zip(self.stores, self.places, strict=True) if p == place]
        if place.axis is None:
            wanted = {n for n, s in self.lets.items() if self._axis(s) is None and self.level[n] == place.level}
        else:
            roots = {n for n, s in self.lets.items()
                     if self._finishes(n) and self.level[n] == place.level and self._axis(s) == place.axis}  # fmt: skip
            used = {u for n in roots for u in self.uses[n]} | {n for s in here for n in refs(s.value)}
            wanted = self._closure(used, place.axis) | roots
        chosen = {id(s) for s in here}
        return tuple(s for s in self.kernel.body if (s.name in wanted if isinstance(s, ir.Let) else id(s) in chosen))

    def _closure(self, names: set[str], axis: str) -> set[str]:
        """The values along `axis` among `names` and below them: those that a pass computes for itself."""
        stack, seen = list(names), set[str]()
        while stack:
            n = stack.pop()
            if n not in seen and axis in self.lets[n].value.axes:
                seen.add(n)
                stack.extend(self.uses[n])
        return seen

    # -- tensors written in place --------------------------------------------------------------------------------
    def _order_overwrites(self) -> None:
        """Move each store to an `inout` tensor into or behind the last step that loads the tensor."""
        inout = {t.name for t in self.kernel.tensors if t.role == "inout"}
        limit = max([*self.level.values(), *(p.level for p in self.places)], default=0) + len(self.stores) + 1
        moved = bool(inout)
        while moved:
            moved = False
            sequence = list(self._sequence())
            bodies = {p: self._body(p) for p in sequence}
            for i, s in enumerate(self.stores):
                if s.tensor not in inout:
                    continue
                loading = [p for p in sequence if any(_loads(b, s.tensor) for b in bodies[p])]
                if loading and sequence.index(self.places[i]) < sequence.index(loading[-1]):
                    self.places[i] = self._not_before(loading[-1], self.places[i].axis)
                    moved = True
                    if self.places[i].level > limit:
                        raise ScheduleError(
                            f"a schedule of {self.kernel.name} cannot take its axes in chunks: passes that overwrite "
                            f"{s.tensor} would each have to come after the other; leave the axes of {s.tensor} whole"
                        )
        for s, p in zip(self.stores, self.places, strict=True):
            if p.axis is not None and s.tensor in inout:
                for b in self._body(p):
                    if _loads(b, s.tensor) and not self._keeps_clear(b, s, p.axis):
                        raise ScheduleError(
                            f"a schedule of {self.kernel.name} cannot take {p.axis} in chunks: line {s.span.line} "
                            f"overwrites elements of {s.tensor} that a later chunk reads; leave {p.axis} whole"
                        )

    def _not_before(self, last: _Place, axis: str | None) -> _Place:
        """The first place for a statement along `axis` that is not before `last`."""
        order = [None, *self.looped]
        return _Place(last.level if order.index(axis) >= order.index(last.axis) else last.level + 1, axis)

    def _keeps_clear(self, load: ir.Stmt, store: ir.Store | ir.Accumulate, axis: str) -> bool:
        """Whether the store of a chunk of `axis` never hits what a later chunk loads."""
        value = load.value
        assert isinstance(value, ir.Load)  # normal form; `_loads` looked
        extent = self.kernel.axis(axis).extent.constant
        return any(
            isinstance(read, Poly) and _apart(read, write, axis, extent)
            for read, write in zip(value.at, store.at, strict=True)
        )


def _apart(read: Poly, write: Poly, axis: str, extent: int) -> bool:
    """Whether `read` at a later index along `axis` differs from `write` at an earlier one."""
    slope, gap = write.coefficient(axis), write - read
    if slope is None or not slope.is_constant or slope.constant == 0 or not gap.is_constant:
        return False
    # write(n) == read(k) <=> slope * (k - n) == gap; a conflict needs 0 < k - n < extent.
    steps, rest = divmod(gap.constant, slope.constant)
    return rest != 0 or not 0 < steps < extent


def _loads(s: ir.Stmt, tensor: str) -> bool:
    return isinstance(s, ir.Let) and isinstance(s.value, ir.Load) and s.value.tensor == tensor


# ---- what statements touch -----------------------------------------------------------------------------------------


def refs(e: ir.Expr) -> frozenset[str]:
    """The names that `e` uses."""
    return frozenset(n.name for n in ir.walk(e) if isinstance(n, ir.Ref))


def live(body: Sequence[ir.Stmt], used: Iterable[str] = ()) -> tuple[ir.Stmt, ...]:
    """`body` without the `Let`s that nothing in it uses, nor is among `used`."""
    out: list[ir.Stmt] = []
    wanted = set(used)
    for s in reversed(body):
        if not isinstance(s, ir.Let) or s.name in wanted:
            out.append(s)
            wanted |= refs(s.value)
    return tuple(reversed(out))


def below(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> set[str]:
    """Every `Let` that `e` comes from, those that reductions are over left out."""
    stack, seen = list(refs(e)), set[str]()
    while stack:
        name = stack.pop()
        if name in seen or name not in lets:
            continue
        seen.add(name)
        if not isinstance(lets[name], ir.Reduce):
            stack.extend(refs(lets[name]))
    return seen
