"""The tests of the chunked cross entropy can fail: each mistake below, made on purpose, turns one of them red."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import test_host_ops as host_ops
import test_host_programs as host_programs
import test_linear_cross_entropy as tests
import test_linear_cross_entropy_calls as calls
import torch
from linear_call_kit import CLASSES, OPTIONS

from kgen.codegen.host import plan, sizing
from kgen.codegen.host.lower import lower
from kgen.dsl.modules import load_source
from kgen.dsl.source import SourceFile
from kgen.ops import functional, linear_losses
from kgen.runtime.host import op as op_module
from kgen.runtime.host import walk
from kgen.runtime.loading import KernelModule
from kgen.runtime.products import multiply

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PATH = Path(functional.__file__).parent / "fused_linear_cross_entropy.kdsl"


@dataclass(frozen=True)
class Break:
    """Edits of the op's text, other values of attributes (owner, name, value), and a call that must fail then."""

    edits: Sequence[tuple[str, str]]
    swaps: Sequence[tuple[Any, str, Any]]
    test: Callable[..., None]
    args: tuple[Any, ...]


@contextmanager
def broken(b: Break) -> Iterator[None]:
    """Ops that are loaded anew and carry the mistake."""
    text = PATH.read_text("utf-8")
    for old, new in b.edits:
        assert old in text, old
        text = text.replace(old, new)
    module = KernelModule(load_source(SourceFile(str(PATH), text)).module)
    with ExitStack() as stack:
        stack.enter_context(patch.object(functional, "_loaded", lambda file, name: module[name]))
        for owner, name, value in b.swaps:
            stack.enter_context(patch.object(owner, name, value))
        yield


def _replanned(change: Callable[[plan.Step], plan.Step | None]) -> Callable[..., plan.Plan]:
    """`lower`, with every step changed, or left out where `change` gives None."""

    def changed(steps: Sequence[plan.Step]) -> tuple[plan.Step, ...]:
        out = []
        for s in steps:
            if isinstance(s, plan.Loop):
                s = replace(s, body=changed(s.body), empty=changed(s.empty))
            new = change(s)
            if new is not None:
                out.append(new)
        return tuple(out)

    def lowered(*args: Any) -> plan.Plan:
        p = lower(*args)
        return replace(p, forward=changed(p.forward), backward=changed(p.backward))

    return lowered


def _never_first(s: plan.Step) -> plan.Step:
    return replace(s, first=None) if isinstance(s, plan.Matmul | plan.Add) else s


def _not_zeroed(s: plan.Step) -> plan.Step | None:
    return None if isinstance(s, plan.Zero) else s


def _all_gradients(program: Any, dtypes: Any, wanted: Any, held: str) -> plan.Plan:
    return lower(program, dtypes, frozenset(program.gradients), held)


def _edit(*edits: tuple[str, str]) -> Sequence[tuple[str, str]]:
    return edits


@functools.wraps(calls.test_the_budget_of_the_environment)
def _budget() -> None:
    with pytest.MonkeyPatch.context() as environment:
        calls.test_the_budget_of_the_environment(environment)


def _narrowed(*args: Any) -> None:
    """The library's product of f32 with the 10 bits of mantissa that TF32 keeps of its operands."""
    out, left, right, *rest = args
    _library(out, *(t if t.dtype != F32 else (t.view(torch.int32) & ~0x1FFF).view(F32) for t in (left, right)), *rest)


