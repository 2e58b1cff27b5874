"""`kgen fmt`: the one layout of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kgen.cli.app import MISTAKES, err, out, show_error
from kgen.cli.files import sources
from kgen.dsl.errors import KgenError


def fmt(
    files: Annotated[
        list[Path], typer.Argument(help="Files, or folders with .kdsl files below them.", show_default=False)
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if a file is not laid out so.")
    ] = False,
) -> None:
    """Lay out files: spacing, line breaks, indentation. Comments and meaning stay.

    Examples:
        kgen fmt ops/
        kgen fmt --check rms_norm.kdsl
    """
    from kgen.dsl.format import format_source

    paths = sources(files)
    changed = failed = 0
    for path in paths:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                text = file.read()
            new = format_source(text, str(path))
        except (KgenError, OSError, UnicodeDecodeError) as error:
            failed += 1
            show_error(error if isinstance(error, KgenError) else KgenError(f"cannot read {path}: {error}"))
            err().print()
            continue
        if new == text:
            continue
        changed += 1
        if not check:
            try:
                path.write_text(new, encoding="utf-8", newline="")
            except OSError as error:
                raise KgenError(f"cannot write {path}: {error.strerror or error}") from None
        out().print(f"{'would change' if check else 'changed'} {path}", markup=False)
    same = len(paths) - changed - failed
    verb = "would change" if check else "changed"
    out().print(f"{changed} {verb}, {same} unchanged" + (f", {failed} with errors" if failed else ""))
    if failed or (check and changed):
        raise typer.Exit(MISTAKES)
