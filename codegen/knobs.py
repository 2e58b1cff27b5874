"""Knobs: which sizes of a schedule does someone set, and may they be set so?

One type for everyone who overrides the chooser: a `schedule` line of a kernel, `kgen tune`, a table of tuned schedules.
Whatever is left out stays as the ladders have it. Knobs change how a kernel is spread over the machine, never what it
computes. This checks sizes; whether a chunk can be taken at all is for `kgen.codegen.phases` to say, and whether the
registers suffice for the compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kgen.codegen.layout import peel, vector_limit
from kgen.codegen.machines import REGISTER_FILE
from kgen.codegen.origins import position
from kgen.codegen.schedule import Schedule, ScheduleError, Sums
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.knobs import KNOBS, WARP, power_of_two

_NOT_PEELED = (
    "its rows cannot be peeled: they are aligned already, or not all alike, it sums over programs, has several tile "
    "indices, or overwrites other elements than it reads"
)
MOST_BLOCKS, MOST_STAGES, MOST_AHEAD = (KNOBS[name].most for name in ("blocks", "stages", "ahead"))
REGISTERS = KNOBS["registers"]
# Chunks of a row that is held, over which every pass is unrolled: Triton's compiler takes minutes for hundreds of them,
# and default schedules have up to 25.
MOST_HELD = 64
_SIZES = ("threads", "rows", "vector", "blocks", "stages", "ahead", "cluster", "peel", "hold", "registers")
_HOLDS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
          ">=": operator.ge}  # fmt: skip


@dataclass(frozen=True)
class Knobs:
    """Sizes of a `Schedule` to take in place of the ladders'; None: as the ladders have it.

    threads: a program (Triton: 32 times its warps). rows: row indices `p` that a program takes (points, where the
    kernel is flat). vector: the most elements that a CUDA thread moves at once. chunks: elements taken at a time, for
    each tile index named; at least its extent is the whole index. blocks: of a kernel that sums over programs, how many
    of them a multiprocessor is to hold. ahead: how far on the row is that a CUDA program asks L2 for, in its own rows
    where it sums over programs, else in programs a multiprocessor; 0: it asks for none. stages: how many iterations of
    a Triton program's innermost loops are in flight at once. cluster: CTAs of a CUDA program, each of `threads`. peel:
    1 to take whole vectors of rows that begin at any address, 0 not to. hold: 1 for a Triton program that holds the
    chunks of its row from pass to pass, 0 for one that loads them again, as it does where chunks are set. registers:
    the most a thread that Triton's compiler may use; left out, as many as it likes, since the ladders' number is for
    their other sizes. by: who set them, for people to read; it takes no part in comparisons.
    """

    threads: int | None = None
    rows: int | None = None
    vector: int | None = None
    chunks: tuple[tuple[str, int], ...] = ()
    blocks: int | None = None
    stages: int | None = None
    ahead: int | None = None
    cluster: int | None = None
    peel: int | None = None
    hold: int | None = None
    registers: int | None = None
    by: str = field(default="caller", compare=False)

    def data(self) -> dict[str, object]:
        """What is set, as plain data that `read` takes."""
        sizes = {n: getattr(self, n) for n in _SIZES}
        out: dict[str, object] = {n: v for n, v in sizes.items() if v is not None}
        return out | ({"chunks": dict(self.chunks)} if self.chunks else {})

    @staticmethod
    def read(data: Mapping[str, object], by: str) -> Knobs:
        """The knobs that `data` describes. Raises ScheduleError for a name or a value that is none of theirs."""
        sizes: dict[str, int] = {}
        chunks: dict[str, int] = {}
        for name, value in data.items():
            if name == "chunks" and isinstance(value, Mapping):
                chunks = {str(axis): _whole_number(f"chunk of {axis}", n) for axis, n in value.items()}
            elif name in _SIZES:
                sizes[name] = _whole_number(name, value)
            else:
                raise ScheduleError(f"there is no knob '{name}'; they are {', '.join(_SIZES)} and chunks")
        return Knobs(**sizes, chunks=tuple(chunks.items()), by=by)


def _whole_number(what: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ScheduleError(f"{what} is {value!r}, expected a whole number")
    return value


def written(kernel: ir.Kernel, variant: Variant, backend: str) -> Knobs | None:
    """What the source of `kernel` sets for `backend` (its `schedule` statements) in the class of calls that `variant`
    describes; None where it sets nothing. They come before those of a table."""
    known = dict(variant.dims) | {n: int(v) for n, v in kernel.consts if isinstance(v, int)}
    for rule in kernel.schedules:
        if rule.backend == backend and all(
            _HOLDS[c.op](c.left.evaluate(known), c.right.evaluate(known)) for c in rule.when
        ):
            chunks = tuple((a, kernel.axis(a).extent.evaluate(known) if n is None else n) for a, n in rule.chunks)
            return Knobs(**dict(rule.sizes), chunks=chunks, by=f"the schedule at {position(rule.span)}")
    return None


def turned(
    kernel: ir.Kernel,
    variant: Variant,
    backend: str,
    schedule: Schedule,
    knobs: Knobs,
    sums: Sums | None = None,
    num_sms: int = 132,
) -> Schedule:
    """`schedule`, the default of `kernel` in normal form, with `knobs` in place of its sizes.

    Raises ScheduleError where they do not fit the kernel or each other.
    """
    if knobs.vector is not None and backend == "triton":
        raise _refused(kernel, "vector is for CUDA alone; Triton's compiler chooses how wide its accesses are")
    if knobs.blocks is not None and sums is None:
        raise _refused(kernel, "blocks is for kernels that sum over programs (out[n] += e), and it has no such sum")
    if knobs.blocks is not None and not 1 <= knobs.blocks <= MOST_BLOCKS:
        raise _refused(kernel, f"blocks is {knobs.blocks}, expected 1 to {MOST_BLOCKS} programs a multiprocessor")
    if knobs.stages is not None and backend != "triton":
        raise _refused(kernel, "stages is for Triton alone")
    if knobs.ahead is not None and (backend != "cuda" or not kernel.tiles):
        raise _refused(kernel, "ahead is for CUDA kernels with tile indices")
    if knobs.ahead is not None and not 0 <= knobs.ahead <= MOST_AHEAD:
        raise _refused(kernel, f"ahead is {knobs.ahead}, expected 0 to {MOST_AHEAD}")
    if knobs.cluster is not None and backend != "cuda":
        raise _refused(kernel, "cluster is for CUDA alone")
    if knobs.peel is not None and backend != "cuda":
        raise _refused(kernel, "peel is for CUDA alone")
    if knobs.hold is not None and backend != "triton":
        raise _refused(kernel, "hold is for Triton alone")
    if knobs.registers is not None and backend != "triton":
        raise _refused(kernel, "registers is for Triton alone")
    if knobs.registers is not None and not REGISTERS.least <= knobs.registers <= REGISTERS.most:
        expected = f"{REGISTERS.least} to {REGISTERS.most} a thread"
        raise _refused(kernel, f"registers is {knobs.registers}, expected {expected}")
    for what in ("peel", "hold"):
        if getattr(knobs, what) not in (None, 0, 1):
            raise _refused(kernel, f"{what} is {getattr(knobs, what)}, expected 0 or 1")
    check_chunks(kernel, knobs.chunks)
    extents = {a.name: a.extent.constant for a in kernel.tiles}
    for axis, chunk in knobs.chunks:
        if backend == "triton" and chunk < extents[axis] and not power_of_two(chunk):
            # The block would be as large as the next one, and the rest of it idle.
            raise _refused(kernel, f"the chunk of {axis} is {chunk}; Triton's blocks are powers of two")
    own = {a: n for a, n in schedule.chunks if a not in dict(knobs.chunks)}
    chunks = own | {a: n for a, n in knobs.chunks if n < extents[a]}
    cluster = schedule.cluster
    if knobs.cluster is not None:
        cluster = knobs.cluster
        if cluster > 1 and not knobs.chunks:
            chunks = {}  # what a cluster is for: the row is held whole
    elif knobs.chunks or (knobs.rows or 1) > 1:
        cluster = 1
    threads = knobs.threads or schedule.threads
    vector = schedule.vector if knobs.vector is None else knobs.vector
    rows = schedule.rows
    if knobs.rows is not None:
        rows = knobs.rows
        if backend == "cuda":
            threads, vector = _sharing(kernel, variant, rows, threads, vector, knobs)
    elif cluster > 1 or (chunks and not schedule.chunks):
        rows = 1  # several rows a program are for those too short to be taken in chunks
    elif not kernel.tiles and backend == "cuda":
        # As many vectors a thread as before.
        rows = schedule.rows // (schedule.threads * schedule.vector) * threads * vector
    elif backend == "cuda":
        rows = min(rows, threads)  # those of short rows, of which each has a thread at least
    held = bool(chunks) and (schedule.held if knobs.hold is None else bool(knobs.hold))
    if knobs.hold and not chunks:
        raise _refused(kernel, "hold is for rows in chunks, and its rows are whole")
    # Of loops that are unrolled the compiler says what is in flight.
    loops = (bool(chunks) and not held) or sums is not None
    stages = schedule.stages if knobs.stages is None else knobs.stages
    if not 1 <= stages <= MOST_STAGES:
        raise _refused(kernel, f"stages is {stages}, expected 1 to {MOST_STAGES} iterations")
    stages = stages if loops else 1  # there is nothing to have in flight: of such a row stages say nothing
    name = schedule.name if not kernel.tiles else "looped" if chunks else "row"
    ordered = tuple((a, chunks[a]) for a in extents if a in chunks)
    ahead = schedule.ahead
    if knobs.ahead is not None:
        ahead = knobs.ahead if sums is not None else -(-knobs.ahead * num_sms // cluster)
    out = replace(
        schedule,
        threads=threads,
        rows=rows,
        vector=vector,
        chunks=ordered,
        name=name,
        stages=stages,
        cluster=cluster,
        by=knobs.by,
        ahead=ahead if rows == 1 else 0,
        peeled=schedule.peeled and vector > 1,
        held=held,
        registers=knobs.registers or 0,
    )
    check(kernel, backend, out)
    if out.registers * out.threads > REGISTER_FILE:
        what = f"{out.threads} threads of {out.registers} registers are more than"
        raise _refused(kernel, f"{what} the {REGISTER_FILE} of a multiprocessor")
    if knobs.peel and not out.peeled:
        raise _refused(kernel, _NOT_PEELED)
    check_peeled(kernel, variant, out)
    if backend == "cuda" and kernel.parallel and not kernel.tiles and out.rows < out.threads:
        raise _refused(kernel, f"{out.threads} threads have {out.rows} points to take")
    return out


def _sharing(
    kernel: ir.Kernel, variant: Variant, rows: int, threads: int, vector: int, knobs: Knobs
) -> tuple[int, int]:
    """The threads and the vector of a CUDA program that takes `rows`: those given, but no more of either than there is
    work for, as far as `knobs` leave them open. `vector` is the most that a thread moves, so fewer it may always be."""
    if kernel.tiles:
        return (threads if knobs.threads is not None else max(threads, rows)), vector
    if kernel.parallel:
        vector = min(vector, vector_limit(kernel, variant, kernel.parallel[-1].name))
    if knobs.threads is None:
        threads = min(threads, max(WARP, rows // vector))
    return threads, max(1, min(vector, rows // threads))


def check(kernel: ir.Kernel, backend: str, schedule: Schedule) -> None:
    """Refuse sizes that no emitter could print: raise ScheduleError."""
    for what in ("threads", "rows", "vector", "cluster"):
        value = getattr(schedule, what)
        most = KNOBS[what].most
        if not power_of_two(value) or value > most:
            raise _refused(kernel, f"{what} is {value}, expected a power of two up to {most}")
    if schedule.threads < WARP:
        raise _refused(kernel, f"threads is {schedule.threads}, expected at least {WARP}")
    if backend == "cuda" and kernel.tiles and schedule.rows > schedule.threads:
        raise _refused(kernel, f"{schedule.rows} rows do not share out among {schedule.threads} threads")
    if schedule.held and backend != "triton":
        raise _refused(kernel, "to hold chunks of a row is for Triton")
    for axis, chunk in schedule.chunks if schedule.held else ():
        count = -(-kernel.axis(axis).extent.constant // chunk)
        if count > MOST_HELD:
            what = f"its passes over {axis} are unrolled {count} times, more than {MOST_HELD}; take larger chunks"
            raise _refused(kernel, f"to hold the row, {what}, or hold = 0")
    if schedule.cluster > 1:
        if backend != "cuda" or not kernel.tiles:
            raise _refused(kernel, "a cluster shares a row: it is for CUDA kernels with tile indices")
        if schedule.rows > 1:
            raise _refused(kernel, f"a cluster of {schedule.cluster} takes one row, and rows is {schedule.rows}")
        if schedule.chunks:
            axis = schedule.chunks[0][0]
            raise _refused(kernel, f"a cluster of {schedule.cluster} holds a row whole, and it takes {axis} in chunks")
    check_chunks(kernel, schedule.chunks)


def check_peeled(kernel: ir.Kernel, variant: Variant, schedule: Schedule) -> None:
    """Refuse to peel rows that cannot be, or among too few threads: raise ScheduleError."""
    if not schedule.peeled:
        return
    found = peel(kernel, variant)
    if found is None:
        raise _refused(kernel, _NOT_PEELED)
    least, threads = replace(found, vector=min(found.vector, schedule.vector)).edge, schedule.team // schedule.rows
    if threads < least:
        raise _refused(
            kernel, f"a row has {threads} threads; peeled, up to {least} of its elements are to have one each"
        )


def check_chunks(kernel: ir.Kernel, chunks: tuple[tuple[str, int], ...]) -> None:
    """Refuse chunks of what is no tile index, and of nothing: raise ScheduleError."""
    tiles = {a.name for a in kernel.tiles}
    for axis, chunk in chunks:
        if axis not in tiles:
            there = ", ".join(sorted(tiles)) or "none"
            raise _refused(kernel, f"it takes {axis} in chunks, which is not a tile index (those are {there})")
        if chunk < 1:
            raise _refused(kernel, f"the chunk of {axis} is {chunk}, expected at least 1")


def _refused(kernel: ir.Kernel, problem: str) -> ScheduleError:
    return ScheduleError(f"a schedule of {kernel.name} is not valid: {problem}")
