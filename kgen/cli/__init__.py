"""The command line: `kgen check | fmt | new | show | build | diff | bench | tune | doctor | cache`. One file for each
command.

Exit codes: 0 all is well; 1 the user's files or arguments have mistakes; 2 wrong usage, or something is missing on
this machine.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import typer

import kgen
from kgen.cli.app import Group, Panel, declare
from kgen.cli.bench import bench
from kgen.cli.build import build
from kgen.cli.cache import cache
from kgen.cli.check import check
from kgen.cli.diff import diff
from kgen.cli.doctor import doctor
from kgen.cli.fmt import fmt
from kgen.cli.new import new
from kgen.cli.show import show
from kgen.cli.tune import tune

app = typer.Typer(
    cls=Group,
    name="kgen",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: kgen new scale && kgen check scale.kdsl && kgen show scale.kdsl --stage cuda,triton",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kgen {kgen.__version__}")
        raise typer.Exit


@app.callback()
def _kgen(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. Allowed anywhere.")] = False,
) -> None:
    """Write a kernel once, in a .kdsl file; read, run and ship it as CUDA C and Triton."""


declare(app, new, Panel.WRITE)
declare(app, check, Panel.WRITE)
declare(app, fmt, Panel.WRITE)
declare(app, show, Panel.COMPILE)
declare(app, build, Panel.COMPILE)
declare(app, diff, Panel.COMPILE)
declare(app, bench, Panel.COMPILE)
declare(app, tune, Panel.MACHINE)
declare(app, doctor, Panel.MACHINE)
app.add_typer(cache, name="cache", rich_help_panel=Panel.MACHINE)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any
) -> None:
    """A warning as one sentence, without the line of kgen that gave it."""
    typer.echo(f"warning: {message}", err=True)


def main() -> None:
    """The console entry point `kgen`."""
    warnings.showwarning = _show_warning
    app(prog_name="kgen")
