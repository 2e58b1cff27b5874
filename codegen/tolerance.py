"""How far from the float64 reference may a backend's result lie? Bounds derived from the kernel and its inputs.

The kernel is executed with an interval beside every value (`enclosure`) that grows by the rounding of every operation,
so that whatever keeps the numerics contract lies inside: any fused or unfused product and sum, any order of a sum up to
a stated depth. Where a comparison, a `where`, a rounding to whole numbers or an argmax hangs on a difference smaller
than the error, both outcomes are inside; where nothing can be said, the bound is infinite and the element is *free*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kgen.codegen.enclosure import MAX32, TINY, U32, U64, Enclosure, free, round_ends, scalar_op, settle
from kgen.codegen.execute import Executor, ScalarValue
from kgen.codegen.interpret import reduce_tensor, to_integer
from kgen.codegen.online import shifted
from kgen.codegen.torch_dtypes import TORCH, rounded
from kgen.dsl import ir
from kgen.dsl.dtypes import F64, DType

# A value is three float64 tensors here, and an operation holds a few more: 32 MiB each.
MAX_ELEMENTS = 1 << 22

Depth = Callable[[int], int]

# Units in the last place that a factor `exp(before - after)` costs a sum of exponentials: 2 for the hardware's
# exponential, half for the product. What the rounding of differences and of their product with log2(e) adds
# is proportional to the differences, which have one sign and add up to the argument whose rounding is counted already.
RESCALED = 3


def rescalings(n: int) -> int:
    """How often what is summed of `n` exponentials is multiplied by such a factor, at most: chunks have at least 512
    elements, or as many as there are chunks; two more for threads and programs."""
    return 2 + min(math.isqrt(max(n, 1)), -(-n // 512))


def blocked_depth(n: int) -> int:
    """Additions that a term of a sum of `n` passes through, at most, in two levels of blocks of about sqrt(n).

    Row reductions are shallower: a thread adds a few elements in sequence, threads combine in a tree.
    """
    return min(sequential_depth(n), 2 * math.isqrt(max(n, 1)) + 2 + max(n, 1).bit_length())


def sequential_depth(n: int) -> int:
    """Additions that a term of a sum of `n` passes through, at most, in whatever order."""
    return max(n - 1, 0)


def error_bound(
    kernel: ir.Kernel,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, ScalarValue],
    *,
    depth: Depth = blocked_depth,
    accumulate_depth: Depth = sequential_depth,
    max_elements: int = MAX_ELEMENTS,
) -> dict[str, torch.Tensor]:
    """For each output the float64 tensor of allowed distances from `interpret(..., precision="f64")`.

    Arguments as for `interpret`. `depth` bounds the additions that one term of a reduction of n terms goes through,
    `accumulate_depth` the same for sums over programs. Integer outputs have the bound 0, or infinity where free.
    """
    run = Analysis(kernel, tensors, scalars, depth, accumulate_depth, max_elements)
    run.run()
    return run.bounds()


@dataclass(frozen=True)
class Comparison:
    """What came out of comparing one output. `ratio` is the largest error over its bound, at `index`; `free` of the
    `total` elements had no bound."""

    ok: bool
    ratio: float
    index: tuple[int, ...]
    actual: float
    expected: float
    bound: float
    free: int
    total: int
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if not self.total:
            return "empty"
        where = f"[{', '.join(map(str, self.index))}]"
        note = f"; {self.free} of {self.total} elements are free" if self.free else ""
        if self.ok:
            return f"within the bound: largest error is {self.ratio:.3g} of it, at {where}{note}"
        error = abs(self.actual - self.expected)
        return (
            f"at {where}: got {self.actual:.9g}, expected {self.expected:.9g}; the error {error:.3g}"
            f" is {self.ratio:.3g} times the bound {self.bound:.3g}{note}"
        )


def compare(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> Comparison:
    """Compare an output with the float64 reference under `bound` (of `error_bound`), all of one shape.

    NaN must meet NaN and an infinity the same infinity, unless the element is free.
    """
    if actual.shape != expected.shape:
        reason = f"got shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        return Comparison(False, math.inf, (), math.nan, math.nan, math.nan, 0, expected.numel(), reason)
    bound = bound.to(expected.device)
    a, e = actual.detach().to(expected.device), expected
    if a.numel() == 0:
        return Comparison(True, 0.0, (), math.nan, math.nan, math.nan, 0, 0)
    equal = (a == e) | (torch.isnan(a) & torch.isnan(e))
    a, e = a.to(torch.float64), e.to(torch.float64)
    ratio = torch.nan_to_num((a - e).abs() / bound, nan=math.inf, posinf=math.inf)
    is_free = torch.isinf(bound)
    ratio = torch.where(equal | is_free, 0.0, ratio)
    flat = int(ratio.argmax())
    worst = float(ratio.flatten()[flat])
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    return Comparison(
        ok=worst <= 1.0,
        ratio=worst,
        index=at,
        actual=float(a[at]),
        expected=float(e[at]),
        bound=float(bound[at]),
        free=int(is_free.sum()),
        total=a.numel(),
    )


class Analysis(Executor[Enclosure]):
    """One execution on enclosures; only the distance from the value is kept of an output. See `error_bound`."""

    def __init__(
        self,
        kernel: ir.Kernel,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, ScalarValue],
        depth: Depth,
        accumulate_depth: Depth,
        max_elements: int,
    ) -> None:
        super().__init__(kernel, tensors, scalars, max_elements)
        self.depth = depth
        self.accumulate_depth = accumulate_depth
        accumulated = {s.tensor for s in kernel.body if isinstance(s, ir.Accumulate)}
        self.lets = {s.name: s.value for s in kernel.body if isinstance(s, ir.Let)}
        self.errors: dict[str, torch.Tensor] = {}
        # Sums over programs: the value, lower and upper error, and the sum of magnitudes, over all blocks.
        self.sums: dict[str, list[torch.Tensor]] = {}
        self.terms: dict[str, int] = {}
        for t in self.outputs:
            kept = t.role == "inout" or t.name in accumulated
            shape = self.flat_shape(t)
            # What no statement writes is free.
            self.errors[t.name] = torch.full(shape, 0.0 if kept else math.inf, dtype=torch.float64, device=self.device)

    # -- leaves --------------------------------------------------------------------------------------------------
    def const(self, e: ir.Const) -> Enclosure:
        if e.dtype.kind != "float":
            return Enclosure(self.block.full(e.value, TORCH[e.dtype]))
        v = self.block.full(e.value, torch.float64)
        held = rounded(v, e.dtype).to(torch.float64)
        if torch.equal(held, v) or math.isnan(e.value):
            return Enclosure(v)
        return Enclosure(v, torch.minimum(held, v), torch.maximum(held, v))

    def exact(self, t: torch.Tensor, dtype: DType) -> Enclosure:
        return Enclosure(t.to(torch.float64 if dtype.kind == "float" else TORCH[dtype]))

    def integers(self, v: Enclosure) -> torch.Tensor:
        return v.v

    def loaded(self, e: ir.Load, v: Enclosure, subscripts: list[Enclosure]) -> Enclosure:
        for s in subscripts:
            if s.unsure is not None:
                v = free(v, s.unsure)
        return v

    # -- operations ----------------------------------------------------------------------------------------------
    def op(self, e: ir.Op, args: list[Enclosure]) -> Enclosure:
        square = e.fn == "mul" and ir.same(e.args[0], e.args[1])
        return scalar_op(e.fn, args, e.dtype, square=square)

    def cast(self, e: ir.Cast, v: Enclosure) -> Enclosure:
        if e.to.kind == "float":
            return _to_float(v, e.to)
        if not v.is_float:
            return Enclosure(to_integer(v.v, e.to).to(TORCH[e.dtype]), unsure=v.unsure)
        out = to_integer(v.v, e.to).to(TORCH[e.dtype])
        if v.lo is None:
            return Enclosure(out)
        low, high = (to_integer(end, e.to).to(TORCH[e.dtype]) for end in v.ends)
        doubt = (low != out) | (high != out) | torch.isinf(v.error)
        if e.to.kind == "bool":
            doubt = doubt | ((v.ends[0] <= 0) & (v.ends[1] >= 0) & (v.ends[0] != v.ends[1]))
        return Enclosure(out, unsure=doubt)

    def reduce(self, e: ir.Reduce, v: Enclosure, over: list[int]) -> Enclosure:
        v = self._spread(v, over)
        if e.kind in ("argmax", "argmin"):
            return _arg_extreme(e.kind, v, over)
        if not v.is_float:
            return _reduce_integers(e.kind, v, over, TORCH[e.dtype])
        if e.kind in ("max", "min"):
            return _reduce_extreme(e.kind, v, over)
        n = math.prod(v.v.shape[d] for d in over)
        if e.kind == "sum":
            depth = self.depth(n)
            if shifted(e.arg, self.lets) is not None:
                depth += 2 * RESCALED * rescalings(n)
            return _sum(v, over, e.dtype, depth)
        return _prod(v, over, e.dtype, sequential_depth(n))

    def _spread(self, v: Enclosure, over: list[int]) -> Enclosure:
        def spread(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else self.block.spread(t, over)

        return Enclosure(self.block.spread(v.v, over), spread(v.lo), spread(v.hi), spread(v.unsure))

    # -- outputs -------------------------------------------------------------------------------------------------
    def store(self, s: ir.Store, v: Enclosure) -> None:
        dtype = self.kernel.tensor(s.tensor).dtype
        self.block.write(self.errors[s.tensor], s.at, _allowed(v, dtype))

    def accumulate(self, s: ir.Accumulate, v: Enclosure) -> None:
        over = [self.block.position(a) for a in s.over]
        v = self._spread(v, over)
        planes = _planes(v, over) if v.is_float else [v.doubt.to(torch.float64).sum(over, keepdim=True)]
        if s.tensor not in self.sums:
            shape = self.errors[s.tensor].shape
            self.sums[s.tensor] = [torch.zeros(shape, dtype=torch.float64, device=self.device) for _ in planes]
        for total, part in zip(self.sums[s.tensor], planes, strict=True):
            self.block.write(total, s.at, part, add=True)

    def bounds(self) -> dict[str, torch.Tensor]:
        """The allowed distance for each output, in the caller's shape."""
        for name, planes in self.sums.items():
            t = self.kernel.tensor(name)
            if len(planes) == 1:
                self.errors[name] = torch.where(planes[0] > 0, math.inf, 0.0).to(torch.float64)
                continue
            adds = [s for s in self.kernel.body if isinstance(s, ir.Accumulate) and s.tensor == name]
            count = sum(math.prod(self.kernel.axis(a).extent.evaluate(self.dims) for a in s.over) for s in adds)
            if t.role == "inout":
                held = self.flat[name].to(torch.float64)
                planes = [p + h for p, h in zip(planes, _planes(Enclosure(held), []), strict=True)]
                count += 1
            dtype = adds[0].value.dtype
            gamma = _gamma(self.accumulate_depth(count), 4 * U64 if dtype == F64 else U32)
            self.errors[name] = _allowed(_added_up(planes, gamma, dtype), t.dtype)
        return {t.name: self.errors[t.name].reshape(self.full_shape(t)) for t in self.outputs}


