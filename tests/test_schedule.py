"""Default schedules, layouts, the calling convention and names."""

from __future__ import annotations

import itertools
import keyword

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_kit import KernelKit, poly, tensor, variant

from kgen.codegen.abi import grid_size, kernel_args
from kgen.codegen.layout import access_width, divisor, layout_of, vector_axis
from kgen.codegen.names import Names
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Loop, Schedule, ScheduleError
from kgen.codegen.variant import TensorClass
from kgen.dsl import ir
from kgen.dsl.dtypes import BF16, F32, F64, I32, I64, DType

BACKENDS = ("cuda", "triton")


def norm(dtype: DType = BF16) -> ir.Kernel:
    k = KernelKit(
        [tensor("x", "*M, N", dtype=dtype), tensor("w", "N", dtype=dtype), tensor("y", "*M, N", "out", dtype)],
        "m in M", "n in N",
    )  # fmt: skip
    x = k.load("x", "m", "n")
    r = k.let("r", k.op("rsqrt", k.mean(k.op("mul", x, x), "n", "N")))
    k.store("y", "m, n", k.op("mul", k.op("mul", x, r), k.load("w", "n")))
    return k.kernel("norm")


def flat(*inputs: DType, out: DType = BF16) -> ir.Kernel:
    names = [f"x{i}" for i in range(len(inputs))]
    tensors = [tensor(n, "*M, N", dtype=d) for n, d in zip(names, inputs, strict=True)]
    k = KernelKit([*tensors, tensor("y", "*M, N", "out", out)], "m in M, n in N")
    value: ir.Expr = k.load(names[0], "m", "n")
    for n in names[1:]:
        value = k.op("add", value, k.load(n, "m", "n"))
    k.store("y", "m, n", value)
    return k.kernel("flat")


def heads() -> ir.Kernel:
    """Two head axes that never meet, beside a feature axis that meets both; halves of D."""
    k = KernelKit(
        [tensor("q", "B, S, I, D", "inout"), tensor("k", "B, S, J, D", "inout"), tensor("c", "S, D")],
        "b in B, s in S", "i in I, j in J, d in D//2",
    )  # fmt: skip
    for t, h in (("q", "i"), ("k", "j")):
        lo, hi = k.load(t, "b", "s", h, "d"), k.load(t, "b", "s", h, "d + D//2")
        k.store(t, f"b, s, {h}, d", k.op("sub", k.op("mul", lo, k.load("c", "s", "d")), hi))
        k.store(t, f"b, s, {h}, d + D//2", k.op("add", k.op("mul", hi, k.load("c", "s", "d + D//2")), lo))
    return k.kernel("heads")


def groups() -> ir.Kernel:
    k = KernelKit([tensor("x", "*M, N"), tensor("s", "*M, N//128", "out", F32)], "m in M", "g in N//128, i in 128")
    k.store("s", "m, g", k.reduce("max", k.load("x", "m", "g * 128 + i"), "i"))
    return k.kernel("groups")


# ---- ladders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "threads", "rows", "vector", "looped"),
    [
        (1, 128, 128, 1, False),
        (3, 128, 32, 1, False),
        (64, 128, 16, 8, False),
        (128, 128, 8, 8, False),
        (512, 64, 2, 8, False),
        (768, 64, 2, 8, False),
        (1024, 64, 1, 8, False),
        (1600, 64, 1, 8, False),
        (2048, 128, 1, 8, False),
        (4096, 128, 1, 8, False),
        (8192, 256, 1, 8, False),
        (16384, 512, 1, 8, False),
        (32768, 512, 1, 8, False),
        (32776, 1024, 1, 8, False),
        (65536, 1024, 1, 8, False),
        (262144, 1024, 1, 8, True),
        (65537, 1024, 1, 8, False),  # peeled
        (255, 128, 4, 1, False),  # fewer vectors than a warp has lanes
    ],
)
def test_cuda_rows(columns: int, threads: int, rows: int, vector: int, looped: bool) -> None:
    s = schedule_kernel(norm(), variant(norm(), {"N": columns}), "cuda", capability=80).schedule
    assert (s.threads, s.rows, s.vector, bool(s.chunks), s.cluster) == (threads, rows, vector, looped, 1)


