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
    WithOption,
    WithoutOption,
    architectures,
    choices,
    refuse_unknown,
)
from kgen.dsl import ast

if TYPE_CHECKING:
    from kgen.dsl.modules import LoadedModule
    from kgen.runtime.build import Job


def build(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE[:KERNEL]|FOLDER...", help="What to build.", show_default=False)
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
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=0, help="Compilations at a time; 0: as many as CPU cores.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifests on standard output.")] = False,
) -> None:
    """Write each kernel as <kernel>.cu and <kernel>_triton.py with cubin, PTX and a manifest. Needs no GPU.

    The sources stand alone: the .cu compiles with nvcc or NVRTC, the .py runs with torch and triton. manifest.json says
    what each was compiled for and how to launch it. Sizes come from the kernel's example statement or from --dim.

    Examples:
        kgen build rms_norm.kdsl --arch sm_90 --out build/
        kgen build ops/ --arch sm_80,sm_90 --backend cuda --dtype f16
        kgen build swiglu.kdsl:geglu --dim M=8192 --dim N=14336
    """
    from kgen.runtime.build import BACKENDS, Job

    archs = architectures(arch)
    if backend not in (*BACKENDS, "both"):
        raise UsageError(f"--backend: '{backend}' is none of cuda, triton, both")
    backends = BACKENDS if backend == "both" else (backend,)
    wanted = chosen(files)
    kernels: list[tuple[Path, LoadedModule, ast.Kernel]] = []
    for path, names in wanted.items():
        loaded = read(path)
        kernels += [(path, loaded, k) for k in selected(loaded.module, names)]
    if not kernels:
        raise UsageError(f"there is no kernel in {', '.join(map(str, wanted))}")
    how = choices(dim, dtype, const, present, absent)
    refuse_unknown(how, [k for _, _, k in kernels])
    places = _places([p for p, _, _ in kernels], folder)
    tasks = [
        Job(m.module, k, how, places[path], backends, tuple(archs), m.content_hash, allow_spills)
        for path, m, k in kernels
    ]
    manifests = _with_progress(tasks, jobs, quiet=as_json)
    if as_json:
        print_json({str(place): manifest for place, manifest in manifests.items()})
        return
    for place, manifest in manifests.items():
        for name, entry in manifest["kernels"].items():
            _summary(place, name, entry)


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
        bar = progress.add_task("compiling", total=sum(t.steps for t in tasks))
        return run(tasks, jobs, lambda what: progress.update(bar, advance=1, description=f"compiled {what}"))


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
