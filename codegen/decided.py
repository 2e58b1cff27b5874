"""How far may two ways of computing a value in float64 lie apart that decide every comparison alike?

The bounds of `tolerance` hold for a backend: what it compares may come out either way where rounding decides. Two
computations in float64 compare the same values. Here every comparison, step and conversion to an integer has the
outcome that the float64 reference gives it, and only rounding is left: that of f32, whatever dtypes the kernel has, so
that the bound is far above what float64 rounds in either of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from kgen.codegen.derive.rules import STEPS
from kgen.codegen.enclosure import Enclosure
from kgen.codegen.execute import ScalarValue
from kgen.codegen.interpret import in_float64
from kgen.codegen.tolerance import MAX_ELEMENTS, Analysis, blocked_depth, sequential_depth
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import F32, DType


def as_in_f32(kernel: ir.Kernel) -> ir.Kernel:
    """`kernel` with f32 in the place of every other floating-point dtype, and with inputs of float64."""
    body = tuple(replace(s, value=_expression(s.value)) for s in kernel.body)
    tensors = (replace(t, dtype=F32) if t.dtype.kind == "float" else t for t in kernel.tensors)
    inputs = {t.name: t for t in in_float64(kernel).tensors if t.role == "in"}
    return replace(kernel, tensors=tuple(inputs.get(t.name, t) for t in tensors), body=body)


def _expression(e: ir.Expr) -> ir.Expr:
    e = replace(e, dtype=_f32(e.dtype))
    match e:
        case ir.Load():
            return replace(e, at=tuple(s if isinstance(s, Poly) else _expression(s) for s in e.at))
        case ir.Op():
            return replace(e, args=tuple(map(_expression, e.args)))
        case ir.Cast():
            return replace(e, to=_f32(e.to), arg=_expression(e.arg))
        case ir.Reduce():
            return replace(e, arg=_expression(e.arg))
        case _:
            return e


def _f32(dtype: DType) -> DType:
    return F32 if dtype.kind == "float" else dtype


def rounding_bound(
    kernel: ir.Kernel,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, ScalarValue],
    *,
    max_elements: int = MAX_ELEMENTS,
) -> dict[str, torch.Tensor]:
    """For each output of `kernel` the float64 tensor of distances from `interpret(..., precision="f64")` that rounding
    of its operations explains, their decisions being those of the reference. Arguments as for `interpret`."""
    run = _Decided(kernel, tensors, scalars, blocked_depth, sequential_depth, max_elements)
    run.run()
    return run.bounds()


class _Decided(Analysis):
    """Integers, bools and the results of steps are what they are in the reference."""

    def op(self, e: ir.Op, args: list[Enclosure]) -> Enclosure:
        out = super().op(e, args)
        return out if out.is_float and e.fn not in STEPS else Enclosure(out.v)

    def cast(self, e: ir.Cast, v: Enclosure) -> Enclosure:
        out = super().cast(e, v)
        return out if out.is_float else Enclosure(out.v)

    def reduce(self, e: ir.Reduce, v: Enclosure, over: list[int]) -> Enclosure:
        out = super().reduce(e, v, over)
        return out if out.is_float else Enclosure(out.v)
