"""Hand-written backwards: their grammar and layout, what the checker says of them, and that calls take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_kit import randn, rms_formula, worst
from typer.testing import CliRunner

import kgen
from kgen.cli import app
from kgen.codegen.derive import derive
from kgen.codegen.derive.paste import pasted
from kgen.codegen.derive.written import by_hand
from kgen.dsl import ast
from kgen.dsl.check import Specialization, check_module, elaborate, signature_of
from kgen.dsl.diagnostics import Diagnostics, DslError, KgenError
from kgen.dsl.dtypes import BF16, F32
from kgen.dsl.format import format_module, format_source
from kgen.dsl.parser import parse_text
from kgen.runtime import autograd, events

OPS = Path(__file__).resolve().parent.parent / "ops"

NORM = """
kernel norm(x: T[*M, N], w: W[N]?, eps: f32 = 1e-6, plain: const bool = true) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    r = rsqrt(mean(x[m, n] * x[m, n], n) + eps)
    a = x[m, n] * r
    if w and plain:
        y[m, n] = a * w[n]
    elif w:
        y[m, n] = a * (1.0 + w[n])
    else:
        y[m, n] = a
"""

# Right but for `SCALE`, which the tests set: an edit that must show.
NORM_BACKWARD = """
backward norm(
    x: T[*M, N], w: W[N]?, saved_r: f32[*M], d_y: T[*M, N], plain: const bool
) -> (d_x: T[*M, N], d_w: W[N]):
    parallel m in M
    tile n in N
    r = saved_r[m]
    if w:
        if plain:
            g = d_y[m, n] * w[n]
        else:
            g = d_y[m, n] * (1.0 + w[n])
        d_w[n] += SCALE * d_y[m, n] * x[m, n] * r
    else:
        g = d_y[m, n]
    d_x[m, n] = r * g - sum(g * x[m, n], n) * r * r * r / N * x[m, n]
"""


def norm(scale: float = 1.0, *edits: tuple[str, str]) -> str:
    """The kernel with its backward, edited; the gradient of w that it gives is `scale` times the right one."""
    text = NORM_BACKWARD.replace("SCALE", str(scale))
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return NORM + text


def mistakes(text: str) -> list[tuple[str, str, str]]:
    """Code, text under the caret and message of everything that is wrong in a file; each with help."""
    diagnostics = Diagnostics()
    try:
        check_module(parse_text(text, "f.kdsl"), diagnostics)
    except DslError as error:
        diagnostics.items = list(error.diagnostics)
    assert all(d.help for d in diagnostics.items)
    return [(d.code, d.span.text, f"{d.message}; {d.help}") for d in diagnostics.sorted()]


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


# ---- calls take it ---------------------------------------------------------------------------------------------------


def run(kernel: Any, backend: str | None, dtype: torch.dtype, **arguments: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The result of a call and the gradient of every floating-point tensor, for a random gradient of the result."""
    given = {
        n: v.to(dtype).requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in arguments.items()
    }
    y = kernel(**given, backend=backend)
    leaves = {n: v for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    found = torch.autograd.grad(y, list(leaves.values()), randn(*y.shape, seed=9, dtype=y.dtype))
    return y, dict(zip(leaves, found, strict=True))


def expected(formula: Callable[..., Any], dtype: torch.dtype, **arguments: Any) -> dict[str, torch.Tensor]:
    """Torch's gradients of an independent formula in float64, of the same values."""
    given = {
        n: v.to(dtype).double().requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in arguments.items()
    }
    y = formula(**given)
    leaves = {n: v for n, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    found = torch.autograd.grad(y, list(leaves.values()), randn(*y.shape, seed=9, dtype=dtype).double())
    return dict(zip(leaves, found, strict=True))


def close(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], size: int) -> bool:
    """Whether every gradient is within the bound of autograd_kit for sums over `size` elements."""
    return all(worst(found[n], e, size) <= 1.0 for n, e in wanted.items())


def texts(kernel: Any, *values: Any) -> tuple[str, str]:
    """The training form and the backward of a call, as text."""
    t = autograd.training(kernel, list(values), autograd.requiring(kernel, values))
    return t.derived.forward_text, t.derived.backward_text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("plain", [True, False])
def test_values(backend: str, dtype: torch.dtype, plain: bool) -> None:
    def formula(x: Any, w: Any, plain: bool) -> Any:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (w if plain else 1.0 + w)

    arguments = {"x": randn(3, 5, 37), "w": randn(37, seed=1), "plain": plain}
    right = expected(formula, dtype, **arguments)
    _, found = run(kgen.loads(norm()).norm, backend, dtype, **arguments)
    assert close(found, right, 3 * 5 * 37)
    _, found = run(kgen.loads(norm(2.0)).norm, backend, dtype, **arguments)
    assert close(found, {"x": right["x"], "w": 2.0 * right["w"]}, 3 * 5 * 37)
    assert not close(found, right, 3 * 5 * 37)


def test_without_the_optional_tensor(backend: str) -> None:
    x = randn(4, 19)
    right = expected(lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), torch.float32, x=x)
    _, found = run(
        kgen.loads(norm(1.0, ("g = d_y[m, n]\n    d_x", "g = 3.0 * d_y[m, n]\n    d_x"))).norm, backend, x.dtype, x=x
    )
    assert close(found, {"x": 3.0 * right["x"]}, 76)


