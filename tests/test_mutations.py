"""The tests can fail: each known mistake, made on purpose, turns the tests red that are there to find it.

`BREAKS` holds for each mistake how it is made (`break_kit`), and calls of tests which pass without it and must fail
with it. docs/known-failures.md has the kinds of mistakes in words.
"""

from __future__ import annotations

import functools

import break_kit as broken
import pytest
import test_add_rms_norm as add_rms_norm
import test_cross_entropy as cross_entropy
import test_known_functions as functions
import test_known_gradients as gradients
import test_known_layouts as layouts
import test_known_numerics as numerics
import test_known_shapes as shapes
import test_ops as ops_tests
from mutation_kit import BF16, F16, F32, Break, by, printed, seen_under, swapped, text

from kgen.ops import losses

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NO_WEIGHTS = functools.partial(lambda t, w, i, right: right(t, None, i), right=losses.kept_weight)
# E[x^2] - E[x]^2.
IN_ONE_PASS = "mean(x[m, n] * x[m, n], n) - mean(x[m, n], n) * mean(x[m, n], n)"

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
        (by(functions.test_rsqrt_in_every_binade, "cuda", "cpu"),),
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
}


@pytest.mark.parametrize("mistake", BREAKS)
def test_every_mistake_is_seen(mistake: str) -> None:
    seen_under(BREAKS[mistake])
