"""`out = left @ right`, where it is computed: in float64, or by the libraries below torch."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kgen.codegen.torch_dtypes import FROM_TORCH, rounded
from kgen.runtime.products import table
from kgen.runtime.unrolled import modes


def store(out: torch.Tensor, source: torch.Tensor) -> None:
    """`out = source`, rounded once: torch rounds float64 to 16 bits by way of float32."""
    if source.dtype == torch.float64 and out.dtype in (torch.float16, torch.bfloat16):
        source = rounded(source, FROM_TORCH[out.dtype])
    out.copy_(source)


def exact(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, plus: torch.Tensor | None, accumulate: bool
) -> None:
    """`out = left @ right + plus`, with `accumulate` `out += left @ right`: in float64, rounded once."""
    result = left.double() @ right.double()
    if plus is not None:
        result += plus
    if accumulate:
        result += out
    store(out, result)


def library(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, plus: torch.Tensor | None, accumulate: bool
) -> None:
    """As `exact`, but the sum in f32 (f64 of f64), and a product may be rounded before it is added to 16 bits: on a GPU
    by the algorithm that was measured to be the fastest, where one was, else by torch."""
    # A mode of torch's dispatcher, such as one that counts operations, is to see the product.
    if plus is None and out.is_cuda and not modes() and (known := table.chosen(out.device.index)) is not None:
        current = torch.cuda.current_device() == out.device.index
        with nullcontext() if current else torch.cuda.device(out.device):
            if known.multiply(out, left, right, accumulate):
                return
    by_torch(out, left, right, plus, accumulate)


def by_torch(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, plus: torch.Tensor | None, accumulate: bool
) -> None:
    """As `library`, by torch."""
    if out.dtype == left.dtype:
        if accumulate:
            out.addmm_(left, right)
        elif plus is not None:
            torch.addmm(plus, left, right, out=out)
        else:
            torch.mm(left, right, out=out)
        return
    if out.dtype == torch.float32 and left.dtype != torch.float64 and out.is_cuda:
        if plus is not None:
            out.copy_(plus.expand_as(out))
        if accumulate or plus is not None:
            torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, out=out)
        else:
            torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)
        return
    # Where the library has no product of these dtypes the operands are widened first.
    wide = torch.promote_types(left.dtype, out.dtype)
    result = left.to(wide) @ right.to(wide)
    if plus is not None:
        result += plus
    if accumulate:
        result += out
    store(out, result)
