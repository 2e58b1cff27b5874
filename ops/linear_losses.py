"""Losses of a linear layer whose logits are never in memory as a whole: torch's argument names and conventions."""

from __future__ import annotations

from typing import Any

import torch

from kgen.ops.functional import _kernel
from kgen.ops.losses import LABELS, check_reduction, options_of
from kgen.runtime.errors import ArgumentError
from kgen.runtime.host.options import Options

_NAME = "linear_cross_entropy"


def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    token_weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    accumulate: str = "auto",
    workspace_mb: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`cross_entropy(linear(input, weight, bias), target, ...)`, with the logits of a chunk of tokens at a time.

    input: `[..., H]`; weight: `[V, H]`, and bias: `[V]`, as of `torch.nn.functional.linear`; target: `[...]`, integer
    labels. input and weight have one floating-point dtype. Under autocast both are multiplied in its dtype, and the
    gradient of an f32 weight is summed in f32. class_weight: `[V]`, the weight of each class, what `cross_entropy`
    calls weight; token_weight: `[...]`, of each token; neither gets a gradient. `mean` divides by the sum of the
    weights (class times token) of the labels that are kept. The other arguments are those of `kgen.ops.cross_entropy`,
    and so is what comes of ignored labels, of none that is kept and of labels out of range. The result is f32.

    Computed are the gradients of what requires grad: for `mean` and `sum` in the forward pass, for `none` in the
    backward pass from logits that are made again.
    workspace_mb: MiB for the logits of a chunk (KGEN_WORKSPACE_MB, else 512); memory beyond it is for gradients.
    accumulate: how the gradient of a bf16 weight is summed over chunks: `param` in bf16, rounded at each chunk; `f32`,
    rounded once, for 4 bytes an element more; `auto` so that its error does not grow with the number of chunks, by
    larger chunks or an f32 sum, whichever is less memory. (f16 always sums in f32.)
    """
    check_reduction(_NAME, reduction)
    options: dict[str, Any] = options_of(_NAME, label_smoothing, z_loss, softcap)
    _check(input, weight, target, bias, class_weight, token_weight)
    input = multiplied_in(_NAME, "weight", input, weight)
    name, form = form_of("fused_linear_cross_entropy", reduction, input, weight)
    return _kernel("fused_linear_cross_entropy", name)(
        input,
        weight,
        target.long(),
        bias,
        None if class_weight is None else class_weight.detach(),
        None if token_weight is None else token_weight.detach().float(),
        ignore_index=ignore_index,
        backend=backend,
        accumulate=accumulate,
        workspace_mb=workspace_mb,
        **options,
        **form,
    )


def check_options(name: str, accumulate: str, workspace_mb: float | None) -> None:
    """Raise ArgumentError for options that no call could take."""
    Options.of(name, workspace_mb, accumulate, None)


def form_of(op: str, reduction: str, input: torch.Tensor, weight: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """The name of the op for `reduction`, of the pair `op` and `op`_rows, and its constants of that form."""
    narrow = input.dtype == torch.float16
    form: dict[str, Any] = {"narrow": narrow, "wide_weight": narrow and weight.dtype == torch.float32}
    return (f"{op}_rows", form) if reduction == "none" else (op, {"averaged": reduction == "mean", **form})


def multiplied_in(op: str, called: str, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`input` in the dtype that is multiplied in. Raises ArgumentError where there is none; `called`: weight's name."""
    place = input.device.type
    if torch.is_autocast_enabled(place) and torch.float64 not in (input.dtype, weight.dtype):
        return input.to(torch.get_autocast_dtype(place))
    if input.dtype != weight.dtype:
        raise ArgumentError(
            f"{op}: input and {called} must have one dtype, got {input.dtype} and {weight.dtype}; convert one, or use "
            f"torch.autocast"
        )
    return input


def _check(input: Any, weight: Any, target: Any, bias: Any, class_weight: Any, token_weight: Any) -> None:
    """Raise ArgumentError, in the names of the function, for shapes and dtypes that do not fit."""
    for name, t in (("input", input), ("weight", weight), ("target", target)):
        if not isinstance(t, torch.Tensor):
            raise ArgumentError(f"{_NAME}: {name} must be a tensor, got a {type(t).__name__}")
    if input.dim() == 0 or not input.is_floating_point():
        raise ArgumentError(
            f"{_NAME}: input must be a floating-point tensor [..., H], got {input.dtype} of shape {tuple(input.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        raise ArgumentError(
            f"{_NAME}: weight must be [V, H] with H = {input.shape[-1]}, that of input, got {tuple(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ArgumentError(f"{_NAME}: weight must have at least one class, got shape {tuple(weight.shape)}")
    if target.dtype not in LABELS:
        raise ArgumentError(f"{_NAME}: target must be a tensor of integer labels, got {target.dtype}")
    tokens, classes = tuple(input.shape[:-1]), (weight.shape[0],)
    check_shapes(
        _NAME,
        ("target", target, tokens),
        ("token_weight", token_weight, tokens),
        ("bias", bias, classes),
        ("class_weight", class_weight, classes),
    )


def check_shapes(op: str, *arguments: tuple[str, Any, tuple[int, ...]]) -> None:
    """Raise ArgumentError for an argument (name, value, shape) that is neither None nor a tensor of that shape."""
    for name, t, shape in arguments:
        if t is None:
            continue
        if not isinstance(t, torch.Tensor):
            raise ArgumentError(f"{op}: {name} must be a tensor or None, got a {type(t).__name__}")
        if tuple(t.shape) != shape:
            raise ArgumentError(f"{op}: {name} must have the shape {shape}, got {tuple(t.shape)}")
