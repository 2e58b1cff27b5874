"""Rows in chunks that a program of Triton holds from pass to pass: which ones, that they fit, and what they compute."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton_kit
from cuda_kit import Call, call, prepare
from typer.testing import CliRunner

import kgen
from kgen.cli import app
from kgen.codegen.candidates import candidates
from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Loop, Schedule, Scheduled, ScheduleError
from kgen.codegen.traffic import traffic

OPS = Path(__file__).resolve().parents[1] / "ops"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
RMS = (OPS / "rms_norm.kdsl").read_text()
LAYER = (OPS / "layer_norm.kdsl").read_text()
ADD = (OPS / "add_rms_norm.kdsl").read_text()
SOFT = (OPS / "softmax.kdsl").read_text()
CROSS = (OPS / "cross_entropy.kdsl").read_text()
HEAD = "kernel k(x: T[*M, N]) -> (y: T[*M, N]):\n    parallel m in M\n    tile n in N\n"
# A weight that two passes need, the place of a maximum, what is true of all, and what is loaded of one pass alone.
MIXED = """kernel k(x: T[*M, N], z: T[*M, N], w: T[N]) -> (y: T[*M, N], best: i64[*M]):
    parallel m in M
    tile n in N
    s = mean(x[m, n] * w[n], n)
    best[m] = argmax(x[m, n] - s, n)
    positive = all(x[m, n] + 100.0 > s, n)
    y[m, n] = where(positive, x[m, n] * w[n] - s, 0.0) + z[m, n]
"""
# In the second pass a product comes first, whose masked lanes would be 1; those of what is held are 0.
TWO = """kernel k(x: T[*M, N, D]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N, d in D
    p = prod(x[m, n, d], d)
    t = sum(x[m, n, d], d)
    y[m, n] = p + t - max(t, n)
"""
# Where elements are is known only in the pass that loads the places: those cannot be loaded ahead.
GATHERED = """kernel k(x: T[*M, N], z: T[*M, N], at: i32[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    s = mean(x[m, at[n]] * z[m, n], n)
    y[m, n] = x[m, at[n]] + z[m, n] - s
"""
IN_PLACE = """kernel k(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, n] * rsqrt(mean(x[m, n] * x[m, n], n) + 1.0)
"""
SUMS = """kernel k(x: T[*M, N]) -> (y: T[*M, N], s: f32[N]):
    parallel m in M
    tile n in N
    r = x[m, n] * rsqrt(mean(x[m, n] * x[m, n], n) + 1.0)
    y[m, n] = r
    s[n] += r
"""
INTEGERS = """kernel k(x: i16[*M, N]) -> (y: i16[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = i16(x[m, n] - max(x[m, n], n))
"""


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def unaligned(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Rows that begin an element behind an address that is aligned."""
    return rand(shape[0], shape[1] + 1, dtype=dtype)[:, 1:]


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def kernels(n: int, dtype: torch.dtype) -> dict[str, Call]:
    """Kernels that need a row in several passes, without values."""
    x, w, f = empty(4, n, dtype=dtype), empty(n, dtype=dtype), empty(n, dtype=F32)
    return {
        "rms_norm": call(RMS, "rms_norm", x=x, w=w),
        "rms_norm without": call(RMS, "rms_norm", x=x),
        "rms_norm of f32 weights": call(RMS, "rms_norm", x=x, w=f),
        "layer_norm": call(LAYER, "layer_norm", x=x, w=w, b=w),
        "layer_norm without": call(LAYER, "layer_norm", x=x),
        "layer_norm of f32 weights": call(LAYER, "layer_norm", x=x, w=f, b=f),
        "softmax": call(SOFT, "softmax", x=x),
        "log_softmax": call(SOFT, "log_softmax", x=x),
    }


def scheduled(c: Call, knobs: Knobs | None = None, backend: str = "triton") -> Scheduled:
    where, _ = prepare(c)
    return schedule_kernel(where.kernel, where.variant, backend, knobs=knobs)


def held(*chunks: tuple[str, int], threads: int = 128) -> Schedule:
    return Schedule(threads, 1, chunks=chunks, name="looped", held=True)


# ---- what is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [32, 48, 64, 256])
@pytest.mark.parametrize("make", [rand, unaligned])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_values(dtype: torch.dtype, make, chunk: int) -> None:
    for n in (257, 384, 511):
        x = make(3, n, dtype=dtype)
        for c in (
            call(RMS, "rms_norm", x=x, w=rand(n, dtype=dtype)),
            call(LAYER, "layer_norm", x=x, w=rand(n, dtype=dtype), b=rand(n, dtype=dtype)),
            call(SOFT, "softmax", x=x),
            call(SOFT, "log_softmax", x=x),
            call(IN_PLACE, "k", x=x),
        ):
            triton_kit.check(c, n, override=held(("n", chunk)))
    c = call(MIXED, "k", x=make(3, 300, dtype=dtype), z=rand(3, 300, dtype=dtype), w=rand(300, dtype=dtype))
    triton_kit.check(c, 300, override=held(("n", chunk)))


def test_masked_lanes_are_what_the_pass_that_loads_them_makes_them() -> None:
    c = call(TWO, "k", x=rand(3, 20, 5))
    text = triton_kit.emitted(c, held(("n", 8))).source
    assert len(re.findall(r"tl\.load\(", text)) == 1 and "other=0.0" in text
    triton_kit.check(c, 20, override=held(("n", 8)))


def test_rows_that_are_not_finite() -> None:
    x = rand(4, 200)
    x[0] = float("-inf")
    x[1, 3], x[2, 199] = float("nan"), float("inf")
    for name in ("softmax", "log_softmax"):
        c = call(SOFT, name, x=x)
        whole, chunks = (triton_kit.run(c, override=s)["y"] for s in (None, held(("n", 64))))
        assert torch.equal(whole.isnan(), chunks.isnan()) and chunks[:3].isnan().all()
        triton_kit.check(c, 200, override=held(("n", 64)))


def test_what_is_gathered_is_loaded_again() -> None:
    at = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    c = call(GATHERED, "k", x=rand(3, 300), z=rand(3, 300), at=at)
    assert scheduled(c, Knobs(threads=128, chunks=(("n", 64),), hold=1)).held == {"z_mn"}
    triton_kit.check(c, 300, override=held(("n", 64)))


def test_integers() -> None:
    x = torch.arange(-300, 300, dtype=torch.int16).view(2, 300)
    triton_kit.check(call(INTEGERS, "k", x=x), override=held(("n", 64)))


def test_a_row_is_loaded_once() -> None:
    c = call(LAYER, "layer_norm", x=rand(3, 300), w=rand(300), b=rand(300))
    text = triton_kit.emitted(c, held(("n", 64))).source
    assert len(re.findall(r"tl\.load\(x_row", text)) == 1
    assert text.count("for n0 in tl.static_range(0, 300, 64):") == 4 and "tl.range" not in text
    assert text.count("x_mn = _packed(x_mn_held[n0 // 64]).to(tl.float32)") == 3
    assert "def _packed(x):" in text
    # All of it is on the way before the first pass waits, and what the passes share stays in the caches.
    first = text[text.index("x_mn_held = ()") : text.index("_acc = ")]
    assert "x_mn_held += (x_mn_chunk,)" in first and "_packed" not in first
    assert re.search(r"w_n = tl\.load\(w_ptr \+ n, mask=mask_n, eviction_policy=\"evict_last\"\)", text)
    # The maximum has a pass of its own: nothing is multiplied again where it rises.
    text = triton_kit.emitted(call(SOFT, "softmax", x=rand(3, 300)), held(("n", 64))).source
    assert len(re.findall(r"tl\.load\(x_row", text)) == 1 and text.count("tl.static_range(") == 4
    # What memory has in 32 bits stays as it is.
    text = triton_kit.emitted(call(RMS, "rms_norm", x=rand(3, 300, dtype=F32)), held(("n", 64))).source
    assert "x_mn = x_mn_held[n0 // 64]\n" in text and "_packed" not in text


# ---- which rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8192, 12344, 16384, 20480, 32000, 32769, 33000, 40000, 45056, 50304, 65536])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_wide_rows_fit_the_registers(dtype: torch.dtype, n: int) -> None:
    for name, c in kernels(n, dtype).items():
        s = scheduled(c)
        if name == "rms_norm" or (name == "softmax" and n % 2 == 0):
            assert s.held == {"x_mn"}, name
        if s.held:
            assert triton_kit.built(c).resources.local_bytes == 0, name


def test_rows_of_32_bits_and_several_of_16_fit_too() -> None:
    n = 32768
    for c, names in (
        (call(RMS, "rms_norm", x=empty(4, n, dtype=F32), w=empty(n, dtype=F32)), {"x_mn"}),
        (call(SOFT, "softmax", x=empty(4, n, dtype=F32)), {"x_mn"}),
        (call(ADD, "add_rms_norm", x=empty(4, n), residual=empty(4, n), w=empty(n)), {"x_mn", "residual_mn"}),
    ):
        assert scheduled(c).held == names
        assert triton_kit.built(c).resources.local_bytes == 0


def test_unaligned_rows_are_held_as_far_as_they_fit() -> None:
    """But for those whose passes are bound by loads of single elements whatever is held."""
    for text, name, n, expected in (
        (RMS, "rms_norm", 33001, True), (RMS, "rms_norm", 50257, True), (RMS, "rms_norm", 60001, False),
        (SOFT, "softmax", 33001, False),
    ):  # fmt: skip
        c = call(text, name, x=empty(4, n))
        assert bool(scheduled(c).held) is expected, (name, n)
        assert triton_kit.built(c).resources.local_bytes == 0


def test_what_is_not_held() -> None:
    n = 65536
    target = torch.zeros(4, dtype=torch.int64)
    for c in (
        call(RMS, "rms_norm", x=empty(4, 6144)),  # a block holds it as well
        call(LAYER, "layer_norm", x=empty(4, 2048)),
        call(RMS, "rms_norm", x=empty(4, n, dtype=F32)),  # twice the registers
        call(ADD, "add_rms_norm", x=empty(4, n), residual=empty(4, n), w=empty(n)),
        call(IN_PLACE, "k", x=empty(4, n)),
        call(CROSS, "cross_entropy", logits=empty(4, n), target=target),  # one pass
        call(SUMS, "k", x=empty(4, n)),
        call(TWO, "k", x=empty(4, 8192, 8)),
    ):
        s = scheduled(c)
        assert not s.held and not s.schedule.held, c.kernel.name
    assert not scheduled(call(RMS, "rms_norm", x=empty(4, n)), backend="cuda").held


# ---- who says otherwise --------------------------------------------------------------------------------------------


# Kernels that take more registers for an element than norms and softmaxes do: held, each spilled 16 to 424 bytes.
HEAVY = {
    "quotient": "    lo, hi = min(x[m, n], n), max(x[m, n], n)\n    y[m, n] = (x[m, n] - lo) / (hi - lo + 1e-3)\n",
    "function": "    g = x[m, n] * sigmoid(1.702 * x[m, n])\n    y[m, n] = softmax(g, n)\n",
    "place": "    b = argmax(x[m, n], n)\n    y[m, n] = x[m, n] - max(where(n == b, -1e30, x[m, n]), n)\n",
    "weights in all passes": "    y[m, n] = softmax(x[m, n] * w[n], n)\n",
}


@pytest.mark.parametrize(("dtype", "n"), [(BF16, 16384), (BF16, 33000), (BF16, 65536), (F32, 8192), (F32, 16384)])
@pytest.mark.parametrize("name", HEAVY)
def test_what_takes_more_registers_is_not_held(name: str, dtype: torch.dtype, n: int) -> None:
    text = HEAD.replace("x: T[*M, N]", "x: T[*M, N], w: T[N]") + HEAVY[name]
    c = call(text, "k", x=empty(4, n, dtype=dtype), w=empty(n, dtype=dtype))
    assert not scheduled(c).held


def test_knobs() -> None:
    c = call(RMS, "rms_norm", x=empty(4, 65536))
    was, without = scheduled(c).schedule, scheduled(c, Knobs(hold=0))
    assert was.held and not without.schedule.held and not without.held
    assert without.schedule.threads == 512 and without.schedule.chunks == (("n", 16384),)
    # Whoever sets chunks has them loaded again, unless they are to be held too.
    loaded = scheduled(c, Knobs(threads=1024, chunks=(("n", 32768),)))
    assert not loaded.held and any(isinstance(s, Loop) and s.down for s in loaded.steps)
    own = scheduled(c, Knobs(threads=512, chunks=(("n", 4096),), hold=1))
    assert own.held == {"x_mn"} and (own.schedule.threads, own.schedule.chunks) == (512, (("n", 4096),))
    assert scheduled(c, Knobs(threads=512)).held
    assert scheduled(call(IN_PLACE, "k", x=empty(4, 65536)), Knobs(hold=1)).held == {"x_mn"}
    assert scheduled(c, Knobs(hold=1, stages=3)).schedule.stages == 1  # there is no loop


@pytest.mark.parametrize(
    ("text", "n", "backend", "knobs", "message"),
    [
        (RMS, 65536, "cuda", Knobs(hold=1), "hold is for Triton alone"),
        (RMS, 65536, "triton", Knobs(hold=2), "hold is 2, expected 0 or 1"),
        (RMS, 4096, "triton", Knobs(hold=1), "hold is for rows in chunks"),
        (RMS, 65536, "triton", Knobs(hold=1, chunks=(("n", 512),)), "unrolled 128 times, more than 64"),
        (SUMS, 4096, "triton", Knobs(hold=1, chunks=(("n", 1024),)), "nothing to hold, as it sums over programs"),
        (HEAD + "    y[m, n] = x[m, n] + 1.0\n", 4096, "triton", Knobs(hold=1, chunks=(("n", 1024),)),
         "no two passes over chunks load the same"),
    ],
)  # fmt: skip
def test_knobs_that_are_refused(text: str, n: int, backend: str, knobs: Knobs, message: str) -> None:
    c = call(text, "rms_norm" if text is RMS else "k", x=empty(4, n))
    with pytest.raises(ScheduleError, match=message):
        scheduled(c, knobs, backend)


def test_a_cuda_schedule_holds_no_chunks() -> None:
    where, _ = prepare(call(RMS, "rms_norm", x=empty(4, 4096)))
    with pytest.raises(ScheduleError, match="for Triton"):
        schedule_kernel(where.kernel, where.variant, "cuda", override=replace(held(("n", 1024)), vector=8))


def test_a_statement_of_the_source(tmp_path: Path) -> None:
    rule = "    schedule triton when N > 8192: warps = 16, chunk[n] = 4096, hold = 1\n"
    text = HEAD.replace("    parallel", rule + "    parallel", 1) + "    y[m, n] = x[m, n] - mean(x[m, n], n)\n"
    assert scheduled(call(text, "k", x=empty(4, 16384))).held == {"x_mn"}
    path = tmp_path / "k.kdsl"
    path.write_text(text)
    options = ["--stage", "schedule", "--backend", "triton", "--dtype", "bf16", "--dim", "N=16384"]
    shown = CliRunner().invoke(app, ["show", str(path), *options])
    assert (
        "num_warps=16, 1 row a program, n in blocks of 4096 that stay in registers for later passes (x_mn)"
        in shown.output
    )
    for body, message in (
        (text.replace("chunk[n] = 4096", "chunk[n] = whole"), "'hold' is for rows in chunks, and here is none"),
        (text.replace("(y: T[*M, N])", "(y: T[*M, N], s: f32[N])") + "    s[n] += x[m, n]\n", "that do not sum over"),
        (
            text.replace("triton when", "cuda when").replace("warps", "threads").replace("= 16", "= 512"),
            "no knob of cuda",
        ),
    ):
        with pytest.raises(kgen.KgenError, match=message):
            kgen.loads(body)


ONE_PASS = {
    "no reduction": "    y[m, n] = x[m, n] + 1.0\n",
    "two reductions": "    s[m] = max(x[m, n], n) - sum(x[m, n], n)\n    y[m, n] = x[m, n] * x[m, N - 1 - n]\n",
}
SEVERAL = {
    "a store": "    y[m, n] = x[m, n] - max(x[m, n], n)\n",
    "a reduction": "    s[m] = sum(exp(x[m, n] - max(x[m, n], n)), n)\n    y[m, n] = x[m, n]\n",
    "named": "    r = sum(x[m, n], n) + 1.0\n    d = 1.0 / r\n    y[m, n] = x[m, n] * d\n",
    "a place": "    b = argmax(x[m, n], n)\n    y[m, n] = where(n == b, 0.0, x[m, n])\n",
}
TWO_OUT = HEAD.replace("(y: T[*M, N])", "(y: T[*M, N], s: f32[*M])")


@pytest.mark.parametrize("name", [*ONE_PASS, *SEVERAL])
def test_check_refuses_to_hold_where_no_size_has_a_second_pass(name: str) -> None:
    """And nothing else: what it lets through holds a row where there are chunks."""
    body = (ONE_PASS | SEVERAL)[name]
    body += "" if "s[m]" in body else "    s[m] = 0.0\n"
    rule = TWO_OUT.replace("    parallel", "    schedule triton: hold = 1, chunk[n] = 1024\n    parallel", 1)
    if name in SEVERAL:
        assert scheduled(call(rule + body, "k", x=empty(4, 4096))).held
        return
    with pytest.raises(kgen.KgenError) as error:
        kgen.loads(rule + body)
    text = str(error.value)
    assert "error[K0242]: 'hold' is for rows that several passes read, and here one pass is all" in text
    assert "schedule triton: hold = 1" in text and "^^^^^^^^" in text
    assert "= help: remove it: nothing along n is computed from a reduction over n" in text
    with pytest.raises(ScheduleError, match="no two passes over chunks load the same"):
        scheduled(call(TWO_OUT + body, "k", x=empty(4, 4096)), Knobs(hold=1, chunks=(("n", 1024),)))
    kgen.loads(rule.replace("hold = 1", "hold = 0") + body)


def test_check_asks_which_tile_indices_may_be_in_chunks() -> None:
    body = "    t = sum(x[m, n, d], d)\n    y[m, n] = t\n"
    text = TWO[: TWO.index("    p =")] + "    schedule triton: hold = 1{}\n" + body
    kgen.loads(text.format(""))  # y waits for a reduction over d, which may be taken in chunks
    with pytest.raises(kgen.KgenError, match="nothing along n is computed from a reduction over n"):
        kgen.loads(text.format(", chunk[d] = whole"))
    kgen.loads(text.format(", chunk[d] = whole").replace("= t\n", "= t - max(t, n)\n"))


def test_traffic_has_the_row_once() -> None:
    x = empty(64, 65536)
    where, _ = prepare(call(RMS, "rms_norm", x=x))

    def read(knobs: Knobs | None) -> tuple[int, int]:
        s = schedule_kernel(where.kernel, where.variant, "triton", knobs=knobs)
        (launch,) = traffic(s, where.dims)
        (of,) = (r for r in launch.requests if r.tensor == "x")
        return of.read, of.passes

    assert read(None) == (x.nbytes, 1)
    assert read(Knobs(hold=0)) == (2 * x.nbytes, 2)


def test_the_tuner_tries_both() -> None:
    where, _ = prepare(call(RMS, "rms_norm", x=empty(64, 65536)))
    found = candidates(where.kernel, where.variant, "triton")
    kinds = {(c.scheduled.schedule.held, c.scheduled.schedule.threads) for c in found}
    assert found[0].scheduled.held and {(True, 512), (False, 512)} <= kinds
    narrow, _ = prepare(call(RMS, "rms_norm", x=empty(64, 32768)))
    several = [c.scheduled.schedule for c in candidates(narrow.kernel, narrow.variant, "triton") if c.scheduled.held]
    # Of those of which more than one program runs at a time, with what the default's compiler is told and without.
    told = {(s.threads, s.chunks, s.registers) for s in several}
    assert several[0].by == "ladders" and several[0].registers == 64
    assert any(r == 64 and (t, chunks, 0) in told for t, chunks, r in told if chunks != several[0].chunks)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", [33001, 40000, 50257, 65536])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_values_on_a_gpu(dtype: torch.dtype, n: int) -> None:
    x = rand(3, n, dtype=dtype).cuda()
    w = rand(n, dtype=dtype).cuda()
    exact, unit, f = x.double(), torch.finfo(dtype).eps / 2, torch.nn.functional
    for name, got, want in (
        ("rms_norm", kgen.ops.rms_norm(x, w, backend="triton"), f.rms_norm(exact, (n,), w.double(), 1e-6)),
        ("layer_norm", kgen.ops.layer_norm(x, w, backend="triton"), f.layer_norm(exact, (n,), w.double())),
        ("softmax", kgen.ops.softmax(x, backend="triton"), exact.softmax(-1)),
    ):
        # One rounding of the result, and what f32 makes of a sum of n terms.
        slack = (n + 16) * torch.finfo(F32).eps * want.abs().max()
        assert ((got.double() - want).abs() <= unit * 1.01 * want.abs() + slack + torch.finfo(dtype).tiny).all(), name
