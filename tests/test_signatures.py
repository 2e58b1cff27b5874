"""What a user sees of a kernel's parameters: its signature, help, and errors in the words of the function called; and
how files, kernels and dtypes are named on the command line."""

from __future__ import annotations

import inspect
import json
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kgen
from kgen import ops
from kgen.cli import app
from kgen.dsl.diagnostics import DslError
from kgen.dsl.signature import KERNEL_OPTIONS, OP_OPTIONS
from kgen.ops.functional import in_words_of_the_caller
from kgen.runtime.host.op import HostOp
from kgen.runtime.kernel import Kernel

OPS = Path(__file__).resolve().parents[1] / "ops"
X = torch.randn(3, 8)

# ---- signatures ------------------------------------------------------------------------------------------------------


def test_signature_and_help_show_the_parameters() -> None:
    kernel = kgen.load(OPS / "rms_norm.kdsl")["rms_norm"]
    shown = inspect.signature(kernel)
    assert list(shown.parameters) == ["x", "w", "eps", "offset", "round_first", "backend", "out", "like", "check"]
    assert shown.parameters["x"].default is inspect.Parameter.empty
    assert {n: p.default for n, p in shown.parameters.items() if n != "x"} == {
        "w": None, "eps": 1e-6, "offset": 0.0, "round_first": False, "backend": None, "out": None, "like": None,
        "check": False,
    }  # fmt: skip
    assert [shown.parameters[n].annotation for n in ("x", "w", "eps", "round_first")] == [
        "T[*M, N]", "W[N]?", "f32", "const bool",
    ]  # fmt: skip
    assert shown.return_annotation == "(y: T[*M, N])"
    assert shown.bind(X, eps=1e-5).arguments == {"x": X, "eps": 1e-5}
    text = pydoc.plain(pydoc.render_doc(kernel))
    assert "rms_norm(x: 'T[*M, N]', w: 'W[N]?' = None, eps: 'f32' = 1e-06, offset: 'f32' = 0.0" in text


def test_signatures_that_python_would_not_allow() -> None:
    module = kgen.loads(
        "kernel f(w: T[N]?, x: T[N], s: inout T[N]) -> (y: T[N]):\n    parallel n in N\n    s[n] = x[n]\n"
        "    if w:\n        y[n] = w[n]\n    else:\n        y[n] = x[n]\n\n"
        "kernel g(lambda: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = lambda[n]\n"
    )
    shown = inspect.signature(module["f"])  # an optional tensor in front of one that must be given
    assert shown.parameters["w"].default is None
    assert shown.parameters["x"].default is inspect.Parameter.empty
    assert shown.parameters["s"].annotation == "inout T[N]"
    assert "kwargs" in inspect.signature(module["g"]).parameters  # Python has no such name
    assert torch.equal(module["g"](X[0]), X[0])
    assert "kwargs" in str(inspect.signature(type(module["f"]).__call__))


FILES = {
    "K0235": "kernel f(x: T[N], {}) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n]\n",
    "K0617": "op f(x: T[B, B], {}) -> (y: T[B, B]):\n    forward:\n        y = x @ x\n",
}
OPTIONS = [("K0235", Kernel, n) for n in KERNEL_OPTIONS] + [("K0617", HostOp, n) for n in OP_OPTIONS]


def test_the_options_of_a_call_are_those_that_are_listed() -> None:
    for of, listed in ((Kernel, KERNEL_OPTIONS), (HostOp, OP_OPTIONS)):
        shown = inspect.signature(of.__call__).parameters.values()
        assert {p.name: p.default for p in shown if p.kind is p.KEYWORD_ONLY} == listed


@pytest.mark.parametrize("param", ["{}: f32 = 1.0", "{}: T[N]", "{}: const bool = false"])
@pytest.mark.parametrize(("code", "of", "option"), OPTIONS)
def test_no_parameter_has_the_name_of_an_option(code: str, of: type, option: str, param: str) -> None:
    with pytest.raises(DslError) as caught:
        kgen.loads(FILES[code].format(param.format(option)))
    found = caught.value.diagnostics[0]
    assert (found.code, found.span.text) == (code, param.format(option)), found.render()
    assert f"'{option}' is what a caller passes to every" in found.message and f"such as {option}_" in found.help


