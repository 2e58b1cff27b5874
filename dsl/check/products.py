"""Matrix products that a kernel writes element by element: a warning (W0106), as such a sum is right and slow.

A sum over `k` of `a * b` is one where `a` has an index that `b` lacks, and `b` one that `a` lacks: each element of both
is read many times, and all of it is multiplied outside of the tensor cores, which the library's `@` in an op uses.

Not looked at here: backwards, and how large the extents are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product

from kgen.dsl import ast, ir
from kgen.dsl.check import each_way
from kgen.dsl.codes import Code
from kgen.dsl.diagnostics import Diagnostic
from kgen.dsl.source import Span

PRODUCT_CODES: tuple[Code, ...] = (
    Code(
        "W0106",
        "a matrix product that a kernel writes as a sum of products",
        "kernel product(a: T[M, K], b: T[K, N]) -> (c: T[M, N]):\n    parallel m in M\n    tile k in K, n in N\n"
        "    c[m, n] = sum(a[m, k] * b[k, n], k)\n",
        "op product(a: T[M, K], b: T[K, N]) -> (c: T[M, N]):\n    forward:\n        c = a @ b\n",
    ),
)


def products(module: ast.Module) -> list[Diagnostic]:
    """A warning for each matrix product that a kernel of the checked `module` writes as a sum."""
    functions = {f.name: f for f in module.functions}
    found: dict[Span, Diagnostic] = {}
    for declared in module.kernels:
        for kernel in each_way(declared, functions):
            for span, rows, columns in _in(kernel):
                message = f"a matrix product: every element of '{rows}' meets every one of '{columns}'"
                help = "multiply by the library in an op, c = a @ b, which takes tensor cores; this sum takes none"
                found.setdefault(span, Diagnostic("W0106", message, span, help=help))
    return list(found.values())


def _in(kernel: ir.Kernel) -> Iterator[tuple[Span, str, str]]:
    """Where a matrix product is summed, and an index of each operand that the other lacks."""
    lets = {s.name: s.value for s in kernel.body if isinstance(s, ir.Let)}
    for s in kernel.body:
        for e in ir.walk(s.value):
            if isinstance(e, ir.Reduce) and e.kind == "sum":
                for pair in _apart(e.arg, frozenset(e.over), lets):
                    yield e.span, *pair
        if isinstance(s, ir.Accumulate):
            kept = ir.target_symbols(s)
            for pair in _apart(s.value, s.value.axes - kept, lets):
                yield s.span, *pair


def _apart(e: ir.Expr, over: frozenset[str], lets: Mapping[str, ir.Expr]) -> Iterator[tuple[str, str]]:
    """The two indices, if the sum of `e` over the indices `over` is a matrix product."""
    summed = [f.axes for f in _factors(e, lets) if f.axes & over]
    for a, b in combinations(summed, 2):
        # Where one factor has both indices, there is one for each pair of elements, and no matrix product.
        pairs = product(sorted(a - b - over), sorted(b - a - over)) if a & b & over else ()
        apart = [(i, j) for i, j in pairs if not any({i, j} <= axes for axes in summed)]
        if apart:
            yield apart[0]
            return


def _factors(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> Iterator[ir.Expr]:
    e = _meant(e, lets)
    if isinstance(e, ir.Op) and e.fn == "mul":
        for a in e.args:
            yield from _factors(a, lets)
    else:
        yield e


def _meant(e: ir.Expr, lets: Mapping[str, ir.Expr]) -> ir.Expr:
    """What is behind names and conversions."""
    while isinstance(e, ir.Cast | ir.Ref):
        if isinstance(e, ir.Ref) and e.name not in lets:
            return e
        e = e.arg if isinstance(e, ir.Cast) else lets[e.name]
    return e
