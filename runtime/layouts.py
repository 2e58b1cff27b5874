"""From one call's tensors to what a kernel is compiled for (the variant) and what it is then told (sizes and strides).

Nothing is ever copied to suit a kernel: a fast path is compiled where the memory of this call proves that it may be
taken, and a general one otherwise. Dimensions of size 1 have no stride, leading dimensions behind a starred one are
merged as far as all tensors allow, and parallel indices that are one index in every tensor become one
(`kgen.codegen.collapse`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from kgen.codegen.collapse import Group, Merge, candidates, collapse, places
from kgen.codegen.normalize import required_dims
from kgen.codegen.program import Arg
from kgen.codegen.variant import TensorClass, Variant
from kgen.dsl import ir
from kgen.dsl.affine import Poly

_MAX_ALIGN = 16
_INT32_MAX = 2**31 - 1
# A program may compute row indices beyond the last one by the points that it takes at a time; the loop of a sum, by
# those that all programs take at a time.
_ROW_SLACK = 2**23


@dataclass(frozen=True)
class Memory:
    """Where the elements of one tensor lie: shape as the caller sees it, strides in elements, the element size in
    bytes and the address modulo 16."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    residue: int


@dataclass(frozen=True)
class Layout:
    """The layout of one call: the kernel with merged indices, its variant, and the run-time sizes and strides.

    `dims` has every dimension of `kernel`; `parts` the sizes behind each starred dimension; `strides[tensor][axis]` one
    stride for each part of that dimension.
    """

    kernel: ir.Kernel
    groups: tuple[Group, ...]
    variant: Variant
    dims: Mapping[str, int]
    parts: Mapping[str, tuple[int, ...]]
    strides: Mapping[str, tuple[tuple[int, ...], ...]]

    def value(self, arg: Arg) -> int:
        """The value of a `dim` or `stride` argument of the compiled kernel."""
        if arg.kind == "stride":
            return self.strides[arg.name][arg.axis][arg.part]
        parts = self.parts.get(arg.name, ())
        return parts[arg.part] if len(parts) > 1 else self.dims[arg.name]


def layout(kernel: ir.Kernel, dims: Mapping[str, int], memory: Mapping[str, Memory]) -> Layout:
    """The layout of a call of `kernel` (not in normal form) with tensors that lie as `memory` says.

    `dims` binds every dimension, none of them such that a parallel index has no values.
    """
    parts, strides = _coalesce(kernel, memory)
    groups = _groups(kernel, dims, parts, strides)
    merged, merges = collapse(kernel, groups)
    sizes = dict(dims)
    for m in merges:
        sizes[m.dim] = m.extent.evaluate(sizes)
        _merge_strides(strides, m, kernel, dims)
    stars = {t.shape[0].as_symbol for t in merged.tensors if t.star}
    parts = {d: p for d, p in parts.items() if d in stars}
    known = tuple((d, sizes[d]) for d in required_dims(merged))
    variant = Variant(
        dims=known,
        multiples=_multiples(merged, sizes, dict(known), parts),
        star_ranks=tuple((d, len(p)) for d, p in parts.items()),
        tensors=tuple(
            (t.name, _tensor_class(t, sizes, parts, strides[t.name], memory[t.name])) for t in merged.tensors
        ),
        wide=_wide(merged, sizes, strides),
    )
    return Layout(merged, groups, variant, sizes, parts, {n: tuple(s) for n, s in strides.items()})


# ---- starred dimensions --------------------------------------------------------------------------------------------

_Strides = dict[str, list[tuple[int, ...]]]  # tensor -> dimension -> part


def _coalesce(kernel: ir.Kernel, memory: Mapping[str, Memory]) -> tuple[dict[str, tuple[int, ...]], _Strides]:
    """The sizes behind each starred dimension and the strides of every tensor, both after merging.

    A leading dimension of size 1 is dropped; two neighbours are merged where, for every tensor that has them, stepping
    over the end of the inner one is a step of the outer one. At least one part is left.
    """
    strides: _Strides = {}
    leading: dict[str, dict[str, int]] = {}  # starred dimension -> tensor -> how many dimensions it stands for
    for t in kernel.tensors:
        m = memory[t.name]
        lead = len(m.shape) - len(t.shape) + 1 if t.star else 0
        own = [() if t.star and i == 0 else (_stride(m, i + len(m.shape) - len(t.shape)),) for i in range(len(t.shape))]
        strides[t.name] = own
        if t.star:
            leading.setdefault(str(t.shape[0]), {})[t.name] = lead
    parts: dict[str, tuple[int, ...]] = {}
    for dim, ranks in leading.items():
        some, rank = next(iter(ranks.items()))
        sizes = memory[some].shape[:rank]
        kept: list[int] = []
        steps: dict[str, list[int]] = {name: [] for name in ranks}
        for i, size in enumerate(sizes):
            if size == 1:
                continue
            if kept and all(steps[n][-1] == size * memory[n].strides[i] for n in ranks):
                kept[-1] *= size
                for n in ranks:
                    steps[n][-1] = memory[n].strides[i]
            else:
                kept.append(size)
                for n in ranks:
                    steps[n].append(memory[n].strides[i])
        parts[dim] = tuple(kept) or (1,)
        for n in ranks:
            strides[n][0] = tuple(steps[n]) or (0,)
    return parts, strides


