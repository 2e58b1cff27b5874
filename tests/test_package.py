"""The package is laid out as setup.py says: sub-packages import, and a wheel misses no file of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kgen

ROOT = Path(__file__).resolve().parent.parent
SUBPACKAGES = ["dsl", "codegen", "templates", "runtime", "ops"]


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_subpackage_imports_under_kgen(name: str) -> None:
    module = importlib.import_module(f"kgen.{name}")
    assert module.__name__ == f"kgen.{name}"
    assert importlib.resources.files(module).joinpath("__init__.py").is_file()


def test_version_is_the_installed_one() -> None:
    assert kgen.__version__ == importlib.metadata.version("kgen")


def test_no_module_of_kgen_hides_a_subpackage() -> None:
    # `kgen/dsl.py` or `kgen/dsl/` would be found before the top-level folder that kgen.dsl is mapped to.
    taken = {path.stem for path in (ROOT / "kgen").iterdir()}
    assert not taken & set(SUBPACKAGES)


def test_wheel_holds_every_source_and_data_file(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ["kgen", *SUBPACKAGES]:
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for name in ["pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, tree)
    # What setup.py must reach beyond what the tree holds today: a new sub-package and a folder of data.
    (tree / "codegen" / "probe").mkdir()
    (tree / "codegen" / "probe" / "__init__.py").touch()
    (tree / "templates" / "probe").mkdir()
    (tree / "templates" / "probe" / "file.j2").touch()
    expected = {
        f"{prefix}{path.relative_to(tree / folder).as_posix()}"
        for folder, prefix in {"kgen": "kgen/", **{name: f"kgen/{name}/" for name in SUBPACKAGES}}.items()
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    # Without build isolation, so that the test needs no network: torch requires a recent setuptools anyway.
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(tree)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected
