"""The functional API against torch in float64, on every executor of a CPU: values, layouts, edges and errors.

Tolerances: all arithmetic is f32 and the result is rounded once to the output dtype, so an error is at most half a
unit in the last place of that dtype plus a few dozen f32 roundings (`slack`), relative to the largest term.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kgen
from kgen import ops

# Half a unit in the last place, relative: 2**-p for p significant bits.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
WIDTHS = (1, 2, 3, 7, 16, 17, 33, 64, 127, 1000, 1025)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0, slack: float = 64.0) -> None:
    """`actual` must be `expected` rounded once to its dtype, but for `slack` f32 roundings of terms of size `scale`."""
    unit = UNIT[actual.dtype]
    f32 = UNIT[torch.float32] if actual.dtype != torch.float64 else unit
    bound = unit * expected.abs() + slack * f32 * (expected.abs() + scale) + 2.0**-25 * (actual.dtype == torch.float16)
    error = (actual.double() - expected).abs()
    assert actual.shape == expected.shape
    worst = (error / bound).max().item() if error.numel() else 0.0
    assert worst <= 1.0, f"{worst:.3g} times the bound"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_widths(backend: str, width: int, dtype: torch.dtype) -> None:
    x, w = randn(3, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    expected = F.rms_norm(x.double(), (width,), w.double(), 1e-6)
    close(ops.rms_norm(x, w, 1e-6, backend=backend), expected)


def test_rms_norm_casting_modes_differ_and_match(backend: str) -> None:
    x, w = randn(4, 96, dtype=torch.bfloat16), randn(96, dtype=torch.bfloat16, seed=1)
    xd = x.double()
    n = xd * torch.rsqrt(xd.square().mean(-1, keepdim=True) + 1e-6)
    close(ops.rms_norm(x, w, casting="gemma", backend=backend), n * (1 + w.double()))
    # Llama's rounding in the middle is visible: compare with the same rounding of the float64 row.
    llama = ops.rms_norm(x, w, casting="llama", backend=backend)
    torch.testing.assert_close(llama, (n.bfloat16() * w), rtol=2**-8, atol=0)
    plain = ops.rms_norm(x, w, backend=backend)
    assert not torch.equal(llama, plain)
    zero = torch.zeros_like(w)
    assert torch.equal(ops.rms_norm(x, zero, backend=backend), torch.zeros_like(x))
    close(ops.rms_norm(x, zero, casting="gemma", backend=backend), n)


@pytest.mark.parametrize("value", [300.0, 7600.0, 60000.0])
def test_rms_norm_f16_sum_of_squares_does_not_overflow(backend: str, value: float) -> None:
    x = torch.full((2, 4096), value, dtype=torch.float16)
    close(ops.rms_norm(x, backend=backend), torch.ones(2, 4096, dtype=torch.float64))


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e3, 1e4])
def test_layer_norm_does_not_cancel(backend: str, mean: float) -> None:
    x = (mean + 1e-3 * randn(3, 257)).contiguous()
    xd = x.double()
    expected = F.layer_norm(xd, (257,), eps=1e-12)
    # The mean is off by a rounding of its own size, which the deviation's size divides.
    spread = (xd - xd.mean(-1, keepdim=True)).square().mean().sqrt().item()
    close(ops.layer_norm(x, eps=1e-12, backend=backend), expected, scale=max(1.0, mean / spread))


def test_layer_norm_of_width_one_is_its_bias(backend: str) -> None:
    x, w, b = torch.full((3, 1), 1e6), torch.tensor([2.0]), torch.tensor([0.25])
    assert torch.equal(ops.layer_norm(x, w, b, backend=backend), b.expand(3, 1))


@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm_parts(backend: str, parts: tuple[bool, bool]) -> None:
    x = randn(2, 3, 50)
    w = randn(50, seed=1) if parts[0] else None
    b = randn(50, seed=2) if parts[1] else None
    expected = F.layer_norm(
        x.double(), (50,), None if w is None else w.double(), None if b is None else b.double(), 1e-5
    )
    close(ops.layer_norm(x, w, b, backend=backend), expected, scale=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gated_units(backend: str, dtype: torch.dtype) -> None:
    gate, up = randn(5, 130, dtype=dtype), randn(5, 130, dtype=dtype, seed=1)
    g, u = gate.double(), up.double()
    close(ops.swiglu(gate, up, backend=backend), F.silu(g) * u, scale=4.0)
    close(ops.geglu(gate, up, backend=backend), F.gelu(g) * u, scale=4.0)
    close(ops.geglu(gate, up, approximate="tanh", backend=backend), F.gelu(g, approximate="tanh") * u, scale=4.0)
    assert not torch.equal(ops.swiglu(gate, up, backend=backend), ops.swiglu(up, gate, backend=backend))


def test_swiglu_rounds_once(backend: str) -> None:
    gate, up = randn(4, 64, dtype=torch.bfloat16), randn(4, 64, dtype=torch.bfloat16, seed=1)
    exact = (F.silu(gate.double()) * up.double()).bfloat16()
    twice = F.silu(gate.double()).bfloat16() * up
    mine = ops.swiglu(gate, up, backend=backend)
    assert (mine != exact).sum() <= 1  # an f32 error can only matter at a tie
    assert (mine != twice).sum() > 10


def test_swiglu_takes_the_halves_of_a_chunk(backend: str) -> None:
    h = randn(4, 3, 62)
    gate, up = h.chunk(2, -1)
    close(ops.swiglu(gate, up, backend=backend), F.silu(gate.double()) * up.double(), scale=4.0)


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_dims(backend: str, name: str, dim: int) -> None:
    x = 4 * randn(5, 33, 7)
    result = getattr(ops, name)(x, dim, backend=backend)
    close(result, getattr(torch, name)(x.double(), dim), scale=20.0 if name == "log_softmax" else 1.0)
    assert result.stride() == x.stride()


def test_softmax_specials(backend: str) -> None:
    x = torch.zeros(5, 9)
    x[0] = -torch.inf
    x[1, 3] = torch.nan
    x[2, 3] = torch.inf
    x[3, 3] = -torch.inf
    result = ops.softmax(x, backend=backend)
    assert result[:3].isnan().all()
    close(result[3:], torch.softmax(x[3:].double(), -1))
    # A shift of the whole row changes nothing, also where exp of the values themselves would overflow.
    close(ops.softmax(randn(2, 40) + 1e4, backend=backend), torch.softmax((randn(2, 40) + 1e4).double(), -1))


def rope_formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """float64 rotation of `[B, S, H, D]` by `[B or 1, S, R]` tables."""
    x, cos, sin = x.double(), cos.double()[:, :, None], sin.double()[:, :, None]
    r = cos.shape[-1]
    y = x.clone()
    if interleaved:
        lo, hi, c, s = x[..., 0:r:2], x[..., 1:r:2], cos[..., 0::2], sin[..., 0::2]
        y[..., 0:r:2], y[..., 1:r:2] = lo * c - hi * s, hi * c + lo * s
        return y
    lo, hi = x[..., : r // 2], x[..., r // 2 : r]
    y[..., : r // 2] = lo * cos[..., : r // 2] - hi * sin[..., : r // 2]
    y[..., r // 2 : r] = hi * cos[..., r // 2 :] + lo * sin[..., r // 2 :]
    return y


def tables(count: int, r: int, interleaved: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of `count` positions for `r` rotated features."""
    freq = 10000.0 ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
    angle = torch.arange(count, dtype=torch.float64)[:, None] * freq
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "r"), [(16, 16), (128, 32), (80, 20), (6, 2)])
def test_rope_full_and_partial(backend: str, d: int, r: int, interleaved: bool) -> None:
    q, k = randn(2, 5, 4, d, dtype=torch.bfloat16), randn(2, 5, 2, d, dtype=torch.bfloat16, seed=1)
    cos, sin = tables(9, r, interleaved, torch.float32)
    got = ops.rope(q, k, cos, sin, interleaved=interleaved, backend=backend)
    for y, x in zip(got, (q, k), strict=True):
        close(y, rope_formula(x, cos[None, :5], sin[None, :5], interleaved), scale=4.0)
        assert torch.equal(y[..., r:], x[..., r:]), "features that are not rotated pass through to the bit"


