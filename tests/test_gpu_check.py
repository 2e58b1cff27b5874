"""The check that runs on a GPU (`benchmarks/gpu_check.py`), on the CPU: what it reaches, and that it finds mistakes."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kgen
from kgen.runtime import autograd
from kgen.runtime.injection import injected

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu_calls  # noqa: E402  # pyright: ignore[reportMissingImports]  # through the path above
import gpu_cases as cases  # noqa: E402  # pyright: ignore[reportMissingImports]
import gpu_pool  # noqa: E402  # pyright: ignore[reportMissingImports]
import gpu_report  # noqa: E402  # pyright: ignore[reportMissingImports]

FOUND = {t.name: i for i, t in enumerate(cases.targets())}
BACKENDS = tuple(s.name for s in kgen.backends("cpu") if s.available and s.name in gpu_calls.BACKENDS)
needs_backends = pytest.mark.skipif(len(BACKENDS) < 2, reason="needs g++ and Triton")


@pytest.fixture
def _loaded_anew() -> Iterator[None]:
    """Kernels of the check that no other test has compiled or will meet."""
    cases._load.cache_clear()
    yield
    cases._load.cache_clear()


def records(
    name: str, rows: tuple[int, ...] = (0, 1, 5), make: cases.Make | None = None, **task: Any
) -> list[dict[str, Any]]:
    """What the check says of one task; the first of those that it would run with these fields. `make` for other
    arguments than the target's."""
    target = cases.targets()[FOUND[name]]
    target = replace(target, make=make or target.make)
    direction = task.get("direction", cases.GRADIENT)
    wanted = tuple(n for n, code in cases.derivable(target).items() if not code) if direction == cases.GRADIENT else ()
    fields = {"direction": direction, "dtype": "f32", "width": 33, "layout": "contiguous", "wave": 0, "wanted": wanted}
    if direction == cases.GRADIENT:
        fields["gradient_layout"] = "contiguous"
    one = cases.Task(FOUND[name], **(fields | task))
    options = gpu_calls.Options(1 << 20, dict.fromkeys(cases.DIRECTIONS, rows), 0, BACKENDS)
    return list(gpu_calls.perform(target, one, torch.device("cpu"), options, contextlib.nullcontext()))


def test_every_kernel_is_reached_in_both_directions() -> None:
    found = cases.targets()
    packaged = {path.stem for path in (BENCHMARKS.parent / "ops").glob("*.kdsl")} - {"activations"}
    assert packaged <= {Path(t.file).stem for t in found}
    every = {
        (path.stem, k.name)
        for path in (BENCHMARKS.parent / "ops").glob("*.kdsl")
        for k in kgen.load(path)._kernels.values()
    }
    assert every <= {(Path(t.file).stem, t.kernel) for t in found}
    widths = (7, 33, 1025)
    queue = cases.tasks(found, set(FOUND), dict.fromkeys(cases.DIRECTIONS, widths), 0)
    for direction in cases.DIRECTIONS:
        mine: dict[str, list[Any]] = defaultdict(list)
        for t in queue:
            if t.direction == direction:
                mine[found[t.target].name].append(t)
        # Not reached is what is in place, of integers, or of which nothing is derived.
        known = {t.name: cases.derivable(t) for t in found}
        assert set(mine) == {n for n in FOUND if direction == cases.FORWARD or not all(known[n].values())}
        for name, own in mine.items():
            first = [t.width for t in own if t.wave == 0]
            assert sorted(first) == [w for w in widths if w in {t.width for t in own}]
            assert {t.layout for t in own} == set(cases.LAYOUTS)
            if direction == cases.GRADIENT:
                assert {t.gradient_layout for t in own} == set(cases.GRADIENT_LAYOUTS)
                assert {n for t in own for n in t.wanted} == {n for n, code in known[name].items() if not code}
                assert all(t.wanted for t in own)


def test_what_is_not_derived_is_what_the_cases_say() -> None:
    from shipped_cases import SHIPPED

    for case in SHIPPED:
        codes = cases.derivable(cases.targets()[FOUND[case.name]])
        assert {n for n, code in codes.items() if code} == set(case.constant), case.name
        assert bool(codes) == case.differentiable


