"""Normal form: what are the values of this kernel, each computed once, and in which order?

Binds the dimensions that the variant knows, numbers values so that equal ones (spelled alike or through other names)
are one, gives every load, every reduction and every shared subexpression a `Let` of its own, and puts affine loads
first so that all are in flight before arithmetic starts. A gather follows what its subscript needs. Tile axes of
extent 0 disappear with the statements along them, a reduction over one being its identity; so do unused ones. The
result is an ordinary kernel, and the normal form of a normal form is itself.

It trusts the invariants of `kgen.dsl.ir`. As no `inout` tensor is loaded after a store to it in program order, all
loads see the memory the kernel was given, and equal loads are equal values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kgen.codegen.names import fresh, taken_names
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import I64, DType
from kgen.dsl.source import Span

_EXACT_F32 = 1 << 24  # whole numbers up to here convert to f32 without rounding


def required_dims(kernel: ir.Kernel) -> tuple[str, ...]:
    """The dimensions that a variant must know: those in the extent of a tile axis, in the kernel's order."""
    needed = frozenset[str]().union(*(a.extent.symbols for a in kernel.tiles))
    return tuple(d for d in kernel.dims if d in needed)


def normalize(kernel: ir.Kernel, variant: Variant) -> ir.Kernel:
    """`kernel` in normal form (see `kgen.codegen.schedule.Scheduled`) with the variant's dimensions bound."""
    bound = {name: value for name, value in variant.dims if name in kernel.dims}
    empty = frozenset(a.name for a in kernel.tiles if a.extent.substitute(bound) == Poly.const(0))
    values = _Values(bound, empty)
    body = [s for s in kernel.body if isinstance(s, ir.Let) or not empty & _target_axes(s)]
    statements = [_number(values, s) for s in body]
    normal = replace(_bind(kernel, bound, variant), body=_Writer(kernel, values, statements).body())
    used = frozenset[str]().union(*map(statement_axes, normal.body))
    return replace(normal, axes=tuple(a for a in normal.axes if a.kind == "parallel" or a.name in used))


def statement_axes(s: ir.Stmt) -> frozenset[str]:
    """Every index that `s` runs over: those of its value and operands, and of the subscripts of its target (with the
    dimensions in them)."""
    axes = frozenset[str]().union(*(n.axes for n in ir.walk(s.value)))
    return axes if isinstance(s, ir.Let) else axes | _target_axes(s)


def _target_axes(s: ir.Store | ir.Accumulate) -> frozenset[str]:
    axes = ir.target_symbols(s)
    return axes.union(s.over) if isinstance(s, ir.Accumulate) else axes


def _bind(kernel: ir.Kernel, bound: Mapping[str, int], variant: Variant) -> ir.Kernel:
    """The declarations of `kernel` with `bound` substituted.

    A starred dimension of star rank > 1 stays symbolic in the shapes: its name is the key to the sizes of its parts.
    """

    def shape(t: ir.Tensor) -> tuple[Poly, ...]:
        dims = tuple(p.substitute(bound) for p in t.shape)
        star = t.shape[0].as_symbol if t.star else None
        return (t.shape[0], *dims[1:]) if star is not None and variant.star_rank(star) > 1 else dims

    tensors = tuple(replace(t, shape=shape(t)) for t in kernel.tensors)
    requires = tuple(
        replace(r, left=r.left.substitute(bound), right=r.right.substitute(bound)) for r in kernel.requires
    )
    kept = frozenset[str]().union(*(p.symbols for t in tensors for p in t.shape))
    return replace(
        kernel,
        dims=tuple(d for d in kernel.dims if d not in bound or d in kept),
        tensors=tensors,
        axes=tuple(replace(a, extent=a.extent.substitute(bound)) for a in kernel.axes),
        requires=tuple(r for r in requires if not (r.left.is_constant and r.right.is_constant)),
    )


# ---- value numbering -----------------------------------------------------------------------------------------------


def is_gather(load: ir.Load) -> bool:
    """Whether a subscript of `load` is a value rather than affine."""
    return any(not isinstance(s, Poly) for s in load.at)


def _trivial(e: ir.Expr) -> bool:
    """Not worth a name: a literal, a scalar argument, index arithmetic, or a conversion of one."""
    return isinstance(e, ir.Const | ir.Scalar | ir.IndexValue) or (isinstance(e, ir.Cast) and _trivial(e.arg))


