"""Lark's parser of `grammar.lark`, whose tables are made once and kept for other processes (`keeping`).

To make them takes as long as to parse all packaged files; to read them, a tenth of that.
"""

from __future__ import annotations

import hashlib
import io
import sys
from contextlib import suppress
from functools import lru_cache
from importlib import resources

import lark
from lark import Lark

from kgen.dsl import keeping
from kgen.dsl.lexing import KeepErrorTokens
from kgen.dsl.tree import TreeBuilder

_OPTIONS = {"parser": "lalr", "lexer": "basic", "start": "module", "maybe_placeholders": True}


@lru_cache(maxsize=1)
def parser() -> tuple[Lark, TreeBuilder]:
    """The parser of this process, and the tree builder that it calls."""
    grammar = resources.files("kgen.dsl").joinpath("grammar.lark").read_text(encoding="utf-8")
    store = keeping.store()
    if store is None:
        made = _made(grammar)
    else:
        key = _key(grammar)
        made = _read(store.get(key))
        if made is None:
            made = _made(grammar)
            store.put(key, _packed(made), told=False)
    builder = made.options.transformer
    assert isinstance(builder, TreeBuilder)
    return made, builder


def _made(grammar: str) -> Lark:
    return Lark(grammar, transformer=TreeBuilder(), postlex=KeepErrorTokens(), **_OPTIONS)


def _key(grammar: str) -> str:
    """It stands for all that the tables depend on."""
    parts = (lark.__version__, sys.version_info[:2], _OPTIONS, KeepErrorTokens.always_accept, grammar)
    return hashlib.sha256(f"tables {parts!r}".encode()).hexdigest()


def _packed(made: Lark) -> bytes:
    file = io.BytesIO()
    made.save(file)
    return file.getvalue()


def _read(payload: bytes | None) -> Lark | None:
    if payload is not None:
        with suppress(Exception):  # whatever Lark raises of a payload that is none of its own: it is no entry
            found = Lark.load(io.BytesIO(payload))
            return found if isinstance(found.options.transformer, TreeBuilder) else None
    return None
