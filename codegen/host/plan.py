"""The plan of a host program: which buffers there are, how long they live, and the steps in order.

A plan is made for given dtypes, constants, optional tensors and wanted gradients; sizes stay symbolic. Every executor
walks the same plan. Inputs and incoming gradients are buffers that the caller owns: no step writes to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import DType
from kgen.dsl.host.ir import ConstArg, KernelRef, ScalarArg


@dataclass(frozen=True)
class Buffer:
    """Contiguous memory for a tensor. A shape may mention the chunk of a loop, with which it grows: then it is for one
    chunk at a time, and as large as for the largest."""

    name: str
    dtype: DType
    shape: tuple[Poly, ...]


@dataclass(frozen=True)
class View:
    """A buffer, a slice of it along `chunks` (pairs of axis and chunk), or the transpose of either."""

    buffer: str
    chunks: tuple[tuple[int, str], ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class Alloc:
    """Get memory for a buffer; it holds nothing yet."""

    buffer: Buffer


@dataclass(frozen=True)
class Free:
    """The buffer is not used any more."""

    buffer: str


@dataclass(frozen=True)
class Own:
    """What the forward pass saved is about to be changed, or handed out. It is copied where another backward pass may
    follow; `shared` (it is an output too): always."""

    buffer: str
    shared: bool


@dataclass(frozen=True)
class Zero:
    """Fill with zeros."""

    out: View


@dataclass(frozen=True)
class Matmul:
    """`out = left @ right + plus`; with `accumulate` `out += left @ right`. The sum is taken in f32 or wider and
    rounded to out's dtype: once, or, as cuBLAS does where it adds to 16 bits, before it is added and after. `first`
    names a loop in whose first iteration nothing is there to be added to."""

    out: View
    left: View
    right: View
    plus: View | None
    accumulate: bool
    first: str | None


@dataclass(frozen=True)
class Add:
    """`out += source`, or with `first` as in `Matmul`."""

    out: View
    source: View
    accumulate: bool
    first: str | None


@dataclass(frozen=True)
class Convert:
    """`out = source`, rounded to out's dtype."""

    out: View
    source: View


@dataclass(frozen=True)
class Launch:
    """A call of a kernel: arguments by parameter, and a view for each output."""

    kernel: str
    arguments: tuple[tuple[str, View | ScalarArg | ConstArg], ...]
    results: tuple[View, ...]


@dataclass(frozen=True)
class AllReduce:
    """Every element becomes the `kind` (`max` or `sum`) of those that the ranks of the call's process group have in its
    place; of a single rank it stays."""

    out: View
    kind: str


@dataclass(frozen=True)
class Loop:
    """`body` for each chunk of dimension `dim`; `empty` instead, where the dimension is 0."""

    chunk: str
    dim: str
    body: tuple[Step, ...]
    empty: tuple[Step, ...]


Step = Alloc | Free | Own | Zero | Matmul | Add | Convert | Launch | AllReduce | Loop


@dataclass(frozen=True)
class Plan:
    """The steps of both directions.

    `outputs` are pairs of an output's name and its buffer, `gradients` of a parameter's name and the buffer of its
    gradient. `saved` is what the backward steps need of the forward ones, `saved_inputs` of the parameters, `upstream`
    pairs of an output's name and the buffer of its gradient. `sums` are the buffers that are summed in their own,
    narrow dtype: in f32 each would take a buffer more.
    """

    name: str
    buffers: dict[str, Buffer]
    forward: tuple[Step, ...]
    outputs: tuple[tuple[str, str], ...]
    backward: tuple[Step, ...]
    upstream: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    saved: tuple[str, ...]
    saved_inputs: tuple[str, ...]
    sums: tuple[str, ...]
    kernels: dict[str, KernelRef]
