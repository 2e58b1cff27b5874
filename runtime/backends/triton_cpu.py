"""The Triton backend on CPU tensors: the generated Triton source, interpreted program by program in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kgen.codegen.program import Program
from kgen.runtime.backends.base import Generated, programs
from kgen.runtime.backends.launch import Built, Launch, ScalarValue, Slots
from kgen.runtime.backends.triton import missing_triton
from kgen.runtime.cache import Cache
from kgen.runtime.layouts import Layout
from kgen.runtime.stages import build_stages


class TritonInterpreter(Generated):
    """Runs the source that a GPU would compile."""

    name = "triton-interpreter"
    backend = "triton"

    def why_unavailable(self, device: torch.device) -> str | None:
        return missing_triton()

    def load(self, program: Program, layout: Layout, device: torch.device, cache: Cache) -> Built:
        return build_stages(program, _Interpreted, device)


class _Interpreted(Built):
    def __init__(self, program: Program) -> None:
        self.program = program

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        from kgen.runtime.triton_interpret import run

        program = self.program
        assert program is not None
        slots = Slots.of(program.args, layout)
        grid = programs(program, layout)

        def launch(tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue], addresses: Sequence[int]) -> None:
            values: list[Any] = list(slots.values)
            for i, k in slots.tensors:
                values[i] = tensors[k].detach()
            for i, k in slots.scalars:
                values[i] = scalars[k]
            run(program, grid, values)

        return launch, grid
