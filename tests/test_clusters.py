"""A row in the registers of several thread blocks: layouts, reductions and sums in a cluster, and who chooses one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cuda_kit
import pytest
import sums_kit
import torch
from cuda_kit import Call, call
from driver_kit import FakeDriver, machine

import kgen
from kgen.codegen.candidates import candidates
from kgen.codegen.cuda import emit, host_source
from kgen.codegen.interpret import interpret
from kgen.codegen.knobs import Knobs
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Schedule, ScheduleError
from kgen.codegen.tolerance import compare, error_bound
from kgen.dsl.parser import parse_text
from kgen.runtime import nvrtc
from kgen.runtime.ahead import Choices, target
from kgen.runtime.backends import driver
from kgen.runtime.backends.launch import Slots
from kgen.runtime.differential import answer, ask
from kgen.runtime.host_executor import HostLaunchError

TEXT = """
kernel rms_norm(x: T[*M, N], w: T[N]) -> (y: T[*M, N], r: f32[*M]):
    parallel m in M
    tile n in N
    scale = rsqrt(mean(x[m, n] * x[m, n], n) + 1e-6)
    y[m, n] = x[m, n] * scale * w[n]
    r[m] = scale

kernel softmax(x: T[M, N]) -> (y: T[M, N], best: i32[M]):
    parallel m in M
    tile n in N
    e = exp(x[m, n] - max(x[m, n], n))
    y[m, n] = e / sum(e, n)
    best[m] = argmax(x[m, n], n)

kernel kinds(
    t: i64[M, N],
    d: f64[M, N],
) -> (s: i64[M], p: f64[M], low: i64[M], at: i32[M], some: bool[M], every: bool[M]):
    parallel m in M
    tile n in N
    s[m] = sum(t[m, n], n)
    p[m] = prod(d[m, n], n)
    low[m] = min(t[m, n], n)
    at[m] = argmin(t[m, n], n)
    some[m] = any(t[m, n] == 3, n)
    every[m] = all(t[m, n] < 900, n)

kernel two_axes(x: T[M, K, N], g: T[K]) -> (y: T[M, K, N], by_k: f32[M, K], by_n: f32[M, N]):
    parallel m in M
    tile k in K, n in N
    a = sum(x[m, k, n], n)
    b = max(x[m, k, n], k)
    by_k[m, k] = a
    by_n[m, n] = b
    y[m, k, n] = (x[m, k, n] - b) * g[k] + a

kernel shifted(x: inout T[M, N]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, N - 1 - n] * 0.5 + sum(x[m, n], n)

kernel reversed(x: inout T[M, N]) -> (s: f32[M]):
    parallel m in M
    tile n in N
    total = sum(x[m, n], n)
    x[m, n] = x[m, N - 1 - n] * 0.5
    s[m] = total

kernel rms_norm_grad(d_y: T[*M, N], x: T[*M, N], w: W[N], rstd: f32[*M]) -> (d_x: T[*M, N], d_w: W[N]):
    parallel m in M
    tile n in N
    x_hat = x[m, n] * rstd[m]
    g = d_y[m, n] * w[n]
    d_x[m, n] = rstd[m] * (g - x_hat * mean(g * x_hat, n))
    d_w[n] += d_y[m, n] * x_hat

kernel scaled_sums(x: T[*M, N], d_y: T[*M, N]) -> (d_x: T[*M, N], s: f32[N], total: f32[]):
    parallel m in M
    tile n in N
    p = exp(x[m, n] - max(x[m, n], n))
    q = p / sum(p, n)
    d_x[m, n] = q * (d_y[m, n] - sum(q * d_y[m, n], n))
    s[n] += q
    total[] += sum(x[m, n], n)

kernel column_sums(x: T[*M, N]) -> (s: f32[N]):
    parallel m in M
    tile n in N
    s[n] += x[m, n]
