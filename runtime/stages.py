"""Kernels that are several launches: workspaces, and what each launch is told.

A sum over programs (`kgen.codegen.sums`) makes partial sums in a workspace and adds them up in another launch.
Workspaces come from torch's allocator at each call: they belong to the current stream, and a CUDA graph that captures
the call holds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from kgen.codegen.torch_dtypes import TORCH
from kgen.runtime.backends.launch import Built, Launch, ScalarValue

if TYPE_CHECKING:
    from kgen.codegen.program import Program
    from kgen.runtime.layouts import Layout


class Workspace(NamedTuple):
    """A contiguous tensor to allocate for one call; `zeroed` if it must be zero before the first launch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool

    def allocate(self, device: torch.device) -> torch.Tensor:
        """The tensor, on the current stream."""
        make = torch.zeros if self.zeroed else torch.empty
        return make(self.shape, dtype=self.dtype, device=device)


def build_stages(program: Program, build: Callable[[Program], Built], device: torch.device) -> Built:
    """`program` and the programs behind it, each compiled by `build`."""
    if program.stage is None:
        return build(program)
    parts = [build(replace(p, then=())) for p in program.launches]
    first, *then = [_resident(p, part) for p, part in zip(program.launches, parts, strict=True)]
    return _Staged(replace(first, then=tuple(then)), parts, device)


def _resident(p: Program, part: Built) -> Program:
    """`p`, a sum shared out among no more programs than run at a time: each has as many rows as the others, so a single
    one that has to wait would double the time."""
    most = part.resident() if p.schedule.programs else None
    return p if not most or most >= p.schedule.programs else replace(p, schedule=replace(p.schedule, programs=most))


class _Staged(Built):
    def __init__(self, program: Program, parts: Sequence[Built], device: torch.device) -> None:
        self.program = program
        self.parts = parts
        self.device = device

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        assert self.program is not None
        layouts, workspaces = stage_layouts(self.program, layout)
        prepared = [part.prepare(where) for part, where in zip(self.parts, layouts, strict=True)]
        return StagedLaunch([launch for launch, _ in prepared], workspaces, self.device), prepared[0][1]


class StagedLaunch:
    """Allocates the workspaces of a call and makes its launches one after another: a `Launch`."""

    def __init__(self, launches: Sequence[Launch], workspaces: Sequence[Workspace], device: torch.device) -> None:
        self.launches = tuple(launches)
        self.workspaces = tuple(workspaces)
        self.device = device

    def __call__(
        self, tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue], addresses: Sequence[int]
    ) -> None:
        new = [w.allocate(self.device) for w in self.workspaces]
        everything = [*tensors, *new]
        places = [*addresses, *(t.data_ptr() for t in new)]
        for one in self.launches:
            one(everything, scalars, places)


def stage_layouts(program: Program, layout: Layout) -> tuple[list[Layout], list[Workspace]]:
    """The layout of each launch of `program`, for a call of `layout`, and the workspaces that follow the call's
    tensors."""
    from kgen.codegen.abi import split_count  # and with it what normalises kernels, which a stored launch does not need

    dims = dict(layout.dims)
    zeroed: set[str] = set()
    for p in program.launches:
        stage = p.stage
        if stage is None or stage.sums is None:  # of rows alone
            continue
        zeroed |= set(stage.sums.zeroed)
        if stage.sums.split is not None:
            known = {**dict(stage.variant.dims), **dims}
            dims[stage.sums.dim] = split_count(stage.kernel, p.schedule, stage.sums, known)
    assert program.stage is not None  # as above
    first = program.stage
    known: Mapping[str, int] = {**dict(first.variant.dims), **dims}
    workspaces: list[Workspace] = []
    strides = dict(layout.strides)
    for t in first.kernel.tensors[len(layout.kernel.tensors) :]:
        shape = tuple(n.evaluate(known) for n in t.shape)
        workspaces.append(Workspace(t.name, shape, TORCH[t.dtype], t.name in zeroed))
        strides[t.name] = tuple((prod(shape[i + 1 :]),) for i in range(len(shape)))
    stages = [p.stage for p in program.launches if p.stage is not None]
    layouts = [replace(layout, kernel=s.kernel, variant=s.variant, dims=dims, strides=strides) for s in stages]
    return layouts, workspaces
