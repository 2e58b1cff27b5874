"""`kgen bench`: tiny and on the CPU, and what is told of results: bars, peers, comparisons, tables."""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_kit import Record, call, linear, norm, result, row, whole
from typer.testing import CliRunner

import kgen
from kgen import ops
from kgen.bench import catalog, compare, measure, report, timing, work
from kgen.bench.compare import FASTER, LOST, SAME, SLOWER
from kgen.bench.linear_rows import linear_cases
from kgen.bench.peers import NotInstalled, attribute
from kgen.bench.result import SCHEMA, Span, best_peer, load, meets, of_floor, save, slower_than_peer
from kgen.bench.run import run
from kgen.cli import app
from kgen.dsl.errors import KgenError

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
BACKENDS = tuple(s.name for s in kgen.backends("cpu") if s.available and s.name in work.BACKENDS)
needs_backend = pytest.mark.skipif(not BACKENDS, reason="needs g++ or Triton")
needs_both = pytest.mark.skipif(len(BACKENDS) < 2, reason="needs g++ and Triton")


def invoke(*arguments: str) -> Any:
    """The command line."""
    return CliRunner().invoke(app, ["bench", *arguments])


# ---- statistics --------------------------------------------------------------------------------------------------


def test_calls_take_turns_and_deciles_are_those_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    order: list[str] = []
    lengths = {"a": iter(range(1, 1000)), "b": iter(range(1000, 9000))}  # us of each call

    def made(name: str) -> Callable[[], None]:
        def call() -> None:
            order.append(name)
            now[0] += next(lengths[name]) * 1e-6

        return call

    def reset() -> None:
        order.append("reset")
        now[0] += 1.0  # outside of the time

    found = timing.interleaved({"a": made("a"), "b": made("b")}, CPU, 20, reset={"b": reset})
    counted = list(range(1 + timing.WARM, 21 + timing.WARM))
    assert found["a"]["calls"] == found["b"]["calls"] == 20
    assert found["a"]["median_us"] == pytest.approx(statistics.median(counted))
    assert found["a"]["p10_us"] == pytest.approx(counted[2]) and found["a"]["p90_us"] == pytest.approx(counted[18])
    assert found["b"]["median_us"] == pytest.approx(999 + statistics.median(counted), rel=1e-6)
    calls = [o for o in order if o != "reset"]
    rounds = [calls[i : i + 2] for i in range(0, len(calls), 2)]
    assert all(set(r) == {"a", "b"} for r in rounds) and {tuple(r) for r in rounds} == {("a", "b"), ("b", "a")}
    assert all(order[i - 1] == "reset" for i, o in enumerate(order) if o == "b") and order.count("reset") == 23


def test_no_round_is_begun_when_time_is_up() -> None:
    found = timing.interleaved({"a": lambda: None}, CPU, 50, until=time.monotonic() - 1)
    assert found["a"]["calls"] == timing.LEAST


def test_what_takes_too_long_is_given_up() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="given up after 1 s"), timing.within(1.0):
        time.sleep(20)
    assert time.monotonic() - began < 10


def test_errors_in_units_of_the_bound_and_by_norm() -> None:
    ref = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    allowed = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    near, off, nan = (torch.tensor(v) for v in ([1.25, -2.0, 0.0], [1.0, -2.0, 1e-9], [1.0, float("nan"), 0.0]))
    assert work.worst([(near, ref, allowed)]) == 0.5
    assert work.worst([(off, ref, allowed)]) == work.worst([(nan, ref, allowed)]) == float("inf")
    assert work.relative_error([(near, ref, allowed)]) == pytest.approx(0.25 / 5**0.5)
    assert work.relative_error([(nan, ref, allowed)]) == float("inf")


# ---- what is timed -----------------------------------------------------------------------------------------------


