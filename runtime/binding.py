"""The arguments of a call by name and position, and every way in which one of them can be wrong.

`Binder` puts arguments in the order of the signature; it is on the path of every call. `examine` looks closely at
the tensors and says what they specialise the kernel to; it runs once for each new signature of a call.
"""

from __future__ import annotations

import inspect
import keyword
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, is_legacy_batchedtensor

from kgen.codegen.torch_dtypes import FROM_TORCH
from kgen.dsl.dtypes import DTYPES, F32, DType
from kgen.dsl.signature import KERNEL_OPTIONS, ScalarParam, Signature, Specialization, TensorParam
from kgen.runtime.derivatives import no_vmap
from kgen.runtime.errors import ArgumentError

ScalarValue = float | int | bool

_INT_RANGE = {
    d.name: (-(1 << (d.bits - 1)), (1 << (d.bits - 1)) - 1) if d.signed else (0, (1 << d.bits) - 1)
    for d in DTYPES.values()
    if d.kind == "int"
}


class Binder:
    """How the arguments of a call of one kernel are put in order."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.names = tuple(p.name for p in signature.params)
        self._index = {name: i for i, name in enumerate(self.names)}
        self._defaults = tuple(_default(p) for p in signature.params)
        self._required = tuple((i, self.names[i]) for i, d in enumerate(self._defaults) if d is _MISSING)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """One value for each parameter, in order of the signature; None for an optional tensor that is not given.

        Raises ArgumentError for too many, unknown, repeated and missing arguments.
        """
        n = len(self.names)
        if len(args) > n:
            self.fail(f"takes {n} argument{'s' * (n != 1)} ({', '.join(self.names)}), got {len(args)}")
        values = [*args, *self._defaults[len(args) :]]
        for name, value in kwargs.items():
            i = self._index.get(name)
            if i is None:
                outputs = {t.name for t in self.signature.outputs}
                hint = "pass outputs as out=" if name in outputs else f"it takes {', '.join(self.names)}"
                self.fail(f"there is no argument '{name}'; {hint}")
            if i < len(args):
                self.fail(f"argument '{name}' is given twice, by position and by name")
            values[i] = value
        # Asked of names, not of values: a trace cannot compare a symbolic number with an object.
        for i, name in self._required:
            if i >= len(args) and name not in kwargs:
                missing = [f"'{n}'" for k, n in self._required if k >= len(args) and n not in kwargs]
                self.fail(f"missing argument{'s' * (len(missing) != 1)} {', '.join(missing)}")
        return values

    def outputs(self, given: Any, option: str = "out") -> tuple[torch.Tensor, ...]:
        """The tensors of `out=`, or of the option of that name, one for each output. Raises ArgumentError."""
        found = (given,) if isinstance(given, torch.Tensor) else given
        if not isinstance(found, list | tuple) or len(found) != len(self.signature.outputs):
            names = ", ".join(t.name for t in self.signature.outputs) or "none"
            got = f"a {type(given).__name__}" if not isinstance(found, list | tuple) else f"{len(found)} tensors"
            self.fail(f"{option}= must be one tensor for each output ({names}), got {got}")
        return tuple(found)

    def models(self, given: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of `like=`. Raises ArgumentError."""
        found = self.outputs(given, "like")
        for t in found:
            if not isinstance(t, torch.Tensor):
                self.fail(f"like= must be tensors, got a {type(t).__name__}")
        return found

    def fail(self, problem: str) -> NoReturn:
        """Raise ArgumentError about this kernel."""
        raise ArgumentError(f"{self.signature.name}: {problem}")


