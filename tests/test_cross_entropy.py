"""Cross entropy and its gradient, derived and in place, against torch and a written-out formula in float64.

Bounds. A sum of V terms of one sign in f32 is off by at most V roundings, relatively; an exponential of `a` by |a| and
a few more (docs/language.md, 4). So is a probability, and the logarithm of the sum absolutely; a difference of logits
adds roundings of their size. `bound` is these roundings, and one of the result's dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from derive_kit import call, derived_of, shipped
from torch.fx.experimental.proxy_tensor import make_fx

import kgen
from kgen import ops

F32 = 2.0**-24
HALF_UNIT = {torch.float32: F32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def labels(rows: int, classes: int, seed: int = 0) -> torch.Tensor:
    """Random labels; the second is the last class, the third is ignored."""
    t = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(seed))
    t[1], t[2] = classes - 1, -100
    return t


def formula(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """The definition, in float64, term by term."""
    x = logits.double()
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    w = torch.ones(x.shape[-1], dtype=torch.float64) if weight is None else weight.double()
    kept = target != ignore_index
    t = target.where(kept, 0)
    log_p = x - torch.logsumexp(x, -1, keepdim=True)
    nll = -w[t] * log_p.gather(-1, t[..., None])[..., 0]
    smooth = -(w * log_p).sum(-1) / x.shape[-1]
    ce = ((1.0 - label_smoothing) * nll + label_smoothing * smooth).where(kept, 0.0)
    z = (z_loss * torch.logsumexp(x, -1) ** 2).where(kept, 0.0)
    if reduction == "none":
        return ce + z
    if reduction == "sum":
        return ce.sum() + z.sum()
    return ce.sum() / w[t].where(kept, 0.0).sum() + z.sum() / kept.sum()


def bound(logits: torch.Tensor, expected: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """What `expected` may be off by; `factor` is the largest of what multiplies probabilities and logarithms."""
    classes, x = logits.shape[-1], logits.double().nan_to_num(0.0, 0.0, 0.0)
    spread = x.abs().max().item() * 2 + math.log(max(classes, 1)) + 1 if x.numel() else 1.0
    return HALF_UNIT[dtype] * expected.abs() + F32 * (classes + 64) * (factor * spread + expected.abs()) + 2.0**-120


def close(actual: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor, factor: float = 1.0) -> None:
    """`actual` within `bound` of `expected`, infinities and NaNs at the same places."""
    assert actual.shape == expected.shape
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    off = (actual.double() - expected).abs() / bound(logits, expected, factor, actual.dtype)
    wrong = ~same & ~(off <= 1.0)
    assert not wrong.any(), f"{off[wrong]} times the bound: {actual[wrong]} for {expected[wrong]}"


def gradient(function: Any, logits: torch.Tensor, upstream: torch.Tensor | float, **kwargs: Any) -> torch.Tensor:
    """The gradient of `function(logits, ...)` for a gradient of its result."""
    x = logits.clone().requires_grad_()
    y = function(x, **kwargs)
    y.backward(torch.as_tensor(upstream).to(y.dtype).expand(y.shape))
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("classes", [1, 2, 33, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch(backend: str, classes: int, dtype: torch.dtype) -> None:
    logits, target = randn(7, classes, dtype=dtype) * 3, labels(7, classes)
    per_row = randn(7, seed=5)
    for reduction, upstream in (("none", per_row), ("mean", 3.7), ("sum", 1.0), ("sum", 0.0)):
        kwargs: dict[str, Any] = {"target": target, "reduction": reduction}
        mine = ops.cross_entropy(logits, backend=backend, **kwargs)
        assert mine.dtype == torch.float32
        close(mine, F.cross_entropy(logits.double(), **kwargs), logits, 7.0)
        close(
            gradient(ops.cross_entropy, logits, upstream, backend=backend, **kwargs),
            gradient(F.cross_entropy, logits.double(), upstream, **kwargs),
            logits,
            4.0,
        )


OPTIONS = [
    dict(zip(("weight", "label_smoothing", "softcap"), c, strict=True)) for c in itertools.product((0, 1), repeat=3)
]


def chosen(which: dict[str, int], classes: int) -> dict[str, Any]:
    """Values for the options that are chosen; z-loss always."""
    values = {"weight": randn(classes, seed=9).abs() + 0.25, "label_smoothing": 0.1, "softcap": 2.5}
    return {"z_loss": 0.3, **{name: values[name] for name, on in which.items() if on}}


@pytest.mark.parametrize("which", OPTIONS, ids=lambda w: "+".join(n for n, on in w.items() if on) or "plain")
def test_every_combination_of_options(backend: str, which: dict[str, int]) -> None:
    classes = 37
    logits, target = 2 * randn(2, 3, classes), labels(6, classes).view(2, 3)
    options = chosen(which, classes)
    weight = options.get("weight")
    factor = 8.0 * (1.0 + (0.0 if weight is None else weight.max().item()))
    for reduction in ("mean", "none"):
        upstream = randn(2, 3, seed=4) if reduction == "none" else 3.7
        kwargs = {"target": target, "reduction": reduction, **options}
        close(ops.cross_entropy(logits, backend=backend, **kwargs), formula(logits, **kwargs), logits, factor)
        expected = gradient(formula, logits.double(), upstream, **kwargs)
        close(gradient(ops.cross_entropy, logits, upstream, backend=backend, **kwargs), expected, logits, factor)
        # The same gradient by the kernel that writes it over the logits.
        scale: Any = upstream
        z_scale: Any = None
        if reduction == "mean":
            scale, z_scale = (upstream / ops.kept_weight(target, w) for w in (weight, None))
        over = logits.clone()
        rows = ops.cross_entropy_(over, target, scale, z_scale=z_scale, backend=backend, **options)
        close(over, expected, logits, factor)
        close(rows, formula(logits, target, reduction="none", **options), logits, factor)


def test_terms_that_an_option_adds_are_seen(backend: str) -> None:
    """Each option changes the loss by far more than a bound, so that the test above can fail."""
    logits, target = 2 * randn(6, 37), labels(6, 37)
    plain = ops.cross_entropy(logits, target, backend=backend)
    for name, value in chosen({"weight": 1, "label_smoothing": 1, "softcap": 1}, 37).items():
        changed = formula(logits, target, **{name: value})
        assert (changed - plain).abs() > 100 * bound(logits, changed, 16.0, torch.float32), name


def test_edges_of_logits(backend: str) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [
            [1.0, 2.0, 3.0, -inf],  # a class that is not the label: finite, no gradient there
            [1.0, -inf, 3.0, 4.0],  # the label: loss inf, gradient finite
            [1.0, nan, 3.0, 4.0],
            [1.0, inf, 3.0, 4.0],
            [-inf, -inf, -inf, -inf],
            [500.0, 510.0, -500.0, 505.0],  # exp of each overflows
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    target = torch.tensor([0, 1, 0, 0, 0, 2, 3])
    for smoothing in (0.0, 0.1):
        kwargs: dict[str, Any] = {"target": target, "reduction": "none", "label_smoothing": smoothing}
        expected = F.cross_entropy(logits.double(), **kwargs)
        close(ops.cross_entropy(logits, backend=backend, **kwargs), expected, logits)
        d = gradient(F.cross_entropy, logits.double(), 1.0, **kwargs)
        close(gradient(ops.cross_entropy, logits, 1.0, backend=backend, **kwargs), d, logits)
        over = logits.clone()
        close(ops.cross_entropy_(over, target, label_smoothing=smoothing, backend=backend), expected, logits)
        close(over, d, logits)
    assert torch.equal(expected.isfinite(), torch.tensor([False, False, False, False, False, True, True]))


def test_a_shift_of_a_row_changes_nothing(backend: str) -> None:
    logits, target = (randn(4, 33) * 256).round() / 256, labels(4, 33)
    shifted = logits + 2.0**14  # exact, as logits are multiples of 2**-8; logsumexp would be off by 2**-10
    for smoothing in (0.0, 0.1):
        rows = [x.clone() for x in (logits, shifted)]
        losses = [ops.cross_entropy_(x, target, label_smoothing=smoothing, backend=backend) for x in rows]
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(rows[0], rows[1])
    losses = [ops.cross_entropy(x, target, reduction="none", backend=backend) for x in (logits, shifted)]
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bad", [9, 14, -1, 2**31 + 3, 2**32 + 1, -(2**63)])
def test_a_label_out_of_range_makes_its_row_nan(backend: str, bad: int, weighted: bool) -> None:
    logits = randn(3, 9)
    target = torch.tensor([1, bad, 2])
    weight = randn(9, seed=1).abs() if weighted else None
    kwargs: dict[str, Any] = {"target": target, "weight": weight, "backend": backend}
    loss = ops.cross_entropy(logits, reduction="none", **kwargs)
    assert loss.isnan().tolist() == [False, True, False]
    d = gradient(ops.cross_entropy, logits, 1.0, reduction="none", **kwargs)
    assert d.isnan().all(-1).tolist() == d.isnan().any(-1).tolist() == [False, True, False]
    over = logits.clone()
    assert ops.cross_entropy_(over, **kwargs).isnan().tolist() == [False, True, False]
    assert over.isnan().all(-1).tolist() == over.isnan().any(-1).tolist() == [False, True, False]
    assert ops.cross_entropy(logits, **kwargs).isnan()
    # The same value as `ignore_index` is a row that is left out, not a mistake.
    kept = torch.tensor([1, 0, 2])
    expected = formula(logits, kept, weight, reduction="none") * torch.tensor([1, 0, 1])
    close(ops.cross_entropy(logits, reduction="none", ignore_index=bad, **kwargs), expected, logits, 4.0)


def test_labels_of_any_integer_dtype_and_stride(backend: str) -> None:
    logits, target = randn(4, 5, 11), torch.randint(0, 11, (5, 4), generator=torch.Generator().manual_seed(0)).t()
    expected = formula(logits, target)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        close(ops.cross_entropy(logits, target.to(dtype), backend=backend), expected, logits)
    one = logits[0, 0]
    close(ops.cross_entropy(one, torch.tensor(3), backend=backend), F.cross_entropy(one.double(), torch.tensor(3)), one)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("classes", [100, 300])  # the latter are more than either dtype can say
def test_weights_of_classes_that_labels_cannot_name(backend: str, dtype: torch.dtype, classes: int) -> None:
    logits, weight = randn(4, classes), randn(classes, seed=1).abs()
    target = torch.tensor([1, 99, 7, 0], dtype=dtype)
    expected = weight.double()[[1, 99, 0]].sum()
    assert abs(ops.kept_weight(target, weight, 7) - expected) <= 3 * F32 * expected
    kwargs: dict[str, Any] = {"weight": weight, "ignore_index": 7}
    got = ops.cross_entropy(logits, target, backend=backend, **kwargs)
    close(got, formula(logits, target.long(), **kwargs), logits, 4.0)


def test_kept_labels_are_counted_exactly() -> None:
    target = torch.zeros((), dtype=torch.int64).expand(2**24 + 3)  # f32 has no such number
    assert ops.kept_weight(target).item() == 2**24 + 3
    assert ops.kept_weight(target, ignore_index=0).item() == 0


def test_ignore_index_that_is_a_class(backend: str) -> None:
    logits, target = randn(5, 6), torch.tensor([0, 3, 3, 5, 1])
    kwargs: dict[str, Any] = {"target": target, "ignore_index": 3, "label_smoothing": 0.2}
    close(ops.cross_entropy(logits, backend=backend, **kwargs), F.cross_entropy(logits.double(), **kwargs), logits)
    d = gradient(ops.cross_entropy, logits, 1.0, backend=backend, **kwargs)
    assert not d[1:3].any()
    close(d, gradient(F.cross_entropy, logits.double(), 1.0, **kwargs), logits)


@pytest.mark.parametrize("options", [{}, {"weight": 1, "label_smoothing": 1, "softcap": 1}], ids=["plain", "all"])
def test_no_label_is_kept(backend: str, options: dict[str, int]) -> None:
    logits, target = randn(3, 8), torch.full((3,), -100)
    kwargs = {"target": target, "backend": backend, **(chosen(options, 8) if options else {})}
    assert ops.cross_entropy(logits, **kwargs).isnan()
    assert ops.cross_entropy(logits, reduction="sum", **kwargs) == 0
    assert not ops.cross_entropy(logits, reduction="none", **kwargs).any()
    for reduction, upstream in itertools.product(("mean", "sum", "none"), (1.0, math.nan, math.inf)):
        d = gradient(ops.cross_entropy, logits, upstream, reduction=reduction, **kwargs)
        assert torch.equal(d, torch.zeros_like(d)), reduction
    over = torch.full_like(logits, math.nan)
    assert not ops.cross_entropy_(over, scale=math.inf, **kwargs).any()
    assert not over.any()


REDUCED = ("mean", "sum")


@pytest.mark.parametrize("options", [{}, {"weight": 1, "label_smoothing": 1}], ids=["plain", "all"])
def test_ignored_rows_of_any_logits(backend: str, options: dict[str, int]) -> None:
    """The loss is 0 everywhere. The derived gradient is torch's, 0 times a softmax; in place it is 0 everywhere."""
    inf, nan = math.inf, math.nan
    rows = [[1.0, 2.0, 3.0, 4.0], [1.0, -inf, 3.0, 4.0], [1.0, nan, 3.0, 4.0], [1.0, inf, 3.0, 4.0], [-inf] * 4]
    logits, target = torch.tensor([*rows, rows[0]]), torch.tensor([-100] * 5 + [2])
    kwargs: dict[str, Any] = {"target": target, "backend": backend, **(chosen(options, 4) if options else {})}
    mean, own = (ops.cross_entropy(logits[5:], **{**kwargs, "target": target[5:], "reduction": r}) for r in REDUCED)
    assert torch.equal(ops.cross_entropy(logits, **kwargs), mean)
    assert ops.cross_entropy(logits, reduction="none", **kwargs).tolist() == [0.0] * 5 + [own]
    d = gradient(ops.cross_entropy, logits, 1.0, **kwargs)
    of_torch = gradient(F.cross_entropy, logits, 1.0, target=target)
    assert not d[:2].any() and not of_torch[:2].any()
    assert d[2:5].isnan().all() and of_torch[2:5].isnan().all()
    over = logits.clone()
    ops.cross_entropy_(over, **kwargs)
    assert not over[:5].any() and over[5].any() and d[5].any()


