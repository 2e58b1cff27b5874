"""The Triton backend on a GPU: Triton compiles and launches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache as memoised
from typing import Any

import torch

from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.runtime import events
from kgen.runtime.backends.base import Built, Executor, Launch, ScalarValue, Slots, programs
from kgen.runtime.cache import Cache
from kgen.runtime.errors import BackendError
from kgen.runtime.generated import import_source
from kgen.runtime.layouts import Layout

# Triton's compiler keeps state in the process, and its interpreter changes the language that the compiler reads.
TRITON_LOCK = threading.RLock()


class Triton(Executor):
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

    def build(self, kernel: ir.Kernel, layout: Layout, device: torch.device, cache: Cache) -> Built:
        from kgen.codegen.triton.emit import emit

        properties = torch.cuda.get_device_properties(device)
        scheduled = schedule_kernel(
            layout.kernel, layout.variant, "triton", num_sms=properties.multi_processor_count
        )
        program = emit(scheduled)
        index = device.index if device.index is not None else torch.cuda.current_device()
        with torch.cuda.device(index):
            return _TritonBuilt(program, _compile(program, layout.variant, device, cache), index)


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


def _compile(program: Program, variant: Variant, device: torch.device, cache: Cache) -> Any:
    """Triton's compiled kernel for the current device, its module loaded. Triton keeps a disk cache of its own."""
    from triton import compile
    from triton.compiler import ASTSource

    from kgen.codegen.triton.intrinsics import SIGNATURE

    function = getattr(import_source(program.source, program.entry, cache), program.entry)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[Any]] = {}
    for i, (name, a) in enumerate(zip(function.arg_names, program.args, strict=True)):
        kind = SIGNATURE[a.dtype.name]
        signature[name] = f"*{kind}" if a.kind == "tensor" else kind
        if a.kind == "tensor" and variant.tensor(a.name).align >= 16:
            attributes[(i,)] = [["tt.divisibility", 16]]
    with TRITON_LOCK:
        try:
            done = compile(
                ASTSource(function, signature, {}, attributes), options={"num_warps": program.schedule.threads // 32}
            )
            done._init_handles()
        except Exception as error:  # whatever its passes, ptxas or the driver raise
            text = str(error).strip() or type(error).__name__
            raise BackendError(
                f"Triton cannot compile the generated kernel '{program.entry}' for {device}: {text}"
            ) from None
    events.count("compile:triton")
    return done


class _TritonBuilt(Built):
    def __init__(self, program: Program, compiled: Any, index: int) -> None:
        self.program = program
        self.compiled = compiled
        self.index = index

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        assert self.program is not None
        slots = Slots.of(self.program.args, layout)
        grid = programs(self.program, layout)
        compiled, index = self.compiled, self.index
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

        def launch(tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue]) -> None:
            # The launcher takes addresses as integers; the hooks of Triton's profiler get no metadata.
            arguments = slots.fill(tensors, scalars)
            stream = torch._C._cuda_getCurrentRawStream(index)
            run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments)

        def guarded(tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue]) -> None:
            if torch._C._cuda_getDevice() == index:
                launch(tensors, scalars)
            else:
                with torch.cuda.device(index):
                    launch(tensors, scalars)

        return guarded, grid
