"""The values of gradients on every executor: shipped ops, unplanned kernels, layouts. `autograd_kit` says how they are
judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autograd_kit import UNPLANNED, check, leaf, packaged, randn, rms_formula, wanted, worst
from shipped_cases import SHIPPED, Shipped
from unplanned_cases import CASES, Case

import kgen
from kgen import ops
from kgen.runtime import autograd
from kgen.runtime.kernel import Kernel

# ---- shipped ops -----------------------------------------------------------------------------------------------------

DERIVED = {case.name: case for case in SHIPPED if case.differentiable}


def _made(case: Shipped, rows: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    return case.make(rows, width, dtype, torch.Generator().manual_seed(width))


@pytest.mark.parametrize("name", DERIVED)
def test_shipped_kernels_in_f32(name: str, backend: str) -> None:
    case = DERIVED[name]
    # g++ takes a second for each variant. Rows of one and two elements are left out: their gradients cancel.
    for n in (33,) if backend == "cuda" else (7, 33, 64):
        check(packaged(case.file, case.kernel), _made(case, 13, n, torch.float32), case.formula, backend, case.constant)


@pytest.mark.parametrize("name", DERIVED)
def test_shipped_kernels_in_bf16(name: str) -> None:
    case = DERIVED[name]
    formula = None if case.rounds else case.formula
    check(packaged(case.file, case.kernel), _made(case, 13, 33, torch.bfloat16), formula, "triton", case.constant)


# A loss is f32 whatever the logits are, too coarse for a difference quotient.
@pytest.mark.parametrize("name", [n for n, case in DERIVED.items() if case.file != "cross_entropy.kdsl"])
def test_shipped_kernels_pass_gradcheck(name: str) -> None:
    case = DERIVED[name]
    made = _made(case, 3, 3, torch.float64)
    arguments = {n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in made.items()}
    tensors = {n: arguments[n].requires_grad_() for n in wanted(arguments, case.constant)}
    rest = {n: v for n, v in arguments.items() if n not in tensors}
    kernel = packaged(case.file, case.kernel)

    def run(*given: torch.Tensor) -> Any:
        known: dict[str, Any] = dict(zip(tensors, given, strict=True)) | rest
        return kernel(**known, backend="reference")

    assert torch.autograd.gradcheck(run, tuple(tensors.values()))


def test_softmax_along_another_dimension() -> None:
    x, g = leaf(3, 5, 4), randn(3, 5, 4, seed=9)
    y = ops.softmax(x, 1)
    assert y.stride() == x.stride()
    (got,) = torch.autograd.grad(y, x, g)
    xd = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(xd.softmax(1), xd, g.double())
    assert worst(got, expected, 5) <= 1.0


# ---- unplanned kernels -----------------------------------------------------------------------------------------------

# Several programs may read one row of a table: not derived (K0503).
DIFFERENTIABLE = [c for c in CASES if c.differentiable and c.kernel != "two_gathers"]
HANDFUL = ("group_norm", "standardize", "kl_rows", "pick", "bilinear", "row_and_column_sums", "template")


def _fits(case: Case) -> bool:
    return torch.float32 in case.dtypes


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{i}-{c.kernel}") for i, c in enumerate(DIFFERENTIABLE) if _fits(c)]
)
def test_unplanned_kernels(case: Case) -> None:
    size = case.sizes[min(2, len(case.sizes) - 1)]
    arguments = case.make(*size, torch.float32, torch.Generator().manual_seed(1))
    check(UNPLANNED[case.kernel], arguments, case.formula, "reference")


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.kernel) for c in DIFFERENTIABLE if c.kernel in HANDFUL])
def test_a_handful_on_the_other_executors(case: Case, backend: str) -> None:
    arguments = case.make(*case.sizes[-1], torch.float32, torch.Generator().manual_seed(1))
    check(UNPLANNED[case.kernel], arguments, case.formula, backend)


# ---- layouts ---------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.cat([t, t], -1)[:, : t.shape[1]],
    "odd offset": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("of_x", ["contiguous", "transposed", "expanded rows"])
@pytest.mark.parametrize("of_g", LAYOUTS)
def test_layouts_of_inputs_and_gradients(of_x: str, of_g: str, backend: str) -> None:
    x, w, g = LAYOUTS[of_x](randn(4, 33)), randn(33, seed=1), LAYOUTS[of_g](randn(4, 33, seed=2))
    xs, ws = x.requires_grad_(), w.requires_grad_()
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    before = g.clone()
    got = torch.autograd.grad(ops.rms_norm(xs, ws, backend=backend), (xs, ws), g)
    expected = torch.autograd.grad(rms_formula(xd, wd), (xd, wd), g.double())
    for a, b in zip(got, expected, strict=True):
        assert worst(a, b, 33) <= 1.0
    assert torch.equal(g, before)


def test_the_gradient_of_a_mean_is_expanded(backend: str) -> None:
    x, u = leaf(3, 20), leaf(3, 20, seed=1)
    ops.swiglu(x, u, backend=backend).mean().backward()
    xd, ud = x.detach().double().requires_grad_(), u.detach().double().requires_grad_()
    (F.silu(xd) * ud).mean().backward()
    for a, b in ((x, xd), (u, ud)):
        assert a.grad is not None and b.grad is not None
        assert worst(a.grad, b.grad, 20) <= 1.0


# ---- the tests can fail ----------------------------------------------------------------------------------------------


def test_a_dropped_term_is_far_outside_the_bound() -> None:
    kernel = load_fresh("rms_norm")
    x, w, g = leaf(4, 33), leaf(33, seed=1), randn(4, 33, seed=2)
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    expected = torch.autograd.grad(rms_formula(xd, wd), (xd, wd), g.double())
    right = torch.autograd.grad(kernel(x, w), (x, w), g)
    assert all(worst(a, e, 33) <= 0.5 for a, e in zip(right, expected, strict=True))
    t = autograd.training(kernel, [x, w, 1e-6, 0.0, False], (0, 1))
    text = t.derived.backward_text
    broken = text.replace("saved_r[m] * t - t_2", "saved_r[m] * t").replace("(x[m, n] * saved_r[m])", "x[m, n]")
    assert broken != text
    wrong = kgen.loads(broken)["rms_norm_backward"]
    object.__setattr__(t, "backward", wrong)
    for a, e in zip(torch.autograd.grad(kernel(x, w), (x, w), g), expected, strict=True):
        assert worst(a, e, 33) > 5.0


def load_fresh(name: str) -> Kernel:
    """A shipped kernel that shares nothing with the one that other tests use."""
    folder = Path(inspect.getfile(ops)).parent
    return kgen.load(folder / f"{name}.kdsl")[name]
