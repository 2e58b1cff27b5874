"""Tuned schedules at run time: which result counts for a call, the files that hold them, and what comes before them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kgen
from kgen.codegen.fingerprint import fingerprint
from kgen.codegen.knobs import Knobs
from kgen.dsl import ir
from kgen.runtime import registry, tuned, tuned_store
from kgen.runtime.ahead import Choices
from kgen.runtime.backends.reference import Reference
from kgen.runtime.binding import examine
from kgen.runtime.kernel import Kernel
from kgen.runtime.layouts import Layout
from kgen.runtime.tune_cases import case
from kgen.runtime.tuned_store import Result, Subject, add, knob_data, load, to_knobs, user_path

NORM = """kernel norm(x: T[*M, N], w: T[N], eps: f32 = 1e-6) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    r = rsqrt(mean(x[m, n] * x[m, n], n) + eps)
    y[m, n] = x[m, n] * r * w[n]
"""
RENAMED = """# the same with other names
kernel zscale(rows: Q[*B, A], gain: Q[A], tiny: f32 = 1e-6) -> (out: Q[*B, A]):
    parallel z in B
    tile a in A
    inverse = rsqrt(mean(rows[z, a] * rows[z, a], a) + tiny)
    out[z, a] = rows[z, a] * inverse * gain[a]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KGEN_TUNED", str(tmp_path))
    tuned.reload()
    yield tmp_path
    tuned.reload()


def norm(text: str = NORM) -> Kernel:
    module = kgen.loads(text)
    return module[next(iter(module))]


def arguments(rows: int = 8, width: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width), torch.randn(width)


def where(kernel: Kernel) -> Layout:
    return case(kernel, Choices({"M": 8, "N": 256}, "f32")).where


def subject_of(kernel: Kernel, backend: str = "cuda") -> Subject:
    return tuned.subject(where(kernel), backend)


def result(subject: Subject, knobs: Knobs | None, us: float = 5.0, rows: int = 8, **changed: object) -> Result:
    data = {} if knobs is None else knob_data(knobs, specialized(NORM))
    made = Result(subject, "norm", {"T": "f32"}, {"M": rows, "N": subject.sizes[0]}, data, us, 10.0)
    return replace(made, **changed)  # type: ignore[arg-type]


# ---- which kernel is it? -------------------------------------------------------------------------------------------


def specialized(text: str, dtype: torch.dtype = torch.float32) -> ir.Kernel:
    kernel = norm(text)
    x, w = (t.to(dtype) for t in arguments())
    spec, _ = examine(kernel.signature, [x, w, 1e-6], None)
    return kernel.specialize(spec)


def test_names_do_not_count() -> None:
    assert fingerprint(specialized(NORM)) == fingerprint(specialized(RENAMED))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ eps", "- eps"),
        ("mean(", "sum("),
        ("x[m, n] * r * w[n]", "x[m, n] * (r * w[n])"),
        ("* r * w[n]", "* r"),
        ("x[m, n] * x[m, n]", "x[m, n] * 2.0"),
        ("x[m, n] * x[m, n]", "x[m, n] * 3.0"),
        ("x: T[*M, N], w", "x: T[M, N], w"),
        ("    tile n in N\n", "    tile n in N\n    require N > 4\n"),
    ],
)
def test_everything_else_does(old: str, new: str) -> None:
    assert old in NORM
    assert fingerprint(specialized(NORM.replace(old, new))) != fingerprint(specialized(NORM))


def test_numbers_count() -> None:
    two, three = (NORM.replace("x[m, n] * x[m, n]", f"x[m, n] * {n}") for n in ("2.0", "3.0"))
    assert fingerprint(specialized(two)) != fingerprint(specialized(three))


def test_dtypes_count() -> None:
    assert fingerprint(specialized(NORM, torch.bfloat16)) != fingerprint(specialized(NORM))


