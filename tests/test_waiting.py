"""Weights that wait for room: loaded some slots ahead of their use, in front of the barrier or right behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cuda_kit
import pytest
import sums_kit
import torch
from cuda_kit import Call, call

from kgen.codegen.cuda import emit, host_source
from kgen.codegen.interpret import interpret
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.schedule import Schedule
from kgen.codegen.tolerance import compare, error_bound
from kgen.runtime import nvrtc
from kgen.runtime.host_executor import HostLaunchError

TEXT = """
kernel rms_norm(x: T[*M, N], w: W[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * rsqrt(mean(x[m, n] * x[m, n], n) + 1e-6) * w[n]

kernel affine(x: T[*M, N], w: W[N], b: W[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * rsqrt(mean(x[m, n] * x[m, n], n) + 1e-6) * w[n] + b[n]

kernel quotient(x: T[*M, N], w: W[N], b: W[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] / max(abs(x[m, n]), n) * w[n] + b[n]

kernel scaled(x: T[*M, N], w: W[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * w[n]

kernel grad(d_y: T[*M, N], x: T[*M, N], w: W[N], rstd: f32[*M]) -> (d_x: T[*M, N], d_w: W[N]):
    parallel m in M
    tile n in N
    x_hat = x[m, n] * rstd[m]
    g = d_y[m, n] * w[n]
    d_x[m, n] = rstd[m] * (g - x_hat * mean(g * x_hat, n))
    d_w[n] += d_y[m, n] * x_hat
"""
F32, BF16 = torch.float32, torch.bfloat16
G = torch.Generator()


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=G.manual_seed(sum(shape))).to(dtype)


def question(kernel: str, m: int, n: int, dtype: torch.dtype = BF16) -> Call:
    made: dict[str, Any] = {"x": randn(m, n, dtype=dtype), "w": randn(n, dtype=dtype)}
    if kernel in ("affine", "quotient"):
        made["b"] = randn(n + 1, dtype=dtype)[1:].clone()
    if kernel == "grad":
        made |= {"d_y": randn(m + 1, n, dtype=dtype)[1:], "rstd": randn(m, dtype=F32).abs() + 0.5}
    return call(TEXT, kernel, **made)


def program(c: Call, override: Schedule | None = None) -> Program:
    where, _ = cuda_kit.prepare(c)
    return emit(schedule_kernel(where.kernel, where.variant, "cuda", override=override))


def text(c: Call, override: Schedule | None = None) -> str:
    return host_source(program(c, override))


def within_bounds(c: Call, got: dict[str, torch.Tensor]) -> None:
    bound = error_bound(c.kernel, c.tensors, c.scalars)
    for name, want in interpret(c.kernel, c.tensors, c.scalars, precision="f64").items():
        result = compare(got[name], want, bound[name])
        assert result.ok, f"{name}: {result}"


# ---- what is written -----------------------------------------------------------------------------------------------


def test_two_slots_ahead_the_first_right_behind_the_reduction() -> None:
    source = text(question("rms_norm", 1, 65536))
    behind = source[source.index("__syncthreads();") :]
    started = behind.index("2 slots ahead of its use, as a load waits for the stores in front of it: w.")
    assert started < behind.index("stay_packed(x_mn_raw);") < behind.index("rsqrtf(")
    assert behind.count("load_staying((const bf16x8*)(w + n))") == 1 and "n_slot < 2; ++n_slot" in behind
    assert "const bf16x8 w_n_raw =" not in source
    loop = behind[behind.index("if (n_slot < 8 - 2) {") :]
    assert loop.index("const int n_ahead = n + 2 * THREADS * 8;") < loop.index(
        "w_n_raw[n_slot + 2] = load_staying((const bf16x8*)(w + n_ahead));"
    ) < loop.index("w_n_raw[n_slot].get(v)")  # fmt: skip


def test_several_weights_share_the_registers() -> None:
    source = text(question("affine", 1, 32768))
    assert "1 slot ahead of its use, as a load waits for the stores in front of it: w, b." in source
    assert "w_n_raw[n_slot + 1]" in source and "b_n_raw[n_slot + 1]" in source


@pytest.mark.parametrize(
    ("n", "dtype", "remark"),
    [
        (8192, BF16, "2 slots ahead of its use"),
        (8000, BF16, "2 slots ahead of its use"),
        (4096, F32, "2 slots ahead of its use"),
        (2048, F32, "Before any store"),
    ],
)
def test_in_front_of_the_barrier_where_sums_leave_room(n: int, dtype: torch.dtype, remark: str) -> None:
    source = text(question("grad", 1, n, dtype), Schedule(256, 1, 16 // dtype.itemsize, name="row", programs=2))
    row = source[source.index("for (int m =") :]
    assert "load_staying" not in source  # L1 has several programs to serve
    assert row.index("__shfl_xor_sync") < row.index(remark) < row.index("__shared__") < row.index("__syncthreads();")
    assert ("n_ahead" in row.split("__syncthreads();")[1]) == ("ahead" in remark)


@pytest.mark.parametrize(
    ("kernel", "n", "dtype", "why"),
    [
        ("rms_norm", 4096, BF16, "several programs a multiprocessor"),
        ("rms_norm", 16384, BF16, "all is loaded first"),
        ("rms_norm", 65537, BF16, "peeled rows have elements around their vectors"),
        ("rms_norm", 131072, BF16, "no registers in a cluster of 2"),
        ("quotient", 131072, BF16, "chunks"),
        ("quotient", 32768, BF16, "no registers beside divisions"),
        ("grad", 16384, BF16, "no registers beside the sums"),
        ("scaled", 1024, F32, "a single slot"),
    ],
)
def test_where_there_is_nothing_to_gain_or_no_room(kernel: str, n: int, dtype: torch.dtype, why: str) -> None:
    source = text(question(kernel, 1, n, dtype))
    assert "ahead of its use" not in source and "Before any store" not in source, why


# ---- what comes out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "n", "dtype"),
    [
        ("rms_norm", 65536, BF16),
        ("rms_norm", 60008, BF16),
        ("rms_norm", 30004, F32),
        ("affine", 32768, BF16),
        ("affine", 28008, BF16),
        ("scaled", 65536, BF16),
        ("scaled", 50008, BF16),
    ],
)
def test_rows(kernel: str, n: int, dtype: torch.dtype) -> None:
    """Whole rows on 1024 threads, with and without a ragged end."""
    c = question(kernel, 2, n, dtype)
    assert "ahead of its use" in text(c)
    within_bounds(c, cuda_kit.run(c, seed=3))


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("ragged", [0, 136])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_sums(dtype: torch.dtype, ragged: int, cluster: int) -> None:
    """All slots in front of the barrier of a cluster, two in front of that of a block."""
    vector = 16 // dtype.itemsize
    schedule = Schedule(256 // cluster, 1, vector, name="row", programs=2, cluster=cluster)
    c = question("grad", 5, 256 * vector * 4 - ragged, dtype)
    assert ("Before any store" if cluster > 1 else "2 slots ahead of its use") in text(c, schedule)
    for seed in (None, 1):
        within_bounds(c, sums_kit.run(c, "cuda", schedule, seed))


MISTAKES: dict[str, Callable[[str], str]] = {
    "loads too near": lambda s: s.replace("n_ahead = n + 2 * THREADS", "n_ahead = n + 1 * THREADS"),
    "fills the wrong slot": lambda s: s.replace("w_n_raw_2[n_slot + 2] =", "w_n_raw_2[n_slot + 1] ="),
    "stops too early": lambda s: s.replace("n_slot < 4 - 2", "n_slot < 4 - 3"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str) -> None:
    c, schedule = question("grad", 4, 8000), Schedule(256, 1, 8, name="row", programs=2)
    source, right = text(c, schedule), sums_kit.run(c, "cuda", schedule)
    within_bounds(c, right)
    assert MISTAKES[mistake](source) != source
    try:
        wrong = sums_kit.run(c, "cuda", schedule, change=MISTAKES[mistake])
    except HostLaunchError:
        return
    assert not torch.equal(wrong["d_x"], right["d_x"])


# ---- machine code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "n", "dtype"),
    [
        ("rms_norm", 65536, BF16),
        ("rms_norm", 60008, BF16),
        ("rms_norm", 32768, F32),
        ("rms_norm", 98304, F32),
        ("affine", 32768, BF16),
        ("affine", 32768, F32),
        ("grad", 8192, F32),
        ("grad", 32768, BF16),
        ("grad", 65536, BF16),
        ("grad", 65536, F32),
        ("grad", 131072, BF16),
    ],
)
def test_nothing_spills(kernel: str, n: int, dtype: torch.dtype) -> None:
    made = program(question(kernel, 1, n, dtype))
    assert re.search("ahead of its use|Before any store", made.source)
    assert nvrtc.compile_cuda(made.source, made.entry, "sm_90").resources.local_bytes == 0
