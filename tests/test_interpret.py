"""The reference interpreter against formulas written directly in torch, and the shapes and errors of a call."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kgen.codegen.execute import ArgumentError
from kgen.codegen.interpret import OPS, interpret
from kgen.codegen.shapes import ShapeError, bind_dims
from kgen.codegen.torch_dtypes import TORCH, rounded
from kgen.dsl import ir
from kgen.dsl.builtins import SCALAR_OPS
from kgen.dsl.check import Specialization, elaborate
from kgen.dsl.dtypes import BF16, DTYPES, F16, F32, DType
from kgen.dsl.parser import parse_text


def build(text: str, present: tuple[str, ...] = (), **dtypes: DType) -> ir.Kernel:
    """The tile IR of the only kernel of `text`, its dtype variables f32 unless given."""
    module = parse_text(text)
    kernel = module.kernels[0]
    variables = dict.fromkeys(("T", "W", "C"), F32) | dtypes
    return elaborate(module, kernel.name, Specialization(dtypes=variables, present=frozenset(present)))


def f64(kernel: ir.Kernel, *args: torch.Tensor, **scalars: float) -> dict[str, torch.Tensor]:
    return interpret(kernel, named(kernel, args), scalars, precision="f64")


def f32(kernel: ir.Kernel, *args: torch.Tensor, **scalars: float) -> dict[str, torch.Tensor]:
    return interpret(kernel, named(kernel, args), scalars, precision="f32")


def named(kernel: ir.Kernel, args: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    names = [t.name for t in kernel.tensors if t.role != "out"]
    return dict(zip(names, args, strict=True))


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within the rounding of float64 over a few hundred operations."""
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected.double(), rtol=1e-12, atol=1e-13, equal_nan=True)


RMS = """kernel rms(x: T[*M, N], w: W[N], eps: f32 = 1e-6) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    r = rsqrt(mean(x[m, n] * x[m, n], n) + eps)
    y[m, n] = x[m, n] * r * w[n]
"""


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 1, 4), (0,), (3, 0)])
@pytest.mark.parametrize("n", [1, 7, 64])
def test_rms_norm(lead: tuple[int, ...], n: int) -> None:
    x, w = rand(*lead, n), rand(n)
    y = f64(build(RMS), x, w)["y"]
    eps = float(torch.tensor(1e-6))
    close(y, x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * w.double())
    assert y.shape == x.shape


def test_layer_norm_two_passes() -> None:
    k = build("""kernel ln(x: T[*M, N], eps: f32 = 1e-5) -> (y: T[*M, N], mu: f32[*M], v: f32[*M]):
    parallel m in M
    tile n in N
    mu[m] = mean(x[m, n], n)
    v[m] = var(x[m, n], n)
    c = x[m, n] - mean(x[m, n], n)
    y[m, n] = c * rsqrt(mean(c * c, n) + eps)
""")
    x = rand(4, 33)
    out = f64(k, x)
    close(out["y"], F.layer_norm(x.double(), (33,), eps=float(torch.tensor(1e-5))))
    close(out["mu"], x.double().mean(-1))
    close(out["v"], x.double().var(-1, correction=0))


def test_softmax_logsumexp() -> None:
    k = build("""kernel sm(x: T[*M, N]) -> (y: T[*M, N], l: f32[*M]):
    parallel m in M
    tile n in N
    y[m, n] = softmax(x[m, n], n)
    l[m] = logsumexp(x[m, n], n)
""")
    x = rand(3, 2, 50) * 100
    out = f64(k, x)
    close(out["y"], x.double().softmax(-1))
    close(out["l"], x.double().logsumexp(-1))
    assert out["l"].shape == (3, 2)


CROSS_ENTROPY = """kernel ce(logits: T[*M, V], target: i64[*M], ignore_index: i64 = -100) -> (loss: f32[*M]):
    parallel m in M
    tile v in V
    t = target[m]
    loss[m] = where(t == ignore_index, 0.0, logsumexp(logits[m, v], v) - logits[m, t])
"""


def test_gather_and_ignored_rows() -> None:
    logits, target = rand(6, 11), torch.tensor([0, 10, -100, 5, 3, 3])
    loss = f64(build(CROSS_ENTROPY), logits, target)["loss"]
    close(loss, F.cross_entropy(logits.double(), target, reduction="none"))


