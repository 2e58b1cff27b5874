"""Files and kernels named on the command line."""

from __future__ import annotations

import difflib
import importlib.resources
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kgen.cli.app import UsageError
from kgen.dsl import ast
from kgen.dsl.check import check_module
from kgen.dsl.diagnostics import Diagnostic, Diagnostics
from kgen.dsl.errors import KgenError
from kgen.dsl.host.check import check_ops, source_of
from kgen.dsl.modules import LoadedModule, load


def sources(paths: Iterable[Path]) -> list[Path]:
    """The `.kdsl` files that `paths` name: files as they are, folders with all that is below them. Each once, in order.

    Raises UsageError for a path that is not there, and for a folder without any.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            below = ((p, p.relative_to(path).parts) for p in path.rglob("*.kdsl"))
            inside = sorted(p for p, parts in below if not any(part.startswith(".") for part in parts))
            if not inside:
                raise UsageError(f"there is no .kdsl file in {path}")
            found |= dict.fromkeys(inside)
        elif path.is_file():
            found[path] = None
        else:
            existing(path)
    return list(found)


def existing(path: Path) -> Path:
    """`path`, which is a file. Raises UsageError, with a near name if there is one, where it is not."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    if not path.is_file():
        raise UsageError(f"there is no file {path}{_similar(path)}")
    return path


def _similar(path: Path) -> str:
    if not path.suffix and path.with_suffix(".kdsl").is_file():
        return f"; did you mean {path.with_suffix('.kdsl')}?"
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix == ".kdsl"]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, 1)
    known = shipped() if path.name == str(path) else {}
    here = sorted(name for name, file in known.items() if file.name == path.name)
    if here:
        return f"; it comes with kgen, in {known[here[0]]}: its kernels go by their names alone, {', '.join(here)}"
    if close:
        return f"; did you mean {path.parent / close[0]}?"
    if not str(path).isidentifier():
        return ""
    if str(path) in known:
        return f"; '{path}' comes with kgen, in {known[str(path)]}"
    close = difflib.get_close_matches(str(path), known, 1)
    return f"; did you mean '{close[0]}', which comes with kgen?" if close else ""


def shipped() -> dict[str, Path]:
    """The files of the kernels and ops that come with kgen, by name."""
    found: dict[str, Path] = {}
    with importlib.resources.as_file(importlib.resources.files("kgen.ops")) as folder:
        for path in sorted(folder.glob("*.kdsl")):
            module = load(path).module
            found |= {item.name: path for item in (*module.kernels, *module.ops)}
    return found


def read(path: Path, names: set[str] | None = None) -> LoadedModule:
    """The checked module of the file at `path`; of its kernels and ops only `names` are checked, all for None.

    Raises DslError with every mistake, KgenError if it cannot be read, UsageError for a name that is not there.
    """
    loaded = load(path)
    diagnostics = Diagnostics()
    module, source = loaded.module, source_of(loaded.module)
    if names is not None:
        ops = {o.name for o in module.ops}
        known = [k.name for k in (*module.kernels, *module.ops)]
        for name in sorted(names - set(known)):
            what = "kernel or op" if ops else "kernel"
            raise UsageError(f"{path} has no {what} '{name}'; {_nearest(name, known)}")
        kernels = tuple(selected(module, names - ops))
        backwards = tuple(b for b in module.backwards if b.name in names)
        module = replace(module, kernels=kernels, backwards=backwards)
        source = replace(source, ops=tuple(o for o in source.ops if o.name in names))
    check_module(module, diagnostics)
    check_ops(source, diagnostics)
    diagnostics.raise_if_errors()
    return loaded


def split_kernel(text: str) -> tuple[Path, str | None]:
    """`rope.kdsl:rope` as the file and the kernel; the kernel is None where only a file is named."""
    path, colon, kernel = text.rpartition(":")
    if colon and kernel.isidentifier() and not Path(text).exists():
        return Path(path), kernel
    return Path(text), None


DIRECTIONS = ("forward", "training", "backward")


def directed(text: str) -> tuple[str, str | None]:
    """`rms_norm.backward` as `rms_norm` and the direction: that of a kernel's gradients, the `training` form of a call
    that records them, or `forward`, the kernel itself. None where none stands behind it: a file may be called so."""
    for direction in DIRECTIONS:
        if text.endswith(f".{direction}") and not Path(text).exists():
            return text.removesuffix(f".{direction}"), direction
    return text, None


def named(text: str) -> tuple[Path, str | None]:
    """What `FILE[:KERNEL]` names, as `split_kernel` has it, or NAME, which is no file here: the kernel or op of that
    name that comes with kgen."""
    path, kernel = split_kernel(text)
    if text.isidentifier() and not path.exists() and not path.with_suffix(".kdsl").is_file():
        found = shipped().get(text)
        if found is not None:
            return found, text
    return path, kernel


def chosen(texts: Iterable[str]) -> dict[Path, set[str] | None]:
    """The files that `texts` name, as `named` has it or as a folder, and the kernels wanted of each; None for all.

    Raises UsageError for a path that is not there; whether a file has such a kernel is not looked at.
    """
    wanted: dict[Path, set[str] | None] = {}
    for text in texts:
        path, kernel = named(text)
        for p in sources([path]):
            known = wanted.get(p, set())
            wanted[p] = None if kernel is None or known is None else known | {kernel}
    return wanted


def by_direction(texts: Iterable[str]) -> dict[str | None, list[str]]:
    """`texts` without the directions behind them, as `directed` has them, for each direction."""
    out: dict[str | None, list[str]] = {}
    for text in texts:
        name, direction = directed(text)
        out.setdefault(direction, []).append(name)
    return out


def selected(module: ast.Module, names: set[str] | None) -> list[ast.Kernel]:
    """The kernels called `names`, all for None. Raises UsageError for a name that is not there."""
    return list(module.kernels) if names is None else [kernel_of(module, name) for name in sorted(names)]


def kernel_of(module: ast.Module, name: str | None) -> ast.Kernel:
    """The kernel called `name`, or the only one of the file."""
    names = [k.name for k in module.kernels]
    ops = [o.name for o in module.ops]
    if name is None and ops and len(names) != 1:
        has = f"{len(names)} kernels ({', '.join(names)}) and " if names else ""
        has += f"{len(ops)} op{'s' * (len(ops) > 1)} ({', '.join(ops)})"
        raise UsageError(f"{module.path} has {has}; name one, as in {module.path}:{ops[0]}")
    if not names:
        raise KgenError(f"{module.path} has no kernel")
    if name is None:
        if len(names) > 1:
            raise UsageError(
                f"{module.path} has {len(names)} kernels ({', '.join(names)}); name one, as in {module.path}:{names[0]}"
            )
        return module.kernels[0]
    for k in module.kernels:
        if k.name == name:
            return k
    if name in ops:
        raise UsageError(f"'{name}' is an op, and this is for kernels; {module.path} has {', '.join(names)}")
    raise UsageError(f"{module.path} has no kernel '{name}'; {_nearest(name, names)}")


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean '{close[0]}'?" if close else f"it has {', '.join(names)}"


def as_data(diagnostics: Iterable[Diagnostic]) -> list[dict[str, object]]:
    """Mistakes and warnings as plain data, for --json."""
    return [
        {
            "file": d.span.source.path,
            "line": d.span.line,
            "column": d.span.column,
            "end_line": d.span.end_line,
            "end_column": d.span.end_column,
            "code": d.code,
            "message": d.message,
            "label": d.label,
            "help": d.help,
            "notes": list(d.notes),
        }
        for d in diagnostics
    ]
