"""Does a backend compute what the kernel means? One call, held against the float64 interpreter under its derived bound.

Outputs are full of NaN beforehand, and what surrounds inputs and outputs in memory must not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kgen.codegen.interpret import interpret
from kgen.codegen.tolerance import Comparison, compare, error_bound
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir
from kgen.dsl.check import TensorParam
from kgen.dsl.errors import KgenError
from kgen.runtime.backends.launch import ScalarValue
from kgen.runtime.binding import examine
from kgen.runtime.errors import BackendError
from kgen.runtime.host_executor import HostCompileError, HostLaunchError
from kgen.runtime.kernel import Kernel
from kgen.runtime.nvrtc import CudaCompileError
from kgen.runtime.placement import Placed, place, poisoned
from kgen.runtime.triton_compile import TritonCompileError
from kgen.runtime.triton_interpret import TritonInterpretError


@dataclass(frozen=True)
class Question:
    """One call of a kernel, and what must come out of it.

    `values` are the arguments in order of the signature; `layout` is that of all tensors, or of each by name, where one
    that is not named is contiguous. `expected` and `bound` are float64 (integers as they are), by name of the output or
    `inout` tensor.
    """

    kernel: Kernel
    ir: ir.Kernel
    values: tuple[Any, ...]
    layout: str | Mapping[str, str]
    expected: Mapping[str, torch.Tensor]
    bound: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Answer:
    """What one backend made of a `Question`.

    status: `ok`; `wrong` (a value is out of its bound, or memory was touched that is not an output's); `refused` (the
    backend said in a KgenError that it cannot); `crashed` (any other exception). `ratio` is the largest error over its
    bound, `message` says what is wrong, `outputs` are the tensors that came out.
    """

    status: str
    ratio: float = 0.0
    message: str = ""
    free: int = 0
    total: int = 0
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


def ask(
    kernel: Kernel,
    arguments: Mapping[str, Any],
    layout: str | Mapping[str, str] = "contiguous",
    *,
    body: ir.Kernel | None = None,
    max_elements: int | None = None,
) -> Question:
    """The question that a call of `kernel` with `arguments`, its tensors laid out as `layout` says, puts to a backend.

    `layout`: see `Question`. `body` is the tile IR of such a call, where its arguments alone do not tell the dtypes of
    its outputs.
    `max_elements` is that of `interpret` and `error_bound`. Raises KgenError for arguments that do not fit.
    """
    values = list(kernel.binder.bind((), arguments))
    for i, p in enumerate(kernel.signature.params):
        if isinstance(p, TensorParam) and values[i] is not None:
            values[i] = place(values[i], _layout_for(p, layout)).tensor
    if body is None:
        spec, _ = examine(kernel.signature, values, None)
        body = kernel.specialize(spec)
    tensors, scalars = split(kernel, body, values)
    cut: dict[str, Any] = {} if max_elements is None else {"max_elements": max_elements}
    expected = interpret(body, tensors, scalars, precision="f64", **cut)
    return Question(kernel, body, tuple(values), layout, expected, error_bound(body, tensors, scalars, **cut))


def answer(question: Question, backend: str, *, repeat: bool = False) -> Answer:
    """What `backend` makes of `question`. With `repeat`, two more calls must give the same bits."""
    kernel, values = question.kernel, list(question.values)
    placed: dict[str, Placed] = {}
    for i, p in enumerate(kernel.signature.params):
        if isinstance(p, TensorParam) and values[i] is not None:
            reads = p.role == "in"
            placed[p.name] = place(values[i], _layout_for(p, question.layout), written=not reads, keep=reads)
            values[i] = placed[p.name].tensor
    device = next(iter(placed.values())).tensor.device
    outs: list[torch.Tensor] = []
    for t in question.ir.tensors:
        if t.role == "out":
            shape = tuple(question.expected[t.name].shape)
            placed[t.name] = poisoned(shape, TORCH[t.dtype], device, _named(t.name, question.layout))
            outs.append(placed[t.name].tensor)
    try:
        kernel(*values, backend=backend, out=outs or None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except KgenError as error:
        return Answer("crashed" if _broke(error) else "refused", message=str(error))
    except Exception as error:  # whatever a backend raises is its failure
        return Answer("crashed", message=f"{type(error).__name__}: {error}")
    result = _judge(question, placed)
    # A call is prepared, the next one looked up, the third recognised by its guards.
    for _ in range(2 if repeat and result.status == "ok" else 0):
        again = answer(question, backend)
        if again.status != "ok":
            return again
        for name, t in result.outputs.items():
            if not same_bits(t, again.outputs[name]):
                return Answer("wrong", message=f"{name}: another call with the same input gave other bits")
    return result


def _broke(error: KgenError) -> bool:
    """Whether `error` tells of generated code that does not compile or run, rather than of a limit that is known."""
    if isinstance(error, BackendError) and not isinstance(error, HostCompileError | HostLaunchError):
        return not any(known in str(error) for known in ("cannot run on", "programs are needed"))
    return isinstance(
        error, HostCompileError | HostLaunchError | CudaCompileError | TritonCompileError | TritonInterpretError
    )


def _judge(question: Question, placed: Mapping[str, Placed]) -> Answer:
    worst, free, total, problems = 0.0, 0, 0, []
    outputs = {}
    for t in question.ir.tensors:
        where = placed[t.name]
        if t.role == "in":
            if not where.unchanged():
                problems.append(f"{t.name}: the input or what surrounds it was overwritten")
            continue
        outputs[t.name] = where.tensor
        if not where.guard_intact():
            problems.append(f"{t.name}: memory around the output was overwritten")
        c = compare(where.tensor, question.expected[t.name], question.bound[t.name])
        worst, free, total = max(worst, c.ratio), free + c.free, total + c.total
        if not c.ok:
            problems.append(f"{t.name} {c}")
    return Answer("wrong" if problems else "ok", worst, "; ".join(problems), free, total, outputs)


def against(question: Question, expected: Mapping[str, torch.Tensor]) -> dict[str, Comparison]:
    """The interpreter's own float64 result held against an independent one, to 1e-9 of the largest magnitude.

    The outputs of a formula in float64 differ from the interpreter's by the order of sums only.
    """
    out = {}
    for name, want in expected.items():
        size = want.to(torch.float64).abs()
        finite = size[size.isfinite()]
        scale = float(finite.max()) if finite.numel() else 0.0
        allowed = torch.full(want.shape, 1e-9 * max(scale, 1e-300), dtype=torch.float64, device=want.device)
        out[name] = compare(question.expected[name], want, allowed)
    return out


def guilty(answers: Mapping[str, Answer]) -> list[str]:
    """The backends to blame: those that are wrong. Where all are, and agree with one another, the reference of float64
    stands alone, and `reference (float64)` is named instead."""
    bad = [b for b, a in answers.items() if a.status in ("wrong", "crashed")]
    ran = [b for b, a in answers.items() if a.status != "refused"]
    if len(bad) == len(ran) > 1 and all(answers[b].outputs for b in bad):
        first = answers[bad[0]].outputs
        if all(_alike(first, answers[b].outputs) for b in bad[1:]):
            return ["reference (float64)"]
    return bad


def _alike(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[n].to(torch.float64), b[n].to(torch.float64), rtol=1e-2, atol=1e-6, equal_nan=True) for n in a
    )


def split(
    kernel: Kernel, body: ir.Kernel, values: Sequence[Any]
) -> tuple[dict[str, torch.Tensor], dict[str, ScalarValue]]:
    """Values in order of the signature as the tensors and scalars that the interpreter takes."""
    by_name = dict(zip((p.name for p in kernel.signature.params), values, strict=True))
    return (
        {t.name: by_name[t.name] for t in body.tensors if t.role != "out"},
        {s.name: by_name[s.name] for s in body.scalars},
    )


def _layout_for(p: TensorParam, layout: str | Mapping[str, str]) -> str:
    own = _named(p.name, layout)
    return "sliced" if own in ("expanded", "scalar") and p.role != "in" else own


def _named(name: str, layout: str | Mapping[str, str]) -> str:
    return layout if isinstance(layout, str) else layout.get(name, "contiguous")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and the same bits."""
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    # Not `contiguous()`, which keeps the strides of dimensions of size 1.
    return torch.empty(t.numel(), dtype=t.dtype, device=t.device).copy_(t.detach().reshape(-1)).view(torch.uint8)
