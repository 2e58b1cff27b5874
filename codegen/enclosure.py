"""In which interval must a value lie, in every backend that keeps the numerics contract?

Interval arithmetic over the scalar functions of the IR, with the rounding of each function added. An interval also
holds the unrounded result, so a backend may contract a product and a sum into one operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from kgen.codegen.interpret import OPS
from kgen.codegen.torch_dtypes import rounded
from kgen.codegen.ulps import ULPS
from kgen.dsl.dtypes import F64, DType

EPS32 = 2.0**-23
U32 = 2.0**-24
U64 = 2.0**-53
# The smallest normal f32.
TINY = 2.0**-126
MAX32 = torch.finfo(torch.float32).max

Tensor = torch.Tensor


@dataclass(frozen=True)
class Enclosure:
    """A value `v` and what is known of it.

    Floats (`v` in float64): the interval `lo .. hi`, None where the value is exact. NaN ends of a `v` that is not NaN
    mean that anything is possible; infinite ends of a NaN `v`, that it need not be NaN.
    Integers and bools: `unsure` where another value is possible, None where nowhere.
    """

    v: Tensor
    lo: Tensor | None = None
    hi: Tensor | None = None
    unsure: Tensor | None = None

    @property
    def is_float(self) -> bool:
        """Whether this is a float (`lo` and `hi` count) and not an integer or bool (`unsure` counts)."""
        return self.v.is_floating_point()

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """`(lo, hi)`, the value itself where it is exact."""
        return (self.v, self.v) if self.lo is None or self.hi is None else (self.lo, self.hi)

    @property
    def doubt(self) -> Tensor:
        """`unsure` as a tensor."""
        return torch.zeros_like(self.v, dtype=torch.bool) if self.unsure is None else self.unsure

    @property
    def error(self) -> Tensor:
        """The largest distance from `v` allowed: infinite where anything is, 0 for a certain NaN or infinity."""
        if not self.is_float:
            return torch.where(self.doubt, torch.inf, 0.0).to(torch.float64)
        lo, hi = self.ends
        error = torch.maximum(hi - self.v, self.v - lo)
        certain = ((lo == self.v) & (hi == self.v)) | (torch.isnan(self.v) & torch.isnan(lo) & torch.isnan(hi))
        return torch.where(certain, 0.0, torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf))


def settle(v: Tensor, lo: Tensor, hi: Tensor, certain_nan: Tensor) -> Enclosure:
    """The enclosure of `v` by computed ends, with the conventions for NaN; `certain_nan` counts where `v` is NaN."""
    nan = torch.isnan(v)
    lo, hi = torch.minimum(lo, v), torch.maximum(hi, v)  # NaN in, NaN out
    bad = torch.isnan(lo) | torch.isnan(hi)
    lo, hi = torch.where(bad, torch.nan, lo), torch.where(bad, torch.nan, hi)
    open_nan = nan & ~certain_nan
    return Enclosure(v, torch.where(open_nan, -torch.inf, lo), torch.where(open_nan, torch.inf, hi))


def free(e: Enclosure, where: Tensor) -> Enclosure:
    """`e` with anything possible at `where`."""
    if not e.is_float:
        return Enclosure(e.v, unsure=e.doubt | where)
    lo, hi = e.ends
    nan = torch.isnan(e.v)
    return Enclosure(
        e.v,
        torch.where(where, torch.where(nan, -torch.inf, torch.nan), lo),
        torch.where(where, torch.where(nan, torch.inf, torch.nan), hi),
    )


def round_ends(
    e: Enclosure, dtype: DType, ulps: float | Tensor | None = None, *, sum_of_product: bool = False
) -> Enclosure:
    """`e` widened by the rounding of an operation to `dtype`: to nearest, or by a budget of `ulps`.

    The ends were rounded to float64 before. For one operation on f32 operands that is harmless, since 53 >= 2 * 24 + 2
    (Figueroa 1995), and rounding is monotone. But a contracted `a * b + c` rounds a sum of up to 24 + 48 digits once:
    what is a hair beside the middle of two f32 may be the middle in float64. `sum_of_product` says that `e` may be one;
    the ends are then taken one float64 further out, which matters at such a middle only.
    """
    lo, hi = e.ends
    if dtype == F64:
        # The reference itself rounds in float64: twice the budget, and one more for the arithmetic on the ends.
        slack = (4 + 2 * (2 * ulps if ulps is not None else 0)) * U64
        low, high = lo - slack * lo.abs(), hi + slack * hi.abs()
        low, high = torch.where(lo.isinf(), lo, low), torch.where(hi.isinf(), hi, high)
    else:
        low, high = lo, hi
        if sum_of_product:
            low, high = (torch.nextafter(x, x.new_full((), to)) for x, to in ((lo, -torch.inf), (hi, torch.inf)))
        if ulps is not None:
            # Subnormal results have a fixed unit in the last place; an exact 0 stays exact.
            low = lo - torch.where(lo == 0, 0.0, EPS32 * ulps * lo.abs() + 2.0**-149 * ulps)
            high = hi + torch.where(hi == 0, 0.0, EPS32 * ulps * hi.abs() + 2.0**-149 * ulps)
            low, high = torch.where(lo.isinf(), lo, low), torch.where(hi.isinf(), hi, high)
        low, high = rounded(low, dtype).to(torch.float64), rounded(high, dtype).to(torch.float64)
    return Enclosure(e.v, torch.minimum(low, lo), torch.maximum(high, hi))


def apply(fn: Callable[..., Tensor], args: Sequence[Enclosure], *, extra: Sequence[Tensor] = ()) -> Enclosure:
    """A function monotone in each argument over the arguments' intervals: its range lies between the values at corners.

    `extra` holds further values that the range may include.
    """
    v = fn(*(a.v for a in args))
    if all(a.lo is None for a in args) and not extra:
        return Enclosure(v)
    choices = [(a.v,) if a.lo is None else a.ends for a in args]
    corners = [fn(*c) for c in itertools.product(*choices)]
    certain_nan = reduce(torch.logical_and, (torch.isnan(c) for c in corners))
    points = [*corners, *extra]
    return settle(v, reduce(torch.minimum, points), reduce(torch.maximum, points), certain_nan)


def scalar_op(fn: str, args: Sequence[Enclosure], dtype: DType, *, square: bool = False) -> Enclosure:
    """The enclosure of one scalar function; `square` says that both operands of a `mul` are one and the same value."""
    if fn == "where":
        return choose(*args)
    if fn in ("and", "or", "not"):
        return _logic(fn, args)
    if dtype.kind != "float" or not all(a.is_float for a in args):
        return _decide(fn, args)
    budget = ULPS[fn]
    match fn:
        case "mul" if square:
            out = _square(args[0])
        case "div":
            lo, hi = args[1].ends
            out = apply(torch.div, args)
            if args[1].lo is not None:
                out = free(out, (lo <= 0) & (hi >= 0) & (lo != hi))
        case "abs":
            out = apply(torch.abs, args, extra=_zero_inside(args[0]))
        case "sigmoid":
            out = apply(torch.sigmoid, args)
            # Down there exp(-a) overflows, and the quotient is 0.
            lo, hi = out.ends
            out = Enclosure(out.v, torch.where(lo < TINY, torch.zeros_like(lo), lo), hi)
        case "exp" | "exp2":
            out = apply(OPS[fn], args)
            if dtype != F64:  # subnormal results are flushed to 0
                lo, hi = out.ends
                out = Enclosure(out.v, torch.where(lo < TINY, torch.zeros_like(lo), lo), hi)
        case "sin" | "cos":
            out = _bounded_slope(OPS[fn], args[0])
        case "pow":
            out = _power(*args)
        case _:
            out = apply(OPS[fn], args)
    if budget is not None:
        return round_ends(out, dtype, budget.at(*args[0].ends))
    if fn in ("add", "sub"):
        return round_ends(out, dtype, sum_of_product=True)
    return round_ends(out, dtype) if fn in ("mul", "div", "sqrt") else out


def _zero_inside(a: Enclosure) -> list[Tensor]:
    """0 where the interval of `a` holds it, for functions with their minimum there."""
    if a.lo is None:
        return []
    lo, hi = a.ends
    return [torch.where((lo < 0) & (hi > 0), 0.0, lo.abs())]


def _square(a: Enclosure) -> Enclosure:
    def square(x: Tensor) -> Tensor:
        return x * x

    return apply(square, [a], extra=[z * z for z in _zero_inside(a)])


def _bounded_slope(fn: Callable[[Tensor], Tensor], a: Enclosure) -> Enclosure:
    """A function with values in [-1, 1] and slope at most 1."""
    v = fn(a.v)
    if a.lo is None:
        return Enclosure(v)
    e = a.error
    out = Enclosure(v, (v - e).clamp(min=-1.0), (v + e).clamp(max=1.0))
    return free(out, torch.isinf(e))  # an infinite argument gives NaN


def _power(a: Enclosure, b: Enclosure) -> Enclosure:
    """Monotone in each argument for a > 0; for a negative base the exponent must be known and whole."""
    lo, hi = a.ends
    zero = [] if a.lo is None else [torch.where((lo < 0) & (hi > 0), torch.zeros_like(lo), lo) ** b.v]
    out = apply(torch.pow, [a, b], extra=zero)
    blo, bhi = b.ends
    return out if b.lo is None else free(out, (lo <= 0) & (blo != bhi))


def choose(c: Enclosure, a: Enclosure, b: Enclosure) -> Enclosure:
    """`where(c, a, b)`; both values are possible where `c` is unsure."""
    v = torch.where(c.v, a.v, b.v)
    if not a.is_float:
        doubt = torch.where(c.v, a.doubt, b.doubt)
        if c.unsure is not None:
            doubt = doubt | (c.unsure & ((a.v != b.v) | a.doubt | b.doubt))
        return Enclosure(v, unsure=doubt)
    if a.lo is None and b.lo is None and c.unsure is None:
        return Enclosure(v)
    (alo, ahi), (blo, bhi) = a.ends, b.ends
    lo, hi = torch.where(c.v, alo, blo), torch.where(c.v, ahi, bhi)
    if c.unsure is None:
        return Enclosure(v, lo, hi)
    low = torch.where(c.unsure, torch.minimum(alo, blo), lo)
    high = torch.where(c.unsure, torch.maximum(ahi, bhi), hi)
    both_nan = torch.isnan(a.v) & torch.isnan(b.v)
    return settle(v, low, high, torch.isnan(lo) & (both_nan | ~c.unsure))


def _logic(fn: str, args: Sequence[Enclosure]) -> Enclosure:
    v = OPS[fn](*(a.v for a in args))
    if all(a.unsure is None for a in args):
        return Enclosure(v)
    doubt = reduce(torch.logical_or, (a.doubt for a in args))
    if fn != "not":
        # One operand that is certain settles `and` by False and `or` by True.
        settled = [(a.v if fn == "or" else ~a.v) & ~a.doubt for a in args]
        doubt = doubt & ~reduce(torch.logical_or, settled)
    return Enclosure(v, unsure=doubt)


def _decide(fn: str, args: Sequence[Enclosure]) -> Enclosure:
    """A function with an integer or bool result, or integer operands."""
    v = OPS[fn](*(a.v for a in args))
    if not args[0].is_float:
        doubts = [a.unsure for a in args if a.unsure is not None]
        if fn in ("floordiv", "mod"):
            doubts.append(args[1].v == 0)  # undefined
        if not doubts:
            return Enclosure(v)
        return Enclosure(v, unsure=reduce(torch.logical_or, doubts).expand(v.shape))
    if all(a.lo is None for a in args):
        return Enclosure(v)
    if fn in ("isnan", "isinf"):
        return Enclosure(v, unsure=torch.isinf(args[0].error))
    (alo, ahi), (blo, bhi) = args[0].ends, args[1].ends
    nan = [torch.isnan(a.v) & torch.isnan(a.ends[0]) for a in args]
    certain = nan[0] | nan[1]
    if fn in ("eq", "ne"):
        certain = certain | (ahi < blo) | (alo > bhi) | ((alo == ahi) & (blo == bhi) & (alo == blo))
    elif fn in ("lt", "ge"):
        certain = certain | (ahi < blo) | (alo >= bhi)
    else:
        certain = certain | (ahi <= blo) | (alo > bhi)
    return Enclosure(v, unsure=~certain)
