"""`kgen show --stage training,backward`: what can be derived, and comments that say why the rest cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kgen
from kgen.cli import app

OPS = Path(__file__).resolve().parents[1] / "ops"


def show(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["show", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_what_can_be_derived_is_shown_and_why_the_rest_is_not() -> None:
    code, out, err = show(f"{OPS / 'rope.kdsl'}:rope", "--stage", "training,backward", "--json", "--dtype", "f32")
    assert (code, err) == (0, "")
    for text in json.loads(out).values():
        head = text.splitlines()[:2]
        for line, name in zip(head, ("cos", "sin"), strict=True):
            assert line.startswith(f"# no gradient of '{name}': the gradient of '{name}' needs a scatter over programs")
            assert f"[K0503] at {OPS / 'rope.kdsl'}:" in line
    text = json.loads(out)["backward"]
    assert "(d_q: f32[" in text and "d_k: f32[" in text and "d_cos" not in text
    module = kgen.loads((OPS / "rope.kdsl").read_text() + "\n" + text)  # as it may be pasted
    assert "rope" in module


def test_positions_that_follow_the_tokens_leave_nothing_out() -> None:
    code, out, _ = show(f"{OPS / 'rope.kdsl'}:rope", "--stage", "backward", "--without", "positions")
    assert code == 0
    assert "no gradient of" not in out
    assert "d_cos[s, " in out


def test_a_backward_by_hand_that_lacks_a_gradient(tmp_path: Path) -> None:
    file = tmp_path / "k.kdsl"
    file.write_text(
        "kernel f(x: T[N], w: T[N]) -> (y: T[N]):\n    example N = 64\n    parallel n in N\n    y[n] = x[n] * w[n]\n\n"
        "backward f(w: T[N], d_y: T[N]) -> (d_x: T[N]):\n    parallel n in N\n    d_x[n] = w[n] * d_y[n]\n"
    )
    code, out, _ = show(file, "--stage", "backward")
    assert code == 0
    first, second, *_ = out.splitlines()
    assert first.startswith("# no gradient of 'w': ") and "[K0507] at" in first
    assert second.startswith("# written by hand")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "f(x: T[N], w: T[N]) -> (y: i64[N]):\n    example N = 64\n    parallel n in N\n    y[n] = i64(x[n] * w[n])",
            ["K0501"],
        ),
        (
            "f(x: T[V, N], z: T[V, N], at: i64[M]) -> (y: T[M, N]):\n"
            "    example M = 4, N = 64, V = 9\n    parallel m in M\n    tile n in N\n"
            "    y[m, n] = x[at[m], n] * z[at[m], n]",
            ["K0503", "K0503"],
        ),
    ],
)
def test_where_nothing_can_be_derived_every_reason_is_told_once(tmp_path: Path, body: str, says: list[str]) -> None:
    file = tmp_path / "k.kdsl"
    file.write_text(f"kernel {body}\n")
    code, out, err = show(file, "--stage", "backward")
    assert (code, out) == (1, "")
    assert [line[6:11] for line in err.splitlines() if line.startswith("error[")] == says
