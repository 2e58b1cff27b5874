"""Calls of an op that record gradients: its backward section is the gradient of the forward section."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from kgen.runtime.derivatives import Once, ReverseOnly
from kgen.runtime.host.ready import Ready


class Call(torch.autograd.Function):
    """One call that records gradients."""

    @staticmethod
    def forward(ctx: Any, ready: Ready, *values: Any) -> Any:
        outputs, made = ready.forward(values)
        _keep(ctx, ready, values, outputs)
        # Not among the saved tensors: what is donated to a gradient must be nobody else's, hooks of them included.
        ctx.made = made
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ready: Ready = ctx.ready
        if all(g is None for g in grads):
            return (None,) * (1 + len(ctx.values))
        values, shared = _kept(ctx)  # raises where the graph is gone
        if torch.is_grad_enabled():  # create_graph=True
            found = _undifferentiable(ready, [*values, *shared, *ctx.made, *grads], len(ctx.made))
            return (None, *(found.get(i) for i in range(len(values))))
        again = cast(Any, torch._C)._autograd._get_current_graph_task_keep_graph()
        made = ctx.made
        if not again:
            ctx.made = None
        found = ready.backward(values, shared, made, grads, donated=not again)
        return (None, *(found.get(i) for i in range(len(values))))


class TransformedCall(ReverseOnly):
    """The same in the form that torch.func takes."""

    @staticmethod
    def forward(ready: Ready, *values: Any) -> Any:
        outputs, made = ready.forward(values)
        return (*outputs, *made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ready, *values = inputs
        ctx.name = ready.op.name
        outputs, made = output[: ready.outputs], output[ready.outputs :]
        _keep(ctx, ready, values, outputs, made)
        ctx.mark_non_differentiable(*made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ready: Ready = ctx.ready
        values, shared = _kept(ctx)
        made = ctx.saved_tensors[len(ctx.saved_at) + len(shared) :]
        at = _undifferentiable(ready, [*values, *shared, *made, *grads[: ready.outputs]], len(made))
        return (None, *(at.get(i) for i in range(len(values))))


def _undifferentiable(ready: Ready, flat: list[Any], made: int) -> dict[int, torch.Tensor]:
    """The gradients by parameter, whose own gradient is refused. `flat`: parameters, outputs that are saved, `made`
    buffers of the forward section, and the gradients of the outputs."""
    # What a gradient made in the forward section came from is not among these: without a tensor that requires grad the
    # result would be taken for a constant.
    anchor = torch.zeros((), requires_grad=True)
    sizes = (len(ready.op.signature.params), len(ready.shared), made, ready.outputs)

    def run(*given: Any) -> tuple[Any, ...]:
        values, shared, own, grads = (given[sum(sizes[:k]) : sum(sizes[: k + 1])] for k in range(len(sizes)))
        found = ready.backward(values, shared, own, grads, donated=False)
        return tuple(found[i] for i, _ in sorted(_positions(ready)))

    found = cast(Any, Once).apply(ready, run, *flat, anchor)
    return {i: g for (i, _), g in zip(sorted(_positions(ready)), found, strict=True)}


def _positions(ready: Ready) -> list[tuple[int, str]]:
    return [(ready.position[n], n) for n, _ in ready.plan.gradients]


def _keep(
    ctx: Any, ready: Ready, values: Sequence[Any], outputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor] = ()
) -> None:
    """Put on `ctx` the arguments and outputs that the backward pass reads."""
    needed = set(ready.plan.saved_inputs)
    ctx.ready = ready
    ctx.saved_at = [i for i, n in ready.tensors if n in needed]
    ctx.save_for_backward(*(values[i] for i in ctx.saved_at), *(outputs[k] for k in ready.shared), *made)
    ctx.values = [None if isinstance(v, torch.Tensor) else v for v in values]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))


def _kept(ctx: Any) -> tuple[list[Any], Sequence[torch.Tensor]]:
    """The arguments, those that were not saved as None, and the outputs that were saved."""
    values, saved = list(ctx.values), ctx.saved_tensors
    for i, t in zip(ctx.saved_at, saved, strict=False):
        values[i] = t
    return values, saved[len(ctx.saved_at) :][: len(ctx.ready.shared)]
