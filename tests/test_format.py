"""The formatter and the printer: layout, idempotence, and that neither changes what a program says."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.dsl import ast
from kgen.dsl.diagnostics import Diagnostics, DslError
from kgen.dsl.format import WIDTH, format_expr, format_function, format_kernel, format_module, format_source
from kgen.dsl.lexing import logical_lines
from kgen.dsl.parser import parse_text, tokens
from kgen.dsl.printing import docstring_lines
from kgen.dsl.source import NOWHERE, SourceFile, Span
from kgen.dsl.tree import docstring_text

OPS = Path(__file__).resolve().parents[1] / "ops"


def bare(node):
    """`node` with every span replaced by one and the same."""
    if isinstance(node, Span):
        return NOWHERE
    if isinstance(node, tuple):
        return tuple(map(bare, node))
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{f.name: bare(getattr(node, f.name)) for f in fields(node)})
    return node


def comments(text):
    """The texts of the comments of a file, without the '#' and the white space around."""
    return [t.value[1:].strip() for t in tokens(SourceFile("x", text)) if t.type == "COMMENT"]


# ---- generated modules

NAMES = st.sampled_from(["a", "b", "x1", "_", "__i", "value", "lambda", "int", "N", "a_rather_long_name_for_a_value"])
AT = NOWHERE
NUMBERS = st.builds(
    lambda v: ast.Number(v, AT),
    st.integers(0, 2**63 - 1) | st.booleans() | st.floats(0, allow_infinity=False, allow_nan=False),
)
LEAVES = NUMBERS | st.builds(lambda n: ast.Name(n, AT), NAMES)
BINARY = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "and", "or"])


def grow(inner):
    args = st.lists(inner, max_size=4).map(tuple)
    return (
        st.builds(lambda op, e: ast.Unary(op, e, AT), st.sampled_from(["-", "not"]), inner)
        | st.builds(lambda op, a, b: ast.Binary(op, a, b, AT), BINARY, inner, inner)
        | st.builds(lambda n, a: ast.Call(n, a, AT, AT), NAMES, args)
        | st.builds(lambda n, a: ast.Subscript(n, a, AT, AT), NAMES, args)
    )


EXPRS = st.recursive(LEAVES, grow, max_leaves=25)
SUBSCRIPTS = st.builds(lambda n, a: ast.Subscript(n, tuple(a), AT, AT), NAMES, st.lists(EXPRS, max_size=3))
TARGETS = SUBSCRIPTS | st.builds(lambda n: ast.Name(n, AT), NAMES)
PAIRS = st.lists(st.tuples(TARGETS, EXPRS), min_size=1, max_size=3)
BINDINGS = st.lists(st.builds(lambda n, e: ast.Binding(n, e, AT), NAMES, EXPRS), min_size=1, max_size=3).map(tuple)
SIZES = st.builds(lambda n, v: ast.ExampleSize(n, ast.Number(v, AT), AT), NAMES, st.integers(0, 2**40))
SETTINGS = st.builds(
    lambda n, i, v: ast.Setting(n, i, v, AT, AT, None if i is None else AT, AT),
    NAMES, st.none() | NAMES, st.integers(0, 2**40) | NAMES,
)  # fmt: skip
SCHEDULES = st.builds(
    lambda b, c, s: ast.Schedule(b, c, tuple(s), AT, AT),
    NAMES, st.none() | EXPRS, st.lists(SETTINGS, min_size=1, max_size=4),
)  # fmt: skip
SIMPLE = (
    st.builds(lambda k, b: ast.Bind(k, b, AT), st.sampled_from(["parallel", "tile"]), BINDINGS)
    | st.builds(lambda e: ast.Require(e, AT), EXPRS)
    | st.lists(SIZES, min_size=1, max_size=8).map(lambda s: ast.Example(tuple(s), AT))
    | SCHEDULES
    | PAIRS.map(lambda p: ast.Assign(tuple(t for t, _ in p), tuple(e for _, e in p), AT))
    | st.builds(lambda t, e: ast.Accumulate(t, e, AT), SUBSCRIPTS, EXPRS)
)


def blocks(stmt):
    body = st.lists(stmt, min_size=1, max_size=3).map(tuple)
    return st.builds(lambda c, b, o: ast.If(c, b, o, AT), EXPRS, body, st.just(()) | body) | st.builds(
        lambda n, e, s, b: ast.For(n, e, s, b, AT), NAMES, EXPRS, st.none() | EXPRS, body
    )


STMTS = st.recursive(SIMPLE, blocks, max_leaves=6)
DIMS = st.lists(
    st.builds(lambda n: ast.DimExpr(ast.Name(n, AT), True, AT), NAMES)
    | st.builds(lambda e: ast.DimExpr(e, False, AT), EXPRS),
    max_size=3,
).map(tuple)
TYPES = st.builds(lambda d, c: ast.ScalarType(d, c, AT), NAMES, st.booleans()) | st.builds(
    lambda d, dims, i, o: ast.TensorType(d, dims, i, o, AT), NAMES, DIMS, st.booleans(), st.booleans()
)
DEFAULTS = st.none() | NUMBERS
PARAMS = st.lists(st.builds(lambda n, t, d: ast.Param(n, t, d, AT), NAMES, TYPES, DEFAULTS), max_size=4).map(tuple)
DTYPE_VARS = st.lists(
    st.builds(lambda n, c: ast.DTypeVar(n, tuple(c), AT), NAMES, st.lists(NAMES, min_size=1, max_size=3)), max_size=2
).map(tuple)
DOCS = (
    st.text(st.sampled_from(" abc\n\t\"'\\#é("), max_size=40)
    .filter(lambda t: '"""' not in t + '"')
    .map(lambda t: docstring_text(f'"""{t}"""'))
)
KERNELS = st.builds(
    lambda n, v, p, o, b, d: ast.Kernel(n, v, p, o, b, d, AT, AT),
    NAMES, DTYPE_VARS, PARAMS, PARAMS, st.lists(STMTS, min_size=1, max_size=4).map(tuple), DOCS,
)  # fmt: skip
FUNCTIONS = st.builds(lambda n, p, e: ast.Function(n, tuple(p), e, AT, AT), NAMES, st.lists(NAMES, max_size=4), EXPRS)
IMPORTS = st.builds(
    lambda m, n: ast.Import(".".join(m), tuple(n), AT, (AT,) * len(n)),
    st.lists(NAMES, min_size=1, max_size=2),
    st.lists(NAMES, min_size=1, max_size=6),
)
MODULES = st.builds(
    lambda d, i, f, k: ast.Module("<string>", d, tuple(i), tuple(f), tuple(k)),
    DOCS, st.lists(IMPORTS, max_size=2), st.lists(FUNCTIONS, max_size=2), st.lists(KERNELS, max_size=2),
)  # fmt: skip

