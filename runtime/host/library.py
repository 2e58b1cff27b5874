"""Ops as operators of torch.library, which is how torch.compile calls them: an op is one operator as a whole.

`kgen::<file>_<op>_<hash>` takes the parameters of the op's signature, the backend and the options. Where gradients are
wanted it is one that also returns what the backward section needs, and whose gradient is a second operator. Imported
only while torch.compile traces.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kgen.codegen.host import plan
from kgen.codegen.shapes import full_shape
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl.check import TensorParam
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.locks import rlock
from kgen.runtime.binding import examine
from kgen.runtime.errors import ArgumentError
from kgen.runtime.host.op import HostOp, by_serial, result_dtypes
from kgen.runtime.host.options import Options
from kgen.runtime.library import _choice, _settled, differentiate, number, refuse_transforms, run_operator
from kgen.runtime.operators import Operator

_lock = rlock()
_defined: set[str] = set()


def call(
    op: HostOp,
    values: list[Any],
    backend: str | None,
    workspace_mb: float | None,
    accumulate: str,
    chunk: int | None,
) -> Any:
    """What `HostOp.__call__` does, for torch.compile to trace. Backend and options are those of trace time."""
    if op.collective:
        raise ArgumentError(f"{op.name}: torch.compile does not take ops with collectives; call it outside, or under "
                            f"torch.compiler.disable")  # fmt: skip
    refuse_transforms(op.name, op.has_float_output)
    choice = _choice(backend)
    for i in op.scalar_at:
        values[i] = number(op.name, op.signature.params[i].name, values[i])
    wanted: tuple[int, ...] = ()
    if torch.is_grad_enabled():
        wanted = tuple(i for i in op.tensor_at if values[i] is not None and values[i].requires_grad)
    dtypes = tuple(None if values[i] is None else values[i].dtype for i in op.tensor_at)
    for i in op.const_at:
        values[i] = _settled(values[i])
    consts = tuple(values[i] for i in op.const_at)
    options = _options(op.serial, _settled(workspace_mb), accumulate, _settled(chunk))
    name, count = _operator(op.serial, dtypes, consts, wanted)
    results = run_operator(name, bool(wanted), (*values, choice, *options))
    if isinstance(results, torch.Tensor):
        return results
    return results[0] if count == 1 else tuple(results[:count])


@torch.compiler.assume_constant_result
def _options(serial: str, workspace_mb: float | None, accumulate: str, chunk: int | None) -> tuple[float, str, int]:
    """The options as an operator takes them: a chunk of 0 rows is one that follows the budget."""
    o = Options.of(by_serial(serial).name, workspace_mb, accumulate, chunk)
    return o.workspace_mb, o.accumulate, o.chunk or 0


@torch.compiler.assume_constant_result
def _operator(
    serial: str, dtypes: tuple[torch.dtype | None, ...], consts: tuple[Any, ...], wanted: tuple[int, ...]
) -> tuple[str, int]:
    """The operator for a call, and how many of its results are the op's."""
    op = by_serial(serial)
    values: list[Any] = [p.default if not isinstance(p, TensorParam) else None for p in op.signature.params]
    for i, dtype in zip(op.tensor_at, dtypes, strict=True):
        values[i] = None if dtype is None else torch.empty(0, dtype=dtype)
    for i, v in zip(op.const_at, consts, strict=True):
        values[i] = v
    return define(op, values, wanted), len(op.signature.outputs)


# ---- operators -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """The operator of an op for one set of wanted gradients.

    Behind the outputs it returns the buffers `extra`, what the backward pass needs and is no output; `shared` are the
    outputs, by position, that it needs.
    """

    op: HostOp
    wanted: tuple[int, ...]
    plan: plan.Plan

    @property
    def extra(self) -> tuple[str, ...]:
        outputs = {b for _, b in self.plan.outputs}
        return tuple(n for n in self.plan.saved if n not in outputs)

    @property
    def shared(self) -> tuple[int, ...]:
        at = {b: k for k, (_, b) in enumerate(self.plan.outputs)}
        return tuple(at[n] for n in self.plan.saved if n in at)

    def saved(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward pass needs among the results of the operator: outputs, then the others."""
        return [*(results[k] for k in self.shared), *results[len(self.plan.outputs) :]]


def define(op: HostOp, values: Sequence[Any], wanted: tuple[int, ...]) -> str:
    """The name of the operator for calls with arguments like `values`, defined where it is not yet."""
    spec, _ = examine(op.signature, values, None, plain=False)
    form = _Form(op, wanted, op.plan_for(spec, wanted, "param"))
    # What is returned depends on all of these, and so does the name.
    settled = (sorted((n, d.name) for n, d in spec.dtypes.items()), sorted(spec.consts.items()), sorted(spec.present))
    content = repr((op.source, settled, wanted) if wanted else (op.source,))
    stem = re.sub(r"\W", "_", Path(op.path).stem)
    name = f"{stem}_{op.name}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    name += "_training" if wanted else ""
    with _lock:
        if name not in _defined:
            _define(name, form)
            _defined.add(name)
    return name


