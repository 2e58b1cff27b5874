"""The checker: from the syntax tree to tile IR, and every mistake on the way.

`check_module` goes through every kernel of a file in every combination of its compile-time choices and reports what is
wrong in any of them. `elaborate` makes the tile IR of one kernel for one specialisation, `elaborate_backward` that of
its hand-written backward. All run the same code, so what was checked is what is compiled.

Not checked here: whether subscripts stay in bounds, whether stores collide and whether in-place updates are ordered.
That is `kgen.dsl.proofs`, which reads the tile IR; both entry points call it when the kernel is otherwise sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.builtins import CALLABLE_OPS, COMPOSITE_REDUCTIONS, CONSTANTS, REDUCTIONS
from kgen.dsl.check.backward import Backward, Misfit, assigned_names, fitted, match, misfit
from kgen.dsl.check.schedules import Rule, Schedules, check_reached
from kgen.dsl.check.scope import Choices, Scope, Specialization
from kgen.dsl.check.signature import ScalarParam, Signature, TensorParam, example_sizes, signature_of
from kgen.dsl.check.statements import Statements
from kgen.dsl.diagnostics import Diagnostics, suggestion
from kgen.dsl.dtypes import BF16, DTYPES, F32, F64, DType
from kgen.dsl.garbage import collected_later
from kgen.dsl.proofs import is_proved, prove_kernel
from kgen.dsl.proofs.claims import index_names
from kgen.dsl.signature import KERNEL_OPTIONS
from kgen.dsl.source import Span

__all__ = [
    "Backward",
    "ScalarParam",
    "Signature",
    "Specialization",
    "TensorParam",
    "backward_of",
    "check_module",
    "each_way",
    "elaborate",
    "elaborate_backward",
    "example_sizes",
    "signature_of",
]


@collected_later()
def check_module(module: ast.Module, diagnostics: Diagnostics) -> None:
    """Report every mistake of `module` that can be found without calling it."""
    _check_declarations(module, diagnostics)
    _check_functions(module, diagnostics)
    functions = {f.name: f for f in module.functions}
    sound: dict[str, Signature] = {}
    for kernel in module.kernels:
        before = len(diagnostics.items)
        signature = signature_of(kernel, diagnostics)
        if len(diagnostics.items) > before:
            continue
        written = _Written.of(kernel, module.functions)
        if written in _sound:
            sound.setdefault(kernel.name, signature)
            continue
        # f32 finds everything that does not depend on a dtype; the other two find what does.
        clean = True
        for assumed in (F32, BF16, F64) if signature.dtype_vars else (F32,):
            # Apart from what was told before: a mistake that is told already is one of this kernel too.
            choices, found = Choices(), Diagnostics()
            while True:
                _elaborate(kernel, signature, functions, found, None, choices, assumed)
                if not choices.next_path():
                    break
            clean = clean and not found.items
            for d in found.items:
                diagnostics.add(d)
            if len(diagnostics.items) > before:
                break
        else:
            sound.setdefault(kernel.name, signature)
            if clean:
                _keep(written)
    for backward in module.backwards:
        _check_backward(module, backward, sound, functions, diagnostics)


def each_way(kernel: ast.Kernel, functions: Mapping[str, ast.Function]) -> Iterator[ir.Kernel]:
    """The tile IR of a kernel without mistakes along every combination of its compile-time choices, with f32 for dtype
    variables."""
    choices, ignored = Choices(), Diagnostics()
    signature = signature_of(kernel, ignored)
    while True:
        made = _elaborate(kernel, signature, functions, ignored, None, choices, F32)
        if made is not None:
            yield made
        if not choices.next_path():
            return


@dataclass(frozen=True)
class _Written:
    """A kernel and the functions that it may call, with the texts that they stand in: all that its check reads."""

    kernel: ast.Kernel
    functions: tuple[ast.Function, ...]
    texts: tuple[str, ...]

    @staticmethod
    def of(kernel: ast.Kernel, functions: tuple[ast.Function, ...]) -> _Written:
        texts = (kernel.name_span.source.text, *(f.name_span.source.text for f in functions))
        return _Written(kernel, functions, tuple(dict.fromkeys(texts)))


# Kernels in which this process found no mistake: a kernel that several files import is checked once.
_sound: dict[_Written, None] = {}
MAX_SOUND = 512


def _keep(written: _Written) -> None:
    if len(_sound) >= MAX_SOUND:
        _sound.clear()
    _sound[written] = None


def backward_of(module: ast.Module, name: str) -> Backward | None:
    """The hand-written backward of kernel `name` of a checked module, None where there is none."""
    kernel = next((b for b in module.backwards if b.name == name), None)
    if kernel is None:
        return None
    diagnostics = Diagnostics()
    forward = next(k for k in module.kernels if k.name == name)
    header, own = signature_of(forward, diagnostics), signature_of(kernel, diagnostics)
    found = match(header, frozenset(assigned_names(forward.body)), kernel, own, diagnostics)
    diagnostics.raise_if_errors()
    return found


@collected_later()
def elaborate_backward(
    module: ast.Module, backward: Backward, forward: ir.Kernel, spec: Specialization
) -> ir.Kernel | str:
    """The tile IR of `backward` for calls of its kernel that are specialised to `spec`, whose tile IR is `forward`.

    A text where it does not serve such calls: why. Raises DslError with every mistake found.
    """
    reason = backward.why_not(spec)
    if reason:
        return reason
    diagnostics = Diagnostics()
    functions = {f.name: f for f in module.functions}
    own = backward.specialization(spec)
    made = _elaborate(backward.kernel, fitted(backward, forward), functions, diagnostics, own, Choices(), None)
    diagnostics.raise_if_errors()
    assert made is not None
    wrong = [m for name, value in _saved_in(made, backward) if (m := misfit(forward, made.tensor(name), value))]
    return wrong[0].message if wrong else made


def _check_backward(
    module: ast.Module,
    kernel: ast.Backward,
    sound: Mapping[str, Signature],
    functions: Mapping[str, ast.Function],
    diagnostics: Diagnostics,
) -> None:
    forward = next((k for k in module.kernels if k.name == kernel.name), None)
    if forward is None:
        message = f"there is no kernel '{kernel.name}' in this file for this backward"
        hint = suggestion(kernel.name, [k.name for k in module.kernels])
        help = f"{hint}; " if hint else ""
        help += "a backward stands in the file of its kernel"
        diagnostics.error("K0230", message, kernel.name_span, help=help)
        return
    before = len(diagnostics.items)
    header = sound.get(kernel.name)
    own = signature_of(kernel, diagnostics)
    if header is None or len(diagnostics.items) > before:
        return
    backward = match(header, frozenset(assigned_names(forward.body)), kernel, own, diagnostics)
    if backward is None:
        return
    # Along each path both kernels are made, with the same answers.
    header = replace(header, dtype_vars=dict(backward.dtypes))
    found: dict[str, list[Misfit | None]] = {}
    for assumed in (F32, BF16, F64) if backward.dtypes else (F32,):
        choices = Choices(backward.known)
        while True:
            there = _elaborate(forward, header, functions, Diagnostics(), None, choices, assumed)
            own = backward.signature if there is None else fitted(backward, there)
            made = _elaborate(kernel, own, functions, diagnostics, None, choices, assumed)
            if there is not None and made is not None:
                for name, value in _saved_in(made, backward):
                    found.setdefault(name, []).append(misfit(there, made.tensor(name), value))
            if not choices.next_path():
                break
        if len(diagnostics.items) > before:
            return
    for name, results in found.items():
        misfits = [m for m in results if m is not None]
        wrong = next((m for m in misfits if not m.unassigned), None) or next(iter(misfits), None)
        if wrong is not None and not (wrong.unassigned and None in results):
            span = next(p.span for p in backward.signature.params if p.name == name)
            diagnostics.error("K0233", wrong.message, span, help=wrong.help)


def _saved_in(kernel: ir.Kernel, backward: Backward) -> Iterator[tuple[str, str]]:
    """The saved values that `kernel`, an elaboration of `backward`, reads: parameter and value."""
    read = {a.tensor for a in ir.accesses(kernel.body)}
    yield from ((name, value) for name, value in backward.saved.items() if name in read)


@collected_later()
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
    statements = Statements(scope)
    if spec is None and not isinstance(kernel, ast.Backward):  # whose signature depends on the path
        statements.body(kernel.body)
    else:
        statements.block(kernel.body)
    rules: list[Rule] = []
    if not scope.broken:
        statements.check_sums()
        rules = Schedules(scope, statements.fail).rules()
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
    used = used.union(*map(index_names, scope.body))
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
        values=tuple((n, v.name) for n, v in scope.values.items() if isinstance(v, ir.Ref)),
        schedules=tuple(r.rule for r in rules),
    )
    if not is_proved(result):
        for poly, span in _polynomials(result):
            if poly.divides_by_zero:
                diagnostics.error("K0226", "a divisor is 0 here", span, help="give the const parameter another value")
        if len(diagnostics.items) == before:
            prove_kernel(result, diagnostics)
    if len(diagnostics.items) == before:
        check_reached(result, rules, diagnostics)
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
    """Names of functions and kernels: each once, and none of them a built-in; of backwards: one for each kernel."""
    seen: dict[str, Span] = {}
    for item in module.backwards:
        if item.name in seen:
            diagnostics.error(
                "K0200",
                f"kernel '{item.name}' has two backwards",
                item.name_span,
                help="keep one of them; it may have an `if` for each case",
                notes=(f"the first is at {seen[item.name]}",),
            )
        seen.setdefault(item.name, item.name_span)
    seen.clear()
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
        for p in item.params if isinstance(item, ast.Kernel) else ():
            if p.name in KERNEL_OPTIONS:
                diagnostics.error(
                    "K0235",
                    f"'{p.name}' is what a caller passes to every kernel",
                    p.span,
                    help=f"give the parameter another name, such as {p.name}_; taken are {', '.join(KERNEL_OPTIONS)}",
                )
        if isinstance(item, ast.Function) and len(set(item.params)) != len(item.params):
            diagnostics.error(
                "K0200",
                f"function '{item.name}' has two parameters of one name",
                item.name_span,
                help="give each its own name",
            )
