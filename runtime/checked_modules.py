"""Files that were parsed and checked before: a process that finds one on disk needs neither parser nor checker for it.

An entry is found by the text of the file, its path, which messages and spans name, and the text of the parser and the
checker themselves. It holds the syntax tree, and of each imported file its path and the hash of its text, which must
still be the same. Only what has no mistake is kept.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from kgen.dsl import ast
from kgen.dsl.source import SourceFile
from kgen.runtime.cache import CACHE, cache_key

_DSL = Path(ast.__file__).parent


def checked(path: str | os.PathLike[str]) -> ast.Module:
    """The module of the file at `path`, which has no mistake.

    Raises DslError with every mistake in it, KgenError where it cannot be read.
    """
    key = _key(path)
    found = _open(CACHE.get(key)) if key is not None else None
    if found is not None:
        return found
    from kgen.dsl.modules import load

    loaded = load(path)
    check(loaded.module)
    if key is not None:
        imported = [(s.path, _hash(Path(s.path))) for s in loaded.sources[1:]]
        CACHE.put(key, pickle.dumps((imported, loaded.module), protocol=5))
    return loaded.module


def checked_text(text: str, name: str) -> ast.Module:
    """The module of `text`, which has no mistake and is checked each time; `name` stands for the file in messages."""
    from kgen.dsl.modules import load_source

    module = load_source(SourceFile(name, text)).module
    check(module)
    return module


def check(module: ast.Module) -> None:
    """Raise DslError with every mistake in it."""
    from kgen.dsl.check import check_module
    from kgen.dsl.diagnostics import Diagnostics
    from kgen.dsl.host.check import check_ops, source_of

    diagnostics = Diagnostics()
    check_module(module, diagnostics)
    check_ops(source_of(module), diagnostics)
    diagnostics.raise_if_errors()


def _key(path: str | os.PathLike[str]) -> str | None:
    """None for a file that cannot be read, which whoever parses it says."""
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError):
        return None
    return cache_key("module", os.fspath(path), text, language())


@functools.cache
def language() -> str:
    """A hash of what parses and checks: any change to it makes other trees."""
    digest = hashlib.sha256(repr(sys.version_info).encode())
    for file in sorted(_DSL.rglob("*")):
        if file.suffix in (".py", ".lark"):
            digest.update(file.relative_to(_DSL).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _open(payload: bytes | None) -> ast.Module | None:
    """The module of an entry whose imported files are what they were."""
    if payload is None:
        return None
    try:
        imported, module = _Trees(io.BytesIO(payload)).load()
        if all(_hash(Path(path)) == known for path, known in imported):
            return module
    except Exception:  # whatever a payload that is none of ours raises: it is no entry
        pass
    return None


class _Trees(pickle.Unpickler):
    """Makes objects of `kgen.dsl` and nothing else, whoever wrote the entry."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        # A name with dots would reach what such a module imports.
        found = super().find_class(module_name, global_name) if module_name.startswith("kgen.dsl.") else None
        if "." in global_name or not isinstance(found, type) or found.__module__ != module_name:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no part of a syntax tree")
        return found


def _hash(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
