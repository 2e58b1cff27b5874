"""The parser: what each construct becomes, what text is let in, and how mistakes are reported."""

import time
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kgen.dsl import ast
from kgen.dsl.codes import CODES, PARSER_CODES
from kgen.dsl.diagnostics import Diagnostics, DslError
from kgen.dsl.lexing import KEYWORDS
from kgen.dsl.parser import parse, parse_text
from kgen.dsl.source import SourceFile, Span

HEAD = "kernel f(x: T[N]) -> (y: T[N]):\n"
ROW = '''"""Row-wise scaling."""

from activations.basic import silu, gelu

fn twice(a) = 2 * a

kernel scale[T: f32 | bf16, U: f16](x: T[*M, N // 2], w: U[N]?, eps: f32 = 1e-6, c: const bool = true,
                                    k: i64 = -1) -> (y: T[*M, N], loss: f32[]):
    """Scales.

    Text.
      Indented.
    """
    parallel m in M, h in H  # rows
    tile n in N // 2
    require N % 2 == 0
    lo, hi = x[m, n], x[m, n + N // 2]
    if c and w:
        y[m, n] = lo
    elif not c:
        y[m, n] = hi
    else: y[m, n] = lo + hi
    loss[] += sum(lo, n)
    for k in K by BK:
        q = k
'''


def spans(node, found=None):
    """All spans under `node`, with the node each belongs to."""
    found = [] if found is None else found
    if isinstance(node, tuple):
        for item in node:
            spans(item, found)
    elif is_dataclass(node) and not isinstance(node, Span):
        if hasattr(node, "span"):
            found.append((node, node.span))  # pyright: ignore[reportAttributeAccessIssue]
        for field in fields(node):
            spans(getattr(node, field.name), found)
    return found


def codes(text):
    """The codes that `text` is refused with, in order of position."""
    with pytest.raises(DslError) as caught:
        parse_text(text)
    return [d.code for d in caught.value.diagnostics]


def only(text):
    """The single diagnostic of `text`."""
    with pytest.raises(DslError) as caught:
        parse_text(text)
    assert len(caught.value.diagnostics) == 1, str(caught.value)
    return caught.value.diagnostics[0]


def expression(text):
    """`text` as an expression, printed with every operator bracketed."""
    return show(parse_text(f"fn f(a) = {text}\n").functions[0].body)


def show(e):
    match e:
        case ast.Number():
            return repr(e.value)
        case ast.Name():
            return e.id
        case ast.Unary():
            return f"({e.op} {show(e.operand)})"
        case ast.Binary():
            return f"({show(e.left)} {e.op} {show(e.right)})"
        case ast.Call():
            return f"{e.func}({', '.join(map(show, e.args))})"
        case ast.Subscript():
            return f"{e.tensor}[{', '.join(map(show, e.indices))}]"


# ---- the tree


def test_whole_module():
    module = parse_text(ROW, "row.kdsl")
    assert (module.path, module.doc) == ("row.kdsl", "Row-wise scaling.")
    assert module.imports[0].module == "activations.basic"
    assert module.imports[0].names == ("silu", "gelu")
    assert [s.text for s in module.imports[0].name_spans] == ["silu", "gelu"]
    assert (module.functions[0].name, module.functions[0].params) == ("twice", ("a",))
    (kernel,) = module.kernels
    assert [(v.name, v.choices) for v in kernel.dtype_vars] == [("T", ("f32", "bf16")), ("U", ("f16",))]
    x, w, eps, c, k = kernel.params
    assert isinstance(x.type, ast.TensorType) and isinstance(w.type, ast.TensorType)
    assert [(d.star, show(d.expr)) for d in x.type.dims] == [(True, "M"), (False, "(N // 2)")]
    assert (x.type.optional, w.type.optional, w.type.inout) == (False, True, False)
    assert isinstance(eps.type, ast.ScalarType) and isinstance(c.type, ast.ScalarType)
    assert (eps.type.const, c.type.const) == (False, True)
    assert [show(p.default) for p in (eps, c, k)] == ["1e-06", "True", "(- 1)"]
    loss = kernel.outputs[1]
    assert isinstance(loss.type, ast.TensorType) and loss.type.dims == ()
    assert kernel.doc == "Scales.\n\nText.\n  Indented."
    parallel, tile, require, pair, choice, accumulate, loop = kernel.body
    assert isinstance(parallel, ast.Bind) and parallel.kind == "parallel"
    assert [(b.index, show(b.extent)) for b in parallel.bindings] == [("m", "M"), ("h", "H")]
    assert isinstance(tile, ast.Bind) and tile.kind == "tile" and show(tile.bindings[0].extent) == "(N // 2)"
    assert isinstance(require, ast.Require) and show(require.condition) == "((N % 2) == 0)"
    assert isinstance(pair, ast.Assign) and list(map(show, pair.targets)) == ["lo", "hi"]
    assert list(map(show, pair.values)) == ["x[m, n]", "x[m, (n + (N // 2))]"]
    assert isinstance(choice, ast.If) and show(choice.condition) == "(c and w)"
    (other,) = choice.orelse
    assert isinstance(other, ast.If) and show(other.condition) == "(not c)" and len(other.orelse) == 1
    assert isinstance(accumulate, ast.Accumulate) and accumulate.target.indices == ()
    assert isinstance(loop, ast.For) and loop.step is not None and show(loop.step) == "BK"


