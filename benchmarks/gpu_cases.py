"""What `gpu_check.py` runs: every packaged kernel and every case of `tests/unplanned_cases.py`, forwards and gradients.

A `Task` is one compiled variant, or few, and many calls of it; `tasks` says which there are, `calls` what each calls.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import shipped_cases  # noqa: E402  # pyright: ignore[reportMissingImports]  # through the path above
import unplanned_cases  # noqa: E402  # pyright: ignore[reportMissingImports]  # as above

import kgen  # noqa: E402
from kgen.dsl.check import TensorParam  # noqa: E402
from kgen.dsl.diagnostics import DslError  # noqa: E402
from kgen.runtime import autograd  # noqa: E402
from kgen.runtime.kernel import Kernel  # noqa: E402
from kgen.runtime.placement import LAYOUTS as PLACED  # noqa: E402

FORWARD, GRADIENT = "forward", "gradient"
DIRECTIONS: tuple[str, ...] = (FORWARD, GRADIENT)
# Of gradients, which compile twice as much, fewer: so that in minutes each width is reached with several dtypes and
# layouts.
WIDTHS: dict[str, tuple[int, ...]] = {
    FORWARD: (
        1, 2, 3, 7, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024, 1025, 4096, 8192, 32000, 65535,
        65536, 65537, 131072,
    ),
    GRADIENT: (1, 3, 8, 31, 32, 33, 127, 128, 129, 1025, 4096, 32000, 65537),
}  # fmt: skip
# Of gradients: around the number of multiprocessors (132 on an H100 and an H200), over which sums over rows are spread.
ROWS: dict[str, tuple[int, ...]] = {
    FORWARD: (0, 1, 2, 97, 133, 65537),
    GRADIENT: (0, 1, 131, 132, 133, 509, 16411, 65537),
}
# The row count that is also called with other values than normal ones, and again for the same bits.
VARIED = {FORWARD: 97, GRADIENT: 133}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LAYOUTS = tuple(name for name in PLACED if name != "padded")
# `scalar`: one element everywhere, as the gradient of a sum.
GRADIENT_LAYOUTS = (*LAYOUTS, "scalar")
VALUES = ("normal", "special", "large", "zeros")
MAX_ELEMENTS = 1 << 27
# In later waves, so that many layouts and dtypes are reached: the float64 reference is most of the time.
LATER_MAX_ELEMENTS = 1 << 25
# Arguments that are made on the CPU, one generator's stream a case.
CPU_MAX_ELEMENTS = 1 << 22

# Kernels whose float64 reference takes minutes or all of the memory at larger widths: its error bounds go along a
# reduced or repeated index step by step, and a gather is held whole.
_SLOW_REFERENCE = {"bilinear", "repeat_each", "two_gathers", "whole_mean"}
# Those whose gradient compares every element of a row with every index of it (docs/derivation.md), N * N a row.
_SLOW_GRADIENT = {"shuffle_columns"}

Make = Callable[[int, int, torch.dtype, torch.Generator], dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """A kernel of a file with a way to make its arguments: `make(rows, width, dtype, generator)`.

    `own_dtypes` where the kernel has no dtype variable. Arguments are made on the generator's device; of an unplanned
    case on the CPU, so that those stay smaller. `formula(**arguments)` gives the outputs in plain torch.
    """

    name: str
    file: str
    kernel: str
    make: Make
    own_dtypes: tuple[str, ...] = ()
    on_cpu: bool = False
    max_width: int = 1 << 20
    formula: Callable[..., Any] | None = None
    differentiable: bool = True

    def load(self) -> Kernel:
        """The kernel."""
        return _load(self.file)[self.kernel]


@cache
def _load(file: str) -> kgen.KernelModule:
    return kgen.load(ROOT / file)


def _vectors(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Any]:
    return {name: torch.randn(m * n, generator=g, device=g.device, dtype=dtype) for name in ("a", "b")}


def targets() -> list[Target]:
    """All targets, those that come with kgen first."""
    found = [
        Target(
            s.name, f"ops/{s.file}", s.kernel, s.make, max_width=1025 if s.heads else 1 << 20,
            formula=s.formula, differentiable=s.differentiable,
        )
        for s in shipped_cases.SHIPPED
    ]  # fmt: skip
    found.append(Target("vec_add", "examples/vec_add.kdsl", "vec_add", _vectors, formula=lambda a, b: a + b))
    seen: dict[str, int] = {}
    for case in unplanned_cases.CASES:
        seen[case.kernel] = seen.get(case.kernel, 0) + 1
        name = case.kernel if seen[case.kernel] == 1 else f"{case.kernel} #{seen[case.kernel]}"
        generic = case.dtypes == (torch.float32, torch.bfloat16)
        own = () if generic else tuple(str(t).removeprefix("torch.") for t in case.dtypes)
        widest = 128 if case.kernel in _SLOW_REFERENCE else 1 << 20
        found.append(
            Target(
                name, "tests/kernels/unplanned.kdsl", case.kernel, case.make, own, True, widest,
                formula=case.formula, differentiable=case.differentiable,
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class Task:
    """One compiled variant, or few, of a target: all rows with one dtype, width and layout.

    Of a gradient, `gradient_layout` is that of the gradients that come in, and `wanted` names the inputs whose gradient
    is asked for.
    """

    target: int
    direction: str
    dtype: str
    width: int
    layout: str
    wave: int
    gradient_layout: str = ""
    wanted: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the variables that stand for one."""
        return DTYPES.get(self.dtype) or getattr(torch, self.dtype)


