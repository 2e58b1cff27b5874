"""Candidates: schedules around the default, each another program, and every one of them right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import kgen
from kgen.codegen.candidates import Candidate, candidates, estimate
from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import ScheduleError
from kgen.codegen.triton import emit
from kgen.runtime.ahead import Choices
from kgen.runtime.loading import load_packaged
from kgen.runtime.registry import executor_for
from kgen.runtime.tune import load_candidate
from kgen.runtime.tune_cases import Case, case
from kgen.runtime.tune_compile import Order, plan
from kgen.runtime.tune_measure import Check

CPU = torch.device("cpu")

COLUMNS = """kernel column_sums(x: T[M, N]) -> (total: f32[N], y: T[M, N]):
    parallel m in M, n in N
    total[n] += x[m, n] * x[m, n]
    y[m, n] = 2.0 * x[m, n]
"""
TILES = """kernel two_tiles(x: T[*M, A, B], w: T[B]) -> (y: T[*M, A], z: T[*M, B]):
    parallel m in M
    tile a in A, b in B
    y[m, a] = sum(x[m, a, b] * w[b], b)
    z[m, b] = max(x[m, a, b], a)
"""


def packaged(file: str, name: str, direction: str = "forward", absent: tuple[str, ...] = (), **dims: int) -> Case:
    return case(load_packaged(f"{file}.kdsl")[name], Choices(dims, without=frozenset(absent)), direction)


def written(text: str, **dims: int) -> Case:
    module = kgen.loads(text)
    return case(module[next(iter(module))], Choices(dims, "f32"))


CASES = {
    "norm": lambda: packaged("rms_norm", "rms_norm", M=37, N=200),
    "norm of a ragged row": lambda: packaged("rms_norm", "rms_norm", M=5, N=777),
    "norm backward": lambda: packaged("layer_norm", "layer_norm", "backward", M=41, N=256),
    "softmax": lambda: packaged("softmax", "softmax", M=7, N=3000),
    "softmax in chunks": lambda: packaged("softmax", "softmax", M=3, N=40960),
    "cross entropy": lambda: packaged("cross_entropy", "cross_entropy_", "forward", ("weight", "z_scale"), M=9, V=700),
    "rope": lambda: packaged("rope", "rope", "forward", ("positions",), B=2, S=7, HQ=3, HK=1, D=32, P=9, R=16),
    "gated": lambda: packaged("swiglu", "geglu", "backward", M=50, N=129),
    "column sums": lambda: written(COLUMNS, M=70, N=300),
    "two tiles": lambda: written(TILES, M=6, A=24, B=96),
}  # fmt: skip


def found(c: Case, backend: str, most: int = 32) -> tuple[Candidate, ...]:
    return candidates(c.where.kernel, c.where.variant, backend, most=most)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_right(name: str, backend: str) -> None:
    c = CASES[name]()
    executor = executor_for(backend, CPU)
    if executor.why_unavailable(CPU):
        pytest.skip(str(executor.why_unavailable(CPU)))
    check = Check(c, CPU)
    planned = plan(Order(c.where.kernel, c.where.variant, backend, 4, 90, most=200))
    assert len(planned) > 4 and planned[0].knobs is None
    # Every fifth, from another one on for each kernel: all of them would take minutes.
    first = list(CASES).index(name) % 5
    for p in [planned[0], *planned[1 + first :: max(5, len(planned) // 8)]]:
        built = load_candidate(executor, p.program, c, CPU)
        assert check.problem(built) == "", p.knobs


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_candidates_are_different_programs_in_order_of_cost(name: str, backend: str) -> None:
    c = CASES[name]()
    some = found(c, backend)
    assert some[0].knobs is None and some[0].scheduled.schedule == schedule_kernel(
        c.where.kernel, c.where.variant, backend
    ).schedule  # fmt: skip
    assert 4 < len(some) <= 32
    costs = [s.cost for s in some[1:]]
    assert costs == sorted(costs)
    schedules = [replace(s.scheduled.schedule, by="") for s in some]
    assert len(set(schedules)) == len(schedules)
    planned = plan(Order(c.where.kernel, c.where.variant, backend, 132, 90))
    programs = [tuple((q.source, q.schedule.threads, q.schedule.programs) for q in p.program.launches) for p in planned]
    assert len(set(programs)) == len(programs) > len(some) // 2


@pytest.mark.parametrize(
    ("c", "chunks", "loops"),
    [
        (lambda: packaged("softmax", "softmax", M=5, N=3000), (("n", 1024),), 2),
        (lambda: packaged("cross_entropy", "cross_entropy_", "forward", ("weight", "z_scale"), M=5, V=700),
         (("v", 256),), 2),
        (lambda: packaged("rms_norm", "rms_norm", "backward", M=70, N=256), (), 1),
        (lambda: packaged("rms_norm", "rms_norm", "backward", M=20, N=600), (("n", 128),), 2),
        (lambda: written(COLUMNS, M=70, N=300), (), 1),
    ],
)  # fmt: skip
def test_loads_of_several_iterations_in_flight(c: Callable[[], Case], chunks: Any, loops: int) -> None:
    made = c()
    knobs = Knobs(chunks=chunks, stages=3)
    scheduled = schedule_kernel(made.where.kernel, made.where.variant, "triton", num_sms=4, knobs=knobs)
    program = emit(scheduled)
    assert program.source.count("num_stages=3") == program.source.count("tl.range(") == loops
    assert all("num_stages" not in p.source for p in program.then)
    built = load_candidate(executor_for("triton", CPU), program, made, CPU)
    assert Check(made, CPU).problem(built) == ""


def test_stages_are_for_loops_of_triton() -> None:
    c = packaged("rms_norm", "rms_norm", M=8, N=256)
    for backend, knobs, message in (
        ("cuda", Knobs(stages=2), "for Triton alone"),
        ("triton", Knobs(stages=9, chunks=(("n", 64),)), "expected 1 to 8"),
        ("triton", Knobs(stages=0, chunks=(("n", 64),)), "expected 1 to 8"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedule_kernel(c.where.kernel, c.where.variant, backend, knobs=knobs)
    whole = schedule_kernel(c.where.kernel, c.where.variant, "triton", knobs=Knobs(stages=2))
    assert whole.schedule.stages == 1  # a row that is taken at once has none
    assert Knobs.read(Knobs(stages=2).data(), "x") == Knobs(stages=2)


def test_the_space_reaches_what_matters() -> None:
    c = packaged("softmax", "softmax", M=8, N=32000)
    schedules = [s.scheduled.schedule for s in found(c, "cuda", 100)]
    assert {s.threads for s in schedules} >= {256, 512, 1024}
    assert any(s.chunks for s in schedules) and any(not s.chunks for s in schedules)
    assert len({s.chunks for s in schedules}) > 3
    sums = [s.scheduled for s in found(packaged("rms_norm", "rms_norm", "backward", M=64, N=1024), "cuda", 100)]
    assert {s.sums.blocks for s in sums if s.sums} >= {4, 8, 16}
    looped = [s.scheduled.schedule for s in found(c, "triton", 100)]
    assert {s.stages for s in looped if s.chunks} >= {1, 2, 3} and {s.stages for s in looped if not s.chunks} == {1}
    short = [s.scheduled.schedule for s in found(packaged("rms_norm", "rms_norm", M=64, N=512), "triton", 100)]
    assert {s.rows for s in short} >= {1, 2, 4, 8}


def test_the_number_of_candidates_is_a_limit_and_the_first_ones_stay() -> None:
    c = packaged("rms_norm", "rms_norm", M=64, N=4096)
    many = found(c, "cuda", 100)
    assert found(c, "cuda", 6) == many[:6]


def test_what_would_spill_is_left_out() -> None:
    c = packaged("softmax", "softmax", M=8, N=32000)

    def cost(backend: str, knobs: Knobs) -> float | None:
        return estimate(schedule_kernel(c.where.kernel, c.where.variant, backend, knobs=knobs), backend)

    assert cost("cuda", Knobs(threads=32, chunks=(("n", 32000),))) is None
    assert cost("triton", Knobs(threads=32, chunks=(("n", 32000),))) is None
    assert cost("cuda", Knobs(threads=512, rows=1)) is not None


def test_a_row_that_is_read_twice_costs_more_than_one_that_is_kept() -> None:
    c = packaged("rms_norm", "rms_norm", M=8, N=8192)

    def cost(knobs: Knobs) -> float:
        found = estimate(schedule_kernel(c.where.kernel, c.where.variant, "cuda", knobs=knobs), "cuda")
        assert found is not None
        return found

    assert cost(Knobs(threads=256, rows=1)) < cost(Knobs(threads=256, rows=1, chunks=(("n", 4096),)))