def test_in_place_kernel_and_one_line_suites():
    kernel = parse_text("kernel f(x: inout T[N]): x[0] = 1\n").kernels[0]
    assert kernel.outputs == () and len(kernel.body) == 1
    assert isinstance(kernel.params[0].type, ast.TensorType) and kernel.params[0].type.inout
    body = (
        parse_text(HEAD + "    if a: b = 1\n    elif c: b = 2\n    else: b = 3\n    for k in K: d = k\n")
        .kernels[0]
        .body
    )
    assert isinstance(body[0], ast.If) and isinstance(body[0].orelse[0], ast.If)
    assert isinstance(body[1], ast.For) and body[1].step is None


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a + b * c", "(a + (b * c))"),
        ("a - b - c", "((a - b) - c)"),
        ("a / b * c", "((a / b) * c)"),
        ("a // b % c", "((a // b) % c)"),
        ("-a ** 2", "(- (a ** 2))"),
        ("a ** -b", "(a ** (- b))"),
        ("a ** b ** c", "(a ** (b ** c))"),
        ("(a ** b) ** c", "((a ** b) ** c)"),
        ("- - a", "(- (- a))"),
        ("-a * b", "((- a) * b)"),
        ("not a == b", "(not (a == b))"),
        ("not a and b or c", "(((not a) and b) or c)"),
        ("a or b and c", "(a or (b and c))"),
        ("a + 1 < b", "((a + 1) < b)"),
        ("(a < b) == (c < d)", "((a < b) == (c < d))"),
        ("f()", "f()"),
        ("f(a, b,)", "f(a, b)"),
        ("x[]", "x[]"),
        ("x[m, n + 1,]", "x[m, (n + 1)]"),
        ("(\n a\n + b)", "(a + b)"),
        ("f(a,  # note\n b)", "f(a, b)"),
    ],
)
def test_expressions(text, tree):
    assert expression(text) == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("00", 0), ("16", 16), ("1_000", 1000), ("0x1f", 31), ("0XFF_FF", 65535), ("1.", 1.0),
        (".5", 0.5), ("1e-6", 1e-6), ("1E+6", 1e6), ("1.5e3", 1500.0), ("1e5", 1e5), ("true", True), ("True", True),
        ("false", False), ("False", False), ("9223372036854775807", 2**63 - 1), ("0.0e-999", 0.0),
    ],
)  # fmt: skip
def test_numbers(text, value):
    got = parse_text(f"fn f(a) = {text}\n").functions[0].body
    assert isinstance(got, ast.Number) and got.value == value and type(got.value) is type(value)
    assert got.span.text == text


def test_smallest_integer_is_a_literal():
    assert expression("-9223372036854775808") == "(- 9223372036854775808)"
    assert codes("fn f(a) = a - 9223372036854775808\n") == ["K0103"]


FOREIGN = """int float half asm template new delete this NULL min lambda None def class print tl triton cp op_ _
register __i warpSize threadIdx M_PI range pass return Kernel TRUE exp x X"""


