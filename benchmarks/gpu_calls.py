"""One task of `gpu_check.py`: its calls on both backends, held against float64 under the derived bound.

Of a gradient three things are judged. The training form is one call, with its residuals among the outputs. The derived
backward is another, on the residuals that this backend's training form gave: both like any kernel, outputs full of NaN
beforehand and everything around them guarded. Then the same gradient is asked of autograd, which must give the bits of
that call, and, where a formula is well conditioned, agree with torch's own derivative of it: the one judge that a wrong
derivation does not pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gpu_cases as cases
import torch
from autograd_kit import as_tuple, worst  # pyright: ignore[reportMissingImports]  # through the path of gpu_cases

from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir
from kgen.dsl.check import TensorParam
from kgen.dsl.dtypes import DTYPES
from kgen.runtime import autograd
from kgen.runtime.autograd import Training
from kgen.runtime.binding import examine
from kgen.runtime.differential import Answer, Question, answer, ask, guilty
from kgen.runtime.kernel import Kernel
from kgen.runtime.placement import place

BACKENDS = ("cuda", "triton")
Record = dict[str, Any]

# Where torch's derivative of the formula is asked: rows of one and two elements cancel in it, one row laid out with
# stride 0 has equal elements, and larger ones are slow.
FORMULA_WIDTHS = range(7, 4097)
FORMULA_ELEMENTS = 1 << 20
# What a whole gradient is less than, beside the gradient that comes in, where it cancels: that of a sum of softmaxes is
# zero, and what is left of it are roundings, of which the formula says nothing.
CANCELLED = 2.0**-24


@dataclass(frozen=True)
class Options:
    """How much is called: the largest tensor in elements, rows for each direction, the seed of the values."""

    limit: int
    rows: dict[str, tuple[int, ...]]
    seed: int
    backends: tuple[str, ...] = BACKENDS


def perform(target: cases.Target, task: cases.Task, device: torch.device, o: Options, big: Any) -> Iterator[Record]:
    """All calls of one task on both backends, as records. `big` is held while a large reference is computed."""
    base = {
        "target": target.name, "direction": task.direction, "dtype": task.dtype, "width": task.width,
        "layout": f"{task.layout}/{task.gradient_layout}" if task.gradient_layout else task.layout,
    }  # fmt: skip
    if task.wanted:
        base["of"] = ", ".join(task.wanted)
    for m, values, fits in cases.calls(target, task, o.limit, o.rows[task.direction]):
        record = base | {"rows": m, "values": values}
        if not fits:
            yield record | {"status": "skipped", "backend": "both"}
            continue
        large = m * task.width > 1 << (23 if task.direction == cases.GRADIENT else 24)
        if large:
            big.acquire()  # a few large references fill the memory
        try:
            given = cases.arguments(target, task, m, values, device, o.seed)
            run = _gradient if task.direction == cases.GRADIENT else _forward
            answers: dict[str, Answer] = {}
            for backend, got, seconds in run(target, task, given, m, values, device, o):
                answers[backend] = got
                yield record | {
                    "backend": backend, "status": got.status, "ratio": got.ratio, "message": got.message[:600],
                    "free": got.free, "total": got.total, "seconds": seconds,
                }  # fmt: skip
            if blame := guilty(answers):
                yield record | {"backend": "both", "status": "blame", "message": ", ".join(blame)}
        except Exception as error:  # the check itself failed: said in the report, and the next call goes on
            message = f"{type(error).__name__}: {error}"[:600]
            yield record | {"backend": "both", "status": "check failed", "message": message}
        finally:
            if large:
                big.release()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


Answers = Iterator[tuple[str, Answer, float]]


def _cut(device: torch.device, direction: str) -> int:
    """Elements that the reference takes at a time; a backward kernel holds some dozens of values of them."""
    if device.type != "cuda":
        return 1 << 20
    return 1 << (22 if direction == cases.GRADIENT else 24)


def _forward(
    target: cases.Target, task: cases.Task, given: dict[str, Any], m: int, values: str, device: torch.device, o: Options
) -> Answers:
    body = _body(target.load(), task, given, device)
    question = ask(target.load(), given, task.layout, body=body, max_elements=_cut(device, cases.FORWARD))
    for backend in o.backends:
        began = time.perf_counter()
        got = answer(question, backend, repeat=m == cases.VARIED[cases.FORWARD] and values == "normal")
        yield backend, got, time.perf_counter() - began


def _body(kernel: Kernel, task: cases.Task, given: dict[str, Any], device: torch.device) -> ir.Kernel:
    """The tile IR of the call. A dtype variable that only outputs have stands for the dtype of the task."""
    signature, values = kernel.signature, kernel.binder.bind((), given)
    known = {n: TORCH[d] for n, d in DTYPES.items()}
    known |= {p.dtype: v.dtype for p, v in zip(signature.params, values, strict=True) if isinstance(v, torch.Tensor)}
    out = [torch.empty(0, dtype=known.get(p.dtype, task.torch_dtype), device=device) for p in signature.outputs]
    return kernel.specialize(examine(signature, values, out)[0])


# ---- gradients -----------------------------------------------------------------------------------------------------


def _gradient(
    target: cases.Target, task: cases.Task, given: dict[str, Any], m: int, values: str, device: torch.device, o: Options
) -> Answers:
    kernel = target.load()
    bound = kernel.binder.bind((), given)
    names = [p.name for p in kernel.signature.params]
    t = autograd.training(kernel, bound, tuple(names.index(n) for n in task.wanted))
    layouts = {p.name: task.layout for p in kernel.signature.params if isinstance(p, TensorParam)}
    forward = ask(t.forward, {names[i]: bound[i] for i in t.inputs}, layouts, max_elements=_cut(device, cases.GRADIENT))
    seeds = _seeds(t, forward, values, device, o.seed)
    layouts |= dict.fromkeys(seeds, task.gradient_layout)
    repeat = m == cases.VARIED[cases.GRADIENT] and values == "normal"
    known: dict[str, torch.Tensor] = {}
    question: Question | None = None
    for backend in o.backends:
        began = time.perf_counter()
        trained = answer(forward, backend)
        if trained.status != "ok":
            yield backend, _said(trained, "the training form: "), time.perf_counter() - began
            continue
        read = {p.name for p in t.backward.signature.params} & set(trained.outputs)
        if question is None or not _same(known, trained.outputs):  # a reference serves both where residuals agree
            known = {n: trained.outputs[n] for n in read}
            question = _backward_question(t, given, known, seeds, layouts, _cut(device, cases.GRADIENT))
        got = answer(question, backend, repeat=repeat)
        if got.status == "ok" and (
            problem := _by_autograd(target, task, t, given, layouts, seeds, got, values, backend)
        ):
            got = Answer("wrong", got.ratio, problem, got.free, got.total, got.outputs)
        yield backend, got, time.perf_counter() - began


def _seeds(t: Training, forward: Question, values: str, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """A gradient for each output that has one, by name among the parameters of the backward kernel."""
    g = torch.Generator(device).manual_seed(seed + 1)
    dtypes = {d.name: TORCH[d.dtype] for d in forward.ir.tensors}
    out = {}
    for i, (name, own) in enumerate(t.derived.cotangents.items()):
        made = torch.randn(forward.expected[name].shape, generator=g, device=device, dtype=dtypes[name])
        out[own] = cases.revalue(made, values, seed + 70 + i)
    return out


def _backward_question(
    t: Training,
    given: dict[str, Any],
    results: dict[str, Any],
    seeds: dict[str, Any],
    layouts: dict[str, str],
    cut: int,
) -> Question:
    """The call of the backward kernel: inputs and gradients that come in laid out as told, results contiguous, as they
    are in autograd."""
    known = given | results | seeds
    arguments = {p.name: known[p.name] for p in t.backward.signature.params if p.name in known}
    return ask(t.backward, arguments, layouts, max_elements=cut)


def _by_autograd(
    target: cases.Target, task: cases.Task, t: Training, given: dict[str, Any], layouts: dict[str, str],
    seeds: dict[str, torch.Tensor], got: Answer, values: str, backend: str,
) -> str:  # fmt: skip
    """What is wrong with the gradients that autograd gives for the same call; nothing if they are as they must be."""
    kernel: Kernel = target.load()
    leaves: dict[str, Any] = {
        n: place(v, layouts[n]).tensor.requires_grad_(n in task.wanted) if isinstance(v, torch.Tensor) else v
        for n, v in given.items()
    }
    incoming = {n: place(v, task.gradient_layout).tensor for n, v in seeds.items()}
    named = dict(
        zip((p.name for p in kernel.signature.outputs), as_tuple(kernel(**leaves, backend=backend)), strict=True)
    )
    carrying = [n for n, r in named.items() if r.requires_grad]
    if set(carrying) != set(t.derived.cotangents):
        return f"outputs {carrying} require grad, and {list(t.derived.cotangents)} have one"
    wanted = [leaves[n] for n in task.wanted]
    ups = [incoming[t.derived.cotangents[n]] for n in carrying]
    found = dict(zip(task.wanted, torch.autograd.grad([named[n] for n in carrying], wanted, ups), strict=True))
    for name, g in found.items():
        if not _same({"": g}, {"": got.outputs[t.derived.gradients[name]]}):
            return f"gradient of {name}: autograd gave other bits than the backward kernel alone"
    return _by_formula(target, task, leaves, carrying, ups, found) if values == "normal" else ""


def _by_formula(
    target: cases.Target, task: cases.Task, leaves: dict[str, Any], carrying: list[str], ups: list[torch.Tensor],
    found: dict[str, torch.Tensor],
) -> str:  # fmt: skip
    size = max(v.numel() for v in leaves.values() if isinstance(v, torch.Tensor))
    if target.formula is None or task.dtype not in ("f32", *target.own_dtypes):
        return (
            ""  # 16-bit values are often equal, and torch's functions differ in whom the gradient of a maximum goes to
        )
    if task.width not in FORMULA_WIDTHS or size > FORMULA_ELEMENTS or size < 2 * task.width:
        return ""
    doubles = {
        n: v.detach().double().requires_grad_(n in task.wanted)
        if isinstance(v, torch.Tensor) and v.is_floating_point()
        else v
        for n, v in leaves.items()
    }
    names = [p.name for p in target.load().signature.outputs]
    outputs = dict(zip(names, as_tuple(target.formula(**doubles)), strict=True))
    expected = torch.autograd.grad(
        [outputs[n] for n in carrying], [doubles[n] for n in found], [u.double() for u in ups], allow_unused=True
    )
    largest = max((u.abs().max().item() for u in ups if u.numel()), default=0.0)
    for name, e in zip(found, expected, strict=True):
        if e is not None and e.numel() and e.abs().max().item() < CANCELLED * largest:
            continue
        ratio = worst(found[name], torch.zeros_like(doubles[name]) if e is None else e, size)
        if not ratio <= 1.0:
            return f"gradient of {name}: {ratio:.3g} times what it may be off torch's derivative of the formula"
    return ""


def _same(a: dict[str, torch.Tensor], b: Any) -> bool:
    """Whether the tensors of `a` have the bits of those of `b`."""
    return all(t.shape == b[n].shape and torch.equal(_bits(t), _bits(b[n])) for n, t in a.items())


def _bits(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t.detach()).reshape(-1).view(torch.uint8)


def _said(got: Answer, where: str) -> Answer:
    return Answer(got.status, got.ratio, where + got.message, got.free, got.total)
