"""Maxima and minima of values of 16 bits, taken two at a time as they lie in memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cuda_kit
import pytest
import torch
from cuda_kit import Call, call

from kgen.codegen.cuda import emit, host_source
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.schedule import Schedule
from kgen.runtime import nvrtc

TEXT = """
kernel extremes(x: T[*M, N]) -> (low: f32[*M], high: f32[*M], total: f32[*M]):
    parallel m in M
    tile n in N
    low[m] = min(x[m, n], n)
    high[m] = max(x[m, n], n)
    total[m] = sum(abs(x[m, n]), n)

kernel highest(x: T[*M, N]) -> (high: f32[*M]):
    parallel m in M
    tile n in N
    high[m] = max(x[m, n], n)

kernel scaled(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] / maximum(abs(max(x[m, n], n)), abs(min(x[m, n], n)))

kernel columns(x: T[*M, K, N]) -> (high: f32[*M, K], low: f32[*M, N]):
    parallel m in M
    tile k in K, n in N
    high[m, k] = max(x[m, k, n], n)
    low[m, n] = min(x[m, k, n], k)

kernel place(x: T[*M, N]) -> (at: i32[*M]):
    parallel m in M
    tile n in N
    at[m] = i32(argmax(x[m, n], n))

kernel masked(x: T[*M, N]) -> (high: f32[*M]):
    parallel m in M
    tile n in N
    high[m] = max(where(n < 5, x[m, n], 0.0), n)

kernel looked_up(x: T[P, N], at: i32[M]) -> (high: f32[M]):
    parallel m in M
    tile n in N
    high[m] = max(x[at[m], n], n)
