"""What a kernel's header says: parameters, outputs, dimensions and dtype variables, before anything is specialised."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kgen.dsl import ast
from kgen.dsl.affine import Poly
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES, VARIABLE_DTYPES, DType
from kgen.dsl.signature import ScalarParam, Signature, TensorParam
from kgen.dsl.source import Span

# Spellings from other languages, mapped to ours so that the message can name the right one.
_ALIASES = {
    "float": "f32", "float16": "f16", "float32": "f32", "float64": "f64", "fp16": "f16", "fp32": "f32",
    "fp64": "f64", "half": "f16", "double": "f64", "bfloat16": "bf16", "int": "i32", "int8": "i8", "int16": "i16",
    "int32": "i32", "int64": "i64", "long": "i64", "uint8": "u8", "u16": "i32", "u32": "i64", "u64": "i64",
}  # fmt: skip


def signature_of(kernel: ast.Kernel, diagnostics: Diagnostics) -> Signature:
    """The signature of `kernel`; mistakes in it are reported and the offending part is left out."""
    return _Reader(kernel, diagnostics).read()


class _Reader:
    def __init__(self, kernel: ast.Kernel, diagnostics: Diagnostics) -> None:
        self.kernel = kernel
        self.diagnostics = diagnostics
        self.const_ints = {
            p.name
            for p in kernel.params
            if isinstance(p.type, ast.ScalarType) and p.type.const and p.type.dtype[0] in "iu"
        }
        self.dims: list[str] = []
        self.star_dims: set[str] = set()
        self.bound: set[str] = set()
        self.dtype_vars: dict[str, tuple[DType, ...]] = {}

    def read(self) -> Signature:
        kernel = self.kernel
        constraints: dict[str, tuple[DType, ...]] = {}
        for var in kernel.dtype_vars:
            choices = []
            for choice in var.choices:
                if choice in DTYPES:
                    choices.append(DTYPES[choice])
                else:
                    self._unknown_dtype(choice, var.span)
            constraints[var.name] = tuple(choices) or VARIABLE_DTYPES
        seen: dict[str, Span] = {}
        params: list[TensorParam | ScalarParam] = []
        outputs: list[TensorParam] = []
        for p, is_output in [(p, False) for p in kernel.params] + [(p, True) for p in kernel.outputs]:
            if p.name in seen:
                self.diagnostics.error(
                    "K0200", f"'{p.name}' is declared twice", p.span, help="give one of them another name"
                )
                continue
            seen[p.name] = p.span
            read = self._param(p, is_output, constraints)
            if isinstance(read, TensorParam) and is_output:
                outputs.append(read)
            elif read is not None:
                params.append(read)
        for name, span in seen.items():
            if name in self.dims:
                self.diagnostics.error(
                    "K0200",
                    f"'{name}' is both a dimension and a parameter",
                    span,
                    help="give one of them another name",
                )
        return Signature(
            kernel.name,
            kernel.doc,
            tuple(params),
            tuple(outputs),
            tuple(self.dims),
            frozenset(self.star_dims),
            self.dtype_vars,
        )

    def _param(
        self, p: ast.Param, is_output: bool, constraints: dict[str, tuple[DType, ...]]
    ) -> TensorParam | ScalarParam | None:
        if not self._dtype(p.type.dtype, p.type.span, constraints, tensor=isinstance(p.type, ast.TensorType)):
            return None
        if isinstance(p.type, ast.ScalarType):
            if is_output:
                self.diagnostics.error(
                    "K0225",
                    f"output '{p.name}' is a scalar",
                    p.span,
                    help=f"a single value is the tensor {p.type.dtype}[]",
                )
                return None
            return ScalarParam(p.name, p.type.dtype, p.type.const, self._default(p, p.type), p.span)
        if p.default is not None:
            self.diagnostics.error(
                "K0223",
                f"tensor '{p.name}' has a default value",
                p.default.span,
                help=f"write {p.type.dtype}[...]? for an optional tensor",
            )
        if is_output and (p.type.optional or p.type.inout):
            word = "optional" if p.type.optional else "inout"
            self.diagnostics.error("K0225", f"output '{p.name}' is {word}", p.span, help="only parameters can be that")
        shape = []
        for i, dim in enumerate(p.type.dims):
            poly = self._dim(dim, p.name, i, is_output)
            shape.append(poly if poly is not None else Poly.const(1))
        star = bool(p.type.dims) and p.type.dims[0].star
        role = "out" if is_output else "inout" if p.type.inout else "in"
        return TensorParam(p.name, p.type.dtype, tuple(shape), star, role, p.type.optional, p.span)

    def _dtype(self, name: str, span: Span, constraints: dict[str, tuple[DType, ...]], *, tensor: bool) -> bool:
        """Whether `name` is a dtype or a dtype variable; a new variable is recorded."""
        if name in DTYPES:
            return True
        if name in _ALIASES or (not tensor and name not in self.dtype_vars and name not in constraints):
            self._unknown_dtype(name, span)
            return False
        self.dtype_vars.setdefault(name, constraints.get(name, VARIABLE_DTYPES))
        return True

    def _unknown_dtype(self, name: str, span: Span) -> None:
        known = ", ".join(DTYPES)
        hint = (
            f"write {_ALIASES[name]}" if name in _ALIASES else f"dtypes are {known}, or a variable that a tensor uses"
        )
        self.diagnostics.error("K0204", f"'{name}' is not a dtype", span, help=hint)

    def _default(self, p: ast.Param, type_: ast.ScalarType) -> int | float | bool | None:
        if p.default is None:
            return None
        value = literal_value(p.default)
        kind = DTYPES[type_.dtype].kind if type_.dtype in DTYPES else "float"
        fits = value is not None and (
            isinstance(value, bool)
            if kind == "bool"
            else not isinstance(value, bool) and (kind == "float" or isinstance(value, int))
        )
        if not fits:
            self.diagnostics.error(
                "K0223",
                f"the default of '{p.name}' is not a {type_.dtype} literal",
                p.default.span,
                help=f"write a {kind} literal",
            )
            return None
        return float(value) if kind == "float" and value is not None else value

    def _dim(self, dim: ast.DimExpr, tensor: str, position: int, is_output: bool) -> Poly | None:
        if dim.star and position != 0:
            self.diagnostics.error(
                "K0220",
                "'*' is only for the leading dimension",
                dim.span,
                help=f"write {tensor}'s starred dimension first",
            )
        if dim.star and not isinstance(dim.expr, ast.Name):
            self.diagnostics.error("K0220", "a starred dimension must be a plain name", dim.span, help="write *M")
            return None
        poly = index_poly(dim.expr, self._shape_name, self.diagnostics)
        if poly is None:
            return None
        for name in _names(dim.expr):
            if name.id in self.const_ints:
                continue
            if name.id not in self.dims:
                self.dims.append(name.id)
            if not is_output:
                self.bound.add(name.id)
            elif name.id not in self.bound:
                self.diagnostics.error(
                    "K0218",
                    f"dimension '{name.id}' of output '{tensor}' occurs in no input",
                    name.span,
                    help="an output's size must follow from the inputs' shapes or a const parameter",
                )
        if dim.star and isinstance(dim.expr, ast.Name):
            self.star_dims.add(dim.expr.id)
        return poly

    def _shape_name(self, name: ast.Name) -> Poly | None:
        return Poly.sym(name.id)


def example_sizes(kernel: ast.Kernel) -> dict[str, int]:
    """The sizes that the kernel's `example` statements give, in order; empty where there is none."""
    sizes = [size for s in kernel.body if isinstance(s, ast.Example) for size in s.sizes]
    values = {size.name: literal_value(size.value) for size in sizes}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def literal_value(e: ast.Expr) -> int | float | bool | None:
    """The value of a literal, possibly negated; None for anything else."""
    if isinstance(e, ast.Number):
        return e.value
    if (
        isinstance(e, ast.Unary)
        and e.op == "-"
        and isinstance(e.operand, ast.Number)
        and not isinstance(e.operand.value, bool)
    ):
        return -e.operand.value
    return None


