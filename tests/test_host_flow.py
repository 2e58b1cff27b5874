"""What a host program means, and that every executor computes it: whatever the chunks, the gradients that are wanted
and how sums are held. The reference interpreter of programs is the oracle; `flow_kit` says why the bound is zero."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flow_kit import PARTITIONS, differences, faults, meaning, settled, wishes
from host_kit import ATTEND, MLP, allocated, program, steps, verify
from host_random import HEAD, KERNELS, mistakes, programs
from linear_loss_kit import randn

import kgen
from kgen.codegen.host import plan
from kgen.codegen.host.lower import lower
from kgen.codegen.host.reference import Execution, Unwritten
from kgen.dsl import ir as tiles
from kgen.dsl.diagnostics import DslError
from kgen.dsl.dtypes import DTYPES, F32
from kgen.dsl.host import ir
from kgen.dsl.host.state import Fault, State

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Y, S, LOOP = "y = clip(x)", "s = clip(w)", "for c in chunks(B):"
DX = ("d_x = d_y @ w.T",)
# Random programs that are drawn and compared; the first that is tried is the one of this number.
FIRST, COUNT = 0, 12


def op(*forward: str, backward: Sequence[str] = DX) -> str:
    """A file with one op of these statements."""
    lines = ["    forward:", *(f"        {line}" for line in forward)]
    lines += ["    backward(d_y, d_s):", *(f"        {line}" for line in backward)]
    return KERNELS + HEAD + "\n".join(lines) + "\n"


# ---- what is accepted ------------------------------------------------------------------------------------------------

SOUND = {
    "a sum goes on in the backward section": op(
        Y, S, "g: f32[N, N]", LOOP, "    g += x[c].T @ x[c]", backward=(LOOP, "    g += d_y[c].T @ x[c]", "d_w = T(g)")
    ),
    "a sum in its own dtype goes on": op(
        Y, S, "p: T[N, N]", LOOP, "    p += x[c].T @ x[c]", backward=(LOOP, "    p += d_y[c].T @ x[c]", "d_w = p")
    ),
    "a sum goes on twice": op(
        Y, S, "p: T[N, N]", LOOP, "    p += x[c].T @ x[c]",
        backward=(LOOP, "    p += d_y[c].T @ x[c]", "    p += x[c].T @ d_y[c]", "p += w @ w", "d_w = p"),
    ),
    "a sum is changed between loops": op(
        Y, LOOP, "    s += x[c].T @ x[c]", "turn_(s)", LOOP, "    s += x[c].T @ x[c]", "turn_(s)", "s += w @ w"
    ),
    "a sum is read between loops": op(
        Y, "p: T[N, N]", LOOP, "    p += x[c].T @ x[c]", "q = clip(p)", LOOP, "    p += x[c].T @ x[c]", "s = q @ p"
    ),
    "a sum that each chunk has": op(
        S, LOOP, "    h: T[c, N]", "    h += x[c] @ w", "    h += clip(x[c])", "    y[c] = h"
    ),
    "a sum of one term that each chunk has": op(
        S, LOOP, "    t: T[N]", "    t += totals(w)", "    y[c] = blend(x[c], t)"
    ),
    "a sum of parts that each chunk has": op(
        Y, LOOP, "    p: T[N, N]", "    p += x[c].T @ x[c]", "    p += x[c].T @ clip(x[c])", "    s += p @ w"
    ),
    "a sum by chunks that is read": op(
        S, "a: T[B, N]", LOOP, "    a[c] += x[c] @ w", "    y[c] = clip(a[c])", LOOP, "    a[c] += x[c]",
        "    turn_(a[c])", "    a[c] += x[c]", "a += x @ w", "y = a",
    ),
    "a chunk is read, changed and stored": op(
        S, Y, LOOP, "    k = blend(y[c], v)", "    turn_(y[c])", "    a = clip(y[c])", "    y[c] = blend(a, v)",
        "    y[c] = k @ w", "    turn_(y[c])",
    ),
    "results that are one value": op(
        Y, "p = clip(w)", "s = p", backward=("d_w = d_s", "d_x = d_y", "turn_(s)", "d_v = totals(s)")
    ),
    "an output that is assigned again": op("y = clip(x)", "a = y", "y = a @ w", "turn_(y)", "s = a.T @ y"),
    "a sum that the ranks reduce": op(
        Y, "g: f32[N, N]", LOOP, "    g += x[c].T @ x[c]", "h = all_sum(g)", LOOP, "    g += x[c].T @ x[c]",
        "s = T(h)", "p = T(g)", backward=("d_w = d_s @ p",),
    ),
    "what all branches assign": op(
        S, "if d_x:", "    y = clip(x)", "else:", "    a = clip(x)", "    y = a", backward=("d_x = y @ w",)
    ),
    "a branch that names an argument": op(
        Y, S, "if d_x:", "    a = clip(v)", "else:", "    a = v", "t = blend(x, a)",
        backward=(
            "if d_w:", "    g = clip(d_y)", "else:", "    g = d_y", "d_x = g @ w.T", "d_w = d_s", "d_v = totals(d_y)",
        ),
    ),
    "a branch that names a transpose": op(
        Y, S,
        backward=("if d_w:", "    g = clip(w).T", "else:", "    g = clip(w.T)", "h = g", "d_x = d_y @ h", "d_w = d_s"),
    ),
    "a branch that names what has another name": op(
        Y, S, "a = clip(y)",
        backward=(
            "if d_w:", "    g = clip(y)", "else:", "    g = a", "d_x = g @ w", "d_w = a.T @ y", "d_v = totals(a)",
        ),
    ),
    "a value of each branch that goes on": op(
        S, LOOP, "    if d_x:", "        h = clip(x[c])", "    else:", "        h = x[c]", "    y[c] = h @ w",
        backward=(
            "if d_w:", "    g = clip(d_y)", "else:", "    g = T(d_y)", "turn_(g)", "d_x = g @ w.T", "d_w = x.T @ g",
        ),
    ),
    "what gradients need": op(
        Y, S, "if d_x:", "    a = clip(y)", "    turn_(a)", backward=("if d_x:", "    d_x = a @ w", "d_v = totals(d_y)")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_what_is_accepted_means_one_thing(backend: str, name: str) -> None:
    assert list(faults(SOUND[name], 1, [backend], 12)) == []


@pytest.mark.parametrize("name", SOUND)
def test_no_rows(name: str) -> None:
    assert list(faults(SOUND[name], 1, ["reference"], 4, rows=0)) == []


def test_a_sum_that_goes_on_starts_from_what_is_there() -> None:
    text = SOUND["a sum in its own dtype goes on"]
    p = lower(settled(text, ("w",)), {"T": DTYPES["bf16"]}, frozenset({"w"}), "f32")
    first = next(s for s in p.backward if not isinstance(s, plan.Own | plan.Alloc))
    assert first == plan.Convert(plan.View("p_sum"), plan.View("p"))
    assert all(s.accumulate and s.first is None for s in steps(p.backward) if isinstance(s, plan.Matmul))
    assert allocated(p.backward).count("p_sum") == 1


# ---- what is refused -------------------------------------------------------------------------------------------------

# Statements of the forward section, the code, the line that the caret is in and what it says.
PART, SUM = "    p = x[c].T @ x[c]", "    s += x[c].T @ x[c]"
REFUSED: dict[str, tuple[tuple[str, ...], str, int, str]] = {
    "filled and read whole": ((LOOP, "    y[c] = clip(x[c])", "    s += y.T @ y"), "K0606", 2, "'y' is filled"),
    "changed and read whole": (
        (S, "a = clip(x)", LOOP, "    turn_(a[c])", "    y[c] = blend(x[c], totals(a))"), "K0606", 4, "'a' is filled",
    ),
    "read whole and filled": ((S, Y, LOOP, "    t = totals(y)", "    y[c] = x[c] @ w + t"), "K0618", 4, "read as a"),
    "summed and read": (
        (LOOP, SUM, "    y[c] = x[c] @ s"), "K0606", 2, "still being summed",
    ),
    "read and summed": ((Y, "s += w @ w", LOOP, "    p = x[c] @ s", "    s += x[c].T @ p"), "K0606", 4, "'s' is read"),
    "summed and changed": ((Y, LOOP, SUM, "    turn_(s)"), "K0606", 3, "still being summed"),
    "stored whole": ((S, LOOP, "    y = clip(x)"), "K0618", 2, "'y' is from outside of this loop, and assigned"),
    "named whole": ((S, "a = clip(x)", LOOP, "    y = a"), "K0618", 3, "'y' is from outside of this loop"),
    "a declared tensor stored whole": ((Y, "p: T[N, N]", LOOP, "    p = clip(w)", "s = p"), "K0618", 3, "'p' is from"),
    "changed whole": (("a = clip(x)", S, LOOP, "    turn_(a)", "y = a"), "K0618", 3, "'a' is from outside"),
    "changed by another name": (("a = clip(x)", S, LOOP, "    b = a", "    turn_(b)", "y = a"), "K0618", 4, "'b' is"),
    "a sum of what is fixed": ((Y, LOOP, "    s += w @ w"), "K0618", 2, "is the same for every chunk"),
    "a sum with what is fixed": ((Y, LOOP, "    s += x[c].T @ x[c] + w"), "K0618", 2, "'w' would be added"),
    "a local sum of both": (
        (Y, LOOP, "    p: T[N, N]", "    p += x[c].T @ x[c]", "    p += w @ w", "    s += p"), "K0618", 4, "a sum of",
    ),
    "a kernel of a part": ((Y, LOOP, PART, "    s += clip(p)"), "K0618", 3, "'p' is what this chunk"),
    "a part changed": ((Y, LOOP, PART, "    turn_(p)", "    s += p"), "K0618", 3, "'p' is what this"),
    "a part for rows": ((S, LOOP, PART, "    y[c] = x[c] @ p"), "K0618", 3, "'p' is what this chunk"),
    "a part added to rows": ((S, LOOP, "    y[c] = x[c] @ w + totals(x[c])"), "K0618", 2, "is what this chunk adds"),
    "two parts": ((Y, LOOP, PART, "    s += p @ p"), "K0618", 3, "'p' is what this chunk"),
    "pairs of rows": ((S, LOOP, "    y[c] = clip(x[c] @ x[c].T) @ x[c]"), "K0618", 2, "for each pair of rows"),
    "changed by rows": (
        (S, LOOP, "    t = totals(w)", "    push_(t, x[c])", "    y[c] = blend(x[c], t)"), "K0618", 3, "'push_' re",
    ),
    "a kernel that mixes rows": ((S, LOOP, "    y[c] = centred(x[c])"), "K0618", 2, "'centred' reduces over rows"),
    "an output of no row": (
        ("r: T[N]", LOOP, "    h, t = beside(x[c], v)", "    r += t", S, "y = blend(x, r)"), "K0618", 3, "is the same",
    ),
    "added by chunks and whole": ((S, LOOP, "    y[c] += x[c]", "    y += x @ w"), "K0618", 3, "'y' is changed by"),
    "never written": ((Y, "p: T[N, N]", "s = clip(p)"), "K0606", 2, "'p' is used before"),
    "named and never written": ((Y, "p: T[N, N]", "q = p", "s = clip(q)"), "K0606", 2, "'p' is used before"),
    "an output by another name": (("a = clip(x)", S, "y = a", "turn_(a)"), "K0619", 2, "'y' stands for a value"),
    "another name of an output": (("y = clip(x)", "a = y", "turn_(y)", "s = a.T @ x"), "K0619", 3, "'a' stands for a"),
    "another name": (("a = clip(x)", S, "b = a", "turn_(a)", "y = b"), "K0619", 4, "'b' stands for a value"),
    "the name of a chunk": ((S, Y, LOOP, "    h = y[c]", "    turn_(h)", "    k = y[c]"), "K0619", 5, "'y'"),
    "a sum by another name": ((Y, "s += w @ w", "p = s", "s += w @ w", "q = clip(p)"), "K0619", 4, "through another"),
    "a store through another name": ((S, Y, "a = y", LOOP, "    a[c] = x[c]"), "K0619", 1, "'y' stands for a value"),
    "a name for an argument": (("y = x", "turn_(y)", S), "K0607", 1, "which is an argument of the op"),
    "changed for gradients": ((Y, S, "if d_x:", "    turn_(y)"), "K0620", 3, "'y' depends on which gradients"),
    "on the way to an output": (("a = clip(x)", S, "if d_x:", "    turn_(a)", "y = a @ w"), "K0620", 3, "'y' depends"),
    "added for gradients": ((Y, "s += w @ w", "if d_x:", "    s += w @ w"), "K0620", 3, "'s' depends on"),
    "named for gradients": ((Y, S, "if d_x:", "    s = w"), "K0620", 3, "'s' depends on"),
    "changed in one branch and read in both": (
        (Y, S, "if d_x:", "    turn_(y)", "    t = totals(y)", "else:", "    t = totals(y)"), "K0620", 3, "'y' depends",
    ),
    "stored for gradients": ((Y, S, LOOP, "    if d_x:", "        y[c] = x[c]"), "K0620", 4, "'y' depends on"),
}  # fmt: skip
PUSH = """\
kernel push_(t: inout T[N], x: T[*M, N]):
    parallel n in N
    tile m in M
    t[n] = t[n] + sum(x[m, n], m)

