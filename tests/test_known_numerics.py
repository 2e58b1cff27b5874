"""Values that kernels of this kind are known to get wrong: ranges, cancellation, roundings, NaN and infinities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autograd_kit import randn, worst

import kgen
from kgen import ops

pytestmark = pytest.mark.usefixtures("poisoned_memory")

F32 = 2.0**-24
NARROW = {torch.bfloat16: 8, torch.float16: 11}  # significant bits


def rounded(value: torch.Tensor, dtype: torch.dtype, slack: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A float64 value rounded once to a narrow dtype, and where an f32 error of `slack` roundings cannot change it."""
    low, high = (value * (1.0 + sign * slack * F32) for sign in (-1.0, 1.0))
    return value.to(dtype), low.to(dtype) == high.to(dtype)


def same_bits(actual: torch.Tensor, value: torch.Tensor, slack: float) -> None:
    """`actual` is `value` rounded once, to the bit, wherever that is certain; it is nearly everywhere."""
    wanted, certain = rounded(value, actual.dtype, slack)
    assert certain.float().mean() > 0.9
    assert torch.equal(actual[certain], wanted[certain])


# ---- where a result is rounded ---------------------------------------------------------------------------------------


def casting_modes(x: torch.Tensor, w: torch.Tensor, offset: float) -> dict[str, torch.Tensor]:
    """What each mode means, in float64 but for the roundings that belong to it."""
    xd = x.double()
    row = xd * torch.rsqrt(xd.square().mean(-1, keepdim=True) + 1e-6)
    return {
        "none": row * (offset + w.double()),
        "gemma": row * (1.0 + offset + w.double()),
        "llama": (offset + w.double()) * row.to(x.dtype).double(),
    }


@pytest.mark.parametrize("offset", [None, 0.25])
@pytest.mark.parametrize("dtype", NARROW)
def test_casting_modes_to_the_bit(backend: str, dtype: torch.dtype, offset: float | None) -> None:
    x, w = randn(8, 120, dtype=dtype), randn(120, dtype=dtype, seed=1)
    exact = casting_modes(x, w, offset or 0.0)
    if offset is not None:
        exact["gemma"] = exact["none"]  # an offset that is given replaces that of the mode
    # Where the row's own rounding to the narrow dtype is certain, so is what Llama makes of it.
    plain = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    sure = rounded(plain, dtype, 40)[1]
    for mode, value in exact.items():
        y = ops.rms_norm(x, w, casting=mode, offset=offset, backend=backend)
        h = ops.add_rms_norm(x, torch.zeros_like(x), w, casting=mode, offset=offset, backend=backend)[0]
        for mine in (y, h):
            same_bits(mine[sure], value[sure], 40)
        for other, away in exact.items():  # the modes are told apart by these very values
            if other != mode and away is not value:
                assert (y != away.to(dtype)).sum() > 30, (mode, other)


def test_a_weight_of_zero(backend: str) -> None:
    x, w = randn(3, 40), torch.zeros(40)
    assert not ops.rms_norm(x, w, backend=backend).any()
    assert not ops.rms_norm(x, w, casting="llama", backend=backend).any()
    row = F.rms_norm(x.double(), (40,), None, 1e-6)
    for mode, offset in (("gemma", None), ("none", 1.0), ("llama", 1.0)):
        assert worst(ops.rms_norm(x, w, casting=mode, offset=offset, backend=backend), row, 40) <= 1.0


@pytest.mark.parametrize("dtype", NARROW)
def test_gated_units_round_once(backend: str, dtype: torch.dtype) -> None:
    gate, up = randn(16, 120, dtype=dtype), randn(16, 120, dtype=dtype, seed=1)
    for mine, activation in (
        (ops.swiglu(gate, up, backend=backend), F.silu),
        (ops.geglu(gate, up, backend=backend), F.gelu),
        (ops.geglu(gate, up, approximate="tanh", backend=backend), lambda a: F.gelu(a, approximate="tanh")),
    ):
        exact = activation(gate.double()) * up.double()
        # 1 + erf and 1 + tanh lose digits where they nearly cancel.
        sure = (gate > -1.0) & (exact.abs() > 2.0**-10)
        same_bits(mine[sure], exact[sure], 60)
        assert (mine != activation(gate.double()).to(dtype) * up).sum() > 100, "rounded after the activation"


# ---- ranges ----------------------------------------------------------------------------------------------------------


