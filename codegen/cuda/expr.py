"""How is an IR expression or an index polynomial spelled in CUDA C?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kgen.codegen.cuda.text import (
    CExpr,
    binary,
    call,
    cast,
    compute_type,
    conditional,
    floating,
    integer,
    unary,
)
from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Mod, Poly, Sym
from kgen.dsl.dtypes import BF16, BOOL, F16, F64, I64, DType


class Place(Protocol):
    """Where an expression stands: how names are read there."""

    def ref(self, name: str) -> CExpr:
        """The value of a `Let`."""
        ...

    def symbol(self, name: str) -> CExpr:
        """An index or a dimension."""
        ...

    def scalar(self, name: str) -> CExpr:
        """A scalar parameter, in its compute type."""
        ...

    def helper(self, name: str) -> str:
        """The name of a helper of the prelude, which is thereby included."""
        ...

    def lane_of(self, e: ir.Expr) -> tuple[CExpr, CExpr] | None:
        """`(base, lane)` where `e` is the index along which lanes differ."""
        ...

    def is_label(self, e: ir.Expr) -> bool:
        """Whether `e` is an index of its axis, or -1."""
        ...


_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&&", "or": "||",
}  # fmt: skip
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}

# The function of CUDA's mathematics library in binary64; in binary32 it ends in `f`.
_LIBRARY = {
    "expm1": "expm1", "log": "log", "log2": "log2", "log1p": "log1p", "sqrt": "sqrt", "rsqrt": "rsqrt",
    "tanh": "tanh", "erf": "erf", "sin": "sin", "cos": "cos", "pow": "pow", "floor": "floor", "ceil": "ceil",
    "round": "rint", "trunc": "trunc",
}  # fmt: skip


def expression(e: ir.Expr, at: Place) -> CExpr:
    """`e`, which holds no load and no reduction, as C. Its C type is that of `e.dtype`, or int where an i64 fits."""
    match e:
        case ir.Const():
            return constant(e.value, e.dtype)
        case ir.Scalar():
            return at.scalar(e.name)
        case ir.IndexValue():
            return index_value(e.index, at)
        case ir.Ref():
            return at.ref(e.name)
        case ir.Cast():
            return converted(expression(e.arg, at), e.arg.dtype, e.to, at)
        case ir.Op(fn="eq" | "ne", args=(index, label)) if at.is_label(label) and (lane := at.lane_of(index)):
            # The difference is the same in all lanes, so that one instruction a lane is left.
            return binary(_BINARY[e.fn], binary("-", expression(label, at), lane[0]), lane[1])
        case ir.Op():
            return _op(e, tuple(expression(a, at) for a in e.args), at)
    raise AssertionError(f"not in normal form: {type(e).__name__} inside an expression")


def constant(value: float | int | bool, dtype: DType) -> CExpr:
    """A literal of `dtype`."""
    if dtype.kind == "bool":
        return CExpr("true" if value else "false", "bool")
    if dtype.kind == "int":
        return integer(int(value))
    return floating(float(value), dtype == F64)


def converted(a: CExpr, source: DType, to: DType, at: Place) -> CExpr:
    """`a`, of compute dtype `source`, converted to `to`: rounded to f16 or bf16 and held as f32, wrapped to i8, ..."""
    if to == BOOL:
        return a if a.type == "bool" else binary("!=", a, constant(0, source.compute))
    if to in (F16, BF16):
        if source.kind == "float" and source == F64:
            bits = call(at.helper(f"cvt_{to.name}_f64"), "int", a)
            return call(at.helper(f"cvt_f32_{to.name}"), "float", bits)
        if source.kind != "float":
            # A whole number beyond 2**24 must not be rounded to f32 on the way.
            bits = call(at.helper(f"cvt_{to.name}_f64"), "int", cast("double", a))
            return call(at.helper(f"cvt_f32_{to.name}"), "float", bits)
        return call(at.helper(f"round_{to.name}"), "float", a)
    if to.kind == "int" and to.bits < 32:
        narrow = cast({"i8": "signed char", "u8": "unsigned char", "i16": "short"}[to.name], a)
        return cast("int", narrow)
    return cast(compute_type(to), a)


def _op(e: ir.Op, args: tuple[CExpr, ...], at: Place) -> CExpr:
    if e.dtype == I64 and e.fn in {"add", "sub", "mul", "neg"} and all(a.type != "long long" for a in args):
        args = (cast("long long", args[0]), *args[1:])
    if e.fn in _BINARY:
        return binary(_BINARY[e.fn], *args)
    double = e.dtype == F64
    type = compute_type(e.dtype)
    match e.fn:
        case "neg":
            return unary("-", args[0])
        case "not":
            return unary("!", args[0])
        case "where":
            return conditional(*args)
        case "exp":
            return exponential(args[0], e.dtype, at)
        case "exp2":
            return call("exp2" if double else at.helper("exp2_approx"), type, *args)
        case "erf" if not double:
            return call(at.helper("erf_f32"), type, *args)
        case "sigmoid":
            at.helper(f"sigmoid_{e.dtype.name}")
            return call("sigmoid", type, *args)
        case "abs":
            names = {"float": "fabsf", "double": "fabs", "long long": "llabs"}
            return call(names.get(type, "abs"), type, *args)
        case "sign":
            at.helper("sign")
            return call("sign", type, *(cast(type, a) for a in args))
        case "maximum" | "minimum":
            return extreme(e.fn, args[0], args[1], e.dtype, at)
        case "isnan" | "isinf":
            # An integer is neither.
            return call(e.fn, "bool", *args) if args[0].type in ("float", "double") else CExpr("false", "bool")
        case "floordiv" | "mod":
            helper = "floor_div" if e.fn == "floordiv" else "floor_mod"
            at.helper(helper)
            return call(helper, type, *(cast(type, a) for a in args))
    return call(_LIBRARY[e.fn] if double else f"{_LIBRARY[e.fn]}f", type, *args)


def exponential(a: CExpr, dtype: DType, at: Place) -> CExpr:
    """e to the power of `a`, in `dtype`."""
    return call("exp" if dtype == F64 else at.helper("exp_approx"), compute_type(dtype), a)


def extreme(fn: str, a: CExpr, b: CExpr, dtype: DType, at: Place) -> CExpr:
    """`fn`, which is `maximum` or `minimum`, of two values of `dtype`; NaN if either is."""
    type = compute_type(dtype)
    if dtype.kind == "float":
        at.helper(f"{fn}_{dtype.name}")
        return call(fn, type, a, b)
    return call(fn[:3], type, cast(type, a), cast(type, b))


# ---- index arithmetic ----------------------------------------------------------------------------------------------


def index_value(p: Poly, at: Place) -> CExpr:
    """`p` as a value of the language: it must not overflow where the language's i64 would not."""
    if _small(p) or all(at.symbol(name).type == "long long" for name in p.symbols):
        return polynomial(p, at.symbol)

    def wide(name: str) -> CExpr:
        s = at.symbol(name)
        return s if s.type == "long long" else cast("long long", s)

    return polynomial(p, wide)