"""
FLAT = "kernel add(a: T[*N]) -> (c: T[*N]):\n    parallel n in N\n    c[n] = a[n] + 1.0\n"
__all__ = ["machine"]
F32, BF16 = torch.float32, torch.bfloat16
G = torch.Generator()
SEEDS = (None, 1, 2, 3)


def randn(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, generator=G.manual_seed(sum(shape))).to(dtype)


def arguments(kernel: str, m: int, n: int, dtype: torch.dtype = F32) -> dict[str, Any]:
    match kernel:
        case "rms_norm":
            return {"x": randn(m, n, dtype=dtype), "w": randn(n, dtype=dtype)}
        case "rms_norm_grad":
            grads = {"d_y": randn(m, n, dtype=dtype), "x": randn(m + 1, n, dtype=dtype)[1:]}
            return grads | {"w": randn(n, dtype=dtype), "rstd": randn(m).abs() + 0.5}
        case "scaled_sums":
            return {"x": randn(m, n, dtype=dtype), "d_y": randn(m + 1, n, dtype=dtype)[1:]}
        case "kinds":
            t = (torch.arange(m * n) * 7919 % 1000 - 50).reshape(m, n)
            return {"t": t, "d": 1 + randn(m, n).double() / n}
        case "two_axes":
            return {"x": randn(m, 6, n, dtype=dtype), "g": randn(6, dtype=dtype)}
    return {"x": randn(m, n, dtype=dtype)}


def in_cluster(cluster: int, threads: int = 64, vector: int = 4, programs: int = 0) -> Schedule:
    return Schedule(threads, 1, vector, name="row", programs=programs, cluster=cluster)


def within_bounds(c: Call, got: dict[str, torch.Tensor]) -> None:
    bound = error_bound(c.kernel, c.tensors, c.scalars)
    for name, want in interpret(c.kernel, c.tensors, c.scalars, precision="f64").items():
        result = compare(got[name], want, bound[name])
        assert result.ok, f"{name}: {result}"


# ---- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("n", [1, 37, 512, 1000, 1023, 4096])
@pytest.mark.parametrize("kernel", ["rms_norm", "softmax"])
def test_rows(kernel: str, n: int, dtype: torch.dtype) -> None:
    """Blocks that have a part of the row, and blocks that have nothing of it; in any order of threads the same bits."""
    c = call(TEXT, kernel, **arguments(kernel, 3, n, dtype))
    for cluster in (2, 4, 8):
        results = [cuda_kit.run(c, in_cluster(cluster), seed) for seed in SEEDS[:3]]
        within_bounds(c, results[0])
        assert all(torch.equal(results[0][name], r[name]) for r in results for name in r)


@pytest.mark.parametrize("cluster", [2, 8])
@pytest.mark.parametrize("n", [33, 500, 700])
def test_every_kind_of_reduction(n: int, cluster: int) -> None:
    c = call(TEXT, "kinds", **arguments("kinds", 3, n))
    for seed in SEEDS:
        within_bounds(c, cuda_kit.run(c, in_cluster(cluster, vector=1), seed))


@pytest.mark.parametrize(
    "schedule", [in_cluster(2), in_cluster(4, 32, 1), in_cluster(8, 128, 2), in_cluster(2, 1024, 4)]
)
@pytest.mark.parametrize("n", [40, 130])
def test_two_axes(n: int, schedule: Schedule) -> None:
    """Some reductions stay in a block, others do not; values that one thread of a row stores."""
    c = call(TEXT, "two_axes", **arguments("two_axes", 2, n))
    for seed in SEEDS:
        within_bounds(c, cuda_kit.run(c, schedule, seed))


@pytest.mark.parametrize("n", [256, 1001])
@pytest.mark.parametrize("kernel", ["shifted", "reversed"])
def test_what_other_blocks_read_is_overwritten_behind_a_barrier(kernel: str, n: int) -> None:
    c = call(TEXT, kernel, **arguments(kernel, 3, n))
    for seed in SEEDS:
        within_bounds(c, cuda_kit.run(c, in_cluster(4, 64, 1), seed))


# ---- sums over programs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("m", [1, 2, 11])
@pytest.mark.parametrize(("kernel", "n"), [("rms_norm_grad", 500), ("rms_norm_grad", 1024), ("scaled_sums", 333)])
def test_sums(kernel: str, n: int, m: int, dtype: torch.dtype) -> None:
    """One reduction a row, or several: each program takes many rows, and slots are written again every other one."""
    c = call(TEXT, kernel, **arguments(kernel, m, n, dtype))
    for cluster, programs in ((2, 3), (4, 1), (8, 2)):
        schedule = in_cluster(cluster, programs=programs)
        first = sums_kit.run(c, "cuda", schedule)
        within_bounds(c, first)
        for seed in SEEDS[1:]:
            again = sums_kit.run(c, "cuda", schedule, seed)
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_blocks_that_have_nothing_to_tell_each_other_do_not_meet() -> None:
    c = call(TEXT, "column_sums", **arguments("column_sums", 7, 300))
    within_bounds(c, sums_kit.run(c, "cuda", in_cluster(2, programs=2)))
    assert not re.search(r"cluster_\w+\(\)", cuda_kit.compiled(c, in_cluster(2, programs=2)).source)


@pytest.mark.parametrize("m", [0, 1, 2, 34])
def test_default_schedules_of_wide_rows(m: int) -> None:
    """A kernel as a user calls it: no row, one, one for each cluster, and more."""
    n = 16000 if m < 34 else 9001
    question_of = kgen.loads(TEXT)["scaled_sums"]
    made = arguments("scaled_sums", m, n, BF16)
    outs = question_of(**made, backend="cuda")
    if m == 0:
        assert not outs[1].any() and not outs[2].any()
        return
    assert answer(ask(question_of, made), "cuda").status == "ok"


# ---- each rule is needed -------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[Callable[[str], str], str | None]] = {
    "waits for no start": (
        lambda s: s.replace("    cluster_wait();\n", ""),
        "not waited for the others yet|may not have started",
    ),
    "starts unseen": (lambda s: re.sub(r"    cluster_(wait|arrive)\(\);\n", "", s), "may not have started"),
    "meets its own block alone": (lambda s: s.replace("cluster_barrier();", "__syncthreads();"), None),
    "does not meet": (lambda s: s.replace("cluster_barrier();", ""), None),
    "tells one block": (lambda s: s.replace("lane < CLUSTER", "lane < 1"), None),
    "one set of slots": (lambda s: s.replace("turn ^= 1;", ""), None),
    "rank in the wrong place": (lambda s: s.replace("% CLUSTER * THREADS", "/ CLUSTER * THREADS"), None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str) -> None:
    """The host executor finds in generated code what a GPU might let pass: blocks have shared memory of their own."""
    change, message = MISTAKES[mistake]
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 9, 500))
    schedule = in_cluster(4, programs=2)
    right = sums_kit.run(c, "cuda", schedule)
    assert change(cuda_kit.compiled(c, schedule).source) != cuda_kit.compiled(c, schedule).source
    wrong = 0
    for seed in (None, *range(8)):
        try:
            got = sums_kit.run(c, "cuda", schedule, seed, lambda s: change(s) if "CLUSTER" in s else s)
            wrong += any(not torch.equal(got[name], right[name]) for name in right)
        except HostLaunchError as error:
            assert message is None or re.search(message, str(error)), error
            wrong += 1
    assert wrong


# ---- who takes a cluster -------------------------------------------------------------------------------------------


def chosen(kernel: str, n: int, dtype: torch.dtype = BF16, **how: Any) -> Schedule:
    where, _ = cuda_kit.prepare(call(TEXT, kernel, **arguments(kernel, 1, n, dtype)))
    return schedule_kernel(where.kernel, where.variant, "cuda", **how).schedule


@pytest.mark.parametrize(
    ("kernel", "n", "dtype", "cluster", "threads"),
    [
        ("rms_norm_grad", 16384, BF16, 1, 1024),
        ("rms_norm_grad", 32768, BF16, 4, 256),
        ("rms_norm_grad", 65536, BF16, 8, 256),
        ("rms_norm_grad", 131072, BF16, 8, 512),
        ("rms_norm_grad", 65536, F32, 8, 512),
        ("scaled_sums", 65536, BF16, 4, 256),
        ("rms_norm", 65536, BF16, 1, 1024),
        ("rms_norm", 131072, BF16, 2, 1024),
        ("rms_norm", 262144, BF16, 4, 1024),
        ("rms_norm", 65536, F32, 2, 1024),
    ],
)
def test_rows_too_wide_for_a_block_are_held_by_a_cluster(
    kernel: str, n: int, dtype: torch.dtype, cluster: int, threads: int
) -> None:
    schedule = chosen(kernel, n, dtype)
    assert (schedule.cluster, schedule.threads, schedule.chunks) == (cluster, threads, ())
    older = chosen(kernel, n, dtype, capability=80)  # chunks, or rows without their sums, which other launches make
    assert older.cluster == 1 and (older == schedule if cluster == 1 else bool(older.chunks) or kernel != "rms_norm")


def test_several_reductions_of_a_row_are_taken_in_chunks() -> None:
    schedule = chosen("softmax", 131072)
    assert schedule.cluster == 1 and schedule.chunks


def test_programs_of_a_sum_are_clusters() -> None:
    for n, cluster, blocks in ((32768, 4, 2), (65536, 8, 2), (131072, 8, 1)):
        c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 1, n, BF16))
        where, _ = cuda_kit.prepare(c)
        made = schedule_kernel(where.kernel, where.variant, "cuda")
        assert made.sums is not None and made.sums.blocks == blocks
        assert made.schedule.programs == blocks * 132 // cluster
        assert f"__launch_bounds__(THREADS, {blocks})" in emit(made).source


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (Knobs(cluster=3), "cluster is 3, expected a power of two up to 8"),
        (Knobs(cluster=16), "up to 8"),
        (Knobs(cluster=2, rows=2), "a cluster of 2 takes one row, and rows is 2"),
        (Knobs(cluster=2, chunks=(("n", 256),)), "holds a row whole, and it takes n in chunks"),
    ],
)
def test_knobs_that_do_not_fit(knobs: Knobs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        chosen("rms_norm", 4096, knobs=knobs)


def test_knobs() -> None:
    assert Knobs.read(Knobs(cluster=4).data(), "x") == Knobs(cluster=4)
    wide = chosen("softmax", 131072, knobs=Knobs(cluster=4))
    assert wide.cluster == 4 and not wide.chunks
    assert chosen("rms_norm_grad", 65536, knobs=Knobs(cluster=8, threads=1024)).programs == 132 // 8
    assert chosen("rms_norm_grad", 65536, knobs=Knobs(chunks=(("n", 4096),))).cluster == 1
    assert chosen("rms_norm_grad", 65536, knobs=Knobs(cluster=1, threads=512, chunks=(("n", 4096),))).cluster == 1
    with pytest.raises(ScheduleError, match=r"cluster of 2 thread blocks; the device is of sm_80, .* have no clusters"):
        chosen("rms_norm", 4096, knobs=Knobs(cluster=2), capability=80)
    where, _ = cuda_kit.prepare(call(TEXT, "rms_norm", **arguments("rms_norm", 1, 4096)))
    with pytest.raises(ScheduleError, match="cluster is for CUDA alone"):
        schedule_kernel(where.kernel, where.variant, "triton", knobs=Knobs(cluster=2))
    where, _ = cuda_kit.prepare(call(FLAT, "add", a=randn(64)))
    with pytest.raises(ScheduleError, match="a cluster shares a row"):
        schedule_kernel(where.kernel, where.variant, "cuda", knobs=Knobs(cluster=2))


def test_a_schedule_in_the_source_sets_it() -> None:
    text = TEXT.replace("    scale = ", "    schedule cuda when N > 2048: cluster = 4, threads = 128\n    scale = ")
    for n, cluster in ((2048, 1), (4096, 4)):
        c = call(text, "rms_norm", **arguments("rms_norm", 2, n))
        where, _ = cuda_kit.prepare(c)
        assert schedule_kernel(where.kernel, where.variant, "cuda").schedule.cluster == cluster
        within_bounds(c, cuda_kit.run(c))


def test_candidates_of_a_tuner() -> None:
    for kernel, n in (("rms_norm_grad", 65536), ("softmax", 65536)):
        where, _ = cuda_kit.prepare(call(TEXT, kernel, **arguments(kernel, 1, n, BF16)))
        found = candidates(where.kernel, where.variant, "cuda", most=200)
        clusters = {c.scheduled.schedule.cluster for c in found}
        assert clusters >= {1, 4, 8} and clusters <= {1, 2, 4, 8}
        shapes = {(c.scheduled.schedule.threads, c.scheduled.schedule.cluster) for c in found}
        assert kernel != "rms_norm_grad" or shapes >= {(256, 8), (512, 4), (512, 8), (1024, 4), (1024, 8)}
        older = candidates(where.kernel, where.variant, "cuda", most=200, capability=86)
        assert {c.scheduled.schedule.cluster for c in older} == {1}
    narrow, _ = cuda_kit.prepare(call(TEXT, "rms_norm", **arguments("rms_norm", 1, 1024, BF16)))
    assert {c.scheduled.schedule.cluster for c in candidates(narrow.kernel, narrow.variant, "cuda")} == {1}


# ---- launched ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("resident", "programs"), [(1000, 66), (7, 7), (0, 66)])
def test_a_sum_has_as_many_programs_as_the_driver_says_run_at_a_time(
    machine: FakeDriver, resident: int, programs: int
) -> None:
    """Clusters need multiprocessors that lie together, so there may be fewer than the number of those says."""
    machine.clusters = resident
    made = arguments("rms_norm_grad", 70, 28672, BF16)
    kernel = kgen.loads(TEXT)["rms_norm_grad"]
    got = kernel(**made, backend="cuda")
    sums, finish = machine.seen
    assert (sums.grid, sums.block, sums.attributes) == ((4 * programs, 1, 1), (256, 1, 1), 0)
    assert programs in sums.arguments and finish.arguments.count(programs) == 1
    ((entry, config),) = machine.asked
    assert (entry, config.gridDimX, config.blockDimX, config.numAttrs) == ("rms_norm_grad", 4, 256, 0)
    within_bounds(call(TEXT, "rms_norm_grad", **made), dict(zip(("d_x", "d_w"), got, strict=True)))


# ---- compiled ahead ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "n", "dtype"),
    [
        ("rms_norm_grad", 32768, BF16),
        ("rms_norm_grad", 65536, BF16),
        ("rms_norm_grad", 131072, BF16),
        ("rms_norm_grad", 65536, F32),
        ("rms_norm", 131072, BF16),
        ("rms_norm", 200000, BF16),
        ("scaled_sums", 40000, BF16),
        ("scaled_sums", 65536, BF16),
    ],
)
def test_machine_code_holds_the_row_in_registers(kernel: str, n: int, dtype: torch.dtype) -> None:
    where, _ = cuda_kit.prepare(call(TEXT, kernel, **arguments(kernel, 1, n, dtype)))
    program = emit(schedule_kernel(where.kernel, where.variant, "cuda"))
    assert program.schedule.cluster > 1
    made = nvrtc.compile_cuda(program.source, program.entry, "sm_90", lines=program.lines)
    assert made.resources.local_bytes == 0
    assert f".reqnctapercluster {program.schedule.cluster}" in made.ptx
    assert len(program.lines) == program.source.count("\n")


def test_files_for_several_architectures_have_no_cluster_if_one_lacks_them() -> None:
    module = parse_text(TEXT, "rows.kdsl")
    declared = next(k for k in module.kernels if k.name == "rms_norm_grad")
    made = target(module, declared, Choices(dims={"M": 8, "N": 65536}, dtype="bf16"))
    assert "__cluster_dims__(8, 1, 1)" in made.launches("cuda", ("sm_90", "sm_100a"))[0].source
    assert "__cluster_dims__" not in made.launches("cuda", ("sm_80", "sm_90"))[0].source


def test_text_is_for_readers() -> None:
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 1, 65536, BF16))
    source = host_source(cuda_kit.compiled(c))
    assert "256 threads a block, 8 blocks a cluster (sm_90 or later)" in source
    for line in source.splitlines():
        name = re.match(r"\s*(?:const )?(?:constexpr )?(?:int|float) (\w+)(?:\[.*\])* =", line)
        assert name is None or len(re.findall(rf"\b{name[1]}\b", source)) > 1, line


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="clusters need sm_90"
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("kernel", "n"),
    [("rms_norm", 131072), ("rms_norm", 140001), ("rms_norm_grad", 65536), ("rms_norm_grad", 50001),
     ("scaled_sums", 40000), ("column_sums", 100000)],
)  # fmt: skip
def test_gpu(kernel: str, n: int, dtype: torch.dtype) -> None:
    """Rows for part of the device, for all of it and for more, and the same bits at each call."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for m in (1, sms // 4 - 1, sms // 4, sms + 3, 4 * sms + 1):
        made = {name: t.cuda() for name, t in arguments(kernel, m, n, dtype).items()}
        got = answer(ask(kgen.loads(TEXT)[kernel], made), "cuda", repeat=True)
        assert got.status == "ok", f"{m} rows: {got.message}"


