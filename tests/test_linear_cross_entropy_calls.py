"""The cross entropy of a linear layer in chunks as it is called: layouts, dtypes, what it costs, autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_call_kit import CLASSES, ROWS, UPSTREAM, WIDTH, Allocations, call, op, outcome, workspace
from linear_loss_kit import Case, case, excess, judge, randn
from torch.utils.checkpoint import checkpoint

import kgen
from kgen import ops
from kgen.dsl.errors import KgenError
from kgen.runtime import events
from kgen.runtime.errors import ArgumentError

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
            consts = {"narrow": dtype == torch.float16}
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
