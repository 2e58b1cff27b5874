"""Do two tensors share memory? Does one tensor meet itself?

A kernel may read and write in any order, so a tensor that it writes must not share an element with any other argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to just after the last element; 0 for an empty tensor. Strides are in elements, >= 0."""
    if 0 in shape:
        return 0
    return (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * itemsize


def shares_memory(a: Region, b: Region) -> bool:
    """Whether some byte belongs to both: exact, also for interleaved views such as the halves of `x.chunk(2, -1)`."""
    return np.shares_memory(np.asarray(a), np.asarray(b))


class Region:
    """The memory of a strided tensor as numpy sees arrays. Nothing is read: addresses may be of a GPU."""

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": tuple(shape),
            "strides": tuple(s * itemsize for s in strides),
            "typestr": f"|V{itemsize}",
            "version": 3,
        }


def meets_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two index tuples may be one element. Exact for every view that slicing, transposing and expanding make;
    True also for exotic strides of which that is not plain."""
    if 0 in shape:
        return False
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n != 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
