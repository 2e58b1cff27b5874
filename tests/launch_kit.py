"""Kernels for tests of warm calls, and what they compute."""

from __future__ import annotations

import pytest
import torch
from driver_kit import FakeDriver

import kgen
from kgen.codegen.program import Program

TEXT = """
kernel scaled(x: T[*M, N], w: W[N]?, a: f32 = 2.0, b: f64 = 0.0, n: i32 = 0, flip: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n_ in N
    v = T(x[m, n_] * a + b + n)
    if w:
        v2 = v * w[n_]
    else:
        v2 = v
    if flip:
        y[m, n_] = -v2
    else:
        y[m, n_] = v2

kernel both(x: T[*M, N], z: T[*M, N]) -> (y: T[*M, N], d: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] + z[m, n]
    d[m, n] = x[m, n] - z[m, n]

kernel halve(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, n] * 0.5

kernel total(x: f32[M, N]) -> (y: f32[N]):
    parallel m in M
    tile n in N
    y[n] += x[m, n]

kernel half_scalar(x: f32[N], h: f16 = 1.0, b: bf16 = 1.0) -> (y: f32[N]):
    parallel n in N
    y[n] = x[n] * h + b
"""


@pytest.fixture
def module(machine: FakeDriver) -> kgen.KernelModule:
    return kgen.loads(TEXT)


def scaled(x: torch.Tensor, w: torch.Tensor | None, a: float, b: float, n: int, flip: bool) -> torch.Tensor:
    """What the kernel computes, rounded where it rounds: exact for the small integers of these tests."""
    y = x.double() * a + b + n
    y = y * w.double() if w is not None else y
    return (-y if flip else y).to(x.dtype)


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-8, 8, shape).to(dtype)


def scheduled(module: kgen.KernelModule, x: torch.Tensor) -> Program:
    """What runs."""
    program = module.scaled.prepare(x, backend="cuda").program
    assert program is not None
    return program
