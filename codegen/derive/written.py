"""Hand-written backwards: from one, and the gradients that a call wants, to the two kernels of that call.

What only unwanted outputs need is cut from it, parameters among that; the forward kernel stores the values that the
rest reads. `gradients_of` is what calls use: the hand-written backward where there is one for such a call, else the
derived one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.codegen.derive import derive, differentiable
from kgen.codegen.derive.codes import DeriveError, error
from kgen.codegen.derive.pair import Derived, assembled, checked, required
from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.check import Backward, Specialization, backward_of, elaborate_backward
from kgen.dsl.check.backward import Misfit, Residual, misfit, residual


@dataclass(frozen=True)
class ByHand:
    """The hand-written backward of a kernel, and its tile IR for one specialisation or why it does not serve that."""

    backward: Backward
    own: ir.Kernel | str


def by_hand(module: ast.Module, kernel: ir.Kernel) -> ByHand | None:
    """The hand-written backward that `module` has for its kernel `kernel`, None where it has none."""
    backward = backward_of(module, kernel.name)
    if backward is None:
        return None
    present = frozenset(t.name for t in kernel.tensors if t.optional)
    spec = Specialization(dict(kernel.dtypes), dict(kernel.consts), present)
    return ByHand(backward, elaborate_backward(module, backward, kernel, spec))


def gradients_of(module: ast.Module, kernel: ir.Kernel, wanted: frozenset[str]) -> Derived:
    """The two kernels of a call of `kernel`, one of `module`, for the gradients `wanted`.

    Raises DeriveError where there is no hand-written backward for such a call and none can be derived (K0501 to K0506),
    and where a hand-written one lacks a wanted gradient (K0507).
    """
    found = by_hand(module, kernel)
    if found is None:
        return derive(kernel, wanted)
    if not isinstance(found.own, str):
        return written(kernel, found.backward, found.own, wanted)
    try:
        return derive(kernel, wanted)
    except DeriveError as failure:
        note = f"the backward at {found.backward.kernel.name_span} is for other calls: here {found.own}"
        raise DeriveError([replace(d, notes=(*d.notes, note)) for d in failure.diagnostics]) from None


def underivable(module: ast.Module, kernel: ir.Kernel) -> dict[str, DeriveError]:
    """For each floating-point input of `kernel`, one of `module`, that has no gradient, why not.

    Each of the others has one, if it is asked for alone."""
    floats = differentiable(kernel)
    why: dict[str, DeriveError] = {}
    if not floats:
        return why
    try:
        gradients_of(module, kernel, floats)
        return why
    except DeriveError:
        pass
    for t in kernel.tensors:
        if t.name in floats:
            try:
                gradients_of(module, kernel, frozenset({t.name}))
            except DeriveError as failure:
                why[t.name] = failure
    return why


def written(kernel: ir.Kernel, backward: Backward, own: ir.Kernel, wanted: frozenset[str]) -> Derived:
    """The two kernels for the gradients `wanted` of `kernel`; `own` is the tile IR of `backward` for the same call."""
    for t in kernel.tensors:
        if t.name in wanted and t.name not in backward.gradients:
            dims = ", ".join(("*" if t.star and i == 0 else "") + str(p) for i, p in enumerate(t.shape))
            raise error(
                "K0507",
                f"a gradient of '{t.name}' is asked for, which the backward of '{kernel.name}' does not compute",
                backward.kernel.name_span,
                f"give it the output d_{t.name}: {t.dtype}[{dims}], or pass a '{t.name}' that requires no grad",
            )
    results = [t for t in own.tensors if t.role == "out" and t.name in {backward.gradients[n] for n in wanted}]
    body = _needed(own, {t.name for t in results})
    read = {a.tensor for a in ir.accesses(body)}
    inputs = [t for t in own.tensors if t.role == "in"]
    unfit = {t.name for t in inputs if t.name in backward.saved and misfit(kernel, t, backward.saved[t.name])}
    given = [t for t in inputs if t.name not in unfit]
    cut = assembled(own, given, [t for t in inputs if t.name in read], results, own.axes, body)
    taken = {t.name for t in cut.tensors}
    saved = {p: v for p, v in backward.saved.items() if p in taken}
    residuals = [r for v in saved.values() if not isinstance(r := residual(kernel, v), Misfit)]
    return Derived(
        _training_form(kernel, residuals),
        cut,
        tuple(saved),
        {t: d for t, d in backward.cotangents.items() if d in taken},
        {t: d for t, d in backward.gradients.items() if t in wanted},
        tuple(t for t in backward.outputs if t in taken),
        by_hand=True,
    )


def _needed(kernel: ir.Kernel, outputs: set[str]) -> tuple[ir.Stmt, ...]:
    """The statements of `kernel` that store to `outputs`, and those that these need."""
    live: set[str] = set()
    kept: list[ir.Stmt] = []
    for s in reversed(kernel.body):
        if s.name in live if isinstance(s, ir.Let) else s.tensor in outputs:
            kept.append(s)
            live |= {e.name for e in ir.walk(s.value) if isinstance(e, ir.Ref)}
    return tuple(reversed(kept))


def _training_form(kernel: ir.Kernel, residuals: list[Residual]) -> ir.Kernel:
    """`kernel` with a further output for each residual, stored where its value is made."""
    taken = {t.name for t in kernel.tensors} | {a.name for a in kernel.axes} | {s.name for s in kernel.scalars}
    taken |= {*kernel.dims, *(s.name for s in kernel.body if isinstance(s, ir.Let))}
    body: list[ir.Stmt] = []
    tensors: list[ir.Tensor] = []
    stores: dict[str, tuple[str, tuple[str, ...]]] = {}
    for r in residuals:
        name = r.tensor.name
        while name in taken:
            name += "_"
        taken.add(name)
        tensors.append(replace(r.tensor, name=name))
        stores[r.let] = name, r.indices
    for s in kernel.body:
        body.append(s)
        if isinstance(s, ir.Let) and s.name in stores:
            name, indices = stores[s.name]
            value = ir.Ref(s.name, s.value.dtype, s.value.axes, s.span)
            body.append(ir.Store(name, tuple(map(Poly.sym, indices)), value, s.span))
    named = replace(kernel, name=f"{kernel.name}_forward", doc="", tensors=(*required(kernel.tensors), *tensors))
    return checked(replace(named, body=tuple(body)), "training")
