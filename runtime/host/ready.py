"""Calls of an op that were classified: its plan for their dtypes and sizes, and the walks of both directions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kgen.codegen.host import plan
from kgen.codegen.shapes import full_shape
from kgen.dsl.check import TensorParam
from kgen.dsl.dtypes import DTYPES
from kgen.runtime.binding import scalar_converter
from kgen.runtime.host import ranks
from kgen.runtime.host.walk import Env, Walk

if TYPE_CHECKING:
    from kgen.runtime.host.op import HostOp


class Ready:
    """Everything about calls of one signature: the plan, its sizes, and the walks of both directions."""

    def __init__(
        self,
        op: HostOp,
        p: plan.Plan,
        walk: Callable[[Sequence[plan.Step]], Walk],
        dims: Mapping[str, int],
        leading: Mapping[str, tuple[int, ...]],
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.op = self.called = op
        self._dtypes = dtypes
        self.plan = p
        self.dims = dims
        self.device = device
        self.outputs = len(p.outputs)
        self._walk = walk
        params = op.signature.params
        self._flat = {q.name: tuple(d.evaluate(dims) for d in q.shape) for q in op.signature.tensors if _bound(q, dims)}
        self._full = {t.name: full_shape(t, dims, leading) for t in op.header.tensors if _bound(t, dims)}
        self.tensors = [(i, params[i].name) for i in op.tensor_at]
        self._scalars = [
            (i, q.name, scalar_converter(op.name, q.name, DTYPES[q.dtype]))
            for i, q in enumerate(params)
            if not isinstance(q, TensorParam) and q.dtype in DTYPES
        ]
        self.position = {q.name: i for i, q in enumerate(params)}
        # What is saved of outputs, which are the caller's too, and what is nobody else's.
        at = {buffer: k for k, (_, buffer) in enumerate(p.outputs)}
        self.shared = tuple(at[n] for n in p.saved if n in at)
        self._shared_as = tuple((p.outputs[k][1], p.outputs[k][0]) for k in self.shared)
        self._made = tuple(n for n in p.saved if n not in at)
        self._forward = walk(p.forward)
        self._group: Any = None

    @cached_property
    def _backward(self) -> Walk:
        return self._walk(self.plan.backward)

    def within(self, group: Any) -> Ready:
        """The same for collectives over `group`; None: there is nothing to reduce."""
        if group is self._group:
            return self
        if self.plan.gradients:
            _ = self._backward  # made once, for all groups
        other = copy.copy(self)
        other._group = group
        return other

    def forward(self, values: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs, and what the backward pass needs besides arguments and those outputs that are `shared`."""
        env = self._given(values, [n for _, n in self.tensors])
        self._forward.run(env, donated=False)
        outputs = [_shaped(env[b], self._full[n]) for n, b in self.plan.outputs]
        return outputs, [env[n] for n in self._made]

    def backward(
        self,
        values: Sequence[Any],
        shared: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        upstream: Sequence[torch.Tensor | None],
        *,
        donated: bool,
    ) -> dict[int, torch.Tensor]:
        """The gradient of each wanted parameter. `upstream` has the gradients of all outputs, None where none came."""
        env = self._given(values, self.plan.saved_inputs)
        env.update(zip(self._made, made, strict=True))
        for (buffer, name), t in zip(self._shared_as, shared, strict=True):
            env[buffer] = t.detach().reshape(self._flat[name])
        given = {name: g for (name, _), g in zip(self.plan.outputs, upstream, strict=True)}
        for name, buffer in self.plan.upstream:
            g = given[name]
            shape = self._flat[name]
            like = {"dtype": self._dtypes[name], "device": self.device}
            env[buffer] = torch.zeros(shape, **like) if g is None else g.reshape(shape)
        self._backward.run(env, donated=donated)
        return {self.position[n]: _shaped(env[b], self._full[n]) for n, b in self.plan.gradients}

    def _given(self, values: Sequence[Any], names: Sequence[str]) -> Env:
        env: Env = {name: convert(values[i]) for i, name, convert in self._scalars}
        env[ranks.GROUP] = self._group
        for name in names:
            t = values[self.position[name]]
            if t is not None:
                shape = self._flat[name]
                env[name] = t.detach() if t.shape == shape else t.detach().reshape(shape)
        return env


def _shaped(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Contiguous `t` in another shape, as a tensor of its own and no view of one: the caller may change it in place."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)


def _bound(t: Any, dims: Mapping[str, int]) -> bool:
    return all(n in dims for d in t.shape for n in d.symbols)
