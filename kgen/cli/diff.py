"""`kgen diff`: does every backend compute what the kernels mean?"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kgen.cli.app import MISTAKES, UsageError, err, out, print_json
from kgen.cli.files import by_direction, chosen, existing, read, selected

if TYPE_CHECKING:
    import torch

    from kgen.dsl.host.ast import Op
    from kgen.runtime.campaign import Report
    from kgen.runtime.kernel import Kernel


# A file, a kernel in it, `forward` or `backward`.
Job = tuple[Path, str, str]


def diff(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE[:KERNEL]|NAME|FOLDER...",
            help="What to examine; of NAME.forward and NAME.backward that direction.",
            show_default=False,
        ),
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option("--kernel", metavar="NAME", help="Only this kernel.")] = None,
    backends: Annotated[str, typer.Option(help="Backends to test, separated by commas.")] = "cuda,triton,reference",
    dtype: Annotated[str, typer.Option(help="Dtypes for the dtype variables; default: f32, bf16, f16 in turn.")] = "",
    device: Annotated[str, typer.Option(help="cpu, or cuda where there is a GPU. Default: cuda if there is one.")] = "",
    direction: Annotated[str, typer.Option(help="forward, backward (gradients) or both.")] = "both",
    quick: Annotated[bool, typer.Option("--quick", help="A third of the calls.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Time for all calls, shared by kernels and directions.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed makes other calls.")] = 0,
    inject: Annotated[
        str,
        typer.Option(
            metavar="MISTAKE", help="Put a mistake into the generated source; it must be found. `list` lists them."
        ),
    ] = "",
    replay: Annotated[Path | None, typer.Option(metavar="FILE", help="Repeat a saved failing call.")] = None,
    save: Annotated[Path, typer.Option(metavar="DIR", help="Where failing calls are saved.")] = Path("kgen-diff"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output.")] = False,
) -> None:
    """Hold every backend against the float64 interpreter, under an error bound derived for each kernel and its inputs.

    Outputs, and the gradients of every input that has one, derived or written by hand: all of them and some, for
    incoming gradients of every layout. Boundary sizes come first, then zero rows, strided, expanded and misaligned
    tensors, NaN and infinities. Without a GPU the generated CUDA runs on the host executor and the generated Triton in
    an interpreter. What fails is made smaller and saved, and the backend to blame is named.

    Examples:
        kgen diff ops/
        kgen diff swiglu.kdsl:geglu --quick --dtype bf16
        kgen diff ops/ --direction backward --seconds 600
        kgen diff softmax.kdsl --inject identity
        kgen diff --replay kgen-diff/softmax.json
    """
    from kgen.runtime.cases import DIRECTIONS
    from kgen.runtime.injection import MUTATIONS

    if inject == "list":
        for name, mutation in MUTATIONS.items():
            out().print(f"{name:10} {mutation.what} ({', '.join(mutation.edits)})")
        return
    if inject and inject not in MUTATIONS:
        raise UsageError(f"--inject {inject}: there is no such mistake; they are {', '.join(MUTATIONS)}")
    where = _device(device)
    names = _backends(backends, where)
    wanted = tuple(d.strip() for d in dtype.split(",") if d.strip())
    _check_dtypes(wanted)
    if direction not in (*DIRECTIONS, "both"):
        raise UsageError(f"--direction {direction}: it is {', '.join(DIRECTIONS)} or both")
    how: dict[str, Any] = {"dtypes": wanted, "quick": quick, "seed": seed}
    if replay is not None:
        if files:
            raise UsageError("--replay names the file itself; give no other")
        path, name, trial = _saved(replay)
        jobs = [(path, name, "backward" if trial.wanted else "forward")]
        how["given"] = [trial]
    else:
        jobs = _jobs(files or [], kernel, DIRECTIONS if direction == "both" else (direction,))
    if inject:
        _inject(jobs, inject, [n for n in names if n in MUTATIONS[inject].edits], where, how, seconds, as_json)
        return
    reports = _run(jobs, names, where, how, seconds, as_json)
    saved = _save(reports, save) if replay is None else {}
    if as_json:
        print_json([_plain(path, r, saved.get((path, r.kernel, r.direction))) for path, r in reports])
    else:
        _print(reports, saved)
    if any(report.failures for _, report in reports):
        raise typer.Exit(MISTAKES)


# ---- what was asked for --------------------------------------------------------------------------------------------


def _device(name: str) -> torch.device:
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: it is cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device")
    return torch.device(name)


def _backends(text: str, device: torch.device) -> list[str]:
    from kgen.runtime.registry import BACKENDS, executor_for

    names = list(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    for name in names:
        if name not in BACKENDS:
            raise UsageError(f"--backends {name}: they are {', '.join(BACKENDS)}")
    usable = []
    for name in names:
        reason = executor_for(name, device).why_unavailable(device)
        if reason is None:
            usable.append(name)
        else:
            err().print(f"warning: {name} is left out: {reason}", markup=False)
    if not usable:
        raise UsageError("none of the backends asked for can run here; see kgen doctor")
    return usable


def _check_dtypes(names: tuple[str, ...]) -> None:
    from kgen.dsl.dtypes import DTYPES

    for name in names:
        if name not in DTYPES:
            raise UsageError(f"--dtype: there is no dtype '{name}'; they are {', '.join(DTYPES)}")


def _jobs(files: list[str], only: list[str] | None, directions: tuple[str, ...]) -> list[Job]:
    """Each kernel in all of `directions`, or in the one behind its name."""
    found: dict[Job, None] = {}
    for direction, names in (by_direction(files) or {None: []}).items():
        own = names[0] if names else ""
        if direction == "training":
            raise UsageError(f"{own}.training: kgen diff has none; name {own}.backward: it runs the training form too")
        if direction is not None and direction not in directions:
            raise UsageError(f"{own}.{direction}: --direction is {directions[0]}; leave one of them out")
        these = directions if direction is None else (direction,)
        found |= dict.fromkeys((path, name, d) for path, name in _kernels(names, only) for d in these)
    return list(found)


def _kernels(files: list[str], only: list[str] | None) -> list[tuple[Path, str]]:
    if not files:
        raise UsageError("name a .kdsl file or a folder with some")
    modules = [(path, read(path).module, names) for path, names in chosen(files).items()]
    ops = {o.name: (path, o) for path, module, _ in modules for o in module.ops}
    asked = {n for _, _, names in modules for n in names or ()} | set(only or ())
    for name in sorted(asked & ops.keys() - {k.name for _, module, _ in modules for k in module.kernels}):
        raise UsageError(_of_an_op(*ops[name]))
    found = [(path, k.name) for path, module, names in modules for k in selected(module, names)]
    if ops and not found:
        raise UsageError(_of_an_op(*next(iter(ops.values()))))
    whole = {path for path, _, names in modules if names is None}
    left_out = [n for n, (path, _) in ops.items() if path in whole]
    if left_out and not only:
        err().print(f"left out, as these are no kernels but ops: {', '.join(left_out)}", markup=False)
    if only:
        missing = set(only) - {name for _, name in found}
        if missing:
            raise UsageError(
                f"--kernel {min(missing)}: there is no such kernel; there are {', '.join(n for _, n in found)}"
            )
        found = [(path, name) for path, name in found if name in only]
    if not found:
        raise UsageError("there are no kernels in these files")
    return found


def _of_an_op(path: Path, op: Op) -> str:
    """What to do where an op is named: it has no bound of its own, as products are the library's."""
    from kgen.dsl.check.unused import uses

    module = read(path).module
    files = {k.name: path for k in module.kernels} | {k.name: Path(k.module.path) for k in module.imported}
    called = [f"{files[n]}:{n}" for n in dict.fromkeys(uses(op)) if n in files]
    those = f"name those that it calls, as in: kgen diff {' '.join(called)}" if called else "it calls none"
    return (
        f"'{op.name}' is an op, and kgen diff examines kernels; {those}. What the op makes of them is the same on "
        f"every backend but 'reference', which multiplies matrices in float64: compare a call with its own there"
    )


