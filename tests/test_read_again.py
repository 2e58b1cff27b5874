"""Rows in chunks that a later pass reads again: marked as what L1 and L2 give up last, where L1 has room for them."""

from __future__ import annotations

import re
from pathlib import Path

import cuda_kit
import pytest
import torch
from cuda_kit import Call, call

from kgen.codegen.cuda import emit
from kgen.codegen.interpret import interpret
from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.tolerance import compare, error_bound
from kgen.dsl.modules import load
from kgen.runtime import nvrtc
from kgen.runtime.ahead import Choices, target

OPS = Path(__file__).resolve().parent.parent / "ops"
TEXT = """
kernel softmax(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = softmax(x[m, n], n)

kernel halve_(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, n] / sum(abs(x[m, n]), n)

kernel norm(x: T[*M, N], w: T[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    c = x[m, n] - mean(x[m, n], n)
    y[m, n] = c * rsqrt(mean(c * c, n) + 1.0) * w[n]

kernel pair(a: T[*M, N], b: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    s = sum(a[m, n] * b[m, n], n)
    y[m, n] = a[m, n] * s

kernel length(x: T[*M, N]) -> (y: f32[*M]):
    parallel m in M
    tile n in N
    y[m] = logsumexp(x[m, n], n)

kernel shared(x: T[B, N], s: T[B, K]) -> (y: T[B, K, N]):
    parallel b in B, k in K
    tile n in N
    y[b, k, n] = softmax(x[b, n] * s[b, k], n)

kernel gradient(x: T[*M, N], d: T[*M, N]) -> (d_x: T[*M, N], d_w: T[N]):
    parallel m in M
    tile n in N
    d_x[m, n] = x[m, n] - mean(x[m, n] * d[m, n], n)
    d_w[n] += d[m, n]
"""
BF16, F32 = torch.bfloat16, torch.float32


def question(kernel: str, n: int, dtype: torch.dtype = BF16, m: int = 2) -> Call:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)

    names = {"norm": {"w": (n,)}, "pair": {}, "shared": {"s": (m, 3)}, "gradient": {"d": (m, n)}}.get(kernel, {})
    first = {"a": (m, n), "b": (m, n)} if kernel == "pair" else {"x": (m, n)}
    return call(TEXT, kernel, **{name: made(*shape) for name, shape in {**first, **names}.items()})


def program(c: Call, knobs: Knobs | None = None, capability: int = 90) -> Program:
    where, _ = cuda_kit.prepare(c)
    return emit(schedule_kernel(where.kernel, where.variant, "cuda", knobs=knobs, capability=capability))


def passes(made: Program) -> list[list[tuple[str, bool]]]:
    """Of each pass: the tensors that are loaded in vectors, and whether they are marked."""
    _, *loops = re.split(r"#pragma unroll 1\n|// All of n at once", made.source)
    load = re.compile(r"= (load_resident\()?(?:\*)?\(const \w+\*\)\((\w+?)(?:_row)? ")
    return [[(m[2], bool(m[1])) for m in load.finditer(text)] for text in loops]


# ---- which ---------------------------------------------------------------------------------------------------------


def test_all_passes_but_the_last() -> None:
    assert passes(program(question("softmax", 32000))) == [[("x", True)], [("x", False)]]
    chunks = Knobs(chunks=(("n", 2048),), threads=256)
    assert passes(program(question("halve_", 8192), chunks)) == [[("x", True)], [("x", False)]]
    # What all rows read is in the caches anyway.
    assert passes(program(question("norm", 8192), chunks)) == [
        [("x", True)], [("x", True)], [("x", False), ("w", False)]
    ]  # fmt: skip
    # ... and nobody reads b again.
    assert passes(program(question("pair", 8192), chunks)) == [[("a", True), ("b", False)], [("a", False)]]


@pytest.mark.parametrize(
    ("kernel", "n", "why"),
    [
        ("length", 32000, "one pass"),
        ("shared", 32000, "other programs read the row too"),
        ("softmax", 4096, "whole rows"),
    ],
)
def test_nothing_to_hold_on_to(kernel: str, n: int, why: str) -> None:
    assert not any(marked for loads in passes(program(question(kernel, n, m=1))) for _, marked in loads), why
    assert "evict_last" not in program(question(kernel, n, m=1), Knobs(ahead=0)).source


