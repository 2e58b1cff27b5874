"""The benchmark of the time that calls take on the host (`benchmarks/host_time.py`), tiny and on the CPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_kit import FakeDriver, machine, needs_compiler

import kgen
from kgen.runtime.kernel import Kernel

__all__ = ["machine"]
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import host_items  # noqa: E402  # pyright: ignore[reportMissingImports]  # through the path above
import host_start  # noqa: E402  # pyright: ignore[reportMissingImports]
import host_time  # noqa: E402  # pyright: ignore[reportMissingImports]

CPU = torch.device("cpu")
USABLE = {s.name for s in kgen.backends("cpu") if s.available}
needs_backends = pytest.mark.skipif(not set(host_time.BACKENDS) <= USABLE, reason="needs g++ and Triton")


@pytest.fixture(autouse=True)
def _grad_mode_is_kept() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled()


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, and both files."""
    words = ["--device", "cpu", "--rounds", "2", "--calls", "1", "--rows", "3", "--width", "8", "--no-start"]
    monkeypatch.setattr(sys, "argv", ["host_time.py", *words, "--out", str(out), *more])
    code = host_time.main()
    return code, json.loads((out / "host-time.json").read_text()), (out / "host-time.md").read_text()


@needs_backends
def test_every_op_is_timed_in_every_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, result, page = run(monkeypatch, tmp_path, "--no-compile")
    assert code == 0, page
    assert set(result["ops"]) == {"rms_norm", "swiglu", "add_rms_norm", "cross_entropy", "rope", "softmax"}
    expected = [w for w in host_time.WAYS if w not in ("torch.compile", "graph replay")]
    for name, found in result["ops"].items():
        for backend in host_time.BACKENDS:
            assert all(found[f"{backend}: {way}"]["us"] > 0 for way in expected), name
        assert all(found[way]["us"] > 0 for way in host_time.PEERS if way.startswith("eager"))
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {name} | cuda | "))
        yardstick = found[host_time.YARDSTICK]
        assert row.endswith(f" | {yardstick['least_us']:.1f} / {yardstick['us']:.1f} |")


def test_bars_are_higher_in_a_slow_phase_of_the_clock() -> None:
    def page(us: float, yardstick: float) -> str:
        def time(least: float) -> dict[str, float]:
            return {"least_us": least, "us": 2 * least}

        found = {f"cuda: {w}": time(us) for w in host_time.WAYS} | {host_time.YARDSTICK: time(yardstick)}
        return "\n".join(host_time.tables({"machine": {}, "bare": {}, "ops": {"an op": found}, "start": {}}))

    def row(us: str, plan: str, yardstick: str) -> str:
        return f"| an op | cuda | {us} | {plan} | {' | '.join([us] * 5)} | {yardstick} |"

    assert row("11.9 / 23.8", "11.9 / 23.8 (over)", "11.0 / 22.0") in page(11.9, 11.0)
    assert row("11.9 / 23.8", "11.9 / 23.8", "22.0 / 44.0") in page(11.9, 22.0)
    # A fast phase lowers none, and a slow median is over none.
    assert row("5.9 / 11.8", "5.9 / 11.8", "5.5 / 11.0") in page(5.9, 5.5)
    assert page(25.1, 11.0).count("(over)") == 1 + 3  # the text says what it means
    assert page(25.1, 0.0).count("(over)") == 1 + 3


@needs_backends
def test_a_call_that_fails_is_told_and_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = host_items.items(CPU, 3, 8)

    def broken(x: torch.Tensor, backend: str) -> torch.Tensor:
        raise ValueError(f"broken on {backend}")

    one = host_items.Item("softmax", made[-1].kernel, made[-1].values, made[-1].inputs, broken, made[-1].eager)
    monkeypatch.setattr(host_items, "items", lambda *_: [one])
    code, result, page = run(monkeypatch, tmp_path, "--no-compile")
    assert code == 1
    assert "us" in result["ops"]["softmax"]["cuda: plan"]  # others go on
    assert "broken on triton" in page


def test_what_is_measured_is_the_time_of_one_call() -> None:
    runs = {"slow": lambda: time.sleep(2e-3), "fast": lambda: None}
    found = host_time.timed(runs, CPU, 5, 3)
    assert 2000 <= found["slow"]["least_us"] <= found["slow"]["us"] <= found["slow"]["p90_us"]
    assert found["fast"]["us"] < 1000


def test_calls_without_gradients_are_timed_without() -> None:
    seen: list[bool] = []
    call = host_time.without_grad(lambda: seen.append(torch.is_grad_enabled()))
    host_time.sample(call, CPU, 2)
    host_time.sample(lambda: seen.append(torch.is_grad_enabled()), CPU, 1)
    assert seen == [False, False, True]


def test_launches_plans_and_functions_give_what_torch_gives() -> None:
    for item in host_items.items(CPU, 3, 8):
        expected = item.eager(*item.inputs)
        launch = item.launch("reference")
        for t in launch():
            t.zero_()  # and are written again
        for got in (launch(), item.plan("reference")(), item.ours(*item.inputs, backend="reference")):
            got = tuple(got) if isinstance(got, tuple | list) else (got,)
            expected = expected if isinstance(expected, tuple) else (expected,)
            for a, b in zip(got, expected, strict=False):  # the kernel of the cross entropy gives the z-loss as well
                torch.testing.assert_close(a.to(b.dtype), b, rtol=0.1, atol=0.1)  # that it is the op, not how exact


@needs_compiler
def test_a_launch_alone_tells_the_driver_what_that_of_a_plan_does(
    monkeypatch: pytest.MonkeyPatch, machine: FakeDriver
) -> None:
    loaded = host_items._loaded
    monkeypatch.setattr(host_items, "_loaded", lambda *of: Kernel(loaded(*of).module, of[1]))  # for this machine alone
    for item in host_items.items(CPU, 3, 8):
        plan, launch = item.plan("cuda"), item.launch("cuda")
        results = plan()
        told = machine.seen[-1]
        outputs = launch()
        again = machine.seen[-1]
        assert again is not told
        results = results if isinstance(results, tuple) else (results,)
        places = {a.data_ptr(): b.data_ptr() for a, b in zip(results, outputs, strict=True)}
        assert [places.get(a, a) for a in told.arguments] == again.arguments
        assert (again.grid, again.stream) == (told.grid, told.stream)
        before = [t.clone() for t in outputs]
        for t in outputs:
            t.zero_()
        launch()
        assert all(torch.equal(a, b) for a, b in zip(before, outputs, strict=True))


def test_a_process_of_its_own_tells_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = host_start._process(("first_op", "cpu", "reference"), str(tmp_path))
    assert found["import and first op"] >= found["first op"] > 0
    assert found["compiled"] == 0
    assert any(tmp_path.rglob("functional.*.pyc"))  # later ones need not compile Python


def test_a_compilation_in_a_later_process_is_a_failure() -> None:
    found = {"cuda: first op": {"first op": 20.0, "compiled": 1}, "emit": {"error": "ValueError: no"}}
    assert len(host_start.failed(found)) == 2
    found = {"cuda: first op": {"first op": 20.0, "compiled": 0}}
    assert not host_start.failed(found)
    assert any("first op 20" in line for line in host_start.told(found))


def test_the_page_is_made_of_the_result_beside_it() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "host-time-h200.json").read_text("utf-8"))
    assert (ROOT / "docs" / "host-time.md").read_text("utf-8") == "\n".join(host_time.tables(result)) + "\n"
