"""The checker of host programs: from `op` items to `ir.Program`, and every mistake on the way.

`check_ops` goes through every op of a file along every combination of its choices; `elaborate_op` makes the program for
one. Both run the same code. Kernels of other files are checked with the ops that import them, as kernels are
(`kgen.dsl.check`); those of the file itself are not checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kgen.dsl import ast
from kgen.dsl import ir as tiles
from kgen.dsl.check import check_module
from kgen.dsl.check.scope import Choices
from kgen.dsl.check.signature import Signature, TensorParam, index_poly, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES, F32
from kgen.dsl.garbage import collected_later
from kgen.dsl.host import ast as host
from kgen.dsl.host import ir
from kgen.dsl.host.passed_on import passed_on
from kgen.dsl.host.scope import GRADIENT, Callee, HostSpecialization, Saved, Scope, Stop
from kgen.dsl.host.statements import Statements, gradient_of
from kgen.dsl.host.values import Difference, Numbers, Operand, Values, Way, differences
from kgen.dsl.signature import OP_OPTIONS
from kgen.dsl.source import Span


@dataclass(frozen=True)
class Source:
    """The ops of a file and the kernels that they may call."""

    ops: tuple[host.Op, ...]
    kernels: Mapping[str, ir.KernelRef]
    imported: tuple[ir.KernelRef, ...]


def source_of(module: ast.Module) -> Source:
    """The ops of a file, with its own kernels and those that it imports."""
    own = {k.name: ir.KernelRef(module, k.name) for k in module.kernels}
    imported = {k.name: ir.KernelRef(k.module, k.name) for k in module.imported}
    return Source(module.ops, {**imported, **own}, tuple(imported.values()))


@collected_later()
def check_ops(source: Source, diagnostics: Diagnostics) -> None:
    """Report every mistake in the ops of a file, and in the kernels that it imports for them."""
    for ref in source.imported if source.ops else ():
        own = [b for b in ref.module.backwards if b.name == ref.name]
        check_module(replace(ref.module, kernels=(_declared(ref),), backwards=tuple(own)), diagnostics)
    callees, ops = _callees(source), frozenset(o.name for o in source.ops)
    names: dict[str, Span] = {n: _declared(r).name_span for n, r in source.kernels.items()}
    for op in source.ops:
        if op.name in names:
            diagnostics.error(
                "K0200",
                f"op '{op.name}' is declared twice",
                op.name_span,
                help="give one of them another name",
                notes=(f"first declared at {names[op.name]}",),
            )
            continue
        names[op.name] = op.name_span
        before = len(diagnostics.items)
        signature = _signature(op, diagnostics)
        _requirements(op, signature, diagnostics)
        if len(diagnostics.items) > before:
            continue
        idle = passed_on(op, signature, {n: c.signature for n, c in callees.items()})
        choices, numbers = Choices(dict.fromkeys(idle, True)), Numbers()
        ways: list[Way] = []
        while True:
            _elaborate(op, signature, callees, ops, diagnostics, None, choices, numbers, ways)
            if not choices.next_path():
                break
        if len(diagnostics.items) == before:
            _report(differences(ways, numbers), diagnostics)


@collected_later()
def elaborate_op(source: Source, name: str, spec: HostSpecialization) -> ir.Program:
    """The program of op `name`, settled. Raises DslError with every mistake found, KeyError if there is no such op."""
    op = next((o for o in source.ops if o.name == name), None)
    if op is None:
        raise KeyError(name)
    diagnostics = Diagnostics()
    signature = _signature(op, diagnostics)
    diagnostics.raise_if_errors()
    program = _elaborate(op, signature, _callees(source), frozenset(), diagnostics, spec, Choices(), Numbers(), [])
    diagnostics.raise_if_errors()
    assert program is not None
    return program


def header(op: host.Op) -> tiles.Kernel:
    """The signature and the requirements of an op in the form of a kernel without statements, which is what binds the
    sizes of a call. Dtypes that are variables stand as f32."""
    diagnostics = Diagnostics()
    signature = _signature(op, diagnostics)
    requires = _requirements(op, signature, diagnostics)
    diagnostics.raise_if_errors()
    return tiles.Kernel(
        name=op.name,
        doc=op.doc,
        dims=signature.dims,
        tensors=tuple(
            tiles.Tensor(t.name, DTYPES.get(t.dtype, F32), t.shape, t.role, t.star, t.optional, t.span)
            for t in signature.tensors
        ),
        scalars=(),
        axes=(),
        requires=requires,
        body=(),
        consts=(),
        dtypes=(),
        span=op.name_span,
    )


def _callees(source: Source) -> dict[str, Callee]:
    out = {}
    for name, ref in source.kernels.items():
        ignored = Diagnostics()  # its own check reports it
        out[name] = Callee(ref, signature_of(_declared(ref), ignored))
    return out


def _declared(ref: ir.KernelRef) -> ast.Kernel:
    return next(k for k in ref.module.kernels if k.name == ref.name)


def _signature(op: host.Op, diagnostics: Diagnostics) -> Signature:
    signature = signature_of(op.header, diagnostics)
    for p in signature.params:
        if isinstance(p, TensorParam) and p.role == "inout":
            diagnostics.error(
                "K0607", f"'{p.name}' of an op is inout", p.span, help="an op writes its outputs only: remove inout"
            )
        if p.name in OP_OPTIONS:
            diagnostics.error(
                "K0617",
                f"'{p.name}' is what a caller passes to every op",
                p.span,
                help=f"give the parameter another name, such as {p.name}_; taken are {', '.join(OP_OPTIONS)}",
            )
        if p.name.startswith(GRADIENT) and any(p.name == GRADIENT + o.name for o in signature.params):
            diagnostics.error(
                "K0615", f"'{p.name}' is the name of a gradient", p.span, help="give the parameter another name"
            )
    if not signature.outputs:
        diagnostics.error("K0610", f"op '{op.name}' has no output", op.name_span, help="add `-> (y: T[...])`")
    _sections(op, signature, diagnostics)
    return signature


def _sections(op: host.Op, signature: Signature, diagnostics: Diagnostics) -> None:
    seen: set[str] = set()
    outputs = [GRADIENT + o.name for o in signature.outputs]
    for s in op.sections:
        if s.name not in ("forward", "backward"):
            diagnostics.error(
                "K0609", f"there is no section '{s.name}'", s.name_span, help="an op has forward: and backward(...):"
            )
        elif s.name in seen:
            diagnostics.error("K0609", f"'{s.name}' stands twice", s.name_span, help="put both in one section")
        elif s.name == "forward" and s.arguments:
            diagnostics.error("K0609", "'forward' takes no arguments", s.arguments[0].span, help="write forward:")
        elif s.name == "backward" and [a.id for a in s.arguments] != outputs:
            diagnostics.error(
                "K0609",
                "'backward' takes the gradient of each output",
                s.name_span,
                help=f"write backward({', '.join(outputs)}):",
            )
        seen.add(s.name)
    if "forward" not in seen and seen <= {"backward"}:  # a misspelt one was reported
        diagnostics.error(
            "K0609", f"op '{op.name}' has no forward section", op.name_span, help="add forward: and its statements"
        )


def _requirements(op: host.Op, signature: Signature, diagnostics: Diagnostics) -> tuple[tiles.Requirement, ...]:
    scope = Scope(signature, {}, diagnostics, None, Choices())
    statements = Statements(scope)
    out: list[tiles.Requirement] = []
    pending = [r.condition for r in op.requires]
    while pending:
        e = pending.pop(0)
        if isinstance(e, ast.Binary) and e.op == "and":
            pending[:0] = [e.left, e.right]
            continue
        try:
            if not (isinstance(e, ast.Binary) and e.op in ("==", "!=", "<", "<=", ">", ">=")):
                raise scope.fail("K0613", "'require' needs a comparison of dimensions", e.span, "as in require V >= 1")
            left, right = (index_poly(x, statements._dimension, diagnostics) for x in (e.left, e.right))
        except Stop:
            continue
        if left is not None and right is not None:
            out.append(tiles.Requirement(e.op, left, right, e.span))
    return tuple(out)


def _elaborate(
    op: host.Op,
    signature: Signature,
    callees: Mapping[str, Callee],
    ops: frozenset[str],
    diagnostics: Diagnostics,
    spec: HostSpecialization | None,
    choices: Choices,
    numbers: Numbers,
    ways: list[Way],
) -> ir.Program | None:
    """One elaboration on one path, which is added to `ways`; None if it found a mistake.

    Where a file is checked it goes on from where this path leaves the one before (`Choices`).
    """
    before = len(diagnostics.items)
    scope = Scope(signature, callees, diagnostics, spec, choices, ops, values=Values(numbers))
    scope.taken = {p.name for p in signature.params}
    for name, p in scope.inputs.items():
        if scope.is_present(p) if p.optional and spec is not None else not p.optional:
            _declare_input(scope, name, p)
    statements = Statements(scope)
    sections = {s.name: s for s in op.sections}
    scope.results = {o.name: o for o in signature.outputs}
    if spec is None:  # optional tensors are asked for where they are used, so that no path is taken in vain
        scope.names = _Optional(scope)
    backward = sections.get("backward")
    done = _Forward((), {}, {}, {})

    left = _before([*sections["forward"].body, _Turn(), *(backward.body if backward is not None else ())], None)

    def restore(saved: tuple[Saved, _Forward, _Steps | None]) -> None:
        nonlocal done, left
        known, done, left = saved
        scope.restore(known)

    count = choices.resume(restore)
    while left is not None:
        if spec is None:
            choices.mark(count, partial(_saved, scope, done, left))
        step, left = left
        if isinstance(step, _Turn):
            done = _turn(scope, backward)
        else:
            left = _before(_performed(statements, step), left)
        count += 1
    gradients = _gradients(scope) if backward is not None else {}
    if scope.broken or len(diagnostics.items) > before:
        return None
    answers = {str(k): v for k, v in choices.answers().items() if k not in scope.asked}
    found = _made(scope, {GRADIENT + n: t for n, t in gradients.items()})
    ways.append(Way(answers, scope.asked, done.made, found, scope.values.made))
    return ir.Program(
        op.name,
        signature,
        scope.tensors,
        done.body,
        done.outputs,
        tuple(scope.body),
        done.upstream,
        gradients,
        {name: callees[name].ref for name in sorted(scope.used)},
    )


@dataclass(frozen=True)
class _Forward:
    """The forward section of one elaboration: its statements, the tensors and the values of the outputs, and the
    tensors of their gradients."""

    body: tuple[ir.Stmt, ...]
    outputs: dict[str, str]
    made: dict[str, tuple[Operand, Span]]
    upstream: dict[str, str]


@dataclass(frozen=True)
class _Turn:
    """The step between the sections."""


@dataclass(frozen=True)
class _Closed:
    """The step behind the branch of a choice that was taken."""

    choice: host.If
    by_gradients: bool


# What is to be done: a step, and all behind it. A path that parts from the one before goes on with what was left there,
# in a scope of its own.
_Step = host.Stmt | _Turn | _Closed
_Steps = tuple[_Step, Any]


def _saved(scope: Scope, done: _Forward, left: _Steps) -> tuple[Saved, _Forward, _Steps]:
    return scope.save(), done, left


def _before(steps: Sequence[_Step], rest: _Steps | None) -> _Steps | None:
    for step in reversed(steps):
        rest = step, rest
    return rest


def _performed(statements: Statements, step: host.Stmt | _Closed) -> Sequence[_Step]:
    """Do a step; the steps that it comes down to, where it is a choice."""
    if isinstance(step, host.If):
        try:
            taken, by_gradients = statements.opened(step)
        except Stop:
            statements.poison(step)
            return ()
        return (*taken, _Closed(step, by_gradients))
    if isinstance(step, _Closed):
        statements.closed(step.choice, step.by_gradients)
    else:
        statements.block((step,))
    return ()


def _turn(scope: Scope, backward: host.Section | None) -> _Forward:
    """The end of the forward section and the beginning of the other, if there is one."""
    outputs = _outputs(scope)
    made = _made(scope, outputs)
    body, scope.body = tuple(scope.body), []
    upstream: dict[str, str] = {}
    if backward is not None:
        for o, name in zip(scope.signature.outputs, backward.arguments, strict=True):
            view = scope.tensor(name.id, o.dtype, scope.shape(o), "upstream", name.span)
            scope.bind(name.id, view)
            scope.values.give(view.tensor, "upstream", o.name)
            upstream[o.name] = view.tensor
        scope.results = {GRADIENT + n: gradient_of(p) for n, p in scope.inputs.items()}
    return _Forward(body, outputs, made, upstream)


def _declare_input(scope: Scope, name: str, p: TensorParam) -> None:
    scope.tensors[name] = ir.Tensor(name, p.dtype, scope.shape(p), "in", p.span)
    scope.state.new(name, written=True, inside=False)
    scope.values.give(name, "parameter", name)
    scope.bind(name, ir.View(name, (), False, p.dtype, scope.shape(p), p.span))


class _Optional(dict[str, ir.View]):
    """Names, among which an optional tensor appears once it was asked whether it is there, and it is."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope.names)
        self._scope = scope

    def get(self, name: str, default: ir.View | None = None) -> ir.View | None:  # pyright: ignore
        p = self._scope.inputs.get(name)
        if p is not None and p.optional and name not in self and self._scope.is_present(p):
            _declare_input(self._scope, name, p)
        return super().get(name, default)