def test_programs_that_loop_over_rows() -> None:
    made = program(question("gradient", 8192), Knobs(threads=256, chunks=(("n", 2048),)))
    first, second = passes(made)
    assert ("x", False) in first and ("x", False) in second and "load_resident" not in made.source


@pytest.mark.parametrize(
    ("n", "threads", "chunk", "capability", "room"),
    [
        (32000, 1024, 16384, 90, True),  # two programs, 128 KB of the 256 of L1
        (32000, 512, 16384, 90, True),  # three, as their registers say
        (50304, 512, 32768, 90, True),  # two with 64 registers a thread, 200 KB
        (50304, 512, 4096, 90, False),  # four, 400 KB
        (128256, 1024, 65536, 90, False),  # one
        (32000, 1024, 16384, 80, True),  # 192 KB
        (50304, 1024, 16384, 80, False),
        (32000, 1024, 16384, 86, True),  # one program of 1024 threads, 128 KB
        (32000, 512, 16384, 86, False),
        (32000, 1024, 16384, 75, False),  # no policies of L2
    ],
)
def test_where_the_rows_of_a_multiprocessor_fit_in_l1(
    n: int, threads: int, chunk: int, capability: int, room: bool
) -> None:
    knobs = Knobs(threads=threads, chunks=(("n", chunk),))
    first, last = passes(program(question("softmax", n, m=1), knobs, capability))
    assert (first, last) == ([("x", room)], [("x", False)])


def test_the_policy_is_made_first() -> None:
    source = program(question("softmax", 32000)).source
    body = source[source.index("{\n", source.index("softmax(\n")) :]
    assert body.splitlines()[1].strip() == "const unsigned long long policy = kept_policy();"
    assert "x_mn_raw[n_slot] = load_resident((const bf16x8*)(x_row + n), policy);" in body
    assert "L1::evict_last.L2::cache_hint.v4.u32" in source and "load_kept" not in source


# ---- what comes out ------------------------------------------------------------------------------------------------


SMALL = Knobs(threads=128, chunks=(("n", 1024),))


@pytest.mark.parametrize(
    ("kernel", "n", "knobs", "dtype"),
    [
        ("softmax", 32008, None, BF16),
        ("softmax", 32011, None, BF16),
        *((k, n, SMALL, F32) for k, n in (("softmax", 3004), ("softmax", 3011))),
        *((k, n, SMALL, d) for k, n in (("norm", 3000), ("norm", 3001), ("halve_", 2504)) for d in (BF16, F32)),
    ],
)
def test_rows(kernel: str, n: int, knobs: Knobs | None, dtype: torch.dtype) -> None:
    c = question(kernel, n, dtype)
    where, tensors = cuda_kit.prepare(c)
    made = program(c, knobs)
    assert "load_resident(" in made.source
    cuda_kit.launch(c, where, made, tensors, seed=2)
    bound = error_bound(c.kernel, c.tensors, c.scalars)
    for name, want in interpret(c.kernel, c.tensors, c.scalars, precision="f64").items():
        result = compare(tensors[name], want, bound[name])
        assert result.ok, f"{name}: {result}"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_machine_code(arch: str) -> None:
    made = program(question("softmax", 32000, m=1), capability=int(arch[3:]))
    found = nvrtc.compile_cuda(made.source, made.entry, arch)
    assert found.resources.local_bytes == 0 and found.resources.registers <= 32
    assert found.ptx.count("ld.global.L1::evict_last.L2::cache_hint.v4.u32") > 0


def test_shipped_cross_entropy() -> None:
    """Of 128256 classes a row is 256 KB, all that there is of L1."""
    module = load(OPS / "cross_entropy.kdsl").module
    kernel = next(k for k in module.kernels if k.name == "cross_entropy_")
    for v, marked in ((32000, True), (50257, True), (50304, True), (128256, False)):
        choices = Choices(dims={"V": v}, dtype="bf16", without=frozenset({"weight", "z_scale"}))
        source = target(module, kernel, choices).program("cuda").source
        assert ("load_resident(" in source) == marked, v