def _stride(m: Memory, i: int) -> int:
    """The stride of dimension `i`; 0 where it has one element and the stride does not matter."""
    return m.strides[i] if m.shape[i] != 1 else 0


# ---- merging indices -----------------------------------------------------------------------------------------------


def _groups(
    kernel: ir.Kernel, dims: Mapping[str, int], parts: Mapping[str, tuple[int, ...]], strides: _Strides
) -> tuple[Group, ...]:
    """Runs of parallel indices that are one index in the memory of this call."""
    groups: list[list[str]] = []
    for a, b in candidates(kernel):
        size_a, size_b = (kernel.axis(x).extent.evaluate(dims) for x in (a, b))
        fits = True
        for name, i in places(kernel, (a, b)):
            outer, inner = strides[name][i], strides[name][i + 1]
            if len(outer) != 1 or len(inner) != 1 or (size_a != 1 and size_b != 1 and outer[0] != size_b * inner[0]):
                fits = False
        if not fits:
            continue
        if groups and groups[-1][-1] == a:
            groups[-1].append(b)
        else:
            groups.append([a, b])
    return tuple(tuple(g) for g in groups)


def _merge_strides(strides: _Strides, merge: Merge, kernel: ir.Kernel, dims: Mapping[str, int]) -> None:
    sizes = [kernel.axis(a).extent.evaluate(dims) for a in merge.axes]
    for name, i in merge.places:
        own = strides[name][i : i + len(sizes)]
        # The innermost index that moves gives the stride of the whole.
        step = next((s for size, s in reversed(list(zip(sizes, own, strict=True))) if size != 1), (0,))
        strides[name][i : i + len(sizes)] = [step]


# ---- what is proved ------------------------------------------------------------------------------------------------


def _multiples(
    kernel: ir.Kernel, dims: Mapping[str, int], known: Mapping[str, int], parts: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[str, int], ...]:
    """Divisibility of the run-time dimensions along which a program may take vectors: those of a flat kernel's fastest
    index. Other run-time dimensions are left out, so that a new size of them is no new variant."""
    if kernel.tiles or not kernel.parallel:
        return ()
    symbols = kernel.parallel[-1].extent.symbols
    return tuple(
        (d, gcd(dims[d], _MAX_ALIGN))
        for d in kernel.dims
        if d in symbols and d not in known and len(parts.get(d, ())) <= 1
    )


def _tensor_class(
    t: ir.Tensor,
    dims: Mapping[str, int],
    parts: Mapping[str, tuple[int, ...]],
    strides: Sequence[tuple[int, ...]],
    m: Memory,
) -> TensorClass:
    """What this call proves of a tensor's memory. A stride of 0 (expanded, or size 1) disturbs no alignment."""
    flat = [s for parts in strides for s in parts]
    one = not flat or flat[-1] == 1 or t.shape[-1].evaluate(dims) == 1
    others = flat[:-1] if one else flat
    align = gcd(_MAX_ALIGN, m.residue, *(s * m.itemsize for s in others))
    dense = align < _MAX_ALIGN and m.residue == 0 and _gapless(_sizes(t, dims, parts), flat)
    return TensorClass(one, align, dense)


def _sizes(t: ir.Tensor, dims: Mapping[str, int], parts: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The extents of all dimensions, those behind a starred one apart."""
    leading = parts[str(t.shape[0])] if t.star else ()
    return [*leading, *(p.evaluate(dims) for p in t.shape[1 if t.star else 0 :])]


def _gapless(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie one behind the other, the last subscript fastest."""
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _wide(kernel: ir.Kernel, dims: Mapping[str, int], strides: _Strides) -> bool:
    """Whether an offset inside a row, a stride of it, or the flattened row index may not fit 32 bits.

    Judged by the furthest element that can be reached, not by the number of elements. A dimension that a parallel
    index subscripts alone has 64-bit offsets anyway.
    """
    points = prod(max(0, a.extent.evaluate(dims)) for a in kernel.parallel)
    if points > _INT32_MAX - _ROW_SLACK:
        return True
    inside = _inside(kernel)
    for t in kernel.tensors:
        sizes = [p.evaluate(dims) for p in t.shape]
        own = [
            (size, parts[-1])
            for i, (size, parts) in enumerate(zip(sizes, strides[t.name], strict=True))
            if (t.name, i) in inside and size > 1
        ]
        if any(s > _INT32_MAX for _, s in own) or sum((size - 1) * s for size, s in own) > _INT32_MAX:
            return True
    return False


def _inside(kernel: ir.Kernel) -> set[tuple[str, int]]:
    """Dimensions (tensor, position) that some subscript moves along inside a row: by a tile index or by a constant."""
    parallel = {a.name for a in kernel.parallel}
    tiles = {a.name for a in kernel.tiles}
    found: set[tuple[str, int]] = set()
    for access in ir.accesses(kernel.body):
        for i, sub in enumerate(access.at):
            if isinstance(sub, Poly) and (sub.symbols & tiles or not sub.symbols & parallel):
                found.add((access.tensor, i))
    return found
