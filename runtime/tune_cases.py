"""What `kgen tune` measures: one kernel at one set of sizes, and arguments for it of its own.

A kernel has up to three: its call, the training form of it that a call takes which records gradients, and the backward
kernel. A `Case` is made from sizes alone; tensors are made when they are asked for. Those of a backward kernel are what
the training form gives for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.codegen.shapes import ShapeError, bind_dims, constants, flat_shape
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.check import Specialization, TensorParam, example_sizes
from kgen.dsl.dtypes import DTYPES
from kgen.runtime import autograd
from kgen.runtime.ahead import Choices, contiguous, specialization, target
from kgen.runtime.autograd import Training
from kgen.runtime.backends.base import round_scalar
from kgen.runtime.backends.launch import ScalarValue
from kgen.runtime.binding import examine
from kgen.runtime.errors import ArgumentError
from kgen.runtime.gradients import derivable
from kgen.runtime.kernel import Kernel
from kgen.runtime.layouts import Layout, Memory, layout

DIRECTIONS = ("forward", "training", "backward")
_CPU = torch.device("cpu")
# Of scalars without a default.
_SCALARS: dict[str, ScalarValue] = {"float": 0.75, "int": 3, "bool": True}


@dataclass(frozen=True)
class Arguments:
    """All tensors of a call, those that it writes among them, and its scalars: in order of the tile IR."""

    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[ScalarValue, ...]

    @property
    def addresses(self) -> list[int]:
        """Where the tensors are."""
        return [t.data_ptr() for t in self.tensors]


@dataclass(frozen=True)
class Case:
    """One kernel to tune. `source` is the kernel of the file, specialised as `spec` says and called with sizes `dims`;
    `body` the kernel that is measured (the same, or that of its `training`), and `where` the layout of its call."""

    source: Kernel
    spec: Specialization
    dims: Mapping[str, int]
    direction: str
    training: Training | None
    body: ir.Kernel
    where: Layout

    @property
    def name(self) -> str:
        """`rms_norm`, `rms_norm.training` or `rms_norm.backward`."""
        return self.source.name if self.direction == "forward" else f"{self.source.name}.{self.direction}"

    @property
    def elements(self) -> int:
        """Those of the largest tensor."""
        sizes = constants(self.body) | dict(self.where.dims)
        return max((math.prod(flat_shape(t, sizes)) for t in self.body.tensors), default=0)

    def arguments(self, device: torch.device, seed: int = 0) -> Arguments:
        """Random arguments on `device`. Integers that are subscripts are those of elements that are there."""
        g = torch.Generator(device).manual_seed(seed)
        own = _values(self.source, self.spec, self.dims, device, g)
        with torch.no_grad():
            values = own if self.training is None else _of_training(self, own, device, g)
        kernel = _kernel(self.source, self.training, self.direction)
        by_name = dict(zip((p.name for p in kernel.signature.params), values, strict=True))
        sizes = constants(self.body) | dict(self.where.dims)
        tensors = [
            torch.empty(flat_shape(t, sizes), dtype=TORCH[t.dtype], device=device)
            if t.role == "out"
            else by_name[t.name]
            for t in self.body.tensors
        ]
        scalars = [round_scalar(by_name[s.name], s.dtype) for s in self.body.scalars]
        return Arguments(tuple(tensors), tuple(scalars))

    def smaller(self, limit: int) -> Case:
        """The same compiled kernel with fewer rows, so that no tensor has many more than `limit` elements; this case
        where its rows are part of what is compiled."""
        free = frozenset[str]().union(*(a.extent.symbols for a in self.body.parallel)) & self.dims.keys()
        free -= frozenset[str]().union(*(a.extent.symbols for a in self.body.tiles))
        dims, found = dict(self.dims), self
        while found.elements > limit:
            most = max(free, key=lambda d: dims[d], default=None)
            if most is None or dims[most] < 32:
                return found
            half = dims[most] // 2
            # As divisible as it was, and no power of two, so that the last program is not full.
            grain = math.gcd(dims[most], 16)
            options = (half - half // 8 | 1, half // grain * grain)
            for n in options:
                try:
                    trial = make(self.source, self.spec, {**dims, most: n}, self.direction, self._wanted)
                except (ShapeError, ArgumentError):
                    continue
                if trial.where.variant == self.where.variant and trial.where.groups == self.where.groups:
                    dims, found = dict(trial.dims), trial
                    break
            else:
                free -= {most}
        return found

    @property
    def _wanted(self) -> tuple[str, ...]:
        if self.training is None:
            return ()
        return tuple(self.source.signature.params[i].name for i in self.training.gradients)


def case(kernel: Kernel, choices: Choices, direction: str = "forward", wanted: Sequence[str] | None = None) -> Case:
    """The case of `kernel` for `choices` (sizes that are not among them are those of its `example`).

    wanted: the inputs whose gradients the backward kernel computes; None for all that have one. Raises ArgumentError
    for choices that do not fit, DeriveError where there is no gradient.
    """
    declared = next(k for k in kernel.module.kernels if k.name == kernel.name)
    spec = specialization(kernel.signature, choices, example_sizes(declared))
    goal = target(kernel.module, declared, choices)
    dims = {d: goal.layout.dims[d] for d in goal.kernel.dims}
    return make(kernel, spec, dims, direction, wanted)


def make(
    kernel: Kernel, spec: Specialization, dims: Mapping[str, int], direction: str, wanted: Sequence[str] | None
) -> Case:
    """The case of `kernel` specialised as `spec` says, at sizes `dims`; otherwise as `case`."""
    values = _values(kernel, spec, dims, _CPU, None)
    if direction == "forward":
        return Case(kernel, spec, dims, direction, None, *_laid_out(kernel, values))
    body = kernel.specialize(spec)
    if wanted is None:
        wanted, _ = derivable(kernel, body)
    if not wanted:
        raise ArgumentError(f"{kernel.name}: no input has a gradient, so there is no backward kernel to tune")
    names = [p.name for p in kernel.signature.params]
    unknown = [n for n in wanted if n not in names or values[names.index(n)] is None]
    if unknown:
        raise ArgumentError(f"{kernel.name}: there is no input '{unknown[0]}' to take a gradient of")
    t = autograd.training(kernel, values, tuple(i for i, n in enumerate(names) if n in wanted))
    inputs = [values[i] for i in t.inputs]
    forward = Case(kernel, spec, dims, "training", t, *_laid_out(t.forward, inputs))
    if direction == "training":
        return forward
    results = _results(forward.body, forward.where)
    arguments = _backward_values(t, values, results, results)
    return Case(kernel, spec, dims, "backward", t, *_laid_out(t.backward, arguments))


def _kernel(source: Kernel, t: Training | None, direction: str) -> Kernel:
    if t is None:
        return source
    return t.forward if direction == "training" else t.backward


def _laid_out(kernel: Kernel, values: Sequence[Any]) -> tuple[ir.Kernel, Layout]:
    """What the runtime makes of a call with `values`, all contiguous and aligned."""
    spec, _ = examine(kernel.signature, values, None, plain=False)
    body = kernel.specialize(spec)
    given = zip(kernel.signature.params, values, strict=True)
    shapes = {p.name: tuple(v.shape) for p, v in given if isinstance(p, TensorParam) and v is not None}
    dims = constants(body) | bind_dims(body, shapes)
    memory: dict[str, Memory] = {}
    for t in body.tensors:
        shape = flat_shape(t, dims)
        memory[t.name] = Memory(shape, contiguous(shape), t.dtype.itemsize, 0)
    return body, layout(body, dims, memory)


def _results(body: ir.Kernel, where: Layout) -> list[torch.Tensor]:
    sizes = constants(body) | dict(where.dims)
    return [_blank(flat_shape(t, sizes), TORCH[t.dtype]) for t in body.tensors if t.role == "out"]


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape that takes no memory."""
    return torch.empty((1,) * len(shape), dtype=dtype).expand(shape)