def test_no_rows(backend: str) -> None:
    logits, target = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    assert ops.cross_entropy(logits, target, backend=backend).isnan()
    assert ops.cross_entropy(logits, target, reduction="sum", backend=backend) == 0
    assert ops.cross_entropy(logits, target, reduction="none", backend=backend).shape == (0,)
    assert gradient(ops.cross_entropy, logits, 1.0, target=target, backend=backend).shape == (0, 8)
    assert ops.cross_entropy_(logits, target, backend=backend).shape == (0,)


def test_two_losses_of_the_same_logits_leave_them_unchanged(backend: str) -> None:
    logits, target = randn(4, 50).requires_grad_(), labels(4, 50)
    before = logits.detach().clone()
    first = ops.cross_entropy(logits, target, backend=backend)
    second = ops.cross_entropy(logits, target.where(target < 0, 0), reduction="sum", backend=backend)
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    assert torch.equal(logits.detach(), before)
    x = before.double().requires_grad_()
    (2 * formula(x, target) + formula(x, target.where(target < 0, 0), reduction="sum")).backward()
    assert logits.grad is not None
    assert x.grad is not None
    close(logits.grad, x.grad, before, 8.0)


def test_strides(backend: str) -> None:
    logits = randn(21, 6, 3)[::2].permute(1, 2, 0)  # classes far apart in memory
    assert not logits.is_contiguous()
    target = torch.randint(0, 11, (6, 3), generator=torch.Generator().manual_seed(0))
    expected = gradient(formula, logits.double(), 1.0, target=target)
    close(ops.cross_entropy(logits, target, backend=backend), formula(logits, target), logits)
    x = logits.detach().requires_grad_()
    ops.cross_entropy(x, target, backend=backend).backward()
    assert x.grad is not None
    close(x.grad, expected, logits)
    around = torch.full((23, 8, 5), 7.0)
    over = around[1:22:2, 1:7, 1:4].permute(1, 2, 0)
    over.copy_(logits)
    ops.cross_entropy_(over, target, 1 / 18, backend=backend)
    close(over, expected, logits)
    over.fill_(7.0)
    assert torch.equal(around, torch.full_like(around, 7.0)), "an element beside the logits was written"


