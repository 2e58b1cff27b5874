"""The tile IR: a kernel with names, dtypes and index sets settled. What the checker makes and every later pass reads.

A value has a dtype and a set of index names (`axes`); operands broadcast by name. `Load` yields the tensor's compute
dtype (f16 and bf16 widen to f32), all arithmetic is on compute dtypes, and `Store` rounds once to the tensor's dtype.
The IR is specialised: dtype variables, `const` parameters and optional tensors are settled, `fn`s are expanded and
compile-time `if`s taken. Dimensions stay symbolic; a schedule fixes those it needs.

Invariants (checked by `kgen.dsl.check`, relied on everywhere):
every axis of a value is declared in `Kernel.axes`; every `Ref` names an earlier `Let` and names are unique;
every affine subscript is in bounds; stores of different programs, and of different elements, never overlap;
no `inout` tensor is loaded after a store to it in program order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeGuard

from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import DType
from kgen.dsl.source import Span

# ---- declarations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """An index: `parallel m in M` or `tile n in N`. `extent` is over dimensions only. `merged`: it stands for several
    neighbouring ones."""

    name: str
    extent: Poly
    kind: str  # "parallel" | "tile"
    span: Span
    merged: bool = False


@dataclass(frozen=True)
class Tensor:
    """A tensor argument. `shape[i]` is over dimensions; `star` says that `shape[0]` stands for `*M`: any number of
    leading dimensions, subscripted by one flattened (row-major) index."""

    name: str
    dtype: DType
    shape: tuple[Poly, ...]
    role: str  # "in" | "out" | "inout"
    star: bool
    optional: bool
    span: Span


@dataclass(frozen=True)
class ScalarParam:
    """A run-time scalar argument of the given storage dtype."""

    name: str
    dtype: DType
    default: float | int | bool | None
    span: Span


@dataclass(frozen=True)
class Requirement:
    """A condition on dimensions that the caller must meet: `left op right`, op of `== != < <= > >=`."""

    op: str
    left: Poly
    right: Poly
    span: Span


@dataclass(frozen=True)
class ScheduleRule:
    """Sizes that the source sets of `backend`'s schedule, where all of `when`, which are on sizes of tiles, hold.

    sizes: pairs of `threads`, `rows`, `vector` or `blocks` and its size. chunks: pairs of a tile index and the elements
    of it that are taken at a time, None for all of them.
    """

    backend: str  # "cuda" | "triton"
    when: tuple[Requirement, ...]
    sizes: tuple[tuple[str, int], ...]
    chunks: tuple[tuple[str, int | None], ...]
    span: Span


# ---- expressions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Const:
    """A literal of compute dtype `dtype`."""

    value: float | int | bool
    dtype: DType
    span: Span
    axes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Scalar:
    """A run-time scalar parameter, converted to its compute dtype."""

    name: str
    dtype: DType
    span: Span
    axes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class IndexValue:
    """Integer arithmetic over indices and dimensions, used as an i64 value (`where(n <= m, ...)`, `sum(...) / N`)."""

    index: Poly
    dtype: DType
    axes: frozenset[str]
    span: Span


@dataclass(frozen=True)
class Ref:
    """The value bound by the `Let` called `name`."""

    name: str
    dtype: DType
    axes: frozenset[str]
    span: Span


@dataclass(frozen=True)
class Load:
    """`tensor[at...]`, widened to its compute dtype. A subscript is affine (`Poly`, proved in bounds) or a value (an
    integer `Expr`: a gather; out of range it yields NaN, or the lowest value for integers, and touches no memory).
    """

    tensor: str
    at: tuple[Poly | Expr, ...]
    dtype: DType
    axes: frozenset[str]
    span: Span


@dataclass(frozen=True)
class Op:
    """A scalar function applied elementwise; see `kgen.dsl.builtins.SCALAR_OPS` for every `fn`, its arity and meaning.

    The operands have been cast to a common dtype where the op needs one (`Cast` nodes make it explicit).
    """

    fn: str
    args: tuple[Expr, ...]
    dtype: DType
    axes: frozenset[str]
    span: Span


@dataclass(frozen=True)
class Cast:
    """`to(arg)`. For `to` of f16/bf16 the value is rounded once to `to` and held as f32 (`dtype` is `to.compute`).
    float -> int truncates toward zero; int -> bool is `!= 0`."""

    to: DType
    arg: Expr
    dtype: DType
    axes: frozenset[str]
    span: Span


@dataclass(frozen=True)
class Reduce:
    """`kind` over the tile axes `over`: `sum prod max min any all argmax argmin`. max and min propagate NaN;
    argmax/argmin give the i64 position along the single axis in `over`, the first of equals, a NaN counting as extreme.
    `expsum`, which only `kgen.codegen.online` makes: the sum of exp(arg - m), m the maximum made finite.
    """

    kind: str
    arg: Expr
    over: tuple[str, ...]
    dtype: DType
    axes: frozenset[str]
    span: Span


Expr = Const | Scalar | IndexValue | Ref | Load | Op | Cast | Reduce

# ---- statements ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Let:
    """`name = value`. `name` is unique in the kernel: a second assignment to `a` is `a_2` (see `source_name`)."""

    name: str
    value: Expr
    span: Span


@dataclass(frozen=True)
class Store:
    """`tensor[at...] = value`, rounded once to the tensor's dtype. Subscripts are affine and injective."""

    tensor: str
    at: tuple[Poly, ...]
    value: Expr
    span: Span


