"""What is installed and which machine this is, as far as compiled kernels depend on it; asked without importing it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from pathlib import Path

import torch


@functools.cache
def triton_version() -> str:
    """Triton's version. Read from its file, as importing Triton takes longer than all else that a process does which
    finds its kernels in the cache."""
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found = re.search(r"^__version__ = ['\"](\S+)['\"]$", Path(spec.origin).read_text(encoding="utf-8"), re.M)
            if found:
                return found[1]
    import triton

    return triton.__version__


@functools.cache
def nvrtc_installation() -> tuple[str, ...]:
    """What says which NVRTC CuPy loads: the versions of the installed packages, and where it looks."""
    spec = importlib.util.find_spec("cupy_backends")
    parts = [os.environ.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "LD_LIBRARY_PATH")]
    for place in [] if spec is None else spec.submodule_search_locations or []:
        site = os.path.dirname(place)
        names = (n for n in os.listdir(site) if n.endswith(".dist-info") and n.startswith(("cupy", "nvidia")))
        parts += [place, *sorted(names)]
    return tuple(parts)


def chosen_ptxas() -> str:
    """The `ptxas` that someone has named to Triton in the environment, in place of its own.

    That of torch does not count. torch.compile names it in mid-process, where it has something to compile: whether a
    kernel of ours comes before or after that would decide under which name it is kept.
    """
    own = str(Path(torch.__file__).parent / "bin" / "ptxas")
    given = (os.environ.get(f"TRITON_{tool}_PATH", "") for tool in ("PTXAS", "PTXAS_BLACKWELL"))
    return ",".join(path for path in given if path and path != own)


def triton_is_installed() -> bool:
    """Whether there is a Triton to import."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def driver_version() -> str:
    """That of the NVIDIA driver."""
    try:
        found = re.search(r"Kernel Module(?:\s+for \S+)?\s+(\d[\d.]*)", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found.group(1)
    except OSError:
        pass
    version = getattr(torch._C, "_cuda_getDriverVersion", None)  # of a CUDA build only
    return f"CUDA {version()}" if version is not None else "unknown"


def device_name(device: torch.device) -> str:
    """What results of `device` are kept under: the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
