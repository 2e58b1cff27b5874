"""A few words to write tile IR by hand, for tests of single passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kgen.codegen.variant import TensorClass, Variant
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import SCALAR_OPS
from kgen.dsl.dtypes import BF16, BOOL, F32, I64, DType
from kgen.dsl.source import SourceFile, Span

SOURCE = SourceFile("test.kdsl", "\n" * 200)


def at_line(line: int) -> Span:
    return Span(SOURCE, line, 1, line, 2)


HERE = at_line(1)


def poly(text: str | int | Poly) -> Poly:
    """`"d + D//2"` as a polynomial."""
    if isinstance(text, Poly):
        return text
    if isinstance(text, int):
        return Poly.const(text)

    class _Names(dict[str, "_P"]):
        def __missing__(self, name: str) -> _P:
            return _P(Poly.sym(name))

    found = eval(text, {"__builtins__": {}}, _Names())
    return found.p if isinstance(found, _P) else Poly.const(found)


class _P:
    """Operators of index arithmetic for `poly`."""

    def __init__(self, p: Poly) -> None:
        self.p = p

    @staticmethod
    def _of(o: _P | int) -> Poly:
        return o.p if isinstance(o, _P) else Poly.const(o)

    def __add__(self, o: _P | int) -> _P:
        return _P(self.p + self._of(o))

    __radd__ = __add__

    def __sub__(self, o: _P | int) -> _P:
        return _P(self.p - self._of(o))

    def __mul__(self, o: _P | int) -> _P:
        return _P(self.p * self._of(o))

    __rmul__ = __mul__

    def __floordiv__(self, o: _P | int) -> _P:
        return _P(self.p.floordiv(self._of(o)))

    def __mod__(self, o: _P | int) -> _P:
        return _P(self.p.mod(self._of(o)))


def tensor(name: str, shape: str, role: str = "in", dtype: DType = BF16) -> ir.Tensor:
    """`tensor("x", "*M, N")`."""
    dims = [d.strip() for d in shape.split(",") if d.strip()]
    star = bool(dims) and dims[0].startswith("*")
    return ir.Tensor(name, dtype, tuple(poly(d.lstrip("*")) for d in dims), role, star, False, HERE)


class KernelKit:
    """Declarations and statements of one kernel; expressions look names up in them."""

    def __init__(
        self, tensors: Iterable[ir.Tensor], parallel: str = "", tile: str = "", scalars: Iterable[str] = ()
    ) -> None:
        """`parallel` and `tile` as `"b in B, s in S"`."""
        self.tensors = {t.name: t for t in tensors}
        self.axes = [self._axis(b, "parallel") for b in parallel.split(",") if b]
        self.axes += [self._axis(b, "tile") for b in tile.split(",") if b]
        self.scalars = tuple(ir.ScalarParam(s, F32, None, HERE) for s in scalars)
        self.body: list[ir.Stmt] = []

    @staticmethod
    def _axis(text: str, kind: str) -> ir.Axis:
        name, extent = text.split(" in ")
        return ir.Axis(name.strip(), poly(extent.strip()), kind, HERE)

    def _used(self, p: Poly) -> frozenset[str]:
        return p.symbols & {a.name for a in self.axes}

    def _line(self) -> Span:
        return at_line(10 + len(self.body))

    def load(self, name: str, *at: str | int | ir.Expr) -> ir.Load:
        subs = tuple(poly(s) if isinstance(s, str | int) else s for s in at)
        axes = frozenset[str]().union(*(self._used(s) if isinstance(s, Poly) else s.axes for s in subs))
        return ir.Load(name, subs, self.tensors[name].dtype.compute, axes, self._line())

    def op(self, fn: str, *args: ir.Expr | float) -> ir.Op:
        exprs = tuple(ir.Const(a, F32, self._line()) if isinstance(a, int | float) else a for a in args)
        kind = SCALAR_OPS[fn].result
        dtype = BOOL if kind == "bool" else exprs[-1].dtype
        return ir.Op(fn, exprs, dtype, frozenset().union(*(e.axes for e in exprs)), self._line())

    def reduce(self, kind: str, arg: ir.Expr, *over: str) -> ir.Reduce:
        return ir.Reduce(kind, arg, over, arg.dtype, arg.axes - set(over), self._line())

    def cast(self, to: DType, arg: ir.Expr) -> ir.Cast:
        return ir.Cast(to, arg, to.compute, arg.axes, self._line())

    def index(self, text: str) -> ir.IndexValue:
        return ir.IndexValue(poly(text), I64, self._used(poly(text)), self._line())

    def scalar(self, name: str) -> ir.Scalar:
        return ir.Scalar(name, F32, self._line())

    def let(self, name: str, value: ir.Expr) -> ir.Ref:
        self.body.append(ir.Let(name, value, self._line()))
        return ir.Ref(name, value.dtype, value.axes, self._line())

    def store(self, name: str, at: str, value: ir.Expr) -> None:
        subs = tuple(poly(s.strip()) for s in at.split(",") if s.strip())
        self.body.append(ir.Store(name, subs, value, self._line()))

    def mean(self, e: ir.Expr, axis: str, extent: str) -> ir.Expr:
        return self.op("div", self.reduce("sum", e, axis), self.cast(F32, self.index(extent)))

    def kernel(self, name: str = "k") -> ir.Kernel:
        axes = {a.name for a in self.axes}
        dims: dict[str, None] = {}
        for t in self.tensors.values():
            dims |= dict.fromkeys(s for p in t.shape for s in sorted(p.symbols - axes))
        return ir.Kernel(
            name, "", tuple(dims), tuple(self.tensors.values()), self.scalars, tuple(self.axes), (),
            tuple(self.body), (), (), HERE,
        )  # fmt: skip


def variant(
    kernel: ir.Kernel,
    dims: dict[str, int],
    *,
    tensors: Mapping[str, TensorClass] | None = None,
    multiples: Mapping[str, int] | None = None,
    star_ranks: Mapping[str, int] | None = None,
    wide: bool = False,
) -> Variant:
    """Contiguous, aligned tensors and nothing known of run-time dimensions, unless said otherwise."""
    classes = {t.name: TensorClass() for t in kernel.tensors} | dict(tensors or {})
    return Variant(
        tuple(dims.items()),
        tuple((multiples or {}).items()),
        tuple((star_ranks or {}).items()),
        tuple(classes.items()),
        wide,
    )


def show(statements: Iterable[ir.Stmt]) -> list[str]:
    """Statements as one line of text each, to compare with."""
    return [_show_stmt(s) for s in statements]


def _show_stmt(s: ir.Stmt) -> str:
    if isinstance(s, ir.Let):
        return f"{s.name} = {show_expr(s.value)}"
    mark = "=" if isinstance(s, ir.Store) else "+="
    return f"{s.tensor}[{', '.join(map(str, s.at))}] {mark} {show_expr(s.value)}"


def show_expr(e: ir.Expr) -> str:
    match e:
        case ir.Const():
            return repr(e.value)
        case ir.Scalar() | ir.Ref():
            return e.name
        case ir.IndexValue():
            return f"({e.index})"
        case ir.Load():
            return f"{e.tensor}[{', '.join(str(s) if isinstance(s, Poly) else show_expr(s) for s in e.at)}]"
        case ir.Op():
            return f"{e.fn}({', '.join(map(show_expr, e.args))})"
        case ir.Cast():
            return f"{e.to}({show_expr(e.arg)})"
        case ir.Reduce():
            return f"{e.kind}({show_expr(e.arg)}, {', '.join(e.over)})"
