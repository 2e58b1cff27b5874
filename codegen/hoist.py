"""What is computed for every element although it is the same for many? It gets a `Let` of its own, outside of the loop.

`x[m, n] - sum / N` divides once a row then, and the value that is left to compute for each element is cheap enough to
be computed again rather than kept across a barrier. Values are not changed: the same operations on the same operands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from kgen.codegen.names import fresh
from kgen.codegen.phases import statement_axes
from kgen.codegen.schedule import Choice, Element, Loop, Step, Straight
from kgen.dsl import ir
from kgen.dsl.source import Span

Grain = Callable[[frozenset[str]], Hashable]  # what of the axes of a value tells how often a thread computes it


def hoist(steps: tuple[Step, ...], grain: Grain, taken: set[str]) -> tuple[Step, ...]:
    """`steps` with such subexpressions named. `taken`: names not to use; the new ones are added."""
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Choice):
            out.append(replace(step, yes=hoist(step.yes, grain, taken), no=hoist(step.no, grain, taken)))
            continue
        if isinstance(step, Element):  # once a row as it is
            out.append(step)
            continue
        body: list[ir.Stmt] = []
        before: list[ir.Stmt] = []
        for s in step.body:
            found: list[ir.Let] = []
            changed = _Hoister(s, grain, taken, found).statement()
            for let in found:
                # What does not vary along a looped axis is computed once, in front of the loop.
                outside = isinstance(step, Loop) and step.axis not in let.value.axes
                (before if outside else body).append(let)
            body.append(changed)
        if before:
            out.append(Straight(tuple(before)))
        out.append(replace(step, body=tuple(body)))
    return tuple(out)


class _Hoister:
    def __init__(self, s: ir.Stmt, grain: Grain, taken: set[str], found: list[ir.Let]) -> None:
        self.s = s
        self.grain = grain
        self.taken = taken
        self.found = found
        self.own = grain(statement_axes(s))

    def statement(self) -> ir.Stmt:
        """The statement with coarser operands replaced by names."""
        s = self.s
        if isinstance(s.value, ir.Load):
            return s
        if isinstance(s.value, ir.Reduce):
            return replace(s, value=replace(s.value, arg=self.operand(s.value.arg)))
        return replace(s, value=self.inside(s.value) if isinstance(s, ir.Let) else self.operand(s.value))

    def operand(self, e: ir.Expr) -> ir.Expr:
        """`e`, or a reference to it where it is coarser than the statement and worth a name."""
        if self.grain(e.axes) != self.own and _works(e):
            return self.named(e)
        return self.inside(e)

    def inside(self, e: ir.Expr) -> ir.Expr:
        """`e` with its operands replaced where that pays."""
        if isinstance(e, ir.Op):
            return replace(e, args=tuple(self.operand(a) for a in e.args))
        if isinstance(e, ir.Cast):
            return replace(e, arg=self.operand(e.arg))
        return e

    def named(self, e: ir.Expr) -> ir.Ref:
        """A reference to a new `Let` of `e`; equal expressions of one statement share it."""
        for let in self.found:
            if ir.same(let.value, e):
                return ir.Ref(let.name, e.dtype, e.axes, e.span)
        owner = self.s.name if isinstance(self.s, ir.Let) else self.s.tensor
        name = fresh(f"{owner}_{e.fn if isinstance(e, ir.Op) else 'value'}", self.taken)
        span: Span = self.s.span
        # Coarser still: `a[m] * (b + 1)` divides into what each level needs.
        inner = _Hoister(ir.Let(name, e, span), self.grain, self.taken, self.found).statement()
        assert isinstance(inner, ir.Let)  # a Let stays one
        self.found.append(inner)
        return ir.Ref(name, e.dtype, e.axes, e.span)


def _works(e: ir.Expr) -> bool:
    """Whether `e` takes an instruction: negation and conversions of literals and scalars do not count."""
    return any(isinstance(n, ir.Op) and n.fn != "neg" for n in ir.walk(e)) and not isinstance(e, ir.Ref)
