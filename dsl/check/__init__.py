"""The checker: from the syntax tree to tile IR, and every mistake on the way.

Two entry points. `check_module` goes through every kernel of a file in every combination of its compile-time
choices and reports what is wrong in any of them. `elaborate` makes the tile IR of one kernel for one
specialisation. Both run the same code, so what was checked is what is compiled.

Not checked here: whether subscripts stay in bounds, whether stores collide and whether in-place updates are ordered.
That is `kgen.dsl.proofs`, which reads the tile IR; both entry points call it when the kernel is otherwise sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import CALLABLE_OPS, COMPOSITE_REDUCTIONS, CONSTANTS, REDUCTIONS
from kgen.dsl.check.expressions import suggestion
from kgen.dsl.check.scope import Choices, Scope, Specialization
from kgen.dsl.check.signature import ScalarParam, Signature, TensorParam, example_sizes, signature_of
from kgen.dsl.check.statements import Statements
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import BF16, DTYPES, F32, F64, DType
from kgen.dsl.proofs import prove_kernel
from kgen.dsl.source import Span

__all__ = [
    "ScalarParam",
    "Signature",
    "Specialization",
    "TensorParam",
    "check_module",
    "elaborate",
    "example_sizes",
    "signature_of",
]


def check_module(module: ast.Module, diagnostics: Diagnostics) -> None:
    """Report every mistake of `module` that can be found without calling it."""
    _check_declarations(module, diagnostics)
    _check_functions(module, diagnostics)
    functions = {f.name: f for f in module.functions}
    for kernel in module.kernels:
        before = len(diagnostics.items)
        signature = signature_of(kernel, diagnostics)
        if len(diagnostics.items) > before:
            continue
        # f32 finds everything that does not depend on a dtype; the other two find what does.
        for assumed in (F32, BF16, F64) if signature.dtype_vars else (F32,):
            choices = Choices()
            while True:
                _elaborate(kernel, signature, functions, diagnostics, None, choices, assumed)
                if not choices.next_path():
                    break
            if len(diagnostics.items) > before:
                break


def elaborate(module: ast.Module, name: str, spec: Specialization) -> ir.Kernel:
    """The tile IR of kernel `name` of `module` specialised to `spec`.

    Raises DslError with every mistake found, KeyError if there is no such kernel.
    """
    kernel = next((k for k in module.kernels if k.name == name), None)
    if kernel is None:
        raise KeyError(name)
    diagnostics = Diagnostics()
    _check_declarations(module, diagnostics)
    signature = signature_of(kernel, diagnostics)
    diagnostics.raise_if_errors()
    functions = {f.name: f for f in module.functions}
    result = _elaborate(kernel, signature, functions, diagnostics, spec, Choices(), None)
    diagnostics.raise_if_errors()
    assert result is not None
    return result


def _elaborate(
    kernel: ast.Kernel,
    signature: Signature,
    functions: Mapping[str, ast.Function],
    diagnostics: Diagnostics,
    spec: Specialization | None,
    choices: Choices,
    assumed: DType | None,
) -> ir.Kernel | None:
    """One elaboration on one path; None if it found a mistake."""
    before = len(diagnostics.items)
    scope = Scope(signature, functions, diagnostics, spec, choices, assumed)
    if not kernel.outputs and not any(t.role == "inout" for t in signature.tensors):
        diagnostics.error(
            "K0225",
            f"kernel '{kernel.name}' has no output",
            kernel.name_span,
            help="add `-> (y: T[...])` or an inout tensor",
        )
    Statements(scope).block(kernel.body)
    if scope.broken or len(diagnostics.items) > before:
        return None
    open_ints = tuple(
        s.name for s in signature.scalars if s.const and scope.const(s.name) is None and DTYPES[s.dtype].kind == "int"
    )
    tensors = tuple(
        ir.Tensor(t.name, scope.dtype(t.dtype) or F32, scope.shape(t), t.role, t.star, t.optional, t.span)
        for t in signature.tensors
        if not t.optional or scope.is_present(t)
    )
    # A dimension that only an absent tensor has is no dimension of this kernel, unless something depends on it.
    used = {name for t in tensors for p in t.shape for name in p.symbols}
    used |= {name for a in scope.axes.values() for name in a.extent.symbols}
    used |= {name for r in scope.requires for p in (r.left, r.right) for name in p.symbols}
    used |= {
        name for s in scope.body for e in ir.walk(s.value) if isinstance(e, ir.IndexValue) for name in e.index.symbols
    }
    result = ir.Kernel(
        name=kernel.name,
        doc=kernel.doc,
        dims=tuple(d for d in signature.dims if d in used) + open_ints,
        tensors=tensors,
        scalars=tuple(
            ir.ScalarParam(s.name, scope.dtype(s.dtype) or F32, s.default, s.span)
            for s in signature.scalars
            if not s.const
        ),
        axes=tuple(scope.axes.values()),
        requires=tuple(scope.requires),
        body=tuple(scope.body),
        consts=tuple(sorted(spec.consts.items())) if spec is not None else (),
        dtypes=tuple((v, scope.dtype(v) or F32) for v in signature.dtype_vars),
        span=kernel.name_span,
    )
    for poly, span in _polynomials(result):
        if poly.divides_by_zero:
            diagnostics.error("K0226", "a divisor is 0 here", span, help="give the const parameter another value")
    if len(diagnostics.items) == before:
        prove_kernel(result, diagnostics)
    return result if len(diagnostics.items) == before else None


def _polynomials(kernel: ir.Kernel) -> Iterator[tuple[Poly, Span]]:
    """Every integer expression over dimensions and indices in `kernel`, and where it stands."""
    for t in kernel.tensors:
        yield from ((p, t.span) for p in t.shape)
    for a in kernel.axes:
        yield a.extent, a.span
    for r in kernel.requires:
        yield from ((r.left, r.span), (r.right, r.span))
    for s in kernel.body:
        if not isinstance(s, ir.Let):
            yield from ((p, s.span) for p in s.at)
        for e in ir.walk(s.value):
            if isinstance(e, ir.IndexValue):
                yield e.index, e.span
            elif isinstance(e, ir.Load):
                yield from ((p, e.span) for p in e.at if isinstance(p, Poly))


def _check_functions(module: ast.Module, diagnostics: Diagnostics) -> None:
    """What is wrong in a function whoever calls it: names it cannot see, and recursion."""
    functions = {f.name: f for f in module.functions}
    known = {*functions, *CALLABLE_OPS, *REDUCTIONS, *COMPOSITE_REDUCTIONS, *DTYPES}
    calls: dict[str, list[ast.Call]] = {}
    for f in module.functions:
        names = [e for e in ast.walk(f.body) if isinstance(e, ast.Name)]
        for name in names:
            if name.id not in f.params and name.id not in CONSTANTS:
                hint = "a function sees only its own parameters"
                diagnostics.error("K0201", f"unknown name '{name.id}'", name.span, help=hint)
        calls[f.name] = [e for e in ast.walk(f.body) if isinstance(e, ast.Call)]
        for call in calls[f.name]:
            # A dtype variable of the kernel that calls it may be applied in a function.
            if call.func not in known and not call.func[:1].isupper():
                hint = suggestion(call.func, sorted(known))
                diagnostics.error("K0202", f"unknown function '{call.func}'", call.func_span, help=hint)
    for f in module.functions:
        seen: set[str] = set()
        todo = [c.func for c in calls[f.name]]
        while todo:
            name = todo.pop()
            if name in functions and name not in seen:
                seen.add(name)
                todo += [c.func for c in calls[name]]
        if f.name in seen:
            call = next(c for c in calls[f.name] if c.func in seen)
            help = "functions cannot be recursive"
            diagnostics.error("K0221", f"function '{f.name}' calls itself", call.func_span, help=help)


def _check_declarations(module: ast.Module, diagnostics: Diagnostics) -> None:
    """Names of functions and kernels: each once, and none of them a built-in."""
    seen: dict[str, Span] = {}
    builtin = {*CALLABLE_OPS, *REDUCTIONS, *COMPOSITE_REDUCTIONS, *DTYPES}
    for item in (*module.functions, *module.kernels):
        what = "function" if isinstance(item, ast.Function) else "kernel"
        if item.name in seen:
            diagnostics.error(
                "K0200",
                f"{what} '{item.name}' is declared twice",
                item.name_span,
                help="give one of them another name",
                notes=(f"first declared at {seen[item.name]}",),
            )
        elif isinstance(item, ast.Function) and item.name in builtin:
            diagnostics.error(
                "K0200",
                f"function '{item.name}' hides a built-in",
                item.name_span,
                help="give it another name",
            )
        seen.setdefault(item.name, item.name_span)
        if isinstance(item, ast.Function) and len(set(item.params)) != len(item.params):
            diagnostics.error(
                "K0200",
                f"function '{item.name}' has two parameters of one name",
                item.name_span,
                help="give each its own name",
            )
