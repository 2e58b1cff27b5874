"""Files that were parsed and checked before: a process that finds one on disk needs neither parser nor checker for it.

An entry is found by the text of the file, its path, which messages and spans name, and the text of the parser and the
checker themselves. It holds what calls need to know of each kernel, the syntax tree, which is read only where a call
has to be compiled, and of each imported file its path and the hash of its text, which must still be the same. Only what
has no mistake is kept.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.dsl.dtypes import DTYPES
from kgen.dsl.signature import Signature
from kgen.dsl.source import SourceFile
from kgen.runtime import generator
from kgen.runtime.cache import CACHE, cache_key

if TYPE_CHECKING:
    from kgen.dsl import ast

Header = tuple[str, Signature]  # of a kernel: its documentation and its parameters


class Checked:
    """A file without a mistake. `kernels` are its headers by name, `ops` the names of its ops. `key` stands for its
    text and for those of the files that it imports, with their paths; None where it is not from files alone."""

    def __init__(
        self, path: str, doc: str, kernels: Mapping[str, Header], ops: tuple[str, ...], key: str | None, tree: bytes
    ) -> None:
        self.path, self.doc, self.kernels, self.ops, self.key = path, doc, kernels, ops, key
        self._tree = tree

    @staticmethod
    def of(module: ast.Module, key: str | None = None) -> Checked:
        """That of a module which was checked."""
        made = Checked(module.path, module.doc, headers(module), tuple(o.name for o in module.ops), key, b"")
        made.__dict__["module"] = module
        return made

    @cached_property
    def module(self) -> ast.Module:
        """The syntax tree."""
        return _Trees(io.BytesIO(self._tree)).load()


def headers(module: ast.Module) -> dict[str, Header]:
    """Those of the kernels of a module. Raises DslError for one that is wrong."""
    from kgen.dsl.check import signature_of
    from kgen.dsl.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    found = {k.name: (k.doc, signature_of(k, diagnostics)) for k in module.kernels}
    diagnostics.raise_if_errors()
    return found


def checked(path: str | os.PathLike[str]) -> Checked:
    """The file at `path`, which has no mistake.

    Raises DslError with every mistake in it, KgenError where it cannot be read.
    """
    key = _key(path)
    found = _open(CACHE.get(key), key) if key is not None else None
    if found is not None:
        return found
    from kgen.dsl.modules import load

    loaded = load(path)
    module = loaded.module
    check(module)
    if key is None:
        return Checked.of(module)
    files = [_unchanged(s) for s in loaded.sources]
    if None in files or _key_of(path, files[0] or b"") != key or generator.changed():
        return Checked.of(module)  # a file was saved meanwhile: the tree is of another text than the key
    pairs = zip(loaded.sources[1:], files[1:], strict=True)
    imported: Imported = [(s.path, _hashed(data)) for s, data in pairs if data is not None]
    CACHE.put(key, _packed(imported, module))
    return Checked.of(module, _content(key, imported))


def checked_text(text: str, name: str) -> Checked:
    """The module of `text`, which has no mistake and is checked each time; `name` stands for the file in messages."""
    from kgen.dsl.modules import load_source

    module = load_source(SourceFile(name, text)).module
    check(module)
    return Checked.of(module)


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
    return _key_of(path, text)


def _key_of(path: str | os.PathLike[str], text: bytes) -> str:
    return cache_key("module", os.fspath(path), text, language())


def _unchanged(source: SourceFile) -> bytes | None:
    """What is in the file of a source, if that is what was parsed."""
    from kgen.dsl.lexing import normalised

    try:
        data = Path(source.path).read_bytes()
        return data if normalised(SourceFile(source.path, data.decode())).text == source.text else None
    except (OSError, ValueError):
        return None


def language() -> str:
    """A hash of what parses and checks: any change to it makes other trees."""
    return generator.version("dsl")


Imported = list[tuple[str, str | None]]  # of each imported file the path and the hash of its text


def _content(key: str, imported: Imported) -> str:
    return cache_key("content", key, repr(imported))


def _packed(imported: Imported, module: ast.Module) -> bytes:
    kernels = {name: (doc, _named(s)) for name, (doc, s) in headers(module).items()}
    head = (module.path, module.doc, kernels, tuple(o.name for o in module.ops))
    return pickle.dumps((imported, head, pickle.dumps(module, protocol=5)), protocol=5)


def _open(payload: bytes | None, key: str = "") -> Checked | None:
    """What an entry holds whose imported files are what they were."""
    if payload is None:
        return None
    try:
        imported, (path, doc, kernels, ops), tree = _Trees(io.BytesIO(payload)).load()
        if any(_hash(Path(path)) != known for path, known in imported):
            return None
        found = {name: (text, _signature(*rest)) for name, (text, rest) in kernels.items()}
        return Checked(path, doc, found, ops, _content(key, imported), tree)
    except Exception:  # whatever a payload that is none of ours raises: it is no entry
        return None


def _named(s: Signature) -> tuple[Any, ...]:
    """A signature with its dtypes by name: they are told apart by identity."""
    variables = {v: tuple(d.name for d in dtypes) for v, dtypes in s.dtype_vars.items()}
    return s.name, s.doc, s.params, s.outputs, s.dims, s.star_dims, variables


def _signature(
    name: str, doc: str, params: Any, outputs: Any, dims: Any, star_dims: Any, variables: Mapping[str, tuple[str, ...]]
) -> Signature:
    """The signature that `_named` took apart."""
    known = {v: tuple(DTYPES[d] for d in dtypes) for v, dtypes in variables.items()}
    return Signature(name, doc, params, outputs, dims, star_dims, known)


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
        return _hashed(path.read_bytes())
    except (OSError, ValueError):
        return None


def _hashed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
