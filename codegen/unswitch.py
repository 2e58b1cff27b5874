"""Which choices are made anew for each element although they are the same for the whole row?

`y[m, n] = where(kept, a, 0.0)` with a condition of the row selects in every element of a pass over chunks. The pass
becomes a choice of two, each with what it needs: one that stores `a`, and one that reads nothing and stores zeros.

Only passes over chunks, where a program has one row. They exponentiate each element twice, and are bound by their
instructions: as multiples of a copy of the same bytes, the cross entropy in place of 4096x128256, with the element of
its label apart (`kgen.codegen.labelled`), takes 1.17 on 32 warps of Triton so and 1.25 before. Rows that a program
holds, whole or in chunks, wait for memory, and their registers would have to do for both passes. A pass that reduces
too is left alone: what it adds up is needed whichever way a row goes.
"""

from __future__ import annotations

from dataclasses import replace

from kgen.codegen.fold import settled, truth
from kgen.codegen.schedule import Choice, Loop, Schedule, Step
from kgen.dsl import ir
from kgen.dsl.dtypes import BOOL


def unswitched(kernel: ir.Kernel, schedule: Schedule, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`steps` of a kernel without sums over programs, with such passes as choices."""
    if schedule.rows > 1:
        return steps
    tiles = frozenset(a.name for a in kernel.tiles)
    return tuple(_choice(step, tiles) if isinstance(step, Loop) and _stores_alone(step) else step for step in steps)


def _stores_alone(step: Loop) -> bool:
    """Whether a pass does nothing but store: no reduction goes on in it."""
    return not any(isinstance(s.value, ir.Reduce) for s in step.body)


def _choice(step: Loop, tiles: frozenset[str]) -> Step:
    lets = {s.name: s.value for s in step.body if isinstance(s, ir.Let)}
    first, *others = [_conditions(s.value, lets, tiles) for s in step.body if isinstance(s, ir.Store)]
    # Stores with choices of their own would each have to be in both passes.
    shared = [c for c in first if all(any(ir.same(c, d) for d in own) for own in others)]
    if not shared:
        return step
    condition = shared[0]
    return Choice(condition, (_pass(step, condition, True),), (_pass(step, condition, False),))


def _conditions(e: ir.Expr, lets: dict[str, ir.Expr], tiles: frozenset[str]) -> list[ir.Expr]:
    """The conditions of the row without which `e` is its last operand, where it is a choice."""
    while isinstance(e, ir.Ref) and e.name in lets:
        e = lets[e.name]
    if not (isinstance(e, ir.Op) and e.fn == "where"):
        return []
    found, left = list[ir.Expr](), [e.args[0]]
    while left:
        c = left.pop()
        if isinstance(c, ir.Op) and c.fn == "and" and c.axes & tiles:
            left += reversed(c.args)
        elif not c.axes & tiles:
            found.append(c)
    return found


def _pass(step: Loop, condition: ir.Expr, holds: bool) -> Loop:
    def known(e: ir.Expr) -> ir.Expr | None:
        return truth(holds, e) if e.dtype == BOOL and ir.same(e, condition) else None

    body = settled(step.body, step.axis, known)
    reads = any(isinstance(s.value, ir.Load) for s in body)
    return replace(step, body=body, down=step.down and reads)
