"""What is computed again behind a reduction, rather than held across it? Where a program's registers are scarce.

A program that holds a row whole, and sums beside it, has no register to spare while its threads wait for each other.
Sums that need no reduction are added to before; of what the statements behind it need, loads that do not depend on the
row (weights) are made again, from the L1 cache, and what comes from them is computed again. So are loads of the row of
which a value was made before that is needed behind too: it is wider than they are. Others stay as they were loaded.

Changes the order of statements, never that of the additions to one sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kgen.codegen.names import fresh, taken_names
from kgen.codegen.normalize import with_children
from kgen.codegen.phases import below, refs
from kgen.dsl import ir


@dataclass(frozen=True)
class Again(ir.Load):
    """A load of what was loaded before; the value it had then is not to be held for it."""


def loaded_again(kernel: ir.Kernel, body: tuple[ir.Stmt, ...]) -> tuple[ir.Stmt, ...]:
    """`body`, statements of `kernel` that run once a row, all of its tiles whole, in an order that holds little across
    reductions."""
    return _Order(kernel, body).statements()


class _Order:
    def __init__(self, kernel: ir.Kernel, body: tuple[ir.Stmt, ...]) -> None:
        self.body = body
        self.tiles = frozenset(a.name for a in kernel.tiles)
        self.parallel = frozenset(a.name for a in kernel.parallel)
        self.overwritten = {s.tensor for s in body if not isinstance(s, ir.Let)}
        self.taken = taken_names(kernel)
        self.lets = {s.name: s for s in body if isinstance(s, ir.Let)}
        self.level: dict[str, int] = {}  # reductions that are finished before, one after the other
        self.made: set[str] = set()
        for s in self.lets.values():
            self.level[s.name] = self._level(s)
        of_weights = self._renewed(frozenset())
        self.renewed = self._renewed(self._across(of_weights))  # made again behind a reduction

    def statements(self) -> tuple[ir.Stmt, ...]:
        """All of them."""
        out: list[ir.Stmt] = []
        done: dict[str, str] = {}  # by name of a `Let`: the name that it has now
        last = max(map(self._level, self.body), default=0)
        for level in range(last + 1):
            # What is renewed is not that of the level before.
            done = {n: now for n, now in done.items() if n not in self.renewed}
            here = [s for s in self.body if self._level(s) == level]
            roots = [s for s in here if not isinstance(s, ir.Let) or isinstance(s.value, ir.Reduce)]
            roots.sort(key=lambda s: (isinstance(s, ir.Store), isinstance(s, ir.Accumulate)))
            first = [s for s in here if isinstance(s, ir.Let) and self._early(s.value, level)]
            needed = self._below([*(s for s in first if s.name not in self.renewed), *roots], done)
            for s in self.body:
                if isinstance(s, ir.Let) and s.name in needed:
                    out.append(self._named(s, done))
            out += (replace(s, value=_with_names(s.value, done)) for s in roots if not isinstance(s, ir.Let))
        return tuple(out)

    def _level(self, s: ir.Stmt) -> int:
        levels = [self.level[n] + isinstance(self.lets[n].value, ir.Reduce) for n in refs(s.value)]
        if isinstance(s, ir.Store):  # behind what is read of a tensor in place, also where a reduction says
            values = ((n, let.value) for n, let in self.lets.items())
            levels += [self.level[n] for n, e in values if isinstance(e, ir.Load) and e.tensor == s.tensor]
        return max(levels, default=0)

    def _early(self, e: ir.Expr, level: int) -> bool:
        """Whether `e`, which can be had at `level`, is loaded there, whoever needs it: before a store changes it, and
        the row first of all."""
        return isinstance(e, ir.Load) and (level == 0 or e.tensor in self.overwritten)

    def _renewed(self, loads: frozenset[str]) -> frozenset[str]:
        """What is made again if weights and the `loads` are."""
        out: set[str] = set()
        for s in self.lets.values():
            e = s.value
            if not e.axes & self.tiles or isinstance(e, ir.Reduce):
                continue
            if isinstance(e, ir.Load):
                again = (not e.axes & self.parallel or s.name in loads) and e.tensor not in self.overwritten
            else:
                again = bool(refs(e) & out)
            if again:
                out.add(s.name)
        return frozenset(out)

    def _across(self, renewed: frozenset[str]) -> frozenset[str]:
        """The loads below computed values of tiles that would be held across a reduction."""
        held = {n for s in self.body for n in refs(s.value) - renewed if self._level(s) > self.level[n]}
        values = {n: self.lets[n].value for n in self.lets}
        wide = [n for n in held if values[n].axes & self.tiles and not isinstance(values[n], ir.Load | ir.Reduce)]
        return frozenset(x for n in wide for x in below(values[n], values) if isinstance(values[x], ir.Load))

    def _below(self, roots: Iterable[ir.Stmt], done: Mapping[str, str]) -> set[str]:
        """The `Let`s among `roots` and below them that are not there yet."""
        stack = [n for s in roots for n in ((s.name,) if isinstance(s, ir.Let) else refs(s.value))]
        out: set[str] = set()
        while stack:
            n = stack.pop()
            if n not in out and n not in done:
                out.add(n)
                stack.extend(refs(self.lets[n].value))
        return out

    def _named(self, s: ir.Let, done: dict[str, str]) -> ir.Let:
        """`s` with what its operands are called now; under a name of its own where it was made before."""
        before = s.name in self.made
        self.made.add(s.name)
        value = _with_names(s.value, done)
        if before and isinstance(value, ir.Load):
            value = Again(value.tensor, value.at, value.dtype, value.axes, value.span)
        done[s.name] = fresh(f"{s.name}_again", self.taken) if before else s.name
        return replace(s, name=done[s.name], value=value)


def _with_names(e: ir.Expr, names: Mapping[str, str]) -> ir.Expr:
    if isinstance(e, ir.Ref):
        return replace(e, name=names.get(e.name, e.name))
    kids = ir.children(e)
    return with_children(e, tuple(_with_names(k, names) for k in kids)) if kids else e
