"""Files and imports: `load` reads a `.kdsl` file and the functions and kernels that it takes from others.

An imported function brings the functions that it calls; those that were not imported by name get a name with a dot in
it, such as `activations.clip`, which no name of the importing file can equal.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kgen.dsl import ast
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.errors import KgenError
from kgen.dsl.garbage import collected_later
from kgen.dsl.lexing import normalised
from kgen.dsl.parser import parse
from kgen.dsl.source import SourceFile, Span

SUFFIX = ".kdsl"


@dataclass(frozen=True)
class LoadedModule:
    """A file with its imports resolved.

    `module.functions` holds what was imported, then the file's own functions; `module.imports` is kept as written.
    `sources` are the texts it was made of: the file itself, then each imported one in order of first use.
    """

    module: ast.Module
    sources: tuple[SourceFile, ...]

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the texts, as hexadecimal digits; the same whatever the line ends and wherever the files lie."""
        digest = hashlib.sha256()
        for source in self.sources:
            data = source.text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()


def load(path: str | os.PathLike[str], search: Sequence[str | os.PathLike[str]] = ()) -> LoadedModule:
    """Read the file at `path`. Imports are looked for beside the importing file, then in the folders of `search`.

    Raises:
        DslError: with every syntax and import error of the file and of those it imports.
        KgenError: if the file cannot be read.
    """
    diagnostics = Diagnostics()
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KgenError(f"cannot read {os.fspath(path)}: {reason}") from None
    source = _decoded(os.fspath(path), data, diagnostics)
    diagnostics.raise_if_errors()
    return load_source(source, search)


def load_source(source: SourceFile, search: Sequence[str | os.PathLike[str]] = ()) -> LoadedModule:
    """Like `load`, for a text at hand; imports are looked for in the folder of `source.path`.

    Raises:
        DslError: with every syntax and import error of the text and of the files it imports.
    """
    diagnostics = Diagnostics()
    loader = _Loader([Path(folder) for folder in search], diagnostics)
    module = loader.root(normalised(source))
    diagnostics.raise_if_errors()
    return LoadedModule(module, tuple(loader.sources))


def _decoded(path: str, data: bytes, diagnostics: Diagnostics) -> SourceFile:
    """The text of a file; where it is not UTF-8 that is reported at the first wrong byte."""
    try:
        return normalised(SourceFile(path, data.decode("utf-8")))
    except UnicodeDecodeError as error:
        before = normalised(SourceFile(path, data[: error.start].decode("utf-8"))).lines
        source = normalised(SourceFile(path, data.decode("utf-8", "replace")))
        line, column = len(before), len(before[-1]) + 1
        diagnostics.error(
            "K0155",
            f"the file is not UTF-8 text: byte 0x{data[error.start]:02x} fits nowhere here",
            Span(source, line, column, line, column + 1),
            help="save it as UTF-8",
        )
        return SourceFile(path, "")


@dataclass
class _File:
    """One imported file: its functions by name, its own and those it imports, each with the file it comes from."""

    prefix: str
    module: ast.Module
    functions: dict[str, tuple[_File, ast.Function]]
    kernels: dict[str, ast.ImportedKernel]


