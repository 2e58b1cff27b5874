"""Losses whose classes are shared out over the ranks of a process group: tensor parallelism by torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from kgen.codegen.host import sizing
from kgen.ops.functional import _kernel
from kgen.ops.linear_losses import check_shapes, form_of, multiplied_in
from kgen.ops.losses import LABELS, check_reduction, options_of
from kgen.runtime.errors import ArgumentError
from kgen.runtime.host import ranks
from kgen.runtime.host.options import Options

_NAME = "vocab_parallel_linear_cross_entropy"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def vocab_parallel_linear_cross_entropy(
    input: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    *,
    first_class: int,
    num_classes: int,
    group: Any = None,
    bias_shard: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduce_input_gradient: bool = True,
    accumulate: str = "auto",
    workspace_mb: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`linear_cross_entropy` of a weight whose rows are shared out over the ranks of `group`, equal on every rank.

    Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053.
    input: `[..., H]`, and target: `[...]`, integer labels out of 0 .. num_classes - 1: the same on every rank.
    weight_shard: `[V, H]`, and bias_shard: `[V]`: this rank's rows first_class .. first_class + V - 1 of the weight and
    bias, V of its own and at least 1. Together the shards have each of the num_classes classes once; rows for classes
    from num_classes on are padding: they take no part and get no gradient, but must be finite. input and weight_shard
    have one dtype, f32, bf16 or f16, or are multiplied in that of autocast. class_weight: `[num_classes]`, of all
    classes, and token_weight: `[...]`: the same on every rank, neither gets a gradient.
    A label that is in no shard, or in two, and is not ignore_index, makes the result NaN; nothing waits for the device.
    The other arguments, and the f32 result, are those of `linear_cross_entropy`.

    group: a `torch.distributed.ProcessGroup`; None is the default group. Where torch.distributed is not initialised
    this process has all shards. All ranks make the same calls with the same arguments but for the shard, with the same
    gradients wanted and the same KGEN_WORKSPACE_MB, or they wait for each other for ever.
    Exchanged are, for each chunk of tokens, one f32 and then four of each token in the forward pass, and where the
    gradient of input is wanted one f32 of each of its elements: for `mean` and `sum` in the forward pass too, for
    `none` in the backward pass.
    reduce_input_gradient: False leaves the gradient of input this rank's share of the sum, for a caller that sums the
    shares itself, as sequence parallelism does in a reduce-scatter.
    workspace_mb: MiB for the logits of a chunk, as if this rank had an equal share of the classes: ranks must agree.
    """
    if torch.compiler.is_dynamo_compiling():
        raise ArgumentError(f"{_NAME}: ranks meet in the middle of it, which torch.compile does not take")
    check_reduction(_NAME, reduction)
    options: dict[str, Any] = options_of(_NAME, label_smoothing, z_loss, softcap)
    settings = Options.of(_NAME, workspace_mb, accumulate, None)
    _check(input, weight_shard, target, bias_shard, class_weight, token_weight, first_class, num_classes)
    input = multiplied_in(_NAME, "weight_shard", input, weight_shard)
    count = ranks.size(ranks.resolved(_NAME, group))
    chunk = None
    if count > 1:
        row = -(-num_classes // count) * input.element_size()
        chunk = sizing.even(target.numel(), max(1, int(settings.workspace_mb * 2**20 // row)))
    name, form = form_of("parallel_linear_cross_entropy", reduction, input, weight_shard)
    fixed = None if class_weight is None else class_weight.detach()
    return _kernel("parallel_linear_cross_entropy", name)(
        input,
        weight_shard,
        target.long(),
        bias_shard,
        fixed,
        None if fixed is None else fixed.sum(dtype=torch.float32),
        None if token_weight is None else token_weight.detach().float(),
        first=first_class,
        classes=num_classes,
        ignore_index=ignore_index,
        joined=bool(reduce_input_gradient),
        backend=backend,
        accumulate=accumulate,
        workspace_mb=workspace_mb,
        chunk=chunk,
        group=group,
        **options,
        **form,
    )


def _check(
    input: Any,
    weight: Any,
    target: Any,
    bias: Any,
    class_weight: Any,
    token_weight: Any,
    first_class: Any,
    num_classes: Any,
) -> None:
    """Raise ArgumentError, in the names of the function, for what does not fit."""
    for name, t in (("input", input), ("weight_shard", weight), ("target", target)):
        if not isinstance(t, torch.Tensor):
            raise ArgumentError(f"{_NAME}: {name} must be a tensor, got a {type(t).__name__}")
    for name, t in (("input", input), ("weight_shard", weight)):
        if t.dtype not in _FLOATS:
            raise ArgumentError(f"{_NAME}: {name} must be f32, bf16 or f16, got {t.dtype}")
    if input.dim() == 0 or weight.dim() != 2 or weight.shape[1] != input.shape[-1] or weight.shape[0] == 0:
        raise ArgumentError(
            f"{_NAME}: input must be [..., H], and weight_shard [V, H] with at least one row, got "
            f"{tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if target.dtype not in LABELS:
        raise ArgumentError(f"{_NAME}: target must be a tensor of integer labels, got {target.dtype}")
    for name, n, least in (("first_class", first_class, 0), ("num_classes", num_classes, 1)):
        if not isinstance(n, int) or isinstance(n, bool) or n < least:
            raise ArgumentError(f"{_NAME}: {name} must be an integer of at least {least}, got {n!r}")
    tokens, classes = tuple(input.shape[:-1]), (weight.shape[0],)
    check_shapes(
        _NAME,
        ("target", target, tokens),
        ("token_weight", token_weight, tokens),
        ("bias_shard", bias, classes),
        ("class_weight", class_weight, (num_classes,)),
    )
