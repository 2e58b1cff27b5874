"""Ops: every mistake with its code, printing and formatting, and the plans that are made of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from host_kit import ATTEND, MLP, allocated, checked, planned, steps, verify

import kgen
from kgen.codegen.host import plan, sizing
from kgen.codegen.host.lower import lower
from kgen.codegen.host.text import plan_text
from kgen.dsl import ast
from kgen.dsl.check import check_module
from kgen.dsl.diagnostics import Diagnostic, Diagnostics, DslError
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.format import format_module, format_source
from kgen.dsl.host.check import check_ops, elaborate_op, source_of
from kgen.dsl.host.codes import HOST_CODES
from kgen.dsl.host.scope import HostSpecialization
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text

OPS = Path(__file__).resolve().parents[1] / "ops"
GRADIENTS = ("x", "w", "bias", "up", "down")


def reported(text: str) -> list[Diagnostic]:
    """The mistakes of `text`. Raises DslError for those of its grammar."""
    module = parse_text(text)
    diagnostics = Diagnostics()
    check_module(module, diagnostics)
    check_ops(source_of(module), diagnostics)
    for d in diagnostics.items:
        assert d.help and d.span.line > 1
    return list(diagnostics.sorted())


def mistakes(text: str) -> list[str]:
    """The codes that `text` earns."""
    return [d.code for d in reported(text)]


@pytest.mark.parametrize("code", HOST_CODES, ids=lambda c: c.code)
def test_every_code_has_an_example_and_its_correction(code):
    assert mistakes(code.wrong) == [code.code]
    assert mistakes(code.right) == []


COPY = "kernel copy(x: T[*M, N]) -> (y: T[*M, N]):\n    parallel m in M, n in N\n    y[m, n] = x[m, n]\n\n"
EDIT = "kernel edit_(x: inout T[*M, N], s: T[N]):\n    parallel m in M, n in N\n    x[m, n] = x[m, n] * s[n]\n\n"
HEAD = "op f(x: T[B, H], w: T[V, H], s: T[H], k: i64[B], n: const i64, e: f32 = 1.0) -> (y: T[B, V]):\n"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("y = copy(x, x) @ w.T", "K0603"),
        ("y = copy() @ w.T", "K0603"),
        ("y = copy(x, x=x) @ w.T", "K0603"),
        ("a, b = copy(x)\n        y = x @ w.T", "K0603"),
        ("y = copy(e) @ w.T", "K0603"),
        ("copy(x)\n        y = x @ w.T", "K0603"),
        ("y = x @ k", "K0604"),
        ("y = x.T @ w", "K0604"),
        ("y = s.T @ w", "K0604"),
        ("z = copy(x)\n        edit_(z, s=k)\n        y = z @ w.T", "K0605"),
        ("z = x @ w.T\n        edit_(z, s)\n        y = copy(z)", "K0604"),
        ("z = copy(x)\n        edit_(z, z)\n        y = z @ w.T", "K0604"),
        ("y = 1.0", "K0614"),
        ("y = x @ e", "K0614"),
        ("x = w @ w.T\n        y = x @ w.T", "K0607"),
        ("e = w @ w.T\n        y = x @ w.T", "K0607"),
        ("g: i32[B, V]\n        g = x @ w.T\n        y = x @ w.T", "K0605"),
        ("g: q[B, V]\n        y = x @ w.T", "K0605"),
        ("g: f32[*B, V]\n        y = x @ w.T", "K0604"),
        ("g: f32[Q]\n        y = x @ w.T", "K0601"),
        ("g[c] = x @ w.T\n        y = x @ w.T", "K0601"),
        ("for c in chunks(Q):\n            y[c] = x[c] @ w.T", "K0611"),
        ("for c in B(B):\n            y[c] = x[c] @ w.T", "K0611"),
        ("for c in chunks(B):\n            for d in chunks(V):\n                y[c, d] = x[c] @ w[d].T", "K0611"),
        ("for x in chunks(B):\n            y[x] = x[x] @ w.T", "K0615"),
        ("for c in chunks(B):\n            y[c] = x @ w.T", "K0604"),
        ("for c in chunks(B):\n            z = x[c] @ w.T\n            y[c] = copy(z)\n        z = copy(z)", "K0601"),
        ("for c in chunks(B):\n            y += x[c] @ w.T", "K0604"),
        ("g: f32[H, H]\n        for c in chunks(B):\n            g += x[c].T @ x[c]\n"
         "            y[c] = x[c] @ w.T\n            z = copy(g)", "K0606"),
        ("y = x @ w.T\n        y += x @ w.T", "K0607"),
        ("y += x @ w.T\n        y = x @ w.T", "K0607"),
        ("require B > 1\n        y = x @ w.T", "K0609"),
        ("y = w(x)", "K0602"),
        ("for c in chunks(B):\n            g: f32[B - c, V]\n            y[c] = x[c] @ w.T", "K0604"),
        ("for c in chunks(B):\n            g: f32[c % 3, V]\n            y[c] = x[c] @ w.T", "K0604"),
    ],
)  # fmt: skip
def test_mistakes(body, code):
    assert code in mistakes(COPY + EDIT + HEAD + "    forward:\n        " + body + "\n")


@pytest.mark.parametrize(
    ("line", "code", "help"),
    [
        ("y = x - w", "K0110", "a minus stands before numbers alone"),
        ("y = x * w", "K0110", "the only operators are a @ b, a @ b + c and +="),
        ("y = 2.0 * x @ w.T", "K0110", "what is computed of single elements stands in a kernel"),
        ("y = x @ w.T + y + s", "K0110", "a product may have one matrix or row added"),
        ("y = x @ w.T + x @ w.T", "K0110", "a statement has one product"),
        ("y = x == w", "K0110", "the only operators are"),
        ("y = x[0:3] @ w.T", "K0110", "no slices but chunks: x[c] in for c in chunks(B):"),
        ("y = x.sum(0)", "K0110", "tensors have no methods"),
        ("y, z = x, w", "K0110", "only a call of a kernel gives several values"),
        ("y = x w", "K0110", "y[c] = expression or name += expression"),
        ("y = x if e else w", "K0110", "a choice by what is known beforehand is a statement"),
        ("for c in range(3):\n            y = x", "K0110", "a loop is written for c in chunks(B):"),
        ("for k in H by 4:\n            y = x", "K0110", "a loop is written for c in chunks(B):"),
        ("tile n in H", "K0110", "indices are declared in kernels"),
        ("if n == 3:\n            y = x\n        else if n == 2:\n            y = w", "K0110", "write elif condition:"),
        ("return x", "K0126", "assign the output, as in y = x @ w.T"),
        ("y = sum(x)", "K0602", "write a kernel that computes it, and call that"),
        ("y = f(x, w, s)", "K0602", "ops call kernels only"),
    ],
)
def test_advice_in_an_op_is_for_ops(line, code, help):
    try:
        found = reported(COPY + EDIT + HEAD + "    forward:\n        " + line + "\n")
    except DslError as error:
        found = list(error.diagnostics)
    assert found[0].code == code and help in str(found[0].help), (found[0].code, found[0].help)


@pytest.mark.parametrize(
    ("body", "code", "text", "help"),
    [
        ("y = x @ w.T\n    z = y", "K0609", "y = x @ w.T", "begin a section above it, forward: or backward(d_y):"),
        ("require B > 0\n    y += x @ w.T", "K0609", "y += x @ w.T", "begin a section above it"),
        ("for c in chunks(B):\n        y[c] = x[c] @ w.T", "K0609", "for c in chunks(B):", "begin a section above it"),
        ("y[c] = x @ w.T", "K0609", "y[c] = x @ w.T", "begin a section above it"),
        ("edit_(x, s)", "K0609", "edit_(x, s)", "begin a section above it"),
        ("g: f32[B, V]\n    y = g", "K0609", "g: f32[B, V]", "begin a section above it"),
        ("forward:\n        y = x @ w.T\n    y = x", "K0609", "y = x", "begin a section above it"),
        ("forward\n        y = x @ w.T", "K0123", "forward", "forward: or backward(d_y):"),
        ("forward:\n    y = x @ w.T", "K0109", ":", "indent the statements of the block"),
        ("forward: y = x @ w.T", "K0110", "y", "on lines of their own, indented under it"),
        ("return x", "K0126", "return", "assign the output"),
        ("pass", "K0126", "pass", "leave the block out"),
        ("", "K0109", ":", "write forward: under it"),
    ],
)
def test_statements_in_no_section_are_one_mistake(body, code, text, help):
    with pytest.raises(DslError) as caught:
        reported(COPY + EDIT + HEAD + "    " + body + "\n")
    (found,) = caught.value.diagnostics
    assert (found.code, found.span.text) == (code, text) and help in found.help, found.render()


def test_mistakes_name_things_as_they_are_written():
    twice = (
        "for c in chunks(B):\n            y[c] = x[c] @ w.T\n"
        "        for c in chunks(B):\n            g: f32[c, c]\n            g = x[c] @ w.T"
    )
    for body, said in (
        (twice, "a value of shape [c, V] is stored in one of shape [c, c]"),
        ("g = copy(x)\n        g = copy(g)\n        two_(g, g)", "'g' is written by this call"),
        ("for c in chunks(B):\n            two_(x[c], x)", "writes to 'x[c]', which is an argument of the op"),
    ):
        two = (
            "kernel two_(x: inout T[*M, N], z: T[*K, N]):\n    parallel m in M, n in N\n    x[m, n] = x[m, n] * 2.0\n\n"
        )
        found = reported(COPY + EDIT + two + HEAD + "    forward:\n        " + body + "\n        y = x @ w.T\n")
        assert any(said in d.message for d in found), [d.message for d in found]


def test_leading_dimensions_of_one_star_are_the_same():
    text = (
        "kernel scaled(x: T[*M, N], s: T[*M]) -> (y: T[*M, N]):\n    parallel m in M, n in N\n"
        "    y[m, n] = s[m] * x[m, n]\n\n"
        "op f(x: T[B, S, H], s: T[S, B]) -> (y: T[B, S, H]):\n    forward:\n        y = scaled(x, s)\n"
    )
    assert mistakes(text) == ["K0604"]
    assert mistakes(text.replace("s: T[S, B]", "s: T[B, S]")) == []


@pytest.mark.parametrize(
    ("sections", "code"),
    [
        ("forward(x):\n        y = x @ w.T", "K0609"),
        ("forward:\n        y = x @ w.T\n    backward(g):\n        d_x = g @ w", "K0609"),
        ("forward:\n        y = x @ w.T\n    forward:\n        y = x @ w.T", "K0609"),
        ("forward:\n        y = x @ w.T\n    backward(d_y):\n        edit_(d_y, s)", "K0604"),
        ("forward:\n        y = x @ w.T\n    backward(d_y):\n        d_x = d_y @ w.T", "K0604"),
        ("forward:\n        y = x @ w.T\n    backward(d_y):\n        scale_(d_y)", "K0602"),
        ("if d_x:\n        y = x @ w.T\n    forward:\n        y = x @ w.T", "K0609"),
        ("require B\n    forward:\n        y = x @ w.T", "K0613"),
        ("require Q > 1\n    forward:\n        y = x @ w.T", "K0601"),
    ],
)
def test_mistakes_of_sections(sections, code):
    text = COPY + EDIT + HEAD + "    " + sections + "\n"
    try:
        found = mistakes(text)
    except DslError as error:
        found = [d.code for d in error.diagnostics]
    assert code in found


def test_imported_kernels_are_checked_with_the_op(tmp_path):
    wrong = COPY.replace("= x[m, n]", "= z[m, n]")
    (tmp_path / "a.kdsl").write_text(wrong + COPY.replace("copy", "other").replace("= x[m, n]", "= q[m, n]"))
    main = tmp_path / "main.kdsl"
    main.write_text("from a import copy\n" + HEAD + "    forward:\n        y = copy(x) @ w.T\n")
    with pytest.raises(DslError) as caught:
        kgen.load(main)
    (found,) = caught.value.diagnostics
    assert found.code == "K0201" and found.span.source.path.endswith("a.kdsl")  # and nothing of the other kernel


def test_ops_are_not_imported(tmp_path):
    (tmp_path / "mlp.kdsl").write_text(MLP)
    (tmp_path / "main.kdsl").write_text("from mlp import mlp\n")
    with pytest.raises(DslError, match="that is an op, and only functions and kernels can be imported"):
        load(tmp_path / "main.kdsl")


def test_a_matrix_product_in_a_kernel_is_told_where_it_belongs():
    with pytest.raises(DslError, match="in an op") as caught:
        parse_text(COPY.replace("= x[m, n]", "= x[m, n] @ 2"))
    assert caught.value.diagnostics[0].code == "K0101"


def test_the_tree_prints_and_reads_back():
    for text in (MLP, ATTEND):
        printed = format_module(parse_text(text))
        again = parse_text(printed)
        assert format_module(again) == printed
        assert allocated(planned(printed, {"T": "f32", "W": "f32", "U": "f32"}, wanted=("x",)).backward)


def test_formatting():
    rough = COPY + (
        "op f(x:T[B,H],w:T[V,H],eps:f32=1.0)->(y:T[B,V]) :\n"
        "  require V>=1\n"
        "  forward :\n"
        "    g : f32[ V,H ]  # a sum\n"
        "    for c in chunks( B ):\n"
        "      g+=x[c] . T@x[ c ]\n"
        "      y[c]=copy( x = x[c], eps = -1 )@w.T+b\n"
        "  backward( d_y ):\n"
        "    copy(x=x)\n"
    )
    tidy = COPY + (
        "op f(x: T[B, H], w: T[V, H], eps: f32 = 1.0) -> (y: T[B, V]):\n"
        "    require V >= 1\n"
        "    forward:\n"
        "        g: f32[V, H]  # a sum\n"
        "        for c in chunks(B):\n"
        "            g += x[c].T @ x[c]\n"
        "            y[c] = copy(x=x[c], eps=-1) @ w.T + b\n"
        "    backward(d_y):\n"
        "        copy(x=x)\n"
    )
    assert format_source(rough) == tidy
    assert format_source(tidy) == tidy
    long = tidy.replace("copy(x=x)", "a, b = copy(" + ", ".join(f"argument_{i}=value_{i}" for i in range(9)) + ")")
    long += "        edit_(" + ", ".join(f"argument_{i}=value_{i}" for i in range(9)) + ")\n"
    once = format_source(long)
    assert format_source(once) == once
    assert max(map(len, once.splitlines())) <= 100
    assert "            argument_3=value_3,\n" in once


# ---- plans -------------------------------------------------------------------------------------------------------


def test_nothing_is_planned_that_no_one_asks_for():
    types = {"T": "f32"}
    assert planned(MLP, types).backward == ()
    only_x = planned(MLP, types, wanted=("x",))
    assert set(allocated(only_x.backward)) == {"d_x", "z", "d_a"}
    assert "silu_" not in {s.kernel for s in steps(only_x.backward) if isinstance(s, plan.Launch)}
    assert only_x.saved == () and only_x.saved_inputs == ("x", "up", "down")
    assert len([s for s in steps(only_x.backward) if isinstance(s, plan.Matmul)]) == 3
    assert set(allocated(planned(MLP, types, wanted=("down",)).backward)) == {"d_down", "a_2"}


def test_a_conversion_to_the_same_dtype_is_none():
    same = planned(ATTEND, {"T": "f32", "W": "f32", "U": "f32"}, present=("bias",), wanted=("x", "w", "bias"))
    assert not [s for s in steps(same.forward) if isinstance(s, plan.Convert)]
    assert {"w", "x"} <= set(same.saved_inputs) and same.saved == ("p",)
    mixed = planned(ATTEND, {"T": "bf16", "W": "f32", "U": "f16"}, present=("bias",), wanted=("x", "w", "bias"))
    assert len([s for s in steps(mixed.forward) if isinstance(s, plan.Convert)]) == 2
    assert mixed.saved_inputs == ("x", "w")


def test_a_conversion_is_a_copy_where_one_of_the_two_is_changed():
    body = "        z = copy(x)\n        a = T(z)\n        edit_({}, s)\n        y = a @ w.T\n"
    for changed in ("z", "a"):
        p = planned(COPY + EDIT + HEAD + "    forward:\n" + body.format(changed), {"T": "f32"})
        (convert,) = [s for s in p.forward if isinstance(s, plan.Convert)]
        assert (convert.out.buffer, convert.source.buffer) == ("a", "z")
    unchanged = planned(
        COPY + EDIT + HEAD + "    forward:\n" + body.replace("        edit_({}, s)\n", ""), {"T": "f32"}
    )
    assert not [s for s in unchanged.forward if isinstance(s, plan.Convert)]


def test_memory_is_given_back_after_its_last_use():
    p = planned(ATTEND, {"T": "bf16", "W": "f32", "U": "f32"}, wanted=("x", "w"))
    text = plan_text(p).splitlines()
    at = {line.strip(): i for i, line in enumerate(text)}
    assert at["alloc wide: bf16[V, H]"] < at["z = x @ wide.T"] < at["free wide"] < at["p = rows(z=z)"] < at["free z"]
    assert "free p" in at and at["free p"] > at["backward(d_p):"]
    outputs, gradients = {b for _, b in p.outputs}, {b for _, b in p.gradients}
    for body, there, kept in ((p.forward, set(), outputs), (p.backward, set(p.saved), gradients)):
        freed = [s.buffer for s in body if isinstance(s, plan.Free)]
        assert sorted(freed) == sorted((set(allocated(body)) | there) - kept)


def test_sums_in_their_own_dtype_and_wider():
    types = {"T": "bf16"}
    own = planned(MLP, types, wanted=("up", "down"))
    assert set(own.sums) == {"d_up", "d_down"}
    sums = [s for s in steps(own.backward) if isinstance(s, plan.Matmul) and s.accumulate]
    # The first iteration stores; memory is zeroed only where there is no iteration.
    assert len(sums) == 2 and all(s.first for s in sums)
    (loop,) = [s for s in own.backward if isinstance(s, plan.Loop)]
    assert {s.out.buffer for s in loop.empty if isinstance(s, plan.Zero)} == {"d_up", "d_down"}
    wide = planned(MLP, types, wanted=("up", "down"), accumulate="f32")
    assert wide.sums == () and {"d_up_sum", "d_down_sum"} <= set(allocated(wide.backward))
    assert [s.out.buffer for s in wide.backward if isinstance(s, plan.Convert)] == ["d_down", "d_up"]
    lines = [line.strip() for line in plan_text(wide).splitlines()]
    assert lines.index("free d_a") < lines.index("alloc d_down: bf16[H, F]") < lines.index("free d_down_sum")
    assert (
        planned(MLP, {"T": "f32"}, wanted=("up",), accumulate="f32").buffers.keys()
        == planned(MLP, {"T": "f32"}, wanted=("up",)).buffers.keys()
    )


def test_several_sums_into_one_tensor_start_from_zero():
    text = COPY + (
        "op f(x: T[B, H], w: T[B, H]) -> (y: f32[H, H]):\n    forward:\n        for c in chunks(B):\n"
        "            y += x[c].T @ x[c]\n            y += w[c].T @ w[c]\n"
    )
    p = planned(text, {"T": "bf16"})
    assert [type(s).__name__ for s in p.forward] == ["Alloc", "Zero", "Loop"]
    assert all(s.accumulate and s.first is None for s in steps(p.forward) if isinstance(s, plan.Matmul))


def test_what_was_saved_is_copied_before_it_is_changed():
    text = EDIT + (
        "op f(x: T[B, H], s: T[H]) -> (y: T[B, B]):\n    forward:\n        g = x @ x.T @ x\n        y = x @ x.T\n"
        "    backward(d_y):\n        edit_(g, s)\n        d_x = g\n"
    ).replace("x @ x.T @ x", "(x @ x.T) @ x")
    p = planned(text, {"T": "f32"}, wanted=("x",))
    assert p.backward[0] == plan.Own("g", False) and p.gradients == (("x", "g"),)
    assert not planned(text, {"T": "f32"}).saved


def subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """All of them."""
    return [s for n in range(len(names) + 1) for s in itertools.combinations(names, n)]


def test_every_plan_of_every_op_keeps_its_buffers_in_order():
    linear = load(OPS / "fused_linear_cross_entropy.kdsl").module
    count = 0
    for module in (parse_text(MLP), parse_text(ATTEND), linear):
        for op in module.ops:
            params = {p.name: p.type for p in op.params}
            tensors = {n: t for n, t in params.items() if isinstance(t, ast.TensorType)}
            optional = tuple(n for n, t in tensors.items() if t.optional)
            flags = tuple(n for n, t in params.items() if isinstance(t, ast.ScalarType) and t.const)
            for present, on, wanted in itertools.product(
                subsets(optional), subsets(tuple(f for f in flags if f in ("narrow", "averaged"))), subsets(GRADIENTS)
            ):
                there = {n for n in tensors if n not in optional or n in present}
                if not set(wanted) <= there:
                    continue
                consts = {f: f in on for f in flags}
                spec = HostSpecialization(consts, frozenset(present), frozenset(wanted))
                program = elaborate_op(source_of(module), op.name, spec)
                for types, held in itertools.product(("f32", "bf16"), ("param", "f32", "f64")):
                    dtypes = {t.dtype: DTYPES[types if t.dtype != "W" else "f32"] for t in tensors.values()}
                    p = lower(program, dtypes, frozenset(wanted), held)
                    verify(p, there)
                    assert {n for n, _ in p.gradients} == set(wanted)
                    count += 1
    assert count > 1000


DIMS = {"B": 8192, "H": 4096, "V": 128256, "F": 128256}
MIB = 2**20


@pytest.mark.parametrize(
    ("mb", "accumulate", "chunk", "held"),
    [(512, "auto", 2048, "param"), (284, "auto", 1024, "param"), (64, "param", 256, "param"), (64, "f32", 256, "f32")],
)
def test_chunks_follow_the_budget(mb, accumulate, chunk, held):
    text = (
        "op f(x: T[*B, H], w: T[V, H]) -> (y: T[V, H]):\n    forward:\n        for c in chunks(B):\n"
        "            z = x[c] @ w.T\n            y += z.T @ x[c]\n"
    )
    p = planned(text, {"T": "bf16"})
    found = sizing.sizes(p, DIMS, mb * MIB, accumulate)
    assert found == sizing.Sizes({"c": chunk}, held)
    (loop,) = sizing.loops(p)
    assert sizing.chunk_bytes(p, loop, DIMS, 3) == 3 * 2 * DIMS["V"]
    assert chunk * 2 * DIMS["V"] <= mb * MIB


def test_auto_takes_wider_chunks_or_f32_whichever_is_less_memory():
    text = (
        "op f(x: T[*B, H], w: T[V, H]) -> (y: T[V, H]):\n    forward:\n        for c in chunks(B):\n"
        "            z = x[c] @ w.T\n            y += z.T @ x[c]\n"
    )
    p = planned(text, {"T": "bf16"})
    assert sizing.sizes(p, DIMS, 64 * MIB, "auto") == sizing.Sizes({"c": 1024}, "param")
    many = {**DIMS, "B": 64 * DIMS["B"]}
    found = sizing.sizes(p, many, 512 * MIB, "auto")
    assert found.accumulate == "f32" and found.chunks["c"] * 2 * DIMS["V"] <= 512 * MIB
    # Chunks that are fixed are kept, and f32 sums are what is left.
    assert sizing.sizes(p, DIMS, 64 * MIB, "auto", 8).accumulate == "f32"
    assert sizing.sizes(p, DIMS, 64 * MIB, "auto", 1024).accumulate == "param"
    f32 = planned(text, {"T": "f32"})
    assert sizing.sizes(f32, DIMS, 1 * MIB, "auto").accumulate == "param"


@pytest.mark.parametrize(
    ("extent", "limit"), [(0, 5), (1, 1), (8192, 2093), (1000, 999), (10000, 2097), (7, 100), (641, 128), (33, 32)]
)
def test_chunks_are_even(extent, limit):
    rows = sizing.even(extent, limit)
    assert 1 <= rows <= max(1, limit)
    assert -(-extent // rows) == -(-extent // limit)
    assert rows >= extent or 2 * ((extent - 1) % rows + 1) >= rows  # the last is no sliver
    assert extent == 0 or rows - 128 < -(-extent // -(-extent // limit)) <= rows


def test_chunks_are_multiples_of_what_a_product_takes():
    for extent, limit, rows in (
        (641, 128, 112),  # 128 would leave one row
        (8192, 2093, 2048),
        (33000, 2047, 1984),
        (1000, 333, 256),
        (6979, 999, 997),  # nothing else fits in as many chunks
        (10, 4, 4),
    ):
        assert sizing.even(extent, limit) == rows, (extent, limit)


def test_checking_leaves_nothing_out():
    assert [o.name for o in checked(MLP).ops] == ["mlp"]
