"""Collectives in the language: mistakes, which memory is reduced, and where ranks meet in the plans of ops."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from host_kit import planned, steps, verify
from linear_loss_kit import randn

import kgen
from kgen.codegen.host import plan
from kgen.codegen.host.lower import lower
from kgen.codegen.host.text import plan_text
from kgen.dsl.diagnostics import DslError
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host.check import elaborate_op, source_of
from kgen.dsl.host.scope import HostSpecialization
from kgen.dsl.modules import load
from kgen.runtime.errors import ArgumentError

_EDIT = """\
kernel edit_(x: inout f32[*M, N]):
    parallel m in M, n in N
    x[m, n] = x[m, n] * 2.0

"""


def op_text(*lines: str, header: str = "x: f32[B, H], w: f32[V, H]") -> str:
    """A file with one op, whose forward section has these lines."""
    return f"{_EDIT}op f({header}) -> (y: f32[B, V]):\n    forward:\n" + "".join(f"        {s}\n" for s in lines)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["y = all_sum(x) @ w.T"], "K0616"),
        (["y = x @ w.T", "all_sum(y)"], "K0603"),
        (["a = x @ w.T", "y = all_sum(a, a)"], "K0603"),
        (["a = x @ w.T", "y = all_sum(a=a)"], "K0603"),
        (["a = x @ w.T", "b, y = all_sum(a)"], "K0603"),
        (["a = x @ w.T", "y = all_sum(a.T)"], "K0616"),
        (["a: f32[B, V]", "for c in chunks(B):", "    a[c] = x[c] @ w.T", "    y[c] = all_max(a[c])"], "K0616"),
        (["a = x @ x.T", "y = all_sum(a)"], "K0604"),
        (["a = bf16(x)", "b = all_sum(a)", "y = x @ w.T"], "K0605"),
        (["a = x @ w.T", "y = all_min(a)"], "K0602"),
    ],
)
def test_mistakes_have_codes(tmp_path: Path, lines: list[str], code: str) -> None:
    (tmp_path / "op.kdsl").write_text(op_text(*lines))
    with pytest.raises(DslError) as error:
        kgen.load(tmp_path / "op.kdsl")
    assert code in {d.code for d in error.value.diagnostics}


def reduced(*lines: str) -> tuple[list[str], list[str]]:
    """The buffers that are reduced, and those that are copied, in the plan of an op."""
    body = steps(planned(op_text(*lines), {}).forward)
    return (
        [s.out.buffer for s in body if isinstance(s, plan.AllReduce)],
        [s.source.buffer for s in body if isinstance(s, plan.Convert)],
    )


def test_memory_is_reduced_in_place_where_nothing_uses_it_afterwards() -> None:
    assert reduced("a = x @ w.T", "b = all_sum(a)", "edit_(b)", "y = f32(b)") == (["a"], ["a"])
    used = ("a = x @ w.T", "b = all_sum(a)", "c = b @ a.T", "y = c @ a")
    assert reduced(*used) == (["b"], ["a"])
    assert "    b = round(a)\n    all_sum(b)\n" in plan_text(planned(op_text(*used), {}))
    # By another name.
    assert reduced("a = x @ w.T", "d = f32(a)", "b = all_sum(a)", "c = b @ d.T", "y = c @ d") == (["b"], ["a"])
    # Made anew in each round, and made once.
    assert reduced("for c in chunks(B):", "    a = x[c] @ w.T", "    b = all_max(a)", "    y[c] = f32(b)") == (
        ["a"],
        ["a"],
    )
    once = ("a = w @ w.T", "for c in chunks(B):", "    b = all_max(a)", "    d = x[c] @ w.T", "    y[c] = d @ b")
    assert reduced(*once) == (["b"], ["a"])
    # What is handed out has memory of its own.
    assert reduced("a = x @ w.T", "y = all_sum(a)") == (["y"], ["a"])


def test_every_plan_keeps_its_buffers_in_order() -> None:
    module = load(Path(kgen.ops.parallel_losses.__file__).parent / "parallel_linear_cross_entropy.kdsl").module
    optional, flags = {"bias", "class_weight", "weights", "token_weight"}, ("narrow", "wide_weight", "joined")
    for op, there, on, wanted in itertools.product(
        module.ops, (set(), optional), _subsets(flags), _subsets(("x", "w", "bias"))
    ):
        rows = op.name.endswith("_rows")
        if ("bias" in wanted and not there) or (rows and set(on) - {"joined"}):
            continue
        consts = {n: n in on for n in ("smoothed", "capped", "averaged", *flags)}
        settled = HostSpecialization(consts, frozenset(there), frozenset(wanted))
        made = elaborate_op(source_of(module), op.name, settled)
        for t, held in itertools.product(("f32", "bf16"), ("param", "f32", "f64")):
            dtypes = {"T": DTYPES[t], "W": DTYPES["f32"], "U": DTYPES[t], "C": DTYPES["f32"]}
            p = lower(made, dtypes, frozenset(wanted), held)
            verify(p, {"x", "w", "target"} | there)
            # Where ranks meet does not depend on what a single rank may want.
            forward, backward = (
                [s.kind for s in steps(b) if isinstance(s, plan.AllReduce)] for b in (p.forward, p.backward)
            )
            last = ["sum"] * ("x" in wanted and "joined" in on)
            assert (forward, backward) == ((["max", "sum"], last) if rows else (["max", "sum", *last], []))


def _subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [s for n in range(len(names) + 1) for s in itertools.combinations(names, n)]


def test_a_kernel_of_that_name_hides_the_collective(tmp_path: Path) -> None:
    text = """\
kernel all_sum(x: f32[*M, N]) -> (y: f32[*M, N]):
    parallel m in M, n in N
    y[m, n] = x[m, n] * 2.0

op f(x: f32[B, H]) -> (y: f32[B, H]):
    forward:
        y = all_sum(x)
"""
    (tmp_path / "op.kdsl").write_text(text)
    f = kgen.load(tmp_path / "op.kdsl").f
    x = randn(3, 4)
    assert torch.equal(f(x, backend="reference"), 2 * x)
    with pytest.raises(ArgumentError, match="group= is for ops"):
        f(x, group="tp")
