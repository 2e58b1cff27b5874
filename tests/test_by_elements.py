"""Sums over programs where no program holds a row: numbers of the rows first, then stores and sums by elements.

Small kernels are cut as wide ones are, by taking it that their sums do not fit registers.
"""

from __future__ import annotations

import re
from typing import Any

import cuda_kit
import derive_kit
import pytest
import sums_kit
import torch
from cuda_kit import Call, call
from sums_kit import within_bounds
from test_build import ROOT
from test_build import run as command
from unplanned_cases import CASES, Case

import kgen
from kgen.codegen import cuda, ladders, pipeline, triton
from kgen.codegen.candidates import candidates
from kgen.codegen.interpret import interpret
from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Loop, Scheduled
from kgen.codegen.sums import has_sums
from kgen.codegen.torch_dtypes import TORCH
from kgen.codegen.traffic import traffic
from kgen.dsl import ir
from kgen.dsl.modules import load
from kgen.runtime.differential import answer, ask

TEXT = (
    (ROOT / "tests" / "kernels" / "sums.kdsl").read_text()
    + """
kernel softmax_grad(x: T[*M, N], g: T[*M, N], w: f32[N]) -> (d_x: T[*M, N], s: f32[N], d_w: f32[N], top: f32[*M]):
    parallel m in M
    tile n in N
    most = max(x[m, n], n)
    e = exp(x[m, n] - most)
    p = e / sum(e, n)
    d_x[m, n] = p * (g[m, n] * w[n] - sum(p * g[m, n] * w[n], n))
    s[n] += p
    d_w[n] += p * g[m, n]
    top[m] = most

kernel picked(x: T[M, N], b: bool[M, N]) -> (y: T[M, N], best: i64[M], s: f32[N], hits: i64[N], total: f32[]):
    parallel m in M
    tile n in N
    at = argmax(x[m, n], n)
    y[m, n] = where(any(b[m, n], n), x[m, n] - x[m, at], 0.0)
    best[m] = at
    s[n] += x[m, at] * x[m, n]
    hits[n] += where(n == at, 1, 0)
    total[] += sum(x[m, n], n)

kernel in_place(x: inout T[M, N]) -> (s: f32[N]):
    parallel m in M
    tile n in N
    c = x[m, n] - mean(x[m, n], n)
    x[m, n] = c
    s[n] += c * c

kernel batched(x: T[B, M, N], g: T[B, M, N]) -> (y: T[B, M, N], s: f32[B, N], all: T[N], by_m: f32[M]):
    parallel b in B, m in M
    tile n in N
    r = rsqrt(mean(x[b, m, n] * x[b, m, n], n) + 1e-6)
    y[b, m, n] = x[b, m, n] * r
    s[b, n] += g[b, m, n] * x[b, m, n] * r
    all[n] += g[b, m, n]
    by_m[m] += r

kernel of_all(w: f32[N], x: T[M, N]) -> (s: f32[N]):
    parallel m in M
    tile n in N
    s[n] += x[m, n] * max(w[n], n)

kernel two_tiles(x: T[M, K, N]) -> (y: T[M, K, N], s: f32[K, N]):
    parallel m in M
    tile k in K, n in N
    c = x[m, k, n] - max(x[m, k, n], k, n)
    y[m, k, n] = c
    s[k, n] += c
"""
)
# What is read after it is overwritten, or reduced along a part of what a target has: not cut.
WHOLE = """
kernel reversed(x: inout T[M, N]) -> (s: f32[N]):
    parallel m in M
    tile n in N
    old = x[m, n]
    most = max(old, n)
    x[m, n] = x[m, N - 1 - n] * 0.5
    s[n] += old * most

kernel scaled(r: inout f32[M], x: T[M, N]) -> (s: f32[N]):
    parallel m in M
    tile n in N
    old = r[m]
    s[n] += x[m, n] * old
    r[m] = old + sum(x[m, n], n)

kernel partly(x: T[M, K, N]) -> (s: f32[N]):
    parallel m in M
    tile k in K, n in N
    s[n] += max(x[m, k, n], k)

kernel beside(x: T[M, K, N]) -> (y: T[M, K, N], s: f32[N]):
    parallel m in M
    tile k in K, n in N
    y[m, k, n] = x[m, k, n] + 1.0
    s[n] += sum(x[m, k, n], k)
"""
F32, BF16 = torch.float32, torch.bfloat16
SEEDS = (None, 1, 2)
G = torch.Generator()


