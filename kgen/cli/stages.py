"""The stages of a kernel or an op as text: what `kgen show` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kgen.dsl.diagnostics import DslError

if TYPE_CHECKING:
    from kgen.codegen.machines import Machine
    from kgen.dsl import ast, ir
    from kgen.dsl.host.ast import Op
    from kgen.dsl.signature import Signature
    from kgen.runtime.ahead import Choices, Target
    from kgen.runtime.derived import GradientTargets

STAGES = ("source", "ast", "ir", "training", "backward", "schedule", "cuda", "triton", "ptx", "sass", "cost", "plan")
GRADIENTS = ("training", "backward")
BACKENDS = ("cuda", "triton")


@dataclass(frozen=True)
class Shown:
    """What is printed of a stage, that of `backend` where each has its own; `data` is what --json has in its place."""

    stage: str
    text: str
    backend: str | None = None
    data: object = None

    @property
    def title(self) -> str:
        """What stands above it."""
        return self.stage if self.backend is None else f"{self.stage}, {self.backend}"


@dataclass(frozen=True)
class Compiled:
    """For what a kernel is compiled: choices of the user, the backend if one is named, its direction (the kernel
    itself, its training form or its backward), architecture, and the machine of its cost."""

    chosen: Choices
    backend: str | None
    direction: str
    arch: str
    gpu: bool  # whether the machine is named
    machine: Callable[[], Machine]
    gradients: tuple[str, ...] | None  # of an op: those of which parameters, None for all that have one


def backends_of(stage: str, stages: Sequence[str], backend: str | None) -> tuple[str, ...]:
    """Whose `stage` is shown beside the others of `stages`, where the user named `backend` or none: those that stand
    among the stages, else both, but of ptx and sass, which are long and take a compiler, CUDA's."""
    if backend is not None:
        return (backend,)
    asked = tuple(s for s in stages if s in BACKENDS)
    return asked or (BACKENDS if stage in ("schedule", "cost") else BACKENDS[:1])


def op_stages(module: ast.Module, op: Op, stages: Sequence[str], how: Compiled) -> list[Shown]:
    """`stages` of an op, which has source, ast, plan and cost."""
    from kgen.cli.cost import op_data, op_text
    from kgen.cli.ir_text import tree_text
    from kgen.runtime.host.ahead import text
    from kgen.runtime.host.cost import op_cost

    out: list[Shown] = []
    for stage in stages:
        match stage:
            case "source":
                out.append(Shown(stage, "\n".join(op.span.source.lines[op.span.line - 1 : op.span.end_line])))
            case "ast":
                out.append(Shown(stage, tree_text(op)))
            case "plan":
                out.append(Shown(stage, text(module, op, how.chosen, how.gradients)))
            case _:
                found = op_cost(module, op, how.chosen, how.machine(), how.gradients)
                out.append(Shown(stage, op_text(found), data=op_data(found)))
    return out


def kernel_stages(module: ast.Module, declared: ast.Kernel, stages: Sequence[str], how: Compiled) -> list[Shown]:
    """`stages` of the kernel `declared` in the direction asked for. Those behind `training` or `backward` are of that
    kernel. Raises DslError where there is no such kernel."""
    from kgen.cli.ir_text import kernel_text, tree_text
    from kgen.runtime.ahead import settled, target
    from kgen.runtime.derived import gradient_targets

    made: Target | None = None
    symbolic: tuple[Signature, ir.Kernel] | None = None  # for what needs no sizes
    derived: GradientTargets | None = None
    of = declared

    def turn(direction: str) -> None:
        nonlocal made, derived, of
        derived = derived or gradient_targets(made or target(module, declared, how.chosen))
        made = derived.training if direction == "training" else derived.backward
        (of,) = made.module.kernels

    if how.direction in GRADIENTS and set(stages) - set(GRADIENTS):
        turn(how.direction)
    out: list[Shown] = []
    for i, stage in enumerate(stages):
        if stage in ("source", "ast"):
            out.append(Shown(stage, "\n".join(_lines(of)) if stage == "source" else tree_text(of)))
        elif derived is None and (stage == "ir" or not set(stages[i:]) - set(GRADIENTS)):
            signature, kernel = symbolic = symbolic or settled(module, declared, how.chosen)
            text = kernel_text(kernel) if stage == "ir" else _gradients(module, signature, kernel, stage)
            out.append(Shown(stage, text))
        elif stage in GRADIENTS:
            turn(stage)
            out.append(Shown(stage, of.name_span.source.text))
        else:
            made = made or target(module, declared, how.chosen)
            out += _compiled(made, stage, backends_of(stage, stages, how.backend), how)
    return [replace(shown, text=shown.text.strip("\n").rstrip("\0")) for shown in out]


