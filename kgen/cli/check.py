"""`kgen check`: is what is written in these files right?"""

from __future__ import annotations

from typing import Annotated

import typer

from kgen.cli.app import MISTAKES, UsageError, err, out, print_json, show_error
from kgen.cli.files import all_errors, chosen, read
from kgen.dsl.diagnostics import DslError, KgenError


def check(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE[:KERNEL]|FOLDER...", help="What to check.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the mistakes as JSON on standard output.")] = False,
) -> None:
    """Check files: grammar, names, index sets, bounds and races, along every compile-time choice.

    Every mistake of every file is reported in one run, each with a code of docs/errors.md. Nothing is compiled. Where
    a kernel is named, mistakes in the other kernels and ops of its file are left out.

    Examples:
        kgen check ops/
        kgen check swiglu.kdsl:geglu
        kgen check rms_norm.kdsl --json
    """
    wanted = chosen(files)
    paths = list(wanted)
    kernels = wrong_files = 0
    mistakes: list[dict[str, object]] = []
    console = err()
    seen: set[str] = set()
    for path in paths:
        try:
            names = wanted[path]
            module = read(path, names).module
            kernels += len(module.kernels) if names is None else len(names & {k.name for k in module.kernels})
        except UsageError:
            raise
        except KgenError as error:
            wrong_files += 1
            if isinstance(error, DslError):
                # A mistake in a file that several import is one mistake.
                fresh = [d for d in error.diagnostics if d.render() not in seen]
                seen |= {d.render() for d in fresh}
                error = DslError(fresh)
                mistakes += all_errors(error)
                if not fresh:
                    continue
            else:
                mistakes.append({"file": str(path), "message": str(error)})
            if not as_json:
                show_error(error, console)
                console.print()
    if as_json:
        print_json({"files": len(paths), "kernels": kernels, "errors": mistakes})
    elif mistakes:
        console.print(f"{_count(len(mistakes), 'error')} in {wrong_files} of {_count(len(paths), 'file')}")
    else:
        out().print(f"{_count(len(paths), 'file')}, {_count(kernels, 'kernel')}: no errors")
    if mistakes:
        raise typer.Exit(MISTAKES)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
