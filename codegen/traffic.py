"""What does a schedule make of a kernel's cost? What it asks memory for, how much at a time, what it computes again.

A pass over chunks reads its row again, and each program reads what all of them share: most of that comes from L2, and
does not count in `kgen.codegen.cost`, but in the kernel's time. Elements are counted as they lie in memory: neither
masks at ragged edges nor the sectors that memory moves at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from kgen.codegen.abi import grid_size, split_count, sum_grid
from kgen.codegen.cost import Graph
from kgen.codegen.hold import from_memory
from kgen.codegen.layout import held
from kgen.codegen.operations import DIVISION, SPECIAL, Instructions
from kgen.codegen.schedule import Element, Loop, Scheduled, usual
from kgen.dsl import ir


@dataclass(frozen=True)
class Requests:
    """Bytes that the programs of a launch ask for of one tensor, and store to it; it holds `size`. `passes`: steps that
    read it."""

    tensor: str
    read: int
    written: int
    size: int
    passes: int

    @property
    def once(self) -> int:
        """Bytes that memory must move: none of them twice in one direction."""
        return min(self.read, self.size) + min(self.written, self.size)

    @property
    def again(self) -> int:
        """Bytes that are asked for or stored again, which L2 may take."""
        return self.read + self.written - self.once


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel under its schedule.

    programs: how many are started. in_flight: bytes of the streamed tensors that a program asks for before it uses any,
    in the step that asks for most in all; of a loop, in as many iterations as are in flight. instructions: those of all
    threads, values that every thread computes for itself included.
    """

    name: str
    programs: int
    requests: tuple[Requests, ...]
    in_flight: int
    instructions: Instructions

    @property
    def read(self) -> int:
        """Bytes asked for."""
        return sum(r.read for r in self.requests)

    @property
    def written(self) -> int:
        """Bytes stored."""
        return sum(r.written for r in self.requests)

    @property
    def once(self) -> int:
        """Bytes that memory must move."""
        return sum(r.once for r in self.requests)


def traffic(scheduled: Scheduled, dims: Mapping[str, int]) -> tuple[Launch, ...]:
    """Every launch of `scheduled`, for a call of sizes `dims`."""
    stages = (scheduled, *scheduled.then)
    known = {**dict(scheduled.variant.dims), **dims}
    for s in stages:
        if s.sums is not None and s.sums.split is not None:
            known[s.sums.dim] = split_count(s.kernel, s.schedule, s.sums, known)
    return tuple(_Counter(s, known).launch() for s in stages)