def test_the_order_of_names_in_index_arithmetic_does_not_count() -> None:
    """Terms are kept in the order of their names."""
    text = "kernel k(x: f32[{0}, {1}]) -> (y: f32[{0}, {1}]):\n    parallel {2} in {0}, {3} in {1}\n" \
           "    y[{2}, {3}] = x[{2}, {3}] + (3 * {2} + {3} + {3} * {2})\n"  # fmt: skip

    def of(*names: str) -> str:
        kernel = norm(text.format(*names))
        return fingerprint(kernel.specialize(examine(kernel.signature, [torch.zeros(2, 3)], None)[0]))

    assert of("A", "B", "i", "j") == of("Z", "Y", "r", "c") == of("Y", "Z", "c", "r")


def test_exchanged_indices_are_another_kernel() -> None:
    text = "kernel k(x: f32[A, B]) -> (y: f32[A, B]):\n    parallel a in A, b in B\n    y[a, b] = x[a, b] + {}\n"

    def of(what: str) -> str:
        kernel = norm(text.format(what))
        return fingerprint(kernel.specialize(examine(kernel.signature, [torch.zeros(2, 3)], None)[0]))

    assert of("a") != of("b")
    assert of("(2 * a + b)") == of("(b + 2 * a)")


# ---- which result counts? ------------------------------------------------------------------------------------------

SUBJECT = Subject("f", "cuda", (4096,), "u16 u16")


def of_sizes(*sizes: int, rows: int = 8, us: float = 1.0, assumed: str = "u16 u16") -> Result:
    return Result(Subject("f", "cuda", sizes, assumed), "k", {}, {"M": rows}, {"threads": sizes[0] // 16}, us, 2.0)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (4096, 4096),  # the same
        (3072, 4096),  # no smaller, same bucket
        (2064, 4096),
        (2048, None),  # another bucket
        (3080, None),  # a multiple of 8 only
        (5008, 5120),  # the nearest
        (5120, 5120),
        (5136, 8192),  # 5120 is shorter
        (8192, 8192),
        (8208, None),
    ],
)
def test_the_bucket(wanted: int, found: int | None) -> None:
    results = [of_sizes(8192), of_sizes(4096), of_sizes(5120)]
    got = tuned.nearest(results, replace(SUBJECT, sizes=(wanted,)))
    assert (None if got is None else got.subject.sizes[0]) == found


def test_what_is_assumed_of_memory_must_be_the_same() -> None:
    assert tuned.nearest([of_sizes(4096)], replace(SUBJECT, assumed="u8 u16")) is None
    assert tuned.nearest([of_sizes(4096)], replace(SUBJECT, backend="triton")) is None
    assert tuned.nearest([of_sizes(4096)], replace(SUBJECT, kernel="g")) is None


def test_of_several_batch_sizes_the_largest_counts() -> None:
    results = [of_sizes(4096, rows=8, us=1.0), of_sizes(4096, rows=512, us=2.0), of_sizes(4096, rows=64, us=3.0)]
    found = tuned.nearest(results, SUBJECT)
    assert found is not None and found.us == 2.0


# ---- calls ---------------------------------------------------------------------------------------------------------


def threads(kernel: Kernel, width: int = 256, backend: str = "cuda") -> tuple[int, str]:
    program = kernel.prepare(*arguments(width=width), backend=backend).program
    assert program is not None
    return program.schedule.threads, program.schedule.by


def test_a_call_takes_the_tuned_schedule() -> None:
    kernel = norm()
    default, _ = threads(kernel)
    knobs = Knobs(threads=2 * default, rows=1)
    add("cpu", [result(subject_of(kernel), knobs)])
    tuned.reload()
    fresh = norm()
    assert threads(fresh) == (2 * default, "tuned")
    x, w = arguments(5)
    y = fresh(x, w, backend="cuda")
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (256,), w, 1e-6))
    # A pure rename is the same kernel, another dtype or width is not.
    assert threads(norm(RENAMED)) == (2 * default, "tuned")
    assert threads(norm(), width=300)[1] == "ladders"
    assert threads(norm(NORM.replace("+ eps", "- eps")))[1] == "ladders"
    assert threads(norm(), backend="triton")[1] == "ladders"


