"""The differential tester holds a backward kernel against a derivative that no step of derivation has a part in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from derive_kit import UNPLANNED, autograd, call, worst
from typer.testing import CliRunner
from unplanned_cases import CASES, Case

import kgen
from kgen.cli import app
from kgen.codegen.derive import adjoints, differentiable
from kgen.codegen.derive.graph import Graph, Node
from kgen.codegen.derive.rules import OPS
from kgen.codegen.interpret import interpret, interpreted_gradients
from kgen.dsl.affine import Poly
from kgen.runtime import gradients
from kgen.runtime.campaign import DERIVED, Report, examine_kernel
from kgen.runtime.cases import Trial, question
from kgen.runtime.gradients import GradientQuestion, departs
from kgen.runtime.kernel import Kernel

CPU = torch.device("cpu")

PAIRS = """
kernel f(x: T[N]) -> (o: T[N, N]):
    tile i in N, j in N
    o[i, j] = x[i] * 2.0 + x[j]
"""
TIES = """
kernel f(x: T[M, N], w: T[N]) -> (y: T[M, N], r: T[M]):
    parallel m in M
    tile n in N
    a = maximum(x[m, n], w[n]) * abs(x[m, n]) + minimum(x[m, n], T(w[n]))
    y[m, n] = a + prod(1.0 + x[m, n], n) + exp(x[m, n])
    r[m] = max(exp(x[m, n]) * w[n], n) + min(x[m, n], n)
"""
CANCELS = """
kernel f(x: T[M, N], w: T[N]) -> (y: T[M], s: T[M]):
    parallel m in M
    tile n in N
    y[m] = sum(softmax(x[m, n] * w[n], n), n)
    s[m] = sum(x[m, n], n)
"""


def captures(self: Graph, a: Node, env: Mapping[str, Poly], spare: Any) -> Node:
    """Substitution that heeds no reduction over the index that it puts in."""
    if not a.axes & env.keys():
        return a
    if a.kind == "load":
        return self.load(a.tensor, [p.substitute(env) for p in a.at if isinstance(p, Poly)], a.dtype, a.span)
    return self.rebuild(a, tuple(captures(self, x, env, spare) for x in a.args))


def examine(text: str, backends: tuple[str, ...] = ("reference",), **how: Any) -> Report:
    return examine_kernel(kgen.loads(text)["f"], backends, CPU, direction="backward", quick=True, **how)


def asked(kernel: Kernel, values: str = "normal", dtype: str = "f32", n: int = 5) -> GradientQuestion:
    floats = tuple(t.name for t in kernel.signature.tensors if t.role == "in")
    found = question(
        kernel, Trial(dict.fromkeys(kernel.signature.dims, n), {"T": dtype}, values=values, wanted=floats), CPU
    )
    assert isinstance(found, GradientQuestion)
    return found


@pytest.mark.parametrize("text", [PAIRS, TIES, CANCELS])
@pytest.mark.parametrize("values", ["normal", "zeros"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_right_kernels(text: str, values: str, dtype: str) -> None:
    assert departs(asked(kgen.loads(text)["f"], values, dtype)) == ""


# ---- mistakes in derivation ------------------------------------------------------------------------------------------


def test_a_captured_index_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not examine(PAIRS).failures
    monkeypatch.setattr(Graph, "at_index", captures)
    report = examine(PAIRS, most_failures=1)
    (failure,) = report.failures
    assert failure.guilty == (DERIVED,)
    assert failure.messages[DERIVED].startswith("it is not the derivative: gradient of x at [")
    # The backends do compute what the derived kernel says.
    assert report.tallies["reference"].ok == report.trials


def test_the_command_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "pairs.kdsl"
    file.write_text(PAIRS)
    args = ["diff", str(file), "--backends", "reference", "--quick", "--direction", "backward"]
    args += ["--save", str(tmp_path)]
    assert CliRunner().invoke(app, args).exit_code == 0
    monkeypatch.setattr(Graph, "at_index", captures)
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)
    assert found["failures"][0]["guilty"] == [DERIVED]


def _twice(g: Graph, z: Node, dz: Node) -> tuple[Node, ...]:
    return tuple(g.where(g.compare("lt", *pair), g.const(0.0, z.dtype), dz) for pair in (z.args, z.args[::-1]))


def test_a_tie_that_is_shared_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal operands that receive the whole gradient each: no bound is wide enough for both choices."""
    monkeypatch.setitem(OPS, "maximum", _twice)
    for dtype in ("f32", "bf16"):
        assert not departs(asked(kgen.loads(TIES)["f"], "normal", dtype))
        assert "it is not the derivative" in departs(
            asked(kgen.loads(TIES.replace("abs(x[m, n])", "exp(x[m, n])"))["f"], "zeros", dtype)
        )