@cache
def derivable(target: Target) -> dict[str, str]:
    """The float inputs of a target: the code of the error for those whose gradient is not derived, else nothing."""
    if not target.differentiable:
        return {}
    kernel = target.load()
    dtype = getattr(torch, target.own_dtypes[0]) if target.own_dtypes else torch.float32
    made = target.make(4, 8, dtype, torch.Generator().manual_seed(0))
    values = kernel.binder.bind((), made)
    found = {}
    for i, p in enumerate(kernel.signature.params):
        if isinstance(p, TensorParam) and values[i] is not None and values[i].is_floating_point():
            try:
                autograd.training(kernel, values, (i,))
                found[p.name] = ""
            except DslError as error:
                found[p.name] = error.diagnostics[0].code
    return found


def tasks(found: list[Target], names: set[str], widths: dict[str, tuple[int, ...]], seed: int) -> list[Task]:
    """Every combination of a target in `names`, direction in `widths`, dtype, width and layouts, in waves.

    A wave has each width of a (target, direction) once, with a dtype, layouts and, of a gradient, inputs by lot: the
    first already touches every target with every width, and nearly surely with every dtype and layout.
    """
    lot = random.Random(seed)
    out: list[Task] = []
    for (i, target), direction in itertools.product(enumerate(found), widths):
        if target.name not in names:
            continue
        inputs = [name for name, code in derivable(target).items() if not code] if direction == GRADIENT else []
        if direction == GRADIENT and not inputs:
            continue
        slow = direction == GRADIENT and target.kernel in _SLOW_GRADIENT
        widest = min(target.max_width, 1025) if slow else target.max_width
        for width in (w for w in widths[direction] if w <= widest):
            incoming = GRADIENT_LAYOUTS if direction == GRADIENT else ("",)
            ways = list(itertools.product(target.own_dtypes or DTYPES, LAYOUTS, incoming))
            lot.shuffle(ways)
            for wave, (dtype, layout, other) in enumerate(ways):
                # All inputs in every second wave, some of them in the others.
                some = lot.sample(inputs, lot.randint(1, len(inputs))) if wave % 2 and inputs else inputs
                wanted = tuple(name for name in inputs if name in some)
                out.append(Task(i, direction, dtype, width, layout, wave, other, wanted))
    order = {id(t): lot.random() for t in out}
    return sorted(out, key=lambda t: (t.wave, order[id(t)]))


def calls(target: Target, task: Task, limit: int, rows: tuple[int, ...]) -> Iterator[tuple[int, str, bool]]:
    """(rows, values, fits) of the calls of a task; where it does not fit, it would pass `limit` elements."""
    if task.wave or task.direction == GRADIENT:
        limit = min(limit, LATER_MAX_ELEMENTS)
    if target.on_cpu:
        limit = min(limit, CPU_MAX_ELEMENTS)
    varied = VARIED[task.direction]
    for m in rows:
        fits = _elements(target, m, task.width, task.torch_dtype) <= limit
        for values in VALUES if m == varied else ("normal",):
            yield m, values, fits


def _elements(target: Target, m: int, n: int, dtype: torch.dtype) -> float:
    """About how many elements the largest tensor has, from how it grows."""
    size = {(a, b): _largest(target, a, b, dtype) for a, b in ((4, 8), (8, 8), (4, 16))}
    by_row = size[8, 8] / size[4, 8]
    by_column = size[4, 16] / size[4, 8]
    return size[4, 8] * (max(m, 1) / 4 if by_row > 1.4 else 1) * (n / 8) ** round(max(0.0, by_column - 1) ** 0.5)


@cache
def _largest(target: Target, m: int, n: int, dtype: torch.dtype) -> int:
    made = target.make(m, n, dtype, torch.Generator().manual_seed(0))
    return max(t.numel() for t in made.values() if isinstance(t, torch.Tensor))


def arguments(target: Target, task: Task, m: int, values: str, device: torch.device, seed: int) -> dict[str, Any]:
    """The arguments of one call."""
    g = torch.Generator("cpu" if target.on_cpu else device).manual_seed(seed)
    made = target.make(m, task.width, task.torch_dtype, g)
    made = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    return {
        k: revalue(v, values, i + seed) if isinstance(v, torch.Tensor) else v for i, (k, v) in enumerate(made.items())
    }


def revalue(t: torch.Tensor, values: str, seed: int) -> torch.Tensor:
    """Float tensors with the kind of values that was asked for; others stay."""
    if values == "normal" or not t.dtype.is_floating_point or t.numel() == 0:
        return t
    if values == "zeros":
        return torch.zeros_like(t)
    info = torch.finfo(t.dtype)
    if values == "large":
        return t * (info.max**0.45)
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, info.tiny / 4, -info.max, info.max]
    g = torch.Generator(t.device).manual_seed(seed)
    flat = t.reshape(-1).clone()
    # About one element in eight rows is special, so that most rows stay finite.
    rows = t.shape[0] if t.dim() else 1
    count = max(len(special), rows // 8)
    at = torch.randint(0, flat.numel(), (count,), generator=g, device=t.device)
    flat[at] = torch.tensor(special, device=t.device).to(t.dtype).repeat(-(-count // len(special)))[:count]
    return flat.reshape(t.shape)
