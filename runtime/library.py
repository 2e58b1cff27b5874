"""Kernels as operators of torch.library, which is how torch.compile calls them.

An operator `kgen::<file>_<kernel>_<hash>` takes the parameters of the kernel's signature and the backend as text; where
the kernel writes given tensors they are declared as mutated. Its fake form finds shapes as a call does. A call that is
differentiated uses the operators of the training form and of the derived backward (`kgen.runtime.autograd`).

Imported only while something traces (`binding.is_traced`): eager calls do not pay for the dispatcher.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import forward_ad

from kgen.codegen.shapes import bind_dims, constants, full_shape, leading_shapes
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl.check import TensorParam
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.locks import rlock
from kgen.runtime import autograd, registry
from kgen.runtime.binding import examine, no_scalar_gradient
from kgen.runtime.derivatives import Called, Once, ReverseOnly, no_forward_mode
from kgen.runtime.errors import ArgumentError
from kgen.runtime.kernel import Kernel, by_serial
from kgen.runtime.loading import load_packaged
from kgen.runtime.operators import Operator

_lock = rlock()
_defined: set[str] = set()
_formulas: dict[str, _Formula] = {}


# ---- traced calls ----------------------------------------------------------------------------------------------------


def call(kernel: Kernel, values: list[Any], outs: tuple[Any, ...] | None, backend: str | None) -> Any:
    """What `Kernel.__call__` does, for torch.compile to trace.

    The backend is the one asked for now, at trace time; which gradients are computed is fixed too, by which inputs
    require grad.
    """
    serial = kernel.serial
    kernel_name, has_float_output, tensor_at, numbers, const_at, inout_at, has_outputs = _form(serial)
    refuse_transforms(kernel_name, has_float_output)
    choice = _choice(backend)
    for i, scalar in numbers:
        values[i] = number(kernel_name, scalar, values[i])
    wanted: tuple[int, ...] = ()
    if torch.is_grad_enabled():
        wanted = tuple(i for i in tensor_at if values[i] is not None and values[i].requires_grad)
    written = outs is not None or len(inout_at) > 0
    dtypes = tuple(None if values[i] is None else values[i].dtype for i in tensor_at)
    for i in const_at:
        values[i] = _settled(values[i])
    consts = tuple(values[i] for i in const_at)
    name, takes, count = _operator(serial, dtypes, consts, wanted, written, outs is not None)
    arguments = [values[i] for i in takes]
    if outs is not None:
        arguments += outs
    results = run_operator(name, len(wanted) > 0, (*arguments, choice))
    if outs is not None or not has_outputs:
        results = outs if outs is not None else [values[i] for i in inout_at]
        return results[0] if len(results) == 1 else tuple(results)
    if isinstance(results, torch.Tensor):
        return results
    return results[0] if count == 1 else tuple(results[:count])


_Form = tuple[
    str, bool, tuple[int, ...], tuple[tuple[int, str], ...], tuple[int, ...], tuple[int, ...], bool
]  # fmt: skip


@torch.compiler.assume_constant_result
def _form(serial: str) -> _Form:
    """What a trace needs of a kernel: its name and whether an output is of floats; the positions of the tensors among
    its parameters, positions and names of scalars and constants, positions of the constants and of the tensors that it
    modifies; whether it has outputs.

    As attributes of the kernel each of them, and each number in them, would be guarded, and compared at every call of
    the compiled function. All follow from `serial`, which is guarded.
    """
    kernel = by_serial(serial)
    params = kernel.signature.params
    numbers = tuple((i, params[i].name) for i in (*kernel.scalar_at, *kernel.const_at))
    return (
        kernel.name, kernel.has_float_output, kernel.tensor_at, numbers, kernel.const_at, kernel.inout_at,
        bool(kernel.signature.outputs),
    )  # fmt: skip


def number(kernel: str, name: str, value: Any) -> Any:
    """The number that is passed for scalar `name`, where it is the element of a tensor too: a trace ends there, and
    goes on behind the call."""
    if not isinstance(value, torch.Tensor):
        return value
    if torch.is_grad_enabled() and value.requires_grad:
        _refuse_scalar_gradient(kernel, name)
    return value.item()


@torch.compiler.assume_constant_result
def _refuse_scalar_gradient(kernel: str, name: str) -> None:
    raise no_scalar_gradient(kernel, name)


def _settled(value: Any) -> Any:
    """`value` as a constant of the trace, which then guards it: with dynamic=True numbers are symbolic, and so is what
    is compared with one. Written in what every torch's trace turns into a constant, which `int` and `float` are not.
    """
    if isinstance(value, bool):
        return True if value else False  # noqa: SIM210 a branch asks for the value
    if isinstance(value, int):
        return operator.index(value)
    return float.fromhex(value.hex()) if isinstance(value, float) else value


class _Shelf:
    """Packaged kernels as attributes. A traced call finds its kernel here, as a trace can guard an attribute of a
    global but not the result of a function that it takes as a constant."""


_SHELF = _Shelf()


def packaged(file: str, name: str) -> Kernel:
    """A kernel of a file that comes with kgen."""
    return getattr(_SHELF, _put_on_shelf(file, name))


@torch.compiler.assume_constant_result
def _put_on_shelf(file: str, name: str) -> str:
    attribute = f"{Path(file).stem}_{name}"
    setattr(_SHELF, attribute, load_packaged(file)[name])
    return attribute


@torch.compiler.assume_constant_result
def _choice(backend: str | None) -> str:
    return registry.requested(backend)


def refuse_transforms(name: str, has_float_output: bool) -> None:
    """Raise inside transforms of torch.func that a call of kernel or op `name` is traced in and that have no rule for
    its operator: in forward mode its tangents would be zero."""
    if has_float_output:
        _refuse_transforms(name, torch.compiler.is_dynamo_compiling())


@torch.compiler.assume_constant_result
def _refuse_transforms(name: str, compiling: bool) -> None:
    # A trace guards which transforms it is inside.
    if forward_ad._current_level >= 0:
        raise no_forward_mode(name, "an argument")
    if compiling and _differentiated():
        raise ArgumentError(
            f"{name}: torch.compile cannot trace torch.func.grad and vjp of it; compile the function itself, as in "
            f"torch.func.grad(torch.compile(f)), or differentiate it with backward or torch.autograd.grad"
        )


def _differentiated() -> bool:
    """Whether the innermost transform of torch.func is one of reverse mode."""
    inside = peek_interpreter_stack()
    return inside is not None and inside.key() == TransformType.Grad


def run_operator(name: str, records: bool, arguments: tuple[Any, ...]) -> Any:
    """The results of an operator of ours. `records` says that it has a gradient, in `differentiate`."""
    if records and not torch.compiler.is_dynamo_compiling() and _differentiated():
        # Operators of torch.library have no rule for these transforms, which are around `make_fx` and fake tensors.
        return _Transformed.apply(_formulas[name], *arguments)
    return getattr(torch.ops.kgen, name)(*arguments)


@dataclass(frozen=True)
class _Formula:
    """The gradient of the operator `name`, as torch.library takes it."""

    called: Called
    name: str
    setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Callable[..., tuple[Any, ...]]


class _Transformed(ReverseOnly):
    """An operator and its gradient in the form that torch.func takes."""

    @staticmethod
    def forward(formula: _Formula, *arguments: Any) -> Any:
        return getattr(torch.ops.kgen, formula.name)(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        formula: _Formula
        formula, *arguments = inputs
        ctx.name, ctx.formula = formula.called.name, formula
        formula.setup_context(ctx, tuple(arguments), output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *ctx.formula.backward(ctx, *grads))


def differentiate(
    op: Any,
    name: str,
    called: Called,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Any, ...]],
) -> None:
    """Register the gradient of the operator `op`, `kgen::<name>`. `backward` is given what runs an operator."""

    def plain(ctx: Any, *grads: Any) -> Any:
        return backward(ctx, lambda name, *arguments: getattr(torch.ops.kgen, name)(*arguments), *grads)

    def once(ctx: Any, *grads: Any) -> Any:
        return backward(
            ctx, lambda name, *arguments: Once.apply(formula, getattr(torch.ops.kgen, name), *arguments), *grads
        )

    formula = _formulas[name] = _Formula(called, name, setup_context, once)
    op.register_autograd(plain, setup_context=setup_context)


@torch.compiler.assume_constant_result
def _operator(
    serial: str,
    dtypes: tuple[torch.dtype | None, ...],
    consts: tuple[Any, ...],
    wanted: tuple[int, ...],
    written: bool,
    out: bool,
) -> tuple[str, tuple[int, ...], int]:
    """The operator for a call: its name, the parameters that it takes, how many of its results are the kernel's.

    All that it is given is text, numbers and dtypes, the only constants of a trace in every torch that kgen runs with;
    the trace guards `serial`, so that another kernel in the same place is traced anew.
    """
    kernel = by_serial(serial)
    everything = tuple(range(len(kernel.signature.params)))
    outputs = len(kernel.signature.outputs)
    wanted = wanted if kernel.has_float_output else ()
    if not wanted:
        return define(kernel, out=out), everything, outputs
    values: list[Any] = [None] * len(everything)
    for i, dtype in zip(kernel.tensor_at, dtypes, strict=True):
        values[i] = None if dtype is None else torch.empty(0, dtype=dtype, requires_grad=i in wanted)
    for i, v in zip(kernel.const_at, consts, strict=True):
        values[i] = v
    if written:
        autograd.refuse(kernel, values, wanted, () if out else None)
        return define(kernel, out=out), everything, outputs
    t = autograd.training(kernel, values, wanted)
    return define_training(t), t.inputs, outputs


# ---- operators -------------------------------------------------------------------------------------------------------


def define(kernel: Kernel, *, out: bool = False) -> str:
    """The name of the operator of `kernel` in the namespace `kgen`, defined where it is not yet.

    With `out` it writes the outputs into tensors that follow the parameters.
    """
    name = _name(kernel, repr(kernel.module)) + ("_out" if out else "")
    with _lock:
        if name not in _defined:
            _define(name, kernel, out)
            _defined.add(name)
    return name


def define_training(t: autograd.Training) -> str:
    """The name of the operator of a training form, whose gradient is the operator of the derived backward."""
    backward = define(t.backward)
    # Inductor keeps compiled graphs from one process to the next, and finds them by the operators of the forward
    # pass: where the operator of the backward pass has another name, so has this one.
    name = _name(t.kernel, f"{t.derived.forward_text}\n{backward}") + "_training"
    with _lock:
        if name not in _defined:
            op = _define(name, t.forward, False)
            _differentiate(op, name, t, backward)
            _defined.add(name)
    return name


def _name(kernel: Kernel, content: str) -> str:
    stem = re.sub(r"\W", "_", Path(kernel.module.path).stem)
    return f"{stem}_{kernel.name}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _define(name: str, kernel: Kernel, out: bool) -> Any:
    signature = kernel.signature
    if signature.outputs and not out and not kernel.inout_at:
        made = _schema(kernel, out), lambda *a: kernel.ordered(a[:-1], a[-1]), partial(_fake, kernel)
        return Operator(name, *made, fresh=True)
    returns = bool(signature.outputs) and not out  # an operator must not return what it was given

    def run(*arguments: Any) -> Any:
        *given, choice = arguments
        outs = given[len(signature.params) :] if out else None
        with torch.no_grad():  # gradients are the dispatcher's business here
            results = kernel.ordered(given[: len(signature.params)], choice, outs)
        return results if returns else None

    mutated = [f"a{i}" for i in kernel.inout_at]
    if out:
        mutated += [f"out{k}" for k in range(len(signature.outputs))]
    op = torch.library.custom_op(f"kgen::{name}", run, mutates_args=mutated, schema=_schema(kernel, out))
    op.register_fake(partial(_fake, kernel) if returns else lambda *_: None)
    return op


def _fake(kernel: Kernel, *arguments: Any) -> Any:
    results = _fake_results(kernel, arguments[:-1])
    return results[0] if len(results) == 1 else tuple(results)


def _schema(kernel: Kernel, out: bool) -> str:
    parts = []
    for i, p in enumerate(kernel.signature.params):
        if isinstance(p, TensorParam):
            kind = f"Tensor(w{i}!)" if p.role == "inout" else "Tensor"
            kind += "?" if p.optional else ""
        else:
            kind = DTYPES[p.dtype].kind if p.dtype in DTYPES else "float"
        parts.append(f"{kind} a{i}")
    outputs = len(kernel.signature.outputs)
    if out:
        parts += [f"Tensor(o{k}!) out{k}" for k in range(outputs)]
    parts.append("str backend")
    returns = "" if out else ", ".join(["Tensor"] * outputs)
    return f"({', '.join(parts)}) -> " + (returns if returns == "Tensor" else f"({returns})")


def _fake_results(kernel: Kernel, values: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors like the outputs of a call, for arguments that may be fake and whose sizes may be symbolic."""
    spec, device = examine(kernel.signature, values, None, plain=False)
    body = kernel.specialize(spec)
    params = kernel.signature.params
    shapes = {
        p.name: tuple(v.shape)
        for p, v in zip(params, values, strict=True)
        if isinstance(p, TensorParam) and v is not None
    }
    dims, leading = constants(body) | bind_dims(body, shapes), leading_shapes(body, shapes)
    outputs = [t for t in body.tensors if t.role == "out"]
    return [torch.empty(full_shape(t, dims, leading), dtype=TORCH[t.dtype], device=device) for t in outputs]


def _differentiate(op: Any, name: str, t: autograd.Training, backward: str) -> None:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *given, ctx.choice = inputs
        values: list[Any] = [None] * len(t.kernel.signature.params)
        for i, v in zip(t.inputs, given, strict=True):
            values[i] = v
        autograd.keep(ctx, t, values, output if isinstance(output, tuple | list) else (output,))

    def run(ctx: Any, operator: Callable[..., Any], *grads: Any) -> Any:
        found = autograd.gradients(ctx, t, grads, lambda arguments: operator(backward, *arguments, ctx.choice))
        return (*(found.get(i) for i in t.inputs), None)

    differentiate(op, name, t.kernel, setup_context, run)
