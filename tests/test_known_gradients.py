"""What backward passes of this kind are known to get wrong: saved inputs, upstream gradients, what is asked for."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autograd_kit import as_tuple, leaf, randn, worst
from derive_kit import call, derived_of, shipped
from known_kit import DTYPES, OPS, agree, expected, outcome
from torch import nn
from torch.autograd import forward_ad

import kgen
from kgen import ops
from kgen.runtime import events

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# ---- inputs and earlier gradients stay as they are -------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_backward_twice_leaves_everything_as_it_was(name: str, backend: str) -> None:
    """Inputs, results, upstream gradients and the gradients of a first backward; a second one with another scale."""
    op = OPS[name]
    tensors = {n: t.requires_grad_() for n, t in op.tensors(33).items()}
    results = as_tuple(op.call(**tensors, backend=backend))
    seeds = [randn(*r.shape, seed=70 + i) for i, r in enumerate(results)]
    kept = [t.detach().clone() for t in (*tensors.values(), *results, *seeds)]
    first = torch.autograd.grad(results, list(tensors.values()), seeds, retain_graph=True)
    before = [t.clone() for t in first]
    second = torch.autograd.grad(results, list(tensors.values()), [4 * s for s in seeds])
    for t, k in zip((*tensors.values(), *results, *seeds), kept, strict=True):
        assert torch.equal(t.detach(), k)
    for a, b, again in zip(first, before, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(again, 4 * b), "a power of two is exact"
    agree([*(r.detach() for r in results), *first], expected(op, tensors, seeds), 6 * 33)


TWICE: list[tuple[Any, Any]] = [
    (lambda h, **kw: ops.swiglu(h, h, **kw), lambda h: F.silu(h) * h),
    (lambda h, **kw: ops.geglu(h, h, **kw), lambda h: F.gelu(h) * h),
    (lambda h, **kw: ops.add_rms_norm(h, h, **kw)[0], lambda h: F.rms_norm(2 * h, (19,), None, 1e-6)),
    (lambda h, **kw: ops.layer_norm(h, h[0], h[0], **kw), lambda h: F.layer_norm(h, (19,), h[0], h[0])),
]


@pytest.mark.parametrize("case", range(len(TWICE)))
def test_one_tensor_for_several_arguments(case: int, backend: str) -> None:
    """The result of an earlier op, whose own backward needs it: a backward that writes over its inputs spoils it."""
    function, formula = TWICE[case]
    x, g = leaf(4, 19), randn(4, 19, seed=1)
    function(torch.exp(x), backend=backend).backward(g)
    xd = x.detach().double().requires_grad_()
    formula(torch.exp(xd)).backward(g.double())
    assert x.grad is not None
    assert xd.grad is not None
    assert worst(x.grad, xd.grad, 2 * 19) <= 1.0


# ---- upstream gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_token_has_its_own_upstream_gradient(backend: str, smoothing: float) -> None:
    """With the first token ignored, and the first gradient 0: no other token may take after it."""
    target = torch.tensor([[-100, 3, 0], [1, -100, 4]])
    for upstream in (randn(2, 3, seed=2), torch.tensor([[0.0, 2.0, -1.0], [0.5, 3.0, 0.0]])):
        logits = leaf(2, 3, 5)
        loss = ops.cross_entropy(
            logits, target, reduction="none", label_smoothing=smoothing, z_loss=0.1, backend=backend
        )
        (found,) = torch.autograd.grad(loss, logits, upstream)
        x = logits.detach().double().requires_grad_()
        plain = F.cross_entropy(x.movedim(-1, 1), target, reduction="none", label_smoothing=smoothing)
        plain = plain + (0.1 * torch.logsumexp(x, -1) ** 2).where(target >= 0, 0.0)
        (exact,) = torch.autograd.grad(plain, x, upstream.double())
        assert worst(found, exact, 64) <= 1.0
        assert not found[0, 0].any()
        over = logits.detach().clone()
        ops.cross_entropy_(over, target, upstream, label_smoothing=smoothing, z_loss=0.1, backend=backend)
        assert worst(over, exact, 64) <= 1.0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("value", [1.0, 0.0, 3.7, -1.0, math.nan, math.inf])
def test_upstream_gradients_of_any_value(backend: str, reduction: str, value: float) -> None:
    """No value is special, 1 and 0 neither. What is not finite reaches the rows that are kept, and no other."""
    logits, target = leaf(4, 6), torch.tensor([5, -100, 0, 2])
    loss = ops.cross_entropy(logits, target, reduction=reduction, backend=backend)
    loss.backward(torch.full_like(loss, value))
    assert logits.grad is not None
    assert not logits.grad[1].any()
    if not math.isfinite(value):
        assert not logits.grad[[0, 2, 3]].isfinite().any()
        return
    x = logits.detach().double().requires_grad_()
    plain = F.cross_entropy(x, target, reduction=reduction)
    plain.backward(torch.full_like(plain, value))
    assert x.grad is not None
    assert worst(logits.grad, x.grad, 6) <= 1.0


def test_an_upstream_gradient_of_another_dtype(backend: str) -> None:
    logits, target = leaf(4, 6, dtype=torch.bfloat16), torch.tensor([5, -100, 0, 2])
    loss = ops.cross_entropy(logits, target, backend=backend)
    assert loss.dtype == torch.float32
    (loss.bfloat16() * 1.0).backward()  # 1 in bf16 on its way
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    x = logits.detach().double().requires_grad_()
    F.cross_entropy(x, target).backward()
    assert x.grad is not None
    assert worst(logits.grad, x.grad, 6) <= 1.0


@pytest.mark.parametrize("name", ["layer_norm", "softmax"])
def test_the_sum_of_a_normalised_row_has_no_gradient(name: str, backend: str) -> None:
    """With an upstream gradient of ones the true gradient is 0, which many a wrong kernel gives as well."""
    x = leaf(3, 33)
    y = getattr(ops, name)(x, backend=backend)
    (zero,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert zero.abs().max() <= (33 + 64) * 2.0**-24 * 8
    (other,) = torch.autograd.grad(y, x, randn(3, 33, seed=1))
    assert other.abs().max() > 1e-2


# ---- which gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
def test_each_subset_of_inputs(name: str) -> None:
    """The gradients that are asked for are those of the full backward, whatever else is asked for."""
    op = OPS[name]
    plain = op.tensors(10)
    results = as_tuple(op.call(**plain))
    seeds = [randn(*r.shape, seed=70 + i) for i, r in enumerate(results)]
    asking = {n: t.clone().requires_grad_() for n, t in plain.items()}
    full = dict(zip(plain, expected(op, asking, seeds)[len(seeds) :], strict=True))
    for asked in itertools.product((False, True), repeat=len(plain)):
        if not any(asked):
            continue
        tensors = {n: t.clone().requires_grad_(a) for (n, t), a in zip(plain.items(), asked, strict=True)}
        mine = as_tuple(op.call(**tensors))
        carrying = [(r, s) for r, s in zip(mine, seeds, strict=True) if r.requires_grad]
        torch.autograd.backward([r for r, _ in carrying], [s for _, s in carrying])
        for n, t in tensors.items():
            assert (t.grad is not None) == t.requires_grad, n
            if t.grad is not None:
                assert t.grad.dtype == t.dtype
                assert worst(t.grad, full[n], 6 * 10) <= 1.0, n


@pytest.mark.parametrize("parts", list(itertools.product((False, True), repeat=2)), ids=str)
def test_weight_and_bias_present_or_not(parts: tuple[bool, bool], backend: str) -> None:
    """Every combination of what is there and what requires grad: shapes are those of the inputs, None where unasked."""
    for asked in itertools.product((False, True), repeat=3):
        x = randn(2, 3, 12).requires_grad_(asked[0])
        w = randn(12, seed=1).requires_grad_(asked[1]) if parts[0] else None
        b = randn(12, seed=2).requires_grad_(asked[2]) if parts[1] else None
        y = ops.layer_norm(x, w, b, backend=backend)
        wanted = [t for t in (x, w, b) if t is not None and t.requires_grad]
        assert y.requires_grad == bool(wanted)
        if not wanted:
            continue
        g = randn(2, 3, 12, seed=3)
        y.backward(g)
        doubles = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in (x, w, b)]
        assert doubles[0] is not None
        exact = F.layer_norm(doubles[0], (12,), doubles[1], doubles[2])
        exact.backward(g.double())
        for t, d in zip((x, w, b), doubles, strict=True):
            if t is not None and d is not None:
                assert (t.grad is not None) == t.requires_grad
                if t.grad is not None and d.grad is not None:
                    assert t.grad.shape == t.shape
                    assert worst(t.grad, d.grad, 72) <= 1.0
        if parts[0]:
            r, v = randn(2, 3, 12).requires_grad_(asked[0]), randn(12, seed=1).requires_grad_(asked[1])
            z = ops.rms_norm(r, v, backend=backend)
            if asked[0] or asked[1]:
                z.backward(g)
                assert [(t.grad is not None, t.shape) for t in (r, v)] == [(asked[0], r.shape), (asked[1], v.shape)]
                assert all(t.grad is None or t.grad.shape == t.shape for t in (r, v))


def test_frozen_inputs_cost_nothing() -> None:
    """The backward kernel of a subset neither reads nor writes what only the others need."""
    arguments = {"x": randn(3, 8), "w": randn(8, seed=1), "b": randn(8, seed=2)}
    module = shipped("layer_norm.kdsl")
    needed = {("b",): {"d_y"}, ("x",): {"x", "w", "d_y"}, ("w",): {"x", "d_y"}}
    for wanted, reads in needed.items():
        derived = derived_of(call(module, "layer_norm", arguments), frozenset(wanted))
        tensors = {t.name for t in derived.backward.tensors if t.role == "in"} - set(derived.residuals)
        assert tensors == reads
        assert [t.name for t in derived.backward.tensors if t.role == "out"] == [f"d_{n}" for n in wanted]


# ---- flows of training -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Every module with parameters or tables, between linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = kgen.nn.RMSNorm(8, 1e-6), kgen.nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(12, 8, bias=False)
        self.gate, self.rope = kgen.nn.SwiGLU(), kgen.nn.RotaryEmbedding(4, max_position=2)
        self.loss = kgen.nn.CrossEntropyLoss()
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(randn(*p.shape, seed=40 + i))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Scores `[B, S, 8]` of states `[B, S, 8]`."""
        h = self.first(x).view(*x.shape[:2], 2, 4)
        q, k = self.rope(h, h.flip(2))
        return self.last(x + self.down(self.gate(self.up((q + k).flatten(2)))))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        return self.loss(self.logits(x), target)


