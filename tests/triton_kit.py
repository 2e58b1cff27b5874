"""Run a kernel's generated Triton on the CPU: from text and tensors to outputs, with any schedule."""

from __future__ import annotations

from pathlib import Path

import torch
from cuda_kit import Call, agree, oracle, prepare

from kgen.codegen.abi import grid_size
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.schedule import Schedule
from kgen.codegen.triton import emit
from kgen.runtime.triton_compile import Compiled, compile_triton
from kgen.runtime.triton_interpret import run as interpret

CACHE = Path(__file__).resolve().parents[1] / "build" / "triton-cache"


def emitted(c: Call, override: Schedule | None = None) -> Program:
    """The Triton program of the call."""
    where, _ = prepare(c)
    return emit(schedule_kernel(where.kernel, where.variant, "triton", override=override))


def built(c: Call, cap: int = 90, override: Schedule | None = None) -> Compiled:
    """The call's program compiled for compute capability `cap`."""
    where, _ = prepare(c)
    program = emit(schedule_kernel(where.kernel, where.variant, "triton", override=override))
    return compile_triton(program, where.variant, cap, CACHE)


def run(c: Call, override: Schedule | None = None) -> dict[str, torch.Tensor]:
    """The outputs of the generated kernel."""
    where, tensors = prepare(c)
    program = emit(schedule_kernel(where.kernel, where.variant, "triton", override=override))
    values = [
        tensors[a.name] if a.kind == "tensor" else c.scalars[a.name] if a.kind == "scalar" else where.value(a)
        for a in program.args
    ]
    interpret(program, grid_size(where.kernel, where.variant, program.schedule, where.dims), values)
    return {t.name: tensors[t.name] for t in c.kernel.tensors if t.role != "in"}


def check(c: Call, terms: int = 1, override: Schedule | None = None) -> None:
    """The generated kernel agrees with float64 to the rounding of its outputs and of f32 sums of `terms` terms."""
    agree(run(c, override), oracle(c), terms)
