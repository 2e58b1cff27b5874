"""Kernels that nobody planned for: every case of `unplanned_cases` on every executor, against an independent formula.

The float64 interpreter must equal the formula up to its own rounding; the other executors must lie within the bound
derived for the kernel and its inputs. No bound is tuned.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from unplanned_cases import CASES, Case

import kgen
from kgen.dsl.dtypes import DTYPES
from kgen.runtime.backends.base import round_scalar
from kgen.runtime.differential import Question, against, answer, ask
from kgen.runtime.kernel import Kernel

FILE = Path(__file__).parent / "kernels" / "unplanned.kdsl"
MODULE = kgen.load(FILE)

# g++ takes a second for each variant, so the host executor gets two sizes, the ragged one and a larger one.
SIZES = {"reference": slice(None), "triton": slice(None), "cuda": slice(-2, None)}


def _name(case: Case) -> str:
    same = [c for c in CASES if c.kernel == case.kernel]
    return case.kernel if len(same) == 1 else f"{case.kernel}-{same.index(case)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


EACH = [pytest.param(case, dtype, id=f"{_name(case)}-{_dtype(dtype)}") for case in CASES for dtype in case.dtypes]


def _question(case: Case, dtype: torch.dtype, size: tuple[int, int], layout: str = "contiguous") -> Question:
    kernel: Kernel = MODULE[case.kernel]
    return ask(kernel, case.make(*size, dtype, torch.Generator().manual_seed(size[1])), layout)


def _expected(case: Case, question: Question) -> dict[str, torch.Tensor]:
    """What the formula gives for the arguments of `question`, by name of the output."""
    taken = inspect.signature(case.formula).parameters
    arguments: dict[str, Any] = {}
    for p, value in zip(question.kernel.signature.params, question.values, strict=True):
        if isinstance(value, torch.Tensor):
            arguments[p.name] = value.double() if value.is_floating_point() else value
        elif p.name in taken:
            # As a call rounds it.
            arguments[p.name] = round_scalar(value, DTYPES[p.dtype]) if isinstance(value, float) else value
    written = [t.name for t in question.ir.tensors if t.role != "in"]
    return dict(zip(written, case.formula(**arguments), strict=True))


@pytest.mark.parametrize(("case", "dtype"), EACH)
def test_interpreter_equals_the_formula(case: Case, dtype: torch.dtype) -> None:
    for size in case.sizes:
        question = _question(case, dtype, size)
        for name, c in against(question, _expected(case, question)).items():
            assert c.ok, f"{size}: {name} {c}"


@pytest.mark.parametrize("backend", ["reference", "cuda", "triton"])
@pytest.mark.parametrize(("case", "dtype"), EACH)
def test_executors_stay_within_the_bound(case: Case, dtype: torch.dtype, backend: str) -> None:
    for size in case.sizes[SIZES[backend]]:
        got = answer(_question(case, dtype, size), backend, repeat=True)
        assert got.status == "ok", f"{size}: {got.message}"
        # A bound that lets everything pass tests nothing.
        assert got.free == 0, f"{size}: {got.free} of {got.total} elements are free"


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("case", [pytest.param(c, id=_name(c)) for c in CASES])
def test_any_layout(case: Case, backend: str) -> None:
    """Strided arguments and outputs, a layout for each case and backend in turn, in the last dtype of the case."""
    layouts = ("transposed", "sliced", "expanded", "offset", "padded")
    layout = layouts[(CASES.index(case) + 2 * (backend == "triton")) % len(layouts)]
    got = answer(_question(case, case.dtypes[-1], case.sizes[-1], layout), backend)
    assert got.status == "ok", f"{layout}: {got.message}"


def test_a_wrong_kernel_is_found() -> None:
    """The bounds are tight enough to tell a mean from one over one element less, in the dtype with the widest bound."""
    text = """
kernel right(x: T[*M, N]) -> (y: f32[*M]):
    parallel m in M
    tile n in N
    y[m] = sum(x[m, n], n) / N

kernel wrong(x: T[*M, N]) -> (y: f32[*M]):
    parallel m in M
    tile n in N
    y[m] = sum(where(n < N - 1, x[m, n], 0.0), n) / N
"""
    module = kgen.loads(text)
    x = torch.rand(3, 129, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    question = ask(module["right"], {"x": x})
    assert answer(question, "reference").status == "ok"
    other = ask(module["wrong"], {"x": x})
    mixed = Question(other.kernel, other.ir, other.values, "contiguous", question.expected, question.bound)
    for backend in ("reference", "cuda", "triton"):
        assert answer(mixed, backend).status == "wrong"
