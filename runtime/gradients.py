"""Does a backend compute the gradients of a call? What `kgen.runtime.differential` asks of a kernel, asked of both
kernels behind a call that records gradients, and of autograd around them.

The training form is one call, with its residuals among the outputs. The backward kernel, derived or written by hand, is
another, on the residuals that this backend's training form gave: so the bounds of both are those of any kernel. Then
autograd is asked for the same gradients, which must be the bits of that call.

Whether the backward kernel is the derivative of the kernel that was called is the same on every backend: `departs` says
it, against autograd of the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kgen.codegen.decided import as_in_f32, rounding_bound
from kgen.codegen.derive import Derived, DeriveError, derive
from kgen.codegen.derive.written import underivable
from kgen.codegen.interpret import interpret, interpreted_gradients
from kgen.codegen.tolerance import compare
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir
from kgen.dsl.check import TensorParam
from kgen.runtime import autograd
from kgen.runtime.autograd import Training
from kgen.runtime.binding import examine
from kgen.runtime.differential import Answer, Question, answer, ask, same_bits
from kgen.runtime.kernel import Kernel
from kgen.runtime.placement import place

# The gradient of an output, from the output's shape and dtype and its number among those that have one.
Incoming = Callable[[tuple[int, ...], torch.dtype, int], torch.Tensor]


def derivable(kernel: Kernel, body: ir.Kernel) -> tuple[tuple[str, ...], Mapping[str, DeriveError]]:
    """The inputs of `body`, a specialisation of `kernel`, that a gradient can be asked for together, in order of the
    signature; and for each other input of a floating-point dtype why not."""
    known = _derivable.setdefault(kernel, {})
    found = known.get(id(body))
    if found is None:
        why = underivable(kernel.module, body)
        floats = [t.name for t in body.tensors if t.role == "in" and t.dtype.kind == "float"]
        found = known[id(body)] = tuple(name for name in floats if name not in why), why
    return found


# By kernel, and by specialisation, each of which the kernel keeps: deriving takes some time.
_derivable: WeakKeyDictionary[Kernel, dict[int, tuple[tuple[str, ...], Mapping[str, DeriveError]]]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class GradientQuestion:
    """One call that records the gradients of `wanted`, and what its training form must give.

    `given` are all arguments by name, in order of the signature; `incoming` the gradients of outputs by name among the
    parameters of the backward kernel; `layouts` are those of both, by name.
    """

    training: Training
    given: Mapping[str, Any]
    wanted: tuple[str, ...]
    incoming: Mapping[str, torch.Tensor]
    layouts: Mapping[str, str]
    forward: Question
    max_elements: int | None

    @property
    def kernel(self) -> Kernel:
        """The kernel that is called."""
        return self.training.kernel

    def backward(self, results: Mapping[str, torch.Tensor]) -> Question:
        """What the backward kernel must make of `results`: what the training form gave and it reads (`kept`).

        They are contiguous, as in autograd. Raises KgenError for arguments that do not fit.
        """
        backward = self.training.backward
        known = {**self.given, **results, **self.incoming}
        arguments = {p.name: known[p.name] for p in backward.signature.params if p.name in known}
        return ask(backward, arguments, self.layouts, max_elements=self.max_elements)


def kept(derived: Derived, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the results of the training form, by name, those that the backward kernel reads, by their names there."""
    made = [t.name for t in derived.forward.tensors if t.role == "out"]
    residuals = made[len(made) - len(derived.residuals) :]
    return {name: results[name] for name in derived.outputs} | {
        own: results[name] for own, name in zip(derived.residuals, residuals, strict=True)
    }


