"""What is written in an op and never used. Warnings (W01xx), beside those of kernels (`kgen.dsl.check.unused`).

A value is used where a statement reads it, or changes it in place for its name to be read; outputs and gradients are
handed out. A name that one branch of a compile-time choice uses is used. Not looked at: incoming gradients, which the
backward section must name.
"""

from __future__ import annotations

from collections.abc import Iterator

from kgen.dsl import ast
from kgen.dsl.check.unused import kernels_unused, unused_parameters, uses, warning
from kgen.dsl.diagnostics import Diagnostic
from kgen.dsl.host import ast as host
from kgen.dsl.host.scope import GRADIENT


def unused(module: ast.Module) -> list[Diagnostic]:
    """A warning for each name in `module` that nothing uses, in kernels and ops, in order of position."""
    found = kernels_unused(module)
    for op in module.ops:
        found += _op(op)
    return sorted(found, key=lambda d: (d.span.line, d.span.column))


def _op(op: host.Op) -> Iterator[Diagnostic]:
    bodies = tuple(s.body for s in op.sections)
    used = set(uses(bodies))
    results = {o.name for o in op.outputs} | {GRADIENT + p.name for p in op.params}
    seen = used | results
    for s in _statements(tuple(s for body in bodies for s in body)):
        if isinstance(s, host.Chunks):
            if s.index not in used:
                yield from warning("W0104", "chunk", s.index, s.span, "loop over chunks of what is sliced")
            continue
        for t in _named(s):
            if t.id not in seen:
                seen.add(t.id)
                yield from warning("W0101", "value", t.id, t.span)
    extents = {s.dim for s in _statements(tuple(s for body in bodies for s in body)) if isinstance(s, host.Chunks)}
    sizes = {p.name: set(uses(p.type)) for p in (*op.params, *op.outputs)}
    needed = (used | extents).union(*(sizes[o.name] for o in op.outputs))
    yield from unused_parameters(op.params, used, needed, sizes)


def _statements(body: tuple[host.Stmt, ...]) -> Iterator[host.Stmt]:
    for s in body:
        yield s
        if isinstance(s, host.If):
            yield from _statements((*s.body, *s.orelse))
        elif isinstance(s, host.Chunks):
            yield from _statements(s.body)


def _named(s: host.Stmt) -> Iterator[ast.Name]:
    """The names that a statement gives a value or declares."""
    match s:
        case host.Declare():
            yield ast.Name(s.name, s.name_span)
        case host.Assign():
            yield from (t for t in s.targets if isinstance(t, ast.Name))
        case host.Accumulate(target=ast.Name() as t):
            yield t
        case _:
            return
