"""Hand-written CUDA C for the host executor, and its arguments."""

from __future__ import annotations

import ctypes

import numpy as np


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def int64(value: int) -> ctypes.c_longlong:
    return ctypes.c_longlong(value)


def body(name: str, parameters: str, text: str) -> str:
    return f'extern "C" __global__ void __launch_bounds__(1024) {name}({parameters}) {{\n{text}\n}}\n'


VECTOR_ADD = """
extern "C" __global__ void __launch_bounds__(256)
vector_add(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ out, long long N, float s) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N) out[i] = x[i] + s * __ldg(y + i);
}
"""