def test_in_place_and_autograd(backend: str) -> None:
    logits, target = randn(3, 7).requires_grad_(), torch.tensor([0, 1, 2])
    with pytest.raises(kgen.ArgumentError, match="require grad"):
        ops.cross_entropy_(logits, target, backend=backend)
    with torch.no_grad():
        ops.cross_entropy_(logits, target, backend=backend)
    x = randn(3, 7).requires_grad_()
    doubled = x * 2
    squared = doubled.square()  # saves `doubled`
    ops.cross_entropy_(doubled.detach(), target, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


def test_the_derived_gradient_compares_with_the_index() -> None:
    arguments = {"logits": randn(3, 7), "target": torch.tensor([0, 1, 2])}
    derived = derived_of(call(shipped("cross_entropy.kdsl"), "cross_entropy", arguments), frozenset({"logits"}))
    assert "where(v == t, " in derived.backward_text
    assert derived.residuals == ("saved_top", "saved_total", "saved_lse")


X, T = torch.zeros(2, 5), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": torch.zeros(2, 5)}, "target .* integer"),
        ({"target": torch.zeros(2, dtype=torch.bool)}, "target .* integer"),
        ({"target": [0, 1]}, "target"),
        ({"target": torch.tensor([0, 1, 2])}, r"target .*\(2,\).*\(3,\)"),
        ({"target": T[:, None]}, "target"),
        ({"reduction": "avg"}, "reduction"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"label_smoothing": math.nan}, "label_smoothing"),
        ({"label_smoothing": "a"}, "label_smoothing must be a number, got 'a'"),
        ({"label_smoothing": None}, "label_smoothing must be a number, got None"),
        ({"z_loss": "a"}, "z_loss must be a number, got 'a'"),
        ({"softcap": [1.0]}, "softcap must be a number"),
        ({"softcap": torch.ones(2)}, "softcap must be a number"),
        ({"z_loss": math.inf}, "z_loss"),
        ({"softcap": 0.0}, "softcap"),
        ({"weight": torch.ones(4)}, "V"),
        ({"weight": 2.0}, "weight"),
        ({"ignore_index": 0.5}, "ignore_index"),
        ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, "logits"),
        ({"logits": torch.tensor(1.0)}, "logits"),
        ({"logits": None}, "logits"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    ops.cross_entropy(X, T)  # a call that is recognised by the next has nothing that these need
    with pytest.raises(kgen.KgenError, match=message) as caught:
        ops.cross_entropy(**{"logits": X, "target": T, **arguments})
    assert "\n" not in str(caught.value)


AROUND: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "gradients": lambda x, t: ops.cross_entropy(x.clone().requires_grad_(), t),
    "a backend that there is not": lambda x, t: ops.cross_entropy(x, t, backend="none"),
    "make_fx": lambda x, t: make_fx(lambda x, t: ops.cross_entropy(x, t))(x, t),
    "vmap": lambda x, t: torch.func.vmap(ops.cross_entropy)(x[None], t[None]),
    "grad": lambda x, t: torch.func.grad(ops.cross_entropy)(x, t),
    "meta": lambda x, t: ops.cross_entropy(x.to("meta"), t.to("meta")),
}


@pytest.mark.parametrize("around", AROUND)
def test_labels_that_do_not_fit_are_named_first(around: str) -> None:
    with pytest.raises(kgen.ArgumentError, match=r"cross_entropy: target must have the shape of logits without .*3"):
        AROUND[around](X, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(2, 1)])
def test_a_scale_that_does_not_fit(scale: torch.Tensor) -> None:
    with pytest.raises(kgen.ArgumentError, match=r"cross_entropy_: scale .*one element a row"):
        ops.cross_entropy_(X.clone(), T, scale)
    with pytest.raises(kgen.ArgumentError, match=r"z_scale .*one element a row"):
        ops.cross_entropy_(X.clone(), T, z_scale=scale)