def _made(scope: Scope, results: Mapping[str, str]) -> dict[str, tuple[Operand, Span]]:
    """What results hold, and where they got it."""
    views = {n: scope.names[n] for n, t in results.items() if t in scope.values.held}
    return {n: (scope.values.of(v), v.span) for n, v in views.items()}


def _report(found: Iterable[Difference], diagnostics: Diagnostics) -> None:
    for d in found:
        when = " and ".join(d.when)
        if d.missing:
            diagnostics.error(
                "K0621",
                f"'{d.name}' is not assigned when {when}",
                d.span,
                help=f"assign it wherever it may be wanted: under `if {d.name}:`, or under no choice by gradients",
            )
        else:
            diagnostics.error(
                "K0620",
                f"'{d.name}' depends on which gradients are wanted",
                d.span,
                label=f"only so when {when}",
                help="compute what only gradients need under names of its own, or assign in every branch of the choice",
            )


def _outputs(scope: Scope) -> dict[str, str]:
    """The tensors of the outputs at the end of the forward section."""
    out: dict[str, str] = {}
    for name in scope.results:
        found = dict.get(scope.names, name)
        if name in scope.failed:
            continue
        if found is None or not scope.state.written(found.tensor):
            span = scope.results[name].span
            scope.fail("K0610", f"output '{name}' is never assigned", span, f"assign {name} = ...")
            continue
        with suppress(Stop):
            out[name] = _own(scope, name, scope.current(name, found, found.span), set(out.values()))
    return out


