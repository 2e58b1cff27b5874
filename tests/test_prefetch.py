"""Rows that a program asks L2 for: which, from where, and never one that does not exist."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_kit
import pytest
import torch
from cuda_kit import Call, call

import kgen
from kgen.codegen import cuda
from kgen.codegen.derive.pair import module_of
from kgen.codegen.derive.written import gradients_of
from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel
from kgen.dsl.modules import load
from kgen.runtime.ahead import Choices, Target, binary, target

ROPE = Path(__file__).resolve().parents[1] / "ops" / "rope.kdsl"

NORM = """
kernel norm(x: T[*M, N], w: T[N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * rsqrt(mean(x[m, n] * x[m, n], n) + 1.0) * w[n]
"""
GRAD = """
kernel grad(x: T[*M, N], d_y: f32[*M, N], r: f32[*M]) -> (d_w: f32[N]):
    parallel m in M
    tile n in N
    d_w[n] += sum(x[m, n] * d_y[m, n], n) * r[m] + x[m, n]
"""
HEADS = """
kernel heads(x: f32[B, S, D]) -> (d_w: f32[D]):
    parallel b in B, s in S
    tile d in D
    d_w[d] += x[b, s, d] * max(x[b, s, d], d)
"""
STRIDED = """
kernel strided(x: f32[*M, 2 * N]) -> (y: f32[*M]):
    parallel m in M
    tile n in N
    y[m] = sum(x[m, 2 * n], n)
"""
# Two runs of each pair of tile indices with a gap between them: N elements, among which some are read twice, and 2N.
# Neighbouring rows share t.
GRID = """
kernel grid(x: T[B, S, H, G, 4 * N], t: T[B, N]) -> (y: T[B, S, H, G, N], z: T[B, S, H, G, N // 4]):
    parallel b in B, s in S
    tile i in H, g in G, n in N, u in N // 4
    y[b, s, i, g, n] = x[b, s, i, g, n] + x[b, s, i, g, n + 2 * N] * t[b, n] + x[b, s, i, g, n + 3 * N]
    z[b, s, i, g, u] = x[b, s, i, g, u + 1]
"""
HALVES = """
kernel halves(x: T[*M, 3 * N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * x[m, n + N] + x[m, n + 1]
"""
PAIRS = """
kernel pairs(x: T[*M, 2 * N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, 2 * n] * x[m, 2 * n + 1]
"""
DIAGONAL = """
kernel diagonal(x: T[*M, N, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n, n]
"""
REVERSED = """
kernel reversed(x: T[M, N]) -> (y: T[M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, N - 1 - n] * max(x[m, N - 1 - n], n)
"""
# The tile index m is two dimensions in memory.
STARRED = """
kernel starred(x: T[*M, B, N]) -> (y: T[*M, B, N]):
    parallel b in B
    tile m in M, n in N
    y[m, b, n] = x[m, b, n] * max(x[m, b, n], n)
"""
# A program sums over b and s for its own h: the programs of other h read t again.
SHARED = """
kernel shared(x: f32[H, B, S, D], t: T[B, S, D]) -> (d_w: f32[H, D]):
    parallel h in H, b in B, s in S
    tile d in D
    d_w[h, d] += x[h, b, s, d] * t[b, s, d] * max(x[h, b, s, d], d)
"""


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def source(c: Call, knobs: Knobs | None = None) -> str:
    where, _ = cuda_kit.prepare(c)
    return cuda.emit(schedule_kernel(where.kernel, where.variant, "cuda", knobs=knobs, num_sms=100)).source


def asked(text: str) -> list[str]:
    """The lines of the block that asks for a row."""
    found = re.search(r"// To L2: .*?\n(.*?)\n\n", text, re.S)
    return [line.strip() for line in found[1].split("\n")] if found else []


def test_a_persistent_program_asks_for_its_next_row() -> None:
    text = source(call(GRAD, "grad", x=randn(7, 4096, dtype=torch.bfloat16), d_y=randn(7, 4096), r=randn(7)))
    assert asked(text) == [
        "if (m < M - SPLITS) {",
        "const int m_ahead = m + SPLITS;",
        "const bf16* x_ahead = x + m_ahead * x_stride0;",
        "const float* d_y_ahead = d_y + m_ahead * d_y_stride0;",
        "for (int n_line = tid * 64; n_line < N; n_line += THREADS * 64) {",
        "prefetch_l2(x_ahead + n_line);",
        "}",
        "for (int n_line_2 = tid * 32; n_line_2 < N; n_line_2 += THREADS * 32) {",
        "prefetch_l2(d_y_ahead + n_line_2);",
        "}",
        "}",
    ]


def test_several_indices_are_taken_apart_for_the_row_ahead_too() -> None:
    lines = asked(source(call(HEADS, "heads", x=randn(3, 10, 4096)[:, :5])))
    assert lines[:4] == [
        "if (p < points - SPLITS) {",
        "const int p_ahead = p + SPLITS;",
        "const int b_ahead = p_ahead / S;",
        "const int s_ahead = p_ahead % S;",
    ]
    assert lines[4] == "const float* x_ahead = x + b_ahead * x_stride0 + s_ahead * x_stride1;"


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_program_with_a_row_asks_for_that_of_one_that_follows(ahead: int) -> None:
    c = call(NORM, "norm", x=randn(5, 2048, dtype=torch.bfloat16), w=randn(2048, dtype=torch.bfloat16))
    lines = asked(source(c, Knobs(ahead=ahead)))
    assert lines[:2] == [f"if (m < M - {100 * ahead}) {{", f"const int m_ahead = m + {100 * ahead};"]
    assert [line for line in lines if "prefetch" in line] == ["prefetch_l2(x_ahead + n_line);"]  # w is every row's


def test_what_does_not_lie_in_a_row_or_is_shared_by_rows_is_not_asked_for() -> None:
    assert not asked(source(call(NORM, "norm", x=randn(5, 64), w=randn(64)), Knobs(ahead=1, rows=2, threads=64)))
    assert not asked(source(call(STRIDED, "strided", x=randn(5, 512)), Knobs(ahead=1, rows=1, threads=128)))
    assert not asked(source(call(NORM, "norm", x=randn(5, 2048), w=randn(2048)), Knobs(ahead=0)))


@pytest.mark.parametrize("m", [1, 2, 9])
def test_results_stay_the_same(m: int) -> None:
    c = call(NORM, "norm", x=randn(m, 1000), w=randn(1000))
    where, _ = cuda_kit.prepare(c)
    made = schedule_kernel(where.kernel, where.variant, "cuda", knobs=Knobs(ahead=1), num_sms=2)
    cuda_kit.check(c, 1000, made.schedule, seed=1)


@pytest.mark.parametrize("m", [1, 133, 300])  # rows for 132 programs: some of them ask for a second and a third
def test_sums_stay_the_same(m: int) -> None:
    arguments = (randn(m, 260, dtype=torch.bfloat16), randn(m, 260), randn(m))
    results: list[torch.Tensor] = []
    for ahead in (0, 1):
        text = GRAD.replace("    parallel", f"    schedule cuda: blocks = 1, rows = 1, ahead = {ahead}\n    parallel")
        kernel = kgen.loads(text).grad
        program = kernel.prepare(*arguments, backend="cuda").program
        assert program is not None and bool(asked(program.source)) == (ahead > 0)
        results.append(kernel(*arguments, backend="cuda"))
    x, d_y, r = (t.double() for t in arguments)
    expected = ((x * d_y).sum(1, keepdim=True) * r[:, None] + x).sum(0)
    assert torch.equal(*results)
    cuda_kit.agree({"d_w": results[0]}, {"d_w": expected}, 260 + m)


# ---- rows of several runs --------------------------------------------------------------------------------------------


def rope(q: torch.Tensor, k: torch.Tensor, rotated: int | None = None, interleaved: bool = False) -> Call:
    """A call of RoPE; the first `rotated` features are rotated, or all."""
    cos, sin = (randn(q.shape[1], rotated or q.shape[3], dtype=q.dtype) for _ in range(2))
    return call(ROPE.read_text(), "rope", q=q, k=k, cos=cos, sin=sin, interleaved=interleaved)


def heads(*shape: int) -> torch.Tensor:
    """Of 3 x 37 tokens: more than the 100 multiprocessors of `source`."""
    return randn(3, 37, *shape, dtype=torch.bfloat16)


def python(lines: list[str]) -> str:
    """A block of C that asks for lines, as Python."""
    out: list[str] = []
    depth = 0
    for line in lines:
        if line == "}":
            depth -= 1
        elif not line.startswith("//"):
            line = re.sub(r"^const .* \*?(\w+) = (.*);$", r"\1 = \2", line).replace(" / ", " // ")
            line = re.sub(r"^for \(int (\w+) = (.*); \w+ < (.*); \w+ \+= (.*)\)", r"for \1 in range(\2, \3, \4)", line)
            line = re.sub(r"^prefetch_l2\((.*)\);$", r"out.append(\1)", line)
            out.append("    " * depth + line.replace(" {", ":"))
            depth += line.endswith("{")
    return "\n".join(out)


def lines_asked(c: Call, knobs: Knobs) -> list[tuple[str, int]]:
    """(tensor, line behind its begin) of all that the programs of the call ask for, sorted."""
    text, where = source(c, knobs), cuda_kit.prepare(c)[0]
    program = compile(python(asked(text)), "asked", "exec")
    known = {name: int(value) for name, value in re.findall(r"constexpr int (\w+) = (\d+);", text)} | dict(where.dims)
    for i, (name, axes) in enumerate(where.strides.items()):
        known |= {f"{name}_stride{axis}": strides[0] for axis, strides in enumerate(axes)} | {name: i << 40}
    rows = math.prod(a.extent.evaluate(where.dims) for a in where.kernel.parallel)
    out: list[int] = []
    for row in range(rows):
        for tid in range(known["THREADS"]):
            exec(program, {**known, "p": row, "m": row, "tid": tid, "out": out})
    names = list(where.strides)
    tensors = [(names[at >> 40], at & (1 << 40) - 1) for at in out]
    return sorted((name, at * c.tensors[name].element_size() // 128) for name, at in tensors)


def lines_read(c: Call, name: str, first: int = 0, end: int | None = None) -> list[tuple[str, int]]:
    """(tensor, line) of what the rows ahead read of each run `[..., first:end]`, sorted: rows are the first dimensions,
    100 of which no program asks for."""
    t = c.tensors[name]
    at = torch.arange(t.untyped_storage().size() // t.element_size()).as_strided(t.shape, t.stride())
    by_row = at.flatten(0, 1)[100:] if t.ndim > 2 else at[100:]
    lines = (by_row[..., first:end] * t.element_size() // 128).flatten(0, -2)
    return sorted((name, line) for run in lines.tolist() for line in dict.fromkeys(run))


FUSED = heads(6 * 64)
ROPES = {
    "dense": (rope(heads(32, 128), heads(8, 128)), Knobs(ahead=1)),
    "ragged": (rope(heads(13, 96), heads(3, 96)), Knobs(ahead=1, rows=1, threads=64)),
    "apart": (rope(heads(4, 256)[..., :128], heads(1, 192)[..., :128]), Knobs(ahead=1, rows=1, threads=64)),
    "fused": (
        rope(FUSED[..., :256].unflatten(-1, (4, 64)), FUSED[..., 256:320].unflatten(-1, (1, 64))),
        Knobs(ahead=1, rows=1, threads=32),
    ),
    "heads first": (
        rope(heads(40, 64).view(3, 40, 37, 64).transpose(1, 2), heads(5, 64).view(3, 5, 37, 64).transpose(1, 2)),
        Knobs(ahead=1, rows=1, threads=32),
    ),
    "some rotated": (rope(heads(8, 96), heads(8, 96), rotated=32), Knobs(ahead=1, rows=1, threads=64)),
    "interleaved": (rope(heads(33, 128), heads(2, 128), interleaved=True), Knobs(ahead=1, rows=1, threads=32)),
}


@pytest.mark.parametrize("name", ROPES)
def test_each_line_of_a_head_is_asked_for_once(name: str) -> None:
    c, knobs = ROPES[name]
    assert lines_asked(c, knobs) == sorted(lines_read(c, "k") + lines_read(c, "q"))


def test_runs_apart_and_of_several_tile_indices() -> None:
    c = call(GRID, "grid", x=heads(5, 3, 4 * 128), t=randn(3, 128, dtype=torch.bfloat16))
    lines = lines_asked(c, Knobs(ahead=1, rows=1, threads=32))
    assert lines == sorted(lines_read(c, "x", 0, 128) + lines_read(c, "x", 256, 512))


@pytest.mark.parametrize("text", [HALVES, PAIRS])
def test_runs_of_one_row_index_that_touch_are_one(text: str) -> None:
    name = text.split()[1].split("(")[0]
    c = call(text, name, x=randn(103, (3 if text == HALVES else 2) * 1024))
    lines = asked(source(c, Knobs(ahead=1)))
    assert [line for line in lines if "for" in line or "prefetch" in line] == [
        "for (int n_line = tid * 32; n_line < 2048; n_line += THREADS * 32) {",
        "prefetch_l2(x_ahead + n_line);",
    ]
    assert lines_asked(c, Knobs(ahead=1)) == lines_read(c, "x", 0, 2048)


def test_what_is_not_asked_for() -> None:
    knobs = Knobs(ahead=1, rows=1, threads=32)
    c = call(GRID, "grid", x=heads(5, 3, 4 * 16), t=randn(3, 16, dtype=torch.bfloat16))
    assert not asked(source(c, knobs))  # runs shorter than a line
    c = call(GRID, "grid", x=heads(4 * 64, 3, 5).permute(0, 1, 4, 3, 2), t=randn(3, 64, dtype=torch.bfloat16))
    assert not asked(source(c, knobs))  # elements apart
    assert not asked(source(call(DIAGONAL, "diagonal", x=randn(5, 64, 64)), knobs))
    assert not asked(source(call(REVERSED, "reversed", x=randn(5, 256)), knobs))
    assert asked(source(call(STARRED, "starred", x=randn(4, 5, 64)), knobs))
    assert not asked(source(call(STARRED, "starred", x=randn(2, 4, 5, 64)[:, :3]), knobs))
    c = call(SHARED, "shared", x=randn(2, 7, 8, 4096), t=randn(7, 8, 4096, dtype=torch.bfloat16))
    assert [line for line in asked(source(c)) if "prefetch" in line] == ["prefetch_l2(x_ahead + d_line);"]  # t is kept
    module = load(ROPE).module
    positions = target(module, module.kernels[0], Choices(dtype="bf16"))
    assert re.findall(r"prefetch_l2\((\w+_ahead)", positions.program("cuda").source) == ["q_ahead", "k_ahead"]
    assert asked(shipped(dims={"HQ": 128}).program("cuda").source)
    assert not asked(shipped(dims={"HQ": 129}).program("cuda").source)  # rows that would push each other out of L2


ASKED = [
    "// 2 lines of each i.",
    "if (tid < HQ * 2) {",
    "prefetch_l2(q_ahead + tid / 2 * q_stride2 + tid % 2 * 64);",
    "}",
    "// 2 lines of each j.",
    "if (tid < HK * 2) {",
    "prefetch_l2(k_ahead + tid / 2 * k_stride2 + tid % 2 * 64);",
    "}",
    "}",
]


def shipped(**choices: Any) -> Target:
    """RoPE as it is shipped, without positions."""
    module = load(ROPE).module
    return target(module, module.kernels[0], Choices(dtype="bf16", without=frozenset({"positions"}), **choices))


@pytest.mark.parametrize("interleaved", ["false", "true"])
def test_the_text_of_rope(interleaved: str) -> None:
    assert asked(shipped(consts={"interleaved": interleaved}).program("cuda").source) == [
        "if (p < B * S - 132) {",
        "const int p_ahead = p + 132;",
        "const int b_ahead = p_ahead / S;",
        "const int s_ahead = p_ahead % S;",
        "const bf16* q_ahead = q + b_ahead * q_stride0 + s_ahead * q_stride1;",
        "const bf16* k_ahead = k + b_ahead * k_stride0 + s_ahead * k_stride1;",
        *ASKED,
    ]


def test_more_lines_than_threads_take_a_loop_and_wide_calls_64_bits() -> None:
    c, knobs = ROPES["interleaved"]
    where, _ = cuda_kit.prepare(c)
    made = schedule_kernel(where.kernel, replace(where.variant, wide=True), "cuda", knobs=knobs, num_sms=100)
    lines = asked(cuda.emit(made).source)
    assert lines[:4] == [
        "if (p < B * S - 100) {",
        "const long long p_ahead = p + 100;",
        "const long long b_ahead = p_ahead / S;",
        "const long long s_ahead = p_ahead % S;",
    ]
    assert "long long B," in cuda.emit(made).source
    assert "for (int line = tid; line < HQ * 2; line += THREADS) {" in lines
    assert "prefetch_l2(q_ahead + line / 2 * q_stride2 + line % 2 * 64);" in lines


def test_the_gradients_of_rope() -> None:
    forward = shipped()
    for wanted, names in (({"q", "k"}, ["d_q_out", "d_k_out"]), ({"q", "k", "cos", "sin"}, [])):
        backward = module_of(gradients_of(forward.module, forward.kernel, frozenset(wanted)).backward)
        made = target(backward, backward.kernels[0], Choices(dims=forward.layout.dims))
        launches = made.program("cuda").launches
        assert (len(launches) > 1) == (not names)  # sums, whose registers are not for many addresses
        assert re.findall(r"prefetch_l2\((\w+)_ahead", "".join(p.source for p in launches)) == names


@pytest.mark.parametrize("interleaved", ["false", "true"])
def test_what_is_asked_for_takes_no_registers_that_a_row_needs(interleaved: str) -> None:
    made = shipped(consts={"interleaved": interleaved})
    found = binary(made, made.program("cuda"), "sm_90")
    assert found.ptx.count("prefetch.global.L2") == 2 and found.resources.local_bytes == 0
    assert found.resources.registers <= 72  # seven programs a multiprocessor


@pytest.mark.parametrize("name", ["ragged", "some rotated", "interleaved"])
def test_results_of_several_runs_stay_the_same(name: str) -> None:
    c, knobs = ROPES[name]
    where, _ = cuda_kit.prepare(c)
    made = schedule_kernel(where.kernel, where.variant, "cuda", knobs=knobs, num_sms=2)
    assert "if (p < B * S - 2) {" in cuda.emit(made).source
    cuda_kit.check(c, 2, made.schedule, seed=1)


@pytest.mark.parametrize(("arch", "policy"), [("sm_90", "::evict_last"), ("sm_80", "::evict_last"), ("sm_75", "")])
def test_what_is_asked_for_is_given_up_last_where_devices_can(arch: str, policy: str) -> None:
    module = load(ROPE.with_name("rms_norm.kdsl")).module
    made = target(module, module.kernels[0], Choices(dims={"N": 4096}, dtype="f32"))
    ptx = binary(made, made.program("cuda", capability=int(arch[3:])), arch).ptx
    assert set(re.findall(r"prefetch\.global\.L2(\S*)", ptx)) == {policy}
