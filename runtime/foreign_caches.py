"""The cache folders of CuPy and Triton, which must not keep kernels from compiling where there is no home to write to.

CuPy makes its folder when it is imported, Triton writes to its own in every compilation, and both fail where they cannot.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from threading import Lock

_lock = Lock()


def before_cupy() -> None:
    """To be called before CuPy is imported: without a folder to write to, its cache is kept in memory."""
    if "cupy" in sys.modules or os.environ.get("CUPY_CACHE_IN_MEMORY"):
        return
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    try:
        os.makedirs(folder, exist_ok=True)  # as CuPy will
    except OSError:
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"


def before_triton_compiles() -> None:
    """To be called before Triton compiles: without a folder to write to, it gets a temporary one for this process."""
    with _lock:
        home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
        folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return
        except OSError:
            pass  # the temporary folder is for this
        own = tempfile.mkdtemp(prefix="kgen-triton-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        os.environ["TRITON_CACHE_DIR"] = own
