"""What the command line does with files that hold ops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from host_kit import MLP
from typer.testing import CliRunner

from kgen.cli import app

ROOT = Path(__file__).resolve().parents[1]
LINEAR = ROOT / "ops" / "fused_linear_cross_entropy.kdsl"


def run(*args: object) -> tuple[int, str]:
    """Exit code and all output of `kgen args`."""
    result = CliRunner().invoke(app, [str(a) for a in args])
    return result.exit_code, result.output


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """A file with two kernels and an op."""
    path = tmp_path / "mlp.kdsl"
    path.write_text(MLP, encoding="utf-8")
    return path


def test_show_the_plan(mlp: Path) -> None:
    code, out = run("show", mlp, "--stage", "plan", "--dtype", "bf16")
    assert code == 0, out
    assert "    for c_2 in chunks(B):\n" in out and "alloc a: bf16[c, F]" in out and "d_up += d_a.T @ x[c_2]" in out
    code, out = run("show", f"{LINEAR}:fused_linear_cross_entropy", "--stage", "plan", "--without", "bias,class_weight")
    assert code == 0, out
    assert out.startswith("# B = 8192, 512 MiB: c of 2048 rows\n") and "b_sum" not in out
    code, out = run(
        "show", f"{LINEAR}:fused_linear_cross_entropy", "-s", "plan", "--dim", "B=1_000_000", "--dtype", "bf16"
    )
    assert code == 0 and "alloc w_sum_sum: f32[V, H]" in out  # more chunks than are summed in bf16
    code, out = run(
        "show", f"{LINEAR}:fused_linear_cross_entropy", "-s", "plan", "--const", "narrow=true", "--dtype", "f16"
    )
    assert code == 0 and "d_w = times_both(g=w_sum, s=d_loss, t=factor)" in out


def test_an_op_is_shown_by_its_plan(mlp: Path, tmp_path: Path) -> None:
    assert run("show", f"{mlp}:mlp") == run("show", f"{mlp}:mlp", "--stage", "plan")
    own = tmp_path / "own.kdsl"
    own.write_text(
        "op f(x: T[B, H], w: T[V, H]) -> (y: T[B, V]):\n    forward:\n        y = x @ w.T\n", encoding="utf-8"
    )
    assert run("show", own) == (0, "plan f\nforward:\n    alloc y: bf16[B, V]\n    y = x @ w.T\n    return y\n")
    code, out = run("show", "fused_linear_cross_entropy", "--gradients", "x")
    assert code == 0 and "plan fused_linear_cross_entropy\n" in out
    code, out = run("show", mlp)
    assert code == 2 and "has 2 kernels (silu_, silu_gradient_) and 1 op (mlp); name one, as in" in " ".join(
        out.split()
    )


def test_show_the_source_and_tree_of_an_op(mlp: Path) -> None:
    code, out = run("show", f"{mlp}:mlp", "--stage", "source,ast")
    assert code == 0, out
    assert "op mlp(x: T[*B, H]" in out and out.count("    backward(d_y):") == 1 and "Chunks(index='c'" in out


def test_what_an_op_does_not_have(mlp: Path) -> None:
    for args, message in [
        ((f"{mlp}:mlp", "--stage", "cuda"), "mlp is an op, whose stages are source, ast, plan"),
        ((f"{mlp}:silu_", "--stage", "plan"), "only an op has a plan; its ops: mlp"),
        ((ROOT / "ops" / "rms_norm.kdsl", "--stage", "plan"), "has none"),
        ((f"{mlp}:mlp", "--stage", "plan", "--dim", "Q=3"), "has no dimension 'Q'"),
    ]:
        code, out = run("show", *args)
        assert code == 2 and message in " ".join(out.split()), out


def test_show_the_plan_of_a_frozen_weight() -> None:
    op = f"{LINEAR}:fused_linear_cross_entropy"
    code, every = run("show", op, "--stage", "plan")
    assert code == 0 and "w_sum += logits.T @ x[c]" in every
    code, out = run("show", op, "--stage", "plan", "--gradients", "x")
    assert code == 0 and "w_sum" not in out and "x_sum[c] = logits @ w\n" in out
    assert out.endswith("    return d_x = x_sum\n")
    code, out = run("show", op, "--stage", "plan", "--gradients", "none")
    assert code == 0 and "x_sum" not in out and "backward" not in out
    code, cost = run("show", op, "--stage", "cost", "--gradients", "x")
    assert code == 0 and "w_sum" not in cost
    for args, message in [
        ((op, "-s", "plan", "--gradients", "target"), "no tensor 'target' that may have a gradient; there is x, w"),
        ((op, "-s", "plan", "--gradients", ","), "--gradients: name parameters"),
        ((op, "-s", "source", "--gradients", "x"), "for the plan and the cost of an op"),
        ((f"{LINEAR}:kept_mass", "-s", "cost", "--gradients", "x"), "kept_mass is a kernel"),
    ]:
        code, out = run("show", *args)
        assert code != 0 and message in " ".join(out.split()), out


def test_ops_and_kernels_by_name(mlp: Path) -> None:
    assert run("check", f"{mlp}:mlp") == (0, "1 file, 1 op: no errors\n")
    assert run("check", f"{mlp}:silu_") == (0, "1 file, 1 kernel: no errors\n")
    assert run("check", mlp) == (0, "1 file, 2 kernels, 1 op: no errors\n")
    code, out = run("check", mlp, "--json")
    assert code == 0 and json.loads(out)["ops"] == 1
    mlp.write_text(MLP.replace("y[c] = a @ down.T", "y[c] = a @ down.T\n            unused = silu"), encoding="utf-8")
    assert run("check", f"{mlp}:silu_")[0] == 0 and run("check", f"{mlp}:mlp")[0] == 1
    spare = "            spare = x[c] @ up.T\n            y[c] = a @ down.T"
    mlp.write_text(MLP.replace("            y[c] = a @ down.T", spare), encoding="utf-8")
    code, out = run("check", f"{mlp}:mlp")
    assert code == 0 and "warning[W0101]: value 'spare' is never used" in out
    assert "W0101" not in run("check", f"{mlp}:silu_")[1]
    those = f"name those that it calls, as in: kgen diff {mlp}:silu_ {mlp}:silu_gradient_. What"
    own = mlp.with_name("own.kdsl")
    own.write_text(
        "op f(x: T[B, H], w: T[V, H]) -> (y: T[B, V]):\n    forward:\n        y = x @ w.T\n", encoding="utf-8"
    )
    for args, message in [
        (("check", f"{mlp}:mpl"), "has no kernel or op 'mpl'; did you mean 'mlp'?"),
        (("diff", f"{mlp}:mlp"), f"'mlp' is an op, and kgen diff examines kernels; {those}"),
        (("diff", mlp, "--kernel", "mlp"), f"'mlp' is an op, and kgen diff examines kernels; {those}"),
        (("diff", own), "'f' is an op, and kgen diff examines kernels; it calls none. What"),
    ]:
        code, out = run(*args)
        assert code == 2 and message in " ".join(out.split()), out


def test_check_and_fmt(mlp: Path) -> None:
    assert run("check", mlp)[0] == 0
    assert run("fmt", "--check", mlp)[0] == 0
    mlp.write_text(MLP.replace("y[c] = a @ down.T", "y[c] = a @ down"), encoding="utf-8")
    code, out = run("check", mlp)
    assert code == 1 and "error[K0604]: the inner dimensions of '@' differ" in out
