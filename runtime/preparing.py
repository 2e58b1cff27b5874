"""The first call of a signature: from tensors to a compiled kernel that is ready to run on their like.

What arguments specialise a kernel to (`binding`), its tile IR, the sizes and the memory of a call (`layouts`), the
schedules that were measured (`tuned`), and an executor's build, once for each compiled variant (`plan`). Imported where
a call is unlike all that this process and earlier ones have seen (`stored`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from kgen.codegen.knobs import Knobs
from kgen.codegen.schedule import ScheduleError
from kgen.codegen.shapes import ShapeError, bind_dims, constants, full_shape, leading_shapes
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir
from kgen.dsl.check import elaborate
from kgen.dsl.signature import Specialization, TensorParam
from kgen.runtime import events, registry, stored, tuned
from kgen.runtime.backends.base import Executor
from kgen.runtime.backends.launch import Built
from kgen.runtime.binding import examine
from kgen.runtime.cache import CACHE
from kgen.runtime.errors import ArgumentError, BackendError
from kgen.runtime.layouts import Layout, Memory, layout
from kgen.runtime.overlap import meets_itself
from kgen.runtime.plan import Argument, PlanKey, ReadyCall, ScalarSlot, scalar_slot

if TYPE_CHECKING:
    from kgen.runtime.kernel import Kernel


def specialized(called: Kernel, spec: Specialization) -> ir.Kernel:
    """The tile IR of `called` for given dtypes, constants and optional tensors; made once for each."""
    return called.kernels.get_or_build(_spec_key(spec), lambda: elaborate(called.module, called.name, spec))


def prepare(
    called: Kernel,
    values: Sequence[Any],
    outs: Sequence[Any] | None,
    choice: str,
    like: Sequence[torch.Tensor] | None = None,
) -> ReadyCall:
    """What a call with these arguments runs; `outs` and `like` are as for `Kernel.ordered`.

    Raises ArgumentError and BackendError with every message that a call of a checked kernel has for its user.
    """
    spec, device = examine(called.signature, values, outs)
    stored.prepares(called)
    executor = registry.resolve(choice, device)
    kernel = specialized(called, spec)
    given = {
        p.name: v
        for p, v in zip(called.signature.params, values, strict=True)
        if isinstance(p, TensorParam) and v is not None
    }
    shapes = {name: tuple(t.shape) for name, t in given.items()}
    if outs is not None:
        shapes |= {p.name: tuple(t.shape) for p, t in zip(called.signature.outputs, outs, strict=True)}
    dims, leading = _bind_dims(kernel, shapes)
    outputs = [t for t in kernel.tensors if t.role == "out"]
    if outs is not None:
        given |= {t.name: x for t, x in zip(outputs, outs, strict=True)}
    models = {t.name: x for t, x in zip(outputs, like or (), strict=False)}
    arguments = [_argument(called, t, given.get(t.name), models.get(t.name), dims, leading) for t in kernel.tensors]
    new = arguments[len(arguments) - len(outputs) :]
    scalars = _scalar_slots(called, kernel)
    event = events.Launch(called.name, executor.name, str(device), 0)
    empty = all(0 in a.shape for a in arguments if a.written)
    if empty or prod(max(0, a.extent.evaluate(dims)) for a in kernel.parallel) == 0:
        # Nothing to launch. A sum over no programs is zero; any other output has no elements.
        sums = {s.tensor for s in kernel.body if isinstance(s, ir.Accumulate)}
        zeroed = [i for i, t in enumerate(outputs) if t.name in sums]
        return ReadyCall(called.name, device, arguments, new, scalars, None, None, event, zeroed, outs is not None)
    built, where, executor = _plan(called, kernel, spec, dims, arguments, given, executor, device, choice)
    launch, grid = built.prepare(where)
    event = events.Launch(called.name, executor.name, str(device), grid)
    return ReadyCall(
        called.name,
        device,
        arguments,
        new,
        scalars,
        launch,
        built,
        event,
        (),
        outs is not None,
        [s.dtype.name for s in kernel.scalars],
    )


def _scalar_slots(called: Kernel, kernel: ir.Kernel) -> list[ScalarSlot]:
    return [
        scalar_slot(called.name, i, s.name, s.dtype, s.default, called.recorded)
        for i, s in zip(called.scalar_at, kernel.scalars, strict=True)
    ]


def _bind_dims(
    kernel: ir.Kernel, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    try:
        return constants(kernel) | bind_dims(kernel, shapes), leading_shapes(kernel, shapes)
    except ShapeError as error:
        raise ArgumentError(str(error)) from None


def _argument(
    called: Kernel,
    t: ir.Tensor,
    given: torch.Tensor | None,
    like: torch.Tensor | None,
    dims: Mapping[str, int],
    leading: Mapping[str, tuple[int, ...]],
) -> Argument:
    if given is None:
        shape = full_shape(t, dims, leading)
        if min(shape, default=0) < 0:
            called.binder.fail(f"output '{t.name}' would have the shape {shape}; a const parameter is too small")
        if like is not None and like.shape != shape:
            called.binder.fail(f"output '{t.name}' has the shape {shape}, its model in like= {tuple(like.shape)}")
        # As torch will lay it out.
        meta = torch.empty(shape, device="meta") if like is None else torch.empty_like(like, device="meta")
        strides = meta.stride()
    else:
        shape, strides = tuple(given.shape), given.stride()
    written = t.role != "in"
    if written and given is not None:
        if given.is_neg():
            called.binder.fail(f"argument '{t.name}' is a lazily negated view, which cannot be written")
        if meets_itself(shape, strides):
            called.binder.fail(
                f"argument '{t.name}' is written, but its elements share memory (strides {tuple(strides)})"
            )
    return Argument(t.name, shape, tuple(strides), TORCH[t.dtype], written, t.role != "out")


def _plan(
    called: Kernel,
    kernel: ir.Kernel,
    spec: Specialization,
    dims: Mapping[str, int],
    arguments: Sequence[Argument],
    given: Mapping[str, torch.Tensor],
    executor: Executor,
    device: torch.device,
    choice: str,
) -> tuple[Built, Layout, Executor]:
    # Outputs that are still to be allocated are aligned: torch's allocators give 64 bytes and more.
    residue = {name: t.data_ptr() % 16 for name, t in given.items()}
    memory = {a.name: Memory(a.shape, a.strides, a.itemsize, residue.get(a.name, 0)) for a in arguments}
    where = layout(kernel, dims, memory)
    executor, knobs = _tuned(called, spec, where, choice, executor, device)
    key = PlanKey(
        _spec_key(spec),
        () if executor.general else where.groups,
        None if executor.general else where.variant,
        device,
        executor.name,
        knobs,
    )

    def build() -> Built:
        # What a stored call has loaded need not be loaded, and the driver's part refuses what must be.
        known = called.restored and not executor.general
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing() and not known:
            raise BackendError(
                f"{called.name}: a first call with these dtypes and layouts must compile, which a CUDA graph capture "
                f"cannot record; call it once before the capture to warm up"
            )
        events.count("plan")
        try:
            return executor.build(kernel, where, device, CACHE, knobs)
        except ScheduleError:
            if knobs is None:
                raise
            # Measured for longer rows, and not possible here.
            return executor.build(kernel, where, device, CACHE)

    return called.plans.get_or_build(key, build), where, executor


def _tuned(
    called: Kernel, spec: Specialization, where: Layout, choice: str, executor: Executor, device: torch.device
) -> tuple[Executor, Knobs | None]:
    """The executor and the knobs that were measured to be the fastest for such a call; looked up once for each
    class of calls."""
    if executor.general or tuned.table(device) is None:
        return executor, None
    key = (_spec_key(spec), where.groups, where.variant, device, choice)
    found = called.choices.get(key)
    if found is None:
        found = called.choices[key] = tuned.choose(where, choice, executor, device)
    return found


def check(called: Kernel, values: Sequence[Any], outs: Sequence[Any] | None) -> None:
    from kgen.runtime.checked import check_gathers  # only needed here

    spec, _ = examine(called.signature, values, outs)
    kernel = specialized(called, spec)
    tensors = [t for i in called.tensor_at if (t := values[i]) is not None]
    slots = _scalar_slots(called, kernel)
    inputs = (t for t in kernel.tensors if t.role != "out")
    check_gathers(
        kernel,
        {t.name: x for t, x in zip(inputs, tensors, strict=True)},
        {s.name: convert(values[i]) for s, (i, convert, _, _) in zip(kernel.scalars, slots, strict=True)},
    )


def _spec_key(spec: Specialization) -> tuple[Any, ...]:
    consts = tuple((n, type(v), repr(v)) for n, v in sorted(spec.consts.items()))
    return (tuple(sorted((n, d.name) for n, d in spec.dtypes.items())), consts, spec.present)