@pytest.mark.parametrize("name", FOREIGN.split())
def test_other_languages_words_are_names(name):
    text = (
        f"fn {name}({name}) = {name}({name})\n"
        f"kernel {name}[{name}: f32]({name}: {name}[{name}]) -> ({name}: {name}[]):\n"
        f"    parallel {name} in {name}\n    {name} = {name}[{name}]\n"
    )
    assert parse_text(text).kernels[0].name == name


@pytest.mark.parametrize("word", sorted(KEYWORDS))
def test_keywords_are_not_names(word):
    assert only(f"fn {word}(a) = a\n").code == "K0111"


def test_spans_cover_the_text_of_their_node():
    module = parse_text(ROW)
    assert module.kernels[0].span.line == 7 and module.kernels[0].name_span.text == "scale"
    for node, span in spans(module):
        assert span.line >= 1 and (span.end_line, span.end_column) > (span.line, span.column)
        match node:
            case ast.Name():
                assert span.text == node.id
            case ast.Call() if span.line == span.end_line:
                assert node.func_span.text == node.func
                assert span.text.startswith(node.func + "(") and span.text.endswith(")")
            case ast.Subscript():
                assert node.tensor_span.text == node.tensor and span.text.endswith("]")
            case ast.Binding() | ast.Param():
                assert span.text.startswith(getattr(node, "index", getattr(node, "name", None)))
            case ast.Binary():
                assert (span.line, span.column) <= (node.left.span.line, node.left.span.column)
                assert node.right.span.end_column <= span.end_column


def test_brackets_belong_to_the_span():
    body = parse_text("fn f(a) = (a + 1) * (2)\n").functions[0].body
    assert isinstance(body, ast.Binary)
    assert [body.left.span.text, body.right.span.text, body.span.text] == ["(a + 1)", "(2)", "(a + 1) * (2)"]


# ---- text


@pytest.mark.parametrize("ending", ["\r\n", "\r", "\n\r\n"])
def test_line_endings_do_not_matter(ending):
    assert parse_text(ROW.replace("\n", ending)) == parse_text(
        ROW.replace("\n", ending.replace("\r\n", "\n").replace("\r", "\n"))
    )


def test_mixed_line_endings_bom_and_trailing_space():
    lines = ROW.split("\n")
    mixed = "".join(line + "  \t" + ("\n", "\r\n", "\r")[i % 3] for i, line in enumerate(lines[12:]))
    head = "\r\n".join(lines[:12]) + "\r\n"
    assert parse_text("\ufeff" + head + mixed) == parse_text(ROW)
    assert parse_text(ROW.rstrip("\n")) == parse_text(ROW)


def test_positions_after_cr_and_bom():
    diagnostic = only("\ufeff# one\r# two\r\nfn f(a) = = 2\r\n")
    assert (diagnostic.span.line, diagnostic.span.column) == (3, 11)


@pytest.mark.parametrize("text", ["", "\n", "\n\n  \n\t\n", "# only a comment", "\ufeff", "   # indented\n", "\f\n"])
def test_files_without_items(text):
    module = parse_text(text)
    assert (module.doc, module.imports, module.functions, module.kernels) == ("", (), (), ())


def test_tabs_form_feeds_and_unicode_comments():
    text = HEAD + "\tparallel n in N\n\f\tif c:  # größer ≥\n        \ty[n] = 1\n\n\t# odd\n  # place\n\ty[n] = 2\n"
    body = parse_text(text).kernels[0].body
    assert len(body) == 3 and isinstance(body[1], ast.If)
    # A tab reaches column 8, so these two lines are in one block, but only if every tab is 8 wide.
    assert codes(HEAD + "        a = 1\n\tb = 2\n") == ["K0107"]
    assert codes(HEAD + "    if c:\n\ta = 1\n") == ["K0107"]