def test_gather_out_of_range_is_nan() -> None:
    loss = f64(build(CROSS_ENTROPY), rand(4, 11), torch.tensor([0, 11, -1, 1 << 60]))["loss"]
    assert loss.isnan().tolist() == [False, True, True, True]
    # A table without rows has no element to read.
    k = build("kernel take(x: T[N], i: i32[M]) -> (y: T[M]):\n    parallel m in M\n    y[m] = x[i[m]]\n")
    assert f64(k, torch.empty(0), torch.zeros(3, dtype=torch.int32))["y"].isnan().all()


def test_integer_gather_out_of_range_is_the_lowest_value() -> None:
    k = build("kernel take(x: i16[N], i: i32[M]) -> (y: i32[M]):\n    parallel m in M\n    y[m] = x[i[m]]\n")
    y = f32(k, torch.tensor([5, 6], dtype=torch.int16), torch.tensor([1, 2, -1], dtype=torch.int32))["y"]
    assert y.tolist() == [6, -(2**15), -(2**15)]


def test_gather_of_two_subscripts() -> None:
    k = build("""kernel pick(x: T[A, B, C], i: i64[M], j: i32[N]) -> (y: T[M, N, C]):
    parallel m in M, n in N, c in C
    y[m, n, c] = x[i[m], j[n], c]
""")
    x, i, j = rand(3, 4, 5), torch.tensor([2, 0]), torch.tensor([3, 1, 1], dtype=torch.int32)
    close(f64(k, x, i, j)["y"], x[i][:, j.long()])


ROPE = """kernel rope(x: T[B, S, H, D], cos: C[S, D], sin: C[S, D]) -> (y: T[B, S, H, D]):
    require D % 2 == 0
    parallel b in B, s in S, h in H
    tile d in D // 2
    lo, hi = x[b, s, h, d], x[b, s, h, d + D // 2]
    y[b, s, h, d] = lo * cos[s, d] - hi * sin[s, d]
    y[b, s, h, d + D // 2] = hi * cos[s, d + D // 2] + lo * sin[s, d + D // 2]
"""


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    lo, hi = x.chunk(2, -1)
    return x * cos[None, :, None] + torch.cat([-hi, lo], -1) * sin[None, :, None]


@pytest.mark.parametrize("max_elements", [1 << 24, 40, 7, 1])
def test_rope_in_parts(max_elements: int) -> None:
    x, cos, sin = rand(2, 5, 3, 8), rand(5, 8), rand(5, 8)[:, ::1]
    k = build(ROPE)
    y = interpret(k, named(k, (x, cos, sin)), {}, precision="f64", max_elements=max_elements)["y"]
    close(y, rope(x.double(), cos.double(), sin.double()))


def test_any_strides() -> None:
    k = build(ROPE)
    x, cos, sin = rand(2, 5, 3, 8), rand(5, 8), rand(5, 8)
    base = torch.zeros(3 + 2 * x.numel() * 2)
    layouts = [
        x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.as_strided(base, x.shape, (480, 48, 16, 2), 3).copy_(x),
    ]
    for y in layouts:
        assert not y.is_contiguous()
        close(f64(k, y, cos.t().contiguous().t(), sin)["y"], rope(x.double(), cos.double(), sin.double()))
    wide = rand(1, 5, 1, 8).expand(2, 5, 3, 8)
    close(f64(k, wide, cos, sin)["y"], rope(wide.double(), cos.double(), sin.double()))


def test_interleaved_and_reversed_subscripts() -> None:
    k = build("""kernel mix(x: T[M, 2 * N]) -> (a: T[M, N], r: T[M, N]):
    parallel m in M
    tile n in N
    a[m, n] = x[m, 2 * n] - x[m, 2 * n + 1]
    r[m, N - 1 - n] = x[m, N - 1 - n] + x[m, n]
""")
    x = rand(3, 10)
    out = f64(k, x)
    close(out["a"], x.double()[:, ::2] - x.double()[:, 1::2])
    close(out["r"], x.double()[:, :5] + x.double()[:, :5].flip(-1))


def test_grouped_index_by_floor_division() -> None:
    k = build("""kernel group(x: T[H, D], k: T[G, D]) -> (y: T[H, D]):
    require H == 3 * G
    parallel h in H
    tile d in D
    y[h, d] = x[h, d] * k[h // 3, d]
""")
    x, g = rand(6, 4), rand(2, 4)
    close(f64(k, x, g)["y"], x.double() * g.double().repeat_interleave(3, 0))