def _compiled(made: Target, stage: str, backends: tuple[str, ...], how: Compiled) -> list[Shown]:
    """A stage of a kernel whose choices are made, for each of `backends` where each has its own."""
    from kgen.cli.cost import kernel_data
    from kgen.cli.cost import kernel_text as cost_text
    from kgen.cli.ir_text import kernel_text

    if stage == "ir":
        return [Shown(stage, kernel_text(made.kernel))]
    if stage in BACKENDS:
        # A sum over programs is several launches; of Triton each is a module of its own, which may stand in one file.
        sources = dict.fromkeys(p.source.strip("\n") for p in made.launches(stage, [how.arch]))
        return [Shown(stage, "\n\n".join(sources))]
    if stage == "cost":
        from kgen.runtime.cost import kernel_cost

        cost = kernel_cost(made, how.machine(), backends)
        return [Shown(stage, cost_text(cost), data=kernel_data(cost))]
    text = _schedule if stage == "schedule" else _binary
    return [Shown(stage, text(made, stage, backend, how), backend) for backend in backends]


def _schedule(made: Target, stage: str, backend: str, how: Compiled) -> str:
    from kgen.cli.ir_text import scheduled_text
    from kgen.codegen.knobs import written
    from kgen.runtime.ahead import capability
    from kgen.runtime.tuned import measured, remarks

    where, tuned = made.layout, list[str]()
    if how.gpu:
        machine = how.machine()
        knobs = measured(where, backend, machine.device)
        scheduled = made.scheduled(backend, machine.multiprocessors, knobs, capability(machine.arch))
    else:
        scheduled = made.scheduled(backend, capability=capability(how.arch))
        if written(where.kernel, where.variant, backend) is None:  # which comes before what was measured
            tuned = [f"tuned on {line}" for line in remarks(where, backend)]
    first = scheduled_text(scheduled, backend, tuned)
    return "\n\n".join([first, *(scheduled_text(s, backend) for s in scheduled.then)])


def _binary(made: Target, stage: str, backend: str, how: Compiled) -> str:
    from kgen.runtime.ahead import binary, capability

    program = made.program(backend, capability=capability(how.arch))
    found = [binary(made, p, how.arch) for p in program.launches]
    return "\n\n".join((b.ptx if stage == "ptx" else b.sass).strip("\n") for b in found)


def _gradients(module: ast.Module, signature: Signature, kernel: ir.Kernel, stage: str) -> str:
    """The forward kernel that also saves what the backward one needs, or that one: for every gradient there is, with a
    comment for each input of a floating-point dtype that has none. Raises DslError where none has one."""
    from kgen.codegen.derive import derive, differentiable
    from kgen.codegen.derive.paste import pasted
    from kgen.codegen.derive.written import by_hand, underivable, written

    without = underivable(module, kernel)
    wanted = differentiable(kernel) - without.keys()
    if without and not wanted:
        raise DslError({d.render(): d for why in without.values() for d in why.diagnostics}.values())
    head = [f"# no gradient of '{name}': {why.diagnostics[0].brief()}" for name, why in without.items()]
    found = by_hand(module, kernel)
    if found is not None and not isinstance(found.own, str):
        if stage == "training":
            text = written(kernel, found.backward, found.own, wanted).forward_text
        else:
            own = found.backward.kernel
            text = "\n".join([f"# written by hand, at {own.span}", *_lines(own)])
        return "\n".join([*head, text])
    derived = derive(kernel, wanted, named=True)
    if stage == "training":
        return "\n".join([*head, derived.forward_text])
    if found is not None:
        head.insert(0, f"# derived, as the one at {found.backward.kernel.span} is for other calls: here {found.own}")
    return "\n".join([*head, pasted(derived, kernel, signature)])


def _lines(kernel: ast.Kernel) -> list[str]:
    """The lines of the file that hold `kernel`."""
    last = max((s.span.end_line for s in kernel.body), default=kernel.span.end_line)
    lines = kernel.name_span.source.lines[kernel.span.line - 1 : max(last, kernel.span.end_line)]
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return list(lines)
