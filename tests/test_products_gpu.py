"""On a GPU: every algorithm that cuBLASLt offers computes the product, and ops take those that were measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kgen import ops
from kgen.runtime.installation import device_name
from kgen.runtime.products import multiply, table
from kgen.runtime.products.cublaslt import Library, library
from kgen.runtime.products.problem import Kind, Problem
from kgen.runtime.products.table import Measured
from kgen.runtime.products.tune import Operands

pytestmark = pytest.mark.gpu
DTYPES = (("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16"))


@pytest.fixture
def lt() -> Library:
    found = library(torch.cuda.current_device())
    assert found is not None and found.version > 110000
    return found


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("dtype", "out"), DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_every_algorithm_is_right(
    lt: Library, transposed: tuple[bool, bool], dtype: str, out: str, accumulate: bool
) -> None:
    device = torch.device("cuda")
    for rows, columns, inner in ((256, 512, 1024), (1000, 264, 72), (24, 2048, 40)):
        left = rows if transposed[0] else inner
        right = inner if transposed[1] else columns
        p = Problem(Kind(transposed, dtype, out, accumulate), rows, columns, inner, (left + 8, right + 16, columns + 8))
        o = Operands.of(p, device)
        assert Problem.of(o.out, o.left, o.right, accumulate) == p
        found = lt.algorithms(p)
        assert found
        for a in found:
            product = lt.product(p, a)
            if product(o.out, o.left, o.right):
                assert o.off(functools.partial(product, o.out, o.left, o.right), accumulate) <= 1, a.config


@pytest.fixture
def known(lt: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Results for a small linear cross entropy; the kinds of the products that were made by them."""
    monkeypatch.setenv("KGEN_TUNED", str(tmp_path))
    rows, hidden, vocab = 256, 512, 2048
    name, results = device_name(torch.device("cuda")), list[Measured]()
    for transposed, accumulate, (m, n, k) in (
        ((False, True), False, (rows, vocab, hidden)),
        ((False, False), False, (rows, hidden, vocab)),
        ((True, False), False, (vocab, hidden, rows)),
        ((True, False), True, (vocab, hidden, rows)),
    ):
        kind = Kind(transposed, "bf16", "bf16", accumulate)
        leading = (m if transposed[0] else k, k if transposed[1] else n, n)
        last = lt.algorithms(Problem(kind, m, n, k, leading))[-1]
        results.append(Measured(kind, (m, n, k), last.config, 1.0, 2.0, 0.0, 2, "", lt.version))
    table.keep(name, results)
    table.reload()
    taken: list[str] = []
    plain = table.Chosen.multiply

    def told(self: table.Chosen, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, accumulate: bool) -> bool:
        done = plain(self, out, left, right, accumulate)
        p = Problem.of(out, left, right, accumulate)
        if done and p is not None:
            taken.append(str(p.kind))
        return done

    monkeypatch.setattr(table.Chosen, "multiply", told)
    yield taken
    table.reload()


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1024, 512, device="cuda", generator=g).bfloat16().requires_grad_()
    w = (torch.randn(2048, 512, device="cuda", generator=g) / 512**0.5).bfloat16().requires_grad_()
    return x, w, torch.randint(2048, (1024,), device="cuda", generator=g)


def gradients(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss = ops.linear_cross_entropy(x, w, target, workspace_mb=65 / 64, accumulate="param")
    return loss, *torch.autograd.grad(loss, (x, w))


def test_an_op_takes_what_was_measured(known: list[str]) -> None:
    x, w, target = operands()
    loss, dx, dw = gradients(x, w, target)
    assert known.count("bf16 = bf16 a @ bᵀ") == 4 and known.count("bf16 = bf16 a @ b") == 4
    assert known.count("bf16 = bf16 aᵀ @ b") == 1 and known.count("bf16 += bf16 aᵀ @ b") == 3
    ref = torch.nn.functional.cross_entropy(x.double() @ w.double().t(), target)
    rx, rw = torch.autograd.grad(ref, (x, w))
    assert abs(float(loss) - float(ref)) <= 1e-2
    for got, right in ((dx, rx), (dw, rw)):
        assert float((got.double() - right.double()).norm() / right.double().norm()) <= 4 * 2.0**-8
    again = gradients(x, w, target)
    assert all(torch.equal(a, b) for a, b in zip((loss, dx, dw), again, strict=True))


def test_a_captured_graph_replays_them(known: list[str]) -> None:
    x, w, target = operands()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = [t.clone() for t in gradients(x, w, target)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(x, w, target)
    before = len(known)
    with torch.no_grad():
        x.copy_(x * 0.5)
    graph.replay()
    assert not torch.equal(found[1], expected[1])
    with torch.no_grad():
        x.copy_(x * 2)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(known) == before > 0


def test_a_capture_that_meets_a_product_first_has_torchs(lt: Library) -> None:
    p = Problem(Kind((False, True), "bf16", "bf16", False), 256, 512, 1024, (1024, 1024, 512))
    o = Operands.of(p, torch.device("cuda"))
    config = lt.algorithms(p)[-1].config
    known = table.Chosen(
        table.Table([Measured(p.kind, p.sizes, config, 1.0, 2.0, 0.0, 2, "", lt.version)], []), lambda: lt
    )
    multiply.by_torch(o.out, o.left, o.right, None, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not known.multiply(o.out, o.left, o.right, False)
        multiply.by_torch(o.out, o.left, o.right, None, False)
    assert o.off(graph.replay, False) <= 1
    assert o.off(lambda: known.multiply(o.out, o.left, o.right, False), False) <= 1  # which it makes now


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_current(known: list[str]) -> None:
    moved = [t.detach().to("cuda:1") for t in operands()]
    other = moved[0].requires_grad_(), moved[1].requires_grad_(), moved[2]
    here, there = gradients(*operands()), gradients(*other)
    assert all(torch.equal(a, b.to("cuda:0")) for a, b in zip(here, there, strict=True))
    assert known


def test_a_mode_of_the_dispatcher_sees_the_products(known: list[str]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w, target = operands()
    with FlopCounterMode(display=False) as counter:
        gradients(x, w, target)
    product = 2 * 1024 * 512 * 2048
    assert not known and 2 * product < counter.get_total_flops() <= 3 * product  # some versions do not count addmm_


def test_several_streams_at_once(known: list[str]) -> None:
    x, w, target = operands()
    expected = gradients(x, w, target)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for s in streams:
        with torch.cuda.stream(s):
            found += [gradients(x, w, target) for _ in range(3)]
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for f in found for a, b in zip(f, expected, strict=True))


def test_torch_alone_gives_the_same_within_roundings(known: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, target = operands()
    ours = gradients(x, w, target)
    monkeypatch.setattr(multiply, "library", multiply.by_torch)
    ops_ = gradients(x, w, target)
    assert known
    for a, b in zip(ours, ops_, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) <= 2 * 2.0**-8