def test_long_files_parse_in_reasonable_time():
    start = time.process_time()
    module = parse_text(HEAD + "    a = x[n] + 1.0\n" * 10_000)
    assert len(module.kernels[0].body) == 10_000
    assert time.process_time() - start < 8  # 2 s on an idle machine; linear time is what matters here
    many = parse_text("".join(f"fn f{i}(a) = a * {i}\n\n" for i in range(2000)))
    assert len(many.functions) == 2000


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000 + "a" + ")" * 5000, "[" * 5000, "-" * 5000 + "a", "not " * 5000 + "a", "a" + " ** a" * 5000,
        "a" + " + a" * 5000, "f(" * 250 + "a" + ")" * 250, "a" + "[a" * 300 + "]" * 300,
    ],
)  # fmt: skip
def test_deep_nesting_is_a_diagnostic(text):
    assert set(codes(f"fn f(a) = {text}\n")) <= {"K0120", "K0106"}


def test_deep_blocks_and_long_elif_chains():
    deep = HEAD + "".join("    " * (i + 1) + "if c:\n" for i in range(60)) + "    " * 61 + "a = 1\n"
    assert codes(deep) == ["K0120"]
    assert codes(HEAD + "    if c: a = 1\n" + "    elif c: a = 1\n" * 300) == ["K0120"]


def test_depth_just_within_the_limit():
    assert parse_text("fn f(a) = " + "(" * 199 + "a" + ")" * 199 + " + a" * 199 + "\n").functions


# ---- mistakes


@pytest.mark.parametrize("code", PARSER_CODES, ids=lambda c: c.code)
def test_example_of_each_code(code):
    assert codes(code.wrong) == [code.code]
    parse_text(code.right)


def test_codes_are_unique_and_titled():
    assert len({c.title for c in CODES.values()}) == len(CODES)
    assert all(key == code.code for key, code in CODES.items())


def test_every_mistake_of_a_file_is_reported():
    text = (
        "fn f(a) = a b\n"  # 1
        + "kernel g(x: T[N]) -> (y: T[N]):\n"
        + "    parallel n in\n"  # 3
        + "    if x[n] = 1:\n"  # 4
        + "        y[n] = 1 +\n"  # 5
        + "    else\n"  # 6
        + "        y[n] = $\n"  # 7
        + "    y[n] = f(x[n]\n"  # 8
        + "kernel (x: T[N]):\n"  # 9
        + "    x[n] = )\n"  # 10
        + "fn h(a) = a\n"
        + "op z(x: T[N]) -> (y: T[N]):\n"
        + "    forward:\n"
        + "        y = x @\n"  # 14
        + "fn i(a, a = a\n"  # 15
    )
    diagnostics = Diagnostics()
    module = parse(SourceFile("bad.kdsl", text), diagnostics)
    assert [d.span.line for d in diagnostics.sorted()] == [1, 3, 4, 5, 6, 7, 8, 9, 10, 14, 15], str(
        DslError(diagnostics.sorted())
    )
    # What is left is right as far as it goes.
    assert [f.name for f in module.functions] == ["h"] and module.kernels == ()


