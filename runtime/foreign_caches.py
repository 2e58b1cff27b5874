"""The cache folders of CuPy and Triton, which must not keep kernels from compiling where there is no home to write to.

CuPy makes its folder when it is imported, Triton writes to its own in every compilation; both fail where they cannot,
so they get a temporary folder that lives as long as the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

from kgen.dsl.locks import lock

_lock = lock()


def before_cupy() -> None:
    """To be called before CuPy is imported."""
    if "cupy" not in sys.modules:
        _ensure("CUPY_CACHE_DIR", Path(os.path.expanduser("~"), ".cupy", "kernel_cache"))


def before_triton_compiles() -> None:
    """To be called before Triton compiles."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    _ensure("TRITON_CACHE_DIR", Path(home, ".triton", "cache"))


def _ensure(variable: str, default: Path) -> None:
    """Point the environment variable to a temporary folder where its folder, or the default one, cannot be used."""
    with _lock:
        folder = Path(os.environ.get(variable) or default)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return
        except OSError:
            pass  # the temporary folder is for this
        own = tempfile.mkdtemp(prefix="kgen-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        os.environ[variable] = own
