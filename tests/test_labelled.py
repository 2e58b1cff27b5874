"""The element of a row's label is stored behind a pass over chunks, in which no element is compared with it."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from apart_kit import equal, kinds, looped, scheduled
from cuda_kit import Call, agree, call, compiled, oracle
from step_runner import run_steps
from triton_kit import emitted

from kgen import ops
from kgen.codegen.interpret import interpret
from kgen.codegen.schedule import Choice, Element, Schedule
from kgen.codegen.tolerance import compare, error_bound
from kgen.dsl import ir

BACKENDS = ("cuda", "triton")
INF, NAN = float("inf"), float("nan")
CROSS_ENTROPY = (Path(ops.__file__).parent / "cross_entropy.kdsl").read_text()

HEAD = """
kernel k(x: {role} T[*M, N], t: i64[*M], s: f32[*M], w: T[N]) -> ({out}z: f32[*M]):
    parallel m in M
    tile n in N
    top = max(x[m, n], n)
    z[m] = top
    e = exp(x[m, n] - top)
"""
APART = HEAD.format(role="", out="y: T[*M, N], ")
PLACE = HEAD.format(role="inout", out="")
TEXTS = {
    "apart": APART + "    y[m, n] = e * s[m] - where(n == t[m], s[m], 0.0)",
    "in place": PLACE + "    x[m, n] = e * s[m] - where(n == t[m], s[m], 0.0)",
    "loaded already": PLACE + "    x[m, n] = e * s[m] - where(n == t[m], x[m, t[m]], 0.0)",
    "not equal": PLACE + "    x[m, n] = where(t[m] != n, e * w[n], s[m] + w[n])",
    "the index": APART + "    y[m, n] = where(n == t[m], n * 2.0, s[m] - e) + 0.5 * f32(n)",
    "used twice": PLACE + "    g = e - f32(n == t[m])\n    x[m, n] = g * (1.0 - g * g) * s[m]",
    "negative zero": APART + "    y[m, n] = e * (0.0 * s[m]) - where(n == t[m], s[m], -0.0)",
    "another value": PLACE + "    x[m, n] = e - where(n == t[m], s[m], 0.0) - where(n == t[m] - 1, 1.0, 0.0)",
    "beside a sum": PLACE.replace("-> (", "-> (l: f32[*M], ")
    + "    l[m] = sum(e - s[m], n)\n    x[m, n] = e - where(n == t[m], s[m], 0.0)",
    "condition": PLACE + "    x[m, n] = where(s[m] > 0.0, e - where(n == t[m], s[m], w[n]), 0.0)",
}
LEFT = {
    "two labels": APART + "    u = t[m] - 1\n    y[m, n] = e - where(n == t[m] or n == u, 1.0, 0.0)",
    "summed": APART.replace("-> (", "-> (l: f32[*M], ")
    + "    a = where(n == t[m], e, 0.0)\n    l[m] = sum(a, n)\n    y[m, n] = e - a",
    "beside a sum of exponentials": APART.replace("-> (", "-> (l: f32[*M], ")
    + "    l[m] = logsumexp(x[m, n], n)\n    y[m, n] = x[m, n] - where(n == t[m], s[m], 0.0)",
    "shifted": APART + "    y[m, n] = e - where(n + 1 == t[m], s[m], 0.0)",
    "index arithmetic": APART + "    y[m, n] = e - where(n == t[m], f32(2 * n + 1), 0.0)",
    "backwards": APART + "    y[m, N - 1 - n] = e - where(n == t[m], s[m], 0.0)",
    "read backwards": APART + "    y[m, n] = x[m, N - 1 - n] * e - where(n == t[m], s[m], 0.0)",
    "of the element": APART + "    y[m, n] = e - where(n == i64(e), s[m], 0.0)",
    "less": APART + "    y[m, n] = e - where(n < t[m], s[m], 0.0)",
}
LABELS = (0, 36, 35, 32, 5, -1, 37, -100, 2**32, 7)


def example(text: str, n: int = 37, dtype: torch.dtype = torch.float32) -> Call:
    """Rows with labels at both ends, in the last chunk, and out of range; one element of some is not finite, and it is
    the label's."""
    x = torch.randn(len(LABELS), n, generator=torch.Generator().manual_seed(n)).to(dtype)
    t = torch.tensor([label if label not in (36, 35) else label - 37 + n for label in LABELS])
    x[4, 5], x[9, 7], x[0, 3], x[3, 3] = NAN, -INF, INF, NAN
    s = torch.randn(len(LABELS), generator=torch.Generator().manual_seed(1))
    w = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype)
    return call(text, "k", x=x, t=t, s=s, w=w)