def randn(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=G.manual_seed(sum(shape))).to(dtype)


def arguments(kernel: str, m: int, n: int, dtype: torch.dtype) -> dict[str, Any]:
    x, other = randn(m, n, dtype=dtype), randn(m, n + 1, dtype=dtype)[:, 1:].contiguous()
    match kernel:
        case "rms_norm_grad":
            return {"x": x, "d_y": other, "w": randn(n, dtype=dtype), "rstd": randn(m).abs() + 0.5}
        case "affine_grad":
            return {"x": x, "d_y": other}
        case "softmax_grad":
            return {"x": x, "g": other, "w": randn(n)}
        case "picked":
            return {"x": x, "b": randn(m, n) > 2.0}
        case "group_sums":
            return {"x": randn(3, m, n, dtype=dtype)}
        case "batched":
            return {"x": randn(3, m, n, dtype=dtype), "g": randn(3, m + 1, n, dtype=dtype)[:, 1:].contiguous()}
        case "of_all":
            return {"x": x, "w": randn(n)}
        case "head_sums":
            return {"x": randn(2, m, 3, n // 2 * 2, dtype=dtype)}
        case "scaled":
            return {"x": x, "r": randn(m)}
        case "two_tiles" | "partly" | "beside":
            return {"x": randn(m, 3, n, dtype=dtype)}
    return {"x": x}


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of no row fit registers, and rows of more than 32 elements are taken in chunks by Triton."""
    monkeypatch.setattr(pipeline, "sums_in_memory", lambda s: s.sums is not None)
    monkeypatch.setattr(ladders, "TRITON_WHOLE", 32)
    monkeypatch.setattr(ladders, "TRITON_CHUNK", ladders.Ladder(((ladders.INF, 32),)))
    monkeypatch.setattr(ladders, "TRITON_SUM_CHUNK", 32)


def launches(c: Call, backend: str, knobs: Knobs | None = None) -> list[Scheduled]:
    where, _ = cuda_kit.prepare(c)
    first = schedule_kernel(where.kernel, where.variant, backend, knobs=knobs)
    return [first, *first.then]


def entries(c: Call, backend: str) -> list[str]:
    return [s.kernel.name.removeprefix(c.kernel.name) for s in launches(c, backend)]


CUT = (
    "rms_norm_grad", "affine_grad", "softmax_grad", "picked", "in_place", "batched", "of_all", "two_tiles",
    "group_sums",
)  # fmt: skip


# ---- on every executor ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("m", "n", "dtype"), [(1, 37, F32), (7, 96, BF16), (140, 33, BF16)])
@pytest.mark.parametrize("kernel", CUT)
def test_kernels(kernel: str, m: int, n: int, dtype: torch.dtype) -> None:
    """Ragged and even rows; threads in any order give the same bits, and so does a second run."""
    c = call(TEXT, kernel, **arguments(kernel, m, n, dtype))
    assert all(entries(c, b)[:2] == ["", "_elements"] for b in ("cuda", "triton"))
    results = [sums_kit.run(c, "cuda", seed=seed) for seed in SEEDS]
    within_bounds(c, results[0])
    assert all(torch.equal(results[0][name], again[name]) for again in results[1:] for name in again)
    got = sums_kit.run(c, "triton")
    within_bounds(c, got)
    assert all(torch.equal(got[name], again) for name, again in sums_kit.run(c, "triton").items())


def pasted(file: str, kernel: str, n: int, *options: str) -> str:
    """The backward of a shipped kernel as a kernel of its own."""
    args = (
        "--stage",
        "backward",
        *(() if "--dtype" in options else ("--dtype", "bf16")),
        "--dim",
        f"M=64,N={n}",
        *options,
    )
    code, out, err = command("show", f"{ROOT / 'ops' / file}:{kernel}", *args)
    assert code == 0, err
    return out.replace("backward ", "kernel d_", 1)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("n", [40, 77])
@pytest.mark.parametrize("kernel", ["rms_norm", "layer_norm", "add_rms_norm"])
def test_derived_backwards(kernel: str, n: int) -> None:
    text = pasted(f"{kernel}.kdsl", kernel, n)
    m = 19
    shapes = {"w": (n,), "saved_r": (m,), "saved_mu": (m,), "saved_rstd": (m,)}
    taken = re.findall(r"(\w+): (?:const )?(?:[A-Z]\w*|f32|bf16)\[([^\]]*)\]", text.split("->")[0])
    tensors: dict[str, Any] = {}
    for i, (name, dims) in enumerate(taken):
        shape = shapes.get(name, (m, n) if "N" in dims and "M" in dims else (n,) if "N" in dims else (m,))
        own = torch.randn(*shape, generator=G.manual_seed(i))
        tensors[name] = own.abs() + 0.5 if len(shape) == 1 and shape[0] == m else own.to(BF16)
    c = call(text, f"d_{kernel}", **tensors)
    for backend in ("cuda", "triton"):
        assert entries(c, backend)[:2] == ["", "_elements"]
        within_bounds(c, sums_kit.run(c, backend))


def backward_of(case: Case) -> Call | None:
    """A call of the derivative of a kernel, if that sums over programs."""
    made = case.make(*case.sizes[-1], F32, G.manual_seed(1))
    c = derive_kit.call(UNPLANNED, case.kernel, made)
    derived = derive_kit.derived_of(c)
    if not has_sums(derived.backward):
        return None
    outputs = interpret(derived.forward, c.tensors, derive_kit.scalars_of(derived.forward, c.scalars), precision="f64")
    gradients = derive_kit.cotangents(outputs, derived)
    given = {**c.tensors, **{r: outputs[r] for r in derived.residuals}}
    given |= {d: gradients[name] for name, d in derived.cotangents.items()}
    inputs = {t.name: given[t.name].to(TORCH[t.dtype]) for t in derived.backward.tensors if t.role == "in"}
    known = {s.name: c.scalars.get(s.name, s.default) for s in derived.backward.scalars}
    return Call(derived.backward, inputs, {name: value for name, value in known.items() if value is not None})


UNPLANNED = load(ROOT / "tests" / "kernels" / "unplanned.kdsl").module
BACKWARDS = {c.kernel: c for c in CASES if c.differentiable and c.kernel != "two_gathers" and F32 in c.dtypes}


@pytest.mark.usefixtures("wide")
def test_derivatives_of_kernels_that_nobody_planned_for() -> None:
    cut: set[str] = set()
    for name, case in BACKWARDS.items():
        c = backward_of(case)
        for backend in ("cuda", "triton") if c is not None else ():
            assert c is not None
            if "_elements" in entries(c, backend):
                cut.add(name)
                within_bounds(c, sums_kit.run(c, backend))
    assert len(cut) > 1, cut


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("kernel", ["reversed", "scaled", "partly", "beside"])
def test_what_cannot_be_cut_is_not(kernel: str, backend: str) -> None:
    c = call(WHOLE, kernel, **arguments(kernel, 5, 40, F32))
    assert entries(c, backend) == ["", "_finish"]


# ---- what is cut ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wide")
def test_rows_are_read_for_what_is_reduced_and_once_more() -> None:
    """Without a reduction there is no launch over rows; with one, it stores a number a row for each value that the
    elements need, not one for each reduction."""
    c = call(TEXT, "softmax_grad", **arguments("softmax_grad", 5, 64, BF16))
    rows, elements, _ = launches(c, "triton")
    assert rows.sums is None and not any(isinstance(s, Loop) for s in elements.steps)
    stored = [s.tensor for step in rows.steps for s in step.body if isinstance(s, ir.Store)]
    assert stored.count("top") == 1 and len(stored) == 4  # the maximum, the sum and the product of both; `top`
    columns = "kernel f(x: T[*M, N], y: T[*M, N]) -> (s: f32[N]):\n    parallel m in M\n    tile n in N\n"
    c = call(columns + "    s[n] += x[m, n] * y[m, n]\n", "f", x=randn(5, 64), y=randn(5, 64))
    assert entries(c, "triton") == entries(c, "cuda") == ["", "_finish"]
    assert not launches(c, "cuda")[0].kernel.tiles


@pytest.mark.usefixtures("wide")
def test_the_second_launch_begins_with_what_the_first_has_read_last() -> None:
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 5, 64, BF16))
    first, second, _ = cuda.emit(launches(c, "cuda")[0]).launches
    assert "for (int m = M - 1 - split; m >= 0; m -= SPLITS)" in second.source and "m >= 0" not in first.source
    text = triton.emit(launches(c, "triton")[0]).launches[1].source
    assert "for m_done in range(split, M, SPLITS):" in text and "m = M - 1 - m_done" in text
    assert text.index("tl.load(w_ptr") < text.index("for m_done")  # weights are the same in all rows
    # Without a launch before it, it has nothing to begin with.
    c = call(TEXT, "affine_grad", **arguments("affine_grad", 5, 64, BF16))
    sums = [s.sums for s in launches(c, "cuda") if s.sums is not None and s.sums.split is not None]
    assert [s.down for s in sums] == [True, False]  # of columns, and of all


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_what_the_launches_ask_for(backend: str) -> None:
    """The row twice, the gradient once; weights once a program of the second launch, not once a row."""
    m, n = 512, 4096
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", m, n, BF16))
    rows, elements, _ = traffic(launches(c, backend)[0], {"M": m})
    assert rows.read == 2 * 2 * m * n + 2 * m * n + 4 * m and rows.written == 4 * m
    asked = {r.tensor: r for r in elements.requests}
    assert asked["x"].read == asked["d_y"].read == asked["d_x"].written == 2 * m * n
    blocks = -(-n // 2048)
    assert asked["rstd"].read == 4 * m * blocks
    splits = elements.programs // blocks
    assert asked["w"].read == 2 * n * splits
    assert asked["d_w_partial"].written == 4 * n * splits


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("n", "ragged"), [(4096, False), (4100, True)])
def test_columns_are_masked_where_programs_have_too_many(n: int, ragged: bool) -> None:
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 3, n, BF16))
    text = triton.emit(launches(c, "triton")[0]).launches[1].source
    assert ("mask=" in text) == ragged
    within_bounds(c, sums_kit.run(c, "triton"))


def test_threads_for_what_there_is() -> None:
    """A vector a thread of a row that is reduced in one pass; no more rows of shares at a time than there are."""
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 1, 65536, BF16))
    rows, elements, finish = launches(c, "triton")
    assert (rows.schedule.threads, rows.schedule.chunks) == (256, (("n", 2048),))
    shares = elements.schedule.programs // (65536 // elements.schedule.rows)
    assert shares == 8 and (finish.schedule.rows, finish.schedule.threads) == (8, 8 * 32 // 4)
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 1, 4096, BF16))
    whole, finish = launches(c, "triton")
    assert whole.schedule.programs > 64 and finish.schedule.rows == 64


# ---- who asks for it -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wide")
def test_knobs() -> None:
    """Those of rows and chunks are for a program that holds rows; the others fit both launches."""
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 5, 64, BF16))
    for knobs in (Knobs(chunks=(("n", 32),)), Knobs(rows=1), Knobs(chunks=(("n", 64),))):
        assert [s.kernel.name for s in launches(c, "triton", knobs)] == ["rms_norm_grad", "rms_norm_grad_finish"]
    rows, elements, _ = launches(c, "triton", Knobs(threads=64, blocks=3, stages=2))
    assert rows.schedule.threads == elements.schedule.threads == 64
    assert elements.sums is not None and elements.sums.blocks == 3
    rows, elements, _ = launches(c, "cuda", Knobs(ahead=0, blocks=3, peel=0))
    assert rows.schedule.ahead == 0 and elements.sums is not None and elements.sums.blocks == 3


@pytest.mark.parametrize(("backend", "n"), [("cuda", 140000), ("triton", 65536), ("triton", 24576)])
def test_a_tuner_tries_rows_that_are_held_and_chunks_too(backend: str, n: int) -> None:
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 2, n, BF16))
    where, _ = cuda_kit.prepare(c)
    found = candidates(where.kernel, where.variant, backend)
    by_elements = [f for f in found if f.scheduled.then[0].kernel.name.endswith("_elements")]
    held = [f for f in found if f not in by_elements]
    assert found[0] in by_elements and len(by_elements) > 3
    assert any(f.scheduled.schedule.chunks for f in held)
    if backend == "cuda":
        assert any(f.scheduled.schedule.cluster > 1 and f.scheduled.sums is not None for f in held)
    # The row is read twice by elements; in chunks, sums are read and written beside it.
    of_rows = [f.cost for f in held if f.scheduled.schedule.chunks]
    assert 1.6 < min(f.cost for f in by_elements[1:]) < min(of_rows)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("n", [16384, 65536, 140003])
@pytest.mark.parametrize("kernel", CUT)
def test_gpu(kernel: str, n: int, backend: str) -> None:
    """Rows as wide as it is meant for, and those that Triton just holds; the same bits at each call."""
    module = kgen.loads(TEXT, "by_elements.kdsl")
    for m in (1, 300):
        made = {k: t.cuda() for k, t in arguments(kernel, m, n, BF16).items()}
        got = answer(ask(module[kernel], made), backend, repeat=True)
        assert got.status == "ok", got.message
