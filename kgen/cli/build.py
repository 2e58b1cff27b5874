"""`kgen build`: sources and binaries to ship, which need no kgen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kgen.cli.app import UsageError, err, out, print_json
from kgen.cli.files import by_direction, chosen, read, selected
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
from kgen.dsl import ast
from kgen.dsl.garbage import collected_later

if TYPE_CHECKING:
    from kgen.dsl.host.ast import Op
    from kgen.dsl.modules import LoadedModule
    from kgen.runtime.build import Job


def build(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE[:NAME]|NAME|FOLDER...",
            help="What to build; of NAME.training and NAME.backward those kernels alone.",
            show_default=False,
        ),
    ],
    arch: Annotated[str, typer.Option("--arch", help="Architectures of the binaries, separated by commas.")] = "sm_90",
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="Where to write; several files get a folder each.")
    ] = Path("build"),
    backend: Annotated[str, typer.Option("--backend", help="cuda, triton or both.")] = "both",
    dim: DimOption = None,
    dtype: DtypeOption = None,
    const: ConstOption = None,
    present: WithOption = None,
    absent: WithoutOption = None,
    allow_spills: Annotated[
        bool, typer.Option("--allow-spills", help="Build kernels whose registers spill to memory.")
    ] = False,
    backward: Annotated[
        bool,
        typer.Option("--backward", help="Each kernel's training form and backward too, derived or written by hand."),
    ] = False,
    gradients: GradientsOption = "all",
    accumulate: Annotated[
        str, typer.Option("--accumulate", help="Of an op: how sums over chunks are held; auto, param or f32.")
    ] = "auto",
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=0, help="Compilations at a time; 0: as many as CPU cores.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifests on standard output.")] = False,
) -> None:
    """Write each kernel as <kernel>.cu and <kernel>_triton.py with cubin, PTX and a manifest. Needs no GPU.

    The sources stand alone: the .cu compiles with nvcc or NVRTC, the .py runs with torch and triton. manifest.json says
    what each was compiled for and how to launch it. Sizes come from the kernel's example statement or from --dim.

    With --backward come <kernel>_forward, which also stores what the backward reads again, and <kernel>_backward, the
    gradients of all inputs that have one: as .kdsl text too, and compiled as the kernel is.

    An op becomes a folder with <op>.py, its forward and backward as plain functions on torch tensors, beside the
    kernels that they launch, through Triton.

    Examples:
        kgen build rms_norm.kdsl --arch sm_90 --out build/
        kgen build ops/ --arch sm_80,sm_90 --backend cuda --dtype f16
        kgen build rms_norm.kdsl --backward
        kgen build swiglu.kdsl:geglu --dim M=8192 --dim N=14336
        kgen build fused_linear_cross_entropy.kdsl:fused_linear_cross_entropy --without bias --gradients x
    """
    from kgen.runtime.build import BACKENDS, Job
    from kgen.runtime.host.options import ACCUMULATE

    archs = architectures(arch)
    if backend not in (*BACKENDS, "both"):
        raise UsageError(f"--backend: '{backend}' is none of cuda, triton, both")
    backends = BACKENDS if backend == "both" else (backend,)
    if accumulate not in ACCUMULATE:
        raise UsageError(f"--accumulate: '{accumulate}' is none of {', '.join(ACCUMULATE)}")
    items = _items(files, backends)
    how = choices(dim, dtype, const, present, absent)
    refuse_unknown(how, [i.item if isinstance(i.item, ast.Kernel) else i.item.header for i in items])
    asked = wanted_gradients(gradients)
    if gradients != "all" and all(isinstance(i.item, ast.Kernel) for i in items):
        raise UsageError("--gradients is for ops, and none is built")
    places = _places([i.path for i in items], folder)
    tasks: list[Job] = []
    gradient: list[Job] = []  # of kernels whose direction is named
    for i in items:
        place = places[i.path] if isinstance(i.item, ast.Kernel) else places[i.path] / i.item.name
        job = Job(
            i.loaded.module, i.item, how, place, backends, tuple(archs), i.loaded.content_hash, allow_spills, asked,
            accumulate,
        )  # fmt: skip
        if i.direction in (None, "forward"):
            tasks.append(job)
        else:
            training, back = _gradients(job)
            gradient.append(training if i.direction == "training" else back)
    if backward and (tasks or not gradient):
        tasks += _backwards(tasks, {i.item.name for i in items if i.named})
    tasks = list({(t.place, t.name): t for t in (*tasks, *gradient)}.values())
    manifests = _with_progress(tasks, jobs, quiet=as_json)
    if as_json:
        print_json({str(place): manifest for place, manifest in manifests.items()})
        return
    for place, manifest in manifests.items():
        if "op" in manifest:
            own = manifest["op"]
            out().print(f"{place / own['file']}: {', '.join(own['functions'])}", markup=False)
        for name, entry in manifest["kernels"].items():
            _summary(place, name, entry)


@dataclass(frozen=True)
class _Item:
    """A kernel or an op of the file at `path`: whether it was named, and the direction behind its name."""

    path: Path
    loaded: LoadedModule
    item: ast.Kernel | Op
    named: bool
    direction: str | None


@collected_later()
def _items(files: list[str], backends: tuple[str, ...]) -> list[_Item]:
    """What `files` name. Ops are left out where `backends` cannot build them; UsageError for one that is named."""
    out: list[_Item] = []
    left_out: list[str] = []
    for direction, texts in by_direction(files).items():
        for path, names in chosen(texts).items():
            loaded, named = read(path), names is not None
            ops = {o.name: o for o in loaded.module.ops if names is None or o.name in names}
            if ops and direction is not None and (named or not loaded.module.kernels):
                op = min(ops)
                raise UsageError(f"{op}.{direction}: {op} is an op, which is built with its gradients: kgen build {op}")
            if ops and "triton" not in backends:
                if named:
                    raise UsageError(
                        f"--backend {backends[0]}: {min(ops)} is an op, whose file launches Triton kernels"
                    )
                left_out += ops
                ops = {}
            rest = None if names is None else names - ops.keys()
            out += [_Item(path, loaded, k, named, direction) for k in selected(loaded.module, rest)]
            out += [_Item(path, loaded, o, named, direction) for o in ops.values() if direction is None]
    if left_out:
        err().print(f"left out: {', '.join(left_out)}; the file of an op launches Triton kernels", markup=False)
    if not out:
        raise UsageError(f"there is no kernel in {', '.join(files)}")
    return out


def _gradients(task: Job) -> list[Job]:
    """The builds of the training form and of the backward of the kernel that `task` builds. Raises DslError
    where it has none."""
    from kgen.runtime.ahead import target
    from kgen.runtime.derived import gradient_targets

    assert isinstance(task.item, ast.Kernel)  # an op has none
    return gradient_targets(target(task.module, task.item, task.choices)).jobs(task)


def _backwards(tasks: list[Job], named: set[str]) -> list[Job]:
    """The builds of training forms and backwards beside `tasks`. A kernel without a gradient is left out and told of;
    one of those `named`, or the only one, is an error: raises DslError."""
    from kgen.dsl.diagnostics import DslError

    kernels = [t for t in tasks if isinstance(t.item, ast.Kernel)]
    if not kernels:
        raise UsageError("--backward is for kernels, and none is built; of an op, --gradients says which are")
    out: list[Job] = []
    for task in kernels:
        try:
            out += _gradients(task)
        except DslError as error:
            if task.name in named or len(kernels) == 1:
                raise
            why = error.diagnostics[0].brief()
            err().print(f"no backward of {task.name}: {why}", markup=False)
    return out


def _places(paths: list[Path], folder: Path) -> dict[Path, Path]:
    """The folder of each file: `folder` itself for one file, else one named after the file."""
    unique = list(dict.fromkeys(paths))
    if len(unique) == 1:
        return {unique[0]: folder}
    places: dict[Path, Path] = {}
    for path in unique:
        place = folder / path.stem
        if place in places.values():
            other = next(p for p, taken in places.items() if taken == place)
            raise UsageError(
                f"{other} and {path} would both be built into {place}; build them one at a time, with --out"
            )
        places[path] = place
    return places


def _with_progress(tasks: list[Job], jobs: int, quiet: bool) -> dict[Path, dict[str, Any]]:
    from kgen.runtime.build import run

    console = err()
    if quiet or not console.is_terminal:
        return run(tasks, jobs)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("compiling", total=None)

        def done(what: str, total: int) -> None:
            progress.update(bar, advance=1, total=total, description=f"compiled {what}")

        return run(tasks, jobs, done)


def _summary(place: Path, name: str, entry: dict[str, Any]) -> None:
    """One line for each binary of a kernel."""
    for backend, launch in ((b, la) for b, made in entry["backends"].items() for la in made["launches"]):
        several = len(entry["backends"][backend]["launches"]) > 1
        kernel = f"{name} ({launch['entry']})" if several else name
        for arch, figures in launch["binaries"].items():
            spill = f", {figures['local_bytes']} bytes of local memory" if figures["local_bytes"] else ""
            shared = f", {figures['shared_bytes']} bytes shared" if figures["shared_bytes"] else ""
            used = f"{figures['registers']} registers{shared}{spill}"
            out().print(f"{place / figures['cubin']}: {kernel}, {backend}, {arch}, {used}", markup=False)
