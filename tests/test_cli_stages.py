"""`kgen show`: whose schedule, cost and binary stand beside the other stages, in which words, and NAME.backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kgen.cli import app
from kgen.cli.stages import backends_of

SIZES = ("--dim", "M=4096", "--dim", "N=20480")
BOTH = ("cuda", "triton")


def show(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["show", *map(str, args)])
    return result.exit_code, result.output


def data(*args: object) -> dict[str, Any]:
    code, out = show(*args, "--json")
    assert code == 0, out
    return json.loads(out)


def kernel(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "k.kdsl"
    path.write_text(text)
    return path


# ---- whose -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "backend", "schedules", "binaries"),
    [
        (("triton",), None, ("triton",), ("triton",)),
        (("cuda",), None, ("cuda",), ("cuda",)),
        (("cuda", "triton"), None, BOTH, BOTH),
        (("triton", "cuda"), None, ("triton", "cuda"), ("triton", "cuda")),
        (("ir",), None, BOTH, ("cuda",)),
        ((), None, BOTH, ("cuda",)),
        (("triton",), "cuda", ("cuda",), ("cuda",)),
        (("cuda", "triton"), "triton", ("triton",), ("triton",)),
    ],
)
def test_the_stages_that_are_asked_for_say_whose_the_others_are(
    stages: tuple[str, ...], backend: str | None, schedules: tuple[str, ...], binaries: tuple[str, ...]
) -> None:
    for stage, expected in {"schedule": schedules, "cost": schedules, "ptx": binaries, "sass": binaries}.items():
        assert backends_of(stage, (*stages, stage), backend) == expected


def test_the_schedule_is_that_of_the_other_stage() -> None:
    code, out = show("softmax", "--stage", "triton,schedule", *SIZES)
    assert code == 0
    title, first = out[out.index("==== schedule") :].splitlines()[:2]
    assert title == "==== schedule, triton ====" and first.startswith("# triton, looped: num_warps=16")
    assert "# cuda" not in out
    assert data("softmax", "-s", "schedule,cuda", *SIZES)["schedule"].startswith("# cuda, looped: 1024 threads")
    own = data("softmax", "-s", "triton,schedule", "--backend", "cuda", *SIZES)
    assert own["schedule"].startswith("# cuda")
    assert show("softmax", "--backend", "triton", *SIZES)[1] == show("softmax", "-s", "triton", *SIZES)[1]


@pytest.mark.parametrize("stages", ["schedule", "cuda,triton,schedule", "cuda,schedule,triton"])
def test_where_both_are_asked_for_or_none_there_are_two_schedules(stages: str) -> None:
    code, out = show("softmax", "--stage", stages, *SIZES)
    assert code == 0
    for backend in BOTH:
        assert f"==== schedule, {backend} ====\n# {backend}, looped: " in out
    texts = data("softmax", "--stage", stages, *SIZES)["schedule"]
    assert list(texts) == list(BOTH) and all(text.startswith(f"# {b}, looped: ") for b, text in texts.items())


def test_every_launch_says_whose_it_is() -> None:
    text = data("rms_norm.backward", "-s", "triton,schedule")["schedule"]
    heads = [part.splitlines()[0] for part in text.split("\n\n# ")]
    assert len(heads) == 2 and heads[0].startswith("# triton, row: ") and heads[1].startswith("triton, finish: ")


def test_the_cost_is_of_the_backends_that_are_asked_for() -> None:
    def backends(*args: str) -> list[str]:
        return list(data("rms_norm", *args)["cost"]["backends"])

    assert backends("-s", "cost") == backends("-s", "cuda,cost,triton") == [*BOTH]
    assert backends("-s", "triton,cost") == backends("-s", "cost", "--backend", "triton") == ["triton"]


# ---- in which words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "cuda", "triton"),
    [
        (
            "softmax", SIZES, "looped: 1024 threads, 1 row a program, vectors of 8, all of n anew in each pass",
            "looped: num_warps=16, maxnreg=64, 1 row a program, n in blocks of 4096 that stay in registers for later "
            "passes (x_mn)",
        ),
        (
            "rms_norm", ("--dim", "N=5120"), "row: 256 threads, 1 row a program, vectors of 8",
            "row: num_warps=8, 1 row a program, n in a block of 8192",
        ),
        (
            "swiglu", (), "flat: 256 threads, 2048 points a program, vectors of 8",
            "flat: num_warps=4, a block of 1024 points",
        ),
    ],
)  # fmt: skip
def test_a_schedule_has_the_words_of_its_backend(name: str, args: tuple[str, ...], cuda: str, triton: str) -> None:
    texts = data(name, "-s", "schedule", "--dtype", "bf16", *args)["schedule"]
    assert {b: text.splitlines()[0] for b, text in texts.items()} == {
        "cuda": f"# cuda, {cuda}", "triton": f"# triton, {triton}"
    }  # fmt: skip
    for word in ("thread", "vectors", "chunks"):
        assert word not in texts["triton"]
    assert "warps" not in texts["cuda"]


def test_loads_that_are_in_flight_are_stages(tmp_path: Path) -> None:
    text = (
        "kernel k(x: T[*M, N]) -> (y: T[*M, N]):\n    parallel m in M\n    tile n in N\n    example M = 64, N = 8192\n"
        "    schedule triton: chunk[n] = 1024, stages = 3, warps = 4\n    schedule cuda: chunk[n] = 1024, cluster = 1\n"
        "    y[m, n] = x[m, n] - max(x[m, n], n)\n"
    )
    texts = data(kernel(tmp_path, text), "-s", "schedule")["schedule"]
    assert "num_warps=4, 1 row a program, n in blocks of 1024, num_stages=3\n" in texts["triton"]
    assert "\nfor n in blocks of 1024:\n" in texts["triton"] and "\nfor n in chunks of 1024" in texts["cuda"]


# ---- the kernels of gradients ------------------------------------------------------------------------------------


def test_a_direction_behind_a_name_is_the_kernel_of_that_direction() -> None:
    stages = "source,ir,schedule,cuda,triton"
    for direction in ("training", "backward"):
        texts = data("rms_norm", "-s", f"{direction},{stages}")
        assert texts.pop(direction)
        assert data(f"rms_norm.{direction}", "-s", stages) == texts
        assert show(f"rms_norm.{direction}")[1].strip() == texts["cuda"].strip()
        assert show(f"rms_norm.{direction}", "-s", direction) == show("rms_norm", "-s", direction)
    assert show("rms_norm.forward", "-s", "cuda,ir") == show("rms_norm", "-s", "cuda,ir")


def test_a_direction_behind_a_kernel_of_a_file(tmp_path: Path) -> None:
    head = "    parallel m in M\n    tile n in N\n    example M = 8, N = 64\n"
    path = kernel(
        tmp_path,
        f"kernel f(x: T[*M, N]) -> (y: T[*M, N]):\n{head}    y[m, n] = x[m, n] * x[m, n]\n"
        f"kernel g(x: i32[*M, N]) -> (y: i32[*M, N]):\n{head}    y[m, n] = x[m, n] + 1\n",
    )
    assert "f_backward(" in show(f"{path}:f.backward", "-s", "cuda")[1]
    code, out = show(f"{path}.backward")
    assert code == 2 and "2 kernels" in out
    code, out = show(f"{path}:g.backward")
    assert code == 1 and "error[K0501]: kernel 'g' has no floating-point output" in out and "= help: integers" in out


def test_diff_examines_the_direction_that_is_named() -> None:
    how = ("--quick", "--backends", "reference", "--dtype", "f32", "--seconds", "2", "--json")

    def examined(*names: str) -> list[tuple[str, str]]:
        done = CliRunner().invoke(app, ["diff", *names, *how])
        assert done.exit_code == 0, done.output
        return [(r["kernel"], r["direction"]) for r in json.loads(done.stdout)]

    assert examined("geglu.backward") == [("geglu", "backward")]
    assert examined("geglu.forward", "swiglu") == [
        ("geglu", "forward"), ("swiglu", "forward"), ("swiglu", "backward")
    ]  # fmt: skip
    assert examined("geglu.forward", "geglu") == [("geglu", "forward"), ("geglu", "backward")]
    for args, said in {
        ("geglu.training",): "name geglu.backward: it runs the training form too",
        ("geglu.backward", "--direction", "forward"): "geglu.backward: --direction is forward",
    }.items():
        done = CliRunner().invoke(app, ["diff", *args])
        assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output


def test_build_writes_the_direction_that_is_named(tmp_path: Path) -> None:
    def built(*names: str, folder: str) -> list[str]:
        args = ["build", *names, "--backend", "triton", "--dtype", "bf16", "--out", str(tmp_path / folder)]
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, done.output
        return list(json.loads((tmp_path / folder / "manifest.json").read_text())["kernels"])

    assert built("geglu.backward", folder="a") == ["geglu_backward"]
    assert built("geglu.training", "geglu", folder="b") == ["geglu", "geglu_forward"]
    assert built("geglu.backward", "geglu", "--backward", folder="c") == ["geglu", "geglu_forward", "geglu_backward"]
    done = CliRunner().invoke(app, ["build", "fused_linear_cross_entropy.backward", "--out", str(tmp_path / "d")])
    assert done.exit_code == 2 and "is an op, which is built with its gradients" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("fused_linear_cross_entropy.backward",), "is an op, whose plan has its gradients: kgen show fused_linear_c"),
        (("rms_nrm.backward",), "did you mean 'rms_norm'"),
        (("rms_norm.backwards",), "there is no file rms_norm.backwards"),
        (("rms_norm.backward", "-s", "training"), "--stage training: rms_norm.backward is the backward kernel alone"),
    ],
)
def test_what_has_no_such_direction(args: tuple[str, ...], said: str) -> None:
    code, out = show(*args)
    assert code == 2 and said in " ".join(out.split()), out
