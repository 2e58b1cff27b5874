"""`kgen bench`: the shipped ops timed beside a copy of the same bytes, torch and other libraries."""

from __future__ import annotations

import difflib
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kgen.cli.app import MISTAKES, UsageError, err, out

if TYPE_CHECKING:
    from kgen.bench.run import Timed
    from kgen.bench.work import Shape

_PANEL = "What is timed"


def bench(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="OPS...", help="Which ops; all without.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="TEXT", rich_help_panel=_PANEL, help="Rows whose name has TEXT in it."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shapes", metavar="16384x4096,...", rich_help_panel=_PANEL, help="These instead of the listed."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", rich_help_panel=_PANEL, help="cuda, triton or both.")] = "both",
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", rich_help_panel=_PANEL, help="torch and other libraries beside ours.")
    ] = True,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", rich_help_panel=_PANEL, help="torch.compile among them.")
    ] = True,
    device: Annotated[str, typer.Option("--device", help="cuda, or cpu: a trial with tiny sizes.")] = "cuda",
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Interleaved rounds that count.")] = 60,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="No row is begun after it.")] = 1800.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Where to leave the result, after each row.")
    ] = None,
    commit: Annotated[str, typer.Option("--commit", help="For the result; else what git says.")] = "",
) -> None:
    """Time the shipped ops beside a copy of the same bytes, torch and other libraries.

    A time counts as a multiple of `torch.Tensor.copy_` of the bytes that must move, in the same interleaved rounds; the
    L2 cache is cleared before each call. Results are held against float64 first. Exit code 1 if a kernel failed or was
    wrong.

    Examples:
        kgen bench rms_norm softmax --json new.json
        kgen bench --only backward --no-peers --seconds 120
        kgen bench rms_norm --shapes 4096x5120,4096x6144
        kgen bench --device cpu
    """
    from kgen.bench import report, result
    from kgen.bench.measure import Plan
    from kgen.bench.peers import COMPILED, PEERS
    from kgen.bench.run import run
    from kgen.bench.work import BACKENDS

    where = _device(device)
    trial = where.type == "cpu"
    if backend not in (*BACKENDS, "both"):
        raise UsageError(f"--backend: '{backend}' is none of cuda, triton, both")
    wanted = _cases(ops or [], only or [], _shapes(shapes or []), trial)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json: there is no folder {json_file.absolute().parent}")
    plan = Plan(
        where, min(rounds, 3) if trial else rounds, BACKENDS if backend == "both" else (backend,),
        tuple(p for p in PEERS if peers and (compiled or p != COMPILED)),
    )  # fmt: skip
    console = out()

    def done(name: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            console.print(report.line(row, trial), markup=False)

    value = run(
        wanted, plan, commit or _commit(), seconds=seconds if seconds else math.inf, file=json_file, done=done,
        tell=lambda text: err().print(f"  {text}", markup=False),
    )  # fmt: skip
    if trial:
        console.print(report.TRIAL)
    for name in value["not reached"]:
        err().print(f"not reached in the time given: {name}", markup=False)
    if result.failures(value):
        raise typer.Exit(MISTAKES)


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
        return torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device: '{name}' is no device; write cuda, cuda:1 or cpu") from None


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
