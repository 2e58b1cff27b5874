"""An op as a Python function on tensors.

A call is classified once (`Ready`): dtypes, sizes, constants, which tensors are there, which gradients are wanted. What
remains of a warm call is to walk the plan's steps. Where an input requires grad, the backward section of the op is its
gradient.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from kgen.codegen.host import plan, sizing
from kgen.codegen.host.lower import lower
from kgen.codegen.shapes import ShapeError, bind_dims, full_shape, leading_shapes
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ast
from kgen.dsl.check import Signature, Specialization, TensorParam, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host import ir
from kgen.dsl.host.check import elaborate_op, header, source_of
from kgen.dsl.host.collectives import collectives_of
from kgen.dsl.host.scope import HostSpecialization
from kgen.runtime import registry
from kgen.runtime.autograd import exact_text, float_output, refuse_tangents, second_derivative
from kgen.runtime.binding import Binder, examine, has_memory, is_fake, refuse_scalar_gradient, scalar_converter
from kgen.runtime.errors import ArgumentError
from kgen.runtime.flight import SingleFlight
from kgen.runtime.host import ranks
from kgen.runtime.host.walk import Env, Walk
from kgen.runtime.kernel import Kernel

MAX_READY = 4096
_serials = itertools.count()
_by_serial: weakref.WeakValueDictionary[str, HostOp] = weakref.WeakValueDictionary()
ACCUMULATE = ("auto", "param", "f32")


@dataclass(frozen=True)
class Options:
    """What a call may choose without changing what is computed: see `HostOp.__call__`."""

    workspace_mb: float
    accumulate: str
    chunk: int | None

    @staticmethod
    def of(name: str, workspace_mb: float | None, accumulate: str, chunk: int | None) -> Options:
        """Checked, with the defaults filled in. Raises ArgumentError."""
        if accumulate not in ACCUMULATE:
            raise ArgumentError(f"{name}: accumulate must be one of {', '.join(ACCUMULATE)}, got {accumulate!r}")
        if workspace_mb is None:
            workspace_mb = _workspace_from_environment()
        if not workspace_mb > 0.0 or not math.isfinite(workspace_mb):
            raise ArgumentError(f"{name}: workspace_mb must be a positive number, got {workspace_mb!r}")
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise ArgumentError(f"{name}: chunk must be a positive number of rows, got {chunk!r}")
        return Options(float(workspace_mb), accumulate, chunk)


def _workspace_from_environment() -> float:
    text = os.environ.get("KGEN_WORKSPACE_MB", "")
    try:
        value = float(text) if text else sizing.DEFAULT_MB
    except ValueError:
        value = 0.0
    if not value > 0.0 or not math.isfinite(value):
        raise ArgumentError(f"KGEN_WORKSPACE_MB must be a positive number, got {text!r}")
    return value


class HostOp:
    """One op of a `.kdsl` file, callable with torch tensors: arguments as its signature has them, then options."""

    def __init__(self, module: ast.Module, name: str, kernel: Callable[[str, ir.KernelRef], Kernel]) -> None:
        """The op `name` of a checked module; `kernel` makes what is called, of a name and where it is defined."""
        op = next(o for o in module.ops if o.name == name)
        self.module = module
        self.source = source_of(module)
        self.path = path = module.path
        self.name = self.__name__ = name
        self.serial = f"{name} {next(_serials)}"  # what torch.compile knows this object by: text is a constant
        self.__doc__ = op.doc or f"The op `{name}` of {path}."
        self.header = header(op)
        self.signature: Signature = signature_of(op.header, Diagnostics())
        self.has_float_output = float_output(self.signature)
        self.has_backward = any(s.name == "backward" for s in op.sections)
        self.collective, self._agreed = collectives_of(op, self.source.kernels)
        params = self.signature.params
        self.tensor_at = tuple(i for i, p in enumerate(params) if isinstance(p, TensorParam))
        self.scalar_at = tuple(i for i, p in enumerate(params) if not isinstance(p, TensorParam))
        self.const_at = tuple(i for i in self.scalar_at if cast(Any, params[i]).const)
        self._kernel = kernel
        self._binder = Binder(self.signature)
        self._ready: dict[tuple[Any, ...], Ready] = {}
        self._programs: SingleFlight[tuple[Any, ...], ir.Program] = SingleFlight()
        self._plans: SingleFlight[tuple[Any, ...], plan.Plan] = SingleFlight()
        _by_serial[self.serial] = self

    def __repr__(self) -> str:
        return f"<op {self.name} of {self.path}>"

    def __copy__(self) -> HostOp:
        return self

    def __deepcopy__(self, _: Any) -> HostOp:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.module, self.name)

    def __call__(
        self,
        *args: Any,
        backend: str | None = None,
        workspace_mb: float | None = None,
        accumulate: str = "auto",
        chunk: int | None = None,
        group: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the op and return its output, or a tuple of them.

        backend: of the kernels; the reference multiplies matrices in float64. workspace_mb: MiB for what grows with a
        chunk; without it KGEN_WORKSPACE_MB, or 512. accumulate: how a sum over chunks is held whose tensor is f16 or
        bf16: `param` in that dtype, rounded at each chunk; `f32`, a buffer more, rounded once; `auto` so that the error
        does not grow with the number of chunks, in the less memory. chunk: the rows of a chunk, instead of a budget.
        group: of an op with collectives, the process group that they go over; None is torch's default group. Without
        torch.distributed, or in a group of one rank, there is nothing to reduce. Every rank of the group makes the same
        calls with the same sizes, but for dimensions that are a rank's own share, and with the same gradients wanted;
        where collectives stand in a loop over chunks, chunk= must be given, as a budget would make chunks of a share.

        Raises ArgumentError for an argument that does not fit the signature, BackendError where the backend cannot run.
        """
        if group is not None and not self.collective:
            raise ArgumentError(f"{self.name}: group= is for ops that have collectives, and this one has none")
        values = self._binder.bind(args, kwargs)
        if torch.compiler.is_dynamo_compiling() or any(map(is_symbolic, [values[i] for i in self.tensor_at])):
            from kgen.runtime.host import library  # imports torch.compile's machinery

            return library.call(self, values, backend, workspace_mb, accumulate, chunk)
        options = Options.of(self.name, workspace_mb, accumulate, chunk)
        choice = registry.requested(backend)
        wanted = self.requiring(values) if torch.is_grad_enabled() else ()
        ready = self.ready(values, wanted, choice, options)
        if self.collective:
            ready = ready.within(self._group(group, options))
        if wanted:
            function = _Call
            if torch._C._are_functorch_transforms_active():
                function = _TransformedCall
                if len(retrieve_all_functorch_interpreters()) > 1:  # torch.func.grad of torch.func.grad
                    raise second_derivative(self.name)
            results = cast(Any, function).apply(ready, *values)
            results = results[: ready.outputs]
        else:
            with torch.no_grad():
                results, _ = ready.forward(values)
        return results[0] if len(results) == 1 else tuple(results)

    def _group(self, group: Any, options: Options) -> Any:
        found = ranks.resolved(self.name, group)
        if found is not None and self._agreed and options.chunk is None:
            raise ArgumentError(
                f"{self.name}: its {found.size()} ranks meet in every chunk, and must have the same ones; pass chunk= "
                f"with a number of rows that all of them agree on"
            )
        return found

    def requiring(self, values: Sequence[Any]) -> tuple[int, ...]:
        """The parameters among `values` that ask for a gradient. Raises ArgumentError for one with a tangent, and for a
        scalar that asks for one."""
        if forward_ad._current_level >= 0:
            refuse_tangents(cast(Any, self), values)
        for i in self.scalar_at:
            if isinstance(v := values[i], torch.Tensor):
                refuse_scalar_gradient(self.name, self.signature.params[i].name, v, True)
        return tuple([i for i in self.tensor_at if getattr(values[i], "requires_grad", False)])

    def ready(self, values: Sequence[Any], wanted: tuple[int, ...], choice: str, options: Options) -> Ready:
        """The call classified, found or made. Raises as `__call__` does."""
        key: tuple[Any, ...] | None = (
            choice,
            wanted,
            options,
            *[
                (type(t), t.dtype, t.device, t.shape) if isinstance(t := values[i], torch.Tensor) else t
                for i in self.tensor_at
            ],
            *[(type(v := values[i]), v if v is True or v is False else exact_text(v)) for i in self.const_at],
        )
        try:
            found = self._ready.get(key)
        except TypeError:  # something unhashable where a tensor is expected, which examine says
            key, found = None, None
        if found is None:
            found = self._prepare(values, wanted, choice, options)
            if key is not None:
                if len(self._ready) >= MAX_READY:
                    self._ready.clear()
                self._ready[key] = found
        return found

    def _prepare(self, values: Sequence[Any], wanted: tuple[int, ...], choice: str, options: Options) -> Ready:
        # torch's transformations call with tensors that have no memory, and their functions with such as have.
        plain = not torch._C._are_functorch_transforms_active()
        spec, device = examine(self.signature, values, None, plain=plain)
        executor = registry.resolve(choice, device)
        dims, leading = self.bind(values, spec)
        p, sizes = self.plan(spec, wanted, dims, options, executor.backend)
        kernels = {name: self._kernel(name, ref) for name, ref in p.kernels.items()}

        def walk(steps: Sequence[plan.Step]) -> Walk:
            return Walk(p, steps, dims, sizes.chunks, device, executor.backend, kernels)

        return Ready(self, p, walk, dims, leading, device, result_dtypes(self, spec))

    # -- once for each signature ---------------------------------------------------------------------------------
    def bind(self, values: Sequence[Any], spec: Specialization) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        """The sizes of the dimensions, and what is behind starred ones. Sizes may be symbolic."""
        ints = {n: int(v) for n, v in spec.consts.items() if isinstance(v, int) and not isinstance(v, bool)}
        tensors = tuple(t for t in self.header.tensors if not t.optional or t.name in spec.present)
        used = {n for t in tensors for d in t.shape for n in d.symbols}
        head = replace(
            self.header,
            tensors=tensors,
            dims=tuple(d for d in self.header.dims if d in used),
            consts=tuple(sorted(ints.items())),
        )
        shapes = {
            p.name: tuple(v.shape)
            for p, v in zip(self.signature.params, values, strict=True)
            if isinstance(p, TensorParam) and v is not None
        }
        try:
            return {**ints, **bind_dims(head, shapes)}, leading_shapes(head, shapes)
        except ShapeError as error:
            raise ArgumentError(str(error)) from None

    def program(self, spec: Specialization, wanted: frozenset[str]) -> ir.Program:
        """The program for constants and optional tensors of `spec` and the gradients `wanted`; made once for each."""
        key = (_consts_key(spec.consts), spec.present, wanted)
        settled = HostSpecialization(spec.consts, spec.present, wanted)
        return self._programs.get_or_build(key, lambda: elaborate_op(self.source, self.name, settled))

    def plan_for(self, spec: Specialization, wanted: tuple[int, ...], accumulate: str) -> plan.Plan:
        """The plan with sums held as `kgen.codegen.host.lower` says for `accumulate`; made once for each."""
        names = frozenset(self.signature.params[i].name for i in wanted)
        dtypes = tuple(sorted((n, d.name) for n, d in spec.dtypes.items()))
        key = (_consts_key(spec.consts), spec.present, names, dtypes, accumulate)

        def build() -> plan.Plan:
            program = self.program(spec, names)
            without = sorted(names - program.gradients.keys())
            if without:
                what = "has no backward section" if not self.has_backward else f"gives no gradient of '{without[0]}'"
                raise ArgumentError(
                    f"{self.name}: argument '{without[0]}' requires grad, and the op {what}; detach it, or call under "
                    f"torch.no_grad()"
                )
            return lower(program, spec.dtypes, names, accumulate)

        return self._plans.get_or_build(key, build)

    def plan(
        self, spec: Specialization, wanted: tuple[int, ...], dims: Mapping[str, int], options: Options, backend: str
    ) -> tuple[plan.Plan, sizing.Sizes]:
        """The plan and the chunks of a call."""
        narrow = self.plan_for(spec, wanted, "param")
        budget = options.workspace_mb * 2**20
        sizes = sizing.sizes(narrow, dims, budget, options.accumulate, options.chunk)
        if backend == "reference" and options.accumulate != "param":
            return self.plan_for(spec, wanted, "f64"), sizes
        return (narrow if sizes.accumulate == "param" else self.plan_for(spec, wanted, "f32")), sizes


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
        self.op = op
        self._dtypes = dtypes
        self.plan = p
        self.dims = dims
        self.device = device
        self.outputs = len(p.outputs)
        self._walk = walk
        params = op.signature.params
        self._flat = {q.name: tuple(d.evaluate(dims) for d in q.shape) for q in op.signature.tensors if _bound(q, dims)}
        self._full = {t.name: full_shape(t, dims, leading) for t in op.header.tensors if _bound(t, dims)}
        self._tensors = [(i, params[i].name) for i in op.tensor_at]
        self._scalars = [
            (i, q.name, scalar_converter(op.name, q.name, DTYPES[q.dtype]))
            for i, q in enumerate(params)
            if not isinstance(q, TensorParam) and q.dtype in DTYPES
        ]
        self._position = {q.name: i for i, q in enumerate(params)}
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
        env = self._given(values, [n for _, n in self._tensors])
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
        return {self._position[n]: _shaped(env[b], self._full[n]) for n, b in self.plan.gradients}

    def _given(self, values: Sequence[Any], names: Sequence[str]) -> Env:
        env: Env = {name: convert(values[i]) for i, name, convert in self._scalars}
        env[ranks.GROUP] = self._group
        for name in names:
            t = values[self._position[name]]
            if t is not None:
                shape = self._flat[name]
                env[name] = t.detach() if t.shape == shape else t.detach().reshape(shape)
        return env


