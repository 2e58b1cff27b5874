"""Clusters of blocks on the host executor, in hand-written CUDA C: shared memory of their own, and each rule broken."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from executor_kit import pointer

from kgen.runtime.host_executor import HostKernel, HostLaunchError, available, compile_host

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

RING = """
constexpr int CLUSTER = 4;
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
ring(const int* x, int* y, int turns) {
    __shared__ int mine;
    __shared__ int given[2];
    const int rank = blockIdx.x % CLUSTER;
    cluster_arrive();
    if (threadIdx.x == 0) mine = x[blockIdx.x];
    cluster_wait();
    for (int t = 0; t < turns; ++t) {
        if (threadIdx.x == THREADS - 1) store_to_block(&given[t % 2], (rank + 1) % CLUSTER, mine);
        cluster_barrier();
        if (threadIdx.x == 0) mine = given[t % 2];
        __syncthreads();
    }
    if (threadIdx.x == 33) y[blockIdx.x] = mine;
}
"""


@pytest.mark.parametrize("threads", [64, 1024])
@pytest.mark.parametrize("turns", [0, 1, 2, 7])
def test_each_block_has_shared_memory_of_its_own(turns: int, threads: int, cache_dir: Path) -> None:
    """A value goes round the blocks of a cluster, and stays in it."""
    kernel = compile_host(RING.replace("THREADS", str(threads)), "ring", cache_dir=cache_dir)
    x = np.arange(12, dtype=np.int32) * 3 + 1
    expected = np.roll(x.reshape(3, 4), turns, axis=1).ravel()
    for seed, workers in ((None, 1), (None, 2), (1, 1), (2, 2), (3, 2)):
        y = np.zeros(12, np.int32)
        kernel.launch(
            (12, 1, 1),
            (threads, 1, 1),
            0,
            [pointer(x), pointer(y), ctypes.c_int(turns)],
            order_seed=seed,
            threads=workers,
        )
        assert np.array_equal(y, expected), seed


def test_grids_of_several_dimensions(cache_dir: Path) -> None:
    text = """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32) places(int* y) {
        __shared__ int from;
        cluster_arrive();
        cluster_wait();
        const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        if (threadIdx.x == 0) store_to_block(&from, 1 - blockIdx.x % 2, block);
        cluster_barrier();
        if (threadIdx.x == 5) y[block] = from;
    }"""
    y = np.zeros(24, np.int32)
    compile_host(text, "places", cache_dir=cache_dir).launch((4, 3, 2), (32, 1, 1), 0, [pointer(y)], order_seed=1)
    assert np.array_equal(y, np.arange(24) ^ 1)


def test_every_type(cache_dir: Path) -> None:
    text = """
    extern "C" __global__ void __cluster_dims__(8, 1, 1) __launch_bounds__(32)
    types(float* f, double* d, int* i, long long* l, bool* b) {
        __shared__ float fs[8]; __shared__ double ds[8]; __shared__ int is[8]; __shared__ long long ls[8];
        __shared__ bool bs[8];
        cluster_arrive();
        cluster_wait();
        const int rank = blockIdx.x, to = threadIdx.x;
        if (to < 8) {
            store_to_block(&fs[rank], to, rank + 0.5f);
            store_to_block(&ds[rank], to, rank * 1e200);
            store_to_block(&is[rank], to, -rank);
            store_to_block(&ls[rank], to, (long long)rank << 40);
            store_to_block(&bs[rank], to, rank % 3 == 0);
        }
        cluster_barrier();
        if (to < 8) {
            const int at = rank * 8 + to;
            f[at] = fs[to]; d[at] = ds[to]; i[at] = is[to]; l[at] = ls[to]; b[at] = bs[to];
        }
    }"""
    r = np.tile(np.arange(8), 8)
    wanted = [(r + 0.5).astype(np.float32), r * 1e200, (-r).astype(np.int32), r.astype(np.int64) << 40, r % 3 == 0]
    got = [np.zeros_like(w) for w in wanted]
    kernel = compile_host(text, "types", cache_dir=cache_dir)
    kernel.launch((8, 1, 1), (32, 1, 1), 0, [pointer(a) for a in got], order_seed=4)
    assert all(np.array_equal(a, w) for a, w in zip(got, wanted, strict=True))


def test_shared_memory_starts_as_nan_in_every_block(cache_dir: Path) -> None:
    text = """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32) fresh(float* y) {
        __shared__ float x;
        if (threadIdx.x == 0) {
            y[blockIdx.x] = x;
            x = 1.0f;
        }
    }"""
    y = np.zeros(6, np.float32)
    compile_host(text, "fresh", cache_dir=cache_dir).launch((6, 1, 1), (32, 1, 1), 0, [pointer(y)], threads=1)
    assert np.isnan(y).all()


def test_who_leaves_is_not_waited_for(cache_dir: Path) -> None:
    text = """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64) leaves(int* y) {
        const int at = blockIdx.x * 32 + threadIdx.x % 32, other = (1 - blockIdx.x) * 32 + threadIdx.x % 32;
        if (threadIdx.x < 32) y[at] = 1;
        cluster_arrive();
        if (threadIdx.x >= 32) return;
        cluster_wait();
        y[64 + at] = y[other];
        if (blockIdx.x == 1) return;
        cluster_barrier();
        y[128 + at] = 1;
    }"""
    for seed in (None, *range(8)):
        y = np.zeros(160, np.int32)
        compile_host(text, "leaves", cache_dir=cache_dir).launch(
            (2, 1, 1), (64, 1, 1), 0, [pointer(y)], order_seed=seed
        )
        assert y.all()


ERRORS = [
    ("if (blockIdx.x == 0) store_to_block(&s, 1, 1);", "a store to block 1 of the cluster, which may not have started"),
    (
        "cluster_arrive(); cluster_wait(); if (blockIdx.x == 1) return; "
        "for (int i = 0; i < 9; ++i) __syncthreads(); store_to_block(&s, 1, 1);",
        "a store to block 1 of the cluster, which has ended",
    ),
    ("cluster_barrier(); store_to_block(&s, 2, 1);", "a store to block 2 of a cluster of 2"),
    ("cluster_barrier(); store_to_block(&local, 1, 1);", "at an address that is not in shared memory"),
    ("cluster_arrive(); cluster_arrive();", "has not waited for the others yet"),
    ("cluster_wait();", "waits at the barrier of the cluster and has not arrived there"),
    (
        "if (threadIdx.x == 3 && blockIdx.x) __syncthreads(); else cluster_barrier();",
        "no thread can go on: 1 of 32 threads wait at __syncthreads .* 63 of 64 threads have come to the barrier of",
    ),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_rules(text: str, message: str, cache_dir: Path) -> None:
    source = (
        'extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32) wrong(int* y) {\n'
        f"__shared__ int s; int local = 0; y[local] = 0;\n{text}\n}}\n"
    )
    kernel = compile_host(source, "wrong", cache_dir=cache_dir)
    y = np.zeros(1, np.int32)
    with pytest.raises(HostLaunchError, match=message):
        kernel.launch((2, 1, 1), (32, 1, 1), 0, [pointer(y)])


def test_launches_that_have_no_whole_clusters(cache_dir: Path) -> None:
    kernel: HostKernel = compile_host(RING.replace("THREADS", "64"), "ring", cache_dir=cache_dir)
    x = np.zeros(12, np.int32)
    args = [pointer(x), pointer(x), ctypes.c_int(1)]
    for grid, threads in ((6, 64), (4, 48)):
        with pytest.raises(HostLaunchError, match="expected a multiple of 4 blocks, and of 32 threads"):
            kernel.launch((grid, 1, 1), (threads, 1, 1), 0, args)


def test_a_kernel_without_clusters(cache_dir: Path) -> None:
    text = 'extern "C" __global__ void __launch_bounds__(32) alone(int* y) { cluster_barrier(); y[0] = 1; }'
    y = np.zeros(1, np.int32)
    with pytest.raises(HostLaunchError, match="the kernel has no cluster"):
        compile_host(text, "alone", cache_dir=cache_dir).launch((1, 1, 1), (32, 1, 1), 0, [pointer(y)])
