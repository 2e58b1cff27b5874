"""Gradients of kernel calls, judged twice.

Against the derived backward in float64 on the very arguments of the call, within the bound that
`kgen.codegen.tolerance` derives; and against torch's gradient of an independent float64 formula. There residuals, which
are f32, differ as well: by the roundings of a sum over n elements, so (n + 64) units of 2**-24 of the largest gradient
are allowed. Gradients of outputs are random, never all ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shipped_cases import rms_formula as rms_formula  # for the tests that use this kit

import kgen
from kgen.codegen.tolerance import compare
from kgen.runtime.gradients import ask_gradients, kept
from kgen.runtime.kernel import Kernel
from kgen.runtime.loading import load_packaged

UNPLANNED = kgen.load(Path(__file__).parent / "kernels" / "unplanned.kdsl")
BACKENDS = ("reference", "cuda", "triton")


def available(name: str) -> str | None:
    """None where backend `name` can run on this machine's CPU, else the reason."""
    status = {s.name: s for s in kgen.backends("cpu")}[name]
    return None if status.available else status.reason or "not available"


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same, as a tensor that requires grad."""
    return randn(*shape, dtype=dtype, seed=seed).requires_grad_()


def as_tuple(x: Any) -> tuple[Any, ...]:
    """One result or several, as several."""
    return x if isinstance(x, tuple) else (x,)


def seeds_for(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """A random gradient for each output."""
    return [randn(*o.shape, dtype=o.dtype, seed=70 + i).to(o.device) for i, o in enumerate(outputs)]


def worst(actual: torch.Tensor, expected: torch.Tensor, n: int) -> float:
    """The largest error in units of the bound for a gradient that a sum over `n` elements enters; NaN must meet NaN."""
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return 0.0
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
    own = min(2.0**-24, unit[actual.dtype])
    largest = expected.abs().nan_to_num(0.0, 0.0).max().clamp(min=1e-6)
    bound = unit[actual.dtype] * expected.abs() + (n + 64) * own * largest
    ratio = ((actual.double() - expected).abs() / bound).nan_to_num(torch.inf)  # NaN where only one of them is
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return ratio.where(~same, 0.0).max().item()


def check(
    kernel: Kernel,
    arguments: dict[str, Any],
    formula: Callable[..., Any] | None,
    backend: str,
    constant: tuple[str, ...] = (),
) -> None:
    """Every gradient of a call of `kernel` but those of `constant`, against both judges, or without a formula one."""
    floats = wanted(arguments, constant)
    given = {n: v.clone().requires_grad_() if n in floats else v for n, v in arguments.items()}
    results = as_tuple(kernel(**given, backend=backend))
    carrying = [r for r in results if r.requires_grad]
    seeds = seeds_for(tuple(carrying))
    found = dict(zip(floats, torch.autograd.grad(carrying, [given[n] for n in floats], seeds), strict=True))

    at = iter(seeds)
    asked = ask_gradients(kernel, arguments, floats, lambda *_: next(at))
    t = asked.training
    with torch.no_grad():
        made = as_tuple(t.forward(*(asked.given[p.name] for p in t.forward.signature.params), backend=backend))
    for mine, again in zip(results, made, strict=False):
        assert torch.allclose(mine, again, rtol=0.0, atol=0.0, equal_nan=True)
    names = (o.name for o in t.forward.signature.outputs)
    question = asked.backward(kept(t.derived, dict(zip(names, made, strict=True))))
    for name, g in found.items():
        own = t.derived.gradients[name]
        assert compare(g, question.expected[own], question.bound[own]).ok, name

    if formula is None:
        return
    taken = inspect.signature(formula).parameters
    plain = {n: v.detach().double() if n in wanted(given) else v for n, v in given.items() if n in taken}
    doubles = {n: v.requires_grad_() if n in floats else v for n, v in plain.items()}
    theirs = [o for o, r in zip(as_tuple(formula(**doubles)), results, strict=True) if r.requires_grad]
    expected = torch.autograd.grad(theirs, [doubles[n] for n in floats], [s.double() for s in seeds])
    size = max(v.numel() for v in arguments.values() if isinstance(v, torch.Tensor))
    for name, e in zip(floats, expected, strict=True):
        assert worst(found[name], e, size) <= 1.0, name


def wanted(arguments: dict[str, Any], constant: tuple[str, ...] = ()) -> list[str]:
    """The arguments that can have a gradient."""
    floats = [n for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return [n for n in floats if n not in constant]


def packaged(file: str, name: str) -> Kernel:
    """A shipped kernel."""
    return load_packaged(f"{Path(file).stem}.kdsl")[name]
