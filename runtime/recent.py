"""Recent calls of a kernel, recognised without a key.

A key of all that a ready call depends on takes longer to build and to look up than the launch. So the last few calls
are remembered with guards: torch's own, which compiled graphs use, compare the tensors of a call with those of the
remembered one in a single step. For what the guards admit the dictionary would have found the same ready call; what
they refuse is looked up there. So nothing depends on guards but time.

Guarded are, for each tensor, type, dtype, device, sizes, strides, whether it requires grad, and its dispatch keys under
the state of the thread: lazy negation, wrappers of transforms, inference mode. Beside them that no mode of torch's
dispatcher is active, 16-byte alignment of each address, which is 0 where the storage of a tensor was freed, that absent
tensors are absent, and that constants are the same objects. A call is remembered where all of its tensors are aligned;
constants are numbers, which do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from kgen.runtime import unrolled
from kgen.runtime.picking import picker
from kgen.runtime.plan import ReadyCall, ScalarSlot, converted
from kgen.runtime.unrolled import UNLIKE, Guards, modes

if TYPE_CHECKING:
    from kgen.runtime.autograd import Training
    from kgen.runtime.kernel import Kernel

_data_ptr = torch.Tensor.data_ptr
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool)
_key_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_NEGATIVE = torch._C.DispatchKey.Negative
_ALIGNED = 15  # the bits of an address that are zero


# Calls a kernel with the values of its parameters and the tensors that are given as outputs (`out=`) or for their
# layout (`like=`): the result, or `UNLIKE` where this is not a call like the remembered one. Raises ArgumentError for
# what depends on more than the layout.
Known = Callable[[Sequence[Any], Sequence[torch.Tensor]], Any]


def remember(
    kernel: Kernel, ready: ReadyCall, values: Sequence[Any], others: Sequence[torch.Tensor], outs: bool
) -> Known | None:
    """What recognises calls with arguments like these, for which `ready` was found; None where there is no guard.
    `outs` says that `others` are the outputs."""
    own = _own(values, others)
    guards = _guards(kernel, values, others, own, ready.scalars)
    if guards is None:
        return None
    if ready.work is not None and not own:
        return unrolled.guarded(guards, ready.work)
    return _general(guards, ready, picker(own), kernel.inout_at, outs)


def remember_recorded(
    kernel: Kernel, t: Training, ready: ReadyCall, choice: str, values: Sequence[Any], others: Sequence[torch.Tensor]
) -> Known | None:
    """The same for a call that records gradients; `ready` is that of its training form."""
    # A scalar of the training form is a parameter of the kernel, at another place.
    slots = [(t.inputs[i], convert, default, number) for i, convert, default, number in ready.scalars]
    guards = None if _own(values, others) else _guards(kernel, values, others, (), slots)
    from kgen.runtime import autograd  # which only those load that need gradients

    recorded = autograd.recorded(t, choice, ready, guards.tensors) if guards is not None else None
    if guards is None or recorded is None:
        return None
    return unrolled.guarded(guards, recorded)


def _own(values: Sequence[Any], others: Sequence[torch.Tensor]) -> list[int]:
    """Which of `others` are none of `values`."""
    return [k for k, t in enumerate(others) if all(t is not v for v in values)]


def _guards(
    kernel: Kernel,
    values: Sequence[Any],
    others: Sequence[torch.Tensor],
    own: Sequence[int],
    slots: Sequence[ScalarSlot],
) -> Guards | None:
    at = [i for i in kernel.tensor_at if values[i] is not None]
    # One may be an argument and the model of an output.
    same = [(k, next(i for i in at if values[i] is t)) for k, t in enumerate(others) if k not in own]
    guarded = [*(values[i] for i in at), *(others[k] for k in own)]
    if not guardable(guarded):
        return None
    fixed = dict.fromkeys((i for i in kernel.tensor_at if values[i] is None), None)
    fixed |= {i: values[i] for i in kernel.const_at}
    if any(v is not None and type(v) not in _NUMBERS for v in fixed.values()):
        return None
    scalars = [
        # A scalar that is the same object is converted once; of what may change under its name nothing is the same.
        (i, v if type(v := values[i]) in _NUMBERS else object(), number, convert)
        for (i, convert, _, _), number in zip(slots, converted(slots, values), strict=True)
    ]
    return Guards(len(values), _admits(guarded), at, fixed, same, [t.numel() > 0 for t in guarded], scalars)


def guardable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether guards of these tensors are all that a call depends on. Under a mode or a transform calls are looked up
    each time, and so are those of tensors that are not aligned, and those with one tensor for two arguments, as torch's
    guards take each once. Inside what a mode does in place of an operator, as in the first run of a compiled graph,
    dispatch keys are left out by which guards tell lazy negation apart."""
    return (
        not modes()
        and not _key_excluded(_NEGATIVE)
        and not torch._C._are_functorch_transforms_active()
        and _trusted()  # which must not be asked under one of them
        and 0 < len({id(t) for t in tensors}) == len(tensors)
        and all(type(t) in _PLAIN and not t.data_ptr() & _ALIGNED for t in tensors)
    )