def test_sums_of_f16_are_f32(backend: str) -> None:
    """Sums that pass 65504, the largest f16: squares, deviations, exponentials, and gradients over rows."""
    signs = torch.tensor([300.0, -300.0], dtype=torch.float16).repeat(2, 2048)
    agree_once(ops.layer_norm(signs, backend=backend), signs.double() / 300.0)
    agree_once(ops.add_rms_norm(signs, signs, backend=backend)[0], signs.double() / 300.0)
    many = torch.full((1, 66000), 1.5, dtype=torch.float16)
    assert worst(ops.softmax(many, backend=backend), torch.full((1, 66000), 1 / 66000.0).double(), 66000) <= 1.0
    target = torch.tensor([3])
    loss = ops.cross_entropy(many, target, backend=backend)
    assert (loss - math.log(66000)).abs() <= 66000 * F32 + 64 * F32 * math.log(66000)
    g = torch.full((70, 8), 1000.0, dtype=torch.float16)
    b = torch.zeros(8, requires_grad=True)
    y = ops.layer_norm(randn(70, 8, dtype=torch.float16), torch.ones(8), b, backend=backend)
    assert torch.equal(torch.autograd.grad(y, b, g)[0], torch.full((8,), 70000.0))
    x = torch.full((2, 512), 300.0, dtype=torch.float16, requires_grad=True)
    w = randn(512, seed=3).requires_grad_()
    upstream = randn(2, 512, dtype=torch.float16, seed=4)
    dx, dw = torch.autograd.grad(ops.rms_norm(x, w, backend=backend), (x, w), upstream)
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    exact_x, exact_w = torch.autograd.grad(F.rms_norm(xd, (512,), wd, 1e-6), (xd, wd), upstream.double())
    # The two terms of d_x cancel in part: each is of the size of w * g / 300.
    size = (w.detach().double() * upstream.double()).abs().max() / 300.0
    assert ((dx.double() - exact_x).abs() <= 2.0**-11 * exact_x.abs() + 600 * F32 * size + 2.0**-25).all()
    assert worst(dw, exact_w, 2) <= 1.0


def agree_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Rounded once, but for what sums of some thousand equal terms lose."""
    unit = torch.finfo(actual.dtype).eps / 2
    assert ((actual.double() - exact).abs() <= (unit + 64 * F32) * exact.abs()).all()


@pytest.mark.parametrize("width", [1, 40, 1025, 4096])
def test_rows_of_large_numbers(backend: str, width: int) -> None:
    for value in (1e9, -1e9, 1e-3):
        x = torch.full((2, width), value)
        exact = torch.full((2, width), math.copysign(1.0, value), dtype=torch.float64)
        agree_once(ops.rms_norm(x, eps=0.0, backend=backend), exact)
    # Squares beyond f32 give what torch gives: 1 / sqrt(inf).
    assert not ops.rms_norm(torch.full((2, width), 1e20), backend=backend).any()


def test_a_row_of_zeros_has_a_finite_gradient(backend: str) -> None:
    x, w, g = torch.zeros(2, 10, requires_grad=True), randn(10), randn(2, 10, seed=1)
    (dx,) = torch.autograd.grad(ops.rms_norm(x, w, backend=backend), x, g)
    assert worst(dx, (w * g).double() / math.sqrt(float(torch.tensor(1e-6))), 10) <= 1.0


# ---- cancellation ----------------------------------------------------------------------------------------------------

MOMENTS = """
kernel moments(x: T[*M, N]) -> (v: f32[*M]):
    parallel m in M
    tile n in N
    v[m] = var(x[m, n], n)
