"""What a compiled kernel may assume about the tensors it will meet: the part of a call that is compiled in.

A `Variant` is made by the runtime from one call's tensors and is the key of a launch plan, together with the
dtypes and constants that the `ir.Kernel` is already specialised to. Whatever is not in here is a run-time argument,
so a new batch size, sequence length or row stride never compiles again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorClass:
    """What is proved about one tensor's memory.

    unit: its last dimension has stride 1, or extent 1 (then the stride does not matter).
    align: the largest power of two, at most 16, that divides its address and all its other strides, in bytes.
    dense: its elements lie without gaps in the order of their subscripts, from an address that is a multiple of 16
        bytes on. Said only where `align` is less than 16: of what is aligned throughout nobody has to know.
    """

    unit: bool = True
    align: int = 16
    dense: bool = False


@dataclass(frozen=True)
class Variant:
    """The compile-time facts of a class of calls.

    dims: values of the dimensions that must be known: all those in the extent of a tile axis.
    multiples: for run-time dimensions, the largest power of two, at most 16, that divides the value.
    star_ranks: into how many strided dimensions each starred dimension falls after merging what can be merged for
        all tensors alike; 1 is the ordinary case, in which each tensor has one row stride.
    tensors: the memory class of each tensor argument.
    wide: an offset inside a row, or a flattened index, may pass 2**31 - 1; 64-bit index arithmetic throughout.
        (Row offsets are 64-bit in every variant.)
    """

    dims: tuple[tuple[str, int], ...]
    multiples: tuple[tuple[str, int], ...]
    star_ranks: tuple[tuple[str, int], ...]
    tensors: tuple[tuple[str, TensorClass], ...]
    wide: bool = False

    def dim(self, name: str) -> int | None:
        """The compile-time value of dimension `name`, or None where it is a run-time argument."""
        return dict(self.dims).get(name)

    def star_rank(self, dim: str) -> int:
        """Number of strided dimensions behind the starred dimension `dim`."""
        return dict(self.star_ranks).get(dim, 1)

    def tensor(self, name: str) -> TensorClass:
        """The memory class of tensor `name`."""
        return dict(self.tensors)[name]