def _general(
    guards: Guards,
    ready: ReadyCall,
    pick_others: Callable[[Sequence[Any]], Sequence[Any]],
    inout: tuple[int, ...],
    outs: bool,
) -> Known:
    """The same for calls that write what a caller gave, or lay out outputs like tensors that are no arguments."""
    admits, pick = guards.admits, picker(guards.tensors)
    fixed, same, slots = tuple(guards.fixed.items()), tuple(guards.same), tuple(guards.scalars)
    filled = tuple(k for k, is_filled in enumerate(guards.filled) if is_filled)

    def known(values: Sequence[Any], others: Sequence[torch.Tensor]) -> Any:
        tensors, more = pick(values), pick_others(others)
        if modes() or not admits(*tensors, *more):
            return UNLIKE
        for i, v in fixed:
            if values[i] is not v:
                return UNLIKE
        for k, i in same:
            if others[k] is not values[i]:
                return UNLIKE
        addresses = [*map(_data_ptr, tensors)]
        places = (*addresses, *map(_data_ptr, more))
        bits = 0
        for address in places:
            bits |= address
        if bits & _ALIGNED or (0 in places and not all(places[k] for k in filled)):
            return UNLIKE
        scalars = [number if (v := values[i]) is given else convert(v) for i, given, number, convert in slots]
        results = ready.run(tensors, scalars, addresses, others if outs else None) or [values[i] for i in inout]
        return results[0] if len(results) == 1 else tuple(results)

    return known


def _admits(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    torch_c: Any = torch._C  # without stubs of this part
    made = torch_c._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return made.check


def _negated(x: torch.Tensor) -> torch.Tensor:
    """A lazily negated tensor of the layout of `x`."""
    view: Any = torch._neg_view  # pyright: ignore[reportPrivateImportUsage]  # no public function gives such strides
    return view(x)


@cache
def _trusted() -> bool:
    """Whether torch has these guards, and they tell apart what they must: they are not part of its public interface.

    Asked once a process, and of a thread of its own: there is no inference mode and no default device, and it is not
    inside an operator, with dispatch keys left out.
    """
    found: list[bool] = []
    try:
        thread = Thread(target=lambda: found.append(_tell_apart()))
        thread.start()
        thread.join()
    except RuntimeError:  # the interpreter is about to end
        return False
    return found == [True]


def _tell_apart() -> bool:
    try:
        with torch.inference_mode(False):
            x = torch.zeros(4, 6, dtype=torch.float32, device="cpu")
            y = torch.ones_like(x)
            admits = _admits([x, y])
            unlike = (
                x.double(), x[:3], x.view(6, 4).t(), x.clone().requires_grad_(), _negated(x),
                torch.nn.Parameter(x, requires_grad=False), x.to("meta"), x.to_sparse(), None, x[0],
            )  # fmt: skip
            with torch.enable_grad():
                told_apart = admits(x, y) and not any(admits(x, z) for z in unlike)
            with torch.inference_mode():
                return told_apart and not admits(x, torch.ones_like(x))
    except Exception:  # whatever another version of torch makes of this
        return False
