"""`kgen check`: is what is written in these files right?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kgen.cli.app import MISTAKES, UsageError, coloured, err, out, print_json, show_error
from kgen.cli.files import as_data, chosen, read
from kgen.dsl import ast
from kgen.dsl.check.products import products
from kgen.dsl.diagnostics import Diagnostic, DslError
from kgen.dsl.errors import KgenError
from kgen.dsl.garbage import collected_later
from kgen.dsl.host.unused import unused
from kgen.dsl.source import Span


@collected_later()
def check(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE[:NAME]|NAME|FOLDER...", help="What to check.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the mistakes as JSON on standard output.")] = False,
) -> None:
    """Check files: grammar, names, index sets, bounds and races, along every compile-time choice.

    Every mistake of every file is reported in one run, each with a code of docs/errors.md. Nothing is compiled. Names
    that nothing uses, and matrix products that kernels write as sums, are warnings (W01xx), which leave the exit code
    as it is. Where a kernel or an op is named, mistakes in the others of its file are left out.

    Examples:
        kgen check ops/
        kgen check swiglu.kdsl:geglu
        kgen check fused_linear_cross_entropy.kdsl:fused_linear_cross_entropy
        kgen check rms_norm.kdsl --json
    """
    wanted = chosen(files)
    paths = list(wanted)
    kernels = ops = wrong_files = 0
    mistakes: list[dict[str, object]] = []
    console = err()
    seen: set[str] = set()
    modules: list[tuple[ast.Module, set[str] | None]] = []
    for path in paths:
        try:
            names = wanted[path]
            module = read(path, names).module
            modules.append((module, names))
            kernels += len([k for k in module.kernels if names is None or k.name in names])
            ops += len([o for o in module.ops if names is None or o.name in names])
        except UsageError:
            raise
        except KgenError as error:
            wrong_files += 1
            if isinstance(error, DslError):
                # A mistake in a file that several import is one mistake.
                fresh = [d for d in error.diagnostics if d.render() not in seen]
                seen |= {d.render() for d in fresh}
                error = DslError(fresh)
                mistakes += as_data(error.diagnostics)
                if not fresh:
                    continue
            else:
                mistakes.append({"file": str(path), "message": str(error)})
            if not as_json:
                show_error(error, console)
                console.print()
    warnings = _warnings(modules)
    if not as_json:
        for d in warnings:
            console.print(coloured(d.render(), console))
            console.print()
    also = f", {_count(len(warnings), 'warning')}" if warnings else ""
    if as_json:
        found = {"errors": mistakes, "warnings": as_data(warnings)}
        print_json({"files": len(paths), "kernels": kernels, "ops": ops, **found})
    elif mistakes:
        console.print(f"{_count(len(mistakes), 'error')} in {wrong_files} of {_count(len(paths), 'file')}{also}")
    else:
        counts = [_count(n, what) for n, what in ((kernels, "kernel"), (ops, "op")) if n] or ["no kernels"]
        out().print(f"{_count(len(paths), 'file')}, {', '.join(counts)}: no errors{also}")
    if mistakes:
        raise typer.Exit(MISTAKES)


def _warnings(modules: list[tuple[ast.Module, set[str] | None]]) -> list[Diagnostic]:
    """What nothing uses in the files without mistakes, and what is no work for a kernel: a function only if none of
    the others imports it, and where kernels and ops are chosen only what lies in them and in the backwards of
    kernels."""
    imported = {_place(f.name_span) for m, _ in modules for f in m.functions if f.name_span.source.path != m.path}
    found: list[Diagnostic] = []
    for module, names in modules:
        wanted = [k for k in (*module.kernels, *module.backwards) if names is None or k.name in names]
        lines = {n for k in wanted for n in range(k.span.line, max(s.span.end_line for s in k.body) + 1)}
        lines |= {
            n
            for o in module.ops
            if names is not None and o.name in names
            for n in range(o.span.line, o.span.end_line + 1)
        }
        chosen_kernels = tuple(k for k in module.kernels if names is None or k.name in names)
        for d in (*unused(module), *products(replace(module, kernels=chosen_kernels))):
            inside = d.span.line in lines
            if (inside or names is None) and not (d.code == "W0102" and _place(d.span) in imported):
                found.append(d)
    return found


def _place(span: Span) -> tuple[Path, int]:
    return Path(span.source.path).resolve(), span.line


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
