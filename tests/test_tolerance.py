"""The derived bounds: what keeps the numerics contract lies inside, what is wrong lies well outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kgen.codegen.interpret import MAX_ELEMENTS, Interpreter, interpret
from kgen.codegen.tolerance import Comparison, blocked_depth, compare, error_bound, sequential_depth
from kgen.codegen.ulps import ULPS
from kgen.dsl import ir
from kgen.dsl.builtins import SCALAR_OPS
from kgen.dsl.check import Specialization, elaborate
from kgen.dsl.dtypes import BF16, F16, F32, F64, DType
from kgen.dsl.parser import parse_text

Tensors = Mapping[str, torch.Tensor]


def build(text: str, **dtypes: DType) -> ir.Kernel:
    """The tile IR of the only kernel of `text`, its dtype variable T f32 unless given."""
    module = parse_text(text)
    return elaborate(module, module.kernels[0].name, Specialization(dtypes={"T": F32} | dtypes))


def row_kernel(*body: str, outputs: str = "y: T[M, N]") -> str:
    """A kernel over rows of `x: T[M, N]`, held whole, with a weight `w: T[N]`."""
    lines = "".join(f"    {line}\n" for line in ("parallel m in M", "tile n in N", *body))
    return f"kernel f(x: T[M, N], w: T[N], eps: f32 = 1e-6) -> ({outputs}):\n{lines}"


KERNELS = {
    "rms": row_kernel("r = rsqrt(mean(x[m, n] * x[m, n], n) + eps)", "y[m, n] = x[m, n] * r * w[n]"),
    "layer": row_kernel("c = x[m, n] - mean(x[m, n], n)", "y[m, n] = c * rsqrt(mean(c * c, n) + eps) * w[n] + w[n]"),
    "softmax": row_kernel("y[m, n] = softmax(x[m, n] * w[n], n)"),
    "logsumexp": row_kernel("y[m] = logsumexp(x[m, n] - w[n], n)", outputs="y: T[M]"),
    "silu": row_kernel("y[m, n] = x[m, n] * sigmoid(x[m, n]) * w[n]"),
    "gelu": row_kernel("y[m, n] = 0.5 * x[m, n] * (1.0 + erf(x[m, n] * 0.7071067811865476)) + tanh(w[n])"),
    "middle": row_kernel("y[m, n] = w[n] * T(x[m, n] * 1.7)"),
    "functions": row_kernel("y[m, n] = sin(x[m, n]) + cos(w[n]) * log1p(abs(x[m, n])) + expm1(w[n]) / exp2(x[m, n])"),
    "powers": row_kernel("y[m, n] = abs(x[m, n]) ** w[n] + x[m, n] ** 3 - sqrt(abs(w[n])) + log(abs(x[m, n]) + eps)"),
    "steps": row_kernel("y[m, n] = floor(x[m, n] * 3.0) + round(x[m, n] / 0.3) + sign(x[m, n] - w[n]) + trunc(w[n])"),
    "branch": row_kernel("y[m, n] = where(x[m, n] * w[n] > mean(x[m, n], n), x[m, n], -w[n])"),
    "extreme": row_kernel("y[m] = max(x[m, n] * w[n], n) - min(x[m, n] + w[n], n)", outputs="y: T[M]"),
    "product": row_kernel("y[m] = prod(x[m, n] * 0.7, n)", outputs="y: T[M]"),
    "argmax": row_kernel("y[m] = argmax(x[m, n] * w[n], n)", outputs="y: i64[M]"),
    "columns": row_kernel("y[n] += x[m, n] * w[n]", outputs="y: f32[N]"),
    "count": row_kernel("y[n] += where(x[m, n] > w[n], 1, 0)", outputs="y: i32[N]"),
    "integers": row_kernel("y[m, n] = i32(x[m, n] * w[n])", outputs="y: i32[M, N]"),
}


class Other(Interpreter):
    """Another executor that keeps the contract, in ways the reference does not take: exponentials by base 2, products
    contracted with sums, sums in sequence over blocks of sqrt(n)."""

    LOG2E = torch.tensor(1.4426950408889634, dtype=torch.float32)

    def op(self, e: ir.Op, args: list[torch.Tensor]) -> torch.Tensor:
        if e.dtype == F32:
            if e.fn == "exp":
                return torch.exp2(args[0] * self.LOG2E)
            if e.fn == "sigmoid":
                return torch.reciprocal(1 + torch.exp2(-args[0] * self.LOG2E))
            if e.fn == "rsqrt":
                return 1 / torch.sqrt(args[0])
            if e.fn in ("add", "sub") and isinstance(e.args[0], ir.Op) and e.args[0].fn == "mul":
                a, b = (self.eval(p).double() for p in e.args[0].args)
                c = args[1].double()
                return (a * b + (c if e.fn == "add" else -c)).float()
        return super().op(e, args)

    def reduce(self, e: ir.Reduce, v: torch.Tensor, over: list[int]) -> torch.Tensor:
        if e.kind != "sum" or e.dtype != F32:
            return super().reduce(e, v, over)
        (d,) = over
        size = max(1, math.isqrt(v.shape[d]))
        blocks = [self._in_sequence(b, d) for b in v.split(size, d)]
        return self._in_sequence(torch.cat(blocks, d), d)

    @staticmethod
    def _in_sequence(v: torch.Tensor, d: int) -> torch.Tensor:
        total = torch.zeros_like(v.select(d, 0)) if v.shape[d] else v.sum(d)
        for i in range(v.shape[d]):
            total = total + v.select(d, i)
        return total.unsqueeze(d)


def other(kernel: ir.Kernel, tensors: Tensors) -> dict[str, torch.Tensor]:
    run = Other(kernel, tensors, {}, exact=False, max_elements=MAX_ELEMENTS)
    run.run()
    return run.results()


def judge(kernel: ir.Kernel, tensors: Tensors, actual: Mapping[str, torch.Tensor]) -> Comparison:
    """The comparison of output `y`."""
    expected = interpret(kernel, tensors, {}, precision="f64")["y"]
    return compare(actual["y"], expected, error_bound(kernel, tensors, {})["y"])


def inputs(m: int, n: int, seed: int, dtype: torch.dtype, center: float, spread: float) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, generator=g, dtype=torch.float64) * spread + center
    return {"x": x.to(dtype), "w": torch.randn(n, generator=g, dtype=torch.float64).to(dtype)}


TORCH = {F16: torch.float16, BF16: torch.bfloat16, F32: torch.float32, F64: torch.float64}


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(0, 4),
    n=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(list(TORCH)),
    center=st.sampled_from([0.0, 1.0, -30.0, 1e4]),
    spread=st.sampled_from([1.0, 1e-3, 1e-20, 50.0, 1e4, 1e18]),
)
@example(m=3, n=200, seed=1, dtype=F32, center=1e4, spread=1e-3)
@example(m=3, n=128, seed=2, dtype=F32, center=1e4, spread=1e4)
@example(m=2, n=64, seed=3, dtype=F32, center=0.0, spread=1e25)
def test_what_keeps_the_contract_lies_inside(
    name: str, m: int, n: int, seed: int, dtype: DType, center: float, spread: float
) -> None:
    kernel = build(KERNELS[name], T=dtype)
    tensors = inputs(m, n, seed, TORCH[dtype], center, spread)
    for run in (lambda: interpret(kernel, tensors, {}, precision="f32"), lambda: other(kernel, tensors)):
        result = judge(kernel, tensors, run())
        assert result.ok, str(result)


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-40, 1e-45, 88.0, -104.0]),
        min_size=1,
        max_size=5,
    )
)
@example([0.0, -2.5, 3e38])  # a partial product overflows, and times 0 is NaN
@example([math.inf, 1e-40, 1e-45])
@example([-math.inf, 3e38, 3e38])  # a partial sum overflows, and meets the opposite infinity
def test_special_values_lie_inside(name: str, values: list[float]) -> None:
    kernel = build(KERNELS[name])
    x = torch.tensor([values, values[::-1]])
    tensors = {"x": x, "w": torch.linspace(-1, 2, x.shape[1])}
    for actual in (interpret(kernel, tensors, {}, precision="f32"), other(kernel, tensors)):
        result = judge(kernel, tensors, actual)
        assert result.ok, str(result)


def mutant(name: str, old: str, new: str) -> ir.Kernel:
    """The kernel with a mistake put into its source."""
    assert old in KERNELS[name]
    return build(KERNELS[name].replace(old, new))


MEAN = "mean(x[m, n] * x[m, n], n)"
LOGSUMEXP_BUT_FIRST = "log(sum(where(n > 0, exp(x[m, n] - w[n]), 0.0), n))"
MISTAKES = {
    "no eps": ("rms", "+ eps", "+ 0.0", 0.0, 1e-3),
    "divisor n - 1": ("rms", MEAN, "sum(x[m, n] * x[m, n], n) / (N - 1)", 0.0, 1.0),
    "last element left out": ("rms", MEAN, "sum(where(n < N - 1, x[m, n] * x[m, n], 0.0), n) / N", 0.0, 1.0),
    "mean not subtracted": ("layer", "mean(c * c, n)", "mean(x[m, n] * x[m, n], n)", 1.0, 1.0),
    "variance divided by n - 1": ("layer", "mean(c * c, n)", "sum(c * c, n) / (N - 1)", 1.0, 1.0),
    "one term left out": ("logsumexp", "logsumexp(x[m, n] - w[n], n)", LOGSUMEXP_BUT_FIRST, 0.0, 1.0),
    "weight left out": ("silu", " * w[n]", "", 0.0, 1.0),
    "tanh for erf": ("gelu", "erf(", "tanh(", 0.0, 1.0),
    "first row left out": ("columns", "x[m, n] * w[n]", "where(m > 0, x[m, n] * w[n], 0.0)", 0.0, 1.0),
    "comparison turned round": ("count", "] > w", "] < w", 0.0, 1.0),
    "rounded to nearest": ("integers", "i32(x[m, n] * w[n])", "i32(round(x[m, n] * w[n]))", 0.0, 3.0),
    "argmin": ("argmax", "argmax(", "argmin(", 0.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("n", [16, 100, 256])
def test_mistakes_lie_outside(mistake: str, n: int) -> None:
    name, old, new, center, spread = MISTAKES[mistake]
    tensors = inputs(4, n, 11, torch.float32, center, spread)
    wrong = interpret(mutant(name, old, new), tensors, {}, precision="f32")
    result = judge(build(KERNELS[name]), tensors, wrong)
    assert result.ratio >= 5, str(result)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_double_rounding_in_a_16_bit_type_lies_outside(dtype: DType) -> None:
    """A result one unit in the last place off is caught: the store's half unit is nearly all of the bound."""
    kernel = build(KERNELS["silu"], T=dtype)
    tensors = inputs(4, 64, 5, TORCH[dtype], 0.0, 1.0)
    y = interpret(kernel, tensors, {}, precision="f32")["y"]
    off = torch.nextafter(y, torch.full_like(y, math.inf))
    expected, bound = interpret(kernel, tensors, {}, precision="f64")["y"], error_bound(kernel, tensors, {})["y"]
    assert compare(y, expected, bound).ok
    assert ((off.double() - expected).abs() > bound).float().mean() > 0.7