def test_rope_positions_and_per_token_tables(backend: str) -> None:
    q, k = randn(2, 3, 4, 8), randn(2, 3, 1, 8, seed=1)
    cos, sin = tables(4096, 8, False, torch.float32)
    positions = torch.tensor([[0, 1, 17], [4095, 2, 2]])
    by_position = ops.rope(q, k, cos, sin, positions=positions, backend=backend)
    by_token = ops.rope(q, k, cos[positions], sin[positions], backend=backend)
    for y, z, x in zip(by_position, by_token, (q, k), strict=True):
        close(y, rope_formula(x, cos[positions], sin[positions], False), scale=4.0)
        assert torch.equal(y, z)


# Leading sizes of cos and of sin, and how many rows more than tokens they have.
TOKEN_TABLES = [(2, 2, 0), (1, 2, 0), (2, 1, 0), (1, 1, 0), (1, 1, 3)]


@pytest.mark.parametrize(("cos_batch", "sin_batch", "more"), TOKEN_TABLES)
def test_rope_rows_of_tokens_are_those_of_their_batch(backend: str, cos_batch: int, sin_batch: int, more: int) -> None:
    q, k = randn(2, 3, 4, 8), randn(2, 3, 1, 8, seed=1)
    cos, sin = randn(cos_batch, 3 + more, 8, seed=2), randn(sin_batch, 3 + more, 8, seed=3)
    for y, x in zip(ops.rope(q, k, cos, sin, backend=backend), (q, k), strict=True):
        close(y, rope_formula(x, cos[:, :3], sin[:, :3], False), scale=8.0)