def test_the_list_has_every_op_and_bars_for_both_backends() -> None:
    there = catalog.cases()
    names = [c.name for c in there]
    assert len(set(names)) == len(names)
    listed = [c for c in there if isinstance(c, measure.Case)]
    assert {c.op for c in listed} | {"linear_cross_entropy"} == set(catalog.OPS)
    shipped = set(ops.__all__) - {"kept_weight", "log_softmax", "vocab_parallel_linear_cross_entropy"}
    assert {op.removesuffix("_tanh") for op in catalog.OPS} == shipped - {"cross_entropy_"}
    assert all(set(c.bars) == set(work.BACKENDS) and min(c.bars.values()) > 1 for c in listed)
    bars = {c.name: dict(c.bars) for c in listed}
    assert bars["rms_norm forward 16384x1024"] == {"cuda": 1.06, "triton": 1.10}
    assert bars["rms_norm backward 2048x65536"] == {"cuda": 1.35, "triton": 1.8}
    assert bars["rope backward 4x4096x32x8x128"] == {"cuda": 1.05, "triton": 1.08}
    assert bars["cross_entropy in place 8192x50304"] == {"cuda": 1.45, "triton": 1.6}


def test_shapes_replace_those_of_the_list_where_they_fit() -> None:
    found = catalog.cases(["rms_norm", "rope", "linear_cross_entropy"], [(16384, 4096), (10, 20), (64, 32, 125)])
    assert [c.name for c in found] == [
        "rms_norm forward 16384x4096", "rms_norm forward 10x20", "rms_norm backward 16384x4096",
        "rms_norm backward 10x20", "linear_cross_entropy 64x32x125",
    ]  # fmt: skip
    assert [bool(c.bars) for c in found] == [True, False, True, False, False]


@needs_backend
@pytest.mark.parametrize(
    "case", [c for c in catalog.cases(small=True) if isinstance(c, measure.Case)], ids=lambda c: c.name
)
def test_checks_find_what_is_off(case: measure.Case) -> None:
    """Results pass; each of them fails when one element is off by three roundings, and when it is missing."""
    made = case.make(case.shape, torch.Generator().manual_seed(1))
    one = made.ours(BACKENDS[0])
    got = one.results(one.call())
    assert 0 < work.worst(made.check(got)) <= 1
    assert work.relative_error(made.check(got)) < work.PEER_ERROR
    for k, tensor in enumerate(got):
        assert tensor is not None
        wrong = tensor.clone()
        flat = wrong.view(-1)
        at = int(flat.abs().argmax())
        flat[at] *= 1 + 4 * work.BF16_ROUNDING
        assert work.worst(made.check((*got[:k], wrong, *got[k + 1 :]))) > 1
        empty = torch.full_like(tensor, float("nan"))
        assert work.worst(made.check((*got[:k], empty, *got[k + 1 :]))) == float("inf")


@needs_backend
@pytest.mark.parametrize(
    "case", [c for c in catalog.cases(small=True) if isinstance(c, measure.Case)], ids=lambda c: c.name
)
def test_eager_torch_computes_the_same_and_can_be_repeated(case: measure.Case) -> None:
    made = case.make(case.shape, torch.Generator().manual_seed(1))
    one, found = measure.ready(made, made.peers["eager"], CPU, own=False)
    again = work.relative_error(made.check(one.results(one.call())))
    assert 0 < found["error_by_norm"] < work.PEER_ERROR and again == found["error_by_norm"]


def test_a_peer_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(name: str) -> str:
        monkeypatch.setattr(importlib, "import_module", lambda _: exec("raise ImportError(name=name)", {"name": name}))
        with pytest.raises(NotInstalled) as error:
            attribute("QuACK", "quack.rmsnorm", "rmsnorm")
        return str(error.value)

    assert said("quack") == "not installed" and said("cutlass") == "not installed: it needs cutlass"
    assert said("quack.rmsnorm") == "not installed: this version has no quack.rmsnorm"
    monkeypatch.undo()
    with pytest.raises(AttributeError):
        attribute("Liger", "math", "no_such_function")


