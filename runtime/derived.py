"""The two kernels behind a call that records gradients, compiled ahead: its training form, and its backward."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.codegen.derive import Derived, differentiable
from kgen.codegen.derive.written import gradients_of, underivable
from kgen.dsl import ir
from kgen.dsl.diagnostics import DslError
from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, Target, target


@dataclass(frozen=True)
class GradientTargets:
    """What a call of a kernel runs that records the gradients of all inputs that have one."""

    derived: Derived
    training: Target
    backward: Target


def gradient_targets(made: Target) -> GradientTargets:
    """Both kernels for the sizes of `made`. Raises DslError, with every reason, where no input has a gradient."""
    without = underivable(made.module, made.kernel)
    wanted = differentiable(made.kernel) - without.keys()
    if without and not wanted:
        raise DslError({d.render(): d for why in without.values() for d in why.diagnostics}.values())
    derived = gradients_of(made.module, made.kernel, wanted)
    return GradientTargets(derived, _compiled(derived.forward, made), _compiled(derived.backward, made))


def _compiled(kernel: ir.Kernel, made: Target) -> Target:
    module = parse_text(kernel.span.source.text, f"{kernel.name}.kdsl")
    (declared,) = module.kernels
    return target(module, declared, Choices(dims=made.layout.dims))
