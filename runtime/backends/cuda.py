"""The CUDA backend on a GPU: NVRTC compiles, the driver launches, both through CuPy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.dsl import ir
from kgen.runtime import events
from kgen.runtime.backends.base import Built, Executor, Launch, Packer, ScalarValue, Slots, programs
from kgen.runtime.cache import Cache, cache_key
from kgen.runtime.errors import BackendError
from kgen.runtime.layouts import Layout

_STATIC_SHARED = 48 * 1024  # what a block may have without asking


class Cuda(Executor):
    """Compiles to a cubin for the device's architecture, loads it into each device's primary context, and launches on
    torch's current stream."""

    name = "cuda"
    backend = "cuda"

    def why_unavailable(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device; it needs an NVIDIA GPU, its driver and a CUDA build of torch"
        return _missing_cupy()

    def build(self, kernel: ir.Kernel, layout: Layout, device: torch.device, cache: Cache) -> Built:
        from kgen.codegen.cuda import emit

        properties = torch.cuda.get_device_properties(device)
        arch = f"sm_{properties.major}{properties.minor}"
        scheduled = schedule_kernel(
            layout.kernel, layout.variant, "cuda", num_sms=properties.multi_processor_count
        )
        program = emit(scheduled)
        cubin, resources = compiled(program, arch, cache)
        return _Loaded(program, cubin, resources, device)


@cache
def _missing_cupy() -> str | None:
    major = (torch.version.cuda or "13").split(".")[0]
    try:
        from cupy_backends.cuda.api import driver  # noqa: F401  # only whether it is there
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
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
        from cupy_backends.cuda.api import driver

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
        self._launch = loaded._driver.launchKernel
        self._context = loaded._driver.ctxGetCurrent
        self._error = loaded._driver.CUDADriverError
        self._function, self._index = loaded._function, loaded.index
        self._grid, self._threads, self._shared = grid, program.schedule.threads, program.shared_bytes
        self._slots, self._entry = slots, program.entry
        self._packer = Packer(program.args)
        # Argument buffers that no call is using. The driver copies arguments, so a buffer is free after the launch.
        self._free: list[ArgumentBuffer] = []

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue]) -> None:
        index = self._index
        # A thread that has not used the GPU yet has no context, and the default stream is the current device's.
        if torch._C._cuda_getDevice() != index or not self._context():
            with current(index):
                self._run(tensors, scalars)
        else:
            self._run(tensors, scalars)

    def _run(self, tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue]) -> None:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = ArgumentBuffer(self._packer)
        self._packer.pack_into(buffer.data, self._slots.fill(tensors, scalars))
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        try:
            self._launch(
                self._function, self._grid, 1, 1, self._threads, 1, 1, self._shared, stream, buffer.pointers, 0
            )
        except self._error as error:
            raise BackendError(f"{self._entry}: the launch of {self._grid} programs failed: {error}") from None
        self._free.append(buffer)


class ArgumentBuffer:
    """Memory for the arguments of one launch, and the array of pointers to them that the driver takes."""

    def __init__(self, packer: Packer) -> None:
        import ctypes

        self.data = bytearray(max(1, packer.size))
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
        from cupy_backends.cuda.api import runtime

        self._guard.__enter__()
        runtime.setDevice(self._index)

    def __exit__(self, *error: Any) -> None:
        self._guard.__exit__(*error)