def _case(make: work.Make, name: str = "op") -> measure.Case:
    return measure.Case(name, "forward", (4, 8), 1, 1, 1, make)


def _copying(mistake: float = 0.0, broken: bool = False) -> work.Make:
    def make(shape: work.Shape, g: torch.Generator) -> work.Work:
        x = work.randn(g, *shape)
        y = torch.empty_like(x)

        def check(got: work.Results) -> Any:
            (found,) = got
            assert found is not None
            yield found, x.double(), work.bound(x.double(), x.double())

        def ours(backend: str) -> work.Run:
            if broken:
                raise RuntimeError("no such luck")
            return work.Run(lambda: y.copy_(x * (1 + mistake) if backend == "cuda" else x))

        def liger() -> work.Run:
            raise NotInstalled("not installed")

        return work.Work(x.numel(), check, ours, {"eager": lambda: work.Run(lambda: x * 2), "Liger": liger}, (y,))

    return make


def test_what_is_wrong_is_not_timed_and_stops_nothing_else(tmp_path: Path) -> None:
    def fails(shape: work.Shape, g: torch.Generator) -> work.Work:
        raise MemoryError("not this much")

    file = tmp_path / "bench.json"
    sizes: list[int] = []
    cases = [
        _case(_copying(0.1), "wrong"),
        _case(fails, "large"),
        _case(_copying(broken=True), "broken"),
        _case(_copying()),
    ]
    plan = measure.Plan(CPU, rounds=3)
    found = run(cases, plan, "abc", file=file, done=lambda _: sizes.append(len(load(file)["rows"])))
    assert sizes == [1, 2, 3, 4]  # the file is written before each is told
    wrong, large, broken, fine = found["rows"]
    assert wrong["results"]["cuda"]["error"].startswith("ValueError: wrong: off by up to")
    assert wrong["results"]["triton"]["calls"] == 3 and of_floor(wrong, "triton") is not None
    assert (
        "something else" in wrong["results"]["eager"]["error"] and wrong["results"]["Liger"]["error"] == "not installed"
    )
    assert large["error"] == "MemoryError: not this much" and large["results"] == {}
    assert broken["results"]["cuda"]["error"] == "RuntimeError: no such luck" and "copy" not in broken["results"]
    assert all(fine["results"][b]["worst"] == 0 for b in work.BACKENDS) and fine["bytes"] == 4 * 8 * 2 * 2
    assert load(file) == json.loads(json.dumps(found))
    late = run(cases, plan, "abc", seconds=2)
    assert late["rows"] == [] and late["not reached"] == [c.name for c in cases]


# ---- the whole command -------------------------------------------------------------------------------------------


@needs_both
def test_the_whole_command_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = invoke("--device", "cpu", "--no-compile", "--json", str(file), "--commit", "abc")
    assert done.exit_code == 0, done.output
    value = load(file)
    assert value["trial"] and value["machine"]["commit"] == "abc" and value["not reached"] == []
    assert {r["op"] for r in value["rows"]} == set(catalog.OPS)
    for r in value["rows"]:
        assert all(0 < r["results"][b]["worst"] <= 1 and r["results"][b]["calls"] == 3 for b in work.BACKENDS)
        assert "torch.compile" not in r["results"] and r["flops"] > 0
        assert r["floor"] == "gemms" or ("median_us" in r["results"]["eager"] and r["bytes"] > 0)
    assert report.TRIAL in done.output and "x [" not in done.output and " ms" not in done.output
    assert done.output.count("right (worst error") == 2 * len(value["rows"])
    told = invoke("--read", str(file))
    assert told.exit_code == 0 and "right (worst error" in told.output and "x [" not in told.output
    for arguments in (("--compare", str(file)), ("--pictures", str(tmp_path)), ("--format", "brief")):
        refused = invoke("--read", str(file), *arguments)
        assert refused.exit_code == 1 and "trial" in refused.output


