"""Gradients of every shipped kernel at the boundaries of tiles, and of layouts and dtypes, on the CPU's executors.

Each call is judged as on a GPU (`benchmarks/gpu_calls.py`): the training form and the derived backward under their
derived bounds, outputs full of NaN beforehand, what surrounds them unchanged, autograd to the bit, and in f32 torch's
derivative of a formula.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shipped_cases import SHIPPED

import kgen

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_calls  # pyright: ignore[reportMissingImports]  # through the path above
import gpu_cases as cases  # pyright: ignore[reportMissingImports]

TARGETS = cases.targets()
PLACE = {t.name: i for i, t in enumerate(TARGETS)}
NAMES = [*(case.name for case in SHIPPED if case.differentiable), "vec_add"]
# Of one element; less than a vector; around a warp; more than several warps; around the threads of a block.
WIDTHS = (1, 3, 31, 32, 33, 127, 129, 1025)
# In turns: a few; none, one and a prime.
ROWS = ((5,), (0, 1, 13))


def turns(name: str, widths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A task for each width: dtypes, layouts and inputs take turns, and begin elsewhere for each kernel."""
    k = NAMES.index(name)
    inputs = [n for n, code in cases.derivable(TARGETS[PLACE[name]]).items() if not code]
    for j, width in enumerate(widths):
        i = k + j
        some = tuple(inputs[:1]) if i % 4 == 1 else tuple(inputs[-1:]) if i % 4 == 3 else tuple(inputs)
        yield {
            "dtype": tuple(cases.DTYPES)[i % 3],
            "width": width,
            "layout": cases.LAYOUTS[i % 5],
            "gradient_layout": cases.GRADIENT_LAYOUTS[i % 6],
            "wanted": some,
        }


def run(name: str, task: dict[str, Any], rows: tuple[int, ...], backend: str) -> None:
    """Every call of a task must pass."""
    target = TARGETS[PLACE[name]]
    one = cases.Task(PLACE[name], cases.GRADIENT, wave=0, **task)
    options = gpu_calls.Options(1 << 20, dict.fromkeys(cases.DIRECTIONS, rows), task["width"], (backend,))
    found = list(gpu_calls.perform(target, one, torch.device("cpu"), options, contextlib.nullcontext()))
    assert len(found) == len(rows)
    assert [(r["rows"], r["message"]) for r in found if r["status"] != "ok"] == [], task


@pytest.mark.parametrize("name", NAMES)
def test_every_width(name: str) -> None:
    if not {s.name: s for s in kgen.backends("cpu")}["triton"].available:
        pytest.skip("Triton cannot run here")
    # A head of 1025 features is more than there is, and slow to interpret.
    widths = tuple(w for w in WIDTHS if w < 1000 or not name.startswith("rope"))
    for j, task in enumerate(turns(name, widths)):
        run(name, task, ROWS[(j + NAMES.index(name)) % 2], "triton")


@pytest.mark.parametrize("name", NAMES)
def test_two_widths_in_cuda_c(name: str) -> None:
    if not {s.name: s for s in kgen.backends("cpu")}["cuda"].available:
        pytest.skip("the host executor cannot run here")
    k = NAMES.index(name)  # g++ takes a second for each
    for task in turns(name, (WIDTHS[k % 8], WIDTHS[(k + 3) % 8])):
        run(name, task, (0, 1, 13), "cuda")


def test_the_turns_reach_everything() -> None:
    seen = [(name, task) for name in NAMES for task in turns(name, WIDTHS)]
    for field, every in (
        ("dtype", set(cases.DTYPES)),
        ("layout", set(cases.LAYOUTS)),
        ("gradient_layout", set(cases.GRADIENT_LAYOUTS)),
        ("width", set(WIDTHS)),
    ):
        for name in NAMES:
            assert len({task[field] for n, task in seen if n == name}) >= min(len(every), 4)
        assert {task[field] for _, task in seen} == every
    pairs = {(task["layout"], task["gradient_layout"]) for _, task in seen}
    assert len(pairs) == len(cases.LAYOUTS) * len(cases.GRADIENT_LAYOUTS)
