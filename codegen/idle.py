"""When is there nothing to do? Where every store would put back what is there, a program leaves before it loads.

`g[m, n] = where(s[] == 1.0, g[m, n], g[m, n] * s[])` costs no memory traffic when s is 1: the condition is the same for
the whole launch, and each store is in place, of the very element that was loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kgen.codegen.phases import refs
from kgen.codegen.schedule import Leave, Step, Straight
from kgen.dsl import ir
from kgen.dsl.dtypes import BOOL


@dataclass(frozen=True)
class Idle:
    """`kernel` without the choice, for when `condition` does not hold; if it does nothing changes."""

    kernel: ir.Kernel
    condition: ir.Expr

    def steps(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """`steps` of `kernel` behind what decides."""
        lets = {s.name: s for s in self.kernel.body if isinstance(s, ir.Let)}
        stack, needed = [*refs(self.condition)], set[str]()
        while stack:
            n = stack.pop()
            if n not in needed:
                needed.add(n)
                stack.extend(refs(lets[n].value))
        first = tuple(s for n, s in lets.items() if n in needed)
        rest = (replace(s, body=tuple(b for b in s.body if b not in first)) for s in steps)
        return (Straight(first), Leave(self.condition), *(s for s in rest if s.body))


def idle(kernel: ir.Kernel) -> Idle | None:
    """How `kernel`, which is in normal form, can be left early; None if it cannot."""
    lets = {s.name: s.value for s in kernel.body if isinstance(s, ir.Let)}
    condition: ir.Expr | None = None
    body: list[ir.Stmt] = []
    for s in kernel.body:
        if isinstance(s, ir.Let):
            body.append(s)
            continue
        found = _choice(kernel, s, lets)
        if found is None or (condition is not None and not ir.same(found[0], condition)):
            return None
        condition, value = found
        body.append(replace(s, value=value))
    return None if condition is None else Idle(replace(kernel, body=tuple(body)), condition)


def _choice(kernel: ir.Kernel, s: ir.Stmt, lets: dict[str, ir.Expr]) -> tuple[ir.Expr, ir.Expr] | None:
    """(when the store changes nothing, what it stores otherwise)."""
    if not isinstance(s, ir.Store) or kernel.tensor(s.tensor).role != "inout":
        return None
    e = s.value
    if not (isinstance(e, ir.Op) and e.fn == "where"):
        return None
    condition, yes, no = e.args
    if condition.axes or any(isinstance(lets.get(n), ir.Reduce) for n in refs(condition)):
        return None
    for kept, other, when in ((yes, no, condition), (no, yes, _negated(condition))):
        load = lets.get(kept.name) if isinstance(kept, ir.Ref) else None
        if isinstance(load, ir.Load) and load.tensor == s.tensor and load.at == s.at:
            return when, other
    return None


def _negated(e: ir.Expr) -> ir.Expr:
    return ir.Op("not", (e,), BOOL, e.axes, e.span)
