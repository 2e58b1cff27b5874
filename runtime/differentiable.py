"""Whether a call asks for a derivative: all that those need of `kgen.runtime.autograd` which ask for none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from kgen.dsl.dtypes import DTYPES
from kgen.dsl.signature import Signature
from kgen.runtime.derivatives import no_forward_mode

if TYPE_CHECKING:
    from kgen.runtime.host.op import HostOp
    from kgen.runtime.kernel import Kernel


def float_output(signature: Signature) -> bool:
    """Whether some tensor that the kernel writes may have a floating-point dtype."""
    return any(
        d.kind == "float"
        for t in signature.tensors
        if t.role != "in"
        for d in ((DTYPES[t.dtype],) if t.dtype in DTYPES else signature.dtype_vars[t.dtype])
    )


def requiring(kernel: Kernel, values: Sequence[Any]) -> tuple[int, ...]:
    """The parameters among `values` that ask for a gradient; none for a kernel whose outputs cannot carry one.

    Raises ArgumentError for a value that carries a tangent: no output would, which means a derivative of zero.
    """
    if not kernel.has_float_output:
        return ()
    if forward_ad._current_level >= 0:
        refuse_tangents(kernel, values)
    # What is no tensor is refused later, in words. A list, as this is on the path of every call outside no_grad.
    wanted = [i for i in kernel.tensor_at if getattr(values[i], "requires_grad", False)]
    return tuple(wanted) if wanted else ()


def refuse_tangents(called: Kernel | HostOp, values: Sequence[Any]) -> None:
    """Raise for a value inside `torch.autograd.forward_ad.dual_level` that carries a tangent."""
    for p, t in zip(called.signature.params, values, strict=True):
        if isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise no_forward_mode(called.name, f"argument '{p.name}'")
