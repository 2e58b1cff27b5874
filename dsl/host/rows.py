"""What a kernel does with the rows of a chunk: each by itself, or sums over them; anything else mixes them.

A kernel that is called on chunks must give the same for every way to cut them. So it is, where each output element is
made of one row, or is a sum (`+=`) of what single rows give. This is read off the kernel's text, along all of its
choices: rows are what an index over a dimension of the chunk goes over, and that index stands nowhere but in subscripts
of that dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kgen.dsl import ast
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import CALLABLE_OPS
from kgen.dsl.check.signature import index_poly
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.source import Span


class Mixes(Exception):
    """A kernel's result hangs on more than one row: why, and where in the kernel."""

    def __init__(self, reason: str, span: Span) -> None:
        super().__init__(reason)
        self.reason, self.span = reason, span


@dataclass(frozen=True)
class Rows:
    """What a kernel that mixes no rows does with them: the positions of the outputs that are sums over rows. Other
    outputs without a dimension of rows are made of no row at all."""

    summed: frozenset[int]


def rows_of(kernel: ast.Kernel, dims: frozenset[str]) -> Rows:
    """How `kernel` treats the index of `dims`, those of its dimensions that mention the chunk. Raises Mixes."""
    return _Reading(kernel, dims).run()


class _Reading:
    def __init__(self, kernel: ast.Kernel, dims: frozenset[str]) -> None:
        self.kernel = kernel
        self.dims = dims
        self.shapes = {
            p.name: p.type.dims for p in (*kernel.params, *kernel.outputs) if isinstance(p.type, ast.TensorType)
        }
        self.dtypes = DTYPES.keys() | {p.type.dtype for p in (*kernel.params, *kernel.outputs)}
        self.indices: set[str] = set()  # those that go over rows
        self.values: dict[str, frozenset[str]] = {}  # name -> the indices of rows that its value has
        self.stored: set[str] = set()
        self.summed: set[str] = set()

    def run(self) -> Rows:
        """Go through all statements."""
        self._block(self.kernel.body)
        both = self.stored & self.summed
        if both:
            raise Mixes(
                f"'{min(both)}' is a sum over rows by some of its choices, and none by others", self.kernel.span
            )
        return Rows(frozenset(k for k, o in enumerate(self.kernel.outputs) if o.name in self.summed))

    # -- statements ----------------------------------------------------------------------------------------------
    def _block(self, body: Iterable[ast.Stmt]) -> None:
        for s in body:
            match s:
                case ast.Bind():
                    self._bind(s)
                case ast.Assign():
                    found = [self._rows(v) for v in s.values]
                    for t, own in zip(s.targets, found, strict=False):
                        self._assign(t, own)
                case ast.Accumulate():
                    self._accumulate(s)
                case ast.If():
                    self._block(s.body)
                    self._block(s.orelse)
                case ast.Require():
                    if self._named(s.condition) & self.dims:
                        raise Mixes("requires something of the number of rows", s.span)
                case ast.For():
                    raise Mixes("goes over rows in order", s.span)
                case _:
                    pass  # typical sizes and schedules have no part in what is computed

    def _bind(self, s: ast.Bind) -> None:
        for b in s.bindings:
            if isinstance(b.extent, ast.Name) and b.extent.id in self.dims:
                self.indices.add(b.index)
            elif self._named(b.extent) & self.dims:
                raise Mixes(f"has an index over {b.extent.span.text}", b.span)

    def _assign(self, t: ast.Name | ast.Subscript, own: frozenset[str]) -> None:
        if isinstance(t, ast.Name):
            self.values[t.id] = self.values.get(t.id, frozenset()) | own
            return
        over = self._subscripts(t)
        if own - over:
            raise Mixes("stores what one row gives for another", t.span)
        if not over:
            self.stored.add(t.tensor)

    def _accumulate(self, s: ast.Accumulate) -> None:
        own, over = self._rows(s.value), self._subscripts(s.target)
        if over:
            if own - over or self.indices - over:
                raise Mixes("sums over rows for each row", s.span)
            return
        if len(self.indices) > 1:
            raise Mixes("sums over pairs of rows", s.span)
        if self.indices:
            self.summed.add(s.target.tensor)
        else:
            self.stored.add(s.target.tensor)

    # -- expressions ---------------------------------------------------------------------------------------------
    def _rows(self, e: ast.Expr) -> frozenset[str]:
        """The indices of rows that a value has."""
        match e:
            case ast.Name():
                if e.id in self.indices:
                    raise Mixes("uses the number of a row as a value", e.span)
                if e.id in self.dims:
                    raise Mixes("uses the number of rows as a value", e.span)
                return self.values.get(e.id, frozenset())
            case ast.Unary():
                return self._rows(e.operand)
            case ast.Binary():
                return self._rows(e.left) | self._rows(e.right)
            case ast.Call():
                over = [a for a in e.args if isinstance(a, ast.Name) and a.id in self.indices]
                if over and (e.func in CALLABLE_OPS or e.func in self.dtypes):
                    raise Mixes("uses the number of a row as a value", e.span)
                if over:
                    raise Mixes(f"reduces over rows by {e.func}", e.span)
                return frozenset[str]().union(*(self._rows(a) for a in e.args))
            case ast.Subscript():
                return self._subscripts(e)
            case _:
                return frozenset()

    def _subscripts(self, e: ast.Subscript) -> frozenset[str]:
        """The indices of rows among the subscripts of a tensor, each where it must be."""
        found: frozenset[str] = frozenset()
        for d, i in zip(self.shapes.get(e.tensor, ()), e.indices, strict=False):
            if not self._named(d.expr) & self.dims:
                found |= self._rows(i)  # a position that a value gives
                continue
            own = self._position(i)
            bare = isinstance(i, ast.Name) and isinstance(d.expr, ast.Name)
            if own is None or not (bare or isinstance(d.expr, ast.Binary)):
                raise Mixes("takes other rows than the one at hand", e.span)
            found |= {own}
        return found

    def _position(self, e: ast.Expr) -> str | None:
        """The index that `e` is, but for a multiple of the number of rows."""
        names = self._named(e)
        indices = names & self.indices
        if len(indices) != 1 or names - indices - self.dims:
            return None
        (index,) = indices
        poly = index_poly(e, lambda n: Poly.sym(n.id), Diagnostics())
        none: Mapping[str, Poly | int] = dict.fromkeys(self.dims, 0)
        return index if poly is not None and poly.substitute(none) == Poly.sym(index) else None

    def _named(self, e: ast.Expr) -> set[str]:
        return {n.id for n in ast.walk(e) if isinstance(n, ast.Name)}
