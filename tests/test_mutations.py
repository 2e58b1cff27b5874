"""The tests can fail: each known mistake, made on purpose, turns the tests red that are there to find it.

`BREAKS` holds for each mistake how it is made (`break_kit`), and calls of tests which pass without it and must fail
with it. docs/known-failures.md has the kinds of mistakes in words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import break_kit as broken
import derive_kit
import pytest
import runtime_mistakes as mistakes
import test_add_rms_norm as add_rms_norm
import test_autograd as autograd_tests
import test_cross_entropy as cross_entropy
import test_known_gradients as gradients
import test_known_layouts as layouts
import test_known_numerics as numerics
import test_known_shapes as shapes
import test_nn as modules
import test_ops as ops_tests
import test_runtime_layouts as layout_tests
import torch

import kgen
from kgen.codegen.derive import derive, differentiable
from kgen.ops import losses
from kgen.runtime import autograd, plan, preparing
from kgen.runtime import layouts as layout_module
from kgen.runtime.host_executor import HostLaunchError
from kgen.runtime.kernel import Kernel

pytestmark = pytest.mark.usefixtures("poisoned_memory")

RED = (AssertionError, pytest.fail.Exception)  # what `assert` and a missing error raise


@dataclass(frozen=True)
class Seen:
    """A call of a test that fails under the mistake, by raising one of `error`."""

    test: Callable[..., None]
    args: tuple[Any, ...] = ()
    error: tuple[type[BaseException], ...] = RED


@dataclass(frozen=True)
class Break:
    """A mistake and what sees it."""

    made: Callable[[], AbstractContextManager[None]]
    seen: tuple[Seen, ...]


def by(test: Callable[..., None], *args: Any, error: type[BaseException] | None = None) -> Seen:
    """The call `test(*args)`, which must fail."""
    return Seen(test, args, RED if error is None else (error,))


def text(file: str, *edits: tuple[str, str]) -> Callable[[], AbstractContextManager[None]]:
    """Edits of a shipped `.kdsl`."""
    return functools.partial(broken.source, file, *edits)


def derived(kernel: str, *edits: tuple[str, str]) -> Callable[[], AbstractContextManager[None]]:
    """Edits of a derived backward."""
    return functools.partial(broken.backward, kernel, *edits)


def printed(backend: str, pattern: str, new: str) -> Callable[[], AbstractContextManager[None]]:
    """Edits of generated code."""
    return functools.partial(broken.printed, backend, pattern, new)


def told(change: mistakes.Told) -> Callable[[], AbstractContextManager[None]]:
    """A wrong word on the memory of tensors."""
    return functools.partial(broken.memory, change)


def running(
    change: Callable[[autograd.Training, mistakes.Run, list[Any]], Any],
) -> Callable[[], AbstractContextManager[None]]:
    """Another way to run backward kernels."""
    return functools.partial(broken.running, change)


def swapped(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    """Another attribute of a module or class."""
    return functools.partial(broken.replaced, owner, name, value)


NO_WEIGHTS = functools.partial(lambda t, w, i, right: right(t, None, i), right=losses.kept_weight)
# E[x^2] - E[x]^2.
IN_ONE_PASS = "mean(x[m, n] * x[m, n], n) - mean(x[m, n], n) * mean(x[m, n], n)"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

BREAKS: dict[str, Break] = {
    # ---- values ----
    "offset dropped": Break(
        text("rms_norm", ("(offset + w[n])", "w[n]")),
        (
            by(numerics.test_a_weight_of_zero, "reference"),
            by(numerics.test_casting_modes_to_the_bit, "reference", BF16, None),
            by(ops_tests.test_rms_norm_casting_modes_differ_and_match, "triton"),
        ),
    ),
    "offset dropped where the row is rounded first": Break(
        text("rms_norm", ("(offset + w[n]) * T(", "w[n] * T(")),
        (by(numerics.test_a_weight_of_zero, "reference"),),
    ),
    "rounded after the weight instead of before": Break(
        text("rms_norm", ("(offset + w[n]) * T(x[m, n] * r)", "(offset + w[n]) * x[m, n] * r")),
        (by(numerics.test_casting_modes_to_the_bit, "reference", BF16, None),),
    ),
    "rounded before the weight": Break(
        text("rms_norm", ("y[m, n] = x[m, n] * r * (offset + w[n])", "y[m, n] = T(x[m, n] * r) * (offset + w[n])")),
        (by(numerics.test_casting_modes_to_the_bit, "triton", F16, 0.25),),
    ),
    "rounded before the weight, in the fused kernel": Break(
        text("add_rms_norm", ("y[m, n] = s * r * (offset + w[n])", "y[m, n] = T(s * r) * (offset + w[n])")),
        (
            by(numerics.test_casting_modes_to_the_bit, "reference", BF16, None),
            by(add_rms_norm.test_to_the_bit_what_two_kernels_give, "reference", "none"),
        ),
    ),
    "gate rounded before the product": Break(
        text("swiglu", ("y[m, n] = silu(gate[m, n])", "y[m, n] = T(silu(gate[m, n]))")),
        (by(numerics.test_gated_units_round_once, "reference", BF16), by(ops_tests.test_swiglu_rounds_once, "triton")),
    ),
    "gelu rounded before the product": Break(
        text("swiglu", ("y[m, n] = gelu(gate[m, n])", "y[m, n] = T(gelu(gate[m, n]))")),
        (by(numerics.test_gated_units_round_once, "reference", F16),),
    ),
    "halves exchanged": Break(
        text("swiglu", ("silu(gate[m, n]) * up[m, n]", "silu(up[m, n]) * gate[m, n]")),
        (
            by(ops_tests.test_swiglu_takes_the_halves_of_a_chunk, "reference"),
            by(layouts.test_halves_of_one_buffer, "triton"),
        ),
    ),
    "squares summed in f16": Break(
        text("rms_norm", ("mean(x[m, n] * x[m, n], n)", "mean(T(x[m, n] * x[m, n]), n)")),
        (by(ops_tests.test_rms_norm_f16_sum_of_squares_does_not_overflow, "reference", 300.0),),
    ),
    "deviations squared in f16": Break(
        text("layer_norm", ("mean(c * c, n)", "mean(T(c * c), n)")),
        (by(numerics.test_sums_of_f16_are_f32, "reference"),),
    ),
    "exponentials summed in f16": Break(
        text("cross_entropy", ("total = sum(exp(x - top), v)", "total = T(sum(exp(x - top), v))")),
        (by(numerics.test_sums_of_f16_are_f32, "reference"),),
    ),
    "variance in one pass": Break(
        text("layer_norm", ("mean(c * c, n)", IN_ONE_PASS)),
        (
            by(numerics.test_the_variance_of_rows_far_from_zero, "reference", 1449.0, 1.0, 67),
            by(numerics.test_the_variance_of_rows_far_from_zero, "triton", 100.0, 0.1, 1000),
            by(numerics.test_gradients_of_rows_far_from_zero, "reference"),
            by(ops_tests.test_layer_norm_does_not_cancel, "reference", 1e2),
        ),
    ),
    "variance of a user's kernel in one pass": Break(
        swapped(numerics, "MOMENTS", numerics.MOMENTS.replace("var(x[m, n], n)", IN_ONE_PASS)),
        (
            by(numerics.test_the_variance_of_rows_far_from_zero, "reference", 1e4, 8.0, 1000),
            by(numerics.test_the_variance_of_a_constant_row_is_not_negative, "reference", 7e8),
        ),
    ),
    "squares leave the range": Break(
        text("rms_norm", ("mean(x[m, n] * x[m, n], n)", "(sum(8.0 * x[m, n] * x[m, n] * 2.0e20, n) / (1.6e21 * N))")),
        (by(numerics.test_rows_of_large_numbers, "reference", 40),),
    ),
    "warps not merged": Break(
        printed("cuda", r"^\s*\w+ \+= \w+_slots\[i\];\n", ""),
        (
            by(ops_tests.test_rms_norm_widths, "cuda", 1025, F32),
            by(numerics.test_rows_of_large_numbers, "cuda", 4096),
        ),
    ),
    "masked elements enter a reduction": Break(
        functools.partial(broken.injected, "mask"),
        (
            by(ops_tests.test_softmax_dims, "triton", "softmax", 1),
            by(layouts.test_addresses_that_are_not_aligned, 46, 1, 0, F32, "triton"),
        ),
    ),
    "last element left out": Break(
        functools.partial(broken.injected, "short"),
        (
            by(ops_tests.test_rms_norm_widths, "triton", 33, F32),
            by(ops_tests.test_rms_norm_widths, "cuda", 33, F32),
            by(shapes.of_width, "softmax", 65, "triton"),
            by(layouts.test_extents_of_one, (5, 1), "triton"),
        ),
    ),
    "mean not subtracted": Break(
        text("layer_norm", ("c = x[m, n] - mean(x[m, n], n)", "c = x[m, n]")),
        (by(numerics.test_width_one, "reference"), by(ops_tests.test_layer_norm_of_width_one_is_its_bias, "triton")),
    ),
    "variance over one element less": Break(
        text("layer_norm", ("mean(c * c, n)", "sum(c * c, n) / (N - 1)")),
        (by(numerics.test_width_one, "reference"), by(ops_tests.test_layer_norm_parts, "reference", (True, True))),
    ),
    "epsilon forgotten": Break(
        text("rms_norm", (" + eps)", " + 0.0 * eps)")),
        (by(numerics.test_a_row_of_zeros_has_a_finite_gradient, "reference"),),
    ),
    "logarithm of a softmax": Break(
        text("softmax", ("y[m, n] = c - log(sum(exp(c), n))", "y[m, n] = log(exp(c) / sum(exp(c), n))")),
        (by(numerics.test_logarithms_of_vanishing_probabilities, "reference"),),
    ),
    "mixture of probabilities": Break(
        swapped(
            numerics,
            "JENSEN_SHANNON",
            numerics.JENSEN_SHANNON.replace("maximum(a, b) + log1p(exp(-abs(a - b)))", "log(exp(a) + exp(b))"),
        ),
        (by(numerics.test_logarithms_of_vanishing_probabilities, "reference"),),
    ),
    "maximum drops NaN (CUDA)": Break(
        printed("cuda", r"return a > b \|\| a != a \? a : b;", "return fmaxf(a, b);"),
        (by(numerics.test_extremes_propagate_nan, "cuda", 33),),
    ),
    "maximum drops NaN (Triton)": Break(
        printed("triton", r"PropagateNan\.ALL", "PropagateNan.NONE"),
        (by(numerics.test_extremes_propagate_nan, "triton", 200),),
    ),
    "masked with a large number": Break(
        text("softmax", ("softmax(x[m, n], n)", "softmax(maximum(x[m, n], -1e30), n)")),
        (by(numerics.test_masked_rows_and_their_gradients, "reference", "softmax"),),
    ),
    "NaN taken for a mask": Break(
        text("softmax", ("softmax(x[m, n], n)", "softmax(where(isnan(x[m, n]), -inf, x[m, n]), n)")),
        (
            by(numerics.test_masked_rows_and_their_gradients, "reference", "softmax"),
            by(ops_tests.test_softmax_specials, "triton"),
        ),
    ),
    "argument of an activation clamped": Break(
        text("swiglu", ("silu(gate[m, n])", "silu(maximum(gate[m, n], -80.0))")),
        (by(numerics.test_activations_at_infinity, "reference"),),
    ),
    "maximum not subtracted in softmax": Break(
        text("softmax", ("softmax(x[m, n], n)", "exp(x[m, n]) / sum(exp(x[m, n]), n)")),
        (by(ops_tests.test_softmax_specials, "reference"),),
    ),
    "rsqrt is approximate": Break(
        printed("cuda", r"rsqrtf\((.+)\);", r"rsqrtf(\1) * 1.0000005f;"),
        (by(numerics.test_rsqrt_in_every_binade, "cuda", "cpu"),),
    ),
    # ---- cross entropy ----
    "loss in the dtype of the logits": Break(
        text("cross_entropy", ("-> (loss: f32[*M], z: f32[*M])", "-> (loss: T[*M], z: T[*M])")),
        (by(gradients.test_an_upstream_gradient_of_another_dtype, "reference"),),
    ),
    "maximum not subtracted in cross entropy": Break(
        text("cross_entropy", ("top = max(x, v)", "top = 0.0 * max(x, v)")),
        (
            by(cross_entropy.test_edges_of_logits, "reference"),
            by(cross_entropy.test_a_shift_of_a_row_changes_nothing, "triton"),
        ),
    ),
    "the column behind the last class is a class": Break(
        text("cross_entropy", ("t >= count", "t > count")),
        (
            by(numerics.test_the_last_class_and_the_columns_behind_it, "reference", 9),
            by(cross_entropy.test_a_label_out_of_range_makes_its_row_nan, "triton", 9, False),
        ),
    ),
    "the last class is none": Break(
        text("cross_entropy", ("t >= count", "t >= count - 1")),
        (by(numerics.test_the_last_class_and_the_columns_behind_it, "triton", 33),),
    ),
    "labels narrowed before they are compared": Break(
        text("cross_entropy", ("t = where(kept, target[m], 0)", "t = where(kept, i32(target[m]), 0)")),
        (by(cross_entropy.test_a_label_out_of_range_makes_its_row_nan, "reference", 2**32 + 1, False),),
    ),
    "labels out of range taken for a class": Break(
        text("cross_entropy", ("where(t < 0 or t >= count, nan, 1.0)", "1.0")),
        (by(cross_entropy.test_a_label_out_of_range_makes_its_row_nan, "reference", 14, False),),
    ),
    "ignored rows take part": Break(
        text("cross_entropy", ("loss[m] = where(kept, ce, 0.0)", "loss[m] = ce")),
        (
            by(cross_entropy.test_no_label_is_kept, "reference", {}),
            by(gradients.test_a_micro_batch_without_labels_among_others, "reference"),
            by(gradients.test_each_token_has_its_own_upstream_gradient, "reference", 0.1),
        ),
    ),
    "ignored rows multiplied by 0": Break(
        text("cross_entropy", ("loss[m] = where(kept, ce, 0.0)", "loss[m] = ce * where(kept, 1.0, 0.0)")),
        (
            by(cross_entropy.test_no_label_is_kept, "reference", {}),
            by(gradients.test_upstream_gradients_of_any_value, "reference", "none", float("nan")),
        ),
    ),
    "the other label smoothing": Break(
        text(
            "cross_entropy",
            ("label_smoothing * mean(lse - x, v)", "label_smoothing * (sum(lse - x, v) - nll) / (V - 1)"),
        ),
        (
            by(numerics.test_label_smoothing_is_torchs, "reference"),
            by(cross_entropy.test_ignore_index_that_is_a_class, "reference"),
        ),
    ),
    "mean over rows instead of weights": Break(
        swapped(losses, "kept_weight", NO_WEIGHTS),
        (
            by(numerics.test_denominators_of_the_mean, "reference"),
            by(cross_entropy.test_every_combination_of_options, "reference", cross_entropy.OPTIONS[4]),
        ),
    ),
    "smoothing forgets the class weights": Break(
        text("cross_entropy", ("sum(weight[v] * (lse - x), v)", "sum(lse - x, v)")),
        (by(numerics.test_denominators_of_the_mean, "reference"),),
    ),
    # ---- gradients ----
    "saved input overwritten by the backward": Break(
        running(mistakes.overwrites_its_input),
        (
            by(gradients.test_backward_twice_leaves_everything_as_it_was, "swiglu", "reference"),
            by(gradients.test_one_tensor_for_several_arguments, 0, "reference"),
            by(autograd_tests.test_the_same_tensor_twice, "triton"),
            by(cross_entropy.test_two_losses_of_the_same_logits_leave_them_unchanged, "reference"),
            by(layouts.laid_out, "softmax", 0, 0, "reference"),
        ),
    ),
    "gradients kept and overwritten": Break(
        mistakes.keeps_its_buffers,
        (
            by(gradients.test_backward_twice_leaves_everything_as_it_was, "layer_norm", "reference"),
            by(autograd_tests.test_two_backwards_with_other_scales, "triton"),
        ),
    ),
    "one upstream gradient for all tokens": Break(
        running(mistakes.first_gradient_for_all),
        (
            by(gradients.test_each_token_has_its_own_upstream_gradient, "reference", 0.0),
            by(cross_entropy.test_as_torch, "triton", 33, F32),
        ),
    ),
    "upstream gradient taken for 1": Break(
        running(mistakes.ones_for_all),
        (
            by(gradients.test_upstream_gradients_of_any_value, "reference", "mean", 3.7),
            by(gradients.test_upstream_gradients_of_any_value, "reference", "sum", 0.0),
        ),
    ),
    "the host asks for a value": Break(
        running(mistakes.asks_whether_it_is_one),
        (
            by(layouts.test_strided_calls_copy_nothing_and_wait_for_nothing, "layer_norm"),
            by(layouts.test_a_reduced_loss_waits_for_nothing),
        ),
    ),
    "an expanded gradient read as rows": Break(
        running(mistakes.reads_expanded_memory_as_rows),
        (
            by(layouts.test_gradients_of_a_sum_and_a_mean, "swiglu", "reference"),
            by(layouts.test_gradients_of_a_sum_and_a_mean, "cross_entropy", "triton"),
        ),
    ),
    "gradients of a weight summed in bf16": Break(
        running(mistakes.sums_chunks_in_bf16),
        (by(numerics.test_weight_gradients_do_not_drift_with_the_number_of_rows, "reference"),),
    ),
    "the residual gets no gradient from the norm": Break(
        derived("add_rms_norm", ("d_residual[m, n] = d_s", "d_residual[m, n] = 0.0 * d_s")),
        (
            by(add_rms_norm.test_gradients_from_both_outputs, "reference", ("y",), (0, 1, 2)),
            by(gradients.test_each_subset_of_inputs, "add_rms_norm"),
        ),
    ),
    "gradients computed that nobody asked for": Break(
        swapped(autograd, "requiring", mistakes.every_float),
        (by(autograd_tests.test_only_what_requires_grad_is_computed, "x"),),
    ),
    "everything derived whatever is asked for": Break(
        swapped(derive_kit, "derive", lambda k, wanted: derive(k, differentiable(k))),
        (by(gradients.test_frozen_inputs_cost_nothing),),
    ),
    "inputs cast under autocast": Break(
        swapped(Kernel, "ordered", mistakes.casts_under_autocast),
        (by(gradients.test_autocast_changes_nothing, "reference"),),
    ),
    "gradients of parameters missing": Break(
        swapped(autograd, "gradients", mistakes.without_parameters),
        (
            by(gradients.test_each_subset_of_inputs, "rms_norm"),
            by(gradients.test_weight_and_bias_present_or_not, (True, False), "reference"),
            by(modules.test_modules_train),
        ),
    ),
    "gradients of weight and bias exchanged": Break(
        swapped(autograd, "gradients", mistakes.exchanged),
        (
            by(gradients.test_weight_and_bias_present_or_not, (True, True), "reference"),
            by(modules.test_norms_are_torchs, "LayerNorm", (24,), {}),
        ),
    ),
    "the mean's share of the gradient dropped": Break(
        derived("layer_norm", ("d_x[m, n] = d_c - sum(d_c, n) / N", "d_x[m, n] = d_c")),
        (
            by(gradients.test_the_sum_of_a_normalised_row_has_no_gradient, "layer_norm", "reference"),
            by(gradients.test_each_subset_of_inputs, "layer_norm"),
        ),
    ),
    "tables written in place between forward and backward": Break(
        swapped(kgen.nn.RotaryEmbedding, "_tabulate", mistakes.tabulate_in_place),
        (
            by(
                gradients.test_generation_before_a_training_step_and_two_forwards_before_one_backward,
                "reference",
                error=RuntimeError,
            ),
        ),
    ),
    "no form for functional transforms": Break(
        swapped(autograd, "_TransformedCall", autograd._Call),
        (by(gradients.test_functional_transforms_of_each_op, "softmax", error=RuntimeError),),
    ),
    "tangents dropped": Break(
        swapped(autograd, "refuse_tangents", lambda *_: None),
        (by(gradients.test_derivatives_that_are_not_derived_are_refused, "softmax", "reference"),),
    ),
    "a workspace is not zeroed": Break(
        functools.partial(broken.poisoned, zeroed=False),
        (by(numerics.test_weight_gradients_of_long_rows, "triton"),),
    ),
    "the last partial sum is left out": Break(
        printed("cuda", r"points = SPLITS;", "points = SPLITS - 1;"),
        (by(numerics.test_weight_gradients_do_not_drift_with_the_number_of_rows, "cuda"),),
    ),
    "the result has the dtype of the weight": Break(
        text("rms_norm", ("-> (y: T[*M, N])", "-> (y: W[*M, N])")),
        (by(gradients.test_dtypes_of_results_and_gradients, F32, BF16),),
    ),
    # ---- layouts ----
    "gradient written with the strides of the upstream one": Break(
        told(mistakes.strides_of("d_y", "d_x")), (by(layouts.laid_out, "rms_norm", 0, 1, "cuda"),)
    ),
    "gradient read with the strides of the input": Break(
        told(mistakes.strides_of("x", "d_y")), (by(layouts.laid_out, "softmax", 0, 1, "triton"),)
    ),
    "heads of a gradient laid out as those of the upstream one": Break(
        told(mistakes.strides_of("d_q_out", "d_q")), (by(layouts.laid_out, "rope", 0, 1, "cuda"),)
    ),
    "columns of an input taken for neighbours": Break(
        told(mistakes.unit_stride("x", "gate", "up")),
        (
            by(layouts.laid_out, "softmax", 2, 0, "cuda"),
            by(layouts.laid_out, "layer_norm", 2, 0, "triton"),
            by(ops_tests.test_softmax_dims, "cuda", "softmax", 0),
        ),
    ),
    "columns of a weight taken for neighbours": Break(
        told(mistakes.unit_stride("w", "b", "weight")),
        (
            by(layouts.test_weights_of_any_stride, "every second", "cuda"),
            by(layouts.test_gradients_of_strided_weights, "column", "triton"),
        ),
    ),
    "columns of a table taken for neighbours": Break(
        told(mistakes.unit_stride("cos", "sin")), (by(layouts.test_tables_and_positions_of_any_stride, "cuda"),)
    ),
    "inputs copied": Break(
        swapped(Kernel, "ordered", mistakes.copies_its_inputs),
        (by(layouts.test_strided_calls_copy_nothing_and_wait_for_nothing, "swiglu"),),
    ),
    "an input taken to be aligned": Break(
        told(mistakes.aligned("gate", "up")),
        (by(layouts.test_addresses_that_are_not_aligned, 2520, 2, 0, F32, "cuda", error=HostLaunchError),),
    ),
    "an output taken to be aligned": Break(
        told(mistakes.aligned("y")),
        (by(layouts.test_addresses_that_are_not_aligned, 2520, 0, 3, F32, "cuda", error=HostLaunchError),),
    ),
    "a barrier is missing": Break(
        functools.partial(broken.injected, "barrier"), (by(layouts.test_a_row_reversed_into_itself, "cuda"),)
    ),
    "overlapping memory is not noticed": Break(
        swapped(plan, "shares_memory", lambda a, b: False),
        (by(layouts.test_outputs_that_overlap_an_input_are_refused, "reference"),),
    ),
    # ---- sizes ----
    "nothing to do is launched": Break(
        swapped(preparing, "prod", lambda sizes: 1),
        (by(shapes.test_no_rows, "layer_norm", "triton"),),
    ),
    "offsets take 32 bits": Break(
        swapped(layout_module, "_wide", lambda *_: False),
        (by(layout_tests.test_wide_goes_by_the_furthest_element),),
    ),
    "masked elements enter a sum": Break(
        functools.partial(broken.injected, "mask"), (by(shapes.test_sums_of_a_constant, "triton"),)
    ),
    "a sum does not start at 0": Break(
        functools.partial(broken.injected, "identity"), (by(shapes.test_sums_of_a_constant, "cuda"),)
    ),
    "high bits of the number of a program are lost": Break(
        printed("cuda", r"blockIdx\.x", "(blockIdx.x & 0xff)"), (by(shapes.test_many_rows, 65537, "cuda"),)
    ),
    "the end of a long row is left out": Break(
        printed("triton", r"range\(0, \d+,", "range(0, 65536,"),
        (by(shapes.test_rows_longer_than_any_block, 65537, "triton"),),
    ),
    # ---- rotary embedding ----
    "positions ignored": Break(
        text("rope", ("p = positions[b, s]", "p = positions[b, 0]")),
        (
            by(ops_tests.test_rope_positions_and_per_token_tables, "reference"),
            by(modules.test_rotary_embedding, False, torch.tensor([[0, 5, 300], [31, 2, 2]])),
        ),
    ),
    "pairs of the other kind": Break(
        text("rope", ("if interleaved:", "if not interleaved:")),
        (by(ops_tests.test_rope_full_and_partial, "reference", 16, 16, False),),
    ),
    "features that are not rotated are touched": Break(
        text("rope", ("q_out[b, s, i, R + t] = q[b, s, i, R + t]", "q_out[b, s, i, R + t] = 1.01 * q[b, s, i, R + t]")),
        (by(ops_tests.test_rope_full_and_partial, "reference", 128, 32, True),),
    ),
}


@pytest.mark.parametrize("mistake", BREAKS)
def test_every_mistake_is_seen(mistake: str) -> None:
    b = BREAKS[mistake]
    for seen in b.seen:
        seen.test(*seen.args)
    with b.made():
        for seen in b.seen:
            with pytest.raises(seen.error):
                seen.test(*seen.args)
