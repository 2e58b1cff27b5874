"""The two kernels behind a call that records gradients, compiled ahead: its training form, and its backward.

Both are `.kdsl` text, whether the backward is derived or written by hand, and are compiled as any file is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.codegen.derive import Derived, differentiable
from kgen.codegen.derive.pair import module_of
from kgen.codegen.derive.written import gradients_of, underivable
from kgen.dsl import ir
from kgen.dsl.diagnostics import DslError
from kgen.runtime.ahead import Choices, Target, target
from kgen.runtime.build import Job


@dataclass(frozen=True)
class GradientTargets:
    """What a call of a kernel runs that records the gradients of all inputs that have one."""

    derived: Derived
    training: Target
    backward: Target

    def jobs(self, job: Job) -> list[Job]:
        """The builds of both kernels, beside that of the kernel itself, `job`."""
        d, name = self.derived, job.item.name
        outputs = [t.name for t in d.forward.tensors if t.role == "out"]
        stored = outputs[len(outputs) - len(d.residuals) :]  # in the order of the backward's, which may call them else
        return [
            _job(job, self.training, {"of": name, "role": "training", "residuals": stored}),
            _job(job, self.backward, {
                "of": name,
                "role": "backward",
                "by_hand": d.by_hand,
                "residuals": list(d.residuals),
                "outputs": list(d.outputs),
                "cotangents": dict(d.cotangents),
                "gradients": dict(d.gradients),
            }),
        ]  # fmt: skip


def _job(job: Job, made: Target, gradient: dict[str, object]) -> Job:
    (declared,) = made.module.kernels
    choices = Choices(dims=made.layout.dims)
    return replace(job, module=made.module, item=declared, choices=choices, gradient=gradient)


def gradient_targets(made: Target) -> GradientTargets:
    """Both kernels for the sizes of `made`. Raises DslError, with every reason, where no input has a gradient."""
    without = underivable(made.module, made.kernel)
    wanted = differentiable(made.kernel) - without.keys()
    if without and not wanted:
        raise DslError({d.render(): d for why in without.values() for d in why.diagnostics}.values())
    derived = gradients_of(made.module, made.kernel, wanted)
    return GradientTargets(derived, _compiled(derived.forward, made), _compiled(derived.backward, made))


def _compiled(kernel: ir.Kernel, made: Target) -> Target:
    module = module_of(kernel)
    (declared,) = module.kernels
    return target(module, declared, Choices(dims=made.layout.dims))