def _saved(path: Path) -> tuple[Path, str, Any]:
    from kgen.runtime.cases import Trial

    try:
        data = json.loads(existing(path).read_text("utf-8"))
        return existing(Path(data["file"])), data["kernel"], Trial.from_json(data["trial"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a call saved by kgen diff ({type(error).__name__}: {error})") from None


def _load(path: Path, name: str) -> Kernel:
    from kgen.runtime.loading import load

    module = load(path)
    if name not in module:
        raise UsageError(f"{path} has no kernel '{name}'")
    return module[name]


# ---- running -------------------------------------------------------------------------------------------------------


def _run(
    jobs: list[Job], names: list[str], device: torch.device, how: dict[str, Any], seconds: float | None, quiet: bool
) -> list[tuple[Path, Report]]:
    """A report for each job. Of `seconds` each has an equal share of what those before it left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kgen.runtime.campaign import examine_kernel

    reports = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[calls]} calls"),
    )
    console = err()
    ends = None if seconds is None else time.monotonic() + seconds
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=len(jobs), calls=0)
        calls = 0

        def step() -> None:
            nonlocal calls
            calls += 1
            bar.update(task, calls=calls)

        for i, (path, name, direction) in enumerate(jobs):
            bar.update(task, description=f"{name}, {direction}")
            share = None if ends is None else max(0.0, ends - time.monotonic()) / (len(jobs) - i)
            options = {**how, "direction": direction, "seconds": share, "progress": step}
            reports.append((path, examine_kernel(_load(path, name), names, device, **options)))
            bar.advance(task)
    return reports


def _inject(
    jobs: list[Job],
    mistake: str,
    names: list[str],
    device: torch.device,
    how: dict[str, Any],
    seconds: float | None,
    as_json: bool,
) -> None:
    """Run with a mistake in the generated source of one backend and one launch at a time, of gradients in the backward
    kernel alone, and tell where it was not found. `seconds` are for each of them."""
    from kgen.codegen.derive.pair import backward_name
    from kgen.runtime.injection import MUTATIONS, injected

    if not names:
        raise UsageError(f"--inject {mistake} is for {', '.join(MUTATIONS[mistake].edits)}, and none of them is tested")
    results: list[dict[str, Any]] = []
    for backend, (path, name, direction) in itertools.product(names, jobs):
        launch, launches = 0, 1
        while launch < launches:
            kernel = backward_name(name) if direction == "backward" else None
            with injected(mistake, kernel=kernel, launch=launch) as done:
                once = {**how, "most_failures": 1}
                ((_, report),) = _run([(path, name, direction)], [backend], device, once, seconds, True)
            launches = done.launches.get(backend, 0)
            changed = done.programs.get(backend, 0)
            state = "not there" if not changed else "found" if report.failures else "not found"
            first = report.failures[0].messages.get(backend, "") if report.failures else ""
            results.append({
                "kernel": name, "direction": direction, "backend": backend, "launch": launch + 1, "mistake": mistake,
                "result": state, "by": first,
            })  # fmt: skip
            launch += 1
    if as_json:
        print_json(results)
    else:
        for r in results:
            by = f": {r['by'][:160]}" if r["by"] else ""
            which = f", launch {r['launch']}" if r["launch"] > 1 else ""
            out().print(f"{r['kernel']}, {r['direction']}, {r['backend']}{which}: {r['result']}{by}", markup=False)
        out().print(
            f"{MUTATIONS[mistake].what}: found in {sum(r['result'] == 'found' for r in results)} of "
            f"{sum(r['result'] != 'not there' for r in results)} places where it could be put"
        )
    if any(r["result"] == "not found" for r in results):
        raise typer.Exit(MISTAKES)


# ---- telling -------------------------------------------------------------------------------------------------------


def _save(reports: list[tuple[Path, Report]], folder: Path) -> dict[Job, Path]:
    saved = {}
    for path, report in reports:
        if not report.failures:
            continue
        first = report.failures[0]
        file = folder / f"{report.kernel}{'' if report.direction == 'forward' else '-' + report.direction}.json"
        folder.mkdir(parents=True, exist_ok=True)
        data = {"file": str(path.resolve()), "kernel": report.kernel, **first.to_json()}
        file.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
        saved[path, report.kernel, report.direction] = file
    return saved


def _plain(path: Path, report: Report, saved: Path | None) -> dict[str, Any]:
    return {
        "file": str(path),
        "kernel": report.kernel,
        "direction": report.direction,
        "planned": report.planned,
        "calls": report.trials,
        "out of time": report.out_of_time,
        "backends": {b: vars(t) for b, t in report.tallies.items()},
        "failures": [f.to_json() for f in report.failures],
        "refusals": report.refusals,
        "without gradient": report.underived,
        "saved": None if saved is None else str(saved),
    }


def _print(reports: list[tuple[Path, Report]], saved: dict[Job, Path]) -> None:
    from rich.table import Table

    console = out()
    table = Table(box=None, pad_edge=False)
    words = ("kernel", "direction", "backend")
    for head in (*words, "calls", "ok", "wrong", "refused", "largest error / bound"):
        table.add_column(head, justify="left" if head in words else "right")
    for _, report in reports:
        if report.direction == "backward" and not report.planned:
            continue
        for i, (backend, t) in enumerate(report.tallies.items()):
            wrong = f"[bold red]{t.wrong}[/bold red]" if t.wrong else "0"
            table.add_row(
                report.kernel if i == 0 else "",
                report.direction if i == 0 else "",
                backend,
                str(report.trials),
                str(t.ok),
                wrong,
                str(t.refused),
                f"{t.worst:.3g}" if t.ok else "-",
            )
    console.print(table)
    for path, report in reports:
        for line in _remarks(path, report, saved.get((path, report.kernel, report.direction))):
            console.print(line, markup=False)


def _remarks(path: Path, report: Report, saved: Path | None) -> Iterator[str]:
    """What the table does not tell of one report."""
    if not report.planned:
        inputs = report.direction == "backward"
        yield f"{report.kernel}: {'no input has a gradient' if inputs else 'no sizes were found that it allows'}"
    if report.out_of_time:
        yield f"{report.kernel}, {report.direction}: time was up after {report.trials} of {report.planned} calls"
    for name, why in report.underived.items():
        yield f"{report.kernel}: no gradient of '{name}': {why}"
    for failure in report.failures:
        yield f"\n{path}: {report.kernel}, {report.direction}: {' and '.join(failure.guilty)} wrong"
        yield f"  call: {failure.trial}"
        for backend, message in failure.messages.items():
            yield f"  {backend}: {message[:400]}"
    if saved is not None:
        yield f"  repeat it with: kgen diff --replay {saved}"
    for backend, message in report.refusals.items():
        yield f"{report.kernel}, {report.direction}, {backend} refused: {message[:300]}"
