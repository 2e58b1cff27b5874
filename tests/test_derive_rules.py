"""Each rule of derivation by itself: values at kinks and zeros, subscripts turned into stores, what is refused; and
each rule broken on purpose, which the comparison with torch.autograd must notice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from derive_kit import autograd, call, derived_of, gradients, kernel_of, worst

from kgen.codegen.derive import DERIVE_CODES, DeriveError, adjoints, derive, differentiable, stores
from kgen.codegen.derive.algebra import Algebra
from kgen.codegen.derive.graph import Graph, Node
from kgen.codegen.derive.rules import OPS, REDUCTIONS
from kgen.codegen.derive.written import gradients_of
from kgen.codegen.interpret import OPS as MEANING
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import F32
from kgen.dsl.parser import parse_text
from kgen.dsl.source import NOWHERE

TOLERANCE = 1e-8


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(text: str, formula: Any, arguments: dict[str, Any], wanted: frozenset[str] | None = None) -> float:
    """The largest relative error of any gradient of the only kernel of `text`."""
    module = parse_text(text, "test.kdsl")
    c = call(module, module.kernels[0].name, arguments)
    wanted = differentiable(c.kernel) if wanted is None else wanted
    derived = derived_of(c, wanted)
    mine, seeds = gradients(c, derived)
    theirs = autograd(formula, c, arguments, wanted, seeds)
    return max(worst(mine[n], theirs[n]) for n in mine)


# ---- ops -------------------------------------------------------------------------------------------------------------

# Both operands positive, so that every op is defined; further cases are below.
_UNARY = [fn for fn in OPS if fn not in ("add", "sub", "mul", "div", "where", "maximum", "minimum", "pow")]
_BINARY = {"add": "x[m, n] + v[n]", "sub": "x[m, n] - v[n]", "mul": "x[m, n] * v[n]", "div": "x[m, n] / v[n]"}
_BINARY |= {f: f"{f}(x[m, n], v[n])" for f in ("maximum", "minimum", "pow")}
_BINARY["where"] = "where(x[m, n] < v[n], x[m, n], v[n])"


def of_op(fn: str) -> tuple[str, Callable[..., Any]]:
    """A kernel of one op, with broadcasting where there are two operands, and what torch computes."""
    meaning = MEANING[fn]
    if fn in _UNARY:
        body = "2.0 * -x[m, n] + v[n]" if fn == "neg" else f"2.0 * {fn}(x[m, n]) + v[n]"
    else:
        body = _BINARY[fn]

    def formula(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        if fn in _UNARY:
            return (2 * meaning(x) + v,)
        return (torch.where(x < v, x, v.expand_as(x)) if fn == "where" else meaning(x, v),)

    text = (
        "kernel f(x: T[*M, N], v: T[N]) -> (y: T[*M, N]):\n    parallel m in M\n    tile n in N\n"
        f"    y[m, n] = {body}\n"
    )
    return text, formula


@pytest.fixture
def pair() -> dict[str, torch.Tensor]:
    return {"x": randn(3, 7).abs() + 0.3, "v": randn(7, seed=1).abs() + 0.4}


@pytest.mark.parametrize("fn", OPS)
def test_each_op(fn: str, pair: dict[str, torch.Tensor]) -> None:
    text, formula = of_op(fn)
    assert error(text, formula, pair) < TOLERANCE


@pytest.mark.parametrize("fn", OPS)
def test_each_op_broken(fn: str, pair: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the first operand that has one comes out 1% too large."""
    rule = OPS[fn]

    def broken(g: Graph, z: Node, dz: Node) -> tuple[Node | None, ...]:
        parts = list(rule(g, z, dz))
        first = next(i for i, p in enumerate(parts) if p is not None)
        part = parts[first]
        assert part is not None
        parts[first] = g.scale(1.01, part)
        return tuple(parts)

    monkeypatch.setitem(OPS, fn, broken)
    text, formula = of_op(fn)
    assert error(text, formula, pair) > 1e-4


