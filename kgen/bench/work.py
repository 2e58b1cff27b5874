"""Operands and calls of one thing that is timed, and how results are held against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.codegen.tolerance import RESCALED, blocked_depth, rescalings

BF16_ROUNDING = 2.0**-8
F32_ROUNDING = 2.0**-24
FEW = 1e2  # roundings of f32 in an element besides those of sums; exp(x) of |x| < 20 has most of them
BLOCK = 1 << 24  # elements that are compared at once
PEER_ERROR = 8 * BF16_ROUNDING  # relative error, by norms, of a peer that computes the same: eight roundings to bf16

Call = Callable[[], Any]
Shape = tuple[int, ...]
Results = tuple[torch.Tensor | None, ...]
# What was found, what is right in float64, and by how much they may differ, each of one shape.
Judged = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
BACKENDS: tuple[str, ...] = ("cuda", "triton")


def as_tuple(value: Any) -> Results:
    """What a call returned, as a tuple of tensors."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


@dataclass(frozen=True)
class Run:
    """A call that can be repeated. `reset`, outside of its time, restores what it overwrites; `results` are the
    tensors that are judged, of what it returned."""

    call: Call
    reset: Call | None = None
    results: Callable[[Any], Results] = as_tuple


@dataclass
class Work:
    """Operands of one case on a device, and the calls on them.

    `elements` are those of the largest tensor, or of what is moved together. `ours` makes the call of a backend, which
    writes to `outputs`; `peers` make those of others. `check` takes the results of a call, in blocks, some of them None
    where a peer does not have them.
    """

    elements: int
    check: Callable[[Results], Iterable[Judged]]
    ours: Callable[[str], Run]
    peers: Mapping[str, Callable[[], Run]]
    outputs: tuple[torch.Tensor, ...] = ()


Make = Callable[[Shape, torch.Generator], Work]


def randn(g: torch.Generator, *shape: int) -> torch.Tensor:
    """Random bf16."""
    return torch.randn(shape, generator=g, device=g.device, dtype=torch.bfloat16)


def blocks(m: int, n: int) -> Iterator[slice]:
    """Rows `0 .. m - 1`, of n elements each, in blocks."""
    step = max(1, BLOCK // n)
    return (slice(i, min(i + step, m)) for i in range(0, m, step))


def roundings(summands: int) -> float:
    """Of f32, relative, on the way through one sum of so many terms, exponentials among them, and what is around it."""
    return (blocked_depth(summands) + RESCALED * rescalings(summands) + FEW) * F32_ROUNDING


def bound(ref: torch.Tensor, size: torch.Tensor, *sums: int) -> torch.Tensor:
    """Of a bf16 result: one rounding, and those of f32 in sums of so many terms, whose sizes add up to `size`."""
    return ref.abs() * BF16_ROUNDING + size.abs() * (sum(map(roundings, sums)) + FEW * F32_ROUNDING)


def worst(judged: Iterable[Judged]) -> float:
    """The largest error in units of its bound; infinite where something is NaN or off where nothing may be."""
    largest = [0.0]
    for got, ref, allowed in judged:
        off = (got.double() - ref).abs()
        ratio = torch.where(off == 0, 0.0, off / allowed)
        largest.append(float(ratio.nan_to_num(float("inf"), float("inf")).max()))
    return max(largest)


def relative_error(judged: Iterable[Judged]) -> float:
    """The largest error of a tensor by norms; the blocks of one tensor are told apart, as each must be right."""
    largest = [0.0]
    for got, ref, _ in judged:
        off = (got.double() - ref).norm() / ref.norm().clamp_min(1e-300)
        largest.append(float(off.nan_to_num(float("inf"), float("inf"))))
    return max(largest)


def backward(
    file: str, name: str, values: Sequence[Any], wanted: Sequence[int], cotangents: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], Callable[[str], Run]]:
    """Calls of the derived backward kernel of `name` in the packaged `file`, alone, without autograd around it.

    `values` are the arguments of the forward kernel, `wanted` the positions of those whose gradients are taken,
    `cotangents` the gradients of its outputs. Returns the tensors that the calls write, in order of the kernel, and
    what makes the call of a backend. The forward of that backend gives what is saved.
    """
    from kgen.runtime.autograd import training
    from kgen.runtime.loading import load_packaged

    t = training(getattr(load_packaged(file), name), values, tuple(wanted))
    order = sorted(t.gradients, key=lambda i: t.gradients[i])
    if list(order) != list(wanted) or [t.gradients[i] for i in order] != list(range(len(order))):
        raise RuntimeError(f"the backward of {name} has other outputs than one for each of {wanted}: {t.gradients}")
    outputs: tuple[torch.Tensor, ...] = tuple(torch.empty_like(values[i]) for i in order)

    def ours(backend: str) -> Run:
        results = as_tuple(t.forward(*(values[i] for i in t.inputs), backend=backend))
        saved = [*(values[i] for i in t.saved), *(results[i] for i in t.kept)]
        places = {"saved": saved, "cotangent": cotangents, "scalar": values}
        arguments = [places[where][i] for where, i in t.arguments]
        del results
        out: Any = outputs[0] if len(outputs) == 1 else outputs
        return Run(lambda: t.backward(*arguments, backend=backend, out=out))

    return outputs, ours
