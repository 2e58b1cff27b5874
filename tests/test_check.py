"""The checker: what kernels mean (dtypes, index sets, compile-time paths) and that each mistake is named."""

from __future__ import annotations

import time

import pytest

from kgen.dsl import ir
from kgen.dsl.check import Specialization, check_module, elaborate
from kgen.dsl.check.codes import CHECKER_CODES
from kgen.dsl.codes import Code
from kgen.dsl.diagnostics import Diagnostic, Diagnostics, DslError
from kgen.dsl.dtypes import BF16, BOOL, F16, F32, F64, I32, I64, DType
from kgen.dsl.parser import parse_text


def findings(text: str) -> list[Diagnostic]:
    """Everything the checker has to say about a file."""
    diagnostics = Diagnostics()
    check_module(parse_text(text, "f.kdsl"), diagnostics)
    return diagnostics.sorted()


def kernel(text: str, dtype: DType = F32, present: tuple[str, ...] = (), **consts: int | float | bool) -> ir.Kernel:
    """The tile IR of the only kernel in `text`, every dtype variable standing for `dtype`."""
    module = parse_text(text, "f.kdsl")
    names = {"T": dtype, "W": dtype, "C": dtype}
    return elaborate(module, module.kernels[0].name, Specialization(names, consts, frozenset(present)))


def value_of(expression: str, params: str = "x: T[M, N], i: i32[M, N], b: bool[M, N]", dtype: DType = F32) -> ir.Expr:
    """The typed form of `expression`, over indices m (parallel) and n (tile)."""
    text = f"kernel f({params}) -> (y: f64[M, N]):\n    parallel m in M\n    tile n in N\n    a = {expression}\n"
    text += "    y[m, n] = where(x[m, n] == x[m, n], 1.0, 0.0)\n"
    let = next(s for s in kernel(text, dtype).body if isinstance(s, ir.Let) and s.name == "a")
    return let.value


@pytest.mark.parametrize("code", CHECKER_CODES, ids=lambda c: c.code)
def test_code_examples(code: Code) -> None:
    wrong = findings(code.wrong)
    assert {d.code for d in wrong} == {code.code}, "\n".join(d.render() for d in wrong)
    assert wrong[0].help, "every message says what to do"
    right = findings(code.right)
    assert not right, "\n".join(d.render() for d in right)


@pytest.mark.parametrize(
    ("expression", "dtype", "expected"),
    [
        ("x[m, n] + 1", BF16, F32),
        ("x[m, n] * x[m, n]", F16, F32),
        ("x[m, n] + 1", F64, F64),
        ("x[m, n] * 0.5", F64, F64),
        ("x[m, n] / N", F64, F64),
        ("T(x[m, n])", F64, F64),
        ("i[m, n] + 1", F32, I32),
        ("i[m, n] + 3000000000", F32, I64),
        ("i[m, n] + n", F32, I64),
        ("i[m, n] / 2", F32, F32),
        ("i[m, n] // 2", F32, I32),
        ("i[m, n] * 0.5", F32, F32),
        ("exp(i[m, n])", F32, F32),
        ("b[m, n] + b[m, n]", F32, I32),
        ("b[m, n] and x[m, n] > 0", F32, BOOL),
        ("b[m, n] == b[m, n]", F32, BOOL),
        ("where(b[m, n], i[m, n], x[m, n])", F32, F32),
        ("where(b[m, n], b[m, n], not b[m, n])", F32, BOOL),
        ("argmax(x[m, n], n)", F64, I64),
        ("any(b[m, n], n)", F32, BOOL),
        ("sum(i[m, n], n)", F32, I32),
        ("sum(b[m, n], n)", F32, I32),
        ("mean(i[m, n], n)", F32, F32),
        ("isnan(i[m, n])", F32, BOOL),
        ("i64(x[m, n])", F32, I64),
        ("bf16(x[m, n])", F32, F32),
        ("where(b[m, n], n * N + m, 0)", F32, I64),
        ("2 * 3", F32, I32),
        ("1 / 2", F32, F32),
    ],
)
def test_dtypes(expression: str, dtype: DType, expected: DType) -> None:
    assert value_of(expression, dtype=dtype).dtype == expected


