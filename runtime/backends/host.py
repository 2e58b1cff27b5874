"""The CUDA backend on CPU tensors: generated CUDA C, built by g++ and run thread by thread."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kgen.codegen.program import Arg, Program
from kgen.runtime.backends.base import Generated, programs
from kgen.runtime.backends.launch import Built, Launch, ScalarValue, Slots, bf16_bits
from kgen.runtime.cache import Cache, temporary_folder
from kgen.runtime.layouts import Layout
from kgen.runtime.stages import build_stages


class CudaHost(Generated):
    """Runs the very source that a GPU would run, with barriers, shuffles and shared memory simulated."""

    name = "cuda-host"
    backend = "cuda"

    def why_unavailable(self, device: torch.device) -> str | None:
        from kgen.runtime import host_executor

        return host_executor.available()

    def load(self, program: Program, layout: Layout, device: torch.device, cache: Cache) -> Built:
        from kgen.codegen.cuda import host_source
        from kgen.runtime.host_executor import compile_host

        folder = cache.folder("host") or temporary_folder("host")

        def build(p: Program) -> Built:
            return _HostBuilt(p, compile_host(host_source(p), p.entry, cache_dir=folder))

        return build_stages(program, build, device)


class _HostBuilt(Built):
    def __init__(self, program: Program, compiled: Any) -> None:
        self.program = program
        self.compiled = compiled
        self.types = [_ctype(a) for a in program.args]

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        program, types = self.program, self.types
        assert program is not None
        slots = Slots.of(program.args, layout)
        grid = programs(program, layout)

        def launch(tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue], addresses: Sequence[int]) -> None:
            values = slots.fill_addresses(addresses, scalars)
            args = [make(value) for make, value in zip(types, values, strict=True)]
            self.compiled.launch(
                (grid * program.schedule.cluster, 1, 1), (program.schedule.threads, 1, 1), program.shared_bytes, args
            )

        return launch, grid


_CTYPES = {
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "bool": ctypes.c_bool,
}


def _ctype(arg: Arg) -> Any:
    if arg.kind == "tensor":
        return ctypes.c_void_p
    if arg.dtype.name == "bf16":
        return lambda value: ctypes.c_uint16(bf16_bits(value))
    if arg.dtype.name == "f16":
        return lambda value: ctypes.c_uint16(_f16_bits(value))
    return _CTYPES[arg.dtype.name]


def _f16_bits(value: ScalarValue) -> int:
    return int(torch.tensor(float(value), dtype=torch.float16).view(torch.int16).item()) & 0xFFFF