@needs_backend
def test_a_wrong_kernel_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.softmax
    monkeypatch.setattr(ops, "softmax", lambda x, backend, out: right(x, backend=backend, out=out).mul_(1.02))
    done = invoke("softmax", "--device", "cpu", "--no-peers", "--backend", BACKENDS[0])
    assert done.exit_code == 1 and "wrong: off by up to" in done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is missing without a GPU")
def test_one_message_without_a_gpu() -> None:
    done = invoke("rms_norm")
    assert done.exit_code == 2 and done.output.count("error:") == 1
    assert "internal" not in done.output and "there is none" in done.output and "--device cpu" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rmsnorm", "--device", "cpu"], "did you mean 'rms_norm'?"),
        (["--device", "tpu"], "neither cuda nor cpu"),
        (["--device", "cpu", "--shapes", "16384,x"], "is not a shape"),
        (["rope", "--device", "cpu", "--shapes", "4x4"], "no row has such"),
        (["--device", "cpu", "--only", "no such row"], "no row has such"),
        (["--device", "cpu", "--backend", "metal"], "'metal' is none of"),
        (["--device", "cpu", "--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--device", "cpu", "--fail-over", "5"], "give both"),
        (["--device", "cpu", "--pictures", "."], "a trial on a CPU has none"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], said: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output


def test_files_that_are_no_result_are_refused(tmp_path: Path) -> None:
    for text, said in (
        ("{", "is not JSON"),
        ("[]", "is not a result"),
        ('{"schema": 0, "rows": []}', "is not a result"),
    ):
        file = tmp_path / "x.json"
        file.write_text(text)
        with pytest.raises(KgenError, match=said):
            load(file)
    with pytest.raises(KgenError, match="cannot read"):
        load(tmp_path / "none.json")


# ---- bars and peers ----------------------------------------------------------------------------------------------


def test_bars_are_of_the_floor() -> None:
    r = norm(102.9)
    assert meets(r, "cuda") is True and meets(r, "triton") is True and meets(r, "eager") is None
    assert meets(norm(103.1), "cuda") is False
    assert meets(norm(103.1, bars={}), "cuda") is None
    assert meets(row("a", "b", "1", "copy", {"cuda": {"error": "no"}}, bars={"cuda": 1.0}), "cuda") is None


def test_a_bar_within_memory_holds_for_both() -> None:
    bars = {"bars": {"cuda": 1.13}}
    assert meets(linear(112.0, 1349.0, 1350.0, **bars), "cuda") is True
    assert meets(linear(114.0, 1349.0, 1350.0, **bars), "cuda") is False
    assert meets(linear(112.0, 1351.0, 1350.0, **bars), "cuda") is False
    assert meets(linear(117.9, 1129.0, 1130.0, below="Liger"), "cuda") is True
    assert meets(linear(118.1, 1129.0, 1130.0, below="Liger"), "cuda") is False
    late = linear(117.9, 1129.0, 1130.0, below="Liger")
    del late["results"]["Liger"]
    assert meets(late, "cuda") is None


def test_slower_than_a_peer_is_beyond_what_both_scatter() -> None:
    assert best_peer(norm(100.0)) == "Liger"
    assert slower_than_peer(norm(113.0), "cuda") is True
    assert slower_than_peer(norm(111.5), "cuda") is False  # 110.4 .. 112.6 meets 108.9 .. 111.1
    assert slower_than_peer(norm(90.0), "cuda") is False  # apart, and faster
    alone = row("a", "b", "1", "copy", {"cuda": call(900.0)})
    assert best_peer(alone) is None and slower_than_peer(alone, "cuda") is None


