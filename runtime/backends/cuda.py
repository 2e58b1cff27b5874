"""The CUDA backend on a GPU: NVRTC compiles, the driver launches, both through CuPy."""

from __future__ import annotations

import ctypes
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from kgen.codegen.program import Program
from kgen.runtime import events
from kgen.runtime.backends.base import Built, Generated, Launch, Packer, ScalarValue, Slots, programs
from kgen.runtime.cache import Cache, cache_key
from kgen.runtime.errors import BackendError
from kgen.runtime.foreign_caches import before_cupy
from kgen.runtime.layouts import Layout
from kgen.runtime.stages import build_stages

# CuPy's extension modules have no stubs.
_DRIVER = "cupy_backends.cuda.api.driver"
_RUNTIME = "cupy_backends.cuda.api.runtime"

_STATIC_SHARED = 48 * 1024  # what a block may have without asking


class Cuda(Generated):
    """Compiles to a cubin for the device's architecture, loads it into each device's primary context, and launches on
    torch's current stream."""

    name = "cuda"
    backend = "cuda"

    def why_unavailable(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device; it needs an NVIDIA GPU, its driver and a CUDA build of torch"
        return _missing_cupy()

    def load(self, program: Program, layout: Layout, device: torch.device, cache: Cache) -> Built:
        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}"

        def build(p: Program) -> Built:
            cubin, resources = compiled(p, arch, cache)
            return _Loaded(p, cubin, resources, device)

        return build_stages(program, build, device)

    def multiprocessors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _missing_cupy() -> str | None:
    major = (torch.version.cuda or "13").split(".")[0]
    before_cupy()
    try:
        importlib.import_module(_DRIVER)
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
    except Exception as error:  # whatever keeps it from loading: a missing wheel, library or symbol
        return f"CuPy with NVRTC is missing ({error}); install it with: pip install 'kgen[cuda{major}]'"
    return None


def compiled(program: Program, arch: str, cache: Cache) -> tuple[bytes, dict[str, Any]]:
    """The cubin of `program` for `arch` and its resources, from the cache or from NVRTC.

    An entry is one line of JSON and the cubin.
    """
    from kgen.runtime import nvrtc

    built = False

    def build() -> bytes:
        nonlocal built
        built = True
        result = nvrtc.compile_cuda(program.source, program.entry, arch, lines=program.lines)
        events.count("compile:cuda")
        return json.dumps(asdict(result.resources)).encode() + b"\n" + result.cubin

    key = cache_key("cuda", program.source, program.entry, nvrtc.version(), *nvrtc.NUMERICS_FLAGS, arch)
    meta, _, cubin = cache.get_or_build(key, build).partition(b"\n")
    if not built:
        events.count("load:cuda")
    return cubin, json.loads(meta)


class _Loaded(Built):
    """A cubin loaded into the primary context of one device."""

    def __init__(self, program: Program, cubin: bytes, resources: dict[str, Any], device: torch.device) -> None:
        driver: Any = importlib.import_module(_DRIVER)
        self.program = program
        self.resources = resources
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self._driver = driver
        with current(self.index):
            try:
                self._module = driver.moduleLoadData(cubin)
                self._function = driver.moduleGetFunction(self._module, program.entry)
                if program.shared_bytes > _STATIC_SHARED:
                    attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    driver.funcSetAttribute(self._function, attribute, program.shared_bytes)
            except driver.CUDADriverError as error:
                raise BackendError(f"{program.entry}: the driver cannot load the kernel on {device}: {error}") from None

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        program = self.program
        assert program is not None
        grid = programs(program, layout)
        return Launcher(self, program, Slots.of(program.args, layout), grid), grid


class Launcher:
    """Launches one kernel with one set of sizes and strides."""

    def __init__(self, loaded: _Loaded, program: Program, slots: Slots, grid: int) -> None:
        self._loaded = loaded  # keeps the module
        self._driver = loaded._driver
        self._launch, self._error = loaded._driver.launchKernel, loaded._driver.CUDADriverError
        self._function, self._index = loaded._function, loaded.index
        self._grid, self._threads, self._shared = grid, program.schedule.threads, program.shared_bytes
        self._entry = program.entry
        self._packer = Packer(program.args, slots)
        # Argument buffers that no call is using. The driver copies arguments, so a buffer is free after the launch.
        self._free: list[ArgumentBuffer] = []

    def __call__(
        self, tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue], addresses: Sequence[int]
    ) -> None:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = ArgumentBuffer(self._packer)
        self._packer.fill(buffer.data, addresses, scalars)
        try:
            if _get_device() == self._index:
                self._run(buffer)
            else:
                with current(self._index):  # the default stream is the current device's
                    self._run(buffer)
        except self._error as error:
            # A thread that has not used the GPU yet has no context.
            if self._driver.ctxGetCurrent():
                raise self._failed(error) from None
            with current(self._index):
                try:
                    self._run(buffer)
                except self._error as second:
                    raise self._failed(second) from None
        self._free.append(buffer)

    def _run(self, buffer: ArgumentBuffer) -> None:
        stream = _get_stream(self._index)
        self._launch(self._function, self._grid, 1, 1, self._threads, 1, 1, self._shared, stream, buffer.pointers, 0)

    def _failed(self, error: Exception) -> BackendError:
        return BackendError(f"{self._entry}: the launch of {self._grid} programs failed: {error}")


# What torch.cuda.current_device and current_stream come down to, without the checks around them.
_get_device = torch._C._cuda_getDevice if hasattr(torch._C, "_cuda_getDevice") else torch.cuda.current_device
_get_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


class ArgumentBuffer:
    """Memory for the arguments of one launch, and the array of pointers to them that the driver takes."""

    def __init__(self, packer: Packer) -> None:
        self.data = packer.buffer()
        self._view = (ctypes.c_char * len(self.data)).from_buffer(self.data)
        base = ctypes.addressof(self._view)
        self._array = (ctypes.c_void_p * max(1, len(packer.offsets)))(*(base + o for o in packer.offsets))
        self.pointers = ctypes.addressof(self._array)


class current:
    """`with current(index):` makes device `index` and its primary context current, and restores what was.

    torch alone would not do: it does nothing where the device number is the same already, though a new thread has no
    context.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._guard = torch.cuda.device(index)

    def __enter__(self) -> None:
        self._guard.__enter__()
        importlib.import_module(_RUNTIME).setDevice(self._index)

    def __exit__(self, *error: Any) -> None:
        self._guard.__exit__(*error)