def gradients_of(model: nn.Module, *losses: torch.Tensor) -> list[torch.Tensor]:
    """Those of the sum of the losses, of every parameter."""
    return list(torch.autograd.grad(sum(losses, torch.zeros(())), list(model.parameters())))


def test_generation_before_a_training_step_and_two_forwards_before_one_backward(backend: str) -> None:
    """Tables grow on the way, in inference mode and between the two forwards: nothing that is saved is written."""
    states = [
        (randn(2, s, 8, seed=s), torch.randint(0, 8, (2, s), generator=torch.Generator().manual_seed(s)))
        for s in (3, 7)
    ]
    with kgen.backend(backend):
        apart = Block()
        separately = [gradients_of(apart, apart(*state)) for state in states]
        model = Block()
        with torch.inference_mode():
            for length in (1, 2, 3):
                model.logits(randn(1, length, 8))
        model.eval()
        with torch.no_grad():
            scores = model.logits(states[0][0])
        model.train()
        together = gradients_of(model, *(model(*state) for state in states))
        assert torch.equal(model.logits(states[0][0]).detach(), scores)
    for a, *each in zip(together, *separately, strict=True):
        assert a.any()
        torch.testing.assert_close(a, each[0] + each[1], rtol=2.0**-20, atol=2.0**-20)


