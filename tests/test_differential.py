"""The differential tester: finds what is wrong, names who, and says nothing about what is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kgen
from kgen.cli import app
from kgen.runtime.campaign import examine_kernel
from kgen.runtime.cases import QUICK_WIDTHS, WIDTHS, Trial, arguments, fits, smaller, trials
from kgen.runtime.differential import Answer, answer, ask, guilty
from kgen.runtime.injection import MUTATIONS, injected
from kgen.runtime.placement import LAYOUTS, place, poisoned

OPS = Path(__file__).resolve().parents[1] / "ops"
CPU = torch.device("cpu")

SOURCE = """
kernel centred(x: T[*M, N], w: W[N]?, k: const i32 = 1, flip: const bool = false) -> (y: T[*M, N]):
    require N % k == 0
    parallel m in M
    tile n in N
    c = x[m, n] - mean(x[m, n], n)
    if w:
        c = c * w[n]
    if flip:
        c = -c
    y[m, n] = c

kernel halves(x: T[*M, D], p: i64[*M]) -> (y: T[*M, D], z: T[*M]):
    require D % 2 == 0 and D >= 4
    parallel m in M
    tile d in D // 2
    y[m, d] = x[m, d + D // 2]
    y[m, d + D // 2] = x[m, d]
    z[m] = x[m, p[m]]

kernel double_(x: inout T[*N]):
    parallel n in N
    x[n] = x[n] * 2.0
"""


@pytest.fixture
def module() -> kgen.KernelModule:
    return kgen.loads(SOURCE)


# ---- placement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (5,), (1, 1), (3, 7), (2, 3, 5), (0, 4), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_placed_values_and_guards(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, shape).to(dtype)
    p = place(values, layout, keep=True)
    assert p.tensor.shape == values.shape
    if layout != "expanded":
        assert torch.equal(p.tensor, values)
    assert p.unchanged()
    assert p.guard_intact()
    for at in (0, p.tensor.storage_offset() - 1, p.buffer.numel() - 1):
        before = p.bits()[at].clone()
        p.bits()[at] = 5
        assert not p.guard_intact()
        assert not p.unchanged()
        p.bits()[at] = before


def test_gaps_between_elements_are_guarded() -> None:
    p = poisoned((3, 4), torch.float32, CPU, "sliced")
    p.tensor.fill_(1.0)
    assert p.guard_intact()
    p.buffer.as_strided((1,), (1,), p.tensor.storage_offset() + 1).fill_(1.0)
    assert not p.guard_intact()


def test_layouts_are_what_they_are_called() -> None:
    at = {layout: place(torch.zeros(4, 6), layout).tensor for layout in LAYOUTS}
    assert {n: t.stride() for n, t in at.items()} == {
        "contiguous": (6, 1), "transposed": (1, 4), "sliced": (12, 2), "expanded": (0, 1), "offset": (6, 1),
        "padded": (12, 1),
    }  # fmt: skip
    assert at["offset"].data_ptr() % 16 == 4
    assert at["contiguous"].data_ptr() % 64 == 0


# ---- trials --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["centred", "halves", "double_"])
def test_trials_fulfil_requirements_and_run(module: kgen.KernelModule, name: str) -> None:
    kernel = module[name]
    chosen = trials(kernel, quick=True)
    assert len(chosen) >= 10
    assert {t.layout for t in chosen} > {"contiguous"}
    assert {"special", "large", "zeros"} <= {t.values for t in chosen}
    for t in chosen:
        assert fits(kernel, t)
        assert answer(ask(kernel, arguments(kernel, t, CPU), t.layout), "reference").status == "ok"
    assert chosen == trials(kernel, quick=True)
    assert chosen != trials(kernel, quick=True, seed=1)


def test_trials_take_every_choice_and_boundary(module: kgen.KernelModule) -> None:
    chosen = trials(module["centred"])
    assert {t.consts["k"] for t in chosen} == {1, 2}
    assert {t.consts["flip"] for t in chosen} == {False, True}
    assert {t.present for t in chosen} == {(), ("w",)}
    assert {t.dtypes["T"] for t in chosen} == {"f32", "bf16", "f16"}
    assert any(t.dims["M"] == 0 for t in chosen)
    widths = {t.dims["N"] for t in chosen}
    assert all(any(abs(n - w) <= 3 for n in widths) for w in WIDTHS)
    assert all(t.dims["N"] % t.consts["k"] == 0 for t in chosen)
    assert len({t.dims["D"] for t in trials(module["halves"], quick=True)}) >= len(QUICK_WIDTHS) - 2
    assert {t.dtypes["T"] for t in trials(module["centred"], dtypes=("f64",))} == {"f64"}


def test_a_trial_survives_json(module: kgen.KernelModule) -> None:
    for t in trials(module["centred"], quick=True):
        assert Trial.from_json(json.loads(json.dumps(t.to_json()))) == t


def test_smaller_trials_are_smaller(module: kgen.KernelModule) -> None:
    start = Trial({"M": 4, "D": 8}, {"T": "f32"}, layout="sliced", values="large")
    found = list(smaller(module["halves"], start))
    assert replace(start, dims={"M": 1, "D": 8}) in found
    assert replace(start, layout="contiguous") in found
    assert all(t.dims["D"] % 2 == 0 and t.dims["D"] >= 4 for t in found)


# ---- answers -------------------------------------------------------------------------------------------------------


def test_a_poisoned_output_and_a_touched_input_are_found(
    module: kgen.KernelModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = module["centred"]
    question = ask(kernel, {"x": torch.randn(3, 5)})

    def call(do: object) -> Answer:
        monkeypatch.setattr(type(kernel), "__call__", do)
        return answer(question, "reference")

    def nothing(self: object, *args: object, **kwargs: object) -> None:
        pass

    def overwrites(self: object, x: torch.Tensor, *args: object, out: tuple[torch.Tensor], **kwargs: object) -> None:
        out[0].copy_(question.expected["y"])
        x[0, 0] += 1

    def strays(self: object, *args: object, out: tuple[torch.Tensor], **kwargs: object) -> None:
        out[0].copy_(question.expected["y"])
        out[0].as_strided((1,), (1,), out[0].storage_offset() + 15).fill_(torch.nan)

    assert "got nan" in call(nothing).message
    assert "the input or what surrounds it was overwritten" in call(overwrites).message
    assert "memory around the output was overwritten" in call(strays).message


def test_who_is_to_blame() -> None:
    right, wrong = Answer("ok"), Answer("wrong", outputs={"y": torch.ones(2)})
    other = Answer("wrong", outputs={"y": torch.zeros(2)})
    assert guilty({"cuda": wrong, "triton": right, "reference": right}) == ["cuda"]
    assert guilty({"cuda": wrong, "triton": other, "reference": right}) == ["cuda", "triton"]
    assert guilty({"cuda": wrong, "triton": wrong, "reference": wrong}) == ["reference (float64)"]
    assert guilty({"cuda": right, "triton": Answer("refused")}) == []


# Those of kernels that sum over programs: tests/test_differential_gradients.py.
@pytest.mark.parametrize("mistake", [m for m in MUTATIONS if m not in ("rows", "partial")])
def test_injected_mistakes_are_found(mistake: str) -> None:
    """Each in a kernel that has what it changes, on each backend that it is for; and the failing call is made small."""
    for backend in MUTATIONS[mistake].edits:
        kernel = kgen.load(OPS / "softmax.kdsl")["log_softmax"]
        with injected(mistake) as done:
            report = examine_kernel(kernel, [backend, "reference"], CPU, quick=True, most_failures=1)
        assert done.programs[backend] >= 1
        (failure,) = report.failures
        assert failure.guilty == (backend,)
        assert failure.trial.dims["M"] <= failure.first.dims["M"]
        assert failure.trial.dims["N"] <= failure.first.dims["N"]
    fresh = kgen.load(OPS / "softmax.kdsl")["log_softmax"]
    given = [failure.trial]
    assert not examine_kernel(fresh, ["cuda", "triton"], CPU, given=given).failures


# ---- the command ---------------------------------------------------------------------------------------------------


def _run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["diff", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_command_on_a_right_kernel(tmp_path: Path) -> None:
    code, text, _ = _run(OPS / "swiglu.kdsl", "--kernel", "swiglu", "--quick", "--json", "--save", tmp_path)
    assert code == 0
    results = json.loads(text)
    assert [(r["kernel"], r["direction"]) for r in results] == [("swiglu", "forward"), ("swiglu", "backward")]
    for result in results:
        assert set(result["backends"]) == {"cuda", "triton", "reference"}
        assert all(b["ok"] == result["calls"] >= 10 for b in result["backends"].values())
    assert not list(tmp_path.iterdir())


def test_command_finds_saves_and_replays(tmp_path: Path) -> None:
    file = tmp_path / "k.kdsl"
    file.write_text(SOURCE)
    with injected("identity"):
        code, text, _ = _run(file, "--kernel", "centred", "--backends", "cuda", "--quick", "--save", tmp_path / "out")
        assert code == 1
        assert "cuda wrong" in text
        saved = tmp_path / "out" / "centred.json"
        assert f"kgen diff --replay {saved}" in text
        code, text, _ = _run("--replay", saved, "--backends", "cuda")
        assert code == 1
    code, text, _ = _run("--replay", saved, "--backends", "cuda")
    assert code == 0


def test_command_with_a_mistake() -> None:
    file = OPS / "rms_norm.kdsl"
    code, text, _ = _run(file, "--inject", "identity", "--quick", "--json")
    assert code == 0
    found = {(r["direction"], r["backend"], r["launch"]): r["result"] for r in json.loads(text)}
    launches = {(d, b, 1) for d in ("forward", "backward") for b in ("cuda", "triton")}
    assert set(found) == launches | {("backward", "cuda", 2), ("backward", "triton", 2)}
    assert all(found[key] == "found" for key in launches)
    assert "not found" not in found.values()  # whether the second launch masks anything is its schedule's business
    code, text, _ = _run("--inject", "list")
    assert code == 0
    assert all(name in text for name in MUTATIONS)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "name a .kdsl file"),
        (["no.kdsl"], "there is no file no.kdsl"),
        ([OPS / "swiglu.kdsl", "--kernel", "sviglu"], "there is no such kernel"),
        ([f"{OPS / 'swiglu.kdsl'}:sviglu"], "has no kernel 'sviglu'; did you mean 'swiglu'?"),
        ([OPS / "swiglu.kdsl", "--direction", "sideways"], "it is forward, backward or both"),
        ([OPS / "swiglu.kdsl", "--backends", "metal"], "they are cuda, triton, reference"),
        ([OPS / "swiglu.kdsl", "--dtype", "f33"], "there is no dtype 'f33'"),
        ([OPS / "swiglu.kdsl", "--device", "tpu"], "it is cpu or cuda"),
        ([OPS / "swiglu.kdsl", "--inject", "gremlin"], "there is no such mistake"),
        (["--replay", OPS / "swiglu.kdsl"], "is not a call saved by kgen diff"),
    ],
)
def test_wrong_usage(args: list[object], says: str) -> None:
    code, _, text = _run(*args)
    assert code == 2
    assert says in " ".join(text.split())
    assert "Traceback" not in text