def python_signature(signature: Signature) -> inspect.Signature | None:
    """The signature of a kernel as of a Python function: its parameters with their defaults, each annotated as in the
    file, then those of every call. None where Python has no such name for one of them."""
    if any(keyword.iskeyword(p.name) for p in signature.params):
        return None
    either, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    found = {
        p.name: inspect.Parameter(
            p.name, either, default=inspect.Parameter.empty if (d := _default(p)) is _MISSING else d,
            annotation=_type_text(p),
        )
        for p in signature.params
    }  # fmt: skip
    for name, default in KERNEL_OPTIONS.items():
        found.setdefault(name, inspect.Parameter(name, named, default=default))
    outputs = [f"{t.name}: {_type_text(t)}" for t in signature.outputs]
    # Not validated: an optional tensor may stand in front of an argument that must be given.
    return inspect.Signature(
        list(found.values()), return_annotation=f"({', '.join(outputs)})", __validate_parameters__=False
    )


def _type_text(p: TensorParam | ScalarParam) -> str:
    """What stands behind the colon in the file."""
    if isinstance(p, ScalarParam):
        return f"{'const ' if p.const else ''}{p.dtype}"
    dims = ", ".join(("*" if p.star and i == 0 else "") + str(s) for i, s in enumerate(p.shape))
    return f"{'inout ' if p.role == 'inout' else ''}{p.dtype}[{dims}]{'?' if p.optional else ''}"


_MISSING: Any = object()  # the default of an argument that must be given


def _default(p: TensorParam | ScalarParam) -> Any:
    if isinstance(p, TensorParam):
        return None if p.optional else _MISSING
    return _MISSING if p.default is None else p.default


# ---- scalars -------------------------------------------------------------------------------------------------------


