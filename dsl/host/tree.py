"""The parser's actions for `op` items: the rules of `grammar.lark` under "host programs"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lark import Token

from kgen.dsl import ast
from kgen.dsl.host import ast as host
from kgen.dsl.source import Span


class HostTree:
    """Methods that the tree builder has beside its own; `self` is the whole builder."""

    def op(self: Any, children: list) -> host.Op:
        start, name, dtype_vars, params, outputs, _, _, _, parts, end = children
        doc, requires, examples, sections = "", [], [], []
        items = self.listed(parts)
        for number, item in enumerate(items):
            if isinstance(item, host.Section):
                sections.append(item)
            elif isinstance(item, ast.Require):
                requires.append(item)
            elif isinstance(item, ast.Example):
                examples.append(item)
            elif isinstance(item, host.If):
                if item.span.line in self.spoilt:  # it stands for a line that was reported
                    continue
                self.error("K0609", "a choice outside the sections of an op", item.span, help="move it under forward:")
            elif number == 0:
                doc = item.text
            else:
                self.misplaced_docstring(item)
        last = items[-1].span if items else self.at(end)
        return host.Op(
            name.value,
            tuple(dtype_vars or ()),
            tuple(params),
            tuple(outputs or ()),
            tuple(requires),
            tuple(examples),
            tuple(sections),
            doc,
            self.at(start).to(last),
            self.at(name),
        )

    def section(self: Any, children: list) -> host.Section:
        # The bracket and what is in it may be missing.
        name, *middle, _, (body, end) = children
        listed = next((c for c in middle if isinstance(c, list)), [])
        arguments = tuple(ast.Name(t.value, self.at(t)) for t in listed)
        return host.Section(name.value, arguments, body, self.at(name).to(end), self.at(name))

    def host_suite(self: Any, children: list) -> tuple[tuple[host.Stmt, ...], Span]:
        stmts = self.listed(children[2])
        for s in stmts:
            if not hasattr(s, "__dataclass_fields__"):
                self.misplaced_docstring(s)
        kept = tuple(s for s in stmts if hasattr(s, "__dataclass_fields__"))
        return kept, stmts[-1].span

    # ---- statements

    def declare(self: Any, children: list) -> host.Declare:
        name, _, kind = children
        return host.Declare(name.value, kind, self.at(name).to(kind.span), self.at(name))

    def host_assign(self: Any, children: list) -> host.Assign:
        *targets, _, value = children
        return host.Assign(tuple(targets), value, targets[0].span.to(value.span))

    def host_accumulate(self: Any, children: list) -> host.Accumulate:
        target, _, value = children
        return host.Accumulate(target, value, target.span.to(value.span))

    def perform(self: Any, children: list) -> host.Perform:
        return host.Perform(children[0], children[0].span)

    def chunks(self: Any, children: list) -> host.Chunks:
        start, index, _, function, _, dim, _, _, (body, end) = children
        return host.Chunks(
            index.value,
            function.value,
            dim.value,
            body,
            self.at(start).to(end),
            self.at(function),
            self.at(dim),
        )

    def host_if(self: Any, children: list) -> host.If:
        start, condition, _, (body, end), elifs, orelse = children
        rest: tuple[host.Stmt, ...] = ()
        parts = self.listed(elifs)
        if orelse is not None:
            rest, end = orelse
        elif parts:
            end = parts[-1][3]
        for token, test, stmts, _ in reversed(parts):
            rest = (host.If(test, stmts, rest, self.at(token).to(end)),)
        return host.If(condition, body, rest, self.at(start).to(end))

    def host_elif(self: Any, children: list) -> tuple[Token, ast.Expr, tuple[host.Stmt, ...], Span]:
        start, condition, _, (body, end) = children
        return start, condition, body, end

    def host_else(self: Any, children: list) -> tuple[tuple[host.Stmt, ...], Span]:
        return children[2]

    # ---- expressions

    def product(self: Any, children: list) -> Any:
        left, _, right, _, plus = children
        end = right if plus is None else plus
        return self.deep(host.Product(left, right, plus, left.span.to(end.span)), left, right)

    def attribute(self: Any, children: list) -> Any:
        operand, name = children
        return self.deep(host.Attribute(operand, name.value, operand.span.to(self.at(name))), operand)

    def negative(self: Any, children: list) -> ast.Unary:
        sign, number = children
        operand = self.number([number])
        return ast.Unary("-", operand, self.at(sign).to(operand.span))

    def host_paren(self: Any, children: list) -> Any:
        opener, inner, closer = children
        return replace(inner, span=self.at(opener).to(self.at(closer)))

    def host_call(self: Any, children: list) -> Any:
        name, _, args, close = children
        given = list(args or ())
        span = self.at(name).to(self.at(close))
        for k, a in enumerate(given):
            if isinstance(a, host.Keyword):
                late = next((x for x in given[k:] if not isinstance(x, host.Keyword)), None)
                if late is not None:
                    self.error(
                        "K0603",
                        "an argument by position behind one by name",
                        late.span,
                        help="put it first, or name it too",
                    )
                break
        positional = tuple(a for a in given if not isinstance(a, host.Keyword))
        keywords = tuple(a for a in given if isinstance(a, host.Keyword))
        return self.deep(host.Call(name.value, positional, keywords, span, self.at(name)), *positional)

    def host_args(self: Any, children: list) -> list[Any]:
        return children

    def keyword(self: Any, children: list) -> host.Keyword:
        name, _, value = children
        return host.Keyword(name.value, value, self.at(name).to(value.span))