@dataclass(frozen=True)
class Accumulate:
    """`tensor[at...] += value`: summed over the parallel axes `over` (those the target lacks), in a fixed order.
    The output holds the sum alone: it need not be initialised by the caller unless it is `inout`."""

    tensor: str
    at: tuple[Poly, ...]
    value: Expr
    over: tuple[str, ...]
    span: Span


Stmt = Let | Store | Accumulate


def target_symbols(s: Store | Accumulate) -> frozenset[str]:
    """The symbols in the subscripts of what `s` writes: indices, and the dimensions among them."""
    return subscript_symbols(s.at)


def subscript_symbols(at: Sequence[Poly | Expr]) -> frozenset[str]:
    """The symbols in subscripts, those that a value is looked up by left out."""
    return frozenset[str]().union(*(p.symbols for p in at if isinstance(p, Poly)))


@dataclass(frozen=True)
class Kernel:
    """A specialised kernel. `dims` are the dimension symbols in order of first appearance in the signature;
    `consts` the values of its `const` parameters; `dtypes` what its dtype variables stand for."""

    name: str
    doc: str
    dims: tuple[str, ...]
    tensors: tuple[Tensor, ...]  # inputs (absent optional ones left out) in order, then outputs
    scalars: tuple[ScalarParam, ...]
    axes: tuple[Axis, ...]  # in order of declaration
    requires: tuple[Requirement, ...]
    body: tuple[Stmt, ...]
    consts: tuple[tuple[str, int | float | bool], ...]
    dtypes: tuple[tuple[str, DType], ...]
    span: Span
    values: tuple[tuple[str, str], ...] = ()  # each name that the user assigns, and the `Let` it stands for at the end
    schedules: tuple[ScheduleRule, ...] = ()  # the first whose condition holds counts; they change no value

    def tensor(self, name: str) -> Tensor:
        """The tensor argument called `name`."""
        return next(t for t in self.tensors if t.name == name)

    def axis(self, name: str) -> Axis:
        """The index called `name`."""
        return next(a for a in self.axes if a.name == name)

    @property
    def parallel(self) -> tuple[Axis, ...]:
        """Indices that are spread over programs."""
        return tuple(a for a in self.axes if a.kind == "parallel")

    @property
    def tiles(self) -> tuple[Axis, ...]:
        """Indices that one program holds whole."""
        return tuple(a for a in self.axes if a.kind == "tile")


# ---- walking -------------------------------------------------------------------------------------------------------


_OF_ONE = (Cast, Reduce)  # made once: a union is made anew wherever it is written, and this is asked very often


def children(e: Expr) -> tuple[Expr, ...]:
    """The direct subexpressions, gather subscripts included."""
    if isinstance(e, Op):
        return e.args
    if isinstance(e, _OF_ONE):
        return (e.arg,)
    if isinstance(e, Load):
        return tuple(s for s in e.at if not isinstance(s, Poly))
    return ()


def walk(e: Expr) -> Iterator[Expr]:
    """`e` and everything below it, operands before their users."""
    # Users first, last operands first, then turned round: a recursive generator takes several times as long.
    found: list[Expr] = []
    left = [e]
    while left:
        found.append(one := left.pop())
        left += children(one)
    return reversed(found)


def accesses(body: Iterable[Stmt]) -> Iterator[Load | Store | Accumulate]:
    """Every load and store of some statements, in order: what a statement loads, then what it stores to."""
    for s in body:
        yield from (e for e in walk(s.value) if isinstance(e, Load))
        if not isinstance(s, Let):
            yield s


def same(a: Expr, b: Expr) -> bool:
    """Structural equality, positions aside."""
    if type(a) is not type(b):
        return False
    for f in fields(a):
        if f.name == "span":
            continue
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, tuple) and isinstance(y, tuple):
            if len(x) != len(y) or not all(same(i, j) if _is_expr(i) else i == j for i, j in zip(x, y, strict=True)):
                return False
        elif _is_expr(x):
            if not same(x, y):
                return False
        elif x != y:
            return False
    return True


def _is_expr(x: object) -> TypeGuard[Expr]:
    return isinstance(x, Const | Scalar | IndexValue | Ref | Load | Op | Cast | Reduce)
