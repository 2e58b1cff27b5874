"""Layout: which thread of a CUDA program holds which element of a tile?

The thread's number in its program is read as one whose *digits* have power-of-two thread counts, fastest first; in a
cluster the rank of the CTA makes its highest bits. Each axis is spread along one digit; axes that never meet in a
statement share a digit. Along an axis, lane `l` of slot `s` of a thread is element

    (s * threads + digit) * vector + l        of the tile, or of the current chunk of a looped axis,

where `digit` is the thread's digit of that axis. Elements at or beyond the extent are masked; a vector
never straddles the end, as `vector` divides the extent and the chunk.

Rows of a *peeled* axis begin at any address, or end within a vector. Of each, `head` elements lie in front of the first
aligned vector, and vectors are counted from there: lane `l` of slot `s` is element

    head + (s * threads + digit) * vector + l

and vectors that would reach beyond the row are masked. What is left, at most `vector - 1` elements on either side, is
the *edge*: thread `digit` has one of them, or none. A weight, which begins aligned in every row, is read beside them in
two aligned vectors, and shifted; so that these do not reach beyond it the last vector is left to the edge then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import prod

from kgen.codegen.normalize import statement_axes
from kgen.codegen.schedule import Schedule, Scheduled
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Mod, Poly, Sym

VECTOR_BYTES = 16  # the widest load and store of one thread


@dataclass(frozen=True)
class AxisLayout:
    """How one axis is spread. `extent`: elements held at a time, those of a whole axis or of a chunk."""

    name: str
    extent: int
    digit: int
    threads: int
    vector: int
    slots: int
    peel: Peel | None = None  # where the row is peeled

    def width(self, tensor: ir.Tensor, at: At, variant: Variant) -> int:
        """Elements of `tensor[at]` that one instruction may move along this axis."""
        whole = access_width(tensor, at, self.name, self.vector, variant)
        if self.peel is not None and self.peel.lead is not None:
            if self.shifts(tensor, at, variant):
                return whole
            return self.vector if self.peel.like_lead(tensor, at, variant) else 1
        return whole

    def shifts(self, tensor: ir.Tensor, at: At, variant: Variant) -> bool:
        """Whether vectors of `tensor[at]` are made of two that are aligned."""
        return self.peel is not None and self.peel.shifted and self.peel.beside(tensor, at, variant)


@dataclass(frozen=True)
class Layout:
    """`digits[i]` is the thread count of digit i; their product is `Schedule.team`. `axes` are the tile axes.

    `row` is the row index `p`, relative to the program's first row: in a flat kernel it has the only digit, vectors and
    slots; in a row kernel the slowest digit, one slot, and vectors of 1.
    """

    digits: tuple[int, ...]
    axes: tuple[AxisLayout, ...]
    row: AxisLayout

    def axis(self, name: str) -> AxisLayout:
        """The layout of tile axis `name`."""
        return next(a for a in self.axes if a.name == name)

    def stride(self, digit: int) -> int:
        """Threads below `digit`: the thread's digit is `its number / stride(digit) % digits[digit]`."""
        return prod(self.digits[:digit])

    def elements(self, axes: frozenset[str]) -> int:
        """Elements of a value with these axes that one thread holds (in a flat kernel, of one with the row index)."""
        if not self.axes:
            return self.row.slots * self.row.vector if axes else 1
        return prod(a.slots * a.vector for a in self.axes if a.name in axes)


def layout_of(scheduled: Scheduled) -> Layout:
    """The layout of a CUDA program."""
    return layout(scheduled.kernel, scheduled.variant, scheduled.schedule)