def test_what_the_source_sets_comes_first() -> None:
    text = NORM.replace("    tile n in N\n", "    tile n in N\n    schedule cuda when N <= 256: threads = 32\n")
    assert text != NORM
    own = subject_of(norm(text))
    knobs = Knobs(threads=512, rows=1)
    add("cpu", [result(replace(own, sizes=(256,)), knobs), result(replace(own, sizes=(512,)), knobs)])
    tuned.reload()
    found, by = threads(norm(text))
    assert found == 32 and by.startswith("the schedule at ")
    assert threads(norm(text), width=512) == (512, "tuned")


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = norm()
    add("cpu", [result(subject_of(kernel), Knobs(threads=512, rows=1))])
    monkeypatch.setenv("KGEN_TUNED", "0")
    tuned.reload()
    assert threads(norm())[1] == "ladders"


def test_a_new_batch_size_compiles_nothing() -> None:
    kernel = norm()
    add("cpu", [result(subject_of(kernel), Knobs(threads=64, rows=1), rows=n) for n in (8, 64)])
    tuned.reload()
    fresh = norm()
    first = fresh.prepare(*arguments(3), backend="cuda")
    assert fresh.prepare(*arguments(64), backend="cuda").built is first.built


def test_knobs_that_do_not_fit_leave_the_default() -> None:
    kernel = norm()
    default, _ = threads(kernel)
    add("cpu", [result(subject_of(kernel), Knobs(threads=48))])
    tuned.reload()
    assert threads(norm()) == (default, "ladders")


def test_chunks_are_kept_by_position() -> None:
    kernel = norm()
    wanted = Knobs(chunks=(("n", 64),))
    stored = result(subject_of(kernel), wanted)
    assert stored.knobs == {"chunks": {"0": 64}}
    assert to_knobs(stored, specialized(RENAMED)) == Knobs(chunks=(("a", 64),))
    add("cpu", [stored])
    tuned.reload()
    program = norm(RENAMED).prepare(*arguments(), backend="cuda").program
    assert program is not None and program.schedule.chunks == (("a", 64),)


def test_the_users_results_come_before_those_of_kgen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = norm()
    at = subject_of(kernel)
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(tuned, "shipped_path", lambda _: shipped)
    add("cpu", [result(at, Knobs(threads=64, rows=1), driver="other")], shipped)
    tuned.reload()
    assert threads(norm())[0] == 64  # whatever the driver
    add("cpu", [result(at, Knobs(threads=512, rows=1), rows=2)])
    tuned.reload()
    assert threads(norm())[0] == 512


def test_the_same_sizes_come_before_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(tuned, "shipped_path", lambda _: shipped)
    add("cpu", [of_sizes(3072, us=1.0), of_sizes(4096, us=4.0)], shipped)
    add("cpu", [of_sizes(4096, us=2.0), of_sizes(3584, us=3.0)])
    known = tuned.Table("cpu", "")

    def found(n: int) -> float:
        r = known.find(replace(SUBJECT, sizes=(n,)))
        assert r is not None
        return r.us

    assert found(3072) == 1.0  # kgen's own, though the user has a near one
    assert found(4096) == 2.0
    assert found(3088) == 3.0  # the nearest of all
    assert found(2064) == 1.0


@pytest.mark.parametrize(
    ("us", "choice", "works", "expected"),
    [
        (4.0, "auto", True, "triton"),
        (6.0, "auto", True, "cuda"),
        (4.0, "auto", False, "cuda"),
        (4.0, "cuda", True, "cuda"),
    ],
)
def test_auto_takes_the_faster_backend_of_a_gpu(us: float, choice: str, works: bool, expected: str) -> None:
    class Fake(Reference):
        general = False

        def __init__(self, backend: str) -> None:
            self.backend = backend

        def why_unavailable(self, device: torch.device) -> str | None:
            return None if works else "not here"

    at = where(norm())
    knobs = {b: Knobs(threads=n) for b, n in (("cuda", 64), ("triton", 128))}
    add("gpu", [result(tuned.subject(at, b), knobs[b], us=us if b == "triton" else 5.0) for b in knobs])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "table", lambda _: tuned.Table("gpu", ""))
        patch.setattr(registry, "executor_for", lambda name, device: Fake(name))
        executor, found = tuned.choose(at, choice, Fake("cuda"), torch.device("cuda", 0))
    assert executor.backend == expected and found == knobs[expected]


