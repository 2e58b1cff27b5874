"""What a process loads before its first result: little, and nothing that an earlier one found out."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kgen
from kgen.dsl import modules
from kgen.runtime import checked_modules, installation
from kgen.runtime.backends import cuda
from kgen.runtime.cache import CACHE, cache_key

TEXT = """
from others import twice

kernel doubled(x: T[*N]) -> (y: T[*N]):
    parallel n in N
    y[n] = twice(x[n])
"""
OTHERS = "fn twice(a) = a + a\n"

_PROCESS = """
import json, sys, torch
import kgen
m = kgen.load(sys.argv[1])
y = m.doubled(torch.ones(3), backend="reference")
from kgen import ops
ops.rms_norm(torch.ones(2, 4), backend="reference")
print(json.dumps([y.tolist(), sorted(name for name in sys.modules)]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    CACHE.clear_memory()
    (tmp_path / "own.kdsl").write_text(TEXT)
    (tmp_path / "others.kdsl").write_text(OTHERS)
    return tmp_path


def process(path: Path) -> tuple[list[float], set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, str(path)], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    y, modules = json.loads(done.stdout)
    return y, set(modules)


def test_a_second_process_needs_no_parser(folder: Path) -> None:
    first, loaded = process(folder / "own.kdsl")
    assert first == [2.0] * 3 and "lark" in loaded
    second, loaded = process(folder / "own.kdsl")
    assert second == [2.0] * 3
    unwanted = (
        "lark",
        "triton",
        "cupy",
        "kgen.codegen.derive",
        "kgen.runtime.host.op",
        "kgen.cli",
    )
    assert not loaded & set(unwanted)


_IMPORTS = """
import json, sys, torch
from dataclasses import is_dataclass
import kgen.ops.functional
known = [m for name, m in sorted(sys.modules.items()) if name.startswith("kgen.")]
made = {c.__name__ for m in known for c in vars(m).values() if isinstance(c, type) and is_dataclass(c)}
print(json.dumps([[m.__name__ for m in known], sorted(made)]))
"""


def test_what_is_imported_before_the_first_call_of_an_op() -> None:
    """No part that only mistakes or gradients need. Python takes 0.3 to 1 ms to make a frozen dataclass and a tenth of
    that for a named tuple, so that what a launch is told is in those; the classes named here are of syntax trees, or
    of what is compared by its type too."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    loaded, made = json.loads(done.stdout)
    assert not {"kgen.dsl.diagnostics", "kgen.runtime.autograd", "kgen.runtime.preparing"} & set(loaded)
    headers = {"Signature", "Specialization", "DType", "Span", "SourceFile"}
    assert set(made) <= headers | {"Sym", "FloorDiv", "Mod", "Poly"}


@pytest.mark.parametrize("changed", ["own.kdsl", "others.kdsl"])
def test_a_changed_file_is_read_again(folder: Path, changed: str) -> None:
    x = torch.ones(3)
    assert kgen.load(folder / "own.kdsl").doubled(x).tolist() == [2.0] * 3
    text = (folder / changed).read_text()
    (folder / changed).write_text(text.replace("twice(x[n])", "3.0 * x[n]").replace("a + a", "a + a + a"))
    assert kgen.load(folder / "own.kdsl").doubled(x).tolist() == [3.0] * 3
    (folder / changed).write_text(text)
    assert kgen.load(folder / "own.kdsl").doubled(x).tolist() == [2.0] * 3


@pytest.mark.parametrize("saved", ["own.kdsl", "others.kdsl"])
@pytest.mark.parametrize("when", ["before it is parsed", "behind it"])
def test_a_file_that_is_saved_while_it_is_loaded(
    folder: Path, saved: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for the old text is not what the new one means, nor the other way round."""
    text = (folder / saved).read_text()
    new = text.replace("twice(x[n])", "3.0 * x[n]").replace("a + a", "a + a + a")
    before = modules.load

    def load(path: Path) -> modules.LoadedModule:
        if when != "behind it":
            (folder / saved).write_text(new)
            return before(path)
        loaded = before(path)
        (folder / saved).write_text(new)
        return loaded

    x = torch.ones(3)
    with monkeypatch.context() as m:
        m.setattr(modules, "load", load)
        kgen.load(folder / "own.kdsl")
    assert kgen.load(folder / "own.kdsl").doubled(x).tolist() == [3.0] * 3
    (folder / saved).write_text(text)
    assert kgen.load(folder / "own.kdsl").doubled(x).tolist() == [2.0] * 3


def test_a_mistake_is_told_each_time(folder: Path) -> None:
    kgen.load(folder / "own.kdsl")
    (folder / "own.kdsl").write_text(TEXT.replace("y[n] =", "y[m] ="))
    for _ in range(2):
        with pytest.raises(kgen.DslError, match=r"own\.kdsl:6"):
            kgen.load(folder / "own.kdsl")
    (folder / "own.kdsl").write_text(TEXT)
    (folder / "others.kdsl").unlink()
    with pytest.raises(kgen.DslError, match="others"):
        kgen.load(folder / "own.kdsl")
    with pytest.raises(kgen.KgenError, match="cannot read"):
        kgen.load(folder / "none.kdsl")


def test_the_tree_is_the_one_that_was_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "own.kdsl"
    parsed = checked_modules.checked(path).module
    monkeypatch.setattr("kgen.dsl.modules.load", lambda _: pytest.fail("parsed again"))
    found = checked_modules.checked(path).module
    assert found == parsed and repr(found) == repr(parsed)
    assert found.kernels[0].span.source.text == parsed.kernels[0].span.source.text


def test_another_checker_checks_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked_modules.checked(folder / "own.kdsl")
    monkeypatch.setattr(checked_modules, "language", lambda: "another")
    seen: list[object] = []
    before: Callable[..., None] = checked_modules.check
    monkeypatch.setattr(checked_modules, "check", lambda module: seen.append(module) or before(module))
    checked_modules.checked(folder / "own.kdsl")
    assert len(seen) == 1


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"no pickle",
        pickle.dumps(([], _Evil())),
        b"\x80\x04\x8c\x10kgen.dsl.modules\x8c\x09os.system\x93.",  # a function that such a module imports
        b"\x80\x04\x8c\x10kgen.dsl.modules\x8c\x05parse\x93.",
        b"\x80\x04\x8c\x12kgen.runtime.cache\x8c\x05Cache\x93.",
    ],
)
def test_an_entry_that_is_none_of_ours(folder: Path, payload: bytes) -> None:
    path = folder / "own.kdsl"
    key = checked_modules._key(path)
    assert key is not None
    CACHE.put(key, payload)
    assert checked_modules._open(payload) is None
    assert kgen.load(path).doubled(torch.ones(3)).tolist() == [2.0] * 3


