"""Schedules: how a kernel is spread over the machine. The source says what, a schedule says how; pure data.

The model is the same on both backends:

* The parallel indices are flattened, last declared fastest, into one *row* index `p` in `0 .. P-1`. A program takes
  `rows` consecutive values of `p` and recovers the indices by division. `rows == 1` is one row a program.
* A tile axis is *whole* (one program holds all of it at once) or *looped* (`chunks` gives how many elements it
  takes at a time; values along it are computed again in each pass that needs them). CUDA: of a chunk as long as the
  axis every pass has all of it at once, and loads it anew.
* A kernel without tile axes is *flat*: `rows` is the block of points that a program takes.

CUDA: `threads` a CTA. In a flat kernel every thread takes vectors of `vector` consecutive points. Otherwise
`threads // rows` threads share a row, each taking vectors of `vector` elements along the vector axis. A program may be
a `cluster` of several CTAs (sm_90 and later), which then share one row: threads are numbered through all of them, and
`threads` is still what each has. Rows that begin at any address may be `peeled` (`kgen.codegen.layout`).
A kernel that sums over parallel indices (`Sums`) is persistent: the summed points are shared out among `programs`
programs, each of which loops over its share, `rows` points at a time.
Triton: `threads // 32` warps; block shapes follow from `rows`, extents and `chunks`; `vector` does not apply. Of a
loop, over chunks or over the rows of a sum, the loads of `stages` iterations are in flight at once. What several passes
over chunks need of a row may be `held` from one to the next (`kgen.codegen.hold`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.errors import KgenError


class ScheduleError(KgenError):
    """A schedule, given by a user or found in a tuning table, that does not fit its kernel."""


@dataclass(frozen=True)
class Schedule:
    """How one kernel variant is mapped onto programs and threads. All sizes are powers of two but `chunks` may be any
    multiple of the vector width."""

    threads: int
    rows: int
    vector: int = 1
    chunks: tuple[tuple[str, int], ...] = ()
    name: str = ""  # "flat", "row", "looped": what a reader of the manifest is told
    programs: int = 0  # for a sum over programs: about how many programs share it; 0 for other kernels
    ahead: int = 0  # CUDA: how many rows of its own, or programs, on a program asks L2 for a row
    stages: int = 1  # Triton: iterations of its innermost loops that are in flight
    cluster: int = 1  # CUDA: CTAs of a program, each of `threads`; with more than one it takes one row, whole
    peeled: bool = False  # CUDA: whole vectors of rows that begin at any address, the elements around them one by one
    held: bool = False  # Triton: chunks of a row stay in registers for later passes, as memory has them
    registers: int = 0  # Triton: the most a thread that the compiler may use; 0: as many as it likes
    by: str = "ladders"  # who chose it, for people to read (see `kgen.codegen.knobs`)

    @property
    def team(self) -> int:
        """Threads of a program: those of all its CTAs."""
        return self.threads * self.cluster

    def chunk(self, axis: str) -> int | None:
        """Elements of `axis` taken at a time, or None where the axis is whole."""
        return dict(self.chunks).get(axis)


@dataclass(frozen=True)
class Sums:
    """How the `Accumulate`s of a kernel are spread (`kgen.codegen.sums`): a program loops over points of the parallel
    indices `over`, keeps the sums and stores them after the loop.

    Of the points it takes every `dim`-th, from the one that its index `split` says; all of them where `split` is None.
    columns: in a flat kernel the row index `p` flattens the indices that are kept, and the loop takes one point of
        `over` after the other. Otherwise `p` flattens `over`, the loop takes `rows` points of it at a time, and the
        other parallel indices are one point a program.
    zeroed: workspaces that must be zero before the launch.
    blocks: programs that a multiprocessor is to hold at a time (of a cluster: CTAs). multiprocessors: those of the
        device that the number of programs was chosen for.
    down: with `columns`, the points of `over` are taken, and added up, from the last to the first.
    """

    over: tuple[str, ...]
    split: str | None
    dim: str
    columns: bool
    zeroed: tuple[str, ...] = ()
    blocks: int = 1
    multiprocessors: int = 0
    down: bool = False

    def row_axes(self, kernel: ir.Kernel) -> tuple[ir.Axis, ...]:
        """The parallel indices that the row index flattens."""
        if self.columns:
            return tuple(a for a in kernel.parallel if a.name not in self.over and a.name != self.split)
        return self.over_axes(kernel)

    def over_axes(self, kernel: ir.Kernel) -> tuple[ir.Axis, ...]:
        """The parallel indices that are summed over."""
        return tuple(a for a in kernel.parallel if a.name in self.over)

    def kept_axes(self, kernel: ir.Kernel) -> tuple[ir.Axis, ...]:
        """The parallel indices, the share aside, that are not summed over."""
        return self.row_axes(kernel) if self.columns else self.block_axes(kernel)

    def block_axes(self, kernel: ir.Kernel) -> tuple[ir.Axis, ...]:
        """The parallel indices, the share aside, of which a program has one point."""
        if self.columns:
            return ()
        return tuple(a for a in kernel.parallel if a.name not in self.over and a.name != self.split)


@dataclass(frozen=True)
class Partial(ir.Reduce):
    """What a thread (CUDA) or a lane of a block (Triton) has of a reduction; `Finish` makes the value of it.

    It goes on from chunk to chunk of a loop, and later statements of the body see what it is so far. A sum is of
    `exp(of - shift)`, where the `Let` called `shift` rises from chunk to chunk: what is summed already is multiplied by
    `exp(before - after)` then. Behind the loop `shift` is that of the last chunk.
    """

    shift: str | None = None
    of: ir.Expr | None = None


@dataclass(frozen=True)
class Finish(ir.Reduce):
    """The reduction of `arg`, which comes from `Partial`s over the same axes and is as wide as they are."""


@dataclass(frozen=True)
class Straight:
    """Statements without a looped axis, executed once for each row of a program; where they are the same in all rows of
    a sum over programs, `once` in front of its loop over them."""

    body: tuple[ir.Stmt, ...]
    once: bool = False


@dataclass(frozen=True)
class Loop:
    """One pass over the chunks of `axis`, or over all of it at once.

    `body` is executed for each chunk, in order, from the last to the first where `down`; values along `axis` live only
    inside. A `Let` in it whose value is a `Reduce` over `axis` is an accumulator: it starts at the identity, takes in
    each chunk, and its name is bound to the finished value after the loop (it is not used inside). A `Partial` is not
    finished, and used inside.
    """

    axis: str
    chunk: int
    body: tuple[ir.Stmt, ...]
    down: bool = False


@dataclass(frozen=True)
class Leave:
    """The program ends here if `condition`, which is the same in all programs, holds."""

    condition: ir.Expr
    body: tuple[ir.Stmt, ...] = ()


@dataclass(frozen=True)
class Choice:
    """`yes` where `condition` holds, which is the same in the whole program, else `no`. Nothing that they make is used
    behind them."""

    condition: ir.Expr
    yes: tuple[Step, ...]
    no: tuple[Step, ...]

    @property
    def body(self) -> tuple[ir.Stmt, ...]:
        """The statements of both."""
        return tuple(s for step in (*self.yes, *self.no) for s in step.body)


@dataclass(frozen=True)
class Element:
    """Behind a pass along `axis`: `body`, once, with `label` for the index `axis`; not at all where that is -1.

    The label is the same in the whole program. The axis stands in `body` as a subscript of stores alone, whose elements
    other threads have just stored: the emitters put a barrier in front.
    """

    axis: str
    label: ir.Ref
    body: tuple[ir.Stmt, ...]


Step = Straight | Loop | Leave | Choice | Element


def decided_by(step: Step) -> tuple[ir.Expr, ...]:
    """What `step` evaluates beside the values of its statements."""
    match step:
        case Leave():
            return (step.condition,)
        case Element():
            return (step.label,)
        case Choice():
            return (step.condition, *(e for inner in (*step.yes, *step.no) for e in decided_by(inner)))
        case _:
            return ()


def usual(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of a program that takes, of each choice, the branch with more to do."""
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Choice):
            out += usual(max(step.yes, step.no, key=lambda branch: sum(len(inner.body) for inner in branch)))
        else:
            out.append(step)
    return tuple(out)


