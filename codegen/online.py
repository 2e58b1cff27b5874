"""Which sums are of exponentials less their own maximum? Of a row in chunks they take one pass with the maximum.

`sum(exp(a - s))` with a shift `s` that comes from `top = max(a)` seems to need the maximum first. It does not: what a
thread has summed against the maximum so far is multiplied by `exp(before - after)` when that maximum rises (Milakov &
Gimelshein 2018, arXiv:1805.02867), and by `exp(own - s)` in the end.

`pair` rewrites such a sum in terms of a reduction of its own, `ExpSum`, which needs no other; `steps_of` turns that, in
a given schedule, into partial results and their end, which a backend can print. A maximum is clamped to finite numbers
before anything is taken against it: a part of a row that is all -inf adds exp(-inf - lowest) = 0, and +inf and NaN come
out as they do from the text.

Only sums are taken like this. An exponential that is stored is taken against the maximum of the row: of equal elements
it is then equal, whichever thread has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kgen.codegen.names import fresh, taken_names
from kgen.codegen.phases import below, live, phases
from kgen.codegen.schedule import Finish, Loop, Partial, Schedule, Step, Straight
from kgen.dsl import ir
from kgen.dsl.dtypes import F64, DType


def largest(dtype: DType) -> float:
    """The largest finite number of a compute dtype."""
    return float.fromhex("0x1.fffffffffffffp+1023" if dtype == F64 else "0x1.fffffep+127")


@dataclass(frozen=True)
class Shifted:
    """`exp(of - by)`, where `by` comes from `top`, the maximum of `of`, and from no other reduction."""

    of: ir.Expr
    by: ir.Expr
    top: str


def shifted(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> Shifted | None:
    """What `e`, or what it names, is, if it is an exponential less the maximum of its argument."""
    e = _followed(e, lets)
    if not (isinstance(e, ir.Op) and e.fn == "exp"):
        return None
    difference = _followed(e.args[0], lets)
    if not (isinstance(difference, ir.Op) and difference.fn == "sub"):
        return None
    of, by = difference.args
    tops = [n for n in below(by, lets) if isinstance(lets[n], ir.Reduce)]
    top = lets[tops[0]] if len(tops) == 1 else None
    if not (isinstance(top, ir.Reduce) and top.kind == "max" and not by.axes & frozenset(top.over)):
        return None
    same = ir.same(_followed(top.arg, lets), _followed(of, lets))
    return Shifted(of, by, tops[0]) if same else None


def _followed(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> ir.Expr:
    """What `e` names."""
    while isinstance(e, ir.Ref) and e.name in lets:
        e = lets[e.name]
    return e


# ---- on the kernel -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpSum(ir.Reduce):
    """The sum of `exp(arg - m)`, m the maximum of `arg`, which is the `Let` called `top`, made finite."""

    top: str


@dataclass(frozen=True)
class _Total(ir.Op):
    """`own * exp(m - by)`: the sum of `exp(a - by)`, for the `ExpSum` of `a` called `own`."""

    own: str
    by: ir.Expr


def paired(kernel: ir.Kernel, schedule: Schedule) -> ir.Kernel:
    """`kernel` with `pair` done along every axis that `schedule` takes in chunks, unless it holds them: a pass of its
    own for the maximum costs no load then, and less than to multiply sums whenever that rises."""
    if schedule.held:
        return kernel
    for axis, chunk in schedule.chunks:
        if chunk <= kernel.axis(axis).extent.constant:
            kernel = pair(kernel, axis)
    return kernel


def pair(kernel: ir.Kernel, axis: str) -> ir.Kernel:
    """`kernel`, which is in normal form, with the sums of exponentials along `axis` in terms of one `ExpSum` for each
    maximum. Values along other tile axes too are left alone."""
    lets = {s.name: s.value for s in kernel.body if isinstance(s, ir.Let)}
    taken, tiles = taken_names(kernel), frozenset(a.name for a in kernel.tiles)
    own: dict[str, ir.Let] = {}  # by maximum
    body: list[ir.Stmt] = []
    for s in kernel.body:
        found = _summed(s, lets) if isinstance(s, ir.Let) else None
        if found is None or found.of.axes & tiles != {axis}:
            body.append(s)
            continue
        e = s.value
        assert isinstance(s, ir.Let) and isinstance(e, ir.Reduce)  # `_summed` looked
        if found.top not in own:
            name = fresh(f"{s.name}_own", taken)
            value = ExpSum("expsum", found.of, e.over, e.dtype, e.axes, e.span, found.top)
            own[found.top] = ir.Let(name, value, s.span)
            body.append(own[found.top])
        whole = _ref(own[found.top])
        peak = _clamped(ir.Ref(found.top, e.dtype, e.axes, s.span))
        args = (whole, _exp_less(peak, found.by))
        body.append(replace(s, value=_Total("mul", args, e.dtype, e.axes, e.span, whole.name, found.by)))
    return replace(kernel, body=live(body)) if own else kernel


def _summed(s: ir.Let, lets: Mapping[str, ir.Expr]) -> Shifted | None:
    """What `s` sums, if that is exponentials less their maximum over the same axes."""
    e = s.value
    if not (isinstance(e, ir.Reduce) and e.kind == "sum" and e.dtype.kind == "float"):
        return None
    found = shifted(e.arg, lets)
    top = None if found is None else lets[found.top]
    fits = isinstance(top, ir.Reduce) and frozenset(top.over) == frozenset(e.over) and top.axes == e.axes
    return found if fits else None


# ---- in a schedule -------------------------------------------------------------------------------------------------


def steps_of(kernel: ir.Kernel, schedule: Schedule) -> tuple[Step, ...]:
    """The steps of `kernel` with every `ExpSum`, and the maximum that goes with it, as partial results and their end.

    Raises `ScheduleError` as `phases` does.
    """
    sums = {s.value.top: s for s in kernel.body if isinstance(s, ir.Let) and isinstance(s.value, ExpSum)}
    unfolder = _Unfolder(kernel, sums)
    steps = tuple(new for step in phases(kernel, schedule) for new in unfolder.step(step))
    left = [s for step in steps for s in step.body if isinstance(s.value, ExpSum | _Total)]
    assert not left, f"{kernel.name}: not unfolded: {left}"
    return steps


class _Unfolder:
    def __init__(self, kernel: ir.Kernel, sums: Mapping[str, ir.Let]) -> None:
        """`sums`: each `ExpSum` by the name of its maximum."""
        self.sums = sums
        self.taken = taken_names(kernel)
        self.parts: dict[str, ir.Let] = {}  # by name of the expsum: the partial sum

    def step(self, step: Step) -> Iterator[Step]:
        """The step, and behind a loop the one that ends its maxima."""
        if isinstance(step, Loop) and any(isinstance(s.value, ExpSum) for s in step.body):
            body, end = self._loop(step.body)
            yield replace(step, body=tuple(body))
            yield Straight(tuple(end))
        else:
            yield replace(step, body=tuple(map(self._ended, step.body)))

    def _loop(self, body: Iterable[ir.Stmt]) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
        """(the loop's body with partial results, the statements behind it)."""
        inside: list[ir.Stmt] = []
        end: list[ir.Stmt] = []
        for s in body:
            if isinstance(s.value, ExpSum):
                continue
            total = self.sums.get(s.name) if isinstance(s, ir.Let) else None
            if total is None or not isinstance(s, ir.Let):
                inside.append(s)
                continue
            e = s.value
            assert isinstance(e, ir.Reduce)  # a maximum
            own = self._let(f"{s.name}_own", Partial("max", e.arg, e.over, e.dtype, e.axes, e.span), s)
            shift = self._let(f"{s.name}_shift", _clamped(_ref(own)), s)
            term = _exp_less(e.arg, _ref(shift))
            part = Partial("sum", term, e.over, e.dtype, e.axes, e.span, shift.name, e.arg)
            name = total.name.removesuffix("_own")
            self.parts[total.name] = self._let(f"{name}_part", part, total)
            inside += [own, shift, self.parts[total.name]]
            end.append(replace(s, value=Finish("max", _ref(own), e.over, e.dtype, e.axes, e.span)))
        return inside, end

    def _ended(self, s: ir.Stmt) -> ir.Stmt:
        """`s`, or the end of a partial sum in place of what was written in terms of its `ExpSum`."""
        if not (isinstance(s, ir.Let) and isinstance(s.value, _Total)):
            return s
        part = self.parts[s.value.own]
        e = part.value
        assert isinstance(e, Partial) and e.shift is not None  # as `_loop` made it
        shift = ir.Ref(e.shift, e.dtype, e.axes, s.span)
        arg = _op("mul", _ref(part), _exp_less(shift, s.value.by))
        return replace(s, value=Finish("sum", arg, e.over, e.dtype, e.axes, e.span))

    def _let(self, hint: str, value: ir.Expr, s: ir.Let) -> ir.Let:
        return ir.Let(fresh(hint, self.taken), value, s.span)


# ---- building expressions ------------------------------------------------------------------------------------------


def _op(fn: str, *args: ir.Expr) -> ir.Op:
    return ir.Op(fn, args, args[0].dtype, frozenset[str]().union(*(a.axes for a in args)), args[0].span)


def _exp_less(a: ir.Expr, by: ir.Expr) -> ir.Op:
    return _op("exp", _op("sub", a, by))


def _ref(s: ir.Let) -> ir.Ref:
    return ir.Ref(s.name, s.value.dtype, s.value.axes, s.span)


def _clamped(e: ir.Expr) -> ir.Expr:
    """`e` as a finite number; NaN stays."""
    most = largest(e.dtype)
    return _op("maximum", _op("minimum", e, _const(most, e)), _const(-most, e))


def _const(value: float, like: ir.Expr) -> ir.Const:
    return ir.Const(value, like.dtype, like.span)