def _shaped(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Contiguous `t` in another shape, as a tensor of its own and no view of one: the caller may change it in place."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)


def _bound(t: Any, dims: Mapping[str, int]) -> bool:
    return all(n in dims for d in t.shape for n in d.symbols)


# ---- autograd ------------------------------------------------------------------------------------------------------


class _Call(torch.autograd.Function):
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


class _TransformedCall(torch.autograd.Function):
    """The same in the form that torch.func takes."""

    @staticmethod
    def forward(ready: Ready, *values: Any) -> Any:
        outputs, made = ready.forward(values)
        return (*outputs, *made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ready, *values = inputs
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

    @staticmethod
    def vmap(_: Any, __: Any, ready: Ready, *rest: Any) -> Any:
        raise _no_vmap(ready)


def _undifferentiable(ready: Ready, flat: list[Any], made: int) -> dict[int, torch.Tensor]:
    """The gradients by parameter, whose own gradient is refused. `flat`: parameters, outputs that are saved, `made`
    buffers of the forward section, and the gradients of the outputs."""
    # What a gradient made in the forward section came from is not among these: without a tensor that requires grad the
    # result would be taken for a constant.
    anchor = torch.zeros((), requires_grad=True)
    found = cast(Any, _Backward).apply(ready, made, *flat, anchor)
    return {i: g for (i, _), g in zip(sorted(_positions(ready)), found, strict=True)}


class _Backward(torch.autograd.Function):
    """A backward section whose own gradient is refused."""

    @staticmethod
    def forward(ready: Ready, made: int, *flat: Any) -> Any:
        sizes = (len(ready.op.signature.params), len(ready.shared), made, ready.outputs)
        values, shared, own, grads = (flat[sum(sizes[:k]) : sum(sizes[: k + 1])] for k in range(len(sizes)))
        found = ready.backward(values, shared, own, grads, donated=False)
        return tuple(found[i] for i, _ in sorted(_positions(ready)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0].op.name

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise second_derivative(ctx.name)

    @staticmethod
    def vmap(_: Any, __: Any, ready: Ready, *rest: Any) -> Any:
        raise _no_vmap(ready)  # as torch.func.jacrev asks for


def _no_vmap(ready: Ready) -> ArgumentError:
    return ArgumentError(f"{ready.op.name}: vmap does not reach into an op; pass tensors with more rows")


def _positions(ready: Ready) -> list[tuple[int, str]]:
    return [(ready._position[n], n) for n, _ in ready.plan.gradients]


def _keep(
    ctx: Any, ready: Ready, values: Sequence[Any], outputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor] = ()
) -> None:
    """Put on `ctx` the arguments and outputs that the backward pass reads."""
    needed = set(ready.plan.saved_inputs)
    ctx.ready = ready
    ctx.saved_at = [i for i, n in ready._tensors if n in needed]
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


def _unpickled(module: ast.Module, name: str) -> HostOp:
    from kgen.runtime.loading import KernelModule  # which imports this module

    return KernelModule(module)[name]


def by_serial(serial: str) -> HostOp:
    """The op whose `serial` this is. Raises KeyError where it is gone."""
    return _by_serial[serial]


# ---- small things --------------------------------------------------------------------------------------------------


def is_symbolic(value: Any) -> bool:
    """Whether `value` is a tensor that has no memory, such as torch.export passes."""
    return isinstance(value, torch.Tensor) and not has_memory(type(value)) and is_fake(value)


def result_dtypes(op: HostOp, spec: Specialization) -> dict[str, torch.dtype]:
    """The dtypes of the tensors of an op's signature."""
    return {t.name: TORCH[DTYPES[t.dtype] if t.dtype in DTYPES else spec.dtypes[t.dtype]] for t in op.signature.tensors}


def _consts_key(consts: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((n, type(v), repr(v)) for n, v in sorted(consts.items()))
