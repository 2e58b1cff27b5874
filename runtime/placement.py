"""Tensors laid out in memory in every way that torch allows, with guards around them.

What lies between and around the elements is the guard: bytes that no kernel may change, and that read as NaN
(integers: -1), so
that a read which strays shows in the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# contiguous; the last two dimensions exchanged; every second element; stride 0; one element further; rows of a wider
# buffer. One-dimensional tensors take every third element for `transposed`, and none is `padded`. Not among them is
# `scalar`, one element everywhere: what the gradient of a sum looks like.
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "offset", "padded")

_GUARD = 64  # elements on either side; a multiple of any vector, so alignment stays as it is
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Placed:
    """A tensor and the buffer that it lies in. `before` is a copy of the buffer's bits, where one was taken."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    mark: int
    before: torch.Tensor | None = None

    def bits(self) -> torch.Tensor:
        """The whole buffer as unsigned or signed integers."""
        return self.buffer.view(_BITS[self.buffer.element_size()])

    def unchanged(self) -> bool:
        """Whether the buffer holds what it held when it was placed. Only for inputs."""
        assert self.before is not None
        return torch.equal(self.bits(), self.before)

    def guard_intact(self) -> bool:
        """Whether nothing but the tensor's own elements was written."""
        rest = self.bits().clone()
        t = self.tensor
        rest.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(self.mark)
        return bool((rest == self.mark).all())


def _mark(size: int, written: bool) -> int:
    """The guard's value for elements of `size` bytes, as the integer type of `_BITS`."""
    if written:
        return int.from_bytes(b"\x3c" * size, "little")
    return 255 if size == 1 else -1


def place(values: torch.Tensor, layout: str, *, written: bool = False, keep: bool = False) -> Placed:
    """A tensor with the shape and values of `values`, laid out as `layout` says, inside a guard.

    `expanded` repeats the first slice along the first dimension of more than one element, `scalar` the first element
    along all of them, so the values differ.
    `written` is for what a kernel overwrites. `keep` copies the buffer's bits, so that `unchanged` can be asked.
    """
    shape = tuple(values.shape)
    strides, offset = _strides(shape, layout)
    length = 1 + sum((s - 1) * st for s, st in zip(shape, strides, strict=True)) if values.numel() else 0
    buffer = torch.empty(2 * _GUARD + offset + length, dtype=values.dtype, device=values.device)
    bits = buffer.view(_BITS[buffer.element_size()])
    mark = _mark(buffer.element_size(), written)
    bits.fill_(mark)
    tensor = buffer.as_strided(shape, strides, _GUARD + offset)
    if values.numel():
        first = tuple(slice(0, 1) if st == 0 and s > 1 else slice(None) for s, st in zip(shape, strides, strict=True))
        tensor[first].copy_(values[first])
    return Placed(tensor, buffer, mark, bits.clone() if keep else None)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: str) -> Placed:
    """A tensor to be written, full of NaN (integers: their lowest value, bool: True)."""
    if dtype.is_floating_point:
        fill: float | int = math.nan
    else:
        fill = 1 if dtype == torch.bool else torch.iinfo(dtype).min
    # Expanded memory cannot be written.
    layout = "contiguous" if layout in ("expanded", "scalar") else layout
    return place(torch.full(shape, fill, dtype=dtype, device=device), layout, written=True)


def _strides(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int]:
    """Strides and offset in elements."""
    sizes = list(shape)
    own = _row_major(sizes)
    if layout == "offset":
        return tuple(own), 1
    if layout == "scalar":
        return tuple(0 for _ in sizes), 0
    if layout == "sliced":
        own = [2 * s for s in own]
    elif layout == "padded":
        own = [s * 2 for s in own[:-1]] + own[-1:]
    elif layout == "transposed" and len(sizes) < 2:
        own = [3 * s for s in own]
    elif layout == "transposed":
        own = _row_major([*sizes[:-2], sizes[-1], sizes[-2]])
        own[-2:] = own[-1], own[-2]
    elif layout == "expanded" and sizes:
        at = next((i for i, s in enumerate(sizes) if s > 1), 0)
        own = _row_major([1 if i == at else s for i, s in enumerate(sizes)])
        own[at] = 0
    return tuple(own), 0


def _row_major(sizes: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]