@pytest.mark.gpu
def test_gpu_knobs() -> None:
    """Schedules as a tuner would set them, for kernels that do not take a cluster by themselves."""
    for kernel, n in (("softmax", 8192), ("kinds", 5000), ("two_axes", 700), ("shifted", 3001), ("reversed", 3001)):
        for cluster in (2, 4, 8):
            first = "tile k in K, n in N" if kernel == "two_axes" else "tile n in N"
            head, mark, tail = TEXT.partition(f"kernel {kernel}(")
            rule = f"{first}\n    schedule cuda: cluster = {cluster}, threads = 128"
            module = kgen.loads(head + mark + tail.replace(first, rule, 1))
            made = {name: t.cuda() for name, t in arguments(kernel, 37, n).items()}
            got = answer(ask(module[kernel], made), "cuda", repeat=True)
            assert got.status == "ok", f"{kernel} in a cluster of {cluster}: {got.message}"


MEET = """
extern "C" __global__ void __cluster_dims__({cluster}, 1, 1) __launch_bounds__({threads})
meet(int* started, int* met, int clusters) {{
    if (threadIdx.x == 0) {{
        if (blockIdx.x % {cluster} == 0) atomicAdd(started, 1);
        const long long until = clock64() + 400000000;
        while (atomicAdd(started, 0) < clusters && clock64() < until) __nanosleep(1000);
        if (atomicAdd(started, 0) >= clusters) atomicAdd(met, 1);
    }}
    __syncthreads();
}}
"""


