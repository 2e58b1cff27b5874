"""What torch's autograd promises its users, of kernel calls: which gradients there are, and what must not happen."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from autograd_kit import UNPLANNED, leaf, packaged, randn, worst
from recent_kit import looked_up
from torch.utils.checkpoint import checkpoint

import kgen
from kgen import ops
from kgen.codegen.derive import DeriveError
from kgen.dsl.check import TensorParam
from kgen.runtime import autograd, differentiable, events

__all__ = ["looked_up"]

# ---- which gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["x", "w", "b", "xw", "xb", "wb", "xwb"])
def test_only_what_requires_grad_is_computed(which: str) -> None:
    kernel = packaged("layer_norm", "layer_norm")
    tensors = {"x": randn(3, 10), "w": randn(10, seed=1), "b": randn(10, seed=2)}
    g = randn(3, 10, seed=3)
    full = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    kernel(*full.values()).backward(g)
    given = {n: t.clone().requires_grad_(n in which) for n, t in tensors.items()}
    y = kernel(*given.values())
    y.backward(g)
    for n, t in given.items():
        assert (t.grad is not None) == (n in which)
        if n in which:
            torch.testing.assert_close(t.grad, full[n].grad, rtol=1e-5, atol=1e-6)
    values = [*given.values(), 1e-5]
    t = autograd.training(kernel, values, differentiable.requiring(kernel, values))
    assert [o.name for o in t.backward.signature.outputs] == [f"d_{n}" for n in which]


def test_no_grad_and_inference_mode(backend: str) -> None:
    x, w = leaf(3, 10), leaf(10, seed=1)
    expected = ops.rms_norm(x, w, backend=backend)
    assert expected.requires_grad
    with torch.no_grad(), events.launches() as seen:
        y = ops.rms_norm(x, w, backend=backend)
    with torch.inference_mode():
        z = ops.rms_norm(x, w, backend=backend)
    assert not y.requires_grad and not z.requires_grad
    assert torch.equal(y, expected) and torch.equal(z, expected)
    assert len(seen) == 1
    assert not ops.rms_norm(x.detach(), w.detach(), backend=backend).requires_grad


def test_outputs_that_get_no_gradient(backend: str) -> None:
    standardize = UNPLANNED.standardize
    for used in range(3):
        x = leaf(3, 9)
        y = standardize(x, backend=backend)[used]
        g = randn(*y.shape, seed=5)
        y.backward(g)
        xd = x.detach().double().requires_grad_()
        mu, var = xd.mean(-1), xd.var(-1, correction=0)
        ((xd - mu[..., None]) / (var[..., None] + 1e-3).sqrt(), mu, var)[used].backward(g.double())
        assert x.grad is not None and xd.grad is not None
        assert worst(x.grad, xd.grad, 9) <= 1.0


SOURCE = """
kernel apart(a: f32[*M, N], b: f32[*M, N]) -> (p: f32[*M, N], q: f32[*M, N]):
    parallel m in M, n in N
    p[m, n] = a[m, n] * a[m, n]
    q[m, n] = exp(b[m, n])

kernel steps(x: f32[*M], y: f32[*M]) -> (z: f32[*M]):
    parallel m in M
    z[m] = floor(x[m]) + y[m]
"""


def test_outputs_that_no_gradient_reaches_do_not_require_it(looked_up: list[str]) -> None:
    apart = kgen.loads(SOURCE).apart
    a, b = leaf(2, 3), leaf(2, 3, seed=1)
    for again in range(2):
        looked_up.clear()
        p, q = apart(a, b.detach())
        assert p.requires_grad and not q.requires_grad
        p, q = apart(a, b)
        assert again == (not looked_up)
        g = randn(2, 3, seed=2)
        da, db = torch.autograd.grad(p, (a, b), g, allow_unused=True)
        torch.testing.assert_close(da, 2 * a.detach() * g)
        assert db is None or not db.any()


class Dropped(torch.autograd.Function):
    """A product of which no gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None


def test_where_no_gradient_arrives_none_is_computed() -> None:
    apart = kgen.loads(SOURCE).apart
    for _ in range(2):  # the second call is recognised
        a, b = leaf(2, 3), leaf(2, 3, seed=1)
        p, q = apart(a, b)
        with events.launches() as seen:
            (cast(Any, Dropped).apply(p) + cast(Any, Dropped).apply(q)).sum().backward()
        assert a.grad is None and b.grad is None
        assert not seen