kernel beside(x: T[*M, N], v: T[N]) -> (y: T[*M, N], r: T[N]):
    parallel n in N
    tile m in M
    y[m, n] = x[m, n]
    r[n] = 2.0 * v[n]

"""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    forward, code, line, says = REFUSED[name]
    with pytest.raises(DslError) as caught:
        kgen.loads(PUSH + op(*forward))
    (found,) = caught.value.diagnostics
    assert (found.code, found.span.line - _above(op())) == (code, line), found.render()
    assert says in found.message and found.help and re.search(r"\^", found.render())


def _above(text: str) -> int:
    """The lines above the first statement."""
    return (PUSH + text).splitlines().index("    forward:") + 2


# Of these the checker would make programs if it kept to no rule.
BOUND = [
    n for n, (_, code, *_) in REFUSED.items() if code in ("K0606", "K0618") and not re.search("stored|name|never", n)
]


@pytest.mark.parametrize("name", BOUND)
def test_what_is_refused_would_depend_on_the_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = State.apply

    def lax(self: State, s: ir.Stmt, **more: Any) -> None:
        try:
            strict(self, s, **more)
        except Fault:
            for v, how in ir.views(s):
                if how != "read":
                    self.assume(v.tensor)

    monkeypatch.setattr(State, "apply", lax)
    p = settled(PUSH + op(*REFUSED[name][0]), ())
    kernels: dict[Hashable, tiles.Kernel] = {}
    try:
        found = [meaning(p, 1, part, (), kernels) for part in PARTITIONS]
    except Unwritten:
        return
    assert any(differences(m, found[0]) for m in found)


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_a_gradient_is_assigned_wherever_it_may_be_wanted() -> None:
    backward = ("d_w = x.T @ d_y", "if d_w:", "    d_x = d_y @ w.T")
    with pytest.raises(DslError) as caught:
        kgen.loads(op(Y, S, backward=backward))
    (found,) = caught.value.diagnostics
    assert found.code == "K0621" and "'d_x' is not assigned when d_w is not wanted" in found.message
    assert found.span.text == "d_x"
    assert mistakes(op(Y, S, backward=("if d_w:", "    d_w = x.T @ d_y", *DX))) == []


def test_what_branches_assign_is_one_value_by_its_name_alone() -> None:
    choice = ("if d_w:", "    turn_(a)", "    g = a", "else:", "    g = a")
    for use, found in {"g": [], "a": ["'d_x' depends on which gradients are wanted"]}.items():
        text = op(Y, S, backward=("a = clip(d_y)", *choice, f"d_x = {use} @ w", "d_w = d_s"))
        assert [m for _, _, m in mistakes(text)] == found
    changed = ("a = clip(d_y)", *choice, "if d_w:", "    turn_(g)", "d_x = g @ w", "d_w = d_s")
    assert [c for _, c, _ in mistakes(op(Y, S, backward=changed))] == ["K0620"]


SCALED = """\
kernel over(x: T[*M, N], s: const f32 = 1.0) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = x[m, n] / s

