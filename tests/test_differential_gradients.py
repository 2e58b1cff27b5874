"""The differential tester on gradients: which calls it makes, that it finds what is wrong in either kernel behind them
and around them, and whom it names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kgen
from kgen.cli import app
from kgen.codegen.derive.pair import backward_name
from kgen.runtime import autograd, gradients
from kgen.runtime.campaign import BY_HAND, Report, examine_kernel
from kgen.runtime.cases import INCOMING, Trial, fits, smaller, trials, without_gradient
from kgen.runtime.injection import MUTATIONS, injected
from kgen.runtime.kernel import Kernel
from kgen.runtime.placement import LAYOUTS

OPS = Path(__file__).resolve().parents[1] / "ops"
CPU = torch.device("cpu")

HEAD = """
kernel norm(x: T[*M, N], w: T[N], eps: f32 = 1e-6) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    r = rsqrt(mean(x[m, n] * x[m, n], n) + eps)
    y[m, n] = x[m, n] * r * w[n]
"""
BY_HAND_RIGHT = (
    HEAD
    + """
backward norm(x: T[*M, N], w: T[N], saved_r: f32[*M], d_y: T[*M, N]) -> (d_x: T[*M, N], d_w: T[N]):
    parallel m in M
    tile n in N
    t = d_y[m, n] * w[n]
    d_x[m, n] = saved_r[m] * (t - x[m, n] * saved_r[m] * saved_r[m] * mean(t * x[m, n], n))
    d_w[n] += d_y[m, n] * x[m, n] * saved_r[m]
