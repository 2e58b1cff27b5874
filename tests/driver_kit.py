"""A CUDA driver that runs what is launched on the CPU, so that the path of a launch on a GPU runs without one.

It offers what `kgen.runtime.backends.driver` needs of libcuda, reads each launch out of memory as the driver does
(the configuration, the pointers to the arguments, the arguments), and runs it on the host executor.
"""

from __future__ import annotations

import base64
import ctypes
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kgen.codegen.cuda import host_source
from kgen.codegen.program import Program
from kgen.runtime import registry
from kgen.runtime.backends import driver
from kgen.runtime.backends.base import Generated
from kgen.runtime.backends.host import _ctype
from kgen.runtime.backends.launch import Built
from kgen.runtime.cache import Cache, cache_key, temporary_folder
from kgen.runtime.host_executor import HostLaunchError, available, compile_host
from kgen.runtime.layouts import Layout
from kgen.runtime.stages import build_stages

POINTER, UINT = ctypes.c_void_p, ctypes.c_uint
INVALID_CONTEXT = 201
ILLEGAL_ADDRESS = 700

needs_compiler = pytest.mark.skipif(available() is not None, reason="needs g++")


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("gridDimX", UINT), ("gridDimY", UINT), ("gridDimZ", UINT),
        ("blockDimX", UINT), ("blockDimY", UINT), ("blockDimZ", UINT),
        ("sharedMemBytes", UINT), ("hStream", POINTER), ("attrs", POINTER), ("numAttrs", UINT),
    ]  # fmt: skip


