"""The Triton backend on CPU tensors: the generated source, program by program, by Triton's semantics over numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.dsl import ir
from kgen.runtime import triton_interpret
from kgen.runtime.backends.base import Built, Executor, Launch, ScalarValue, Slots, programs
from kgen.runtime.backends.triton import missing_triton
from kgen.runtime.cache import Cache
from kgen.runtime.layouts import Layout


class TritonInterpreter(Executor):
    """Runs the source that a GPU would compile."""

    name = "triton-interpreter"
    backend = "triton"

    def why_unavailable(self, device: torch.device) -> str | None:
        return missing_triton()

    def build(self, kernel: ir.Kernel, layout: Layout, device: torch.device, cache: Cache) -> Built:
        from kgen.codegen.triton.emit import emit

        return _Interpreted(emit(schedule_kernel(layout.kernel, layout.variant, "triton")))


class _Interpreted(Built):
    def __init__(self, program: Program) -> None:
        self.program = program

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        program = self.program
        assert program is not None
        slots = Slots.of(program.args, layout)
        grid = programs(program, layout)

        def launch(tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue]) -> None:
            arguments: list[Any] = list(slots.values)
            for i, k in slots.tensors:
                arguments[i] = tensors[k].detach()
            for i, k in slots.scalars:
                arguments[i] = scalars[k]
            triton_interpret.run(program, grid, arguments)

        return launch, grid
