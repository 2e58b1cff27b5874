"""What a launch is, whatever made the kernel: all that is needed of a backend whose kernels are compiled already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kgen.codegen.torch_dtypes import rounded
from kgen.dsl.dtypes import BF16

if TYPE_CHECKING:
    from kgen.codegen.program import Arg, Program
    from kgen.runtime.layouts import Layout

ScalarValue = float | int | bool

# Runs the kernel once on tensors (in order of `ir.Kernel.tensors`, outputs last), scalars (of `ir.Kernel.scalars`)
# and the addresses of the tensors.
Launch = Callable[[Sequence[torch.Tensor], Sequence[ScalarValue], Sequence[int]], None]


class Built(ABC):
    """A kernel compiled for one variant on one device: what a launch plan holds."""

    program: Program | None = None

    @abstractmethod
    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        """How to run it on tensors of just this layout, and the number of programs (0 where that has no meaning)."""

    def resident(self) -> int | None:
        """How many programs the device runs at a time, where that is for the device to say (clusters must find their
        multiprocessors side by side); None: as many as the schedule assumes."""
        return None


class Slots(NamedTuple):
    """Where the pieces of a call go among the arguments of a compiled kernel.

    `values` holds the run-time sizes and strides; `tensors` are pairs (position among the arguments, position among the
    call's tensors), `scalars` likewise.
    """

    values: tuple[int, ...]
    tensors: tuple[tuple[int, int], ...]
    scalars: tuple[tuple[int, int], ...]

    @staticmethod
    def of(args: Sequence[Arg], layout: Layout) -> Slots:
        """The slots of a kernel with the arguments `args`, for calls of this layout."""
        tensor_at = {t.name: i for i, t in enumerate(layout.kernel.tensors)}
        scalar_at = {s.name: i for i, s in enumerate(layout.kernel.scalars)}
        return Slots(
            tuple(layout.value(a) if a.kind in ("dim", "stride") else 0 for a in args),
            tuple((i, tensor_at[a.name]) for i, a in enumerate(args) if a.kind == "tensor"),
            tuple((i, scalar_at[a.name]) for i, a in enumerate(args) if a.kind == "scalar"),
        )

    def fill(self, tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue]) -> list[ScalarValue]:
        """The arguments in order, tensors as addresses."""
        return self.fill_addresses([t.data_ptr() for t in tensors], scalars)

    def fill_addresses(self, addresses: Sequence[int], scalars: Sequence[ScalarValue]) -> list[ScalarValue]:
        """The same from the addresses of the call's tensors."""
        out: list[ScalarValue] = list(self.values)
        for i, k in self.tensors:
            out[i] = addresses[k]
        for i, k in self.scalars:
            out[i] = scalars[k]
        return out


def bf16_bits(value: ScalarValue) -> int:
    """`value` rounded to bf16, as its 16 bits."""
    return int(rounded(torch.tensor(float(value), dtype=torch.float64), BF16).view(torch.int16).item()) & 0xFFFF
