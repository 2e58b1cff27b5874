"""Sums over programs (`out[n] += e`) on every executor, against formulas in float64 under the derived bound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_kit
import pytest
import torch
from cuda_kit import call
from sums_kit import run, within_bounds

import kgen
from kgen.codegen import cuda, triton
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Schedule, ScheduleError
from kgen.dsl.parser import parse_text
from kgen.runtime import nvrtc
from kgen.runtime.ahead import Choices, binary, target
from kgen.runtime.differential import against, answer, ask
from kgen.runtime.placement import LAYOUTS
from kgen.runtime.stages import Workspace
from kgen.runtime.triton_compile import compile_triton

FILE = Path(__file__).parent / "kernels" / "sums.kdsl"
TEXT = FILE.read_text()
MODULE = kgen.load(FILE)
BACKENDS = ("reference", "cuda", "triton")
G = torch.Generator()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=G.manual_seed(sum(shape))).to(dtype)


def rows(kernel: str, m: int, n: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the kernels over rows of a matrix."""
    out = {"d_y": randn(m, n, dtype=dtype), "x": randn(m, n + 1, dtype=dtype)[:, 1:].contiguous()}
    if kernel == "rms_norm_grad":
        out |= {"w": randn(n, dtype=dtype), "rstd": randn(m).abs() + 0.5}
    return out


# ---- formulas ------------------------------------------------------------------------------------------------------


def rms_norm_grad(d_y, x, w, rstd):
    y = x * rstd[..., None]
    g = d_y * w
    d_x = rstd[..., None] * (g - y * (g * y).mean(-1, keepdim=True))
    return d_x, (d_y * y).flatten(0, -2).sum(0)


def affine_grad(d_y, x):
    return (d_y * x).flatten(0, -2).sum(0), d_y.flatten(0, -2).sum(0), d_y.sum()


def mixed(x):
    return x.sum(1), (x * x).sum(0), (x + 1).sum(), 2 * x


def counts(t, n):
    return (t > 3).sum(), torch.tensor(t.numel()), n.sum()


def head_sums(x):
    halves = x.sum((0, 1, 2))
    return x.sum((0, 1)), halves


