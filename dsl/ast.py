"""The syntax tree: what was written, with positions, before any meaning is given to it. All nodes are immutable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kgen.dsl.source import Span

if TYPE_CHECKING:
    from kgen.dsl.host.ast import Op

# ---- expressions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A literal: `int` for `16`, `0x1f`; `float` for `1.0`, `1e-6`; `bool` for `true` / `false`."""

    value: int | float | bool
    span: Span


@dataclass(frozen=True)
class Name:
    """A use of a name: index, dimension, scalar, value or (in a condition) an optional tensor."""

    id: str
    span: Span


@dataclass(frozen=True)
class Unary:
    """`-a`, `not a`. `op` is `-` or `not`."""

    op: str
    operand: Expr
    span: Span


@dataclass(frozen=True)
class Binary:
    """`a op b` with op of `+ - * / // % ** == != < <= > >= and or`."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True)
class Call:
    """`f(args)`: a built-in, a `fn`, a reduction (`sum(e, n)`), or a dtype (`T(e)`, `f32(e)`)."""

    func: str
    args: tuple[Expr, ...]
    span: Span
    func_span: Span


@dataclass(frozen=True)
class Subscript:
    """`x[m, n]`; a target of a store, or a load."""

    tensor: str
    indices: tuple[Expr, ...]
    span: Span
    tensor_span: Span


Expr = Number | Name | Unary | Binary | Call | Subscript


def walk(e: Expr) -> Iterator[Expr]:
    """`e` and every expression in it."""
    yield e
    if isinstance(e, Unary):
        yield from walk(e.operand)
    elif isinstance(e, Binary):
        yield from walk(e.left)
        yield from walk(e.right)
    elif isinstance(e, Call | Subscript):
        for a in e.args if isinstance(e, Call) else e.indices:
            yield from walk(a)


# ---- statements ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binding:
    """`m in M`: index `index` runs over 0 .. extent-1."""

    index: str
    extent: Expr
    span: Span


@dataclass(frozen=True)
class Bind:
    """`parallel m in M, n in N` or `tile n in N`; `kind` is `parallel` or `tile`."""

    kind: str
    bindings: tuple[Binding, ...]
    span: Span


@dataclass(frozen=True)
class Require:
    """`require D % 2 == 0`: a condition on dimensions, checked at every call and assumed by the bounds proof."""

    condition: Expr
    span: Span


@dataclass(frozen=True)
class ExampleSize:
    """`N = 4096` in an `example` statement."""

    name: str
    value: Expr
    span: Span


@dataclass(frozen=True)
class Example:
    """`example M = 16384, N = 4096`: typical sizes of dimensions and const integers.

    They have no effect on what the kernel means; they are the sizes taken where no call gives any (build, show, diff).
    """

    sizes: tuple[ExampleSize, ...]
    span: Span


@dataclass(frozen=True)
class Setting:
    """`threads = 256` or `chunk[n] = 4096` in a `schedule` statement; `value` is a whole number or a word (`whole`)."""

    name: str
    index: str | None
    value: int | float | str
    span: Span
    name_span: Span
    index_span: Span | None
    value_span: Span


@dataclass(frozen=True)
class Schedule:
    """`schedule cuda when N <= 4096: threads = 256, rows = 1`: sizes of the schedule of one backend.

    They have no effect on what the kernel means. Of several that hold the first counts.
    """

    backend: str
    condition: Expr | None
    settings: tuple[Setting, ...]
    span: Span
    backend_span: Span


@dataclass(frozen=True)
class Assign:
    """`a, b = e1, e2`: each target a `Name` (a new value) or a `Subscript` (a store)."""

    targets: tuple[Name | Subscript, ...]
    values: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True)
class Accumulate:
    """`out[n] += e`: the sum over every parallel index that the target lacks."""

    target: Subscript
    value: Expr
    span: Span


@dataclass(frozen=True)
class If:
    """A condition on `const` parameters and on the presence of optional tensors; resolved at compile time.

    `elif` is an `If` as the only statement of `orelse`.
    """

    condition: Expr
    body: tuple[Stmt, ...]
    orelse: tuple[Stmt, ...]
    span: Span


@dataclass(frozen=True)
class For:
    """`for k in K by BK:`: a sequential loop. Parsed so that its place in the language is kept; not yet lowered."""

    index: str
    extent: Expr
    step: Expr | None
    body: tuple[Stmt, ...]
    span: Span


Stmt = Bind | Require | Example | Schedule | Assign | Accumulate | If | For

# ---- declarations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DimExpr:
    """One dimension of a tensor's shape: an integer expression; `star` for `*M` (any number of leading dimensions)."""

    expr: Expr
    star: bool
    span: Span


@dataclass(frozen=True)
class TensorType:
    """`T[*M, N]`, `inout T[N]`, `W[N]?`. `dtype` is a dtype name or a dtype variable."""

    dtype: str
    dims: tuple[DimExpr, ...]
    inout: bool
    optional: bool
    span: Span


@dataclass(frozen=True)
class ScalarType:
    """`f32`, `const bool`. `dtype` is a dtype name or a dtype variable."""

    dtype: str
    const: bool
    span: Span


@dataclass(frozen=True)
class Param:
    """One parameter or output; `default` is a literal (`Number` or a negated one) or None."""

    name: str
    type: TensorType | ScalarType
    default: Expr | None
    span: Span


@dataclass(frozen=True)
class DTypeVar:
    """`T: f32 | bf16`, the constraint of a dtype variable of a kernel."""

    name: str
    choices: tuple[str, ...]
    span: Span


@dataclass(frozen=True)
class Import:
    """`from activations import silu, gelu`: functions and kernels of the file `activations.kdsl` beside this one."""

    module: str
    names: tuple[str, ...]
    span: Span
    name_spans: tuple[Span, ...]


@dataclass(frozen=True)
class Function:
    """`fn silu(a) = a * sigmoid(a)`: expanded where it is used; dtype and index set follow from the arguments."""

    name: str
    params: tuple[str, ...]
    body: Expr
    span: Span
    name_span: Span


@dataclass(frozen=True)
class Kernel:
    """`kernel f[T: f32 | bf16](params) -> (outputs):` and its statements."""

    name: str
    dtype_vars: tuple[DTypeVar, ...]
    params: tuple[Param, ...]
    outputs: tuple[Param, ...]
    body: tuple[Stmt, ...]
    doc: str
    span: Span
    name_span: Span


@dataclass(frozen=True)
class ConstValues:
    """`causal: true`, `K: 3 | 5`: the values of a const parameter of the forward kernel that a backward serves."""

    name: str
    values: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True)
class Backward(Kernel):
    """`backward f[T: f32, causal: true](params) -> (outputs):`, the hand-written backward of the kernel called `name`.

    `serves` narrows, with `dtype_vars`, which calls of that kernel it is for.
    """

    serves: tuple[ConstValues, ...] = ()


@dataclass(frozen=True)
class ImportedKernel:
    """A kernel of another file, which ops may call; it keeps to the names of its own file, `module`."""

    name: str
    module: Module


@dataclass(frozen=True)
class Module:
    """A file: its docstring, imports, functions, kernels and their hand-written backwards, and ops, in order of
    appearance; `imported` are the kernels of its imports."""

    path: str
    doc: str
    imports: tuple[Import, ...]
    functions: tuple[Function, ...]
    kernels: tuple[Kernel, ...]
    backwards: tuple[Backward, ...] = ()
    ops: tuple[Op, ...] = ()
    imported: tuple[ImportedKernel, ...] = ()
