"""Run a kernel's generated CUDA C on the CPU: from text and tensors to outputs, with any schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kgen.codegen.abi import grid_size
from kgen.codegen.cuda import emit, host_source
from kgen.codegen.interpret import interpret
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.schedule import Schedule
from kgen.codegen.shapes import bind_dims, full_shape, leading_shapes
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir
from kgen.dsl.check import elaborate, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.parser import parse_text
from kgen.runtime.backends.base import round_scalar
from kgen.runtime.backends.host import _ctype
from kgen.runtime.backends.launch import Slots
from kgen.runtime.binding import Binder, examine
from kgen.runtime.host_executor import compile_host
from kgen.runtime.layouts import Layout, Memory, layout

CACHE = Path(__file__).resolve().parents[1] / "build" / "host-cache"


@dataclass
class Call:
    """One kernel with its arguments."""

    kernel: ir.Kernel
    tensors: dict[str, torch.Tensor]  # inputs and inout, by name
    scalars: dict[str, float | int | bool]


def call(text: str, name: str, **arguments: Any) -> Call:
    """Kernel `name` of `text`, specialised to the arguments."""
    module = parse_text(text, f"{name}.kdsl")
    declared = next(k for k in module.kernels if k.name == name)
    signature = signature_of(declared, Diagnostics())
    values = Binder(signature).bind((), arguments)
    spec, _ = examine(signature, values, None)
    kernel = elaborate(module, name, spec)
    by_name = dict(zip((p.name for p in signature.params), values, strict=True))
    scalars = {p.name: round_scalar(by_name[p.name], p.dtype) for p in kernel.scalars}
    tensors = {t.name: by_name[t.name] for t in kernel.tensors if t.role != "out"}
    return Call(kernel, tensors, scalars)


def prepare(c: Call) -> tuple[Layout, dict[str, torch.Tensor]]:
    """The layout of the call and all its tensors: new outputs (filled with a mark), copies of what is overwritten."""
    shapes = {n: t.shape for n, t in c.tensors.items()}
    dims = bind_dims(c.kernel, shapes)
    leading = leading_shapes(c.kernel, shapes)
    tensors: dict[str, torch.Tensor] = {}
    for t in c.kernel.tensors:
        if t.role == "out":
            shape = full_shape(t, {**dims, **{n: int(v) for n, v in c.kernel.consts}}, leading)
            tensors[t.name] = torch.full(shape, 77, dtype=TORCH[t.dtype])
        elif t.role == "inout":
            own = torch.empty_strided(c.tensors[t.name].shape, c.tensors[t.name].stride(), dtype=TORCH[t.dtype])
            tensors[t.name] = own.copy_(c.tensors[t.name])
        else:
            tensors[t.name] = c.tensors[t.name]
    memory = {n: Memory(tuple(t.shape), t.stride(), t.element_size(), t.data_ptr() % 16) for n, t in tensors.items()}
    return layout(c.kernel, dims, memory), tensors


def compiled(c: Call, override: Schedule | None = None) -> Program:
    """The CUDA program of the call."""
    where, _ = prepare(c)
    return emit(schedule_kernel(where.kernel, where.variant, "cuda", override=override))


def run(c: Call, override: Schedule | None = None, seed: int | None = None) -> dict[str, torch.Tensor]:
    """The outputs of the generated kernel; `seed` shuffles the order of threads."""
    where, tensors = prepare(c)
    program = emit(schedule_kernel(where.kernel, where.variant, "cuda", override=override))
    launch(c, where, program, tensors, seed)
    return {t.name: tensors[t.name] for t in c.kernel.tensors if t.role != "in"}


def launch(
    c: Call, where: Layout, program: Program, tensors: Mapping[str, torch.Tensor], seed: int | None = None
) -> None:
    """Run `program`, which has one launch, on `tensors`."""
    kernel = compile_host(host_source(program), program.entry, cache_dir=CACHE)
    values = Slots.of(program.args, where).fill(
        [tensors[t.name] for t in where.kernel.tensors], [c.scalars[s.name] for s in where.kernel.scalars]
    )
    args = [_ctype(a)(v) for a, v in zip(program.args, values, strict=True)]
    grid = grid_size(where.kernel, where.variant, program.schedule, where.dims)
    kernel.launch(
        (grid * program.schedule.cluster, 1, 1),
        (program.schedule.threads, 1, 1),
        program.shared_bytes,
        args,
        order_seed=seed,
    )


def oracle(c: Call) -> dict[str, torch.Tensor]:
    """The outputs in float64."""
    return interpret(c.kernel, c.tensors, c.scalars, precision="f64")


def check(c: Call, terms: int = 1, override: Schedule | None = None, seed: int | None = None) -> None:
    """The generated kernel agrees with float64 to the rounding of its outputs and of f32 sums of `terms` terms."""
    agree(run(c, override, seed), oracle(c), terms)


def agree(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], terms: int = 1) -> None:
    """Every output within half a unit of its dtype, plus what `terms` + 16 f32 operations may add up to, relative to
    the largest magnitude of the output (sums cancel)."""
    for name, want in expected.items():
        got = actual[name]
        if not got.dtype.is_floating_point:
            assert torch.equal(got, want.to(got.dtype)), name
            continue
        unit = torch.finfo(got.dtype).eps / 2
        f32 = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
        finite = want[torch.isfinite(want)].abs()
        scale = float(finite.max()) if finite.numel() else 1.0
        atol = scale * f32 * (16 + terms)
        tiny = torch.finfo(got.dtype).tiny
        torch.testing.assert_close(
            got.double(),
            want.double(),
            rtol=unit * 1.01,
            atol=atol + tiny,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )
