"""What must a kernel move and compute, whatever its schedule? Exact, as polynomials in its dimensions.

Bytes: every element that is read is read once, every element that is stored is written once; what is overwritten in
place counts both ways, and a tensor that is repeated along an index counts once, as it lies in memory. Operations:
equal ones are done once, each for every value of the indices it has, as a compiler leaves them; a reduction of n values
takes n - 1. What a schedule makes of it, which may read and compute again, is `kgen.codegen.traffic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from kgen.codegen.operations import DIVISION, FLOPS, KINDS, SPECIAL, Instructions, kind
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import REDUCTIONS

# The subscripts of an access: each one's polynomial, or the number of a gathered value, and the names in it.
Reach = tuple[tuple[Poly | int, frozenset[str]], ...]

_REDUCES = {"sum": "add", "prod": "mul"}
ONE = Poly.const(1)


@dataclass(frozen=True)
class Moved:
    """Bytes of one tensor that are read and written. `whole`: all of it, not a part that the subscripts reach."""

    tensor: ir.Tensor
    read: Poly
    written: Poly
    whole: bool


@dataclass(frozen=True)
class Work:
    """Operations by kind (`kgen.codegen.operations.KINDS`). `fused`: of the additions, those that take a product which
    nothing else takes, and are one instruction with it. `functions`: special functions by name."""

    counts: Mapping[str, Poly]
    fused: Poly
    functions: Mapping[str, Poly]

    @property
    def flops(self) -> Poly:
        """Floating-point operations; a fused multiply-add is two, a special function one."""
        return sum((self.counts[k] for k in FLOPS), start=Poly.const(0))

    def instructions(self, dims: Mapping[str, int]) -> Instructions:
        """Instructions of the two units that floating-point operations take most of, for sizes `dims`."""
        n = {k: p.evaluate(dims) for k, p in self.counts.items()}
        special, f32 = n["division"] * DIVISION.special, n["division"] * DIVISION.f32
        for fn, p in self.functions.items():
            special += p.evaluate(dims) * SPECIAL[fn].special
            f32 += p.evaluate(dims) * SPECIAL[fn].f32
        return Instructions(special, f32 + n["add"] + n["mul"] - self.fused.evaluate(dims))


@dataclass(frozen=True)
class Cost:
    """What a kernel moves and computes."""

    moved: tuple[Moved, ...]
    work: Work

    @property
    def read(self) -> Poly:
        """Bytes read."""
        return sum((m.read for m in self.moved), start=Poly.const(0))

    @property
    def written(self) -> Poly:
        """Bytes written."""
        return sum((m.written for m in self.moved), start=Poly.const(0))

    @property
    def bytes(self) -> Poly:
        """Bytes moved, both ways together."""
        return self.read + self.written


def cost(kernel: ir.Kernel, dims: Mapping[str, int]) -> Cost:
    """The cost of `kernel`. `dims`: the sizes of its dimensions, which decide where one of two polynomials is smaller:
    a tensor that is read in part takes no more than what its subscripts reach, and no more than it holds."""
    graph = Graph.of(kernel)
    reads: dict[str, list[Reach]] = {}
    for tensor, at in graph.loads():
        reads.setdefault(tensor, []).append(at)
    writes: dict[str, list[Reach]] = {}
    for s in kernel.body:
        if not isinstance(s, ir.Let):
            writes.setdefault(s.tensor, []).append(tuple((p, p.symbols) for p in s.at))
    moved: list[Moved] = []
    for t in kernel.tensors:
        size = Poly.const(t.dtype.itemsize)
        read, all_read = _reached(kernel, t, reads.get(t.name, []), dims)
        if t.role == "out":
            written, all_written = prod(t.shape, start=ONE), True  # the checker proves that every element is stored
        else:
            written, all_written = _reached(kernel, t, writes.get(t.name, []), dims)
        if t.name in reads or t.name in writes:
            moved.append(Moved(t, read * size, written * size, all_read and all_written))
    return Cost(tuple(moved), graph.work())


def _reached(kernel: ir.Kernel, t: ir.Tensor, accesses: list[Reach], dims: Mapping[str, int]) -> tuple[Poly, bool]:
    """Elements of `t` that some subscripts reach, and whether those are all; none where there are no subscripts.

    Along each dimension that is at most what the indices in the subscripts take, and the dimension's size; of all
    together, at most what the indices in all of them take. A gather that meets one element several times reaches less.
    """
    if not accesses:
        return Poly.const(0), True
    extents = {a.name: a.extent for a in kernel.axes}
    known = {**dims, **{n: int(v) for n, v in kernel.consts if isinstance(v, int)}}

    def points(axes: Iterable[str]) -> Poly:
        return prod((extents[a] for a in sorted(axes)), start=ONE)

    def smaller(a: Poly, b: Poly) -> Poly:
        return a if a.evaluate(known) <= b.evaluate(known) else b

    total = Poly.const(0)
    for at in dict.fromkeys(accesses):
        total = total + points(frozenset[str]().union(*(axes for _, axes in at)) & extents.keys())
    whole, product = prod(t.shape, start=ONE), ONE
    for i, size in enumerate(t.shape):
        along = {at[i] for at in accesses}
        product = product * smaller(
            size, sum((points(axes & extents.keys()) for _, axes in along), start=Poly.const(0))
        )
    best = smaller(smaller(whole, product), total)
    return best, best == whole


# ---- operations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    e: ir.Expr
    args: tuple[int, ...]


@dataclass
class Graph:
    """The values that some stores need, each distinct one once: equal expressions are one node, names are gone."""

    extents: Mapping[str, Poly]
    nodes: list[_Node] = field(default_factory=list[_Node])
    uses: dict[int, int] = field(default_factory=dict[int, int])
    sums: list[tuple[int, frozenset[str], frozenset[str]]] = field(
        default_factory=list[tuple[int, frozenset[str], frozenset[str]]]
    )
    lets: dict[str, ir.Expr] = field(default_factory=dict[str, ir.Expr])
    _numbers: dict[object, int] = field(default_factory=dict[object, int])
    _names: dict[str, int] = field(default_factory=dict[str, int])

    @staticmethod
    def of(kernel: ir.Kernel, body: Iterable[ir.Stmt] | None = None) -> Graph:
        """The graph of what the stores of `kernel` need, or of all that is in `body`, some of its statements."""
        graph = Graph({a.name: a.extent for a in kernel.axes})
        statements = tuple(kernel.body if body is None else body)
        graph.lets = {s.name: s.value for s in statements if isinstance(s, ir.Let)}
        for s in statements:
            if isinstance(s, ir.Let):
                if body is not None:
                    graph._named(s.name)
                continue
            top = graph._add(s.value)
            graph.uses[top] = graph.uses.get(top, 0) + 1
            if isinstance(s, ir.Accumulate):
                axes = ir.target_symbols(s) & graph.extents.keys()
                graph.sums.append((top, s.value.axes | frozenset(s.over), axes))
        return graph

    def loads(self) -> Iterator[tuple[str, Reach]]:
        """Every distinct load: of which tensor, and where."""
        for n in self.nodes:
            if isinstance(n.e, ir.Load):
                values = iter(n.args)
                yield (
                    n.e.tensor,
                    tuple((s, s.symbols) if isinstance(s, Poly) else (next(values), s.axes) for s in n.e.at),
                )

    def _named(self, name: str) -> int:
        if name not in self._names:
            self._names[name] = self._add(self.lets[name])
        return self._names[name]

    def _add(self, e: ir.Expr) -> int:
        if isinstance(e, ir.Ref) and e.name in self.lets:
            return self._named(e.name)
        args = tuple(map(self._add, ir.children(e)))
        key = (type(e).__name__, _own(e), args, e.dtype, e.axes)
        if key in self._numbers:
            return self._numbers[key]
        for a in args:
            self.uses[a] = self.uses.get(a, 0) + 1
        number = self._numbers[key] = len(self.nodes)
        self.nodes.append(_Node(e, args))
        return number

    def points(self, axes: Iterable[str]) -> Poly:
        """How many values of the indices `axes` there are together."""
        return prod((self.extents[a] for a in sorted(axes)), start=ONE)

    def operations(self) -> Iterable[tuple[str, str, frozenset[str], frozenset[str], bool]]:
        """(kind, function, over these indices, less over those, whether it is fused with a product): done as often as
        there are values of the first, less those of the second where it reduces."""
        none: frozenset[str] = frozenset()
        for n in self.nodes:
            e = n.e
            if isinstance(e, ir.Op):
                floating = e.args[-1].dtype.kind == "float"
                what = kind(e.fn, floating)
                # A product counts for one addition, even where both operands are products.
                fused = what == "add" and any(self._fuses(a, e.axes) for a in n.args)
                yield what, e.fn, e.axes, none, fused
            elif isinstance(e, ir.Reduce):
                floating = e.arg.dtype.kind == "float"
                what = _REDUCES.get(e.kind, "other") if floating else "integer"
                fused = what == "add" and bool(n.args) and self._fuses(n.args[0], e.arg.axes)
                yield what, e.kind, e.arg.axes | frozenset(e.over), e.axes, fused
        for top, axes, target in self.sums:
            what = "add" if self.nodes[top].e.dtype.kind == "float" else "integer"
            yield what, "sum", axes, target, what == "add" and self._fuses(top, axes)

    def _fuses(self, number: int, axes: frozenset[str]) -> bool:
        """Whether a product has one use, which is an addition over the same indices."""
        e = self.nodes[number].e
        product = isinstance(e, ir.Op) and e.fn == "mul" and e.dtype.kind == "float"
        return product and self.uses.get(number, 0) == 1 and e.axes == axes

    def work(self) -> Work:
        """All operations."""
        counts = {k: Poly.const(0) for k in KINDS}
        functions: dict[str, Poly] = {}
        fused = Poly.const(0)
        for what, fn, axes, less, fuses in self.operations():
            often = self.points(axes) - (self.points(less) if less != axes and _reduces(fn) else Poly.const(0))
            counts[what] = counts[what] + often
            if what == "special":
                functions[fn] = functions.get(fn, Poly.const(0)) + often
            if fuses:
                fused = fused + often
        return Work(counts, fused, functions)


def _reduces(fn: str) -> bool:
    return fn in REDUCTIONS


def _own(e: ir.Expr) -> object:
    """What tells a node from others of its type with the same operands."""
    match e:
        case ir.Const():
            return repr(e.value)
        case ir.Scalar() | ir.Ref():
            return e.name
        case ir.IndexValue():
            return e.index
        case ir.Load():
            return e.tensor, tuple(s if isinstance(s, Poly) else None for s in e.at)
        case ir.Op():
            return e.fn
        case ir.Cast():
            return e.to
        case ir.Reduce():
            return e.kind, e.over
