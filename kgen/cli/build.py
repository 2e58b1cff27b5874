"""`kgen build`: sources and binaries to ship, which need no kgen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kgen.cli.app import UsageError, err, out, print_json
from kgen.cli.files import chosen, read, selected
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

if TYPE_CHECKING:
    from kgen.dsl.host.ast import Op
    from kgen.dsl.modules import LoadedModule
    from kgen.runtime.build import Job


def build(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE[:NAME]|NAME|FOLDER...", help="What to build.", show_default=False)
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
    wanted = chosen(files)
    items: list[tuple[Path, LoadedModule, ast.Kernel | Op]] = []
    left_out: list[str] = []
    for path, names in wanted.items():
        loaded = read(path)
        ops = {o.name: o for o in loaded.module.ops if names is None or o.name in names}
        if ops and "triton" not in backends:
            if names is not None:
                raise UsageError(f"--backend {backend}: {min(ops)} is an op, whose file launches Triton kernels")
            left_out += ops
            ops = {}
        rest = None if names is None else names - ops.keys()
        items += [(path, loaded, k) for k in selected(loaded.module, rest)]
        items += [(path, loaded, o) for o in ops.values()]
    if left_out:
        err().print(f"left out: {', '.join(left_out)}; the file of an op launches Triton kernels", markup=False)
    if not items:
        raise UsageError(f"there is no kernel in {', '.join(map(str, wanted))}")
    how = choices(dim, dtype, const, present, absent)
    refuse_unknown(how, [k if isinstance(k, ast.Kernel) else k.header for _, _, k in items])
    asked = wanted_gradients(gradients)
    if gradients != "all" and all(isinstance(k, ast.Kernel) for _, _, k in items):
        raise UsageError("--gradients is for ops, and none is built")
    places = _places([p for p, _, _ in items], folder)
    tasks = [
        Job(
            m.module,
            k,
            how,
            places[path] if isinstance(k, ast.Kernel) else places[path] / k.name,
            backends,
            tuple(archs),
            m.content_hash,
            allow_spills,
            asked,
            accumulate,
        )
        for path, m, k in items
    ]
    if backward:
        tasks += _backwards(tasks, {n for names in wanted.values() for n in names or ()})
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


def _backwards(tasks: list[Job], named: set[str]) -> list[Job]:
    """The builds of training forms and backwards beside `tasks`. A kernel without a gradient is left out and told of;
    one of those `named`, or the only one, is an error: raises DslError."""
    from kgen.dsl.diagnostics import DslError
    from kgen.runtime.ahead import target
    from kgen.runtime.derived import gradient_targets

    kernels = [t for t in tasks if isinstance(t.item, ast.Kernel)]
    if not kernels:
        raise UsageError("--backward is for kernels, and none is built; of an op, --gradients says which are")
    out: list[Job] = []
    for task in kernels:
        assert isinstance(task.item, ast.Kernel)  # as above
        try:
            out += gradient_targets(target(task.module, task.item, task.choices)).jobs(task)
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
