"""As `test_mutations`, of gradients, layouts, sizes and the rotary embedding."""

from __future__ import annotations

import functools

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
from mutation_kit import BF16, F32, Break, by, derived, printed, running, seen_under, swapped, text, told

import kgen
from kgen.codegen.derive import derive, differentiable
from kgen.runtime import autograd, plan, preparing
from kgen.runtime import differentiable as asked
from kgen.runtime import layouts as layout_module
from kgen.runtime.host_executor import HostLaunchError
from kgen.runtime.kernel import Kernel

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BREAKS: dict[str, Break] = {
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
        swapped(asked, "requiring", mistakes.every_float),
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
        swapped(asked, "refuse_tangents", lambda *_: None),
        (by(gradients.test_derivatives_that_are_not_derived_are_refused, "softmax", "reference"),),
    ),
    "a workspace is not zeroed": Break(
        functools.partial(broken.poisoned, zeroed=False),
        (by(numerics.test_sums_of_chunks_are_kept_in_memory, "triton"),),
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
    seen_under(BREAKS[mistake])