def _in_proportion(p: Any, loop: Any, dims: Any, most: int, budget: float) -> int:
    """The rows of a budget as if each took what one takes."""
    return max(1, min(most, int(budget // sizing.chunk_bytes(p, loop, dims, 1))))


def _rounded_up(extent: int, limit: int) -> int:
    """Rows of a chunk, a multiple of 128 wherever that is within the limit."""
    rows = -(-extent // -(-extent // limit)) if extent > limit else max(1, extent)
    rounded = -(-rows // 128) * 128
    return rounded if extent > limit and rounded <= limit else rows


def _without_autocast(_: str, __: str, input: torch.Tensor, ___: torch.Tensor) -> torch.Tensor:
    return input


_library = multiply.library
F32, BF16 = torch.float32, torch.bfloat16
SUMMED = ("                w_sum: W[V, H]\n            b_sum", "                w_sum: T[V, H]\n            b_sum")
TOKENS = {"token_weight": OPTIONS[-1]["token_weight"]}
WEIGHED = "        a = token_weight[m]\n    else:\n        a = 1.0\n    if averaged:"
BREAKS: dict[str, Break] = {
    "the bias left out of the logits": Break(
        _edit(("x[c] @ weight.T + row", "x[c] @ weight.T")), (), tests.test_values_and_gradients, ("cuda", F32, "mean")
    ),
    "the bias added in the forward pass alone": Break(
        _edit(
            (
                "logits = x[c] @ weight.T + row\n            else:\n                logits = x[c] @ weight.T\n"
                "            cross_entropy_(",
                "logits = x[c] @ weight.T\n            else:\n                logits = x[c] @ weight.T\n"
                "            cross_entropy_(",
            )
        ),
        (),
        tests.test_values_and_gradients,
        ("cuda", F32, "none"),
    ),
    "products of f32 with ten bits": Break(
        (), ((multiply, "library", _narrowed),), tests.test_values_and_gradients, ("cuda", F32, "sum")
    ),
    "autocast takes no notice": Break(
        (), ((linear_losses, "multiplied_in", _without_autocast),), calls.test_autocast, (BF16, "mean")
    ),
    "the gradient of an f32 weight rounded to the dtype of autocast": Break(
        _edit(
            SUMMED,
            (
                "                times_(w_sum, d_loss)\n                d_w = w_sum\n",
                "                times_(w_sum, d_loss)\n                d_w = W(w_sum)\n",
            ),
        ),
        (),
        calls.test_autocast,
        (BF16, "mean"),
    ),
    "the gradient of the result taken for 1": Break(
        _edit(("                times_(x_sum, d_loss)\n", "")),
        (),
        calls.test_the_gradient_of_the_result_may_be_anything,
        (3.7,),
    ),
    "a gradient of the result that is 0 or NaN taken for none": Break(
        _edit(("where(s[] == 1.0, g[m, n], g[m, n] * s[])", "where(s[] * s[] > 0.0, g[m, n] * s[], g[m, n])")),
        (),
        calls.test_the_gradient_of_the_result_may_be_anything,
        (float("nan"),),
    ),
    "the gradient of the result forgotten for the bias": Break(
        _edit(("                times_(b_sum, d_loss)\n", "")),
        (),
        tests.test_values_and_gradients,
        ("cuda", F32, "mean"),
    ),
    "the first token's upstream gradient for all": Break(
        _edit(("scale[m] = d_loss[m]\n", "scale[m] = d_loss[m - m]\n")),
        (),
        tests.test_values_and_gradients,
        ("cuda", F32, "none"),
    ),
    "z-loss divided by the weights of classes": Break(
        _edit(("a / mass[], a / count[]", "a / mass[], a / mass[]")),
        (),
        tests.test_every_combination_of_options,
        ({k: v for k, v in OPTIONS[-1].items() if k in ("class_weight", "z_loss")},),
    ),
    "token weights left out of the gradient": Break(
        _edit((WEIGHED, WEIGHED.replace("token_weight[m]", "1.0"))),
        (),
        tests.test_every_combination_of_options,
        (TOKENS,),
    ),
    "ignored labels count in the mean": Break(
        _edit(("count[] += where(kept, a, 0.0)", "count[] += a"), ("mass[] += where(kept, a, 0.0)", "mass[] += a")),
        (),
        tests.test_all_labels_ignored,
        ("cuda", F32),
    ),
    "a label out of range spoils what the mean divides by": Break(
        _edit(("class_weight[minimum(maximum(target[m], 0), V - 1)], 0.0)", "class_weight[target[m]], 0.0)")),
        (),
        tests.test_a_label_out_of_range_is_never_a_plausible_number,
        ("cuda", CLASSES),
    ),
    "no factor in f16": Break(
        _edit(("if narrow:", "if false:")), (), tests.test_f16_gradients_do_not_underflow_before_they_are_scaled, ()
    ),
    "gradients in f16 bounded by the weights of labels alone": Break(
        _edit(
            ("        own = abs(1.0 - label_smoothing) * w_t + abs(label_smoothing) * spread[]", "        own = w_t")
        ),
        (),
        tests.test_f16_gradients_do_not_overflow,
        (1e4, {"label_smoothing": 0.9}, "mean", "cuda"),
    ),
    "z-loss forgotten in what bounds gradients in f16": Break(
        _edit(("where(z_loss == 0.0, f64(0.0), 2.0 * lse * abs(z_loss * ratio))", "f64(0.0) * lse * ratio")),
        (),
        tests.test_f16_gradients_do_not_overflow,
        (0.0, {"z_loss": 10.0}, "sum", "cuda"),
    ),
    "a mean in f16 over labels that weigh nothing has no gradient": Break(
        _edit(("where(labels[] > 0.0, f / mass[]", "where(total[] > 0.0 and labels[] > 0.0, f / mass[]")),
        (),
        tests.test_the_mean_over_labels_that_weigh_nothing_is_none,
        (torch.float16, "cuda"),
    ),
    "sums rounded at each of many chunks": Break(
        (),
        ((sizing, "ROUNDINGS", 10**9),),
        tests.test_the_error_of_the_weight_gradient_does_not_grow_with_the_chunks,
        (),
    ),
    "the first chunk added to what was there": Break(
        (), ((op_module, "lower", _replanned(_never_first)),), tests.test_any_number_of_chunks_gives_the_same, (3,)
    ),
    "sums over no chunk left as they were": Break(
        (), ((op_module, "lower", _replanned(_not_zeroed)),), tests.test_no_tokens, ("cuda", F32)
    ),
    "saved gradients changed although the graph is kept": Break(
        (), ((walk, "_own", lambda s: lambda env, i, n: None),), calls.test_several_backward_passes, (F32, "mean")
    ),
    "gradients that no one asked for": Break(
        (), ((op_module, "lower", _all_gradients),), calls.test_only_wanted_gradients_cost_anything, (("x",), 2, "mean")
    ),
    "the budget ignored": Break(
        (),
        ((sizing, "even", lambda extent, limit: max(1, extent)),),
        _budget,
        (),
    ),
    "memory that grows with the square of a chunk taken for the rows times one": Break(
        (),
        ((sizing, "_fitting", _in_proportion),),
        host_ops.test_memory_that_grows_with_the_square_of_a_chunk_keeps_to_the_budget,
        (),
    ),
    "chunks rounded up until the last has one row": Break(
        (), ((sizing, "even", _rounded_up),), host_programs.test_chunks_are_even, (641, 128)
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_mistake_is_found(name: str) -> None:
    b = BREAKS[name]
    with broken(Break((), (), b.test, b.args)):
        b.test(*b.args)  # on ops that are loaded anew, and right
    with broken(b), pytest.raises((AssertionError, pytest.fail.Exception)):
        b.test(*b.args)