def test_a_row_within_memory_is_beside_peers_that_keep_within_it() -> None:
    from kgen.bench.linear import Bar
    from kgen.bench.linear_problem import Shape
    from kgen.bench.linear_rows import LinearCase, _row

    case = LinearCase(Shape(8, 8, 8), (Bar(100.0, 1.1), Bar(50.0, None)))
    records: dict[str, Record] = {
        "gemms": call(100.0), "Liger": call(1.0, peak_bytes=90 << 20), "eager": call(1.0, peak_bytes=110 << 20),
    }  # fmt: skip
    own = {"cuda": call(1.0)}
    found = {mib: _row(case, own, records, ["Liger", "eager"], mib) for mib in (None, 100.0, 50.0)}
    assert [list(r["results"]) for r in found.values()] == [
        ["gemms", "cuda", "Liger", "eager"], ["gemms", "cuda", "Liger"], ["gemms", "cuda"],
    ]  # fmt: skip
    assert found[100.0]["bars"] == {"cuda": 1.1} and found[50.0]["below"] == "Liger" and found[None]["bars"] == {}
    assert [c.shape.tokens for c in linear_cases()] == [8192, 4096, 16384]


# ---- comparisons -------------------------------------------------------------------------------------------------


def kinds(new: Record, old: Record) -> list[str]:
    """Of all changes."""
    return [c.kind for c in compare.changes(result([new]), result([old]))]


def test_changes_are_marked_beyond_what_the_calls_scatter() -> None:
    assert kinds(norm(103.0), norm(100.0)) == [SLOWER, SAME]
    assert kinds(norm(97.0), norm(100.0)) == [FASTER, SAME]
    assert kinds(norm(101.5), norm(100.0)) == [SAME, SAME]
    assert kinds(norm(103.0, spread=0.02), norm(100.0, spread=0.02)) == [SAME, SAME]
    assert Span(1.0, 0.9, 1.1).apart(Span(1.3, 1.11, 1.4)) and not Span(1.0, 0.9, 1.1).apart(Span(1.3, 1.1, 1.4))


def test_changes_are_of_multiples_of_the_floor() -> None:
    """A GPU that is slower as a whole is no regression of a kernel."""
    new = norm(100.0)
    for record in new["results"].values():
        for key in ("median_us", "p10_us", "p90_us"):
            if key in record:
                record[key] *= 1.5
    (cuda, _) = compare.changes(result([new]), result([norm(100.0)]))
    assert cuda.ratio == pytest.approx(1.0) and cuda.kind == SAME


def test_rows_that_are_not_in_both_are_left_out_and_lost_ones_are_told() -> None:
    assert compare.changes(result([norm(1.0, width=64)]), result([norm(1.0)])) == []
    lost = norm(100.0)
    lost["results"]["cuda"] = {"error": "wrong"}
    (cuda, triton) = compare.changes(result([lost]), result([norm(100.0)]))
    assert cuda.kind == LOST and cuda.ratio is None and cuda.fails(1000.0) and not triton.fails(0.0)
    assert compare.changes(result([lost], backends=["triton"]), result([norm(100.0)])) == [triton]
    other = result([norm(100.0)])
    other["machine"] = {**other["machine"], "torch": "2.12"}
    assert compare.unlike(other, result([norm(100.0)])) == ["torch: 2.11, now 2.12"]


@pytest.mark.parametrize(("new_us", "percent", "code"), [(106.0, 5, 1), (104.0, 5, 0), (101.0, 0, 0), (90.0, 0, 0)])
def test_exit_code_of_regressions(tmp_path: Path, new_us: float, percent: float, code: int) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    save(result([norm(new_us)]), new)
    save(result([norm(100.0)]), old)
    arguments = ["--read", str(new), "--compare", str(old)]
    done = invoke(*arguments, "--fail-over", str(percent))
    assert done.exit_code == code, done.output
    assert f"{new_us / 100:.3f}x" in done.output
    assert invoke(*arguments).exit_code == 0


# ---- what is printed and drawn -----------------------------------------------------------------------------------


