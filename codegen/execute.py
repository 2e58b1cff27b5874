"""How a kernel of the tile IR is walked, whatever its values are.

`Executor` settles the arguments, cuts the index space into blocks and walks the statements; what a value is and what
an operation does to it is a subclass's: numbers (`interpret`) or numbers with error bounds (`tolerance`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

from kgen.codegen.shapes import bind_dims, constants, flat_shape, full_shape, leading_shapes
from kgen.codegen.space import Block, Subscript, blocks
from kgen.codegen.torch_dtypes import FROM_TORCH, TORCH, rounded
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import DType
from kgen.dsl.errors import KgenError

V = TypeVar("V")
ScalarValue = float | int | bool


class ArgumentError(KgenError):
    """A tensor or scalar argument of a call has the wrong type, dtype or device."""


class Executor(ABC, Generic[V]):
    """One execution of `kernel` on given arguments. Subclasses define the values and keep the outputs."""

    def __init__(
        self,
        kernel: ir.Kernel,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, ScalarValue],
        max_elements: int,
    ) -> None:
        """Check the arguments; see `interpret` for their form and the errors."""
        check_tensors(kernel, tensors)
        shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self.kernel = kernel
        self.dims = constants(kernel) | bind_dims(kernel, shapes)
        self.leading = leading_shapes(kernel, shapes)
        self.device = next((t.device for t in tensors.values()), torch.device("cpu"))
        self.scalars = {p.name: scalar_value(kernel, p, scalars) for p in kernel.scalars}
        for name in scalars:
            if name not in self.scalars:
                raise ArgumentError(f"{kernel.name}: there is no scalar argument '{name}'")
        self.flat = {
            t.name: tensors[t.name].detach().reshape(flat_shape(t, self.dims))
            for t in kernel.tensors
            if t.name in tensors and t.role != "out"
        }
        self.max_elements = max_elements
        self.block: Block
        self.env: dict[str, V] = {}

    @property
    def outputs(self) -> tuple[ir.Tensor, ...]:
        """The tensors that the kernel writes."""
        return tuple(t for t in self.kernel.tensors if t.role != "in")

    def flat_shape(self, tensor: ir.Tensor) -> tuple[int, ...]:
        """The shape of an argument with starred dimensions flattened."""
        return flat_shape(tensor, self.dims)

    def full_shape(self, tensor: ir.Tensor) -> tuple[int, ...]:
        """The shape of an argument as the caller sees it."""
        return full_shape(tensor, self.dims, self.leading)

    def run(self) -> None:
        """Execute every statement for every block of the index space."""
        last: dict[str, int] = {}
        for i, s in enumerate(self.kernel.body):
            last.update({e.name: i for e in ir.walk(s.value) if isinstance(e, ir.Ref)})
        for block in blocks(self.kernel, self.dims, self.device, self.max_elements):
            self.block = block
            self.env = {}
            for i, s in enumerate(self.kernel.body):
                if isinstance(s, ir.Let):
                    if s.name in last:
                        self.env[s.name] = self.eval(s.value)
                elif isinstance(s, ir.Store):
                    self.store(s, self.eval(s.value))
                else:
                    self.accumulate(s, self.eval(s.value))
                # A value lives until its last use: intermediates are large.
                for name in [n for n in self.env if last[n] <= i]:
                    del self.env[name]

    def eval(self, e: ir.Expr) -> V:
        """The value of an expression over the current block."""
        match e:
            case ir.Ref():
                return self.env[e.name]
            case ir.Const():
                return self.const(e)
            case ir.Scalar():
                value = self.block.full(self.scalars[e.name].item(), self.scalars[e.name].dtype)
                return self.exact(value, e.dtype)
            case ir.IndexValue():
                return self.exact(self.block.index(e.index), e.dtype)
            case ir.Load():
                return self._load(e)
            case ir.Op():
                return self.op(e, [self.eval(a) for a in e.args])
            case ir.Cast():
                return self.cast(e, self.eval(e.arg))
            case ir.Reduce():
                return self.reduce(e, self.eval(e.arg), [self.block.position(a) for a in e.over])

    def _load(self, e: ir.Load) -> V:
        subs = [s if isinstance(s, Poly) else self.eval(s) for s in e.at]
        index: list[Subscript] = [s if isinstance(s, Poly) else self.integers(s) for s in subs]
        tensor = self.flat[e.tensor]
        raw = self.block.read(tensor, index, outside_value(tensor.dtype))
        return self.loaded(e, self.exact(raw, e.dtype), [s for s in subs if not isinstance(s, Poly)])

    # -- what a subclass says ------------------------------------------------------------------------------------
    @abstractmethod
    def const(self, e: ir.Const) -> V:
        """A literal."""

    @abstractmethod
    def exact(self, t: torch.Tensor, dtype: DType) -> V:
        """A value known exactly, converted to compute dtype `dtype`."""

    @abstractmethod
    def integers(self, v: V) -> torch.Tensor:
        """An integer value as a tensor, to subscript with."""

    @abstractmethod
    def loaded(self, e: ir.Load, v: V, subscripts: list[V]) -> V:
        """`v`, which was loaded at `subscripts` (those of its subscripts that are values)."""

    @abstractmethod
    def op(self, e: ir.Op, args: list[V]) -> V:
        """A scalar function, elementwise."""

    @abstractmethod
    def cast(self, e: ir.Cast, v: V) -> V:
        """A conversion."""

    @abstractmethod
    def reduce(self, e: ir.Reduce, v: V, over: list[int]) -> V:
        """A reduction over the tensor dimensions `over`, which are kept with size 1."""

    @abstractmethod
    def store(self, s: ir.Store, v: V) -> None:
        """Keep the block's part of an output."""

    @abstractmethod
    def accumulate(self, s: ir.Accumulate, v: V) -> None:
        """Add the block's part to an output."""


