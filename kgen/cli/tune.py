"""`kgen tune`: measures which schedule of a kernel is the fastest on this GPU, and keeps it for every later call."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kgen.cli.app import INTERRUPTED, MISTAKES, UsageError, err, out, write_json
from kgen.cli.files import directed, existing, shipped, split_kernel
from kgen.cli.options import ConstOption, DimOption, DtypeOption, WithOption, WithoutOption, choices, refuse_unknown
from kgen.cli.tune_products import declared, op_of, tasks_of
from kgen.cli.tune_products import run as tune_products
from kgen.cli.tune_products import show as show_products
from kgen.dsl.errors import KgenError

if TYPE_CHECKING:
    from kgen.runtime.ahead import Choices
    from kgen.runtime.kernel import Kernel
    from kgen.runtime.loading import KernelModule
    from kgen.runtime.tune import Job, Machine, Options, Outcome
    from kgen.runtime.tuned_store import Result


def tune(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE[:KERNEL]|NAME...", help="What to tune; NAME is a kernel that comes with kgen."),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option("--sizes", metavar="M=16384,N=1024", help="One call; may be given again."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="cuda, triton or both.")] = "both",
    gradients: Annotated[
        str | None, typer.Option("--gradients", metavar="x,w", help="Of a backward kernel: whose gradients.")
    ] = None,
    dim: DimOption = None,
    dtype: DtypeOption = None,
    const: ConstOption = None,
    present: WithOption = None,
    absent: WithoutOption = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0, help="For everything together.")] = None,
    workspace_mb: Annotated[
        list[float] | None,
        typer.Option(
            "--workspace-mb", metavar="MIB", min=0, help="Of an op: the budget of its chunks; may be repeated."
        ),
    ] = None,
    accumulate: Annotated[
        str | None, typer.Option("--accumulate", help="Of an op: how sums over chunks are held: auto, param or f32.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure too what is known already.")] = False,
    most: Annotated[int, typer.Option("--candidates", min=2, help="Schedules to try of each kernel, at most.")] = 32,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="Compilations at a time; 0: one a CPU core.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="List what is known of this device and stop.")] = False,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="With --show: another device.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write what is known of this device to a file.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every measurement to a file; - prints it.")
    ] = None,
) -> None:
    """Try the schedules that a kernel allows at given sizes, and keep the fastest for every later call of such sizes.

    NAME.backward is the kernel of its gradients, NAME.training the form of a call that records them. Of an op, the
    algorithms of the library that makes its matrix products are tried; name its kernels to tune those. Sizes come from
    --sizes, else from the kernel's example statement, or, for kernels that come with kgen, a list of usual ones.
    Measures on a GPU and on arguments of its own. A schedule is kept only where it beats the default by more than
    measurements vary. What is known already is left as it is, so that an interrupted run goes on where it stopped.

    Examples:
        kgen tune rms_norm softmax --seconds 120
        kgen tune my.kdsl:scale --sizes M=8192,N=4096 --sizes M=8192,N=8192 --dtype f16
        kgen tune rms_norm.backward --sizes M=16384,N=4096 --backend cuda
        kgen tune fused_linear_cross_entropy --sizes B=8192,H=4096,V=128256 --workspace-mb 512
        kgen tune --show
    """
    from kgen.runtime.host.options import ACCUMULATE
    from kgen.runtime.tune import Job, Machine, Options, unique

    if show:
        _show(device)
        return
    if backend not in ("cuda", "triton", "both"):
        raise UsageError(f"--backend: '{backend}' is none of cuda, triton, both")
    backends = ("cuda", "triton") if backend == "both" else (backend,)
    if not targets:
        if export is None:
            raise UsageError("name a kernel to tune, as in: kgen tune rms_norm, or kgen tune my.kdsl:scale")
        _export(Machine.gpu().name if device is None else device, export)
        return
    how = choices(dim, dtype, const, present, absent)
    given = [_sizes(s) for s in sizes or ()]
    wanted = None if gradients is None else tuple(n.strip() for n in gradients.split(",") if n.strip())
    ops = {t: found for t in targets if (found := op_of(t)) is not None}
    if (workspace_mb or accumulate) and not ops:
        raise UsageError("--workspace-mb and --accumulate are for ops, which take rows in chunks, and no op is named")
    if accumulate not in (None, *ACCUMULATE):
        raise UsageError(f"--accumulate: '{accumulate}' is none of {', '.join(ACCUMULATE)}")
    if ops:
        if len(ops) < len(targets):
            raise UsageError("tune ops and kernels by two commands: their sizes have other names")
        for option in ("backend", "gradients", "most", "jobs"):
            source = context.get_parameter_source(option)
            if source is not None and source.name != "DEFAULT":
                flag = "candidates" if option == "most" else option
                raise UsageError(f"--{flag} is for kernels, and the products of an op are the library's")
        refuse_unknown(_everything(how, given), [declared(op).header for op, _ in ops.values()])
        work = [
            t for op, usual in ops.values() for t in tasks_of(op, usual, how, given, workspace_mb or (), accumulate)
        ]
        if not tune_products(work, Machine.gpu(), seconds, again, export, json_file):
            raise typer.Exit(MISTAKES)
        return
    named = [target_of(t) for t in targets]
    everything = _everything(how, given)
    refuse_unknown(everything, [k for t in named for k in t.kernel.module.kernels if k.name == t.kernel.name])
    cases = [c for target in named for c in cases_of(target, how, given, wanted)]
    machine = Machine.gpu()
    tasks = unique([Job(c, b) for c in cases for b in backends])
    options = Options(seconds, again, jobs, most)
    outcomes = run(tasks, machine, options, export, json_file)
    if any(o.state == "failed" or o.problems for o in outcomes):
        raise typer.Exit(MISTAKES)


def _everything(how: Choices, sizes: Sequence[dict[str, int]]) -> Choices:
    """All names that are chosen, those of every call in one."""
    return replace(how, dims={**how.dims, **{d: n for one in sizes for d, n in one.items()}})


def _sizes(text: str) -> dict[str, int]:
    try:
        return {d.strip(): int(n.replace("_", "")) for d, n in (pair.split("=") for pair in text.split(","))}
    except ValueError:
        raise UsageError(f"--sizes {text}: write it as --sizes M=8192,N=4096") from None


def run(
    tasks: Sequence[Job], machine: Machine, options: Options, export: Path | None = None, json_file: Path | None = None
) -> list[Outcome]:
    """Tune `tasks`, telling what comes out of each; what is done is kept and told where it is interrupted."""
    from kgen.runtime.tuned_store import user_path

    outcomes: list[Outcome] = []
    try:
        for outcome in _with_progress(tasks, machine, options):
            outcomes.append(outcome)
    except KeyboardInterrupt:
        err().print(INTERRUPTED)
        raise
    finally:
        if json_file is not None:
            write_json(json_file, _plain(machine, outcomes))
        if outcomes and export is not None:
            _export(machine.name, export)
    _summary(outcomes)
    if any(o.state == "tuned" for o in outcomes):
        err().print(f"kept in {user_path(machine.name)}; KGEN_TUNED=0 does without", markup=False)
    return outcomes


def _with_progress(tasks: Sequence[Job], machine: Machine, options: Options) -> Iterator[Outcome]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kgen.runtime.tune import tune as tuned

    console = err()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(tasks[0].name if tasks else "", total=len(tasks))
        for i, outcome in enumerate(tuned(tasks, machine, options)):
            after = tasks[i + 1].name if i + 1 < len(tasks) else ""
            bar.update(task, advance=1, description=after)
            for line in _lines(outcome):
                bar.console.print(line, markup=False) if console.is_terminal else out().print(line, markup=False)
            yield outcome


# ---- what to tune ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A kernel, the directions asked for (none: those of the list of usual sizes, else the kernel alone), and the usual
    sizes of one that comes with kgen."""

    kernel: Kernel
    direction: str | None
    usual: tuple[dict[str, Any], ...]


