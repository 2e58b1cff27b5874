"""Which sums are of exponentials less their own maximum? They are taken in one pass over the row, with the maximum.

`sum(exp(a - s))` with a shift `s` that comes from `top = max(a)` seems to need the maximum first. It does not: what a
thread has summed against the maximum so far is multiplied by `exp(before - after)` when that maximum rises (Milakov &
Gimelshein 2018, arXiv:1805.02867). And an exponential taken against a thread's own maximum becomes the one asked for by
a factor that is the same for the whole thread, so that none is taken twice.

`pair` rewrites such a sum into a reduction of its own, `expsum`, which needs no other; `steps_of` turns that, in a
given schedule, into partial sums and maxima that a backend can print. A maximum is clamped to finite numbers before
anything is taken against it: a part of a row that is all -inf adds exp(-inf - lowest) = 0, and +inf and NaN come out as
they do from the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kgen.codegen.names import fresh, taken_names
from kgen.codegen.normalize import with_children
from kgen.codegen.phases import phases, refs
from kgen.codegen.schedule import Finish, Loop, Partial, Schedule, Step, Straight
from kgen.dsl import ir
from kgen.dsl.dtypes import F64, DType


def highest(dtype: DType) -> float:
    """The largest finite number of a compute dtype."""
    return float.fromhex("0x1.fffffffffffffp+1023" if dtype == F64 else "0x1.fffffep+127")


def shifted(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> str | None:
    """The name of a maximum where `e` is `exp(a - s)` and `s` comes from it alone of all reductions; else None."""
    found = _shifted(e, lets)
    return None if found is None else found.top


@dataclass(frozen=True)
class _Shifted:
    """`exp(of - by)`, where `by` comes from the maximum `top` of `of`."""

    of: ir.Expr
    by: ir.Expr
    top: str


def _shifted(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> _Shifted | None:
    e = _followed(e, lets)
    if not (isinstance(e, ir.Op) and e.fn == "exp"):
        return None
    difference = _followed(e.args[0], lets)
    if not (isinstance(difference, ir.Op) and difference.fn == "sub"):
        return None
    of, by = difference.args
    tops = {n for n in _below(by, lets) if isinstance(lets[n], ir.Reduce)}
    if len(tops) != 1:
        return None
    (name,) = tops
    top = lets[name]
    if not (isinstance(top, ir.Reduce) and top.kind == "max" and not by.axes & frozenset(top.over)):
        return None
    same = ir.same(_followed(top.arg, lets), _followed(of, lets))
    return _Shifted(of, by, name) if same else None


def _followed(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> ir.Expr:
    """What `e` names."""
    while isinstance(e, ir.Ref) and e.name in lets:
        e = lets[e.name]
    return e


def _below(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> set[str]:
    """Every `Let` that `e` comes from, those that reductions are over left out."""
    stack, seen = list(refs(e)), set[str]()
    while stack:
        name = stack.pop()
        if name in seen or name not in lets:
            continue
        seen.add(name)
        if not isinstance(lets[name], ir.Reduce):
            stack.extend(refs(lets[name]))
    return seen


# ---- on the kernel -------------------------------------------------------------------------------------------------


def pair(kernel: ir.Kernel, over: str | None = None) -> ir.Kernel:
    """`kernel`, which is in normal form, with `total = sum(exp(a - s), n)` rewritten as
    `total_own = expsum(a, n)` and `total = total_own * exp(clamp(top) - s)`.

    `over`: where given, only sums along this one axis, of values along no other tile axis.
    """
    lets = {s.name: s.value for s in kernel.body if isinstance(s, ir.Let)}
    taken, tiles = taken_names(kernel), frozenset(a.name for a in kernel.tiles)
    body: list[ir.Stmt] = []
    changed = False
    for s in kernel.body:
        found = _pair(s, lets) if isinstance(s, ir.Let) else None
        fits = found is not None and (over is None or found[0].arg.axes & tiles == {over})
        if found is None or not fits or not isinstance(s, ir.Let):
            body.append(s)
            continue
        changed = True
        e, shift = found
        own = ir.Let(fresh(s.name + _OWN, taken), e, s.span)
        peak = _clamped(ir.Ref(shift.top, e.dtype, e.axes, s.span))
        body += [own, ir.Let(s.name, _op("mul", _ref(own), _exp_less(peak, shift.by)), s.span)]
    return replace(kernel, body=_live(body)) if changed else kernel


def _pair(s: ir.Let, lets: Mapping[str, ir.Expr]) -> tuple[ir.Reduce, _Shifted] | None:
    e = s.value
    if not (isinstance(e, ir.Reduce) and e.kind == "sum" and e.dtype.kind == "float"):
        return None
    found = _shifted(e.arg, lets)
    if found is None:
        return None
    top = lets[found.top]
    # A thread's part is one number: no index of the row is left.
    if not (isinstance(top, ir.Reduce) and frozenset(top.over) == frozenset(e.over) and top.axes == e.axes):
        return None
    return replace(e, kind="expsum", arg=found.of), found


def _live(body: list[ir.Stmt]) -> tuple[ir.Stmt, ...]:
    """`body` without the `Let`s that nothing uses."""
    out: list[ir.Stmt] = []
    used = set[str]()
    for s in reversed(body):
        if not isinstance(s, ir.Let) or s.name in used:
            out.append(s)
            used |= refs(s.value)
    return tuple(reversed(out))


# ---- in a schedule -------------------------------------------------------------------------------------------------


def steps_of(kernel: ir.Kernel, schedule: Schedule) -> tuple[Step, ...]:
    """The steps of `kernel` with every `expsum`, and the maximum of the same values, as partial results and their end.

    In a step without a loop, exponentials of the same values are multiples of those that were summed.
    Raises `ScheduleError` as `phases` does.
    """
    steps = phases(kernel, schedule)
    if not any(_is_expsum(s) for step in steps for s in step.body):
        return steps
    unfolder = _Unfolder(kernel)
    return tuple(new for step in steps for new in unfolder.step(step))


def _is_expsum(s: ir.Stmt) -> bool:
    return isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce) and s.value.kind == "expsum"


@dataclass(frozen=True)
class _Parts:
    """What stands for a maximum and the sum that goes with it. `shift`: what the sum was taken against."""

    own: ir.Let
    shift: ir.Let
    part: ir.Let


class _Kept:
    """Exponentials that a thread has, but for a factor, and what is computed from them: `c * e` as
    `(c * scale) * terms`, so that a row's factors are multiplied once."""

    def __init__(self, lets: Mapping[str, ir.Expr], taken: set[str]) -> None:
        self.lets = lets
        self.taken = taken
        self.terms: dict[str, tuple[ir.Let, ir.Let]] = {}  # by maximum: the shift, the exponentials
        self.scales: list[ir.Let] = []
        self.scaled: dict[str, tuple[ir.Expr, ir.Expr]] = {}  # by name that stands for some: the exponentials, a factor

    def statement(self, s: ir.Stmt) -> list[ir.Stmt]:
        """What stands in place of `s`."""
        new: list[ir.Stmt] = []
        found = self._found(s.value)
        if isinstance(s, ir.Let) and found is not None:
            self.scaled[s.name] = self._scaled(found, s, new)
            return new
        value = self._expression(s.value, s, new)
        return [*new, s if value is s.value else replace(s, value=value)]

    def _found(self, e: ir.Expr) -> _Shifted | None:
        found = None if isinstance(e, ir.Ref) else _shifted(e, self.lets)
        return found if found is not None and found.top in self.terms else None

    def _scaled(self, found: _Shifted, s: ir.Stmt, new: list[ir.Stmt]) -> tuple[ir.Expr, ir.Expr]:
        shift, terms = self.terms[found.top]
        value = _exp_less(_ref(shift), found.by)
        scale = self.scale(value)
        if scale is None:
            let = ir.Let(fresh(f"{terms.name}_scale", self.taken), value, s.span)
            self.scales.append(let)
            new.append(let)
            scale = _ref(let)
        return _ref(terms), scale

    def scale(self, value: ir.Expr) -> ir.Ref | None:
        """The factor that is `value`, if it has a name already."""
        return next((_ref(let) for let in self.scales if ir.same(let.value, value)), None)

    def _expression(self, e: ir.Expr, s: ir.Stmt, new: list[ir.Stmt]) -> ir.Expr:
        product = self._product(e, s, new)
        if product is not None:
            terms, factor = product
            return _op("mul", terms, factor)
        children = ir.children(e)
        changed = tuple(self._expression(c, s, new) for c in children)
        return e if all(a is b for a, b in zip(children, changed, strict=True)) else with_children(e, changed)

    def _product(self, e: ir.Expr, s: ir.Stmt, new: list[ir.Stmt]) -> tuple[ir.Expr, ir.Expr] | None:
        """`(terms, factor)` where `e` is a product of exponentials that are there and what is the same in the row."""
        if isinstance(e, ir.Ref):
            return self.scaled.get(e.name)
        if (found := self._found(e)) is not None:
            return self._scaled(found, s, new)
        if isinstance(e, ir.Op) and e.fn == "mul":
            for a, b in (e.args, e.args[::-1]):
                product = self._product(a, s, new)
                if product is not None and product[1].axes >= b.axes:
                    return product[0], _op("mul", b, product[1])
        return None


