"""Where in memory is an element, how wide may it be accessed, and how does it change type on the way?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.codegen.cuda.context import ROW, Context, is_zero
from kgen.codegen.cuda.expr import constant, converted, expression, polynomial
from kgen.codegen.cuda.prelude import Pack
from kgen.codegen.cuda.text import (
    STORAGE_TYPES,
    CExpr,
    binary,
    call,
    cast,
    compute_type,
)
from kgen.codegen.layout import contiguous
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import BF16, BOOL, F16, F32, F64, DType

At = tuple["Poly | ir.Expr", ...]


@dataclass(frozen=True)
class Address:
    """`base[offset]`; `offset` is None for the element that `base` points to."""

    base: str
    offset: CExpr | None

    @property
    def element(self) -> CExpr:
        """The element itself."""
        return CExpr(f"{self.base}[{self.offset or 0}]", "")

    @property
    def pointer(self) -> str:
        """A pointer to it."""
        return self.base if self.offset is None else f"{self.base} + {self.offset.at(70)}"


def pack_of(ctx: Context, tensor: ir.Tensor, at: At, lane_axis: str | None) -> Pack | None:
    """The pack in which the lanes of `tensor[at]` along `lane_axis` are moved; None where one by one."""
    if lane_axis is None:
        return None
    spread = ctx.axis(lane_axis)
    lanes = spread.vector
    if lane_axis == ROW:
        assert ctx.fastest is not None  # the row index of a kernel with parallel indices
        spread = replace(spread, name=ctx.fastest)
    if not contiguous(tensor, at, spread.name, ctx.variant):
        return None
    width = spread.width(tensor, at, ctx.variant) * tensor.dtype.itemsize
    return Pack(tensor.dtype, lanes, width) if width >= 4 else None


def address(ctx: Context, tensor: ir.Tensor, at: At, gathered: dict[int, CExpr], *, row: str | None = None) -> Address:
    """The address of `tensor[at]` at the current lane. `gathered[i]` is the value of subscript i where it is one.

    The part that no tile index moves is a pointer made once in the prologue; `row` is such a pointer made by the
    caller.
    """
    outer, inner = _parts(ctx, tensor, at, gathered)
    if inner is None:
        return Address(row or ctx.names[tensor.name], None if row else outer)
    if row is not None or outer is None:
        return Address(row or ctx.names[tensor.name], inner)
    if ctx.flat:
        return Address(ctx.names[tensor.name], binary("+", outer, inner))
    return Address(row_pointer(ctx, tensor, outer), inner)


def element_at(ctx: Context, tensor: ir.Tensor, at: tuple[Poly, ...], axis: str, index: CExpr) -> Address:
    """The address of `tensor[at...]` with `index`, which no tile index moves, for the subscript that is `axis`."""
    i = at.index(Poly.sym(axis))
    outer = outer_part(ctx, tensor, (*at[:i], Poly.const(0), *at[i + 1 :]), {})
    base = ctx.names[tensor.name] if outer is None else row_pointer(ctx, tensor, outer)
    return Address(base, _times_stride(ctx, tensor, i, index))


def row_pointer(ctx: Context, tensor: ir.Tensor, outer: CExpr) -> str:
    """The prologue's pointer to `tensor + outer`."""
    key = (tensor.name, outer.text)
    if key not in ctx.pointers:
        ctx.pointers[key] = ctx.names.fresh(f"{tensor.name}_row")
    return ctx.pointers[key]


def outer_part(ctx: Context, tensor: ir.Tensor, at: At, gathered: dict[int, CExpr]) -> CExpr | None:
    """The offset that no tile index moves."""
    return _parts(ctx, tensor, at, gathered)[0]