def target_of(text: str) -> Target:
    """What `FILE[:KERNEL]` or `NAME`, either with a direction behind it, names. Raises UsageError."""
    from kgen.runtime.loading import load

    name, direction = directed(text)
    path, kernel = split_kernel(name)
    if kernel is None and name.isidentifier() and not path.exists():
        return _shipped(name, direction)
    module = load(existing(path))
    names = _kernels(module)
    if kernel is None and len(names) != 1:
        raise UsageError(f"{path} has {len(names)} kernels; name one, as in {path}:{names[0] if names else 'KERNEL'}")
    chosen = kernel or names[0]
    if chosen not in names:
        raise UsageError(_no_kernel(str(path), chosen, names, chosen in module))
    return Target(module[chosen], direction, ())


def _shipped(name: str, direction: str | None) -> Target:
    import importlib.resources

    from kgen.runtime.loading import load_packaged

    folder = importlib.resources.files("kgen.ops")
    usual = json.loads((folder / "tuned_sizes.json").read_text("utf-8"))
    found = shipped()
    if name not in found:
        raise UsageError(_no_kernel("kgen", name, [*found], False))
    module = load_packaged(found[name].name)
    if name not in _kernels(module):
        raise UsageError(_no_kernel(found[name].name, name, _kernels(module), True))
    return Target(module[name], direction, tuple(u for u in usual if u.get("kernel") == name))


def _kernels(module: KernelModule) -> list[str]:
    from kgen.runtime.kernel import Kernel as Made

    return [n for n in module if isinstance(module[n], Made)]


def _no_kernel(place: str, name: str, names: Sequence[str], is_op: bool) -> str:
    if is_op:
        return f"'{name}' is an op, a program of kernels; name one of those: {', '.join(names)}"
    close = difflib.get_close_matches(name, names, 1)
    return f"{place} has no kernel '{name}'" + (f"; did you mean '{close[0]}'?" if close else "")


