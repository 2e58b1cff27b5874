"""The cross entropy of a linear layer in chunks: values and gradients within derived bounds, torch's conventions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_loss_kit import Case, case, excess, judge, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kgen
from kgen import ops
from kgen.dsl.diagnostics import KgenError
from kgen.ops import functional
from kgen.runtime import events
from kgen.runtime.errors import ArgumentError

ROWS, WIDTH, CLASSES = 33, 24, 37


def op(name: str) -> Any:
    """One of the two ops."""
    return functional._loaded("fused_linear_cross_entropy", name)


def call(c: Case, **more: Any) -> torch.Tensor:
    """The function on a case."""
    return ops.linear_cross_entropy(c.x, c.w, c.target, c.bias, **{**c.options, **more})


def outcome(c: Case, upstream: torch.Tensor, **more: Any) -> list[torch.Tensor]:
    """The loss and the gradients of all that may have one."""
    given = [t.detach().clone().requires_grad_() for t in c.floats]
    own = Case(given[0], given[1], c.target, given[2] if c.bias is not None else None, c.options)
    loss = call(own, **more)
    assert loss.dtype == torch.float32
    up = upstream.to(loss.dtype).expand(loss.shape)
    found = torch.autograd.grad(loss, given, up)
    assert torch.equal(up.nan_to_num(), upstream.to(loss.dtype).expand(loss.shape).nan_to_num())
    assert all(torch.equal(a, b) for a, b in zip(given, c.floats, strict=True))  # nothing was modified
    assert [g.dtype for g in found] == [t.dtype for t in given]
    return [loss.detach(), *found]


def check(c: Case, upstream: torch.Tensor, stored: torch.dtype | None = None, **more: Any) -> None:
    """The outcome within its bounds."""
    right = judge(c, upstream, stored)
    for name, a, e, b in zip(("loss", "x", "w", "bias"), outcome(c, upstream, **more), right.expected, right.bound,
                             strict=False):  # fmt: skip
        assert excess(a, e, b) <= 1.0, (name, excess(a, e, b))


def workspace(c: Case, chunks: int) -> float:
    """A budget in MiB for so many chunks: a row of logits and its loss, z and scales are what grows."""
    rows = -(-c.target.numel() // chunks)
    return (rows + 0.5) * c.w.shape[0] * c.x.element_size() / 2**20


UPSTREAM = {"mean": torch.tensor(3.7), "sum": torch.tensor(-0.5), "none": randn(ROWS, seed=8)}


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


OPTIONS = [
    {k: v for k, v, on in zip(
        ("class_weight", "token_weight", "label_smoothing", "z_loss", "softcap"),
        (randn(CLASSES, seed=9).abs() + 0.25, randn(ROWS, seed=10), 0.1, 0.02, 2.5),
        chosen, strict=True) if on}
    for chosen in itertools.product((False, True), repeat=5)
]  # fmt: skip


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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
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
        found = [loss, *torch.autograd.grad(loss, (x, w, bias), torch.tensor(2.0**-12))]
        right = judge(c, torch.tensor(2.0**-12))
        for name, a, e, b in zip(("loss", "x", "w", "bias"), found, right.expected, right.bound, strict=True):
            assert a.isfinite().all() and excess(a, e, b) <= 1.0, (name, size, excess(a, e, b))


# ---- layouts and dtypes ----------------------------------------------------------------------------------------------


def test_layouts(backend: str) -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    expected = outcome(c, torch.tensor(1.0), backend=backend)
    wide = torch.zeros(ROWS, 2 * WIDTH)
    wide[:, ::2] = c.x
    strided = Case(wide[:, ::2], c.w.T.contiguous().T, c.target, torch.stack([c.bias, c.bias], -1)[:, 0], {})
    for a, e, b in zip(outcome(strided, torch.tensor(1.0), backend=backend), expected,
                       judge(c, torch.tensor(1.0)).bound, strict=True):  # fmt: skip
        assert excess(a, e.double(), 2 * b) <= 1.0
    x, w = c.x.clone().requires_grad_(), c.w.clone().requires_grad_()
    loss = ops.linear_cross_entropy(x, w, c.target, reduction="none", backend=backend)
    loss.sum().backward()  # a gradient that is one element, expanded
    assert x.grad is not None and w.grad is not None
    assert excess(x.grad, *(judge(case(ROWS, WIDTH, CLASSES, reduction="none"), torch.ones(ROWS)).__dict__[k][1]
                            for k in ("expected", "bound"))) <= 1.0  # fmt: skip


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast(low: torch.dtype, reduction: str) -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0, reduction=reduction)
    up = UPSTREAM[reduction]
    rounded = Case(c.x.to(low).float(), c.w, c.target, c.bias, c.options)
    right = judge(rounded, up, low)
    with torch.autocast("cpu", low):
        found = outcome(c, up, backend="cuda", workspace_mb=workspace(c, 9))
    for name, a, e, b in zip(("loss", "x", "w", "bias"), found, right.expected, right.bound, strict=True):
        # The gradient of x was one of the low dtype before autograd converted it.
        b = b + 4 * {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[low] * e.abs() if name == "x" else b
        assert a.dtype == torch.float32 and excess(a, e, b) <= 1.0, name
    if reduction == "mean":  # what was summed is the gradient, and no other f32 tensor of its size is made
        w = c.w.clone().requires_grad_()
        seen = Allocations()
        with seen, torch.autocast("cpu", low):
            call(Case(c.x, w, c.target, c.bias, c.options), backend="cuda").backward()
        assert seen.shapes.count((CLASSES, WIDTH)) == 2  # the other is the weight in the low dtype
    # The weight's gradient is not rounded to the low dtype anywhere.
    assert not torch.equal(found[2], found[2].to(low).float())
    mixed = Case(c.x.to(low), c.w, c.target, None, {})
    with torch.autocast("cpu", low):
        assert [g.dtype for g in outcome(mixed, torch.tensor(1.0), backend="cuda")[1:]] == [low, torch.float32]


def test_f64_is_computed_in_f64() -> None:
    c = case(9, WIDTH, CLASSES, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        _, dx, dw = outcome(c, torch.tensor(1.0), backend="cuda")
    right = judge(c, torch.tensor(1.0), torch.float32)
    assert excess(dx, right.expected[1], right.bound[1]) <= 1.0 and dw.dtype == torch.float64


def test_what_does_not_fit_is_told() -> None:
    x, w, t = randn(3, 4), randn(5, 4), torch.zeros(3, dtype=torch.int64)
    for arguments, message in [
        ((x, w.bfloat16(), t), "input and weight must have one dtype.*torch.autocast"),
        ((x, w.T, t), r"weight must be \[V, H\] with H = 4"),
        ((x.long(), w, t), "floating-point"),
        ((x, w, t.float()), "integer labels"),
        ((x, w, t[:2]), r"target must have the shape \(3,\)"),
        ((x, w, t, x), r"bias must have the shape \(5,\)"),
        ((x, w, t, None, w), r"class_weight must have the shape \(5,\)"),
        ((x, w, t, "no"), "bias must be a tensor or None"),
        ((None, w, t), "input must be a tensor"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            ops.linear_cross_entropy(*arguments)
    for options, message in [
        ({"token_weight": w}, "token_weight must have the shape"),
        ({"reduction": "max"}, "reduction must be"),
        ({"accumulate": "f64"}, "accumulate must be one of"),
        ({"workspace_mb": 0}, "workspace_mb must be a positive"),
        ({"workspace_mb": float("nan")}, "workspace_mb must be a positive"),
        ({"label_smoothing": 2.0}, "label_smoothing"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            ops.linear_cross_entropy(x, w, t, **options)
    w.requires_grad_()
    with pytest.raises(ArgumentError, match="gives no gradient of 'class_weight'"):
        op("fused_linear_cross_entropy")(x, randn(5, 4), t, class_weight=randn(5).requires_grad_())


# ---- only what is asked for ------------------------------------------------------------------------------------------


_ALLOCATING = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty_strided,  # a gradient that autograd copies
    torch.ops.aten.zeros,
    torch.ops.aten.clone,
    torch.ops.aten._to_copy,
)


class Allocations(TorchDispatchMode):
    """The shapes of all memory that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATING:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("which", "products"), [((), 1), (("x",), 2), (("w",), 2), (("bias",), 1), (("x", "w"), 3), (("x", "w", "bias"), 3)]
)
def test_only_wanted_gradients_cost_anything(which: tuple[str, ...], products: int, reduction: str) -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    given = {"x": c.x.clone(), "w": c.w.clone(), "bias": c.bias.clone()}
    for name in which:
        given[name].requires_grad_()
    seen = Allocations()
    chunk = 9
    with events.launches() as launches, seen:
        loss = op("fused_linear_cross_entropy")(
            given["x"], given["w"], c.target, given["bias"], backend="cuda", chunk=chunk
        ) if reduction == "mean" else op("fused_linear_cross_entropy_rows")(
            given["x"], given["w"], c.target, given["bias"], backend="cuda", chunk=chunk
        )  # fmt: skip
        assert loss.requires_grad == bool(which)
        if which:
            loss.sum().backward()
    chunks = -(-ROWS // chunk)
    again = reduction == "none" and bool(which)
    assert len([x for x in launches if x.kernel.endswith("@")]) == chunks * (products + again)
    assert ((ROWS, WIDTH) in seen.shapes) == ("x" in which)
    assert ((CLASSES, WIDTH) in seen.shapes) == ("w" in which)
    if "bias" not in which:  # sums over programs have workspaces
        assert seen.shapes.count((chunk, CLASSES)) == 1 + again
    assert not any(len(s) == 2 and s[0] > chunk and s[1] == CLASSES for s in seen.shapes)
    wrote = {"cross_entropy_"} if which else {"cross_entropy"}
    assert {x.kernel for x in launches if x.kernel.startswith("cross")} == (
        wrote | {"cross_entropy"} if again else wrote
    )
    for name, t in given.items():
        assert (t.grad is not None) == (name in which)


def test_no_grad_and_inference_mode() -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    c.x.requires_grad_()
    expected = call(c, backend="cuda").detach()
    with torch.no_grad():
        loss = call(c, backend="cuda")
    with torch.inference_mode():
        other = call(c, backend="cuda")
    assert not loss.requires_grad and torch.equal(loss, other)
    assert excess(loss, expected.double(), 64 * 2.0**-24 * expected.abs()) <= 1.0


def test_the_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(ROWS, WIDTH, CLASSES)

    def chunks(**options: Any) -> int:
        with events.launches() as launches, torch.no_grad():
            call(c, backend="cuda", **options)
        return len([x for x in launches if x.kernel.endswith("@")])

    assert chunks() == 1
    monkeypatch.setenv("KGEN_WORKSPACE_MB", str(10.5 * CLASSES * 4 / 2**20))
    assert chunks() == 4
    assert chunks(workspace_mb=512) == 1
    monkeypatch.setenv("KGEN_WORKSPACE_MB", "much")
    with pytest.raises(ArgumentError, match="KGEN_WORKSPACE_MB must be"):
        chunks()


# ---- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_several_backward_passes(dtype: torch.dtype, reduction: str) -> None:
    c = case(ROWS, WIDTH, CLASSES, dtype, bias=1.0, reduction=reduction)
    given = [t.clone().requires_grad_() for t in c.floats]
    loss = call(Case(given[0], given[1], c.target, given[2], c.options), backend="cuda")
    ups = [torch.full(loss.shape, u) for u in (1.0, 3.0, 0.0)]
    found, copies = [], []
    for i, up in enumerate(ups):
        found.append(torch.autograd.grad(loss, given, up, retain_graph=i < 2))
        copies.append([g.clone() for g in found[-1]])
        if i == 0:
            for g in found[0]:
                g.add_(1.0)  # what was handed out is the caller's
            copies[0] = [g.clone() for g in found[0]]
    for g, kept in zip(found, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(g, kept, strict=True))
    for up, gradients in zip(ups[1:], found[1:], strict=True):
        right = judge(c, up)
        for a, e, b in zip(gradients, right.expected[1:], right.bound[1:], strict=True):
            assert excess(a, e, b) <= 1.0
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, given, ups[0])


