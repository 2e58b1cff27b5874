"""Sums over programs: how does `out[n] += e` become launches that give the same bits every time?

A kernel that sums over parallel indices is cut into *stages*, kernels that are launched one after the other. In each,
the points of the summed indices are shared out among `SPLITS` programs; a program loops over its share in a fixed
order, keeps one partial sum for each element of the target, and writes them to its own row of a workspace. A last stage
adds up the rows of the workspace, also in a fixed order. No stage uses atomics.

Both kinds of stage are ordinary kernels whose `Accumulate` now means: sum over what this program loops over, then
store. Sums that keep different parallel indices go to stages of their own, each of which computes what it needs again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd

from kgen.codegen.layout import VECTOR_BYTES, contiguous, divisor
from kgen.codegen.names import fresh, taken_names
from kgen.codegen.normalize import normalize
from kgen.codegen.phases import refs
from kgen.codegen.schedule import Schedule, ScheduleError, Step, Straight, Sums
from kgen.codegen.separate import separated
from kgen.codegen.variant import TensorClass, Variant
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import BOOL, I64

WARP = 32
SECTOR_FLOATS = 8  # of 4 bytes, in the 32 bytes that memory moves at once


@dataclass(frozen=True)
class Stage:
    """One launch: a kernel in normal form, and how its sums are spread (None for one without sums)."""

    kernel: ir.Kernel
    variant: Variant
    sums: Sums | None


def has_sums(kernel: ir.Kernel) -> bool:
    """Whether `kernel` sums over programs."""
    return any(isinstance(s, ir.Accumulate) for s in kernel.body)


def stages(kernel: ir.Kernel, variant: Variant) -> tuple[Stage, ...]:
    """The stages of `kernel`, which is in normal form, in order of launch."""
    plain = _plain(kernel)
    if not has_sums(plain):
        return (Stage(plain, variant, None),)
    groups: dict[frozenset[str], list[ir.Accumulate]] = {}
    for s in plain.body:
        if isinstance(s, ir.Accumulate):
            groups.setdefault(frozenset(s.over), []).append(s)
    cut = _Cut(plain, variant)
    for i, group in enumerate(groups.values()):
        # Stores come last: an `inout` tensor is read by every stage before one overwrites it.
        cut.partial(plain, group, stores=i == len(groups) - 1)
    return cut.stages()


def stages_by_elements(kernel: ir.Kernel, variant: Variant) -> tuple[Stage, ...] | None:
    """The stages of `kernel`, which is in normal form and has sums, where no program holds a row: first what is reduced
    along the rows, then stores and sums element by element. None where it cannot be cut so."""
    plain = _plain(kernel)
    cut = _Cut(plain, variant)
    found = separated(plain, cut.fresh)
    if found is None:
        return None
    if found.rows is not None:
        cut.rows(found.rows, found.values)
    for i, part in enumerate(found.parts):
        # What the kernel over rows has read last is still in L2.
        down = i == 0 and found.rows is not None
        cut.partial(part, [s for s in part.body if isinstance(s, ir.Accumulate)], stores=True, down=down)
    return cut.stages()


def _plain(kernel: ir.Kernel) -> ir.Kernel:
    """`kernel` with a store for each `+=` that has nothing to sum over."""
    return replace(
        kernel, body=tuple(_stored(s) if isinstance(s, ir.Accumulate) and not s.over else s for s in kernel.body)
    )


def _stored(s: ir.Accumulate) -> ir.Store:
    return ir.Store(s.tensor, s.at, s.value, s.span)


class _Cut:
    """Collects the stages; workspaces are tensors of all of them, as the runtime passes one list."""

    def __init__(self, kernel: ir.Kernel, variant: Variant) -> None:
        self.kernel = kernel
        self.variant = variant
        self.taken = taken_names(kernel) | {kernel.name, *dict(variant.dims)}
        self.dims: list[str] = []
        self.workspaces: list[ir.Tensor] = []
        self.classes: list[tuple[str, TensorClass]] = []
        self.partials: list[tuple[ir.Kernel, Sums | None]] = []
        self.finishes: list[tuple[ir.Kernel, Sums]] = []

    def stages(self) -> tuple[Stage, ...]:
        """All stages, the partial sums first."""
        variant = replace(self.variant, tensors=(*self.variant.tensors, *self.classes))
        out: list[Stage] = []
        for kernel, sums in (*self.partials, *self.finishes):
            written = {s.tensor for s in kernel.body if not isinstance(s, ir.Let)}
            tensors = tuple(replace(t, role="out" if t.name in written else "in") for t in self.workspaces)
            whole = replace(kernel, tensors=(*self.kernel.tensors, *tensors), dims=(*self.kernel.dims, *self.dims))
            out.append(Stage(normalize(whole, variant), variant, sums))
        return tuple(out)

    def rows(self, kernel: ir.Kernel, values: Iterable[ir.Tensor]) -> None:
        """The first stage, without sums, which stores `values`, contiguous tensors with a number a row."""
        for t in values:
            self._add_workspace(t, t.shape[-1])
        self.partials.append((kernel, None))

    def partial(self, kernel: ir.Kernel, group: list[ir.Accumulate], stores: bool, down: bool = False) -> None:
        """The stage that makes the partial sums of `group`, some of those of `kernel` (and its stores), and those that
        finish them. `down`: from the last of the summed points to the first, where it takes one after the other."""
        split, dim = self.fresh("split"), self.fresh("SPLITS")
        self.dims.append(dim)
        span = group[0].span
        axis = ir.Axis(split, Poly.sym(dim), "parallel", span)
        over = frozenset(group[0].over)
        kept = tuple(a for a in kernel.parallel if a.name not in over)
        summed = tuple(a for a in kernel.parallel if a.name in over)
        columns = not kernel.tiles and bool(kept) and self._along_columns(kernel, kept[-1].name, summed[-1].name)
        body: list[ir.Stmt] = []
        ends: dict[tuple[str, ...], list[ir.Accumulate]] = {}
        for s in kernel.body:
            if isinstance(s, ir.Accumulate) and any(s is g for g in group):
                if s.value.dtype == BOOL:  # true if any is: counted
                    s = replace(s, value=ir.Cast(I64, s.value, I64, s.value.axes, s.span))
                rest = _elements(kernel, s)
                workspace = self._workspace(s, dim, (*kept, *rest))
                at = tuple(Poly.sym(a) for a in (split, *(a.name for a in (*kept, *rest))))
                body.append(replace(s, tensor=workspace.name, at=at))
                load = ir.Load(workspace.name, at, s.value.dtype, frozenset().union(*(p.symbols for p in at)), s.span)
                end = replace(s, value=load, over=(split,))
                ends.setdefault(tuple(a.name for a in rest), []).append(end)
            elif isinstance(s, ir.Let) or (stores and isinstance(s, ir.Store)):
                body.append(s)
        tiles = kernel.tiles
        parallel = (*summed, axis, *kept) if columns else (*kept, axis, *summed)
        name = kernel.name
        if self.partials:
            what = "elements" if self.partials[0][1] is None else str(len(self.partials) + 1)
            name = self.fresh(f"{kernel.name}_{what}")
        sums = Sums(tuple(a.name for a in summed), split, dim, columns, down=down and columns)
        self.partials.append((replace(kernel, name=name, axes=(*parallel, *tiles), body=tuple(body)), sums))
        for rest_names, statements in ends.items():
            rest = tuple(replace(a, kind="parallel") for a in tiles if a.name in rest_names)
            self._finish(axis, (*kept, *rest), statements, dim)

    def _finish(self, split: ir.Axis, elements: tuple[ir.Axis, ...], statements: list[ir.Accumulate], dim: str) -> None:
        """The stage that adds up the partial sums of `statements`, whose targets have the indices `elements`."""
        axes = (split, *elements)
        body: list[ir.Stmt] = []
        columns = bool(elements)
        width = self._block(elements[-1].extent) if elements else 1
        if width > 1:
            # Blocks of columns, so that the threads of a program share out the rows of the workspace too.
            last = elements[-1]
            block = ir.Axis(self.fresh(f"{last.name}_block"), last.extent.floordiv(width), "parallel", last.span)
            lane = ir.Axis(self.fresh(f"{last.name}_lane"), Poly.const(width), "tile", last.span)
            index = Poly.sym(block.name) * Poly.const(width) + Poly.sym(lane.name)
            statements = [_substituted(s, last.name, index, frozenset((block.name, lane.name))) for s in statements]
            axes, columns = (*elements[:-1], block, split, lane), False
        for s in statements:
            share = self.fresh(f"{s.tensor}_share")
            body.append(ir.Let(share, s.value, s.span))
            body.append(replace(s, value=ir.Ref(share, s.value.dtype, s.value.axes, s.span)))
        name = self.fresh(f"{self.kernel.name}_finish")
        finish = replace(self.kernel, name=name, doc="", axes=axes, body=tuple(body))
        self.finishes.append((finish, Sums((split.name,), None, dim, columns)))

    def _block(self, extent: Poly) -> int:
        """Columns that one program adds up: a warp's worth, or as many as surely divide the extent; 1 where those are
        too few for whole memory sectors."""
        proved = gcd(extent.constant, WARP) if extent.is_constant else divisor(extent, self.variant)
        return proved if proved >= SECTOR_FLOATS else 1

    def _workspace(self, s: ir.Accumulate, dim: str, axes: tuple[ir.Axis, ...]) -> ir.Tensor:
        dtype = s.value.dtype
        name = self.fresh(f"{s.tensor}_partial")
        shape = (Poly.sym(dim), *(a.extent for a in axes))
        tensor = ir.Tensor(name, dtype, shape, "out", False, False, s.span)
        self._add_workspace(tensor, axes[-1].extent if axes else None)
        return tensor

    def _add_workspace(self, tensor: ir.Tensor, innermost: Poly | None) -> None:
        """Count in a contiguous tensor, whose strides are multiples of the extent `innermost`."""
        self.workspaces.append(tensor)
        proved = VECTOR_BYTES if innermost is None else divisor(innermost, self.variant) * tensor.dtype.itemsize
        self.classes.append((tensor.name, TensorClass(True, min(VECTOR_BYTES, proved))))

    def _along_columns(self, kernel: ir.Kernel, kept: str, summed: str) -> bool:
        """Whether memory is contiguous along `kept` rather than along `summed`, for most bytes of a flat kernel that
        have both indices."""
        weight = 0
        for s in kernel.body:
            if isinstance(s, ir.Let) and isinstance(s.value, ir.Load) and {kept, summed} <= s.value.axes:
                t = kernel.tensor(s.value.tensor)
                for axis, sign in ((kept, 1), (summed, -1)):
                    if contiguous(t, s.value.at, axis, self.variant):
                        weight += sign * t.dtype.itemsize
        return weight >= 0

    def fresh(self, name: str) -> str:
        """A name that no tensor, index, dimension or stage has."""
        return fresh(name, self.taken)


def _elements(kernel: ir.Kernel, s: ir.Accumulate) -> tuple[ir.Axis, ...]:
    """The tile indices of a target."""
    names = ir.target_symbols(s)
    return tuple(a for a in kernel.tiles if a.name in names)


def _substituted(s: ir.Accumulate, name: str, index: Poly, axes: frozenset[str]) -> ir.Accumulate:
    """`s`, whose value is a load, with `index` over `axes` for the index `name`."""
    load = s.value
    assert isinstance(load, ir.Load)  # of the workspace

    def put(at: tuple[Poly | ir.Expr, ...]) -> tuple[Poly, ...]:
        return tuple(p.substitute({name: index}) for p in at if isinstance(p, Poly))

    value = replace(load, at=put(load.at), axes=load.axes - {name} | axes)
    return replace(s, at=put(s.at), value=value)


# ---- partial sums in memory ----------------------------------------------------------------------------------------


def spill_looped(kernel: ir.Kernel, sums: Sums, schedule: Schedule) -> tuple[ir.Kernel, Sums]:
    """`kernel` with the partial sums along axes that `schedule` takes in chunks kept in the workspace, which then has
    to be zero before the launch: a chunk's part is loaded, added to and stored again."""
    looped = {a for a, chunk in schedule.chunks if chunk < kernel.axis(a).extent.constant}
    body: list[ir.Stmt] = []
    loads: list[ir.Stmt] = []
    zeroed: list[str] = []
    taken = taken_names(kernel)
    for s in kernel.body:
        axes = ir.target_symbols(s) if isinstance(s, ir.Accumulate) else frozenset[str]()
        if not isinstance(s, ir.Accumulate) or not axes & looped:
            body.append(s)
            continue
        if schedule.rows > 1:
            raise ScheduleError(
                f"a schedule of {kernel.name} cannot take {', '.join(sorted(axes & looped))} in chunks with "
                f"{schedule.rows} rows a program: line {s.span.line} sums along it; give rows = 1"
            )
        name = fresh(f"{s.tensor}_before", taken)
        names = frozenset(a.name for a in kernel.axes)
        loads.append(ir.Let(name, ir.Load(s.tensor, s.at, s.value.dtype, axes & names, s.span), s.span))
        before = ir.Ref(name, s.value.dtype, axes & names, s.span)
        total = ir.Op("add", (before, s.value), s.value.dtype, (axes & names) | s.value.axes, s.span)
        body.append(ir.Store(s.tensor, s.at, total, s.span))
        zeroed.append(s.tensor)
    if not zeroed:
        return kernel, sums
    tensors = tuple(replace(t, role="inout") if t.name in zeroed else t for t in kernel.tensors)
    return replace(kernel, tensors=tensors, body=(*loads, *body)), replace(sums, zeroed=tuple(zeroed))


# ---- what is the same in all rows ----------------------------------------------------------------------------------


def ahead_of_rows(kernel: ir.Kernel, sums: Sums, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`steps` of column sums, with what does not depend on the summed points, such as weights, in front of them: a
    thread has few columns, and holds it. Compilers would load it again beside stores."""
    if not sums.columns:
        return steps
    stored = {s.tensor for s in kernel.body if isinstance(s, ir.Store)}
    early: dict[str, ir.Stmt] = {}
    for s in kernel.body:
        if not isinstance(s, ir.Let) or s.value.axes & {*sums.over} or not refs(s.value) <= early.keys():
            continue
        if not any(isinstance(e, ir.Load) and e.tensor in stored for e in ir.walk(s.value)):
            early[s.name] = s
    if not early:
        return steps
    rest = (replace(step, body=tuple(s for s in step.body if s not in early.values())) for step in steps)
    return (Straight(tuple(early.values()), once=True), *(step for step in rest if step.body))