def _parts(ctx: Context, tensor: ir.Tensor, at: At, gathered: dict[int, CExpr]) -> tuple[CExpr | None, CExpr | None]:
    """The offset in elements as (what no tile index moves, the rest); None for 0."""
    outer: CExpr | None = None
    inner: CExpr | None = None
    tiles = frozenset(a.name for a in ctx.kernel.tiles) or ctx.parallel
    for i, s in enumerate(at):
        if isinstance(s, Poly):
            fixed = Poly(tuple(t for t in s.terms if not _symbols(t) & tiles))
            moving = s - fixed
            if not (fixed.symbols & ctx.indices) and not is_zero(moving):
                fixed, moving = Poly.const(0), s  # a constant offset reads best beside the index
            outer = _plus(outer, _strided(ctx, tensor, i, fixed))
            inner = _plus(inner, _strided(ctx, tensor, i, moving))
        else:
            value = gathered[i]
            term = _times_stride(ctx, tensor, i, value)
            if s.axes & tiles:
                inner = _plus(inner, term)
            else:
                outer = _plus(outer, term)
    return outer, inner


def _symbols(term: tuple[tuple, int]) -> frozenset[str]:
    return Poly((term,)).symbols


def _plus(a: CExpr | None, b: CExpr | None) -> CExpr | None:
    return b if a is None else a if b is None else binary("+", a, b)


def _strided(ctx: Context, tensor: ir.Tensor, axis: int, s: Poly) -> CExpr | None:
    """`s` times the stride of dimension `axis`, over the parts of a starred dimension; None for 0."""
    if is_zero(s):
        return None
    star = tensor.shape[0].as_symbol if tensor.star and axis == 0 else None
    rank = ctx.variant.star_rank(star) if star is not None else 1
    if rank == 1:
        return _times_stride(ctx, tensor, axis, polynomial(s, ctx.symbol))
    assert star is not None
    total: CExpr | None = None
    for part in range(rank):
        total = _plus(total, _times_stride(ctx, tensor, axis, star_part(ctx, star, s, part, rank), part))
    return total


def star_part(ctx: Context, star: str, s: Poly, part: int, rank: int) -> CExpr:
    """Index `part` of the `rank` dimensions behind the starred dimension `star`, for the flattened index `s`."""
    value = polynomial(s, ctx.symbol)
    for later in range(rank - 1, part, -1):
        value = binary("/", value, ctx.size(star, later))
    return binary("%", value, ctx.size(star, part)) if part else value


def _times_stride(ctx: Context, tensor: ir.Tensor, axis: int, value: CExpr, part: int = 0) -> CExpr:
    stride = ctx.stride(tensor.name, axis, part)
    return value if stride is None else binary("*", value, stride)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_pack(ctx: Context, let: ir.Let, pack: Pack, place: Address, *, staying: bool = False) -> str:
    """The pack that `let` loads from `place`; `staying`: it is to stay in L1."""
    if ctx.peel is not None and isinstance(let.value, ir.Load):
        tensor = ctx.kernel.tensor(let.value.tensor)
        if ctx.axis(ctx.peel.axis).shifts(tensor, let.value.at, ctx.variant):
            return f"{ctx.helper('load_shifted')}<{pack.name}>({place.pointer}, {ctx.peeled('head')})"
    pointer = f"(const {pack.name}*)({place.pointer})"
    if let.name in ctx.scheduled.kept:
        return _load_kept(ctx, pointer, pack.bytes)
    if let.name in ctx.staying:
        ctx.helper(f"load_resident {pack.bytes}")
        return f"{ctx.helper('load_resident')}({pointer}, {kept_policy(ctx)})"
    if staying:
        ctx.helper(f"load_staying {pack.bytes}")
        return f"{ctx.helper('load_staying')}({pointer})"
    return f"*{pointer}"


def read_element(ctx: Context, let: ir.Let, tensor: ir.Tensor, place: Address, *, raw: bool = False) -> CExpr:
    """The element that `let` loads from `place`: as it lies in memory if `raw`, else widened to its compute type."""
    element = place.element
    if let.name in ctx.scheduled.kept:
        element = CExpr(_load_kept(ctx, place.pointer, tensor.dtype.itemsize), "")
    return element if raw else loaded(ctx, tensor.dtype, element)


def _load_kept(ctx: Context, pointer: str, bytes: int) -> str:
    """The load of what is to stay in L2, `bytes` at a time."""
    ctx.helper(f"load_kept {bytes}")
    return f"{ctx.helper('load_kept')}({pointer}, {kept_policy(ctx)})"


