"""The structure that the design promises: who imports whom, what knows no op by name, and how large files are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kgen.dsl.parser import parse_text

ROOT = Path(__file__).resolve().parent.parent
# What each folder may import of the package; itself is understood.
MAY_IMPORT = {
    "dsl": set(),
    "codegen": {"dsl", "templates"},
    "runtime": {"dsl", "codegen", "templates"},
    "ops": {"dsl", "codegen", "runtime"},
}


def sources(folder: str, *suffixes: str) -> list[Path]:
    """The files of a folder with one of the suffixes."""
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes and p.is_file())


def imported_packages(path: Path) -> set[str]:
    """The sub-packages of kgen that a Python file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {n.split(".")[1] for n in names if n.startswith("kgen.")} & {*MAY_IMPORT, "templates"}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_they_may(folder: str) -> None:
    wrong = {
        str(p.relative_to(ROOT)): sorted(extra)
        for p in sources(folder, ".py")
        if (extra := imported_packages(p) - MAY_IMPORT[folder] - {folder})
    }
    assert not wrong


def shipped_kernels() -> set[str]:
    """The names of all shipped kernels and ops."""
    modules = [parse_text(p.read_text("utf-8"), p.name) for p in sources("ops", ".kdsl")]
    return {k.name for m in modules for k in (*m.kernels, *m.ops)}


@pytest.mark.parametrize("folder", ["dsl", "codegen", "templates"])
def test_the_compiler_knows_no_op_by_name(folder: str) -> None:
    # `softmax` is also a reduction of the language; it means a row operation there, not the shipped kernel.
    names = shipped_kernels() - {"softmax"}
    assert {"rms_norm", "swiglu", "rope"} <= names
    pattern = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    files = sources(folder, ".py", ".j2", ".hpp", ".cpp", ".lark")
    assert files
    found = {str(p.relative_to(ROOT)): m.group() for p in files if (m := pattern.search(p.read_text("utf-8")))}
    assert not found


def test_no_file_grows_past_what_one_reader_holds() -> None:
    limit = 560  # about 500, with some air
    folders = (*MAY_IMPORT, "templates", "kgen", "tests", "benchmarks")
    large = {
        str(p.relative_to(ROOT)): n
        for folder in folders
        for p in sources(folder, ".py", ".j2", ".hpp", ".cpp", ".lark", ".kdsl")
        if (n := p.read_text("utf-8").count("\n")) > limit
    }
    assert not large
