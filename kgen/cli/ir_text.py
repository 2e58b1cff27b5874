"""The syntax tree, the tile IR and a schedule as text for people to read. Not a format: nothing reads it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

from kgen.codegen.layout import ceil_power
from kgen.codegen.schedule import Choice, Element, Leave, Loop, Scheduled, Step, Straight
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.knobs import WARP
from kgen.dsl.source import Span

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "and": "and", "or": "or",
}  # fmt: skip


def tree_text(node: object) -> str:
    """A syntax tree, one node a line, positions as line:column."""
    return "\n".join(_tree(node, "", ""))


def _tree(node: object, label: str, pad: str) -> Iterator[str]:
    head = f"{pad}{label}: " if label else pad
    if not is_dataclass(node) or isinstance(node, type):
        yield f"{head}{node!r}"
        return
    own, below = [], []
    for f in fields(node):
        value = getattr(node, f.name)
        if isinstance(value, Span):
            continue
        if is_dataclass(value):
            below.append((f.name, value))
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            below += [(f"{f.name}[{i}]", item) for i, item in enumerate(value)]
        elif value not in ((), "", None) and not (isinstance(value, tuple) and isinstance(value[0], Span)):
            own.append(f"{f.name}={value!r}")
    span = getattr(node, "span", None)
    place = f"  @{span.line}:{span.column}" if isinstance(span, Span) else ""
    yield f"{head}{type(node).__name__}({', '.join(own)}){place}"
    for name, item in below:
        yield from _tree(item, name, pad + "  ")


def kernel_text(kernel: ir.Kernel) -> str:
    """The tile IR of a kernel: declarations, then one statement a line with dtype and index set of its value."""
    return "\n".join([*declarations(kernel), "", *_aligned(kernel.body)])


def scheduled_text(scheduled: Scheduled, backend: str, remarks: Iterable[str] = ()) -> str:
    """A kernel in normal form, under its schedule for `backend`: the steps that an emitter prints. `remarks` are to
    stand below who chose it."""
    s = scheduled.schedule
    out = [f"# {backend}{f', {s.name}' if s.name else ''}: {', '.join(_sizes(scheduled, backend))}"]
    by = "a tuned schedule" if s.by == "tuned" else s.by
    out.append(f"# chosen by {by}" if by == "ladders" else f"# set by {by}, the rest chosen by ladders")
    out += [f"# {line}" for line in remarks]
    v = scheduled.variant
    out += [f"# {d} = {n}" for d, n in v.dims] + [f"# {d} is a multiple of {n}" for d, n in v.multiples if n > 1]
    for t, c in v.tensors:
        out.append(
            f"# {t}: innermost stride {'1' if c.unit else 'any'}, address, other strides multiples of {c.align} bytes"
            + (", dense" if c.dense else "")
        )
    if v.wide:
        out.append("# 64-bit index arithmetic")
    if scheduled.sums is not None and scheduled.sums.down:
        out.append(f"# {', '.join(scheduled.sums.over)} from the last to the first")
    out += [*declarations(scheduled.kernel), ""]
    out += _steps(scheduled.steps, scheduled.kernel, backend)
    out += [f"# {name} is to stay in L2" for name in sorted(scheduled.kept)]
    out += [f"# barrier before the first store to {t}" for t in sorted(scheduled.barriers)]
    return "\n".join(out)


def _sizes(scheduled: Scheduled, backend: str) -> list[str]:
    """The sizes of a schedule, in the words of its backend."""
    kernel, s = scheduled.kernel, scheduled.schedule
    rows = f"{s.rows} row{'s' * (s.rows > 1)} a program" if kernel.tiles else f"{s.rows} points a program"
    if backend == "triton":
        rows = rows if kernel.tiles else f"a block of {s.rows} points"
        out = [f"num_warps={s.threads // WARP}", *([f"maxnreg={s.registers}"] if s.registers else ()), rows]
        for a in kernel.tiles:
            n, chunk = a.extent.constant, s.chunk(a.name)
            out.append(
                f"{a.name} in a block of {ceil_power(n)}" if chunk is None else _chunks(kernel, backend, a.name, chunk)
            )
        if scheduled.held:
            out[-1] += f" that stay in registers for later passes ({', '.join(sorted(scheduled.held))})"
        return out + ([f"num_stages={s.stages}"] if s.stages > 1 else [])
    threads = f"{s.threads} threads" + (f" in each of {s.cluster} blocks of a cluster" if s.cluster > 1 else "")
    vectors = f"vectors of {s.vector}" if s.vector > 1 else "element by element"
    peeled = " of rows that begin at any address" if s.peeled else ""
    return [threads, rows, vectors + peeled, *(_chunks(kernel, backend, a, n) for a, n in s.chunks)]


def _chunks(kernel: ir.Kernel, backend: str, axis: str, chunk: int) -> str:
    """How a pass takes `axis`."""
    if chunk >= kernel.axis(axis).extent.constant:
        return f"all of {axis} anew in each pass"
    return f"{axis} in {'blocks' if backend == 'triton' else 'chunks'} of {chunk}"


def _steps(steps: Iterable[Step], kernel: ir.Kernel, backend: str) -> Iterator[str]:
    for step in steps:
        match step:
            case Choice():
                yield f"if {expr_text(step.condition)}:"
                yield from _indented(_steps(step.yes, kernel, backend))
                yield "else:"
                yield from _indented(_steps(step.no, kernel, backend))
            case Loop():
                whole = step.chunk >= kernel.axis(step.axis).extent.constant
                taken = f"all of {step.axis}" if whole else _chunks(kernel, backend, step.axis, step.chunk)
                yield f"for {taken}{', from the last' if step.down else ''}:"
                yield from _indented(_aligned(step.body))
            case Element():
                yield f"at {step.axis} = {expr_text(step.label)}, unless that is -1:"
                yield from _indented(_aligned(step.body))
            case Straight(once=True):
                yield "once, for all rows:"
                yield from _indented(_aligned(step.body))
            case Leave():
                yield f"leave if {expr_text(step.condition)}"
            case _:
                yield from _aligned(step.body)


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def declarations(kernel: ir.Kernel) -> list[str]:
    """What a kernel declares: tensors, scalars, constants, indices and requirements."""
    out = [f"kernel {kernel.name}"]
    for t in kernel.tensors:
        dims = [("*" if t.star and i == 0 else "") + str(p) for i, p in enumerate(t.shape)]
        out.append(f"{t.role:8} {t.name}: {t.dtype}[{', '.join(dims)}]")
    out += [f"scalar   {p.name}: {p.dtype}" + ("" if p.default is None else f" = {p.default}") for p in kernel.scalars]
    out += [f"const    {n} = {str(v).lower() if isinstance(v, bool) else v}" for n, v in kernel.consts]
    out += [f"{a.kind:8} {a.name} in {a.extent}" for a in kernel.axes]
    out += [f"require  {r.left} {r.op} {r.right}" for r in kernel.requires]
    return out


def _aligned(body: Iterable[ir.Stmt]) -> list[str]:
    lines = [(statement_text(s), s) for s in body]
    width = min(88, max((len(text) for text, _ in lines), default=0))
    return [f"{text:{width}}  # {s.value.dtype} {_axes(s.value.axes)}, line {s.span.line}" for text, s in lines]


def _axes(axes: frozenset[str]) -> str:
    return "{" + ", ".join(sorted(axes)) + "}"


def statement_text(s: ir.Stmt) -> str:
    """One statement on one line."""
    if isinstance(s, ir.Let):
        return f"{s.name} = {expr_text(s.value)}"
    at = ", ".join(map(str, s.at))
    if isinstance(s, ir.Store):
        return f"{s.tensor}[{at}] = {expr_text(s.value)}"
    return f"{s.tensor}[{at}] += {expr_text(s.value)}  over {', '.join(s.over)}"


def expr_text(e: ir.Expr, inside: bool = False) -> str:
    """An expression; operators are in brackets wherever they are operands."""
    match e:
        case ir.Const():
            return str(e.value).lower() if isinstance(e.value, bool) else repr(e.value)
        case ir.Scalar() | ir.Ref():
            return e.name
        case ir.IndexValue():
            return f"({e.index})" if inside and e.index.as_symbol is None else str(e.index)
        case ir.Load():
            return f"{e.tensor}[{', '.join(str(s) if isinstance(s, Poly) else expr_text(s) for s in e.at)}]"
        case ir.Cast():
            return f"{e.to}({expr_text(e.arg)})"
        case ir.Reduce():
            return f"{e.kind}({expr_text(e.arg)}, {', '.join(e.over)})"
        case ir.Op():
            if e.fn in _INFIX and len(e.args) == 2:
                text = f"{expr_text(e.args[0], True)} {_INFIX[e.fn]} {expr_text(e.args[1], True)}"
                return f"({text})" if inside else text
            return f"{e.fn}({', '.join(map(expr_text, e.args))})"