def _gradients(scope: Scope) -> dict[str, str]:
    """The tensors of the gradients that are assigned, by parameter, at the end of the backward section."""
    out: dict[str, str] = {}
    for name in scope.inputs:
        found = dict.get(scope.names, GRADIENT + name)
        if found is None or not scope.state.written(found.tensor):
            continue
        with suppress(Stop):
            scope.current(GRADIENT + name, found, found.span)
            if scope.spec is None or name in scope.spec.wanted:
                out[name] = _own(scope, GRADIENT + name, found, set(out.values()))
            else:
                out[name] = found.tensor
    return out


def _own(scope: Scope, name: str, v: ir.View, taken: set[str]) -> str:
    """A tensor that is result `name` and nothing else: the one that `v` shows, if it is the program's and no other
    result, or a copy."""
    tensor = scope.tensors[v.tensor]
    whole = v.shape == tensor.shape and not v.chunks and not v.transposed
    if tensor.role == "value" and whole and v.tensor not in taken:
        return v.tensor
    p = scope.results[name]
    made = scope.storage.get(name)
    if made is None or scope.state.touched(made):
        made = scope.tensor(name, p.dtype, scope.shape(p), "value", p.span).tensor
    target = ir.View(made, (), False, p.dtype, scope.shape(p), p.span)
    scope.emit(ir.Convert(target, v, v.span))
    return made
