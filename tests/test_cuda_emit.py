"""Generated CUDA C: run on the CPU against float64, and compiled for sm_90 to see what the machine code is like."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cuda_kit import Call, agree, call, check, compiled, oracle, run
from emit_kernels import GATE, GRID, NORM, PICK, SCALED, SOFTMAX

from kgen.codegen.cuda import host_source
from kgen.codegen.cuda.reserved import RESERVED
from kgen.codegen.cuda.text import Lines
from kgen.codegen.schedule import Schedule
from kgen.dsl.builtins import SCALAR_OPS
from kgen.dsl.source import SourceFile, Span
from kgen.runtime.nvrtc import compile_cuda


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype)


def norm(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    return call(NORM, "norm", x=rand(m, n, dtype=dtype), w=rand(n, dtype=dtype), offset=1.0)


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 7), (5, 100), (2, 1023), (3, 4096)])
def test_row_kernel(m: int, n: int, dtype: torch.dtype) -> None:
    check(norm(m, n, dtype), n)


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(32, 1, 8),
        Schedule(1024, 1, 4),
        Schedule(128, 4, 2),
        Schedule(256, 4, 8),
        Schedule(256, 64, 1),
        Schedule(128, 1, 8, (("n", 256),)),
        Schedule(512, 2, 8, (("n", 320),)),
        Schedule(64, 1, 1, (("n", 33),)),
    ],
    ids=str,
)
@pytest.mark.parametrize("text", [NORM, SOFTMAX])
def test_any_schedule_gives_the_same_values(schedule: Schedule, text: str) -> None:
    x = rand(5, 1000, dtype=torch.bfloat16)
    c = call(text, "soft", x=x) if text is SOFTMAX else call(text, "norm", x=x, w=rand(1000))
    # Threads in another order must not matter: a barrier that is missing shows here.
    for seed in (None, 1):
        check(c, 1000, schedule, seed)


@pytest.mark.parametrize("schedule", [None, Schedule(64, 64, 1), Schedule(128, 2048, 8), Schedule(32, 1024, 4)])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 13), (5, 264)])
def test_flat_kernel(m: int, n: int, schedule: Schedule | None) -> None:
    gate = rand(m, n + 8, dtype=torch.bfloat16)[:, :n]  # rows that do not join
    check(call(GATE, "gate_up", gate=gate, up=rand(m, n, dtype=torch.bfloat16)), override=schedule)


@pytest.mark.parametrize(
    "schedule",
    [None, Schedule(32, 1, 4), Schedule(256, 2, 4), Schedule(1024, 1, 1), Schedule(128, 1, 4, (("i", 3),))],
    ids=str,
)
@pytest.mark.parametrize(("i", "j"), [(1, 1), (6, 20), (33, 64)])
def test_two_tile_axes(i: int, j: int, schedule: Schedule | None) -> None:
    check(call(GRID, "grid", x=rand(3, i, j), w=rand(j)), i * j, schedule, seed=1)


def test_strides_of_every_kind() -> None:
    x = rand(6, 64, dtype=torch.bfloat16)
    w = rand(64, dtype=torch.bfloat16)
    wide = torch.zeros(6, 200, dtype=torch.bfloat16)
    for view in (wide[:, :64], wide[:, 1:65], wide[:, :128:2], torch.zeros(64, 6, dtype=torch.bfloat16).t()):
        check(call(NORM, "norm", x=view.copy_(x), w=w), 64)
    check(call(NORM, "norm", x=x[:1].expand(6, 64), w=w[:1].expand(64)), 64)
    lead = rand(2, 3, 4, 64).transpose(0, 2)  # leading dimensions that do not merge
    check(call(NORM, "norm", x=lead, w=w), 64)


def test_a_tensor_without_dimensions_beside_rows_of_every_kind() -> None:
    wide, s = rand(6, 40, dtype=torch.bfloat16), rand()
    for g in (wide, wide[:, :33], wide.t(), wide[:, ::2], wide.reshape(2, 3, 40).transpose(0, 1)):
        check(call(SCALED, "scaled", g=g, s=s))


def test_gathers_in_and_out_of_range() -> None:
    x, rows = rand(6, 40, dtype=torch.bfloat16), rand(30, 40, dtype=torch.bfloat16)
    t = torch.tensor([0, 29, -1, 30, 1 << 33, 39])
    got = run(call(PICK, "pick", x=x, rows=rows, t=t))
    assert torch.equal(got["best"], x.float().argmax(-1))
    inside = (t >= 0) & (t < 40)
    assert got["one"][~inside].isnan().all()
    assert torch.equal(got["one"][inside], x.float().gather(-1, t.clamp(0, 39)[:, None])[inside, 0])
    inside = (t >= 0) & (t < 30)
    assert got["row"][~inside].isnan().all()
    assert torch.equal(got["row"][inside], (x.float() + rows[t.clamp(0, 29)].float())[inside].bfloat16())


EXTREMES = """kernel extremes(x: f32[*M, N]) -> (hi: f32[*M], lo: f32[*M], first: i64[*M], last: i64[*M]):
    parallel m in M
    tile n in N
    hi[m] = max(x[m, n], n)
    lo[m] = min(x[m, n], n)
    first[m] = argmax(x[m, n], n)
    last[m] = argmin(x[m, n], n)