@pytest.mark.parametrize(
    ("expression", "axes"),
    [
        ("x[m, n]", {"m", "n"}),
        ("sum(x[m, n], n)", {"m"}),
        ("x[m, n] - mean(x[m, n], n)", {"m", "n"}),
        ("1.0", set()),
        ("n * 2.0", {"n"}),
        ("x[m, i64(sum(i[m, n], n))]", {"m"}),
        ("softmax(x[m, n], n)", {"m", "n"}),
        ("logsumexp(x[m, n], n)", {"m"}),
    ],
)
def test_index_sets(expression: str, axes: set[str]) -> None:
    assert value_of(expression).axes == axes


def test_constants_fold_and_literals_take_the_dtype_of_their_partner() -> None:
    value = value_of("x[m, n] * (2 * 3 + 1)", dtype=F64)
    assert isinstance(value, ir.Op)
    assert isinstance(value.args[1], ir.Const)
    assert value.args[1].value == 7.0
    assert value.args[1].dtype == F64


def test_index_arithmetic_stays_affine_through_a_name() -> None:
    text = "kernel f(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    k = N - 1 - n\n    y[n] = x[k]\n"
    store = kernel(text).body[-1]
    assert isinstance(store.value, ir.Load)
    assert str(store.value.at[0]) == "N - n - 1"


def test_function_argument_used_twice_is_computed_once() -> None:
    text = "fn sq(a) = a * a\n\nkernel f(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = sq(x[n] + 1.0)\n"
    body = kernel(text).body
    assert [type(s).__name__ for s in body] == ["Let", "Store"]
    assert body[0].name == "sq_a"  # type: ignore[union-attr]  # the line above says that it is a Let


def test_shadowing_gives_unique_names() -> None:
    text = "kernel f(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    a = x[n]\n    a = a + 1.0\n    y[n] = a * a\n"
    lets = [s.name for s in kernel(text).body if isinstance(s, ir.Let)]
    assert lets == ["a", "a_2"]


def test_compile_time_if_and_optional_tensors() -> None:
    text = """
kernel f(x: T[N], b: W[N]?, mode: const i32 = 0) -> (y: T[N]):
    parallel n in N
    a = x[n]
    if b and mode == 1:
        a = a + b[n]
    elif mode > 1:
        a = -a
    y[n] = a
"""
    assert not findings(text)
    assert len(kernel(text, present=("b",), mode=1).body) == 3
    assert len(kernel(text, mode=1).body) == 2
    assert [t.name for t in kernel(text, mode=1).tensors] == ["x", "y"]


def test_each_path_is_checked() -> None:
    text = """
kernel f(x: T[N], flag: const bool) -> (y: T[N]):
    parallel n in N
    if flag:
        a = x[n]
    y[n] = a
"""
    (only,) = findings(text)
    assert only.code == "K0201"
    assert only.notes == ("this is so when flag is false",)


def test_a_tensor_is_given_or_absent() -> None:
    text = """
kernel f(x: T[N], w: T[N]?, flag: const bool) -> (y: T[N]):
    parallel n in N
    if w and flag:
        a = x[n]
    y[n] = a
"""
    notes = [finding.notes for finding in findings(text)]
    assert notes == [("this is so when w is given and flag is false",)]


def test_advice_on_subscripts_goes_by_sizes() -> None:
    text = """
kernel f(x: T[M, N, N], b: T[N]) -> (y: T[M, N]):
    parallel m in M
    tile n in N, k in N, h in N // 2
    y[m, n] = b + sum(x, k)
"""
    assert [finding.help for finding in findings(text)] == ["write b[n]"]
    assert [finding.help for finding in findings(text.replace("b + ", ""))] == ["write x[m, n, k]"]