"""


@pytest.mark.parametrize(("one", "other", "same"), [("0.0", "-0.0", False), ("1", "1.0", True), ("1.0", "2.0", False)])
def test_constants_are_told_apart(one: str, other: str, same: bool) -> None:
    ways = ("if d_w:", f"    d_x = over(d_y, {one})", "if not d_w:", f"    d_x = over(d_y, {other})")
    text = SCALED + op(Y, S, backward=(*ways, "d_w = d_s"))
    if same:
        kgen.loads(text)
    else:
        with pytest.raises(DslError, match="'d_x' depends on which gradients are wanted"):
            kgen.loads(text)


def test_a_number_is_the_same_by_type_and_text() -> None:
    numbers = (1, 1.0, True, 0.0, -0.0)
    assert len({ir.ConstArg(n) for n in numbers}) == len(numbers) and ir.ConstArg(1.0) == ir.ConstArg(1.0)


def test_the_reference_tells_constants_apart() -> None:
    text = SCALED + op("y = over(x, 0.0)", "s = over(w, -0.0)")
    found = executed(text, {"B": 1, "N": 1}, {"x": torch.ones(1, 1), "w": torch.ones(1, 1)}).forward()
    assert (found["y"].item(), found["s"].item()) == (torch.inf, -torch.inf)


def test_a_gradient_is_one_value_whatever_else_is_wanted() -> None:
    backward = ("a = clip(d_y)", "if d_w:", "    turn_(a)", "d_x = a @ w", "d_w = x.T @ a")
    assert [(c, m) for _, c, m in mistakes(op(Y, S, backward=backward))] == [
        ("K0620", "'d_x' depends on which gradients are wanted")
    ]


# ---- random programs -------------------------------------------------------------------------------------------------

RANDOM = programs(FIRST, COUNT)


@pytest.mark.parametrize("at", range(COUNT))
def test_random_programs(backend: str, at: int) -> None:
    p = RANDOM[at]
    found = list(faults(p.text, at, [backend], 3))
    found += faults(p.text, at, [backend], 1, rows=0)
    assert not found, "\n".join([p.text, *found])


@pytest.mark.parametrize("at", range(COUNT))
def test_plans_of_random_programs_keep_their_buffers_in_order(at: int) -> None:
    text = RANDOM[at].text
    for wanted in wishes(text):
        for dtype in ("f32", "bf16"):
            for held in ("param", "f32", "f64"):
                p = lower(settled(text, wanted), {"T": DTYPES[dtype]}, frozenset(wanted), held)
                verify(p, {"x", "w", "v"})


def test_what_is_drawn_is_refused_for_every_reason() -> None:
    refused = {code for p in RANDOM for code in p.refused}
    assert {"K0606", "K0607", "K0608", "K0618", "K0619"} <= refused


# ---- the reference interpreter ---------------------------------------------------------------------------------------


def executed(text: str, dims: dict[str, int], tensors: dict[str, torch.Tensor], **more: Any) -> Execution:
    """The op of `text` with the gradients of its tensors wanted."""
    names = tuple(tensors)
    p = program(text, wanted=names, present=names)
    return Execution(p, dict.fromkeys(("T", "W", "U"), F32), dims, tensors, **more)


@pytest.mark.parametrize("chunks", [(5,), (2, 3), (1, 1, 1, 1, 1)])
def test_the_interpreter_on_an_mlp(chunks: tuple[int, ...]) -> None:
    tensors = {"x": randn(5, 8), "up": randn(12, 8, seed=1), "down": randn(8, 12, seed=2)}
    run = executed(MLP, {"B": 5, "H": 8, "F": 12}, tensors, chunks={"B": chunks})
    leaves = {n: t.double().requires_grad_() for n, t in tensors.items()}
    y = torch.nn.functional.silu(leaves["x"] @ leaves["up"].T) @ leaves["down"].T
    up = randn(5, 8, seed=3).double()
    assert (run.forward()["y"] - y).abs().max() <= 2.0**-44 * y.abs().max()
    for _ in range(2):  # the second starts from what forward left, as the first did
        found = run.backward({"y": up})
        for n, g in zip(leaves, torch.autograd.grad(y, list(leaves.values()), up, retain_graph=True), strict=True):
            assert (found[n] - g).abs().max() <= 2.0**-44 * g.abs().max()


def test_the_interpreter_on_a_softmax() -> None:
    tensors = {"x": randn(4, 8), "w": randn(6, 8, seed=1), "bias": randn(6, seed=2)}
    run = executed(ATTEND, {"B": 4, "H": 8, "V": 6}, tensors)
    leaves = {n: t.double().requires_grad_() for n, t in tensors.items()}
    p = (leaves["x"] @ leaves["w"].T + leaves["bias"]).softmax(-1)
    up = randn(4, 6, seed=3).double()
    assert (run.forward()["p"] - p).abs().max() <= 2.0**-44
    found = run.backward({"p": up})
    for n, g in zip(leaves, torch.autograd.grad(p, list(leaves.values()), up), strict=True):
        assert (found[n] - g).abs().max() <= 2.0**-44 * g.abs().max()


def test_the_interpreter_finds_what_nothing_was_stored_to() -> None:
    p = program(op(Y, S))
    span = p.forward[0].span
    hole = ir.Tensor("hole", "T", p.tensors["y"].shape, "value", span)
    view = ir.View("hole", (), False, "T", hole.shape, span)
    sums = ir.Sum(ir.View("y", (), False, "T", hole.shape, span), view, span)
    broken = replace(p, tensors={**p.tensors, "hole": hole}, forward=(*p.forward, sums))
    with pytest.raises(Unwritten, match="'hole' is read where nothing was stored"):
        meaning(broken, 1, (7,), ())