"""


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1e-3), (100.0, 0.1), (1449.0, 1.0), (1e4, 8.0), (-2.3, 0.5)])
@pytest.mark.parametrize("width", [67, 1000])
def test_the_variance_of_rows_far_from_zero(backend: str, mean: float, spread: float, width: int) -> None:
    """The mean is off by roundings of its own size; beside the spread that must be all."""
    dtypes = (torch.float32, torch.float16) if mean == -2.3 else (torch.float32,)
    for dtype in dtypes:
        x = (mean + spread * randn(3, width)).to(dtype)
        exact = F.layer_norm(x.double(), (width,), eps=1e-12)
        # A sum in blocks of 32 terms and more: some dozens of roundings of partial sums.
        off = 64 * F32 * (1.0 + abs(mean) / spread)
        assert off < 0.06
        mine = ops.layer_norm(x, eps=1e-12, backend=backend).double()
        unit = torch.finfo(dtype).eps / 2
        assert ((mine - exact).abs() <= unit * exact.abs() + off * (1.0 + exact.abs())).all()
        v = kgen.loads(MOMENTS).moments(x, backend=backend).double()
        wanted = x.double().var(-1, correction=0)
        assert ((v - wanted).abs() <= (64 * F32 + off**2) * wanted + off * F32 * wanted).all()


@pytest.mark.parametrize("value", [1449.3, -2.3, 1e4 / 3, 7e8])
def test_the_variance_of_a_constant_row_is_not_negative(backend: str, value: float) -> None:
    x = torch.full((2, 333), value, requires_grad=True)
    y = ops.layer_norm(x, backend=backend)
    y.backward(randn(2, 333))
    v = kgen.loads(MOMENTS).moments(x.detach(), backend=backend)
    assert (v >= 0).all()
    # Deviations are roundings of the mean.
    assert (v <= (64 * F32 * value) ** 2).all()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_gradients_of_rows_far_from_zero(backend: str) -> None:
    mean, spread, width = 1449.0, 1.0, 67
    x, w, g = mean + spread * randn(3, width), randn(width, seed=1), randn(3, width, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    doubles = [t.double().requires_grad_() for t in (x, w)]
    found = torch.autograd.grad(ops.layer_norm(leaves[0], leaves[1], backend=backend), leaves, g)
    wanted = torch.autograd.grad(F.layer_norm(doubles[0], (width,), doubles[1]), doubles, g.double())
    off = 64 * F32 * mean / spread
    for a, e in zip(found, wanted, strict=True):
        assert ((a - e).abs() <= off * (e.abs() + e.abs().max())).all()


def test_width_one(backend: str) -> None:
    """A layer norm of one element is its bias, and nothing else matters; a root mean square leaves the sign."""
    x = torch.tensor([[1e6], [-3.0], [0.1]], requires_grad=True)
    w, b = torch.tensor([2.0], requires_grad=True), torch.tensor([0.25], requires_grad=True)
    g = randn(3, 1)
    y = ops.layer_norm(x, w, b, backend=backend)
    assert torch.equal(y, torch.full((3, 1), 0.25))
    dx, dw, db = torch.autograd.grad(y, (x, w, b), g)
    assert torch.equal(dx, torch.zeros(3, 1))
    assert torch.equal(dw, torch.zeros(1))
    assert worst(db, g.double().sum(0), 3) <= 1.0
    y = ops.rms_norm(x, w, eps=0.0, backend=backend)
    assert worst(y, 2.0 * x.detach().double().sign(), 1) <= 1.0
    assert torch.equal(ops.softmax(x.detach(), backend=backend), torch.ones(3, 1))
    assert torch.equal(ops.log_softmax(x.detach(), backend=backend), torch.zeros(3, 1))


def test_logarithms_of_vanishing_probabilities(backend: str) -> None:
    """exp(-120) is 0 in f32 and its logarithm is not; a divergence of two such rows is finite."""
    x = torch.zeros(2, 50)
    x[:, 7] = -120.0
    y = ops.log_softmax(x, backend=backend)
    assert worst(y, x.double().log_softmax(-1), 50) <= 1.0
    p, q = kgen.loads(JENSEN_SHANNON).jensen_shannon(x, x, backend=backend)
    assert torch.equal(p, torch.zeros(2))
    assert torch.equal(q, torch.zeros(2))
    other = randn(2, 50)
    other[:, 7] = -120.0
    leaf = x.clone().requires_grad_()
    js = kgen.loads(JENSEN_SHANNON).jensen_shannon
    p, q = js(leaf, other, backend=backend)
    xd = x.double().requires_grad_()
    a, b = xd.log_softmax(-1), other.double().log_softmax(-1)
    mixed = torch.logaddexp(a, b) - math.log(2.0)
    wanted = (a.exp() * (a - mixed)).sum(-1), (b.exp() * (b - mixed)).sum(-1)
    for mine, exact in zip((p, q), wanted, strict=True):
        assert (mine - exact).abs().max() <= 64 * F32 * 50
    g = randn(2, seed=5)
    (found,) = torch.autograd.grad((p, q), leaf, (g, 2 * g))
    (exact,) = torch.autograd.grad(wanted, xd, (g.double(), 2 * g.double()))
    assert (found - exact).abs().max() <= 64 * F32 * 50


# A user's kernel: the logarithm of the mixture is formed from logarithms.
JENSEN_SHANNON = """
fn logaddexp(a, b) = maximum(a, b) + log1p(exp(-abs(a - b)))

