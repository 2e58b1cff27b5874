"""Gradients on a GPU: values, the backward's own thread, capture in a CUDA graph, torch.compile."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from autograd_kit import check, leaf, packaged, randn, rms_formula, worst
from compile_kit import Model, batch, outcome

import kgen
from kgen import ops
from kgen.runtime import events

pytestmark = pytest.mark.gpu
BACKENDS = ("cuda", "triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, 1, 131, 132, 133])
def test_values_at_row_counts_around_the_number_of_multiprocessors(rows: int, backend: str) -> None:
    x, w, g = randn(rows, 257), randn(257, seed=1), randn(rows, 257, seed=2)
    xs, ws = x.cuda().requires_grad_(), w.cuda().requires_grad_()
    xd, wd = x.double().requires_grad_(), w.double().requires_grad_()
    got = torch.autograd.grad(ops.rms_norm(xs, ws, backend=backend), (xs, ws), g.cuda())
    expected = torch.autograd.grad(rms_formula(xd, wd), (xd, wd), g.double())
    for a, b in zip(got, expected, strict=True):
        assert worst(a.cpu(), b, max(rows, 257)) <= 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_within_the_derived_bound(backend: str, dtype: torch.dtype) -> None:
    def formula(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b, 1e-5)

    arguments = {"x": randn(37, 129, dtype=dtype), "w": randn(129, seed=1), "b": randn(129, seed=2)}
    check(packaged("layer_norm", "layer_norm"), {n: t.cuda() for n, t in arguments.items()}, formula, backend)


FIRST = """
import torch
from kgen import ops
x = torch.ones(3, 8, device="cuda", requires_grad=True)
y = ops.softmax(x, backend="{backend}")
g = torch.rand(3, 8, device="cuda")
torch.autograd.backward(y, g)  # a leaf's gradient: the backward kernel is the first launch of autograd's thread
s = torch.softmax(x.detach(), -1)
assert torch.allclose(x.grad, s * (g - (g * s).sum(-1, keepdim=True)), atol=1e-6)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_kernel_is_the_first_of_its_thread(backend: str) -> None:
    code = FIRST.format(backend=backend)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_runs_on_the_stream_of_the_forward(backend: str) -> None:
    x, g = leaf(64, 4096).detach().cuda().requires_grad_(), randn(64, 4096, seed=1).cuda()
    (expected,) = torch.autograd.grad(ops.softmax(x, backend=backend), x, g)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what runs on another stream would be done before this
        late = g * 1.0
        y = ops.softmax(x, backend=backend)
    (got,) = torch.autograd.grad(y, x, late)
    torch.cuda.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_directions_in_one_graph(backend: str) -> None:
    x, w = randn(8, 256).cuda().requires_grad_(), randn(256, seed=1).cuda().requires_grad_()
    g = randn(8, 256, seed=2).cuda()

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(ops.rms_norm(x, w, backend=backend), (x, w), g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(randn(8, 256, seed=3))
    for _ in range(2):
        graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_with_inductor(backend: str) -> None:
    torch._dynamo.reset()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(ops.swiglu(x, x * 2, backend=backend), w, backend=backend)

    g = torch.compile(f, fullgraph=True, dynamic=True)
    w = randn(512, seed=1).cuda().requires_grad_()
    plans = 0
    for rows in (8, 16):
        before = events.counts()["plan"]
        x, seed = randn(rows, 512).cuda().requires_grad_(), randn(rows, 512, seed=2).cuda()
        got = torch.autograd.grad(g(x, w), (x, w), seed)
        plans = events.counts()["plan"] - before
        for a, b in zip(got, torch.autograd.grad(f(x, w), (x, w), seed), strict=True):
            torch.testing.assert_close(a, b)
    assert plans == 0


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_at_a_new_batch_and_length(backend: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    plans = 0
    with kgen.backend(backend):
        model = Model().cuda()
        f = torch.compile(model, fullgraph=True, dynamic=dynamic)
        for rows, tokens in ((2, 8), (4, 12)):
            before = events.counts()["plan"]
            x, labels = batch(rows, tokens, seed=rows, device="cuda")
            got = outcome(f, model, x, labels)
            plans = events.counts()["plan"] - before
            for a, b in zip(got, outcome(model, model, x, labels), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # inductor adds up in another order
    assert plans == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_in_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    with kgen.backend(backend):
        model = Model().cuda()
        f = torch.compile(model, fullgraph=True)
        x, labels = batch(2, 8, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                first = outcome(f, model, x, labels)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = outcome(f, model, x, labels)
        other = batch(2, 8, seed=5, device="cuda")
        with torch.no_grad():
            x.copy_(other[0])
            labels.copy_(other[1])
            for p in model.parameters():
                p.mul_(1.25)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(captured, outcome(model, model, x, labels), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert not any(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in zip(captured, first, strict=True))
