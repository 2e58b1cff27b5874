"""What the command line does with files that hold ops."""

from __future__ import annotations

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


def test_check_and_fmt(mlp: Path) -> None:
    assert run("check", mlp)[0] == 0
    assert run("fmt", "--check", mlp)[0] == 0
    mlp.write_text(MLP.replace("y[c] = a @ down.T", "y[c] = a @ down"), encoding="utf-8")
    code, out = run("check", mlp)
    assert code == 1 and "error[K0604]: the inner dimensions of '@' differ" in out
