"""Choices of a whole row are made once: a pass over chunks becomes two, of which a program takes one."""

from __future__ import annotations

import pytest
import torch
from apart_kit import equal, kinds, left_alone, looped, scheduled
from cuda_kit import Call, agree, call, compiled, oracle
from triton_kit import emitted

from kgen.codegen.schedule import Choice, Loop, Schedule
from kgen.dsl import ir

BACKENDS = ("cuda", "triton")
HEAD = """
kernel k(x: T[*M, N], s: T[*M], f: f32 = 1.0) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    top = max(x[m, n], n)
"""
CHOSEN = {
    "zeros": HEAD + "    y[m, n] = where(s[m] > 0.0, x[m, n] / top, 0.0)",
    "by name": HEAD + "    c = s[m] > 0.0\n    v = where(c, exp(x[m, n] - top), 2.0 * s[m])\n    y[m, n] = v",
    "no first": HEAD + "    y[m, n] = where(s[m] > 0.0, top, x[m, n] - where(s[m] > 0.0, 1.0, s[m]))",
    "of the call": HEAD + "    y[m, n] = where(f == 1.0, x[m, n] * top, x[m, n])",
    "and": HEAD + "    y[m, n] = where(s[m] > 0.0 and x[m, n] < top, x[m, n], -1.0)",
    "inside too": HEAD + "    a = where(s[m] > 0.0, x[m, n], top)\n    y[m, n] = where(s[m] > 0.0, a + 1.0, a - 1.0)",
}
LEFT = {
    "of the element": HEAD + "    y[m, n] = where(x[m, n] > 0.0, x[m, n] / top, 0.0)",
    "or": HEAD + "    y[m, n] = where(s[m] > 0.0 or x[m, n] < top, x[m, n], -1.0)",
    "part of a value": HEAD + "    y[m, n] = top + where(s[m] > 0.0, x[m, n], 0.0)",
}
TWO = """
kernel k(x: inout T[*M, N], s: T[*M]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    top = max(x[m, n], n)
    y[m, n] = where(s[m] > 0.0, x[m, n] / top, 0.0)
    x[m, n] = where({condition}, x[m, n] - top, top)
"""


