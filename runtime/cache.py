"""The disk cache of compiled kernels: a content hash names each entry, and a damaged entry is no entry.

The key is made of everything that determines a binary (final source, compiler version, flags, backend, architecture),
so entries never go stale and are never rewritten; neither file times nor object identities play a part. Entries are
written to a temporary file and moved into place, so that any number of processes may share a folder. Whatever the
file system refuses, compiled kernels stay in memory and work goes on; a folder that cannot be used is told once, as a
warning.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from kgen.dsl.locks import lock

_MAGIC = b"kgen-cache-1\n"
_DIGEST = hashlib.sha256().digest_size


def cache_key(*parts: str | bytes) -> str:
    """The hexadecimal SHA-256 of `parts`; their boundaries count, so ("ab", "c") and ("a", "bc") differ."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


@functools.cache
def temporary_folder(name: str) -> Path:
    """A folder that lives as long as the process, for where `Cache.folder(name)` has none."""
    folder = tempfile.TemporaryDirectory(prefix=f"kgen-{name}-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def default_root() -> Path:
    """`$KGEN_CACHE_DIR`, else the user's cache folder for kgen."""
    given = os.environ.get("KGEN_CACHE_DIR")
    if given:
        return Path(given)
    import platformdirs  # only needed without the variable

    return Path(platformdirs.user_cache_dir("kgen", appauthor=False))


class Cache:
    """A folder of entries named by `cache_key`, with a copy of what this process used in memory.

    `root` None is `default_root()`, looked up at each use, so that a changed KGEN_CACHE_DIR counts.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._memory: dict[str, bytes] = {}
        self._lock = lock()
        self._warned = False

    @property
    def root(self) -> Path:
        """The folder; it need not exist."""
        return self._root if self._root is not None else default_root()

    def path(self, key: str) -> Path:
        """Where the entry `key` is kept; two levels keep folders small."""
        return self.root / key[:2] / key[2:]

    def folder(self, name: str) -> Path | None:
        """The sub-folder `name`, made if need be, for tools that keep files of their own; None if it cannot be used."""
        try:
            path = self.root / name
            self._make(path)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, "the folder cannot be written to", str(path))
        except (OSError, RuntimeError) as error:
            self._warn(error)
            return None
        return path

    def get(self, key: str) -> bytes | None:
        """The entry `key`, or None where there is none, or none that can be read and is whole."""
        found = self._memory.get(key)
        if found is not None:
            return found
        try:
            data = self.path(key).read_bytes()
        except (OSError, RuntimeError):  # RuntimeError: no home folder can be determined
            return None
        payload = _open(data)
        if payload is not None:
            self._memory[key] = payload
        return payload

    def put(self, key: str, payload: bytes, *, told: bool = True) -> None:
        """Keep `payload` as entry `key`. Never raises for what the file system refuses; `told`: it warns of it."""
        self._memory[key] = payload
        try:
            path = self.path(key)
            self._make(path.parent)
            write_atomically(path, _seal(payload))
        except (OSError, RuntimeError) as error:
            # Another process may have been faster, on a system that does not replace a file while it is read.
            if told and not self._is_kept(key):
                self._warn(error)

    def get_or_build(self, key: str, build: Callable[[], bytes]) -> bytes:
        """The entry `key`, made by `build()` where it is missing. Where `build` raises, nothing is kept."""
        found = self.get(key)
        if found is None:
            found = build()
            self.put(key, found)
        return found

    def _is_kept(self, key: str) -> bool:
        try:
            return _open(self.path(key).read_bytes()) is not None
        except (OSError, RuntimeError):
            return False

    def clear_memory(self) -> None:
        """Forget the copies in memory; the folder stays."""
        self._memory.clear()

    def _make(self, path: Path) -> None:
        # The root alone decides who may look in; mode applies to the last folder that mkdir makes.
        if not self.root.is_dir():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _warn(self, error: Exception) -> None:
        with self._lock:
            if self._warned:
                return
            self._warned = True
        warnings.warn(
            f"kgen cannot keep compiled kernels on disk ({error}); they are kept in memory and compiled again by the "
            f"next process. Set KGEN_CACHE_DIR to a folder that can be written to.",
            RuntimeWarning,
            stacklevel=2,
        )


def _seal(payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(payload).digest() + payload


def _open(data: bytes) -> bytes | None:
    head = len(_MAGIC) + _DIGEST
    payload = data[head:]
    whole = data.startswith(_MAGIC) and data[len(_MAGIC) : head] == hashlib.sha256(payload).digest()
    return payload if whole else None


def write_atomically(path: Path, data: bytes) -> None:
    """`data` at `path`, all or nothing. Raises OSError; no temporary file is left behind where it can be removed."""
    # The name of the temporary file is unique among processes, and among machines that share the folder.
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        # A leftover is harmless, and the error that brought us here is the one to tell.
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


CACHE = Cache()
