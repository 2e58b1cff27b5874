"""`kgen show`: what becomes of a kernel, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.app import UsageError, out, print_json
from kgen.cli.files import existing, kernel_of, named, read
from kgen.cli.options import (
    ConstOption,
    DimOption,
    DtypeOption,
    GradientsOption,
    WithOption,
    WithoutOption,
    architectures,
    choices,
    refuse_unknown,
    wanted_gradients,
)
from kgen.dsl.diagnostics import DslError

if TYPE_CHECKING:
    from kgen.codegen.machines import Machine
    from kgen.dsl import ast, ir
    from kgen.dsl.host.ast import Op
    from kgen.dsl.signature import Signature
    from kgen.runtime.ahead import Choices, Target
    from kgen.runtime.derived import GradientTargets

STAGES = ("source", "ast", "ir", "training", "backward", "schedule", "cuda", "triton", "ptx", "sass", "cost", "plan")
_OF_OPS = ("source", "ast", "plan", "cost")
_GRADIENTS = ("training", "backward")
_LEXERS = {"cuda": "cuda", "ptx": "ptx", "sass": "text", "cost": "text"}  # the others read as Python
# Two columns of generated code are readable from this width on.
_WIDE = 160


@dataclass(frozen=True)
class _Shown:
    """What is printed of a stage; `data` is what --json has in its place."""

    text: str
    data: object = None


@dataclass(frozen=True)
class _Compiled:
    """For what a kernel is compiled: choices of the user, whose schedule, ptx and sass, and the machine of its cost."""

    chosen: Choices
    backend: str
    arch: str
    gpu: bool  # whether the machine is named
    machine: Callable[[], Machine]
    gradients: tuple[str, ...] | None  # of an op: those of which parameters, None for all that have one


def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]|NAME",
            help="A kernel or op of a file, or one that comes with kgen.",
            show_default=False,
        ),
    ],
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            "-s",
            help=f"One or several of {', '.join(STAGES)}; else cuda, of an op plan.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="cuda or triton: whose schedule, ptx and sass.")] = "cuda",
    arch: Annotated[
        str | None, typer.Option("--arch", help="Architecture of ptx, sass and cost; sm_90 where none is given.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="h200", help="The machine of cost and schedule; else one of --arch.")
    ] = None,
    dim: DimOption = None,
    dtype: DtypeOption = None,
    const: ConstOption = None,
    present: WithOption = None,
    absent: WithoutOption = None,
    gradients: GradientsOption = "all",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object: the text of each stage, of cost its figures.")
    ] = False,
) -> None:
    """Show a kernel, or an op, at a stage of its compilation; several stages stand side by side where the terminal is
    wide enough.

    The stage backward is the hand-written one where the file has it for these choices. A derived one is printed as it
    may be pasted into the file: there it is the hand-written one, to be edited. Comments name the inputs that have no
    gradient, and why. Sizes stay symbols there.

    Stages behind training or backward are of that kernel, as a call runs it that records all gradients.

    The stage cost says what the kernel must move and compute, what its two programs ask for and occupy, and its floor
    on a GPU: how long a copy of the same bytes takes, or the arithmetic; of an op, that of each step and the sum.

    Examples:
        kgen show swiglu.kdsl:geglu --stage cuda,triton
        kgen show rms_norm.kdsl --stage schedule --dim N=8192 --dtype f32 --without w
        kgen show rms_norm --stage backward --dtype bf16
        kgen show rms_norm.kdsl --stage backward,cuda,triton --dtype bf16
        kgen show rms_norm.kdsl --stage schedule,cost --gpu a100 --dim N=8192
        kgen show rms_norm.kdsl --stage sass --backend triton --arch sm_90
        kgen show fused_linear_cross_entropy
        kgen show fused_linear_cross_entropy --stage plan,cost --gradients x
    """
    from kgen.cli.cost import machine_of

    path, name = named(file)
    wanted = None if stage is None else _stages(stage)
    if backend not in ("cuda", "triton"):
        raise UsageError(f"--backend: '{backend}' is neither cuda nor triton")
    module = read(existing(path)).module
    stages = wanted or [_first_stage(module, name)]
    if gpu is not None and not {"cost", "schedule"} & set(stages):
        raise UsageError("--gpu is for --stage cost and schedule")
    (target_arch, *more) = architectures(arch or "sm_90")
    if more:
        raise UsageError("--arch: show takes one architecture")
    asked = wanted_gradients(gradients)
    if asked is not None and not {"plan", "cost"} & set(stages):
        raise UsageError("--gradients is for the plan and the cost of an op")
    if name is None and set(stages) <= {"source", "ast"}:
        texts = {s: _Shown(_module_text(module, s)) for s in stages}
    else:
        chosen = choices(dim, dtype, const, present, absent)
        op = _op_of(module, name, stages)
        declared = op.header if op is not None else kernel_of(module, name)
        if op is None and asked is not None:
            raise UsageError(f"--gradients is for ops, and {declared.name} is a kernel")
        refuse_unknown(chosen, [declared])
        how = _Compiled(
            chosen, backend, target_arch, gpu is not None, lambda: machine_of(gpu, target_arch, arch is not None), asked
        )
        texts = _op_texts(module, op, stages, how) if op is not None else _texts(module, declared, stages, how)
    if as_json:
        print_json({s: shown.text if shown.data is None else shown.data for s, shown in texts.items()})
    else:
        _print({s: shown.text for s, shown in texts.items()})


def _stages(text: str) -> list[str]:
    stages = list(dict.fromkeys(s.strip() for s in text.split(",") if s.strip()))
    for s in stages:
        if s not in STAGES:
            raise UsageError(f"--stage: there is no stage '{s}'; they are {', '.join(STAGES)}")
    if not stages:
        raise UsageError(f"--stage: name one of {', '.join(STAGES)}")
    return stages


def _first_stage(module: ast.Module, name: str | None) -> str:
    """The stage that is shown where none is asked for."""
    ops = [o.name for o in module.ops]
    return "plan" if name in ops or (name is None and len(ops) == 1 and not module.kernels) else "cuda"


def _module_text(module: ast.Module, stage: str) -> str:
    """A stage that a file has as a whole."""
    if stage == "ast":
        from kgen.cli.ir_text import tree_text

        return tree_text(module)
    return Path(module.path).read_text("utf-8").rstrip("\n")


def _op_of(module: ast.Module, name: str | None, stages: list[str]) -> Op | None:
    """The op that is meant, if one is: by its name, or as the only one of the file where its plan is asked for."""
    ops = {o.name: o for o in module.ops}
    if name is None and len(ops) == 1 and ("plan" in stages or ("cost" in stages and not module.kernels)):
        name = next(iter(ops))
    if name not in ops:
        if "plan" in stages:
            has = f"its ops: {', '.join(ops)}" if ops else f"{module.path} has none"
            raise UsageError(f"--stage plan: only an op has a plan; {has}")
        return None
    other = [s for s in stages if s not in _OF_OPS]
    if other:
        raise UsageError(f"--stage {other[0]}: {name} is an op, whose stages are {', '.join(_OF_OPS)}")
    return ops[name]


def _op_texts(module: ast.Module, op: Op, stages: list[str], how: _Compiled) -> dict[str, _Shown]:
    from kgen.cli.ir_text import tree_text
    from kgen.runtime.host.ahead import text

    made = {
        "source": lambda: _Shown("\n".join(op.span.source.lines[op.span.line - 1 : op.span.end_line])),
        "ast": lambda: _Shown(tree_text(op)),
        "plan": lambda: _Shown(text(module, op, how.chosen, how.gradients)),
        "cost": lambda: _op_cost(module, op, how),
    }
    return {stage: made[stage]() for stage in stages}


def _op_cost(module: ast.Module, op: Op, how: _Compiled) -> _Shown:
    from kgen.cli.cost import op_data, op_text
    from kgen.runtime.host.cost import op_cost

    found = op_cost(module, op, how.chosen, how.machine(), how.gradients)
    return _Shown(op_text(found), op_data(found))


def _texts(module: ast.Module, declared: ast.Kernel, stages: list[str], how: _Compiled) -> dict[str, _Shown]:
    from kgen.cli.ir_text import kernel_text, tree_text
    from kgen.runtime.ahead import settled, target

    made: Target | None = None
    symbolic: tuple[Signature, ir.Kernel] | None = None  # for what needs no sizes
    derived: GradientTargets | None = None
    of = declared
    texts: dict[str, _Shown] = {}
    for i, stage in enumerate(stages):
        if stage in ("source", "ast"):
            own = "\n".join(_lines(of)) if stage == "source" else tree_text(of)
            texts[stage] = _Shown(own)
            continue
        if derived is None and (stage == "ir" or not set(stages[i:]) - set(_GRADIENTS)):
            signature, kernel = symbolic = symbolic or settled(module, declared, how.chosen)
            shown = kernel_text(kernel) if stage == "ir" else _gradients(module, signature, kernel, stage)
            texts[stage] = _Shown(shown)
            continue
        made = made or target(module, declared, how.chosen)
        if stage not in _GRADIENTS:
            texts[stage] = _stage(made, stage, how)
        else:
            from kgen.runtime.derived import gradient_targets

            derived = derived or gradient_targets(made)
            made = derived.training if stage == "training" else derived.backward
            (of,) = made.module.kernels
            texts[stage] = _Shown(of.name_span.source.text)
    return {s: replace(shown, text=shown.text.strip("\n").rstrip("\0")) for s, shown in texts.items()}


def _stage(made: Target, stage: str, how: _Compiled) -> _Shown:
    """A stage of a kernel whose choices are made."""
    from kgen.cli.cost import kernel_data
    from kgen.cli.cost import kernel_text as cost_text
    from kgen.cli.ir_text import kernel_text, scheduled_text
    from kgen.runtime.ahead import binary, capability

    if stage == "ir":
        return _Shown(kernel_text(made.kernel))
    if stage == "schedule":
        from kgen.codegen.knobs import written
        from kgen.runtime.tuned import measured, remarks

        where, tuned = made.layout, ""
        if how.gpu:
            machine = how.machine()
            knobs = measured(where, how.backend, machine.device)
            scheduled = made.scheduled(how.backend, machine.multiprocessors, knobs, capability(machine.arch))
        else:
            scheduled = made.scheduled(how.backend, capability=capability(how.arch))
            if written(where.kernel, where.variant, how.backend) is None:  # which comes before what was measured
                tuned = "".join(f"# tuned on {line}\n" for line in remarks(where, how.backend))
        return _Shown(tuned + "\n\n".join(scheduled_text(s).strip("\n") for s in (scheduled, *scheduled.then)))
    if stage in ("cuda", "triton"):
        # A sum over programs is several launches; of Triton each is a module of its own, which may stand in one file.
        sources = dict.fromkeys(p.source.strip("\n") for p in made.launches(stage, [how.arch]))
        return _Shown("\n\n".join(sources))
    if stage == "cost":
        from kgen.runtime.cost import kernel_cost

        cost = kernel_cost(made, how.machine())
        return _Shown(cost_text(cost), kernel_data(cost))
    program = made.program(how.backend, capability=capability(how.arch))
    found = [binary(made, p, how.arch) for p in program.launches]
    return _Shown("\n\n".join((b.ptx if stage == "ptx" else b.sass).strip("\n") for b in found))


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


def _print(texts: dict[str, str]) -> None:
    console = out()
    if not console.is_terminal:
        for i, (stage, text) in enumerate(texts.items()):
            if len(texts) > 1:
                typer.echo(f"{chr(10) if i else ''}==== {stage} ====")
            typer.echo(text)
        return
    from rich.panel import Panel
    from rich.syntax import Syntax
    from rich.table import Table

    panels = [
        Panel(
            Syntax(text, _LEXERS.get(stage, "python"), theme="ansi_dark", background_color="default", word_wrap=True),
            title=stage,
        )
        for stage, text in texts.items()
    ]
    if len(panels) > 1 and console.width >= _WIDE:
        grid = Table.grid(expand=True)
        for _ in panels:
            grid.add_column(ratio=1)
        grid.add_row(*panels)
        console.print(grid)
    else:
        for panel in panels:
            console.print(panel)
