"""Generated Python modules: written to a real file, as Triton reads its kernels from one, and imported under a name of
their own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from kgen.runtime.cache import Cache, write_atomically

_lock = threading.Lock()
_temporary: tempfile.TemporaryDirectory[str] | None = None


def import_source(source: str, stem: str, cache: Cache, flavour: str = "") -> ModuleType:
    """The module of `source`, imported once a process for each `flavour`.

    Its file is in the folder `triton` of the cache, or in a temporary one that lives as long as the process.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:20]
    name = f"kgen_generated_{flavour}{digest}"
    with _lock:
        module = sys.modules.get(name)
        if module is not None:
            return module
        path = _file(source, f"{stem}_{digest}.py", cache)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # Triton looks up helper functions through it
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _file(source: str, name: str, cache: Cache) -> Path:
    global _temporary
    folder = cache.folder("triton")
    if folder is not None:
        path = folder / name
        try:
            # Not trusted for its name: what is imported is what was generated.
            if not path.is_file() or path.read_bytes() != source.encode():
                write_atomically(path, source.encode())
            return path
        except OSError:
            pass  # a full or read-only folder; the cache has warned or will
    if _temporary is None:
        _temporary = tempfile.TemporaryDirectory(prefix="kgen-triton-")
    path = Path(_temporary.name) / name
    path.write_bytes(source.encode())
    return path
