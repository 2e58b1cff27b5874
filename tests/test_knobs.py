"""Knobs in place of the ladders: what they set, what is refused, and that results stay the same."""

from __future__ import annotations

from dataclasses import replace

import cuda_kit
import pytest
import torch
import triton_kit
from cuda_kit import Call, call
from test_accumulate import TEXT as SUMS
from test_accumulate import randn
from test_cuda_emit import GATE, NORM, SOFTMAX

from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Schedule, Scheduled, ScheduleError

BF16 = torch.bfloat16


def scheduled(c: Call, backend: str, knobs: Knobs | None = None) -> Scheduled:
    where, _ = cuda_kit.prepare(c)
    return schedule_kernel(where.kernel, where.variant, backend, knobs=knobs)


def norm(n: int = 4096) -> Call:
    return call(NORM, "norm", x=randn(3, n).to(BF16), w=randn(n))


def gate() -> Call:
    return call(GATE, "gate_up", gate=randn(5, 264).to(BF16), up=randn(5, 264).to(BF16))


def sums() -> Call:
    return call(SUMS, "affine_grad", d_y=randn(13, 72), x=randn(13, 72))


def test_what_is_left_out_stays_as_it_was() -> None:
    was = scheduled(norm(), "cuda").schedule
    assert was.by == "ladders"
    got = scheduled(norm(), "cuda", Knobs(threads=128, by="me")).schedule
    assert was.ahead and got == Schedule(128, was.rows, was.vector, name="row", by="me", ahead=was.ahead)
    assert scheduled(norm(), "cuda", Knobs()).schedule == replace(was, by="caller")


def test_chunks_make_a_looped_row_and_the_whole_extent_a_whole_one() -> None:
    got = scheduled(norm(), "triton", Knobs(chunks=(("n", 1024),))).schedule
    assert (got.name, got.chunks, got.rows) == ("looped", (("n", 1024),), 1)
    wide = call(SOFTMAX, "soft", x=randn(2, 50304).to(BF16))
    assert scheduled(wide, "cuda").schedule.chunks
    got = scheduled(wide, "cuda", Knobs(threads=1024, chunks=(("n", 65536),))).schedule
    assert (got.name, got.chunks) == ("row", ())


def test_short_rows_in_chunks_come_one_at_a_time() -> None:
    assert scheduled(norm(64), "cuda").schedule.rows > 1
    assert scheduled(norm(64), "cuda", Knobs(chunks=(("n", 32),))).schedule.rows == 1


def test_fewer_threads_than_short_rows_take_fewer_rows() -> None:
    assert scheduled(norm(1), "cuda").schedule.rows > 32
    assert scheduled(norm(1), "cuda", Knobs(threads=32)).schedule.rows == 32


def test_a_flat_kernel_keeps_its_vectors_a_thread() -> None:
    was = scheduled(gate(), "cuda").schedule
    got = scheduled(gate(), "cuda", Knobs(threads=64)).schedule
    assert got.rows * was.threads == was.rows * 64


def test_few_points_are_shared_out_among_fewer_threads() -> None:
    was = scheduled(gate(), "cuda").schedule
    assert (was.threads, was.vector) == (256, 8)
    got = scheduled(gate(), "cuda", Knobs(rows=512)).schedule
    assert (got.threads, got.rows, got.vector) == (64, 512, 8)


def test_blocks_of_a_sum() -> None:
    got = scheduled(sums(), "cuda", Knobs(threads=64, rows=1, blocks=3))
    assert got.sums is not None and got.sums.blocks == 3 and got.schedule.programs == 3 * 132
    # Those that add up the shares are as they were.
    assert got.then and all(s.schedule.by == "ladders" for s in got.then)


@pytest.mark.parametrize(
    ("make", "backend", "knobs", "message"),
    [
        (norm, "cuda", Knobs(threads=100), "threads is 100, expected a power of two up to 1024"),
        (norm, "cuda", Knobs(threads=2048), "threads is 2048"),
        (norm, "cuda", Knobs(threads=16), "expected at least 32"),
        (norm, "cuda", Knobs(threads=64, rows=128), "128 rows do not share out among 64 threads"),
        (norm, "cuda", Knobs(vector=3), "vector is 3"),
        (norm, "triton", Knobs(vector=8), "vector is for CUDA alone"),
        (norm, "triton", Knobs(chunks=(("n", 1000),)), "Triton's blocks are powers of two"),
        (norm, "cuda", Knobs(chunks=(("m", 4),)), "takes m in chunks, which is not a tile index"),
        (norm, "cuda", Knobs(chunks=(("n", 0),)), "the chunk of n is 0"),
        (norm, "cuda", Knobs(blocks=2), "it has no such sum"),
        (norm, "cuda", Knobs(registers=64), "registers is for Triton alone"),
        (norm, "triton", Knobs(threads=512, registers=129), "512 threads of 129 registers are more than the 65536"),
        (norm, "triton", Knobs(registers=256), "registers is 256, expected 32 to 255 a thread"),
        (norm, "triton", Knobs(ahead=1), "ahead is for CUDA kernels with tile indices"),
        (gate, "cuda", Knobs(ahead=1), "ahead is for CUDA kernels with tile indices"),
        (norm, "cuda", Knobs(ahead=33), "ahead is 33, expected 0 to 32"),
        (sums, "cuda", Knobs(blocks=64), "blocks is 64"),
        (sums, "cuda", Knobs(rows=2, chunks=(("n", 32),)), "give rows = 1"),
        (gate, "cuda", Knobs(rows=128, threads=256), "256 threads have 128 points to take"),
        (gate, "cuda", Knobs(rows=16), "32 threads have 16 points to take"),
    ],
)
def test_impossible_knobs_are_refused(make, backend: str, knobs: Knobs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        scheduled(make(), backend, knobs)


def test_plain_data_and_back() -> None:
    knobs = Knobs(threads=256, rows=1, chunks=(("n", 4096),), blocks=2, registers=64)
    assert knobs.data() == {"threads": 256, "rows": 1, "chunks": {"n": 4096}, "blocks": 2, "registers": 64}
    assert Knobs.read(knobs.data(), "table") == knobs and Knobs.read({}, "table").by == "table"
    with pytest.raises(ScheduleError, match="there is no knob 'warps'"):
        Knobs.read({"warps": 4}, "table")
    with pytest.raises(ScheduleError, match="rows is '2', expected a whole number"):
        Knobs.read({"rows": "2"}, "table")


@pytest.mark.parametrize("knobs", [Knobs(threads=64), Knobs(threads=256, rows=2), Knobs(chunks=(("n", 256),))], ids=str)
def test_results_stay_the_same(knobs: Knobs) -> None:
    soft = call(SOFTMAX, "soft", x=randn(5, 1000).to(BF16))
    for c in (norm(1000), soft):
        cuda_kit.check(c, 1000, scheduled(c, "cuda", knobs).schedule, seed=1)
        triton_kit.check(c, 1000, scheduled(c, "triton", knobs).schedule)


@pytest.mark.parametrize("knobs", [Knobs(threads=64), Knobs(rows=4096), Knobs(vector=2, threads=32)], ids=str)
def test_results_of_a_flat_kernel_stay_the_same(knobs: Knobs) -> None:
    cuda_kit.check(gate(), override=scheduled(gate(), "cuda", knobs).schedule)
    if knobs.vector is None:
        triton_kit.check(gate(), override=scheduled(gate(), "triton", knobs).schedule)