@dataclass
class _Values:
    """Values by number. `kids[v]` are the operands of `exprs[v]`, in the order of `ir.children`.

    A `Ref` in `exprs` stands for a user's name of a trivial value (`c = 2.0`): it is a value of its own, so that the
    name stays where the user put it and does not spread to every other 2.0; its operand is the trivial value.
    """

    bound: Mapping[str, int]
    empty: frozenset[str]  # tile axes of extent 0
    exprs: list[ir.Expr] = field(default_factory=list)
    kids: list[tuple[int, ...]] = field(default_factory=list)
    numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    lets: dict[str, int] = field(default_factory=dict)  # the value of each `Let`
    names: dict[int, str] = field(default_factory=dict)  # the user's name of a value; the first one wins
    spans: dict[int, Span] = field(default_factory=dict)  # where the user named it
    memo: dict[int, int] = field(default_factory=dict)  # by id(): operands shared by the checker are visited once

    def number(self, e: ir.Expr) -> int:
        """The number of the value of `e`."""
        if id(e) in self.memo:
            return self.memo[id(e)]
        if isinstance(e, ir.Ref):
            v = self.lets[e.name]
        else:
            kids = tuple(self.number(c) for c in ir.children(e))
            v = self._intern(self._settle(e, kids), kids)
        self.memo[id(e)] = v
        return v

    def let(self, s: ir.Let) -> int:
        """The number of the value that `s` binds; it takes on the user's name."""
        v = self.number(s.value)
        if _trivial(self.exprs[v]):
            e = self.exprs[v]
            v = self._intern(ir.Ref(s.name, e.dtype, e.axes, e.span), (v,))
        self.lets[s.name] = v
        if v not in self.names:
            self.names[v], self.spans[v] = s.name, s.span
        return v

    def _settle(self, e: ir.Expr, kids: tuple[int, ...]) -> ir.Expr:
        """`e` with the bound dimensions in it, a literal where that makes it one."""
        match e:
            case ir.IndexValue():
                index = e.index.substitute(self.bound)
                return ir.Const(index.constant, I64, e.span) if index.is_constant else replace(e, index=index)
            case ir.Load():
                return replace(e, at=tuple(s.substitute(self.bound) if isinstance(s, Poly) else s for s in e.at))
            case ir.Cast() if e.dtype.kind == "float" and e.to == e.dtype:
                arg = self.exprs[kids[0]]
                if isinstance(arg, ir.Const) and arg.dtype.kind == "int" and abs(arg.value) <= _EXACT_F32:
                    return ir.Const(float(arg.value), e.dtype, e.span)
            case ir.Reduce() if self.empty.intersection(e.over):
                return ir.Const(_identity(e.kind, e.dtype), e.dtype, e.span)
        return e

    def _intern(self, e: ir.Expr, kids: tuple[int, ...]) -> int:
        if isinstance(e, ir.Const):
            kids = ()
        key = (type(e).__name__, *_attributes(e), kids)
        if key not in self.numbers:
            self.numbers[key] = len(self.exprs)
            self.exprs.append(e)
            self.kids.append(kids)
        return self.numbers[key]


def _identity(kind: str, dtype: DType) -> float | int | bool:
    """What a reduction over nothing gives; position 0 for argmax and argmin, which have none."""
    if kind in ("any", "all"):
        return kind == "all"
    if kind in ("max", "min") and dtype.kind == "float":
        return -math.inf if kind == "max" else math.inf
    if kind in ("max", "min"):
        low, high = (-(1 << dtype.bits - 1), (1 << dtype.bits - 1) - 1) if dtype.signed else (0, (1 << dtype.bits) - 1)
        return low if kind == "max" else high
    one = 1 if kind == "prod" else 0
    return float(one) if dtype.kind == "float" else one


def _attributes(e: ir.Expr) -> tuple[object, ...]:
    """What tells `e` from other expressions of its class with the same operands."""
    match e:
        case ir.Const():
            return repr(e.value), e.dtype  # by text: 1, 1.0 and True are equal in Python, 0.0 and -0.0 too
        case ir.Scalar() | ir.Ref():
            return (e.name,)
        case ir.IndexValue():
            return (e.index,)
        case ir.Load():
            return e.tensor, tuple(s if isinstance(s, Poly) else None for s in e.at)
        case ir.Op():
            return e.fn, e.dtype
        case ir.Cast():
            return (e.to,)
        case ir.Reduce():
            return e.kind, e.over, e.dtype


def with_children(e: ir.Expr, kids: tuple[ir.Expr, ...]) -> ir.Expr:
    """`e` with its operands replaced, in the order of `ir.children`."""
    if isinstance(e, ir.Op):
        return replace(e, args=kids)
    if isinstance(e, ir.Cast | ir.Reduce):
        return replace(e, arg=kids[0])
    if isinstance(e, ir.Load):
        subscripts = iter(kids)
        return replace(e, at=tuple(s if isinstance(s, Poly) else next(subscripts) for s in e.at))
    return e


def _number(values: _Values, s: ir.Stmt) -> tuple[ir.Stmt, int]:
    return (s, values.let(s)) if isinstance(s, ir.Let) else (s, values.number(s.value))


# ---- writing the normal form ---------------------------------------------------------------------------------------


