"""What all commands share: how errors end a command, and the two consoles.

Results go to standard output, everything else (errors, progress, advice) to standard error. Colour is for terminals.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from kgen.dsl.diagnostics import DslError
from kgen.dsl.errors import KgenError

OK, MISTAKES, USAGE = 0, 1, 2

# The base of what Typer raises for wrong options: click's own class, which some versions of Typer bring privately.
_REFUSED: type[Exception] = [c for c in typer.BadParameter.__mro__ if issubclass(c, Exception) and c is not Exception][
    -1
]


class Panel:
    """Headings in `kgen --help`."""

    WRITE = "Write kernels"
    COMPILE = "Look at and ship what is generated"
    MACHINE = "This machine"


class UsageError(KgenError):
    """The command was called wrongly, or something that it needs is missing here. Ends with exit code 2."""


def out() -> Console:
    """Standard output."""
    return Console(highlight=False, soft_wrap=True, emoji=False)


def err() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def print_json(value: Any) -> None:
    """`value` as JSON on standard output, for programs."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def write_json(path: Path, value: Any) -> None:
    """`value` as JSON in the file at `path`, or, where that is `-`, on standard output."""
    if str(path) == "-":
        print_json(value)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


INTERRUPTED = "interrupted; what was measured is kept, and the same command goes on from there"


def declare(app: typer.Typer, command: Callable[..., None], panel: str) -> None:
    """Make the function `command` a command of `app`; its docstring, after a line `Examples:`, ends in examples."""
    text, _, examples = (command.__doc__ or "").partition("Examples:")
    lines = [line.strip() for line in examples.strip().splitlines()]
    # Rich joins the lines of a paragraph; an empty one keeps each example on its own.
    epilog = "\n\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)]) if lines else None
    paragraphs = [" ".join(p.split()) for p in text.strip().split("\n\n")]
    app.command(name=command.__name__, help="\n\n".join(paragraphs), epilog=epilog, rich_help_panel=panel)(command)


def _exit_code(error: KgenError) -> int:
    from kgen.runtime.errors import BackendError  # imports nothing heavy

    return USAGE if isinstance(error, UsageError | BackendError) else MISTAKES


class Group(TyperGroup):
    """The command group that turns every exception into a message and an exit code."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["kgen.debug"] = "--debug" in args[:end] or bool(os.environ.get("KGEN_DEBUG"))
        return super().parse_args(ctx, [a for a in args[:end] if a != "--debug"] + args[end:])

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (_REFUSED, typer.Exit, typer.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            err().print("interrupted")
            raise typer.Exit(130) from None
        except KgenError as error:
            self._trace(ctx)
            show_error(error)
            raise typer.Exit(_exit_code(error)) from None
        except Exception as error:
            self._trace(ctx)
            report = "" if ctx.meta["kgen.debug"] else " Run the command again with --debug to see where."
            what = str(error).strip().split("\n")[0][:200]
            err().print(
                f"internal error: kgen failed in a way that it should not ({type(error).__name__}: {what}). "
                f"Please report this with the file and the command that you ran.{report}",
                markup=False,
            )
            raise typer.Exit(USAGE) from None

    def _trace(self, ctx: typer.Context) -> None:
        if ctx.meta.get("kgen.debug"):
            traceback.print_exc(file=sys.stderr)


def show_error(error: KgenError, console: Console | None = None) -> None:
    """The message of `error`; those of a source file with carets and, on a terminal, in colour."""
    console = console or err()
    if isinstance(error, DslError):
        console.print("\n\n".join(coloured(d.render(), console) for d in error.diagnostics))
    else:
        console.print(coloured(f"error: {error}", console))


def coloured(text: str, console: Console) -> str:
    """Rich markup of a rendered diagnostic; without a terminal the markup comes out as the plain text."""
    from rich.markup import escape

    lines = []
    for i, line in enumerate(text.split("\n")):
        safe = escape(line)
        head, _, rest = line.partition("|")
        if i == 0 and line.startswith(("error", "warning")):
            mark, colon, message = line.partition(":")
            colour = "bold red" if line.startswith("error") else "bold yellow"
            safe = f"[{colour}]{escape(mark)}[/{colour}]{colon}[bold]{escape(message)}[/bold]"
        elif rest.lstrip().startswith("^") and not head.strip():
            safe = f"{head}|[red]{escape(rest)}[/red]"
        elif line.lstrip().startswith("= help:"):
            safe = f"[cyan]{safe}[/cyan]"
        lines.append(safe)
    return "\n".join(lines)
