"""Builds the syntax tree, one method per rule of `grammar.lark`, and reports what the grammar alone cannot say well.

Methods are called by the parser as it reduces, and twice for the same text after a mistake; they keep no state but
`depth` and what was reported.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

from lark import Token, Transformer

from kgen.dsl import ast
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.host import ast as host
from kgen.dsl.host.tree import HostTree
from kgen.dsl.lexing import Line, number_value, token_span
from kgen.dsl.source import NOWHERE, SourceFile, Span

MAX_DEPTH = 200


class _More:
    """A list that grows at its end without changing the shorter list it came from."""

    __slots__ = ("item", "rest")

    def __init__(self, rest: _More | None, item: Any) -> None:
        self.rest = rest
        self.item = item


def _items(more: _More | None) -> list[Any]:
    out = []
    while more is not None:
        out.append(more.item)
        more = more.rest
    return out[::-1]


def docstring_text(literal: str) -> str:
    """The text of a docstring literal without its quotes, common indentation and trailing white space."""
    lines = inspect.cleandoc(literal[3:-3]).split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


class _Docstring:
    __slots__ = ("span", "text")

    def __init__(self, text: str, span: Span) -> None:
        self.text = text
        self.span = span


class TreeBuilder(HostTree, Transformer):
    """The parser's actions; `begin` names the file that is being parsed."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(NOWHERE.source, Diagnostics())

    def __reduce__(self) -> tuple[type[TreeBuilder], tuple[()]]:
        return TreeBuilder, ()  # kept with a parser (`tables`), and no file

    def begin(self, source: SourceFile, diagnostics: Diagnostics) -> None:
        """Start on a new file."""
        self.source = source
        self.diagnostics = diagnostics
        # Depth of the expressions of the current line. Each is kept beside its depth so that its id stays its own.
        self.depth: dict[int, tuple[Any, int]] = {}
        self.spoilt: set[int] = set()

    def spoil(self, line: Line) -> None:
        """Leave the item that holds `line` out of the module: it has a mistake."""
        first, last = line.tokens[0].line or 1, line.newline.line or 1
        self.spoilt.update(range(first, last + 1))

    def at(self, token: Token) -> Span:
        return token_span(self.source, token)

    def error(self, code: str, message: str, span: Span, *, label: str = "", help: str = "") -> None:
        self.diagnostics.error(code, message, span, label=label, help=help)

    # ---- lists

    def listed(self, more: _More | None) -> list[Any]:
        """The items of a list that grew at its end."""
        return _items(more)

    def nothing(self, _: list) -> None:
        return None

    def first(self, children: list) -> _More:
        return _More(None, children[0])

    def more(self, children: list) -> _More:
        return _More(children[0], children[1])

    # ---- items

    def module(self, children: list) -> ast.Module:
        doc = ""
        imports, functions, kernels, backwards, ops = [], [], [], [], []
        for number, item in enumerate(_items(children[0])):
            if isinstance(item, _Docstring):
                if number == 0:
                    doc = item.text
                else:
                    self.misplaced_docstring(item)
                continue
            if self.spoilt and not self.spoilt.isdisjoint(range(item.span.line, item.span.end_line + 1)):
                continue
            if isinstance(item, ast.Import):
                imports.append(item)
            elif isinstance(item, ast.Function):
                functions.append(item)
            elif isinstance(item, host.Op):
                ops.append(item)
            else:
                (backwards if isinstance(item, ast.Backward) else kernels).append(item)
        return ast.Module(
            self.source.path, doc, tuple(imports), tuple(functions), tuple(kernels), tuple(backwards), tuple(ops)
        )

    def docstring(self, children: list) -> _Docstring:
        token = children[0]
        return _Docstring(docstring_text(token.value), self.at(token))

    def misplaced_docstring(self, doc: _Docstring) -> None:
        self.error(
            "K0117",
            "a docstring stands only at the top of a file or first in a kernel or op",
            doc.span,
            help="move it there, or make it a # comment",
        )

    def dotted(self, children: list) -> list[Token]:
        return children

    def names(self, children: list) -> list[Token]:
        return children

    name_list = names

    def import_item(self, children: list) -> ast.Import:
        start, dotted = children[0], children[1]
        names = next(c for c in children[2:] if isinstance(c, list))
        last = names[-1] if children[3] is names else children[-2]
        return ast.Import(
            ".".join(t.value for t in dotted),
            tuple(t.value for t in names),
            self.at(start).to(self.at(last)),
            tuple(self.at(t) for t in names),
        )

    def function(self, children: list) -> ast.Function:
        start, name, _, params, _, _, body, _ = children
        return ast.Function(
            name.value,
            tuple(t.value for t in params or ()),
            body,
            self.at(start).to(body.span),
            self.at(name),
        )

    def kernel(self, children: list) -> ast.Kernel:
        start, name, dtype_vars, params, outputs, _, suite = children
        stmts, end = suite
        body = list(stmts)
        doc = ""
        if body and isinstance(body[0], _Docstring):
            doc = body.pop(0).text
            if not body:
                self.error(
                    "K0109",
                    f"{start} '{name}' has no statements",
                    self.at(name),
                    help="store to each output, for example y[m] = x[m]",
                )
        return ast.Kernel(
            name.value,
            tuple(dtype_vars or ()),
            tuple(params),
            tuple(outputs or ()),
            self.statements(body),
            doc,
            self.at(start).to(end),
            self.at(name),
        )

    def backward(self, children: list) -> ast.Backward:
        start, name, serves, *rest = children
        dtype_vars = [s for s in serves or () if isinstance(s, ast.DTypeVar)]
        values = tuple(s for s in serves or () if isinstance(s, ast.ConstValues))
        kernel = self.kernel([start, name, dtype_vars, *rest])
        return ast.Backward(**{f.name: getattr(kernel, f.name) for f in fields(kernel)}, serves=values)

    def serves(self, children: list) -> list[ast.DTypeVar | ast.ConstValues]:
        return children[1:-1]

    def const_values(self, children: list) -> ast.ConstValues:
        name, _, *values = children
        return ast.ConstValues(name.value, tuple(values), self.at(name).to(values[-1].span))

    def dtype_vars(self, children: list) -> list[ast.DTypeVar]:
        return children[1:-1]

    def dtype_var(self, children: list) -> ast.DTypeVar:
        name, _, choices = children
        span = self.at(name).to(self.at(choices[-1]))
        return ast.DTypeVar(name.value, tuple(t.value for t in choices), span)

    def choices(self, children: list) -> list[Token]:
        return children

    def params(self, children: list) -> list[ast.Param]:
        return children[1] or []

    def param_list(self, children: list) -> list[ast.Param]:
        return children

    def param(self, children: list) -> ast.Param:
        name, _, kind, _, default = children
        span = self.at(name).to(kind.span if default is None else default.span)
        if default is not None and not _is_literal(default):
            self.error(
                "K0121",
                f"the default of '{name}' is not a literal",
                default.span,
                help="a default is a number, a negative number, true or false",
            )
        return ast.Param(name.value, kind, default, span)

    def type(self, children: list) -> ast.TensorType | ast.ScalarType:
        qualifier, name, shape, mark = children
        first = name if qualifier is None else qualifier
        end = self.at(name) if shape is None else shape[1]
        span = self.at(first).to(end if mark is None else self.at(mark))
        if shape is not None:
            if qualifier is not None and qualifier.type == "CONST":
                self.error(
                    "K0124",
                    "a tensor cannot be const",
                    span,
                    help="const marks compile-time scalars, such as `causal: const bool`; remove it",
                )
            inout = qualifier is not None and qualifier.type == "INOUT"
            return ast.TensorType(name.value, tuple(shape[0]), inout, mark is not None, span)
        if mark is not None:
            self.error(
                "K0124",
                "only a tensor can be optional",
                span,
                help=f"give it a shape, as in {name}[N]?, or give the scalar a default value",
            )
        if qualifier is not None and qualifier.type == "INOUT":
            self.error(
                "K0124",
                "only a tensor can be inout",
                span,
                help=f"give it a shape, as in inout {name}[N]",
            )
        return ast.ScalarType(name.value, qualifier is not None and qualifier.type == "CONST", span)

    def qualifier(self, children: list) -> Token:
        return children[0]

    def shape(self, children: list) -> tuple[list[ast.DimExpr], Span]:
        return children[1] or [], self.at(children[-1])

    def dims(self, children: list) -> list[ast.DimExpr]:
        return children

    def star_dim(self, children: list) -> ast.DimExpr:
        star, name = children
        return ast.DimExpr(self.name([name]), True, self.at(star).to(self.at(name)))

    def expr_dim(self, children: list) -> ast.DimExpr:
        return ast.DimExpr(children[0], False, children[0].span)

    # ---- statements

    def statements(self, stmts: list[Any]) -> tuple[ast.Stmt, ...]:
        for stmt in stmts:
            if isinstance(stmt, _Docstring):
                self.misplaced_docstring(stmt)
        return tuple(s for s in stmts if not isinstance(s, _Docstring))

    def line_suite(self, children: list) -> tuple[list[Any], Span]:
        return [children[0]], children[0].span

    def block_suite(self, children: list) -> tuple[list[Any], Span]:
        stmts = _items(children[2])
        return stmts, stmts[-1].span

    def simple_stmt(self, children: list) -> ast.Stmt:
        return children[0]

    def bind(self, children: list) -> ast.Bind:
        kind, *bindings = children
        return ast.Bind(kind.value, tuple(bindings), self.at(kind).to(bindings[-1].span))

    def binding(self, children: list) -> ast.Binding:
        name, _, extent = children
        return ast.Binding(name.value, extent, self.at(name).to(extent.span))

    def require(self, children: list) -> ast.Require:
        return ast.Require(children[1], self.at(children[0]).to(children[1].span))

    def example(self, children: list) -> ast.Example:
        keyword, *sizes = children
        return ast.Example(tuple(sizes), self.at(keyword).to(sizes[-1].span))

    def size(self, children: list) -> ast.ExampleSize:
        name, _, value = children
        return ast.ExampleSize(name.value, value, self.at(name).to(value.span))

    def schedule(self, children: list) -> ast.Schedule:
        keyword, backend, _, condition, _, *settings = children
        span = self.at(keyword).to(settings[-1].span)
        return ast.Schedule(backend.value, condition, tuple(settings), span, self.at(backend))

    def setting(self, children: list) -> ast.Setting:
        name, _, index, _, _, value = children
        number = number_value(value.value) if value.type == "NUMBER" else value.value
        return ast.Setting(
            name.value,
            None if index is None else index.value,
            0 if number is None else number,  # misspelt, which is reported
            self.at(name).to(self.at(value)),
            self.at(name),
            None if index is None else self.at(index),
            self.at(value),
        )

    def assign(self, children: list) -> ast.Assign:
        targets, equal, values = children
        span = targets[0].span.to(values[-1].span)
        for target in targets:
            if not isinstance(target, ast.Name | ast.Subscript):
                self.error(
                    "K0113",
                    "this cannot be assigned to",
                    target.span,
                    label="neither a name nor a tensor element",
                    help="write name = value, or y[m, n] = value; a comparison is written ==",
                )
        if len(targets) != len(values):
            self.error(
                "K0114",
                f"{_count(len(targets), 'target')} but {_count(len(values), 'value')}",
                self.at(equal),
                help="give one value for each target, separated by commas",
            )
        return ast.Assign(tuple(targets), tuple(values), span)

    def accumulate(self, children: list) -> ast.Accumulate:
        targets, _, value = children
        span = targets[0].span.to(value.span)
        if len(targets) != 1 or not isinstance(targets[0], ast.Subscript):
            self.error(
                "K0116",
                "'+=' adds into one tensor element",
                targets[0].span.to(targets[-1].span),
                help="write out[n] += value; values are not changed once named, so use a new name with =",
            )
        return ast.Accumulate(targets[0], value, span)

    def bare(self, children: list) -> ast.Require:
        span = children[0][0].span.to(children[0][-1].span)
        self.error(
            "K0115",
            "this expression has no effect",
            span,
            help="store it, as in y[m, n] = ..., or give it a name, as in r = ...",
        )
        return ast.Require(children[0][0], span)

    def exprs(self, children: list) -> list[ast.Expr]:
        return children

    def if_stmt(self, children: list) -> ast.If:
        start, condition, _, (body, end), elifs, orelse = children
        rest: tuple[ast.Stmt, ...] = ()
        parts = _items(elifs)
        if orelse is not None:
            rest, end = self.statements(orelse[0]), orelse[1]
        elif parts:
            end = parts[-1][3]
        if len(parts) > MAX_DEPTH:
            self.error(
                "K0120",
                f"more than {MAX_DEPTH} elif branches",
                self.at(start),
                help="split the kernel into several",
            )
            parts = parts[:MAX_DEPTH]
        for token, test, stmts, _ in reversed(parts):
            rest = (ast.If(test, self.statements(stmts), rest, self.at(token).to(end)),)
        return ast.If(condition, self.statements(body), rest, self.at(start).to(end))

    def elif_part(self, children: list) -> tuple[Token, ast.Expr, list[Any], Span]:
        start, condition, _, (body, end) = children
        return start, condition, body, end

    def else_part(self, children: list) -> tuple[list[Any], Span]:
        return children[2]

    def for_stmt(self, children: list) -> ast.For:
        start, name, _, extent, _, step, _, (body, end) = children
        return ast.For(name.value, extent, step, self.statements(body), self.at(start).to(end))

    # ---- expressions

    def depth_of(self, expr: ast.Expr) -> int:
        known = self.depth.get(id(expr))
        return 0 if known is None else known[1]

    def deep(self, node: Any, *operands: ast.Expr) -> Any:
        """`node`, whose operands are `operands`; reported once where it becomes too deep."""
        depth = 1 + max((self.depth_of(e) for e in operands), default=0)
        if depth == MAX_DEPTH + 1:
            self.error(
                "K0120",
                f"this expression is nested more than {MAX_DEPTH} deep",
                node.span,
                help="name parts of it with assignments of their own",
            )
        self.depth[id(node)] = (node, depth)
        return node

    def left_binary(self, children: list) -> ast.Expr:
        left = children[0]
        for op, right in zip(children[1::2], children[2::2], strict=True):
            left = self.deep(ast.Binary(op.value, left, right, left.span.to(right.span)), left, right)
        return left

    expr = and_test = sum = term = binary = left_binary

    def comparison(self, children: list) -> ast.Expr:
        if len(children) > 3:
            self.error(
                "K0112",
                "comparisons cannot be chained",
                children[0].span.to(children[-1].span),
                help="write a < b and b < c",
            )
        return self.left_binary(children[:3])

    def unary(self, children: list) -> ast.Expr:
        op, operand = children
        return self.deep(ast.Unary(op.value, operand, self.at(op).to(operand.span)), operand)

    def number(self, children: list) -> ast.Number:
        value = number_value(children[0].value)
        # A misspelt number was reported with the line; any value will do.
        return ast.Number(0 if value is None else value, self.at(children[0]))

    def boolean(self, children: list) -> ast.Number:
        return ast.Number(children[0].value in ("true", "True"), self.at(children[0]))

    def name(self, children: list) -> ast.Name:
        return ast.Name(children[0].value, self.at(children[0]))

    def call(self, children: list) -> ast.Expr:
        name, _, args, close = children
        args = tuple(args or ())
        func_span = self.at(name)
        return self.deep(ast.Call(name.value, args, func_span.to(self.at(close)), func_span), *args)

    def subscript(self, children: list) -> ast.Expr:
        name, _, args, close = children
        args = tuple(args or ())
        tensor_span = self.at(name)
        return self.deep(ast.Subscript(name.value, args, tensor_span.to(self.at(close)), tensor_span), *args)

    def paren(self, children: list) -> ast.Expr:
        # The brackets belong to the span, so that a caret under `(a + b) * c` begins at the bracket.
        opener, inner, closer = children
        node = replace(inner, span=self.at(opener).to(self.at(closer)))
        self.depth[id(node)] = (node, self.depth_of(inner))
        return node

    def args(self, children: list) -> list[ast.Expr]:
        return children


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _is_literal(expr: ast.Expr) -> bool:
    if isinstance(expr, ast.Unary) and expr.op == "-":
        expr = expr.operand
        return isinstance(expr, ast.Number) and not isinstance(expr.value, bool)
    return isinstance(expr, ast.Number)
