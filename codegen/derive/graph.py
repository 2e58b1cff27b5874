"""Values as a graph: each distinct value of a kernel is one node, and new ones are simplified as they are made.

Nodes are interned, so equal subexpressions are the same object: that is the elimination of common subexpressions, and
what no store reaches is dead. Nodes that come from a kernel are kept as the user wrote them (`make`); `add`, `mul` and
the others simplify. No simplification changes a value by more than rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Mod, Poly, Sym
from kgen.dsl.dtypes import BOOL, I64, DType
from kgen.dsl.source import Span

# An index over tiles of an extent, one of some that are preferred if possible and none of others.
Spare = Callable[[Poly, tuple[str, ...], frozenset[str]], str]


@dataclass(frozen=True, eq=False)
class Node:
    """A value. `data` by `kind`: const, its value; scalar, its name; index, a `Poly`; load, the tensor and its affine
    subscripts (None for a gather, whose subscript is in `args`); op, its name; cast, the dtype it converts to;
    reduce, its kind and axes. `serial` grows from operands to users."""

    kind: str
    data: Hashable
    args: tuple[Node, ...]
    dtype: DType
    axes: frozenset[str]
    span: Span
    serial: int

    @property
    def fn(self) -> str:
        """The name of an op; empty for any other node."""
        return str(self.data) if self.kind == "op" else ""

    @property
    def value(self) -> float | int | bool | None:
        """What a literal stands for; None for any other node."""
        return self.data[1] if self.kind == "const" else None  # type: ignore[index]  # a const's data is a pair

    @property
    def tensor(self) -> str:
        """The tensor that a load reads."""
        assert isinstance(self.data, tuple)
        return self.data[0]

    @property
    def at(self) -> tuple[Poly | Node, ...]:
        """The subscripts of a load."""
        assert isinstance(self.data, tuple)
        gathers = iter(self.args)
        return tuple(next(gathers) if p is None else p for p in self.data[1])

    @property
    def reduction(self) -> tuple[str, tuple[str, ...]]:
        """Kind and axes of a reduction."""
        assert isinstance(self.data, tuple)
        return self.data


class Graph:
    """Makes nodes. `extents` has every index of the kernel; `span` is given to the nodes made from now on."""

    def __init__(self, extents: Mapping[str, Poly], span: Span) -> None:
        self.extents = dict(extents)
        self.span = span
        self._nodes: dict[Hashable, Node] = {}
        self._products: dict[Node, tuple[Node, ...]] = {}  # the factors of products that may be regrouped

    # -- nodes as they are -----------------------------------------------------------------------------------------
    def make(
        self, kind: str, data: Hashable, args: tuple[Node, ...], dtype: DType, axes: frozenset[str], span: Span
    ) -> Node:
        """The node with these fields: the existing one where there is one."""
        key = (kind, data, tuple(a.serial for a in args), dtype)
        if key not in self._nodes:
            self._nodes[key] = Node(kind, data, args, dtype, axes, span, len(self._nodes))
        return self._nodes[key]

    def const(self, value: float | int | bool, dtype: DType) -> Node:
        """A literal."""
        value = bool(value) if dtype == BOOL else float(value) if dtype.kind == "float" else int(value)
        return self.make("const", (repr(value), value), (), dtype, frozenset(), self.span)

    def index(self, poly: Poly) -> Node:
        """Index arithmetic as a value."""
        return self.make("index", poly, (), I64, self.names(poly), self.span)

    def names(self, poly: Poly) -> frozenset[str]:
        """The indices in `poly`."""
        return poly.symbols & self.extents.keys()

    def load(self, tensor: str, at: Iterable[Poly | Node], dtype: DType, span: Span | None = None) -> Node:
        """An element of a tensor; `dtype` is the tensor's compute dtype."""
        at = tuple(at)
        args = tuple(s for s in at if isinstance(s, Node))
        axes = frozenset[str]().union(*(self.names(s) if isinstance(s, Poly) else s.axes for s in at))
        data = (tensor, tuple(s if isinstance(s, Poly) else None for s in at))
        return self.make("load", data, args, dtype, axes, span or self.span)

    def op(self, fn: str, *args: Node, dtype: DType | None = None) -> Node:
        """An op as it stands."""
        axes = frozenset[str]().union(*(a.axes for a in args))
        return self.make("op", fn, args, dtype or args[-1].dtype, axes, self.span)

    def reduce(self, kind: str, a: Node, over: Iterable[str]) -> Node:
        """A reduction as it stands, its axes in the order of their declaration."""
        over = tuple(n for n in self.extents if n in set(over))
        return self.make("reduce", (kind, over), (a,), a.dtype, a.axes - frozenset(over), self.span) if over else a

    def cast(self, a: Node, dtype: DType) -> Node:
        """`a` in compute dtype `dtype`."""
        if a.dtype == dtype:
            return a
        if a.value is not None:
            return self.const(a.value, dtype)
        return self.make("cast", dtype, (a,), dtype, a.axes, self.span)

    # -- arithmetic, simplified ------------------------------------------------------------------------------------
    def neg(self, a: Node) -> Node:
        """-a"""
        if a.value is not None:
            return self.const(-a.value, a.dtype)
        if a.fn == "neg":
            return a.args[0]
        coefficient, factors = self._split(a)
        return self.op("neg", a) if coefficient == 1 else self._product(-coefficient, factors, a.dtype)

    def add(self, a: Node, b: Node) -> Node:
        """a + b"""
        if a.value is not None and b.value is not None:
            return self.const(a.value + b.value, a.dtype)
        if a.value == 0:
            return b
        if b.value == 0:
            return a
        (p, fs), (q, gs) = self._split(a), self._split(b)
        if fs == gs:
            return self._product(p + q, fs, a.dtype)
        if b.fn == "neg":
            return self.op("sub", a, b.args[0])
        if q < 0 and b in self._products:
            return self.op("sub", a, self._product(-q, gs, a.dtype))
        if a.fn == "neg" or (p < 0 and a in self._products):
            return self.op("sub", b, self._product(-p, fs, a.dtype))
        return self.op("add", a, b)

    def total(self, parts: Iterable[Node]) -> Node:
        """The sum of at least one value, multiples of the same value taken together."""
        distinct: list[Node] = []
        for a in parts:
            factors = self._split(a)[1]
            for i, b in enumerate(distinct):
                if self._split(b)[1] == factors:
                    distinct[i] = self.add(b, a)
                    break
            else:
                distinct.append(a)
        result = distinct[0]
        for a in distinct[1:]:
            result = self.add(result, a)
        return result

    def sub(self, a: Node, b: Node) -> Node:
        """a - b"""
        return self.add(a, self.neg(b))

    def mul(self, a: Node, b: Node) -> Node:
        """a * b, with factors that carry fewer indices multiplied first: they are computed once a row. Of equals the
        newest comes first, which is a gradient: `g * r * r * r` stays in range where `r * r * r` does not."""
        (p, fs), (q, gs) = self._split(a), self._split(b)
        return self._product(p * q, fs + gs, a.dtype)

    def div(self, a: Node, b: Node) -> Node:
        """a / b"""
        if b.value == 1:
            return a
        coefficient, factors = self._split(a)
        if coefficient == 1 or not factors:
            return self.op("div", a, b)
        return self.scale(coefficient, self.op("div", self._product(1, factors, a.dtype), b))

    def scale(self, value: float, a: Node) -> Node:
        """`value * a` for a number."""
        return self.mul(self.const(value, a.dtype), a)

    def where(self, c: Node, a: Node, b: Node) -> Node:
        """where(c, a, b)"""
        if c.value is not None:
            return a if c.value else b
        if a.fn == "where" and a.args[0] is c:
            a = a.args[1]
        if b.fn == "where" and b.args[0] is c:
            b = b.args[2]
        return a if a is b else self.op("where", c, a, b)

    def compare(self, fn: str, a: Node, b: Node) -> Node:
        """A comparison."""
        return self.op(fn, a, b, dtype=BOOL)

    def sum(self, a: Node, over: Iterable[str]) -> Node:
        """The sum of `a` over tile axes, with factors that lack them taken out; an axis that `a` lacks multiplies by
        its extent."""
        over = [n for n in self.extents if n in set(over)]
        count = math.prod((self.extents[n] for n in over if n not in a.axes), start=Poly.const(1))
        here = frozenset(over) & a.axes
        coefficient, factors = self._split(a)
        outside = [f for f in factors if not f.axes & here]
        inside = [f for f in factors if f.axes & here]
        total = self._product(coefficient, tuple(outside), a.dtype)
        if inside:
            total = self.mul(self.reduce("sum", self._product(1, tuple(inside), a.dtype), here), total)
        if count == Poly.const(1):
            return total
        if count.is_constant:
            return self.scale(count.constant, total)
        return self.mul(self.cast(self.index(count), a.dtype), total)

    def freeze(self, a: Node) -> Node:
        """`a`, from now on a number times one factor, because several values share it."""
        coefficient, factors = self._split(a)
        if len(factors) < 2:
            return a
        shared = self._product(1, factors, a.dtype)
        self._products.pop(shared, None)
        return self._product(coefficient, (shared,), a.dtype)

    def _split(self, a: Node) -> tuple[float | int, tuple[Node, ...]]:
        """`a` as a number times factors."""
        if a.value is not None and a.dtype.kind == "float":
            return a.value, ()
        if a.fn == "neg":
            coefficient, factors = self._split(a.args[0])
            return -coefficient, factors
        factors = self._products.get(a, (a,))
        numbers = [f.value for f in factors if f.value is not None]
        return math.prod(numbers), tuple(f for f in factors if f.value is None)

    def _product(self, coefficient: float | int, factors: tuple[Node, ...], dtype: DType) -> Node:
        if not factors or coefficient == 0:
            return self.const(coefficient, dtype)
        ordered = sorted(factors, key=lambda f: (len(f.axes), -f.serial))
        if abs(coefficient) != 1:
            ordered.insert(0, self.const(coefficient, dtype))
        total = ordered[0]
        for f in ordered[1:]:
            total = self.op("mul", total, f)
        if len(ordered) > 1:
            self._products[total] = tuple(ordered)
        return self.neg(total) if coefficient == -1 else total

    # -- rewriting -------------------------------------------------------------------------------------------------
    def rebuild(self, a: Node, args: tuple[Node, ...]) -> Node:
        """`a` with other operands."""
        if args == a.args:
            return a
        if a.kind == "load":
            gathers = iter(args)
            return self.load(a.tensor, [p if isinstance(p, Poly) else next(gathers) for p in a.at], a.dtype, a.span)
        axes = frozenset[str]().union(*(x.axes for x in args))
        if a.kind == "reduce":
            axes -= frozenset(a.reduction[1])
        return self.make(a.kind, a.data, args, a.dtype, axes, a.span)

    def replace(self, a: Node, new: Mapping[Node, Node], memo: dict[Node, Node]) -> Node:
        """`a` with every node of `new` replaced; `memo` is shared by calls with the same `new`."""
        if a in new:
            return new[a]
        if a not in memo:
            memo[a] = self.rebuild(a, tuple(self.replace(x, new, memo) for x in a.args))
        return memo[a]

    def at_index(self, a: Node, env: Mapping[str, Poly], spare: Spare) -> Node:
        """The value of `a` where its free indices are those of `env`, all replaced at once. Every value is recomputed
        from inputs, so this may also be what another program computes.

        An index that a reduction runs over is another one than an index of that name outside: it is left alone, and
        gives way to `spare(extent, preferred, avoided)`, an index over tiles, where `env` puts its name inside."""
        return self._at_index(a, env, spare, {})

    def _at_index(
        self, a: Node, env: Mapping[str, Poly], spare: Spare, memo: dict[tuple[Node, frozenset[tuple[str, Poly]]], Node]
    ) -> Node:
        env = {name: p for name, p in env.items() if name in a.axes}  # only what is free in `a`
        if not env:
            return a
        key = a, frozenset(env.items())
        if key not in memo:
            if a.kind == "reduce":
                memo[key] = self._reduce_at(a, env, spare, memo)
                return memo[key]
            args = tuple(self._at_index(x, env, spare, memo) for x in a.args)
            if a.kind == "index":
                assert isinstance(a.data, Poly)
                memo[key] = self.index(self.fold(a.data.substitute(env)))
            elif a.kind == "load":
                gathers = iter(args)
                at = [self.fold(p.substitute(env)) if isinstance(p, Poly) else next(gathers) for p in a.at]
                memo[key] = self.load(a.tensor, at, a.dtype, a.span)
            else:
                memo[key] = self.rebuild(a, args)
        return memo[key]

    def _reduce_at(
        self,
        a: Node,
        env: Mapping[str, Poly],
        spare: Spare,
        memo: dict[tuple[Node, frozenset[tuple[str, Poly]]], Node],
    ) -> Node:
        """A reduction where its free indices, all those of `env`, are moved. What it runs over is renamed where it
        would capture an index of the new places."""
        kind, over = a.reduction
        arriving = frozenset[str]().union(*(self.names(p) for p in env.values()))
        inside = {*over, *arriving, *(a.axes - env.keys())}
        inner, new = dict(env), []
        for name in over:
            if name in arriving:
                fresh = spare(self.extents[name], tuple(env), frozenset(inside))
                inside.add(fresh)
                inner[name] = Poly.sym(fresh)
                name = fresh
            new.append(name)
        arg = self._at_index(a.args[0], inner, spare, memo)
        ordered = tuple(new) if len(new) == 1 else tuple(n for n in self.extents if n in new)
        return self.make("reduce", (kind, ordered), (arg,), a.dtype, arg.axes - frozenset(new), a.span)

    def fold(self, p: Poly) -> Poly:
        """`p` with `j // c` and `j % c` folded for indices j that stay below c."""
        total = Poly.const(0)
        for mono, c in p.terms:
            term = Poly.const(c)
            for atom in mono:
                if isinstance(atom, Sym):
                    term = term * Poly.sym(atom.name)
                    continue
                num, den = self.fold(atom.num), self.fold(atom.den)
                name = num.as_symbol
                if name is not None and self.extents.get(name) == den:
                    term = term * (num if isinstance(atom, Mod) else Poly.const(0))
                else:
                    term = term * (num.floordiv(den) if isinstance(atom, FloorDiv) else num.mod(den))
            total = total + term
        return total


