"""Collectives: what an op computes over the ranks of a process group, as `top = all_max(own)`.

The result is a new value, the same on every rank; the operand stays what it is. Each rank must come to the same
collectives in the same order with the same sizes: that is the caller's business, who gives every rank the arguments
that decide it. A kernel of the file with one of these names hides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from kgen.dsl.host import ast as host
from kgen.dsl.host import ir
from kgen.dsl.host.scope import Scope

if TYPE_CHECKING:
    from kgen.dsl.host.expressions import Expressions

# The functions, and what they compute of the elements that the ranks have in one place.
COLLECTIVES = {"all_max": "max", "all_sum": "sum"}
_WIDE = ("f32", "f64")


def is_collective(e: host.Expr, scope: Scope) -> bool:
    """Whether `e` is a call of a collective."""
    return isinstance(e, host.Call) and e.func in COLLECTIVES and e.func not in scope.callees


def collective(e: host.Call, expressions: Expressions, target: ir.View | None, hint: str) -> ir.View:
    """`all_max(a)` and `all_sum(a)`, into `target` or a new tensor."""
    scope = expressions.scope
    if e.keywords or len(e.args) != 1:
        raise scope.fail("K0603", f"{e.func}(...) takes one tensor", e.span, f"write {e.func}(a)")
    source = expressions.value(e.args[0])
    tensor = scope.tensors[source.tensor]
    if tensor.role != "value":
        what = "an argument of the op" if tensor.role == "in" else "an incoming gradient"
        raise scope.fail("K0616", f"'{e.func}' of '{source.span.text}', which is {what}", source.span,
                         "collectives take what the op computed: copy it with a kernel first")  # fmt: skip
    if source.chunks or source.transposed:
        what = "a transpose" if source.transposed else "a slice"
        raise scope.fail("K0616", f"'{e.func}' of {what}", source.span,
                         "collectives take whole values: compute the part as a value of its own")  # fmt: skip
    if any(d.name not in _WIDE for d in scope.dtypes(source.dtype)):
        raise scope.fail("K0605", f"'{e.func}' of {source.dtype} values", source.span,
                         f"it takes f32 and f64, as 16 bits round at each rank: f32({source.span.text})")  # fmt: skip
    if target is None:
        target = scope.tensor(hint, source.dtype, source.shape, "value", e.span)
    expressions.fits(target, source.shape, source.dtype, e.span)
    expressions.apart(target, [source], e.span)
    scope.emit(ir.AllReduce(target, source, COLLECTIVES[e.func], e.span))
    return target


def collectives_of(op: host.Op, kernels: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether an op has collectives, and whether it has some in a loop over chunks. `kernels` are those it may call."""
    found = [in_loop for s in op.sections for name, in_loop in _calls(s.body, False)
             if name in COLLECTIVES and name not in kernels]  # fmt: skip
    return bool(found), any(found)


def _calls(node: Any, in_loop: bool) -> Iterator[tuple[str, bool]]:
    """The functions that are called in a piece of a syntax tree."""
    if isinstance(node, tuple):
        for n in node:
            yield from _calls(n, in_loop)
        return
    if not is_dataclass(node):
        return
    if isinstance(node, host.Call):
        yield node.func, in_loop
    inside = in_loop or isinstance(node, host.Chunks)
    for f in fields(node):
        yield from _calls(getattr(node, f.name), inside)