"""
)
SOURCE = """
kernel mixed(x: T[*M, N], w: T[N]?, s: T[V, N], at: i64[*M], twice: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    a = x[m, n] * s[at[m], n]
    if w:
        a = a * w[n]
    if twice:
        a = a + a
    y[m, n] = a

kernel steps(x: T[*N]) -> (k: i64[*N]):
    parallel n in N
    k[n] = i64(x[n])

kernel double_(x: inout T[*N]):
    parallel n in N
    x[n] = x[n] * 2.0

kernel either(x: f32[N]) -> (y: T[N]):
    parallel n in N
    y[n] = 2.0 * x[n]

kernel columns(x: T[M, N]) -> (y: f32[N], z: T[M, N]):
    parallel m in M
    tile n in N
    y[n] += x[m, n] * x[m, n]
    z[m, n] = x[m, n] - mean(x[m, n], n)

kernel lookup(table: T[V, N], word: i64[M]) -> (y: T[M, N]):
    parallel m in M
    tile n in N
    y[m, n] = table[word[m], n]

backward lookup(table: T[V, N], word: i64[M], d_y: T[M, N]) -> (d_table: T[V, N]):
    parallel m in M
    tile v in V, n in N
    d_table[v, n] += where(word[m] == v, d_y[m, n], 0.0)
"""


@pytest.fixture
def module() -> kgen.KernelModule:
    return kgen.loads(SOURCE)


def examine(kernel: Kernel, backends: Sequence[str] = ("triton", "reference"), **how: Any) -> Report:
    return examine_kernel(kernel, backends, CPU, **{"direction": "backward", "quick": True, **how})


# ---- which calls -----------------------------------------------------------------------------------------------------


def test_trials_want_all_and_some_of_what_has_a_gradient(module: kgen.KernelModule) -> None:
    chosen = trials(module["mixed"], direction="backward")
    assert {t.wanted for t in chosen if t.present} == {("x", "w"), ("x",), ("w",)}
    assert {t.wanted for t in chosen if not t.present} == {("x",)}
    assert {t.incoming for t in chosen} == set(INCOMING)
    assert {t.layout for t in chosen} == set(LAYOUTS)
    assert {t.consts["twice"] for t in chosen} == {False, True}
    assert {t.dtypes["T"] for t in chosen} == {"f32", "bf16", "f16"}
    assert any(t.dims["M"] == 0 for t in chosen)
    assert all(fits(module["mixed"], t) for t in chosen)
    assert chosen == trials(module["mixed"], direction="backward")
    assert not any(t.wanted for t in trials(module["mixed"]))
    assert set(without_gradient(module["mixed"])) == {"s"}


# A call of the last one needs out=, which records no gradient.
@pytest.mark.parametrize("name", ["steps", "double_", "either"])
def test_what_has_no_gradient_is_not_called(module: kgen.KernelModule, name: str) -> None:
    report = examine(module[name], ("reference",), direction="forward")
    assert report.tallies["reference"].ok == report.trials >= 10
    assert not trials(module[name], direction="backward")
    assert examine(module[name]).trials == 0


def test_a_trial_survives_json_and_those_saved_before_are_read(module: kgen.KernelModule) -> None:
    for t in trials(module["mixed"], direction="backward", quick=True):
        assert Trial.from_json(json.loads(json.dumps(t.to_json()))) == t
    old = trials(module["mixed"], quick=True)[0].to_json()
    del old["wanted"], old["incoming"]
    assert Trial.from_json(old) == trials(module["mixed"], quick=True)[0]


def test_smaller_trials_want_less(module: kgen.KernelModule) -> None:
    start = Trial(
        {"M": 1, "N": 1, "V": 1}, {"T": "f32"}, {"twice": False}, ("w",), wanted=("x", "w"), incoming="scalar"
    )
    found = list(smaller(module["mixed"], start))
    assert {t.wanted for t in found} == {("x",), ("w",), ("x", "w")}
    assert replace(start, incoming="contiguous") in found
    assert all(t.wanted for t in smaller(module["mixed"], replace(start, wanted=("x",))))


# ---- right kernels ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixed", "columns", "lookup"])
def test_right_gradients(module: kgen.KernelModule, name: str) -> None:
    report = examine(module[name], ("cuda", "triton", "reference"))
    assert report.trials == report.planned >= 10
    assert all(t.ok == report.trials for t in report.tallies.values()), (report.failures, report.refusals)
    assert set(report.underived) == ({"s"} if name == "mixed" else set())
    assert all("[K0503] at <string>:" in why for why in report.underived.values())


# ---- mistakes --------------------------------------------------------------------------------------------------------

# Launches of the backward kernel of rms_norm that have what each mistake changes, whatever the schedule: the second one
# adds up the partial sums of the gradient of `w`.
THERE = {"rows": {0}, "partial": {1}, "short": {0, 1}, "identity": {0}}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("mistake", THERE)
def test_a_mistake_in_each_launch_of_a_backward_is_found(mistake: str, backend: str) -> None:
    for launch in range(2):
        kernel = kgen.load(OPS / "rms_norm.kdsl")["rms_norm"]
        with injected(mistake, kernel=backward_name("rms_norm"), launch=launch) as done:
            report = examine(kernel, (backend, "reference"), most_failures=1)
        assert done.launches[backend] == 2
        there = bool(done.programs.get(backend))
        assert there or launch not in THERE[mistake]
        assert [f.guilty for f in report.failures] == [(backend,)] * there
        assert all("d_w" in f.messages[backend] or "d_x" in f.messages[backend] for f in report.failures)


def test_a_mistake_in_each_launch_of_a_forward_sum_is_found(module: kgen.KernelModule) -> None:
    for launch, mistake in enumerate(("rows", "partial")):
        for backend in MUTATIONS[mistake].edits:
            kernel = kgen.loads(SOURCE)["columns"]
            with injected(mistake, launch=launch) as done:
                report = examine(kernel, (backend, "reference"), direction="forward", most_failures=1)
            assert done.launches[backend] == 2
            assert [f.guilty for f in report.failures] == [(backend,)]


def test_a_mistake_in_the_training_form_is_told_as_one() -> None:
    kernel = kgen.load(OPS / "rms_norm.kdsl")["rms_norm"]
    with injected("identity", kernel="rms_norm"):
        (failure,) = examine(kernel, most_failures=1).failures
    assert failure.guilty == ("triton",)
    assert failure.messages["triton"].startswith("the training form: ")
    assert failure.trial.wanted and set(failure.trial.wanted) <= set(failure.first.wanted)


def test_a_gradient_that_goes_to_the_wrong_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd around right kernels: both inputs of swiglu have one shape."""
    original = autograd.gradients

    def swapped(*args: Any) -> dict[int, torch.Tensor]:
        found = original(*args)
        return dict(zip(found, reversed(found.values()), strict=True))

    monkeypatch.setattr(autograd, "gradients", swapped)
    (failure,) = examine(kgen.load(OPS / "swiglu.kdsl")["swiglu"], ("reference",), most_failures=1).failures
    assert "autograd gave other bits than the backward kernel alone" in failure.messages["reference"]
    assert set(failure.trial.wanted) == {"gate", "up"}

    def breaks(*args: Any) -> Any:
        raise RuntimeError("no gradient today")

    monkeypatch.setattr(autograd, "gradients", breaks)
    (failure,) = examine(kgen.load(OPS / "swiglu.kdsl")["swiglu"], ("reference",), most_failures=1).failures
    assert failure.messages["reference"] == "autograd: RuntimeError: no gradient today"


def test_a_backward_written_by_hand_is_held_against_the_derivative() -> None:
    report = examine(kgen.loads(BY_HAND_RIGHT)["norm"])
    assert report.trials >= 10 and not report.failures and not report.refusals
    wrong = BY_HAND_RIGHT.replace("saved_r[m] * saved_r[m] * mean(", "saved_r[m] * mean(")
    report = examine(kgen.loads(wrong)["norm"], most_failures=1)
    (failure,) = report.failures
    assert failure.guilty == (BY_HAND,)
    assert failure.messages[BY_HAND].startswith("it is not the derivative: gradient of x at [")
    assert failure.trial.dims == {"M": 1, "N": 1} and failure.trial.wanted == ("x",)
    assert all(t.ok == report.trials for t in report.tallies.values())


def test_a_residual_under_another_name_in_the_training_form() -> None:
    """The training form stores `saved_r` under another name where the kernel has it for a value of its own."""
    text = BY_HAND_RIGHT.replace("    y[m, n] = x", "    saved_r = r\n    y[m, n] = x", 1).replace(
        "* r * w", "* saved_r * w"
    )
    report = examine(kgen.loads(text)["norm"])
    assert report.trials >= 10 and not report.failures and not report.refusals


def test_an_output_without_a_gradient_counts_as_none_in_the_derivative() -> None:
    text = """
kernel both(x: T[N]) -> (y: T[N], z: T[N]):
    parallel n in N
    y[n] = x[n] * x[n]
    z[n] = 3.0 * x[n]

backward both(x: T[N], d_y: T[N]) -> (d_x: T[N]):
    parallel n in N
    d_x[n] = 2.0 * x[n] * d_y[n]
"""
    report = examine(kgen.loads(text)["both"])
    assert report.trials >= 10 and not report.failures and not report.refusals
    wrong = kgen.loads(text.replace("2.0 * x", "x"))["both"]
    assert [f.guilty for f in examine(wrong, most_failures=1).failures] == [(BY_HAND,)]


def test_questions_are_put_once_where_residuals_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kgen.load(OPS / "swiglu.kdsl")["swiglu"]
    asked: list[str] = []
    original = gradients.ask

    def counted(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
        asked.append(kernel.name)
        return original(kernel, *args, **kwargs)

    monkeypatch.setattr(gradients, "ask", counted)
    examine(kernel, given=trials(kernel, direction="backward", quick=True)[:1])
    assert asked == ["swiglu", "swiglu_backward"]


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["diff", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_command_saves_and_replays_a_gradient(tmp_path: Path) -> None:
    file = OPS / "rms_norm.kdsl"
    with injected("partial"):
        how = ("--backends", "triton,reference", "--quick", "--save", tmp_path)
        code, text, _ = run(f"{file}:rms_norm", *how)
        assert code == 1
        assert "rms_norm, backward: triton wrong" in text
        saved = tmp_path / "rms_norm-backward.json"
        assert f"kgen diff --replay {saved}" in text
        assert not (tmp_path / "rms_norm.json").exists()
        assert run("--replay", saved, "--backends", "triton")[0] == 1
    assert run("--replay", saved, "--backends", "triton")[0] == 0


def test_command_with_a_mistake_in_gradients() -> None:
    file = OPS / "rms_norm.kdsl"
    code, text, _ = run(file, "--inject", "partial", "--quick", "--json", "--direction", "backward")
    assert code == 0
    found = [(r["backend"], r["launch"], r["result"]) for r in json.loads(text)]
    assert found == [(b, k, r) for b in ("cuda", "triton") for k, r in ((1, "not there"), (2, "found"))]


def test_time_is_shared_by_kernels_and_directions(module: kgen.KernelModule, monkeypatch: pytest.MonkeyPatch) -> None:
    from kgen.runtime import campaign

    now, shares = [0.0], []
    original = campaign.examine_kernel

    def spy(*args: Any, **kwargs: Any) -> Report:
        shares.append(kwargs["seconds"])
        return original(*args, **kwargs)

    def tick(*_: Any) -> dict[str, Any]:  # every call takes two seconds
        now[0] += 2.0
        return {"reference": gradients.Answer("ok")}

    monkeypatch.setattr(campaign, "run", tick)
    monkeypatch.setattr(campaign, "examine_kernel", spy)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    args = (OPS / "swiglu.kdsl", "--backends", "reference", "--quick", "--seconds", "40", "--json")
    code, text, _ = run(*args)
    assert code == 0
    results = json.loads(text)
    jobs = len(results)
    assert jobs == 2 * len(kgen.load(OPS / "swiglu.kdsl"))
    assert shares[0] == 40 / jobs
    assert all(r["out of time"] and 0 < r["calls"] < r["planned"] for r in results)
    assert 40 <= now[0] < 40 + 2 * jobs
    code, text, _ = run(*args[:-3], "--seconds", "0")
    assert code == 0
    assert "swiglu, backward: time was up after 0 of" in text


def test_inputs_without_a_gradient_are_named() -> None:
    code, text, _ = run(f"{OPS / 'rope.kdsl'}:rope", "--direction", "backward", "--seconds", "0")
    assert code == 0
    assert "rope: no gradient of 'cos': the gradient of 'cos' needs a scatter over programs [K0503] at" in text
