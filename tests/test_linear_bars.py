"""The benchmark of the linear cross entropy (`benchmarks/linear_bars.py`), tiny and on the CPU, and what it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kgen
from kgen import ops
from kgen.bench import linear
from kgen.bench.linear_problem import MIB, Problem, Shape

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import linear_bars  # noqa: E402  # pyright: ignore[reportMissingImports]  # through the path above
import linear_report  # noqa: E402  # pyright: ignore[reportMissingImports]

BACKENDS = tuple(s.name for s in kgen.backends("cpu") if s.available and s.name in linear_bars.BACKENDS)
needs_backend = pytest.mark.skipif(not BACKENDS, reason="needs g++ or Triton")
CPU = torch.device("cpu")
SHAPE = Shape(64, 32, 125)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the program has it, and as it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exact(p: Problem) -> list[torch.Tensor]:
    """The loss and the gradients in float64, by torch."""
    x, w = (t.detach().double().requires_grad_() for t in (p.x, p.w))
    loss = torch.nn.functional.cross_entropy(x @ w.T, p.target)
    return [loss.detach(), *torch.autograd.grad(loss, (x, w))]


def test_the_reference_is_torchs_in_float64() -> None:
    p = Problem(SHAPE, CPU)
    r = p.reference
    for got, right in zip((r.loss, r.dx, r.dw), exact(p), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-18)


def outputs(p: Problem, workspace_mb: float) -> tuple[list[torch.Tensor], int]:
    """Ours, in small chunks that round often, and the rows of a chunk."""
    call = linear.ours(p, BACKENDS[0], workspace_mb, "param").make()
    _, rows = p.observe(call)
    return list(call()), rows


def _no_label(p: Problem, o: list[torch.Tensor]) -> None:
    o[2][p.target[5]] += (p.x[5] / p.shape.tokens).detach()


def _last_rows(p: Problem, o: list[torch.Tensor]) -> None:
    o[1][-1] = 0.0


def _twice(p: Problem, o: list[torch.Tensor]) -> None:
    o[2] *= 2


def _mean(p: Problem, o: list[torch.Tensor]) -> None:
    o[0] = o[0] * (1 - 1 / p.shape.tokens)


def _nan(p: Problem, o: list[torch.Tensor]) -> None:
    o[1][3, 2] = float("nan")


@needs_backend
@pytest.mark.parametrize("rows", [2, 16, 3])
def test_bounds_hold_for_ours_and_for_no_mistake(rows: int) -> None:
    p = Problem(SHAPE, CPU)
    got, chunk = outputs(p, linear.budget(SHAPE, rows))
    assert chunk == rows
    assert 0.0 < p.judge((got[0], got[1], got[2]), chunk)["worst"] <= 1.0
    for spoil in (_no_label, _last_rows, _twice, _mean, _nan):
        wrong = [t.detach().clone() for t in got]
        spoil(p, wrong)
        assert not p.judge((wrong[0], wrong[1], wrong[2]), chunk)["worst"] <= 1.0, spoil.__name__


@needs_backend
def test_settings_have_the_largest_chunks_under_a_peak() -> None:
    p = Problem(SHAPE, CPU)
    backend = BACKENDS[0]
    search = linear.Search(p, backend)
    search.observed(None, "auto")  # whatever is kept from a first call
    search = linear.Search(p, backend)
    spare = search.observed(linear.budget(SHAPE, 1), "param")[0] - SHAPE.row_bytes
    for rows in (64, 32, 16, 4):
        key = search.under((spare + rows * SHAPE.row_bytes + 8) / MIB)
        assert search.observed(*key)[1] == rows
        assert key[1] == ("param" if rows < 8 else "auto")  # which takes no more chunks than eight
        assert (key[0] is None) == (rows == 64)
    with pytest.raises(ValueError, match="no setting stays within"):
        search.under(spare / MIB)


@needs_backend
def test_the_whole_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = BACKENDS[0]
    common = ["--device", "cpu", "--rounds", "3", "--backends", backend, "--out", str(tmp_path), "--commit", "abc"]
    common += ["--shapes", "1"]
    assert linear_bars.main([*common, "--groups", "bars,accumulate"]) == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "linear-bars.json").read_text())
    assert [g["group"] for g in result["groups"]] == ["bars", "accumulate"]
    assert len(result["bars"]) == 3
    for bar in result["bars"]:
        group = next(g for g in result["groups"] if g["shape"] == bar["shape"])
        (row,) = [r for r in group["rows"] if bar["mib"] in r["caps"]]
        assert row["peak_mib"] <= bar["mib"] and f"{row['of_gemms']:.3f}x" in bar["found"]
        assert bar["met"] == (None if bar["limit"] is None else row["of_gemms"] <= bar["limit"])
    rows = [r for g in result["groups"] for r in g["rows"]]
    assert {r["name"] for r in rows if "error" in r} <= {"Liger"}
    assert all(0 < r["worst"] <= 1 and r["calls"] == 3 for r in rows if r["backend"])
    assert {r["accumulate"] for r in rows if r["backend"]} == {"auto", "param", "f32"}
    by_sum = {r["accumulate"]: r for r in result["groups"][-1]["rows"] if r["workspace_mb"]}
    assert by_sum["f32"]["dw_error"] < by_sum["auto"]["dw_error"] < by_sum["param"]["dw_error"]
    told = (tmp_path / "linear-bars.md").read_text()
    assert "abc" in told and "## Bars" in told
    assert (tmp_path / "linear-bars.png").stat().st_size > 10_000


@needs_backend
def test_time_and_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["--device", "cpu", "--rounds", "3", "--backends", BACKENDS[0], "--out", str(tmp_path)]
    assert linear_bars.main([*common, "--groups", "bars", "--seconds", "5"]) == 1
    result = json.loads((tmp_path / "linear-bars.json").read_text())
    assert len(result["not reached"]) == 3 and result["groups"] == []
    assert all(b["met"] is None for b in result["bars"])
    right: Callable[..., Any] = ops.linear_cross_entropy
    monkeypatch.setattr(ops, "linear_cross_entropy", lambda *a, **k: right(*a, **k) * 1.25)
    assert linear_bars.main([*common, "--groups", "accumulate"]) == 1
    result = json.loads((tmp_path / "linear-bars.json").read_text())
    assert all("wrong: off by" in r["error"] for r in result["groups"][0]["rows"])
    with pytest.raises(SystemExit):
        linear_bars.main([*common, "--backends", "cuda,metal"])


def test_figures_of_the_page_are_those_of_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear_report.main(["--check"]) == 0, "run: python benchmarks/linear_report.py RESULT.json"
    text = linear_report.DOC.read_text("utf-8")
    parts = linear_report.PART.findall(text)
    assert len(parts) == 1
    if parts[0][1] == linear_report.NO_RUN:
        assert "MiB |" not in text and not linear_report.PICTURE.exists()
    row = {
        "name": "kgen", "backend": "cuda", "workspace_mb": 63.0, "accumulate": "param", "forward": False,
        "caps": [1130.0], "peak_mib": 1129.5, "chunk": 256, "median_us": 44250.0, "of_gemms": 1.183,
    }  # fmt: skip
    other = {"name": "Liger", "backend": None, "workspace_mb": None, "accumulate": None, "forward": False, "caps": []}
    gemms = {"median_us": 37400.0, "p10_us": 37300.0, "p90_us": 37500.0, "calls": 9}
    group = {"group": "bars", "shape": "8192x4096x128256", "gradients_mib": 1066.0, "gemms": gemms,
             "rows": [row, {**other, "error": "not installed"}]}  # fmt: skip
    verdict = linear_report.verdict([group], group["shape"], 1130.0, None, "cuda")
    assert verdict == {"met": None, "found": "1.183x, 44.25 ms, 1129.5 MiB; no time of Liger"}
    group["rows"][1] = {**other, "median_us": 44300.0, "of_gemms": 1.184, "peak_mib": 1129.0}
    assert linear_report.verdict([group], group["shape"], 1130.0, None, "cuda")["met"] is True
    assert linear_report.verdict([group], group["shape"], 1130.0, 1.1, "cuda")["met"] is False
    assert linear_report.verdict([group], group["shape"], 1130.0, None, "triton")["found"] == "no setting"
    late = {**row, "peak_mib": 1131.0}
    assert linear_report.verdict([{**group, "rows": [late]}], group["shape"], 1130.0, 2.0, "cuda")["met"] is False
    bars = [{"shape": group["shape"], "mib": 1130.0, "limit": None, "backend": "cuda", **verdict}]
    result = {"machine": {"device": "some"}, "groups": [group], "bars": bars, "not reached": [], "trial": False}
    page, kept = tmp_path / "docs" / "page.md", tmp_path / "benchmarks" / "results" / "linear-bars-abc.json"
    for path in (page, kept):
        path.parent.mkdir(parents=True)
    page.write_text(text)
    kept.write_text(json.dumps(result))
    for name, value in (("ROOT", tmp_path), ("DOC", page), ("PICTURE", page.with_suffix(".png"))):
        monkeypatch.setattr(linear_report, name, value)
    assert linear_report.main([str(kept)]) == 0
    filled = page.read_text()
    assert "| kgen, cuda | 63 | param | 256 | 1129.5 | 44.25 | 1.183 |" in filled
    assert "(../benchmarks/results/linear-bars-abc.json)" in filled and page.with_suffix(".png").exists()
    assert linear_report.main(["--check"]) == 0
    page.write_text(filled.replace("44.25", "40.25"))
    assert linear_report.main(["--check"]) == 1
    kept.write_text(json.dumps({**result, "trial": True}))
    with pytest.raises(ValueError, match="trial on a CPU"):
        linear_report.main([str(kept)])
