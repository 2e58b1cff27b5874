"""Two kernels for one call that records gradients, and how a kernel is put together from the parts that are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kgen.codegen.derive.codes import DeriveError
from kgen.codegen.derive.text import to_kdsl
from kgen.dsl import ast, ir
from kgen.dsl.check import Specialization, elaborate
from kgen.dsl.check.schedules import reached
from kgen.dsl.diagnostics import Diagnostics, DslError
from kgen.dsl.parser import parse
from kgen.dsl.source import SourceFile


@dataclass(frozen=True)
class Derived:
    """The two kernels of a differentiable call.

    `forward` has the outputs of the kernel it was derived from, then `residuals`: values that `backward` reads again.
    `backward` has as inputs those of the forward that it needs, `residuals`, and gradients of outputs; `cotangents`
    maps an output to its gradient's name, `gradients` a wanted input to its gradient, an output of `backward`. Both
    have the tensor's dtype and shape. An output that no wanted input reaches is not in `cotangents`; one that all of
    them reach for nothing, as the sum of a softmax is 1, is there, and `backward` does not take its gradient. `outputs`
    are those that `backward` takes as they are: only a hand-written one (`by_hand`) does.
    """

    forward: ir.Kernel
    backward: ir.Kernel
    residuals: tuple[str, ...]
    cotangents: Mapping[str, str]
    gradients: Mapping[str, str]
    outputs: tuple[str, ...] = ()
    by_hand: bool = False

    @property
    def forward_text(self) -> str:
        """The training form as a `.kdsl` file."""
        return self.forward.span.source.text

    @property
    def backward_text(self) -> str:
        """The derived kernel as a `.kdsl` file."""
        return self.backward.span.source.text


def backward_name(kernel: str) -> str:
    """What the backward kernel of `kernel` is called."""
    return f"{kernel}_backward"


def assembled(
    kernel: ir.Kernel,
    given: Iterable[ir.Tensor],
    used: Iterable[ir.Tensor],
    results: list[ir.Tensor],
    axes: Iterable[ir.Axis],
    body: tuple[ir.Stmt, ...],
) -> ir.Kernel:
    """The backward kernel of `kernel` that consists of `body`, with no more than it needs: of `axes` those over tiles
    that occur, scalars and requirements of `kernel`, inputs.

    `used` are the inputs that `body` reads; of `given` are taken those that tell a size which no other tells.
    """
    live = frozenset[str]().union(*(_axes_of(s) for s in body))
    axes = tuple(a for a in axes if a.kind == "parallel" or a.name in live)
    tensors = _with_sizes(kernel, list(given), list(used), results, axes, body)
    known = frozenset[str]().union(*(p.symbols for t in tensors for p in t.shape))
    scalars = {e.name for s in body for e in ir.walk(s.value) if isinstance(e, ir.Scalar)}
    made = replace(
        kernel,
        name=backward_name(kernel.name),
        doc="",
        tensors=tuple(required(tensors)),
        scalars=tuple(s for s in kernel.scalars if s.name in scalars),
        axes=axes,
        requires=tuple(r for r in kernel.requires if r.left.symbols | r.right.symbols <= known),
        schedules=tuple(r for r in kernel.schedules if {name for name, _ in r.chunks} <= {a.name for a in axes}),
        body=body,
    )
    return checked(made, "backward")


def required(tensors: Iterable[ir.Tensor]) -> list[ir.Tensor]:
    """Tensors without `?`: those that are absent are not in the IR."""
    return [replace(t, optional=False) for t in tensors]


def checked(kernel: ir.Kernel, role: str) -> ir.Kernel:
    """What the checker makes of the text of `kernel`, which is the `training` form of a kernel or its `backward`; its
    positions point into that text."""
    # A rule that was for another dtype is gone, so that one before it may hold wherever another does.
    text = to_kdsl(replace(kernel, schedules=reached(kernel)), comments=True)
    try:
        module = _parsed(SourceFile(f"{kernel.name}.kdsl", text, role))
        return elaborate(module, kernel.name, Specialization({}))
    except DslError as failure:
        note = "this is the derived kernel: ask for fewer gradients, or write its backward by hand"
        raise DeriveError([replace(d, notes=(*d.notes, note)) for d in failure.diagnostics]) from None


def module_of(kernel: ir.Kernel) -> ast.Module:
    """The syntax tree of a kernel that `checked` made."""
    return _parsed(kernel.span.source)


def _parsed(source: SourceFile) -> ast.Module:
    diagnostics = Diagnostics()
    module = parse(source, diagnostics)
    diagnostics.raise_if_errors()
    return module


def _with_sizes(
    kernel: ir.Kernel,
    given: list[ir.Tensor],
    inputs: list[ir.Tensor],
    results: list[ir.Tensor],
    axes: Iterable[ir.Axis],
    body: Iterable[ir.Stmt],
) -> list[ir.Tensor]:
    """The tensors of the derived kernel: with those of `given` that are needed for a size that no other tells."""
    indices = [e.index for s in body for e in ir.walk(s.value) if isinstance(e, ir.IndexValue)]
    polys = [*(p for t in results for p in t.shape), *(a.extent for a in axes), *indices]
    needed = frozenset[str]().union(*(p.symbols for p in polys)) & frozenset(kernel.dims)
    stars = {t.shape[0].as_symbol for t in results if t.star}
    chosen = list(inputs)

    def told(tensors: Iterable[ir.Tensor]) -> set[str]:
        plain = {(p.as_symbol, t.star and i == 0) for t in tensors for i, p in enumerate(t.shape)}
        return {name for name, starred in plain if name is not None and (starred or name not in stars)}

    for t in given:
        if t not in chosen and (told([t]) - told(chosen)) & needed:
            chosen.append(t)
    position = {t.name: i for i, t in enumerate(given)}
    chosen.sort(key=lambda t: position.get(t.name, len(given)))
    return [*chosen, *results]


def _axes_of(s: ir.Stmt) -> frozenset[str]:
    axes = frozenset[str]().union(*(e.axes for e in ir.walk(s.value)))
    return axes if isinstance(s, ir.Let) else axes.union(*(p.symbols for p in s.at))
