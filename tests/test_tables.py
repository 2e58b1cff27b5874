"""The parser's tables are made once for all processes, and never taken where they are not the grammar's."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lark
import pytest

import kgen.ops
from kgen.dsl import keeping, parser, tables
from kgen.dsl.diagnostics import DslError
from kgen.dsl.parser import parse_text
from kgen.runtime.cache import CACHE, Cache

OPS = Path(kgen.ops.__file__).parent
WRONG = "kernel f(x: T[N] -> (y: T[N]):\n    tile n in N\n    y[n] = = x[n]\n    y[n] x\n"


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parser, "_parsed", {})
    tables.parser.cache_clear()
    yield
    tables.parser.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that tables were made of."""
    seen: list[str] = []
    before = tables._made

    def counted(grammar: str) -> lark.Lark:
        seen.append(grammar)
        return before(grammar)

    monkeypatch.setattr(tables, "_made", counted)
    return seen


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(keeping, "store", lambda: Cache(tmp_path))  # as another process, with nothing in memory
    return tmp_path


def another_process() -> None:
    tables.parser.cache_clear()
    parser._parsed.clear()


def kept(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def told(text: str) -> str:
    with pytest.raises(DslError) as error:
        parse_text(text)
    return str(error.value)


def test_kgen_gives_the_language_its_cache() -> None:
    assert keeping.store() is CACHE


def test_kept_tables_are_the_same(folder: Path, made: list[str]) -> None:
    texts = [p.read_text() for p in sorted(OPS.glob("*.kdsl"))]
    first = [parse_text(t) for t in texts]
    mistakes = told(WRONG)
    assert len(made) == len(kept(folder)) == 1
    another_process()
    assert [parse_text(t) for t in texts] == first
    assert told(WRONG) == mistakes
    assert len(made) == len(kept(folder)) == 1


@pytest.mark.parametrize("what", ["lark", "python", "grammar", "options", "terminals"])
def test_others_make_their_own(folder: Path, made: list[str], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_text("fn f(a) = a\n")
    another_process()
    match what:
        case "lark":
            monkeypatch.setattr(lark, "__version__", "0.0.1")
        case "python":
            monkeypatch.setattr(tables.sys, "version_info", (3, 0, 0))
        case "grammar":
            before = tables._key
            monkeypatch.setattr(tables, "_key", lambda grammar: before(grammar + "\n"))
        case "options":
            monkeypatch.setitem(tables._OPTIONS, "propagate_positions", True)
        case _:
            always = (*tables.KeepErrorTokens.always_accept, "NAME")
            monkeypatch.setattr(tables.KeepErrorTokens, "always_accept", always)
    assert parse_text("fn g(a) = a\n").functions[0].name == "g"
    assert len(made) == len(kept(folder)) == 2


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, ((("options", 1),),))


def _other_grammar() -> bytes:
    file = io.BytesIO()
    lark.Lark('start: "x"', parser="lalr").save(file)
    return file.getvalue()


@pytest.mark.parametrize("payload", [b"", b"none", pickle.dumps({}), pickle.dumps(_Evil()), _other_grammar()])
def test_an_entry_that_is_none_of_ours(folder: Path, made: list[str], payload: bytes) -> None:
    parse_text("fn f(a) = a\n")
    (path,) = kept(folder)
    Cache(folder).put("".join(path.parts[-2:]), payload)
    another_process()
    assert parse_text("fn g(a) = a\n").functions[0].name == "g"
    another_process()
    assert parse_text("fn h(a) = a\n").functions[0].name == "h"
    assert len(made) == 2  # the second time the entry was put right


@pytest.mark.parametrize("cut", [0, 10, 1000])
def test_a_damaged_file(folder: Path, made: list[str], cut: int) -> None:
    parse_text("fn f(a) = a\n")
    (path,) = kept(folder)
    path.write_bytes(path.read_bytes()[:cut])
    another_process()
    assert parse_text("fn g(a) = a\n").functions[0].name == "g"
    assert len(made) == 2


def test_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever only reads files is not warned that compiled kernels could not be kept."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(keeping, "store", lambda: Cache(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_text("fn f(a) = a\n").functions[0].name == "f"


def test_a_kept_builder_knows_no_file() -> None:
    _, builder = tables.parser()
    told(WRONG)
    again = pickle.loads(pickle.dumps(builder))
    assert again.diagnostics.items == [] and again.source.text == ""