def nearest(x: Fraction) -> Fraction:
    """`x` rounded once to f32, to nearest even; float64 cannot hold the `x` of interest here."""
    near = torch.tensor(float(x), dtype=torch.float64).float()
    ends = (near, *(torch.nextafter(near, torch.tensor(to)) for to in (-math.inf, math.inf)))
    return min((abs(Fraction(e.item()) - x), int(e.view(torch.int32)) & 1, Fraction(e.item())) for e in ends)[2]


def test_every_rounding_of_a_product_is_one_of_the_whole() -> None:
    """Factors near 1, each such that the product so far, in f32, is rounded up by as much as there is: of a tree of
    products, too, all of them count, not those that one factor passes through."""
    candidates = 1.0 + torch.arange(-32, 32, dtype=torch.float64) * 2.0**-23
    made = float(torch.tensor(1.3))
    factors = [made]
    for _ in range(1000):
        exact = made * candidates
        factors.append(float(candidates[((exact.float().double() - exact) / exact).argmax()]))
        made = float(torch.tensor(made * factors[-1]).float())
    k = build("kernel f(x: T[M, N]) -> (y: T[M]):\n    parallel m in M\n    tile n in N\n    y[m] = prod(x[m, n], n)\n")
    x = torch.tensor([factors])
    want, bound = interpret(k, {"x": x}, {}, precision="f64")["y"], error_bound(k, {"x": x}, {})["y"]
    error = abs(made - float(want))
    assert error > 300 * 2.0**-24 * made  # far more than a tree is deep
    assert error <= float(bound) < 4 * error


