"""Arguments and independent formulas for the kernels that come with kgen, as `unplanned_cases` has them for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from shard_cases import joined_formula, parts_formula, row_formula, shard, sums

Arguments = dict[str, Any]
Make = Callable[[int, int, torch.dtype, torch.Generator], Arguments]


@dataclass(frozen=True)
class Shipped:
    """A kernel of `file` with `make(rows, width, dtype, generator)`, which gives its arguments on the generator's
    device, and `formula(**arguments)`, which gives its outputs in the arithmetic of the arguments (None: in place).

    `rounds`: the kernel rounds to the dtype in the middle, which the formula does not. `constant`: float inputs whose
    gradient is not derived. `heads`: the width is that of a head, of which there are several.
    """

    name: str
    file: str
    kernel: str
    make: Make
    formula: Callable[..., Any] | None
    rounds: bool = False
    constant: tuple[str, ...] = ()
    heads: bool = False
    differentiable: bool = True


def _randn(g: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    # A first draw of f32 may be as large as the result in f64: the 16-bit types are drawn as they are.
    return torch.randn(shape, generator=g, device=g.device, dtype=dtype)


def _tensors(rows: tuple[str, ...], columns: tuple[str, ...] = (), f32: tuple[str, ...] = (), **scalars: Any) -> Make:
    """Arguments `[rows, width]` and `[width]` of the dtype, or of f32, and fixed scalars."""

    def make(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> Arguments:
        dtypes = {name: torch.float32 if name in f32 else dtype for name in (*rows, *columns)}
        made: Arguments = {name: _randn(g, m, n, dtype=dtypes[name]) for name in rows}
        return made | {name: _randn(g, n, dtype=dtypes[name]) for name in columns} | scalars

    return make


def _rope(partial: bool = False, positions: bool = False, **scalars: Any) -> Make:
    def make(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> Arguments:
        d = max(n, 2)
        r = (d // 2 if partial else d) // 2 * 2
        table = max(m, 1) + 3
        angle = torch.rand(table, r, generator=g, device=g.device) * 6.28
        made: Arguments = {
            "q": _randn(g, 2, m, 3, d, dtype=dtype),
            "k": _randn(g, 2, m, 1, d, dtype=dtype),
            "cos": angle.cos().to(dtype),
            "sin": angle.sin().to(dtype),
        }
        if positions:
            made["positions"] = torch.randint(0, table, (2, m), generator=g, device=g.device)
        return made | scalars

    return make


def _classes(bad: bool = False, weighted: bool = False, in_place: bool = False, **scalars: Any) -> Make:
    """Logits and labels, some of them left out; `bad`: some out of range."""

    def make(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> Arguments:
        labels = torch.randint(0, n, (m,), generator=g, device=g.device)
        labels[1::7] = scalars.get("ignore_index", -100)
        if bad:
            for start, label in enumerate((n, -1, 2**40, -(2**63))):
                labels[2 + start :: 11] = label
        made: Arguments = {"logits": 2 * _randn(g, m, n, dtype=dtype), "target": labels}
        if in_place:
            made["scale"] = _randn(g, m, dtype=torch.float32)
        if weighted:
            made["weight"] = torch.rand(n, generator=g, device=g.device) + 0.25
            if in_place:
                made["z_scale"] = _randn(g, m, dtype=torch.float32)
        return made | scalars

    return make


def rms_formula(x: Any, w: Any = None, eps: float = 1e-6, offset: float = 0.0, round_first: bool = False) -> Any:
    """Root-mean-square normalisation without the rounding in the middle."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if w is None else y * (w + offset)


def _add_rms(x: Any, residual: Any, w: Any = None, **scalars: Any) -> Any:
    h = x + residual
    return rms_formula(h, w, **scalars), h


def layer_norm_formula(x: Any, w: Any = None, b: Any = None) -> Any:
    """Layer normalisation."""
    return F.layer_norm(x, (x.shape[-1],), w, b, 1e-5)