@pytest.mark.parametrize(
    ("columns", "vector", "cluster", "looped"),
    [(65536, 8, 1, False), (65537, 8, 1, False), (131072, 8, 2, False), (524288, 8, 8, False), (1 << 20, 8, 1, True)],
)
def test_cuda_rows_in_clusters(columns: int, vector: int, cluster: int, looped: bool) -> None:
    s = schedule_kernel(norm(), variant(norm(), {"N": columns}), "cuda").schedule
    assert (s.threads, s.rows, s.vector, s.cluster, bool(s.chunks)) == (1024, 1, vector, cluster, looped)


@pytest.mark.parametrize(
    ("columns", "warps", "rows", "looped"),
    [(1, 4, 2048, False), (768, 2, 2, False), (1000, 4, 2, False), (1280, 2, 1, False), (2048, 4, 1, False),
     (2560, 4, 1, False), (4000, 8, 1, False), (6144, 8, 1, False), (8192, 8, 1, True), (16384, 16, 1, True),
     (65536, 32, 1, True), (131072, 32, 1, True)],
)  # fmt: skip
def test_triton_rows(columns: int, warps: int, rows: int, looped: bool) -> None:
    s = schedule_kernel(norm(), variant(norm(), {"N": columns}), "triton").schedule
    assert (s.threads // 32, s.rows, bool(s.chunks)) == (warps, rows, looped)


def test_few_rows_are_spread_over_the_machine() -> None:
    v = variant(norm(), {"N": 64})
    many = schedule_kernel(norm(), v, "cuda", rows_hint=1 << 20).schedule
    few = schedule_kernel(norm(), v, "cuda", rows_hint=256).schedule
    assert (many.threads, many.rows) == (128, 16)
    assert few.rows < many.rows and few.threads // few.rows == 8 and few.threads >= 32


def test_float64_takes_vectors_of_two() -> None:
    s = schedule_kernel(norm(F64), variant(norm(F64), {"N": 1024}), "cuda").schedule
    assert (s.vector, s.threads) == (2, 128)


@pytest.mark.parametrize(
    ("kernel", "multiple", "tensors", "vector"),
    [
        (flat(BF16, BF16), 16, {}, 8),
        (flat(BF16, F32), 16, {}, 4),  # 16 bytes of the widest
        (flat(BF16), 4, {}, 4),  # vectors end with their row
        (flat(BF16), 1, {}, 1),
        (flat(BF16, BF16), 16, {"x1": TensorClass(True, 4)}, 2),  # bytes of alignment
        (flat(BF16, BF16), 16, {"x0": TensorClass(False, 2), "x1": TensorClass(False, 2)}, 8),  # y alone is contiguous
    ],
)
def test_flat_vectors(kernel: ir.Kernel, multiple: int, tensors: dict[str, TensorClass], vector: int) -> None:
    v = variant(kernel, {}, multiples={"N": multiple}, tensors=tensors)
    s = schedule_kernel(kernel, v, "cuda")
    assert s.schedule.vector == vector
    row = layout_of(s).row
    assert row.threads * row.vector * row.slots == s.schedule.rows and row.threads == 256


def test_a_starred_dimension_in_parts_has_no_vectors() -> None:
    k = KernelKit([tensor("x", "*M"), tensor("y", "*M", "out")], "m in M")
    k.store("y", "m", k.load("x", "m"))
    for rank, vector in ((1, 8), (2, 1)):
        v = variant(k.kernel(), {}, multiples={"M": 16}, star_ranks={"M": rank})
        assert schedule_kernel(k.kernel(), v, "cuda").schedule.vector == vector


def test_weights_do_not_narrow_the_vectors_of_rows() -> None:
    v = variant(norm(), {"N": 1024}, tensors={"w": TensorClass(True, 2)})
    s = schedule_kernel(norm(), v, "cuda")
    assert s.schedule.vector == 8
    w = norm().tensor("w")
    assert access_width(w, (poly("n"),), "n", 8, v) == 1


# ---- layouts -------------------------------------------------------------------------------------------------------


def test_axes_that_never_meet_share_a_digit() -> None:
    s = schedule_kernel(heads(), variant(heads(), {"D": 128, "I": 32, "J": 8}), "cuda")
    lay = layout_of(s)
    d, i, j = lay.axis("d"), lay.axis("i"), lay.axis("j")
    assert (d.digit, d.threads, d.vector, d.slots) == (0, 8, 8, 1)
    assert i.digit == j.digit == 1 and i.threads == j.threads
    assert lay.row.digit == 2
    # Each thread overwrites only what it has loaded itself.
    assert s.barriers == frozenset()


def test_offsets_narrow_vectors() -> None:
    """Half a head of 20 elements starts at element 10: vectors of two."""
    s = schedule_kernel(heads(), variant(heads(), {"D": 20, "I": 2, "J": 2}), "cuda")
    assert layout_of(s).axis("d").vector == 2


@pytest.mark.parametrize(("offset", "vector"), [(0, 8), (1, 1), (4, 4), (6, 2), (8, 8)])
def test_a_shifted_access_narrows_vectors(offset: int, vector: int) -> None:
    k = KernelKit([tensor("x", "*M, N + 8"), tensor("y", "*M, N", "out")], "m in M", "n in N")
    k.store("y", "m, n", k.op("exp", k.load("x", "m", f"n + {offset}")))
    assert schedule_kernel(k.kernel(), variant(k.kernel(), {"N": 64}), "cuda").schedule.vector == vector


def test_the_contiguous_axis_has_the_vectors() -> None:
    v = variant(groups(), {"N": 1024})
    s = schedule_kernel(groups(), v, "cuda")
    assert vector_axis(s.kernel, v) == "i"
    lay = layout_of(s)
    assert (lay.axis("i").vector, lay.axis("i").digit, lay.axis("g").digit) == (8, 0, 1)


def test_a_barrier_where_other_threads_read_what_is_overwritten() -> None:
    k = KernelKit([tensor("x", "*M, N", "inout")], "m in M", "n in N")
    k.store("x", "m, n", k.op("neg", k.load("x", "m", "n * -1 + N - 1")))
    assert schedule_kernel(k.kernel(), variant(k.kernel(), {"N": 64}), "cuda").barriers == {"x_mn"}
    k = KernelKit([tensor("x", "*M, N"), tensor("s", "*M", "inout", F32)], "m in M", "n in N")
    k.store("s", "m", k.op("add", k.load("s", "m"), k.reduce("sum", k.load("x", "m", "n"), "n")))
    # Every thread of the row loads s[m], one stores it.
    assert schedule_kernel(k.kernel(), variant(k.kernel(), {"N": 64}), "cuda").barriers == {"s_m"}


SIZES = st.one_of(st.integers(1, 300), st.sampled_from([1023, 1024, 4096, 50257, 65537]))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["norm", "heads"]), SIZES, st.integers(1, 40), st.integers(1, 40))
def test_every_element_has_one_place(which: str, n: int, i: int, j: int) -> None:
    kernel, dims = (norm(), {"N": n}) if which == "norm" else (heads(), {"D": 2 * min(n, 512), "I": i, "J": j})
    s = schedule_kernel(kernel, variant(kernel, dims), "cuda")
    lay = layout_of(s)
    total = 1
    for count in lay.digits:
        assert count & (count - 1) == 0
        total *= count
    assert total == s.schedule.threads * s.schedule.cluster and 32 <= s.schedule.threads <= 1024
    for a in lay.axes:
        places = [
            (slot * a.threads + digit) * a.vector + lane
            for slot, digit, lane in itertools.product(range(a.slots), range(a.threads), range(a.vector))
        ]
        assert a.threads == lay.digits[a.digit]
        if a.peel is not None:
            assert s.schedule.peeled and a.peel.vector == a.vector > 1 and a.peel.lead is None and n % a.vector
            end = a.extent if s.schedule.chunks else a.extent // a.vector * a.vector
            assert sorted(p for p in places if p < end) == list(range(end))
            assert n - n // a.vector * a.vector <= a.peel.edge <= a.threads
            continue
        assert sorted(p for p in places if p < a.extent) == list(range(a.extent))
        assert a.extent % a.vector == 0
        assert (a.slots - 1) * a.threads * a.vector < a.extent  # no slot is empty
    for step in s.steps:
        if isinstance(step, Loop):
            assert step.chunk == lay.axis(step.axis).extent


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES, st.sampled_from(BACKENDS))
def test_axes_that_meet_are_not_both_looped(n: int, k: int, backend: str) -> None:
    kit = KernelKit([tensor("x", "*M, N, K"), tensor("y", "*M", "out", F32)], "m in M", "n in N, k in K")
    kit.store("y", "m", kit.reduce("sum", kit.load("x", "m", "n", "k"), "n", "k"))
    try:
        s = schedule_kernel(kit.kernel(), variant(kit.kernel(), {"N": n, "K": k}), backend).schedule
    except ScheduleError as e:
        # Neither axis fits whole beside one element of the other.
        assert min(n, k) > 2048 and "spread one of n, k" in str(e)
    else:
        assert len(s.chunks) <= 1


