"""Which compiler is this? A hash of the sources of kgen's own parts, which any change to one of them changes."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kgen.runtime.cache import CACHE, cache_key

# What the source of a program depends on, and what is launched.
PARTS = ("dsl", "codegen", "templates", "runtime")
_ENDINGS = (".py", ".lark", ".j2", ".hpp", ".cpp", ".json")
_ROOT = Path(__file__).resolve().parent.parent


class _Source(NamedTuple):
    """A source, and what tells Python itself that a compiled module is out of date: names, sizes and times."""

    name: str
    path: str
    size: int
    modified: int
    inode: int
    changed: int  # when contents, name or mode did, which a copy does not take over from its original


@functools.cache
def version(*parts: str) -> str:
    """The hash of all sources in the folders `parts`, and of which Python this is.

    They are those that the process started with. Where they are known no more, as they were changed before anyone
    asked, the version is this process's own. To read them all takes longer than all else that a process does whose
    kernels are known, so the hash is kept under their names, sizes and times.
    """
    files = [f for f in _at_start(_ROOT) if f.name.partition("/")[0] in parts]
    seen = [f"{f.name} {f.size} {f.modified} {f.inode}" for f in files]
    key = cache_key("sources", str(_ROOT), repr(sys.version_info), *seen)
    found = CACHE.get(key)
    if found is None:
        try:
            found = _hashed(files)
        except OSError:
            found = b""
        if changed() or not found or not files:
            return f"of process {os.getpid()} alone, {time.time_ns()}"
        CACHE.put(key, found)
    return found.decode()


def changed() -> bool:
    """Whether some source was changed since this process started. What is imported from then on is of others than those
    that `version` is of, and nothing that was made with it may be kept under that."""
    return _sources(_ROOT) != _at_start(_ROOT)


def _sources(root: Path) -> tuple[_Source, ...]:
    """Those below the folders of `PARTS`, in order of the names; none where there are no such folders."""
    found: list[_Source] = []
    folders = [(str(root / part), part) for part in PARTS]
    while folders:
        here, called = folders.pop()
        try:
            entries = list(os.scandir(here))
        except OSError:
            continue
        for entry in entries:
            inner = f"{called}/{entry.name}"
            if entry.name.endswith(_ENDINGS):
                try:
                    s = entry.stat()
                except OSError:
                    continue  # it is being replaced
                found.append(_Source(inner, entry.path, s.st_size, s.st_mtime_ns, s.st_ino, s.st_ctime_ns))
            elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                folders.append((entry.path, inner))
    return tuple(sorted(found))


_at_start = functools.cache(_sources)
_at_start(_ROOT)


def _hashed(files: Sequence[_Source]) -> bytes:
    digest = hashlib.sha256(repr(sys.version_info).encode())
    for f in files:
        data = Path(f.path).read_bytes()
        digest.update(f"{f.name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest().encode()