_OPTIONS = "str backend, float workspace_mb, str accumulate, int chunk"


def _parameters(op: HostOp) -> list[str]:
    parts = []
    for i, p in enumerate(op.signature.params):
        if isinstance(p, TensorParam):
            kind = "Tensor?" if p.optional else "Tensor"
        else:
            kind = DTYPES[p.dtype].kind if p.dtype in DTYPES else "float"
        parts.append(f"{kind} a{i}")
    return parts


def _returns(count: int) -> str:
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _unpacked(arguments: Sequence[Any]) -> tuple[list[Any], str, Options]:
    *values, choice, workspace_mb, accumulate, chunk = arguments
    return values, choice, Options(workspace_mb, accumulate, chunk or None)


def _define(name: str, form: _Form) -> None:
    op = form.op
    count = len(form.plan.outputs) + len(form.extra)

    def run(*arguments: Any) -> Any:
        values, choice, options = _unpacked(arguments)
        ready = op.ready(values, form.wanted, choice, options)
        outputs, made = ready.forward(values)
        return outputs[0] if count == 1 else (*outputs, *made)

    def fake(*arguments: Any) -> Any:
        values, _, _ = _unpacked(arguments)
        spec, device = examine(op.signature, values, None, plain=False)
        dims, leading = op.bind(values, spec)
        dtypes = result_dtypes(op, spec)
        head = {t.name: t for t in op.header.tensors}
        results = [
            torch.empty(full_shape(head[n], dims, leading), dtype=dtypes[n], device=device)
            for n, _ in form.plan.outputs
        ]
        for n in form.extra:
            b = form.plan.buffers[n]
            shape = tuple(d.evaluate(dims) for d in b.shape)
            results.append(torch.empty(shape, dtype=TORCH[b.dtype], device=device))
        return results[0] if count == 1 else tuple(results)

    schema = f"({', '.join([*_parameters(op), _OPTIONS])}) -> {_returns(count)}"
    made = Operator(name, schema, run, fake, fresh=False)
    if form.wanted:
        _define_backward(f"{name}_backward", form)
        _differentiate(made, name, form)


def _define_backward(name: str, form: _Form) -> None:
    op = form.op
    params = op.signature.params
    gradients = [next(i for i, p in enumerate(params) if p.name == n) for n, _ in form.plan.gradients]
    saved, outputs = len(form.plan.saved), len(form.plan.outputs)

    def run(*arguments: Any) -> Any:
        values, choice, options = _unpacked(arguments)
        own, kept, grads = values[: len(params)], values[len(params) :][:saved], values[len(params) + saved :]
        shared = len(form.shared)
        ready = op.ready(own, form.wanted, choice, options)
        found = ready.backward(own, kept[:shared], kept[shared:], grads, donated=False)
        results = tuple(found[i] for i in gradients)
        return results[0] if len(results) == 1 else results

    def fake(*arguments: Any) -> Any:
        values, _, _ = _unpacked(arguments)
        results = tuple(torch.empty(values[i].shape, dtype=values[i].dtype, device=values[i].device) for i in gradients)
        return results[0] if len(results) == 1 else results

    parts = [
        *_parameters(op),
        *(f"Tensor s{i}" for i in range(saved)),
        *(f"Tensor? g{i}" for i in range(outputs)),
        _OPTIONS,
    ]
    schema = f"({', '.join(parts)}) -> {_returns(len(gradients))}"
    Operator(name, schema, run, fake, fresh=False)


def _differentiate(made: Any, name: str, form: _Form) -> None:
    params = form.op.signature.params
    # The backward operator takes all arguments, as it must know all sizes.
    tensors = form.op.tensor_at

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, tuple | list) else (output,)
        values, ctx.options = list(inputs[: len(params)]), inputs[len(params) :]
        ctx.given = [i for i in tensors if values[i] is not None]
        ctx.save_for_backward(*(values[i] for i in ctx.given), *form.saved(results))
        ctx.values = [None if i in tensors else v for i, v in enumerate(values)]
        ctx.set_materialize_grads(False)

    def run(ctx: Any, operator: Callable[..., Any], *grads: Any) -> Any:
        values = list(ctx.values)
        outputs = grads[: len(form.plan.outputs)]
        if all(g is None for g in outputs):
            return (None,) * (len(params) + 4)
        for i, t in zip(ctx.given, ctx.saved_tensors, strict=False):
            values[i] = t
        made = ctx.saved_tensors[len(ctx.given) :]
        results = operator(f"{name}_backward", *values, *made, *outputs, *ctx.options)
        results = (results,) if isinstance(results, torch.Tensor) else results
        at = dict(zip((n for n, _ in form.plan.gradients), results, strict=True))
        return (*(at.get(p.name) for p in params), *(None,) * 4)

    differentiate(made, name, form.op, setup_context, run)
