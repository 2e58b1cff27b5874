"""On a GPU: streams, devices, threads, graphs, and agreement with the reference."""

from __future__ import annotations

import threading

import pytest
import torch

import kgen
from kgen.runtime import events

pytestmark = pytest.mark.gpu

SOURCE = """
kernel add(a: T[*N], b: T[*N]) -> (c: T[*N]):
    parallel n in N
    c[n] = a[n] + b[n]

kernel centred(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] - mean(x[m, n], n)

kernel scale(x: T[*N], a: f32, b: i64 = 1, c: f64 = 1.0, d: const bool = false) -> (y: T[*N]):
    parallel n in N
    y[n] = T(x[n] * a) * b * c
"""
BACKENDS = ["cuda", "triton"]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def m() -> kgen.KernelModule:
    return kgen.loads(SOURCE)


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x.double() - x.double().mean(-1, keepdim=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (33, 1000), (4, 1025), (1, 20000)])
def test_values(m: kgen.KernelModule, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(shape, device="cuda").to(dtype)
    with events.launches() as seen:
        y = m.centred(x, backend=backend)
    assert [e.executor for e in seen] == [backend]
    # A sum of n terms in the compute type, and one rounding to the type of y.
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    bound = (shape[-1] + 2) * unit * 2 * x.double().abs().max() + torch.finfo(dtype).eps / 2 * _centred(x).abs()
    assert ((y.double() - _centred(x)).abs() <= bound).all()
    assert torch.equal(m.centred(x, backend=backend), y)  # the same bits again


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_are_used_where_they_lie(m: kgen.KernelModule, backend: str) -> None:
    for x in (
        torch.randn(64, 32, device="cuda").T,
        torch.randn(8, 64, device="cuda").chunk(2, -1)[1],
        torch.randn(65, device="cuda")[1:],
        torch.randn(4, 1, device="cuda").expand(4, 16),
        torch.randn(4, 6, 8, device="cuda").transpose(0, 1),
    ):
        m.add(x, x, backend=backend)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = m.add(x, x, backend=backend)
        # Only the output was allocated; blocks are rounded up to 512 bytes.
        assert torch.cuda.max_memory_allocated() - before <= -(-y.numel() * 4 // 512) * 512
        assert torch.equal(y, x + x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scalars_arrive_exactly(m: kgen.KernelModule, backend: str) -> None:
    x = torch.ones(4, device="cuda")
    for a, b, c in [(0.125, 1, 1.0), (42.0, -1, 0.5), (1.0, 2**20, 1.0), (1.0, 1, 16.0), (1.0, 16, 3.0)]:
        assert m.scale(x, a, b, c, backend=backend).tolist() == [a * b * c] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_current_stream(m: kgen.KernelModule, backend: str) -> None:
    x = torch.ones(1 << 20, device="cuda")
    m.add(x, x, backend=backend)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late = torch.full_like(x, 3.0)
        y = m.add(late, x, backend=backend)  # on another stream it would read before `late` is written
        assert not side.query()
    side.synchronize()
    assert (y == 4).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_synchronisation(m: kgen.KernelModule, backend: str) -> None:
    x = torch.ones(4, 8, device="cuda")
    m.centred(x, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        m.centred(x, backend=backend)
        m.centred(torch.ones(5, 8, device="cuda"), backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_thread(m: kgen.KernelModule, backend: str) -> None:
    x = torch.arange(8.0, device="cuda")
    results: list[object] = []

    def run() -> None:
        try:  # the first to touch the GPU in this thread is the kernel
            results.append(m.add(x, x, backend=backend, out=out))
        except Exception as error:
            results.append(error)

    for _ in range(2):  # cold, then warm
        out = torch.empty_like(x)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert isinstance(results[-1], torch.Tensor), results[-1]
        assert torch.equal(out, x + x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_thread(m: kgen.KernelModule, backend: str) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
            return m.add(g, g, backend=backend)

    x = torch.ones(4, device="cuda", requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs(m: kgen.KernelModule, backend: str) -> None:
    x = torch.arange(8.0, device="cuda").reshape(2, 4)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(kgen.BackendError, match="warm up"), torch.cuda.graph(graph):
        m.centred(x, backend=backend)
    torch.cuda.synchronize()
    m.centred(x, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = m.centred(x, backend=backend)
        z = m.centred(
            torch.cat([y, y]), backend=backend
        )  # a new batch size: known to no call before, compiled all the same
    x.copy_(torch.randn(2, 4, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert (y.double() - _centred(x)).abs().max() < 1e-6 * x.abs().max().item() * 6
    assert z.shape == (4, 4)
    assert (z[:2].double() - _centred(y)).abs().max() < 1e-6 * x.abs().max().item() * 6


def test_auto_takes_cuda_where_cupy_is(m: kgen.KernelModule) -> None:
    x = torch.ones(4, device="cuda")
    available = [s.executor for s in kgen.backends("cuda") if s.available]
    with events.launches() as seen:
        m.add(x, x)
    assert seen[0].executor == available[0]


def test_tensors_on_two_kinds_of_device(m: kgen.KernelModule) -> None:
    with pytest.raises(kgen.ArgumentError, match="all tensors must be on one device, got 'a' on cuda:0, 'b' on cpu"):
        m.add(torch.ones(2, device="cuda"), torch.ones(2))


def test_a_scalar_on_the_gpu_is_refused(m: kgen.KernelModule) -> None:
    with pytest.raises(kgen.ArgumentError, match="scalar argument 'a' must be a number"):
        m.scale(torch.ones(2, device="cuda"), torch.tensor(1.0, device="cuda"))


@several
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_device(m: kgen.KernelModule, backend: str) -> None:
    for index in (1, 0, 1):
        x = torch.arange(6.0, device=f"cuda:{index}")
        y = m.add(x, x, backend=backend)
        assert y.device == x.device
        assert torch.equal(y, x + x)
        assert torch.cuda.current_device() == 0
    results: list[bool] = []

    def run(index: int) -> None:
        x = torch.arange(6.0, device=f"cuda:{index}")
        results.extend(torch.equal(m.add(x, x, backend=backend), x + x) for _ in range(50))

    threads = [threading.Thread(target=run, args=(i % 2,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [True] * 400


@several
def test_tensors_on_two_gpus(m: kgen.KernelModule) -> None:
    with pytest.raises(kgen.ArgumentError, match="all tensors must be on one device"):
        m.add(torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1"))