@pytest.mark.parametrize(
    ("line", "column", "message", "help"),
    [
        ("y[n] = x[n] if c else 0", 17, "the keyword 'if'", "where("),
        ("y[n] = x[:, n]", 14, "':'", "no slices"),
        ("y[n] = tl.exp(x[n])", 14, "'.'", "plain name"),
        ("y[n] = max(x[n], axis=1)", 26, "'='", "by position"),
        ("y[n] = x[n] | x[n]", 17, "'|'", "'or'"),
        ("y[n] = +x[n]", 12, "'+'", "unary plus"),
        ("y[n] = (x[n])(2)", 18, "'('", "only a name"),
        ("y[n] = [a for a in x]", 12, "'['", "written"),
        ("y[n] = f(a for a in x)", 16, "'for'", "comprehensions"),
        ("y[n] = a = b", 14, "'='", "assigns once"),
        ("y[n] =", 11, "the end of the line", "finish"),
        ("parallel n", 15, "expected 'in'", "parallel m in M"),
        ("parallel 3 in N", 14, "expected an index name, found the number 3", "parallel m in M"),
        ("paralel n in N", 5, "'paralel' begins no statement", "did you mean 'parallel'"),
        ("if c = 1: y[n] = 2", 10, "'='", "written =="),
        ("y[n] -= 1", 10, "'-='", "only +="),
        ("y[n] = x[n] && c", 17, "'&&'", "'and'"),
        ("y[n] = 'a'", 12, "quoted text", "docstrings"),
        ("y[n] = x[n] \u2212 1", 17, "'\u2212'", "minus"),
        ("y[n] = x[n]\u00a0+ 1", 16, "U+00A0", "plain space"),
        ("y[n] = x[n] + \\", 19, "'\\'", "inside ( )"),
        ("y[n] = 0123", 12, "'0123' is not a number", "leading zeros"),
        ("y[n] = 1.0f", 12, "'1.0f' is not a number", "suffix"),
        ("y[n] = 3abc", 12, "'3abc' is not a number", "digit"),
        ("y[n] = 1e", 12, "'1e' is not a number", "1e-6"),
        ("y[n] = 1e-400", 12, "too small", "0.0"),
        ("y[n] = " + "9" * 5000, 12, "does not fit", "9223372036854775807"),
        ("y[n] = 0x" + "f" * 5000, 12, "does not fit", "9223372036854775807"),
    ],
)
def test_messages(line, column, message, help):
    diagnostic = only(f"{HEAD}    {line}\n")
    assert (diagnostic.span.line, diagnostic.span.column) == (2, column)
    assert message in diagnostic.message and help in diagnostic.help
    assert diagnostic.render()


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("kernel f(x T[N]):\n    x[0] = 1\n", 1, 12, "expected ':', found 'T'"),
        ("kernel f(x: T[N]) -> y: T[N]:\n    y[0] = 1\n", 1, 22, "expected '(', found 'y'"),
        ("kernel f(x:):\n    x[0] = 1\n", 1, 12, "expected a type, found ')'"),
        ("kernel (x: T):\n    x[0] = 1\n", 1, 8, "expected the name of the kernel"),
        ("fn (a) = a\n", 1, 4, "expected the name of the function"),
        ("fn f(a, 1) = a\n", 1, 9, "expected the name of a parameter"),
        ("from .here import a\n", 1, 6, "expected a module's name"),
        ("from here import *\n", 1, 18, "expected a function's name"),
        ("kernal f(x: T):\n    x[0] = 1\n", 1, 1, "'kernal' cannot begin"),
        ("\0\0\0", 1, 1, "NUL"),
        ("fn f(a) = a  # \0\n", 1, 16, "NUL"),
        ("fn f(a) = a\n  fn g(a) = a\n", 2, 3, "indented more"),
        ('fn f(a) = a\n"""\nopen\n', 2, 1, "never closed"),
        ("fn f(a) = (a\n\n\nfn g(a) = a\n", 1, 11, "'(' is never closed"),
        ("fn f(a) = (a]\n", 1, 13, "does not match the '('"),
        ("kernel f(x: T[N]\n         w: T[N]):\n    x[0] = 1\n", 2, 10, "found 'w'"),
    ],
)
def test_messages_of_items(text, line, column, message):
    diagnostic = only(text)
    assert (diagnostic.span.line, diagnostic.span.column) == (line, column), diagnostic.render()
    assert message in diagnostic.message


def test_message_never_speaks_of_terminals():
    with pytest.raises(DslError) as caught:
        parse_text("kernel f[T(x: T):\n    a\nfn f(a) = (a,)\nfrom a import\nkernel g(x: T[N) ->:\n    b = \n")
    text = str(caught.value)
    for word in ("LPAR", "NAME", "NEWLINE", "RSQB", "_COMMA", "COMPARE", "Token", "$END"):
        assert word not in text


def test_a_file_of_rubbish_stops_early():
    diagnostics = Diagnostics()
    parse(SourceFile("bad.kdsl", "fn f(a) = =\n" * 5000), diagnostics)
    assert len(diagnostics.items) == 100


SIGNS = [*"()[]:,=+-<?|.#'@*12xyf\\\r\0é", "->", "+=", "**", "==", "0x", "2.5", '"""']
PIECES = st.sampled_from([*SIGNS, "\n", "\n    ", "\n        ", "\n\t", *sorted(KEYWORDS)])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=60).map(" ".join) | st.text(max_size=80))
def test_any_text_parses_or_is_refused_cleanly(text):
    try:
        parse_text(text)
    except DslError as error:
        assert str(error)
        for diagnostic in error.diagnostics:
            assert diagnostic.code in CODES and diagnostic.message and diagnostic.span.line >= 1