def test_integer_division_floors() -> None:
    k = build("""kernel divmod(a: i32[M], b: i32[N]) -> (q: i32[M, N], r: i32[M, N]):
    parallel m in M, n in N
    q[m, n] = a[m] // b[n]
    r[m, n] = a[m] % b[n]
""")
    a = torch.tensor([-7, -6, -1, 0, 1, 7, 2**31 - 1, -(2**31)], dtype=torch.int32)
    b = torch.tensor([-3, -2, 2, 3, 5], dtype=torch.int32)
    out = f32(k, a, b)
    assert out["q"].tolist() == [[i // j for j in b.tolist()] for i in a.tolist()]
    assert out["r"].tolist() == [[i % j for j in b.tolist()] for i in a.tolist()]
    # What the language leaves undefined must not end the process.
    f32(k, a, torch.tensor([0, -1], dtype=torch.int32))


REDUCTIONS = """kernel red(x: T[M, N]) -> (mx: T[M], mn: T[M], am: i64[M], an: i64[M], p: T[M]):
    parallel m in M
    tile n in N
    mx[m] = max(x[m, n], n)
    mn[m] = min(x[m, n], n)
    am[m] = argmax(x[m, n], n)
    an[m] = argmin(x[m, n], n)
    p[m] = prod(x[m, n], n)
"""


def test_extremes() -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([[1, 3, 3, 2], [1, nan, 5, nan], [-inf, -inf, -inf, -inf], [0, inf, inf, -2]])
    out = f64(build(REDUCTIONS), x)
    close(out["mx"], torch.tensor([3, nan, -inf, inf]))
    close(out["mn"], torch.tensor([1, nan, -inf, -2]))
    assert out["am"].tolist() == [1, 1, 0, 1]
    assert out["an"].tolist() == [0, 1, 0, 3]
    close(out["p"], torch.tensor([18, nan, inf, nan]))


def test_reductions_over_nothing() -> None:
    k = build("""kernel red(x: T[M, N]) -> (s: T[M], p: T[M], mx: T[M], mn: T[M], a: bool[M], b: bool[M], e: T[M]):
    parallel m in M
    tile n in N
    s[m] = sum(x[m, n], n)
    p[m] = prod(x[m, n], n)
    mx[m] = max(x[m, n], n)
    mn[m] = min(x[m, n], n)
    a[m] = any(x[m, n] > 0.0, n)
    b[m] = all(x[m, n] > 0.0, n)
    e[m] = mean(x[m, n], n)
""")
    for precision in ("f64", "f32"):
        out = interpret(k, {"x": torch.empty(2, 0)}, {}, precision=precision)
        expected = {"s": 0, "p": 1, "mx": -math.inf, "mn": math.inf, "a": False, "b": True}
        for name, value in expected.items():
            assert out[name].tolist() == [value, value]
        assert out["e"].isnan().all()


def test_reduction_over_two_tiles() -> None:
    k = build("""kernel block(x: T[M, A, B]) -> (s: T[M], r: T[M, A]):
    parallel m in M
    tile a in A, b in B
    s[m] = sum(x[m, a, b], a, b)
    r[m, a] = max(x[m, a, b], b) - sum(x[m, a, b], a, b)
""")
    x = rand(2, 3, 5)
    out = f64(k, x)
    close(out["s"], x.double().sum((1, 2)))
    close(out["r"], x.double().amax(2) - x.double().sum((1, 2))[:, None])


@pytest.mark.parametrize("max_elements", [1 << 24, 20, 1])
def test_sum_over_programs(max_elements: int) -> None:
    k = build("""kernel cols(x: T[*M, N]) -> (s: f32[N], count: i32[N]):
    parallel m in M
    tile n in N
    s[n] += x[m, n] * x[m, n]
    count[n] += where(x[m, n] > 0.0, 1, 0)
""")
    x = rand(7, 2, 9)
    out = interpret(k, {"x": x}, {}, precision="f64", max_elements=max_elements)
    close(out["s"], x.double().square().sum((0, 1)))
    assert torch.equal(out["count"], (x > 0).sum((0, 1), dtype=torch.int32))
    assert f64(k, torch.empty(0, 4, 3))["s"].tolist() == [0, 0, 0]


def test_inout_is_returned_and_left_alone() -> None:
    k = build("""kernel axpy(y: inout T[M, N], x: T[M, N], a: f32):
    parallel m in M
    tile n in N
    y[m, n] = y[m, n] + a * x[m, n]
""")
    y, x = rand(3, 4), rand(4, 3).t()
    before = y.clone()
    close(f64(k, y, x, a=0.5)["y"], before.double() + 0.5 * x.double())
    assert torch.equal(y, before)


def test_index_values_and_masks() -> None:
    k = build("""kernel tril(x: T[N, N]) -> (y: T[N, N], c: f32[N]):
    parallel m in N
    tile n in N
    y[m, n] = where(n <= m, x[m, n], 0.0)
    c[m] = sum(where(n <= m and not (n % 2 == 0), 1.0, 0.0), n) / N
""")
    x = rand(6, 6)
    out = f64(k, x)
    close(out["y"], x.double().tril())
    close(out["c"], torch.tensor([(m + 1) // 2 for m in range(6)]).double() / 6)


def test_rounding_in_the_middle() -> None:
    k = build("""kernel mid(x: T[M], w: T[M]) -> (y: f32[M]):
    parallel m in M
    y[m] = w[m] * T(x[m] * 1.7)
""", T=BF16)  # fmt: skip
    x, w = rand(50, dtype=torch.bfloat16), rand(50, dtype=torch.bfloat16)
    y = f32(k, x, w)["y"]
    assert y.dtype == torch.float32
    assert torch.equal(y, w.float() * (x.float() * torch.tensor(1.7)).bfloat16().float())
    close(f64(k, x, w)["y"], w.double() * (x.double() * 1.7))


def test_f32_contract_rounds_once_per_operation() -> None:
    k = build("""kernel fma(x: T[M], y: T[M], z: T[M]) -> (o: T[M]):
    parallel m in M
    o[m] = x[m] * y[m] + z[m]
""", T=F16)  # fmt: skip
    x, y, z = (rand(n, dtype=torch.float16)[:100] for n in (100, 101, 102))
    assert torch.equal(f32(k, x, y, z)["o"], (x.float() * y.float() + z.float()).half())


def test_f64_operand_makes_f64() -> None:
    k = build("""kernel mixed(x: T[M], y: f64[M]) -> (o: f64[M]):
    parallel m in M
    o[m] = x[m] + y[m]
""")
    x, y = rand(20), rand(20).double() * 1e-9
    assert torch.equal(f32(k, x, y)["o"], x.double() + y)


def test_casts_to_integers_truncate_saturate_and_wrap() -> None:
    k = build("""kernel cast(x: T[M]) -> (i: i32[M], l: i64[M], b: i8[M], f: bool[M]):
    parallel m in M
    i[m] = i32(x[m])
    l[m] = i64(x[m])
    b[m] = i8(i32(x[m]))
    f[m] = bool(x[m])
""")
    x = torch.tensor([-1.9, 1.9, 300.0, math.nan, math.inf, -math.inf, 0.0])
    out = f32(k, x)
    assert out["i"].tolist() == [-1, 1, 300, 0, 2**31 - 1, -(2**31), 0]
    assert out["l"].tolist() == [-1, 1, 300, 0, 2**63 - 1, -(2**63), 0]
    assert out["b"].tolist()[:3] == [-1, 1, 300 - 256]
    assert out["f"].tolist() == [True, True, True, True, True, True, False]


def test_small_integers_widen_and_bools_count() -> None:
    k = build("""kernel small(a: u8[M], b: i8[M], c: bool[M]) -> (o: i32[M]):
    parallel m in M
    o[m] = a[m] + b[m] * 2 + i32(c[m])
""")
    a, b, c = torch.tensor([250, 255, 0]), torch.tensor([127, -128, 3]), torch.tensor([True, False, True])
    assert f64(k, a.to(torch.uint8), b.to(torch.int8), c)["o"].tolist() == [505, -1, 7]


def test_one_program_without_parallel_indices() -> None:
    k = build("""kernel total(x: T[N]) -> (y: T[N]):
    tile n in N
    y[n] = x[n] / sum(x[n], n)
""")
    x = rand(9)
    close(f64(k, x)["y"], x.double() / x.double().sum())


def test_every_scalar_op_is_there_and_means_what_the_table_says() -> None:
    assert set(OPS) == set(SCALAR_OPS)
    x = torch.tensor([-2.5, -1.0, -0.5, 0.5, 1.5, 2.5], dtype=torch.float64)
    by_name = {
        "exp2": lambda a: 2.0**a,
        "rsqrt": lambda a: a**-0.5 if a > 0 else math.nan,
        "sigmoid": lambda a: 1 / (1 + math.exp(-a)),
        "sign": lambda a: math.copysign(1, a),
        "round": round,
        "exp": math.exp,
        "expm1": math.expm1,
        "tanh": math.tanh,
        "erf": math.erf,
        "floor": math.floor,
        "ceil": math.ceil,
        "trunc": math.trunc,
        "abs": abs,
        "neg": lambda a: -a,
        "log1p": lambda a: math.log1p(a) if a > -1 else (-math.inf if a == -1 else math.nan),
    }
    for name, f in by_name.items():
        close(OPS[name](x), torch.tensor([float(f(a)) for a in x.tolist()], dtype=torch.float64))
    nan = torch.tensor([math.nan])
    assert OPS["sign"](nan).isnan()
    assert OPS["maximum"](nan, x[:1].float()).isnan()
    assert OPS["minimum"](x[:1].float(), nan).isnan()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_float64_rounds_once(dtype: DType) -> None:
    """A value just above the middle of two neighbours, by less than float32 can hold, rounds up."""
    unit = torch.finfo(TORCH[dtype]).eps
    middle = torch.tensor([1 + unit / 2, 1 + 3 * unit / 2, -1 - unit / 2], dtype=torch.float64)
    tiny = torch.tensor(2.0**-45, dtype=torch.float64)
    up = rounded(middle * (1 + tiny), dtype).double()
    down = rounded(middle * (1 - tiny), dtype).double()
    assert ((up - down).abs() == unit).all()
    assert rounded(torch.tensor([math.inf, math.nan, 1e300], dtype=torch.float64), dtype).double().tolist()[::2] == [
        math.inf,
        math.inf,
    ]


def test_dims_are_solved_and_checked() -> None:
    k = build("""kernel two(x: T[M, 2 * N], h: T[N // 2, M]) -> (y: T[M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, 2 * n]
""")
    assert bind_dims(k, {"x": (3, 8), "h": (2, 3)}) == {"M": 3, "N": 4}
    with pytest.raises(
        ShapeError, match=r"two: argument 'h' .*\[N // 2, M\] = \[2, 3\] \(N = 4 by 'x'\), got shape \(3, 3\)"
    ):
        bind_dims(k, {"x": (3, 8), "h": (3, 3)})
    with pytest.raises(ShapeError, match=r"'x'.*2 dimensions"):
        bind_dims(k, {"x": (3, 8, 1), "h": (2, 3)})
    with pytest.raises(ShapeError, match=r"'h'.*missing"):
        bind_dims(k, {"x": (3, 8)})
    with pytest.raises(ShapeError, match="no tensor argument 'z'"):
        bind_dims(k, {"x": (3, 8), "h": (2, 3), "z": ()})
    with pytest.raises(ShapeError, match=r"'x'.*\[M, 2\*N\].*\(3, 7\)"):
        bind_dims(k, {"x": (3, 7), "h": (2, 3)})


def test_shape_errors_name_the_argument() -> None:
    rms, ce = build(RMS), build(CROSS_ENTROPY)
    with pytest.raises(ShapeError, match=r"rms: argument 'w' .*\[N\] = \[8\] \(N = 8 by 'x'\), got shape \(7,\)"):
        bind_dims(rms, {"x": (2, 3, 8), "w": (7,)})
    with pytest.raises(ShapeError, match=r"'target'.*leading dimensions \(2, 3\) as 'logits' has, got shape \(6,\)"):
        bind_dims(ce, {"logits": (2, 3, 8), "target": (6,)})
    with pytest.raises(ShapeError, match=r"requires D % 2 == 0, but the arguments give 1 and 0 \(D = 5\)"):
        bind_dims(build(ROPE), {"x": (1, 2, 3, 5), "cos": (2, 5), "sin": (2, 5)})
    with pytest.raises(ShapeError, match="at least 1 dimension"):
        bind_dims(rms, {"x": (), "w": (7,)})


def test_argument_errors_name_the_argument() -> None:
    k = build(RMS)
    with pytest.raises(ArgumentError, match="'x' must have dtype f32, got bf16"):
        f64(k, rand(2, 3).bfloat16(), rand(3))
    with pytest.raises(ArgumentError, match="no scalar argument 'epsilon'"):
        f64(k, rand(2, 3), rand(3), epsilon=1.0)
    ce = build(CROSS_ENTROPY)
    with pytest.raises(ArgumentError, match="'ignore_index' must be a whole number"):
        f64(ce, rand(2, 3), torch.tensor([0, 1]), ignore_index=0.5)
    with pytest.raises(ArgumentError, match="on one device"):
        f64(k, rand(2, 3), rand(3).to("meta"))


def test_every_dtype_has_a_torch_dtype() -> None:
    assert set(TORCH) == set(DTYPES.values())
    assert all(TORCH[d].itemsize == d.itemsize for d in TORCH)
