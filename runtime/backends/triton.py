"""The Triton backend on a GPU: Triton compiles and launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as memoised
from typing import Any

import torch

from kgen.codegen.program import Program
from kgen.runtime.backends.base import Built, Generated, Launch, ScalarValue, Slots, programs
from kgen.runtime.cache import Cache, temporary_folder
from kgen.runtime.errors import BackendError
from kgen.runtime.layouts import Layout
from kgen.runtime.stages import build_stages


class Triton(Generated):
    """One compiled kernel for each variant, launched on torch's current stream by Triton's own launcher."""

    name = "triton"
    backend = "triton"

    def why_unavailable(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device; it needs an NVIDIA GPU, its driver and a CUDA build of torch"
        missing = missing_triton()
        if missing is None and _interprets():
            return "Triton runs as an interpreter here because TRITON_INTERPRET is set; unset it"
        return missing

    def load(self, program: Program, layout: Layout, device: torch.device, cache: Cache) -> Built:
        from kgen.runtime.triton_compile import compile_triton

        properties = torch.cuda.get_device_properties(device)
        index = device.index if device.index is not None else torch.cuda.current_device()
        folder = cache.folder("triton") or temporary_folder("triton")
        # Triton keeps a disk cache of its own: whether its compiler ran or not is not told.
        capability = 10 * properties.major + properties.minor

        def build(p: Program) -> Built:
            variant = p.stage.variant if p.stage is not None else layout.variant
            return _TritonBuilt(p, compile_triton(p, variant, capability, folder).handle, index)

        return build_stages(program, build, device)

    def multiprocessors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count


@memoised
def missing_triton() -> str | None:
    """One sentence where Triton cannot be imported."""
    try:
        import triton  # noqa: F401  # only whether it is there
    except ImportError as error:
        return f"Triton is not installed ({error}); install it with: pip install triton"
    return None


def _interprets() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


class _TritonBuilt(Built):
    def __init__(self, program: Program, handle: Any, index: int) -> None:
        self.program = program
        self.index = index
        with torch.cuda.device(index):
            try:
                handle._init_handles()  # loads the module into the current device's context
            except Exception as error:  # whatever Triton and the driver raise: too much shared memory, no room, ...
                raise BackendError(f"{program.entry}: Triton cannot load the kernel on cuda:{index}: {error}") from None
        self.run, self.function, self.metadata = handle.run, handle.function, handle.packed_metadata

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        assert self.program is not None
        slots = Slots.of(self.program.args, layout)
        grid = programs(self.program, layout)
        run, function, metadata, index = self.run, self.function, self.metadata, self.index

        def launch(tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue], addresses: Sequence[int]) -> None:
            # The launcher takes addresses as integers; the hooks of Triton's profiler are left out.
            arguments = slots.fill_addresses(addresses, scalars)
            stream = torch._C._cuda_getCurrentRawStream(index)
            run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments)

        def guarded(tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue], addresses: Sequence[int]) -> None:
            if torch._C._cuda_getDevice() == index:
                launch(tensors, scalars, addresses)
            else:
                with torch.cuda.device(index):
                    launch(tensors, scalars, addresses)

        return guarded, grid
