"""The syntax tree of `op` items: what was written, with positions. All nodes are immutable.

Names, literals and subscripts are those of kernels (`kgen.dsl.ast`); a subscript names chunks, as in `x[c]`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.dsl import ast
from kgen.dsl.source import Span

# ---- expressions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribute:
    """`a.T`, the transpose. Any other name is a mistake."""

    operand: Expr
    name: str
    span: Span


@dataclass(frozen=True)
class Product:
    """`left @ right`, or `left @ right + plus`: one call of the library's matrix product."""

    left: Expr
    right: Expr
    plus: Expr | None
    span: Span


@dataclass(frozen=True)
class Keyword:
    """`eps=eps` among the arguments of a call."""

    name: str
    value: Expr
    span: Span


@dataclass(frozen=True)
class Call:
    """`f(x, w[c], eps=1e-6)`: a kernel, or a dtype, which converts."""

    func: str
    args: tuple[Expr, ...]
    keywords: tuple[Keyword, ...]
    span: Span
    func_span: Span


Expr = ast.Number | ast.Unary | ast.Name | ast.Subscript | Attribute | Product | Call
Target = ast.Name | ast.Subscript

# ---- statements ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declare:
    """`g: f32[V, H]`: a tensor that the statements below fill."""

    name: str
    type: ast.TensorType | ast.ScalarType
    span: Span
    name_span: Span


@dataclass(frozen=True)
class Assign:
    """`a, b = e`: each target a new value, or a (slice of a) declared tensor."""

    targets: tuple[Target, ...]
    value: Expr
    span: Span


@dataclass(frozen=True)
class Accumulate:
    """`g += e`: `g` becomes the sum of all that is added to it."""

    target: Target
    value: Expr
    span: Span


@dataclass(frozen=True)
class Perform:
    """A call for the sake of what it writes in place."""

    call: Call
    span: Span


@dataclass(frozen=True)
class If:
    """A choice that is settled before the program runs; `elif` is an `If` as the only statement of `orelse`."""

    condition: ast.Expr
    body: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...]
    span: Span


@dataclass(frozen=True)
class Chunks:
    """`for c in chunks(B):`; `function` is the word before the bracket."""

    index: str
    function: str
    dim: str
    body: tuple[Stmt, ...]
    span: Span
    function_span: Span
    dim_span: Span


Stmt = Declare | Assign | Accumulate | Perform | If | Chunks | ast.Require

# ---- declarations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """`forward:` or `backward(d_loss):` and its statements; `name` is as written."""

    name: str
    arguments: tuple[ast.Name, ...]
    body: tuple[Stmt, ...]
    span: Span
    name_span: Span


@dataclass(frozen=True)
class Op:
    """`op f(params) -> (outputs):`, its requirements, typical sizes and sections."""

    name: str
    dtype_vars: tuple[ast.DTypeVar, ...]
    params: tuple[ast.Param, ...]
    outputs: tuple[ast.Param, ...]
    requires: tuple[ast.Require, ...]
    examples: tuple[ast.Example, ...]
    sections: tuple[Section, ...]
    doc: str
    span: Span
    name_span: Span

    @property
    def header(self) -> ast.Kernel:
        """The signature in the form of a kernel's without statements, which has the same rules."""
        return ast.Kernel(
            self.name, self.dtype_vars, self.params, self.outputs, self.examples, self.doc, self.span, self.name_span
        )