def test_a_cell_says_why_there_is_no_time() -> None:
    def said(error: str) -> str:
        return report.cell({"floor": "copy", "results": {"QuACK": {"error": error}}}, "QuACK")

    assert [said("not installed"), said("ValueError: wrong")] == ["not installed", "failed"]
    assert said("not installed: it needs cutlass") == "needs cutlass"
    assert said("not installed: this version has no quack.rmsnorm") == "this version has no quack.rmsnorm"


def test_tables_from_a_result(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    save(whole(), file)
    table = invoke("--read", str(file))
    assert table.exit_code == 0, table.output
    lines = table.output.splitlines()
    first = next(line for line in lines if "16384x4096" in line)
    assert "0.1020 (1.02x)" in first and "1.03 / 1.05" in first and "0.1100 (1.10x)" in first
    assert "not installed" in first and "3922" in first  # GB/s: 4e8 bytes in 102 us
    assert first.split("│")[-4].strip() == "1" and first.split("│")[-3].strip() == "400"  # MiB, MB
    assert next(line for line in lines if "entropy default" in line).split("│")[-4].strip() == "1500"
    assert "rms_norm forward 16384x16384, cuda: above the bar 1.03" in lines
    # Above: 16384x16384 on CUDA and the linear loss; without a time: 16384x8192 on Triton.
    assert lines[-1] == "4 of 6 bars are met; 0 of 7 are slower than the fastest other by more than both scatter"
    assert "linear_cross_entropy within 1600 MiB 8192x4096x128256, cuda: above the bar 1.08" in lines
    assert not any("16384x4096, cuda" in line for line in lines)
    page = invoke("--read", str(file), "--format", "markdown").output
    assert "| rms_norm forward | 16384x4096 | 0.1000 | 1.03 / 1.05 | 0.1020 (1.02x) | 0.1040 (1.04x) |" in page
    assert (
        "- rms_norm forward 16384x8192, triton: ValueError: wrong" in page and "- rope forward 1x1x1x1x2: not r" in page
    )
    brief = invoke("--read", str(file), "--format", "brief").output
    assert "| rms_norm forward | 16384x4096 | 0.1000 | 1.02x | 1.04x | 1.10x Liger |" in brief
    assert "| rms_norm forward | 16384x8192 | 0.1000 | 1.00x | - | 1.10x Liger |" in brief
    assert "Some GPU" in brief and "abc1234" in brief
    file.write_text(json.dumps(result([norm(100.0)])))
    alone = (
        invoke("--read", str(file), "--format", "brief").output
        + invoke("--read", str(file), "--format", "markdown").output
    )
    for text, said in ((page, True), (brief, True), (alone, False)):
        assert ("for the linear cross entropy, three `torch.mm`" in text) == said


def test_lines_say_what_misses() -> None:
    assert report.line(norm(102.0)).endswith("Liger 1.100x [1.09-1.11]")
    assert report.line(norm(115.0)).endswith("<- cuda above the bar 1.03, slower than Liger")
    late = linear(119.0, 1129.0, 1130.0, below="Liger")
    assert report.line(late).endswith("<- cuda not below Liger")
    assert report.line({**norm(1.0), "error": "no memory"}) == "rms_norm forward 16384x4096: no memory"


def test_generated_parts_come_from_the_result_that_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "render.py")
    assert spec is not None and spec.loader is not None
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    monkeypatch.setattr(render, "ROOT", tmp_path)
    text = "a\n<!-- generated: kgen bench --read bench.json --format brief -->\n1.00x\n<!-- end -->\nb\n"
    empty = render.render(text)
    assert render.NO_RUN in empty and "1.00x" not in empty
    save(whole(), tmp_path / "bench.json")
    filled = render.render(empty)
    assert "| rms_norm forward | 16384x4096 | 0.1000 | 1.02x | 1.04x | 1.10x Liger |" in filled
    assert "```" not in filled and filled.startswith("a\n<!-- generated") and filled.endswith("<!-- end -->\nb\n")
    assert render.render(filled) == filled
    assert whole()["schema"] == SCHEMA
