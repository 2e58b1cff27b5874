"""`kgen tune`, the command, without a GPU: candidates run on the CPU's executors, and times are made up."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_kit import machine, norm, outcomes
from typer.testing import CliRunner

from kgen.cli import app
from kgen.runtime.ahead import Choices
from kgen.runtime.tune import Job, Machine
from kgen.runtime.tuned_store import Result, Subject, load, user_path

command = importlib.import_module("kgen.cli.tune")  # the package has the function by that name
pytestmark = pytest.mark.usefixtures("tuned_folder")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "gpu", staticmethod(machine))


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_cpu(monkeypatch)
    report, shipped = tmp_path / "out" / "tune.json", tmp_path / "nvidia.json"
    done = invoke("rms_norm", "swiglu.backward", "--sizes", "M=8,N=64", "--sizes", "M=8,N=128", "--candidates", "3",
                  "--json", str(report), "--export", str(shipped))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "rms_norm on cuda, M=8, N=64:" in done.output and "swiglu.backward on triton, M=8, N=128:" in done.output
    data = json.loads(report.read_text())
    assert data["device"] == "cpu" and len(data["outcomes"]) == 8
    assert all(o["result"]["tried"] == 3 and len(o["candidates"]) == 3 for o in data["outcomes"])
    assert len(load(shipped)) == 8
    listed = invoke("--show")
    assert listed.exit_code == 0 and "swiglu.backward" in listed.output
    again = invoke("rms_norm", "--sizes", "M=8,N=64", "--candidates", "3")
    assert again.exit_code == 0 and "(known)" in again.output


def test_a_file_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_cpu(monkeypatch)
    file = tmp_path / "scale.kdsl"
    file.write_text(
        "kernel scale(x: T[M, N]) -> (y: T[M, N]):\n    example M = 8, N = 64\n"
        "    parallel m in M, n in N\n    y[m, n] = 2.0 * x[m, n]\n"
    )
    done = invoke(str(file), "--backend", "cuda", "--candidates", "2", "--dtype", "f16")
    assert done.exit_code == 0 and "scale on cuda, M=8, N=64" in done.output
    assert load(user_path("cpu"))[0].dtypes == {"T": "f16"}
    assert invoke(f"{file}:scale.backward", "--backend", "cuda", "--candidates", "2").exit_code == 0


def test_a_schedule_in_the_source_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_cpu(monkeypatch)
    file = tmp_path / "scale.kdsl"
    file.write_text(
        "kernel scale(x: T[M, N]) -> (y: T[M, N]):\n    example M = 8, N = 64\n    schedule cuda: threads = 64\n"
        "    parallel m in M, n in N\n    y[m, n] = 2.0 * x[m, n]\n"
    )
    done = invoke(str(file), "--candidates", "2")
    assert done.exit_code == 0
    assert done.output.count("calls take the schedule that is set by") == 1 and "scale.kdsl:3" in done.output


def test_show_says_what_was_measured() -> None:
    c = norm()
    outcomes([Job(c, "cuda"), Job(c, "triton")])

    def shown(width: int) -> str:
        done = CliRunner().invoke(app, ["show", c.source.module.path, "--stage", "schedule", "--dtype", "f32", "--dim",
                                        f"N={width}"])  # fmt: skip
        assert done.exit_code == 0, done.output
        return done.output

    for text in shown(256).split("==== schedule, ")[1:]:
        line = text.splitlines()[3]  # below the title, the sizes and who chose them
        assert line.startswith("# tuned on cpu, measured with M = 24, N = 256: ") and "default 10.0 us" in line
    assert "tuned on" not in shown(512)


def test_usual_sizes_are_those_of_the_list() -> None:
    target = command.target_of("rms_norm")
    cases = list(command.cases_of(target, Choices(), [], None))
    assert {(c.dims["M"], c.dims["N"]) for c in cases} >= {(16384, 1024), (2048, 65536)}
    assert {c.direction for c in cases} == {"forward", "training", "backward"}
    only = list(command.cases_of(command.target_of("rope.backward"), Choices(), [], None))
    assert [c.name for c in only] == ["rope.backward"]
    assert [t.name for t in only[0].body.tensors if t.role == "out"] == ["d_q", "d_k"]


def test_every_usual_size_is_a_case() -> None:
    import importlib.resources

    usual = json.loads((importlib.resources.files("kgen.ops") / "tuned_sizes.json").read_text("utf-8"))
    names = {u["kernel"] for u in usual if "kernel" in u}
    for name in names:
        assert list(command.cases_of(command.target_of(name), Choices(), [], None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rms_norn",), "did you mean 'rms_norm'?"),
        ((), "name a kernel to tune"),
        (("rms_norm", "--backend", "cpu"), "none of cuda, triton, both"),
        (("nowhere.kdsl",), "there is no file"),
        (("rms_norm", "--sizes", "Q=4,N=8"), "has no dimension 'Q'"),
        (("rms_norm", "--sizes", "4"), "write it as --sizes M=8192,N=4096"),
        (("rms_norm", "--without", "v"), "has no optional tensor 'v'"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and message in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("backend", "says"),
    [("cuda", "threads=256, chunk[0]=4096, chunk[1]=8"), ("triton", "warps=8, chunk[0]=4096, chunk[1]=8")],
)
def test_knobs_have_the_names_of_the_language(backend: str, says: str) -> None:
    knobs = {"threads": 256, "chunks": {"0": 4096, "1": 8}}
    subject = Subject("", backend, (), "")
    assert Result(subject, "f", {}, {}, knobs, 1.0, 2.0).words == says


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_one_clear_message() -> None:
    done = invoke("rms_norm", "--sizes", "M=8,N=64")
    assert done.exit_code == 2 and "measures on a GPU" in done.output.replace("\n", " ")
    assert invoke("--show").exit_code == 0