def _gamma(depth: int, unit: float) -> float:
    """The relative error of `depth` roundings of relative size `unit` (Higham 2002, lemma 3.1)."""
    return depth * unit / (1 - depth * unit) if depth * unit < 0.5 else math.inf


def _to_float(v: Enclosure, dtype: DType) -> Enclosure:
    if v.is_float:
        if dtype == F64 or (v.lo is None and torch.equal(rounded(v.v, dtype).to(torch.float64), v.v)):
            return v
        return round_ends(v, dtype)
    value = v.v.to(torch.float64)
    out = Enclosure(value)
    if v.unsure is not None:
        if v.v.dtype == torch.bool:
            out = Enclosure(value, torch.where(v.unsure, 0.0, value), torch.where(v.unsure, 1.0, value))
        else:
            out = free(out, v.unsure)
    # Whole numbers beyond 2**24 round.
    return round_ends(out, dtype) if v.v.dtype != torch.bool and dtype != F64 else out


def _stored(v: Enclosure, dtype: DType) -> Enclosure:
    """`v` rounded to the storage type `dtype`."""
    if dtype.kind == "float":
        return _to_float(v, dtype)
    if v.is_float:
        low, high = (to_integer(end, dtype) for end in v.ends)
        return Enclosure(to_integer(v.v, dtype), unsure=(low != high) | torch.isinf(v.error))
    return v