def example(text: str, n: int = 37, dtype: torch.dtype = torch.float32) -> Call:
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    x[1, 0], x[2, -1], x[3, n // 2] = float("nan"), float("inf"), -float("inf")
    return call(text, "k", x=x, s=torch.tensor([1.0, -1.0, 0.0, 3.0, float("nan")], dtype=dtype))


def store_pass(c: Call, backend: str, schedule: Schedule) -> str:
    return kinds(scheduled(c, backend, schedule).steps[-1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", CHOSEN.values(), ids=CHOSEN)
def test_a_pass_becomes_a_choice_of_two(text: str, backend: str) -> None:
    c, schedule = example(text), looped(backend, "n", 8)
    assert store_pass(c, backend, schedule) == "[loop | loop]"
    agree(equal(c, backend, schedule), oracle(c), 4)
    equal(example(text, 64, torch.bfloat16), backend, looped(backend, "n", 32, 32, 8))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_choices_of_elements_are_left_alone(text: str, backend: str) -> None:
    assert store_pass(example(text), backend, looped(backend, "n", 8)) == "loop"


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_pass_does_what_it_needs(backend: str) -> None:
    choice = scheduled(example(CHOSEN["inside too"]), backend, looped(backend, "n", 8)).steps[-1]
    assert isinstance(choice, Choice)
    (yes,), (no,) = choice.yes, choice.no
    assert isinstance(yes, Loop) and isinstance(no, Loop)
    assert not any(isinstance(e, ir.Op) and e.fn == "where" for s in choice.body for e in ir.walk(s.value))
    assert any(isinstance(s.value, ir.Load) for s in yes.body) and yes.down
    assert [type(s) for s in no.body] == [ir.Store] and not no.down  # nothing is there to be found again


@pytest.mark.parametrize("backend", BACKENDS)
def test_stores_with_one_condition_go_together(backend: str) -> None:
    c, schedule = example(TWO.format(condition="s[m] > 0.0")), looped(backend, "n", 8)
    assert store_pass(c, backend, schedule) == "[loop | loop]"
    agree(equal(c, backend, schedule), oracle(c), 4)
    for other in ("s[m] > 1.0", "x[m, n] > 0.0"):
        c = example(TWO.format(condition=other))
        assert store_pass(c, backend, schedule) == "loop"
        equal(c, backend, schedule)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_a_program_holds_whole_are_left_alone(backend: str) -> None:
    for schedule in (Schedule(32, 1), Schedule(32, 2)):
        with left_alone():
            before = scheduled(example(CHOSEN["zeros"]), backend, schedule)
        assert scheduled(example(CHOSEN["zeros"]), backend, schedule) == before


def test_rows_that_are_held_in_chunks_are_left_alone() -> None:
    c, schedule = example(CHOSEN["zeros"]), Schedule(32, 1, chunks=(("n", 8),), held=True)
    assert store_pass(c, "triton", schedule) == "loop"
    agree(equal(c, "triton", schedule), oracle(c), 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_rows_in_chunks_are_left_alone(backend: str) -> None:
    c = example(CHOSEN["zeros"])
    assert store_pass(c, backend, Schedule(32, 2, chunks=(("n", 8),))) == "loop"


BARE = """
kernel k(x: inout T[*M, N], s: T[*M]):
    require N >= 1
    parallel m in M
    tile n in N
    x[m, n] = where(s[m] > 0.0, x[m, n] - x[m, 0], 2.0 * x[m, 0])
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_ways_wait_for_what_they_overwrite(backend: str) -> None:
    """No reduction brings the threads together between the load of `x[m, 0]` and the first store."""
    c, schedule = example(BARE, 101), looped(backend, "n", 8, 64)
    assert kinds(scheduled(c, backend, schedule).steps) == "straight [loop | loop]"
    agree(equal(c, backend, schedule, (1, 2, 3)), oracle(c), 4)
    if backend == "cuda":
        assert all("__syncthreads();" in way for way in compiled(c, schedule).source.split("} else {"))
        return
    # Blocks of fewer lanes than threads are read by several of them in each chunk, others once in front.
    assert emitted(c, schedule).source.count("tl.debug_barrier()") == 2
    before, *ways = emitted(c, looped(backend, "n", 32)).source.split("    if s_m")
    assert "tl.debug_barrier()" in before and "tl.debug_barrier()" not in ways[0]


LATER = """
kernel k(x: inout T[*M, N], v: f32[K], s: f32[*M], t: i64[*M]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N, k in K
    p = x[m, t[m]]
    y[m, n] = where(s[m] > 0.0, n * p, 0.0)
    x[m, n] = x[m, n] + p - max(v[k] + s[m], k)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_neither_way_waits_for_a_later_pass_does(backend: str) -> None:
    """All threads load `p`; the choice overwrites nothing, and a warp alone reduces without a barrier."""
    generator = torch.Generator().manual_seed(1)
    x, v, s = (torch.randn(shape, generator=generator) for shape in ((3, 37), (20,), (3,)))
    c = call(LATER, "k", x=x, v=v, s=s, t=torch.tensor([1, 2, 3]))
    schedule = Schedule(32, 1, chunks=(("n", 8), ("k", 8)))
    assert kinds(scheduled(c, backend, schedule).steps) == "straight [loop | loop] loop loop"
    agree(equal(c, backend, schedule), oracle(c), 4)
    if backend == "cuda":
        assert compiled(c, schedule).source.rindex("__syncthreads();") > compiled(c, schedule).source.rindex("__shfl")
    else:
        assert emitted(c, schedule).source.count("tl.debug_barrier()") == 1


REDUCED = """
kernel k(x: T[*M, N], s: T[*M]) -> (y: T[*M, N], z: T[*M]):
    parallel m in M
    tile n in N
    top = max(x[m, n], n)
    v = where(s[m] > 0.0, x[m, n] - top, 0.0)
    y[m, n] = v
    z[m] = sum(v, n)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_that_reduces_too_is_left_alone(backend: str) -> None:
    steps = scheduled(example(REDUCED), backend, looped(backend, "n", 8)).steps
    assert not any(isinstance(s, Choice) for s in steps)
    equal(example(REDUCED), backend, looped(backend, "n", 8))


def test_the_text() -> None:
    c = example(CHOSEN["zeros"])
    cuda = compiled(c, looped("cuda", "n", 8)).source
    assert "\n    if (s_m > 0.0f) {\n" in cuda and "\n    } else {\n" in cuda
    (otherwise,) = cuda.split("\n    } else {\n")[1:]
    assert "x_row" not in otherwise and "y_row[n] = 0.0f;" in otherwise
    triton = emitted(c, looped("triton", "n", 8)).source
    assert "\n    if s_m > 0.0:\n        for n" in triton
    assert "\n    else:\n        for n0 in range(0, 37, 8):" in triton