"""
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
NAN, INF = float("nan"), float("inf")


def rows(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of `n` values of either sign, of one sign, with infinities, NaN, zeros of both signs and subnormals."""
    x = torch.randn(11, n, generator=torch.Generator().manual_seed(n))
    x[1] = x[1].abs() + 1
    x[2] = -x[2].abs() - 1
    x[3] = -INF
    x[4] = INF
    x[5, n // 2], x[5, 0] = INF, -INF
    x[6, n - 1] = NAN
    x[7, 0] = NAN
    x[8] = -INF
    x[8, n // 3] = NAN
    x[9] = torch.where(torch.arange(n) % 2 == 0, 0.0, -0.0)
    x[10] = torch.finfo(dtype).smallest_normal / 4 * (torch.arange(n) % 3 - 1)
    return x.to(dtype)


def program(c: Call, override: Schedule | None = None, capability: int = 90) -> Program:
    where, _ = cuda_kit.prepare(c)
    return emit(schedule_kernel(where.kernel, where.variant, "cuda", override=override, capability=capability))


def exact(c: Call, got: dict[str, torch.Tensor], names: tuple[str, ...] = ("low", "high")) -> None:
    """An extreme is one of the values: nothing is rounded."""
    want = cuda_kit.oracle(c)
    for name in names:
        torch.testing.assert_close(got[name].double(), want[name].double(), rtol=0, atol=0, equal_nan=True)


# ---- what is written -----------------------------------------------------------------------------------------------


def test_text() -> None:
    source = host_source(program(call(TEXT, "extremes", x=rows(4096, BF16))))
    body = source[source.index("extremes(\n") :]
    assert "low_min_pair = min_pair_bf16(low_min_pair, x_mn_raw[n_slot].word);" in body
    assert "high_max_pair = max_pair_bf16(high_max_pair, x_mn_raw[n_slot].word);" in body
    assert "low_min = minimum(low_min, min_of_pair_bf16(low_min_pair));" in body
    assert "high_max = maximum(high_max, max_of_pair_bf16(high_max_pair));" in body
    # Beside them only the sum takes element by element.
    assert body.count(".get(v)") == 1 and "for (int v = 0; v < 8; ++v)" in body


def test_no_method_that_nobody_calls() -> None:
    source = program(call(TEXT, "highest", x=rows(4096, F16))).source
    assert "max_pair_f16" in source and ".get(" not in source and "get(int i)" not in source
    assert nvrtc.compile_cuda(source, "highest", "sm_90").resources.local_bytes == 0


@pytest.mark.parametrize(
    ("kernel", "arguments", "why"),
    [
        ("extremes", {"x": rows(4096, F32)}, "32 bits"),
        ("extremes", {"x": rows(4096, BF16).t().contiguous().t()}, "no vectors"),
        ("place", {"x": rows(4096, BF16)}, "places"),
        ("masked", {"x": rows(4096, BF16)}, "not what is loaded"),
        ("looked_up", {"x": rows(4096, BF16), "at": torch.zeros(3, dtype=torch.int32)}, "rows that may not be there"),
    ],
)
def test_one_by_one(kernel: str, arguments: dict[str, Any], why: str) -> None:
    assert "_pair" not in program(call(TEXT, kernel, **arguments)).source, why


@DTYPES
def test_older_devices_have_no_such_instruction(dtype: torch.dtype) -> None:
    c = call(TEXT, "extremes", x=rows(4096, dtype))
    assert "_pair" in program(c, capability=80).source
    older = program(c, capability=75)
    assert "_pair" not in older.source
    assert nvrtc.compile_cuda(older.source, older.entry, "sm_75").resources.local_bytes == 0


# ---- what comes out ------------------------------------------------------------------------------------------------

SCHEDULES = {
    "as chosen": None,
    "whole": Schedule(64, 2, 8, name="row"),
    "narrow": Schedule(32, 1, 2, name="row"),
    "chunks": Schedule(32, 1, 8, chunks=(("n", 512),), name="looped"),
    "peeled": Schedule(32, 1, 8, name="row", peeled=True),
    "peeled chunks": Schedule(32, 1, 8, chunks=(("n", 512),), name="looped", peeled=True),
}


@DTYPES
@pytest.mark.parametrize(
    ("n", "way"), [(n, way) for n in (1040, 1003) for way in SCHEDULES if n % 8 or "peeled" not in way]
)
def test_rows(n: int, way: str, dtype: torch.dtype) -> None:
    x = rows(n, dtype)
    c, schedule = call(TEXT, "extremes", x=x), SCHEDULES[way]
    if n % 8 == 0 or "peeled" in way or way == "as chosen":
        assert "max_pair" in program(c, schedule).source
    for seed in (None, 3):
        exact(c, cuda_kit.run(c, schedule, seed))


@DTYPES
@pytest.mark.parametrize("sizes", [(3, 40), (8, 1024), (16, 8)])
def test_tiles(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Of a tile of two axes: along the vectors in pairs, and one variable for each slot of the other axis."""
    x = rows(sizes[0] * sizes[1], dtype).view(11, *sizes)
    c = call(TEXT, "columns", x=x)
    source = program(c, Schedule(32, 1, 8, name="row")).source
    assert "max_pair" in source and "min_pair" not in source
    exact(c, cuda_kit.run(c, Schedule(32, 1, 8, name="row")))


@DTYPES
@pytest.mark.parametrize("n", [20008, 20011])
def test_used_in_the_row(n: int, dtype: torch.dtype) -> None:
    x = rows(n, dtype)[:3]
    cuda_kit.check(call(TEXT, "scaled", x=x), seed=1)


MISTAKES: dict[str, Callable[[str], str]] = {
    "begins at 0": lambda s: s.replace("0xff80ff80", "0").replace("0xfc00fc00", "0"),
    "forgets a slot": lambda s: s.replace(
        "max_pair_bf16(high_max_pair, x_mn_raw[n_slot]", "max_pair_bf16(high_max_pair, x_mn_raw[0]"
    ),
    "forgets the odd places": lambda s: s.replace("__uint_as_float(pair & 0xffff0000)", "__uint_as_float(pair << 16)"),
    "forgets the last word": lambda s: s.replace("i < WORDS; ++i) own", "i < WORDS - 1; ++i) own"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c = call(TEXT, "extremes", x=rows(2048, BF16))
    exact(c, cuda_kit.run(c, SCHEDULES["chunks"]))

    def changed(p: Program) -> str:
        text = host_source(p)
        assert MISTAKES[mistake](text) != text
        return MISTAKES[mistake](text)

    monkeypatch.setattr(cuda_kit, "host_source", changed)
    with pytest.raises(AssertionError):
        exact(c, cuda_kit.run(c, SCHEDULES["chunks"]))


# ---- machine code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@DTYPES
def test_one_instruction_a_pair(dtype: torch.dtype, arch: str) -> None:
    made = program(call(TEXT, "extremes", x=rows(8192, dtype)), capability=int(arch[3:]))
    found = nvrtc.compile_cuda(made.source, made.entry, arch)
    assert found.resources.local_bytes == 0
    name = "bf16x2" if dtype == BF16 else "f16x2"
    # 4 words of 2 values in each slot of a thread.
    slots = 8192 // 8 // made.schedule.threads
    assert len(re.findall(rf"max\.NaN\.{name} ", found.ptx)) >= 4 * slots
