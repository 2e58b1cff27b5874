"""NVRTC without a GPU: cubins, resource figures, messages."""

import pytest

from kgen.dsl.source import NOWHERE, SourceFile, Span
from kgen.runtime.nvrtc import CudaCompileError, compile_cuda, parse_resources

PLAIN = """
extern "C" __global__ void twice(const float4* __restrict__ x, float4* __restrict__ y) {
    const float4 a = x[threadIdx.x];
    y[threadIdx.x] = make_float4(2.0f * a.x, 2.0f * a.y, 2.0f * a.z, 2.0f * a.w);
}
"""

# An array under a run-time index lives in local memory.
LOCAL = """
extern "C" __global__ void pick(const float* x, float* y, int n) {
    float a[32];
    for (int i = 0; i < 32; ++i) a[i] = x[i * threadIdx.x];
    for (int i = 0; i < n; ++i) a[(i * n) & 31] += x[i];
    y[threadIdx.x] = a[n & 31];
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_for_each_generation(arch: str) -> None:
    compiled = compile_cuda(PLAIN, "twice", arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert f".target {arch}" in compiled.ptx
    assert 0 < compiled.resources.registers <= 32
    assert compiled.resources.local_bytes == 0


def test_sass_shows_the_width_of_accesses() -> None:
    sass = compile_cuda(PLAIN, "twice").sass
    assert "LDG.E.128" in sass
    assert "STG.E.128" in sass


def test_local_memory_is_reported() -> None:
    assert compile_cuda(LOCAL, "pick").resources.local_bytes >= 32 * 4


def test_spills_are_read_from_the_log() -> None:
    log = """ptxas info    : Compiling entry function 'k' for 'sm_90'
ptxas info    : Function properties for k
ptxas         .     880 bytes stack frame, 760 bytes spill stores, 764 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 880 bytes cumulative stack size, 48 bytes smem
ptxas info    : Compile time = 42.576 ms
"""
    found = parse_resources(log, "k")
    assert (found.registers, found.local_bytes, found.spill_store_bytes) == (32, 880, 760)
    assert (found.spill_load_bytes, found.shared_bytes) == (764, 48)


def test_rejected_text_names_the_source_line() -> None:
    source = SourceFile("a.kdsl", "y[m] = x[m] + oops")
    lines = [None, Span(source, 1, 1, 1, 19)]
    with pytest.raises(CudaCompileError, match=r"(?s)undefined.*a\.kdsl:1:1: y\[m\] = x\[m\] \+ oops"):
        compile_cuda('extern "C" __global__ void k(float* y) {\ny[0] = oops; }', "k", lines=lines)


def test_unknown_arch_is_one_sentence() -> None:
    with pytest.raises(CudaCompileError, match=r"cannot compile for sm_12345; it knows sm_75, "):
        compile_cuda(PLAIN, "twice", "sm_12345", lines=[NOWHERE])
