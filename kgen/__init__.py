"""kgen: a block-level kernel language and a generator that emits readable CUDA C and Triton kernels.

import kgen
m = kgen.load("rms_norm.kdsl")
y = m.rms_norm(x, w)                      # on x's device; kgen.backends() lists what can run there
y = m.rms_norm(x, w, backend="triton")
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("kgen.dsl") is None:
    # A source tree that is not installed: the sub-packages are folders beside this one.
    __path__.append(str(Path(__file__).resolve().parent.parent))

from kgen.dsl import keeping
from kgen.dsl.errors import KgenError

if TYPE_CHECKING:
    __version__: str
    from kgen.dsl.diagnostics import DslError
    from kgen.runtime.errors import ArgumentError, BackendError
    from kgen.runtime.kernel import Kernel
    from kgen.runtime.loading import KernelModule, load, load_packaged, loads
    from kgen.runtime.registry import BackendStatus, backend, backends, set_backend

__all__ = [
    "ArgumentError",
    "BackendError",
    "BackendStatus",
    "DslError",
    "Kernel",
    "KernelModule",
    "KgenError",
    "__version__",
    "backend",
    "backends",
    "load",
    "load_packaged",
    "loads",
    "set_backend",
]

# Imported at its first use, as most of it needs torch: `import kgen` and the tools that only read files start at once.
_LAZY = {
    "ArgumentError": "kgen.runtime.errors",
    "BackendError": "kgen.runtime.errors",
    "BackendStatus": "kgen.runtime.registry",
    "DslError": "kgen.dsl.diagnostics",
    "Kernel": "kgen.runtime.kernel",
    "KernelModule": "kgen.runtime.loading",
    "backend": "kgen.runtime.registry",
    "backends": "kgen.runtime.registry",
    "load": "kgen.runtime.loading",
    "load_packaged": "kgen.runtime.loading",
    "loads": "kgen.runtime.loading",
    "set_backend": "kgen.runtime.registry",
}
_SUBPACKAGES = ("codegen", "dsl", "nn", "ops", "runtime", "templates")


def _store() -> keeping.Store:
    from kgen.runtime.cache import CACHE

    return CACHE


keeping.store = _store


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    if name == "__version__":
        globals()[name] = found = _version()
        return found
    if name in _SUBPACKAGES:
        return importlib.import_module(f"kgen.{name}")
    raise AttributeError(f"module 'kgen' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # a tenth of what `import kgen.ops` takes

    try:
        return version("kgen")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0.0.0+source"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
