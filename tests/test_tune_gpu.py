"""`kgen tune` on a GPU: real compilers in other processes, real times, and calls that take what was found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kgen.cli import app
from kgen.codegen.tolerance import compare
from kgen.runtime import events, tuned
from kgen.runtime.ahead import Choices
from kgen.runtime.differential import ask
from kgen.runtime.loading import load_packaged
from kgen.runtime.tune import Job, Machine, Options, tune
from kgen.runtime.tune_cases import case
from kgen.runtime.tuned_store import add, load, user_path

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KGEN_TUNED", str(tmp_path))
    tuned.reload()
    yield
    tuned.reload()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_candidates_are_right_and_timed(direction: str) -> None:
    kernel = load_packaged("rms_norm.kdsl")["rms_norm"]
    c = case(kernel, Choices({"M": 3000, "N": 1024}), direction)
    machine = Machine.gpu()
    found = list(tune([Job(c, b) for b in ("cuda", "triton")], machine, Options(most=8, workers=4)))
    assert [o.state for o in found] == ["tuned", "tuned"]
    for o in found:
        assert o.problems == () and o.result is not None
        assert o.result.tried > 2 and 0 < o.result.us <= o.result.default_us < 10_000
        assert o.result.driver == machine.driver != ""
        assert all(f["registers"] > 8 for f in o.figures if "us" in f)
    assert len(load(user_path(machine.name))) == 2


def test_calls_take_the_faster_backend_and_its_schedule() -> None:
    kernel = load_packaged("softmax.kdsl")["softmax"]
    c = case(kernel, Choices({"M": 1000, "N": 2048}))
    machine = Machine.gpu()
    options = Options(most=4, workers=4, keep=False)
    results = [o.result for o in tune([Job(c, b) for b in ("cuda", "triton")], machine, options)]
    for name, us in (("cuda", (1.0, 2.0)), ("triton", (2.0, 1.0))):
        made = [replace(r, us=t, knobs={"threads": 256, "rows": 1}) for r, t in zip(results, us, strict=True) if r]
        add(machine.name, made)
        tuned.reload()
        fresh = load_packaged.__wrapped__("softmax.kdsl")["softmax"]
        x = torch.randn(77, 2048, device="cuda", dtype=torch.bfloat16)
        with events.launches() as seen:
            y = fresh(x)
        assert [launch.executor for launch in seen] == [name]
        (built,) = fresh.plans._values.values()
        assert (built.program.schedule.threads, built.program.schedule.by) == (256, "tuned")
        q = ask(fresh, {"x": x})
        assert compare(y, q.expected["y"], q.bound["y"]).ok


def test_the_command(tmp_path: Path) -> None:
    arguments = ["tune", "swiglu", "--sizes", "M=512,N=1024", "--candidates", "3", "--json", str(tmp_path / "t.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "swiglu on cuda, M=512, N=1024:" in done.output and (tmp_path / "t.json").exists()
    assert "(known)" in CliRunner().invoke(app, arguments).output
