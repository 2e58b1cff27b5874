"""The cross entropy of a linear layer in chunks: values and gradients within derived bounds, torch's conventions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_call_kit import CLASSES, OPTIONS, ROWS, UPSTREAM, WIDTH, call, check, op, outcome, workspace
from linear_loss_kit import Case, case, excess, judge, randn

from kgen import ops
from kgen.runtime.errors import ArgumentError


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients(backend: str, dtype: torch.dtype, reduction: str) -> None:
    for chunks, bias in ((1, 0.0), (3, 5.0), (16, 1.0)):
        c = case(ROWS, WIDTH, CLASSES, dtype, bias=bias, reduction=reduction)
        check(c, UPSTREAM[reduction], backend=backend, workspace_mb=workspace(c, chunks))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("chunks", [1, 3, 16, 33])
def test_any_number_of_chunks_gives_the_same(chunks: int) -> None:
    for dtype, accumulate in itertools.product((torch.float32, torch.bfloat16), ("auto", "f32")):
        c = case(ROWS, WIDTH, CLASSES, dtype, bias=1.0)
        check(c, torch.tensor(1.0), backend="cuda", workspace_mb=workspace(c, chunks), accumulate=accumulate)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda o: "+".join(o))
def test_every_combination_of_options(options: dict[str, Any]) -> None:
    for dtype, reduction in ((torch.float32, "mean"), (torch.float16, "mean"), (torch.float32, "none")):
        c = case(ROWS, WIDTH, CLASSES, dtype, bias=1.0, reduction=reduction, **options)
        check(c, UPSTREAM[reduction], backend="cuda", workspace_mb=workspace(c, 3))


def test_all_options_on_every_backend(backend: str) -> None:
    for reduction in ("mean", "none"):
        c = case(ROWS, WIDTH, CLASSES, torch.bfloat16, bias=1.0, reduction=reduction, **OPTIONS[-1])
        check(c, UPSTREAM[reduction], backend=backend, workspace_mb=workspace(c, 4))


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("classes", [1, 2, 129, 1001])
def test_ragged_sizes(rows: int, classes: int, backend: str) -> None:
    for reduction in ("mean", "none"):
        c = case(rows, 7, classes, torch.float32, reduction=reduction)
        check(c, randn(rows, seed=8) if reduction == "none" else torch.tensor(2.0), backend=backend)


def test_leading_dimensions() -> None:
    c = case(ROWS - 3, WIDTH, CLASSES, bias=1.0, token_weight=randn(ROWS - 3, seed=5).abs())
    flat = outcome(c, torch.tensor(1.0), backend="cuda")
    shaped = Case(c.x.view(2, 3, 5, WIDTH), c.w, c.target.view(2, 3, 5), c.bias, {
        "token_weight": c.options["token_weight"].view(2, 3, 5)})  # fmt: skip
    found = outcome(shaped, torch.tensor(1.0), backend="cuda")
    assert found[1].shape == (2, 3, 5, WIDTH)
    assert all(torch.equal(a.view(b.shape), b) for a, b in zip(found, flat, strict=True))
    assert call(shaped, reduction="none", backend="cuda").shape == (2, 3, 5)


# ---- what there is nothing of ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_tokens(backend: str, dtype: torch.dtype) -> None:
    c = Case(torch.zeros(0, 5, dtype=dtype), randn(7, 5).to(dtype), torch.zeros(0, dtype=torch.int64), None, {})
    for reduction in ("mean", "sum", "none"):
        loss, dx, dw = outcome(c, torch.tensor(1.0), reduction=reduction, backend=backend)
        expected = F.cross_entropy(c.x.float() @ c.w.float().T, c.target, reduction=reduction)
        assert torch.equal(loss.isnan(), expected.isnan()) and loss.nansum() == 0
        assert dx.shape == (0, 5) and torch.equal(dw, torch.zeros(7, 5, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_labels_ignored(backend: str, dtype: torch.dtype) -> None:
    c = case(9, WIDTH, CLASSES, dtype, bias=1.0)
    c.target[:] = -100
    for options in ({}, OPTIONS[-1] | {"token_weight": randn(9)}):
        for reduction in ("mean", "sum", "none"):
            loss, *gradients = outcome(c, torch.tensor(1.0), reduction=reduction, backend=backend, **options)
            assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
            assert all((g == 0).all() for g in gradients)


def test_no_width() -> None:
    c = Case(torch.zeros(4, 0), torch.zeros(6, 0), torch.tensor([0, 5, -100, 2]), None, {})
    check(c, torch.tensor(1.0), backend="cuda")


def test_no_classes_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least one class"):
        ops.linear_cross_entropy(randn(3, 4), randn(0, 4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="requires V >= 1"):
        op("fused_linear_cross_entropy")(randn(3, 4), randn(0, 4), torch.zeros(3, dtype=torch.int64))


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [CLASSES, CLASSES + 5, -1, 2**31 + 3, -(2**40)])
def test_a_label_out_of_range_is_never_a_plausible_number(backend: str, label: int) -> None:
    for weighted in (False, True):
        c = case(5, WIDTH, CLASSES, class_weight=randn(CLASSES, seed=9).abs() if weighted else None)
        c.target[2] = label
        loss, dx, _ = outcome(c, torch.tensor(1.0), reduction="none", backend=backend)
        assert loss.isnan().tolist() == [i == 2 for i in range(5)]
        assert dx.isnan().all(-1).tolist() == [i == 2 for i in range(5)]
        loss, dx, dw = outcome(c, torch.tensor(1.0), backend=backend)
        assert loss.isnan() and dw.isnan().any()
        assert dx.isnan().all(-1).tolist() == [i == 2 for i in range(5)]


def test_integer_labels_of_any_width_and_an_ignored_class() -> None:
    c = case(9, WIDTH, CLASSES, ignore_index=3)
    c.target[c.target < 0] = 3
    expected = call(c, backend="cuda")
    for dtype in (torch.int32, torch.int16, torch.int8):
        spread = torch.stack([c.target.to(dtype), c.target.to(dtype) + 1], -1)[:, 0]
        assert torch.equal(call(Case(c.x, c.w, spread, None, c.options), backend="cuda"), expected)
    check(c, torch.tensor(1.0), backend="cuda")


# ---- the sum over chunks ---------------------------------------------------------------------------------------------


def test_the_error_of_the_weight_gradient_does_not_grow_with_the_chunks() -> None:
    c = case(1024, 16, 40, torch.bfloat16)
    exact = judge(c, torch.tensor(1.0)).expected[2]

    def error(chunks: int, accumulate: str) -> float:
        x, w = c.x, c.w.clone().requires_grad_()
        rows = -(-1024 // chunks)
        loss = op("fused_linear_cross_entropy")(x, w, c.target, backend="cuda", chunk=rows, accumulate=accumulate)
        (g,) = torch.autograd.grad(loss, w)
        return ((g.double() - exact).norm() / exact.norm()).item()

    one = error(1, "auto")
    for accumulate in ("auto", "f32"):
        for chunks in (16, 256, 1024):
            assert error(chunks, accumulate) <= 1.1 * one, (chunks, accumulate)
        assert error(8, accumulate) <= 2.5 * one  # eight roundings average out to twice one
    # What the test would find: a sum that is rounded at each chunk.
    assert error(1024, "param") > 4.0 * one


@pytest.mark.parametrize("backend", ["reference", "cuda", "triton"])
def test_f16_labels_that_weigh_nothing(backend: str) -> None:
    x, w = (randn(*s).half().requires_grad_() for s in ((5, 8), (11, 8)))
    target = torch.tensor([1, 3, 3, 7, 1])
    nothing = ops.linear_cross_entropy(x, w, target, token_weight=torch.zeros(5), reduction="sum", backend=backend)
    assert float(nothing.detach()) == 0.0
    assert all(not g.any() for g in torch.autograd.grad(nothing, (x, w)))
    # Smoothing lets the other classes weigh though.
    weight = torch.ones(11)
    weight[target] = 0.0
    options: dict[str, Any] = {"reduction": "sum", "label_smoothing": 0.1}
    loss = ops.linear_cross_entropy(x, w, target, class_weight=weight, backend=backend, **options)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    formula = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, target, weight=weight.double(), **options)
    found, expected = torch.autograd.grad(loss, (x, w)), torch.autograd.grad(formula, exact)
    for a, b in zip(found, expected, strict=True):
        # The logits and their gradients are rounded to f16 on the way, 11 of which add up.
        assert (a - b).abs().max() <= 11 * 2 * 2**-11 * b.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_mean_over_labels_that_weigh_nothing_is_none(dtype: torch.dtype, backend: str) -> None:
    c = case(ROWS, WIDTH, CLASSES, dtype, class_weight=torch.zeros(CLASSES), z_loss=0.1)
    loss, *gradients = outcome(c, torch.tensor(1.0), backend=backend)
    assert loss.isnan() and all(g.isnan().any() for g in gradients)


def test_f16_gradients_do_not_underflow_before_they_are_scaled() -> None:
    # Gradients of logits are some 1e-6 / 37 here, and f16 ends at 6e-8; the loss is scaled as a trainer scales it.
    c = case(3000, 8, CLASSES, torch.float16, bias=1.0)
    up = torch.tensor(65536.0)
    check(c, up, backend="cuda", workspace_mb=0.05)
    for options in ({"token_weight": 1e-4 * randn(3000, seed=1)}, {"class_weight": 1e3 * randn(CLASSES, seed=2).abs()}):
        check(Case(c.x, c.w, c.target, c.bias, options), up, backend="cuda", workspace_mb=0.05)
    # The mean of single losses without such a scale.
    c.options["reduction"] = "none"
    check(c, torch.full((3000,), 1e-6), backend="cuda", workspace_mb=0.05)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("heavy", "options"),
    [
        (1e4, {"label_smoothing": 0.9}),
        (0.0, {"z_loss": 10.0}),
        (0.0, {"z_loss": -10.0, "softcap": 30.0}),
        (1e4, {"label_smoothing": 0.9, "z_loss": 10.0, "softcap": 30.0}),
        (-1e4, {"label_smoothing": 0.9, "z_loss": 10.0}),
    ],
)
def test_f16_gradients_do_not_overflow(heavy: float, options: dict[str, Any], reduction: str, backend: str) -> None:
    # What a row's label weighs bounds its gradient neither under smoothing, which other classes weigh in, nor under
    # z-loss, which grows with the logits: up to 4e4 here.
    for size in (1.0, 4e4):
        c = case(ROWS, WIDTH, CLASSES, torch.float16, bias=1.0, reduction=reduction, **options)
        assert c.bias is not None
        c.bias[5] = size
        if heavy:
            c.options["class_weight"] = torch.ones(CLASSES)
            c.options["class_weight"][5] = heavy
            c.target[c.target == 5] = 6
        x, w, bias = (t.clone().requires_grad_() for t in (c.x, c.w, c.bias))
        loss = call(Case(x, w, c.target, bias, c.options), backend=backend, workspace_mb=workspace(c, 3))
        up = 2.0**-12 * (randn(ROWS, seed=8) if reduction == "none" else torch.tensor(1.0))
        found = [loss, *torch.autograd.grad(loss, (x, w, bias), up)]
        right = judge(c, up)
        for name, a, e, b in zip(("loss", "x", "w", "bias"), found, right.expected, right.bound, strict=True):
            assert a.isfinite().all() and excess(a, e, b) <= 1.0, (name, size, excess(a, e, b))