MANY = settings(max_examples=200, deadline=None)
SOME = settings(max_examples=60, deadline=None)


@MANY
@given(EXPRS)
def test_printed_expressions_read_back(expr):
    text = f"fn f() = {format_expr(expr)}\n"
    assert bare(parse_text(text).functions[0].body) == expr


@SOME
@given(MODULES)
def test_printed_modules_read_back_and_stay(module):
    text = format_module(module)
    assert bare(parse_text(text)) == module
    assert format_source(text) == text


@SOME
@given(MODULES, st.integers(0, 2**32))
def test_formatting_keeps_program_and_comments(module, seed):
    """Write a module with white space and comments strewn in, format it, and compare."""
    text = strewn(format_module(module), Random(seed))
    assert bare(parse_text(text)) == module
    once = format_source(text)
    assert bare(parse_text(once)) == module
    assert comments(once) == comments(text)
    assert format_source(once) == once
    assert not any(line != line.rstrip() for line in once.split("\n") if '"' not in line)


def strewn(text, random):
    """`text` with random spacing, line breaks inside brackets, comments, blank lines and wider indentation."""
    source = SourceFile("x", text)
    out = []
    step = random.choice([1, 3, 4, 8])

    def noise():
        return random.choice(["# note", "#note", "#", "  # é (", '# """'])

    for line in logical_lines(tokens(source), source, Diagnostics()):
        indent = " " * (line.indent // 4 * step)
        while random.random() < 0.3:
            out.append(random.choice(["", indent + noise(), noise(), " " * 5]))
        depth = 0
        row = indent
        for token in line.tokens:
            depth -= token.type in ("RPAR", "RSQB")
            if depth and random.random() < 0.1:
                out.append(row + random.choice(["", " " + noise()]))
                # A break before an operand would look like an unclosed bracket if it were not indented further.
                row = indent + "  "
            depth += token.type in ("LPAR", "LSQB")
            row += token.value + " " * random.choice([1, 1, 2])
        out.append(row + random.choice(["", noise()]))
    if random.random() < 0.3:
        out.append(noise())
    return "\n".join(out) + random.choice(["", "\n", "\n\n\n"])


@MANY
@given(DOCS)
def test_docstrings_read_back(doc):
    assert docstring_text("\n".join(docstring_lines(doc, "    ")).lstrip()) == doc


# ---- layout


MESSY = '''"""Doc."""
from a import b,c
from d import(e,)
# about f
fn f( a,b )=a*-b**2
fn g(a)=f(a , True)



fn h(a)=not a
# about k
#second
kernel k[T:f32|bf16](x:T[ * M,N//2],w : inout W[ N ] ?,e:f32=-1e-6)->(y:T[*M]):

  # first
  parallel m in M,n in N # rows


  if a<b: y [m]=1 # why
  else:
    #deep
    y[m]=(x[m,n])
    # still deep

  # out
  z[]+=sum(
    x[m,n],  # the value
    n)


# the end
'''

NEAT = '''"""Doc."""

from a import b, c
from d import (e)
# about f
fn f(a, b) = a * -b ** 2
fn g(a) = f(a, true)

fn h(a) = not a
# about k
# second
kernel k[T: f32 | bf16](x: T[*M, N // 2], w: inout W[N]?, e: f32 = -1e-6) -> (y: T[*M]):
    # first
    parallel m in M, n in N  # rows

    if a < b:
        y[m] = 1  # why
    else:
        # deep
        y[m] = (x[m, n])
        # still deep

    # out
    z[] += sum(
        x[m, n],  # the value
        n)

# the end
'''


def test_canonical_layout():
    assert format_source(MESSY) == NEAT
    assert format_source(NEAT) == NEAT


def test_long_signature_takes_a_line_for_each_parameter():
    params = ", ".join(f"weight_{i}: T[M, N]" for i in range(8))
    text = format_source(f"kernel f({params}) -> (y: T[M, N]):\n    y[0, 0] = 1\n")
    lines = text.split("\n")
    assert lines[0] == "kernel f(" and lines[1] == "    weight_0: T[M, N]," and lines[9] == ") -> (y: T[M, N]):"
    both = format_source(f"kernel f({params}) -> ({params}):\n    y[0, 0] = 1\n")
    assert ") -> (\n    weight_0: T[M, N],\n" in both and "\n):\n" in both
    assert format_source(both) == both


def test_long_expressions_are_broken_at_the_loosest_operator():
    terms = " + ".join(f"x[m, n + {i}] * w[n + {i}]" for i in range(8))
    text = format_source(f"kernel f(x: T[M, N]) -> (y: T[M]):\n    y[m] = {terms}\n    z[m] = f({terms}, n)\n")
    assert "    y[m] = (\n        x[m, n + 0] * w[n + 0]\n        + x[m, n + 1] * w[n + 1]\n" in text
    assert "    z[m] = f(\n        x[m, n + 0] * w[n + 0]\n        + x" in text and "\n        n,\n    )\n" in text
    assert max(map(len, text.split("\n"))) <= WIDTH
    assert format_source(text) == text


@pytest.mark.parametrize("text", ["", "\n\n", "# only\n", "  # only", "\ufeff\r\n"])
def test_files_without_items(text):
    once = format_source(text)
    assert format_source(once) == once and comments(once) == comments(text.removeprefix("\ufeff"))


def test_line_ends_become_lf_and_errors_are_raised():
    assert format_source("fn f(a) = a\r\n\r\nfn g(a) = a\rfn h(a) = a") == "fn f(a) = a\n\nfn g(a) = a\nfn h(a) = a\n"
    with pytest.raises(DslError):
        format_source("fn f(a) = = a\n")


def test_printing_parts():
    module = parse_text('fn f(a) = (a)\nkernel k(x: inout T[N]):\n    """D."""\n    x[0] = f(1e-06)\n')
    assert format_function(module.functions[0]) == "fn f(a) = a\n"
    assert format_kernel(module.kernels[0]) == 'kernel k(x: inout T[N]):\n    """D."""\n    x[0] = f(1e-6)\n'
    negative = ast.Binary("**", ast.Number(-2.0, AT), ast.Number(-1, AT), AT)
    assert format_expr(negative) == "(-2.0) ** -1"
    with pytest.raises(ValueError, match="inf"):
        format_expr(ast.Number(float("inf"), AT))


@pytest.mark.parametrize("path", sorted(OPS.glob("*.kdsl")), ids=lambda p: p.name)
def test_shipped_files_are_formatted(path: Path) -> None:
    text = path.read_text()
    assert format_source(text, path.name) == text
