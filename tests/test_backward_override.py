"""Hand-written backwards: calls take them, on every executor, and what kgen show prints is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from autograd_kit import randn, rms_formula, worst
from backward_kit import mistakes, norm
from typer.testing import CliRunner

import kgen
from kgen.cli import app
from kgen.codegen.derive import derive
from kgen.codegen.derive.paste import pasted
from kgen.codegen.derive.written import by_hand
from kgen.dsl.check import Specialization, check_module, elaborate, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import BF16, F32
from kgen.dsl.errors import KgenError
from kgen.dsl.parser import parse_text
from kgen.runtime import autograd, differentiable, events

OPS = Path(__file__).resolve().parent.parent / "ops"

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
    t = autograd.training(kernel, list(values), differentiable.requiring(kernel, values))
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
    rest = a + zero
    d_x[m, k, n] = gain(d_y[m, k, n]) * saved_low[m, k] + rest
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
    # Read where there is none: such calls are derived.
    always = text.replace("d_x[m, n] = d_y[m, n]\n", "d_x[m, n] = 8.0 * d_y[m, n] / saved_s[m]\n")
    assert always != text and not mistakes(always)
    assert "8.0" not in texts(kgen.loads(always).f, arguments["x"], None)[1]


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


def test_the_pages_say_what_is_so() -> None:
    page = (OPS.parent / "docs" / "derivation.md").read_text("utf-8")
    shown = printed(OPS / "rms_norm.kdsl", "backward", "--dtype", "bf16")
    header = shown[: shown.index(":\n    parallel") + 2]
    assert f"```\n{header}```" in page
    assert f"```{LOOKUP}{BY_SUMS}```" in page
    language = (OPS.parent / "docs" / "language.md").read_text("utf-8")
    start = language.index("backward scaled(")
    scaled = language[start : language.index("```", start)]
    forward = "kernel scaled(x: T[M, N], w: W[N]) -> (y: T[M, N]):\n    parallel m in M, n in N\n"
    forward += "    y[m, n] = x[m, n] * w[n]\n"
    assert not mistakes(forward + scaled)