def test_every_op_has_a_rule_or_is_a_step() -> None:
    integer = {"floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "isnan", "isinf"}
    assert MEANING.keys() == OPS.keys() | adjoints.STEPS | integer


REDUCTION = "kernel f(x: T[*M, N]) -> (y: T[*M]):\n    parallel m in M\n    tile n in N\n    y[m] = {}(x[m, n], n)\n"
TORCH_REDUCTIONS = {
    "sum": lambda x: (x.sum(-1),),
    "prod": lambda x: (x.prod(-1),),
    "max": lambda x: (x.amax(-1),),
    "min": lambda x: (x.amin(-1),),
}
ROWS = {
    "random": randn(3, 7),
    "ties": torch.tensor([[1.0, 2.0, 2.0, -1.0, -1.0, 2.0, 0.5], [3.0] * 7]),
    "one zero": torch.tensor([[1.0, 2.0, 0.0, -1.0], [0.0, 1.0, 2.0, 3.0]]),
    "zeros": torch.tensor([[1.0, 0.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]]),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_each_reduction(kind: str, rows: str) -> None:
    assert error(REDUCTION.format(kind), TORCH_REDUCTIONS[kind], {"x": ROWS[rows]}) < TOLERANCE


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_each_reduction_broken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = REDUCTIONS[kind]
    monkeypatch.setitem(REDUCTIONS, kind, lambda g, z, dz: (g.scale(1.01, rule(g, z, dz)[0] or dz),))
    assert error(REDUCTION.format(kind), TORCH_REDUCTIONS[kind], {"x": ROWS["random"]}) > 1e-4


def test_naive_product_rule_fails_at_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REDUCTIONS, "prod", lambda g, z, dz: (g.div(g.mul(dz, z), z.args[0]),))
    assert error(REDUCTION.format("prod"), TORCH_REDUCTIONS["prod"], {"x": ROWS["random"]}) < TOLERANCE
    assert error(REDUCTION.format("prod"), TORCH_REDUCTIONS["prod"], {"x": ROWS["one zero"]}) > 1e-4


ELEMENTWISE = "kernel f(x: T[*M]) -> (y: T[*M]):\n    parallel m in M\n    y[m] = {}\n"


@pytest.mark.parametrize(
    ("body", "formula", "x"),
    [
        ("abs(x[m])", lambda x: (x.abs(),), [-1.0, 0.0, 2.0]),
        ("maximum(x[m], 0.0)", lambda x: (torch.maximum(x, torch.zeros_like(x)),), [-1.0, 0.0, 2.0]),
        ("minimum(x[m], 0.0)", lambda x: (torch.minimum(x, torch.zeros_like(x)),), [-1.0, 0.0, 2.0]),
        ("maximum(x[m], x[m])", lambda x: (torch.maximum(x, x),), [-1.0, 0.0, 2.0]),
        ("x[m] ** 2", lambda x: (x**2,), [-1.0, 0.0, 2.0]),
        ("x[m] ** 3", lambda x: (x**3,), [-1.0, 0.0, 2.0]),
        ("x[m] ** 1", lambda x: (x**1,), [-1.0, 0.0, 2.0]),
        ("x[m] ** 0 + x[m]", lambda x: (x**0 + x,), [-1.0, 0.0, 2.0]),
        ("2.0 ** x[m]", lambda x: (2.0**x,), [-1.0, 0.0, 2.0]),
        ("abs(x[m]) ** abs(x[m])", lambda x: (x.abs() ** x.abs(),), [-1.0, 0.5, 2.0]),
        ("floor(x[m]) * x[m] + sign(x[m])", lambda x: (x.detach().floor() * x,), [-1.2, 0.0, 2.6]),
        ("where(x[m] > 0.0, log(x[m]), 0.0)", lambda x: (torch.where(x > 0, x, 1.0).log(),), [3.0, 0.5, 2.0]),
        ("x[m] - x[m] + 3.0 * x[m]", lambda x: (3 * x,), [-1.0, 0.0, 2.0]),
        ("f64(x[m]) * x[m]", lambda x: (x * x,), [-1.0, 0.0, 2.0]),
        ("bf16(x[m]) * 3", lambda x: (x * 3,), [-1.0, 0.0, 2.0]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_kinks_and_constants(body: str, formula: Any, x: list[float]) -> None:
    assert error(ELEMENTWISE.format(body), formula, {"x": torch.tensor(x)}) < TOLERANCE


def test_zero_to_a_variable_power() -> None:
    text = ELEMENTWISE.replace("x: T[*M]", "x: T[*M], p: f32").format("x[m] ** p")
    x = torch.tensor([0.0, 1.0, 2.0])
    for p in (0.0, 1.0, 2.5):
        assert error(text, lambda x, p: (torch.pow(x, p),), {"x": x, "p": p}) < TOLERANCE


# ---- subscripts ------------------------------------------------------------------------------------------------------


def rows_kernel(body: str, params: str = "", head: str = "tile n in N", y: str = "T[*M, N]") -> str:
    """A kernel of rows with the statements of `body`."""
    lines = [f"kernel f(x: T[*M, N]{params}) -> (y: {y}):", "    parallel m in M", f"    {head}"]
    return "\n".join([*lines, *(f"    {line}" for line in body.split("; "))]) + "\n"


TARGET = torch.tensor([2, 0, 6])
ORDER = torch.tensor([3, 3, 0, 1, 6, 5, 5], dtype=torch.int32)
ROW_SUBSCRIPTS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "loaded twice alike": (rows_kernel("y[m, n] = x[m, n] * sin(x[m, n])"), lambda x: (x * x.sin(),), {}),
    "reversed and straight": (
        rows_kernel("y[m, n] = x[m, n] * x[m, N - 1 - n]"), lambda x: (x * x.flip(-1),), {},
    ),
    "rotated and straight": (
        rows_kernel("y[m, n] = x[m, n] * x[m, (n + K) % N]", ", K: const i32"),
        lambda x, K: (x * x.roll(-K, -1),), {"K": 3},
    ),
    "rotated backward, spread": (
        rows_kernel("y[m, n] = x[m, n] * x[m, (K - n) % N]", ", K: const i32", "parallel n in N"),
        lambda x, K: (x * x[:, (K - torch.arange(7)) % 7],), {"K": 2},
    ),
    "neighbours": (
        rows_kernel("y[m, n] = x[m, n + 1] * x[m, n]", head="tile n in N - 1", y="T[*M, N - 1]").replace(
            "    parallel m", "    require N >= 1\n    parallel m"
        ),
        lambda x: (x[:, 1:] * x[:, :-1],), {},
    ),
    "a tail that is not read": (
        rows_kernel("y[m, n] = x[m, n]", head="tile n in N - 2", y="T[*M, N - 2]").replace(
            "    parallel m", "    require N >= 2\n    parallel m"
        ),
        lambda x: (x[:, :-2],), {},
    ),
    "a head that is not read": (
        rows_kernel("y[m, n] = x[m, n + 2]", head="tile n in N - 2", y="T[*M, N - 2]").replace(
            "    parallel m", "    require N >= 2\n    parallel m"
        ),
        lambda x: (x[:, 2:],), {},
    ),
    "every element twice": (
        rows_kernel("y[m, n] = x[m, n // 2]", head="tile n in 2 * N", y="T[*M, 2 * N]"),
        lambda x: (x.repeat_interleave(2, -1),), {},
    ),
    "around again": (
        rows_kernel("y[m, n] = x[m, n % N] * n", head="tile n in 2 * N", y="T[*M, 2 * N]"),
        lambda x: (x.repeat(1, 2) * torch.arange(14),), {},
    ),
    "halves": (
        rows_kernel("y[m, n] = x[m, n // 2] * x[m, n]"), lambda x: (x * x[:, torch.arange(7) // 2],), {},
    ),
    "gathered and straight": (
        rows_kernel("y[m] = logsumexp(x[m, n], n) - x[m, t[m]]", ", t: i64[*M]", y="T[*M]"),
        lambda x, t: (x.logsumexp(-1) - x.gather(-1, t[:, None])[:, 0],), {"t": TARGET},
    ),
    "gathered by column": (
        rows_kernel("y[m, n] = x[m, order[n]] * x[m, n]", ", order: i32[N]"),
        lambda x, order: (x * x[:, order.long()],), {"order": ORDER},
    ),
    "gathered at two places": (
        rows_kernel("y[m] = x[m, t[m]] * x[m, 3] * x[m, N - 1 - t[m]]", ", t: i64[*M]", y="T[*M]").replace(
            "    parallel m", "    require N >= 4\n    parallel m"
        ).replace("    tile n in N\n", ""),
        lambda x, t: (x.gather(-1, t[:, None])[:, 0] * x[:, 3] * x.gather(-1, 6 - t[:, None])[:, 0],), {"t": TARGET},
    ),
    "summed over programs": (
        rows_kernel("y[n] += x[m, n] * x[m, n]", y="T[N]"), lambda x: (x.square().sum(0),), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_SUBSCRIPTS)
def test_subscripts(name: str) -> None:
    text, formula, more = ROW_SUBSCRIPTS[name]
    assert error(text, formula, {"x": randn(3, 7), **more}) < TOLERANCE


def test_the_diagonal() -> None:
    text = "kernel f(x: T[N, N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n, n]\n"
    assert error(text, lambda x: (x.diagonal(),), {"x": randn(5, 5)}) < TOLERANCE


def test_a_weight_of_a_spread_index_is_summed_over_the_other() -> None:
    text = (
        "kernel f(x: T[*M, N], w: W[N], s: W[]) -> (y: T[*M, N]):\n    parallel m in M, n in N\n"
        "    y[m, n] = x[m, n] * w[n] * s[]\n"
    )
    assert error(text, lambda x, w, s: (x * w * s,), {"x": randn(4, 5), "w": randn(5), "s": torch.ones(())}) < TOLERANCE


def test_repeated_along_an_index_that_the_value_lacks() -> None:
    text = rows_kernel("y[m, n] = sin(w[n]) + 2.0; z[m, n] = x[m, n]", ", w: W[N]").replace(
        "(y: T[*M, N])", "(y: T[*M, N], z: T[*M, N])"
    )
    formula = lambda x, w: ((w.sin() + 2).expand_as(x), x)  # noqa: E731  # one line is all there is
    assert error(text, formula, {"x": randn(3, 7), "w": randn(7)}) < TOLERANCE


# ---- structure broken on purpose ---------------------------------------------------------------------------------


def test_broken_broadcast(monkeypatch: pytest.MonkeyPatch, pair: dict[str, torch.Tensor]) -> None:
    """Without the factor N for an axis that the gradient lacks."""
    text = rows_kernel("y[m] = mean(x[m, n] + s[m], n)", ", s: T[*M]", y="T[*M]")
    arguments = {"x": randn(3, 7), "s": randn(3)}
    formula = lambda x, s: ((x + s[:, None]).mean(-1),)  # noqa: E731  # one line is all there is
    assert error(text, formula, arguments) < TOLERANCE
    monkeypatch.setattr(Graph, "sum", lambda g, a, over: g.reduce("sum", a, frozenset(over) & a.axes))
    assert error(text, formula, arguments) > 1e-4


def test_broken_sum_of_contributions(monkeypatch: pytest.MonkeyPatch) -> None:
    text, formula, _ = ROW_SUBSCRIPTS["loaded twice alike"]
    monkeypatch.setattr(Graph, "total", lambda g, parts: next(iter(parts)))
    assert error(text, formula, {"x": randn(3, 7)}) > 1e-4


def test_broken_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation turned the wrong way."""
    inverse = stores.Planner._inverse

    def broken(self: stores.Planner, part: stores.Part, position: int, extent: Poly) -> tuple[str, Poly] | None:
        found = inverse(self, part, position, extent)
        if found is None or "N" not in found[1].symbols:
            return found
        return found[0], (found[1] + 1).mod(extent)

    text, formula, more = ROW_SUBSCRIPTS["rotated and straight"]
    monkeypatch.setattr(stores.Planner, "_inverse", broken)
    assert error(text, formula, {"x": randn(3, 7), **more}) > 1e-4


def test_broken_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the index left out: every element receives the gradient."""
    text, formula, more = ROW_SUBSCRIPTS["gathered and straight"]
    monkeypatch.setattr(Graph, "where", lambda g, c, a, b: a)
    assert error(text, formula, {"x": randn(3, 7), **more}) > 1e-4


def test_broken_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of one term too many taken for zero."""
    text = rows_kernel("y[m, n] = x[m, n] - mean(x[m, n], n)")
    formula = lambda x: (x - x.mean(-1, keepdim=True),)  # noqa: E731  # one line is all there is
    assert error(text, formula, {"x": randn(3, 7)}) < TOLERANCE
    is_zero = Algebra.is_zero
    monkeypatch.setattr(Algebra, "is_zero", lambda self, a: is_zero(self, a) or a.fn == "neg")
    assert error(text, formula, {"x": randn(3, 7)}) > 1e-4


# ---- what is zero ------------------------------------------------------------------------------------------------


def test_a_softmax_gradient_has_no_term_of_its_maximum() -> None:
    for reduction in ("softmax(x[m, n], n)", "x[m, n] - logsumexp(x[m, n], n)"):
        derived = derive(kernel_of(rows_kernel(f"y[m, n] = {reduction}")), frozenset("x"))
        nodes = [e for s in derived.backward.body for e in ir.walk(s.value)]
        assert not any(isinstance(e, ir.Reduce) and e.kind == "max" for e in nodes)
        assert not any(isinstance(e, ir.Op) and e.fn in ("eq", "where") for e in nodes)


def test_the_algebra_tells_zero_from_almost_zero() -> None:
    g = Graph({"m": Poly.sym("M"), "n": Poly.sym("N")}, NOWHERE)
    x = g.load("x", (Poly.sym("m"), Poly.sym("n")), F32)
    s = g.reduce("sum", x, ("n",))
    share = g.op("div", x, s)
    one = g.const(1.0, F32)
    zero = g.op("sub", g.reduce("sum", share, ("n",)), one)
    algebra = Algebra()
    assert algebra.is_zero(zero)
    assert algebra.is_zero(g.op("sub", g.op("mul", x, x), g.op("mul", x, x)))
    for other in (share, s, g.op("sub", share, one), g.op("sub", x, s), g.op("sub", g.op("mul", s, s), s)):
        assert not algebra.is_zero(other)
    # A sum over n of what lacks n is not the thing itself.
    assert not algebra.is_zero(g.op("sub", g.reduce("sum", g.op("mul", x, s), ("n",)), g.op("mul", s, x)))


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", DERIVE_CODES, ids=lambda c: c.code)
def test_each_code(code: Any) -> None:
    def run(text: str) -> None:
        kernel = kernel_of(text)
        inputs = frozenset(t.name for t in kernel.tensors if t.role == "in")
        wanted = inputs if code.code == "K0506" else differentiable(kernel)
        gradients_of(parse_text(text, "test.kdsl"), kernel, wanted)

    with pytest.raises(DeriveError) as caught:
        run(code.wrong)
    (found,) = caught.value.diagnostics
    assert found.code == code.code and found.help and found.span.source.path == "test.kdsl"
    assert found.span.text in code.wrong and found.span.text
    run(code.right)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("f32(argmax(x[m, n], n))", "argmax"),
        ("floor(sum(x[m, n], n))", "floor"),
        ("f32(i32(sum(x[m, n], n)))", "conversion to i32"),
        ("sum(where(x[m, n] > 0.0, 1.0, 0.0), n)", "gt"),
        ("max(w[n], n) + f32(argmax(w[n], n))", "no output depends on it"),
    ],
)
def test_the_construct_that_stops_a_gradient_is_named(body: str, word: str) -> None:
    kernel = kernel_of(rows_kernel(f"y[m] = {body}", ", w: W[N]", y="f32[*M]"))
    with pytest.raises(DeriveError) as caught:
        derive(kernel, frozenset("x"))
    (found,) = caught.value.diagnostics
    assert found.code == "K0504" and word in found.label


def test_asking_for_nothing_or_for_an_unknown_name() -> None:
    kernel = kernel_of(rows_kernel("y[m, n] = x[m, n]"))
    for wanted in (frozenset[str](), frozenset(("z",)), frozenset(("y",))):
        with pytest.raises(DeriveError, match="K0506"):
            derive(kernel, wanted)


def test_stencil_over_a_spread_index_is_refused_with_its_place() -> None:
    text = (
        "kernel f(x: T[N]) -> (y: T[N - 1]):\n    require N >= 1\n    parallel n in N - 1\n    y[n] = x[n + 1] - x[n]\n"
    )
    with pytest.raises(DeriveError, match=r"K0505.*\n.*test.kdsl:4"):
        derive(kernel_of(text), frozenset("x"))


def test_names_of_gradients_give_way_to_the_users() -> None:
    text = rows_kernel("d_y = x[m, n] * 2.0; y[m, n] = d_y * d_x[m, n]", ", d_x: T[*M, N]")
    x, d_x = randn(3, 7), randn(3, 7, seed=1)
    assert error(text, lambda x, d_x: (2 * x * d_x,), {"x": x, "d_x": d_x}) < TOLERANCE


def test_gradients_where_the_forward_is_nan_or_masked() -> None:
    text = rows_kernel("y[m, n] = softmax(where(keep[n], x[m, n], -inf), n)", ", keep: bool[N]")
    formula = lambda x, keep: (x.masked_fill(~keep, -math.inf).softmax(-1),)  # noqa: E731  # one line is all there is
    x = randn(3, 7)
    keep = torch.tensor([True, False, True, True, False, False, True])
    assert error(text, formula, {"x": x, "keep": keep}) < TOLERANCE
    # Nothing kept: the forward is NaN, and so is the gradient of an element that is read.
    module = parse_text(rows_kernel("y[m, n] = softmax(x[m, n], n)"), "test.kdsl")
    c = call(module, "f", {"x": torch.full((1, 3), -math.inf)})
    mine, _ = gradients(c, derived_of(c))
    assert mine["x"].isnan().all()


def test_new_indices_take_no_name_that_a_value_has() -> None:
    text = "kernel f(x: T[*M, E], t: i64[*M]) -> (y: T[*M], z: T[*M]):\n    parallel m in M\n"
    text += "    y[m] = exp(x[m, t[m]]) * sin(exp(x[m, t[m]]))\n    z[m] = exp(x[m, t[m]])\n"

    def formula(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        e = x.gather(-1, t[:, None])[:, 0].exp()
        return e * e.sin(), e

    assert error(text, formula, {"x": randn(3, 7), "t": TARGET}) < TOLERANCE
    assert error(text.replace("E]", "IN]"), formula, {"x": randn(3, 7), "t": TARGET}) < TOLERANCE


def test_no_rows_and_no_columns() -> None:
    text = rows_kernel("y[m, n] = softmax(x[m, n] * w[n], n)", ", w: T[N]")

    def formula(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x * w).softmax(-1),)

    for rows, columns in ((0, 7), (3, 0), (0, 0), (1, 1)):
        assert error(text, formula, {"x": randn(rows, columns), "w": randn(columns)}) < TOLERANCE


def test_a_computed_maximum_is_computed_again_where_elements_are_compared_with_it() -> None:
    """Another kernel may contract `x * s + 1` to one operation, and its maximum would equal no element."""
    computed = derive(kernel_of(rows_kernel("y[m] = max(x[m, n] * s + 1.0, n)", ", s: f32", y="T[*M]")), frozenset("x"))
    assert not computed.residuals
    selected = derive(kernel_of(rows_kernel("y[m] = max(abs(x[m, n]), n)", y="T[*M]")), frozenset("x"))
    assert selected.residuals == ("saved_peak",)


def test_a_gradient_that_cancels_is_stored_as_zero() -> None:
    text = rows_kernel("y[m] = sum(softmax(x[m, n], n), n) * s[m]", ", s: T[*M]", y="T[*M]")
    assert error(text, lambda x, s: (x.softmax(-1).sum(-1) * s,), {"x": randn(3, 7), "s": randn(3)}) < TOLERANCE
    text = rows_kernel("y[m, n] = 0.0 * x[m, n]")
    assert error(text, lambda x: (0 * x,), {"x": randn(3, 7)}) < TOLERANCE