@needs_backends
@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("rms_norm", {"layout": "transposed", "gradient_layout": "scalar"}),
        ("add_rms_norm, f32 stream", {"dtype": "bf16", "gradient_layout": "offset"}),
        ("cross_entropy, all options", {"layout": "sliced", "gradient_layout": "expanded"}),
        ("cross_entropy_, all options", {"direction": "forward", "layout": "offset"}),
        ("times_both", {"direction": "forward", "dtype": "f16", "layout": "transposed"}),
        ("times_", {"direction": "forward", "dtype": "bf16", "layout": "transposed"}),
        ("vec_add", {"dtype": "f16", "wanted": ("b",), "gradient_layout": "transposed"}),
        ("standardize", {"width": 7, "gradient_layout": "sliced"}),
    ],
)
def test_right_kernels_pass(name: str, task: dict[str, Any]) -> None:
    found = records(name, **task)
    assert [r["message"] for r in found if r["status"] != "ok"] == []
    assert Counter(r["backend"] for r in found) == {"cuda": 3, "triton": 3}


@needs_backends
@pytest.mark.parametrize("name", ["argmax_and_gap", "function_zoo", "minmax_scale", "pool_pairs", "two_rows"])
def test_formulas_judge_equal_values_too(name: str) -> None:
    """Among thousands of rows some extremes are attained twice, and operands of `minimum` are equal."""
    made = cases.targets()[FOUND[name]].make

    def halves(*size: Any) -> dict[str, Any]:
        return {k: (v * 2).round() / 2 for k, v in made(*size).items()}

    found = records(name, rows=(5,), make=halves)
    assert [r["message"] for r in found if r["status"] != "ok"] == []


@needs_backends
@pytest.mark.usefixtures("_loaded_anew")
@pytest.mark.parametrize(("mistake", "name"), [("identity", "softmax"), ("short", "swiglu"), ("long", "swiglu")])
def test_broken_code_is_found(mistake: str, name: str) -> None:
    with injected(mistake):
        found = records(name, rows=(5,), width=31)
    assert {r["backend"] for r in found if r["status"] in ("wrong", "crashed")} == {"cuda", "triton"}, found
    assert len(gpu_report.failures(found)) == 2
    told = gpu_report.listed(found, 9)
    assert all(re.match(rf"{name}, gradient, (cuda|triton|cuda, triton), f32: [12] \w+ at widths 31 ", t) for t in told)
    assert sum(len(g.each) for g in gpu_report.grouped(found)) == 2


@needs_backends
@pytest.mark.usefixtures("_loaded_anew")
def test_a_wrong_derivation_is_found() -> None:
    """Its own float64 form agrees with it, and torch's derivative of the formula does not."""
    kernel = cases._load("ops/rms_norm.kdsl")["rms_norm"]
    t = autograd.training(kernel, [torch.ones(2, 33), torch.ones(33), 1e-6, 0.0, False], (0, 1))
    text = t.derived.backward_text
    broken = text.replace("saved_r[m] * t - t_2", "saved_r[m] * t")
    assert broken != text
    object.__setattr__(t, "backward", kgen.loads(broken)[t.backward.name])
    found = records("rms_norm", rows=(5,))
    assert [r["status"] for r in found if r["backend"] != "both"] == ["wrong", "wrong"]
    assert all("gradient of x" in r["message"] and "formula" in r["message"] for r in found if r["backend"] != "both")


@needs_backends
@pytest.mark.usefixtures("_loaded_anew")
def test_another_result_through_autograd_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = autograd.gradients

    def off(*args: Any) -> dict[int, torch.Tensor]:
        return {i: g + 1e-6 for i, g in right(*args).items()}

    monkeypatch.setattr(autograd, "gradients", off)
    found = records("swiglu", rows=(5,))
    assert all("autograd gave other bits" in r["message"] for r in found if r["backend"] != "both")


def test_kernels_share_the_time() -> None:
    found = cases.targets()
    names = ("rms_norm", "softmax", "standardize", "reverse")
    cost = {FOUND[n]: c for n, c in zip(names, (0.1, 2.0, 0.5, 3.0), strict=True)}
    queue = cases.tasks(found, set(names), cases.WIDTHS, 0)
    shares = gpu_pool.Shares(queue, found)
    running = [shares.next() for _ in range(3)]
    for _ in range(300):
        task = running.pop(0)
        assert task is not None
        shares.ended(task, cost[task.target])
        running.append(shares.next())
    spent = {key: g.spent / g.weight for key, g in shares.groups.items()}
    assert len(spent) == 8
    assert max(spent.values()) - min(spent.values()) <= 3 * 3.0


