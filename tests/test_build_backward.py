"""`kgen build --backward`: training forms and backwards that stand alone, as text and as code. No GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_build import clean, run

import kgen
from kgen.codegen.interpret import interpret
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl.check import Specialization, elaborate
from kgen.dsl.parser import parse_text

OPS = Path(__file__).resolve().parents[1] / "ops"
SMALL = ("--dim", "M=96", "--dim", "N=64", "--dtype", "f32")

BY_HAND = """
kernel scaled(x: f32[M, N], w: f32[N]) -> (y: f32[M, N]):
    example M = 96, N = 64
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] * w[n]

backward scaled(x: f32[M, N], w: f32[N], d_y: f32[M, N]) -> (d_x: f32[M, N], d_w: f32[N]):
    parallel m in M
    tile n in N
    d_x[m, n] = w[n] * d_y[m, n]
    d_w[n] += d_y[m, n] * x[m, n]

kernel doubled_(x: inout f32[N]):
    example N = 64
    parallel n in N
    x[n] = 2.0 * x[n]
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KGEN_CACHE_DIR", str(cache))
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{cache}/triton-own")


def test_both_kernels_run_alone_and_agree_with_autograd(tmp_path: Path) -> None:
    code, out, err = run("build", OPS / "rms_norm.kdsl", "--backward", *SMALL, "--out", tmp_path)
    assert code == 0, err
    assert "rms_norm_forward.sm_90.cubin" in out and "rms_norm_backward.sm_90.cubin" in out
    kernels = json.loads((tmp_path / "manifest.json").read_text())["kernels"]
    assert list(kernels) == ["rms_norm", "rms_norm_forward", "rms_norm_backward"]
    assert "gradient" not in kernels["rms_norm"]
    assert kernels["rms_norm_forward"]["gradient"] == {
        "of": "rms_norm", "role": "training", "residuals": ["saved_r"], "file": "rms_norm_forward.kdsl",
    }  # fmt: skip
    own = kernels["rms_norm_backward"]["gradient"]
    assert own["cotangents"] == {"y": "d_y"} and own["gradients"] == {"x": "d_x", "w": "d_w"} and not own["by_hand"]
    assert len(kernels["rms_norm_backward"]["backends"]["cuda"]["launches"]) == 2
    assert 'extern "C" __global__' in (tmp_path / "rms_norm_backward.cu").read_text()
    script = """
import importlib.util, torch
def load(path):
    spec = importlib.util.spec_from_file_location(path[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
torch.manual_seed(0)
x, w, d_y = torch.randn(2, 5, 64), torch.randn(64), torch.randn(2, 5, 64)
y, saved_r, d_x, d_w = torch.empty_like(x), torch.empty(2, 5), torch.empty_like(x), torch.empty(64)
load("rms_norm_forward_triton.py").launch_rms_norm_forward(x, w, y, saved_r)
load("rms_norm_backward_triton.py").launch_rms_norm_backward(x, w, saved_r, d_y, d_x, d_w, multiprocessors=3)
a, b = x.double().requires_grad_(), w.double().requires_grad_()
want = torch.nn.functional.rms_norm(a, (64,), b, 1e-6)
want.backward(d_y.double())
for got, exact in ((y, want), (d_x, a.grad), (d_w, b.grad)):
    torch.testing.assert_close(got.double(), exact.detach(), rtol=1e-5, atol=1e-5)
print("done")
"""
    assert clean(script, tmp_path, TRITON_INTERPRET="1") == "done\n"


def test_the_text_of_both_is_a_file_that_computes_the_same(tmp_path: Path) -> None:
    code, _, err = run("build", OPS / "rms_norm.kdsl", "--backward", "--backend", "cuda", *SMALL, "--out", tmp_path)
    assert code == 0, err
    x, w, d_y = torch.randn(3, 64), torch.randn(64), torch.randn(3, 64)
    results: dict[str, torch.Tensor] = {"x": x, "w": w, "d_y": d_y}
    for name in ("rms_norm_forward", "rms_norm_backward"):
        text = (tmp_path / f"{name}.kdsl").read_text()
        assert run("check", tmp_path / f"{name}.kdsl")[0] == 0
        kernel = elaborate(parse_text(text, f"{name}.kdsl"), name, Specialization({}))
        scalars = {s.name: s.default for s in kernel.scalars if s.default is not None}
        tensors = {t.name: results[t.name] for t in kernel.tensors if t.role == "in"}
        found = interpret(kernel, tensors, scalars, precision="f64")
        results |= {t.name: found[t.name].to(TORCH[t.dtype]) for t in kernel.tensors if t.role == "out"}
    a, b = x.double().requires_grad_(), w.double().requires_grad_()
    torch.nn.functional.rms_norm(a, (64,), b, 1e-6).backward(d_y.double())
    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close(results["d_x"].double(), a.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results["d_w"].double(), b.grad, rtol=1e-5, atol=1e-5)


def test_a_backward_by_hand_is_built_and_what_has_none_is_told_of(tmp_path: Path) -> None:
    file = tmp_path / "k.kdsl"
    file.write_text(BY_HAND)
    code, _, err = run("build", file, "--backward", "--backend", "cuda", "--out", tmp_path / "built")
    assert code == 0, err
    assert "no backward of doubled_: 'x' is overwritten in place" in " ".join(err.split()) and "[K0502]" in err
    kernels = json.loads((tmp_path / "built" / "manifest.json").read_text())["kernels"]
    assert list(kernels) == ["scaled", "doubled_", "scaled_forward", "scaled_backward"]
    assert kernels["scaled_backward"]["gradient"]["by_hand"] is True
    # The text that is built is the one that is checked again.
    assert "scaled_backward" in kgen.loads((tmp_path / "built" / "scaled_backward.kdsl").read_text())
    code, _, err = run("build", f"{file}:doubled_", "--backward", "--out", tmp_path / "none")
    assert code == 1 and "error[K0502]" in err and not (tmp_path / "none").exists()


def test_an_op_has_gradients_of_its_own(tmp_path: Path) -> None:
    op = f"{OPS / 'fused_linear_cross_entropy.kdsl'}:fused_linear_cross_entropy"
    code, _, err = run("build", op, "--backward", "--out", tmp_path)
    assert code == 2 and "--backward is for kernels" in " ".join(err.split())