kernel jensen_shannon(x: f32[*M, N], y: f32[*M, N]) -> (p: f32[*M], q: f32[*M]):
    parallel m in M
    tile n in N
    a = x[m, n] - logsumexp(x[m, n], n)
    b = y[m, n] - logsumexp(y[m, n], n)
    mix = logaddexp(a, b) - log(2.0)
    p[m] = sum(exp(a) * (a - mix), n)
    q[m] = sum(exp(b) * (b - mix), n)
"""


# ---- NaN and infinities ----------------------------------------------------------------------------------------------

EXTREMES = """
kernel extremes(x: T[*M, N], y: T[*M, N]) -> (hi: T[*M], lo: T[*M], upper: T[*M, N], lower: T[*M, N]):
    parallel m in M
    tile n in N
    hi[m] = max(x[m, n], n)
    lo[m] = min(x[m, n], n)
    upper[m, n] = maximum(x[m, n], y[m, n])
    lower[m, n] = minimum(x[m, n], y[m, n])
"""


@pytest.mark.parametrize("width", [2, 33, 200])
def test_extremes_propagate_nan(backend: str, width: int) -> None:
    """Beside infinities too, wherever in the row, and as the only element of it that is no number."""
    inf, nan = math.inf, math.nan
    x = randn(12, width)
    for row, (first, second) in enumerate([(nan, inf), (inf, nan), (nan, -inf), (-inf, nan), (nan, nan), (inf, -inf)]):
        x[row, 0], x[row, -1] = first, second
    x[6, width // 2], x[7, 0], x[8, -1] = nan, nan, nan
    y = x.flip(0, 1)
    extremes = kgen.loads(EXTREMES).extremes
    got = extremes(x, y, backend=backend)
    wanted = x.amax(-1), x.amin(-1), torch.maximum(x, y), torch.minimum(x, y)
    for a, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_masked_rows_and_their_gradients(backend: str, name: str) -> None:
    """-inf in some places, in all, beside NaN and beside +inf: values and gradients as torch."""
    inf, nan = math.inf, math.nan
    x = randn(6, 40)
    x[0], x[1, 1:], x[2, 5:] = -inf, -inf, -inf
    x[3, 3], x[3, 10:] = nan, -inf
    x[4, 3], x[4, 10:] = inf, -inf
    leaf, double, g = x.clone().requires_grad_(), x.double().requires_grad_(), randn(6, 40, seed=1)
    mine, theirs = getattr(ops, name)(leaf, backend=backend), getattr(torch, name)(double, -1)
    (d,), (e,) = torch.autograd.grad(mine, leaf, g), torch.autograd.grad(theirs, double, g.double())
    for a, b in ((mine.detach(), theirs.detach()), (d, e)):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.isinf(), b.isinf())
        finite = b.isfinite()
        assert worst(a[finite], b[finite], 40) <= 1.0
    assert d[0].isnan().all()
    assert d[3].isnan().all()
    assert d[2].isfinite().all()


def test_activations_at_infinity(backend: str) -> None:
    inf, nan = math.inf, math.nan
    x, one = torch.tensor([-inf, inf, nan, 0.0]), torch.ones(4)
    assert ops.swiglu(x, one, backend=backend).tolist()[1] == inf
    assert ops.swiglu(x, one, backend=backend).isnan().tolist() == F.silu(x).isnan().tolist()
    tanh = ops.geglu(x, one, approximate="tanh", backend=backend)
    assert tanh[1] == inf
    assert tanh.isnan().tolist() == F.gelu(x, approximate="tanh").isnan().tolist()


# ---- cross entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [1, 9, 33, 130])
def test_the_last_class_and_the_columns_behind_it(backend: str, classes: int) -> None:
    """A padded column is nobody's label: V - 1 is a class, V up to the next power of two and beyond is none."""
    block = 1 << classes.bit_length()
    rows = randn(4, classes)
    each: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1}]
    for options in each:
        target = torch.tensor([classes - 1, classes, block - 1, block])
        exact = F.cross_entropy(rows[:1].double(), target[:1], **options)
        over = rows.clone()
        leaf = rows.clone().requires_grad_()
        loss = ops.cross_entropy(leaf, target, reduction="none", backend=backend, **options)
        (d,) = torch.autograd.grad(loss, leaf, torch.ones(4))
        rows_in_place = ops.cross_entropy_(over, target, backend=backend, **options)
        for values, gradient in ((loss.detach(), d), (rows_in_place, over)):
            assert values.isnan().tolist() == [False, True, True, True]
            assert (values[0] - exact).abs() <= (classes + 64) * F32 * (1.0 + exact)
            assert gradient[0].isfinite().all()
            assert gradient[1:].isnan().all()


