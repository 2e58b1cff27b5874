"""Which backend runs a call, what happens where it cannot, and what is compiled how often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kgen
from kgen.runtime import events, registry

SOURCE = """
kernel add(a: T[*N], b: T[*N]) -> (c: T[*N]):
    parallel n in N
    c[n] = a[n] + b[n]

kernel centred(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] - mean(x[m, n], n)
"""
A, B = torch.arange(6.0), torch.ones(6)


@pytest.fixture
def m() -> kgen.KernelModule:
    return kgen.loads(SOURCE)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KGEN_BACKEND", raising=False)
    kgen.set_backend(None)
    yield
    monkeypatch.delenv("KGEN_BACKEND", raising=False)
    kgen.set_backend(None)


def _executor(m: kgen.KernelModule, **kwargs: Any) -> str:
    with events.launches() as seen:
        assert torch.equal(m.add(A, B, **kwargs), A + B)
    (launch,) = seen
    assert (launch.kernel, launch.device) == ("add", "cpu")
    return launch.executor


def test_the_order_of_choice(m: kgen.KernelModule, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _executor(m) == "reference"  # auto, on the CPU
    monkeypatch.setenv("KGEN_BACKEND", "cuda")
    kgen.set_backend(None)
    assert _executor(m) == "cuda-host"
    kgen.set_backend("reference")
    assert _executor(m) == "reference"
    with kgen.backend("cuda"):
        assert _executor(m) == "cuda-host"
        with kgen.backend("auto"):
            assert _executor(m) == "reference"
        assert _executor(m, backend="reference") == "reference"
        assert _executor(m) == "cuda-host"
    assert _executor(m) == "reference"


def test_a_context_is_of_its_thread(m: kgen.KernelModule) -> None:
    found: list[str] = []
    with kgen.backend("cuda"):
        thread = threading.Thread(target=lambda: found.append(registry.requested(None)))
        thread.start()
        thread.join()
    assert found == ["auto"]


@pytest.mark.parametrize("name", ["cuuda", "", 3, "CUDA"])
def test_unknown_backends(m: kgen.KernelModule, name: Any) -> None:
    for use in (
        lambda: m.add(A, B, backend=name),
        lambda: kgen.set_backend(name),
        lambda: kgen.backend(name).__enter__(),
    ):
        with pytest.raises(kgen.BackendError, match="the backends are auto, cuda, triton, reference"):
            use()


def test_an_unknown_backend_in_the_environment(m: kgen.KernelModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_BACKEND", "metal")
    kgen.set_backend(None)
    with pytest.raises(kgen.BackendError, match="KGEN_BACKEND got 'metal'"):
        m.add(A, B)


def test_a_missing_compiler_is_one_sentence_and_the_others_go_on(
    m: kgen.KernelModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (status,) = [s for s in kgen.backends("cpu") if s.name == "cuda"]
    assert not status.available
    assert "install g++" in (status.reason or "")
    with pytest.raises(kgen.BackendError, match=r"backend 'cuda' cannot run on cpu: .*install g\+\+"):
        m.add(A, B, backend="cuda")
    assert torch.equal(m.add(A, B), A + B)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_backends_of_a_gpu_without_one() -> None:
    found = {s.name: s for s in kgen.backends("cuda")}
    assert found["reference"].executor == "reference"
    for name in ("cuda", "triton"):
        assert found[name].executor == name
        assert not found[name].available
        assert "no CUDA device" in (found[name].reason or "")


def test_backends_on_the_cpu() -> None:
    found = {s.name: s.executor for s in kgen.backends("cpu")}
    assert found == {"cuda": "cuda-host", "triton": "triton-interpreter", "reference": "reference"}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_new_batch_sizes_and_row_strides_compile_nothing(m: kgen.KernelModule, backend: str) -> None:
    m.centred(torch.randn(3, 16), backend=backend)
    before = events.counts()["plan"]
    for x in (
        torch.randn(1, 16),
        torch.randn(7, 16),
        torch.randn(2, 3, 16),
        torch.randn(16),
        torch.randn(4, 32)[:, :16],
    ):
        bound = 18 * 2.0**-24 * 2 * x.abs().max().item()
        expected = x.double() - x.double().mean(-1, keepdim=True)
        assert (m.centred(x, backend=backend).double() - expected).abs().max() <= bound
    assert events.counts()["plan"] == before
    m.centred(torch.randn(3, 16).T.contiguous().T, backend=backend)  # columns apart: another variant
    assert events.counts()["plan"] == before + 1


def test_a_warm_call_prepares_nothing(m: kgen.KernelModule, monkeypatch: pytest.MonkeyPatch) -> None:
    m.add(A, B, backend="cuda")
    monkeypatch.setattr(m.add, "_prepare", lambda *_: pytest.fail("prepared again"))
    assert torch.equal(m.add(A + 1, B, backend="cuda"), A + 1 + B)


def test_sixteen_threads_and_one_cold_kernel(m: kgen.KernelModule) -> None:
    before = events.counts()["plan"]
    start, results = threading.Barrier(16), []

    def run() -> None:
        start.wait()
        results.append(torch.equal(m.add(A, B, backend="cuda"), A + B))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert results == [True] * 16
    assert events.counts()["plan"] == before + 1


PROCESS = """
import json, sys, torch, kgen
from kgen.runtime import events, host_executor
real = host_executor._build
built = []
host_executor._build = lambda *a: (built.append(1), real(*a))[1]
m = kgen.loads(sys.argv[1])
y = m.centred(torch.arange(12.0).reshape(3, 4), backend="cuda")
print(json.dumps([y.tolist(), len(built)]))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "KGEN_CACHE_DIR": str(tmp_path / "a cache")}

    def run() -> list[Any]:
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, SOURCE], env=env, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    rows = [[-1.5, -0.5, 0.5, 1.5]] * 3
    first, second = run(), run()
    assert first[0] == second[0] == rows
    assert first[1] > 0
    assert second[1] == 0


def test_importing_kgen_does_not_import_torch() -> None:
    code = "import sys, kgen; print('torch' in sys.modules, kgen.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", kgen.__version__]


@pytest.mark.parametrize("copied", [True, False])
def test_a_source_tree_that_is_not_installed(tmp_path: Path, copied: bool) -> None:
    root = Path(kgen.__file__).parent.parent
    if copied:  # laid out as installed
        (tmp_path / "kgen").mkdir()
        for entry in [
            *(root / "kgen").iterdir(),
            *(root / d for d in ("dsl", "codegen", "runtime", "ops", "templates")),
        ]:
            (tmp_path / "kgen" / entry.name).symlink_to(entry)
    where = tmp_path if copied else root
    code = "import kgen, kgen.dsl.ir; print(kgen.__version__, kgen.__file__)"
    # -S: without site-packages, where the installed kgen and its metadata are.
    command = [sys.executable, "-S", "-c", code]
    env = {**os.environ, "PYTHONPATH": str(where)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    version, file = done.stdout.split()
    assert version == ("0.0.0+source" if copied else kgen.__version__)  # a build leaves metadata in the tree
    assert file.startswith(str(where))
