"""The bound on gradients is tight enough: without any one operand of a derived backward, its result is far outside."""

from __future__ import annotations

import math
from typing import Any

import break_kit as broken
import pytest
import test_derive as derive_tests
import torch
from autograd_kit import worst
from derive_kit import autograd as autograd_of
from derive_kit import call, derived_of, shipped
from derive_kit import gradients as gradients_of

from kgen.codegen.derive import Derived
from kgen.dsl.diagnostics import DslError

# Either of these two factors makes NaN of the gradient of a label out of range; test_mutations drops both.
REDUNDANT = {"where(kept, d_loss[m], 0.0) * w_t -> where(kept, d_loss[m], 0.0)", "(w_t * z_loss) -> z_loss"}


def _backwards() -> list[Any]:
    """The shipped kernels as the tests of derivation call them, and a cross entropy with all terms."""
    cases: list[Any] = []
    for i, (file, name, arguments, formula, wanted) in enumerate(derive_tests.SHIPPED):
        if name == "rms_norm" and "w" in arguments:
            arguments = {**arguments, "offset": 0.5}  # 0 and 1 hide an operand
        cases.append(pytest.param(file, name, arguments, formula, wanted, id=f"{name}-{i}"))
    g = torch.Generator().manual_seed(0)
    logits, target = torch.randn(4, 7, generator=g), torch.tensor([0, 6, 3, 7])  # the last is no class
    options: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 0.3, "softcap": 2.0, "smoothed": True, "capped": True}

    def terms(logits: Any, target: Any, **_: Any) -> Any:
        x = 2.0 * torch.tanh(logits / 2.0)
        none = torch.where(target > 6, torch.nan, 1.0)
        row = torch.nn.functional.cross_entropy(x, target.clamp(max=6), reduction="none", label_smoothing=0.2)
        return none * row, none * 0.3 * torch.logsumexp(x, -1) ** 2

    arguments = {"logits": logits, "target": target, **options}
    cases.append(
        pytest.param("cross_entropy", "cross_entropy", arguments, terms, frozenset({"logits"}), id="cross_entropy")
    )
    return cases


@pytest.mark.parametrize(("file", "name", "arguments", "formula", "wanted"), _backwards())
def test_no_operand_of_a_backward_can_be_dropped(
    file: str, name: str, arguments: dict[str, Any], formula: Any, wanted: Any
) -> None:
    """The derived text is right within half the bound of the tests; without any one operand it is 5 times outside."""
    c = call(shipped(f"{file}.kdsl"), name, arguments)
    right = derived_of(c, wanted)
    found, seeds = gradients_of(c, right)
    exact = autograd_of(formula, c, arguments, frozenset(found), seeds)
    terms = max(t.numel() for t in c.tensors.values())

    def off(d: Derived, *dtypes: torch.dtype) -> list[float]:
        values, _ = gradients_of(c, d, seeds)
        if any(not torch.equal(values[n].isnan(), exact[n].isnan()) for n in exact):
            return [math.inf]
        plain = {n: (values[n].nan_to_num(0.0), exact[n].nan_to_num(0.0)) for n in exact}
        return [max(worst(v.to(dtype), e, terms) for v, e in plain.values()) for dtype in dtypes]

    assert off(right, torch.float32)[0] <= 0.5
    tried = 0
    for what, changed in broken.without_an_operand(right.backward_text):
        try:
            mutant = broken.with_text(right, changed)
        except DslError:  # it does not even check
            continue
        ratio = min(off(mutant, torch.float32, torch.bfloat16))
        tried += 1
        assert ratio > 5.0 or what in REDUNDANT, f"{what}: only {ratio:.3g} times the bound"
    assert tried >= 2