def test_a_micro_batch_without_labels_among_others(backend: str) -> None:
    """Sums divided by the labels of the whole batch: the same gradient however it is cut, also where one part has no
    label at all; and a mean over that part alone is NaN with a gradient of 0."""
    x, target = randn(6, 4, 5), torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(1))
    target[2:4] = -100
    target[0, 0] = -100
    count = int((target >= 0).sum())

    def accumulated(parts: int) -> torch.Tensor:
        w = leaf(5, 9, seed=2)
        for states, labels in zip(x.chunk(parts), target.chunk(parts), strict=True):
            (ops.cross_entropy(states @ w, labels, reduction="sum", z_loss=0.01, backend=backend) / count).backward()
        assert w.grad is not None
        return w.grad

    whole = accumulated(1)
    assert whole.isfinite().all()
    for parts in (3, 6):
        torch.testing.assert_close(accumulated(parts), whole, rtol=2.0**-20, atol=2.0**-20)
    mean = ops.cross_entropy(x @ leaf(5, 9, seed=2), target, z_loss=0.01, backend=backend)
    w = leaf(5, 9, seed=2)
    good = ops.cross_entropy(x[:2] @ w, target[:2], backend=backend)
    empty = ops.cross_entropy(x[2:4] @ w, target[2:4], backend=backend)
    assert mean.isfinite()
    assert good.isfinite()
    assert empty.isnan()
    (alone,) = torch.autograd.grad(good, w, retain_graph=True)
    (both,) = torch.autograd.grad(good + empty, w)
    assert torch.equal(alone, both)