def _allowed(v: Enclosure, dtype: DType) -> torch.Tensor:
    """The allowed distance of `v` stored as `dtype`.

    A result that is rounded to nearest may use up all of it, so the float64 reference's own last bits, which vary with
    the device and the cut of the index space, need room too.
    """
    out = _stored(v, dtype)
    if not out.is_float or dtype == F64:
        return out.error
    noise = torch.where((out.error > 0) & out.v.isfinite(), 2.0**-44 * out.v.abs(), 0.0)
    return out.error + noise


def _sum(v: Enclosure, over: list[int], dtype: DType, depth: int) -> Enclosure:
    return _added_up(_planes(v, over), _gamma(depth, 4 * U64 if dtype == F64 else U32), dtype)


def _planes(v: Enclosure, over: list[int]) -> list[torch.Tensor]:
    """The sums over `over` that `_added_up` needs: of the values, the ends, and the magnitudes of the finite ends."""
    lo, hi = v.ends
    sizes = [torch.where(end.isfinite(), end.abs(), 0.0) for end in (lo, hi)]
    return [t.sum(over, keepdim=True) if over else t for t in (v.v, lo, hi, *sizes)]


def _added_up(planes: list[torch.Tensor], gamma: float, dtype: DType) -> Enclosure:
    """The enclosure of a sum whose terms go through additions of relative error `gamma` in all, in any order.

    The computed sum is that of the terms each times 1 + d, |d| <= gamma (Higham 2002, section 4.2), and
    x * (1 + d) is least at the lower end of x whatever its sign: a sum of squares stays positive.
    """
    total, lo, hi, lo_size, hi_size = planes
    nan = torch.isnan(lo) & torch.isnan(hi)
    out = settle(total, lo - gamma * lo_size, hi + gamma * hi_size, nan)
    # The partial sum of the finite terms may overflow in some order, and even meet the opposite infinity.
    overflow = torch.maximum(lo_size, hi_size) > MAX32
    return out if dtype == F64 else free(out, overflow & ~(nan & torch.isnan(total)))


