"""The language's scalar types and torch's, one to one."""

from __future__ import annotations

import torch

from kgen.dsl import dtypes
from kgen.dsl.dtypes import DType

TORCH: dict[DType, torch.dtype] = {
    dtypes.F16: torch.float16,
    dtypes.BF16: torch.bfloat16,
    dtypes.F32: torch.float32,
    dtypes.F64: torch.float64,
    dtypes.I8: torch.int8,
    dtypes.U8: torch.uint8,
    dtypes.I16: torch.int16,
    dtypes.I32: torch.int32,
    dtypes.I64: torch.int64,
    dtypes.BOOL: torch.bool,
}

FROM_TORCH: dict[torch.dtype, DType] = {t: d for d, t in TORCH.items()}


def rounded(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """`x` converted to the floating-point type `dtype` by one rounding to nearest even.

    torch converts float64 to the 16-bit types by way of float32, which rounds twice. Rounding to odd on the first step
    keeps the sticky bit, so that the second step decides as if it saw the whole value (Boldo & Melquiond 2008).
    """
    target = TORCH[dtype]
    if x.dtype != torch.float64 or dtype.bits >= 32:
        return x.to(target)
    near = x.to(torch.float32)
    back = near.to(torch.float64)
    even = (near.view(torch.int32) & 1) == 0
    toward = torch.where(x > back, torch.inf, -torch.inf).to(torch.float32)
    fix = even & (back != x) & torch.isfinite(near)
    return torch.where(fix, torch.nextafter(near, toward), near).to(target)