"""


def test_extremes_with_nan_ties_and_infinities() -> None:
    n = 300
    x = torch.zeros(5, n)
    x[0, [7, 270]] = 2.0  # ties: the first
    x[1, 200], x[1, 3] = torch.nan, 9.0  # NaN is extreme
    x[2] = -torch.inf
    x[3] = torch.inf
    x[4, [100, 40]] = torch.nan  # the first NaN
    for schedule in (None, Schedule(128, 1, 2), Schedule(256, 8, 1), Schedule(64, 1, 4, (("n", 64),))):
        got = run(call(EXTREMES, "extremes", x=x), schedule, seed=2)
        assert got["first"].tolist() == [7, 200, 0, 0, 40]
        assert got["last"].tolist() == [0, 200, 0, 0, 40]
        for name, want in (("hi", x.amax(-1)), ("lo", x.amin(-1))):
            torch.testing.assert_close(got[name], want, equal_nan=True, rtol=0, atol=0)


def test_every_scalar_op_computes_what_the_table_says() -> None:
    infix = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
             "ge": ">="}  # fmt: skip
    skipped = {"floordiv", "mod", "and", "or", "not"}  # of integers and bools: below
    exprs: dict[str, str] = {}
    for op in SCALAR_OPS.values():
        if op.name in skipped:
            continue
        if op.name in infix:
            exprs[op.name] = f"a {infix[op.name]} b"
        elif op.name == "neg":
            exprs[op.name] = "-a"
        elif op.name == "where":
            exprs[op.name] = "where(a < b, a, b)"
        else:
            exprs[op.name] = f"{op.name}({', '.join('ab'[: op.arity])})"
    bools = {n for n, e in exprs.items() if SCALAR_OPS[n].result == "bool"}
    outs = ", ".join(f"o_{n}: {'bool' if n in bools else 'T'}[N]" for n in exprs)
    stores = "".join(f"    o_{n}[n] = {e}\n" for n, e in exprs.items())
    text = f"kernel ops(x: T[N], z: T[N]) -> ({outs}):\n    parallel n in N\n    a, b = x[n], z[n]\n{stores}"
    for dtype in (torch.float32, torch.float64):
        c = call(text, "ops", x=rand(70, dtype=dtype).abs() + 0.1, z=rand(70, dtype=dtype))
        agree(run(c), oracle(c))
        compile_cuda(compiled(c).source, "ops")
    outs = "q: T[N], r: T[N], m: T[N], s: T[N], f: bool[N], g: f32[N], k: i8[N]"
    text = f"""kernel ints(x: T[N], z: T[N], p: bool[N]) -> ({outs}):
    parallel n in N
    a, b = x[n], z[n]
    q[n] = a // b
    r[n] = a % b
    m[n] = maximum(a, b) - minimum(-a, b)
    s[n] = abs(a) * sign(b) + n
    f[n] = (p[n] and not a > b) or a == b
    g[n] = a / b
    k[n] = i8(a)
