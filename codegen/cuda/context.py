"""The state of emitting one kernel: how names are spelled, where values are held, what the prologue must define."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from kgen.codegen import ladders
from kgen.codegen.abi import kernel_args
from kgen.codegen.cuda.expr import polynomial
from kgen.codegen.cuda.plan import Space
from kgen.codegen.cuda.prelude import Pack
from kgen.codegen.cuda.reserved import RESERVED
from kgen.codegen.cuda.text import MUL, CExpr, Lines, binary, cast, compute_type, integer
from kgen.codegen.hoist import hoist
from kgen.codegen.layout import AxisLayout, layout_of
from kgen.codegen.names import Names
from kgen.codegen.narrow import Label
from kgen.codegen.phases import statement_axes
from kgen.codegen.schedule import Scheduled, Step
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import BF16, BOOL, F16

if TYPE_CHECKING:
    from kgen.codegen.cuda.reduce import Accumulator

ROW = ""  # the row index of a flat kernel, as an axis of the layout


@dataclass(frozen=True)
class Holder:
    """Where a value is: variable `name`, an array over the slots of `slots` and, if `lanes`, over lanes.

    `pack`: the innermost array is a pack. `missing`: the variable that says that a gather was in range, and the value
    where it was not. `converted`: the value of an element that is held as it lies in memory.
    """

    name: str
    type: str
    slots: tuple[str, ...] = ()
    lanes: bool = False
    pack: Pack | None = None
    in_range: str | None = None
    missing: CExpr | None = None
    converted: CExpr | None = None


@dataclass
class Frame:
    """The nest that is being emitted: its axes, whether inside the loop over lanes, and what it has defined so far."""

    space: Space
    lane: str | None = None  # the name of the lane variable, inside the loop over lanes
    lane_axis: str | None = None
    locals: dict[str, CExpr] = field(default_factory=dict)
    symbols: set[str] = field(default_factory=set)  # indices that must be defined in the nest


class Context:
    """Everything that the parts of the emitter share. Implements `expr.Place`."""

    def __init__(self, scheduled: Scheduled) -> None:
        self.scheduled = scheduled
        self.kernel = scheduled.kernel
        self.variant = scheduled.variant
        self.schedule = scheduled.schedule
        self.layout = layout_of(scheduled)
        self.flat = not self.kernel.tiles
        self.args = kernel_args(self.kernel, self.variant)
        self.indices = frozenset(a.name for a in self.kernel.axes)
        self.parallel = frozenset(a.name for a in self.kernel.parallel)
        # The parallel indices that the row index flattens; the others are the same in the whole program.
        self.row_axes = scheduled.row_axes
        self.rowwise = frozenset(a.name for a in self.row_axes)
        self.fastest = self.row_axes[-1].name if self.row_axes else None
        self.partials: dict[tuple[str, tuple[Poly, ...]], Accumulator] = {}  # by target: sums over programs
        self.behind_rows = False  # in a sum over programs: behind the loop over rows
        self.steps = hoist(scheduled.steps, self._grain, set(self._user_names(scheduled.steps)))
        self.names = Names(self._user_names(self.steps), RESERVED)
        self.labels = {
            s.name for step in self.steps for s in step.body if isinstance(s, ir.Let) and isinstance(s.value, Label)
        }
        self.entry = self.names.fresh(self.kernel.name)  # a kernel may be called as one of its dimensions is
        self.helpers: set[str] = set()
        self.packs: dict[Pack, tuple[bool, bool]] = {}
        self.lines = Lines()
        self.holders: dict[str, Holder] = {}
        # Where a row is peeled: how, whether the element of the edge is being emitted, and where its values are.
        self.peel = next((a.peel for a in self.layout.axes if a.peel is not None), None)
        self.at_edge = False
        self.edges: dict[str, Holder] = {}
        self.frame = Frame(frozenset())
        self.visible: list[set[str]] = [set()]  # constants defined in the enclosing blocks
        # The pass around: its axis, and the variable of its chunk; None where it has all of the axis at once.
        self.loop: tuple[str, str | None] | None = None
        self.loop_symbols: set[str] = set()  # indices that the body of that loop must define
        self.prologue: set[str] = set()  # names that the prologue must define
        self.in_range: dict[str, str] = {}  # condition of a gather: the constant that holds it
        self.pointers: dict[tuple[str, str], str] = {}
        self.constants: dict[str, tuple[str, str]] = {}  # constexpr name: (value, remark)
        self.unsynced: set[str] = set()  # inout tensors that a barrier has to stand before a store to
        self.shared_bytes = 0
        self.staying = frozenset[str]()  # loads of the step that L1 and L2 are to give up last
        # In a loop over rows of a cluster: which of two buffers holds the slots of this row.
        self.turn: str | None = None
        self.meets = False  # whether the blocks of a cluster write to each other
        self.index_type = "long long" if self.variant.wide else "int"
        self._temporaries: dict[str, str] = {}
        self._params = {
            (a.kind, a.name, a.axis, a.part): self._param(a.kind, a.name, a.axis, a.part) for a in self.args
        }
        self._ranks = {
            a.name: 1 + max(b.part for b in self.args if b.kind == "dim" and b.name == a.name)
            for a in self.args if a.kind == "dim"
        }  # fmt: skip

    def _user_names(self, steps: tuple[Step, ...]) -> Iterator[str]:
        k = self.kernel
        for group in (k.tensors, k.scalars, k.axes):
            yield from (x.name for x in group)
        yield from k.dims
        yield from dict(self.variant.dims)
        for step in steps:
            yield from (s.name for s in step.body if isinstance(s, ir.Let))

    def _grain(self, axes: frozenset[str]) -> object:
        """What tells how often a thread computes a value over `axes`."""
        if self.flat:
            return bool(axes & self.rowwise), self.fastest in axes
        return (axes & self.indices) - self.parallel

    # -- names ---------------------------------------------------------------------------------------------------
    def temporary(self, hint: str) -> str:
        """The temporary called `hint`: the same variable each time."""
        if hint not in self._temporaries:
            self._temporaries[hint] = self.names.fresh(hint)
        return self._temporaries[hint]

    def _param(self, kind: str, name: str, axis: int, part: int) -> str:
        if kind == "stride":
            rank = len({a.part for a in self.args if (a.kind, a.name, a.axis) == (kind, name, axis)})
            return self.names.fresh(f"{name}_stride{axis}" + (f"_{part}" if rank > 1 or part else ""))
        if kind == "dim" and sum(a.kind == kind and a.name == name for a in self.args) > 1:
            return self.names.fresh(f"{name}_{part}")
        return self.names[name]

    def param(self, kind: str, name: str, axis: int = 0, part: int = 0) -> str:
        """The parameter's identifier."""
        return self._params[kind, name, axis, part]

    def stride(self, tensor: str, axis: int, part: int = 0) -> CExpr | None:
        """The stride argument; None where it is 1 by proof."""
        for a in self.args:
            if (a.kind, a.name, a.axis, a.part) == ("stride", tensor, axis, part):
                return CExpr(self.param("stride", tensor, axis, part), compute_type(a.dtype))
        return None

    # -- expr.Place ----------------------------------------------------------------------------------------------
    def ref(self, name: str) -> CExpr:
        """The value of the `Let` called `name` here. A pack's element becomes a local first."""
        if name in self.frame.locals:
            return self.frame.locals[name]
        h = self.edges[name] if self.at_edge and name in self.edges else self.holders[name]
        where = h.name + "".join(f"[{self.slot(a)}]" for a in h.slots)
        if h.pack is None and h.converted is None:
            return CExpr(where + (f"[{self.frame.lane}]" if h.lanes else ""), h.type)
        if h.converted is not None:
            if not self.is_visible(f"#edge {name}"):
                self.visible[-1].add(f"#edge {name}")
                self.lines.add(f"const {h.type} {self.names[name]} = {h.converted};")
            return self.local(name, h.type)
        assert h.pack is not None  # as above
        self.pack(h.pack, reads=True)
        value = f"{where}.get({self.frame.lane})"
        if h.in_range is not None:
            value = f"{h.in_range} ? {value} : {h.missing}"
        self.lines.add(f"const {h.type} {self.names[name]} = {value};")
        return self.local(name, h.type)

    def local(self, name: str, type: str) -> CExpr:
        """Record that the nest has defined `name`."""
        self.frame.locals[name] = CExpr(self.names[name], type)
        return self.frame.locals[name]

    def symbol(self, name: str) -> CExpr:
        """An index, at the current lane, or a dimension."""
        base = self.base(name)
        f = self.frame
        moves = f.lane is not None and name == (self.fastest if f.lane_axis == ROW else f.lane_axis)
        return binary("+", base, CExpr(f.lane or "", "int")) if moves else base

    def lane_of(self, e: ir.Expr) -> tuple[CExpr, CExpr] | None:
        """`(base, lane)` where `e` is the index along which lanes differ."""
        axis = e.index.as_symbol if isinstance(e, ir.IndexValue) else None
        if axis is None or self.frame.lane is None or axis != self.frame.lane_axis:
            return None
        return self.base(axis), CExpr(self.frame.lane, "int")

    def is_label(self, e: ir.Expr) -> bool:
        """Whether `e` is an index of its axis, or -1."""
        return isinstance(e, ir.Ref) and e.name in self.labels

    def base(self, name: str) -> CExpr:
        """An index, at lane 0 of its vector, or a dimension."""
        if self.at_edge and self.peel is not None and name == self.peel.axis:
            return CExpr(self.peeled("edge"), "int")
        if name in self.indices:
            # Parallel indices vary inside a nest of a flat kernel only.
            axis = ROW if name in self.parallel else name
            if (axis != ROW or name in self.rowwise) and self.axis(axis).slots > 1:
                self.frame.symbols.add(name)
            elif self.loop is not None and axis == self.loop[0]:
                self.loop_symbols.add(name)
            else:
                self.prologue.add(name)
            return CExpr(self.names[name], self.index_type if name in self.parallel else "int")
        known = self.variant.dim(name)
        if known is not None:
            return integer(known)
        total: CExpr | None = None
        for part in range(self._ranks[name]):
            size = self.size(name, part)
            total = size if total is None else binary("*", total, size)
        assert total is not None
        return total

    def size(self, dim: str, part: int) -> CExpr:
        """A dimension argument."""
        dtype = next(a.dtype for a in self.args if a.kind == "dim" and a.name == dim and a.part == part)
        return CExpr(self.param("dim", dim, part=part), compute_type(dtype))

    def scalar(self, name: str) -> CExpr:
        """A scalar parameter in its compute type."""
        p = next(p for p in self.kernel.scalars if p.name == name)
        text = self.param("scalar", name)
        if p.dtype in (F16, BF16):
            return CExpr(f"{self.helper(f'cvt_f32_{p.dtype.name}')}({text})", "float")
        if p.dtype == BOOL:
            return CExpr(text, "bool")
        return CExpr(text, compute_type(p.dtype))

    def helper(self, name: str) -> str:
        """Include the helper `name`."""
        self.helpers.add(name)
        return name

    def pack(self, pack: Pack, *, reads: bool = False, writes: bool = False) -> str:
        """Include the struct of `pack` with the given methods; its name."""
        before = self.packs.get(pack, (False, False))
        self.packs[pack] = (before[0] or reads, before[1] or writes)
        return pack.name

    def streamed(self, tensor: str) -> bool:
        """Whether what is stored to `tensor` here may leave the caches first: in passes over chunks it is not read
        again, while the rows around it are. Sums that go on in memory are."""
        sums = self.scheduled.sums
        if self.loop is None or (sums is not None and tensor in sums.zeroed):
            return False
        t = self.kernel.tensor(tensor)
        row = self.kernel.axis(self.loop[0]).extent.constant * t.dtype.itemsize
        return t.role != "inout" or row > ladders.STREAMED_IN_PLACE

    # -- layout --------------------------------------------------------------------------------------------------
    def axis(self, name: str) -> AxisLayout:
        """The layout of a tile axis, or of the row index; at the edge of a peeled row a thread has one element."""
        a = self.layout.row if name == ROW else self.layout.axis(name)
        return replace(a, vector=1, slots=1) if self.at_edge and a.peel is not None else a

    def peeled(self, what: str) -> str:
        """Of a peeled row, the variable of the number of elements before the first whole vector (`head`), of the first
        element behind the last one (`end`), or of the thread's element of the edge (`edge`)."""
        assert self.peel is not None  # the caller looked
        return self.temporary(f"{self.peel.axis}_{what}")

    @contextmanager
    def edge(self) -> Iterator[None]:
        """What is emitted inside is for the thread's element of the edge of a peeled row."""
        self.at_edge = True
        try:
            yield
        finally:
            self.at_edge = False

    def space(self, s: ir.Stmt) -> Space:
        """The axes of the layout that `s` runs over."""
        axes = statement_axes(s) & self.indices
        if self.flat:
            return frozenset({ROW}) if axes & self.rowwise else frozenset()
        return axes - self.parallel

    def ordered(self, space: Space) -> list[AxisLayout]:
        """The axes of `space`, the vector axis last."""
        axes = (
            [self.layout.row]
            if self.flat and space
            else [self.axis(a.name) for a in self.layout.axes if a.name in space]
        )
        return sorted(axes, key=lambda a: a.vector > 1)

    def slots(self, space: Space) -> int:
        """Slots of `space` in one thread."""
        return prod(a.slots for a in self.ordered(space))

    def looped_slots(self, space: Space) -> tuple[str, ...]:
        """The axes of `space` with more than one slot."""
        return tuple(a.name for a in self.ordered(space) if a.slots > 1)

    def lane_axis(self, space: Space, axes: frozenset[str]) -> str | None:
        """The axis along which a value over `axes` differs between the lanes of a vector."""
        for a in self.ordered(space):
            if a.vector > 1:
                varies = self.fastest in axes if a.name == ROW else a.name in axes
                return a.name if varies else None
        return None

    def slot(self, axis: str) -> str:
        """The variable of the loop over the slots of `axis`."""
        return self.temporary(f"{axis}_slot" if axis else "slot")

    def thread(self, digit: int) -> str:
        """The thread's digit `digit` as an identifier that the prologue defines."""
        if self.layout.digits[digit] == self.schedule.team:
            self.prologue.add("#tid")
            return self.temporary("tid")
        self.prologue.add(f"#digit{digit}")
        if not self.flat and digit == self.layout.row.digit:
            return self.temporary("row")
        return self.temporary("_".join(a.name for a in self.layout.axes if a.digit == digit) + "_thread")

    def program(self) -> CExpr:
        """The number of the program, unsigned: of the block, or of its cluster."""
        block = CExpr("blockIdx.x", "unsigned")
        return block if self.schedule.cluster == 1 else CExpr(f"{block} / {self._cluster}", "unsigned", MUL)

    def number(self) -> str:
        """The thread's number in its program."""
        if self.schedule.cluster == 1:
            return "threadIdx.x"
        self.constants["THREADS"] = (str(self.schedule.threads), "")
        return f"blockIdx.x % {self._cluster} * THREADS + threadIdx.x"

    def team(self) -> CExpr:
        """The named constant that is the number of threads of a program."""
        self.constants["THREADS"] = (str(self.schedule.threads), "")
        if self.schedule.cluster == 1:
            return CExpr("THREADS", "int")
        self.constants["ROW_THREADS"] = (f"{self._cluster} * THREADS", "")
        return CExpr("ROW_THREADS", "int")

    @property
    def _cluster(self) -> str:
        self.constants["CLUSTER"] = (str(self.schedule.cluster), "")
        return "CLUSTER"

    def rows_total(self) -> CExpr:
        """The number of rows of the call: the product of the extents that the row index flattens."""
        return self.points_of(self.row_axes)

    def points_of(self, axes: tuple[ir.Axis, ...]) -> CExpr:
        """The product of the extents of parallel axes."""
        total: CExpr | None = None
        for a in axes:
            extent = self.extent(a)
            if self.variant.wide:
                extent = cast("long long", extent)
            total = extent if total is None else binary("*", total, extent)
        return total if total is not None else integer(1)

    def extent(self, axis: ir.Axis) -> CExpr:
        """The extent of a parallel axis."""
        return polynomial(axis.extent, self.base)

    def extent_constant(self, axis: str) -> str:
        """The named constant that is the extent of tile axis `axis`."""
        a = self.kernel.axis(axis)
        value = a.extent.constant
        written = a.span.text.rsplit(" in ", 1)[-1].strip() if " in " in a.span.text else ""
        if self.variant.dim(written) == value:
            name, remark = self.names[written], ""
        else:
            name, remark = self.temporary(f"{axis}_EXTENT"), written if written != str(value) else ""
        self.constants[name] = (str(value), remark)
        return name

    def chunk_constant(self, axis: str) -> str:
        """The named constant that is the chunk of a looped axis."""
        name = self.temporary(f"{axis}_CHUNK")
        self.constants[name] = (str(self.layout.axis(axis).extent), "")
        return name

    # -- blocks --------------------------------------------------------------------------------------------------
    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A block of lines in which new constants are visible."""
        self.visible.append(set())
        with self.lines.block(head):
            yield
        self.visible.pop()

    def is_visible(self, name: str) -> bool:
        """Whether a constant `name` is defined in this block or around it."""
        return any(name in names for names in self.visible)

    @contextmanager
    def capture(self) -> Iterator[Lines]:
        """Collect lines apart, at the current depth; the caller appends them where they go."""
        outer = self.lines
        self.lines = Lines(depth=outer.depth, span=outer.span)
        try:
            yield self.lines
        finally:
            self.lines = outer

    def barrier(self) -> None:
        """All threads of the program wait for each other."""
        if self.schedule.cluster == 1:
            self.lines.add("__syncthreads();")
        else:
            self.meet()
            self.lines.add(f"{self.helper('cluster_barrier')}();")
        self.unsynced.clear()

    def meet(self) -> None:
        """Before blocks of a cluster meet for the first time, and before the first store to another one's memory: all
        of them have started."""
        if not self.meets:
            self.meets = True
            self.lines.add(f"{self.helper('cluster_wait')}();")


def is_zero(p: Poly) -> bool:
    """Whether `p` is the constant 0."""
    return p.is_constant and p.constant == 0
