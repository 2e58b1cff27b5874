"""Matrix products by an algorithm that was measured: which are known, which are taken, and what they compute."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cublaslt import FakeLt
from typer.testing import CliRunner

from kgen.cli import app
from kgen.cli.tune_products import op_of, problems_of, tasks_of
from kgen.dsl.errors import KgenError
from kgen.runtime.ahead import Choices
from kgen.runtime.errors import BackendError
from kgen.runtime.products import cublaslt, multiply, table, tune
from kgen.runtime.products.problem import Kind, Problem, distance
from kgen.runtime.products.table import Chosen, Measured, Table
from kgen.runtime.products.tune import Operands, measure
from kgen.runtime.tune import Machine as Tuner

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
TRANSPOSED = ((False, False), (False, True), (True, False), (True, True))
KIND = Kind((False, False), "bf16", "bf16", False)


def config(tile: int) -> dict[str, int]:
    return {"id": 66, "tile": tile, "split": 1, "reduction": 0, "swizzle": 0, "custom": 0, "stages": 0, "inner": 0,
            "cluster": 0}  # fmt: skip


HERE = 130100  # the version of the library in these tests


def measured(
    kind: Kind = KIND,
    sizes: tuple[int, int, int] = (64, 32, 16),
    tile: int = 29,
    us: float = 1.0,
    version: int = HERE,
) -> Measured:
    return Measured(kind, sizes, config(tile) if tile else {}, us, 2.0, 0.1, 3, "1.2", version)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library on the CPU, whose stream is none."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: type("Stream", (), {"cuda_stream": 0}))
    return FakeLt()


def matrices(
    rows: int, columns: int, inner: int, transposed: tuple[bool, bool], dtype: torch.dtype, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, left, right), aligned to 256 bytes, each part of something wider."""
    g = torch.Generator().manual_seed(3)

    def matrix(m: int, n: int, turned: bool, d: torch.dtype) -> torch.Tensor:
        down, along = (n, m) if turned else (m, n)
        wide = -(-along // 16) * 16 + 16
        room = torch.empty(down * wide + 256, dtype=d)
        skip = -room.data_ptr() % 256 // d.itemsize
        part = room[skip : skip + down * wide].view(down, wide)[:, :along]
        part.copy_(torch.randn(down, along, generator=g))
        return part.t() if turned else part

    return (
        matrix(rows, columns, False, out), matrix(rows, inner, transposed[0], dtype),
        matrix(inner, columns, transposed[1], dtype),
    )  # fmt: skip


# ---- what a problem is -----------------------------------------------------------------------------------------------


def test_problems_of_tensors() -> None:
    x, w = torch.empty(8, 32, dtype=BF16), torch.empty(64, 32, dtype=BF16)
    logits = torch.empty(8, 64, dtype=BF16)
    p = Problem.of(logits, x, w.t(), False)
    assert p == Problem(Kind((False, True), "bf16", "bf16", False), 8, 64, 32, (32, 32, 64))
    assert p is not None and p.flops == 2 * 8 * 64 * 32 and str(p.kind) == "bf16 = bf16 a @ bᵀ"
    p = Problem.of(torch.empty(64, 32, dtype=F32), logits.t(), x, True)
    assert p == Problem(Kind((True, False), "bf16", "f32", True), 64, 32, 8, (64, 32, 32))


def test_problems_that_are_torchs_alone() -> None:
    a, b, c = torch.empty(8, 32, dtype=BF16), torch.empty(32, 64, dtype=BF16), torch.empty(8, 64, dtype=BF16)
    assert Problem.of(c, a, b, False) is not None
    assert Problem.of(c.float(), a.float(), b.float(), False) is None  # f32 factors: TF32 is not ours to choose
    assert Problem.of(c, a, b.half(), False) is None
    assert Problem.of(c.half(), a, b, False) is None
    assert Problem.of(c, a[:, ::2], b[:16], False) is None  # neither its rows nor its columns are contiguous
    assert Problem.of(c[:, :63], a, b[:, :63], False) is not None  # rows 128 bytes apart
    odd = torch.empty(32, 63, dtype=BF16)
    assert Problem.of(torch.empty(8, 63, dtype=BF16), a, odd, False) is None  # rows 126 bytes apart
    assert Problem.of(torch.empty(64, 8, dtype=BF16).t(), a, b, False) is None  # a result that lies transposed
    assert Problem.of(c[:0], a[:0], b, False) is None
    assert Problem.of(c, a[:, :0], b[:0], True) is None
    one = Problem.of(torch.empty(1, 64, dtype=BF16), a[:1], b, False)
    assert one is not None and one.leading[0] == 32


def test_distances() -> None:
    assert distance((64, 32, 16), (64, 32, 16)) == 0
    assert distance((64, 32, 16), (128, 32, 8)) == 2
    assert distance((64, 32, 16), (129, 32, 16)) is None
    assert distance((64, 32, 16), (64, 32, 7)) is None
    assert distance((64, 0, 16), (64, 32, 16)) is None


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    kinds = [Kind(t, d, o, a) for t in TRANSPOSED for d, o, a in
             (("bf16", "bf16", True), ("f16", "f32", False))]  # fmt: skip
    results = [measured(k, (64, 32, 8 * i + 8), 29 if i % 2 else 0) for i, k in enumerate(kinds)]
    where = table.keep("A GPU", results[:5], tmp_path / "products" / "a_gpu.json")
    assert table.keep("A GPU", [*results[5:], measured(kinds[0], (64, 32, 8), 20, 0.5)], where) == where
    read = {r.key: r for r in table.load(where)}
    assert len(read) == len(results) and read[kinds[0], (64, 32, 8), HERE].us == 0.5
    assert all(read[r.key] == r for r in results[1:])
    assert table.text_of("A GPU", read.values()) == table.text_of("A GPU", reversed(list(read.values())))


def test_a_file_that_is_none_is_told_and_kept(tmp_path: Path) -> None:
    where = tmp_path / "a.json"
    for text in ("{", '{"format": 2, "products": []}', '{"format": 1}', '{"format": 1, "products": [{"sizes": [1]}]}'):
        where.write_text(text)
        with pytest.warns(RuntimeWarning, match="no file of tuned matrix products"):
            assert table.load(where) == []
    table.keep("A GPU", [measured()], where)
    assert (tmp_path / "a.json.bad").read_text() == text and table.load(where) == [measured()]
    assert table.load(tmp_path / "nothing.json") == [] and table.load(None) == []
    with pytest.raises(ValueError, match="two of n and t"):
        Kind.read({"transposed": "nx", "dtype": "bf16", "out": "bf16", "accumulate": False})


def test_what_comes_with_kgen_is_well_formed() -> None:
    files = list((table.shipped_path("x").parent).glob("*.json"))
    for file in files:
        results = table.parse(file.read_bytes())
        assert len({r.key for r in results}) == len(results) > 0
        for r in results:
            assert min(r.sizes) > 0 and r.us > 0 and r.driver and r.version > 120000
            assert (r.us < r.default_us and r.config["split"] == 1) if r.config else r.us == r.default_us
        assert file.read_text() == table.text_of(json.loads(file.read_text())["device"], results)


# ---- which is taken --------------------------------------------------------------------------------------------------


def test_the_nearest_result_counts_and_the_users_first() -> None:
    def problem(rows: int) -> Problem:
        return Problem(KIND, rows, 32, 16, (16, 32, 32))

    known = Table([measured(sizes=(256, 32, 16), tile=1)], [measured(sizes=(64, 32, 16), tile=2)])
    assert len(known) == 2
    for rows, tile in ((64, 2), (96, 2), (32, 2), (256, 1), (512, 1), (200, 1)):
        found = known.find(problem(rows), HERE)
        assert found is not None and found.config["tile"] == tile, rows
    assert known.find(problem(513), HERE) is None and known.find(problem(31), HERE) is None
    other = Problem(Kind((False, True), "bf16", "bf16", False), 64, 32, 16, (16, 16, 32))
    assert known.find(other, HERE) is None
    both = Table([measured(tile=1)], [measured(tile=2)])
    found = both.find(problem(64), HERE)
    assert found is not None and found.config["tile"] == 1


def test_results_of_another_version_of_the_library_come_behind(fake: Any, tmp_path: Path) -> None:
    problem = Problem(KIND, 64, 32, 16, (16, 32, 32))
    here, other = measured(tile=29), measured(tile=77, us=0.5, version=HERE + 1)
    where = table.keep("A GPU", [here], tmp_path / "a.json")
    table.keep("A GPU", [other], where)
    both = table.load(where)
    assert both == [here, other] and table.text_of("A GPU", both) == table.text_of("A GPU", both[::-1])
    for known in (Table(both, []), Table([other], [here])):
        assert known.find(problem, HERE) == here and known.find(problem, HERE + 1) == other
    assert Table([other], []).find(problem, HERE) == other  # better than nothing: its algorithm may be on offer
    c, a, b = matrices(64, 32, 16, (False, False), BF16, BF16)
    assert Chosen(Table([other], [here]), lambda: cublaslt.Library(fake)).multiply(c, a, b, False)


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize(("dtype", "out"), [(BF16, BF16), (BF16, F32), (F16, F16)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_library_is_told_the_right_product(
    fake: Any, transposed: tuple[bool, bool], dtype: torch.dtype, out: torch.dtype, accumulate: bool
) -> None:
    c, a, b = matrices(24, 40, 56, transposed, dtype, out)
    problem = Problem.of(c, a, b, accumulate)
    assert problem is not None and problem.kind.transposed == transposed
    library = cublaslt.Library(fake)
    found = {x.config["tile"]: x for x in library.algorithms(problem)}
    expected = a.double() @ b.double() + (c.double() if accumulate else 0)
    size = a.double().abs() @ b.double().abs() + c.double().abs()
    if not accumulate:
        c.fill_(math.nan)
    assert library.product(problem, found[29])(c, a, b)
    eps = {BF16: 2.0**-8, F16: 2.0**-11, F32: 0.0}[out]
    assert ((c.double() - expected).abs() <= expected.abs() * eps + size * 56 * 2.0**-24).all()
    assert fake.calls == [29]


def chosen(fake: Any, *results: Measured) -> Chosen:
    return Chosen(Table(list(results), []), lambda: cublaslt.Library(fake))


def test_a_known_algorithm_is_taken_and_made_once(fake: Any) -> None:
    c, a, b = matrices(64, 32, 16, (False, False), BF16, BF16)
    known = chosen(fake, measured())
    created = []
    make = fake.cublasLtMatmulDescCreate
    fake.cublasLtMatmulDescCreate = lambda *args: created.append(1) or make(*args)
    for _ in range(3):
        assert known.multiply(c, a, b, False)
    assert fake.calls == [29] * 3
    assert len(created) == 2  # to ask, and to make
    assert torch.equal(c, (a.float() @ b.float()).to(BF16))
    assert not known.multiply(c, a, b, True)  # another kind


def test_what_is_not_known_or_does_not_fit_is_left_to_torch(fake: Any) -> None:
    c, a, b = matrices(64, 32, 16, (False, False), BF16, BF16)
    assert not chosen(fake, measured(tile=0)).multiply(c, a, b, False)  # torch's choice was the fastest
    assert not chosen(fake, measured(tile=77)).multiply(c, a, b, False)  # not on offer: another version
    assert not chosen(fake, measured(sizes=(640, 32, 16))).multiply(c, a, b, False)
    assert not Chosen(Table([measured()], []), lambda: None).multiply(c, a, b, False)
    known = chosen(fake, measured())
    room = torch.empty(64 * 64 + 256, dtype=BF16)
    skip = -room.data_ptr() % 256 // 2 + 8
    off = room[skip : skip + 64 * 48].view(64, 48)[:, :32]
    off.copy_(c)
    assert off.stride() == c.stride() and off.data_ptr() % 256 == 16
    assert not known.multiply(off, a, b, False) and known.multiply(c, a, b, False)
    assert fake.calls == [29]


@pytest.mark.parametrize("skip", [0, 4])
def test_freed_memory_is_left_to_torch_which_says_so(fake: Any, skip: int) -> None:
    tried: list[torch.Tensor] = []

    def room(rows: int, columns: int) -> torch.Tensor:
        """Behind `skip` rows of a storage that begins aligned."""
        while not tried or tried[-1].data_ptr() % 256:
            tried.append(torch.zeros(skip + rows, columns, dtype=BF16))
        return tried.pop()[skip:]

    known = chosen(fake, measured(sizes=(128, 128, 128)))
    for freed in range(3):
        operands = room(128, 128), room(128, 128), room(128, 128)
        assert known.multiply(*operands, False)
        operands[freed].untyped_storage().resize_(0)
        assert operands[freed].data_ptr() == skip * 256
        assert not known.multiply(*operands, False)
        with pytest.raises(RuntimeError, match=r"not allocated|out of bounds"):
            multiply.by_torch(*operands, None, False)
    assert fake.calls == [29] * 3


def test_while_a_graph_is_captured_the_library_is_asked_nothing(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c, a, b = matrices(64, 32, 16, (False, False), BF16, BF16)
    asked: list[int] = []
    known = Chosen(Table([measured()], []), lambda: asked.append(1) or cublaslt.Library(fake))
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "is_available", lambda: True)
        m.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not known.multiply(c, a, b, False) and not asked
    assert known.multiply(c, a, b, False)  # nothing was concluded from it
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, "is_available", lambda: True)
        m.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert known.multiply(c, a, b, False)
    assert fake.calls == [29] * 2


def test_descriptions_last_as_long_as_their_product(fake: Any) -> None:
    c, a, b = matrices(64, 32, 16, (False, False), BF16, BF16)
    known, other = chosen(fake, measured()), chosen(fake, measured(tile=77))
    assert known.multiply(c, a, b, False) and not other.multiply(c, a, b, False)
    assert fake.alive == 4  # the product and its matrices, and nothing of what was asked
    del known
    assert fake.alive == 0


def test_an_algorithm_that_is_refused_is_not_asked_again(fake: Any) -> None:
    c, a, b = matrices(64, 32, 16, (False, False), BF16, BF16)
    before = c.clone()
    fake.refused = (29,)
    known = chosen(fake, measured())
    assert not known.multiply(c, a, b, False) and torch.equal(c, before)
    fake.refused = ()
    assert not known.multiply(c, a, b, False) and not fake.calls


def test_a_failure_is_told(fake: Any) -> None:
    """Behind it nobody knows what the result is: torch must not add to it."""
    c, a, b = matrices(64, 32, 16, (False, False), BF16, BF16)
    fake.refused, fake.status = (29,), 13  # CUBLAS_STATUS_EXECUTION_FAILED
    with pytest.raises(BackendError, match="status 13"):
        chosen(fake, measured()).multiply(c, a, b, False)


def test_split_sums_are_never_taken(fake: Any) -> None:
    fake.split = (29,)
    c, a, b = matrices(64, 32, 16, (False, False), BF16, BF16)
    problem = Problem.of(c, a, b, False)
    assert problem is not None
    assert [x.config["tile"] for x in cublaslt.Library(fake).algorithms(problem)] == [20]
    assert not chosen(fake, measured()).multiply(c, a, b, False)


def test_nothing_is_asked_of_the_library_without_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "device_name", lambda _: "A GPU")
    monkeypatch.setenv("KGEN_TUNED", str(tmp_path))
    table.reload()
    try:
        assert table.chosen(0) is None
        table.keep("A GPU", [measured()])
        table.reload()
        assert table.chosen(0) is not None
        monkeypatch.setenv("KGEN_TUNED", "0")
        table.reload()
        assert table.chosen(0) is None
    finally:
        table.reload()


# ---- which is the fastest --------------------------------------------------------------------------------------------


def timer(times: Mapping[int, float]) -> Any:
    """Of run i, always `times[i]`."""

    def make(runs: Sequence[Callable[[], object]], reset: Callable[[], object]) -> Any:
        return lambda which, rounds: {i: [times.get(i, 9.0)] * rounds for i in which}

    return make


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_fastest_of_the_right_ones(fake: Any, accumulate: bool) -> None:
    fake.tiles, fake.refused = (20, 24, 29, 31), (31,)
    p = Problem(Kind((True, False), "bf16", "bf16", accumulate), 128, 64, 40, (128, 64, 64))
    right = fake.cublasLtMatmul

    def wrong(*args: Any) -> int:
        code = right(*args)
        if fake.calls[-1:] == [24]:  # as if it had left out a term
            out = fake._matrix(args[10], args[11], 0)
            out[3, ::7] += 0.5
        return code

    fake.cublasLtMatmul = wrong
    o = measure(p, cublaslt.Library(fake), CPU, "1.2", timer=timer({0: 10.0, 1: 8.0, 2: 5.0}))
    assert o.result is not None and o.result.config["tile"] == 29 and (o.result.us, o.result.default_us) == (5.0, 10.0)
    assert len(o.wrong) == 1 and "'tile': 24" in o.wrong[0] and "WRONG" in o.wrong[0]
    assert [f["algorithm"].get("tile") for f in o.figures] == [29, 20, None]
    o = measure(p, cublaslt.Library(fake), CPU, "1.2", timer=timer({0: 4.0}))
    assert o.result is not None and o.result.config == {} and o.result.us == 4.0


def test_operands_lie_as_the_problem_says() -> None:
    for transposed in TRANSPOSED:
        p = Problem(Kind(transposed, "f16", "f32", True), 48, 24, 16, (64, 64, 32))
        o = Operands.of(p, CPU)
        assert Problem.of(o.out, o.left, o.right, True) == p
        assert o.off(lambda o=o: multiply.by_torch(o.out, o.left, o.right, None, True), True) <= 1
        assert o.off(lambda: None, False) == math.inf  # nothing was computed


def test_a_wrong_product_of_torch_is_told(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiply, "by_torch", lambda out, *_: out.zero_())
    p = Problem(KIND, 64, 32, 16, (16, 32, 32))
    with pytest.raises(KgenError, match="torch's own product is off"):
        measure(p, cublaslt.Library(fake), CPU, "")


@pytest.mark.parametrize("what", ["by_torch", "search"])
def test_memory_that_does_not_suffice_is_a_mistake(fake: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(multiply if what == "by_torch" else tune, what, refuse)
    with pytest.raises(KgenError, match="do not fit the memory"):
        measure(Problem(KIND, 64, 32, 16, (16, 32, 32)), cublaslt.Library(fake), CPU, "", timer=timer({}))


def test_a_check_holds_part_of_a_factor_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_AT_ONCE", 256)
    o = Operands.of(Problem(KIND, 64, 40, 72, (72, 40, 40)), CPU)
    double, sizes = torch.Tensor.double, list[int]()
    monkeypatch.setattr(torch.Tensor, "double", lambda t: sizes.append(t.numel()) or double(t))
    assert o.off(lambda: multiply.by_torch(o.out, o.left, o.right, None, False), False) <= 1
    assert sizes.count(3 * 72) == 13 and max(sizes[1:]) <= 256

    def last() -> None:
        multiply.by_torch(o.out, o.left, o.right, None, False)
        o.out[:, -1] += 1

    assert o.off(last, False) > 1


# ---- the command -----------------------------------------------------------------------------------------------------


def test_products_of_an_op() -> None:
    found = op_of("fused_linear_cross_entropy")
    assert found is not None and len(found[1]) == 2
    (task,) = tasks_of(found[0], found[1], Choices(), [{"B": 4096, "H": 512, "V": 8192}], [8.0], None)
    assert {(str(p.kind), p.sizes) for p in problems_of(task)} == {
        ("bf16 = bf16 a @ bᵀ", (512, 8192, 512)),
        ("bf16 = bf16 a @ b", (512, 512, 8192)),
        ("bf16 = bf16 aᵀ @ b", (8192, 512, 512)),
        ("bf16 += bf16 aᵀ @ b", (8192, 512, 512)),
    }
    usual = tasks_of(found[0], found[1], Choices(), [], [], None)
    assert {t.accumulate for t in usual} == {"param", "f32"} and all(problems_of(t) for t in usual)
    assert op_of("rms_norm") is None and op_of("no_such_op") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rms_norm", "--workspace-mb", "64"), "for ops, which take rows in chunks"),
        (("fused_linear_cross_entropy", "--accumulate", "f64"), "none of auto, param, f32"),
        (("fused_linear_cross_entropy", "rms_norm"), "by two commands"),
        (("fused_linear_cross_entropy", "--gradients", "x"), "--gradients is for kernels"),
        (("fused_linear_cross_entropy", "--candidates", "8"), "--candidates is for kernels"),
        (("fused_linear_cross_entropy", "--sizes", "B=8,H=64,Q=3"), "no dimension 'Q'"),
        (("fused_linear_cross_entropy", "--without", "zzz"), "no optional tensor 'zzz'"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["tune", *arguments])
    assert done.exit_code == 2 and message in " ".join(done.output.split())


@dataclass(frozen=True)
class Machine:
    """One that kgen tune measures on, where there is none."""

    name: str = "A GPU"
    driver: str = "1.2"
    device: torch.device = CPU


def test_what_this_version_measured_is_known_and_an_interrupted_run_tells_the_rest(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KGEN_TUNED", str(tmp_path / "tuned"))
    monkeypatch.setattr(Tuner, "gpu", lambda: Machine())
    monkeypatch.setattr(cublaslt, "library", lambda _: cublaslt.Library(fake))
    seen: list[Problem] = []

    def measure(p: Problem, library: cublaslt.Library, *_: Any, **__: Any) -> tune.Outcome:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(p)
        return tune.Outcome(p, measured(p.kind, p.sizes, version=library.version))

    monkeypatch.setattr(tune, "measure", measure)

    def run() -> str:
        command = ("tune", "fused_linear_cross_entropy", "--sizes", "B=8,H=64,V=128", "--json", str(tmp_path / "j"))
        return CliRunner().invoke(app, [*command, "--export", str(tmp_path / "e")]).output

    assert "interrupted; what was measured is kept" in run()
    assert len(json.loads((tmp_path / "j").read_text())["products"]) == len(table.load(tmp_path / "e")) == 2
    first = seen[:]
    seen.clear()
    assert run().count("(known)") == 2 and len(seen) == 2 and not set(seen) & set(first)
    seen.clear()
    assert run().count("(known)") == 4 and not seen
    fake.cublasLtGetVersion = lambda: HERE + 1
    assert "(known)" not in run() and seen == first
