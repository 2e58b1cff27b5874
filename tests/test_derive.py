"""Derived gradients against torch.autograd on independent formulas, in float64, and the text they are written as."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from derive_kit import (
    ROOT,
    UNPLANNED,
    Call,
    autograd,
    call,
    derived_of,
    doubled,
    gradients,
    scalars_of,
    shipped,
    worst,
)
from torch.nn import functional as F
from unplanned_cases import CASES, Case

from kgen.codegen.derive import DERIVE_CODES, Derived, DeriveError, differentiable, to_kdsl
from kgen.codegen.interpret import interpret
from kgen.dsl import ir
from kgen.dsl.check import Specialization, check_module, elaborate
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import F64
from kgen.dsl.parser import parse_text

# Both sides compute in float64; a few hundred roundings of terms that partly cancel.
TOLERANCE = 1e-8

# Gradients that need a scatter over programs.
REFUSED = {"two_gathers": "K0503"}
DIFFERENTIABLE = [c for c in CASES if c.differentiable]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def agree(formula: Any, c: Call, arguments: dict[str, Any], wanted: frozenset[str] | None = None) -> Derived:
    """Derive `c` and compare every gradient with autograd of `formula`."""
    wanted = differentiable(c.kernel) if wanted is None else wanted
    derived = derived_of(c, wanted)
    mine, seeds = gradients(c, derived)
    theirs = autograd(formula, c, arguments, wanted, seeds)
    assert mine.keys() == wanted
    for name in mine:
        assert worst(mine[name], theirs[name]) < TOLERANCE, name
    return derived


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda c: c.kernel)
def test_every_unplanned_kernel(case: Case) -> None:
    for size in case.sizes:
        arguments = case.make(*size, case.dtypes[0], torch.Generator().manual_seed(3))
        c = call(UNPLANNED, case.kernel, arguments)
        if case.kernel in REFUSED:
            with pytest.raises(DeriveError, match=REFUSED[case.kernel]):
                derived_of(c)
        else:
            agree(case.formula, c, arguments)


# ---- the shipped kernels -------------------------------------------------------------------------------------------


def _rms(x, w=None, eps=1e-6, offset=0.0, round_first=False):
    n = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (n if w is None else n * (offset + w),)


def _layer_norm(x, w=None, b=None, eps=1e-5):
    return (F.layer_norm(x, x.shape[-1:], w, b, eps),)


def _rope(q, k, cos, sin, positions=None, interleaved=False):
    r = cos.shape[1]
    p = torch.arange(q.shape[1]) if positions is None else positions
    c, s = cos[p], sin[p]
    c, s = (t.reshape(*(p.shape if p.dim() == 2 else (1, *p.shape)), 1, r) for t in (c, s))

    def one(x):
        x, tail = x[..., :r], x[..., r:]
        if interleaved:
            a, b = x[..., ::2], x[..., 1::2]
            cc, ss = c[..., ::2], s[..., ::2]
            return torch.cat([torch.stack([a * cc - b * ss, b * cc + a * ss], -1).flatten(-2), tail], -1)
        half = torch.cat([-x[..., r // 2 :], x[..., : r // 2]], -1)
        return torch.cat([x * c + half * s, tail], -1)

    return one(q), one(k)


ROPE = {
    "q": randn(2, 5, 3, 10),
    "k": randn(2, 5, 1, 10, seed=1),
    "cos": randn(7, 6, seed=2),
    "sin": randn(7, 6, seed=3),
}
POSITIONS = torch.tensor([[0, 3, 3, 6, 1], [5, 4, 2, 0, 0]])

SHIPPED: tuple[tuple[str, str, dict[str, Any], Callable[..., Any], frozenset[str] | None], ...] = (
    ("rms_norm", "rms_norm", {"x": randn(3, 2, 17), "w": randn(17, seed=1), "offset": 1.0}, _rms, None),
    ("rms_norm", "rms_norm", {"x": randn(5, 64)}, _rms, None),
    ("rms_norm", "rms_norm", {"x": randn(5, 33), "w": randn(33, seed=1), "round_first": True}, _rms, None),
    ("layer_norm", "layer_norm", {"x": randn(2, 3, 7), "w": randn(7), "b": randn(7, seed=2)}, _layer_norm, None),
    ("layer_norm", "layer_norm", {"x": randn(4, 9), "w": randn(9, seed=1)}, _layer_norm, None),
    ("layer_norm", "layer_norm", {"x": randn(4, 9), "b": randn(9, seed=1)}, _layer_norm, None),
    ("layer_norm", "layer_norm", {"x": randn(4, 9)}, _layer_norm, None),
    ("softmax", "softmax", {"x": randn(2, 3, 33)}, lambda x: (x.softmax(-1),), None),
    ("softmax", "log_softmax", {"x": randn(3, 33)}, lambda x: (x.log_softmax(-1),), None),
    ("swiglu", "swiglu", {"gate": randn(3, 7), "up": randn(3, 7, seed=1)}, lambda gate, up: (F.silu(gate) * up,), None),
    ("swiglu", "geglu", {"gate": randn(3, 7), "up": randn(3, 7, seed=1)}, lambda gate, up: (F.gelu(gate) * up,), None),
    (
        "swiglu", "geglu_tanh", {"gate": randn(3, 7), "up": randn(3, 7, seed=1)},
        lambda gate, up: (F.gelu(gate, approximate="tanh") * up,), None,
    ),
    ("rope", "rope", ROPE, _rope, None),
    ("rope", "rope", ROPE | {"q": randn(2, 5, 3, 6), "k": randn(2, 5, 2, 6, seed=1)}, _rope, frozenset(("q", "k"))),
    ("rope", "rope", ROPE | {"positions": POSITIONS}, _rope, frozenset(("q", "k"))),
    ("rope", "rope", ROPE | {"positions": POSITIONS, "interleaved": True}, _rope, frozenset(("q", "k"))),
)  # fmt: skip


_SHIPPED_IDS = [f"{case[1]}-{i}" for i, case in enumerate(SHIPPED)]


@pytest.mark.parametrize(("file", "name", "arguments", "formula", "wanted"), SHIPPED, ids=_SHIPPED_IDS)
def test_every_shipped_kernel(file: str, name: str, arguments: dict[str, Any], formula: Any, wanted: Any) -> None:
    agree(formula, call(shipped(f"{file}.kdsl"), name, arguments), arguments, wanted)


def test_all_shipped_files_are_tested() -> None:

    kernels = {(p.stem, k.name) for p in (ROOT / "ops").glob("*.kdsl") for k in shipped(p.name).kernels}
    tested = {(case[0], case[1]) for case in SHIPPED}
    elsewhere = {k for k in kernels if k[0] not in {"rms_norm", "layer_norm", "softmax", "swiglu", "rope"}}
    assert kernels - elsewhere <= tested


def subsets(names: frozenset[str]) -> list[frozenset[str]]:
    """All but the empty one."""
    ordered = sorted(names)
    return [frozenset(s) for s in chain.from_iterable(combinations(ordered, n) for n in range(1, len(ordered) + 1))]


def test_each_subset_of_inputs() -> None:
    x, w, b = randn(4, 9), randn(9, seed=1), randn(9, seed=2)
    layer = {"x": x, "w": w, "b": b}
    c = call(shipped("layer_norm.kdsl"), "layer_norm", layer)
    for wanted in subsets(frozenset(layer)):
        derived = agree(_layer_norm, c, layer, wanted)
        outputs = {t.name for t in derived.backward.tensors if t.role == "out"}
        assert outputs == {f"d_{n}" for n in wanted}
    only_bias = derived_of(c, frozenset("b"))
    assert not only_bias.residuals
    assert [t.name for t in only_bias.backward.tensors] == ["d_y", "d_b"]
    arguments = {"a": randn(3, 5), "w": randn(5, 6, seed=1), "b": randn(3, 6, seed=2)}
    for wanted in subsets(frozenset(arguments)):
        agree(
            lambda a, w, b: (torch.einsum("mi,ij,mj->m", a, w, b),),
            call(UNPLANNED, "bilinear", arguments),
            arguments,
            wanted,
        )


def test_a_gradient_that_is_not_asked_for_costs_nothing() -> None:
    c = call(shipped("rms_norm.kdsl"), "rms_norm", {"x": randn(4, 9), "w": randn(9, seed=1)})
    derived = derived_of(c, frozenset(("x",)))
    assert "d_w" not in derived.backward_text
    assert not any(isinstance(s, ir.Accumulate) for s in derived.backward.body)


@pytest.mark.parametrize("name", ["function_zoo", "cosine_rows", "standardize", "kl_rows", "product_rows", "softcap"])
def test_finite_differences(name: str) -> None:
    """A second opinion that shares no derivative formula: central differences along a random direction."""
    case = next(c for c in CASES if c.kernel == name)
    arguments = case.make(3, 7, torch.float32, torch.Generator().manual_seed(5))
    c = call(UNPLANNED, name, arguments)
    mine, seeds = gradients(c, derived_of(c))
    direction = {k: torch.randn(v.shape, generator=torch.Generator().manual_seed(9)).double() for k, v in mine.items()}

    def value(step: float) -> float:
        moved = doubled(arguments_of(c))
        moved |= {k: moved[k] + step * direction[k] for k in mine}
        wide = elaborate(UNPLANNED, name, Specialization(dict.fromkeys(dict(c.kernel.dtypes), F64)))
        out = interpret(wide, moved, scalars_of(wide, c.scalars), precision="f64")
        return sum((out[k] * s).sum().item() for k, s in seeds.items())

    h = 1e-5
    measured = (value(h) - value(-h)) / (2 * h)
    predicted = sum((mine[k] * direction[k]).sum().item() for k in mine)
    # Truncation is about h^2, rounding about 1e-16/h of the value.
    assert abs(measured - predicted) <= 1e-7 * max(1.0, abs(predicted))


def arguments_of(c: Call) -> dict[str, torch.Tensor]:
    return dict(c.tensors)


# ---- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in DIFFERENTIABLE if c.kernel not in REFUSED], ids=lambda c: c.kernel)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_text_reads_back(case: Case, dtype: torch.dtype) -> None:
    if dtype not in case.dtypes and case.dtypes[0] != torch.float32:
        dtype = case.dtypes[0]
    arguments = case.make(3, 7 if case.kernel != "pool_pairs" else 8, dtype, torch.Generator().manual_seed(1))
    derived = derived_of(call(UNPLANNED, case.kernel, arguments))
    for kernel, text in ((derived.forward, derived.forward_text), (derived.backward, derived.backward_text)):
        found = Diagnostics()
        module = parse_text(text, f"{kernel.name}.kdsl")
        check_module(module, found)
        found.raise_if_errors()
        assert elaborate(module, kernel.name, Specialization({})) == kernel
        bare = to_kdsl(kernel)
        assert same_kernel(elaborate(parse_text(bare), kernel.name, Specialization({})), kernel)
        assert to_kdsl(kernel) == bare


def same_kernel(a: ir.Kernel, b: ir.Kernel) -> bool:
    """Equality, positions aside."""
    return (
        [(t.name, t.dtype, t.shape, t.role, t.star) for t in a.tensors]
        == [(t.name, t.dtype, t.shape, t.role, t.star) for t in b.tensors]
        and [(x.name, x.extent, x.kind) for x in a.axes] == [(x.name, x.extent, x.kind) for x in b.axes]
        and [(s.name, s.dtype, s.default) for s in a.scalars] == [(s.name, s.dtype, s.default) for s in b.scalars]
        and [(r.op, r.left, r.right) for r in a.requires] == [(r.op, r.left, r.right) for r in b.requires]
        and len(a.body) == len(b.body)
        and all(same_statement(s, t) for s, t in zip(a.body, b.body, strict=True))
    )


def same_statement(a: ir.Stmt, b: ir.Stmt) -> bool:
    """Equality, positions aside."""
    if isinstance(a, ir.Let) or isinstance(b, ir.Let):
        return isinstance(a, ir.Let) and isinstance(b, ir.Let) and a.name == b.name and ir.same(a.value, b.value)
    return type(a) is type(b) and (a.tensor, a.at) == (b.tensor, b.at) and ir.same(a.value, b.value)


def test_shipped_kernels_with_given_sizes_print_with_names_and_origins() -> None:
    c = call(shipped("layer_norm.kdsl"), "layer_norm", {"x": randn(4, 9), "w": randn(9), "b": randn(9)})
    text = derived_of(c).backward_text
    assert "d_h = " in text and "c = x[m, n] - " in text
    assert "    # layer_norm.kdsl:8: h = c * rsqrt(mean(c * c, n) + eps)\n" in text


def test_residuals_are_rows_in_compute_precision() -> None:
    arguments = {"x": randn(2, 3, 9).bfloat16(), "w": randn(9, seed=1).bfloat16()}
    derived = derived_of(call(shipped("rms_norm.kdsl"), "rms_norm", arguments))
    assert derived.residuals == ("saved_r",)
    (saved,) = [t for t in derived.forward.tensors if t.name == "saved_r"]
    assert (saved.dtype.name, saved.star, saved.role) == ("f32", True, "out")
    assert not any(isinstance(e, ir.Op) and e.fn == "rsqrt" for s in derived.backward.body for e in ir.walk(s.value))
    given = {t.name: t.dtype.name for t in derived.backward.tensors}
    assert given == {"x": "bf16", "w": "bf16", "saved_r": "f32", "d_y": "bf16", "d_x": "bf16", "d_w": "bf16"}


def test_the_page_shows_what_is_derived() -> None:
    page = (ROOT / "docs/derivation.md").read_text("utf-8")
    arguments = {"x": torch.zeros(2, 8).bfloat16(), "w": torch.zeros(8).bfloat16()}
    derived = derived_of(call(shipped("rms_norm.kdsl"), "rms_norm", arguments))
    for text in (derived.forward_text, derived.backward_text):
        assert f"```\n{text}```" in page
    for code in DERIVE_CODES:
        assert f"| {code.code} | {code.title} |" in page
