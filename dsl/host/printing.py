"""An `op` as text: what `kgen.dsl.printing` is for kernels."""

from __future__ import annotations

from collections.abc import Iterator

from kgen.dsl import ast
from kgen.dsl.host import ast as host
from kgen.dsl.printing import docstring_lines, expr_text, header_text, type_text

_STEP = "    "


def op_text(op: host.Op) -> str:
    """An op: header, docstring, requirements, sections."""
    lines = [header_text("op", op.header)]
    if op.doc:
        lines += docstring_lines(op.doc, _STEP)
    lines += [f"{_STEP}require {expr_text(r.condition)}" for r in op.requires]
    for e in op.examples:
        lines.append(f"{_STEP}example {', '.join(f'{s.name} = {expr_text(s.value)}' for s in e.sizes)}")
    for s in op.sections:
        arguments = f"({', '.join(a.id for a in s.arguments)})" if s.arguments else ""
        lines.append(f"{_STEP}{s.name}{arguments}:")
        lines += _block(s.body, _STEP * 2)
    return "\n".join(lines)


def _block(body: tuple[host.Stmt, ...], indent: str) -> Iterator[str]:
    for s in body:
        yield from _statement(s, indent)


def _statement(s: host.Stmt, indent: str) -> Iterator[str]:
    match s:
        case host.Declare():
            yield f"{indent}{s.name}: {type_text(s.type)}"
        case host.Assign():
            yield f"{indent}{', '.join(map(host_text, s.targets))} = {host_text(s.value)}"
        case host.Accumulate():
            yield f"{indent}{host_text(s.target)} += {host_text(s.value)}"
        case host.Perform():
            yield indent + host_text(s.call)
        case ast.Require():
            yield f"{indent}require {expr_text(s.condition)}"
        case host.Chunks():
            yield f"{indent}for {s.index} in {s.function}({s.dim}):"
            yield from _block(s.body, indent + _STEP)
        case host.If():
            word = "if"
            while True:
                yield f"{indent}{word} {expr_text(s.condition)}:"
                yield from _block(s.body, indent + _STEP)
                if len(s.orelse) != 1 or not isinstance(s.orelse[0], host.If):
                    break
                s, word = s.orelse[0], "elif"
            if s.orelse:
                yield f"{indent}else:"
                yield from _block(s.orelse, indent + _STEP)


def host_text(e: host.Expr) -> str:
    """An expression of an op on one line."""
    match e:
        case host.Product():
            plus = "" if e.plus is None else f" + {_operand(e.plus)}"
            return f"{_operand(e.left)} @ {_operand(e.right)}{plus}"
        case host.Attribute():
            return f"{_operand(e.operand)}.{e.name}"
        case host.Call():
            keywords = [f"{k.name}={host_text(k.value)}" for k in e.keywords]
            return f"{e.func}({', '.join([*map(host_text, e.args), *keywords])})"
        case _:
            return expr_text(e)


def _operand(e: host.Expr) -> str:
    text = host_text(e)
    return f"({text})" if isinstance(e, host.Product) else text
