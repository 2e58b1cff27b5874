"""What an executor is: something that compiles a kernel for a class of calls and runs it on tensors."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from kgen.codegen.abi import grid_size, sum_grid
from kgen.codegen.knobs import Knobs
from kgen.codegen.machines import too_old
from kgen.codegen.pipeline import CAPABILITY, MULTIPROCESSORS, schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.schedule import Scheduled
from kgen.codegen.torch_dtypes import rounded
from kgen.dsl import ir
from kgen.dsl.dtypes import DType
from kgen.runtime.backends.launch import Built, ScalarValue
from kgen.runtime.cache import Cache
from kgen.runtime.errors import BackendError
from kgen.runtime.layouts import Layout

_GRID_LIMIT = 2**31 - 1


class Executor(ABC):
    """One backend on one kind of device."""

    name: str  # as in `kgen.backends()` and in events: "cuda", "cuda-host", ...
    backend: str  # "cuda" | "triton" | "reference"
    general: bool = False  # one build serves every layout

    @abstractmethod
    def why_unavailable(self, device: torch.device) -> str | None:
        """None where it can run on `device`, else one sentence that says what is missing and what to install."""

    @abstractmethod
    def build(
        self, kernel: ir.Kernel, layout: Layout, device: torch.device, cache: Cache, knobs: Knobs | None = None
    ) -> Built:
        """`kernel` compiled for `layout.variant`, with the default schedule turned by `knobs`. `layout.kernel` is
        `kernel` with merged indices. Raises ScheduleError where the knobs do not fit."""


class Generated(Executor):
    """An executor of generated programs."""

    def build(
        self, kernel: ir.Kernel, layout: Layout, device: torch.device, cache: Cache, knobs: Knobs | None = None
    ) -> Built:
        scheduled = schedule_kernel(
            layout.kernel,
            layout.variant,
            self.backend,
            num_sms=self.multiprocessors(device),
            knobs=knobs,
            capability=self.capability(device),
        )
        keep_templates(cache)
        return self.load(emitter(self.backend)(scheduled), layout, device, cache)

    @abstractmethod
    def load(self, program: Program, layout: Layout, device: torch.device, cache: Cache) -> Built:
        """`program`, which was emitted for `layout.variant`, compiled and ready to run on `device`."""

    def multiprocessors(self, device: torch.device) -> int:
        """Those of `device`: what the number of programs of a sum depends on."""
        return MULTIPROCESSORS

    def capability(self, device: torch.device) -> int:
        """The compute capability of `device`, 90 for sm_90; of what only simulates one, that of the default."""
        return CAPABILITY


@functools.cache
def keep_templates(cache: Cache) -> None:
    """Have templates compiled once for all processes: to print a kernel takes less than to read its templates."""
    from jinja2 import FileSystemBytecodeCache

    from kgen.codegen.templating import environment

    folder = cache.folder("templates")
    if folder is not None:
        environment().bytecode_cache = FileSystemBytecodeCache(str(folder))


def emitter(backend: str) -> Callable[[Scheduled], Program]:
    """What makes the programs of `backend`, `cuda` or `triton`."""
    # Imported on demand: each brings its templates.
    if backend == "cuda":
        from kgen.codegen.cuda import emit

        return emit
    from kgen.codegen.triton import emit

    return emit


def programs(program: Program, layout: Layout) -> int:
    """The number of programs, each of `Schedule.cluster` blocks of the grid. Raises BackendError where no device could
    launch them."""
    if program.stage is not None and program.stage.sums is not None:
        known = {**dict(layout.variant.dims), **layout.dims}
        grid = sum_grid(layout.kernel, program.schedule, program.stage.sums, known)
    else:
        grid = grid_size(layout.kernel, layout.variant, program.schedule, layout.dims)
    if grid * program.schedule.cluster > _GRID_LIMIT:
        raise BackendError(
            f"{layout.kernel.name}: {grid} programs are needed, and a device launches at most {_GRID_LIMIT}; "
            f"split the call along its first dimension"
        )
    return grid


def capability_of(device: torch.device) -> int:
    """The compute capability of a GPU: 90 for sm_90."""
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor


def missing_gpu(device: torch.device) -> str | None:
    """One sentence where torch sees no GPU, or `device` is one that code is not generated for."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; it needs an NVIDIA GPU, its driver and a CUDA build of torch"
    return too_old(capability_of(device))


def round_scalar(value: ScalarValue, dtype: DType) -> ScalarValue:
    """`value` rounded to its declared dtype, as any call would round it."""
    if dtype.kind != "float" or dtype.bits == 64:
        return value
    return float(rounded(torch.tensor(float(value), dtype=torch.float64), dtype).item())
