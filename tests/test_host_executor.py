"""The host executor on hand-written CUDA C: values against float64."""

from __future__ import annotations

import ctypes
import itertools
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from executor_kit import VECTOR_ADD, body, int64, pointer

from kgen.runtime.host_executor import HostKernel, HostLaunchError, available, compile_host

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

F32_UNIT = 2.0**-24


@pytest.mark.parametrize("n", [1, 255, 256, 257, 10007])
def test_vector_add(cache_dir: Path, n: int) -> None:
    kernel = compile_host(VECTOR_ADD, "vector_add", cache_dir=cache_dir)
    assert kernel.parameters == (("p", 8), ("p", 8), ("p", 8), ("i", 8), ("f", 4))
    x, y = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32)
    out = np.full(n + 1, -1, np.float32)
    args = [pointer(x), pointer(y), pointer(out), int64(n), ctypes.c_float(0.5)]
    kernel.launch(((n + 255) // 256, 1, 1), (256, 1, 1), 0, args)
    # Two roundings in float32, each reproduced by numpy: the result is the same bit for bit.
    assert np.array_equal(out[:n], x + np.float32(0.5) * y)
    assert out[n] == -1


BLOCK_SUM = """
#define WARPS (THREADS / 32)
extern "C" __global__ void __launch_bounds__(THREADS)
block_sum(const float* __restrict__ x, float* __restrict__ y, long long N) {
    __shared__ float partial[32];
    float sum = 0.0f;
    for (long long i = threadIdx.x; i < N; i += THREADS) sum += x[(long long)blockIdx.x * N + i];
    #pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = sum;
    SYNC
    sum = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[w];
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
"""


def block_sum(cache_dir: Path, threads: int, barrier: str = "__syncthreads();") -> HostKernel:
    source = BLOCK_SUM.replace("THREADS", str(threads)).replace("SYNC", barrier)
    return compile_host(source, "block_sum", cache_dir=cache_dir)


@pytest.mark.parametrize(("threads", "n"), [(32, 1), (64, 63), (256, 1000), (1024, 4099)])
def test_block_reduction(cache_dir: Path, threads: int, n: int) -> None:
    x = np.random.default_rng(n).standard_normal((7, n)).astype(np.float32)
    results = []
    kernel = block_sum(cache_dir, threads)
    for seed, workers in itertools.product([None, 1, 2], [1, 2]):
        y = np.zeros(7, np.float32)
        args = [pointer(x), pointer(y), int64(n)]
        kernel.launch((7, 1, 1), (threads, 1, 1), 0, args, order_seed=seed, threads=workers)
        results.append(y)
    # Additions on the longest way from an element to the result: in a thread, in a warp, over the warps.
    depth = -(-n // threads) + 5 + threads // 32
    bound = depth * F32_UNIT * np.abs(x.astype(np.float64)).sum(1)
    assert (np.abs(results[0] - x.astype(np.float64).sum(1)) <= bound).all()
    assert all(np.array_equal(results[0], other) for other in results)


def test_missing_barrier_shows_in_shuffled_order(cache_dir: Path) -> None:
    x = np.ones((1, 256), np.float32)

    def results(kernel: HostKernel) -> set[str]:
        y = np.zeros(1, np.float32)
        found: set[str] = set()
        for seed in range(10):
            kernel.launch((1, 1, 1), (256, 1, 1), 0, [pointer(x), pointer(y), int64(256)], order_seed=seed)
            found.add(str(y[0]))
        return found

    assert results(block_sum(cache_dir, 256)) == {"256.0"}
    # Shared memory that no thread has written yet is NaN.
    assert "nan" in results(block_sum(cache_dir, 256, barrier=""))


def test_thousand_threads_over_many_blocks_are_fast(cache_dir: Path) -> None:
    kernel = block_sum(cache_dir, 1024)
    x, y = np.ones((256, 1024), np.float32), np.zeros(256, np.float32)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        kernel.launch((256, 1, 1), (1024, 1, 1), 0, [pointer(x), pointer(y), int64(1024)])
        seconds.append(time.perf_counter() - start)
    assert np.all(y == 1024)
    assert min(seconds) < 0.5, seconds  # about 0.08 s; the best of three, since other work may share the machine


WARP_PER_ROW = """
extern "C" __global__ void __launch_bounds__(128)
row_max(const float* __restrict__ x, float* __restrict__ y, int rows, int columns) {
    const int row = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x;
    float best = __int_as_float(0xff800000);
    if (row < rows) for (int j = lane; j < columns; j += 32) best = fmaxf(best, x[row * columns + j]);
    for (int offset = 16; offset > 0; offset >>= 1) best = fmaxf(best, __shfl_down_sync(0xffffffffu, best, offset));
    if (row < rows && lane == 0) y[row] = best;
}
"""


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 32), (13, 77)])
def test_warp_per_row(cache_dir: Path, rows: int, columns: int) -> None:
    kernel = compile_host(WARP_PER_ROW, "row_max", cache_dir=cache_dir)
    x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    y = np.zeros(rows, np.float32)
    args = [pointer(x), pointer(y), ctypes.c_int(rows), ctypes.c_int(columns)]
    kernel.launch(((rows + 3) // 4, 1, 1), (32, 4, 1), 0, args, order_seed=5)
    assert np.array_equal(y, x.max(1))


PERSISTENT_COLUMN_SUM = """
extern "C" __global__ void __launch_bounds__(64)
column_sum(const float* __restrict__ x, float* partials, unsigned* counter, float* __restrict__ y, long long M, int N) {
    __shared__ bool last;
    const int n = threadIdx.x;
    float sum = 0.0f;
    for (long long m = blockIdx.x; m < M; m += gridDim.x) if (n < N) sum += x[m * N + n];
    if (n < N) partials[(long long)blockIdx.x * N + n] = sum;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == gridDim.x - 1;
    __syncthreads();
    if (last) {
        __threadfence();
        sum = 0.0f;
        for (unsigned b = 0; b < gridDim.x; ++b) if (n < N) sum += __ldcg(partials + (long long)b * N + n);
        if (n < N) y[n] = sum;
        if (threadIdx.x == 0) *counter = 0;
    }
}
"""


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_last_block_finishes_a_persistent_grid(cache_dir: Path, seed: int | None) -> None:
    kernel = compile_host(PERSISTENT_COLUMN_SUM, "column_sum", cache_dir=cache_dir)
    m, n, blocks = 1001, 61, 100
    x = np.random.default_rng(0).standard_normal((m, n)).astype(np.float32)
    partials, counter = np.zeros((blocks, n), np.float32), np.zeros(1, np.uint32)
    results = []
    for workers in (1, 4, 4):
        y = np.zeros(n, np.float32)
        args = [pointer(x), pointer(partials), pointer(counter), pointer(y), int64(m), ctypes.c_int(n)]
        kernel.launch((blocks, 1, 1), (64, 1, 1), 0, args, order_seed=seed, threads=workers)
        assert counter[0] == 0
        results.append(y)
    bound = (-(-m // blocks) + blocks) * F32_UNIT * np.abs(x.astype(np.float64)).sum(0)
    assert (np.abs(results[0] - x.astype(np.float64).sum(0)) <= bound).all()
    assert all(np.array_equal(results[0], other) for other in results)


def test_dynamic_shared_memory(cache_dir: Path) -> None:
    source = body(
        "reverse",
        "const float* x, float* y",
        """extern __shared__ __align__(16) float tile[];
        const unsigned i = threadIdx.x + blockIdx.x * blockDim.x;
        tile[threadIdx.x] = x[i];
        __syncthreads();
        y[i] = tile[blockDim.x - 1 - threadIdx.x];""",
    )
    kernel = compile_host(source, "reverse", cache_dir=cache_dir)
    x, y = np.arange(256 * 40, dtype=np.float32).reshape(40, 256), np.zeros((40, 256), np.float32)
    kernel.launch((40, 1, 1), (256, 1, 1), 1024, [pointer(x), pointer(y)], order_seed=3, threads=2)
    assert np.array_equal(y, x[:, ::-1])


def test_dynamic_and_static_shared_memory_start_as_nan(cache_dir: Path) -> None:
    source = body(
        "read",
        "unsigned* y",
        """extern __shared__ unsigned dynamic[];
        static __shared__ unsigned fixed[64];
        y[threadIdx.x] = dynamic[threadIdx.x] & fixed[threadIdx.x];
        dynamic[threadIdx.x] = fixed[threadIdx.x] = 0;""",
    )
    kernel = compile_host(source, "read", cache_dir=cache_dir)
    for _ in range(2):
        y = np.zeros(64, np.uint32)
        kernel.launch((1, 1, 1), (64, 1, 1), 256, [pointer(y)])
        assert np.all(y == 0xFFFFFFFF)
    kernel.launch((1, 1, 1), (64, 1, 1), 256, [pointer(y)], poison=False)
    assert np.all(y == 0)


def test_shuffles_and_votes(cache_dir: Path) -> None:
    source = body(
        "lanes",
        "long long* y",
        """const unsigned all = 0xffffffffu;
        const int lane = threadIdx.x & 31;
        long long* out = y + threadIdx.x * 11;
        out[0] = __shfl_sync(all, lane * 10, 37);
        out[1] = __shfl_sync(all, (long long)lane << 40, lane + 3, 8);
        out[2] = __shfl_xor_sync(all, (unsigned)lane, 5, 16);
        out[3] = (long long)__shfl_up_sync(all, (float)lane, 3, 16);
        out[4] = (long long)__shfl_down_sync(all, (double)lane, 2, 4);
        out[5] = __ballot_sync(all, lane % 3 == 0);
        out[6] = __any_sync(all, lane == 40) * 10 + __any_sync(all, lane == 4);
        out[7] = __all_sync(all, lane < 32) * 10 + __all_sync(all, lane < 31);
        if (lane < 8) { out[8] = __ballot_sync(0xffu, lane & 1); __syncwarp(0xffu); }
        else { __syncwarp(0xffffff00u); out[8] = __ballot_sync(0xffffff00u, lane & 2); }
        out[9] = __syncthreads_count(threadIdx.x % 5 == 0);
        out[10] = __syncthreads_or(threadIdx.x == 63) * 10 + __syncthreads_and(threadIdx.x != 63);""",
    )
    kernel = compile_host(source, "lanes", cache_dir=cache_dir)
    lane = np.arange(64) % 32
    expected = np.stack(
        [
            np.full(64, 50),
            ((lane & ~7) | ((lane + 3) & 7)) << 40,
            lane ^ 5,
            np.where(lane % 16 >= 3, lane - 3, lane),
            np.where(lane % 4 < 2, lane + 2, lane),
            np.full(64, sum(1 << i for i in range(0, 32, 3))),
            np.full(64, 1),
            np.full(64, 10),
            np.where(lane < 8, 0xAA, sum(1 << i for i in range(8, 32) if i & 2)),
            np.full(64, 13),
            np.full(64, 10),
        ],
        axis=1,
    )
    for seed in (None, 1, 2, 3):
        y = np.zeros((64, 11), np.int64)
        kernel.launch((1, 1, 1), (64, 1, 1), 0, [pointer(y)], order_seed=seed)
        assert np.array_equal(y, expected)


CONVERT = """
extern "C" __global__ void __launch_bounds__(256)
convert(const float* x, const double* d, unsigned short* f16, unsigned short* bf16, unsigned short* f16d,
        unsigned short* bf16d, uint2* pairs, float* back, int N) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < N; i += blockDim.x * gridDim.x) {
        f16[i] = cvt_f16_f32(x[i]);
        bf16[i] = cvt_bf16_f32(x[i]);
        f16d[i] = cvt_f16_f64(d[i]);
        bf16d[i] = cvt_bf16_f64(d[i]);
        pairs[i] = make_uint2(cvt_f16x2_f32(x[i], 1.0f), cvt_bf16x2_f32(2.0f, x[i]));
    }
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < 65536; i += blockDim.x * gridDim.x)
        back[i] = cvt_f32_f16((unsigned short)i);
}
"""


def test_conversions_round_once_to_nearest_even(cache_dir: Path) -> None:
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 2**32, 60000, dtype=np.uint32)
    near_f16 = (generator.standard_normal(20000) * 2.0 ** generator.integers(-28, 18, 20000)).astype(np.float32)
    ties = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        middle = (ties[:-1] + ties[1:]) / 2  # exact in float32: between two neighbours of binary16
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 2.0**-25, 3.4e38], np.float32)
    bf16_ties = ((np.arange(65536, dtype=np.uint32) << 16) | 0x8000).view(np.float32)
    x = np.concatenate([bits.view(np.float32), near_f16, ties, middle, special, bf16_ties])
    # Doubles just beside what is a tie in float32: rounding twice goes wrong there.
    with np.errstate(invalid="ignore"):
        d = x.astype(np.float64) * (1 + generator.choice([0.0, 2.0**-40, -(2.0**-40), 2.0**-26], len(x)))
    n = len(x)
    f16, bf16, f16d, bf16d = (np.zeros(n, np.uint16) for _ in range(4))
    pairs, back = np.zeros((n, 2), np.uint32), np.zeros(65536, np.float32)
    arrays = [x, d, f16, bf16, f16d, bf16d, pairs, back]
    kernel = compile_host(CONVERT, "convert", cache_dir=cache_dir)
    kernel.launch((16, 1, 1), (256, 1, 1), 0, [*map(pointer, arrays), ctypes.c_int(n)])

    with np.errstate(over="ignore", invalid="ignore"):
        half = np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))
        half_of_double = np.where(np.isnan(d), np.uint16(0x7FFF), d.astype(np.float16).view(np.uint16))
    brain = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    brain = np.where(np.isnan(x), np.uint16(0x7FFF), brain)
    assert np.array_equal(f16, half)
    assert np.array_equal(bf16, brain)
    assert np.array_equal(f16d, half_of_double)
    assert np.array_equal(pairs[:, 0], (half.astype(np.uint32) << 16) | 0x3C00)
    assert np.array_equal(pairs[:, 1], np.uint32(0x40000000) | brain)
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    assert np.array_equal(back, every.astype(np.float32), equal_nan=True)
    assert np.array_equal(np.signbit(back), np.signbit(every))

    # bfloat16 from binary64: no neighbour is nearer, and of two equally near ones the even one is taken.
    ok = np.isfinite(d) & (np.abs(d) < 3.3e38)
    value = (bf16d.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    own = np.abs(value[ok] - d[ok])
    for step in (1, -1):
        magnitude = (bf16d[ok] & 0x7FFF).astype(np.int64) + step
        sign = np.where(bf16d[ok] & 0x8000, -1.0, 1.0)
        neighbour = sign * (np.maximum(magnitude, 0).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        distance = np.abs(neighbour - d[ok])
        real = magnitude >= 0
        assert (own[real] <= distance[real]).all()
        tie = real & (own == distance)
        assert (bf16d[ok][tie] % 2 == 0).all()
    assert (bf16d[np.isnan(d)] == 0x7FFF).all()


def test_bf16_rows_packed_in_16_byte_vectors(cache_dir: Path) -> None:
    source = body(
        "double_it",
        "const unsigned short* __restrict__ x, unsigned short* __restrict__ y, long long vectors",
        """for (long long v = blockIdx.x * blockDim.x + threadIdx.x; v < vectors; v += gridDim.x * blockDim.x) {
            uint4 raw = __ldcs(reinterpret_cast<const uint4*>(x) + v);
            unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float lo = __uint_as_float(words[i] << 16), hi = __uint_as_float(words[i] & 0xffff0000u);
                words[i] = cvt_bf16x2_f32(2.5f * hi, 2.5f * lo);
            }
            __stcs(reinterpret_cast<uint4*>(y) + v, make_uint4(words[0], words[1], words[2], words[3]));
        }""",
    )
    kernel = compile_host(source, "double_it", cache_dir=cache_dir)
    x = torch.randn(8 * 777, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    y = torch.zeros_like(x)
    args = [ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), int64(777)]
    kernel.launch((3, 1, 1), (128, 1, 1), 0, args)
    assert torch.equal(y, (x.float() * 2.5).to(torch.bfloat16))
    args[0] = ctypes.c_void_p(x.data_ptr() + 2)
    with pytest.raises(HostLaunchError, match=r"at double_it\.cu:3: misaligned address"):
        kernel.launch((3, 1, 1), (128, 1, 1), 0, [args[0], args[1], int64(1)])


def test_arithmetic_is_ieee_without_contraction(cache_dir: Path) -> None:
    source = body(
        "arithmetic",
        "const float* x, float* y",
        """const float a = x[0], b = x[1], c = x[2];
        y[0] = a * b + c;
        y[1] = fmaf(a, b, c);
        y[2] = __fdiv_rn(a, c);
        y[3] = x[3] * 0.5f;
        y[4] = max(__int_as_float(0x7fc00000), 1.0f);
        y[5] = (float)min(-1, 2) + (float)max(3u, 4u) + (float)abs(-7) + (float)max(5ll, 6ll);
        y[6] = (float)__float2int_rz(1e20f);
        y[7] = isnan(x[4]) ? expf(-__int_as_float(0x7f800000)) : 1.0f;
        y[8] = rsqrtf(4.0f) + exp2_approx(3.0f) + tanhf(0.0f) + erff(0.0f) + fmodf(7.0f, 4.0f) + log1pf(0.0f);""",
    )
    kernel = compile_host(source, "arithmetic", cache_dir=cache_dir)
    a = np.float32(1 + 2.0**-12)
    x = np.array([a, a, -(1 + 2.0**-11), 1e-44, np.nan], np.float32)
    y = np.ones(9, np.float32)
    kernel.launch((1, 1, 1), (1, 1, 1), 0, [pointer(x), pointer(y)])
    assert y[0] == 0.0  # the product rounds to 1 + 2**-11
    assert y[1] == 2.0**-24
    assert y[2] == x[0] / x[2]
    assert y[3] == np.float32(1e-44) / 2 != 0  # subnormals are kept
    assert list(y[4:]) == [1.0, -1 + 4 + 7 + 6, 2.0**31, 0.0, 0.5 + 8 + 3]
