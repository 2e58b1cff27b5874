"""Rows that begin at any address: whole vectors of them, and the elements around the vectors one by one."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
from pathlib import Path

import cuda_kit
import pytest
import torch
from cuda_kit import Call, call, check, compiled
from emit_kernels import NORM, PICK, SOFTMAX

import kgen
from kgen.codegen.candidates import candidates
from kgen.codegen.knobs import Knobs
from kgen.codegen.layout import layout_of, peel
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Schedule, Scheduled, ScheduleError
from kgen.dsl.modules import load
from kgen.runtime.ahead import Choices, binary, target
from kgen.runtime.placement import place

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OPS = Path(__file__).resolve().parent.parent / "ops"
WIDTHS = (1, 7, 8, 9, 31, 1000, 1001, 4099, 50257, 65537)

TEXT = """
kernel shift_(x: inout T[*M, N], s: f32[*M]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, n] - s[m] * max(x[m, n], n)

kernel mixed(x: T[*M, N], w: W[N], b: B[*M, N]) -> (y: f32[*M, N], z: T[*M, N]):
    parallel m in M
    tile n in N
    e = exp(x[m, n] - max(x[m, n], n)) * w[n]
    y[m, n] = e / sum(e, n) + b[m, n]
    z[m, n] = x[m, n] - e

kernel labelled(x: T[*M, N], t: i64[*M]) -> (loss: f32[*M], g: T[*M, N], best: i64[*M]):
    parallel m in M
    tile n in N
    loss[m] = logsumexp(x[m, n], n) - x[m, t[m]]
    g[m, n] = softmax(x[m, n], n) - where(n == t[m], 1.0, 0.0)
    best[m] = argmax(x[m, n], n)

kernel triple(x: T[B, S, N]) -> (y: T[B, S, N]):
    parallel b in B, s in S
    tile n in N
    y[b, s, n] = x[b, s, n] - mean(x[b, s, n], n)