def _names(e: ast.Expr) -> Iterator[ast.Name]:
    if isinstance(e, ast.Name):
        yield e
    elif isinstance(e, ast.Unary):
        yield from _names(e.operand)
    elif isinstance(e, ast.Binary):
        yield from _names(e.left)
        yield from _names(e.right)


def index_poly(e: ast.Expr, resolve: Callable[[ast.Name], Poly | None], diagnostics: Diagnostics) -> Poly | None:
    """The polynomial that integer expression `e` denotes; `resolve` gives that of a name, or None after reporting.

    Reports K0219 for anything that is not integer arithmetic with + - * // %.
    """
    if isinstance(e, ast.Number) and isinstance(e.value, int) and not isinstance(e.value, bool):
        return Poly.const(e.value)
    if isinstance(e, ast.Name):
        return resolve(e)
    if isinstance(e, ast.Unary) and e.op == "-":
        inner = index_poly(e.operand, resolve, diagnostics)
        return None if inner is None else -inner
    if isinstance(e, ast.Binary) and e.op in ("+", "-", "*", "//", "%"):
        a, b = index_poly(e.left, resolve, diagnostics), index_poly(e.right, resolve, diagnostics)
        return None if a is None or b is None else combine(e.op, a, b)
    diagnostics.error(
        "K0219",
        "a shape or extent must be integer arithmetic over dimensions",
        e.span,
        help="use dimension names, const integers and + - * // %",
    )
    return None


def combine(op: str, a: Poly, b: Poly) -> Poly:
    """`a op b` for op of `+ - * // %`."""
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    return a.floordiv(b) if op == "//" else a.mod(b)