def cases_of(target: Target, how: Choices, sizes: Sequence[Any], wanted: tuple[str, ...] | None) -> Iterator[Any]:
    """The cases of `target`: at `sizes`, else at its usual ones. `wanted`: whose gradients a backward kernel gives."""
    from kgen.runtime.tune_cases import case

    usual = () if sizes or how.dims else target.usual
    if usual:
        for u in usual:
            directions = (target.direction,) if target.direction else tuple(u["directions"])
            without = (how.without | set(u.get("without", ()))) - how.given
            own = replace(how, dims=u["dims"], without=without)
            for d in directions:
                yield case(target.kernel, own, d, wanted or tuple(u.get("gradients", ())) or None)
        return
    # Of a kernel that comes with kgen, optional tensors that are not usual are absent here too.
    absent = frozenset(target.usual[0].get("without", ())) if target.usual else frozenset[str]()
    default = tuple(target.usual[0].get("gradients", ())) or None if target.usual else None
    for dims in sizes or ({},):
        own = replace(how, dims={**how.dims, **dims}, without=(how.without | absent) - how.given)
        yield case(target.kernel, own, target.direction or "forward", wanted or default)


# ---- telling ---------------------------------------------------------------------------------------------------------


def _lines(o: Outcome) -> Iterator[str]:
    from kgen.codegen.knobs import written

    dims = ", ".join(f"{d}={n}" for d, n in o.job.case.dims.items())
    head = f"{o.job.name}, {dims}"
    if o.result is not None:
        yield f"{head}: {_said(o.result)}{' (known)' if o.state == 'known' else ''}"
    elif o.state == "failed":
        yield f"{head}: FAILED: {o.problems[0]}"
    else:
        yield f"{head}: {o.state}"
    if o.state != "failed":
        yield from (f"  {p}" for p in o.problems)
    where = o.job.case.where
    own = written(where.kernel, where.variant, o.job.backend)
    if own is not None:
        yield f"  calls take the schedule that is set by {own.by}, not what is measured"


def _said(r: Result) -> str:
    if not r.knobs:
        return f"{r.us:.1f} us, the default stays ({r.tried} tried)"
    faster = f"{r.default_us / r.us:.2f} times as fast as the default"
    return f"{r.us:.1f} us, {faster}, with {r.words} ({r.tried} tried)"


def _summary(outcomes: Sequence[Outcome]) -> None:
    from kgen.runtime.tune import speedup

    results = [o.result for o in outcomes if o.result is not None]
    if not results:
        return
    better = sum(bool(r.knobs) for r in results)
    out().print(
        f"{better} of {len(results)} are faster than the default; all together {speedup(results):.3f} times as fast"
    )


def _plain(machine: Machine, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "device": machine.name,
        "driver": machine.driver,
        "outcomes": [
            {
                "name": o.job.name,
                "dims": dict(o.job.case.dims),
                "state": o.state,
                "result": None if o.result is None else o.result.data(),
                "problems": list(o.problems),
                "candidates": list(o.figures),
            }
            for o in outcomes
        ],
    }


def _show(device: str | None) -> None:
    from rich.table import Table

    from kgen.runtime.tune import Machine
    from kgen.runtime.tuned_store import devices, load, shipped_path, switched_off, user_path

    driver: str | None = None
    names: list[str]
    if device is not None:
        names = [device]
    else:
        try:
            machine = Machine.gpu()
            names, driver = [machine.name], machine.driver
        except KgenError:  # without a GPU: whatever is known
            names = devices()
    console = out()
    for name in names:
        for path in (user_path(name), shipped_path(name)):
            results = load(path)
            if not results:
                continue
            console.print(f"{path}: {len(results)} results", markup=False)
            table = Table(box=None, pad_edge=False)
            for head in ("kernel", "backend", "dtypes", "sizes", "us", "default us", "schedule"):
                table.add_column(
                    head,
                    justify="right" if "us" in head else "left",
                    no_wrap=head == "kernel",
                    min_width=12 if head == "schedule" else None,
                )
            ignored = 0
            for r in results:
                if driver is not None and path == user_path(name) and r.driver != driver:
                    ignored += 1
                    continue
                table.add_row(
                    r.name, r.subject.backend, " ".join(dict.fromkeys(r.dtypes.values())),
                    ", ".join(f"{d}={n}" for d, n in r.dims.items()), f"{r.us:.1f}", f"{r.default_us:.1f}",
                    r.words or "default",
                )  # fmt: skip
            console.print(table)
            if ignored:
                console.print(f"{ignored} results of another driver than {driver} do not count; tune again for those")
        show_products(name)
    if not names:
        console.print("no tuned schedules are known here")
    if switched_off():
        console.print("KGEN_TUNED=0 is set: none of them is used")


def _export(device: str, path: Path) -> None:
    from kgen.runtime.tuned_store import load, text_of, user_path

    results = load(user_path(device))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(device, results), "utf-8")
    err().print(f"{len(results)} results written to {path}", markup=False)