kernel columns(x: T[*M, N]) -> (y: T[*M, N], s: f32[N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] - mean(x[m, n], n)
    s[n] += x[m, n]

kernel total(x: T[*M, N]) -> (y: T[*M, N], s: f32[]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] - mean(x[m, n], n)
    s[] += max(x[m, n], n)

kernel upside_down(x: T[M, N]) -> (y: T[M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * x[M - 1 - m, n]

kernel cut(x: T[*M, N + 1]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n]

kernel lagged(x: T[*M, N], z: T[*M, N]) -> (s: f32[*M]):
    parallel m in M
    tile n in N - 1
    s[m] = sum(x[m, n] * z[m, n + 1], n)

kernel turned_(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, N - 1 - n] + 1.0

kernel halves(x: T[*M, 2 * N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * x[m, n + N] - sum(x[m, n], n)
"""


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype)


def scheduled(c: Call, knobs: Knobs | None = None) -> Scheduled:
    where, _ = cuda_kit.prepare(c)
    return schedule_kernel(where.kernel, where.variant, "cuda", knobs=knobs)


def can(c: Call) -> bool:
    s = scheduled(c)
    return peel(s.kernel, s.variant) is not None


def ways(c: Call, n: int) -> list[Schedule]:
    """The default schedule and, where rows can be peeled, peeled ones: whole, in chunks, with narrower vectors."""
    if not can(c):
        return [scheduled(c).schedule]
    chunk = max(8, n // 3 // 8 * 8)
    peeled = [Knobs(peel=1), Knobs(peel=1, chunks=(("n", chunk),)), Knobs(peel=1, vector=2)]
    return [scheduled(c).schedule, *(scheduled(c, k).schedule for k in peeled)]


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("name", ["softmax", "norm", "in place", "labelled"])
def test_every_width(name: str, n: int) -> None:
    rows = 9 if n < 5000 else 3  # each of them begins elsewhere
    x = rand(rows, n)
    c = {
        "softmax": lambda: call(SOFTMAX, "soft", x=x),
        "norm": lambda: call(NORM, "norm", x=x, w=rand(n), offset=1.0),
        "in place": lambda: call(TEXT, "shift_", x=x, s=rand(rows, dtype=F32)),
        "labelled": lambda: call(TEXT, "labelled", x=x, t=torch.arange(rows) * 5 % n),
    }[name]()
    assert can(c) == (n % 8 != 0)
    for schedule in ways(c, n):
        assert schedule.peeled == (n % 8 != 0) or schedule.by == "ladders"
        check(c, n, schedule, seed=1)


@pytest.mark.parametrize("n", [9, 1001, 2050])
@pytest.mark.parametrize(("x", "w", "b"), [(BF16, F32, BF16), (F16, F16, F32), (F32, BF16, F16), (F16, BF16, F16)])
def test_elements_of_several_sizes(x: torch.dtype, w: torch.dtype, b: torch.dtype, n: int) -> None:
    """Vectors are 16 bytes of the widest tensor, y; of narrower ones they are less."""
    c = call(TEXT, "mixed", x=rand(9, n, dtype=x), w=rand(n, dtype=w), b=rand(9, n, dtype=b))
    for schedule in ways(c, n):
        check(c, n, schedule)
    axis = layout_of(scheduled(c, Knobs(peel=1))).axis("n")
    assert axis.vector == 4 and axis.peel is not None


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(256, 8, 8, peeled=True),
        Schedule(128, 4, 4, peeled=True),
        Schedule(64, 1, 8, peeled=True),
        Schedule(1024, 1, 8, peeled=True),
        Schedule(32, 1, 8, (("n", 64),), peeled=True),
        Schedule(128, 2, 8, (("n", 320),), peeled=True),
        Schedule(64, 1, 8, (("n", 36),), peeled=True),
        Schedule(64, 1, 8, (("n", 33),), peeled=True),
        Schedule(128, 1, 8, peeled=True, cluster=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("text", [NORM, SOFTMAX])
def test_any_schedule_gives_the_same_values(schedule: Schedule, text: str) -> None:
    x = rand(5, 1001)
    c = call(text, "soft", x=x) if text is SOFTMAX else call(text, "norm", x=x, w=rand(1001))
    for seed in (None, 1):
        check(c, 1001, schedule, seed)


def test_gathers_of_rows_stay_out_of_it() -> None:
    """rows[t[m], v] begins elsewhere than x[m, v]."""
    x, rows = rand(6, 1001), rand(30, 1001)
    assert not can(call(PICK, "pick", x=x, rows=rows, t=torch.tensor([0, 29, -1, 30, 7, 3])))


# ---- memory --------------------------------------------------------------------------------------------------------


def around(values: torch.Tensor, layout: str) -> torch.Tensor:
    """`values`, laid out as `layout` says, with NaN around every element."""
    return place(values, layout).tensor


@pytest.mark.parametrize("n", [31, 1001, 1008, 4099])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded", "offset", "padded"])
def test_memory_of_every_kind(layout: str, n: int) -> None:
    x = around(rand(9, n), layout)
    c = call(SOFTMAX, "soft", x=x)
    for schedule in ways(c, n):
        check(c, n, schedule)
    # Of a transposed input nothing is contiguous along n, and of an expanded one all rows are aligned.
    assert can(c) == (n % 8 != 0 and layout in ("contiguous", "transposed", "sliced"))


def test_which_rows_are_alike() -> None:
    def norm(x: torch.Tensor, w: torch.Tensor) -> bool:
        return can(call(NORM, "norm", x=x, w=w))

    wide = torch.zeros(9, 1040, dtype=BF16)
    assert norm(rand(9, 1001), rand(1001)) and norm(rand(9, 1001), around(rand(1001), "offset"))
    assert not norm(wide[:, :1001], rand(1001))  # x begins aligned, y does not
    assert not norm(around(rand(9, 1001), "offset"), rand(1001))
    assert not norm(rand(9, 1003)[:, :1001], rand(1001))
    assert norm(rand(3, 3, 1001), rand(1001)) and not norm(rand(3, 3, 1001).transpose(0, 1), rand(1001))
    assert not can(call(SOFTMAX, "soft", x=rand(1, 1001).expand(9, 1001)))
    # In place there is nothing else to be like.
    assert can(call(TEXT, "shift_", x=wide[:, :1001], s=rand(9, dtype=F32)))
    assert can(call(TEXT, "triple", x=rand(2, 3, 1001)))
    assert not can(call(TEXT, "columns", x=rand(9, 1001))) and not can(call(TEXT, "total", x=rand(9, 1001)))
    assert not can(call(TEXT, "upside_down", x=rand(9, 1001))) and not can(call(TEXT, "cut", x=rand(9, 1002)))
    assert not can(call(TEXT, "lagged", x=rand(9, 1001), z=rand(9, 1001)))
    assert not can(call(TEXT, "turned_", x=rand(9, 1001)))
    assert not can(call(TEXT, "halves", x=rand(9, 2002)))  # halves begin where the other's middle is


@pytest.mark.parametrize("chunks", [(), (("n", 256),)])
def test_aligned_rows_that_end_within_a_vector(chunks: tuple[tuple[str, int], ...]) -> None:
    """Logits of a padded vocabulary, without the padding: nothing stands in front of the first vector."""
    x = around(rand(9, 1008), "contiguous")[:, :1001]
    c = call(TEXT, "shift_", x=x, s=rand(9, dtype=F32))
    s = scheduled(c, Knobs(chunks=chunks))
    axis = layout_of(s).axis("n")
    assert axis.peel is not None and axis.peel.lead is None and axis.peel.edge == 7
    check(c, 1001, s.schedule)
    assert "n_head" not in compiled(c, s.schedule).source


@pytest.mark.parametrize("layout", ["contiguous", "offset", "padded", "sliced"])
def test_in_place_in_memory_of_every_kind(layout: str) -> None:
    """By a call of the runtime, which looks where the tensor lies: one element further, rows begin elsewhere."""
    shift = kgen.loads(TEXT)["shift_"]
    s = rand(9, dtype=F32)
    placed = place(rand(9, 1001), layout, written=True)
    expected = rand(9, 1001)
    shift(placed.tensor, s, backend="cuda")
    shift(expected, s, backend="reference")
    assert torch.equal(placed.tensor, expected) and placed.guard_intact()


@pytest.mark.parametrize("n", [257, 1001, 1002, 1007])
def test_weights_are_not_read_beyond_their_end(n: int) -> None:
    """Of a weight two aligned vectors are read for each of the row: the second may not reach beyond it. Pages are too
    coarse to see that, so the last vector is told from the text."""
    source = compiled(call(NORM, "norm", x=rand(3, n), w=rand(n)), None).source
    assert "load_shifted<bf16x8>(w + n, n_head)" in source
    (end,) = re.findall(r"const int n_end = ([^;]*);", source)
    for head in range(8):
        last = eval(end.replace("/", "//"), {"n_head": head, "N": n}) - 8  # where the last vector begins
        assert (last - head) % 8 == 0 and last - head + 2 * 8 <= n < last - head + 3 * 8 + 7


@pytest.mark.parametrize(("w", "lanes"), [(BF16, "bf16x8"), (F32, "f32x8"), (torch.float64, "f64x8")])
def test_weights_of_any_size_are_shifted(w: torch.dtype, lanes: str) -> None:
    for n in (1001, 1002):  # rows of 1002 are aligned to the vectors of two elements that are among the ways
        c = call(NORM, "norm", x=rand(9, n), w=rand(n, dtype=w))
        assert f"load_shifted<{lanes}>" in compiled(c).source
        for schedule in ways(c, n):
            check(c, n, schedule)
            assert "(x_row + n, n_head)" not in compiled(c, schedule).source
    # What is not aligned itself is read one by one.
    c = call(NORM, "norm", x=rand(9, 1001), w=around(rand(1001, dtype=w), "offset"))
    assert can(c) and "load_shifted" not in compiled(c).source
    check(c, 1001)


@pytest.mark.parametrize("name", ["shift_", "labelled", "triple", "turned_", "columns"])
def test_nothing_around_is_written(name: str) -> None:
    x = rand(9, 1001) if name != "triple" else rand(3, 3, 1001)
    extra = {"shift_": {"s": rand(9, dtype=F32)}, "labelled": {"t": torch.arange(9)}}.get(name, {})
    c = call(TEXT, name, x=x, **extra)
    if name == "columns":  # which cuda_kit does not launch: several programs share it
        assert not scheduled(c).schedule.peeled
        return
    where, tensors = cuda_kit.prepare(c)
    placed = {
        t.name: place(tensors[t.name], "contiguous", written=t.role != "in", keep=t.role == "in")
        for t in c.kernel.tensors
    }
    program = cuda_kit.emit(schedule_kernel(where.kernel, where.variant, "cuda"))
    assert program.schedule.peeled == (name != "turned_")
    cuda_kit.launch(c, where, program, {n: p.tensor for n, p in placed.items()})
    for t in c.kernel.tensors:
        assert placed[t.name].unchanged() if t.role == "in" else placed[t.name].guard_intact()
    cuda_kit.agree(
        {t.name: placed[t.name].tensor for t in c.kernel.tensors if t.role != "in"}, cuda_kit.oracle(c), 1001
    )


def fenced(rows: int, n: int, at_end: bool) -> torch.Tensor:
    """Rows in bf16 that begin where a page begins, or end where one ends, between pages that nobody may touch."""
    size, page = rows * n * 2, mmap.PAGESIZE
    inside = -(-size // page) * page
    memory = mmap.mmap(-1, inside + 2 * page)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for first in (begin, begin + page + inside):
        assert protect(ctypes.c_void_p(first), ctypes.c_size_t(page), 0) == 0
    offset = page + (inside - size if at_end else 0)
    return torch.frombuffer(memory, dtype=BF16, count=rows * n, offset=offset).view(rows, n)


def test_nothing_around_is_read() -> None:
    """In a process of its own, which a read that strays ends."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_peeled; test_peeled.at_fences()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the fences hold" in done.stdout


def at_fences() -> None:
    """Peeled kernels on tensors between pages that cannot be read; then a read of one of these pages."""
    for n in (9, 1001, 4099):
        for at_end in (False, True):
            x, w = fenced(8, n, at_end).copy_(rand(8, n)), fenced(1, n, at_end)[0].copy_(rand(n))
            calls = [call(SOFTMAX, "soft", x=x), call(NORM, "norm", x=x, w=w)]
            for c in calls:
                # Of a weight of odd length the last page begins unaligned, which is no matter.
                for knobs in (Knobs(peel=1), Knobs(peel=1, chunks=(("n", max(8, n // 3 // 8 * 8)),))):
                    check(c, n, scheduled(c, knobs).schedule)
    code = "import test_peeled as t, ctypes; x = t.fenced(8, 9, True); ctypes.string_at(x.data_ptr() + 8 * 9 * 2, 1)"
    strays = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); {code}"]
    assert subprocess.run(strays, capture_output=True).returncode < 0
    print("the fences hold")


# ---- what is chosen ------------------------------------------------------------------------------------------------


def test_a_knob_switches_it_off_and_on() -> None:
    c = call(SOFTMAX, "soft", x=rand(2, 50257))
    assert scheduled(c).schedule.peeled and scheduled(c).schedule.vector == 8
    off = scheduled(c, Knobs(peel=0)).schedule
    assert (off.peeled, off.vector) == (False, 1)
    assert scheduled(c, Knobs(vector=1)).schedule.peeled is False
    short = call(SOFTMAX, "soft", x=rand(9, 255))
    assert not scheduled(short).schedule.peeled and scheduled(short, Knobs(peel=1)).schedule.peeled
    text = SOFTMAX.replace("    parallel", "    schedule cuda when N > 1000: peel = 0\n    parallel")
    assert not scheduled(call(text, "soft", x=rand(2, 50257))).schedule.peeled
    assert scheduled(call(text, "soft", x=rand(2, 999))).schedule.peeled
    where, _ = cuda_kit.prepare(c)
    assert any(k.knobs == Knobs(peel=0) for k in candidates(where.kernel, where.variant, "cuda", most=1000))


@pytest.mark.parametrize(
    ("c", "backend", "knobs", "says"),
    [
        (lambda: call(SOFTMAX, "soft", x=rand(9, 1000)), "cuda", Knobs(peel=1), "cannot be peeled"),
        (lambda: call(TEXT, "columns", x=rand(9, 1001)), "cuda", Knobs(peel=1), "cannot be peeled"),
        (lambda: call(SOFTMAX, "soft", x=rand(9, 1001)), "cuda", Knobs(peel=2), "expected 0 or 1"),
        (lambda: call(SOFTMAX, "soft", x=rand(9, 1001)), "triton", Knobs(peel=1), "peel is for CUDA alone"),
        (lambda: call(SOFTMAX, "soft", x=rand(9, 1001)), "cuda", Knobs(threads=64, rows=8), "up to 14 of its elements"),
        (lambda: call(NORM, "norm", x=rand(9, 1001), w=rand(1001)), "cuda", Knobs(threads=128, rows=8), "up to 22 of"),
    ],
)
def test_what_is_refused(c, backend: str, knobs: Knobs, says: str) -> None:
    where, _ = cuda_kit.prepare(c())
    with pytest.raises(ScheduleError, match=says):
        schedule_kernel(where.kernel, where.variant, backend, knobs=knobs)


def test_a_schedule_from_outside_is_checked_too() -> None:
    where, _ = cuda_kit.prepare(call(SOFTMAX, "soft", x=rand(9, 1000)))
    with pytest.raises(ScheduleError, match="cannot be peeled"):
        schedule_kernel(where.kernel, where.variant, "cuda", override=Schedule(128, 1, 8, peeled=True))


def test_what_is_claimed_of_memory() -> None:
    """Density is said of rows that are not aligned, and only where it is true."""

    def dense(x: torch.Tensor) -> bool:
        where, _ = cuda_kit.prepare(call(TEXT, "triple", x=x))
        return where.variant.tensor("x").dense

    assert dense(rand(2, 3, 9)) and dense(rand(2, 3, 18)) and not dense(rand(2, 3, 16))
    assert dense(rand(2, 1, 9)) and dense(rand(8, 3, 9)[:2]) and dense(rand(3, 1, 9).transpose(0, 1))
    assert not dense(rand(2, 3, 10)[:, :, :9]) and not dense(rand(2, 4, 9)[:, :3])
    assert not dense(rand(3, 2, 9).transpose(0, 1)) and not dense(rand(1, 3, 9).expand(2, 3, 9))
    assert not dense(around(rand(2, 3, 9), "offset"))
    assert dense(rand(9, 3, 9)[8:]) and not dense(rand(9, 3, 9)[7:])  # from an address on that is aligned, or is not


# ---- machine code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name", "dim"),
    [
        ("softmax.kdsl", "softmax", "N"), ("softmax.kdsl", "log_softmax", "N"), ("rms_norm.kdsl", "rms_norm", "N"),
        ("layer_norm.kdsl", "layer_norm", "N"), ("cross_entropy.kdsl", "cross_entropy", "V"),
        ("cross_entropy.kdsl", "cross_entropy_", "V"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("width", "dtype"), [(4099, "bf16"), (50257, "bf16"), (50257, "f32")])
def test_sixteen_bytes_at_a_time_and_no_spills(file: str, name: str, dim: str, width: int, dtype: str) -> None:
    module = load(OPS / file).module
    kernel = next(k for k in module.kernels if k.name == name)
    made = target(module, kernel, Choices(dims={dim: width}, dtype=dtype))
    program = made.program("cuda")
    assert program.schedule.peeled
    found = binary(made, program, "sm_90")
    assert found.resources.local_bytes == 0 and not re.search(r"\b(LDL|STL)\b", found.sass)
    assert re.search(r"LDG\.E\.(\w+\.)*128", found.sass)
    if name != "cross_entropy":
        assert re.search(r"STG\.E\.(\w+\.)*128", found.sass)