def _small(p: Poly) -> bool:
    """Whether `p` over non-negative ints is an int: one index, or the difference of two, and a small number."""
    plus = [c for mono, c in p.terms if mono and c > 0]
    minus = [c for mono, c in p.terms if mono and c < 0]
    single = all(len(mono) <= 1 for mono, _ in p.terms)
    return single and plus in ([], [1]) and minus in ([], [-1]) and -(1 << 20) < p.constant <= 0


def polynomial(p: Poly, symbol: Callable[[str], CExpr]) -> CExpr:
    """`p` with its names spelled by `symbol`, positive terms first. Divisions floor."""
    terms = sorted(p.terms, key=lambda t: (not t[0], t[1] < 0))
    total: CExpr | None = None
    for mono, c in terms:
        factors = [_atom(a, symbol) for a in mono]
        if abs(c) != 1 or not factors:
            factors.insert(0, integer(abs(c)))
        term = factors[0]
        for f in factors[1:]:
            term = binary("*", term, f)
        if total is None:
            total = unary("-", term) if c < 0 else term
        else:
            total = binary("-" if c < 0 else "+", total, term)
    return total if total is not None else integer(0)


def _atom(a: Sym | FloorDiv | Mod, symbol: Callable[[str], CExpr]) -> CExpr:
    if isinstance(a, Sym):
        return symbol(a.name)
    num, den = polynomial(a.num, symbol), polynomial(a.den, symbol)
    op = "/" if isinstance(a, FloorDiv) else "%"
    if _not_negative(a.num) and _not_negative(a.den):
        return binary(op, num, den)
    # C rounds toward zero. For a positive divisor the remainder is mended, and the quotient follows from it.
    rest = binary("%", num, den)
    mended = binary("%", binary("+", rest, den), den)
    return mended if op == "%" else binary("/", binary("-", num, mended), den)


def _not_negative(p: Poly) -> bool:
    """Indices and dimensions are not negative; sums and products of them neither."""
    return all(c >= 0 for _, c in p.terms)