def test_float64_gradcheck_judges_it() -> None:
    x, w = randn(2, 5, dtype=torch.float64).requires_grad_(), randn(5, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(kgen.loads(norm()).norm, (x, w))
    assert not torch.autograd.gradcheck(kgen.loads(norm(2.0)).norm, (x, w), raise_exception=False)
    # saved_r, declared f32, is f64 there.
    assert "saved_r: f64[*M]" in texts(kgen.loads(norm()).norm, x, w, 1e-6, True)[1]


def test_what_no_wanted_gradient_needs_is_cut() -> None:
    kernel = kgen.loads(norm()).norm
    x, w = randn(2, 5), randn(5, seed=1)
    forward, backward = texts(kernel, x, w.clone().requires_grad_(), 1e-6, True)
    assert "saved_r[m] = r" in forward
    assert "-> (d_w: f32[N])" in backward and " w: " not in backward and "sum(" not in backward
    _, backward = texts(kernel, x.clone().requires_grad_(), w, 1e-6, True)
    assert "-> (d_x: f32[*M, N])" in backward and "+=" not in backward
    with events.launches() as seen:
        (d_w,) = torch.autograd.grad(kernel(x, v := w.clone().requires_grad_()).sum(), v)
    assert [e.kernel for e in seen] == ["norm", "norm_backward"] and d_w.shape == (5,)
    # Neither residual: nothing is saved that is not read.
    text = norm(1.0, ("x[m, n] * r\n    else", "x[m, n] * rsqrt(mean(x[m, n] * x[m, n], n) + 1e-6)\n    else"))
    forward, backward = texts(kgen.loads(text).norm, x, w.clone().requires_grad_(), 1e-6, True)
    assert "saved" not in forward and "saved" not in backward


def test_a_gradient_that_it_lacks() -> None:
    text = norm(1.0, (", d_w: W[N]", ""), ("        d_w[n] += 1.0 * d_y[m, n] * x[m, n] * r\n", ""))
    kernel = kgen.loads(text).norm
    x, w = randn(3, 7).requires_grad_(), randn(7, seed=1)
    kernel(x, w).sum().backward()
    assert x.grad is not None
    with pytest.raises(KgenError, match=r"K0507.*gradient of 'w'") as caught:
        kernel(x, w.requires_grad_())
    assert "d_w: f32[N]" in str(caught.value) and "backward norm" in str(caught.value)
    with torch.no_grad():
        kernel(x, w)


@pytest.mark.parametrize(
    ("edits", "given", "served"),
    [
        ((("norm(", "norm[T: bf16]("),), {}, False),
        ((("norm(", "norm[T: bf16 | f32]("),), {}, True),
        ((("T[", "bf16["),), {}, False),
        ((("T[", "f32["), ("W[", "f32[")), {}, True),
        ((("norm(", "norm[plain: true]("),), {"plain": False}, False),
        ((("norm(", "norm[plain: false]("),), {"plain": False}, True),
        # What the header leaves out, a call leaves out.
        (((", plain: const bool", ""), ("if plain", "if true")), {"plain": False}, False),
        (((", plain: const bool", ""), ("if plain", "if true")), {}, True),
        ((("N]?", "N]"), ("    if w:", "    if true:")), {"w": None}, False),
        ((("N]?", "N]"), ("    if w:", "    if true:")), {}, True),
    ],
)
def test_calls_that_it_is_not_for_are_derived(
    edits: tuple[tuple[str, str], ...], given: dict[str, Any], served: bool
) -> None:
    kernel = kgen.loads(norm(8.0, *edits)).norm
    arguments = {"x": randn(3, 7).requires_grad_(), "w": randn(7, seed=1).requires_grad_(), "eps": 1e-6, "plain": True}
    _, backward = texts(kernel, *(arguments | given).values())
    assert ("8.0 * d_y" in backward) == served


# ---- gathers ---------------------------------------------------------------------------------------------------------

LOOKUP = """
kernel lookup(table: T[V, N], word: i64[M]) -> (y: T[M, N]):
    parallel m in M
    tile n in N
    y[m, n] = table[word[m], n]
"""
BY_SUMS = """
backward lookup(table: T[V, N], word: i64[M], d_y: T[M, N]) -> (d_table: T[V, N]):
    parallel m in M
    tile v in V, n in N
    d_table[v, n] += where(word[m] == v, d_y[m, n], 0.0)
"""
BY_COMPARISON = """
backward lookup(table: T[V, N], word: i64[M], d_y: T[M, N]) -> (d_table: T[V, N]):
    parallel v in V, n in N
    tile m in M
    d_table[v, n] = sum(where(word[m] == v, d_y[m, n], 0.0), m)
"""


@pytest.mark.parametrize("written", [BY_SUMS, BY_COMPARISON], ids=["sums", "comparison"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gather_that_cannot_be_derived(written: str, dtype: torch.dtype, backend: str) -> None:
    arguments = {"table": randn(5, 9), "word": torch.tensor([0, 3, 3, 1, 0, 3, 4])}
    with pytest.raises(KgenError, match=r"K0503[^$]*write its backward by hand"):
        run(kgen.loads(LOOKUP).lookup, backend, dtype, **arguments)
    y, found = run(kgen.loads(LOOKUP + written).lookup, backend, dtype, **arguments)
    assert torch.equal(y, arguments["table"].to(dtype)[arguments["word"]])
    right = expected(lambda table, word: table[word], dtype, **arguments)
    assert right["table"][2].eq(0).all() and close(found, right, 7)


def test_where_it_does_not_serve_the_reason_is_told() -> None:
    kernel = kgen.loads(LOOKUP + BY_SUMS.replace("T[", "bf16[")).lookup
    with pytest.raises(KgenError, match="K0503") as caught:
        kernel(randn(5, 9).requires_grad_(), torch.tensor([0, 3]))
    assert "is for other calls: here T is f32" in str(caught.value)


# ---- what it may take ------------------------------------------------------------------------------------------------


def test_outputs_as_they_are_and_values_of_several_kinds(backend: str) -> None:
    text = """
fn gain(a) = 3.0 * a

kernel peaks(x: T[*M, K, N]) -> (y: T[*M, K, N], best: i64[*M, K]):
    parallel k in K, m in M
    tile n in N
    top = argmax(x[m, k, n], n)
    low = sum(x[m, k, n], n)
    low = low * low + 1.0
    best[m, k] = top
    y[m, k, n] = gain(x[m, k, n]) * low

backward peaks(
    x: T[*M, K, N], y: T[*M, K, N], best: i64[*M, K], saved_low: f32[*M, K], saved_top: i64[*M, K], d_y: T[*M, K, N]
) -> (d_x: T[*M, K, N]):
    parallel k in K, m in M
    tile n in N
    a = sum(d_y[m, k, n] * y[m, k, n], n) / saved_low[m, k] * 2.0 * sum(x[m, k, n], n)
    zero = where(best[m, k] == saved_top[m, k], 0.0, nan)
    d_x[m, k, n] = gain(d_y[m, k, n]) * saved_low[m, k] + a + zero
"""
    kernel = kgen.loads(text).peaks
    x = randn(2, 3, 4, 11).requires_grad_()
    y, best = kernel(x, backend=backend)
    assert y.requires_grad and not best.requires_grad
    g = randn(2, 3, 4, 11, seed=9)
    (found,) = torch.autograd.grad(y, x, g, retain_graph=True)
    right = expected(lambda x: 3.0 * x * (x.sum(-1, keepdim=True).square() + 1.0), torch.float32, x=x.detach())
    assert close({"x": found}, right, x.numel())
    with torch.no_grad():
        y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)


def test_names_that_the_forward_uses_itself() -> None:
    text = """
kernel f(x: T[N], d_y: T[N]) -> (y: T[N]):
    parallel n in N
    saved_a = x[n] * x[n]
    a = saved_a * d_y[n]
    y[n] = a

backward f(x: T[N], d_y: T[N], saved_a: f32[N], saved_saved_a: f32[N], d_y_2: T[N]) -> (d_x: T[N], d_d_y: T[N]):
    parallel n in N
    d_x[n] = 2.0 * saved_a[n] / x[n] * d_y_2[n]
    d_d_y[n] = saved_saved_a[n] * d_y_2[n]
"""
    arguments = {"x": randn(9), "d_y": randn(9, seed=1)}
    _, found = run(kgen.loads(text).f, None, torch.float32, **arguments)
    assert close(found, expected(lambda x, d_y: x * x * d_y, torch.float32, **arguments), 9)


def test_a_value_of_one_path_only() -> None:
    """Where w is absent there is no such value, nor a use of it."""
    text = """
kernel f(x: T[M, N], w: T[N]?) -> (y: T[M, N]):
    parallel m in M
    tile n in N
    if w:
        s = sum(x[m, n] * w[n], n)
        y[m, n] = s * x[m, n]
    else:
        y[m, n] = x[m, n]

backward f(x: T[M, N], w: T[N]?, saved_s: f32[M], d_y: T[M, N]) -> (d_x: T[M, N], d_w: T[N]):
    parallel m in M
    tile n in N
    if w:
        t = sum(d_y[m, n] * x[m, n], n)
        d_x[m, n] = saved_s[m] * d_y[m, n] + t * w[n]
        d_w[n] += t * x[m, n]
    else:
        d_x[m, n] = d_y[m, n]
"""
    assert not mistakes(text)
    kernel = kgen.loads(text).f
    arguments = {"x": randn(3, 7), "w": randn(7, seed=1)}
    _, found = run(kernel, None, torch.float32, **arguments)
    right = expected(lambda x, w: (x * w).sum(-1, keepdim=True) * x, torch.float32, **arguments)
    assert close(found, right, 21)
    assert "saved_s" not in "".join(texts(kernel, arguments["x"].requires_grad_(), None))


# ---- torch -----------------------------------------------------------------------------------------------------------


def test_torch_compile_and_func() -> None:
    torch._dynamo.reset()
    kernel = kgen.loads(norm(2.0)).norm
    x, w = randn(3, 17), randn(17, seed=1)
    g = randn(3, 17, seed=9)
    found = []
    for f in (kernel, torch.compile(kernel, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        found.append(torch.autograd.grad(f(*leaves), leaves, g))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    d_w = torch.func.grad(lambda w: (kernel(x, w) * g).sum())(w)
    assert worst(d_w, found[0][1].double(), 51) <= 1.0


# ---- the command line: what is printed is what may be pasted ---------------------------------------------------------


def printed(path: Path, *options: str) -> str:
    """What kgen show prints."""
    result = CliRunner().invoke(app, ["show", str(path), "--stage", *options], prog_name="kgen")
    assert result.exit_code == 0, result.output
    return result.output


def test_pasted_and_edited(tmp_path: Path, backend: str) -> None:
    """The printed backward of a shipped kernel, pasted and edited, wins on every executor."""
    path = tmp_path / "rms_norm.kdsl"
    path.write_text((OPS / "rms_norm.kdsl").read_text("utf-8"), "utf-8")
    before = printed(path, "backward", "--dtype", "f32")
    assert before.startswith("backward rms_norm(\n    x: f32[*M, N],\n")
    arguments = {"x": randn(5, 67), "w": randn(67, seed=1), "offset": 1.0}
    right = expected(rms_formula, torch.float32, **arguments)
    for edited, factor in ((before, 1.0), (before.replace("d_w[n] += ", "d_w[n] += 2.0 * "), 2.0)):
        path.write_text((OPS / "rms_norm.kdsl").read_text("utf-8") + "\n" + edited, "utf-8")
        assert CliRunner().invoke(app, ["check", str(path)], prog_name="kgen").exit_code == 0
        _, found = run(kgen.load(path).rms_norm, backend, torch.float32, **arguments)
        assert close(found, {"x": right["x"], "w": factor * right["w"]}, 5 * 67)
    after = printed(path, "backward", "--dtype", "f32")
    assert after.startswith(f"# written by hand, at {path}:") and "d_w[n] += 2.0 * " in after
    path.write_text((OPS / "rms_norm.kdsl").read_text("utf-8") + "\n" + after, "utf-8")
    assert "2.0" in printed(path, "backward", "--dtype", "f32")
    assert "saved_r[m] = r" in printed(path, "training", "--dtype", "f32")
    other = printed(path, "backward", "--dtype", "bf16")
    assert other.startswith("# derived, as the one at ") and "here T is bf16\nbackward rms_norm(" in other


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rms_norm.kdsl:rms_norm", ("--const", "round_first=true")),
        ("rms_norm.kdsl:rms_norm", ("--without", "w")),
        ("add_rms_norm.kdsl:add_rms_norm", ()),
        ("layer_norm.kdsl:layer_norm", ()),
        ("softmax.kdsl:log_softmax", ()),
        ("swiglu.kdsl:geglu", ("--dtype", "f64")),
        ("softmax.kdsl:softmax", ("--dtype", "f16")),
    ],
)
def test_what_is_printed_is_taken_as_it_is(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    file, kernel = name.split(":")
    for source in OPS.glob("*.kdsl"):  # with those that it imports
        (tmp_path / source.name).write_bytes(source.read_bytes())
    path = tmp_path / file
    text = printed(Path(f"{path}:{kernel}"), "backward", *options)
    path.write_text(path.read_text("utf-8") + "\n" + text, "utf-8")
    again = printed(Path(f"{path}:{kernel}"), "backward", *options)
    first, rest = again.split("\n", 1)
    assert first.startswith("# written by hand") and rest == text


def test_a_kernel_named_in_brackets_only_where_it_must() -> None:
    text = """
kernel f(x: T[N], b: B[N]?, k: i32[N]?, s: const i32 = 2, up: const bool = false) -> (y: T[N]):
    parallel n in N
    a = x[n] * s
    if k:
        a = B(a) + 1.0
    if b:
        a = a + b[n]
    y[n] = a
"""
    module = parse_text(text, "f.kdsl")
    signature = signature_of(module.kernels[0], Diagnostics())
    spec = Specialization({"T": F32, "B": BF16}, {"s": -3, "up": False}, frozenset(("k",)))
    kernel = elaborate(module, "f", spec)
    derived = derive(kernel, frozenset("x"))
    shown = pasted(derived, kernel, signature)
    assert shown.startswith("backward f[B: bf16, s: -3](k: i32[N], d_y: f32[N]) -> (d_x: f32[N]):\n")
    again = parse_text(text + "\n" + shown, "f.kdsl")
    diagnostics = Diagnostics()
    check_module(again, diagnostics)
    assert not diagnostics.items
    for other in (
        replace(spec, dtypes={"T": F32, "B": F32}),
        replace(spec, consts={"s": 3, "up": False}),
        replace(spec, consts={"s": -3, "up": True}),
        replace(spec, present=frozenset()),
        replace(spec, present=frozenset(("b", "k"))),
    ):
        found = by_hand(again, elaborate(again, "f", other))
        assert found is not None and isinstance(found.own, str)
    found = by_hand(again, elaborate(again, "f", spec))
    assert found is not None and not isinstance(found.own, str)
