"""Passes that have all of a row at once, and load it anew: softmax of rows that two programs hold in turn."""

from __future__ import annotations

import cuda_kit
import pytest
import torch
import triton_kit
from cuda_kit import Call, call

from kgen.codegen.cuda import emit, host_source
from kgen.codegen.interpret import interpret
from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.schedule import Schedule
from kgen.codegen.tolerance import compare, error_bound
from kgen.runtime import nvrtc

TEXT = """
kernel softmax(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = softmax(x[m, n], n)

kernel log_softmax(x: T[*M, N], s: f32[*M]) -> (y: T[*M, N], top: f32[*M]):
    parallel m in M
    tile n in N
    y[m, n] = s[m] * x[m, n] - logsumexp(s[m] * x[m, n], n)
    top[m] = max(x[m, n], n)

kernel softmax_(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = softmax(x[m, n], n)

kernel size(x: T[*M, N]) -> (y: f32[*M]):
    parallel m in M
    tile n in N
    y[m] = logsumexp(x[m, n], n)

kernel masked(x: T[*M, N], k: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = softmax(x[m, n] + k[m, n], n)

kernel norm(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    c = x[m, n] - mean(x[m, n], n)
    y[m, n] = c * rsqrt(mean(c * c, n) + 1.0)
"""
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def question(kernel: str, n: int, dtype: torch.dtype = BF16, m: int = 3) -> Call:
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    more = {"log_softmax": {"s": torch.linspace(0.5, 2.0, m)}, "masked": {"k": x.flip(1)}}.get(kernel, {})
    return call(TEXT, kernel, x=x, **more)


def program(c: Call, knobs: Knobs | None = None, override: Schedule | None = None, capability: int = 90) -> Program:
    where, _ = cuda_kit.prepare(c)
    return emit(
        schedule_kernel(where.kernel, where.variant, "cuda", knobs=knobs, override=override, capability=capability)
    )


def chunk(c: Call, knobs: Knobs | None = None, capability: int = 90) -> int | None:
    return program(c, knobs, capability=capability).schedule.chunk("n")


# ---- which ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "dtype"), [(32000, BF16), (20008, F16), (16392, BF16)])
@pytest.mark.parametrize("kernel", ["softmax", "log_softmax"])
def test_rows_at_once(kernel: str, n: int, dtype: torch.dtype) -> None:
    assert chunk(question(kernel, n, dtype, 1)) == n


@pytest.mark.parametrize(
    ("kernel", "n", "capability", "other", "why"),
    [
        ("softmax", 16384, 90, None, "whole rows"),
        ("softmax", 32768, 90, 16384, "no condition between the slots"),
        ("softmax", 32001, 90, 16384, "peeled rows"),
        ("softmax", 33000, 90, 32768, "no room for two programs"),
        ("softmax", 32000, 75, 16384, "no loads that the caches give up last"),
        ("softmax_", 32000, 90, 16384, "in place"),
        ("size", 32000, 90, 16384, "one pass"),
        ("masked", 32000, 90, 16384, "two rows"),
        ("norm", 32000, 90, None, "no exponentials: the row is held"),
    ],
)
def test_others(kernel: str, n: int, capability: int, other: int | None, why: str) -> None:
    assert chunk(question(kernel, n, m=1), capability=capability) == other, why


@pytest.mark.parametrize("n", [8196, 16004, 16384, 18004, 20004, 30720])
def test_rows_as_wide_as_their_exponentials_are_held(n: int) -> None:
    for kernel in ("softmax", "log_softmax"):
        made = program(question(kernel, n, F32, 1))
        assert (made.schedule.threads, made.schedule.chunk("n")) == (512, None)
        assert nvrtc.compile_cuda(made.source, made.entry, "sm_90").resources.local_bytes == 0


def test_knobs() -> None:
    """What they leave alone stays; a chunk as large as the row holds it, as anywhere."""
    c = question("softmax", 32000, m=1)
    assert chunk(c, Knobs(ahead=1)) == 32000
    assert chunk(c, Knobs(chunks=(("n", 16384),))) == 16384
    assert chunk(c, Knobs(chunks=(("n", 32000),))) is None
    assert chunk(c, Knobs(cluster=2)) is None


# ---- what is written -----------------------------------------------------------------------------------------------


def test_text() -> None:
    source = host_source(program(question("softmax", 32000, m=1)))
    first, second = source.split("    // All of n at once")[1:]
    assert first.startswith(", to be read again.\n    {\n") and second.startswith(".\n    {\n")
    assert "chunk" not in source and "CHUNK" not in source
    assert "const int n = (n_slot * THREADS + tid) * 8;\n            if (n < N) {" in first
    assert first.count("load_resident(") == 1 and second.count("*(const bf16x8*)(x_row + n)") == 1
    # Nothing is summed yet that were to be taken against another maximum.
    assert "y_sum_part *=" not in first and "y_sum_part_against = peak_shift;" in first


