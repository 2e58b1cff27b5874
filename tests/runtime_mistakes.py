"""Mistakes of a runtime, made on purpose: in calls of backward kernels, in gradients handed on, in what a kernel is
told of memory. `break_kit` puts them in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import break_kit as broken
import torch

import kgen
from kgen.runtime import autograd
from kgen.runtime.kernel import Kernel
from kgen.runtime.layouts import Memory

Run = Callable[[list[Any]], Any]
Told = Callable[[str, Memory, Mapping[str, Memory]], Memory]

RIGHT_GRADIENTS = autograd.gradients
RIGHT_TABLES = kgen.nn.RotaryEmbedding._tabulate
RIGHT_CALL = Kernel.ordered


def cotangents(t: autograd.Training, arguments: list[Any]) -> list[int]:
    """Which arguments of a backward kernel are gradients of results."""
    return [k for k, (where, _) in enumerate(t.arguments) if where == "cotangent"]


def overwrites_its_input(t: autograd.Training, run: Run, arguments: list[Any]) -> Any:
    results = run(arguments)
    first = results[0] if isinstance(results, tuple) else results
    like = [a for a in arguments if isinstance(a, torch.Tensor) and (a.shape, a.dtype) == (first.shape, first.dtype)]
    like[0].data.copy_(first)
    return results


def keeps_its_buffers() -> AbstractContextManager[None]:
    held: dict[int, Any] = {}

    def change(t: autograd.Training, run: Run, arguments: list[Any]) -> Any:
        results = run(arguments)
        mine = held.setdefault(id(t), results)
        pairs = zip(mine, results, strict=True) if isinstance(results, tuple) else [(mine, results)]
        for a, b in pairs:
            a.copy_(b)
        return mine

    return broken.running(change)


def first_gradient_for_all(t: autograd.Training, run: Run, arguments: list[Any]) -> Any:
    given = list(arguments)
    for k in cotangents(t, arguments):
        given[k] = given[k].flatten()[0].expand(given[k].shape)
    return run(given)


def ones_for_all(t: autograd.Training, run: Run, arguments: list[Any]) -> Any:
    given = list(arguments)
    for k in cotangents(t, arguments):
        given[k] = torch.ones_like(given[k])
    return run(given)


def asks_whether_it_is_one(t: autograd.Training, run: Run, arguments: list[Any]) -> Any:
    for k in cotangents(t, arguments):
        bool((arguments[k] == 1.0).all())
    return run(arguments)


def reads_expanded_memory_as_rows(t: autograd.Training, run: Run, arguments: list[Any]) -> Any:
    given = list(arguments)
    for k in cotangents(t, arguments):
        if 0 in given[k].stride():
            memory = torch.zeros(given[k].shape)
            memory.view(-1)[0] = given[k].flatten()[0]
            given[k] = memory
    return run(given)


def sums_chunks_in_bf16(t: autograd.Training, run: Run, arguments: list[Any]) -> Any:
    rows = arguments[cotangents(t, arguments)[0]].shape[0]
    total: Any = None
    for at in range(0, rows, 20):
        part = run([a[at : at + 20] if isinstance(a, torch.Tensor) and a.shape[0] == rows else a for a in arguments])
        total = part if total is None else tuple(a + b for a, b in zip(total, part, strict=True))
    return total


def every_float(kernel: Kernel, values: Any) -> tuple[int, ...]:
    return tuple(i for i in kernel.tensor_at if values[i] is not None and values[i].is_floating_point())


def without_parameters(*args: Any) -> dict[int, torch.Tensor]:
    return {i: g for i, g in RIGHT_GRADIENTS(*args).items() if g.dim() > 1}


def exchanged(*args: Any) -> dict[int, torch.Tensor]:
    found = RIGHT_GRADIENTS(*args)
    return {**found, 1: found[2], 2: found[1]} if {1, 2} <= found.keys() else found


def tabulate_in_place(self: Any, count: int, device: torch.device) -> None:
    if not hasattr(self, "cos"):
        RIGHT_TABLES(self, count, device)
        return
    old = self.cos, self.sin
    RIGHT_TABLES(self, count, device)
    for name, table in zip(("cos", "sin"), old, strict=True):
        new = getattr(self, name)
        self.register_buffer(name, table.resize_(new.shape).copy_(new), persistent=False)


def copies_its_inputs(self: Kernel, values: Sequence[Any], *rest: Any) -> Any:
    return RIGHT_CALL(self, [a.contiguous() if isinstance(a, torch.Tensor) else a for a in values], *rest)


def casts_under_autocast(self: Kernel, values: Sequence[Any], *rest: Any) -> Any:
    if not torch.is_autocast_enabled("cpu"):
        return RIGHT_CALL(self, values, *rest)
    narrow = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in values]
    return RIGHT_CALL(self, narrow, *rest)


def strides_of(other: str, *names: str) -> Told:
    """The tensors `names` have the strides of `other`."""
    return lambda n, m, every: replace(m, strides=every[other].strides) if n in names and other in every else m


def unit_stride(*names: str) -> Told:
    """The last stride of the tensors `names` is 1."""
    return lambda n, m, every: replace(m, strides=(*m.strides[:-1], 1)) if n in names else m


def aligned(*names: str) -> Told:
    """The addresses of the tensors `names` are multiples of 16 bytes."""
    return lambda n, m, every: replace(m, residue=0) if n in names else m
