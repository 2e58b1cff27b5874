"""The reference: the interpreter of the tile IR, in torch, on any device. Slow, and right by construction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kgen.codegen.interpret import interpret
from kgen.codegen.knobs import Knobs
from kgen.dsl import ir
from kgen.runtime.backends.base import Executor
from kgen.runtime.backends.launch import Built, Launch, ScalarValue
from kgen.runtime.cache import Cache
from kgen.runtime.layouts import Layout


class Reference(Executor):
    """Follows the numerics contract: f32 arithmetic (f64 where an operand is), one rounding at a store."""

    name = "reference"
    backend = "reference"
    general = True

    def why_unavailable(self, device: torch.device) -> str | None:
        return None

    def build(
        self, kernel: ir.Kernel, layout: Layout, device: torch.device, cache: Cache, knobs: Knobs | None = None
    ) -> Built:
        return _Interpreted(kernel)


class _Interpreted(Built):
    def __init__(self, kernel: ir.Kernel) -> None:
        self.kernel = kernel

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        return self._run, 0

    def _run(self, tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue], addresses: Sequence[int]) -> None:
        given = {t.name: x.detach() for t, x in zip(self.kernel.tensors, tensors, strict=True)}
        inputs = {t.name: given[t.name] for t in self.kernel.tensors if t.role != "out"}
        values = {s.name: v for s, v in zip(self.kernel.scalars, scalars, strict=True)}
        with torch.no_grad():
            for name, result in interpret(self.kernel, inputs, values, precision="f32").items():
                given[name].copy_(result)
