"""Rows of about a hundred thousand elements in place on Triton: large chunks on many warps, where nothing spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from apart_kit import scheduled
from cuda_kit import call
from triton_kit import built

from kgen import ops

CROSS_ENTROPY = (Path(ops.__file__).parent / "cross_entropy.kdsl").read_text()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_rows_take_large_chunks_and_spill_nothing(dtype: torch.dtype, weighted: bool) -> None:
    rows: dict[str, Any] = {"weight": torch.ones(128256, dtype=dtype)} if weighted else {}
    t, scale, x = torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.zeros(1, 128256, dtype=dtype)
    c = call(CROSS_ENTROPY, "cross_entropy_", logits=x, target=t, scale=scale, **rows)
    schedule = scheduled(c, "triton", None).schedule
    assert (schedule.threads, schedule.chunks) == (1024, (("v", 32768),))
    assert built(c).resources.local_bytes == 0


@pytest.mark.parametrize(
    ("n", "threads", "text", "dtype"),
    [
        (90000, 512, "x[m, n] = softmax(x[m, n], n)", torch.bfloat16),  # narrower
        (128256, 512, "h = x[m, n] + y[m, n]\n    x[m, n] = h * rsqrt(mean(h * h, n))", torch.bfloat16),  # two rows
        (128256, 1024, "c = x[m, n] - max(x[m, n], n)\n    e = exp(c)\n    x[m, n] = c * e * sum(e, n)",
         torch.float32),
        (128256, 1024, "c = x[m, n] - max(x[m, n], n)\n    e = exp(c)\n    x[m, n] = c * e / sum(e, n)",
         torch.bfloat16),
    ],
)  # fmt: skip
def test_what_would_not_fit_small_threads_takes_smaller_chunks(
    n: int, threads: int, text: str, dtype: torch.dtype
) -> None:
    head = "kernel k(x: inout T[*M, N], y: T[*M, N]):\n    parallel m in M\n    tile n in N\n    "
    c = call(head + text, "k", x=torch.zeros(1, n, dtype=dtype), y=torch.zeros(1, n, dtype=dtype))
    schedule = scheduled(c, "triton", None).schedule
    assert (schedule.threads, schedule.chunks) == (threads, (("n", 16384),))
