"""In which order does a thread do the statements of a step, and which values does it keep in registers between?

A step is cut into *phases*: what can be done before the first reduction is finished, before the second, and so on. In a
phase, statements over the same axes form a *nest*: one loop over the thread's slots and lanes. A value that one nest
makes and only that nest uses is a local of the loop; others are *kept*, unless computing them again is
cheaper than a register for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kgen.codegen import ladders
from kgen.codegen.operations import CHEAP
from kgen.codegen.phases import refs
from kgen.codegen.registers import RECOMPUTE_LIMIT
from kgen.dsl import ir

Space = frozenset[str]  # axes of the layout that a statement runs over; "" is the row index of a flat kernel


@dataclass
class Nest:
    """Statements over one space, in order. `span` of the loads first is that of the statement they belong to."""

    space: Space
    items: list[ir.Stmt] = field(default_factory=list)


@dataclass
class Phase:
    """Nests, then the reductions to finish behind them (they share a barrier)."""

    nests: list[Nest] = field(default_factory=list)
    reductions: list[ir.Let] = field(default_factory=list)


@dataclass
class Plan:
    """The phases of one body. `kept`: values that outlive the nest that makes them."""

    prefetch: list[ir.Let]  # loads whose raw tiles are fetched before everything else
    phases: list[Phase]
    kept: set[str]
    waiting: set[str] = field(default_factory=set[str])  # weights that are loaded slot by slot where they are used


@dataclass(frozen=True)
class Shape:
    """What planning needs to know of a layout."""

    space: Callable[[ir.Stmt], Space]
    slots: Callable[[Space], int]  # slots of a space that one thread runs over
    words: Callable[[ir.Let], int]  # 32-bit registers of the raw tile of a load
    streamed: Callable[[ir.Let], bool]  # whether a load differs from program to program
    carried: int = 0  # 32-bit registers of sums that a thread holds throughout


def plan(
    body: tuple[ir.Stmt, ...], shape: Shape, escaping: set[str], finished_later: set[str], overwritten: set[str]
) -> Plan:
    """The plan of `body`. `escaping`: values that later steps use. `finished_later`: reductions that are finished
    behind the loop this body is in. `overwritten`: inout tensors, whose loads must all come before their stores."""
    return _Planner(body, shape, escaping, finished_later, overwritten).plan()


def is_affine_load(s: ir.Stmt) -> bool:
    """Whether `s` loads from an address that no value is needed for."""
    return isinstance(s, ir.Let) and isinstance(s.value, ir.Load) and not ir.children(s.value)


class _Planner:
    def __init__(
        self,
        body: tuple[ir.Stmt, ...],
        shape: Shape,
        escaping: set[str],
        finished_later: set[str],
        overwritten: set[str],
    ) -> None:
        self.body = body
        self.shape = shape
        self.escaping = escaping
        self.finished_later = finished_later
        self.overwritten = overwritten
        self.lets = {s.name: s for s in body if isinstance(s, ir.Let)}
        self.uses = {id(s): [n for n in refs(s.value) if n in self.lets] for s in body}
        self.depth: dict[int, int] = {}
        for s in body:
            self.depth[id(s)] = self._depth(s)

    def plan(self) -> Plan:
        kept = self._kept_across([self._needed(p, set()) for p in self._phases()])
        while True:
            out = self._attempt(kept)
            if out.kept == kept:
                return out
            # A value that turned out to be kept is kept wherever it is made: try again, knowing that.
            kept = set(out.kept)

    def _phases(self) -> range:
        return range(max(self.depth.values(), default=0) + 1)

    def _attempt(self, kept: set[str]) -> Plan:
        prefetch, late, waiting = self._loads([self._needed(p, set()) for p in self._phases()])
        kept_first = kept | {s.name for s in prefetch} | (self.escaping & set(self.lets))
        out = Plan(prefetch, [], kept_first, waiting)
        done = {s.name for s in prefetch}
        for p in self._phases():
            wanted = self._needed(p, done & kept)
            phase = Phase()
            made: dict[str, int] = {}
            for s in self._order(p, wanted, done, late):
                nest = self._place(phase, s, made)
                out.kept |= {n for n in self.uses[id(s)] if n in made and made[n] != nest}
                if isinstance(s, ir.Let):
                    made[s.name] = nest
                    if isinstance(s.value, ir.Reduce) and s.name not in self.finished_later:
                        phase.reductions.append(s)
            done |= {n for n in made if n in kept}
            if phase.nests:
                out.phases.append(phase)
        out.kept |= {n for n, s in self.lets.items() if isinstance(s.value, ir.Reduce)}
        return out

    # -- when ----------------------------------------------------------------------------------------------------
    def _depth(self, s: ir.Stmt) -> int:
        """Reductions that are finished one behind the other before `s`."""
        depth = 0
        for name in self.uses[id(s)]:
            let = self.lets[name]
            depth = max(depth, self.depth[id(let)] + isinstance(let.value, ir.Reduce))
        if not isinstance(s, ir.Let) and s.tensor in self.overwritten:
            for let in self.lets.values():
                if isinstance(let.value, ir.Load) and let.value.tensor == s.tensor:
                    depth = max(depth, self.depth[id(let)])
        return depth

    def _is_root(self, s: ir.Stmt) -> bool:
        if not isinstance(s, ir.Let) or isinstance(s.value, ir.Reduce) or s.name in self.escaping:
            return True
        # A gather from what is overwritten is made as early as it can be, not where it is first used.
        return isinstance(s.value, ir.Load) and s.value.tensor in self.overwritten and not is_affine_load(s)

    def _needed(self, phase: int, have: set[str]) -> set[str]:
        """Values other than reductions that the roots of `phase` need, computed from what is there."""
        stack = [
            n
            for s in self.body
            if self._is_root(s) and self.depth[id(s)] == phase
            for n in ([s.name] if isinstance(s, ir.Let) and not isinstance(s.value, ir.Reduce) else self.uses[id(s)])
        ]
        seen = set[str]()
        while stack:
            n = stack.pop()
            if n in seen or n in have or isinstance(self.lets[n].value, ir.Reduce):
                continue
            seen.add(n)
            stack.extend(self.uses[id(self.lets[n])])
        return seen

    def _kept_across(self, needed: list[set[str]]) -> set[str]:
        """Values that several phases need and that are not computed again."""
        out = set[str]()
        for name, s in self.lets.items():
            several = sum(name in names for names in needed) > 1
            if isinstance(s.value, ir.Load):
                if not is_affine_load(s) and several:
                    out.add(name)
            elif several and (not self.shape.space(s) or self._cost(name, out) > RECOMPUTE_LIMIT):
                out.add(name)
        return out

    def _cost(self, name: str, kept: set[str]) -> int:
        """Instructions to compute `name` again from what is kept."""
        cost = 0
        for e in ir.walk(self.lets[name].value):
            if isinstance(e, ir.Op):
                cost += 1 if e.fn in CHEAP else RECOMPUTE_LIMIT + 1
            elif isinstance(e, ir.Ref) and e.name in self.lets and e.name not in kept:
                below = self.lets[e.name]
                if self.shape.space(below) and not isinstance(below.value, ir.Load | ir.Reduce):
                    cost += self._cost(e.name, kept)
        return cost

    # -- loads ---------------------------------------------------------------------------------------------------
    def _loads(self, needed: list[set[str]]) -> tuple[list[ir.Let], set[str], set[str]]:
        """(loads fetched first, loads made in the nests that use them, those among them that wait for room)."""
        affine = [s for s in self.body if isinstance(s, ir.Let) and is_affine_load(s)]
        total = sum(self.shape.words(s) for s in affine)
        late, waiting = set[str](), set[str]()
        for s in affine:
            assert isinstance(s.value, ir.Load)
            phases = [p for p, names in enumerate(needed) if s.name in names]
            users = {self.shape.space(u) for u in self.body if s.name in self.uses[id(u)]}
            if s.name in self.escaping or s.value.tensor in self.overwritten:
                continue
            space = self.shape.space(s)
            if users != {space} or not space:
                continue
            single = phases == [0] and self.shape.slots(space) == 1
            crowded = total + self.shape.carried > ladders.PREFETCH_WORDS
            if single and not crowded:
                late.add(s.name)
            elif not self.shape.streamed(s) and crowded:
                waiting.add(s.name)  # in each phase anew: what is the same in all rows is in the nearest cache
        used = set[str]().union(*needed) | self.escaping
        late |= waiting
        return [s for s in affine if s.name not in late and s.name in used], late, waiting

    # -- nests ---------------------------------------------------------------------------------------------------
    def _order(self, phase: int, wanted: set[str], done: set[str], late: set[str]) -> Iterable[ir.Stmt]:
        """What `phase` does: what is the same for all elements first, as a value's operands have no more axes than it
        has; overwriting comes last."""

        def rank(s: ir.Stmt) -> int:
            overwrites = not isinstance(s, ir.Let) and s.tensor in self.overwritten
            return len(self.body) if overwrites else len(self.shape.space(s))

        chosen: list[ir.Stmt] = []
        for s in self.body:
            if isinstance(s, ir.Let) and not isinstance(s.value, ir.Reduce):
                if s.name in wanted and (s.name in late or s.name not in done):
                    chosen.append(s)
            elif self.depth[id(s)] == phase:
                chosen.append(s)
        return sorted(chosen, key=rank)

    def _place(self, phase: Phase, s: ir.Stmt, made: dict[str, int]) -> int:
        """The number of the first nest of the space of `s` that stands behind all it needs; if need be a new one."""
        space = self.shape.space(s)
        first = 0
        for name in self.uses[id(s)]:
            if name in made:
                behind = phase.nests[made[name]].space != space
                first = max(first, made[name] + behind)
        if not isinstance(s, ir.Let) and s.tensor in self.overwritten:
            loads = (n for n in made if isinstance(v := self.lets[n].value, ir.Load) and v.tensor == s.tensor)
            first = max([first, *(made[n] + 1 for n in loads)])
        for i in range(first, len(phase.nests)):
            if phase.nests[i].space == space:
                phase.nests[i].items.append(s)
                return i
        phase.nests.append(Nest(space, [s]))
        return len(phase.nests) - 1