F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
CASES: list[tuple[str, dict[str, Any], Callable[..., tuple[torch.Tensor, ...]]]] = [
    ("rms_norm_grad", rows("rms_norm_grad", 7, 96, BF16), rms_norm_grad),
    ("rms_norm_grad", rows("rms_norm_grad", 140, 33, F32), rms_norm_grad),
    ("rms_norm_grad", rows("rms_norm_grad", 3, 20000, BF16), rms_norm_grad),  # a cluster of blocks a row
    ("rms_norm_grad", rows("rms_norm_grad", 5, 64, F64), rms_norm_grad),
    ("affine_grad", rows("affine_grad", 134, 10, BF16), affine_grad),
    ("affine_grad", {"d_y": randn(3, 5, 40), "x": randn(3, 5, 40)}, affine_grad),
    ("column_sums", {"x": randn(137, 50)}, lambda x: (x.sum(0),)),
    ("column_sums", {"x": randn(19, 512, dtype=BF16)}, lambda x: (x.sum(0),)),
    ("column_sums", {"x": randn(40, 300).t()}, lambda x: (x.sum(0),)),
    ("total", {"x": randn(10007, dtype=BF16)}, lambda x: (x.sum(),)),
    ("total", {"x": randn(3, 1, 5, dtype=F64)}, lambda x: (x.sum(),)),
    ("group_sums", {"x": randn(5, 17, 24)}, lambda x: (x.sum(1), x.amax(2).sum(1))),
    ("mixed", {"x": randn(6, 301)}, mixed),
    ("counts", {"t": torch.arange(1000) % 7, "n": torch.arange(1000, dtype=torch.int32)}, counts),
    ("head_sums", {"x": randn(2, 9, 3, 16)}, head_sums),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces hold NaN (integers: a large number) unless they are asked to be zero."""

    def allocate(self: Workspace, device: torch.device) -> torch.Tensor:
        poison = float("nan") if self.dtype.is_floating_point else 10**8
        return torch.full(self.shape, 0 if self.zeroed else poison, dtype=self.dtype, device=device)

    monkeypatch.setattr(Workspace, "allocate", allocate)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("kernel", "arguments", "formula"), CASES, ids=IDS)
def test_formula_and_executors(kernel: str, arguments: dict[str, torch.Tensor], formula: Callable[..., Any]) -> None:
    question = ask(MODULE[kernel], arguments)
    exact = formula(**{n: t.double() if t.is_floating_point() else t for n, t in arguments.items()})
    written = [t.name for t in question.ir.tensors if t.role != "in"]
    for name, c in against(question, dict(zip(written, exact, strict=True))).items():
        assert c.ok, f"{name}: {c}"
    for backend in BACKENDS:
        got = answer(question, backend, repeat=True)
        assert got.status == "ok", f"{backend}: {got.message}"


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("m", [0, 1, 131, 132, 133, 1061])
def test_row_counts_around_the_multiprocessors(m: int) -> None:
    for arguments in (rows("affine_grad", m, 8, F32), rows("rms_norm_grad", m, 256, F32)):
        kernel = MODULE["rms_norm_grad" if "w" in arguments else "affine_grad"]
        for backend in BACKENDS:
            outs = kernel(**arguments, backend=backend)
            if m == 0:
                assert all(torch.equal(o, torch.zeros_like(o)) for o in outs)
        if m:
            question = ask(kernel, arguments)
            assert all(answer(question, b).status == "ok" for b in BACKENDS)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_strided_inputs_and_outputs(layout: str, backend: str) -> None:
    question = ask(MODULE["rms_norm_grad"], rows("rms_norm_grad", 6, 48, F32), layout)
    got = answer(question, backend)
    assert got.status == "ok", got.message


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(("m", "n"), [(1, 140004), (7, 140003), (0, 140004)])
def test_rows_too_wide_for_registers_are_read_by_rows_and_by_elements(m: int, n: int, backend: str) -> None:
    kernel, arguments = MODULE["rms_norm_grad"], rows("rms_norm_grad", m, n, BF16)
    outs = kernel(**arguments, backend=backend)
    if m == 0:
        assert all(torch.equal(o, torch.zeros_like(o)) for o in outs)
        return
    got = answer(ask(kernel, arguments), backend, repeat=True)
    assert got.status == "ok", got.message


def test_sums_that_need_a_part_of_the_row_stay_with_it() -> None:
    text = """
kernel f(x: T[*M, K, N]) -> (s: f32[N]):
    parallel m in M
    tile k in K, n in N
    s[n] += max(x[m, k, n], k)
"""
    wide = Choices(dims={"M": 8, "K": 2, "N": 600000}, dtype="bf16")
    for source, entries in ((TEXT, ["", "_elements", "_finish"]), (text, ["", "_finish"])):
        module = parse_text(source)
        for backend in ("cuda", "triton"):
            program = target(module, module.kernels[0], wide).program(backend)
            assert [p.entry.removeprefix(program.entry) for p in program.launches] == entries


# ---- any schedule, any order of threads ----------------------------------------------------------------------------


SCHEDULES = [
    ("affine_grad", {"d_y": randn(13, 72), "x": randn(13, 72)}, Schedule(64, 1, 4, programs=5)),
    ("affine_grad", {"d_y": randn(13, 72), "x": randn(13, 72)}, Schedule(128, 4, 2, programs=2)),
    ("affine_grad", {"d_y": randn(13, 72), "x": randn(13, 72)}, Schedule(64, 1, 4, (("n", 32),), programs=3)),
    ("rms_norm_grad", rows("rms_norm_grad", 11, 40, BF16), Schedule(64, 1, 4, (("n", 24),), programs=4)),
    ("rms_norm_grad", rows("rms_norm_grad", 11, 40, BF16), Schedule(256, 8, 8, programs=1)),
    ("column_sums", {"x": randn(11, 200)}, Schedule(32, 128, 2, programs=6)),
    ("total", {"x": randn(1001)}, Schedule(64, 256, 2, programs=3)),
    ("group_sums", {"x": randn(3, 11, 20)}, Schedule(64, 2, 4, programs=7)),
    ("mixed", {"x": randn(5, 67)}, Schedule(32, 32, 1, programs=4)),
    ("head_sums", {"x": randn(2, 5, 3, 16)}, Schedule(64, 2, 2, programs=3)),
]


@pytest.mark.parametrize(("kernel", "arguments", "schedule"), SCHEDULES)
def test_schedules(kernel: str, arguments: dict[str, torch.Tensor], schedule: Schedule) -> None:
    c = call(TEXT, kernel, **arguments)
    first = run(c, "cuda", schedule)
    within_bounds(c, first)
    # Threads in any order give the same bits: no barrier is missing, and the order of additions is fixed.
    for seed in (1, 2, 3):
        again = run(c, "cuda", schedule, seed)
        assert all(torch.equal(first[n], again[n]) for n in first)
    within_bounds(c, run(c, "triton", schedule))


def test_sums_in_chunks_take_one_row_at_a_time() -> None:
    c = call(TEXT, "affine_grad", d_y=randn(4, 64), x=randn(4, 64))
    where, _ = cuda_kit.prepare(c)
    with pytest.raises(ScheduleError, match=r"line \d+ sums along it; give rows = 1"):
        schedule_kernel(where.kernel, where.variant, "cuda", override=Schedule(64, 2, 1, (("n", 32),)))


# ---- the generated code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_chunk_adds_to_has_a_name_of_its_own(backend: str) -> None:
    """Scalars have names too."""
    f = kgen.loads("""kernel f(x: T[M, N], s_partial_before: f32) -> (s: f32[N]):
    schedule cuda: chunk[n] = 32
    schedule triton: chunk[n] = 32
    parallel m in M
    tile n in N
    s[n] += x[m, n] * s_partial_before
""")["f"]
    got = answer(ask(f, {"x": randn(7, 137), "s_partial_before": 3.0}), backend)
    assert got.status == "ok", got.message


@pytest.mark.parametrize("n", [1024, 4096, 8192, 12288, 16384, 65536, 140000])
def test_machine_code_does_not_spill(n: int, tmp_path: Path) -> None:
    """The backward of a normalisation in bf16: 16-byte accesses in CUDA, no register in local memory in either."""
    c = call(TEXT, "rms_norm_grad", **rows("rms_norm_grad", 2, n, BF16))
    where, _ = cuda_kit.prepare(c)
    for p in cuda.emit(schedule_kernel(where.kernel, where.variant, "cuda")).launches:
        assert nvrtc.compile_cuda(p.source, p.entry, "sm_90", lines=p.lines).resources.local_bytes == 0
        assert "atomic" not in p.source
        assert len(p.lines) == p.source.count("\n")
    for p in triton.emit(schedule_kernel(where.kernel, where.variant, "triton")).launches:
        variant = where.variant if p.stage is None else p.stage.variant
        assert compile_triton(p, variant, 90, tmp_path).resources.local_bytes == 0


def test_one_launch_makes_the_sums_of_all_targets_alike() -> None:
    """Sums over the same indices share a launch, and so do the ends of those with the same elements."""
    c = call(TEXT, "affine_grad", d_y=randn(4, 64), x=randn(4, 64))
    entries = [p.entry for p in cuda_kit.compiled(c).launches]
    assert entries == ["affine_grad", "affine_grad_finish", "affine_grad_finish_2"]
    c = call(TEXT, "mixed", x=randn(4, 64))
    sums = [p.stage.sums for p in cuda_kit.compiled(c).launches if p.stage is not None]
    assert [s.over for s in sums if s is not None and s.split is not None] == [("m",), ("g",), ("g", "m")]


def test_source_names_and_lines() -> None:
    """Generated code keeps names and shows the line of each sum."""
    c = call(TEXT, "affine_grad", d_y=randn(4, 2048), x=randn(4, 2048))
    where, _ = cuda_kit.prepare(c)
    line = next(i for i, text in enumerate(TEXT.splitlines(), 1) if "d_b[n] +=" in text)
    for backend, emitter in (("cuda", cuda), ("triton", triton)):
        program = emitter.emit(schedule_kernel(where.kernel, where.variant, backend))
        assert f"affine_grad.kdsl:{line}: d_b[n] += d_y[m, n]" in program.source
        for text, span in zip(program.source.splitlines(), program.lines, strict=True):
            if "d_b_partial_sum" in text:
                assert span is not None and span.line == line, text


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_every_launch_compiles_ahead_of_time(backend: str) -> None:
    module = parse_text(TEXT, "sums.kdsl")
    declared = next(k for k in module.kernels if k.name == "affine_grad")
    made = target(module, declared, Choices(dims={"M": 8, "N": 64}))
    binaries = [binary(made, p, "sm_90") for p in made.program(backend).launches]
    assert len(binaries) == 3 and all(b.cubin and not b.resources.local_bytes for b in binaries)


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_gpu(backend: str) -> None:
    """Every case, and row counts around the number of multiprocessors, with the same bits at each call."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    cases = [(name, arguments) for name, arguments, _ in CASES]
    cases += [("affine_grad", rows("affine_grad", m, 4096, BF16)) for m in (1, sms - 1, sms, sms + 1, 16 * sms + 1)]
    for name, arguments in cases:
        question = ask(MODULE[name], {n: t.cuda() for n, t in arguments.items()})
        got = answer(question, backend, repeat=True)
        assert got.status == "ok", f"{name}: {got.message}"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_gpu_graph(backend: str) -> None:
    """A warm call can be captured; a replay sees new inputs."""
    arguments: dict[str, Any] = {n: t.cuda() for n, t in rows("rms_norm_grad", 300, 1024, F32).items()}
    kernel = MODULE["rms_norm_grad"]
    kernel(**arguments, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(**arguments, backend=backend)
    arguments["d_y"].mul_(3.0)
    graph.replay()
    expected = kernel(**arguments, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