class _Writer:
    """Chooses which values are named, names them, and writes the statements in order."""

    def __init__(self, kernel: ir.Kernel, values: _Values, statements: list[tuple[ir.Stmt, int]]) -> None:
        self.values = values
        self.axes = frozenset(a.name for a in kernel.axes)
        live = self._live(v for s, v in statements if not isinstance(s, ir.Let))
        self.statements = [(s, v) for s, v in statements if v in live]
        # Every live value, operands first, with the statement that needs it first.
        self.order: dict[int, ir.Stmt] = {}
        for s, v in self.statements:
            for u in self._operands_first(v):
                self.order[u] = s
        self.names = {v: name for v, name in values.names.items() if v in live}
        self.taken = taken_names(kernel) | set(values.lets)
        self._name_values()

    def body(self) -> tuple[ir.Stmt, ...]:
        exprs, kids = self.values.exprs, self.values.kids
        loads = {v for v in self.order if isinstance(exprs[v], ir.Load)}
        affine = [v for v in self.order if v in loads and not kids[v]]
        # Gathers that wait for no reduction start as early as their subscripts allow.
        below = {v: self._live(iter((v,))) for v in loads if kids[v]}
        early = {v for v in below if not any(isinstance(exprs[u], ir.Reduce) for u in below[v])}
        needed = frozenset[int]().union(*(below[v] for v in early))
        first = dict.fromkeys(affine + [v for v in self.order if v in needed])
        out: list[ir.Stmt] = [self._let(v) for v in first if v in self.names]
        pending = [v for v in self.order if v in self.names and v not in first]
        done = 0
        for s, v in self.statements:
            while done < len(pending) and self.order[pending[done]] is s:
                out.append(self._let(pending[done]))
                done += 1
            if not isinstance(s, ir.Let):
                at = tuple(p.substitute(self.values.bound) for p in s.at)
                out.append(replace(s, at=at, value=self._use(v)))
        return tuple(out)

    def _let(self, v: int) -> ir.Let:
        e = self.values.exprs[v]
        kids = tuple(self._use(k) for k in self.values.kids[v])
        value = kids[0] if isinstance(e, ir.Ref) else with_children(e, kids)
        return ir.Let(self.names[v], value, self.values.spans.get(v, self.order[v].span))

    def _use(self, v: int) -> ir.Expr:
        e = self.values.exprs[v]
        if v in self.names:
            return ir.Ref(self.names[v], e.dtype, e.axes, e.span)
        return with_children(e, tuple(self._use(k) for k in self.values.kids[v]))

    def _live(self, roots: Iterator[int]) -> set[int]:
        stack, seen = list(roots), set[int]()
        while stack:
            v = stack.pop()
            if v not in seen:
                seen.add(v)
                stack.extend(self.values.kids[v])
        return seen

    def _operands_first(self, root: int) -> Iterator[int]:
        """Values below `root` that are not in `order` yet; iterative, as chains of statements may be long."""
        stack = [(root, False)]
        while stack:
            v, expanded = stack.pop()
            if v in self.order:
                continue
            if expanded:
                yield v
            else:
                stack.append((v, True))
                stack.extend((k, False) for k in reversed(self.values.kids[v]))

    # -- names ---------------------------------------------------------------------------------------------------
    def _name_values(self) -> None:
        uses: dict[int, int] = {}
        for v in self.order:
            for k in self.values.kids[v]:
                uses[k] = uses.get(k, 0) + 1
        for s, v in self.statements:
            if not isinstance(s, ir.Let):
                uses[v] = uses.get(v, 0) + 1
        for v, s in self.order.items():
            e = self.values.exprs[v]
            if v in self.names:
                continue
            owner = s.name if isinstance(s, ir.Let) else s.tensor
            if isinstance(e, ir.Load):
                self.names[v] = self._fresh(self._load_name(v, e))
            elif isinstance(e, ir.Reduce):
                self.names[v] = self._fresh(f"{owner}_{e.kind}")
            elif isinstance(e, ir.Op | ir.Cast) and uses[v] > 1 and not _trivial(e):
                self.names[v] = self._fresh(f"{owner}_{e.fn if isinstance(e, ir.Op) else e.to.name}")

    def _load_name(self, v: int, load: ir.Load) -> str:
        """`x_mn` for `x[m, n]`, `x_row_col` for `x[row, col]`, `x_mt` for the gather `x[m, t]`."""
        kids = iter(self.values.kids[v])
        parts: list[str] = []
        for s in load.at:
            if not isinstance(s, Poly):
                parts.append(self.names.get(next(kids), "at"))
            elif s.is_constant:
                parts.append(str(s.constant))
            else:
                # The indices of the subscript in the order in which they are written out: `d` of `d + D // 2`.
                found = sorted(s.symbols & self.axes, key=str(s).find)
                parts.extend(found or sorted(s.symbols))
        letters = "".join(parts) if all(len(p) == 1 for p in parts) else "_".join(parts)
        return f"{load.tensor}_{letters}" if letters else f"{load.tensor}_0"

    def _fresh(self, name: str) -> str:
        return fresh(name, self.taken)
