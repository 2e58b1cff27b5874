"""Which compiler is this? A hash of the sources of kgen's own parts, which any change to one of them changes."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path

from kgen.runtime.cache import CACHE, cache_key

# What the source of a program depends on, and what is launched.
PARTS = ("dsl", "codegen", "templates", "runtime")
_ENDINGS = (".py", ".lark", ".j2", ".hpp", ".cpp", ".json")
_ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def version(*parts: str) -> str:
    """The hash of all sources in the folders `parts`, and of which Python this is.

    To read them all takes longer than all else that a process does whose kernels are known. So the hash is kept under
    what tells Python itself that a compiled module is out of date: names, sizes and times of the files.
    """
    files = [entry for part in parts for entry in _sources(_ROOT / part, part)]
    seen = [f"{name} {status.st_size} {status.st_mtime_ns} {status.st_ino}" for name, _, status in files]
    key = cache_key("sources", str(_ROOT), repr(sys.version_info), *seen)
    return CACHE.get_or_build(key, lambda: _hashed([(name, path) for name, path, _ in files])).decode()


def _sources(folder: Path, name: str) -> list[tuple[str, str, os.stat_result]]:
    """Name, path and status of each source below `folder`, in order of the names."""
    found: list[tuple[str, str, os.stat_result]] = []
    folders = [(str(folder), name)]
    while folders:
        here, called = folders.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                inner = f"{called}/{entry.name}"
                if entry.name.endswith(_ENDINGS):
                    found.append((inner, entry.path, entry.stat()))
                elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                    folders.append((entry.path, inner))
    return sorted(found, key=lambda f: f[0])


def _hashed(files: list[tuple[str, str]]) -> bytes:
    digest = hashlib.sha256(repr(sys.version_info).encode())
    for name, path in files:
        data = Path(path).read_bytes()
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest().encode()
