"""The emitted program: source text and everything that a runtime must know to launch it."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.codegen.schedule import Schedule, Sums
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.dtypes import DType
from kgen.dsl.source import Span


@dataclass(frozen=True)
class Arg:
    """One argument of the emitted function, in order.

    kind `tensor`: the data pointer of tensor `name`.
    kind `dim`: the value of run-time dimension `name`, or, for a starred dimension of star rank > 1, the size of
        its part `part` (row-major order; part 0 is the outermost).
    kind `stride`: the stride in elements of dimension `axis` of tensor `name`; for a starred dimension of star
        rank > 1 that of its part `part`.
    kind `scalar`: the scalar parameter `name`.
    `dtype`: of the pointee for tensors; of the value otherwise (i32 or i64 for dims and strides).
    """

    kind: str
    name: str
    dtype: DType
    axis: int = 0
    part: int = 0


@dataclass(frozen=True)
class Stage:
    """What the launches of a kernel with sums over programs know beside their source: the stage's own kernel, whose
    last tensors are the workspaces, its variant, and how the sums are spread (None for one that makes none)."""

    kernel: ir.Kernel
    variant: Variant
    sums: Sums | None


@dataclass(frozen=True)
class Program:
    """One backend's program for one scheduled kernel.

    `args` is the same list, in the same order, on every backend for one kernel and variant (`kernel_args`).
    The grid is one-dimensional: `ceil(product of the parallel extents / schedule.rows)` programs, see `grid_size`.
    A kernel that sums over programs is several launches that share workspaces, see `kgen.runtime.stages`.
    `lines[i]` is the `.kdsl` span that generated line `i + 1` comes from, or None.
    """

    backend: str  # "cuda" | "triton"
    entry: str
    source: str
    args: tuple[Arg, ...]
    schedule: Schedule
    shared_bytes: int
    lines: tuple[Span | None, ...]
    stage: Stage | None = None  # of a kernel with sums over programs, which is several launches; else None
    then: tuple[Program, ...] = ()  # launched behind this one, on the same stream

    @property
    def launches(self) -> tuple[Program, ...]:
        """This program and those behind it."""
        return (self, *self.then)