@pytest.mark.parametrize("upstream", [1.0, 0.0, 3.7, float("nan")])
def test_the_gradient_of_the_result_may_be_anything(upstream: float) -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    given = [t.clone().requires_grad_() for t in c.floats]
    loss = call(Case(given[0], given[1], c.target, given[2], {}), backend="cuda")
    (loss.bfloat16() * upstream).sum().backward()
    for t, one in zip(given, outcome(c, torch.tensor(1.0), backend="cuda")[1:], strict=True):
        assert t.grad is not None
        expected = one * torch.tensor(upstream).bfloat16().float()
        assert torch.equal(t.grad.isnan(), expected.isnan())
        assert torch.equal(t.grad.nan_to_num(), expected.nan_to_num())


def test_gradients_add_up_and_take_no_copy() -> None:
    c = case(ROWS, WIDTH, CLASSES)
    w = c.w.clone().requires_grad_()
    seen = Allocations()
    with seen:
        ops.linear_cross_entropy(c.x, w, c.target, backend="cuda").backward()
    assert seen.shapes.count((CLASSES, WIDTH)) == 1  # what was summed is the gradient
    assert w.grad is not None
    once = w.grad.clone()
    ops.linear_cross_entropy(c.x, w, c.target, backend="cuda").backward()
    assert torch.equal(w.grad, 2 * once)