def scalar_converter(kernel: str, name: str, dtype: DType, *, recorded: bool = False) -> Callable[[Any], ScalarValue]:
    """A function from what a caller may pass for scalar `name` to a Python value of `dtype`.

    It takes Python and numpy numbers and CPU tensors with one element. It raises ArgumentError for anything else, for
    an integer that does not fit, for a GPU tensor, whose value only a synchronisation could tell, and for a tensor
    whose gradient is asked for. `recorded`: the call is part of one that records gradients, with the grad mode off.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.device.type != "cpu":
                raise ArgumentError(
                    f"{kernel}: scalar argument '{name}' must be a number, "
                    f"got a tensor of shape {tuple(value.shape)} on {value.device}"
                )
            refuse_scalar_gradient(kernel, name, value, recorded or torch.is_grad_enabled())
            return value.item()
        return value

    def refuse(value: Any) -> NoReturn:
        what = {"int": "an integer", "bool": "a bool"}.get(dtype.kind, "a number")
        raise ArgumentError(f"{kernel}: scalar argument '{name}' must be {what} ({dtype}), got {_describe(value)}")

    if dtype.kind == "bool":

        def to_bool(value: Any) -> bool:
            if value is True or value is False:
                return value
            value = plain(value)
            if type(value).__name__ not in ("bool", "bool_"):
                refuse(value)
            return bool(value)

        return to_bool

    if dtype.kind == "int":
        low, high = _INT_RANGE[dtype.name]

        def to_int(value: Any) -> int:
            if type(value) is not int:
                value = plain(value)
                try:
                    value = operator.index(value)
                except TypeError:
                    refuse(value)
            if not low <= value <= high:
                raise ArgumentError(
                    f"{kernel}: scalar argument '{name}' must fit {dtype} ({low} to {high}), got {value}"
                )
            return value

        return to_int

    largest = _LARGEST[dtype.name]

    def to_float(value: Any) -> float:
        if type(value) is not float:
            value = plain(value)
            try:
                value = float(value) if not isinstance(value, str | bytes) else refuse(value)
            except OverflowError:
                raise ArgumentError(
                    f"{kernel}: scalar argument '{name}' must fit {dtype}; the integer given is larger than any float"
                ) from None
            except (TypeError, ValueError):
                refuse(value)
        # What rounds to infinity is infinity, on every executor.
        return math.copysign(math.inf, value) if value >= largest or value <= -largest else value

    return to_float


def refuse_scalar_gradient(kernel: str, name: str, value: torch.Tensor, recording: bool) -> None:
    """Raise for the value of scalar `name` that a transform differentiates or batches, or, where gradients are
    recorded, that requires grad: no gradient would reach it, which means one of zero."""
    if is_batchedtensor(value):
        raise no_vmap(kernel)
    if is_functorch_wrapped_tensor(value) or (recording and value.requires_grad):
        raise no_scalar_gradient(kernel, name)


def no_scalar_gradient(kernel: str, name: str) -> ArgumentError:
    """The error for scalar `name`, whose gradient is asked for."""
    return ArgumentError(
        f"{kernel}: scalar argument '{name}' requires grad, and gradients of scalars are not derived; pass a number, "
        f"or {name}.detach() where its gradient is not wanted"
    )


# The least magnitude that rounds to infinity: the largest finite value and half a unit in its last place.
_LARGEST = {"f16": 65520.0, "bf16": 3.3961775292304601e38, "f32": 3.4028235677973366e38, "f64": math.inf}


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 else f"a {type(value).__name__}"


# ---- tensors -------------------------------------------------------------------------------------------------------


def examine(
    signature: Signature, values: Sequence[Any], out: Sequence[torch.Tensor] | None, *, plain: bool = True
) -> tuple[Specialization, torch.device]:
    """What the arguments of a call specialise the kernel to, and the device they are on.

    `values` is in order of the signature, `out` in order of the outputs. Shapes are not looked at here. `plain=False`
    admits tensors without memory of their own, which torch's transformations call their functions with. Raises
    ArgumentError for what is no dense tensor of a dtype that the signature allows, and for tensors on several devices.
    """
    name = signature.name
    dtypes: dict[str, DType] = {}
    bound_by: dict[str, str] = {}
    consts: dict[str, ScalarValue] = {}
    present: set[str] = set()
    places: dict[str, torch.device] = {}
    given: list[tuple[TensorParam, Any]] = []
    for p, value in zip(signature.params, values, strict=True):
        if isinstance(p, TensorParam):
            if value is not None or not p.optional:
                given.append((p, value))
        elif p.const:
            if p.dtype not in DTYPES:
                raise ArgumentError(f"{name}: const parameter '{p.name}' has dtype variable {p.dtype}; name a dtype")
            consts[p.name] = scalar_converter(name, p.name, DTYPES[p.dtype])(value)
    given += zip(signature.outputs, out or (), strict=False)
    for p, value in given:
        _check_kind(name, p, value, plain)
        dtype = FROM_TORCH.get(value.dtype)
        if p.dtype in DTYPES:
            if dtype is not DTYPES[p.dtype]:
                raise ArgumentError(f"{name}: argument '{p.name}' must have dtype {p.dtype}, got {_dtype(value)}")
        else:
            allowed = signature.dtype_vars[p.dtype]
            if dtype not in allowed:
                listed = ", ".join(map(str, allowed))
                raise ArgumentError(
                    f"{name}: argument '{p.name}' has dtype {_dtype(value)}, but {p.dtype} stands for one of {listed}"
                )
            if dtypes.setdefault(p.dtype, dtype) is not dtype:
                raise ArgumentError(
                    f"{name}: argument '{p.name}' has dtype {dtype}, but {p.dtype} is {dtypes[p.dtype]} "
                    f"by argument '{bound_by[p.dtype]}'"
                )
            bound_by.setdefault(p.dtype, p.name)
        places[p.name] = value.device
        if p.optional:
            present.add(p.name)
    if len(set(places.values())) > 1:
        listed = ", ".join(f"'{n}' on {d}" for n, d in places.items())
        raise ArgumentError(f"{name}: all tensors must be on one device, got {listed}")
    for var, choices in signature.dtype_vars.items():
        if var not in dtypes:
            dtypes[var] = _unbound(signature, var, choices)
    device = next(iter(places.values()), None)
    if device is None:
        raise ArgumentError(f"{name}: no tensor is given, so there is no device to run on; pass out=")
    return Specialization(dtypes, consts, frozenset(present)), device


def _check_kind(kernel: str, p: TensorParam, value: Any, plain: bool) -> None:
    """Refuse what is not a strided tensor on a device that kernels run on, and, with `plain`, one without memory."""
    if not isinstance(value, torch.Tensor):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise ArgumentError(f"{kernel}: argument '{p.name}' must be a torch.Tensor, got {kind}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}; use .to_dense()"
        raise ArgumentError(f"{kernel}: argument '{p.name}' must be a dense tensor, got {kind}")
    if value.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{kernel}: argument '{p.name}' must be on a CPU or CUDA device, got {value.device}")
    if plain and torch._is_functional_tensor(value):  # pyright: ignore[reportPrivateImportUsage]
        raise ArgumentError(f"{kernel}: torch.func.functionalize does not reach into a kernel; call it outside")
    if plain and is_functorch_wrapped_tensor(value):
        if is_batchedtensor(value):
            raise no_vmap(kernel)
        raise ArgumentError(
            f"{kernel}: argument '{p.name}' belongs to a transform of torch.func, and under torch.no_grad() none "
            f"reaches into a kernel; pass x.detach() where its gradient is not wanted"
        )
    if plain and is_legacy_batchedtensor(value):
        raise ArgumentError(
            f"{kernel}: many gradients at once (vectorize=True, is_grads_batched=True) are a vmap, which does not "
            f"reach into a kernel; ask for one after another"
        )
    if plain and not has_memory(type(value)):
        raise ArgumentError(
            f"{kernel}: argument '{p.name}' is a {type(value).__name__} that has no memory of its own; "
            f"pass a plain torch.Tensor (for a distributed tensor its local part)"
        )
    if plain and value.numel() and not value.data_ptr():
        raise ArgumentError(f"{kernel}: argument '{p.name}' has elements but no memory: its storage was freed")


def is_batched(value: object) -> bool:
    """Whether `value` is a tensor inside torch.func.vmap, with other transforms around or within."""
    while isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        if is_batchedtensor(value):
            return True
        value = get_unwrapped(value)
    return False


def has_memory(kind: type) -> bool:
    """Whether tensors of type `kind` are plain. Those with a dispatch of their own have no memory, or other memory."""
    return getattr(kind, "__torch_dispatch__", None) is _PLAIN_DISPATCH


def is_traced(name: str) -> bool:
    """Whether torch records operators around a call of kernel or op `name`, or works out their shapes (`make_fx`, fake
    tensors): results of what is no operator would be constants of its graph, or have no memory. Raises ArgumentError
    under torch.jit.trace, which cannot be told of such operators."""
    if torch._C._get_tracing_state() is not None:
        raise ArgumentError(f"{name}: torch.jit.trace does not record kernels; use torch.compile or torch.export")
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACERS))


_TRACERS = [getattr(torch._C._TorchDispatchModeKey, kind) for kind in ("PROXY", "FAKE", "FUNCTIONAL")]


def is_fake(value: object) -> bool:
    """Whether `value` is a tensor that stands for the shape and dtype of one, as torch.export passes."""
    from torch._subclasses.fake_tensor import FakeTensor  # only needed for what is no plain tensor

    return isinstance(value, FakeTensor)


_PLAIN_DISPATCH = getattr(torch.Tensor, "__torch_dispatch__", None)


def _dtype(value: torch.Tensor) -> str:
    found = FROM_TORCH.get(value.dtype)
    return str(found) if found is not None else str(value.dtype)


def _unbound(signature: Signature, var: str, choices: tuple[DType, ...]) -> DType:
    """A dtype for a variable that no argument given has."""
    open_ = len(choices) != 1
    if open_ and any(t.dtype == var for t in signature.outputs):
        raise ArgumentError(
            f"{signature.name}: the dtype {var} of an output follows from no argument that is given; pass out="
        )
    return next((d for d in choices if d is F32), choices[0])
