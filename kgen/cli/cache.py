"""`kgen cache`: the folder of compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kgen.cli.app import out, print_json
from kgen.dsl.errors import KgenError

cache = typer.Typer(help="The folder of compiled kernels: where it is, and emptying it.", no_args_is_help=True)


@cache.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Where compiled kernels are kept, how many there are, and how much room they take."""
    root = _root()
    files = _files(root)
    size = sum(_size(f) for f in files)
    if as_json:
        print_json({"folder": str(root), "exists": root.is_dir(), "files": len(files), "bytes": size})
        return
    out().print(f"folder  {root}" + ("" if root.is_dir() else " (not made yet)"), markup=False)
    out().print(f"files   {len(files)}")
    out().print(f"size    {size / 1e6:.1f} MB")
    out().print("KGEN_CACHE_DIR names another folder.")


@cache.command()
def clear(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Remove every compiled kernel. They are compiled again where they are needed."""
    root = _root()
    files = _files(root)
    size = removed = 0
    for f in files:
        own = _size(f)
        try:
            f.unlink()
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            raise KgenError(f"cannot remove {f}: {error.strerror or error}") from None
        size, removed = size + own, removed + 1
    for folder in sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True):
        try:
            folder.rmdir()
        except OSError:
            continue  # not empty: it holds what is not ours, or what another process is writing
    if as_json:
        print_json({"folder": str(root), "files": removed, "bytes": size})
    else:
        out().print(f"removed {removed} files, {size / 1e6:.1f} MB, from {root}", markup=False)


def _root() -> Path:
    from kgen.runtime.cache import default_root

    try:
        return default_root()
    except RuntimeError:
        raise KgenError("no home folder is known here; set KGEN_CACHE_DIR to a folder that can be written to") from None


def _files(root: Path) -> list[Path]:
    """The files of the cache: entries under two hexadecimal digits, and the folders of tools. Nothing else is touched,
    whatever KGEN_CACHE_DIR may point to."""
    found: list[Path] = []
    if not root.is_dir():
        return found
    for folder in root.iterdir():
        entries = len(folder.name) == 2 and all(c in "0123456789abcdef" for c in folder.name)
        if folder.is_dir() and not folder.is_symlink() and (entries or folder.name in TOOL_FOLDERS):
            found += [p for p in folder.rglob("*") if p.is_file() or p.is_symlink()]
    return found


# Folders that `Cache.folder` makes for tools.
TOOL_FOLDERS = ("host", "templates", "triton")


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