def test_the_page_says_what_failed_and_what_was_not_run() -> None:
    found = cases.targets()
    widths = {cases.FORWARD: (7, 33), cases.GRADIENT: (8, 31)}
    queue = cases.tasks(found, {"softmax", "two_gathers"}, widths, 0)

    def record(direction: str, status: str, **fields: Any) -> dict[str, Any]:
        base = {"target": "softmax", "direction": direction, "dtype": "f32", "width": 7, "layout": "offset", "rows": 5}
        base |= {"values": "normal", "backend": "cuda", "status": status, "ratio": 0.5, "message": "", "free": 0}
        return base | {"total": 35} | fields

    each = [record(cases.FORWARD, "ok", backend=b) for b in gpu_calls.BACKENDS]
    off = "y at [{}, 2]: got 1.5e+03, expected -2.0; the error is {} times the bound"
    each += [
        record(cases.GRADIENT, "wrong", width=8, layout="offset/scalar", dtype=d, of="x", message=off.format(i, 3.25))
        for i, d in enumerate(("f32", "bf16"))
    ]
    each += [record(cases.FORWARD, "crashed", backend="both", rows=-1, message="the process ended")]
    each += [record(cases.FORWARD, "skipped", backend="both", rows=65537), record(cases.FORWARD, "blame")]
    text = gpu_report.page({"device": "a device"}, each, queue, 5, None, 60.0, 1 << 27)
    lines = text.split("\n")
    assert "| direction | calls | ok | refused | wrong | crashed | check failed |" in lines
    assert "| forward | 3 | 2 | 0 | 0 | 1 | 0 |" in lines and "| gradient | 2 | 0 | 0 | 2 | 0 | 0 |" in lines
    # Two that differ in numbers and dtype are one failure, with the first in full.
    at = lines.index("- **softmax, gradient, cuda, bf16, f32: 2 wrong**")
    assert lines[at + 1 : at + 4] == [
        "  - at widths 8 (offset/scalar)",
        "  - first: [5, 8], cuda, f32, offset/scalar, normal values, of x",
        f"  - ``{off.format(0, 3.25)}``",
    ]
    assert "  - first: width 7, both, f32, offset, normal values" in lines
    assert f"- {len(queue) - 5} combinations for lack of time." in lines
    assert "- Not one call was right: softmax, gradient, triton." in lines
    assert "forward, 1 of 65537 rows" in text.replace("\n  ", " ")
    assert "- two_gathers: no gradient is derived of `words` (K0503), `places` (K0503)." in lines
    gaps = lines[lines.index("| kernel | direction | widths | rows |") + 2 :]
    assert gaps[:3] == [
        "| softmax | forward | 33 | 65537 |",
        "| softmax | gradient | 31 |  |",
        "| two_gathers | forward | 7, 33 |  |",
    ]
    assert "| softmax | both | 1 | 0 | 0 | 0 | 0 | 0.500 |  | 0.0% |" not in lines  # the gradients differ
    assert max(len(line) for line in lines if not line.startswith(("|", "  - "))) <= 120
    fine = gpu_report.page({}, each[:2], queue, 5, None, 60.0, 1 << 27).split("\n")
    assert fine[fine.index("## Failures") + 2] == "None."
    assert "| softmax | both | 1 | 0 | 0 | 0 | 0 | 0.500 |  | 0.0% |" in fine


@pytest.mark.slow
@needs_backends
def test_the_whole_program(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--device", "cpu", "--workers", "1", "--seconds", "5"]
    command += ["--only", "vec_add", "--widths", "7", "--rows", "0,1", "--out", str(tmp_path), "--commit", "abc"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "gpu-results.json").read_text())
    assert [r["kernel"] for r in told["summary"]] == ["vec_add", "vec_add"]
    assert all(int(r["forward ok"]) > 0 and int(r["gradient ok"]) > 0 for r in told["summary"])
    page = (tmp_path / "gpu-results.md").read_text()
    assert "- gradient: " in page and "abc" in page
    wrong = subprocess.run([*command[:-6], "--only", "no such"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "no target is called" in wrong.stderr
