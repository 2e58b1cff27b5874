"""An op as a Python function on tensors.

A call is classified once (`Ready`): dtypes, sizes, constants, which tensors are there, which gradients are wanted. What
remains of a warm call is to walk the plan's steps. Where an input requires grad, the backward section of the op is its
gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from kgen.codegen.host import plan, sizing
from kgen.codegen.host.lower import lower
from kgen.codegen.shapes import ShapeError, bind_dims, leading_shapes
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
from kgen.runtime.autograd import exact_text
from kgen.runtime.binding import Binder, examine, has_memory, is_batched, is_fake, is_traced, refuse_scalar_gradient
from kgen.runtime.derivatives import no_forward_mode, no_vmap, second_derivative
from kgen.runtime.differentiable import float_output, refuse_tangents
from kgen.runtime.errors import ArgumentError
from kgen.runtime.flight import SingleFlight
from kgen.runtime.host import ranks
from kgen.runtime.host.autograd import Call, TransformedCall
from kgen.runtime.host.options import Options
from kgen.runtime.host.ready import Ready
from kgen.runtime.host.walk import Walk
from kgen.runtime.kernel import Kernel

MAX_READY = 4096
_serials = itertools.count()
_by_serial: weakref.WeakValueDictionary[str, HostOp] = weakref.WeakValueDictionary()


class HostOp:
    """One op of a `.kdsl` file, callable with torch tensors: arguments as its signature has them, then options."""

    noun = "an op"

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
        /,
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
        symbolic = torch.compiler.is_dynamo_compiling() or any(map(is_symbolic, [values[i] for i in self.tensor_at]))
        if symbolic or is_traced(self.name):
            from kgen.runtime.host import library  # imports torch.compile's machinery

            return library.call(self, values, backend, workspace_mb, accumulate, chunk)
        transformed = torch._C._are_functorch_transforms_active()
        if transformed and any(map(is_batched, values)):
            raise no_vmap(self.name, self.noun)
        if forward_ad._current_level >= 0 and self.has_float_output:  # torch.no_grad() stops no tangent
            refuse_tangents(self, values)
        options = Options.of(self.name, workspace_mb, accumulate, chunk)
        choice = registry.requested(backend)
        wanted = self.requiring(values) if torch.is_grad_enabled() else ()
        ready = self.ready(values, wanted, choice, options)
        if self.collective:
            ready = ready.within(self._group(group, options))
        if wanted:
            function = Call
            if transformed:
                function = TransformedCall
                levels = retrieve_all_functorch_interpreters()
                if any(level.key() == TransformType.Jvp for level in levels):  # around a torch.func.grad
                    raise no_forward_mode(self.name, "an argument")
                if len(levels) > 1:  # torch.func.grad of torch.func.grad
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
        """The parameters among `values` that ask for a gradient. Raises ArgumentError for a scalar that does."""
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