@pytest.mark.parametrize("name", OPS)
def test_functional_transforms_of_each_op(name: str) -> None:
    """`torch.func.grad` gives the gradient that `backward` gives, and `vmap` is refused in words."""
    op = OPS[name]
    plain = op.tensors(10)
    seeds = [randn(*r.shape, seed=70 + i) for i, r in enumerate(as_tuple(op.call(**plain)))]

    def weighed(*tensors: torch.Tensor) -> torch.Tensor:
        results = as_tuple(op.call(**dict(zip(plain, tensors, strict=True))))
        return torch.stack([(r * s).sum() for r, s in zip(results, seeds, strict=True)]).sum()

    found = torch.func.grad(weighed, argnums=tuple(range(len(plain))))(*plain.values())
    wanted = outcome(op, {n: t.clone().requires_grad_() for n, t in plain.items()}, seeds)[len(seeds) :]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(kgen.ArgumentError, match="vmap does not reach into a kernel"):
        torch.func.vmap(torch.func.grad(weighed))(*(t.expand(2, *t.shape) for t in plain.values()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of make_dual
@pytest.mark.parametrize("name", OPS)
def test_derivatives_that_are_not_derived_are_refused(name: str, backend: str) -> None:
    """In words, instead of a derivative of zero: forward mode, and Jacobians, which are a vmap."""
    op = OPS[name]
    plain = op.tensors(10)
    first, *rest = plain
    with forward_ad.dual_level():
        dual = {first: forward_ad.make_dual(plain[first], torch.ones_like(plain[first])), **{n: plain[n] for n in rest}}
        with pytest.raises(kgen.ArgumentError, match=r"argument '\w+' carries a tangent, .*forward mode"):
            op.call(**dual, backend=backend)
        op.call(**plain, backend=backend)
    op.call(**dual, backend=backend)  # outside there is no tangent

    def of_first(x: torch.Tensor) -> torch.Tensor:
        return as_tuple(op.call(**{**plain, first: x}, backend=backend))[0]

    with pytest.raises(kgen.ArgumentError, match="vmap does not reach into a kernel"):
        torch.func.jacrev(of_first)(plain[first])


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_w", DTYPES)
@pytest.mark.parametrize("of_x", DTYPES)
def test_dtypes_of_results_and_gradients(of_x: torch.dtype, of_w: torch.dtype) -> None:
    """A result has the dtype of the first input, a gradient that of its input; nothing depends on the weight's."""
    x, w, residual = leaf(3, 16, dtype=of_x), leaf(16, dtype=of_w, seed=1), leaf(3, 16, dtype=of_w, seed=2)
    b = leaf(16, dtype=of_w, seed=3)
    xd, wd, bd = (t.detach().double() for t in (x, w, b))
    for casting in ("none", "llama", "gemma"):
        y = ops.rms_norm(x, w, casting=casting)
        assert y.dtype == of_x
        exact = F.rms_norm(xd, (16,), None, 1e-6) * (wd + (casting == "gemma"))
        # Llama rounds the row as well.
        assert ((y - exact).abs() <= torch.finfo(of_x).eps * (exact.abs() * 1.01 + 2.0**-20)).all()
        gx, gw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        assert (gx.dtype, gw.dtype) == (of_x, of_w)
    y = ops.layer_norm(x, w, b)
    assert y.dtype == of_x
    assert worst(y, F.layer_norm(xd, (16,), wd, bd), 16) <= 1.0
    assert [g.dtype for g in torch.autograd.grad(y, (x, w, b), torch.ones_like(y))] == [of_x, of_w, of_w]
    y, h = ops.add_rms_norm(x, residual, w)
    assert (y.dtype, h.dtype) == (of_x, of_w)
    assert torch.equal(h.detach(), (x.detach().float() + residual.detach().float()).to(of_w))
    grads = torch.autograd.grad((y, h), (x, residual, w), (torch.ones_like(y), torch.ones_like(h)))
    assert [g.dtype for g in grads] == [of_x, of_w, of_w]
    assert worst(y.detach(), F.rms_norm(h.detach().double(), (16,), wd, 1e-6), 16) <= 1.0
    loss = ops.cross_entropy(x, torch.tensor([0, 15, 3]), w.detach().abs())
    assert loss.dtype == torch.float32
    assert torch.autograd.grad(loss, x)[0].dtype == of_x
    assert worst(loss, F.cross_entropy(xd, torch.tensor([0, 15, 3]), wd.abs()), 64) <= 1.0
    if of_x != of_w:
        with pytest.raises(kgen.ArgumentError, match="'up' has dtype"):
            ops.swiglu(x.detach(), x.detach().to(of_w))
        with pytest.raises(kgen.ArgumentError, match="'bias' has dtype"):
            ops.layer_norm(x.detach(), w.detach(), b.detach().to(of_x))


def test_autocast_changes_nothing(backend: str) -> None:
    """Kernels compute in f32 whatever comes in: an autocast region casts no argument and no gradient of them."""
    x, w, target = leaf(3, 16), leaf(16, dtype=torch.bfloat16, seed=1), torch.tensor([0, 15, 3])
    expected = ops.rms_norm(x, w, backend=backend), ops.cross_entropy(x, target, backend=backend)
    with torch.autocast("cpu", torch.bfloat16), events.launches() as seen:
        mine = ops.rms_norm(x, w, backend=backend), ops.cross_entropy(x, target, backend=backend)
        narrow = ops.cross_entropy(x @ randn(16, 5), target.clamp(max=4), backend=backend)  # logits are bf16 here
    assert len(seen) >= 3
    for a, b in zip(mine, expected, strict=True):
        assert torch.equal(a, b)
    assert narrow.dtype == torch.float32
    found = torch.autograd.grad((*mine, narrow), (x, w), (randn(3, 16, seed=4), torch.ones(()), torch.ones(())))
    assert [g.dtype for g in found] == [torch.float32, torch.bfloat16]