@pytest.mark.parametrize("compiles_alone", [pytest.param(False, marks=pytest.mark.gpu), True], ids=["gpu", "compiled"])
@pytest.mark.parametrize(("threads", "cluster", "shared"), [(1024, 4, 120 << 10), (256, 8, 100 << 10), (512, 8, 0)])
def test_the_driver_knows_how_many_clusters_run_at_a_time(
    threads: int, cluster: int, shared: int, compiles_alone: bool
) -> None:
    """Clusters that wait until all have started: of as many as the driver says all do, of one more the last does not
    start before the others give up."""
    major, minor = (9, 0) if compiles_alone else torch.cuda.get_device_capability()
    cubin = nvrtc.compile_cuda(MEET.format(threads=threads, cluster=cluster), "meet", f"sm_{major}{minor}").cubin
    if compiles_alone:
        return
    function = driver.load(driver.Binary(cubin, threads, shared, 0), "meet", 0)
    resident = driver.resident_clusters(function, 0, cluster, threads, shared)
    assert 0 < resident <= torch.cuda.get_device_properties(0).multi_processor_count * 2048 // (threads * cluster)
    slots = Slots((0, 0, 0), ((0, 0), (1, 1)), ((2, 0),))
    for clusters in (resident, resident + 1):
        counts = torch.zeros(2, dtype=torch.int32, device="cuda")
        form = driver.Form("meet", clusters, cluster, threads, shared, 0, ("i32", "i32", "i32"), slots)
        tensors = [counts[0], counts[1]]
        driver.DeviceLaunch(function, 0, form)(tensors, [clusters], [t.data_ptr() for t in tensors])
        started, met = counts.tolist()
        assert started == clusters
        assert (met == clusters * cluster) == (clusters == resident), f"{met} blocks of {clusters} clusters met"
