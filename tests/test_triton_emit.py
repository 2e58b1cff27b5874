"""Generated Triton: run on the CPU against float64, and compiled without a GPU to see what the machine code is like."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
import triton.language as tl
from cuda_kit import Call, agree, call, oracle, prepare
from emit_kernels import GATE, GRID, NORM, PICK, SCALED, SOFTMAX
from triton_kit import CACHE, built, check, emitted, run

from kgen.codegen.schedule import Schedule
from kgen.codegen.triton.reserved import HELPERS, RESERVED
from kgen.dsl.builtins import SCALAR_OPS
from kgen.runtime.triton_compile import TritonCompileError, compile_triton, load_module
from kgen.runtime.triton_interpret import TritonInterpretError
from kgen.runtime.triton_interpret import run as interpret

ROTATE = """kernel rotate(x: T[B, S, H, D], c: C[S, D]) -> (y: T[B, S, H, D]):
    require D % 2 == 0
    parallel b in B, s in S
    tile h in H, d in D // 2
    y[b, s, h, d] = x[b, s, h, d] * c[s, d] - x[b, s, h, d + D // 2]
    y[b, s, h, d + D // 2] = x[b, s, h, d + D // 2] * c[s, d + D // 2] + x[b, s, h, d]
"""

CHUNKS = ((128, 1, (("n", 256),)), (128, 2, (("n", 64),)), (64, 1, (("n", 33),)))
SCHEDULES = [Schedule(32, 1), Schedule(256, 4), Schedule(128, 16)]
SCHEDULES += [Schedule(t, r, 1, chunks, "looped") for t, r, chunks in CHUNKS]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype)


def norm(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    return call(NORM, "norm", x=rand(m, n, dtype=dtype), w=rand(n, dtype=dtype), offset=1.0)


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n", [*range(1, 10), 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 1000, 1023, 1024, 1025]
)
def test_row_kernel_widths(n: int) -> None:
    check(norm(3, n), n)
    check(call(SOFTMAX, "soft", x=rand(3, n, dtype=torch.bfloat16)), n)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_row_kernel_dtypes(m: int, dtype: torch.dtype) -> None:
    check(norm(m, 100, dtype), 100)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("text", [NORM, SOFTMAX])
def test_any_schedule_gives_the_same_values(schedule: Schedule, text: str) -> None:
    x = rand(5, 1000, dtype=torch.bfloat16)
    c = call(text, "soft", x=x) if text is SOFTMAX else call(text, "norm", x=x, w=rand(1000))
    check(c, 1000, schedule)


@pytest.mark.parametrize("schedule", [None, Schedule(64, 64), Schedule(128, 2048), Schedule(32, 1)], ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 13), (5, 264)])
def test_flat_kernel(m: int, n: int, schedule: Schedule | None) -> None:
    if schedule is not None and schedule.rows == 1:
        m, n = 1, 13  # a point a program is slow here
    gate = rand(m, n + 8, dtype=torch.bfloat16)[:, :n]  # rows that do not join
    check(call(GATE, "gate_up", gate=gate, up=rand(m, n, dtype=torch.bfloat16)), override=schedule)


@pytest.mark.parametrize(
    "schedule",
    [None, Schedule(32, 1), Schedule(256, 2), Schedule(128, 1, 1, (("i", 4),)), Schedule(128, 2, 1, (("i", 3),))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("i", "j"), [(1, 1), (6, 20), (33, 64)])
def test_two_tile_axes(i: int, j: int, schedule: Schedule | None) -> None:
    check(call(GRID, "grid", x=rand(3, i, j), w=rand(j)), i * j, schedule)


@pytest.mark.parametrize("d", [2, 6, 64])
def test_several_parallel_axes_and_halves(d: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        c = call(ROTATE, "rotate", x=rand(2, 3, 5, d, dtype=dtype), c=rand(3, d, dtype=dtype))
        check(c, 4)
        check(c, 4, Schedule(128, 4))


def test_strides_of_every_kind() -> None:
    x = rand(6, 64, dtype=torch.bfloat16)
    w = rand(64, dtype=torch.bfloat16)
    wide = torch.zeros(6, 200, dtype=torch.bfloat16)
    for view in (wide[:, :64], wide[:, 1:65], wide[:, :128:2], torch.zeros(64, 6, dtype=torch.bfloat16).t()):
        check(call(NORM, "norm", x=view.copy_(x), w=w), 64)
    check(call(NORM, "norm", x=x[:1].expand(6, 64), w=w[:1].expand(64)), 64)
    lead = rand(2, 3, 4, 64).transpose(0, 2)  # leading dimensions that do not merge
    check(call(NORM, "norm", x=lead, w=w), 64)
    gate = rand(2, 3, 4, 16).transpose(0, 2)
    check(call(GATE, "gate_up", gate=gate, up=gate.contiguous()))


def test_a_tensor_without_dimensions_beside_rows_of_every_kind() -> None:
    wide, s = rand(6, 40, dtype=torch.bfloat16), rand()
    for g in (wide, wide[:, :33], wide.t(), wide[:, ::2], wide.reshape(2, 3, 40).transpose(0, 1)):
        check(call(SCALED, "scaled", g=g, s=s))


@pytest.mark.parametrize("rows", [1, 4])
def test_gathers_in_and_out_of_range(rows: int) -> None:
    x, table = rand(6, 40, dtype=torch.bfloat16), rand(30, 40, dtype=torch.bfloat16)
    t = torch.tensor([0, 29, -1, 30, 1 << 33, 39])
    got = run(call(PICK, "pick", x=x, rows=table, t=t), Schedule(128, rows))
    assert torch.equal(got["best"], x.float().argmax(-1))
    inside = (t >= 0) & (t < 40)
    assert got["one"][~inside].isnan().all()
    assert torch.equal(got["one"][inside], x.float().gather(-1, t.clamp(0, 39)[:, None])[inside, 0])
    inside = (t >= 0) & (t < 30)
    assert got["row"][~inside].isnan().all()
    assert torch.equal(got["row"][inside], (x.float() + table[t.clamp(0, 29)].float())[inside].bfloat16())


def test_integer_gathers_out_of_range_read_the_lowest_value() -> None:
    text = """kernel take(x: i8[P], t: i32[N]) -> (y: i64[N]):
    parallel n in N
    y[n] = x[t[n]]
"""
    got = run(
        call(text, "take", x=torch.arange(10, dtype=torch.int8), t=torch.tensor([0, 9, 10, -1], dtype=torch.int32))
    )
    assert got["y"].tolist() == [0, 9, -128, -128]


EXTREMES = """kernel extremes(x: f32[*M, N]) -> (hi: f32[*M], lo: f32[*M], first: i64[*M], last: i64[*M]):
    parallel m in M
    tile n in N
    hi[m] = max(x[m, n], n)
    lo[m] = min(x[m, n], n)
    first[m] = argmax(x[m, n], n)
    last[m] = argmin(x[m, n], n)
"""


@pytest.mark.parametrize(
    "schedule", [None, Schedule(128, 1), Schedule(256, 8), Schedule(64, 1, 4, (("n", 64),))], ids=str
)
def test_extremes_with_nan_ties_and_infinities(schedule: Schedule | None) -> None:
    n = 300
    x = torch.zeros(5, n)
    x[0, [7, 270]] = 2.0  # ties: the first
    x[1, 200], x[1, 3] = torch.nan, 9.0  # NaN is extreme
    x[2] = -torch.inf
    x[3] = torch.inf
    x[4, [100, 40]] = torch.nan  # the first NaN
    got = run(call(EXTREMES, "extremes", x=x), schedule)
    assert got["first"].tolist() == [7, 200, 0, 0, 40]
    assert got["last"].tolist() == [0, 200, 0, 0, 40]
    for name, want in (("hi", x.amax(-1)), ("lo", x.amin(-1))):
        torch.testing.assert_close(got[name], want, equal_nan=True, rtol=0, atol=0)


REDUCTIONS = """kernel reductions(x: T[*M, N]) -> (p: T[*M], a: bool[*M], o: bool[*M], hi: T[*M], lo: T[*M], s: T[*M]):
    parallel m in M
    tile n in N
    p[m] = prod(x[m, n], n)
    a[m] = all(x[m, n] > 0, n)
    o[m] = any(x[m, n] > 3, n)
    hi[m] = max(x[m, n], n)
    lo[m] = min(x[m, n], n)
    s[m] = sum(x[m, n], n)
"""


@pytest.mark.parametrize("schedule", [None, Schedule(128, 2), Schedule(64, 1, 1, (("n", 4),))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_reductions(dtype: torch.dtype, schedule: Schedule | None) -> None:
    name = {torch.float32: "f32", torch.int32: "i32", torch.int64: "i64"}[dtype]
    x = torch.tensor([[1, 2, 3, 1, 2, 1, 1], [-1, 4, 0, 2, 2, 2, 2], [-5, -4, -3, -2, -1, -6, -7]]).to(dtype)
    c = call(REDUCTIONS.replace("T[", f"{name}["), "reductions", x=x)
    agree(run(c, schedule), oracle(c), 7)


def op_kernel() -> str:
    infix = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
             "ge": ">="}  # fmt: skip
    of_integers = {"floordiv", "mod", "and", "or", "not"}
    exprs: dict[str, str] = {}
    for op in SCALAR_OPS.values():
        if op.name in of_integers:
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
    return f"kernel ops(x: T[N], z: T[N]) -> ({outs}):\n    parallel n in N\n    a, b = x[n], z[n]\n{stores}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_scalar_op_computes_what_the_table_says(dtype: torch.dtype) -> None:
    c = call(op_kernel(), "ops", x=rand(70, dtype=dtype).abs() + 0.1, z=rand(70, dtype=dtype))
    agree(run(c), oracle(c))
    built(c)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers(dtype: torch.dtype) -> None:
    name = {torch.int32: "i32", torch.int64: "i64"}[dtype]
    text = f"""kernel ints(x: {name}[N], z: {name}[N], p: bool[N]) -> (
    q: {name}[N], r: {name}[N], m: {name}[N], s: {name}[N], f: bool[N], g: f32[N], k: i8[N], h: u8[N]
):
    parallel n in N
    a, b = x[n], z[n]
    q[n] = a // b
    r[n] = a % b
    m[n] = maximum(a, b) - minimum(-a, b)
    s[n] = abs(a) * sign(b) + n
    f[n] = (p[n] and not a > b) or a == b
    g[n] = a / b
    k[n] = i8(a * 3)
    h[n] = u8(a)
"""
    x = torch.arange(-100, 100, dtype=dtype)
    z = torch.tensor([3, -3, 7, -1] * 50, dtype=dtype)
    c = call(text, "ints", x=x, z=z, p=x % 2 == 0)
    agree(run(c), oracle(c))
    built(c)


def test_floats_become_integers_as_the_reference_says() -> None:
    text = """kernel whole(x: f32[N]) -> (a: i32[N], b: i64[N], c: i8[N], d: bool[N]):
    parallel n in N
    a[n] = i32(x[n])
    b[n] = i64(x[n])
    c[n] = i8(x[n])
    d[n] = bool(x[n])
"""
    x = torch.tensor([0.0, -0.9, 1.9, -7.5, 300.0, -300.0, 3e9, -3e9, 1e30, -1e30, torch.nan, torch.inf])
    c = call(text, "whole", x=x)
    agree(run(c), oracle(c))


def test_constants_keep_the_precision_of_f64() -> None:
    text = """kernel precise(x: f64[N]) -> (a: f64[N], b: f64[N], c: f64[N]):
    parallel n in N
    a[n] = maximum(x[n], 0.1)
    b[n] = where(x[n] > 0, 0.1, x[n])
    c[n] = pow(abs(x[n]), 0.1) + 0.7
"""
    c = call(text, "precise", x=rand(9, dtype=torch.float64))
    agree(run(c), oracle(c))


def test_rounding_in_the_middle_happens_once() -> None:
    text = """kernel twice(x: f32[N]) -> (y: f32[N], z: f32[N]):
    parallel n in N
    y[n] = bf16(x[n])
    z[n] = f16(x[n])
"""
    x = torch.tensor([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 3 * 2.0**-8, -1 - 2.0**-11, 65519.0, 65520.0, 1e-41])
    got = run(call(text, "twice", x=x))
    assert torch.equal(got["y"], x.bfloat16().float())
    assert torch.equal(got["z"], x.half().float())


@pytest.mark.parametrize("n", [32, 100])
def test_in_place(n: int) -> None:
    text = """kernel turn(x: inout T[*M, N]):
    require N % 2 == 0
    parallel m in M
    tile n in N // 2
    a, b = x[m, n], x[m, n + N // 2]
    x[m, n] = b
    x[m, n + N // 2] = a
"""
    c = call(text, "turn", x=rand(5, n, dtype=torch.bfloat16))
    check(c)
    flip = """kernel flip(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, N - 1 - n]
"""
    c = call(flip, "flip", x=rand(5, n, dtype=torch.bfloat16))
    check(c)
    source = emitted(c).source
    assert source.index("tl.load(") < source.index("tl.debug_barrier()") < source.index("tl.store(")


def test_programs_run_in_parallel_threads() -> None:
    calls = [norm(4, n) for n in (33, 100, 1000)]
    wrong: list[Exception] = []

    def work(c: Call) -> None:
        try:
            for _ in range(3):
                check(c, 1000)
        except Exception as error:  # an assertion in a thread is lost otherwise
            wrong.append(error)

    before = {name: getattr(tl, name) for name in dir(tl)}
    threads = [threading.Thread(target=work, args=(c,)) for c in calls for _ in range(2)]
    for t in threads:
        t.start()
    built(calls[0])  # the real language is untouched meanwhile
    for t in threads:
        t.join()
    assert not wrong
    assert all(getattr(tl, name) is value for name, value in before.items())


def test_interpreter_finds_masks_that_are_missing() -> None:
    c = norm(3, 100)
    where, tensors = prepare(c)
    program = emitted(c)
    values = [
        tensors[a.name] if a.kind == "tensor" else c.scalars[a.name] if a.kind == "scalar" else where.value(a)
        for a in program.args
    ]
    broken = re.sub(r",?\s*other=0\.0", "", program.source)
    assert broken != program.source
    interpret(type(program)(**{**vars(program), "source": broken}), 3, values)
    assert tensors["y"].isnan().any()
    broken = program.source.replace("tl.rsqrt", "tl.rsqrt_")
    with pytest.raises(TritonInterpretError, match="failed in norm"):
        interpret(type(program)(**{**vars(program), "source": broken}), 3, values)


# ---- machine code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [768, 1000, 4096, 16384, 65536])
@pytest.mark.parametrize("text", [NORM, SOFTMAX])
def test_rows_neither_spill_nor_load_narrow(text: str, n: int) -> None:
    x = torch.empty(64, n, dtype=torch.bfloat16)
    c = call(text, "soft", x=x) if text is SOFTMAX else call(text, "norm", x=x, w=torch.empty(n, dtype=torch.bfloat16))
    found = built(c)
    assert found.resources.local_bytes == 0
    assert found.resources.spill_store_bytes == 0
    sass = found.sass
    assert re.search(r"LDG\.E\.EL\.128", sass)  # EL: rows are what the caches give up last
    assert re.search(r"STG\.E(\.EF)?\.128", sass)  # EF: long rows are streamed past the caches
    assert not re.search(r"LDG\.E(\.EL)?\.(U16|U8)", sass)


@pytest.mark.parametrize("pad", [0, 8])
def test_flat_kernels_move_16_bytes_at_a_time(pad: int) -> None:
    x = torch.empty(64, 14336 + pad, dtype=torch.bfloat16)[:, :14336]
    c = call(GATE, "gate_up", gate=x, up=x)
    for cap in (80, 90, 100):
        assert built(c, cap).resources.local_bytes == 0
    sass = built(c).sass
    assert sass.count("LDG.E.128") == 2
    assert sass.count("STG.E.128") == 1


def test_heads_move_16_bytes_at_a_time() -> None:
    x, c = torch.empty(2, 16, 32, 128, dtype=torch.bfloat16), torch.empty(16, 128, dtype=torch.bfloat16)
    sass = built(call(ROTATE, "rotate", x=x, c=c)).sass
    assert sass.count("LDG.E.EL.128") + sass.count("LDG.E.128") >= 2
    assert not re.search(r"(LDG|STG)\.E(\.EL)?\.(U16|U8)", sass)


def test_odd_addresses_are_never_accessed_wide() -> None:
    x = torch.empty(64 * 100 + 1, dtype=torch.bfloat16)[1:].view(64, 100)
    sass = built(call(NORM, "norm", x=x, w=torch.empty(101, dtype=torch.bfloat16)[1:])).sass
    assert "LDG.E.U16" in sass
    assert not re.search(r"LDG\.E(\.EL)?\.(64|128)", sass)


def test_ptx_keeps_the_numerics_contract() -> None:
    text = """kernel contract(x: f32[*M, N]) -> (a: f32[*M, N], b: f32[*M, N], c: f32[*M], d: f32[*M, N]):
    parallel m in M
    tile n in N
    a[m, n] = x[m, n] / 3.0
    b[m, n] = sqrt(x[m, n])
    c[m] = max(x[m, n], n)
    d[m, n] = bf16(x[m, n] * 2.0)
"""
    ptx = built(call(text, "contract", x=torch.empty(4, 128))).ptx
    for needed in ("div.rn.f32", "sqrt.rn.f32", "max.NaN.f32", "cvt.rn.bf16"):
        assert needed in ptx, needed
    for wrong in ("div.full", "div.approx", "sqrt.approx", "max.f32", "ftz"):
        assert wrong not in ptx, wrong


def test_a_new_batch_size_needs_no_new_program() -> None:
    programs = {emitted(norm(m, 64)).source for m in (1, 2, 7, 16, 1000)}
    assert len(programs) <= 2  # an only row has no stride, so memory looks different
    assert len({emitted(norm(m, 64)).source for m in (2, 7, 16, 1000)}) == 1


# ---- text ----------------------------------------------------------------------------------------------------------


def test_text_reads_like_the_source() -> None:
    program = emitted(norm(4, 4000))
    lines = program.source.splitlines()
    assert "    # norm.kdsl:6: y[m, n] = x[m, n] * s * (offset + w[n])" in lines
    assert "    s = tl.rsqrt(tl.div_rn(s_sum, 4000.0) + eps)" in lines
    assert len(program.lines) == len(lines)
    store = next(i for i, line in enumerate(lines) if "x_mn * s * (offset + w_n)" in line)
    span = program.lines[store]
    assert span is not None
    assert span.line == 6
    assert max(map(len, lines)) <= 130


def test_nothing_is_defined_that_is_not_used() -> None:
    calls = [norm(4, 100), norm(4, 100000), call(GATE, "gate_up", gate=rand(3, 8), up=rand(3, 8))]
    calls.append(call(PICK, "pick", x=rand(6, 40), rows=rand(30, 40), t=torch.zeros(6, dtype=torch.int64)))
    for c in calls:
        text = emitted(c).source
        body = text[text.index("\n):\n") :]
        for name in re.findall(r"^ +(\w+) \+?= ", body, re.M):
            assert len(re.findall(rf"\b{name}\b", body)) > 1, name


def test_template_names_are_reserved() -> None:
    folder = Path(__file__).resolve().parents[1] / "templates" / "triton"
    names = re.findall(r"^def (\w+)\(", (folder / "helpers.py.j2").read_text(), re.M)
    assert tuple(names) == HELPERS
    assert set(names) <= RESERVED


def test_names_of_the_language_are_legal() -> None:
    text = """kernel float(int: f32[*tl, triton], lambda: f32) -> (range: f32[*tl, triton]):
    parallel print in tl
    tile class in triton
    _maximum = max(int[print, class], class)
    x_ptr = _maximum * 2.0
    range[print, class] = int[print, class] * lambda - x_ptr / triton
"""
    c = call(text, "float", int=rand(3, 50), **{"lambda": 2.0})
    check(c, 50)
    built(c)


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
    assert "tl.program_id(0).to(tl.int64)" in emitted(c).source
    built(c)


# ---- modules -------------------------------------------------------------------------------------------------------


def test_modules_are_files_named_by_their_content(tmp_path: Path) -> None:
    program = emitted(norm(4, 64))
    module = load_module(program.source, "norm", tmp_path)
    assert load_module(program.source, "norm", tmp_path) is module
    files = list(tmp_path.glob("*.py"))
    assert [f.read_text() for f in files] == [program.source]
    files[0].write_text("damaged")
    load_module(program.source + "\n", "norm", tmp_path)
    assert len(list(tmp_path.glob("*.py"))) == 2
    assert not list(tmp_path.glob("*.tmp"))


def test_rejected_code_names_the_line_of_the_source() -> None:
    c = norm(4, 64)
    where, _ = prepare(c)
    program = emitted(c)
    broken = type(program)(**{**vars(program), "source": program.source.replace("tl.rsqrt(", "tl.rsqrt(tl, ")})
    with pytest.raises(TritonCompileError, match=r"norm at norm\.kdsl:4"):
        compile_triton(broken, where.variant, 90, CACHE)
