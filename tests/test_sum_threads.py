"""How many threads take a row of sums in CUDA: of widths between powers of two, few of them idle."""

from __future__ import annotations

from typing import Any

import pytest
import sums_kit
import torch
from cuda_kit import Call, call, prepare

from kgen.codegen import cuda, ladders, machines
from kgen.codegen.layout import layout
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Schedule
from kgen.runtime.nvrtc import compile_cuda

BF16 = torch.bfloat16
# The gradients of a normalisation, by a single reduction, and by two of which more is held.
ONE = """kernel one(x: T[*M, N], w: T[N], d_y: T[*M, N]) -> (d_x: T[*M, N], d_w: T[N]):
    parallel m in M
    tile n in N
    c = mean(x[m, n] * d_y[m, n] * w[n], n)
    d_x[m, n] = d_y[m, n] * w[n] - x[m, n] * c
    d_w[n] += x[m, n] * d_y[m, n]
"""
TWO = """kernel two(x: T[*M, N], w: T[N], d_y: T[*M, N]) -> (d_x: T[*M, N], d_w: T[N], d_b: T[N]):
    parallel m in M
    tile n in N
    g = d_y[m, n] * w[n]
    d_x[m, n] = g - mean(g, n) - x[m, n] * mean(g * x[m, n], n)
    d_w[n] += x[m, n] * d_y[m, n]
    d_b[n] += d_y[m, n]
"""
# Threads take elements of both tile axes, of which vectors lie along one.
HEADS = """kernel heads(x: T[*M, H, N], d_y: T[*M, H, N]) -> (d_w: T[H, N]):
    parallel m in M
    tile i in H, n in N
    d_w[i, n] += x[m, i, n] * sum(x[m, i, n] * d_y[m, i, n], n)
"""


def gradients(text: str, n: int, dtype: torch.dtype = BF16, m: int = 5) -> Call:
    g = torch.Generator().manual_seed(n)
    tensors: dict[str, Any] = {k: torch.randn(m, n, generator=g).to(dtype) for k in ("x", "d_y")}
    name = "one" if text is ONE else "two"
    return call(text, name, **tensors, w=torch.randn(n, generator=g).to(dtype))


def chosen(c: Call) -> tuple[Schedule, float]:
    """The schedule, and the part of the slots of a row that have elements."""
    where, _ = prepare(c)
    s = schedule_kernel(where.kernel, where.variant, "cuda")
    axis = layout(s.kernel, s.variant, s.schedule).axis("n")
    return s.schedule, axis.extent / (axis.slots * axis.threads * axis.vector)


def registers(c: Call) -> int:
    """Those of a thread, of which none is in memory."""
    where, _ = prepare(c)
    program = cuda.emit(schedule_kernel(where.kernel, where.variant, "cuda"))
    resources = compile_cuda(program.source, program.entry, "sm_90").resources
    assert resources.local_bytes == 0
    return resources.registers


@pytest.mark.parametrize(
    ("n", "threads", "vector"),
    [
        (1024, 128, 8), (2048, 256, 8), (4096, 512, 8), (7168, 1024, 8), (8192, 1024, 8), (16384, 1024, 8),
        (3072, 256, 4), (5120, 512, 4), (6144, 512, 4), (10240, 1024, 4), (12288, 1024, 4),
    ],
)  # fmt: skip
def test_few_are_idle(n: int, threads: int, vector: int) -> None:
    schedule, busy = chosen(gradients(ONE, n))
    assert (schedule.threads, schedule.vector, schedule.rows) == (threads, vector, 1)
    assert busy >= ladders.SUM_BUSY


def test_where_each_choice_leaves_some_it_is_that_of_powers_of_two() -> None:
    schedule, busy = chosen(gradients(ONE, 2056))  # just above a power of two
    assert (schedule.threads, schedule.vector) == (512, 8) and busy < ladders.SUM_BUSY


@pytest.mark.parametrize(("n", "threads"), [(2048, 256), (4096, 512), (5120, 256), (6144, 256), (7168, 128)])
def test_what_meets_twice_has_two_programs_on_a_multiprocessor(n: int, threads: int) -> None:
    """... of which one works while the other waits: rather than many threads, and with no register in memory."""
    c = gradients(TWO, n)
    schedule, busy = chosen(c)
    assert (schedule.threads, schedule.rows) == (threads, 1) and busy >= ladders.SUM_BUSY
    assert 2 * threads * registers(c) <= machines.REGISTER_FILE
    assert chosen(gradients(ONE, n))[0].threads >= threads


@pytest.mark.parametrize(
    ("n", "threads", "cluster"), [(12288, 512, 1), (16384, 512, 2), (20480, 512, 2), (32768, 512, 4)]
)
def test_what_meets_twice_has_few_ctas_of_a_cluster(n: int, threads: int, cluster: int) -> None:
    c = gradients(TWO, n)
    schedule, _ = chosen(c)
    assert (schedule.threads, schedule.cluster, schedule.chunks) == (threads, cluster, ())
    assert registers(c) <= machines.MOST_REGISTERS


def test_half_of_1024_before_a_cluster() -> None:
    """As 1024 threads have 64 registers each, 512 hold more of a row."""
    schedule, _ = chosen(gradients(TWO, 12288))
    assert (schedule.threads, schedule.cluster, schedule.chunks) == (512, 1, ())
    assert chosen(gradients(TWO, 32768))[0].cluster > 1


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("n", [1536, 2560, 3072, 5120, 6144, 12288])
@pytest.mark.parametrize("text", [ONE, TWO])
def test_against_float64(text: str, n: int, dtype: torch.dtype) -> None:
    c = gradients(text, n, dtype, m=3)
    sums_kit.within_bounds(c, sums_kit.run(c, "cuda"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("h", "n", "threads"), [(4, 1024, 512), (128, 8, 128), (200, 1, 64), (3, 40, 32), (7, 33, 64)])
def test_rows_of_several_tile_axes(h: int, n: int, threads: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(n)
    x, d_y = (torch.randn(3, h, n, generator=g).to(dtype) for _ in range(2))
    c = call(HEADS, "heads", x=x, d_y=d_y)
    schedule = schedule_kernel(prepare(c)[0].kernel, prepare(c)[0].variant, "cuda").schedule
    if dtype is torch.float16:
        assert schedule.threads // schedule.rows == threads
    sums_kit.within_bounds(c, sums_kit.run(c, "cuda"))