def test_a_mistake_is_reported_once_and_the_rest_is_still_checked() -> None:
    text = """
kernel f(x: T[M, N]) -> (y: T[M, N], z: T[M]):
    parallel m in M
    tile n in N
    a = foo(x[m, n])
    y[m, n] = a + 1.0
    z[m] = x[m, n]
"""
    assert [d.code for d in findings(text)] == ["K0202", "K0203"]


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("sum(x[m, n], m)", ", or sum over programs with `out[...] += value`"),
        ("mean(x[m, n], m)", ", or sum over programs with `out[...] += value / (M + 1)`"),
        ("max(x[m, n], m)", ""),
        ("softmax(x[m, n], m)", ""),
        ("logsumexp(x[m, n], m)", ""),
    ],
)
def test_advice_for_a_reduction_over_programs_fits_it(value: str, advice: str) -> None:
    header = "kernel f(x: T[M + 1, N]) -> (y: T[N]):\n    parallel m in M + 1\n    tile n in N\n"
    (only,) = findings(f"{header}    y[n] = {value}\n")
    assert (only.code, only.help) == ("K0207", "declare it with `tile m in M + 1`" + advice)


@pytest.mark.parametrize(
    "statements",
    [
        "parallel m in M\n    tile n in N\n    y[m, n] += x[m, n]",
        "parallel m in M, n in N\n    y[m, n] += x[m, n]",
        "tile m in M, n in N\n    y[m, n] += x[m, n]",
    ],
)
def test_a_sum_over_no_programs_is_refused(statements: str) -> None:
    (only,) = findings(f"kernel f(x: T[M, N]) -> (y: T[M, N]):\n    {statements}\n")
    assert only.code == "K0228"
    assert only.help == "write `=`; `+=` sums over the parallel indices that its target lacks"


def test_one_of_several_sums_may_name_every_program() -> None:
    assert not findings(
        "kernel f(x: T[N]) -> (y: T[N + 1]):\n    parallel n in N\n    y[n + 1] += x[n]\n    y[0] += x[n]\n"
    )


@pytest.mark.parametrize(
    ("power", "products"),
    [("a ** 2", 1), ("a ** 3", 2), ("pow(a, 2.0)", 1), ("(a - 1.0) ** 2", 1), ("square(a + 1.0)", 1), ("a ** 4", 0),
     ("a ** -2", 0), ("a ** 2.5", 0), ("a ** b", 0), ("2 ** a", 0)],
)  # fmt: skip
def test_small_whole_powers_are_products(power: str, products: int) -> None:
    k = kernel(
        "fn square(v) = v ** 2\n\n"
        "kernel f(x: f32[N], b: f32 = 2.0) -> (y: f32[N]):\n    parallel n in N\n    a = x[n]\n"
        f"    y[n] = {power} + b\n"
    )
    ops = [e.fn for s in k.body for e in ir.walk(s.value) if isinstance(e, ir.Op)]
    assert (ops.count("mul"), ops.count("pow")) == (products, 0 if products else 1)
    assert ops.count("sub") + ops.count("add") == 1 + ("1.0" in power)  # the base is computed once


def test_message_shows_line_caret_and_help() -> None:
    text = "kernel f(x: T[M, N]) -> (y: T[M]):\n    parallel m in M\n    tile n in N\n    y[m] = x[m, n] * 2.0\n"
    with pytest.raises(DslError) as caught:
        kernel(text)
    assert str(caught.value) == (
        "error[K0203]: value still carries tile index 'n'\n"
        " --> f.kdsl:4:12\n"
        "  |\n"
        "4 |     y[m] = x[m, n] * 2.0\n"
        "  |            ^^^^^^^^^^^^^ indices {m, n}, but the target has {m}\n"
        "  = help: reduce it first, for example sum(x[m, n] * 2.0, n)"
    )


def test_ten_thousand_statements_are_checked_in_linear_time() -> None:
    def seconds(count: int) -> float:
        head = "kernel f(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    a = x[n]\n"
        text = head + "    a = a * 1.5 + x[n]\n" * count + "    y[n] = a\n"
        module = parse_text(text)
        start = time.process_time()
        check_module(module, Diagnostics())
        return time.process_time() - start

    # Twice what linear time would be, against a clock that others share: quadratic time would be ten times it.
    assert seconds(10_000) < 20 * seconds(1_000) + 1
