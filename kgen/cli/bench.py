"""`kgen bench`: the shipped ops timed beside a copy of the same bytes, torch and other libraries."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kgen.cli.app import MISTAKES, UsageError, err, out

if TYPE_CHECKING:
    from kgen.bench.run import Timed
    from kgen.bench.work import Shape

_WHAT = "What is timed"
_RESULT = "What is done with the result"
_WIDE = 240  # columns of a table that goes to a file


class Form(StrEnum):
    """How a result is printed."""

    table = "table"
    markdown = "markdown"
    brief = "brief"


def bench(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="OPS...", help="Which ops; all without.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="TEXT", rich_help_panel=_WHAT, help="Rows whose name has TEXT in it."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shapes", metavar="16384x4096,...", rich_help_panel=_WHAT, help="These instead of the listed."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", rich_help_panel=_WHAT, help="cuda, triton or both.")] = "both",
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", rich_help_panel=_WHAT, help="torch and other libraries beside ours.")
    ] = True,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", rich_help_panel=_WHAT, help="torch.compile among them.")
    ] = True,
    device: Annotated[str, typer.Option("--device", help="cuda, or cpu: a trial with tiny sizes.")] = "cuda",
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Interleaved rounds that count.")] = 60,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="No row is begun after it.")] = 1800.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", rich_help_panel=_RESULT, help="Where to leave it, after each row."),
    ] = None,
    read: Annotated[
        Path | None, typer.Option("--read", metavar="FILE", rich_help_panel=_RESULT, help="Time nothing; tell FILE.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="OLD.json", rich_help_panel=_RESULT, help="Beside an earlier result."),
    ] = None,
    fail_over: Annotated[
        float | None,
        typer.Option("--fail-over", metavar="PERCENT", min=0, rich_help_panel=_RESULT,
                     help="Exit code 1 where a row became slower by more, beyond what the calls scatter."),
    ] = None,
    form: Annotated[Form, typer.Option("--format", rich_help_panel=_RESULT, help="How it is printed.")] = Form.table,
    pictures: Annotated[
        Path | None,
        typer.Option("--pictures", metavar="FOLDER", rich_help_panel=_RESULT,
                     help="Draw a roofline, time against width, and time against memory into it; made if not there."),
    ] = None,
    commit: Annotated[str, typer.Option("--commit", rich_help_panel=_RESULT, help="Else what git says.")] = "",
) -> None:  # fmt: skip
    """Time the shipped ops beside a copy of the same bytes, torch and other libraries.

    A time counts as a multiple of `torch.Tensor.copy_` of the bytes that must move (of three `torch.mm` for the linear
    cross entropy), in the same interleaved rounds; the L2 cache is cleared before each call. Results are held against
    float64 first. Exit code 1 if a kernel failed or was wrong, or with --fail-over became slower.

    Examples:
        kgen bench rms_norm softmax --json new.json
        kgen bench --only backward --no-peers --seconds 120
        kgen bench rms_norm --shapes 4096x5120,4096x6144
        kgen bench --json new.json --compare old.json --fail-over 5
        kgen bench --read new.json --pictures .
        kgen bench --device cpu
    """
    from kgen.bench import compare as comparison
    from kgen.bench import pictures as drawing
    from kgen.bench import report, result, terminal

    if fail_over is not None and compare is None:
        raise UsageError("--fail-over says how much slower than the result of --compare a row may be; give both")
    if pictures is not None and (why := drawing.missing()) is not None:
        raise UsageError(why)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json: there is no folder {json_file.absolute().parent}")
    if pictures is not None and (file := _in_the_way(pictures)) is not None:
        raise UsageError(f"--pictures: {file} is no folder")
    old = None if compare is None else result.load(compare)
    if read is None:
        if pictures is not None and device == "cpu":
            raise UsageError("--pictures draws times, and a trial on a CPU has none that say anything")
        value = _measured(ops, only, shapes, backend, (peers, compiled), (device, rounds, seconds), json_file, commit)
    else:
        value = result.load(read)
    _print(value, form, fresh=read is None)
    failed = bool(result.failures(value)) and read is None
    if old is not None:
        found = comparison.changes(value, old)
        console = _wide() if not out().is_terminal else out()
        for text in comparison.unlike(value, old):
            err().print(f"another {text}", markup=False)
        console.print(terminal.changed(found) if found else "no row of the earlier result was timed again")
        failed |= fail_over is not None and any(c.fails(fail_over) for c in found)
    if pictures is not None:
        for path in drawing.draw(value, pictures):
            err().print(f"{path}", markup=False)
    if value["trial"] and read is None:
        out().print(report.TRIAL)
    elif not value["trial"] and form is Form.table:
        out().print(report.summary(value), markup=False)
    if failed:
        raise typer.Exit(MISTAKES)


def _measured(
    ops: list[str] | None, only: list[str] | None, shapes: list[str] | None, backend: str, peers: tuple[bool, bool],
    how: tuple[str, int, float], file: Path | None, commit: str,
) -> dict[str, Any]:  # fmt: skip
    from kgen.bench.measure import Plan
    from kgen.bench.peers import COMPILED, PEERS
    from kgen.bench.run import run
    from kgen.bench.terminal import Steps
    from kgen.bench.work import BACKENDS

    name, rounds, seconds = how
    where = _device(name)
    trial = where.type == "cpu"
    if backend not in (*BACKENDS, "both"):
        raise UsageError(f"--backend: '{backend}' is none of cuda, triton, both")
    wanted = _cases(ops or [], only or [], _shapes(shapes or []), trial)
    plan = Plan(
        where,
        min(rounds, 3) if trial else rounds,
        BACKENDS if backend == "both" else (backend,),
        tuple(p for p in PEERS if peers[0] and (peers[1] or p != COMPILED)),
    )
    with Steps(out(), err(), trial).shown(len(wanted)) as steps:
        value = run(
            wanted, plan, commit or _commit(), seconds=seconds, file=file, tell=steps.tell, begin=steps.begin,
            done=steps.done,
        )  # fmt: skip
    for missed in value["not reached"]:
        err().print(f"not reached in the time given: {missed}", markup=False)
    return value


def _print(value: dict[str, Any], form: Form, fresh: bool) -> None:
    """A fresh result has been told line by line where nobody looks at a terminal."""
    from kgen.bench import report, terminal

    if form is not Form.table:
        text = report.markdown(value) if form is Form.markdown else report.brief(value)
        out().print(text, markup=False, end="")
    elif not value["trial"] and (not fresh or out().is_terminal):
        (out() if out().is_terminal else _wide()).print(terminal.table(value))
        for text in terminal.verdicts(value):
            out().print(text, markup=False)
    elif not fresh:
        for row in value["rows"]:
            out().print(report.line(row, value["trial"]), markup=False)


def _in_the_way(folder: Path) -> Path | None:
    """The file that keeps `folder` from being made, if there is one."""
    return next((p for p in (folder, *folder.parents) if p.exists() and not p.is_dir()), None)


def _wide() -> Any:
    from rich.console import Console

    return Console(highlight=False, emoji=False, width=_WIDE)


def _device(name: str) -> Any:
    import torch

    if name.split(":")[0] not in ("cuda", "cpu"):
        raise UsageError(f"--device: '{name}' is neither cuda nor cpu")
    if name != "cpu" and not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no NVIDIA GPU or driver"
        raise UsageError(
            f"kgen bench times kernels on an NVIDIA GPU, and there is none ({why}); "
            f"--device cpu tries the whole command with tiny sizes, and says nothing about speed"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device: '{name}' is no device; write cuda, cuda:1 or cpu") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device: there is no '{name}'; torch sees {torch.cuda.device_count()} GPUs")
    return device


def _shapes(texts: list[str]) -> list[Shape] | None:
    found: list[Shape] = []
    for text in (part.strip() for t in texts for part in t.split(",")):
        try:
            shape = tuple(int(n) for n in text.split("x"))
        except ValueError:
            shape = ()
        if not shape or min(shape) < 1:
            raise UsageError(f"--shapes: '{text}' is not a shape; write sizes with x between them, such as 16384x4096")
        found.append(shape)
    return found or None


def _cases(ops: list[str], only: list[str], shapes: list[Shape] | None, trial: bool) -> Sequence[Timed]:
    from kgen.bench.catalog import OPS, cases

    for op in ops:
        if op not in OPS:
            close = difflib.get_close_matches(op, OPS, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(OPS)}"
            raise UsageError(f"there is no op '{op}' to time; {hint}")
    found = [c for c in cases(ops or OPS, shapes, small=trial) if not only or any(text in c.name for text in only)]
    if not found:
        raise UsageError("no row has such an op, shape and name")
    return found


def _commit() -> str:
    """What git says of the folder of the package."""
    import kgen

    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(kgen.__file__).resolve().parent, capture_output=True,
            text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return f"kgen {kgen.__version__}"
    return done.stdout.strip() or f"kgen {kgen.__version__}"