# ---- from the tile IR ------------------------------------------------------------------------------------------------


class Reader:
    """Turns the expressions of a kernel into nodes. `names` collects the names that its `Let`s give; `split` replaces
    an index by arithmetic over others, which `parts` names."""

    def __init__(self, graph: Graph, split: Mapping[str, Poly], parts: Mapping[str, tuple[str, ...]]) -> None:
        self.graph = graph
        self.names: dict[Node, str] = {}
        self._split = split
        self._parts = parts
        self._lets: dict[str, Node] = {}

    def let(self, s: ir.Let) -> None:
        """Read `s`; its name now stands for its value."""
        node = self.expr(s.value)
        self._lets[s.name] = node
        if node.kind not in ("const", "scalar", "index"):
            self.names.setdefault(node, s.name)

    def value(self, let: str) -> Node:
        """The value of the `Let` of this name, which was read."""
        return self._lets[let]

    def poly(self, p: Poly) -> Poly:
        """A subscript over the indices of the graph."""
        return self.graph.fold(p.substitute(self._split)) if p.symbols & self._split.keys() else p

    def expr(self, e: ir.Expr) -> Node:
        """The node of an expression."""
        graph = self.graph
        if isinstance(e, ir.Ref):
            return self._lets[e.name]
        if isinstance(e, ir.Const):
            return graph.make("const", (repr(e.value), e.value), (), e.dtype, frozenset(), e.span)
        if isinstance(e, ir.Scalar):
            return graph.make("scalar", e.name, (), e.dtype, frozenset(), e.span)
        if isinstance(e, ir.IndexValue):
            p = self.poly(e.index)
            return graph.make("index", p, (), I64, graph.names(p), e.span)
        if isinstance(e, ir.Load):
            at = [self.poly(s) if isinstance(s, Poly) else self.expr(s) for s in e.at]
            return graph.load(e.tensor, at, e.dtype, e.span)
        if isinstance(e, ir.Reduce):
            a = self.expr(e.arg)
            over = tuple(p for n in e.over for p in self._parts.get(n, (n,)))
            return graph.make("reduce", (e.kind, over), (a,), e.dtype, a.axes - frozenset(over), e.span)
        args = (self.expr(e.arg),) if isinstance(e, ir.Cast) else tuple(map(self.expr, e.args))
        axes = frozenset[str]().union(*(a.axes for a in args))
        if isinstance(e, ir.Cast):
            return graph.make("cast", e.to, args, e.dtype, axes, e.span)
        return graph.make("op", e.fn, args, e.dtype, axes, e.span)