def test_other_forms_of_differentiation() -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    dw = outcome(c, torch.tensor(1.0), backend="cuda")[2]
    of_w = torch.func.grad(lambda w: ops.linear_cross_entropy(c.x, w, c.target, c.bias, backend="cuda"))
    assert torch.equal(of_w(c.w), dw)
    w = c.w.clone().requires_grad_()
    (g,) = torch.autograd.grad(ops.linear_cross_entropy(c.x, w, c.target, c.bias), w, create_graph=True)
    with pytest.raises(KgenError, match="second derivatives are not derived"):
        g.sum().backward()
    for reduction in ("mean", "none"):  # a penalty on the gradient, beside the loss itself
        loss = ops.linear_cross_entropy(c.x, w, c.target, c.bias, reduction=reduction).sum()
        (g,) = torch.autograd.grad(loss, w, create_graph=True)
        with pytest.raises(KgenError, match="second derivatives are not derived"):
            (loss + g.square().sum()).backward()
    with pytest.raises(KgenError, match="second derivatives are not derived"):
        torch.func.grad(lambda w: of_w(w).square().sum())(c.w)
    with pytest.raises(ArgumentError, match="vmap does not reach into an op"):
        torch.func.vmap(lambda x: ops.linear_cross_entropy(x, w, c.target[:3]))(randn(2, 3, WIDTH))
    checkpointed = checkpoint(
        lambda w: ops.linear_cross_entropy(c.x, w, c.target, c.bias, backend="cuda"), w, use_reentrant=False
    )
    assert torch.equal(torch.autograd.grad(checkpointed, w)[0], dw)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction: str) -> None:
    torch._dynamo.reset()
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)

    def f(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        loss = ops.linear_cross_entropy(torch.tanh(x), w, target, bias, reduction=reduction, label_smoothing=0.1,
                                        backend="cuda", workspace_mb=0.002)  # fmt: skip
        return (loss * loss).sum()

    g = torch.compile(f, fullgraph=True, backend="aot_eager")
    for rows in (ROWS, 17, 5):
        found = []
        for each in (f, g):
            given = [t.clone().requires_grad_() for t in (c.x[:rows], c.w, c.bias)]
            loss = each(given[0], given[1], c.target[:rows], given[2])
            found.append([loss, *torch.autograd.grad(loss, given)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        assert torch.equal(f(c.x, c.w, c.target, c.bias), g(c.x, c.w, c.target, c.bias))


def test_the_operators_are_sound() -> None:
    from kgen.runtime.host import library

    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    for one in (op("fused_linear_cross_entropy"), op("fused_linear_cross_entropy_rows")):
        for dtype in (torch.float32, torch.float16):
            consts = {"narrow": dtype == torch.float16} if one.signature.name.endswith("entropy") else {}
            given = [c.x.to(dtype).requires_grad_(), c.w.to(dtype).requires_grad_(), c.target]
            values = one._binder.bind(given, consts)
            name = library.define(one, values, (0, 1))
            arguments = (*values, "cuda", 512.0, "auto", 16)
            torch.library.opcheck(getattr(torch.ops.kgen, name), arguments, test_utils=("test_schema",
                "test_autograd_registration", "test_faketensor"))  # fmt: skip


def test_the_module() -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0, class_weight=randn(CLASSES).abs(), label_smoothing=0.1, z_loss=0.01)
    module = kgen.nn.LinearCrossEntropyLoss(c.options["class_weight"], label_smoothing=0.1, z_loss=0.01)
    assert torch.equal(module(c.x, c.w, c.target, c.bias), call(c))
    weights = randn(ROWS, seed=4).abs()
    assert torch.equal(module(c.x, c.w, c.target, c.bias, weights), call(c, token_weight=weights))
    assert list(module.state_dict()) == ["class_weight"] and "label_smoothing=0.1" in repr(module)
    with pytest.raises(ArgumentError, match="LinearCrossEntropyLoss: reduction"):
        kgen.nn.LinearCrossEntropyLoss(reduction="max")
    with pytest.raises(ArgumentError, match="LinearCrossEntropyLoss: accumulate"):
        kgen.nn.LinearCrossEntropyLoss(accumulate="max")
