"""A kernel in plain Triton, to have its launch beside ours."""

import triton
import triton.language as tl


@triton.jit
def copy(y, x, n, BLOCK: tl.constexpr):  # pyright: ignore
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)
