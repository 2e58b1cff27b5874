"""`kgen show --stage cost`, and stages behind a derived backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from host_kit import MLP
from typer.testing import CliRunner

from kgen.cli import app
from kgen.codegen.knobs import Knobs
from kgen.dsl.modules import load
from kgen.runtime import tuned
from kgen.runtime.ahead import Choices, target
from kgen.runtime.tuned_store import Result, add, knob_data

OPS = Path(__file__).resolve().parents[1] / "ops"
NORM = OPS / "rms_norm.kdsl"
LINEAR = f"{OPS / 'fused_linear_cross_entropy.kdsl'}:fused_linear_cross_entropy"


def show(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["show", *map(str, args)])
    return result.exit_code, result.output


def data(*args: object) -> Any:
    code, out = show(*args, "--json")
    assert code == 0, out
    return json.loads(out)


def test_the_tables() -> None:
    code, out = show(NORM, "--stage", "cost", "--dtype", "bf16")
    assert code == 0, out
    assert "together              268.4 MB  4*M*N + 2*N" in out
    assert "floor 67.1 us: bound by memory" in out and "4.27 TB/s measured of 4.80 TB/s" in out
    (line,) = [text for text in out.splitlines() if text.startswith("threads a program")]
    assert line.split()[3:] == ["128", "256", "(8", "warps)"]
    for row in ("registers a thread", "limited by", "waves", "bytes in flight", "of that again"):
        (line,) = [text for text in out.splitlines() if text.startswith(row)]
        assert len(line.removeprefix(row).split()) >= 2, line


def test_the_figures() -> None:
    got = data(NORM, "--stage", "cost", "--dtype", "bf16", "--dim", "N=1024")["cost"]
    assert got["dims"] == {"M": 16384, "N": 1024}
    assert got["bytes"]["moved"] == {"value": 4 * 16384 * 1024 + 2 * 1024, "formula": "4*M*N + 2*N"}
    assert got["floor"]["bound"] == "memory" and got["floor"]["seconds"] == pytest.approx(20.2e-6, rel=1e-3)
    for backend in ("cuda", "triton"):
        (launch,) = got["backends"][backend]["launches"]
        assert launch["spill_bytes"] == 0 and launch["registers"] > 0
        assert launch["programs_per_multiprocessor"] == min(launch["limits"].values())
        assert launch["schedule"]["by"] == "ladders"


def test_the_machine_is_named_or_follows_from_the_architecture() -> None:
    assert data(NORM, "-s", "cost", "--gpu", "A100")["cost"]["machine"]["arch"] == "sm_80"
    assert data(NORM, "-s", "cost", "--arch", "sm_80")["cost"]["machine"]["name"] == "a100"
    assert data(NORM, "-s", "cost")["cost"]["machine"]["name"] == "h200"
    for args, message in [
        (("-s", "cost", "--gpu", "h300"), "there is no machine 'h300' here; they are h200, h100, a100"),
        (("-s", "cost", "--gpu", "a100", "--arch", "sm_90"), "NVIDIA A100 SXM (80 GB) is sm_80"),
        (("-s", "cost", "--arch", "sm_87"), "no machine with it is known; name one: --gpu h200"),
        (("-s", "cuda", "--gpu", "h200"), "--gpu is for --stage cost and schedule"),
    ]:
        code, out = show(NORM, *args)
        assert code == 2 and message in " ".join(out.split()), out


def test_the_schedule_that_was_measured_on_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_TUNED", str(tmp_path))
    module = load(NORM).module
    made = target(module, module.kernels[0], Choices(dtype="bf16"))
    knobs = Knobs(threads=512, rows=1)
    result = Result(
        tuned.subject(made.layout, "cuda"), "rms_norm", {"T": "bf16"}, {"M": 16384, "N": 4096},
        knob_data(knobs, made.layout.kernel), 60.0, 70.0, driver="some",
    )  # fmt: skip
    add("NVIDIA A100-SXM4-80GB", [result])
    args = (NORM, "--dtype", "bf16", "--gpu")
    got = data(*args, "a100", "-s", "cost")["cost"]["backends"]
    assert (
        got["cuda"]["launches"][0]["schedule"] | {"threads": 512, "by": "tuned"}
        == got["cuda"]["launches"][0]["schedule"]
    )
    assert got["triton"]["launches"][0]["schedule"]["by"] == "ladders"
    text = data(*args, "a100", "-s", "schedule")["schedule"]["cuda"]
    assert (
        text.startswith("# cuda, row: 512 threads") and "# set by a tuned schedule, the rest chosen by ladders" in text
    )
    assert "# chosen by ladders" in data(*args, "h200", "-s", "schedule")["schedule"]["cuda"]
    # What the source sets comes before it.
    own = tmp_path / "own.kdsl"
    line = "    example M = 16384, N = 4096\n"
    own.write_text(NORM.read_text().replace(line, line + "    schedule cuda: threads = 64\n"))
    text = data(own, "--dtype", "bf16", "--gpu", "a100", "-s", "schedule", "--backend", "cuda")["schedule"]
    assert text.startswith("# cuda, row: 64 threads") and f"# set by the schedule at {own}:" in text


def test_an_op_is_the_sum_of_its_steps() -> None:
    got = data(LINEAR, "--stage", "cost", "--without", "bias,class_weight,token_weight", "--dtype", "bf16")["cost"]
    b, h, v = 8192, 4096, 128256
    assert got["matrix_flops"] == 3 * 2 * b * h * v
    assert got["matrix_seconds"] == pytest.approx(37.4e-3, rel=1e-3)  # as was measured
    assert got["seconds"] == pytest.approx(sum(s["floor"]["seconds"] for s in got["steps"]))
    steps = {s["step"].split("(")[0]: s for s in got["steps"]}
    rows = got["chunks"]["c"]
    logits = next(s for s in got["steps"] if s["step"].startswith("logits = x[c] @"))
    assert logits["times"] == -(-b // rows)
    assert logits["bytes"] == logits["times"] * 2 * h * v + 2 * b * h + 2 * b * v
    # The first product of a sum has nothing to be added to.
    summed = next(s for s in got["steps"] if s["step"].startswith("w_sum += "))
    assert summed["bytes"] == 2 * b * v + 2 * b * h + (2 * summed["times"] - 1) * 2 * h * v
    assert steps["losses[c], z[c] = cross_entropy_"]["bytes"] == 4 * b * v + 24 * b
    assert {s["direction"] for s in got["steps"]} == {"forward", "backward"}
    code, out = show(LINEAR, "--stage", "cost", "--dtype", "bf16")
    assert code == 0 and "matrix units" in out and "together" in out


def test_an_op_with_a_last_chunk_that_is_smaller(tmp_path: Path) -> None:
    got = data(LINEAR, "-s", "cost", "--dim", "B=5000", "--dtype", "bf16", "--without", "bias")["cost"]
    rows = got["chunks"]["c"]
    assert 5000 % rows
    assert got["matrix_flops"] == 3 * 2 * 5000 * 4096 * 128256
    path = tmp_path / "mlp.kdsl"
    path.write_text(MLP, encoding="utf-8")
    code, out = show(f"{path}:mlp", "-s", "cost")
    assert code == 1 and "its cost needs the size of every dimension" in " ".join(out.split())
    assert data(f"{path}:mlp", "-s", "cost", *(a for d in ("B=64", "H=32", "F=48") for a in ("--dim", d)))


# ---- behind a derived backward -------------------------------------------------------------------------------------


def test_stages_behind_backward_are_of_the_backward() -> None:
    got = data(NORM, "--stage", "cuda,backward,cuda,triton,cost,schedule", "--dtype", "bf16")
    assert list(got) == ["cuda", "backward", "triton", "cost", "schedule"]
    assert got["cuda"].startswith("// rms_norm(")  # in front of it
    assert got["backward"].startswith("kernel rms_norm_backward(")
    assert "def rms_norm_backward(" in got["triton"]
    assert (
        got["cost"]["kernel"] == "rms_norm_backward" and got["cost"]["bytes"]["moved"]["formula"] == "6*M*N + 4*M + 4*N"
    )
    assert all("kernel rms_norm_backward" in got["schedule"][backend] for backend in ("cuda", "triton"))
    cuda = data(NORM, "--stage", "backward,cuda", "--dtype", "bf16")["cuda"]
    assert "rms_norm_backward(" in cuda and "rms_norm.kdsl:19, backward: " in cuda and "finish" in cuda


def test_stages_behind_training_are_of_the_training_form() -> None:
    got = data(NORM, "--stage", "training,cost,backward,ir", "--dtype", "bf16")
    assert got["training"].startswith("kernel rms_norm_forward(")
    assert got["cost"]["bytes"]["moved"]["formula"] == "4*M*N + 4*M + 2*N"
    assert "kernel rms_norm_backward" in got["ir"]


def test_what_has_no_backward_says_so() -> None:
    code, out = show(f"{OPS / 'cross_entropy.kdsl'}:cross_entropy_", "--stage", "backward,cuda")
    assert code == 1 and "error[K0502]" in out