def test_a_schedule_in_the_source_comes_before_all_results() -> None:
    text = NORM.replace("    parallel m in M\n", "    schedule cuda: threads = 64, rows = 1\n    parallel m in M\n")
    assert fingerprint(specialized(text)) == fingerprint(specialized(NORM))
    add("cpu", [result(subject_of(norm(), b), Knobs(threads=512, rows=1)) for b in ("cuda", "triton")])
    tuned.reload()
    assert threads(norm())[0] == 512
    assert threads(norm(text))[0] == 64
    assert threads(norm(text), backend="triton")[0] == 512  # which it says nothing about


def test_results_of_another_driver_do_not_count() -> None:
    kernel = norm()
    add("cpu", [result(subject_of(kernel), Knobs(threads=512, rows=1), driver="1.2.3")])
    tuned.reload()
    assert threads(norm())[1] == "ladders"


def test_the_faster_backend() -> None:
    at = where(norm())
    cuda, triton = (result(tuned.subject(at, b), None) for b in ("cuda", "triton"))
    for us, expected in ((4.0, "triton"), (6.0, "cuda")):
        add("cpu", [cuda, replace(triton, us=us)])
        assert tuned.Table("cpu", "").faster(at) == expected


def test_no_backend_is_faster_where_one_was_not_measured_or_other_calls_were() -> None:
    at = where(norm())
    cuda, triton = (result(tuned.subject(at, b), None) for b in ("cuda", "triton"))
    add("cpu", [cuda])
    assert tuned.Table("cpu", "").faster(at) is None
    add("cpu", [replace(triton, dims={"M": 7, "N": 256})])
    assert tuned.Table("cpu", "").faster(at) is None


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_file_round_trip() -> None:
    made = [of_sizes(4096), replace(of_sizes(64, rows=2), skipped={"spills": 3}, driver="5", spread_us=0.25)]
    path = add("Some GPU (tm)", made)
    assert path.name == "some_gpu_tm.json"
    assert sorted(map(repr, load(path))) == sorted(map(repr, made))


def test_a_newer_result_replaces_the_older_one_of_its_kind_alone() -> None:
    add("gpu", [of_sizes(4096, us=1.0), of_sizes(4096, rows=9, us=2.0)])
    add("gpu", [of_sizes(4096, us=3.0)])
    assert sorted(r.us for r in load(user_path("gpu"))) == [2.0, 3.0]


def test_writers_at_the_same_time_lose_nothing() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: add("gpu", [of_sizes(16 * (i + 1))]), range(40)))
    path = user_path("gpu")
    assert len(load(path)) == 40
    assert path is not None and not list(path.parent.glob(".tmp*"))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 9, "generator": 1, "results": []}',
                                  '{"format": 1, "generator": 1, "results": [{}]}'])  # fmt: skip
def test_a_file_that_is_none(text: str) -> None:
    path = user_path("cpu")
    assert path is not None
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="is no file of tuned schedules"):
        assert load(path) == []
    with pytest.warns(RuntimeWarning):
        assert threads(norm())[1] == "ladders"
    add("cpu", [of_sizes(64)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(load(path)) == 1
    assert path.with_name("cpu.json.bad").read_text() == text


def test_results_of_another_generator_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    path = add("gpu", [of_sizes(64)])
    monkeypatch.setattr(tuned_store, "GENERATOR", tuned_store.GENERATOR + 1)
    assert load(path) == []
    assert json.loads(path.read_text())["results"]


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KGEN_TUNED", str(tmp_path / "file"))
    with pytest.raises(kgen.KgenError, match="cannot write"):
        add("gpu", [of_sizes(64)])
