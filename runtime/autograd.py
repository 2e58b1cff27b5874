"""Gradients of kernel calls: the training form of a kernel, its derived backward, and torch's autograd around them.

A call that is to be differentiated runs the training form (`kgen.codegen.derive`): the same outputs, and residuals that
the backward kernel reads. That one is derived, or the one that the file has for such a call. Both are ordinary kernels,
so variants, layouts and backends are those of any call; the backward runs on the backend of its forward.
`kgen.runtime.library` gives torch.compile the same two kernels.

Not done here: gradients of gradients, and gradients of kernels that write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from kgen.dsl.signature import TensorParam
from kgen.runtime.binding import examine, refuse_scalar_gradient
from kgen.runtime.derivatives import Once, ReverseOnly
from kgen.runtime.errors import ArgumentError
from kgen.runtime.picking import picker
from kgen.runtime.unrolled import Recorded

if TYPE_CHECKING:
    from kgen.codegen.derive import Derived
    from kgen.dsl import ir
    from kgen.runtime.kernel import Kernel
    from kgen.runtime.plan import ReadyCall

# Where an argument of a backward kernel comes from ("saved", "cotangent", "scalar"), and which one it is there.
Place = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Training:
    """The two kernels behind one call that records gradients, and which argument is what.

    `inputs` are the parameters of the original kernel that `forward` takes, in its order; `outputs` counts the original
    outputs, which come first among those of `forward`, before the residuals. `saved` are the parameters kept for the
    backward pass, `kept` the results of `forward` that follow them: residuals, and outputs that `backward` reads.
    `arguments` has a place for each parameter of `backward`: in saved and kept, among the gradients of outputs, among
    the original parameters. `gradients` maps a parameter of the original kernel to its gradient among the outputs of
    `backward`.
    """

    kernel: Kernel
    derived: Derived
    forward: Kernel
    backward: Kernel
    inputs: tuple[int, ...]
    outputs: int
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    arguments: tuple[Place, ...]
    gradients: dict[int, int]

    @property
    def called(self) -> Kernel:
        """The original kernel."""
        return self.kernel

    @cached_property
    def reached(self) -> frozenset[int]:
        """The outputs that carry a gradient, whether or not the backward kernel reads what arrives."""
        return frozenset(i for i, t in enumerate(self.kernel.signature.outputs) if t.name in self.derived.cotangents)

    @cached_property
    def unreached(self) -> tuple[int, ...]:
        """The outputs that carry none."""
        return tuple(i for i in range(self.outputs) if i not in self.reached)

    @cached_property
    def pick_saved(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Takes the parameters that are kept for the backward pass out of the original ones."""
        return picker(self.saved)

    @cached_property
    def pick_kept(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """Takes the results that are kept out of those of `forward`."""
        return picker(self.kept)

    @cached_property
    def scalars(self) -> tuple[int, ...]:
        """The parameters of the original kernel whose numbers the backward kernel reads."""
        return tuple(i for where, i in self.arguments if where == "scalar")


def training(kernel: Kernel, values: Sequence[Any], wanted: tuple[int, ...]) -> Training:
    """The training form of `kernel` for arguments like `values` and the gradients of the parameters `wanted`.

    Raises ArgumentError for arguments that do not fit, DeriveError naming the construct that has no derivative.
    """
    try:
        dtypes = tuple(None if (t := values[i]) is None else t.dtype for i in kernel.tensor_at)
        consts = tuple((type(v := values[i]), v if v is True or v is False else exact_text(v)) for i in kernel.const_at)
    except AttributeError:  # something that is no tensor, which examine says
        examine(kernel.signature, values, None)
        raise
    key = (dtypes, consts, wanted)
    found = kernel.trainings.get(key)
    if found is not None:
        return found

    def build() -> Training:
        spec, _ = examine(kernel.signature, values, None, plain=False)
        return _training(kernel, kernel.specialize(spec), wanted)

    return kernel.trainings.get_or_build(key, build)


def exact_text(value: Any) -> str:
    """The value of a const parameter as text, which tells 0.0 and -0.0 apart; that of a tensor with all its digits."""
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def _training(kernel: Kernel, specialized: ir.Kernel, wanted: tuple[int, ...]) -> Training:
    # Only needed where gradients are.
    from kgen.codegen.derive.pair import module_of
    from kgen.codegen.derive.written import gradients_of
    from kgen.runtime.kernel import Kernel as Made  # which imports this module

    params = kernel.signature.params
    position = {p.name: i for i, p in enumerate(params)}
    names = frozenset(params[i].name for i in wanted)
    derived = gradients_of(kernel.module, specialized, names)
    # The training form has the kernel's own name: a mistake in a call is told in the user's words.
    module = module_of(derived.forward)
    renamed = tuple(replace(k, name=kernel.name) for k in module.kernels)
    forward = Made(replace(module, kernels=renamed), kernel.name)
    forward.recorded = True
    backward = Made(module_of(derived.backward), derived.backward.name)
    takes = [p for p in backward.signature.params if isinstance(p, TensorParam) and p.name in position]
    saved = tuple(position[p.name] for p in takes)
    places: dict[str, Place] = {p.name: ("saved", k) for k, p in enumerate(takes)}
    outputs = [t.name for t in kernel.signature.outputs]
    kept = [(r, len(outputs) + k) for k, r in enumerate(derived.residuals)]
    kept += [(name, outputs.index(name)) for name in derived.outputs]
    places |= {name: ("saved", len(saved) + k) for k, (name, _) in enumerate(kept)}
    places |= {d: ("cotangent", outputs.index(name)) for name, d in derived.cotangents.items()}
    results = [t.name for t in backward.signature.outputs]
    return Training(
        kernel=kernel,
        derived=derived,
        forward=forward,
        backward=backward,
        inputs=tuple(position[p.name] for p in forward.signature.params),
        outputs=len(outputs),
        saved=saved,
        kept=tuple(i for _, i in kept),
        arguments=tuple(places.get(p.name) or ("scalar", position[p.name]) for p in backward.signature.params),
        gradients={position[name]: results.index(d) for name, d in derived.gradients.items()},
    )


# ---- one definition of both directions, for eager calls and for torch.compile ----------------------------------------


class Like(NamedTuple):
    """Shape, dtype and device of an output, for a gradient of zeros where none arrives."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(t: torch.Tensor) -> Like:
        """That of `t`."""
        return Like(t.shape, t.dtype, t.device)

    def zeros(self) -> torch.Tensor:
        """A gradient of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def keep(ctx: Any, t: Training, values: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
    """Put on `ctx` what the backward pass needs; `values` are in order of the original parameters. Residuals are
    results of the torch function too."""
    ctx.save_for_backward(*t.pick_saved(values), *t.pick_kept(results))
    # The numbers of this call, as a tensor or array that is given for one may have another by then.
    ctx.scalars = {i: v.item() if hasattr(v := values[i], "item") else v for i in t.scalars}
    ctx.likes = {i: Like.of(results[i]) for i in t.reached} if len(t.reached) > 1 else {}
    ctx.set_materialize_grads(False)
    silent = [*(results[i] for i in t.unreached), *results[t.outputs :]]
    if silent:
        ctx.mark_non_differentiable(*silent)


def gradients(
    ctx: Any, t: Training, grads: Sequence[torch.Tensor | None], run: Callable[[list[Any]], Any]
) -> dict[int, torch.Tensor]:
    """The gradient of each wanted parameter, from what `keep` put on `ctx`; `run` calls the backward kernel. Empty
    where no gradient arrives."""
    if all(grads[i] is None for i in t.reached):
        return {}
    saved = ctx.saved_tensors
    arguments: list[Any] = []
    for where, i in t.arguments:
        if where == "saved":
            arguments.append(saved[i])
        elif where == "scalar":
            arguments.append(ctx.scalars[i])
        else:
            g = grads[i]
            arguments.append(ctx.likes[i].zeros() if g is None else g)
    results = run(arguments)
    results = results if isinstance(results, tuple) else (results,)
    return {i: results[k] for i, k in t.gradients.items()}


# ---- eager calls -----------------------------------------------------------------------------------------------------


def record(
    kernel: Kernel, values: list[Any], wanted: tuple[int, ...], choice: str, like: Sequence[torch.Tensor] | None
) -> Any:
    """Call `kernel` so that its outputs carry the gradients of the parameters `wanted`; see `Kernel.__call__`."""
    function = _Call
    if torch._C._are_functorch_transforms_active():
        function = _TransformedCall
        for i in (*kernel.scalar_at, *kernel.const_at):  # its forward sees what is wrapped, here, as plain tensors
            if isinstance(v := values[i], torch.Tensor):
                refuse_scalar_gradient(kernel.name, kernel.signature.params[i].name, v, True)
    t = training(kernel, values, wanted)
    results = cast(Any, function).apply(t, choice, like, *values)
    return results[0] if t.outputs == 1 else tuple(results[: t.outputs])


def refuse(kernel: Kernel, values: Sequence[Any], wanted: Sequence[int], outs: Sequence[Any] | None) -> None:
    """Raise for a call that writes to given tensors while an input that it only reads asks for a gradient."""
    read = [p.name for i in wanted if isinstance(p := kernel.signature.params[i], TensorParam) and p.role == "in"]
    if outs is not None and read:
        raise ArgumentError(
            f"{kernel.name}: a call with out= records no gradient, but argument '{read[0]}' requires grad; "
            f"call without out=, or under torch.no_grad()"
        )
    if read:
        training(kernel, values, tuple(wanted))  # says that a kernel that overwrites an argument is not derived


class _Call(torch.autograd.Function):
    """The training form of one kernel call."""

    @staticmethod
    def forward(ctx: Any, t: Training, choice: str, like: Sequence[torch.Tensor] | None, *values: Any) -> Any:
        results = _run_forward(t, choice, like, values)
        ctx.training, ctx.choice = t, choice
        keep(ctx, t, values, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        t: Training = ctx.training
        found = gradients(ctx, t, grads, lambda arguments: _run_backward(t, ctx.choice, arguments))
        return (None, None, None, *(found.get(i) for i in range(len(ctx.needs_input_grad) - 3)))


class Task(NamedTuple):
    """What the backward pass of a call that guards have recognised needs of it, beside tensors and numbers: the
    training form, the backend, which of the original parameters are tensors that are given, and what outputs are like
    where a gradient of zeros may be needed."""

    training: Training
    choice: str
    tensors: Sequence[int]
    likes: Mapping[int, Like]


class _KnownCall(_Call):
    """The same for a call that guards have recognised; see `kgen.runtime.unrolled.Recorded`."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], told: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        return run(ctx, told, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        task: Task = ctx.task
        t, choice = task.training, task.choice
        ctx.likes = task.likes
        found = gradients(ctx, t, grads, lambda arguments: _run_backward(t, choice, arguments))
        return (None, None, *map(found.get, task.tensors))


def recorded(t: Training, choice: str, ready: ReadyCall, tensors: Sequence[int]) -> Recorded | None:
    """What a call of `t` does whose training form is ready, with the original parameters `tensors` guarded; None
    where the training form has no plan."""
    if ready.plan is None:
        return None
    several = len(t.reached) > 1
    outputs = {i: ready.outputs[i] for i in t.reached} if several else {}
    likes = {i: Like(torch.Size(a.shape), a.dtype, ready.device) for i, a in outputs.items()}
    return Recorded(
        apply=_apply,
        plan=ready.plan,
        takes=[tensors.index(i) for i in t.inputs if i in tensors],
        results=len(ready.outputs),
        outputs=t.outputs,
        silent=t.unreached,
        task=Task(t, choice, tensors, likes),
        numbers=t.scalars,
        saved=t.saved,
        kept=t.kept,
    )


# What torch.autograd.Function.apply comes down to where no transform of torch.func is active, as guards make sure.
_apply: Callable[..., Any] = getattr(super(torch.autograd.Function, _KnownCall), "apply")  # noqa: B009  # no stub has it


class _TransformedCall(ReverseOnly):
    """The same in the form that torch.func takes, which costs some 20 us more a call."""

    @staticmethod
    def forward(t: Training, choice: str, like: Sequence[torch.Tensor] | None, *values: Any) -> Any:
        return _run_forward(t, choice, like, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        t, choice, _, *values = inputs
        ctx.name, ctx.training, ctx.choice = t.called.name, t, choice
        keep(ctx, t, values, output)

    backward = _Call.backward


def _run_forward(t: Training, choice: str, like: Sequence[torch.Tensor] | None, values: Sequence[Any]) -> Any:
    results = t.forward.ordered([values[i] for i in t.inputs], choice, None, like)
    return results if isinstance(results, tuple) else (results,)


def _run_backward(t: Training, choice: str, arguments: list[Any]) -> Any:
    if torch.is_grad_enabled():  # create_graph=True: the results must say that they cannot be differentiated
        return cast(Any, Once).apply(t, lambda *given: t.backward.ordered(given, choice), *arguments)
    return t.backward.ordered(arguments, choice)