def ask_gradients(
    kernel: Kernel,
    arguments: Mapping[str, Any],
    wanted: Sequence[str],
    incoming: Incoming,
    *,
    layout: str = "contiguous",
    incoming_layout: str = "contiguous",
    max_elements: int | None = None,
) -> GradientQuestion:
    """The question that a call of `kernel` with `arguments`, and the gradients of its inputs `wanted`, put.

    `layout` is that of every input, `incoming_layout` that of every gradient that comes in (`kgen.runtime.placement`).
    `max_elements` is that of `kgen.runtime.differential.ask`. Raises KgenError for arguments that do not fit,
    DeriveError for what has no derivative.
    """
    values = kernel.binder.bind((), arguments)
    params = kernel.signature.params
    names = [p.name for p in params]
    t = autograd.training(kernel, values, tuple(i for i, name in enumerate(names) if name in wanted))
    layouts = {p.name: layout for p in params if isinstance(p, TensorParam)}
    forward = ask(t.forward, {names[i]: values[i] for i in t.inputs}, layouts, max_elements=max_elements)
    dtypes = {x.name: TORCH[x.dtype] for x in forward.ir.tensors}
    made = {
        d: incoming(tuple(forward.expected[name].shape), dtypes[name], i)
        for i, (name, d) in enumerate(t.derived.cotangents.items())
    }
    layouts |= dict.fromkeys(made, incoming_layout)
    given = dict(zip(names, values, strict=True))
    return GradientQuestion(t, given, tuple(n for n in names if n in wanted), made, layouts, forward, max_elements)


def answers(
    question: GradientQuestion, backends: Sequence[str], *, repeat: bool = False
) -> Iterator[tuple[str, Answer]]:
    """What each of `backends` makes of `question`; the outputs of an answer that is right are the gradients, by name of
    the backward kernel's outputs. With `repeat`, two more calls of the backward kernel must give the same bits.

    Raises KgenError where the question to the backward kernel cannot be put.
    """
    known: dict[str, torch.Tensor] = {}
    backward: Question | None = None
    for backend in backends:
        trained = answer(question.forward, backend)
        if trained.status != "ok":
            yield backend, replace(trained, message=f"the training form: {trained.message}")
            continue
        results = kept(question.training.derived, trained.outputs)
        # One reference serves all backends whose residuals agree.
        if backward is None or any(not same_bits(known[n], t) for n, t in results.items()):
            known, backward = results, question.backward(results)
        got = answer(backward, backend, repeat=repeat)
        if got.status == "ok":
            try:
                if problem := by_autograd(question, backend, got):
                    got = replace(got, status="wrong", message=problem)
            except Exception as error:  # both kernels have run: whatever is raised around them is a failure
                got = replace(got, status="crashed", message=f"autograd: {type(error).__name__}: {error}")
        yield backend, got


def by_autograd(question: GradientQuestion, backend: str, got: Answer) -> str:
    """What is wrong with the gradients that autograd gives for the same call, where `got` is what the backward kernel
    gave by itself; nothing if they have its bits."""
    t, kernel, layouts = question.training, question.kernel, question.layouts
    leaves = {
        n: place(v, layouts[n]).tensor.requires_grad_(n in question.wanted) if isinstance(v, torch.Tensor) else v
        for n, v in question.given.items()
    }
    results = kernel(*leaves.values(), backend=backend)
    results = results if isinstance(results, tuple) else (results,)
    named = dict(zip((o.name for o in kernel.signature.outputs), results, strict=True))
    carrying = [n for n, r in named.items() if r.requires_grad]
    if set(carrying) != set(t.derived.cotangents):
        return f"outputs {carrying} require grad, and {list(t.derived.cotangents)} have one"
    ups = [place(question.incoming[d], layouts[d]).tensor for d in (t.derived.cotangents[n] for n in carrying)]
    found = torch.autograd.grad([named[n] for n in carrying], [leaves[n] for n in question.wanted], ups)
    for name, g in zip(question.wanted, found, strict=True):
        if not same_bits(g, got.outputs[t.derived.gradients[name]]):
            return f"gradient of {name}: autograd gave other bits than the backward kernel alone"
    return ""


# ---- is it the derivative? -------------------------------------------------------------------------------------------


