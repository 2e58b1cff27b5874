"""Which stores are streamed past the caches: those of passes over chunks, but for what is read again."""

from __future__ import annotations

import pytest

from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, target

TEXT = """
kernel soft(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = softmax(x[m, n], n)

kernel soft_(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = softmax(x[m, n], n)

kernel column_sums(x: T[*M, N]) -> (s: f32[N]):
    parallel m in M
    tile n in N
    schedule cuda: chunk[n] = 4096
    schedule triton: chunk[n] = 4096
    s[n] += x[m, n] - mean(x[m, n], n)
"""
MODULE = parse_text(TEXT)
MARKS = {"cuda": "store_streaming<", "triton": 'cache_modifier=".cs"'}


def streamed(kernel: int, n: int, backend: str) -> bool:
    """Whether kernel number `kernel` streams a store, in bf16 with rows of `n`."""
    made = target(MODULE, MODULE.kernels[kernel], Choices(dims={"M": 8, "N": n}, dtype="bf16"))
    return any(MARKS[backend] in p.source for p in made.program(backend).launches)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_passes_over_chunks_stream_and_whole_rows_do_not(backend: str) -> None:
    assert streamed(0, 100352, backend)
    assert not streamed(0, 4096, backend)
    assert not streamed(0, 40960, "triton")  # held in chunks: nothing is to be found again


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_sums_that_go_on_in_memory_are_not_streamed(backend: str) -> None:
    made = target(MODULE, MODULE.kernels[2], Choices(dims={"M": 8, "N": 300000}, dtype="bf16")).program(backend)
    assert made.stage is not None and made.stage.sums is not None
    assert made.stage.sums.zeroed  # a chunk's sums are read, added to and stored
    assert not streamed(2, 300000, backend)


def test_rows_in_place_that_stay_in_the_caches_are_not_streamed_on_cuda() -> None:
    assert streamed(1, 50304, "cuda")
    assert not streamed(1, 32000, "cuda")
    assert streamed(1, 32000, "triton")