# In one the even neighbour is above the middle, in the other below.
@pytest.mark.parametrize(("a", "b"), [(9722880, 8916992), (9722880, 8916992 + 8192)])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("text", "product", "rest"),
    [("a[n] * b[n] + c[n]", 1, 1), ("c[n] + a[n] * b[n]", 1, 1), ("a[n] * b[n] - c[n]", 1, -1),
     ("c[n] - a[n] * b[n]", -1, 1)],
)  # fmt: skip
def test_a_contracted_sum_is_rounded_once(text: str, product: int, rest: int, sign: int, a: int, b: int) -> None:
    """A product in the middle of two f32, and a sum too small for float64 to see, which sends it to the other side."""
    assert a * b % 2**23 == 2**22 and 2**46 < a * b < 2**47
    kernel = build(
        "kernel f(a: f32[N], b: f32[N], c: f32[N], d: f32[N]) -> (y: f32[N]):\n    parallel n in N\n"
        f"    y[n] = {text} + d[n]\n"
    )
    c, d = Fraction(sign, 2**10), Fraction(160000)
    assert float(a * b + c) == a * b
    tensors = {k: torch.tensor([float(v)]) for k, v in {"a": a, "b": b, "c": c, "d": d}.items()}
    expected = interpret(kernel, tensors, {}, precision="f64")["y"].item()
    fused, unfused = (nearest(nearest(p * product + c * rest) + d) for p in (Fraction(a * b), nearest(Fraction(a * b))))
    worst = max(abs(float(r) - expected) for r in (fused, unfused))
    bound = error_bound(kernel, tensors, {})["y"].item()
    assert worst <= bound
    # Both neighbours, and no more: an end may lie off f32 by what was added last, and the reference by 2**-44.
    assert bound <= 2**22 + float(d) + 2**-44 * abs(expected)