def test_label_smoothing_is_torchs(backend: str) -> None:
    """e / V to every class, the label's too; the other convention, e / (V - 1) to all but the label's, is far away."""
    logits, target, e = randn(5, 9), torch.tensor([0, 8, 3, 4, 4]), 0.1
    leaf, double = logits.clone().requires_grad_(), logits.double().requires_grad_()
    mine = ops.cross_entropy(leaf, target, label_smoothing=e, backend=backend)
    theirs = F.cross_entropy(double, target, label_smoothing=e)
    bound = 80 * F32 * 8.0
    assert (mine - theirs).abs() <= bound
    (d,), (dd,) = torch.autograd.grad(mine, leaf), torch.autograd.grad(theirs, double)
    assert worst(d, dd, 9) <= 1.0
    log_p = logits.double().log_softmax(-1)
    nll = -log_p.gather(-1, target[:, None])[:, 0]
    other = ((1 - e) * nll + e / 8 * (-log_p.sum(-1) - nll)).mean()
    assert (mine - other).abs() > 100 * bound


def test_weight_gradients_do_not_drift_with_the_number_of_rows(backend: str) -> None:
    """Summed in f32 and rounded once: the error of a bf16 gradient is half a unit, with 16 rows and with 2000."""
    for rows in (16, 2000):
        x, g = randn(rows, 8, dtype=torch.bfloat16), randn(rows, 8, dtype=torch.bfloat16, seed=1)
        w, b = (torch.ones(8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        ops.layer_norm(x, w, b, backend=backend).backward(g)
        row = F.layer_norm(x.double(), (8,))
        for found, terms in ((w.grad, row * g.double()), (b.grad, g.double())):
            assert found is not None
            exact, size = terms.sum(0), terms.abs().sum(0)
            # The sum is made in blocks: no partial sum is rounded more often than some hundred times.
            assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() * 1.001 + 200 * F32 * size).all()


def test_weight_gradients_of_long_rows(backend: str) -> None:
    """Sums that no registers hold: what rows give them is stored first."""
    x, w, g = randn(3, 20000), randn(20000, seed=1).requires_grad_(), randn(3, 20000, seed=2)
    (found,) = torch.autograd.grad(ops.rms_norm(x, w, backend=backend), w, g)
    assert worst(found, (F.rms_norm(x.double(), (20000,), None, 1e-6) * g.double()).sum(0), 20000) <= 1.0


def test_sums_of_chunks_are_kept_in_memory(backend: str) -> None:
    """In memory that holds NaN before it is zeroed."""
    source = """kernel f(x: f32[M, N]) -> (y: f32[M, N], s: f32[N]):
    parallel m in M
    tile n in N
    schedule cuda: chunk[n] = 32
    schedule triton: chunk[n] = 32
    r = sum(x[m, n], n)
    y[m, n] = x[m, n] * r
    s[n] += x[m, n] * r
"""
    x = randn(5, 100)
    y, s = kgen.loads(source).f(x, backend=backend)
    exact = x.double() * x.double().sum(-1, keepdim=True)
    size = x.double().abs() * x.double().abs().sum(-1, keepdim=True)
    assert ((y.double() - exact).abs() <= 110 * F32 * size).all()  # a sum of 100 terms, and a product
    assert ((s.double() - exact.sum(0)).abs() <= 110 * F32 * size.sum(0)).all()


def test_denominators_of_the_mean(backend: str) -> None:
    """Class weights divide the cross entropy by their sum, the z-loss by the number of labels kept; smoothing, labels
    to ignore and a z-loss at once."""
    logits, target = 2 * randn(6, 7), torch.tensor([0, -100, 6, 3, 3, -100])
    weight, e, c = randn(7, seed=1).abs() + 0.1, 0.2, 0.3
    log_p, w = logits.double().log_softmax(-1), weight.double()
    z, ce, total, kept = 0.0, 0.0, 0.0, 0
    for row, t in enumerate(target.tolist()):
        if t != -100:
            ce += -(1 - e) * w[t] * log_p[row, t] - e / 7 * (w * log_p[row]).sum()
            z += c * torch.logsumexp(logits[row].double(), -1) ** 2
            total, kept = total + w[t], kept + 1
    exact: Any = ce / total + z / kept
    mine = ops.cross_entropy(logits, target, weight, label_smoothing=e, z_loss=c, backend=backend)
    assert (mine - exact).abs() <= 80 * F32 * 10 * (1 + abs(exact))