def rope_formula(q: Any, k: Any, cos: Any, sin: Any, positions: Any = None, interleaved: bool = False) -> Any:
    """Pairs of features turned as complex numbers."""
    at = torch.arange(q.shape[1], device=q.device).expand(q.shape[:2]) if positions is None else positions
    c, s = (t[at][:, :, None] for t in (cos, sin))
    r = cos.shape[-1]
    lo, hi = (slice(0, r, 2), slice(1, r, 2)) if interleaved else (slice(0, r // 2), slice(r // 2, r))
    second = lo if interleaved else hi  # where the tables are read for the second of a pair

    def turn(x: Any) -> Any:
        a = x[..., lo] * c[..., lo] - x[..., hi] * s[..., lo]
        b = x[..., hi] * c[..., second] + x[..., lo] * s[..., second]
        turned = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
        return torch.cat([turned, x[..., r:]], -1)

    return turn(q), turn(k)


def cross_entropy_formula(
    logits: Any, target: Any, weight: Any = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float = 1.0, smoothed: bool = False, capped: bool = False,
) -> Any:  # fmt: skip
    """The loss of each row and its z-loss; NaN where the label is out of range."""
    x = softcap * torch.tanh(logits / softcap) if capped else logits
    classes = x.shape[-1]
    kept = target != ignore_index
    t = target.where(kept, 0)
    valid = torch.where((t < 0) | (t >= classes), torch.nan, 1.0).to(x.dtype)
    t = t.clamp(0, classes - 1)
    w = torch.ones(classes, dtype=x.dtype, device=x.device) if weight is None else weight
    log_p = x.log_softmax(-1)
    loss = -w[t] * log_p.gather(-1, t[..., None])[..., 0]
    if smoothed:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * (w * log_p).sum(-1) / classes
    z = z_loss * torch.logsumexp(x, -1) ** 2
    return (loss * valid).where(kept, 0.0), (z * valid).where(kept, 0.0)


def _tokens(*vectors: str, scalars: tuple[str, ...] = (), labels: bool = True, **more: Any) -> Make:
    """What kernels of single tokens and of sums over them take: labels of `width` classes, f32 numbers a token (a class
    for `class_weight`), and f32 tensors of one positive element."""

    def make(m: int, n: int, dtype: torch.dtype, g: torch.Generator) -> Arguments:
        made: Arguments = {}
        if labels:
            made["target"] = torch.randint(0, n, (m,), generator=g, device=g.device)
            made["target"][1::7] = -100
        for name in vectors:
            made[name] = _randn(g, n if name == "class_weight" else m, dtype=torch.float32)
        for name in scalars:
            wide = torch.float64 if name == "total" else torch.float32
            made[name] = _randn(g, dtype=wide).abs() + 0.5
        return made | more

    return make


def _matrix(*scalars: str, name: str, dtype: torch.dtype | None = None) -> Make:
    def make(m: int, n: int, own: torch.dtype, g: torch.Generator) -> Arguments:
        made: Arguments = {name: _randn(g, m, n, dtype=dtype or own)}
        return made | {s: _randn(g, dtype=torch.float32) for s in scalars}

    return make


def _kept(target: Any, class_weight: Any, token_weight: Any) -> tuple[Any, Any]:
    """The weight of each token, without and with that of its class; 0 where the label is left out."""
    kept = target != -100
    a = torch.ones(target.shape, device=target.device) if token_weight is None else token_weight
    b = a if class_weight is None else a * class_weight[target.where(kept, 0)]
    return a.where(kept, 0.0), b.where(kept, 0.0)


def _mass(target: Any, class_weight: Any = None, token_weight: Any = None) -> Any:
    a, b = _kept(target, class_weight, token_weight)
    return b.sum(), a.sum()


def _powers(
    target: Any, mass: Any = None, count: Any = None, class_weight: Any = None, spread: Any = None,
    token_weight: Any = None, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 1.0,
    smoothed: bool = False, capped: bool = False,
) -> Any:  # fmt: skip
    kept = target != -100
    bound = torch.ones_like(target, dtype=torch.float64)
    if class_weight is not None:
        bound = class_weight.double()[target.where(kept, 0)].abs()
    if smoothed:
        bound = (1.0 - label_smoothing) * bound + label_smoothing * (bound if spread is None else spread)
    bound = bound + 2.0 * z_loss * (45.0 + (softcap if capped else 65504.0)) * (1.0 if mass is None else mass / count)
    bound = (bound if token_weight is None else bound * token_weight).where(kept, 0.0)
    return (bound**4).sum(), kept.sum()


def _factors(target: Any, mass: Any, count: Any, token_weight: Any = None, averaged: bool = True) -> Any:
    a = torch.ones(target.shape, device=target.device) if token_weight is None else token_weight
    return (a / mass, a / count) if averaged else (a, a)


def _narrow(target: Any, mass: Any, count: Any, total: Any, token_weight: Any = None, averaged: bool = True) -> Any:
    a = torch.ones(target.shape, device=target.device) if token_weight is None else token_weight
    a = a * 32768.0 / total**0.25
    return (a, a * mass / count) if averaged else (a, a)


def _weighed(losses: Any, z: Any, target: Any, token_weight: Any = None) -> Any:
    kept = target != -100
    a = 1.0 if token_weight is None else token_weight.where(kept, 0.0)
    return a * losses, a * z


_ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "smoothed": True, "capped": True}
_NLL, _LOSS_ = ("cross_entropy.kdsl", "cross_entropy"), ("cross_entropy.kdsl", "cross_entropy_")
_ADD, _RMS = ("add_rms_norm.kdsl", "add_rms_norm"), ("rms_norm.kdsl", "rms_norm")
_LN, _ROPE = ("layer_norm.kdsl", "layer_norm"), ("rope.kdsl", "rope")
_LINEAR, _MEANS = "fused_linear_cross_entropy.kdsl", ("mass", "count")
_SHARDS = "parallel_linear_cross_entropy.kdsl"
_INNER: dict[str, Any] = {"differentiable": False}  # steps of ops, whose gradients the ops have
# With positions several programs may read one row of a table, and its even and odd columns are read one by one.
_TABLES = {"constant": ("cos", "sin"), "heads": True}

SHIPPED: tuple[Shipped, ...] = (
    Shipped("rms_norm", *_RMS, _tensors(("x",), ("w",)), rms_formula),
    Shipped("rms_norm, no weight", *_RMS, _tensors(("x",)), rms_formula),
    Shipped("rms_norm, f32 weight and offset", *_RMS, _tensors(("x",), ("w",), ("w",), offset=1.0), rms_formula),
    Shipped("rms_norm, rounded first", *_RMS, _tensors(("x",), ("w",), round_first=True), rms_formula, rounds=True),
    Shipped("add_rms_norm", *_ADD, _tensors(("x", "residual"), ("w",)), _add_rms, rounds=True),
    Shipped("add_rms_norm, f32 stream", *_ADD, _tensors(("x", "residual"), ("w",), ("residual",)), _add_rms),
    Shipped("add_rms_norm, no weight", *_ADD, _tensors(("x", "residual")), _add_rms, rounds=True),
    Shipped("layer_norm", *_LN, _tensors(("x",), ("w", "b")), layer_norm_formula),
    Shipped("layer_norm, f32 weight", *_LN, _tensors(("x",), ("w",), ("w",)), layer_norm_formula),
    Shipped("layer_norm, no weight", *_LN, _tensors(("x",)), layer_norm_formula),
    Shipped("softmax", "softmax.kdsl", "softmax", _tensors(("x",)), lambda x: x.softmax(-1)),
    Shipped("log_softmax", "softmax.kdsl", "log_softmax", _tensors(("x",)), lambda x: x.log_softmax(-1)),
    Shipped("swiglu", "swiglu.kdsl", "swiglu", _tensors(("gate", "up")), lambda gate, up: F.silu(gate) * up),
    Shipped("geglu", "swiglu.kdsl", "geglu", _tensors(("gate", "up")), lambda gate, up: F.gelu(gate) * up),
    Shipped(
        "geglu_tanh", "swiglu.kdsl", "geglu_tanh", _tensors(("gate", "up")),
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    ),
    Shipped("rope", *_ROPE, _rope(), rope_formula, heads=True),
    Shipped("rope, partial", *_ROPE, _rope(partial=True), rope_formula, heads=True),
    Shipped("rope, interleaved, positions", *_ROPE, _rope(positions=True, interleaved=True), rope_formula, **_TABLES),
    Shipped("cross_entropy", *_NLL, _classes(), cross_entropy_formula),
    Shipped("cross_entropy, z-loss", *_NLL, _classes(z_loss=0.01, ignore_index=0), cross_entropy_formula),
    Shipped(
        "cross_entropy, smoothed", *_NLL, _classes(label_smoothing=0.1, smoothed=True, bad=True), cross_entropy_formula
    ),
    Shipped(
        "cross_entropy, all options", *_NLL, _classes(weighted=True, **_ALL), cross_entropy_formula,
        constant=("weight",),
    ),
    Shipped("cross_entropy_", *_LOSS_, _classes(in_place=True, bad=True), None, differentiable=False),
    Shipped(
        "cross_entropy_, smoothed", *_LOSS_, _classes(in_place=True, label_smoothing=0.1, smoothed=True, z_loss=0.01),
        None, differentiable=False,
    ),
    Shipped(
        "cross_entropy_, all options", *_LOSS_, _classes(in_place=True, weighted=True, bad=True, **_ALL), None,
        differentiable=False,
    ),
    Shipped("kept_mass", _LINEAR, "kept_mass", _tokens(), _mass, **_INNER),
    Shipped("kept_mass, weighted", _LINEAR, "kept_mass", _tokens("class_weight", "token_weight"), _mass, **_INNER),
    Shipped(
        "mean_magnitude", _LINEAR, "mean_magnitude", _tokens("class_weight", labels=False),
        lambda class_weight: class_weight.abs().mean(), **_INNER,
    ),
    Shipped("fourth_powers", _LINEAR, "fourth_powers", _tokens(scalars=_MEANS), _powers, **_INNER),
    Shipped(
        "fourth_powers, all options", _LINEAR, "fourth_powers",
        _tokens("class_weight", "token_weight", scalars=(*_MEANS, "spread"), **_ALL), _powers, **_INNER,
    ),
    Shipped("row_factors", _LINEAR, "row_factors", _tokens("token_weight", scalars=_MEANS), _factors, **_INNER),
    Shipped(
        "narrow_row_factors", _LINEAR, "narrow_row_factors", _tokens("token_weight", scalars=(*_MEANS, "total")),
        _narrow, **_INNER,
    ),
    Shipped(
        "fourth_powers, of single tokens", _LINEAR, "fourth_powers", _tokens("token_weight", z_loss=0.01), _powers,
        **_INNER,
    ),
    Shipped(
        "narrow_token_scales", _LINEAR, "narrow_token_scales", _tokens("scale", scalars=("total",), labels=False),
        lambda scale, total: scale * 32768.0 / total**0.25, **_INNER,
    ),
    Shipped(
        "shared_factor", _LINEAR, "shared_factor", _tokens(scalars=("mass", "total", "labels"), labels=False),
        lambda mass, total, labels: total**0.25 / 32768.0 / mass, **_INNER,
    ),
    Shipped(
        "loss_totals", _LINEAR, "loss_totals", _tokens("losses", "z", "token_weight"),
        lambda **a: tuple(t.sum() for t in _weighed(**a)), **_INNER,
    ),
    Shipped(
        "reduced_loss", _LINEAR, "reduced_loss", _tokens(scalars=("ce", "z_total", *_MEANS), labels=False),
        lambda ce, z_total, mass, count: ce / mass + z_total / count, **_INNER,
    ),
    Shipped(
        "token_losses", _LINEAR, "token_losses", _tokens("losses", "z", "token_weight"),
        lambda **a: sum(_weighed(**a)), **_INNER,
    ),
    Shipped(
        "token_scales", _LINEAR, "token_scales", _tokens("d_loss", "token_weight", labels=False),
        lambda d_loss, token_weight: d_loss * token_weight, **_INNER,
    ),
    Shipped("column_totals", _LINEAR, "column_totals", _matrix(name="z"), lambda z: z.sum(0), **_INNER),
    Shipped("times_", _LINEAR, "times_", _matrix("s", name="g"), None, **_INNER),
    Shipped("times_both_", _LINEAR, "times_both_", _matrix("s", "t", name="g"), None, **_INNER),
    Shipped(
        "times_both", _LINEAR, "times_both", _matrix("s", "t", name="g", dtype=torch.float32),
        lambda g, s, t: g * (s * t), **_INNER,
    ),
    Shipped("shard_row", _SHARDS, "shard_row", shard(), row_formula, **_INNER),
    Shipped(
        "shard_row, all options", _SHARDS, "shard_row",
        shard(padded=True, weighted=True, softcap=5.0, smoothed=True, capped=True), row_formula, **_INNER,
    ),
    Shipped(
        "shard_parts", _SHARDS, "shard_parts", _tokens("own", "top", "total", "here", "label", "all", labels=False),
        parts_formula, **_INNER,
    ),
    Shipped("joined_row", _SHARDS, "joined_row", sums(), joined_formula, **_INNER),
    Shipped(
        "joined_row, all options", _SHARDS, "joined_row",
        sums(weighted=True, label_smoothing=0.1, smoothed=True, z_loss=0.01), joined_formula, **_INNER,
    ),
    Shipped("shard_gradients_", _SHARDS, "shard_gradients_", shard(in_place=True), None, **_INNER),
    Shipped(
        "shard_gradients_, all options", _SHARDS, "shard_gradients_",
        shard(padded=True, weighted=True, in_place=True, **_ALL), None, **_INNER,
    ),
    Shipped(
        "times_rounded", _LINEAR, "times_rounded", _matrix("s", name="g", dtype=torch.float32), lambda g, s: g * s,
        **_INNER,
    ),
)  # fmt: skip