@pytest.mark.parametrize("name", ["rms", "softmax", "silu", "gelu", "logsumexp", "layer"])
def test_bounds_are_not_far_above_what_happens(name: str) -> None:
    """On ordinary data the worst error of a plain f32 run reaches a fair part of the bound."""
    kernel = build(KERNELS[name])
    tensors = inputs(64, 128, 7, torch.float32, 0.0, 1.0)
    result = judge(kernel, tensors, other(kernel, tensors))
    assert result.free == 0
    assert result.ratio > 0.01, str(result)


def test_ties_are_free_and_the_rest_is_not() -> None:
    kernel = build("""kernel f(x: T[M], w: T[M]) -> (y: i32[M], z: i32[M]):
    parallel m in M
    y[m] = i32(floor(x[m] * w[m]))
    z[m] = where(x[m] > w[m], 1, 0)
""")
    # The product of the third is 1 - 2**-46, which f32 rounds to 1.
    x, w = torch.tensor([1.0, 0.1, 1 + 2**-23, 2.0]), torch.tensor([1.0, 0.1, 1 - 2**-23, 2.0])
    bound = error_bound(kernel, {"x": x, "w": w}, {})
    assert bound["y"].tolist() == [0, 0, math.inf, 0]
    assert bound["z"].tolist() == [0, 0, 0, 0]  # loads are exact, and so is comparing them


