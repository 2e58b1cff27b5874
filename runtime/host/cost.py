"""The cost of an op: the sum over the steps of its plan, for sizes of dimensions and the chunks that these give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from kgen.codegen.cost import cost
from kgen.codegen.host import plan
from kgen.codegen.host.text import step_text
from kgen.codegen.machines import Machine
from kgen.codegen.shapes import bind_dims, constants
from kgen.dsl import ast
from kgen.dsl.dtypes import F64
from kgen.dsl.host import ast as host
from kgen.runtime.ahead import Choices
from kgen.runtime.cost import Floor, floor
from kgen.runtime.errors import ArgumentError
from kgen.runtime.host.ahead import planned
from kgen.runtime.op_target import OpTarget, op_target


@dataclass(frozen=True)
class StepCost:
    """A step of a plan, taken `times` times: bytes and operations of all times together, and their floor."""

    text: str
    direction: str  # "forward" | "backward"
    times: int
    moved: int
    flops: int
    floor: Floor
    product: bool = False


@dataclass(frozen=True)
class OpCost:
    """An op for sizes `dims`, with the gradients of all that has one. `chunks`: rows of a chunk, by its symbol.

    The floors of steps add up: one waits for the other. Collectives count what they move on this rank.
    """

    name: str
    dims: Mapping[str, int]
    chunks: Mapping[str, int]
    machine: Machine
    steps: tuple[StepCost, ...]

    @property
    def moved(self) -> int:
        """Bytes of all steps."""
        return sum(s.moved for s in self.steps)

    @property
    def flops(self) -> int:
        """Floating-point operations of all steps."""
        return sum(s.flops for s in self.steps)

    @property
    def seconds(self) -> float:
        """The floor of all steps, one after the other."""
        return sum(s.floor.seconds for s in self.steps)

    @property
    def matrix_flops(self) -> int:
        """Operations of the matrix products."""
        return sum(s.flops for s in self.steps if s.product)

    @property
    def matrix_seconds(self) -> float:
        """The floor of the matrix products."""
        return sum(s.floor.seconds for s in self.steps if s.product)


def op_cost(
    module: ast.Module, op: host.Op, choices: Choices, machine: Machine, gradients: Sequence[str] | None = None
) -> OpCost:
    """The cost of `op` of the checked `module` under `choices`, on `machine`, with the gradients of the parameters
    `gradients`; None: of all that have one.

    Raises ArgumentError for a choice that does not fit the signature, and for a dimension without a size.
    """
    found, sizes = planned(module, op, choices, gradients)
    if sizes is None:
        raise ArgumentError(f"{op.name}: its cost needs the size of every dimension; give them, as in --dim B=8192")
    made = replace(op_target(module, op, choices, gradients, sizes.accumulate), plan=found)
    counter = _Counter(made, machine)
    steps = [
        counter.step(s, direction, lengths)
        for direction, body in (("forward", found.forward), ("backward", found.backward))
        for s, lengths in _taken(body, made.dims, sizes.chunks)
    ]
    dims = {d: n for d, n in made.dims.items() if d in made.header.dims}
    return OpCost(op.name, dims, sizes.chunks, machine, tuple(s for s in steps if s is not None))


# The sizes of chunks that a step is taken with, and how often with each.
_Lengths = Sequence[tuple[Mapping[str, int], int]]


def _taken(
    body: Sequence[plan.Step], dims: Mapping[str, int], chunks: Mapping[str, int]
) -> Iterator[tuple[plan.Step, _Lengths]]:
    for s in body:
        if not isinstance(s, plan.Loop):
            yield s, [({}, 1)]
            continue
        extent, rows = dims[s.dim], chunks[s.chunk]
        whole, rest = divmod(extent, rows)
        lengths = [({s.chunk: rows}, whole)] if whole else []
        lengths += [({s.chunk: rest}, 1)] if rest else []
        for inner in s.body if extent else s.empty:
            yield inner, lengths if extent else [({}, 1)]


def _begun(s: plan.Step, lengths: _Lengths) -> Iterator[tuple[plan.Step, Mapping[str, int], int]]:
    """`s` as often as it is taken; where a sum begins with its first chunk, that one does not read what is there."""
    for i, (sizes, often) in enumerate(lengths):
        if i == 0 and isinstance(s, plan.Matmul | plan.Add) and s.accumulate and s.first is not None:
            yield replace(s, accumulate=False), sizes, 1
            often -= 1
        if often:
            yield s, sizes, often


class _Counter:
    def __init__(self, op: OpTarget, machine: Machine) -> None:
        self.op = op
        self.machine = machine

    def step(self, s: plan.Step, direction: str, lengths: _Lengths) -> StepCost | None:
        """The cost of a step; None of one that moves nothing."""
        moved = flops = times = 0
        spent: dict[str, float] = {}
        for taken, sizes, often in _begun(s, lengths):
            found = self._once(taken, {**self.op.dims, **sizes})
            if found is None:
                return None
            times += often
            moved, flops = moved + often * found[0], flops + often * found[1]
            for what, t in found[2].times.items():
                spent[what] = spent.get(what, 0.0) + often * t
        return StepCost(step_text(s), direction, times, moved, flops, Floor(spent), isinstance(s, plan.Matmul))

    def _once(self, s: plan.Step, sizes: Mapping[str, int]) -> tuple[int, int, Floor] | None:
        match s:
            case plan.Matmul():
                return self._product(s, sizes)
            case plan.Launch():
                return self._launch(s, sizes)
            case plan.Add():
                moved = self._bytes(s.source, sizes) + self._bytes(s.out, sizes) * (1 + s.accumulate)
                return moved, self._elements(s.out, sizes), self._memory(moved)
            case plan.Convert():
                moved = self._bytes(s.source, sizes) + self._bytes(s.out, sizes)
            case plan.Zero():
                moved = self._bytes(s.out, sizes)
            case plan.AllReduce():
                moved = 2 * self._bytes(s.out, sizes)
            case plan.Own() if s.shared:
                moved = 2 * self._bytes(plan.View(s.buffer), sizes)
            case _:
                return None  # takes and gives back memory, or copies only where the graph is kept
        return moved, 0, self._memory(moved)

    def _memory(self, moved: int) -> Floor:
        return Floor({"memory": self.machine.memory_time(moved)})

    def _product(self, s: plan.Matmul, sizes: Mapping[str, int]) -> tuple[int, int, Floor]:
        """Two operations for each of rows x inner x columns; what is added to is read too."""
        (rows, inner), (_, columns) = self._shape(s.left, sizes), self._shape(s.right, sizes)
        flops = 2 * rows * inner * columns + (rows * columns if s.plus is not None else 0)
        views = [s.left, s.right, s.out, *([s.plus] if s.plus is not None else []), *([s.out] if s.accumulate else [])]
        moved = sum(self._bytes(v, sizes) for v in views)
        widest = max(self.op.buffer(v.buffer)[0].itemsize for v in (s.left, s.right))
        m = self.machine
        if widest <= 2:
            times = {"matrix": flops / (m.matrix_measured or m.matrix)}
        else:  # without TF32, which changes results, wider products are made by the ordinary units
            lanes = m.limits.f64 if self.op.buffer(s.left.buffer)[0] == F64 else m.limits.f32
            times = {"f32": flops / (2 * lanes * m.multiprocessors * m.clock)}
        return moved, flops, Floor({**times, "memory": m.memory_time(moved)})

    def _launch(self, s: plan.Launch, sizes: Mapping[str, int]) -> tuple[int, int, Floor]:
        _, _, kernel, views = self.op.elaborated(s)
        dims = constants(kernel) | bind_dims(
            kernel, {t.name: self._shape(views[t.name], sizes) for t in kernel.tensors}
        )
        own = cost(kernel, dims)
        return own.bytes.evaluate(dims), own.work.flops.evaluate(dims), floor(kernel, own, dims, self.machine)

    def _shape(self, v: plan.View, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(p.evaluate(sizes) for p in self.op.shape(v))

    def _elements(self, v: plan.View, sizes: Mapping[str, int]) -> int:
        return prod(self._shape(v, sizes))

    def _bytes(self, v: plan.View, sizes: Mapping[str, int]) -> int:
        return self._elements(v, sizes) * self.op.buffer(v.buffer)[0].itemsize