@dataclass
class Launched:
    """What the driver was told of one launch."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    attributes: int
    arguments: list[Any]
    nulls: list[int | None]  # the values of the parameters behind those of the program


@dataclass(repr=False)
class FakeDriver:
    """The state of the machine: `device` is the current one, `streams` the current stream of each; `nulls` parameters
    are added to each kernel, as Triton does; `fail` is the error code of the next launch, after `times` launches."""

    device: int = 0
    streams: dict[int, int] = field(default_factory=dict)
    nulls: int = 0
    seen: list[Launched] = field(default_factory=list)
    before: Callable[[], object] = lambda: None  # what happens inside the driver's call, before the arguments are read
    code: int = 0
    contextless: set[int] = field(default_factory=set)  # threads that have no context yet
    entered: list[int] = field(default_factory=list)  # devices that were made current for a launch
    programs: list[tuple[Program, Any]] = field(default_factory=list)
    clusters: int = 1000  # that run at a time
    asked: list[tuple[str, LaunchConfig]] = field(default_factory=list)  # about clusters

    def library(self) -> Any:
        """The functions, to be called through ctypes."""

        class Library:
            cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, POINTER, POINTER)(self._launch)
            cuCtxGetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, POINTER)(self._get_current)
            cuCtxSetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, POINTER)(self._set_current)
            cuDevicePrimaryCtxRetain = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, ctypes.c_int)(self._retain)
            cuGetErrorString = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, POINTER)(self._error)
            cuModuleLoadData = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)(self._load)
            cuModuleGetFunction = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, ctypes.c_char_p)(self._function)
            cuFuncSetAttribute = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, ctypes.c_int, ctypes.c_int)(lambda *_: 0)
            cuOccupancyMaxActiveClusters = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, POINTER)(self._clusters)

        return Library()

    def _launch(self, config_at: int, function: int, parameters: int, extra: int | None) -> int:
        if threading.get_ident() in self.contextless:
            return INVALID_CONTEXT
        if self.code:
            return self.code
        self.before()
        program, kernel = self.programs[function - 1]
        config = LaunchConfig.from_address(config_at)
        types = [_ctype(a) for a in program.args]
        at = (POINTER * (len(types) + self.nulls)).from_address(parameters)
        kinds = [ctypes.c_uint16 if not isinstance(t, type) else t for t in types]  # 16-bit floats, as their bits
        arguments = [kind.from_address(at[i]) for i, kind in enumerate(kinds)]
        nulls = [POINTER.from_address(at[len(types) + i]).value for i in range(self.nulls)]
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        values = [a.value for a in arguments]
        shared, stream = config.sharedMemBytes, config.hStream or 0
        self.seen.append(Launched(program.entry, grid, block, shared, stream, config.numAttrs, values, nulls))
        try:
            kernel.launch(grid, block, shared, [kind(v) for kind, v in zip(kinds, values, strict=True)])
        except HostLaunchError:
            return ILLEGAL_ADDRESS
        return 0

    def _clusters(self, out: int, function: int, config_at: int) -> int:
        config = LaunchConfig.from_buffer_copy(ctypes.string_at(config_at, ctypes.sizeof(LaunchConfig)))
        self.asked.append((self.programs[function - 1][0].entry, config))
        ctypes.c_int.from_address(out).value = self.clusters
        return self.code

    def _get_current(self, out: int) -> int:
        here = threading.get_ident() not in self.contextless
        POINTER.from_address(out).value = 1 if here else None
        return 0

    def _set_current(self, context: int) -> int:
        self.contextless.discard(threading.get_ident())
        return 0

    def _retain(self, out: int, index: int) -> int:
        POINTER.from_address(out).value = 1 + index
        return 0

    def _error(self, code: int, out: int) -> int:
        self._text = ctypes.create_string_buffer(f"error of the fake driver {code}".encode())
        POINTER.from_address(out).value = ctypes.addressof(self._text)
        return 0

    def _load(self, out: int, image: int) -> int:
        # Of this process or of another, as a cubin is.
        program: Program = pickle.loads(base64.b64decode(ctypes.string_at(image)))
        known = self.programs
        at = next((k for k, (q, _) in enumerate(known) if (q.source, q.entry) == (program.source, program.entry)), None)
        if at is None:
            at = len(known)
            compiled = compile_host(host_source(program), program.entry, cache_dir=temporary_folder("fake"))
            known.append((program, compiled))
        POINTER.from_address(out).value = at + 1
        return 0

    def _function(self, out: int, module: int, name: bytes) -> int:
        assert self.programs[module - 1][0].entry == name.decode()
        POINTER.from_address(out).value = module
        return 0


class OnFakeDriver(Generated):
    """The CUDA backend on CPU tensors, launched as on a GPU."""

    name = "cuda-fake"
    backend = "cuda"

    def __init__(self, machine: FakeDriver) -> None:
        self.machine = machine

    def why_unavailable(self, device: torch.device) -> str | None:
        return None

    def load(self, program: Program, layout: Layout, device: torch.device, cache: Cache) -> Built:
        def build(p: Program) -> Built:
            cubin = base64.b64encode(pickle.dumps(replace(p, lines=(), then=())))
            key = cache_key("fake", p.source, p.entry)
            cache.put(key, b"{}\n" + cubin)
            binary = driver.Binary(cubin, p.schedule.threads, p.shared_bytes, self.machine.nulls, key)
            return driver.Loaded(p, binary, torch.device("cuda", 0))

        return build_stages(program, build, device)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A machine whose `cuda` backend takes CPU tensors. Kernels must be loaded anew."""
    fake = FakeDriver()
    made = driver.Driver(fake.library())

    class current:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, fake.device = fake.device, self.index
            fake.entered.append(self.index)
            made.make_current(self.index)

        def __exit__(self, *_: Any) -> None:
            fake.device = self.before

    monkeypatch.setattr(driver, "driver", lambda: made)
    monkeypatch.setattr(driver, "loaded", {})
    monkeypatch.setattr(driver, "current", current)
    monkeypatch.setattr(driver, "current_device", lambda: fake.device)
    monkeypatch.setattr(driver, "current_stream", lambda index: fake.streams.get(index, 0))
    monkeypatch.setitem(registry._executors, ("cuda", "cpu"), OnFakeDriver(fake))
    return fake