def passes(c: Call, backend: str, schedule: Schedule) -> str:
    return kinds(scheduled(c, backend, schedule).steps)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_element_of_the_label_is_as_before(text: str, backend: str) -> None:
    c, schedule = example(text), looped(backend, "n", 8)
    assert kinds(scheduled(c, backend, schedule).steps).count("element") == 1
    got = equal(c, backend, schedule)
    bounds = error_bound(c.kernel, c.tensors, c.scalars)
    for name, expected in interpret(c.kernel, c.tensors, c.scalars, precision="f64").items():
        found = compare(got[name], expected, bounds[name])
        assert found.ok, str(found)
    for dtype in (torch.bfloat16, torch.float16):
        equal(example(text, 64, dtype), backend, looped(backend, "n", 32, 32, 4))
        equal(example(text, 61, dtype), backend, looped(backend, "n", 16, 64))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_steps_mean_the_same(text: str) -> None:
    c = example(text)
    s = scheduled(c, "cuda", looped("cuda", "n", 8))
    agree(run_steps(s, c.tensors, c.scalars), oracle(c), 4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_what_does_not_fit_is_left_alone(text: str, backend: str) -> None:
    assert "element" not in passes(example(text), backend, looped(backend, "n", 8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_and_several_rows_are_left_alone(backend: str) -> None:
    for schedule in (Schedule(32, 1), Schedule(32, 2, chunks=(("n", 8),))):
        assert "element" not in passes(example(TEXTS["in place"]), backend, schedule)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_loaded_at_the_label_comes_before_it_is_overwritten(backend: str) -> None:
    schedule = looped(backend, "n", 8)
    s = scheduled(example(TEXTS["in place"]), backend, schedule)
    (own,) = (x for x in s.kernel.body if isinstance(x, ir.Let) and x.name == "x_mn_at_label")
    assert own in s.steps[0].body and "x_mn_at_label" in s.barriers
    # Of what only other elements need, nothing is loaded; nor twice what the kernel loads itself.
    body = scheduled(example(TEXTS["condition"]), backend, schedule).kernel.body
    assert [x.value.tensor for x in body if isinstance(x.value, ir.Load) and isinstance(x.value.at[-1], ir.Ref)] == [
        "x"
    ]
    s = scheduled(example(TEXTS["loaded already"]), backend, schedule)
    gathers = [x for x in s.kernel.body if isinstance(x.value, ir.Load) and isinstance(x.value.at[-1], ir.Ref)]
    assert len(gathers) == 1


WAYS = (
    PLACE
    + """    g = f32(n == t[m]) + s[m]
    x[m, n] = where(s[m] > 0.0, e * (1.0 + s[m]) - where(n == t[m], 2.0, 0.0), g * g * e)
"""
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_way_uses_nothing_of_the_other(backend: str) -> None:
    """`1.0 + s[m]` has a name in the first way; in the second it is the value of `g` at the label. What is loaded at
    the label is in front of both."""
    c, schedule = example(WAYS), looped(backend, "n", 8)
    (choice,) = (step for step in scheduled(c, backend, schedule).steps if isinstance(step, Choice))
    assert kinds([choice]) == "[straight loop element | loop element]"
    body = scheduled(c, backend, schedule).kernel.body
    assert len([x for x in body if isinstance(x.value, ir.Load) and isinstance(x.value.at[-1], ir.Ref)]) == 1
    equal(c, backend, schedule)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_element_is_compared_in_the_pass(backend: str) -> None:
    s = scheduled(example(TEXTS["condition"]), backend, looped(backend, "n", 8))
    (choice,) = (step for step in s.steps if isinstance(step, Choice))
    assert kinds([choice]) == "[loop element | loop]"
    assert not any(isinstance(e, ir.Op) and e.fn in ("eq", "where") for x in choice.body for e in ir.walk(x.value))


TABLE = """
kernel k(x: T[*M, N], t: i64[*M], table: T[K, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    top = max(x[m, n], n)
    y[m, n] = table[{row}, n] - where(n == t[m], x[m, n], 0.0)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_looked_up(backend: str) -> None:
    """The element of a row that only a reduction gives cannot be loaded in front of everything."""
    x, t = torch.randn(3, 37, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 9, -1])
    for row, apart in (("t[m]", True), ("t[m] // 2", True), ("i64(top)", False)):
        c = call(TABLE.format(row=row), "k", x=x, t=t, table=x.flip(1))
        assert ("element" in passes(c, backend, looped(backend, "n", 8))) == apart
        equal(c, backend, looped(backend, "n", 8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend: str) -> None:
    c = example(TEXTS["in place"])
    c.tensors["x"] = c.tensors["x"].t().contiguous().t()
    assert c.tensors["x"].stride(1) > 1
    equal(c, backend, looped(backend, "n", 8))


VARIANTS = list(product((False, True), repeat=4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("weighted", "z_scale", "smoothed", "capped"), VARIANTS)
def test_cross_entropy_in_place(backend: str, weighted: bool, z_scale: bool, smoothed: bool, capped: bool) -> None:
    """Labels left out, out of range and at the ends, rows that are not finite; in chunks with a ragged last one."""
    for v, dtype, chunk in ((203, torch.bfloat16, 64), (96, torch.float16, 32), (50, torch.float32, 16)):
        x = 3 * torch.randn(9, v, generator=torch.Generator().manual_seed(v)).to(dtype)
        t = torch.tensor([0, v - 1, -100, v // 2, -1, v, 3, 4, 5])
        x[2, 1], x[6, 3], x[7, 1], x[8, 5] = NAN, -INF, INF, NAN
        rows: dict[str, Any] = {"scale": torch.rand(9) + 0.1, "label_smoothing": 0.1, "z_loss": 0.3, "softcap": 5.0}
        if weighted:
            rows["weight"] = torch.rand(v, generator=torch.Generator().manual_seed(4)).to(dtype) + 0.5
        if z_scale:
            rows["z_scale"] = torch.rand(9)
        c = call(CROSS_ENTROPY, "cross_entropy_", logits=x, target=t, smoothed=smoothed, capped=capped, **rows)
        schedule = looped(backend, "v", chunk, 32, 8 if v == 96 else 1)
        # With smoothing the pass that stores adds up too, so it makes the choice for each element.
        steps = kinds(scheduled(c, backend, schedule).steps)
        assert ("straight loop element straight" if smoothed else "[straight loop element | loop]") in steps
        got = equal(c, backend, schedule, (3,))
        bounds = error_bound(c.kernel, c.tensors, c.scalars)
        for name, expected in interpret(c.kernel, c.tensors, c.scalars, precision="f64").items():
            found = compare(got[name], expected, bounds[name])
            assert found.ok, str(found)
        assert not got["logits"][2].any()


def test_rows_at_any_address() -> None:
    """Of peeled rows the elements at the edge are stored behind the pass, that of the label behind them."""
    n = 203
    c = example(TEXTS["in place"], n, torch.bfloat16)
    c.tensors["t"][:4] = torch.tensor([0, 1, n - 1, n - 2])
    schedule = Schedule(32, 1, 8, (("n", 64),), peeled=True)
    assert "element" in passes(c, "cuda", schedule)
    equal(c, "cuda", schedule)


def test_the_text() -> None:
    c = example(TEXTS["condition"])
    cuda = compiled(c, looped("cuda", "n", 8)).source
    stored = r"__syncthreads\(\);\n +if \(tid == 0 && t_m_label >= 0\) \{\n.*\n +x_row\[t_m_label\] = .* - s_m;\n"
    assert re.search(stored, cuda)
    assert "t_m_label - n" not in cuda and "n == t_m_label" not in cuda
    triton = emitted(c, looped("triton", "n", 8)).source
    assert re.search(r"tl.debug_barrier\(\)\n.*\n +tl.store\(x_row \+ t_m_label, .* mask=t_m_label >= 0\)\n", triton)
    assert "n == t_m_label" not in triton


def test_the_schedule_shows_it() -> None:
    from kgen.cli.ir_text import scheduled_text

    text = scheduled_text(scheduled(example(TEXTS["condition"]), "cuda", looped("cuda", "n", 8)), "cuda")
    lines = (
        "\nif s_m > 0.0:\n    ",
        "\n    at n = t_m_label, unless that is -1:\n        x[m, n] = ",
        "\nelse:\n    for n",
    )
    places = [text.index(line) for line in lines]
    assert places == sorted(places)


def test_an_element_is_one_of_the_row() -> None:
    (element,) = (s for s in scheduled(example(TEXTS["in place"]), "cuda", looped("cuda", "n", 8)).steps
                  if isinstance(s, Element))  # fmt: skip
    assert all(not s.value.axes & {"n"} for s in element.body)


FLAT = """
kernel k(x: T[*N], t: i64[]) -> (y: T[*N]):
    tile n in N
    y[n] = exp(x[n] - max(x[n], n)) - where(n == t[], x[n], 0.0)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tile_over_several_dimensions(backend: str) -> None:
    """Such a one has no element at the value of a label: memory has it in parts."""
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    for view in (x, x[:, :8], x.t()):
        c, schedule = call(FLAT, "k", x=view, t=torch.tensor(11)), looped(backend, "n", 8)
        agree(equal(c, backend, schedule), oracle(c), 80)