def test_a_tile_too_large_to_hold_is_refused() -> None:
    kit = KernelKit([tensor("x", "*M, N", "inout")], "m in M", "n in N")
    kit.store("x", "m, n", kit.op("neg", kit.load("x", "m", "n * -1 + N - 1")))
    for backend in BACKENDS:
        with pytest.raises(ScheduleError, match="its tiles need"):
            schedule_kernel(kit.kernel(), variant(kit.kernel(), {"N": 1 << 22}), backend)


@pytest.mark.parametrize("text,expected", [("8*m + 4", 4), ("N*m", 2), ("m", 1), ("32", 16), ("0", 16), ("D", 16)])
def test_divisor(text: str, expected: int) -> None:
    v = variant(norm(), {"D": 96}, multiples={"N": 2})
    assert divisor(poly(text), v) == expected


# ---- overrides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (Schedule(100, 1), "threads is 100, expected a power of two up to 1024"),
        (Schedule(16, 1), "expected at least 32"),
        (Schedule(64, 128), "128 rows do not share out among 64 threads"),
        (Schedule(64, 1, 3), "vector is 3"),
        (Schedule(64, 1, chunks=(("m", 4),)), "takes m in chunks, which is not a tile index"),
        (Schedule(64, 1, chunks=(("n", 0),)), "the chunk of n is 0"),
    ],
)
def test_impossible_overrides_are_refused(override: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_kernel(norm(), variant(norm(), {"N": 64}), "cuda", override=override)


def test_an_unknown_tile_extent_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the value of N must be known"):
        schedule_kernel(norm(), variant(norm(), {}), "cuda")


# ---- calling convention --------------------------------------------------------------------------------------------


def names_of(
    kernel: ir.Kernel,
    dims: dict[str, int],
    tensors: dict[str, TensorClass] | None = None,
    star_ranks: dict[str, int] | None = None,
) -> list[str]:
    """`x` for a tensor or scalar, `|M.1` for part 1 of a dimension, `:x0.1` for a stride of dimension 0 of x."""
    mark = {"tensor": "", "scalar": "", "dim": "|", "stride": ":"}
    return [
        f"{mark[a.kind]}{a.name}" + (f"{a.axis}.{a.part}" if a.kind == "stride" else f".{a.part}" * (a.part > 0))
        for a in kernel_args(kernel, variant(kernel, dims, tensors=tensors, star_ranks=star_ranks))
    ]


def test_arguments_are_those_in_use() -> None:
    assert names_of(norm(), {"N": 64}) == ["x", "w", "y", "|M", ":x0.0", ":y0.0"]
    # Without unit stride, and with rows in two parts.
    assert names_of(norm(), {"N": 64}, tensors={"w": TensorClass(False)}, star_ranks={"M": 2}) == [
        "x", "w", "y", "|M", "|M.1", ":x0.0", ":x0.1", ":w0.0", ":y0.0", ":y0.1",
    ]  # fmt: skip


def test_the_same_arguments_before_and_after_normal_form() -> None:
    v = variant(heads(), {"D": 128, "I": 4, "J": 4})
    normal = schedule_kernel(heads(), v, "cuda").kernel
    assert kernel_args(heads(), v) == kernel_args(normal, v)
    kinds = {(a.kind, a.name, a.axis): a.dtype for a in kernel_args(heads(), v)}
    assert kinds[("stride", "q", 0)] == I64 and kinds[("stride", "q", 2)] == I32  # rows are far apart, heads are near


def test_a_gathered_dimension_is_an_argument() -> None:
    k = KernelKit([tensor("x", "*M, V"), tensor("t", "*M", dtype=I64), tensor("y", "*M", "out")], "m in M")
    k.store("y", "m", k.load("x", "m", k.load("t", "m")))
    assert "|V" in names_of(k.kernel(), {})


def test_grid_size() -> None:
    v = variant(heads(), {"D": 8, "I": 1, "J": 1})
    s = Schedule(32, 4)
    assert [grid_size(heads(), v, s, {"B": b, "S": 3}) for b in (0, 1, 3, 4)] == [0, 1, 3, 3]
    assert grid_size(flat(BF16), variant(flat(BF16), {}), s, {"M": 1 << 40, "N": 1 << 10}) == 1 << 48


# ---- names ---------------------------------------------------------------------------------------------------------

RESERVED = frozenset(keyword.kwlist) | {"int", "half", "warpSize", "tl", "threadIdx", "i_", "x_", "int_"}
IDENTIFIERS = st.one_of(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True),
    st.sampled_from(
        ["int", "int_", "int__2_", "_int_", "__int", "_", "__", "___", "_1", "1_"[1:] + "_1", "x", "x_", "X"]
    ),
)


@settings(max_examples=400)
@given(st.sets(IDENTIFIERS, max_size=12), st.lists(IDENTIFIERS, max_size=6))
def test_names_are_injective(user: set[str], hints: list[str]) -> None:
    names = Names(user, RESERVED)
    spelled = [names[u] for u in sorted(user)]
    temporaries = [names.fresh(h) for h in hints]
    everything = spelled + temporaries
    assert len(set(everything)) == len(everything)
    assert not RESERVED & set(everything)
    assert all(n.isidentifier() for n in everything)
    assert not any(n.startswith("__") for n in spelled)
    assert not set(temporaries) & user
    again = Names(sorted(user, reverse=True), RESERVED)
    assert [again[u] for u in sorted(user)] == spelled


def test_ordinary_names_stay() -> None:
    names = Names(["x", "int", "__i", "x_mn", "lambda"], RESERVED | {"lambda"})
    assert [names[n] for n in ("x", "int", "__i", "x_mn", "lambda")] == ["x", "int_2_", "i_2_", "x_mn", "lambda_"]
    assert [names.fresh("row"), names.fresh("row"), names.fresh("x")] == ["row", "row_2", "x_2"]
    with pytest.raises(KeyError):
        names["other"]
