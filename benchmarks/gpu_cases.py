"""What `gpu_check.py` runs: every packaged kernel and every case of `tests/unplanned_cases.py`, and in which order."""

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

import unplanned_cases  # noqa: E402  # pyright: ignore[reportMissingImports]  # through the path above

import kgen  # noqa: E402
from kgen.runtime.kernel import Kernel  # noqa: E402

WIDTHS = (
    1, 2, 3, 7, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 1000, 1023, 1024, 1025, 4096, 8192, 32000, 65535, 65536,
    65537, 131072,
)  # fmt: skip
ROWS = (0, 1, 2, 97, 65537)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "offset")
VALUES = ("normal", "special", "large", "zeros")
MAX_ELEMENTS = 1 << 27
# In later waves, so that many layouts and dtypes are reached: the float64 reference is most of the time.
LATER_MAX_ELEMENTS = 1 << 25
UNPLANNED_WAVE = 5

# Kernels whose float64 reference takes minutes or all of the memory at larger widths: its error bounds go along a
# reduced or repeated index step by step, and a gather is held whole.
_SLOW_REFERENCE = {"bilinear", "repeat_each", "two_gathers", "whole_mean"}

Make = Callable[[int, int, torch.dtype, torch.Generator], dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """A kernel of a file with a way to make its arguments: `make(rows, width, dtype, generator)`.

    `own_dtypes` where the kernel has no dtype variable. Arguments are made on the generator's device; of an unplanned
    case on the CPU, so that those stay smaller.
    """

    name: str
    file: str
    kernel: str
    make: Make
    own_dtypes: tuple[str, ...] = ()
    on_cpu: bool = False
    widths: tuple[int, ...] = WIDTHS

    def load(self) -> Kernel:
        """The kernel."""
        return _load(self.file)[self.kernel]


@cache
def _load(file: str) -> kgen.KernelModule:
    return kgen.load(ROOT / file)


def _randn(g: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    # A first draw of f32 may be as large as the result in f64: the 16-bit types are drawn as they are.
    return torch.randn(shape, generator=g, device=g.device, dtype=dtype)


def _tensors(rows: tuple[str, ...], columns: tuple[str, ...] = (), **scalars: Any) -> Make:
    """Arguments `[rows, width]` and `[width]` of the dtype, and fixed scalars."""

    def make(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Any]:
        made: dict[str, Any] = {name: _randn(g, m, n, dtype=dtype) for name in rows}
        return made | {name: _randn(g, n, dtype=dtype) for name in columns} | scalars

    return make


def _rope(partial: bool, positions: bool, **scalars: Any) -> Make:
    def make(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Any]:
        d = max(n, 2)
        r = (d // 2 if partial else d) // 2 * 2
        table = max(m, 1) + 3
        angle = torch.rand(table, r, generator=g, device=g.device) * 6.28
        made: dict[str, Any] = {
            "q": _randn(g, 2, m, 3, d, dtype=dtype),
            "k": _randn(g, 2, m, 1, d, dtype=dtype),
            "cos": angle.cos().to(dtype),
            "sin": angle.sin().to(dtype),
        }
        if positions:
            made["positions"] = torch.randint(0, table, (2, m), generator=g, device=g.device)
        return made | scalars

    return make


def targets() -> list[Target]:
    """All targets, those that come with kgen first."""
    rms, ln, glu, soft, rope = (f"ops/{n}.kdsl" for n in ("rms_norm", "layer_norm", "swiglu", "softmax", "rope"))
    heads = tuple(w for w in WIDTHS if w <= 1025)
    found = [
        Target("rms_norm", rms, "rms_norm", _tensors(("x",), ("w",))),
        Target("rms_norm, no weight", rms, "rms_norm", _tensors(("x",))),
        Target("rms_norm, rounded first", rms, "rms_norm", _tensors(("x",), ("w",), round_first=True)),
        Target("layer_norm", ln, "layer_norm", _tensors(("x",), ("w", "b"))),
        Target("layer_norm, no weight", ln, "layer_norm", _tensors(("x",))),
        Target("softmax", soft, "softmax", _tensors(("x",))),
        Target("log_softmax", soft, "log_softmax", _tensors(("x",))),
        Target("swiglu", glu, "swiglu", _tensors(("gate", "up"))),
        Target("geglu", glu, "geglu", _tensors(("gate", "up"))),
        Target("geglu_tanh", glu, "geglu_tanh", _tensors(("gate", "up"))),
        Target("rope", rope, "rope", _rope(False, False), widths=heads),
        Target("rope, interleaved", rope, "rope", _rope(False, True, interleaved=True), widths=heads),
        Target("rope, partial", rope, "rope", _rope(True, False), widths=heads),
    ]
    seen: dict[str, int] = {}
    for case in unplanned_cases.CASES:
        seen[case.kernel] = seen.get(case.kernel, 0) + 1
        name = case.kernel if seen[case.kernel] == 1 else f"{case.kernel} #{seen[case.kernel]}"
        generic = case.dtypes == (torch.float32, torch.bfloat16)
        own = () if generic else tuple(str(t).removeprefix("torch.") for t in case.dtypes)
        widths = tuple(w for w in WIDTHS if w <= 128) if case.kernel in _SLOW_REFERENCE else WIDTHS
        found.append(Target(name, "tests/kernels/unplanned.kdsl", case.kernel, case.make, own, True, widths))
    return found


@dataclass(frozen=True)
class Task:
    """One compiled variant, or few, of a target: all `rows` with one dtype, width and layout."""

    target: int
    dtype: str
    width: int
    layout: str
    wave: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES.get(self.dtype) or getattr(torch, self.dtype)


def tasks(found: list[Target], widths: tuple[int, ...], seed: int) -> list[Task]:
    """Every combination of target, dtype, width and layout, in waves.

    A wave has each (target, width) once, with a dtype and layout by lot: the first already touches every target with
    every width, and nearly surely with every dtype and layout. In a wave, packaged kernels come first.
    """
    lot = random.Random(seed)
    out: list[Task] = []
    for i, target in enumerate(found):
        for width in (w for w in target.widths if w in widths):
            ways = list(itertools.product(target.own_dtypes or DTYPES, LAYOUTS))
            lot.shuffle(ways)
            out += [Task(i, dtype, width, layout, wave) for wave, (dtype, layout) in enumerate(ways)]
    packaged = {i for i, t in enumerate(found) if not t.on_cpu}
    order = {id(t): lot.random() for t in out}
    # Each wave has every width of every kernel once. The packaged kernels go five waves ahead.
    return sorted(out, key=lambda t: (t.wave + (0 if t.target in packaged else UNPLANNED_WAVE), order[id(t)]))


def calls(target: Target, task: Task, limit: int, rows: tuple[int, ...]) -> Iterator[tuple[int, str, bool]]:
    """(rows, values, fits) of the calls of a task; where it does not fit, it would pass `limit` elements."""
    if task.wave:
        limit = min(limit, LATER_MAX_ELEMENTS)
    for m in rows:
        elements = _elements(target, m, task.width, task.torch_dtype)
        fits = elements <= (min(limit, 1 << 22) if target.on_cpu else limit)
        for values in VALUES if m == 97 else ("normal",):
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
        k: _revalue(v, values, i + seed) if isinstance(v, torch.Tensor) else v for i, (k, v) in enumerate(made.items())
    }


def _revalue(t: torch.Tensor, values: str, seed: int) -> torch.Tensor:
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
    count = max(len(special), t.shape[0] // 8)
    at = torch.randint(0, flat.numel(), (count,), generator=g, device=t.device)
    flat[at] = torch.tensor(special, device=t.device).to(t.dtype).repeat(-(-count // len(special)))[:count]
    return flat.reshape(t.shape)
