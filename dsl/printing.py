"""The syntax tree as text: one statement a line, only the brackets it needs. `dsl/format.py` lays the lines out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kgen.dsl import ast

_PRECEDENCE = {
    "or": 1, "and": 2, "==": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4, "+": 5, "-": 5, "*": 6, "/": 6, "//": 6,
    "%": 6, "**": 8,
}  # fmt: skip
_NOT, _COMPARE, _NEGATE, _POWER, _ATOM = 3, 4, 7, 8, 9


def expr_text(expr: ast.Expr) -> str:
    """An expression on one line.

    Raises:
        ValueError: on an infinite or NaN constant, which no literal stands for.
    """
    return _expr(expr)[0]


def module_text(module: ast.Module) -> str:
    """A module, with a blank line between items other than imports."""
    blocks: list[str] = []
    if module.doc:
        blocks.append("\n".join(docstring_lines(module.doc, "")))
    if module.imports:
        blocks.append("\n".join(f"from {i.module} import {', '.join(i.names)}" for i in module.imports))
    blocks += [function_text(f) for f in module.functions]
    blocks += [kernel_text(k) for k in (*module.kernels, *module.backwards)]
    if module.ops:
        from kgen.dsl.host.printing import op_text  # which prints its parts with what is here

        blocks += [op_text(o) for o in module.ops]
    return "\n\n".join(blocks) + ("\n" if blocks else "")


def function_text(function: ast.Function) -> str:
    """`fn name(a, b) = body`."""
    return f"fn {function.name}({', '.join(function.params)}) = {expr_text(function.body)}"


def kernel_text(kernel: ast.Kernel) -> str:
    """A kernel: header, docstring, statements."""
    lines = [header_text("backward" if isinstance(kernel, ast.Backward) else "kernel", kernel)]
    if kernel.doc:
        lines += docstring_lines(kernel.doc, "    ")
    lines += _statements(kernel.body, "    ")
    return "\n".join(lines)


def header_text(kind: str, kernel: ast.Kernel) -> str:
    """The first line of a kernel, or of what has the same signature; `kind` is its keyword."""
    head = f"{kind} {kernel.name}"
    limits = [f"{v.name}: {' | '.join(v.choices)}" for v in kernel.dtype_vars]
    if isinstance(kernel, ast.Backward):
        limits += [f"{c.name}: {' | '.join(map(expr_text, c.values))}" for c in kernel.serves]
    if limits:
        head += f"[{', '.join(limits)}]"
    head += "(" + ", ".join(map(_param, kernel.params)) + ")"
    if kernel.outputs:
        head += " -> (" + ", ".join(map(_param, kernel.outputs)) + ")"
    return head + ":"


def docstring_lines(text: str, indent: str) -> list[str]:
    """A docstring literal of `text`, so that reading it gives `text` again."""
    lines = text.split("\n")
    if len(lines) == 1 and not text.endswith('"'):
        return [f'{indent}"""{text}"""']
    rest = [line for line in lines[1:] if line]
    # Were all later lines indented, reading would take their common margin away; a first line of its own keeps it.
    lines = ["", *lines] if rest and all(line[0].isspace() for line in rest) else lines
    body = [f'{indent}"""{lines[0]}', *(indent + line if line else "" for line in lines[1:])]
    return [*body, f'{indent}"""']


def _param(param: ast.Param) -> str:
    text = f"{param.name}: {type_text(param.type)}"
    return text if param.default is None else f"{text} = {expr_text(param.default)}"


def type_text(kind: ast.TensorType | ast.ScalarType) -> str:
    """The type of a parameter as it is written."""
    if isinstance(kind, ast.ScalarType):
        return f"const {kind.dtype}" if kind.const else kind.dtype
    dims = ", ".join(("*" if d.star else "") + expr_text(d.expr) for d in kind.dims)
    return ("inout " if kind.inout else "") + f"{kind.dtype}[{dims}]" + ("?" if kind.optional else "")


def _statements(body: tuple[ast.Stmt, ...], indent: str) -> Iterator[str]:
    for stmt in body:
        yield from _statement(stmt, indent)


def _statement(stmt: ast.Stmt, indent: str) -> Iterator[str]:
    match stmt:
        case ast.Bind():
            bindings = ", ".join(f"{b.index} in {expr_text(b.extent)}" for b in stmt.bindings)
            yield f"{indent}{stmt.kind} {bindings}"
        case ast.Require():
            yield f"{indent}require {expr_text(stmt.condition)}"
        case ast.Example():
            yield f"{indent}example {', '.join(f'{s.name} = {expr_text(s.value)}' for s in stmt.sizes)}"
        case ast.Schedule():
            yield f"{indent}{schedule_text(stmt)}"
        case ast.Assign():
            yield f"{indent}{_list(stmt.targets)} = {_list(stmt.values)}"
        case ast.Accumulate():
            yield f"{indent}{expr_text(stmt.target)} += {expr_text(stmt.value)}"
        case ast.For():
            step = "" if stmt.step is None else f" by {expr_text(stmt.step)}"
            yield f"{indent}for {stmt.index} in {expr_text(stmt.extent)}{step}:"
            yield from _statements(stmt.body, indent + "    ")
        case ast.If():
            word = "if"
            while True:
                yield f"{indent}{word} {expr_text(stmt.condition)}:"
                yield from _statements(stmt.body, indent + "    ")
                if len(stmt.orelse) != 1 or not isinstance(stmt.orelse[0], ast.If):
                    break
                stmt, word = stmt.orelse[0], "elif"
            if stmt.orelse:
                yield f"{indent}else:"
                yield from _statements(stmt.orelse, indent + "    ")


def schedule_text(s: ast.Schedule) -> str:
    """A `schedule` statement on one line."""
    when = "" if s.condition is None else f" when {expr_text(s.condition)}"
    settings = (f"{x.name}{'' if x.index is None else f'[{x.index}]'} = {x.value}" for x in s.settings)
    return f"schedule {s.backend}{when}: {', '.join(settings)}"


def _list(exprs: tuple[ast.Expr, ...]) -> str:
    return ", ".join(map(expr_text, exprs))


def _expr(expr: ast.Expr) -> tuple[str, int]:
    """The text, and how tightly its outermost operator binds."""
    match expr:
        case ast.Number():
            return _number(expr.value)
        case ast.Name():
            return expr.id, _ATOM
        case ast.Call():
            return f"{expr.func}({_list(expr.args)})", _ATOM
        case ast.Subscript():
            return f"{expr.tensor}[{_list(expr.indices)}]", _ATOM
        case ast.Unary():
            level = _NOT if expr.op == "not" else _NEGATE
            return ("not " if expr.op == "not" else "-") + _operand(expr.operand, level), level
        case ast.Binary():
            level = _PRECEDENCE[expr.op]
            left, right = level, level + 1
            if level == _COMPARE:
                left = level + 1
            elif level == _POWER:
                left, right = _ATOM, _NEGATE
            return f"{_operand(expr.left, left)} {expr.op} {_operand(expr.right, right)}", level


def _operand(expr: ast.Expr, least: int) -> str:
    text, level = _expr(expr)
    return text if level >= least else f"({text})"


def _number(value: int | float | bool) -> tuple[str, int]:
    if isinstance(value, bool):
        return ("true" if value else "false"), _ATOM
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"no literal of the language stands for {value}")
    text = repr(value).replace("e-0", "e-")
    return text, _NEGATE if text.startswith("-") else _ATOM