def _prod(v: Enclosure, over: list[int], dtype: DType, roundings: int) -> Enclosure:
    """A product in any order: |prod(a + e) - prod(a)| <= prod(|a| + |e|) - prod(|a|). Each of its `roundings` is one of
    the whole, wherever it stands in a tree of them."""

    def prod(t: torch.Tensor) -> torch.Tensor:
        return reduce_tensor("prod", t, over, torch.float64)

    total, size, grown = prod(v.v), prod(v.v.abs()), prod(v.v.abs() + v.error)
    gamma = _gamma(roundings, 4 * U64 if dtype == F64 else U32)
    slack = grown * (1 + gamma) - size
    out = Enclosure(total, torch.where(slack == 0, total, total - slack), torch.where(slack == 0, total, total + slack))
    certain = ~total.isfinite() & (reduce_tensor("sum", v.error, over, torch.float64) == 0)
    lo, hi = out.ends
    out = Enclosure(total, torch.where(certain, total, lo), torch.where(certain, total, hi))
    # Partial products may overflow, or lose digits to underflow, in some order though the whole does not; and then
    # meet a 0 or an infinity, which makes NaN.
    peak = reduce_tensor("prod", v.v.abs().clamp(min=1.0), over, torch.float64)
    dip = reduce_tensor("prod", v.v.abs().clamp(max=1.0), over, torch.float64)
    unstable = ((peak > MAX32) & total.isfinite()) | ((dip < TINY) & (total != 0) & ~torch.isnan(total))
    return out if dtype == F64 or roundings == 0 else free(out, unstable)


def _reduce_extreme(kind: str, v: Enclosure, over: list[int]) -> Enclosure:
    def extreme(t: torch.Tensor) -> torch.Tensor:
        return reduce_tensor(kind, t, over, torch.float64)

    total = extreme(v.v)
    if v.lo is None:
        return Enclosure(total)
    lo, hi = (extreme(end) for end in v.ends)
    surely_nan = torch.isnan(v.v) & torch.isnan(v.ends[0])
    return settle(total, lo, hi, reduce_tensor("any", surely_nan, over, torch.bool))


def _reduce_integers(kind: str, v: Enclosure, over: list[int], dtype: torch.dtype) -> Enclosure:
    total = reduce_tensor(kind, v.v, over, dtype)
    if v.unsure is None:
        return Enclosure(total)
    doubt = reduce_tensor("any", v.unsure, over, torch.bool)
    if kind in ("any", "all"):
        # One element that is certain settles `any` by True and `all` by False.
        settled = (v.v if kind == "any" else ~v.v) & ~v.unsure
        doubt = doubt & ~reduce_tensor("any", settled, over, torch.bool)
    return Enclosure(total, unsure=doubt)


def _arg_extreme(kind: str, v: Enclosure, over: list[int]) -> Enclosure:
    """The position of the extreme, unsure where another element may be it."""
    at = reduce_tensor(kind, v.v, over, torch.int64)
    (d,) = over
    if v.v.shape[d] == 0 or (v.lo is None and v.unsure is None):
        return Enclosure(at)
    if not v.is_float:
        return Enclosure(at, unsure=reduce_tensor("any", v.doubt, over, torch.bool))
    lo, hi = v.ends
    if kind == "argmin":
        lo, hi = -hi, -lo
    best = torch.gather(lo, d, at)
    iota = torch.arange(v.v.shape[d], device=v.v.device).reshape([-1 if i == d else 1 for i in range(v.v.dim())])
    rival = (iota != at) & ~(hi < best)
    # Exact values are compared exactly: the first of equals, and any certain NaN before all numbers, is the winner.
    exact = v.error == 0
    rival = rival & ~(exact & torch.gather(exact, d, at))
    return Enclosure(at, unsure=reduce_tensor("any", rival, over, torch.bool))
