"""The cross entropy of a linear layer in float64, and how far a chunked one may be from it.

Bounds. A logit is a sum of H products, rounded to the dtype it is stored in: off by D at most. So is the logarithm of a
sum of exponentials, and a probability by a factor exp(2 D). The gradient of a logit is rounded where it is stored, and
a gradient of x, w or the bias is a sum over such gradients, off by what its terms are and by its own roundings. What
the kernel adds to its exact result is that of tests/test_cross_entropy.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

F32 = 2.0**-24
HALF_UNIT = {torch.float32: F32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
# Half the smallest number above zero: what rounds to zero.
TINY = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float64: 0.0}
ROUNDINGS = 10  # of a sum over chunks under `auto`: eight chunks, the factor of the backward pass and one to spare


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Case:
    """Arguments of one call; `options` are those of `linear_cross_entropy` by name."""

    x: torch.Tensor
    w: torch.Tensor
    target: torch.Tensor
    bias: Any  # a tensor or None
    options: dict[str, Any]

    @property
    def floats(self) -> list[torch.Tensor]:
        """What may require grad."""
        return [t for t in (self.x, self.w, self.bias) if t is not None]


def case(
    rows: int, width: int, classes: int, dtype: torch.dtype = torch.float32, *, bias: float = 0.0, **options: Any
) -> Case:
    """Random arguments, one label in four left out. `bias` is its standard deviation; 0: there is none."""
    x, w = randn(rows, width, seed=1).to(dtype), (randn(classes, width, seed=2) / width**0.5).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(3))
    target[1::4] = -100
    return Case(x, w, target, (bias * randn(classes, seed=4)).to(dtype) if bias else None, options)


def formula(c: Case, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The definition, term by term, in the dtype of x."""
    o = {"reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "ignore_index": -100, **c.options}
    z = x @ w.T if bias is None else x @ w.T + bias
    if o["softcap"] is not None:
        z = o["softcap"] * torch.tanh(z / o["softcap"])
    classes = z.shape[-1]
    class_weight = _weights(o.get("class_weight"), (classes,))
    token_weight = _weights(o.get("token_weight"), tuple(c.target.shape))
    kept = c.target != o["ignore_index"]
    t = c.target.where(kept, 0)
    lse = torch.logsumexp(z, -1)
    nll = class_weight[t] * (lse - z.gather(-1, t[..., None])[..., 0])
    smooth = (class_weight * (lse[..., None] - z)).sum(-1) / classes
    e = o["label_smoothing"]
    ce = (token_weight * ((1 - e) * nll + e * smooth)).where(kept, 0.0)
    penalty = (token_weight * o["z_loss"] * lse**2).where(kept, 0.0)
    if o["reduction"] == "none":
        return ce + penalty
    if o["reduction"] == "sum":
        return ce.sum() + penalty.sum()
    mass, count = (token_weight * class_weight[t]).where(kept, 0.0).sum(), token_weight.where(kept, 0.0).sum()
    return ce.sum() / mass + (penalty.sum() / count if o["z_loss"] else 0.0)


def _weights(given: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64) if given is None else given.double()


@dataclass
class Judged:
    """What is right, and by how much each may be off: the loss, then the gradients of x, w and the bias."""

    expected: list[torch.Tensor]
    bound: list[torch.Tensor]


def judge(c: Case, upstream: torch.Tensor, stored: torch.dtype | None = None, *, roundings: int = ROUNDINGS) -> Judged:
    """The loss and its gradients in float64 with their bounds. `stored` is the dtype of logits, that of x without it;
    `roundings` are those of the sum that is the gradient of w."""
    stored = stored or c.x.dtype
    u, tiny = HALF_UNIT[stored], TINY[stored]
    x, w = c.x.detach().double(), c.w.detach().double()
    b = None if c.bias is None else c.bias.detach().double()
    lead, rows = c.target.shape, c.target.numel()
    exact = [t.clone().requires_grad_() for t in (x, w, b) if t is not None]
    loss = formula(c, exact[0], exact[1], exact[2] if b is not None else None)
    gradients = torch.autograd.grad(loss, exact, upstream.double())
    x = x.reshape(rows, -1)

    # Logits and what they are off by.
    z = x @ w.T if b is None else x @ w.T + b
    size = x.abs() @ w.abs().T + (0.0 if b is None else b.abs())
    width, classes = x.shape[1], w.shape[0]
    # Operands that are converted first bring a rounding each.
    converted = sum(HALF_UNIT[stored] for t in (c.w, c.bias) if t is not None and t.dtype != stored)
    d = u * z.abs() + ((width + 4) * F32 + converted) * size + tiny
    worst = d.amax(-1) if classes else d.sum(-1)

    # How much a row counts in the result, by what multiplies probabilities.
    o = {"reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "ignore_index": -100, **c.options}
    leaf = z.clone().requires_grad_()
    unit = torch.eye(classes, dtype=torch.float64)
    of_logits = formula(Case(c.x, c.w, c.target, None, c.options), leaf.reshape(*lead, classes), unit, None)
    (exact_g,) = torch.autograd.grad(of_logits, leaf, upstream.double())
    kept = (c.target != o["ignore_index"]).reshape(-1)
    t = c.target.reshape(-1).where(kept, 0)
    cw = _weights(o.get("class_weight"), (classes,))
    tw = _weights(o.get("token_weight"), tuple(lead)).reshape(-1)
    up = upstream.double().reshape(-1).expand(rows) if o["reduction"] == "none" else upstream.double()
    mass = (tw * cw[t]).where(kept, 0.0).sum() if o["reduction"] == "mean" else torch.tensor(1.0)
    count = tw.where(kept, 0.0).sum() if o["reduction"] == "mean" else torch.tensor(1.0)
    e, zl = o["label_smoothing"], abs(o["z_loss"])
    capped = z if o["softcap"] is None else o["softcap"] * torch.tanh(z / o["softcap"])
    lse = torch.logsumexp(capped, -1) if classes else z.sum(-1)
    p = torch.exp(capped - lse[:, None])
    share = (tw.abs() * ((1 - e) * cw[t].abs() + e * cw.abs().mean()) / mass.abs()).where(kept, 0.0)
    share_z = (tw.abs() * zl / count.abs()).where(kept, 0.0)
    spread = 2 * z.abs().amax() + torch.log(torch.tensor(float(classes))) + 1 if z.numel() else torch.tensor(1.0)

    own = F32 * (classes + 64)
    row = share * (2 * worst + own * spread) + share_z * (2 * lse.abs() + worst) * (worst + own * spread)
    value = loss.detach()
    off = row.reshape(lead) if o["reduction"] == "none" else row.sum()
    bounds = [off + (rows + 16) * F32 * (value.abs() + (share * spread).sum()) + F32 * value.abs()]

    k = up.abs() * (share + share_z * 2 * (lse.abs() + worst))
    g_off = k[:, None] * p * torch.expm1(2 * worst)[:, None] + (up.abs() * share_z * 2 * worst)[:, None] * p
    if o["softcap"] is not None:
        g_off += k[:, None] * (p + 1.0) * (4 * worst / o["softcap"])[:, None]
    g_off += (own + (rows + 32) * F32) * (k[:, None] * (p + own) + exact_g.abs())
    g_off += u * (exact_g.abs() + g_off)
    if stored == torch.float16:
        # Rows are scaled before they are rounded, by what bounds them all: a fourth root of at most `rows` times the
        # power of the largest. fused_linear_cross_entropy.kdsl derives what bounds one.
        ratio = (mass / count).abs().nan_to_num(0.0, 0.0, 0.0)
        most = 2 * zl * ratio * (45.0 + (65504.0 if o["softcap"] is None else o["softcap"]))
        of_row = tw.abs() * ((1 - e) * cw[t].abs() + e * cw.abs().mean() + most) * up.abs() / mass.abs()
        of_row = of_row.where(kept, 0.0).nan_to_num(0.0, 0.0, 0.0)
        tiny = tiny * (of_row.max() if rows else 0.0) * max(rows, 1) ** 0.25 / 32768.0
    g_off += tiny
    g_off, g = g_off.where(kept[:, None], 0.0), exact_g.abs()
    x_size, w_size = g @ w.abs(), g.T @ x.abs()
    dtypes = [c.x.dtype, c.w.dtype]
    slack = (
        g_off @ w.abs() + ((classes + 16) * F32 + converted) * x_size,
        g_off.T @ x.abs() + (rows + 16) * F32 * w_size + (roundings - 1) * HALF_UNIT[c.w.dtype] * w_size,
    )
    for i, s in enumerate(slack):
        exact_i = gradients[i].abs().reshape(s.shape)
        # The factor of the backward pass is multiplied into what was rounded before, and rounded again.
        bounds.append((3 * HALF_UNIT[dtypes[i]] * (exact_i + s) + s + TINY[dtypes[i]]).reshape(gradients[i].shape))
    if c.bias is not None:
        s = g_off.sum(0) + (rows + 16) * F32 * g.sum(0)
        bounds.append(3 * HALF_UNIT[c.bias.dtype] * (gradients[2].abs() + s) + s + TINY[c.bias.dtype])
    return Judged([value, *gradients], bounds)


def excess(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error in units of its bound; infinite where only one of the two is NaN."""
    assert actual.shape == expected.shape
    same = (actual.isnan() & expected.isnan()) | (actual == expected)
    off = ((actual.double() - expected).abs() / bound).where(~same, 0.0)
    return off.nan_to_num(float("inf")).max().item() if off.numel() else 0.0