def kept_policy(ctx: Context) -> str:
    """The constant that holds the policy of such loads, which a kernel with any defines first."""
    ctx.helper("kept_policy")
    return ctx.temporary("policy")


# ---- gathers -------------------------------------------------------------------------------------------------------


def gather_subscripts(ctx: Context, load: ir.Load) -> tuple[dict[int, CExpr], CExpr]:
    """(the values of the subscripts that are values, whether all are in range)."""
    tensor = ctx.kernel.tensor(load.tensor)
    values: dict[int, CExpr] = {}
    ok: CExpr | None = None
    for i, s in enumerate(load.at):
        if isinstance(s, Poly):
            continue
        value = expression(s, ctx)
        if not value.text.isidentifier():
            name = ctx.names.fresh(f"{tensor.name}_at")
            ctx.lines.add(f"const {compute_type(s.dtype)} {name} = {value};")
            value = CExpr(name, compute_type(s.dtype))
        values[i] = value
        below = binary("<", value, polynomial(tensor.shape[i], ctx.symbol))
        inside = binary("&&", binary(">=", value, CExpr("0", "int")), below)
        ok = inside if ok is None else binary("&&", ok, inside)
    assert ok is not None  # the caller has a gather
    return values, ok


def missing_value(dtype: DType) -> CExpr:
    """What a gather out of range reads: NaN, the lowest integer, or false."""
    if dtype.kind == "float":
        return constant(float("nan"), dtype.compute)
    if dtype.kind == "bool":
        return constant(False, BOOL)
    return constant(-(1 << (dtype.bits - 1)) if dtype.signed else 0, dtype.compute)


# ---- types in memory -----------------------------------------------------------------------------------------------


def loaded(ctx: Context, dtype: DType, element: CExpr) -> CExpr:
    """An element of `dtype` from memory, widened to its compute type."""
    if dtype in (F16, BF16):
        return call(ctx.helper(f"cvt_f32_{dtype.name}"), "float", element)
    if dtype == BOOL:
        return binary("!=", element, CExpr("0", "int"))
    return CExpr(element.text, compute_type(dtype), element.level)


def narrowed(ctx: Context, value: ir.Expr, to: DType) -> CExpr:
    """`value` as an element of `to` to be written by itself: f16 and bf16 as bits."""
    text = _without_rounding(ctx, value, to)
    if to in (F16, BF16):
        source = value.arg.dtype if isinstance(value, ir.Cast) and value.to == to else value.dtype
        if source == F32:
            return call(ctx.helper(f"cvt_{to.name}_f32"), "int", text)
        return call(ctx.helper(f"cvt_{to.name}_f64"), "int", text if source == F64 else cast("double", text))
    return _as_compute(value, text, to)


def packed_value(ctx: Context, value: ir.Expr, to: DType) -> CExpr:
    """`value` in the compute type of `to`, such that a pack of `to` rounds it once."""
    if to in (F16, BF16):
        source = value.arg.dtype if isinstance(value, ir.Cast) and value.to == to else value.dtype
        if source == F32:
            return _without_rounding(ctx, value, to)
        return converted(_without_rounding(ctx, value, to), source, to, ctx)
    return _as_compute(value, _without_rounding(ctx, value, to), to)


def _without_rounding(ctx: Context, value: ir.Expr, to: DType) -> CExpr:
    """`value`; of `to(e)` only `e`, as the store rounds."""
    if isinstance(value, ir.Cast) and value.to == to and to in (F16, BF16):
        return expression(value.arg, ctx)
    return expression(value, ctx)


def _as_compute(value: ir.Expr, text: CExpr, to: DType) -> CExpr:
    if to == BOOL and text.type != "bool":
        return binary("!=", text, constant(0, value.dtype))
    # C narrows integers at the assignment as the language does.
    return cast(compute_type(to), text) if value.dtype.kind != to.kind or value.dtype == F64 else text


def storage_type(dtype: DType) -> str:
    """The C type of an element of `dtype` in memory."""
    return STORAGE_TYPES[dtype.name]
