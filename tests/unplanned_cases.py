"""Inputs and independent float64 formulas for `kernels/unplanned.kdsl`.

Each case makes its arguments from a size class and a dtype; its formula is plain torch on float64 copies and shares
nothing with the language, so a mistake in the checker or the interpreter is found as well as one in an emitter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Arguments = dict[str, Any]
LOW = torch.iinfo(torch.int64).min

# (rows, columns): one element; below a warp; ragged; around a vector; a power of two.
SIZES = ((1, 1), (3, 7), (2, 33), (5, 64), (4, 129))


@dataclass(frozen=True)
class Case:
    """One kernel: `make(rows, columns, dtype, generator)` gives its arguments, `formula(**arguments)` its outputs."""

    kernel: str
    make: Callable[[int, int, torch.dtype, torch.Generator], Arguments]
    formula: Callable[..., tuple[torch.Tensor, ...]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    sizes: tuple[tuple[int, int], ...] = SIZES
    differentiable: bool = True


def _randn(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


def _ints(g: torch.Generator, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=g).to(dtype)


def _bools(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=g) < 0.6


def _rows(*names: str, **scalars: float) -> Callable[..., Arguments]:
    """Arguments that are all `[rows, columns]` tensors of the dtype, and fixed scalars."""
    return lambda m, n, dt, g: {name: _randn(g, m, n, dtype=dt) for name in names} | scalars


def _group_norm(x, w, b, G, eps=1e-5):
    n, c, s = x.shape
    y = x.reshape(n, G, -1)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + eps).sqrt()
    return (y.reshape(n, c, s) * w[:, None] + b[:, None],)


def _group_rms(x, eps=1e-6):
    y = x.reshape(*x.shape[:-1], -1, 128)
    return ((y / (y.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(x.shape),)


def _standardize(x):
    mu, var = x.mean(-1), x.var(-1, correction=0)
    return (x - mu[..., None]) / (var[..., None] + 1e-3).sqrt(), mu, var


def _huber(e, delta):
    return torch.where(e.abs() <= delta, 0.5 * e * e, delta * (e.abs() - 0.5 * delta))


def _kl(p, q):
    lp, lq = p.log_softmax(-1), q.log_softmax(-1)
    return ((lp.exp() * (lp - lq)).sum(-1),)


def _cosine(a, b):
    return ((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-6),)


def _zoo(x):
    a = x.abs() + 0.5
    y = a.log() + a.log1p() * (-a).expm1() + (-a).exp2() + a.log2() + a**1.5 + a**2 + a.sin() * a.cos()
    # Not `clamp`, which gives all of the gradient at the limit.
    return (y + torch.erf(x) + torch.minimum(a, torch.ones_like(a)),)


def _gap(x):
    # Not `max(-1)`, which gives the gradient of equal elements to one of them: in some of 16411 rows of 31 normal f32
    # values the second and the third are equal.
    best = x.argmax(-1)
    rest = x.scatter(-1, best[..., None], -torch.inf)
    return best, x.amax(-1) - rest.amax(-1)


def _sums(x):
    i, j = x.shape[-2:]
    d = x - x.sum(-1, keepdim=True) / j - x.sum(-2, keepdim=True) / i
    return x.sum(-1), x.sum(-2), d


def _affine(x, scale=None, shift=None, negate=False, power=1):
    a = x**power
    a = a if scale is None else a * scale
    if shift is None:
        return (a,)
    return (a - shift if negate else a + shift,)


def _adamw(p, g, m, v, lr, b1=0.9, b2=0.95, eps=1e-8, decay=0.1, c1=1.0, c2=1.0):
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return p * (1 - lr * decay) - lr * (m / c1) / ((v / c2).sqrt() + eps), m, v


def _quantize(x):
    s = x.abs().amax(-1).clamp(min=1e-12) / 127
    return (x / s[..., None]).round().to(torch.int8), s


def _template(half, float, **scalars):
    x = half * float + scalars.get("__i", 2.0)
    total = x.sum(-1)
    return x - total[..., None] / half.shape[-1], total


CASES: tuple[Case, ...] = (
    Case(
        "group_norm",
        lambda m, n, dt, g: {
            "x": _randn(g, m, 6, n, dtype=dt), "w": _randn(g, 6, dtype=dt), "b": _randn(g, 6, dtype=dt), "G": 3,
        },
        _group_norm,
    ),
    Case(
        "group_rms_128",
        lambda m, n, dt, g: {"x": _randn(g, m, 128 * (1 + n % 3), dtype=dt)},
        _group_rms,
    ),
    Case(
        "l2_normalize_middle",
        lambda m, n, dt, g: {"x": _randn(g, m, n, 3, dtype=dt)},
        lambda x: (x / x.norm(dim=1, keepdim=True).clamp(min=1e-6),),
    ),
    Case("standardize", _rows("x"), _standardize),
    Case(
        "minmax_scale",
        _rows("x"),
        lambda x: ((x - x.amin(-1, True)) / (x.amax(-1, True) - x.amin(-1, True) + 1e-3),),
    ),
    Case("whole_mean", lambda m, n, dt, g: {"x": _randn(g, n, dtype=dt)}, lambda x: (x.mean(),)),
    Case(
        "masked_softmax",
        lambda m, n, dt, g: {
            "x": _randn(g, 2, m, 3, n, dtype=dt), "keep": _bools(g, 2, n) | (torch.arange(n) == 0), "scale": 0.5,
        },
        lambda x, keep, scale: ((x * scale).masked_fill(~keep[:, None, None], -torch.inf).softmax(-1),),
    ),
    Case(
        "causal_softmax",
        lambda m, n, dt, g: {"x": _randn(g, m, n, n, dtype=dt)},
        lambda x: (x.masked_fill(~torch.ones_like(x, dtype=torch.bool).tril(), -torch.inf).softmax(-1),),
    ),
    Case("lse_and_z", _rows("x"), lambda x: (x.logsumexp(-1), x.logsumexp(-1).square())),
    Case("kl_rows", _rows("p", "q"), _kl),
    Case(
        "huber_loss",
        lambda m, n, dt, g: {"pred": _randn(g, m, n, dtype=dt), "target": _randn(g, m, n, dtype=dt), "delta": 0.75},
        lambda pred, target, delta: (_huber(pred - target, delta),),
    ),
    Case(
        "huber_rows",
        _rows("pred", "target", delta=0.75),
        lambda pred, target, delta: (_huber(pred - target, delta).mean(-1),),
    ),
    Case("cosine_rows", _rows("a", "b"), _cosine),
    Case("softcap", _rows("x", cap=3.0), lambda x, cap: (cap * (x / cap).tanh(),)),
    Case("function_zoo", _rows("x"), _zoo),
    Case(
        "dropout_residual",
        lambda m, n, dt, g: {
            "x": _randn(g, m, n, dtype=dt), "r": _randn(g, m, n, dtype=dt), "keep": _bools(g, m, n), "p": 0.25,
        },
        lambda x, r, keep, p: (r + torch.where(keep, x / (1 - p), 0.0),),
    ),
    Case(
        "mixed_precision",
        lambda m, n, dt, g: {"x": _randn(g, m, n, dtype=dt), "w": _randn(g, n, dtype=torch.float64)},
        lambda x, w: (x * w, (x * w).sum(-1)),
    ),
    Case(
        "two_gathers",
        lambda m, n, dt, g: {
            "words": _randn(g, 11, n, dtype=dt), "places": _randn(g, 5, n, dtype=dt),
            "word": _ints(g, 0, 11, m), "place": _ints(g, 0, 5, m, dtype=torch.int32),
        },
        lambda words, places, word, place: (words[word] + places[place.long()],),
    ),
    Case(
        "pick",
        lambda m, n, dt, g: {"x": _randn(g, m, n, dtype=dt), "t": _ints(g, 0, n, m)},
        lambda x, t: (x.gather(-1, t[:, None])[:, 0],),
    ),
    Case(
        "shuffle_columns",
        lambda m, n, dt, g: {
            "x": _randn(g, m, n, dtype=dt), "order": torch.randperm(n, generator=g).to(torch.int32),
        },
        lambda x, order: (x[:, order.long()],),
    ),
    Case(
        "floor_division",
        lambda m, n, dt, g: {
            "a": _ints(g, -50, 50, m, n, dtype=torch.int32),
            "b": _ints(g, 1, 9, m, n, dtype=torch.int32) * (2 * _ints(g, 0, 2, m, n, dtype=torch.int32) - 1),
        },
        lambda a, b: (a // b, a % b),
        dtypes=(torch.int32,),
        differentiable=False,
    ),
    Case(
        "floor_division_64",
        lambda m, n, dt, g: {"a": _ints(g, -(2**40), 2**40, m, n)},
        lambda a: (a // 7, a % -7),
        dtypes=(torch.int64,),
        differentiable=False,
    ),
    Case("repeat_each", lambda m, n, dt, g: {"x": _randn(g, n, dtype=dt)}, lambda x: (x.repeat_interleave(3),)),
    Case(
        "rotate_columns",
        lambda m, n, dt, g: {"x": _randn(g, m, n, dtype=dt), "K": 3},
        lambda x, K: (x.roll(-K, -1),),
    ),
    Case("reverse", _rows("x"), lambda x: (x.flip(-1),)),
    Case(
        "pool_pairs",
        _rows("x"),
        lambda x: (torch.maximum(x[..., 0 : x.shape[-1] // 2 * 2 : 2], x[..., 1::2]),),
        sizes=((3, 8), (2, 33), (4, 130)),
    ),
    Case("argmax_and_gap", _rows("x"), _gap, sizes=SIZES[1:]),
    Case("absmax_quantize", _rows("x"), _quantize, differentiable=False),
    Case(
        "dequantize",
        lambda m, n, dt, g: {"q": _ints(g, -127, 128, m, n, dtype=torch.int8), "scale": _randn(g, m).abs()},
        lambda q, scale: (q * scale[:, None],),
        dtypes=(torch.int8,),
    ),
    Case(
        "flags",
        _rows("x", limit=-0.5),
        lambda x, limit: ((x > limit).any(-1), (x > limit).all(-1), (x > limit).sum(-1)),
        differentiable=False,
    ),
    Case("product_rows", _rows("x"), lambda x: ((1 + 0.01 * x).prod(-1),)),
    Case(
        "two_rows",
        lambda m, n, dt, g: {"a": _randn(g, m, n, dtype=dt), "b": _randn(g, m, 2 * n + 1, dtype=dt)},
        lambda a, b: (a.mean(-1) - b.amax(-1),),
    ),
    Case(
        "outer",
        lambda m, n, dt, g: {"a": _randn(g, m, 5, dtype=dt), "b": _randn(g, m, n, dtype=dt)},
        lambda a, b: (a[..., :, None] * b[..., None, :],),
    ),
    Case(
        "bilinear",
        lambda m, n, dt, g: {
            "a": _randn(g, m, n, dtype=dt), "w": _randn(g, n, 6, dtype=dt), "b": _randn(g, m, 6, dtype=dt),
        },
        lambda a, w, b: (torch.einsum("mi,ij,mj->m", a, w, b),),
    ),
    Case("row_and_column_sums", lambda m, n, dt, g: {"x": _randn(g, m, 6, n, dtype=dt)}, _sums),
    Case(
        "permute",
        lambda m, n, dt, g: {"x": _randn(g, m, 3, n, dtype=dt)},
        lambda x: (x.permute(2, 0, 1),),
    ),
    Case("affine", _rows("x"), _affine),
    Case(
        "affine",
        lambda m, n, dt, g: {
            "x": _randn(g, m, n, dtype=dt), "scale": _randn(g, n, dtype=dt), "shift": _randn(g, n, dtype=dt),
            "negate": True, "power": 2,
        },
        _affine,
    ),
    Case(
        "affine",
        lambda m, n, dt, g: {"x": _randn(g, m, n, dtype=dt).abs(), "shift": _randn(g, n, dtype=dt), "power": 3},
        _affine,
    ),
    Case("scale_", _rows("x", s=1.5), lambda x, s: (x * s,), differentiable=False),
    Case("softmax_", _rows("x"), lambda x: (x.softmax(-1),), differentiable=False),
    Case(
        "rotate_in_place_",
        lambda m, n, dt, g: {"x": _randn(g, m, n, dtype=dt), "K": 2},
        lambda x, K: (x.roll(-K, -1),),
        differentiable=False,
    ),
    Case(
        "adamw_",
        lambda m, n, dt, g: {
            "p": _randn(g, m, n, dtype=dt), "g": _randn(g, m, n, dtype=dt), "m": _randn(g, m, n),
            "v": _randn(g, m, n).square(), "lr": 1e-2,
        },
        _adamw,
        differentiable=False,
    ),
    Case(
        "template",
        lambda m, n, dt, g: {"half": _randn(g, m, n, dtype=dt), "float": _randn(g, n, dtype=dt)},
        _template,
    ),
)  # fmt: skip
