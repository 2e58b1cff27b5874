"""The meaning of an `op`: statements on named tensors. What the checker makes and `kgen.codegen.host` lowers.

A program is settled in its `const` parameters, in which optional tensors are there and in which gradients are wanted;
dimensions stay symbols, and so do dtype variables. Starred dimensions are one dimension here. The extent of a chunk is
a symbol like a dimension: that of `Loop.chunk`.

Every tensor is written before it is read, in order of the statements. No statement writes memory that it also reads,
but for what a kernel is declared to update in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kgen.dsl import ast
from kgen.dsl.affine import Poly
from kgen.dsl.signature import Signature
from kgen.dsl.source import Span


@dataclass(frozen=True)
class Tensor:
    """A tensor by its unique name. `dtype` is a dtype or a dtype variable of the op.

    role: `in` a parameter, `upstream` the gradient of an output, given to the backward section; `value` made by the
    program: outputs, gradients, declared tensors and results.
    """

    name: str
    dtype: str
    shape: tuple[Poly, ...]
    role: str
    span: Span


@dataclass(frozen=True)
class View:
    """A tensor, a slice of it, or the transpose of either. `chunks` are pairs (axis, chunk) of the tensor's axes.

    `meant` is for the checker alone (`Values.meant`): "", or which choice by gradients gave the value its name.
    """

    tensor: str
    chunks: tuple[tuple[int, str], ...]
    transposed: bool
    dtype: str
    shape: tuple[Poly, ...]
    span: Span
    meant: str = field(default="", compare=False)


@dataclass(frozen=True)
class ScalarArg:
    """A scalar parameter of the op, passed on."""

    name: str


@dataclass(frozen=True, eq=False)
class ConstArg:
    """A number that is known when the program is made. Numbers are the same by type and text: to Python 1, 1.0 and
    True are equal, and 0.0 and -0.0."""

    value: int | float | bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstArg) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)


Argument = View | ScalarArg | ConstArg


@dataclass(frozen=True)
class Product:
    """`target = left @ right + plus`, or with `add` `target += left @ right`: summed in f32 or wider, rounded once."""

    target: View
    left: View
    right: View
    plus: View | None
    add: bool
    span: Span


@dataclass(frozen=True)
class Launch:
    """A call of `kernel` with `arguments` by parameter; those in `updated` are written in place. `results` receive the
    outputs in order."""

    kernel: str
    arguments: tuple[tuple[str, Argument], ...]
    updated: tuple[str, ...]
    results: tuple[View, ...]
    span: Span


@dataclass(frozen=True)
class Convert:
    """`target = source`, rounded to the dtype of the target."""

    target: View
    source: View
    span: Span


@dataclass(frozen=True)
class Sum:
    """`target += source`."""

    target: View
    source: View
    span: Span


@dataclass(frozen=True)
class AllReduce:
    """`target` = the `kind` (`max` or `sum`) of what every rank of a process group has as `source`."""

    target: View
    source: View
    kind: str
    span: Span


@dataclass(frozen=True)
class Loop:
    """The body once for each chunk of dimension `dim`, in order; `chunk` is the symbol of a chunk's extent."""

    chunk: str
    dim: str
    body: tuple[Stmt, ...]
    span: Span


Stmt = Product | Launch | Convert | Sum | AllReduce | Loop


@dataclass(frozen=True)
class KernelRef:
    """A kernel that the program calls: the module whose names it sees, and its name there."""

    module: ast.Module
    name: str


@dataclass(frozen=True)
class Program:
    """An op, settled. `outputs` and `gradients` map names of the signature to tensors."""

    name: str
    signature: Signature
    tensors: dict[str, Tensor]
    forward: tuple[Stmt, ...]
    outputs: dict[str, str]
    backward: tuple[Stmt, ...]
    upstream: dict[str, str]
    gradients: dict[str, str]
    kernels: dict[str, KernelRef]


def views(s: Stmt) -> Iterator[tuple[View, str]]:
    """The views of a statement, each with `read`, `write` or `update` (both); of a loop, those of its body."""
    match s:
        case Product():
            yield s.left, "read"
            yield s.right, "read"
            if s.plus is not None:
                yield s.plus, "read"
            yield s.target, "update" if s.add else "write"
        case Convert() | AllReduce():
            yield s.source, "read"
            yield s.target, "write"
        case Sum():
            yield s.source, "read"
            yield s.target, "update"
        case Launch():
            for name, a in s.arguments:
                if isinstance(a, View):
                    yield a, "update" if name in s.updated else "read"
            for r in s.results:
                yield r, "write"
        case Loop():
            for inner in s.body:
                yield from views(inner)


def homes(p: Program) -> dict[str, str]:
    """The tensors that each iteration of a loop has anew, with the chunk of that loop: those that no statement outside
    of it touches, and that are no result."""
    found: dict[str, str | None] = {}
    for s in (*p.forward, *p.backward):
        place = s.chunk if isinstance(s, Loop) else None
        for v, _ in views(s):
            if found.setdefault(v.tensor, place) != place:
                found[v.tensor] = None
    kept = {*p.outputs.values(), *p.gradients.values()}
    return {n: c for n, c in found.items() if c is not None and n not in kept and p.tensors[n].role == "value"}
