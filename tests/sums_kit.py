"""Run the launches of a kernel that sums over programs on the CPU, with any schedule and order of threads."""

from __future__ import annotations

from collections.abc import Callable

import cuda_kit
import torch
from cuda_kit import Call

from kgen.codegen import cuda, triton
from kgen.codegen.interpret import interpret
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.schedule import Schedule
from kgen.codegen.tolerance import compare, error_bound
from kgen.runtime.backends.base import programs
from kgen.runtime.backends.host import _ctype
from kgen.runtime.backends.launch import Slots
from kgen.runtime.host_executor import compile_host
from kgen.runtime.stages import stage_layouts
from kgen.runtime.triton_interpret import run as interpret_triton


def run(
    c: Call,
    backend: str,
    override: Schedule | None = None,
    seed: int | None = None,
    change: Callable[[str], str] = lambda source: source,
) -> dict[str, torch.Tensor]:
    """The outputs of all launches, under the default or a given schedule, with poisoned workspaces; `change` is made
    to CUDA text."""
    where, tensors = cuda_kit.prepare(c)
    emitter = cuda if backend == "cuda" else triton
    program: Program = emitter.emit(schedule_kernel(where.kernel, where.variant, backend, override=override))
    layouts, workspaces = stage_layouts(program, where)
    spaces = [torch.full(w.shape, 0 if w.zeroed else 1000, dtype=w.dtype) for w in workspaces]
    everything = [*(tensors[t.name] for t in where.kernel.tensors), *spaces]
    scalars = [c.scalars[s.name] for s in where.kernel.scalars]
    for p, stage in zip(program.launches, layouts, strict=True):
        grid = programs(p, stage)
        slots = Slots.of(p.args, stage)
        if backend == "cuda":
            values = slots.fill(everything, scalars)
            args = [_ctype(a)(v) for a, v in zip(p.args, values, strict=True)]
            built = compile_host(change(cuda.host_source(p)), p.entry, cache_dir=cuda_kit.CACHE)
            built.launch(
                (grid * p.schedule.cluster, 1, 1), (p.schedule.threads, 1, 1), p.shared_bytes, args, order_seed=seed
            )
        else:
            by_name = dict(zip((t.name for t in stage.kernel.tensors), everything, strict=True))
            interpret_triton(p, grid, [
                by_name[a.name] if a.kind == "tensor" else c.scalars[a.name] if a.kind == "scalar" else stage.value(a)
                for a in p.args
            ])  # fmt: skip
    return {t.name: tensors[t.name] for t in c.kernel.tensors if t.role != "in"}


def within_bounds(c: Call, got: dict[str, torch.Tensor]) -> None:
    exact = interpret(c.kernel, c.tensors, c.scalars, precision="f64")
    bound = error_bound(c.kernel, c.tensors, c.scalars)
    for name, want in exact.items():
        result = compare(got[name], want, bound[name])
        assert result.ok, f"{name}: {result}"