def test_scalars_of_the_backward_pass_are_those_of_the_call(looked_up: list[str]) -> None:
    scaled = kgen.loads("""
kernel scaled(x: f32[*M, N], s: f32) -> (y: f32[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = s * x[m, n] * sum(x[m, n], n)
""").scaled
    for number in (torch.tensor(2.0), np.array(2.0, dtype=np.float32), torch.tensor(2.0)):
        looked_up.clear()
        x = leaf(2, 3)
        y = scaled(x, number)
        number[...] = 3.0
        y.sum().backward()
        torch.testing.assert_close(x.grad, 4 * x.detach().sum(1, keepdim=True).expand(2, 3))
    assert "scaled" not in looked_up


def test_outputs_of_integers_carry_none() -> None:
    best, gap = UNPLANNED.argmax_and_gap(leaf(3, 7))
    assert not best.requires_grad and gap.requires_grad
    results = UNPLANNED.flags(leaf(3, 7), -0.5)
    assert not any(r.requires_grad for r in results)


# ---- what must not happen --------------------------------------------------------------------------------------------


def test_inputs_stay_as_they_are(backend: str) -> None:
    x, w = leaf(3, 17), leaf(17, seed=1)
    copies, versions = (x.detach().clone(), w.detach().clone()), (x._version, w._version)
    y = ops.rms_norm(x, w, backend=backend)
    y.backward(randn(3, 17, seed=2))
    assert torch.equal(x, copies[0]) and torch.equal(w, copies[1])
    assert (x._version, w._version) == versions


def test_an_input_modified_in_between_is_noticed() -> None:
    x = leaf(3, 5)
    h = x * 1.0
    y = ops.softmax(h)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(randn(3, 5))


def test_the_same_tensor_twice(backend: str) -> None:
    x = leaf(4, 19)
    h = torch.exp(x)
    g = randn(4, 19, seed=1)
    ops.swiglu(h, h, backend=backend).backward(g)
    xd = x.detach().double().requires_grad_()
    hd = torch.exp(xd)
    (F.silu(hd) * hd).backward(g.double())
    assert x.grad is not None and xd.grad is not None
    assert worst(x.grad, xd.grad, 19) <= 1.0