def test_a_small_error_is_found_whatever_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth, of which bf16 keeps nothing."""
    original = OPS["exp"]
    monkeypatch.setitem(OPS, "exp", lambda g, z, dz: tuple(g.scale(1.001, a) for a in original(g, z, dz)))  # pyright: ignore[reportArgumentType]  # exp has one operand
    for dtype in ("f32", "bf16"):
        assert "it is not the derivative" in departs(asked(kgen.loads(TIES)["f"], "normal", dtype))


def test_an_output_that_derivation_takes_for_unreached_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kgen.loads(CANCELS)["f"]
    assert not departs(asked(kernel))
    plain = adjoints.Sweep.run

    def forgets(self: adjoints.Sweep, outputs: list[adjoints.Write], *rest: Any) -> dict[Node, Node]:
        return plain(self, [w for w in outputs if w.tensor != "s"], *rest)

    monkeypatch.setattr(adjoints.Sweep, "run", forgets)
    kernel = kgen.loads(CANCELS)["f"]
    assert "gradient of x" in departs(asked(kernel))


def test_no_number_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A term that is 0 / 0 where autograd has a number."""
    text = "kernel f(x: T[N]) -> (y: T[N]):\n    tile n in N\n    y[n] = prod(x[n], n) + x[n]\n"
    assert not departs(asked(kgen.loads(text)["f"], "zeros"))
    from kgen.codegen.derive.rules import REDUCTIONS

    monkeypatch.setitem(REDUCTIONS, "prod", lambda g, z, dz: (g.mul(dz, g.div(z, z.args[0])),))
    assert not departs(asked(kgen.loads(text)["f"], "normal"))
    assert "got nan" in departs(asked(kgen.loads(text)["f"], "zeros"))


# ---- the derivative by itself ----------------------------------------------------------------------------------------


def test_derivatives_of_the_interpreter_in_parts() -> None:
    kernel = asked(kgen.loads(TIES)["f"]).training.kernel
    body = asked(kernel).training.derived.forward
    g = torch.Generator().manual_seed(1)
    tensors = {"x": torch.randn(4, 6, generator=g), "w": torch.randn(6, generator=g)}
    ups = {"y": torch.randn(4, 6, generator=g), "r": torch.randn(4, generator=g)}
    whole = interpreted_gradients(body, tensors, {}, ["w", "x"], ups)
    parts = interpreted_gradients(body, tensors, {}, ["w", "x"], ups, max_elements=6)
    for name in ("w", "x"):
        assert whole[name].dtype == torch.float64 and whole[name].shape == tensors[name].shape
        assert torch.allclose(whole[name], parts[name], rtol=1e-13, atol=1e-13)
    assert not any(t.requires_grad for t in tensors.values())
    assert not interpreted_gradients(body, tensors, {}, ["x"], {})["x"].any()
    leaf = tensors["x"].requires_grad_()
    assert not interpret(body, {**tensors, "x": leaf}, {}, precision="f64")["y"].requires_grad
    # Central differences along a direction, with no kinks within the step.
    h, direction = 1e-6, torch.randn(4, 6, generator=g, dtype=torch.float64)
    held = gradients.as_in_f32(body)

    def value(step: float) -> float:
        moved = {"x": leaf.detach().double() + step * direction, "w": tensors["w"].double()}
        out = interpret(held, moved, {}, precision="f64")
        return sum(float((out[n] * u).sum()) for n, u in ups.items())

    measured = (value(h) - value(-h)) / (2 * h)
    assert abs(measured - float((whole["x"] * direction).sum())) < 1e-6 * max(1.0, abs(measured))


@pytest.mark.parametrize("case", [c for c in CASES if c.differentiable], ids=lambda c: c.kernel)
def test_derivatives_of_the_interpreter_are_those_of_a_formula(case: Case) -> None:
    """Block by block, sums over programs among them."""
    for size in case.sizes:
        arguments = case.make(*size, case.dtypes[0], torch.Generator().manual_seed(3))
        c = call(UNPLANNED, case.kernel, arguments)
        outputs = interpret(c.kernel, c.tensors, c.scalars, precision="f64")
        g = torch.Generator().manual_seed(7)
        ups = {n: torch.randn(o.shape, generator=g).double() for n, o in outputs.items() if o.is_floating_point()}
        wanted = sorted(differentiable(c.kernel))
        mine = interpreted_gradients(c.kernel, c.tensors, c.scalars, wanted, ups, max_elements=20)
        theirs = autograd(case.formula, c, arguments, frozenset(wanted), ups)
        for name in wanted:
            assert worst(mine[name], theirs[name]) < 1e-8, name  # float64 on both sides, terms that partly cancel
