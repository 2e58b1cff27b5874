"""From the graph of values back to statements: which values get a name, and in which order are they computed?

A value gets a name where the user gave it one, where it is used more than once, or where an expression would otherwise
nest too deeply to read. Statements follow the stores that need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kgen.codegen.derive.adjoints import Write, ordered
from kgen.codegen.derive.graph import Node
from kgen.codegen.names import fresh
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import DType

MAX_DEPTH = 7

_WORDS = {
    "where": "part", "eq": "hit", "lt": "below", "gt": "above", "exp": "e", "rsqrt": "rsqrt_of", "sqrt": "root",
    "sum": "total", "max": "peak", "min": "low", "prod": "product",
}  # fmt: skip


class Lowering:
    """Writes statements for a list of writes. `names` are users' names, `hints` names for gradients; `taken` names
    mean something else."""

    def __init__(self, names: Mapping[Node, str], hints: Mapping[Node, str], taken: set[str]) -> None:
        self._names = names
        self._hints = hints
        self._taken = set(taken)
        self._refs: dict[Node, ir.Ref] = {}
        self._depth: dict[Node, int] = {}
        self._uses: dict[Node, int] = {}
        self.body: list[ir.Stmt] = []

    def run(self, writes: Sequence[Write], over: Mapping[str, tuple[str, ...]]) -> tuple[ir.Stmt, ...]:
        """The statements; `over` has, by the text of its target, the axes that a summed write sums over."""
        nodes = ordered(w.value for w in writes)
        for a in nodes:
            for b in a.args:
                self._uses[b] = self._uses.get(b, 0) + 1
        for w in writes:
            self._uses[w.value] = self._uses.get(w.value, 0) + 1
        for w in writes:
            value = self._expr(w.value)
            if w.summed:
                self.body.append(ir.Accumulate(w.tensor, w.at, value, over[_key(w)], w.span))
            else:
                self.body.append(ir.Store(w.tensor, w.at, value, w.span))
        return tuple(self.body)

    def _expr(self, a: Node) -> ir.Expr:
        if a in self._refs:
            return self._refs[a]
        args = tuple(self._expr(b) for b in a.args)
        self._depth[a] = 1 + max((0 if b in self._refs else self._depth[b] for b in a.args), default=0)
        e = _expression(a, args)
        if not self._named(a):
            return e
        name = self._unique(self._names.get(a) or self._hints.get(a) or describe(a))
        self.body.append(ir.Let(name, e, a.span))
        self._refs[a] = ir.Ref(name, a.dtype, a.axes, a.span)
        return self._refs[a]

    def _named(self, a: Node) -> bool:
        if a in self._names:
            return True
        if _trivial(a):
            return False
        return self._uses.get(a, 0) > 1 or self._depth[a] > MAX_DEPTH

    def _unique(self, hint: str) -> str:
        return fresh(hint, self._taken)


def _key(w: Write) -> str:
    return f"{w.tensor}[{', '.join(map(str, w.at))}]"


def describe(a: Node) -> str:
    """A name for a value that the user gave none."""
    if a.fn == "div" and a.args[0].kind == "reduce" and a.args[0].reduction[0] == "sum":
        return "mean"
    return _WORDS.get(a.reduction[0] if a.kind == "reduce" else a.fn, "t")


def _trivial(a: Node) -> bool:
    """Not worth a name of its own: a leaf, or a sign or conversion in front of one."""
    if a.kind in ("const", "scalar", "index"):
        return True
    if a.kind == "load":
        return not a.args
    return (a.kind == "cast" or a.fn == "neg") and _trivial(a.args[0])


def _expression(a: Node, args: tuple[ir.Expr, ...]) -> ir.Expr:
    """The node with operands `args` as an expression of the IR."""
    if a.kind == "const":
        assert a.value is not None
        return ir.Const(a.value, a.dtype, a.span)
    if a.kind == "scalar":
        return ir.Scalar(str(a.data), a.dtype, a.span)
    if a.kind == "index":
        assert isinstance(a.data, Poly)
        return ir.IndexValue(a.data, a.dtype, a.axes, a.span)
    if a.kind == "load":
        gathers = iter(args)
        at = tuple(s if isinstance(s, Poly) else next(gathers) for s in a.at)
        return ir.Load(a.tensor, at, a.dtype, a.axes, a.span)
    if a.kind == "cast":
        assert isinstance(a.data, DType)
        return ir.Cast(a.data, args[0], a.dtype, a.axes, a.span)
    if a.kind == "reduce":
        kind, over = a.reduction
        return ir.Reduce(kind, args[0], over, a.dtype, a.axes, a.span)
    return ir.Op(a.fn, args, a.dtype, a.axes, a.span)