def test_triton_holds_such_rows() -> None:
    c = question("softmax", 1000)
    schedule = Schedule(128, 1, chunks=(("n", 1000),))
    where, _ = cuda_kit.prepare(c)
    made = schedule_kernel(where.kernel, where.variant, "triton", override=schedule)
    assert made.schedule.chunks == ()
    triton_kit.check(c, override=schedule)


# ---- what comes out ------------------------------------------------------------------------------------------------


def within_bounds(c: Call, got: dict[str, torch.Tensor]) -> None:
    bound = error_bound(c.kernel, c.tensors, c.scalars)
    for name, want in interpret(c.kernel, c.tensors, c.scalars, precision="f64").items():
        result = compare(got[name], want, bound[name])
        assert result.ok, f"{name}: {result}"


@pytest.mark.parametrize("kernel", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("n", "dtype"), [(32008, BF16), (20008, F16)], ids=str)
def test_rows(kernel: str, n: int, dtype: torch.dtype) -> None:
    c = question(kernel, n, dtype)
    within_bounds(c, cuda_kit.run(c, seed=5))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rows_with_infinities_and_nan(dtype: torch.dtype) -> None:
    n = 16400
    x = torch.randn(7, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    inf, nan = float("inf"), float("nan")
    x[1] = -inf
    x[2, : n // 2] = -inf
    x[3, 17] = inf
    x[4, n - 1] = nan
    x[5, 0] = x[5, 1] = inf
    x[6, 1:] = -inf
    c = call(TEXT, "softmax", x=x)
    assert program(c).schedule.chunk("n") == n
    got, want = cuda_kit.run(c)["y"].double(), cuda_kit.oracle(c)["y"].double()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[6], want[6]) and (got[2, : n // 2] == 0).all()


@pytest.mark.parametrize("n", [1000, 1003])
@pytest.mark.parametrize("kernel", ["softmax", "log_softmax", "softmax_", "size", "norm"])
def test_by_hand(kernel: str, n: int) -> None:
    """Any kernel may be spread so: several slots a thread, ragged ends, peeled rows."""
    c = question(kernel, n)
    schedule = Schedule(32, 1, 8, chunks=(("n", n),), name="looped", peeled=n % 8 > 0)
    source = program(c, override=schedule).source
    assert "// All of n at once" in source and ("bf16x8 x_mn_raw" in source)
    within_bounds(c, cuda_kit.run(c, schedule, seed=1))


def test_a_maximum_at_the_edge_of_a_peeled_row() -> None:
    """What the vectors have summed is taken against it, as there is more than one pass then."""
    n = 1003
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(2)).to(BF16)
    x[0, 0] = x[1, n - 1] = x[2, 1] = x[3, n - 2] = 9.0
    c = call(TEXT, "log_softmax", x=x, s=torch.ones(4))
    schedule = Schedule(32, 1, 8, chunks=(("n", n),), name="looped", peeled=True)
    assert "_part *= " in program(c, override=schedule).source
    within_bounds(c, cuda_kit.run(c, schedule, seed=1))


REVERSED = """kernel k(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, N - 1 - n] = x[m, n] - max(x[m, n], n)
"""
TWO = """kernel k(x: T[*M, N, K]) -> (y: T[*M, N, K]):
    parallel m in M
    tile n in N, k in K
    y[m, n, k] = x[m, n, k] - max(x[m, n, k], n, k)
"""


@pytest.mark.parametrize(
    ("text", "shape", "chunks", "left"),
    [
        (REVERSED, (3, 37), (("n", 37),), ()),
        (TWO, (3, 37, 5), (("n", 37), ("k", 5)), ()),
        (TWO, (3, 37, 5), (("n", 37), ("k", 2)), (("k", 2),)),
    ],
)
def test_what_no_pass_can_have_at_once_is_whole(
    text: str, shape: tuple[int, ...], chunks: tuple[tuple[str, int], ...], left: tuple[tuple[str, int], ...]
) -> None:
    """A chunk as long as its axis is no more than the row has: there is no later one to be wrong about."""
    c = call(text, "k", x=torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    schedule = Schedule(32, 1, chunks=chunks)
    assert program(c, override=schedule).schedule.chunks == left
    within_bounds(c, cuda_kit.run(c, schedule, seed=1))


# ---- machine code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("n", "dtype"), [(32000, BF16), (20008, F16)], ids=str)
@pytest.mark.parametrize("kernel", ["softmax", "log_softmax"])
def test_two_programs_a_multiprocessor(kernel: str, n: int, dtype: torch.dtype, arch: str) -> None:
    made = program(question(kernel, n, dtype, 1), capability=int(arch[3:]))
    found = nvrtc.compile_cuda(made.source, made.entry, arch).resources
    assert found.local_bytes == 0 and found.registers <= 32
