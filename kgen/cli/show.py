"""`kgen show`: what becomes of a kernel, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kgen.cli.app import UsageError, out, print_json
from kgen.cli.files import directed, existing, kernel_of, named, read
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
from kgen.cli.stages import BACKENDS, GRADIENTS, STAGES, Compiled, Shown, kernel_stages, op_stages

if TYPE_CHECKING:
    from kgen.dsl import ast
    from kgen.dsl.host.ast import Op

_OF_OPS = ("source", "ast", "plan", "cost")
_LEXERS = {"cuda": "cuda", "ptx": "ptx", "sass": "text", "cost": "text"}  # the others read as Python
# Two columns of generated code are readable from this width on.
_WIDE = 160


def show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]|NAME",
            help="A kernel or op of a file, or one that comes with kgen; NAME.backward, NAME.training: its gradients.",
            show_default=False,
        ),
    ],
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            "-s",
            help=f"One or several of {', '.join(STAGES)}; else --backend or cuda, of an op plan.",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            help="cuda or triton: whose schedule, cost, ptx and sass. Else those of the stages cuda and triton that "
            "are asked for; else both, and CUDA's ptx and sass.",
            show_default=False,
        ),
    ] = None,
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
        bool,
        typer.Option(
            "--json",
            help="Print a JSON object: the text of each stage, by backend where there are several, "
            "of cost its figures.",
        ),
    ] = False,
) -> None:
    """Show a kernel, or an op, at a stage of its compilation; several stages stand side by side where the terminal is
    wide enough.

    The stage backward is the hand-written one where the file has it for these choices. A derived one is printed as it
    may be pasted into the file: there it is the hand-written one, to be edited. Comments name the inputs that have no
    gradient, and why. Sizes stay symbols there.

    Stages behind training or backward are of that kernel, as a call runs it that records all gradients; so are all of
    NAME.training and NAME.backward.

    The stage cost says what the kernel must move and compute, what its programs ask for and occupy, and its floor
    on a GPU: how long a copy of the same bytes takes, or the arithmetic; of an op, that of each step and the sum.

    Examples:
        kgen show swiglu.kdsl:geglu --stage cuda,triton
        kgen show rms_norm.kdsl --stage schedule --dim N=8192 --dtype f32 --without w
        kgen show rms_norm --stage backward --dtype bf16
        kgen show rms_norm.kdsl --stage backward,cuda,triton --dtype bf16
        kgen show rms_norm.backward --stage triton,schedule --dim M=4096,N=8192
        kgen show rms_norm.kdsl --stage schedule,cost --gpu a100 --dim N=8192
        kgen show rms_norm.kdsl --stage sass --backend triton --arch sm_90
        kgen show fused_linear_cross_entropy
        kgen show fused_linear_cross_entropy --stage plan,cost --gradients x
    """
    from kgen.cli.cost import machine_of

    text, direction = directed(file)
    path, name = named(text)
    wanted = None if stage is None else _stages(stage)
    if backend not in (None, *BACKENDS):
        raise UsageError(f"--backend: '{backend}' is neither cuda nor triton")
    module = read(existing(path)).module
    stages = wanted or [_first_stage(module, name) or backend or BACKENDS[0]]
    other = [s for s in stages if s in GRADIENTS and direction in GRADIENTS and s != direction]
    if other:
        raise UsageError(f"--stage {other[0]}: {file} is the {direction} kernel alone; name {text}")
    if gpu is not None and not {"cost", "schedule"} & set(stages):
        raise UsageError("--gpu is for --stage cost and schedule")
    (target_arch, *more) = architectures(arch or "sm_90")
    if more:
        raise UsageError("--arch: show takes one architecture")
    asked = wanted_gradients(gradients)
    if asked is not None and not {"plan", "cost"} & set(stages):
        raise UsageError("--gradients is for the plan and the cost of an op")
    if name is None and direction is None and set(stages) <= {"source", "ast"}:
        texts = [Shown(s, _module_text(module, s)) for s in stages]
    else:
        chosen = choices(dim, dtype, const, present, absent)
        op = _op_of(module, name, stages)
        if op is not None and direction is not None:
            raise UsageError(f"{file}: {op.name} is an op, whose plan has its gradients: kgen show {text} --stage plan")
        declared = op.header if op is not None else kernel_of(module, name)
        if op is None and asked is not None:
            raise UsageError(f"--gradients is for ops, and {declared.name} is a kernel")
        refuse_unknown(chosen, [declared])
        how = Compiled(
            chosen, backend, direction or "forward", target_arch, gpu is not None,
            lambda: machine_of(gpu, target_arch, arch is not None), asked,
        )  # fmt: skip
        texts = op_stages(module, op, stages, how) if op is not None else kernel_stages(module, declared, stages, how)
    if as_json:
        print_json(_data(texts))
    else:
        _print(texts)


def _data(texts: Sequence[Shown]) -> dict[str, object]:
    """What stands in the JSON object: of a stage that several backends have, an object by backend."""
    out: dict[str, object] = {}
    for shown in texts:
        own = shown.text if shown.data is None else shown.data
        several = [s for s in texts if s.stage == shown.stage]
        out[shown.stage] = own if len(several) == 1 else {str(s.backend): s.text for s in several}
    return out


def _stages(text: str) -> list[str]:
    stages = list(dict.fromkeys(s.strip() for s in text.split(",") if s.strip()))
    for s in stages:
        if s not in STAGES:
            raise UsageError(f"--stage: there is no stage '{s}'; they are {', '.join(STAGES)}")
    if not stages:
        raise UsageError(f"--stage: name one of {', '.join(STAGES)}")
    return stages


def _first_stage(module: ast.Module, name: str | None) -> str | None:
    """The stage that is shown of an op where none is asked for; None where a kernel is named."""
    ops = [o.name for o in module.ops]
    return "plan" if name in ops or (name is None and len(ops) == 1 and not module.kernels) else None


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


def _print(texts: Sequence[Shown]) -> None:
    console = out()
    if not console.is_terminal:
        for i, shown in enumerate(texts):
            if len(texts) > 1:
                typer.echo(f"{chr(10) if i else ''}==== {shown.title} ====")
            typer.echo(shown.text)
        return
    from rich.panel import Panel
    from rich.syntax import Syntax
    from rich.table import Table

    panels = [
        Panel(
            Syntax(
                shown.text, _LEXERS.get(shown.stage, "python"), theme="ansi_dark", background_color="default",
                word_wrap=True,
            ),
            title=shown.title,
        )
        for shown in texts
    ]  # fmt: skip
    if len(panels) > 1 and console.width >= _WIDE:
        grid = Table.grid(expand=True)
        for _ in panels:
            grid.add_column(ratio=1)
        grid.add_row(*panels)
        console.print(grid)
    else:
        for panel in panels:
            console.print(panel)
