"""Warm calls on a GPU: recognised on any stream, device and in a graph; and what a second process needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recent_kit import UNKNOWN, looked_up

import kgen
from kgen.runtime.backends import driver
from kgen.runtime.cache import CACHE

__all__ = ["looked_up"]
pytestmark = pytest.mark.gpu

TEXT = """
kernel shifted(x: T[*M, N], w: T[N]?, a: f32 = 1.0) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    if w:
        y[m, n] = x[m, n] - max(x[m, n], n) * a + w[n]
    else:
        y[m, n] = x[m, n] - max(x[m, n], n) * a
"""
BACKENDS = ["cuda", "triton"]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def m() -> kgen.KernelModule:
    return kgen.loads(TEXT)


def shifted(x: torch.Tensor, w: torch.Tensor | None = None, a: float = 1.0) -> torch.Tensor:
    """Exact for the small integers of these tests."""
    y = x - x.amax(-1, keepdim=True) * a
    return y if w is None else y + w


def integers(*shape: int, device: str = "cuda") -> torch.Tensor:
    return torch.randint(-50, 50, shape, device=device).float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [7, 64, 1000, 20000])
def test_recognised_calls_give_what_the_first_gave(
    m: kgen.KernelModule, looked_up: list[str], width: int, backend: str
) -> None:
    for k in range(5):
        x, w = integers(33, width), integers(width)
        assert torch.equal(m.shifted(x, w, float(k), backend=backend), shifted(x, w, k))
    assert looked_up == ["shifted"] * UNKNOWN


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recognised_call_runs_on_the_current_stream(m: kgen.KernelModule, looked_up: list[str], backend: str) -> None:
    x = integers(512, 512)
    m.shifted(x, backend=backend)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(4):
        later = torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # a call on any other stream would see zeros
            later.copy_(x)
            y = m.shifted(later, backend=backend)
        stream.synchronize()
        assert torch.equal(y, shifted(x))
    assert len(looked_up) == UNKNOWN


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recognised_call_in_a_graph(m: kgen.KernelModule, looked_up: list[str], backend: str) -> None:
    x, w = integers(64, 256), integers(256)
    m.shifted(x, w, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = m.shifted(x, w, 2.0, backend=backend)
    for _ in range(4):
        x.copy_(integers(64, 256))
        m.shifted(integers(64, 256), w, backend=backend)  # which must not change what the graph holds
        graph.replay()
        assert torch.equal(y, shifted(x, w, 2.0))
    assert len(looked_up) == UNKNOWN


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stored_call_warms_up_a_capture_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "own.kdsl").write_text(TEXT)
    for _ in range(2):
        CACHE.clear_memory()
        driver.loaded.clear()
        m = kgen.load(tmp_path / "own.kdsl")
        m.shifted(integers(64, 256), integers(256), backend=backend)
    assert m.shifted.restored
    x, w, graph = integers(96, 256), integers(256), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = m.shifted(x, w, 2.0, backend=backend)
    x.copy_(integers(96, 256))
    graph.replay()
    assert torch.equal(y, shifted(x, w, 2.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_recognised_calls(m: kgen.KernelModule, looked_up: list[str], backend: str) -> None:
    results = []
    for k in range(3):
        torch.manual_seed(0)
        x, w = integers(33, 64).requires_grad_(), integers(64).requires_grad_()
        m.shifted(x, w, 2.0, backend=backend).sum().backward()
        results.append((x.grad, w.grad))
        if k == 1:
            looked_up.clear()
    assert not looked_up
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))


@several
@pytest.mark.parametrize("backend", BACKENDS)
def test_devices_take_turns(m: kgen.KernelModule, backend: str) -> None:
    for current in (0, 1):
        with torch.cuda.device(current):
            for _ in range(4):
                for device in ("cuda:0", "cuda:1"):
                    x = integers(33, 64, device=device)
                    y = m.shifted(x, backend=backend)
                    assert y.device == x.device and torch.equal(y, shifted(x))
                    assert torch.cuda.current_device() == current


_PROCESS = """
import sys, torch
from kgen import ops
from kgen.runtime import events
ops.rms_norm(torch.ones(4, 64, device="cuda"), torch.ones(64, device="cuda"), backend={backend!r})
torch.cuda.synchronize()
print(events.counts()["compile:{backend}"], events.counts()["load:{backend}"], "triton" in sys.modules)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_process_compiles_nothing_and_imports_no_compiler(tmp_path: Path, backend: str) -> None:
    env = {**os.environ, "KGEN_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _PROCESS.format(backend=backend)]
    told = [
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)
    ]
    assert told[0][:2] == ["1", "0"]
    assert told[1] == ["0", "1", "False"]