def _backward_values(
    t: Training, values: Sequence[Any], results: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
) -> list[Any]:
    saved = [*(values[i] for i in t.saved), *(results[i] for i in t.kept)]
    sources = {"saved": saved, "cotangent": incoming, "scalar": values}
    return [sources[where][i] for where, i in t.arguments]


def _of_training(case: Case, own: list[Any], device: torch.device, g: torch.Generator) -> list[Any]:
    t = case.training
    assert t is not None  # the caller looked
    inputs = [own[i] for i in t.inputs]
    if case.direction == "training":
        return inputs
    results = t.forward(*inputs, backend="auto")
    results = list(results) if isinstance(results, tuple) else [results]
    incoming = [
        torch.randn(r.shape, generator=g, device=device, dtype=r.dtype) if r.is_floating_point() else r for r in results
    ]
    return _backward_values(t, own, results, incoming)


# ---- values ----------------------------------------------------------------------------------------------------------


def _values(
    kernel: Kernel, spec: Specialization, dims: Mapping[str, int], device: torch.device, g: torch.Generator | None
) -> list[Any]:
    """Arguments in order of the signature; without a generator tensors are there for their shapes alone."""
    body = kernel.specialize(spec)
    sizes = constants(body) | dict(dims)
    tensors = {t.name: t for t in body.tensors}
    limits = _limits(body, sizes) if g is not None else {}
    out: list[Any] = []
    for p in kernel.signature.params:
        if isinstance(p, TensorParam):
            t = tensors.get(p.name)
            out.append(None if t is None else _tensor(t, flat_shape(t, sizes), device, g, limits.get(p.name)))
        elif p.const:
            out.append(spec.consts[p.name])
        elif p.default is not None:
            out.append(p.default)
        else:
            out.append(_SCALARS[DTYPES[p.dtype].kind if p.dtype in DTYPES else "float"])
    return out


def _tensor(
    t: ir.Tensor, shape: tuple[int, ...], device: torch.device, g: torch.Generator | None, limit: int | None
) -> torch.Tensor:
    dtype = TORCH[t.dtype]
    if g is None:
        return _blank(shape, dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=g, device=device) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g, device=device, dtype=dtype)
    most = min(limit or 128, torch.iinfo(dtype).max)
    return torch.randint(0, max(1, most), shape, generator=g, device=device).to(dtype)


def _limits(body: ir.Kernel, sizes: Mapping[str, int]) -> dict[str, int]:
    """For tensors that subscripts are made of: how many elements there are to choose from."""
    made_of: dict[str, frozenset[str]] = {}
    limits: dict[str, int] = {}

    def sources(e: ir.Expr) -> frozenset[str]:
        found = frozenset[str]()
        for n in ir.walk(e):
            if isinstance(n, ir.Load):
                found |= {n.tensor}
            elif isinstance(n, ir.Ref):
                found |= made_of.get(n.name, frozenset())
        return found

    for s in body.body:
        for e in ir.walk(s.value):
            if not isinstance(e, ir.Load):
                continue
            for subscript, extent in zip(e.at, body.tensor(e.tensor).shape, strict=True):
                if not isinstance(subscript, Poly):
                    for name in sources(subscript):
                        n = extent.evaluate(sizes)
                        limits[name] = min(n, limits.get(name, n))
        if isinstance(s, ir.Let):
            made_of[s.name] = sources(s.value)
    return limits
