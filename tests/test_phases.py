"""Phases: which pass computes what, and that no choice of chunks changes a result."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from ir_kit import KernelKit, show, tensor, variant
from step_runner import run_steps
from unplanned_cases import CASES, Case

from kgen.codegen.interpret import interpret
from kgen.codegen.normalize import normalize, required_dims
from kgen.codegen.phases import phases
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Loop, Schedule, ScheduleError, Step
from kgen.codegen.shapes import bind_dims
from kgen.codegen.variant import TensorClass, Variant
from kgen.dsl import ir
from kgen.dsl.check import Specialization, elaborate, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import F32
from kgen.dsl.parser import parse_text

UNPLANNED = parse_text((Path(__file__).parent / "kernels/unplanned.kdsl").read_text())


def steps(kernel: ir.Kernel, dims: dict[str, int], **chunks: int) -> list[str]:
    """The steps as text: `n/4:` opens a pass over n in chunks of 4, `once:` a straight part."""
    normal = normalize(kernel, variant(kernel, dims))
    found = phases(normal, Schedule(32, 1, chunks=tuple(chunks.items())))
    return [line for step in found for line in (_title(step), *show(step.body))]


def _title(step: Step) -> str:
    return f"{step.axis}/{step.chunk}:" if isinstance(step, Loop) else "once:"


def softmax(role: str = "out") -> ir.Kernel:
    out = "y" if role == "out" else "x"
    tensors = [tensor("x", "*M, N", "in" if role == "out" else "inout"), tensor("y", "*M, N", "out")]
    k = KernelKit(tensors if role == "out" else tensors[:1], "m in M", "n in N")
    x = k.load("x", "m", "n")
    e = k.let("e", k.op("exp", k.op("sub", x, k.reduce("max", x, "n"))))
    k.store(out, "m, n", k.op("div", e, k.reduce("sum", e, "n")))
    return k.kernel()


def test_whole_axes_are_one_straight_step() -> None:
    assert steps(softmax(), {"N": 8}) == steps(softmax(), {"N": 8}, n=16)
    assert steps(softmax(), {"N": 8})[0] == "once:"


def test_a_chunk_as_long_as_its_axis_is_loaded_in_each_pass() -> None:
    several = steps(softmax(), {"N": 8}, n=4)
    assert steps(softmax(), {"N": 8}, n=8) == [line.replace("n/4", "n/8") for line in several]


def test_one_pass_a_level() -> None:
    assert steps(softmax(), {"N": 8}, n=4) == [
        "n/4:",
        "x_mn = x[m, n]",
        "e_max = max(x_mn, n)",
        "n/4:",
        "x_mn = x[m, n]",
        "e = exp(sub(x_mn, e_max))",
        "y_sum = sum(e, n)",
        "n/4:",
        "x_mn = x[m, n]",
        "e = exp(sub(x_mn, e_max))",
        "y[m, n] = div(e, y_sum)",
    ]


def test_stores_run_in_the_earliest_pass() -> None:
    k = KernelKit([tensor("x", "*M, N"), tensor("y", "*M, N", "out"), tensor("z", "*M, N", "out")], "m in M", "n in N")
    x = k.load("x", "m", "n")
    total = k.let("total", k.reduce("sum", x, "n"))
    k.store("z", "m, n", k.op("mul", x, total))
    k.store("y", "m, n", k.op("neg", x))
    assert steps(k.kernel(), {"N": 8}, n=2) == [
        "n/2:",
        "x_mn = x[m, n]",
        "total = sum(x_mn, n)",
        "y[m, n] = neg(x_mn)",
        "n/2:",
        "x_mn = x[m, n]",
        "z[m, n] = mul(x_mn, total)",
    ]


def test_an_overwriting_store_waits_for_the_last_pass_that_loads() -> None:
    k = KernelKit([tensor("x", "*M, N", "inout"), tensor("s", "*M", "out", F32)], "m in M", "n in N")
    x = k.load("x", "m", "n")
    peak = k.let("peak", k.reduce("max", x, "n"))
    total = k.let("total", k.reduce("sum", k.op("sub", x, peak), "n"))
    k.store("x", "m, n", k.op("neg", x))
    k.store("s", "m", total)
    lines = steps(k.kernel(), {"N": 8}, n=2)
    # `neg(x)` would fit the first pass, but the second still reads x.
    assert [i for i, line in enumerate(lines) if line.startswith("n/")] == [0, 3]
    assert lines.index("x[m, n] = neg(x_mn)") > 3


def test_values_without_the_axis_are_computed_once() -> None:
    k = KernelKit([tensor("x", "*M, N"), tensor("s", "*M"), tensor("y", "*M, N", "out")], "m in M", "n in N")
    scale = k.let("scale", k.op("exp", k.load("s", "m")))
    k.store("y", "m, n", k.op("mul", k.load("x", "m", "n"), scale))
    assert steps(k.kernel(), {"N": 8}, n=2) == [
        "once:",
        "s_m = s[m]",
        "scale = exp(s_m)",
        "n/2:",
        "x_mn = x[m, n]",
        "y[m, n] = mul(x_mn, scale)",
    ]


def two_axes(together: bool) -> ir.Kernel:
    k = KernelKit(
        [tensor("a", "*M, N"), tensor("b", "*M, K"), tensor("y", "*M", "out", F32)], "m in M", "n in N, k in K"
    )
    a, b = k.load("a", "m", "n"), k.load("b", "m", "k")
    if together:
        k.store("y", "m", k.reduce("sum", k.op("mul", a, b), "n", "k"))
    else:
        k.store("y", "m", k.op("sub", k.reduce("sum", a, "n"), k.reduce("max", b, "k")))
    return k.kernel()


def test_axes_apart_have_passes_of_their_own() -> None:
    assert steps(two_axes(together=False), {"N": 8, "K": 6}, n=4, k=3) == [
        "n/4:",
        "a_mn = a[m, n]",
        "y_sum = sum(a_mn, n)",
        "k/3:",
        "b_mk = b[m, k]",
        "y_max = max(b_mk, k)",
        "once:",
        "y[m] = sub(y_sum, y_max)",
    ]


def test_axes_together_are_not_both_looped() -> None:
    with pytest.raises(ScheduleError, match="both n and k in chunks"):
        steps(two_axes(together=True), {"N": 8, "K": 6}, n=4, k=3)
    assert steps(two_axes(together=True), {"N": 8, "K": 6}, n=4)[:2] == ["once:", "b_mk = b[m, k]"]


@pytest.mark.parametrize(
    ("read", "fits"),
    [("n", True), ("n + N", True), ("n * -1 + 7", False), ("n + 1", True)],
)
def test_chunks_of_a_shifted_overwrite(read: str, fits: bool) -> None:
    """x[n] = x[n + 1] reads only what no earlier chunk wrote; x[n] = x[7 - n] does not."""
    k = KernelKit([tensor("x", "*M, 2*N + 1", "inout")], "m in M", "n in N")
    k.store("x", "m, n", k.op("neg", k.load("x", "m", read)))
    if fits:
        steps(k.kernel(), {"N": 8}, n=4)
    else:
        with pytest.raises(ScheduleError, match="cannot take n in chunks"):
            steps(k.kernel(), {"N": 8}, n=4)


def test_a_later_chunk_must_not_read_what_was_overwritten() -> None:
    k = KernelKit([tensor("x", "*M, N + 1", "inout")], "m in M", "n in N")
    k.store("x", "m, n + 1", k.op("neg", k.load("x", "m", "n")))
    with pytest.raises(ScheduleError, match="a later chunk reads"):
        steps(k.kernel(), {"N": 8}, n=4)


# ---- meaning -------------------------------------------------------------------------------------------------------


def specialised(case: Case, size: tuple[int, int]) -> tuple[ir.Kernel, dict[str, torch.Tensor], dict[str, float]]:
    """The kernel of `case` for float32 arguments (or its only dtype), its tensors and run-time scalars."""
    args = case.make(*size, case.dtypes[0], torch.Generator().manual_seed(7))
    signature = signature_of(next(k for k in UNPLANNED.kernels if k.name == case.kernel), Diagnostics())
    consts = {p.name: p.default for p in signature.scalars if p.const and p.default is not None}
    consts |= {p.name: args[p.name] for p in signature.scalars if p.const and p.name in args}
    present = frozenset(t.name for t in signature.tensors if t.optional and t.name in args)
    spec = Specialization(dict.fromkeys(signature.dtype_vars, F32), consts, present)
    tensors = {n: v for n, v in args.items() if isinstance(v, torch.Tensor)}
    scalars = {n: v for n, v in args.items() if n not in tensors and n not in consts}
    return elaborate(UNPLANNED, case.kernel, spec), tensors, scalars


def variant_of(kernel: ir.Kernel, tensors: dict[str, torch.Tensor]) -> Variant:
    dims = bind_dims(kernel, {n: tuple(t.shape) for n, t in tensors.items()})
    required = tuple((d, dims[d]) for d in required_dims(kernel))
    return Variant(required, (), (), tuple((t.name, TensorClass()) for t in kernel.tensors))


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c.kernel}" for i, c in enumerate(CASES)])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_no_schedule_changes_the_meaning(case: Case, backend: str) -> None:
    for size in case.sizes:
        kernel, tensors, scalars = specialised(case, size)
        expected = interpret(kernel, tensors, scalars, precision="f64")
        v = variant_of(kernel, tensors)
        tiles = {a.name: a.extent.constant for a in normalize(kernel, v).tiles}
        chosen = [schedule_kernel(kernel, v, backend)]
        for chunk, axes in itertools.product((1, 4), _subsets(tiles)):
            trial = Schedule(32, 1, chunks=tuple((a, chunk) for a in axes))
            try:
                chosen.append(schedule_kernel(kernel, v, backend, override=trial))
            except ScheduleError:
                # Refused: axes that meet in a statement, or an overwrite that chunks would break.
                assert len(axes) > 1 or any(t.role == "inout" for t in kernel.tensors)
        for scheduled in chosen:
            actual = run_steps(scheduled, tensors, scalars)
            for name, value in expected.items():
                # Chunks change the order of float64 additions, nothing else.
                torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-13, equal_nan=True)


def _subsets(names: dict[str, int]) -> list[tuple[str, ...]]:
    return [c for r in range(1, len(names) + 1) for c in itertools.combinations(names, r)]