"""
    for dtype in (torch.int32, torch.int64):
        text_of = text.replace("T[", {torch.int32: "i32[", torch.int64: "i64["}[dtype])
        x = torch.arange(-100, 100, dtype=dtype)
        z = torch.tensor([3, -3, 7, -1] * 50, dtype=dtype)
        c = call(text_of, "ints", x=x, z=z, p=x % 2 == 0)
        agree(run(c), oracle(c))
        compile_cuda(compiled(c).source, "ints")


# ---- machine code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [768, 4096, 16384, 65536])
@pytest.mark.parametrize("text", [NORM, SOFTMAX])
def test_rows_neither_spill_nor_load_narrow(text: str, n: int) -> None:
    x = torch.empty(64, n, dtype=torch.bfloat16)
    c = call(text, "soft", x=x) if text is SOFTMAX else call(text, "norm", x=x, w=torch.empty(n, dtype=torch.bfloat16))
    program = compiled(c)
    found = compile_cuda(program.source, program.entry, lines=program.lines)
    assert found.resources.local_bytes == 0
    assert "LDG.E.128" in found.sass
    assert re.search(r"STG\.E\.(EF\.)?128", found.sass)  # EF: what the caches give up first
    assert not re.search(r"LDG\.E\.(U16|U8)", found.sass)


def test_flat_kernels_move_16_bytes_at_a_time() -> None:
    x = torch.empty(64, 14336, dtype=torch.bfloat16)
    program = compiled(call(GATE, "gate_up", gate=x, up=x))
    for arch in ("sm_80", "sm_90", "sm_100"):
        assert compile_cuda(program.source, program.entry, arch).resources.local_bytes == 0
    sass = compile_cuda(program.source, program.entry).sass
    assert sass.count("LDG.E.128") == 2
    assert sass.count("STG.E.128") == 1


def test_odd_addresses_are_never_accessed_wide() -> None:
    x = torch.empty(64 * 100 + 1, dtype=torch.bfloat16)[1:].view(64, 100)
    program = compiled(call(GATE, "gate_up", gate=x, up=x))
    sass = compile_cuda(program.source, program.entry).sass
    assert "LDG.E.U16" in sass
    assert not re.search(r"LDG\.E\.(64|128)", sass)


def test_many_warps_share_one_barrier_a_reduction() -> None:
    program = compiled(norm(4, 16384))
    assert program.source.count("__syncthreads();") == 1
    x = torch.empty(4, 16384)
    both = call(EXTREMES, "extremes", x=x)
    assert compiled(both).source.count("__syncthreads();") == 1


# ---- text ----------------------------------------------------------------------------------------------------------


def test_text_reads_like_the_source() -> None:
    program = compiled(norm(4, 4000))
    text = program.source
    assert "// norm.kdsl:6: y[m, n] = x[m, n] * s * (offset + w[n])" in text
    assert "= x_mn * s * (offset + w_n);" in text
    assert "constexpr int N = 4000;" in text
    assert "#include" not in text
    # Every line that was generated from the source says from which.
    lines = text.splitlines()
    assert len(program.lines) == len(lines)
    store = next(i for i, line in enumerate(lines) if "= x_mn * s *" in line)
    span = program.lines[store]
    assert span is not None and span.line == 6


def test_a_comment_is_not_said_twice_in_a_row() -> None:
    """Across parts that are put together; behind an empty line or a block it is said again."""
    span = Span(SourceFile("f.kdsl", "y[n] = x[n]\n"), 1, 1, 1, 12)

    def part(gap: bool = False, block: bool = False) -> Lines:
        lines = Lines()
        lines.comment(span)
        lines.add("a;")
        if block:
            with lines.block("if (b)"):
                lines.add("c;")
        if gap:
            lines.gap()
        return lines

    def together(first: Lines) -> int:
        first.extend(part())
        return sum("// f.kdsl" in text for text, _ in first.items)

    assert [together(part()), together(part(gap=True)), together(part(block=True))] == [1, 2, 2]


def test_nothing_is_defined_that_is_not_used() -> None:
    for c in (norm(4, 100), norm(4, 4096), call(GATE, "gate_up", gate=rand(3, 8), up=rand(3, 8))):
        text = compiled(c).source
        body = text[text.index("\n{\n") :]
        for name in re.findall(r"const (?:int|long long|float|bool|\w+\*) (\w+) =", body):
            assert len(re.findall(rf"\b{name}\b", body)) > 1, name


def test_host_text_has_no_device_primitives() -> None:
    program = compiled(norm(4, 4096))
    assert "asm(" in program.source
    text = host_source(program)
    assert "asm(" not in text
    assert program.source.endswith(text[text.index("constexpr int") :])


def test_template_names_are_reserved() -> None:
    folder = Path(__file__).resolve().parents[1] / "templates" / "cuda"
    for path in folder.glob("*.cu.j2"):
        for name in re.findall(r"__forceinline__ [\w ]+?&? (\w+)\(", path.read_text()):
            assert name in RESERVED, name


def test_names_of_the_language_are_legal() -> None:
    text = """kernel double(int: f32[*threadIdx, float], lambda: f32) -> (THREADS: f32[*threadIdx, float]):
    parallel half in threadIdx
    tile warp in float
    tid = sum(int[half, warp], warp)
    THREADS[half, warp] = int[half, warp] * lambda - tid / float
"""
    c = call(text, "double", int=rand(3, 50), **{"lambda": 2.0})
    check(c, 50)
    compile_cuda(compiled(c).source, compiled(c).entry)


@pytest.mark.parametrize("text", [NORM, GATE, GRID])
def test_wide_variants_use_64_bit_indices_and_keep_the_values(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import kgen.runtime.layouts

    monkeypatch.setattr(kgen.runtime.layouts, "_wide", lambda *_: True)
    x = rand(5, 40)
    c = {
        NORM: lambda: call(NORM, "norm", x=x, w=rand(40)),
        GATE: lambda: call(GATE, "gate_up", gate=x, up=x),
        GRID: lambda: call(GRID, "grid", x=rand(5, 6, 40), w=rand(40)),
    }[text]()
    check(c, 240)
    program = compiled(c)
    assert "(long long)blockIdx.x" in program.source
    compile_cuda(program.source, program.entry)