class _Unfolder:
    def __init__(self, kernel: ir.Kernel) -> None:
        self.lets = {s.name: s.value for s in kernel.body if isinstance(s, ir.Let)}
        self.taken = taken_names(kernel)
        self.parts: dict[str, _Parts] = {}  # by expsum
        self.kept = _Kept(self.lets, self.taken)

    def step(self, step: Step) -> Iterator[Step]:
        """The step, and behind a loop the one that ends its maxima."""
        sums = [s for s in step.body if isinstance(s, ir.Let) and _is_expsum(s)]
        if isinstance(step, Loop) and sums:
            body, end = self._loop(step.body, sums)
            yield replace(step, body=tuple(body))
            yield Straight(tuple(end))
        else:
            self.kept = _Kept(self.lets, self.taken)
            body = step.body if isinstance(step, Loop) else self._straight(step.body, sums)
            yield replace(step, body=tuple(map(self._ended, body)))

    def _loop(self, body: Iterable[ir.Stmt], sums: list[ir.Let]) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
        """(the loop's body with partial results, the statements behind it)."""
        inside: list[ir.Stmt] = []
        end: list[ir.Stmt] = []
        for s in body:
            total = self._sum_of(s, sums)
            if total is not None and isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce):
                own, shift = self._own(s, s.value)
                part = self._part(total, _exp_less(s.value.arg, _ref(shift)), shift)
                inside += [own, shift, part]
                after = ir.Let(self._fresh(f"{s.name}_shift"), shift.value, s.span)  # the loop's own is gone
                end += [after, self._finish(s, _ref(own))]
                self.parts[total.name] = _Parts(own, after, part)
            elif s not in sums:
                inside.append(s)
        return inside, end

    def _straight(self, body: tuple[ir.Stmt, ...], sums: list[ir.Let]) -> list[ir.Stmt]:
        out: list[ir.Stmt] = []
        again = {found.top for s in body for e in ir.walk(s.value) if (found := self._taken_against(e)) is not None}
        for s in body:
            total = self._sum_of(s, sums)
            if total is not None and isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce):
                own, shift = self._own(s, s.value)
                out += [own, shift]
                term = _exp_less(s.value.arg, _ref(shift))
                if s.name in again:
                    terms = ir.Let(self._fresh(f"{_base(total)}_terms"), term, total.span)
                    self.kept.terms[s.name] = shift, terms
                    out.append(terms)
                    term = _ref(terms)
                part = self._part(total, term, None)
                out += [part, self._finish(s, _ref(own))]
                self.parts[total.name] = _Parts(own, shift, part)
            elif s not in sums:
                out += self.kept.statement(s)
        return out

    def _taken_against(self, e: ir.Expr) -> _Shifted | None:
        """What `e` is, if it is an exponential less the maximum of its argument; a name for one is none."""
        return None if isinstance(e, ir.Ref) else _shifted(e, self.lets)

    def _sum_of(self, s: ir.Stmt, sums: Iterable[ir.Let]) -> ir.Let | None:
        """The sum of exponentials that goes with `s`, if that is a maximum."""
        if not (isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce) and s.value.kind == "max"):
            return None
        for total in sums:
            e = total.value
            if isinstance(e, ir.Reduce) and e.over == s.value.over and ir.same(e.arg, s.value.arg):
                return total
        return None

    def _ended(self, s: ir.Stmt) -> ir.Stmt:
        """The end of a partial sum in place of `total = total_own * exp(clamp(top) - by)`: its parts are taken against
        `by` at once."""
        if not isinstance(s, ir.Let):
            return s
        found = _rebased(s.value)
        if found is None or found[0] not in self.parts:
            return s
        name, by = found
        parts = self.parts[name]
        scale = _exp_less(_ref(parts.shift), by)
        arg = _op("mul", _ref(parts.part), self.kept.scale(scale) or scale)
        return self._finish(replace(s, value=parts.part.value), arg)

    # -- the statements ------------------------------------------------------------------------------------------
    def _own(self, s: ir.Let, e: ir.Reduce) -> tuple[ir.Let, ir.Let]:
        """The partial maximum, and what exponentials are taken against."""
        own = ir.Let(self._fresh(f"{s.name}_own"), Partial("max", e.arg, e.over, e.dtype, e.axes, e.span), s.span)
        return own, ir.Let(self._fresh(f"{s.name}_shift"), _clamped(_ref(own)), s.span)

    def _part(self, total: ir.Let, term: ir.Expr, shift: ir.Let | None) -> ir.Let:
        e = total.value
        assert isinstance(e, ir.Reduce)  # an expsum
        part = Partial("sum", term, e.over, e.dtype, e.axes, e.span, None if shift is None else shift.name)
        return ir.Let(self._fresh(f"{_base(total)}_part"), part, total.span)

    def _finish(self, s: ir.Let, arg: ir.Expr) -> ir.Let:
        e = s.value
        assert isinstance(e, ir.Reduce)  # the callers looked
        return replace(s, value=Finish(e.kind, arg, e.over, e.dtype, e.axes, e.span))

    def _fresh(self, hint: str) -> str:
        return fresh(hint, self.taken)


