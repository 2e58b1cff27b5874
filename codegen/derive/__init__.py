"""Reverse mode over the tile IR: from a kernel, the kernel of its gradients.

`derive` reads as the list of its steps: read the kernel into a graph of values (`graph`, `split`), find the gradient of
every load (`adjoints`, with one rule an op in `rules`), find the stores that write them (`stores`), choose what the
forward kernel saves (`residuals`), and write both kernels as text (`lower`, `text`). The text is then checked like any
file: the derived kernels are what the checker makes of it, with every proof, and their positions point into it.

Not done here: choosing which gradients to ask for, and calling the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kgen.codegen.derive.adjoints import Sweep, Write, differentiable_operands, ordered, place
from kgen.codegen.derive.codes import DERIVE_CODES, DeriveError, error
from kgen.codegen.derive.graph import Graph, Node, Reader
from kgen.codegen.derive.lower import Lowering, describe
from kgen.codegen.derive.pair import Derived, assembled, checked, required
from kgen.codegen.derive.reach import within_reach
from kgen.codegen.derive.residuals import to_save
from kgen.codegen.derive.split import split_axes
from kgen.codegen.derive.stores import Planner
from kgen.codegen.derive.text import to_kdsl
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.check.backward import SAVED, gradient_names

__all__ = ["DERIVE_CODES", "DeriveError", "Derived", "derive", "differentiable", "to_kdsl"]


def differentiable(kernel: ir.Kernel) -> frozenset[str]:
    """The inputs that can be asked for a gradient: tensors of a floating-point dtype."""
    return frozenset(t.name for t in kernel.tensors if t.role == "in" and t.dtype.kind == "float")


def derive(kernel: ir.Kernel, wanted: frozenset[str], *, named: bool = False, whole: bool = False) -> Derived:
    """The training form of `kernel` and the kernel of the gradients of its inputs `wanted`.

    With `named` only values that the user names are saved: a hand-written backward could take no others. With `whole`
    terms that cancel stay, as autograd computes them. Scalar arguments and integer tensors have no gradient. Raises
    DeriveError (K05xx) for what cannot be derived.
    """
    _refuse(kernel, wanted)
    split = split_axes(kernel)
    graph = Graph({a.name: a.extent for a in split.axes}, kernel.span)
    reader = Reader(graph, split.places, split.parts)
    outputs = _read(kernel, reader)
    forward_values = set(ordered(w.value for w in outputs))
    taken = {
        *(t.name for t in kernel.tensors), *(s.name for s in kernel.scalars), *kernel.dims, *graph.extents,
        *reader.names.values(), "inf", "nan",
    }  # fmt: skip
    wanted_in_order = [t for t in kernel.tensors if t.name in wanted]
    floats = [t for t in kernel.tensors if t.role == "out" and t.dtype.kind == "float"]
    # Named as in a hand-written backward, and as many whichever are wanted. A value of such a name gives way to them.
    declared = {*(t.name for t in kernel.tensors), *(s.name for s in kernel.scalars), *kernel.dims}
    outputs_first = sorted(kernel.tensors, key=lambda t: t.role != "out")
    names = gradient_names([t.name for t in outputs_first], declared)
    cotangents = {t.name: names[t.name] for t in floats}
    gradients = {t.name: names[t.name] for t in wanted_in_order}
    taken |= set(names.values())

    loads = {
        place(w): graph.load(cotangents[w.tensor], w.at, kernel.tensor(w.tensor).dtype.compute, w.span)
        for w in outputs
        if w.tensor in cotangents
    }
    tiles = frozenset(a.name for a in split.axes if a.kind == "tile")
    sweep = Sweep(graph, tiles, reader.names, whole=whole)
    received = sweep.run(outputs, loads, wanted)
    planner = Planner(graph, kernel, split.axes, taken)
    writes: list[Write] = []
    for t in wanted_in_order:
        own = [(load, g) for load, g in received.items() if load.tensor == t.name]
        if not own:
            raise _zero(kernel, t, outputs)
        writes += planner.plan(t, gradients[t.name], sorted(own, key=lambda pair: pair[0].serial))

    loadable = [*kernel.tensors, *(replace(t, name=cotangents[t.name]) for t in floats)]
    proved = forward_values.union(loads.values())
    writes = within_reach(graph, kernel, loadable, list(planner.axes.values()), writes, proved)

    saved: list[tuple[Node, ir.Tensor, Write]] = []
    if not split.places:
        parallel = [a for a in kernel.axes if a.kind == "parallel"]
        users = {reader.value(let): name for name, let in kernel.values if SAVED + name not in taken}
        possible = forward_values & users.keys() if named else forward_values
        nodes = to_save((w.value for w in writes), possible, frozenset(a.name for a in parallel))
        saved = _residuals(kernel, parallel, nodes, reader.names | users, taken)
        new = {a: graph.load(t.name, w.at, t.dtype, a.span) for a, t, w in saved}
        memo: dict[Node, Node] = {}
        writes = [replace(w, value=graph.replace(w.value, new, memo)) for w in writes]
        for words in (reader.names, sweep.hints):
            words.update({new_value: words[a] for a, new_value in memo.items() if a in words})

    forward = _forward(kernel, outputs if not split.places else None, saved, reader.names, taken)
    used = {a.tensor for a in ordered(w.value for w in writes) if a.kind == "load"}
    tensors = [
        *(t for t in kernel.tensors if t.role == "in" and t.name in used),
        *(replace(t, role="in") for _, t, _ in saved),
        *(replace(t, name=cotangents[t.name], role="in") for t in floats if cotangents[t.name] in used),
    ]
    results = [replace(t, name=gradients[t.name], role="out") for t in wanted_in_order]
    backward = _backward(kernel, planner, tensors, results, writes, reader.names, sweep.hints, taken)
    passing = {w.tensor for w in outputs if w.value in sweep.active}
    reached = {name: d for name, d in cotangents.items() if name in passing}
    return Derived(forward, backward, tuple(t.name for _, t, _ in saved), reached, gradients)


# ---- what is refused -------------------------------------------------------------------------------------------------


def _refuse(kernel: ir.Kernel, wanted: frozenset[str]) -> None:
    for t in kernel.tensors:
        if t.role == "inout":
            raise error(
                "K0502",
                f"'{t.name}' is overwritten in place, so the kernel cannot be derived",
                t.span,
                "make it an input and store the new value to an output",
            )
    if not any(t.role == "out" and t.dtype.kind == "float" for t in kernel.tensors):
        out = next(t for t in kernel.tensors if t.role == "out")
        raise error(
            "K0501",
            f"kernel '{kernel.name}' has no floating-point output",
            out.span,
            "integers and bools carry no gradient; call it without asking for one",
        )
    possible = differentiable(kernel)
    for name in sorted(wanted - possible):
        known = next((t for t in kernel.tensors if t.name == name), None)
        raise error(
            "K0506",
            f"'{name}' is no floating-point input of '{kernel.name}'",
            kernel.span if known is None else known.span,
            f"gradients can be asked for: {', '.join(sorted(possible)) or 'none'}",
        )
    if not wanted:
        raise error("K0506", f"no gradient of '{kernel.name}' is asked for", kernel.span, "name an input")


def _zero(kernel: ir.Kernel, t: ir.Tensor, outputs: Sequence[Write]) -> DeriveError:
    """The error for an input that no gradient reaches, at the construct that stops it where there is one."""
    message = f"no output of '{kernel.name}' has a derivative with respect to '{t.name}'"
    advice = f"ask for no gradient of '{t.name}'"
    for a in ordered(w.value for w in outputs):
        if a.kind == "load" or not a.args or differentiable_operands(a):
            continue
        if any(b.kind == "load" and b.tensor == t.name for b in ordered((a,))):
            what = a.reduction[0] if a.kind == "reduce" else f"conversion to {a.dtype}" if a.kind == "cast" else a.fn
            return error("K0504", message, a.span, advice, label=f"'{what}' has no derivative: it changes in steps")
    return error("K0504", message, t.span, advice, label="no output depends on it")


# ---- parts of both kernels -------------------------------------------------------------------------------------------


def _read(kernel: ir.Kernel, reader: Reader) -> list[Write]:
    outputs = []
    for s in kernel.body:
        if isinstance(s, ir.Let):
            reader.let(s)
        else:
            at = tuple(reader.poly(p) for p in s.at)
            outputs.append(Write(s.tensor, at, reader.expr(s.value), isinstance(s, ir.Accumulate), s.span))
    return outputs


def _residuals(
    kernel: ir.Kernel, parallel: list[ir.Axis], nodes: Sequence[Node], names: Mapping[Node, str], taken: set[str]
) -> list[tuple[Node, ir.Tensor, Write]]:
    """For each saved value: the value, the tensor that holds it, and the store in the forward kernel."""
    stars = {t.shape[0].as_symbol for t in kernel.tensors if t.star}
    starred = [a for a in parallel if a.extent.as_symbol in stars]
    if len(starred) > 1:
        return []  # one tensor has at most one starred dimension
    order = [*starred, *(a for a in parallel if a not in starred)]
    out = []
    for a in nodes:
        name = _unique(SAVED + (names.get(a) or describe(a)), taken)
        shape = tuple(x.extent for x in order)
        tensor = ir.Tensor(name, a.dtype, shape, "out", bool(starred), False, a.span)
        out.append((a, tensor, Write(name, tuple(Poly.sym(x.name) for x in order), a, False, a.span)))
    return out


def _forward(
    kernel: ir.Kernel,
    outputs: list[Write] | None,
    saved: Sequence[tuple[Node, ir.Tensor, Write]],
    names: Mapping[Node, str],
    taken: set[str],
) -> ir.Kernel:
    """The kernel with its residuals; `outputs` are its stores, None if the kernel is to stay as it is."""
    if outputs is None:
        body = kernel.body
    else:
        reserved = taken - set(names.values())
        over = _over(outputs, kernel.axes)
        body = Lowering(names, {}, reserved).run([*(w for _, _, w in saved), *outputs], over)
    tensors = (*required(kernel.tensors), *(t for _, t, _ in saved))
    return checked(replace(kernel, name=f"{kernel.name}_forward", doc="", tensors=tensors, body=body), "training")


def _backward(
    kernel: ir.Kernel,
    planner: Planner,
    inputs: list[ir.Tensor],
    results: list[ir.Tensor],
    writes: list[Write],
    names: Mapping[Node, str],
    hints: Mapping[Node, str],
    taken: set[str],
) -> ir.Kernel:
    axes = tuple(planner.axes.values())
    tensors = {t.name for t in (*inputs, *results)}
    reserved = (taken - set(names.values())) | {a.name for a in axes} | tensors
    body = Lowering(names, hints, reserved).run(writes, _over(writes, axes))
    plain = replace(kernel, schedules=())  # those are of another kernel
    return assembled(plain, (t for t in kernel.tensors if t.role == "in"), inputs, results, axes, body)


def _over(writes: Iterable[Write], axes: Iterable[ir.Axis]) -> dict[str, tuple[str, ...]]:
    """The parallel axes that each target lacks."""
    parallel = [a.name for a in axes if a.kind == "parallel"]
    return {place(w): tuple(n for n in parallel if all(n not in p.symbols for p in w.at)) for w in writes}


def _unique(hint: str, taken: set[str]) -> str:
    name, n = hint, 1
    while name in taken:
        n += 1
        name = f"{hint}_{n}"
    taken.add(name)
    return name
