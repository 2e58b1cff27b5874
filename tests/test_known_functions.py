"""Functions of numbers in every binade: subnormals, exact roots and quotients, bounds of errors, infinities, signs."""

from __future__ import annotations

import math

import pytest
import torch

import kgen
from kgen.codegen.erf import SPLIT
from kgen.codegen.ulps import ULPS

pytestmark = pytest.mark.usefixtures("poisoned_memory")

F32 = 2.0**-24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


TINY = kgen.loads(
    "kernel tiny(x: T[N], a: T[N], b: T[N]) -> (half: T[N], e: T[N], e2: T[N]):\n    parallel n in N\n"
    "    half[n] = x[n] * 0.5\n    e[n] = exp(a[n])\n    e2[n] = exp2(b[n])\n"
)["tiny"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_subnormals_are_kept_but_by_f32_exponentials(backend: str, dtype: torch.dtype) -> None:
    x = torch.tensor([2.0**-126, 2.0**-140, 3 * 2.0**-148], dtype=dtype)
    a, b = torch.tensor([[-87.0, -88.0, -100.0], [-125.5, -127.5, -140.5]], dtype=dtype)
    half, e, e2 = TINY(x, a, b, backend=backend)
    assert torch.equal(half, x / 2)
    for y, expected in ((e, a.double().exp()), (e2, b.double().exp2())):
        if dtype == torch.float32 and backend != "reference":
            expected = expected.where(expected >= 2.0**-126, 0.0)
        assert torch.equal(y == 0.0, expected == 0.0)
        # An exponential of `a` is off by |a| roundings and a few more; a subnormal by one of its own units.
        assert ((y.double() - expected).abs() <= 150 * F32 * expected + 2.0**-149).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rsqrt_in_every_binade(backend: str, device: str) -> None:
    if device == "cuda" and backend == "reference":
        pytest.skip("the reference is what it is on a CPU")
    text = "kernel f(x: f32[N]) -> (y: f32[N]):\n    parallel n in N\n    y[n] = rsqrt(x[n])\n"
    budget = ULPS["rsqrt"]
    assert budget is not None
    count = 64 if device == "cpu" else 4096
    fraction = torch.rand(254, count, generator=torch.Generator().manual_seed(0))
    x = torch.ldexp(1.0 + fraction, torch.arange(-126, 128)[:, None]).flatten()
    x = x.clamp(max=torch.finfo(torch.float32).max).to(device)
    exact = x.double().rsqrt()
    off = (kgen.loads(text).f(x, backend=backend).double() - exact).abs()
    ulp = torch.exp2(torch.floor(torch.log2(exact)) - 23)
    assert (off / ulp).max() <= budget.at(x, x)


@pytest.mark.parametrize("device", DEVICES)
def test_roots_and_quotients_are_the_nearest(backend: str, device: str) -> None:
    text = """kernel f(x: f32[N], a: f32[N]) -> (root: f32[N], quotient: f32[N]):
    parallel n in N
    root[n] = sqrt(x[n])
    quotient[n] = a[n] / x[n]
"""
    fraction, a = torch.rand(2, 254, 64, generator=torch.Generator().manual_seed(0))
    x = (
        torch.ldexp(1.0 + fraction, torch.arange(-126, 128)[:, None])
        .flatten()
        .clamp(max=torch.finfo(torch.float32).max)
    )
    x, a = x.to(device), a.flatten().to(device)
    root, quotient = kgen.loads(text).f(x, a, backend=backend)
    # What is rounded to double precision first and then to f32 is the nearest: neither result is that close to a tie.
    assert torch.equal(root, x.double().sqrt().float())
    assert torch.equal(quotient, (a.double() / x.double()).float())


@pytest.mark.parametrize("device", DEVICES)
def test_erf_in_every_binade(backend: str, device: str) -> None:
    if device == "cuda" and backend == "reference":
        pytest.skip("the reference is what it is on a CPU")
    f = kgen.loads("kernel f(x: f32[N]) -> (y: f32[N]):\n    parallel n in N\n    y[n] = erf(x[n])\n").f
    budget = ULPS["erf"]
    assert budget is not None
    count = 64 if device == "cpu" else 4096
    generator = torch.Generator().manual_seed(0)
    binades = torch.ldexp(1.0 + torch.rand(276, count, generator=generator), torch.arange(-148, 128)[:, None]).flatten()
    middle = 5.0 * torch.rand(400 * count, generator=generator)
    # About the place where one polynomial ends and the other begins.
    border = torch.tensor(SPLIT).view(torch.int32) + torch.arange(-512, 512, dtype=torch.int32)
    x = torch.cat((binades.clamp(max=torch.finfo(torch.float32).max), middle, border.view(torch.float32))).to(device)
    exact = x.double().erf()
    y = f(x, backend=backend)
    assert ((y.double() - exact).abs() <= budget.at(x, x) * (2.0**-23 * exact + 2.0**-149)).all()
    assert (y[x > 4.0] == 1.0).all() and (y <= 1.0).all()
    assert torch.equal(f(-x, backend=backend).view(torch.int32), (-y).view(torch.int32))
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan], device=device)
    y = f(special, backend=backend)
    assert torch.equal(y[:4].view(torch.int32), special.clamp(-1.0, 1.0)[:4].view(torch.int32)) and y[4].isnan()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_negative_of_zero_is_negative(backend: str, device: str, dtype: torch.dtype) -> None:
    source = """kernel f(x: T[N]) -> (y: T[N], z: T[N]):
    parallel n in N
    y[n] = -x[n]
    z[n] = 1.0 / -x[n]
"""
    x = torch.tensor([0.0, -0.0, 1.5, -math.inf, math.inf], dtype=dtype, device=device)
    y, z = kgen.loads(source).f(x, backend=backend)
    assert torch.equal(y, -x) and torch.equal(y.signbit(), ~x.signbit())
    assert z.tolist() == [-math.inf, math.inf, float((1.0 / -x)[2]), 0.0, 0.0]
    assert z.signbit().tolist() == [True, False, True, False, True]
