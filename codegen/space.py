"""Which elements of a tensor does each point of a kernel's index space touch?

A block is a part of the index space: a range of every parallel index, the whole of every tile index. Values over
a block are tensors with one dimension for each index, in order of declaration, of size 1 where the value lacks it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Poly, Sym
from kgen.dsl.errors import KgenError

Subscript = Poly | torch.Tensor


def floordiv(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Integer `a // b`, floored; 0 where `b` is 0 (which the language leaves undefined), never a trap."""
    plain = torch.where((b == 0) | (b == -1), torch.ones_like(b), b)
    q = torch.div(a, plain, rounding_mode="floor")
    q = torch.where(b == -1, -a, q)
    return torch.where(b == 0, torch.zeros_like(q), q)


def modulo(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Integer `a % b` with the sign of `b`; 0 where `b` is 0."""
    plain = torch.where((b == 0) | (b == -1), torch.ones_like(b), b)
    return torch.remainder(a, plain)


@dataclass(frozen=True)
class Block:
    """A part of the index space: `ranges[i]` is the half-open range of axis `axes[i]`; `dims` binds all other names."""

    axes: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    dims: Mapping[str, int]
    device: torch.device

    def position(self, axis: str) -> int:
        """The tensor dimension along which `axis` lies."""
        return self.axes.index(axis)

    def extent(self, axis: str) -> int:
        """How many values of `axis` the block has."""
        lo, hi = self.ranges[self.position(axis)]
        return hi - lo

    def shape(self, names: frozenset[str] | Sequence[str]) -> tuple[int, ...]:
        """The shape of a value over the axes `names`."""
        return tuple(hi - lo if a in names else 1 for a, (lo, hi) in zip(self.axes, self.ranges, strict=True))

    def iota(self, axis: str) -> torch.Tensor:
        """The values of `axis` as i64."""
        lo, hi = self.ranges[self.position(axis)]
        return torch.arange(lo, hi, device=self.device).reshape(self.shape((axis,)))

    def full(self, value: float | int | bool, dtype: torch.dtype) -> torch.Tensor:
        """A value over no axes."""
        return torch.full(self.shape(()), value, dtype=dtype, device=self.device)

    def spread(self, v: torch.Tensor, over: Sequence[int]) -> torch.Tensor:
        """`v` expanded to the whole extent along the tensor dimensions `over`, where it lacks those axes."""
        return v.expand([self.extent(self.axes[i]) if i in over else s for i, s in enumerate(v.shape)])

    def index(self, poly: Poly) -> torch.Tensor:
        """The i64 value of an expression over indices and dimensions."""
        total = self.full(0, torch.int64)
        for mono, coefficient in poly.terms:
            term = self.full(coefficient, torch.int64)
            for atom in mono:
                if isinstance(atom, Sym):
                    factor = self.iota(atom.name) if atom.name in self.axes else self.dims[atom.name]
                elif isinstance(atom, FloorDiv):
                    factor = floordiv(self.index(atom.num), self.index(atom.den))
                else:
                    factor = modulo(self.index(atom.num), self.index(atom.den))
                term = term * factor
            total = total + term
        return total

    def view(self, tensor: torch.Tensor, at: Sequence[Poly]) -> torch.Tensor | None:
        """The elements `tensor[at...]` as a view without copying, over the axes that the subscripts mention.

        None where no strides describe them (floor divisions, products of indices, negative steps).
        """
        strides = dict.fromkeys(self.axes, 0)
        used: set[str] = set()
        offset = tensor.storage_offset()
        for size, stride, poly in zip(tensor.shape, tensor.stride(), at, strict=True):
            linear = self._linear(poly)
            if linear is None:
                return None
            coefficients, constant = linear
            low = high = constant
            for axis, c in coefficients.items():
                lo, hi = self.ranges[self.position(axis)]
                if hi <= lo:
                    return tensor.new_empty(self.shape(frozenset().union(*(p.symbols for p in at))))
                low += min(c * lo, c * (hi - 1))
                high += max(c * lo, c * (hi - 1))
                strides[axis] += c * stride
                offset += c * lo * stride
                used.add(axis)
            if low < 0 or high >= size:
                raise KgenError(f"subscript {poly} takes values {low} to {high} in a dimension of size {size}")
            offset += constant * stride
        if any(s < 0 for s in strides.values()):
            return None
        return tensor.as_strided(self.shape(frozenset(used)), [strides[a] for a in self.axes], offset)

    def _linear(self, poly: Poly) -> tuple[dict[str, int], int] | None:
        coefficients: dict[str, int] = {}
        constant = 0
        for mono, c in poly.substitute(dict(self.dims)).terms:
            if not mono:
                constant = c
            elif len(mono) == 1 and isinstance(mono[0], Sym) and mono[0].name in self.axes:
                coefficients[mono[0].name] = c
            else:
                return None
        return coefficients, constant

    def read(self, tensor: torch.Tensor, at: Sequence[Subscript], outside: float | int) -> torch.Tensor:
        """`tensor[at...]` in its dtype; `outside` where a gather (a subscript that is a tensor) is out of range."""
        affine = [s for s in at if isinstance(s, Poly)]
        if len(affine) == len(at):
            view = self.view(tensor, affine)
            if view is not None:
                return view
        index = [self.index(s) if isinstance(s, Poly) else s.to(torch.int64) for s in at]
        shape = torch.broadcast_shapes(*(i.shape for i in index))
        if math.prod(shape) and not tensor.numel():
            return torch.full(shape, outside, dtype=tensor.dtype, device=self.device)
        bad = torch.zeros(self.shape(()), dtype=torch.bool, device=self.device)
        for i, (sub, size) in enumerate(zip(at, tensor.shape, strict=True)):
            if isinstance(sub, Poly):
                continue
            bad = bad | (index[i] < 0) | (index[i] >= size)
            index[i] = index[i].clamp(0, max(size - 1, 0))
        value = tensor[tuple(index)]
        return value if len(affine) == len(at) else torch.where(bad, value.new_tensor(outside), value)

    def write(self, tensor: torch.Tensor, at: Sequence[Poly], value: torch.Tensor, *, add: bool = False) -> None:
        """`tensor[at...] = value`, or `+=` with equal places added up; `value` broadcasts over axes that it lacks."""
        view = self.view(tensor, at)
        if view is not None:
            if add:
                view.add_(value)
            else:
                view.copy_(value)
            return
        index = torch.broadcast_tensors(*(self.index(p) for p in at))
        shape = torch.broadcast_shapes(index[0].shape, value.shape)
        index = tuple(i.expand(shape) for i in index)
        tensor.index_put_(index, value.expand(shape).to(tensor.dtype), accumulate=add)


def blocks(kernel: ir.Kernel, dims: Mapping[str, int], device: torch.device, max_elements: int) -> Iterator[Block]:
    """Blocks that cover the index space, each with at most `max_elements` in its largest value.

    Parallel indices are cut, the first declared first; tile indices never, so that one program's tile may exceed it.
    Nothing is yielded where a parallel index has no values: no program runs.
    """
    names = tuple(a.name for a in kernel.axes)
    extent = {a.name: max(0, a.extent.evaluate(dims)) for a in kernel.axes}
    used = {e.axes for s in kernel.body for e in ir.walk(s.value)} | {frozenset()}
    chunk = dict(extent)

    def largest() -> int:
        return max(math.prod(chunk[a] for a in axes) for axes in used)

    for axis in kernel.parallel:
        if largest() > max_elements:
            with_one = chunk | {axis.name: 1}
            rest = max(math.prod(with_one[a] for a in axes) for axes in used if axis.name in axes or not axes)
            chunk[axis.name] = max(1, min(extent[axis.name], max_elements // max(rest, 1)))
    cuts = [[(lo, min(lo + chunk[a], extent[a])) for lo in range(0, extent[a], max(chunk[a], 1))] for a in names]
    tiles = {a.name for a in kernel.tiles}
    cuts = [c or [(0, 0)] if a in tiles else c for a, c in zip(names, cuts, strict=True)]
    for ranges in itertools.product(*cuts):
        yield Block(names, ranges, dims, device)
