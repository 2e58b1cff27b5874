"""The checker: from the syntax tree to tile IR, and every mistake on the way.

Two entry points. `check_module` goes through every kernel of a file in every combination of its compile-time
choices and reports what is wrong in any of them. `elaborate` makes the tile IR of one kernel for one
specialisation. Both run the same code, so what was checked is what is compiled.

Not checked here: whether subscripts stay in bounds, whether stores collide and whether in-place updates are ordered.
That is `kgen.dsl.proofs`, which reads the tile IR; both entry points call it when the kernel is otherwise sound.
"""

from __future__ import annotations

from collections.abc import Mapping

from kgen.dsl import ast, ir
from kgen.dsl.builtins import CALLABLE_OPS, COMPOSITE_REDUCTIONS, REDUCTIONS
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
    if len(diagnostics.items) > before:
        return None
    open_ints = tuple(
        s.name for s in signature.scalars if s.const and scope.const(s.name) is None and DTYPES[s.dtype].kind == "int"
    )
    result = ir.Kernel(
        name=kernel.name,
        doc=kernel.doc,
        dims=signature.dims + open_ints,
        tensors=tuple(
            ir.Tensor(t.name, scope.dtype(t.dtype) or F32, scope.shape(t), t.role, t.star, t.optional, t.span)
            for t in signature.tensors
            if not t.optional or scope.is_present(t)
        ),
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
    prove_kernel(result, diagnostics)
    return result if len(diagnostics.items) == before else None


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
