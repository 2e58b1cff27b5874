"""Rows of sums that Triton holds whole on all registers of a multiprocessor: what is loaded again, and that it fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sums_kit
import torch
from cuda_kit import call, prepare
from sums_kit import within_bounds
from test_by_elements import BF16, F32, TEXT, arguments, pasted

from kgen.codegen import pipeline, triton
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.program import Program
from kgen.codegen.schedule import Schedule
from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, target
from kgen.runtime.triton_compile import compile_triton


def wide_rows(n: int, dtype: torch.dtype = BF16) -> Program:
    """The backward of RMSNorm."""
    c = call(TEXT, "rms_norm_grad", **arguments("rms_norm_grad", 2, n, dtype))
    where, _ = prepare(c)
    return triton.emit(schedule_kernel(where.kernel, where.variant, "triton"))


def in_order(text: str, lines: list[str]) -> bool:
    places = [text.index(line) for line in lines]
    return places == sorted(places)


def test_weights_are_loaded_again_and_sums_added_to_before_a_reduction_has_users() -> None:
    """Of the row, `d_y` is held as it was loaded; of `x`, `x_hat` would be held, which takes twice the registers."""
    program = wide_rows(16384)
    text = program.source
    assert in_order(
        text,
        [
            "w_n = tl.load(w_ptr + n).to(tl.float32)",
            "d_x_sum = tl.sum(g * x_hat, axis=0)",
            "d_w_partial_sum += d_y_mn * x_hat",
            'x_mn_again = tl.load(x_row + n, cache_modifier=".ca").to(tl.float32)',
            'w_n_again = tl.load(w_ptr + n, cache_modifier=".ca").to(tl.float32)',
            "x_hat_again = x_mn_again * rstd_m",
            "g_again = d_y_mn * w_n_again",
            "tl.store(d_x_row + n, (rstd_m * (g_again - x_hat_again * ",
        ],
    )
    assert len(re.findall(r"tl\.load\(d_y_row", text)) == 1
    assert program.schedule.threads == 512 and program.schedule.stages == 1
    assert program.stage is not None and program.stage.sums is not None and program.stage.sums.blocks == 1


def test_a_row_that_is_used_as_it_was_loaded_is_loaded_once() -> None:
    module = parse_text(pasted("rms_norm.kdsl", "rms_norm", 16384))
    made = target(module, module.kernels[0], Choices(dims={"M": 64, "N": 16384}, dtype="bf16"))
    text = made.program("triton").source
    assert len(re.findall(r"tl\.load\((?:x|d_y)_row", text)) == 2
    assert len(re.findall(r"tl\.load\(w_ptr", text)) == 2


@pytest.mark.parametrize(("n", "dtype"), [(8192, BF16), (4096, F32)])
def test_rows_with_room_keep_their_weights(n: int, dtype: torch.dtype) -> None:
    assert ".ca" not in wide_rows(n, dtype).source


@pytest.mark.parametrize(("n", "dtype"), [(16384, F32), (9001, BF16), (16392, BF16)])
def test_what_would_spill_is_taken_by_elements(n: int, dtype: torch.dtype) -> None:
    assert [p.entry for p in wide_rows(n, dtype).launches][1] == "rms_norm_grad_elements"


@pytest.mark.parametrize("kernel", ["rms_norm_grad", "softmax_grad", "picked", "batched", "in_place", "affine_grad"])
def test_the_same_bits_as_with_everything_held(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements are in another order, additions to a sum are not."""
    for n, dtype in ((37, F32), (64, BF16)):
        c = call(TEXT, kernel, **arguments(kernel, 11, n, dtype))
        held = Schedule(64, 1, programs=4)
        before = sums_kit.run(c, "triton", held)
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "tight", lambda *_: True)
            got = sums_kit.run(c, "triton", held)
            where, _ = prepare(c)
            text = triton.emit(schedule_kernel(where.kernel, where.variant, "triton", override=held)).source
        within_bounds(c, got)
        assert all(torch.equal(before[name], got[name]) for name in got)
        # Others use the row as it was loaded, or nothing of it behind a reduction.
        assert (".ca" in text) == (kernel in ("rms_norm_grad", "softmax_grad"))


LOOKED_UP = """
kernel looked_up(x: T[M, N], z: inout T[M, N]) -> (s: f32[N], y: T[M, N]):
    parallel m in M
    tile n in N
    at = argmax(x[m, n], n)
    g = z[m, at]
    z[m, n] = 2.0 * x[m, n]
    y[m, n] = g * mean(x[m, at] * x[m, n], n)
    s[n] += x[m, n]
"""


def test_what_a_reduction_looks_up_is_read_before_it_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store needs no reduction, the load does, and what needs the load first needs another one too."""
    monkeypatch.setattr(pipeline, "tight", lambda *_: True)
    c = call(LOOKED_UP, "looked_up", x=torch.randn(11, 37), z=torch.randn(11, 37))
    within_bounds(c, sums_kit.run(c, "triton", Schedule(64, 1, programs=4)))


def names(file: str) -> str:
    return {"rms_norm": "w", "layer_norm": "w,b"}[file]


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("n", [9001, 12288, 16384])
@pytest.mark.parametrize("kernel", ["rms_norm", "layer_norm"])
def test_nothing_spills(kernel: str, n: int, dtype: str, tmp_path: Path) -> None:
    for options in ((), ("--without", names(kernel))):
        module = parse_text(pasted(f"{kernel}.kdsl", kernel, n, "--dtype", dtype, *options))
        made = target(module, module.kernels[0], Choices(dims={"M": 64, "N": n}, dtype=dtype))
        for p in made.program("triton").launches:
            variant = made.layout.variant if p.stage is None else p.stage.variant
            assert compile_triton(p, variant, 90, tmp_path).resources.local_bytes == 0, (options, p.entry)
