"""The CUDA backend on a GPU: NVRTC, through CuPy, compiles; the driver loads and launches."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from kgen.codegen.program import Program
from kgen.runtime import events
from kgen.runtime.backends.base import Generated, capability_of, missing_gpu
from kgen.runtime.backends.driver import Binary, Loaded
from kgen.runtime.backends.launch import Built
from kgen.runtime.cache import CACHE, Cache, cache_key
from kgen.runtime.foreign_caches import before_cupy
from kgen.runtime.installation import nvrtc_installation
from kgen.runtime.layouts import Layout
from kgen.runtime.stages import build_stages


class Cuda(Generated):
    """Compiles to a cubin for the device's architecture, loads it into each device's primary context, and launches on
    torch's current stream."""

    name = "cuda"
    backend = "cuda"

    def why_unavailable(self, device: torch.device) -> str | None:
        return missing_gpu(device) or _missing_cupy()

    def load(self, program: Program, layout: Layout, device: torch.device, cache: Cache) -> Built:
        arch = f"sm_{self.capability(device)}"

        def build(p: Program) -> Built:
            cubin, _ = compiled(p, arch, cache)
            return Loaded(p, Binary(cubin, p.schedule.threads, p.shared_bytes, 0, binary_key(p, arch)), device)

        return build_stages(program, build, device)

    def multiprocessors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def capability(self, device: torch.device) -> int:
        return capability_of(device)


@cache
def _missing_cupy() -> str | None:
    if nvrtc_version() is not None:
        return None
    major = (torch.version.cuda or "13").split(".")[0]
    before_cupy()
    try:
        version = importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
    except Exception as error:  # whatever keeps it from loading: a missing wheel, library or symbol
        return f"CuPy with NVRTC is missing ({error}); install it with: pip install 'kgen[cuda{major}]'"
    CACHE.put(_installation(), ".".join(map(str, version)).encode())
    return None


def nvrtc_version() -> str | None:
    """The version of NVRTC, as this installation told it to an earlier process; None where none has asked.

    To ask it is to import CuPy, which takes longer than all else that a process does which finds its kernels in the
    cache.
    """
    known = CACHE.get(_installation())
    return None if known is None else known.decode()


def _installation() -> str:
    """The key of what says which NVRTC CuPy loads."""
    return cache_key("nvrtc", *nvrtc_installation())


def binary_key(program: Program, arch: str) -> str:
    """What the cache has the cubin of `program` for `arch` under."""
    from kgen.runtime import nvrtc

    return cache_key(
        "cuda", program.source, program.entry, nvrtc_version() or nvrtc.version(), *nvrtc.NUMERICS_FLAGS, arch
    )


def compiled(program: Program, arch: str, cache: Cache) -> tuple[bytes, dict[str, Any]]:
    """The cubin of `program` for `arch` and its resources, from the cache or from NVRTC.

    An entry, which `binary_key` names, is one line of JSON and the cubin.
    """
    from kgen.runtime import nvrtc

    built = False

    def build() -> bytes:
        nonlocal built
        built = True
        result = nvrtc.compile_cuda(program.source, program.entry, arch, lines=program.lines)
        events.count("compile:cuda")
        return json.dumps(asdict(result.resources)).encode() + b"\n" + result.cubin

    meta, _, cubin = cache.get_or_build(binary_key(program, arch), build).partition(b"\n")
    if not built:
        events.count("load:cuda")
    return cubin, json.loads(meta)
