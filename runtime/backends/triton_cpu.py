"""The Triton backend on CPU tensors: Triton's own interpreter, program by program, in numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.dsl import ir
from kgen.runtime.backends.base import Built, Executor, Launch, ScalarValue, Slots, programs, round_scalar
from kgen.runtime.backends.triton import TRITON_LOCK, missing_triton
from kgen.runtime.cache import Cache
from kgen.runtime.errors import BackendError
from kgen.runtime.generated import import_source
from kgen.runtime.layouts import Layout


class TritonInterpreter(Executor):
    """Runs the source that a GPU would compile."""

    name = "triton-interpreter"
    backend = "triton"

    def why_unavailable(self, device: torch.device) -> str | None:
        return missing_triton()

    def build(self, kernel: ir.Kernel, layout: Layout, device: torch.device, cache: Cache) -> Built:
        from kgen.codegen.triton.emit import emit

        program = emit(schedule_kernel(layout.kernel, layout.variant, "triton"))
        with TRITON_LOCK:
            module = import_source(program.source, program.entry, cache)
        return _Interpreted(program, getattr(module, program.entry))


class _Interpreted(Built):
    def __init__(self, program: Program, function: Any) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.program = program
        self.function = InterpretedFunction(function.fn)

    def prepare(self, layout: Layout) -> tuple[Launch, int]:
        program, function = self.program, self.function
        assert program is not None
        slots = Slots.of(program.args, layout)
        grid = programs(program, layout)

        def launch(tensors: Sequence[torch.Tensor], scalars: Sequence[ScalarValue]) -> None:
            arguments: list[Any] = list(slots.values)
            for i, k in slots.tensors:
                arguments[i] = tensors[k].detach()
            for i, k in slots.scalars:
                arguments[i] = round_scalar(scalars[k], program.args[i].dtype)
            with TRITON_LOCK, _device_calls():
                try:
                    function.run(*arguments, grid=(grid,), warmup=False)
                except Exception as error:  # whatever numpy and the interpreter raise
                    raise BackendError(f"{program.entry}: the Triton interpreter failed: {error}") from error

        return launch, grid


@contextmanager
def _device_calls() -> Iterator[None]:
    """Inside, a call of a `@triton.jit` function is interpreted, `tl.sum` and its like included.

    Triton decides that when it is imported, for the whole process (TRITON_INTERPRET). Here compiling and interpreting
    share a process, so what the interpreter changes in `triton.language` is also taken back after each call, which Triton
    itself does not do.
    """
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang
    from triton.runtime.jit import JITFunction

    interpreted: dict[Any, Any] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        body = interpreted.get(self.fn)
        if body is None:
            body = interpreted[self.fn] = InterpretedFunction(self.fn).rewrite()
        scope = _patch_lang(self.fn)
        try:
            return body(*args, **kwargs)
        finally:
            scope.restore()

    saved = JITFunction.__call__
    JITFunction.__call__ = call  # type: ignore[method-assign]  # taken back below
    try:
        yield
    finally:
        JITFunction.__call__ = saved  # type: ignore[method-assign]  # as it was