def test_rope_rows_of_tokens_seen_from_all_batches(backend: str) -> None:
    q, k = randn(2, 3, 4, 8), randn(2, 3, 1, 8, seed=1)
    cos, sin = randn(1, 3, 8, seed=2), randn(1, 3, 8, seed=3)
    expected = ops.rope(q, k, cos, sin, backend=backend)
    for c, s in ((cos.expand(2, 3, 8), sin), (cos.expand(2, 3, 8), sin.expand(2, 3, 8))):
        assert all(map(torch.equal, ops.rope(q, k, c, s, backend=backend), expected))
    for c in (cos[:0], cos):
        assert ops.rope(q[:0], k[:0], c, c, backend=backend)[0].shape == (0, 3, 4, 8)


@pytest.mark.parametrize(
    ("cos", "sin"),
    [
        ((2, 5, 8), (2, 5, 8)),  # longer: whose rows are they from the second batch on?
        ((2, 2, 8), (2, 2, 8)),
        ((1, 2, 8), (1, 2, 8)),
        ((3, 3, 8), (3, 3, 8)),
        ((1, 5, 8), (2, 3, 8)),
        ((1, 5, 8), (1, 3, 8)),
        ((2, 3, 8), (2, 3, 6)),
        ((2, 3, 8), (3, 8)),
        ((3, 8), (1, 3, 8)),
    ],
)
def test_rope_tables_of_other_tokens_are_refused(cos: tuple[int, ...], sin: tuple[int, ...]) -> None:
    with pytest.raises(kgen.ArgumentError, match=r"^rope: cos and sin must have one row a token.*\[2, 3\]") as caught:
        ops.rope(randn(2, 3, 4, 8), randn(2, 3, 1, 8), randn(*cos), randn(*sin))
    assert str(cos) in str(caught.value) and str(sin) in str(caught.value)


def test_rope_takes_transposed_heads_and_keeps_their_layout(backend: str) -> None:
    q, k = randn(2, 4, 5, 8).transpose(1, 2), randn(2, 2, 5, 8, seed=1).transpose(1, 2)
    cos, sin = tables(5, 8, False, torch.float32)
    got = ops.rope(q, k, cos, sin, backend=backend)
    close(got[0], rope_formula(q, cos[None], sin[None], False), scale=4.0)
    assert got[0].stride() == q.stride()


def test_rope_beyond_the_table(backend: str) -> None:
    q, k = randn(1, 5, 1, 4), randn(1, 5, 1, 4)
    cos, sin = tables(4, 4, False, torch.float32)
    with pytest.raises(kgen.KgenError, match="S <= P"):
        ops.rope(q, k, cos, sin, backend=backend)
    positions = torch.tensor([[0, 1, 2, 3, 4]])
    assert ops.rope(q, k, cos, sin, positions=positions, backend=backend)[0][0, 4].isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 0)])
def test_nothing_to_do(backend: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    for op in (ops.rms_norm, ops.layer_norm, ops.softmax):
        assert op(x, backend=backend).shape == shape


def test_inputs_are_not_modified_and_out_is_used(backend: str) -> None:
    x, w = randn(3, 40), randn(40)
    before = x.clone(), w.clone()
    out = torch.full_like(x, torch.nan)
    result = ops.rms_norm(x, w, backend=backend, out=out)
    assert result is out
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
    close(out, F.rms_norm(x.double(), (40,), w.double(), 1e-6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(randn(3, 4), randn(5)), r"N.*4.*5|N.*5.*4"),
        (lambda: ops.rms_norm(randn(3, 4), randn(1, 4)), "w"),
        (lambda: ops.rms_norm(randn(3, 4).int()), "x"),
        (lambda: ops.rms_norm(randn(3, 4), casting="gpt"), "casting"),
        (lambda: ops.swiglu(randn(3, 4), randn(3, 4).half()), "up"),
        (lambda: ops.swiglu(randn(3, 4), None), "up"),  # type: ignore[arg-type]  # the mistake under test
        (lambda: ops.softmax(randn(3, 4), 2), "dim"),
        (lambda: ops.softmax(randn(3, 4), 1.0), "softmax: dim must be an integer, got 1.0"),  # type: ignore[arg-type]
        (lambda: ops.softmax(randn(3, 4), "n"), "softmax: dim must be an integer, got 'n'"),  # type: ignore[arg-type]
        (lambda: ops.rope(3, *[randn(1, 2, 4)] * 3), "rope: argument 'q'.* got a int"),  # type: ignore[arg-type]
        (lambda: ops.rope(*[randn(1, 2, 4)] * 4), r"rope: argument 'q'.* got \(1, 2, 4\)"),
        (lambda: ops.rope(randn(1, 2, 3, 4), 3, *[randn(1, 2, 4)] * 2), "rope: argument 'k'"),  # type: ignore[arg-type]
        (lambda: ops.rope(*[randn(1, 2, 3, 4)] * 2, *[randn(1, 2, 4).numpy()] * 2), "'cos' .* got a ndarray"),  # type: ignore[arg-type]
        (lambda: ops.softmax(randn(3, 4), backend="cutlass"), "cutlass"),
        (lambda: ops.geglu(randn(3, 4), randn(3, 4), approximate="erf"), "approximate"),
    ],
)
def test_mistakes_are_named(call, message: str) -> None:
    with pytest.raises(kgen.KgenError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value).strip()