def test_outputs_may_have_the_name_of_an_option() -> None:
    module = kgen.loads("kernel f(x: T[N]) -> (out: T[N]):\n    parallel n in N\n    out[n] = exp(x[n])\n")
    x = X[0].clone().requires_grad_()
    y = module["f"](x)
    y.sum().backward()  # its backward takes what it gave
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_a_parameter_may_be_called_self() -> None:
    module = kgen.loads("kernel f(self: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = self[n]\n")
    assert torch.equal(module["f"](self=X[0]), X[0])


# ---- errors in the caller's words ------------------------------------------------------------------------------------

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.rms_norm(X, X[0, :7]), "rms_norm: argument 'weight' must have shape [N]"),
    (lambda: ops.rms_norm(X, [1.0]), "rms_norm: argument 'weight' must be a torch.Tensor, got a list"),  # pyright: ignore
    (lambda: ops.rms_norm(X, X[0].long()), "rms_norm: argument 'weight' has dtype i64"),
    (lambda: ops.layer_norm(X, X[0], X[0, :7]), "layer_norm: argument 'bias' must have shape [N]"),
    (lambda: ops.layer_norm(X, X[0], X[0].bfloat16()), "W is f32 by argument 'weight'"),
    (lambda: ops.add_rms_norm(X, X, X[0, :7]), "add_rms_norm: argument 'weight' must have shape [N]"),
    (lambda: ops.add_rms_norm(X, X[:, :7], X[0]), "add_rms_norm: argument 'residual' must have shape"),
    (
        lambda: ops.layer_norm(X, X[0], X[0].requires_grad_(), out=torch.empty(3, 8)),
        "but argument 'bias' requires grad",
    ),
]


@pytest.mark.parametrize(("call", "says"), WRONG)
def test_errors_name_the_arguments_of_the_function(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(kgen.ArgumentError) as caught:
        call()
    assert says in str(caught.value)
    assert "'w'" not in str(caught.value) and "'b'" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_only_names_in_quotation_marks_are_replaced() -> None:
    error = in_words_of_the_caller(kgen.ArgumentError("f: w of 'w' by 'b', not 'x'"), w="weight", b="bias")
    assert type(error) is kgen.ArgumentError
    assert str(error) == "f: w of 'weight' by 'bias', not 'x'"


# ---- the command line ------------------------------------------------------------------------------------------------


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.kdsl"
    path.write_text(
        "kernel good(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n]\n\n"
        "kernel bad(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = z[n]\n"
    )
    return path


def test_check_of_one_kernel(file: Path) -> None:
    code, out, _ = run("check", f"{file}:good")
    assert (code, out) == (0, "1 file, 1 kernel: no errors\n")
    for what in (f"{file}:bad", file):
        code, out, _ = run("check", what, "--json")
        assert code == 1
        assert [e["line"] for e in json.loads(out)["errors"]] == [7]
    code, _, err = run("check", f"{file}:god")
    assert code == 2
    assert "has no kernel 'god'; did you mean 'good'?" in err
    assert run("check", f"{OPS / 'fused_linear_cross_entropy.kdsl'}:fused_linear_cross_entropy")[0] == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--dtype", "f32,bf16"], "--dtype f32,bf16: one kernel is compiled for one dtype; name one, or one for each"),
        (["--dtype", "f32", "--dtype", "f16"], "--dtype f32,f16: one kernel is compiled for one dtype"),
        (["--dtype", "T=f32,T=bf16"], "--dtype f32,bf16: one kernel is compiled for one dtype"),
        (["--dim", "N=8", "--dim", "N=9"], "--dim N=9: N is 8 already, and it has one value"),
        (["--const", "round_first=true,round_first=false"], "--const round_first=false: round_first is true already"),
    ],
)
def test_one_thing_at_a_time(args: list[str], says: str) -> None:
    code, out, err = run("show", OPS / "rms_norm.kdsl", *args)
    assert (code, out) == (2, "")
    assert says in err
    same = [a.replace("bf16", "f32").replace("f16", "f32").replace("9", "8").replace("false", "true") for a in args]
    assert run("show", OPS / "rms_norm.kdsl", "--stage", "ir", *same)[0] == 0