def departs(question: GradientQuestion) -> str:
    """How the backward kernel of a call, derived or written by hand, departs from the derivative of the kernel that was
    called, both in float64. Nothing if it does not.

    The derivative is what torch.autograd makes of the interpreter (`interpreted_gradients`), so that no step of
    derivation judges itself. Torch's choices where there is no derivative are those of docs/derivation.md, and both
    sides take each comparison, maximum and step on the same float64 values: ties are right or wrong, and no allowance
    is made for them. Where autograd itself gives no number (it multiplies an infinite derivative with 0) nothing is
    said about the element. The gradients that arrive are random numbers, whatever those of the call are.

    What is allowed is what f32 would round at either of the two ways of computing in float64: the error bound of the
    backward kernel, and that of the derivation that leaves out no term that cancels, whose terms are autograd's. That
    is some 2**29 times the rounding that does happen, and as much less than a wrong term.
    """
    t = question.training
    spec, _ = examine(question.kernel.signature, list(question.given.values()), None)
    body = question.kernel.specialize(spec)
    arriving = _arriving(question, body)
    derivative = interpreted_gradients(
        body, *_arguments(body, question.given), question.wanted, arriving, **_cut(question)
    )
    found, bound = _in_float64(question, t.derived, arriving)
    try:
        terms = derive(body, frozenset(question.wanted), whole=True)
    except DeriveError:
        terms = t.derived
    if terms.backward_text != t.derived.backward_text:
        _, more = _in_float64(question, terms, arriving)
        bound = {n: bound[n] + more[n] for n in bound}
    for name in question.wanted:
        right = derivative[name]
        said = right.isfinite()
        # No bound excuses what is no number.
        allowed = torch.where(found[name].isfinite(), bound[name], 0.0)
        c = compare(torch.where(said, found[name], right), right, allowed)
        if not c.ok:
            return f"it is not the derivative: gradient of {name} {c}"
    return ""


def _arriving(question: GradientQuestion, body: ir.Kernel) -> dict[str, torch.Tensor]:
    """A random gradient in float64 for each output of `body`, the kernel that was called, by name.

    For those too that no input reaches according to a derivation: there it must not matter. A backward that is written
    by hand and takes none of an output means that none arrives.
    """
    d = question.training.derived
    g = torch.Generator().manual_seed(len(body.tensors))
    made: dict[str, torch.Tensor] = {}
    for t in body.tensors:
        if t.role == "out" and t.dtype.kind == "float" and (t.name in d.cotangents or not d.by_hand):
            like = question.forward.expected[t.name]
            made[t.name] = torch.randn(like.shape, generator=g, dtype=torch.float64).to(like.device)
    return made


def _in_float64(
    question: GradientQuestion, d: Derived, arriving: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients by way of the two kernels of `d`, nothing rounded between them, and how far rounding to f32 would
    take the second of them; by name of the input. `arriving` are those of outputs, by name; others are 0."""
    known: dict[str, Any] = {
        n: v.to(torch.float64) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in question.given.items()
    }
    forward, backward = as_in_f32(d.forward), as_in_f32(d.backward)
    results = interpret(forward, *_arguments(forward, known), precision="f64", **_cut(question))
    known |= kept(d, results)
    known |= {g: arriving.get(output, torch.zeros_like(results[output])) for output, g in d.cotangents.items()}
    arguments = _arguments(backward, known)
    found = interpret(backward, *arguments, precision="f64", **_cut(question))
    bound = rounding_bound(backward, *arguments, **_cut(question))
    return {n: found[g] for n, g in d.gradients.items()}, {n: bound[g] for n, g in d.gradients.items()}


def _arguments(body: ir.Kernel, known: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and scalars that `body` takes, of those `known`."""
    return {t.name: known[t.name] for t in body.tensors if t.role != "out"}, {
        s.name: known[s.name] for s in body.scalars
    }


def _cut(question: GradientQuestion) -> dict[str, Any]:
    return {} if question.max_elements is None else {"max_elements": question.max_elements}