def test_two_backwards_with_other_scales(backend: str) -> None:
    x, w, g = leaf(3, 12), leaf(12, seed=1), randn(3, 12, seed=2)
    y = ops.layer_norm(x, w, backend=backend)
    first = torch.autograd.grad(y, (x, w), g, retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(y, (x, w), 4 * g, retain_graph=True)
    none = torch.autograd.grad(y, (x, w), 0 * g)
    for a, b, k, z in zip(first, second, kept, none, strict=True):
        assert torch.equal(a, k)
        assert torch.equal(b, 4 * k)  # a power of two is exact
        assert not z.any()


def test_zero_rows_give_zero_gradients_of_parameters(backend: str) -> None:
    for rows, width in ((0, 8), (2, 0)):
        x, w, b = leaf(rows, width), leaf(width, seed=1), leaf(width, seed=2)
        ops.layer_norm(x, w, b, backend=backend).backward(torch.empty(rows, width))
        for t in (x, w, b):
            assert t.grad is not None and t.grad.shape == t.shape
            assert not t.grad.any()


def test_the_backward_runs_where_the_forward_ran() -> None:
    x = leaf(3, 11)
    with kgen.backend("triton"):
        y = ops.softmax(x)
    with kgen.backend("reference"), events.launches() as seen:
        y.backward(randn(3, 11))
    assert [(e.kernel, e.executor) for e in seen] == [("softmax_backward", "triton-interpreter")]


def test_checkpointing_recomputes() -> None:
    x, w, g = leaf(3, 8), leaf(8, seed=1), randn(3, 8, seed=2)
    expected = torch.autograd.grad(ops.rms_norm(ops.swiglu(x, x), w), (x, w), g)

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(ops.swiglu(x, x), w)

    y = checkpoint(block, x, w, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    for a, b in zip(torch.autograd.grad(y, (x, w), g), expected, strict=True):
        assert torch.equal(a, b)


def test_training_changes_every_parameter() -> None:
    x, target = randn(16, 8), randn(16, 8, seed=1)
    weights = [leaf(8, 16, seed=2), leaf(8, 8, seed=3), leaf(8, seed=4), leaf(8, seed=5)]
    start = [w.detach().clone() for w in weights]
    optimizer = torch.optim.SGD(weights, lr=0.05)
    losses = []
    for _ in range(20):
        gate, up = (x @ weights[0]).chunk(2, -1)
        y = ops.layer_norm(ops.swiglu(gate, up) @ weights[1], weights[2], weights[3])
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(w, s) for w, s in zip(weights, start, strict=True))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused() -> None:
    x, g = leaf(3, 8), leaf(3, 8, seed=1)
    (dx,) = torch.autograd.grad(ops.softmax(x), x, g, create_graph=True)
    (expected,) = torch.autograd.grad(ops.softmax(x), x, g)
    assert torch.equal(dx, expected)
    with pytest.raises(kgen.KgenError, match="softmax: a gradient of its gradient is asked for"):
        dx.square().sum().backward()


def test_what_cannot_be_derived_is_named_at_the_call() -> None:
    words, places = leaf(11, 4), randn(5, 4, seed=1)
    word, place = torch.tensor([1, 1, 7]), torch.tensor([0, 4, 2], dtype=torch.int32)
    with pytest.raises(DeriveError, match=r"K0503"):
        UNPLANNED.two_gathers(words, places, word, place)
    with torch.no_grad():
        y = UNPLANNED.two_gathers(words, places, word, place)
    assert torch.equal(y, words.detach()[word] + places[place.long()])
    steps = kgen.loads(SOURCE).steps
    with pytest.raises(DeriveError, match="no output of 'steps' has a derivative with respect to 'x'"):
        steps(leaf(3), randn(3))
    assert steps(randn(3), leaf(3)).requires_grad


def test_writing_to_given_tensors_records_nothing_and_says_so() -> None:
    p, g, m, v = randn(6), leaf(6, seed=1), torch.zeros(6), torch.zeros(6)
    with pytest.raises(DeriveError, match="overwritten in place, so the kernel cannot be derived"):
        UNPLANNED.adamw_(p, g, m, v, lr=0.1)
    with torch.no_grad():
        UNPLANNED.adamw_(p, g, m, v, lr=0.1)
    x = leaf(3, 4)
    with pytest.raises(
        kgen.ArgumentError, match="a call with out= records no gradient, but argument 'x' requires grad"
    ):
        ops.softmax(x, out=torch.empty(3, 4))


def test_mistakes_are_told_in_the_words_of_the_kernel() -> None:
    x = leaf(3, 8)
    with pytest.raises(kgen.KgenError, match=r"^rms_norm: argument 'weight' must have shape \[N\]"):
        ops.rms_norm(x, leaf(7))
    with pytest.raises(kgen.ArgumentError, match=r"^rms_norm: argument 'weight' must be a torch\.Tensor, got a list"):
        ops.rms_norm(x, [1.0])  # pyright: ignore[reportArgumentType]  # the mistake under test
    with pytest.raises(kgen.ArgumentError, match=r"^rms_norm: scalar argument 'eps' must be a number"):
        ops.rms_norm(x, eps="no")  # pyright: ignore[reportArgumentType]  # the mistake under test
    at = torch.tensor([0, 9])
    with pytest.raises(kgen.KgenError, match=r"unplanned\.kdsl:.*reads x"):
        UNPLANNED.pick(leaf(2, 3), at, check=True)


def test_functional_transforms() -> None:
    x, w, g = randn(3, 8), randn(8, seed=1), randn(3, 8, seed=2)
    got = torch.func.grad(lambda x, w: (ops.rms_norm(x, w) * g).sum(), argnums=(0, 1))(x, w)
    xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
    for a, b in zip(got, torch.autograd.grad(ops.rms_norm(xs, ws), (xs, ws), g), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(kgen.ArgumentError, match="vmap does not reach into a kernel"):
        torch.func.vmap(lambda x: ops.rms_norm(x, ws))(x)


def test_parameters_of_training_forms_are_in_order() -> None:
    kernel = packaged("rms_norm", "rms_norm")
    values = [leaf(2, 8), leaf(8), 1e-6, 0.0, False]
    t = autograd.training(kernel, values, (0, 1))
    assert [kernel.signature.params[i].name for i in t.inputs] == ["x", "w", "eps", "offset"]
    assert t.reached == {0} and set(t.gradients) == {0, 1}
    assert all(isinstance(p, TensorParam) for p in t.backward.signature.outputs)
