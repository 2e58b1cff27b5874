"""Normal form: what gets a name, in which order, and that the meaning stays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_kit import KernelKit, at_line, show, tensor, variant

from kgen.codegen.interpret import interpret
from kgen.codegen.normalize import normalize, required_dims
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import BF16, F32, I64


def rms() -> ir.Kernel:
    k = KernelKit([tensor("x", "*M, N"), tensor("w", "N"), tensor("y", "*M, N", "out")], "m in M", "n in N", ["eps"])
    square = k.op("mul", k.load("x", "m", "n"), k.load("x", "m", "n"))
    r = k.let("r", k.op("rsqrt", k.op("add", k.mean(square, "n", "N"), k.scalar("eps"))))
    k.store("y", "m, n", k.op("mul", k.op("mul", k.load("x", "m", "n"), r), k.load("w", "n")))
    return k.kernel()


def body(kernel: ir.Kernel, **dims: int) -> list[str]:
    return show(normalize(kernel, variant(kernel, dims)).body)


def test_loads_first_then_reductions_where_they_are_used() -> None:
    assert body(rms(), N=128) == [
        "x_mn = x[m, n]",
        "w_n = w[n]",
        "r_sum = sum(mul(x_mn, x_mn), n)",
        "r = rsqrt(add(div(r_sum, 128.0), eps))",
        "y[m, n] = mul(mul(x_mn, r), w_n)",
    ]


def test_dimensions_are_bound_and_dropped() -> None:
    normal = normalize(rms(), variant(rms(), {"N": 128}))
    assert normal.dims == ("M",)
    assert normal.axis("n").extent == Poly.const(128)
    assert [str(p) for p in normal.tensor("x").shape] == ["M", "128"]
    assert required_dims(rms()) == ("N",)


def test_a_starred_dimension_in_parts_keeps_its_name() -> None:
    k = KernelKit([tensor("x", "*M"), tensor("y", "", "out", F32)], tile="m in M")
    k.store("y", "", k.reduce("sum", k.load("x", "m"), "m"))
    kernel = k.kernel()
    normal = normalize(kernel, variant(kernel, {"M": 12}, star_ranks={"M": 2}))
    assert normal.axis("m").extent == Poly.const(12)
    assert normal.tensor("x").shape == (Poly.sym("M"),) and normal.dims == ("M",)


def test_users_names_are_kept_and_copies_dropped() -> None:
    k = KernelKit([tensor("x", "*M, N"), tensor("y", "*M, N", "out")], "m in M, n in N")
    a = k.let("a", k.load("x", "m", "n"))
    b = k.let("b", a)
    c = k.let("c", k.op("mul", b, 2.0))
    k.let("unused", k.op("exp", c))
    two = k.let("two", ir.Const(2.0, F32, at_line(1)))
    k.store("y", "m, n", k.op("add", k.op("mul", a, 2.0), k.op("mul", c, two)))
    assert body(k.kernel()) == [
        "a = x[m, n]",
        "c = mul(a, 2.0)",
        "two = 2.0",
        "y[m, n] = add(c, mul(c, two))",
    ]


def test_shared_subexpressions_get_a_name_from_the_statement() -> None:
    k = KernelKit([tensor("x", "*M, N"), tensor("y", "*M, N", "out")], "m in M", "n in N")
    e = k.op("exp", k.load("x", "m", "n"))
    k.store("y", "m, n", k.op("div", e, k.reduce("sum", k.op("exp", k.load("x", "m", "n")), "n")))
    assert body(k.kernel(), N=4) == [
        "x_mn = x[m, n]",
        "y_exp = exp(x_mn)",
        "y_sum = sum(y_exp, n)",
        "y[m, n] = div(y_exp, y_sum)",
    ]


def test_equal_literals_of_different_types_and_signs_stay_apart() -> None:
    k = KernelKit([tensor("y", "N", "out", F32)], "n in N")
    zeros = [ir.Const(v, F32, at_line(1)) for v in (0.0, -0.0, math.nan)]
    k.store("y", "n", k.op("add", k.op("exp", zeros[0]), k.op("add", k.op("exp", zeros[1]), k.op("exp", zeros[2]))))
    assert body(k.kernel()) == ["y[n] = add(exp(0.0), add(exp(-0.0), exp(nan)))"]


def test_gathers_follow_their_subscripts_but_do_not_wait() -> None:
    k = KernelKit(
        [tensor("x", "*M, V"), tensor("t", "*M", dtype=I64), tensor("y", "*M", "out", F32)], "m in M", "v in V"
    )
    peak = k.let("peak", k.reduce("max", k.load("x", "m", "v"), "v"))
    k.store("y", "m", k.op("sub", peak, k.load("x", "m", k.load("t", "m"))))
    assert body(k.kernel(), V=8) == [
        "x_mv = x[m, v]",
        "t_m = t[m]",
        "x_m_t_m = x[m, t_m]",
        "peak = max(x_mv, v)",
        "y[m] = sub(peak, x_m_t_m)",
    ]


def test_a_gather_at_a_reduced_position_comes_after_the_reduction() -> None:
    k = KernelKit([tensor("x", "*M, V"), tensor("y", "*M", "out", F32)], "m in M", "v in V")
    best = k.reduce("argmax", k.load("x", "m", "v"), "v")
    k.store("y", "m", k.load("x", "m", replace(best, dtype=I64)))
    assert body(k.kernel(), V=8) == [
        "x_mv = x[m, v]",
        "y_argmax = argmax(x_mv, v)",
        "x_m_y_argmax = x[m, y_argmax]",
        "y[m] = x_m_y_argmax",
    ]


def test_loads_of_an_overwritten_tensor_come_before_the_store() -> None:
    k = KernelKit([tensor("x", "*M, N", "inout"), tensor("y", "*M, N", "out")], "m in M, n in N")
    a = k.let("a", k.op("neg", k.load("x", "m", "n")))
    k.store("x", "m, n", k.op("exp", a))
    k.store("y", "m, n", a)
    assert body(k.kernel()) == ["x_mn = x[m, n]", "a = neg(x_mn)", "x[m, n] = exp(a)", "y[m, n] = a"]


@pytest.mark.parametrize(
    ("at", "name"),
    [(("m", "d + D//2"), "x_md"), (("m", 0), "x_m0"), ((3, 0), "x_30"), (("m", "2 * d + 1"), "x_md")],
)
def test_load_names(at: tuple[str | int, ...], name: str) -> None:
    k = KernelKit([tensor("x", "*M, D"), tensor("y", "*M, D", "out")], "m in M", "d in D//2")
    k.store("y", "m, d", k.load("x", *at))
    assert body(k.kernel(), D=64)[0].split(" ")[0] == name


def test_lifted_names_avoid_everything_declared() -> None:
    k = KernelKit(
        [tensor("x", "*x_mn_2, N"), tensor("x_mn", "*x_mn_2, N"), tensor("y", "*x_mn_2, N", "out")],
        "m in x_mn_2, n in N", scalars=["x_mn_3"],
    )  # fmt: skip
    a = k.let("x_mn_mn", k.op("neg", k.load("x_mn", "m", "n")))
    k.store("y", "m, n", k.op("mul", k.op("mul", a, k.load("x", "m", "n")), k.scalar("x_mn_3")))
    assert [s.split(" ")[0] for s in body(k.kernel())[:3]] == ["x_mn_mn_2", "x_mn_4", "x_mn_mn"]


def test_lets_carry_the_span_of_their_statement() -> None:
    spans = {s.name: s.span.line for s in normalize(rms(), variant(rms(), {"N": 8})).body if isinstance(s, ir.Let)}
    assert spans == {"x_mn": 10, "w_n": 11, "r_sum": 10, "r": 10}


def test_an_empty_tile_disappears() -> None:
    k = KernelKit(
        [tensor("x", "*M, N"), tensor("y", "*M, N", "out"), tensor("s", "*M", "out", F32)], "m in M", "n in N"
    )
    x = k.load("x", "m", "n")
    k.store("y", "m, n", x)
    k.store("s", "m", k.op("add", k.reduce("max", x, "n"), k.reduce("sum", x, "n")))
    normal = normalize(k.kernel(), variant(k.kernel(), {"N": 0}))
    assert show(normal.body) == ["s[m] = add(-inf, 0.0)"]
    assert [a.name for a in normal.axes] == ["m"]


def test_long_chains_and_wide_sharing_stay_linear() -> None:
    k = KernelKit([tensor("x", "N"), tensor("y", "N", "out")], "n in N")
    a: ir.Expr = k.load("x", "n")
    for i in range(3000):
        a = k.let(f"a{i}", k.op("add", a, a))
    k.store("y", "n", a)
    assert len(body(k.kernel())) == 3002
    doubled: ir.Expr = k.load("x", "n")
    for _ in range(60):  # a tree of 2**60 leaves, shared
        doubled = k.op("add", doubled, doubled)
    k = KernelKit([tensor("x", "N"), tensor("y", "N", "out")], "n in N")
    k.store("y", "n", doubled)
    assert len(body(k.kernel())) == 61


# ---- any kernel ----------------------------------------------------------------------------------------------------

LOADS = (("x", "m", "n"), ("x", "m", "n + 1"), ("w", "n"), ("s", "m"))


@st.composite
def kernels(draw: st.DrawFn) -> ir.Kernel:
    """A few statements over loads, named values and reductions, with much repetition."""
    k = KernelKit(
        [tensor("x", "*M, N + 1", dtype=F32), tensor("w", "N", dtype=F32), tensor("s", "*M", dtype=F32),
         tensor("y", "*M, N", "out", F32), tensor("z", "*M", "out", F32)], "m in M", "n in N",
    )  # fmt: skip
    named: list[ir.Expr] = []

    def expr(depth: int) -> ir.Expr:
        kind = draw(st.integers(0, 6 if depth else 2))
        if kind == 0 or (kind == 1 and not named):
            return k.load(*draw(st.sampled_from(LOADS)))
        if kind == 1:
            return draw(st.sampled_from(named))
        if kind == 2:
            return ir.Const(draw(st.sampled_from([0.5, 2.0])), F32, at_line(1))
        if kind == 3:
            a = expr(depth - 1)
            return k.reduce(draw(st.sampled_from(["sum", "max"])), a, "n") if "n" in a.axes else a
        if kind == 4:
            return k.cast(BF16, expr(depth - 1))
        return k.op(draw(st.sampled_from(["add", "mul", "maximum"])), expr(depth - 1), expr(depth - 1))

    for i in range(draw(st.integers(0, 3))):
        named.append(k.let(f"v{i}", expr(2)))
    k.store("y", "m, n", k.op("add", expr(3), k.load("w", "n")))
    z = expr(3)
    k.store("z", "m", k.reduce("sum", z, "n") if "n" in z.axes else z)
    return k.kernel()


def bound(kernel: ir.Kernel) -> Variant:
    return variant(kernel, {"N": 5})


@settings(max_examples=150, deadline=None)
@given(kernels())
def test_any_kernel(kernel: ir.Kernel) -> None:
    normal = normalize(kernel, bound(kernel))
    names = [s.name for s in normal.body if isinstance(s, ir.Let)]
    assert len(set(names)) == len(names)
    assert not set(names) & {"x", "w", "s", "y", "z", "m", "n", "M", "N"}
    loads = [s.value for s in normal.body if isinstance(s, ir.Let) and isinstance(s.value, ir.Load)]
    assert len({(e.tensor, e.at) for e in loads}) == len(loads)
    seen: set[str] = set()
    for s in normal.body:
        inner = list(ir.walk(s.value))
        if isinstance(s, ir.Let):
            inner.remove(s.value)
        # A load or reduction is the whole of its own Let; names come before their uses.
        assert not any(isinstance(e, ir.Load | ir.Reduce) for e in inner)
        assert {e.name for e in ir.walk(s.value) if isinstance(e, ir.Ref)} <= seen
        if isinstance(s, ir.Let):
            seen.add(s.name)
    used = {e.name for s in normal.body for e in ir.walk(s.value) if isinstance(e, ir.Ref)}
    assert used == set(names)
    assert normalize(normal, bound(kernel)) == normal

    g = torch.Generator().manual_seed(1)
    data = {"x": torch.randn(3, 6, generator=g), "w": torch.randn(5, generator=g), "s": torch.randn(3, generator=g)}
    before = interpret(kernel, data, {}, precision="f32")
    after = interpret(normal, data, {}, precision="f32")
    # Naming values changes no rounding: bit for bit the same, NaN included.
    for name in ("y", "z"):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, equal_nan=True)
