"""Passes over chunks of rows that are overwritten: eight vectors a thread where its registers hold them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import cuda_kit
import pytest
import torch
from cuda_kit import call

from kgen.codegen.cuda import emit
from kgen.codegen.interpret import interpret
from kgen.codegen.tolerance import compare, error_bound
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text
from kgen.runtime import nvrtc
from kgen.runtime.ahead import Choices, Target, binary, target

OPS = Path(__file__).resolve().parent.parent / "ops"
TEXT = """
kernel softmax_(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = softmax(x[m, n], n)

kernel log_softmax_(x: inout T[*M, N], s: f32[*M]):
    parallel m in M
    tile n in N
    x[m, n] = s[m] * x[m, n] - logsumexp(s[m] * x[m, n], n)

kernel norm_(x: inout T[*M, N], w: T[N]):
    parallel m in M
    tile n in N
    c = x[m, n] - mean(x[m, n], n)
    x[m, n] = c * rsqrt(mean(c * c, n) + 1.0) * w[n]

kernel share_(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, n] / sum(abs(x[m, n]), n)

kernel tanh_(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = tanh(x[m, n])
"""
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])


def made(name: str, n: int, dtype: str) -> Target:
    module = parse_text(TEXT)
    return target(module, next(k for k in module.kernels if k.name == name), Choices(dims={"N": n}, dtype=dtype))


def slots(compiled: Target) -> int:
    """Vectors that a thread of 1024 takes of a chunk."""
    s = compiled.scheduled("cuda").schedule
    assert s.threads == 1024
    return s.chunks[0][1] // s.threads // s.vector


# ---- how many ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "n", "dtype", "vectors", "why"),
    [
        ("softmax_", 128256, "bf16", 8, "a program has the multiprocessor to itself"),
        ("softmax_", 128257, "bf16", 8, "peeled rows"),
        ("softmax_", 128256, "f32", 8, "vectors are as wide in f32"),
        ("log_softmax_", 128256, "bf16", 4, "elements are unpacked twice"),
        ("log_softmax_", 128256, "f32", 8, "nothing to unpack"),
        ("norm_", 128256, "bf16", 2, "weights beside the row"),
        ("share_", 150001, "bf16", 4, "quotients, and an edge"),
        ("tanh_", 128256, "bf16", 4, "nothing is read again"),
    ],
)
def test_vectors_of_a_chunk(kernel: str, n: int, dtype: str, vectors: int, why: str) -> None:
    assert slots(made(kernel, n, dtype)) == vectors, why


def test_rows_of_at_most_128_kb_have_smaller_programs() -> None:
    s = made("softmax_", 50304, "bf16").scheduled("cuda").schedule
    assert (s.threads, s.chunks) == (512, (("n", 32768),))


# ---- what comes out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [70016, 70003])
def test_rows(n: int) -> None:
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16)
    c = call(TEXT, "softmax_", x=x)
    assert dict(cuda_kit.compiled(c).schedule.chunks) == {"n": 65536}
    got, bound = cuda_kit.run(c, seed=1), error_bound(c.kernel, c.tensors, c.scalars)
    result = compare(got["x"], interpret(c.kernel, c.tensors, c.scalars, precision="f64")["x"], bound["x"])
    assert result.ok, result


# ---- machine code --------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("n", [100000, 131072, 150001])
@pytest.mark.parametrize("kernel", ["softmax_", "log_softmax_", "norm_", "share_"])
def test_nothing_spills(kernel: str, n: int, dtype: str) -> None:
    compiled = made(kernel, n, dtype)
    program = emit(compiled.scheduled("cuda"))
    assert nvrtc.compile_cuda(program.source, program.entry, "sm_90").resources.local_bytes == 0


@DTYPES
@pytest.mark.parametrize("v", [50304, 128256, 152064, 262144])
def test_cross_entropy_in_place(v: int, dtype: str) -> None:
    """With everything that it may have: weights, smoothing, a softcap."""
    module = load(OPS / "cross_entropy.kdsl").module
    kernel = next(k for k in module.kernels if k.name == "cross_entropy_")
    for weight, smoothed, capped in product((False, True), repeat=3):
        consts = {"smoothed": str(smoothed).lower(), "capped": str(capped).lower()}
        without = frozenset({"z_scale"} if weight else {"weight", "z_scale"})
        compiled = target(module, kernel, Choices(dims={"V": v}, dtype=dtype, consts=consts, without=without))
        program = compiled.program("cuda")
        found = binary(compiled, program, "sm_90").resources
        assert found.local_bytes == 0, (weight, consts, found)
        if not capped and not (weight and smoothed) and v > 65536:
            assert slots(compiled) == 8