def layout(kernel: ir.Kernel, variant: Variant, schedule: Schedule) -> Layout:
    """The layout of `kernel`, in normal form, under `schedule`: vectors first, then as many threads as the vector axis
    can use, the rest to the other digits in turn; threads beyond what the tile needs idle along digit 0."""
    if not kernel.tiles:
        fastest = kernel.parallel[-1].name if kernel.parallel else None
        vector = min(schedule.vector, vector_limit(kernel, variant, fastest)) if fastest else 1
        slots = -(-schedule.rows // (schedule.threads * vector))
        row = AxisLayout("", schedule.rows, 0, schedule.threads, vector, slots)
        return Layout((schedule.threads,), (), row)
    extents = held(kernel, schedule)
    digit_of = digits(kernel, variant)
    vectors = {a: min(schedule.vector, vector_limit(kernel, variant, a)) if digit_of[a] == 0 else 1 for a in extents}
    # A chunk given by hand need not be a multiple of what the whole axis allows.
    vectors = {a: min(v, power_of_two_in(extents[a])) for a, v in vectors.items()}
    peeled = peel(kernel, variant) if schedule.peeled else None
    if peeled is not None:
        return _peeled(kernel, schedule, peeled)
    left = schedule.team // schedule.rows
    counts: list[int] = []
    for d in range(max(digit_of.values()) + 1):
        wanted = max(ceil_power(-(-extents[a] // vectors[a])) for a in extents if digit_of[a] == d)
        counts.append(min(left, wanted))
        left //= counts[-1]
    counts[0] *= left
    axes = tuple(
        AxisLayout(a, e, digit_of[a], counts[digit_of[a]], vectors[a], -(-e // (counts[digit_of[a]] * vectors[a])))
        for a, e in extents.items()
    )
    return Layout((*counts, schedule.rows), axes, AxisLayout("", schedule.rows, len(counts), schedule.rows, 1, 1))


def _peeled(kernel: ir.Kernel, schedule: Schedule, peeled: Peel) -> Layout:
    """The layout of a kernel whose only tile axis is peeled."""
    (extent,) = held(kernel, schedule).values()
    vector = min(schedule.vector, peeled.vector)
    if extent < kernel.axis(peeled.axis).extent.constant:
        vector = min(vector, power_of_two_in(extent))
    threads = schedule.team // schedule.rows
    slots = max(1, -(-(extent // vector) // threads))
    axis = AxisLayout(peeled.axis, extent, 0, threads, vector, slots, replace(peeled, vector=vector))
    return Layout((threads, schedule.rows), (axis,), AxisLayout("", schedule.rows, 1, schedule.rows, 1, 1))


def held(kernel: ir.Kernel, schedule: Schedule) -> dict[str, int]:
    """Elements of each tile axis that a program holds at a time, by axis in order of declaration."""
    out: dict[str, int] = {}
    for a in kernel.tiles:
        chunk = schedule.chunk(a.name)
        out[a.name] = a.extent.constant if chunk is None else min(chunk, a.extent.constant)
    return out


def elements(axes: Set[str], extents: Mapping[str, int]) -> int:
    """Elements of a value with these axes, for `extents` of the tile axes."""
    return prod(n for a, n in extents.items() if a in axes)


def tile_bytes(tensor: ir.Tensor, axes: Set[str], extents: Mapping[str, int]) -> int:
    """Bytes in memory of what a load from, or a store to, `tensor` with these axes moves, as `elements`."""
    return tensor.dtype.itemsize * elements(axes, extents)


def digits(kernel: ir.Kernel, variant: Variant) -> dict[str, int]:
    """The digit of each tile axis: the vector axis has the fastest, then inner axes before outer ones."""
    together = [statement_axes(s) for s in kernel.body]
    first = vector_axis(kernel, variant)
    order = sorted((a.name for a in reversed(kernel.tiles)), key=lambda name: name != first)
    out: dict[str, int] = {}
    for name in order:
        met = {d for other, d in out.items() if any(name in axes and other in axes for axes in together)}
        out[name] = next(d for d in range(len(order)) if d not in met)
    return out


# ---- memory accesses -----------------------------------------------------------------------------------------------

At = tuple["Poly | ir.Expr", ...]


@dataclass(frozen=True)
class Access:
    """A load or store of normal form: `tensor[at]`, over the indices `axes`. `once`: of a sum over programs, which a
    program stores once for all its rows."""

    tensor: ir.Tensor
    at: At
    axes: frozenset[str]
    once: bool = False


def accesses(kernel: ir.Kernel) -> Iterator[Access]:
    """Every load and store of `kernel`, in normal form, in order."""
    names = frozenset(a.name for a in kernel.axes)
    for s in kernel.body:
        if isinstance(s, ir.Let):
            if isinstance(s.value, ir.Load):
                yield Access(kernel.tensor(s.value.tensor), s.value.at, s.value.axes)
        else:
            axes = ir.target_symbols(s) & names
            yield Access(kernel.tensor(s.tensor), s.at, axes, isinstance(s, ir.Accumulate))


def vector_axis(kernel: ir.Kernel, variant: Variant) -> str | None:
    """The axis along which memory is contiguous for most bytes: among tile axes, or the fastest parallel axis of a flat
    kernel. None where no access is contiguous along any."""
    weights: dict[str, int] = {}
    extents = {a.name: a.extent.constant for a in kernel.tiles}
    candidates = list(extents) or [a.name for a in kernel.parallel[-1:]]
    for access in accesses(kernel):
        size = tile_bytes(access.tensor, access.axes, extents)
        for axis in candidates:
            if contiguous(access.tensor, access.at, axis, variant):
                weights[axis] = weights.get(axis, 0) + size
    return max(weights, key=lambda a: weights[a]) if weights else None


def contiguous(tensor: ir.Tensor, at: At, axis: str, variant: Variant) -> bool:
    """Whether `tensor[at]` moves by one element of memory with `axis`, by proof."""
    if not at or not variant.tensor(tensor.name).unit:
        return False
    last = at[-1]
    if not isinstance(last, Poly) or last.coefficient(axis) != Poly.const(1):
        return False
    if any(axis in (s.symbols if isinstance(s, Poly) else s.axes) for s in at[:-1]):
        return False
    # The flattened index of a starred dimension that stays in parts jumps at the end of its innermost part.
    star = tensor.shape[0].as_symbol if tensor.star and len(at) == 1 else None
    return star is None or variant.star_rank(star) == 1


def access_width(tensor: ir.Tensor, at: At, axis: str, vector: int, variant: Variant) -> int:
    """Elements that one instruction may move for `vector` consecutive elements of `axis` that start at a multiple of
    `vector`: a power of two up to `vector`, aligned by proof; 1 where `tensor[at]` is not contiguous along `axis`."""
    if not contiguous(tensor, at, axis, variant):
        return 1
    last = at[-1]
    assert isinstance(last, Poly)  # contiguous() looked
    size = tensor.dtype.itemsize
    aligned = min(VECTOR_BYTES, variant.tensor(tensor.name).align) // size
    return max(1, min(vector, aligned, divisor(last - Poly.sym(axis), variant)))


def vector_limit(kernel: ir.Kernel, variant: Variant, axis: str) -> int:
    """The widest vector along `axis`: 16 bytes of the widest tensor that is contiguous along it, less where alignment,
    an offset or the extent proves less. Tensors without a parallel index (weights, which stay in cache) and sums do not
    count beside those with one."""
    found = [a for a in accesses(kernel) if contiguous(a.tensor, a.at, axis, variant)]
    parallel = {a.name for a in kernel.parallel}
    streamed = [a for a in found if a.axes & parallel and not a.once] or found
    widths = [access_width(a.tensor, a.at, axis, VECTOR_BYTES, variant) for a in streamed]
    return min([*widths, divisor(kernel.axis(axis).extent, variant)]) if widths else 1


@dataclass(frozen=True)
class Peel:
    """How a row along `axis` is peeled: in vectors of `vector` elements, which begin where the elements of `lead` are
    aligned to them. None: where the row begins, as all rows are aligned and only end within a vector. `shifted`: some
    weights are read in two vectors."""

    axis: str
    vector: int
    lead: Access | None
    shifted: bool = False

    def like_lead(self, tensor: ir.Tensor, at: At, variant: Variant) -> bool:
        """Whether the rows of `tensor[at]` begin as many elements behind an aligned address as those of `lead`, by
        proof. What neither does nor is a weight (`beside`) is accessed element by element."""
        assert self.lead is not None  # the caller looked
        other = self.lead.tensor
        return (
            variant.tensor(tensor.name).dense
            and variant.tensor(other.name).dense
            and tensor.shape[1:] == other.shape[1:]
            and all(isinstance(s, Poly) for s in at)
            and at[:-1] == self.lead.at[:-1]
            and _starts(at, self.axis, self.vector, variant)
        )

    def beside(self, tensor: ir.Tensor, at: At, variant: Variant) -> bool:
        """Whether `tensor[at]` is a weight: the same for all rows, from an aligned address on."""
        most = min(self.vector, VECTOR_BYTES // tensor.dtype.itemsize)
        return (
            tensor.role == "in"
            and all(isinstance(s, Poly) and s.symbols <= {self.axis} for s in at)
            and access_width(tensor, at, self.axis, self.vector, variant) == most
            and _starts(at, self.axis, self.vector, variant)
        )

    @property
    def edge(self) -> int:
        """The most elements of a row that are in no whole vector."""
        return (self.vector - 1) * (1 if self.lead is None else 2) + (self.vector if self.shifted else 0)


def peel(kernel: ir.Kernel, variant: Variant) -> Peel | None:
    """How the rows of `kernel` may be peeled; None where that gives no wider vectors, or cannot be.

    It can be where everything that a program streams along the only tile axis is aligned alike: x[m, n] and y[m, n] are
    where both lie without gaps from an aligned address on. Kernels that sum over programs are left alone, as a thread
    would have other columns in each row; so are those that overwrite other elements than they read, as the edge takes
    no part in the order of chunks.
    """
    axis = kernel.tiles[0].name if len(kernel.tiles) == 1 else None
    if axis is None or any(isinstance(s, ir.Accumulate) for s in kernel.body):
        return None
    parallel = {a.name for a in kernel.parallel}
    along = [a for a in accesses(kernel) if axis in a.axes]
    streamed = [a for a in along if contiguous(a.tensor, a.at, axis, variant) and a.axes & parallel]
    overwritten = [a for a in along if a.tensor.role == "inout"]
    if not streamed or any(a.at != b.at for a in overwritten for b in overwritten if a.tensor == b.tensor):
        return None
    vector = VECTOR_BYTES // max(a.tensor.dtype.itemsize for a in streamed)
    widths = {access_width(a.tensor, a.at, axis, vector, variant) for a in streamed}
    found = Peel(axis, vector, None if widths == {vector} else streamed[0])
    if found.lead is not None and not all(found.like_lead(a.tensor, a.at, variant) for a in streamed):
        return None
    if found.lead is not None and kernel.axis(axis).extent.constant >= 3 * vector:
        found = replace(found, shifted=any(found.beside(a.tensor, a.at, variant) for a in along))
    return found if vector > vector_limit(kernel, variant, axis) else None


def _starts(at: At, axis: str, vector: int, variant: Variant) -> bool:
    """Whether index 0 of `axis` is a multiple of `vector` elements behind the start of a row of memory."""
    last = at[-1]
    return isinstance(last, Poly) and divisor(last - Poly.sym(axis), variant) >= vector


def divisor(p: Poly, variant: Variant) -> int:
    """The largest power of two, at most 16, that divides `p` by proof; indices and unknown dimensions may be odd."""
    multiples = dict(variant.multiples)
    return min(
        (min(16, power_of_two_in(c) * prod(_atom_divisor(a, multiples, variant) for a in mono)) for mono, c in p.terms),
        default=16,
    )


def _atom_divisor(a: Sym | FloorDiv | Mod, multiples: dict[str, int], variant: Variant) -> int:
    if isinstance(a, Sym):
        known = variant.dim(a.name)
        return power_of_two_in(known) if known is not None else multiples.get(a.name, 1)
    if isinstance(a, Mod):
        return min(divisor(a.num, variant), divisor(a.den, variant))
    return 1


def power_of_two_in(n: int) -> int:
    """The largest power of two, at most 16, that divides `n`; 16 for 0."""
    return n & -n if 0 < (n & -n) < 16 else 16


def ceil_power(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def floor_power(n: int) -> int:
    """The largest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)
