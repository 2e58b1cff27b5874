"""The chunked cross entropy of a linear layer on a GPU: bounds, memory, synchronisation, capture, streams, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_loss_kit import Case, case, excess, judge, randn

from kgen import ops
from kgen.runtime.loading import load_packaged

pytestmark = pytest.mark.gpu
BACKENDS = ("cuda", "triton")
MIB = 2**20


def on_gpu(c: Case) -> Case:
    """The same on the GPU, with gradients wanted."""
    floats = [None if t is None else t.cuda().requires_grad_() for t in (c.x, c.w, c.bias)]
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in c.options.items()}
    assert floats[0] is not None and floats[1] is not None
    return Case(floats[0], floats[1], c.target.cuda(), floats[2], options)


def call(c: Case, **more: Any) -> torch.Tensor:
    """The function on a case."""
    return ops.linear_cross_entropy(c.x, c.w, c.target, c.bias, **{**c.options, **more})


def gradients(c: Case, upstream: torch.Tensor | None = None, **more: Any) -> list[torch.Tensor]:
    """The loss and the gradients."""
    loss = call(c, **more)
    given = [t for t in c.floats if t.requires_grad]
    up = torch.ones_like(loss) if upstream is None else upstream.to(loss.device).expand(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, given, up)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_within_derived_bounds(reduction: str, dtype: torch.dtype, backend: str) -> None:
    rows, classes = 261, 1003
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "token_weight": randn(rows, seed=3)}):
        c = case(rows, 64, classes, dtype, bias=2.0, reduction=reduction, **options)
        up = randn(rows, seed=8) if reduction == "none" else torch.tensor(3.7)
        right = judge(c, up)
        for accumulate, mb in (("auto", 0.5), ("f32", 0.05), ("auto", 64.0)):
            found = gradients(on_gpu(c), up, backend=backend, accumulate=accumulate, workspace_mb=mb)
            for a, e, b in zip(found, right.expected, right.bound, strict=True):
                assert excess(a.cpu(), e, b) <= 1.0


def test_the_error_of_the_weight_gradient_does_not_grow_with_the_chunks() -> None:
    c = case(4096, 64, 200, torch.bfloat16)
    exact = judge(c, torch.tensor(1.0)).expected[2]
    given = on_gpu(c)
    op = load_packaged("fused_linear_cross_entropy.kdsl").fused_linear_cross_entropy

    def error(chunks: int, accumulate: str) -> float:
        loss = op(given.x, given.w, given.target, chunk=4096 // chunks, accumulate=accumulate)
        (g,) = torch.autograd.grad(loss, given.w)
        return ((g.cpu().double() - exact).norm() / exact.norm()).item()

    one = error(1, "auto")
    for chunks in (16, 256, 1024):
        assert error(chunks, "auto") <= 1.1 * one and error(chunks, "f32") <= 1.1 * one
    assert error(1024, "param") > 4.0 * one


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_waits_and_both_directions_are_captured(reduction: str, backend: str) -> None:
    weights = randn(300, seed=3).abs()
    c = on_gpu(case(300, 64, 500, torch.bfloat16, bias=1.0, reduction=reduction, token_weight=weights, z_loss=0.01))

    def step() -> list[torch.Tensor]:
        return gradients(c, backend=backend, workspace_mb=0.1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with no_sync():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        c.x.copy_(randn(300, 64, seed=11))
        c.target[5:9] = -100
    for _ in range(2):
        graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def peak(f: Callable[[], Any]) -> float:
    """MiB above what is there before, at most; `f` was called once before."""
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = f()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / MIB


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory(backend: str) -> None:
    rows, width, classes = 4096, 512, 32000
    x, w = randn(rows, width).bfloat16().cuda(), (randn(classes, width, seed=1) / 23).bfloat16().cuda()
    target = torch.randint(0, classes, (rows,), device="cuda")
    dx, dw, budget, small = rows * width * 2 / MIB, classes * width * 2 / MIB, 64.0, 4.0

    def train(accumulate: str = "auto") -> Any:
        loss = ops.linear_cross_entropy(x, w, target, backend=backend, workspace_mb=budget, accumulate=accumulate)
        return torch.autograd.grad(loss, [t for t in (x, w) if t.requires_grad])

    with torch.no_grad():
        assert (
            peak(lambda: ops.linear_cross_entropy(x, w, target, backend=backend, workspace_mb=budget)) <= budget + small
        )
    x.requires_grad_()
    assert peak(train) <= dx + budget + small
    w.requires_grad_()
    assert peak(train) <= dx + dw + budget + small
    assert peak(lambda: train("f32")) <= dx + 3 * dw + budget + small


# The first rows, those around the element 2^31 of logits, and the last ones.
FAR, FAR_CLASSES = 17000, 128256
PARTS = (slice(0, 8), slice(2**31 // FAR_CLASSES - 4, 2**31 // FAR_CLASSES + 4), slice(FAR - 8, FAR))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_place", [False, True])
def test_rows_far_into_large_logits(in_place: bool, backend: str) -> None:
    logits = torch.randn(FAR, FAR_CLASSES, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, FAR_CLASSES, (FAR,), device="cuda")
    before = [logits[part].double() for part in PARTS]
    if in_place:
        loss = ops.cross_entropy_(logits, target, 0.5, backend=backend)
    else:
        loss = ops.cross_entropy(logits, target, reduction="none", backend=backend)
    own = 2.0**-24 * (FAR_CLASSES + 64)  # what a sum over the classes is off by, relative to it
    for part, x in zip(PARTS, before, strict=True):
        x.requires_grad_()
        expected = F.cross_entropy(x, target[part], reduction="none")
        (e,) = torch.autograd.grad(0.5 * expected.sum(), x)
        spread = x.detach().abs().amax() + expected.amax()
        assert ((loss[part] - expected).abs() <= 2 * own + 8 * 2.0**-24 * spread).all()
        if in_place:
            p = 0.5 * x.detach().softmax(-1)
            bound = 2.0**-8 * e.abs() + (2 * own + 32 * 2.0**-24 * spread) * p + 2.0**-24 * e.abs()
            assert ((logits[part] - e).abs() <= bound).all()
        else:
            assert torch.equal(logits[part].double(), x.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_far_into_a_large_chunk(backend: str) -> None:
    rows, width, classes = FAR, 16, FAR_CLASSES  # 2.18e9 logits in one chunk: offsets beyond 32 bits
    x, w = randn(rows, width).bfloat16().cuda().requires_grad_(), randn(classes, width, seed=1).bfloat16().cuda()
    target = torch.randint(0, classes, (rows,), device="cuda")
    op = load_packaged("fused_linear_cross_entropy.kdsl").fused_linear_cross_entropy_rows
    loss = op(x, w, target, chunk=rows, backend=backend)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    for part in PARTS:
        own = x.detach()[part].double().requires_grad_()
        expected = F.cross_entropy(own @ w.double().T, target[part], reduction="none")
        (e,) = torch.autograd.grad(expected.sum(), own)
        size = (x.detach()[part].abs().double() @ w.abs().double().T).amax(-1)
        assert ((loss[part] - expected).abs() <= 2.0**-7 * size + 1e-3 * expected).all()
        assert ((dx[part] - e).abs() <= 2.0**-6 * size[:, None] * w.abs().double().amax()).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_another_stream(backend: str) -> None:
    c = on_gpu(case(300, 64, 500, torch.bfloat16, bias=1.0))
    expected = gradients(c, backend=backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what runs on another stream would be done before this
        late = Case((c.x.detach() * 1.0).requires_grad_(), c.w, c.target, c.bias, c.options)
        found = gradients(late, backend=backend)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_autocast() -> None:
    c = case(300, 64, 500, bias=1.0)
    right = judge(Case(c.x.bfloat16().float(), c.w, c.target, c.bias, c.options), torch.tensor(1.0), torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        found = gradients(on_gpu(c), workspace_mb=0.1)
    for a, e, b in zip(found, right.expected, right.bound, strict=True):
        assert a.dtype == torch.float32 and excess(a.cpu(), e, b + 2.0**-6 * e.abs()) <= 1.0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_with_inductor(reduction: str) -> None:
    torch._dynamo.reset()
    c = on_gpu(case(300, 64, 500, torch.bfloat16, bias=1.0, reduction=reduction))

    def f(x: torch.Tensor) -> torch.Tensor:
        return ops.linear_cross_entropy(x, c.w, c.target, c.bias, reduction=reduction, workspace_mb=0.1).sum()

    g = torch.compile(f, fullgraph=True)
    found = [torch.autograd.grad(h(c.x), [c.x, c.w, c.bias]) for h in (f, g)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
