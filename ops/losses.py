"""Loss functions of logits and labels: torch's argument names and conventions, classes in the last dimension."""

from __future__ import annotations

import math
from typing import Any

import torch

from kgen.ops.functional import _kernel, is_dynamo_compiling
from kgen.runtime.errors import ArgumentError

LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The negative log-likelihood of the labels under `softmax(logits)`, as `torch.nn.functional.cross_entropy`.

    logits: `[..., V]`, the classes in the last dimension, in f16, bf16, f32 or f64; target: `[...]`, integer labels.
    weight: `[V]`, of each class; it gets no gradient. Rows labelled `ignore_index` have loss 0 whatever their logits
    are, and gradient 0; but NaN, as in torch, where the row's softmax is NaN (a logit is NaN or +inf, or all are -inf).
    reduction: `none` gives `[...]`, `sum` and `mean` a scalar, always in f32. `mean` divides by the number of labels
    that are kept, or by the sum of their weights; with none kept it is NaN, and the gradient 0, as in torch.
    label_smoothing: e in `(1 - e) * nll - e / V * sum(weight * log p)`. z_loss: coefficient of `logsumexp**2`, which is
    not weighted and whose mean is over the labels that are kept. softcap: logits become
    `softcap * tanh(logits / softcap)` before all else, so a class at -inf becomes one at -softcap.
    A label outside 0 .. V - 1 makes its row, and so the mean and the sum, NaN; nothing waits for the device.
    """
    check_reduction("cross_entropy", reduction)
    options = options_of("cross_entropy", label_smoothing, z_loss, softcap)
    # Labels of int64 are checked by the kernel, which takes what `_labels` takes, and once for calls that are alike.
    if is_dynamo_compiling() or getattr(target, "dtype", None) is not torch.int64:
        target = _labels("cross_entropy", logits, target)
    if weight is not None:
        weight = _fixed("cross_entropy", weight)
    try:
        loss, z = _kernel("cross_entropy", "cross_entropy").ordered(
            (logits, target, weight, ignore_index, *options.values()), backend
        )
    except Exception:  # torch.compile, where it traces what is called here, raises errors of its own
        _labels("cross_entropy", logits, target)  # says what is wrong with them in this function's words
        raise
    if reduction == "none":
        return loss + z if z_loss else loss

    def reduced(rows: torch.Tensor, of: torch.Tensor | None) -> torch.Tensor:
        return rows.sum() / kept_weight(target, of, ignore_index) if reduction == "mean" else rows.sum()

    return reduced(loss, weight) + reduced(z, None) if z_loss else reduced(loss, weight)


def cross_entropy_(
    logits: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor | float = 1.0,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    z_scale: torch.Tensor | float | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The loss of each row, `[...]` in f32, while one kernel overwrites `logits` with the gradient of the result.

    The arguments are those of `cross_entropy`. The gradient of rows labelled `ignore_index` is 0 whatever their logits
    are, also where that of `cross_entropy` is NaN. scale: a number, or a tensor that is a scalar or `[...]`: what the
    gradient of each row is multiplied by. For the mean of n kept labels it is 1/n (`kept_weight` gives n), times the
    gradient of the mean. z_scale: the same for the z-loss, whose mean has another denominator where there are class
    weights; without it `scale` serves both.
    Nothing is recorded for autograd: raises ArgumentError where `logits` require grad, unless under `torch.no_grad()`.
    """
    options = options_of("cross_entropy_", label_smoothing, z_loss, softcap)
    target, weight = _labels("cross_entropy_", logits, target), _fixed("cross_entropy_", weight)
    if logits.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "cross_entropy_: logits require grad and would be overwritten; call it under torch.no_grad(), "
            "or call cross_entropy"
        )
    with torch.no_grad():
        loss, z = _kernel("cross_entropy", "cross_entropy_")(
            logits,
            target,
            _rows("scale", scale, target),
            weight,
            None if z_scale is None else _rows("z_scale", z_scale, target),
            ignore_index=ignore_index,
            backend=backend,
            **options,
        )
        torch.autograd.graph.increment_version(logits)
        return loss + z if z_loss else loss


def kept_weight(target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100) -> torch.Tensor:
    """What the mean of a cross entropy divides by, a scalar on the device of `target`: the number of labels that are
    not `ignore_index`, in int64, or the sum of their class weights, in f32."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    # A label out of range makes the loss NaN whatever it is divided by; here it must only stay in bounds.
    labels = target.long().clamp(0, weight.shape[0] - 1)  # int8 does not hold the bounds
    return weight.detach().float()[labels].masked_fill(~kept, 0.0).sum()


def check_reduction(op: str, reduction: str) -> None:
    """Raise ArgumentError for what is not none, mean or sum."""
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"{op}: reduction must be none, mean or sum, got {reduction!r}")


def options_of(op: str, label_smoothing: float, z_loss: float, softcap: float | None) -> dict[str, Any]:
    """The scalars of the kernels, and which of their terms are there at all: their last parameters, in order. Raises
    ArgumentError for bad ones."""
    try:
        if not 0.0 <= label_smoothing <= 1.0:
            raise ArgumentError(f"{op}: label_smoothing must be between 0 and 1, got {label_smoothing}")
        if not -math.inf < z_loss < math.inf:  # a comparison, as z_loss may be symbolic under torch.compile
            raise ArgumentError(f"{op}: z_loss must be finite, got {z_loss}")
        if softcap is not None and not 0.0 < softcap < math.inf:
            raise ArgumentError(f"{op}: softcap must be a positive number or None, got {softcap}")
    except (TypeError, RuntimeError):  # of a comparison; the latter of tensors
        for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss), ("softcap", softcap)):
            if not _compares(value):
                raise ArgumentError(f"{op}: {name} must be a number, got {value!r}") from None
        raise
    return {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": 1.0 if softcap is None else softcap,
        "smoothed": label_smoothing != 0.0,
        "capped": softcap is not None,
    }


def _compares(value: Any) -> bool:
    try:
        return bool(value < 0.0) in (True, False)
    except (TypeError, RuntimeError):
        return False


def _labels(op: str, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`target` as int64, when it holds one label for each row of `logits`."""
    if not isinstance(logits, torch.Tensor) or logits.dim() == 0:
        got = "a scalar" if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
        raise ArgumentError(f"{op}: logits must be a tensor [..., V] with the classes last, got {got}")
    if not isinstance(target, torch.Tensor) or target.dtype not in LABELS:
        got = str(target.dtype) if isinstance(target, torch.Tensor) else f"a {type(target).__name__}"
        raise ArgumentError(f"{op}: target must be a tensor of integer labels, got {got}")
    if target.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"{op}: target must have the shape of logits without the classes, {tuple(logits.shape[:-1])}, "
            f"got {tuple(target.shape)}"
        )
    return target.long()


def _fixed(op: str, weight: Any) -> torch.Tensor | None:
    if weight is not None and not isinstance(weight, torch.Tensor):
        raise ArgumentError(f"{op}: weight must be a tensor [V] or None, got a {type(weight).__name__}")
    return None if weight is None else weight.detach()


def _rows(name: str, value: torch.Tensor | float, target: torch.Tensor) -> torch.Tensor:
    """A factor for each row, in f32: of a number or a scalar tensor, one element seen from all rows."""
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=torch.float32, device=target.device).expand(target.shape)
    if value.dim() and value.shape != target.shape:
        raise ArgumentError(
            f"cross_entropy_: {name} must be a number, a scalar tensor or one element a row, {tuple(target.shape)}, "
            f"got {tuple(value.shape)}"
        )
    return value.detach().float().expand(target.shape)