class _Counter:
    def __init__(self, scheduled: Scheduled, dims: Mapping[str, int]) -> None:
        self.s = scheduled
        self.steps = usual(scheduled.steps)
        self.kernel = scheduled.kernel
        self.dims = dims
        self.extents = {a.name: max(0, a.extent.evaluate(dims)) for a in self.kernel.axes}
        self.tiles = {a.name for a in self.kernel.tiles}
        self.parallel = {a.name for a in self.kernel.parallel}
        sums = scheduled.sums
        if sums is None:
            self.programs = grid_size(self.kernel, scheduled.variant, scheduled.schedule, dims)
            self.rows = prod(self.extents[a] for a in self.parallel)
        else:
            self.programs = sum_grid(self.kernel, scheduled.schedule, sums, dims)
            # The index of the share is not looped over: it says which points are taken.
            self.rows = prod(self.extents[a] for a in self.parallel if a != sums.split or sums.split in sums.over)
        self.held = held(self.kernel, scheduled.schedule)
        # Of column sums: the indices that its loop runs over, and those of its columns.
        self.over = frozenset(sums.over) if sums is not None and sums.columns else frozenset[str]()
        self.kept = self.parallel - self.over - ({sums.split} if sums is not None else set())

    def launch(self) -> Launch:
        return Launch(self.kernel.name, self.programs, tuple(self._requests()), self._in_flight(), self._instructions())

    # -- memory --------------------------------------------------------------------------------------------------
    def _often(self, axes: frozenset[str]) -> int:
        """How many elements with these indices all programs take in one pass: one for each row that there is, or one a
        program where rows do not matter."""
        tile = prod(self.extents[a] for a in axes & self.tiles)
        if self.over and axes & self.parallel:
            return self._of_columns(axes)
        return tile * (self.rows if axes & self.parallel else self.programs)

    def _of_columns(self, axes: frozenset[str]) -> int:
        """`_often` of column sums. What does not change in a program's loop is loaded in front of it; what is the same
        in all columns, once for those of a program."""
        columns, summed = prod(self.extents[a] for a in self.kept), prod(self.extents[a] for a in self.over)
        splits = self.extents.get(self.s.sums.split or "", 1) if self.s.sums is not None else 1
        if not axes & self.over:  # in front of the loop
            return columns * splits
        return summed * (columns if axes & self.kept else self.programs // max(1, splits))

    def _requests(self) -> Iterator[Requests]:
        read: dict[str, int] = {}
        passes: dict[str, int] = {}
        written: dict[str, int] = {}
        for step, made in from_memory(self.steps, self.s.held):
            loads = [s.value for s in made if isinstance(s.value, ir.Load)]
            # A single element of a row that is gathered beside it is no pass over the row.
            for tensor in {e.tensor for e in loads if e.axes & self.tiles or not self.tiles}:
                passes[tensor] = passes.get(tensor, 0) + 1
            for e in loads:
                size = self.kernel.tensor(e.tensor).dtype.itemsize
                read[e.tensor] = read.get(e.tensor, 0) + self._often(e.axes) * size
            for s in step.body:
                if not isinstance(s, ir.Let):
                    size = self.kernel.tensor(s.tensor).dtype.itemsize
                    stored = self.rows if isinstance(step, Element) else self._stored(s)
                    written[s.tensor] = written.get(s.tensor, 0) + stored * size
        for t in self.kernel.tensors:
            if t.name in read or t.name in written:
                size = t.dtype.itemsize * prod(p.evaluate(self.dims) for p in t.shape)
                n = passes.get(t.name, int(t.name in read))
                yield Requests(t.name, read.get(t.name, 0), written.get(t.name, 0), size, n)

    def _stored(self, s: ir.Store | ir.Accumulate) -> int:
        axes = ir.target_symbols(s) & self.extents.keys()
        if isinstance(s, ir.Accumulate):  # of a sum over programs: once, behind the loop
            return prod(self.extents[a] for a in axes)
        tile = prod(self.extents[a] for a in axes & self.tiles)
        # A row of the workspace that is loaded, added to and stored again has the share's index, and is met once a row.
        return tile * (self.rows if axes & self.parallel else 1)

    def _in_flight(self) -> int:
        best = (0, 0)
        for step, loads in from_memory(self.steps, self.s.held):
            asked, names, made = 0, set[str](), {s.name for s in loads}
            for s in step.body:
                used = {e.name for e in ir.walk(s.value) if isinstance(e, ir.Ref)}
                if used & names:
                    break
                if (
                    isinstance(s.value, ir.Load)
                    and isinstance(s, ir.Let)
                    and s.name in made
                    and s.value.axes & self.parallel
                ):
                    names.add(s.name)
                    size = self.kernel.tensor(s.value.tensor).dtype.itemsize
                    # The chunks of a row that is held are all under way: its loops are unrolled.
                    together = self.extents if s.name in self.s.held else self.held
                    asked += size * prod(together[a] for a in s.value.axes & self.tiles)
            total = sum(self._often(s.value.axes) for s in loads)
            rows = min(self.s.schedule.rows, max(1, self.rows))
            again = self.s.schedule.stages if isinstance(step, Loop) or self.s.sums is not None else 1
            best = max(best, (total, asked * rows * again))
        return best[1]

    # -- arithmetic ----------------------------------------------------------------------------------------------
    def _instructions(self) -> Instructions:
        special = f32 = 0
        for step in self.steps:
            for what, fn, axes, _, fused in Graph.of(self.kernel, step.body).operations():
                often = self._computed(axes)
                own = _cost_of(what, fn)
                special += own.special * often
                f32 += own.f32 * often - (often if fused else 0)
        return Instructions(special, f32)

    def _computed(self, axes: frozenset[str]) -> int:
        """How many times all threads compute a value over `axes`: what has no tile index, every thread of its row."""
        schedule = self.s.schedule
        often = self._often(axes)
        if not self.tiles or axes & self.tiles or not axes:
            return often
        return often * max(1, schedule.team // schedule.rows)


def _cost_of(what: str, fn: str) -> Instructions:
    if what == "special":
        return SPECIAL[fn]
    if what == "division":
        return DIVISION
    return Instructions(0, 1) if what in ("add", "mul") else Instructions(0, 0)