@dataclass(frozen=True)
class Scheduled:
    """A kernel in normal form with its schedule applied: what both emitters print.

    Normal form (`kgen.codegen.normalize`): every `Load` and every `Reduce` is the whole value of its own `Let`;
    equal loads are loaded once; all other `Let`s and stores are free of both. Dimensions known to the variant are
    replaced by their values. Names of lifted values are made from the user's: `x_mn` for `x[m, n]`, `r_sum` for the
    sum inside `r = ...`.

    `capability`: the least compute capability of the devices it is for, 90 for sm_90.
    """

    kernel: ir.Kernel
    variant: Variant
    schedule: Schedule
    steps: tuple[Step, ...]
    capability: int
    # Loads of elements that other threads of the program overwrite, by name: the emitters put a barrier between them
    # and the first store to their tensor.
    barriers: frozenset[str] = frozenset()
    # Loads that are to stay in L2 (`kgen.codegen.kept`), by name.
    kept: frozenset[str] = frozenset()
    # Loads of chunks that later passes take from the pass that makes them first (`kgen.codegen.hold`), by name.
    held: frozenset[str] = frozenset()
    # How sums over programs are spread, whether it is one of several launches, and those behind this one.
    sums: Sums | None = None
    staged: bool = False
    then: tuple[Scheduled, ...] = ()

    @property
    def row_axes(self) -> tuple[ir.Axis, ...]:
        """The parallel indices that the row index `p` flattens."""
        return self.kernel.parallel if self.sums is None else self.sums.row_axes(self.kernel)
