"""Launch plans: what a call needs that does not change from one call to the next.

A *plan* is a kernel compiled for a class of calls (`PlanKey`). A *ready call* is a plan with all run-time sizes and
strides of one exact signature filled in: what remains is to allocate outputs, put in addresses and scalars, and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.codegen.knobs import Knobs
from kgen.codegen.program import Program
from kgen.codegen.variant import Variant
from kgen.runtime import events
from kgen.runtime.backends.base import Built, Launch, ScalarValue
from kgen.runtime.errors import ArgumentError
from kgen.runtime.flight import SingleFlight
from kgen.runtime.overlap import Region, shares_memory, span


@dataclass(frozen=True)
class PlanKey:
    """What a compiled kernel depends on.

    `specialization` stands for dtypes, constants and optional tensors; `groups` are the merged parallel indices.
    `variant` is None for an executor that needs to know nothing of the memory. `knobs` are those of a tuned schedule.
    """

    specialization: tuple[Any, ...]
    groups: tuple[tuple[str, ...], ...]
    variant: Variant | None
    device: torch.device
    executor: str
    knobs: Knobs | None = None


Plans = SingleFlight[PlanKey, Built]


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a ready call: what the check for shared memory needs."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    written: bool
    is_input: bool

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def span(self) -> int:
        """Bytes from the first to just after the last element."""
        return span(self.shape, self.strides, self.itemsize)


# Where a scalar is among the signature's parameters, how what is passed is checked and converted, and its default value
# before and after that.
ScalarSlot = tuple[int, Callable[[Any], ScalarValue], Any, Any]


class ReadyCall:
    """Everything about calls of one exact signature.

    `launch` is None where there is nothing to compute; outputs that are sums (`zeroed`) are then set to zero.
    """

    __slots__ = (
        "_arguments", "_launch", "_make", "_pairs", "_record", "_written", "_zeroed", "built", "device", "kernel",
        "scalars",
    )  # fmt: skip

    def __init__(
        self,
        kernel: str,
        device: torch.device,
        arguments: Sequence[Argument],
        outputs: Sequence[Argument],
        scalars: Sequence[ScalarSlot],
        launch: Launch | None,
        built: Built | None,
        event: events.Launch,
        zeroed: Sequence[int],
        given: bool,
    ) -> None:
        self.kernel = kernel
        self.device = device
        self.built = built
        self.scalars = tuple(scalars)
        self._arguments = tuple(arguments)
        self._make = tuple(_maker(a, device, arguments) for a in outputs)
        self._launch = launch
        self._record = events.recorder(event)
        self._zeroed = tuple(zeroed)
        first_output = len(arguments) - len(outputs)
        # Fresh outputs share memory with nothing.
        self._written = tuple(
            i for i, a in enumerate(arguments) if a.written and (given or i < first_output) and a.span
        )
        self._pairs = tuple(
            (i, j, arguments[i].span, arguments[j].span)
            for i in self._written
            for j in range(len(arguments) if given else first_output)
            if j != i and arguments[j].span and not (j in self._written and j < i)
        )

    @property
    def program(self) -> Program | None:
        """The program that runs, where the executor has one."""
        return self.built.program if self.built is not None else None

    def run(
        self,
        tensors: list[torch.Tensor],
        scalars: Sequence[ScalarValue],
        addresses: list[int],
        out: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        """Run the kernel on the inputs `tensors` (at `addresses`) and return the outputs: `out`, or new ones."""
        if out is None:
            out = [make(tensors) for make in self._make]
        for t in out:
            tensors.append(t)
            addresses.append(t.data_ptr())
        if self._written:
            self._check_written(tensors, addresses)
        if self._launch is not None:
            self._launch(tensors, scalars, addresses)
            self._record()
        for i in self._zeroed:
            out[i].zero_()
        for i in self._written:
            _bump_version(tensors[i])
        return out

    def _check_written(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        if torch.is_grad_enabled():
            for i in self._written:
                if tensors[i].requires_grad:
                    raise ArgumentError(
                        f"{self.kernel}: argument '{self._arguments[i].name}' is written in place but requires grad; "
                        f"call under torch.no_grad(), or pass a detached tensor"
                    )
        for i, j, size_i, size_j in self._pairs:
            a, b = addresses[i], addresses[j]
            if a < b + size_j and b < a + size_i:
                first, second = self._arguments[i], self._arguments[j]
                if shares_memory(_region(a, first), _region(b, second)):
                    raise ArgumentError(
                        f"{self.kernel}: argument '{first.name}', which is written, shares memory with argument "
                        f"'{second.name}'; pass a tensor of its own"
                    )


def _maker(
    output: Argument, device: torch.device, arguments: Sequence[Argument]
) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """How a new output is allocated: like an input where one looks the same, which torch does in half the time."""
    shape, strides, dtype = output.shape, output.strides, output.dtype
    plain = strides == torch.empty(shape, device="meta").stride()
    same = (shape, dtype, strides)
    model = next((i for i, a in enumerate(arguments) if a.is_input and (a.shape, a.dtype, a.strides) == same), None)

    def make(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        # A subclass would answer with its own kind.
        if model is not None and type(x := tensors[model]) is torch.Tensor:
            return torch.empty_like(x)
        if plain:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return make


def _region(address: int, a: Argument) -> Region:
    return Region(address, a.shape, a.strides, a.itemsize)


def _bump_version(tensor: torch.Tensor) -> None:
    """Tell autograd that `tensor` was modified: a graph that saved it then raises instead of using the new values."""
    if not tensor.is_inference():  # those have no version
        torch.autograd.graph.increment_version(tensor)