def outside_value(dtype: torch.dtype) -> float | int:
    """What a gather out of range reads: NaN, the lowest value of an integer type, False."""
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def check_tensors(kernel: ir.Kernel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ArgumentError unless every tensor given has the dtype of the signature and all are on one device."""
    devices = {t.device: name for name, t in tensors.items()}
    if len(devices) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise ArgumentError(f"{kernel.name}: tensor arguments must be on one device, got {places}")
    for t in kernel.tensors:
        if t.name in tensors and tensors[t.name].dtype != TORCH[t.dtype]:
            found = FROM_TORCH.get(tensors[t.name].dtype, tensors[t.name].dtype)
            raise ArgumentError(f"{kernel.name}: argument '{t.name}' must have dtype {t.dtype}, got {found}")


def scalar_value(kernel: ir.Kernel, p: ir.ScalarParam, given: Mapping[str, ScalarValue]) -> torch.Tensor:
    """The scalar argument `p` as a tensor of shape () and its storage dtype, rounded to it as any call rounds it.

    Raises ArgumentError if it is missing, or an integer argument is not a whole number in range.
    """
    value = given.get(p.name, p.default)
    if value is None:
        raise ArgumentError(f"{kernel.name}: scalar argument '{p.name}' is missing")
    if p.dtype.kind == "float":
        return rounded(torch.tensor(float(value), dtype=torch.float64), p.dtype)
    if p.dtype.kind == "bool":
        return torch.tensor(bool(value))
    info = torch.iinfo(TORCH[p.dtype])
    if value != value or value in (float("inf"), -float("inf")) or int(value) != value:
        raise ArgumentError(f"{kernel.name}: scalar argument '{p.name}' must be a whole number, got {value}")
    if not info.min <= value <= info.max:
        raise ArgumentError(f"{kernel.name}: scalar argument '{p.name}' must fit {p.dtype}, got {value}")
    return torch.tensor(int(value), dtype=TORCH[p.dtype])
