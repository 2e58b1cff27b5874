"""Passes over the same chunks turn round, where nothing depends on which chunk comes first."""

from __future__ import annotations

from derive_kit import kernel_of
from ir_kit import variant

from kgen.codegen.alternate import alternated
from kgen.codegen.normalize import normalize
from kgen.codegen.online import steps_of
from kgen.codegen.schedule import Loop, Schedule


def directions(source: str) -> list[bool]:
    """Of each pass over chunks of `n`, whether it runs from the last chunk to the first."""
    checked = kernel_of(source)
    kernel = normalize(checked, variant(checked, {"N": 64}))
    steps = alternated(kernel, steps_of(kernel, Schedule(32, 1, chunks=(("n", 16),))))
    return [s.down for s in steps if isinstance(s, Loop)]


def test_each_pass_runs_against_the_one_before() -> None:
    source = """
kernel norm(x: f32[*M, N]) -> (y: f32[*M, N]):
    parallel m in M
    tile n in N
    c = x[m, n] - mean(x[m, n], n)
    y[m, n] = c * rsqrt(mean(c * c, n) + 1.0)
"""
    assert directions(source) == [False, True, False]


def test_a_pass_that_reads_something_else_does_not_turn() -> None:
    source = """
kernel apart(x: f32[*M, N], w: f32[N]) -> (y: f32[*M, N]):
    parallel m in M
    tile n in N
    s = sum(x[m, n], n)
    y[m, n] = s * w[n]
"""
    assert directions(source) == [False, False]


def test_the_first_of_equal_values_stays_the_first() -> None:
    source = """
kernel first(x: f32[*M, N]) -> (y: i32[*M]):
    parallel m in M
    tile n in N
    s = mean(x[m, n], n)
    y[m] = i32(argmax(x[m, n] - s, n))
"""
    assert directions(source) == [False, False]


def test_what_is_overwritten_is_read_in_the_same_chunk() -> None:
    source = """
kernel halve_(x: inout f32[*M, N]):
    parallel m in M
    tile n in N
    s = sum(x[m, n], n)
    x[m, n] = x[m, n] / s
"""
    assert directions(source) == [False, True]
    shifted = """
kernel shift_(x: inout f32[*M, N + 1]):
    parallel m in M
    tile n in N
    s = sum(x[m, n], n)
    x[m, n] = x[m, n + 1] / s
"""
    assert directions(shifted) == [False, False]