def test_tritons_version_without_triton() -> None:
    module = pytest.importorskip("triton")
    assert installation.triton_version.__wrapped__() == module.__version__


def test_nvrtcs_version_is_remembered_for_this_installation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    cuda._missing_cupy.cache_clear()
    assert cuda.nvrtc_version() is None
    assert cuda._missing_cupy() is None
    assert cuda.nvrtc_version() == ".".join(map(str, nvrtc.getVersion()))
    monkeypatch.setattr(cuda, "_installation", lambda: cache_key("another"))
    assert cuda.nvrtc_version() is None


def test_templates_are_compiled_once(folder: Path) -> None:
    from kgen.codegen.templating import environment
    from kgen.runtime.backends.base import keep_templates

    before = environment().bytecode_cache
    keep_templates.cache_clear()
    try:
        for _ in range(2):
            environment().cache.clear()  # pyright: ignore[reportOptionalMemberAccess]
            m = kgen.loads("kernel f(x: T[*N]) -> (y: T[*N]):\n    parallel n in N\n    y[n] = x[n]\n")
            assert m.f(torch.ones(3), backend="triton").tolist() == [1.0] * 3
            kept = {f.name for f in (folder / "cache" / "templates").iterdir()}
        assert kept
    finally:
        environment().bytecode_cache = before
        keep_templates.cache_clear()