class _Loader:
    def __init__(self, search: list[Path], diagnostics: Diagnostics) -> None:
        self.search = search
        self.diagnostics = diagnostics
        self.files: dict[Path, _File | None] = {}
        self.sources: list[SourceFile] = []
        self.prefixes: set[str] = set()
        self.open: list[Path] = []

    @collected_later()
    def root(self, source: SourceFile) -> ast.Module:
        return self.resolved(self.read(source, Path(source.path), ""))

    def resolved(self, file: _File) -> ast.Module:
        """The module of a file with all that its functions and kernels need."""
        # The names under which the functions reached from here appear in the result.
        visible = {(id(owner), f.name): name for name, (owner, f) in file.functions.items()}
        order: dict[tuple[int, str], ast.Function] = {}
        for owner, function in file.functions.values():
            self.collect(owner, function, visible, order)
        return replace(file.module, functions=tuple(order.values()), imported=tuple(file.kernels.values()))

    def read(self, source: SourceFile, path: Path, prefix: str) -> _File:
        """Parse a text and what it imports."""
        self.sources.append(source)
        self.open.append(_identity(path))
        module = parse(source, self.diagnostics)
        file = _File(prefix, module, {}, {})
        own = {f.name for f in module.functions} | {k.name for k in module.kernels}
        for item in module.imports:
            self.resolve(item, path, file, own)
        for function in module.functions:
            # Of two functions of one name the first counts here; the checker reports the second.
            file.functions.setdefault(function.name, (file, function))
        self.open.pop()
        return file

    def resolve(self, item: ast.Import, importer: Path, file: _File, own: set[str]) -> None:
        target = self.find(item, importer)
        if target is None:
            return
        where = _identity(target)
        if where in self.open:
            chain = [p.name for p in self.open[self.open.index(where) :]]
            self.diagnostics.error(
                "K0153",
                f"import cycle: {' -> '.join([*chain, where.name])}",
                item.span,
                help="move the functions that both files need to a third one",
            )
            return
        source = self.imported(item, target, where)
        if source is None:
            return
        for name, span in zip(item.names, item.name_spans, strict=True):
            self.take(name, span, item, source, target, file, own)

    def take(
        self, name: str, span: Span, item: ast.Import, source: _File, target: Path, file: _File, own: set[str]
    ) -> None:
        """Make one imported name known in `file`."""
        kernels = {k.name for k in source.module.kernels}
        if name not in source.functions and name not in kernels:
            broken = any(d.span.source.path == str(target) for d in self.diagnostics.items)
            if not broken:  # a function with a syntax error is missing because of that
                has = "it has: " + (", ".join(sorted({*source.functions, *kernels})) or "none")
                if any(o.name == name for o in source.module.ops):
                    has = "that is an op, and only functions and kernels can be imported"
                self.diagnostics.error(
                    "K0152",
                    f"'{item.module}' has no function or kernel '{name}'",
                    span,
                    help=has,
                )
        elif name in file.functions or name in file.kernels or name in own:
            self.diagnostics.error(
                "K0154",
                f"'{name}' is imported here, and " + ("also defined in this file" if name in own else "was before"),
                span,
                help="remove one of the two, or rename it",
            )
        elif name in source.functions:
            file.functions[name] = source.functions[name]
        else:
            file.kernels[name] = ast.ImportedKernel(name, self.resolved(source))

    def find(self, item: ast.Import, importer: Path) -> Path | None:
        """The file that an import names; reported if there is none."""
        relative = Path(*item.module.split(".")).with_suffix(SUFFIX)
        folders = [importer.parent, *self.search]
        for folder in folders:
            if (folder / relative).is_file():
                return folder / relative
        looked = ", ".join(dict.fromkeys(str(folder) for folder in folders))
        self.diagnostics.error(
            "K0151",
            f"there is no file '{relative.as_posix()}' to import from",
            item.span,
            help=f"put it beside this file; looked in {looked}",
        )
        return None

    def imported(self, item: ast.Import, target: Path, where: Path) -> _File | None:
        """The imported file, read once however often it is imported."""
        if where in self.files:
            return self.files[where]
        self.files[where] = None
        try:
            data = target.read_bytes()
        except OSError as error:
            self.diagnostics.error(
                "K0151",
                f"'{target}' cannot be read: {error.strerror}",
                item.span,
                help="check the permissions of the file",
            )
            return None
        mistakes = len(self.diagnostics.items)
        source = _decoded(str(target), data, self.diagnostics)
        if len(self.diagnostics.items) > mistakes:
            return None
        prefix, number = item.module, 2
        while prefix in self.prefixes:  # two files of one name in different folders
            prefix, number = f"{item.module}_{number}", number + 1
        self.prefixes.add(prefix)
        self.files[where] = self.read(source, target, prefix)
        return self.files[where]

    def collect(
        self,
        owner: _File,
        function: ast.Function,
        visible: dict[tuple[int, str], str],
        order: dict[tuple[int, str], ast.Function],
    ) -> None:
        """Add a function, behind those it calls, with calls spelt as the importing file knows them."""
        pending = [(owner, function, False)]
        started: set[tuple[int, str]] = set()
        while pending:
            owner, function, ready = pending.pop()
            key = (id(owner), function.name)
            called = {n: owner.functions[n] for n in _called(function.body) if n in owner.functions}
            if ready:
                names = {n: visible.get((id(o), f.name)) or f"{o.prefix}.{f.name}" for n, (o, f) in called.items()}
                name = visible.get(key) or f"{owner.prefix}.{function.name}"
                order.setdefault(key, replace(function, name=name, body=_renamed(function.body, names)))
            elif key not in order and key not in started:
                started.add(key)
                pending.append((owner, function, True))
                pending += [(o, f, False) for o, f in reversed(list(called.values()))]


def _identity(path: Path) -> Path:
    """The path by which a file is recognised when it is reached by different ways."""
    return Path(os.path.realpath(path))


def _children(expr: ast.Expr) -> Iterable[ast.Expr]:
    match expr:
        case ast.Unary():
            return (expr.operand,)
        case ast.Binary():
            return (expr.left, expr.right)
        case ast.Call():
            return expr.args
        case ast.Subscript():
            return expr.indices
        case _:
            return ()


def _called(expr: ast.Expr) -> dict[str, None]:
    """The names that an expression calls, in order."""
    names: dict[str, None] = {expr.func: None} if isinstance(expr, ast.Call) else {}
    for child in _children(expr):
        names.update(_called(child))
    return names


def _renamed(expr: ast.Expr, names: dict[str, str]) -> ast.Expr:
    """`expr` with its calls renamed; itself if there is nothing to rename."""
    if all(old == new for old, new in names.items()):
        return expr
    match expr:
        case ast.Unary():
            return replace(expr, operand=_renamed(expr.operand, names))
        case ast.Binary():
            return replace(expr, left=_renamed(expr.left, names), right=_renamed(expr.right, names))
        case ast.Call():
            args = tuple(_renamed(a, names) for a in expr.args)
            return replace(expr, func=names.get(expr.func, expr.func), args=args)
        case ast.Subscript():
            return replace(expr, indices=tuple(_renamed(i, names) for i in expr.indices))
        case _:
            return expr
