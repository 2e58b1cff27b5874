"""Kernels, their derivatives, and torch.autograd's opinion on the same arguments, in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kgen.codegen.derive import Derived, derive, differentiable
from kgen.codegen.interpret import interpret
from kgen.codegen.torch_dtypes import FROM_TORCH
from kgen.dsl import ast, ir
from kgen.dsl.check import ScalarParam, Specialization, elaborate, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES, F32
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text

ROOT = Path(__file__).resolve().parent.parent
UNPLANNED = parse_text((ROOT / "tests/kernels/unplanned.kdsl").read_text(), "unplanned.kdsl")


@dataclass(frozen=True)
class Call:
    """A specialised kernel with its tensors and run-time scalars."""

    kernel: ir.Kernel
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any]


def shipped(file: str) -> ast.Module:
    """A file of `ops/`."""
    return load(ROOT / "ops" / file).module


def call(module: ast.Module, name: str, arguments: Mapping[str, Any]) -> Call:
    """`name` of `module` specialised to these arguments (tensors, scalars and consts)."""
    definition = next(k for k in module.kernels if k.name == name)
    signature = signature_of(definition, Diagnostics())
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    dtypes = {
        p.dtype: FROM_TORCH[tensors[p.name].dtype]
        for p in signature.params
        if p.name in tensors and p.dtype not in DTYPES
    }
    open_vars = {v: dtypes.get(v, F32) for v in signature.dtype_vars}
    scalars = [p for p in signature.params if isinstance(p, ScalarParam)]
    consts = {p.name: arguments.get(p.name, p.default) for p in scalars if p.const}
    present = frozenset(t.name for t in signature.tensors if t.optional and t.name in tensors)
    kernel = elaborate(module, name, Specialization(open_vars, consts, present))
    return Call(kernel, tensors, {p.name: arguments[p.name] for p in scalars if not p.const and p.name in arguments})


def kernel_of(text: str, **consts: Any) -> ir.Kernel:
    """The only kernel of a text, in float32."""
    module = parse_text(text, "test.kdsl")
    signature = signature_of(module.kernels[0], Diagnostics())
    return elaborate(module, module.kernels[0].name, Specialization(dict.fromkeys(signature.dtype_vars, F32), consts))


def scalars_of(kernel: ir.Kernel, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the kernel takes."""
    return {s.name: scalars[s.name] for s in kernel.scalars if s.name in scalars}


def cotangents(outputs: Mapping[str, torch.Tensor], derived: Derived, seed: int = 7) -> dict[str, torch.Tensor]:
    """A random gradient for each output that has one, in float64; never all ones."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(outputs[name].shape, generator=g, dtype=torch.float64) for name in derived.cotangents}


def doubled(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Floats as float64."""
    return {k: v.double() if v.is_floating_point() else v for k, v in tensors.items()}


def gradients(
    c: Call, derived: Derived, seeds: Mapping[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the derived pair gives for random (or the given) gradients of the outputs: by input, and these gradients."""
    outputs = interpret(derived.forward, c.tensors, scalars_of(derived.forward, c.scalars), precision="f64")
    seeds = cotangents(outputs, derived) if seeds is None else seeds
    given = {t.name for t in derived.backward.tensors if t.role == "in"}
    arguments = {k: v for k, v in c.tensors.items() if k in given} | {r: outputs[r] for r in derived.residuals}
    arguments |= {d: seeds[name].to(torch.float64) for name, d in derived.cotangents.items() if d in given}
    held = Held(derived.backward, arguments)
    results = interpret(held.kernel, held.tensors, scalars_of(derived.backward, c.scalars), precision="f64")
    return {name: results[d] for name, d in derived.gradients.items()}, dict(seeds)


class Held:
    """Arguments as the kernel's declared dtypes take them: gradients and residuals in float64, unrounded."""

    def __init__(self, kernel: ir.Kernel, tensors: Mapping[str, torch.Tensor]) -> None:
        self.kernel = replace(
            kernel,
            tensors=tuple(
                replace(t, dtype=FROM_TORCH[tensors[t.name].dtype]) if t.name in tensors else t for t in kernel.tensors
            ),
        )
        self.tensors = dict(tensors)


def autograd(
    formula: Any, c: Call, arguments: Mapping[str, Any], wanted: frozenset[str], seeds: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradients of the independent formula for the same arguments and gradients of outputs."""
    leaves = {
        k: v.double().requires_grad_(k in wanted) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }
    results = formula(**leaves)
    names = [t.name for t in c.kernel.tensors if t.role == "out"]
    total = torch.zeros((), dtype=torch.float64)
    for name, value in zip(names, results, strict=True):
        if name in seeds:
            total = total + (value * seeds[name].reshape(value.shape)).sum()
    asked = sorted(wanted)
    if not total.requires_grad:
        return {n: torch.zeros_like(leaves[n]) for n in asked}
    found = torch.autograd.grad(total, [leaves[n] for n in asked], allow_unused=True)
    return {n: torch.zeros_like(leaves[n]) if f is None else f for n, f in zip(asked, found, strict=True)}


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest element of `expected`; infinite where NaNs differ."""
    if actual.numel() == 0:
        return 0.0 if actual.shape == expected.shape else math.inf
    if actual.shape != expected.shape or not torch.equal(actual.isnan(), expected.isnan()):
        return math.inf
    difference = (actual - expected).abs().nan_to_num(0.0).max().item()
    return difference / max(expected.abs().nan_to_num(0.0).max().item(), 1e-3)


def derived_of(c: Call, wanted: frozenset[str] | None = None) -> Derived:
    """The derivative for all inputs that can have one, or for `wanted`."""
    return derive(c.kernel, differentiable(c.kernel) if wanted is None else wanted)
