"""The package is laid out as setup.py says: sub-packages import, and data files are found through them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources

import pytest

import kgen


@pytest.mark.parametrize("name", ["dsl", "codegen", "templates", "runtime", "ops"])
def test_subpackage_imports_under_kgen(name: str) -> None:
    module = importlib.import_module(f"kgen.{name}")
    assert module.__name__ == f"kgen.{name}"
    assert importlib.resources.files(module).joinpath("__init__.py").is_file()


def test_version_is_the_installed_one() -> None:
    assert kgen.__version__ == importlib.metadata.version("kgen")


def test_package_is_marked_as_typed() -> None:
    assert importlib.resources.files("kgen").joinpath("py.typed").is_file()