def test_certain_non_finite_results_are_compared_exactly() -> None:
    kernel = build("kernel f(x: T[M]) -> (y: T[M]):\n    parallel m in M\n    y[m] = 1.0 / x[m] + log(x[m])\n")
    tensors = {"x": torch.tensor([-1.0, math.nan, math.inf, 2.0])}
    bound = error_bound(kernel, tensors, {})["y"]
    expected = interpret(kernel, tensors, {}, precision="f64")["y"]
    assert bound[:3].tolist() == [0, 0, 0]
    right = torch.tensor([math.nan, math.nan, math.inf, 0.5 + math.log(2)])
    assert compare(right, expected, bound).ok
    for i, value in ((0, 1.0), (1, 0.0), (2, -math.inf), (2, math.nan), (3, math.nan), (3, math.inf)):
        wrong = right.clone()
        wrong[i] = value
        result = compare(wrong, expected, bound)
        assert not result.ok
        assert result.index == (i,)
        assert result.ratio == math.inf


def test_unwritten_elements_are_free() -> None:
    kernel = build("kernel f(x: T[N]) -> (y: T[N], z: T[N]):\n    parallel n in N\n    y[n] = x[n]\n    z[n] = x[n]\n")
    bound = error_bound(replace(kernel, body=kernel.body[:1]), {"x": torch.ones(2)}, {})
    assert bound["y"].tolist() == [0, 0]
    assert bound["z"].tolist() == [math.inf, math.inf]


def test_parts_of_the_index_space_give_the_same_bounds() -> None:
    for name in ("layer", "columns", "count"):
        kernel, tensors = build(KERNELS[name]), inputs(7, 12, 3, torch.float32, 1.0, 1.0)
        whole = error_bound(kernel, tensors, {})["y"]
        parts = error_bound(kernel, tensors, {}, max_elements=20)["y"]
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)


def test_leading_dimensions_and_inout() -> None:
    kernel = build("""kernel f(x: inout T[*M, N], s: f32) -> (t: f32[*M]):
    parallel m in M
    tile n in N
    t[m] = sum(x[m, n], n)
    x[m, n] = x[m, n] * s
""")
    bound = error_bound(kernel, {"x": torch.rand(2, 3, 5)}, {"s": 0.1})
    assert bound["x"].shape == (2, 3, 5)
    assert bound["t"].shape == (2, 3)
    assert (bound["x"] <= 2.0**-25).all()


@pytest.mark.parametrize("depth", [blocked_depth, sequential_depth])
def test_depths(depth: Callable[[int], int]) -> None:
    assert [depth(n) for n in (0, 1, 2)] == [0, 0, 1]
    assert all(depth(n) <= n - 1 for n in range(1, 500))
    assert all(depth(n) <= depth(n + 1) for n in range(500))


def test_every_float_function_has_a_budget_with_a_reason() -> None:
    floats = {name for name, op in SCALAR_OPS.items() if op.result == "float"} | {"add", "sub", "mul"}
    assert floats <= set(ULPS)
    assert all(b is None or b.reason for b in ULPS.values())


def test_messages() -> None:
    expected, bound = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.1, 0.1], dtype=torch.float64)
    wrong = compare(torch.tensor([1.0, 3.0]), expected, bound)
    assert str(wrong) == "at [1]: got 3, expected 2; the error 1 is 10 times the bound 0.1"
    assert str(compare(torch.tensor([1.0]), expected, bound)) == "got shape (1,), expected (2,)"
    assert "within the bound" in str(compare(torch.tensor([1.0, 2.05]), expected, bound))
    assert compare(torch.empty(0), torch.empty(0).double(), torch.empty(0).double()).ok
