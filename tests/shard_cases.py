"""Arguments and independent formulas for the kernels of ops/parallel_linear_cross_entropy.kdsl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[int, int, torch.dtype, torch.Generator], dict[str, Any]]


def shard(*, padded: bool = False, weighted: bool = False, in_place: bool = False, **scalars: Any) -> Make:
    """Logits of the middle one of three shards, and labels of all. `padded`: the last third of it are no classes."""

    def make(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Any]:
        classes = 2 * n - n // 3 if padded else 3 * n
        labels = torch.randint(0, classes, (m,), generator=g, device=g.device)
        labels[1::7] = -100
        logits = 2 * torch.randn(m, n, generator=g, device=g.device, dtype=dtype)
        made: dict[str, Any] = {"logits": logits, "target": labels, "first": n, "classes": classes}
        if weighted:
            made["weight"] = torch.rand(classes, generator=g, device=g.device) + 0.25
        if in_place:
            made |= {name: torch.randn(m, generator=g, device=g.device) for name in ("scale", "z_scale")}
            made |= _sums(m, g)
            if weighted:
                made["weights"] = made["weight"].sum()
        return made | scalars

    return make


def sums(*, weighted: bool = False, **scalars: Any) -> Make:
    """What the ranks have of each row once they met."""

    def make(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> dict[str, Any]:
        labels = torch.randint(0, n, (m,), generator=g, device=g.device)
        labels[1::7] = -100
        made: dict[str, Any] = {**_sums(m, g), "target": labels, "classes": n}
        if weighted:
            made["weight"] = torch.rand(n, generator=g, device=g.device) + 0.25
            made["weights"] = made["weight"].sum()
        return made | scalars

    return make


def _sums(m: int, g: torch.Generator) -> dict[str, Any]:
    parts = torch.randn(4, m, generator=g, device=g.device)
    parts[0] = parts[0].abs() + 1.0
    parts[1] = 1.0
    parts[1, 2::11] = 0.0  # a label that no shard has
    return {"top": 5.0 + torch.randn(m, generator=g, device=g.device), "parts": parts}


def row_formula(
    logits: Any, target: Any, first: int, classes: int, weight: Any = None, softcap: float = 1.0,
    smoothed: bool = False, capped: bool = False,
) -> Any:  # fmt: skip
    """Top, sum of exponentials, whether the label is here, its logit, and the weighed sum of logits."""
    x = softcap * torch.tanh(logits / softcap) if capped else logits
    n = min(x.shape[-1], classes - first)
    x = x[:, :n]
    here = (target >= first) & (target < first + n)
    label = x.gather(-1, (target - first).clamp(0, n - 1)[:, None])[:, 0].where(here, 0.0)
    top = x.amax(-1)
    w = 1.0 if weight is None else weight[first : first + n]
    every = (w * x).sum(-1) if smoothed else torch.zeros_like(top)
    return top, (x - top[:, None]).exp().sum(-1), here.to(x.dtype), label, every


def parts_formula(own: Any, top: Any, total: Any, here: Any, label: Any, all: Any) -> Any:
    """The four of them in rows."""
    return torch.stack([total * (own - top).exp(), here, label, all])


def joined_formula(
    top: Any, parts: Any, target: Any, classes: int, weight: Any = None, weights: Any = None,
    label_smoothing: float = 0.0, z_loss: float = 0.0, smoothed: bool = False,
) -> Any:  # fmt: skip
    """The loss of each row and its z-loss."""
    kept = target != -100
    lse = top + parts[0].log()
    w_t = 1.0 if weight is None else weight[target.where(kept, 0)]
    loss = w_t * (lse - parts[2])
    if smoothed:
        spread = (classes if weights is None else weights) * lse - parts[3]
        loss = (1.0 - label_smoothing) * loss + label_smoothing * spread / classes
    nan = torch.full_like(lse, torch.nan)
    return tuple(v.where(parts[1] == 1.0, nan).where(kept, 0.0) for v in (loss, z_loss * lse**2))