# ---- building expressions ------------------------------------------------------------------------------------------

_OWN = "_own"  # how an expsum is called beside the sum that it is for


def _base(total: ir.Let) -> str:
    return total.name.removesuffix(_OWN)


def _op(fn: str, *args: ir.Expr) -> ir.Op:
    return ir.Op(fn, args, args[0].dtype, frozenset[str]().union(*(a.axes for a in args)), args[0].span)


def _exp_less(a: ir.Expr, by: ir.Expr) -> ir.Op:
    return _op("exp", _op("sub", a, by))


def _ref(s: ir.Let) -> ir.Ref:
    return ir.Ref(s.name, s.value.dtype, s.value.axes, s.span)


def _clamped(e: ir.Expr) -> ir.Expr:
    """`e` as a finite number; NaN stays."""
    most = highest(e.dtype)
    return _op("maximum", _op("minimum", e, _const(most, e)), _const(-most, e))


def _const(value: float, like: ir.Expr) -> ir.Const:
    return ir.Const(value, like.dtype, like.span)


def _rebased(e: ir.Expr) -> tuple[str, ir.Expr] | None:
    """`(own, by)` where `e` is `own * exp(clamp(top) - by)` for a name `own`."""
    if isinstance(e, ir.Op) and e.fn == "mul" and isinstance(e.args[0], ir.Ref):
        factor = e.args[1]
        if isinstance(factor, ir.Op) and factor.fn == "exp":
            difference = factor.args[0]
            if isinstance(difference, ir.Op) and difference.fn == "sub":
                return e.args[0].name, difference.args[1]
    return None
