"""Launch plans: what a call needs that does not change from one call to the next.

A *plan* is a kernel compiled for a class of calls (`PlanKey`). A *ready call* is a plan with all run-time sizes and
strides of one exact signature filled in: what remains is to allocate outputs, put in addresses and scalars, and launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kgen.dsl.dtypes import DType
from kgen.runtime import events, unrolled
from kgen.runtime.backends.launch import Built, Launch, ScalarValue
from kgen.runtime.binding import scalar_converter
from kgen.runtime.errors import ArgumentError
from kgen.runtime.flight import SingleFlight
from kgen.runtime.overlap import Region, shares_memory, span
from kgen.runtime.unrolled import Work

if TYPE_CHECKING:
    from kgen.codegen.knobs import Knobs
    from kgen.codegen.program import Program
    from kgen.codegen.variant import Variant


class PlanKey(NamedTuple):
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


class Argument(NamedTuple):
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


def scalar_slot(kernel: str, i: int, name: str, dtype: DType, default: Any, recorded: bool = False) -> ScalarSlot:
    """That of scalar `name`, parameter `i`; `recorded` is as for `scalar_converter`."""
    convert = scalar_converter(kernel, name, dtype, recorded=recorded)
    if default is None:
        return i, convert, object(), 0  # nothing that is passed is this default
    return i, convert, default, convert(default)


def converted(slots: Sequence[ScalarSlot], values: Sequence[Any]) -> list[ScalarValue]:
    """The scalars of a call among its `values`, checked and converted."""
    return [known if (v := values[i]) is default else convert(v) for i, convert, default, known in slots]


class ReadyCall:
    """Everything about calls of one exact signature.

    `launch` is None where there is nothing to compute; outputs that are sums (`zeroed`) are then set to zero.
    """

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
        dtypes: Sequence[str] = (),
    ) -> None:
        """`given`: the outputs are the caller's. `dtypes`: of the scalars, by name."""
        self.kernel = kernel
        self.given, self.dtypes, self.event, self.launch = given, tuple(dtypes), event, launch
        self.arguments, self.outputs = tuple(arguments), tuple(outputs)
        self.device = device
        self.built = built
        self.scalars = tuple(scalars)
        self._draw = events.drawer(event)
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
        # What a call for new outputs does, where there is nothing else to see to: None where inputs are written, or
        # there is nothing to launch.
        self.work: Work | None = None
        if launch is not None and outputs and not self._written and not given:
            self.work = Work(device, outputs, launch, event, self._draw, self._elsewhere)

    def _elsewhere(self, tensors: list[Any], scalars: list[Any], addresses: list[int]) -> Any:
        results = self.run(tensors, scalars, addresses, None)
        return results[0] if len(results) == 1 else tuple(results)

    @cached_property
    def plan(self) -> Callable[..., Any] | None:
        """A function of the tensors, one after another, then the converted scalars, then the tensors' addresses; it
        returns the output, or a tuple of them. None as for `work`. Nothing is checked: tensors must have the layout
        that this was made for, and no mode of torch's dispatcher may be active."""
        if self.work is None:
            return None
        return unrolled.plain(self.work, len(self.arguments) - len(self.outputs), len(self.scalars))

    @property
    def program(self) -> Program | None:
        """The program that runs, where the executor has one."""
        return self.built.program if self.built is not None else None

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[ScalarValue],
        addresses: list[int],
        out: Sequence[torch.Tensor] | None,
    ) -> Sequence[torch.Tensor]:
        """Run the kernel on the inputs `tensors` (at `addresses`) and return the outputs: `out`, or new ones."""
        if out is None:
            new = torch.empty_strided
            out = [new(a.shape, a.strides, dtype=a.dtype, device=self.device) for a in self.outputs]
        tensors = [*tensors, *out]
        for t in out:
            addresses.append(t.data_ptr())
        if self._written:
            self._check_written(tensors, addresses)
        if self.launch is not None:
            self.launch(tensors, scalars, addresses)
            events.record(self.event, self._draw)
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
                        f"{self.kernel}: argument '{self.arguments[i].name}' is written in place but requires grad; "
                        f"call under torch.no_grad(), or pass a detached tensor"
                    )
        for i, j, size_i, size_j in self._pairs:
            a, b = addresses[i], addresses[j]
            if a < b + size_j and b < a + size_i:
                first, second = self.arguments[i], self.arguments[j]
                if shares_memory(_region(a, first), _region(b, second)):
                    raise ArgumentError(
                        f"{self.kernel}: argument '{first.name}', which is written, shares memory with argument "
                        f"'{second.name}'; pass a tensor of its own"
                    )


def _region(address: int, a: Argument) -> Region:
    return Region(address, a.shape, a.strides, a.itemsize)


def _bump_version(tensor: torch.Tensor) -> None:
    """Tell autograd that `tensor` was modified: a graph that saved it then raises instead of using the new values."""
    if not tensor.is_inference():  # those have no version
        torch.autograd.graph.increment_version(tensor)
