"""What a matrix product is to the library that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

import torch

from kgen.codegen.torch_dtypes import FROM_TORCH

ALIGNMENT = 256  # bytes: what algorithms are chosen for, and what torch's allocations have
_VECTOR = 16  # bytes: below it rows have other kernels
_SIXTEEN = (torch.bfloat16, torch.float16)
_NEAR = 1.0  # how far, in powers of two, a size may be from that of a measurement that counts for it


@dataclass(frozen=True)
class Kind:
    """What is known of a product besides its sizes.

    transposed: whether the left and the right factor lie in memory as their transposes. dtype: of both factors, out: of
    the result. accumulate: whether the product is added to what the result holds.
    """

    transposed: tuple[bool, bool]
    dtype: str
    out: str
    accumulate: bool

    def __str__(self) -> str:
        left, right = ("aᵀ" if self.transposed[0] else "a"), ("bᵀ" if self.transposed[1] else "b")
        return f"{self.out} {'+=' if self.accumulate else '='} {self.dtype} {left} @ {right}"

    def data(self) -> dict[str, Any]:
        """Plain data, for `read`."""
        return {
            "transposed": "".join("t" if t else "n" for t in self.transposed),
            "dtype": self.dtype,
            "out": self.out,
            "accumulate": self.accumulate,
        }

    @staticmethod
    def read(d: Mapping[str, Any]) -> Kind:
        """What `data` wrote. Raises KeyError or ValueError for anything else."""
        letters = str(d["transposed"])
        if len(letters) != 2 or set(letters) - {"t", "n"}:
            raise ValueError(f"transposed is {letters!r}, expected two of n and t")
        left, right = (c == "t" for c in letters)
        return Kind((left, right), str(d["dtype"]), str(d["out"]), bool(d["accumulate"]))


@dataclass(frozen=True)
class Problem:
    """`out = left @ right`, or `out +=`: sizes rows x inner times inner x columns. `leading` are the elements between
    rows of the left factor, the right factor and the result, as they lie in memory."""

    kind: Kind
    rows: int
    columns: int
    inner: int
    leading: tuple[int, int, int]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and inner dimension."""
        return self.rows, self.columns, self.inner

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each term."""
        return 2 * self.rows * self.columns * self.inner

    @staticmethod
    def of(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, accumulate: bool) -> Problem | None:
        """The problem of these matrices; None for one that is torch's alone: of other dtypes than 16-bit factors with a
        result of the same or f32, with no elements, or of rows that are not contiguous and aligned."""
        if left.dtype not in _SIXTEEN or right.dtype != left.dtype or out.dtype not in (left.dtype, torch.float32):
            return None
        sides = [_side(t) for t in (left, right, out)]
        if not (left.numel() and right.numel()) or any(s is None for s in sides):
            return None
        (left_t, a), (right_t, b), (out_t, c) = (s for s in sides if s is not None)
        if out_t:
            return None
        kind = Kind((left_t, right_t), FROM_TORCH[left.dtype].name, FROM_TORCH[out.dtype].name, accumulate)
        return Problem(kind, left.shape[0], right.shape[1], left.shape[1], (a, b, c))


def _side(t: torch.Tensor) -> tuple[bool, int] | None:
    """(whether t lies as its transpose, elements between its rows in memory); None where neither way is contiguous."""
    (rows, columns), (down, along) = t.shape, t.stride()
    aligned = _VECTOR // t.element_size()
    if along == 1 and down >= columns and down % aligned == 0:
        return False, down
    if down == 1 and along >= rows and along % aligned == 0:
        return True, along
    return None


def distance(measured: tuple[int, ...], wanted: tuple[int, ...]) -> float | None:
    """How far apart two sizes are, in powers of two altogether; None where a measurement at one says nothing of the
    other, as some dimension is more than twice as large."""
    if min(*measured, *wanted) < 1:
        return None
    apart = [abs(log2(m / w)) for m, w in zip(measured, wanted, strict=True)]
    return None if max(apart) > _NEAR else sum(apart)
