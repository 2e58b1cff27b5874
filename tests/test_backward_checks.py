"""Hand-written backwards: their grammar and layout, and what the checker says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from backward_kit import NORM_BACKWARD, mistakes, norm

from kgen.dsl import ast
from kgen.dsl.check import backward_of, check_module
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.format import format_module, format_source
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text

# ---- grammar and layout ----------------------------------------------------------------------------------------------


def test_the_word_is_not_reserved() -> None:
    text = "kernel backward(backward: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = 2.0 * backward[n]\n"
    text += "\nbackward backward(d_y: T[N], backward: T[N]) -> (d_backward: T[N]):\n    parallel n in N\n"
    text += "    backward_ = 2.0\n    d_backward[n] = backward_ * d_y[n]\n"
    assert not mistakes(text)
    module = parse_text(text)
    assert [k.name for k in module.kernels] == [b.name for b in module.backwards] == ["backward"]
    assert format_source(text) == text and not mistakes(format_module(module))


def test_layout_is_that_of_a_kernel() -> None:
    ragged = (
        "backward   f[T:f32|bf16, k : -1|2,flag:True](d_y:T[N],\n  # kept\n  x: T[N]\n) -> (d_x: T[N]):\n"
        "  parallel n in N\n  # a comment\n  d_x[n]=d_y[n]*x[n]\n"
    )
    laid = format_source(ragged)
    assert laid.startswith("backward f[T: f32 | bf16, k: -1 | 2, flag: true](d_y: T[N],\n    # kept\n    x: T[N]\n")
    assert format_source(laid) == laid and "    # a comment\n    d_x[n] = d_y[n] * x[n]\n" in laid
    long = format_source(norm())
    assert "\nbackward norm(\n    x: T[*M, N],\n    w: W[N]?,\n" in long and format_source(long) == long
    (kept,) = parse_text(ragged).backwards
    assert isinstance(kept, ast.Backward) and [c.name for c in kept.serves] == ["k", "flag"]
    assert format_module(parse_text(ragged)).startswith("backward f[T: f32 | bf16, k: -1 | 2, flag: true](d_y")


@pytest.mark.parametrize(
    ("text", "code", "place", "words"),
    [
        ("backward f(x: T[N])\n    y[n] = 1\n", "K0123", ")", "this backward line must end"),
        ("backward (x: T[N]):\n    y[n] = 1\n", "K0118", "backward", "written backward name("),
        ("backwards f(x: T[N]):\n    y[n] = 1\n", "K0118", "backwards", "did you mean 'backward'"),
        ("kernel f(x: T[N]) -> (y: T[N]):\n    backward g():\n        y[n] = 1\n", "K0125", "backward", "inside"),
        ("kernel f(x: T[N]) -> (y: T[N]):\n    y[n] = (1\nbackward f(x: T[N]):\n    y[n] = 1\n", "K0106", "(", "never"),
        ("kernel f[a: true](x: T[N]):\n    x[n] = 1\n", "K0111", "true", "keyword"),
        ('backward f(x: T[N]):\n    """Nothing."""\n', "K0109", "f", "backward 'f' has no statements"),
    ],
)  # fmt: skip
def test_mistakes_of_grammar(text: str, code: str, place: str, words: str) -> None:
    ((found, under, message),) = mistakes(text)
    assert (found, under) == (code, place) and words in message


# ---- what the checker says -------------------------------------------------------------------------------------------


def test_a_right_one_is_right() -> None:
    assert not mistakes(norm())
    # One that is for some calls only.
    assert not mistakes(norm(1.0, (", plain: const bool", ""), ("if plain", "if true")))
    assert not mistakes(norm(1.0, ("norm(", "norm[T: f16 | bf16, plain: false | true]("), ("if plain", "if plain")))
    assert not mistakes(norm(1.0, ("T[", "bf16["), ("W[", "f32[")))
    assert not mistakes(norm(1.0, ("f32[*M]", "f64[*M]"), ("norm(", "norm[T: f64](")))


@pytest.mark.parametrize(
    ("old", "new", "code", "place", "words"),
    [
        ("norm(", "norn(", "K0230", "norn", "did you mean 'norm'"),
        ("d_y: T", "dy: T", "K0231", "dy: T[*M, N]", "did you mean 'd_y'"),
        ("plain: const bool", "eps: f32, blank: f32, plain: const bool", "K0231", "blank: f32", "nothing that kernel"),
        ("d_w: W[N]", "d_eps: f32[]", "K0231", "d_eps: f32[]", "outputs may be d_x, d_w"),
        ("d_y: T[*M, N]", "d_y: f32[*M, N]", "K0232", "d_y: f32[*M, N]", "write T for f32"),
        ("d_w: W[N]", "d_w: T[N]", "K0232", "d_w: T[N]", "the gradient of 'w' is W"),
        ("d_y: T[*M, N]", "d_y: U[*M, N]", "K0232", "d_y: U[*M, N]", "write T for U"),
        ("x: T[*M, N], w", "x: T[M, N], w", "K0232", "x: T[M, N]", "declare it x: T[*M, N]"),
        ("d_x: T[*M, N]", "d_x: T[*M, N // 2]", "K0232", "d_x: T[*M, N // 2]", "the gradient of 'x' is T[*M, N]"),
        ("x: T[*M, N], w", "x: T[*M, N]?, w", "K0232", "x: T[*M, N]?", "not optional"),
        ("d_y: T[*M, N]", "d_y: T[*M, N]?", "K0232", "d_y: T[*M, N]?", "cannot be optional"),
        ("d_y: T[*M, N]", "d_y: f32", "K0232", "d_y: f32", "declare it d_y: T[*M, N]"),
        ("plain: const bool", "plain: bool", "K0232", "plain: bool", "declare it plain: const bool"),
        ("plain: const bool", "plain: const bool, eps: f64", "K0232", "eps: f64", "write f32 for f64"),
        ("saved_r", "saved_q", "K0233", "saved_q: f32[*M]", "the values it names: a, r"),
        ("saved_r: f32[*M]", "saved_r: i32[*M]", "K0233", "saved_r: i32[*M]", "declare it saved_r: f32[*M]"),
        ("saved_r: f32[*M]", "saved_r: f64[*M]", "K0233", "saved_r: f64[*M]", "declare it saved_r: f32[*M]"),
        ("saved_r", "saved_a", "K0233", "saved_a: f32[*M]", "carries tile index 'n'"),
        ("norm(", "norm[Q: f32](", "K0234", "Q: f32", "dtype variables: T, W"),
        ("norm(", "norm[eps: 1.0](", "K0234", "eps: 1.0", "const parameters: plain"),
        ("norm(", "norm[plain: 1](", "K0234", "plain: 1", "write bool literals"),
        ("norm(", "norm[T: i32](", "K0234", "norm", "no dtype fits T"),
    ],
)
def test_mistakes(old: str, new: str, code: str, place: str, words: str) -> None:
    found = mistakes(norm(1.0, (old, new)))
    assert [(c, p) for c, p, _ in found][:1] == [(code, place)], found
    assert words in found[0][2]
    assert {c for c, _, _ in found} == {code}


def test_two_backwards_of_one_kernel() -> None:
    ((code, place, message),) = mistakes(norm() + NORM_BACKWARD.replace("SCALE", "1.0"))
    assert (code, place) == ("K0200", "norm") and "two backwards" in message


def test_kernels_that_can_have_none() -> None:
    text = "kernel f(x: inout T[N]):\n    parallel n in N\n    x[n] = 2.0 * x[n]\n\n"
    text += "backward f(x: T[N]) -> (d_x: T[N]):\n    parallel n in N\n    d_x[n] = x[n]\n"
    assert mistakes(text)[0][:2] == ("K0230", "f")
    text = "kernel f(x: T[N], k: i32[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n] * k[n]\n\n"
    text += "backward f(x: T[N], d_y: T[N]) -> (d_k: i32[N]):\n    parallel n in N\n    d_k[n] = i32(x[n] * d_y[n])\n"
    assert mistakes(text)[0][:2] == ("K0231", "d_k: i32[N]")


def test_its_body_is_checked_along_every_path() -> None:
    assert not mistakes(norm())
    # Without w there is no d_w: a store to it is a mistake there, and so is an element of it that nothing stores.
    always = norm(1.0, ("        d_w[n] +=", "    d_w[n] +="), ("    else:\n        g = d_y[m, n]\n    d_x", "    d_x"))
    assert {c for c, _, _ in mistakes(always)} == {"K0212", "K0201"}
    never = norm(1.0, ("        d_w[n] += 1.0 * d_y[m, n] * x[m, n] * r\n", ""))
    assert [c[:3] for c, _, _ in mistakes(never)] == ["K04"]
    beyond = norm(1.0, ("w[n]\n", "w[n + 1]\n"))
    assert mistakes(beyond)[0][:2] == ("K0301", "w[n + 1]")


def test_an_imported_kernel_brings_its_own(tmp_path: Path) -> None:
    (tmp_path / "norms.kdsl").write_text(norm(), "utf-8")
    (tmp_path / "main.kdsl").write_text("from norms import norm\n", "utf-8")
    (imported,) = load(tmp_path / "main.kdsl").module.imported
    assert backward_of(imported.module, "norm") is not None
    # A file cannot give a kernel of another file a second one.
    (tmp_path / "main.kdsl").write_text(f"from norms import norm\n{NORM_BACKWARD.replace('SCALE', '1.0')}", "utf-8")
    diagnostics = Diagnostics()
    check_module(load(tmp_path / "main.kdsl").module, diagnostics)
    (found,) = diagnostics.items
    assert found.code == "K0230" and found.help == "a backward stands in the file of its kernel"
