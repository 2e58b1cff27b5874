"""What the driver is told of a launch, from which threads and devices, and the text that is written for a call."""

from __future__ import annotations

import ctypes
import random
import threading

import pytest
import torch
from driver_kit import FakeDriver, LaunchConfig, machine, needs_compiler
from launch_kit import TEXT, integers, module, scheduled
from recent_kit import UNKNOWN

import kgen
from kgen.runtime import unrolled
from kgen.runtime.backends import driver
from kgen.runtime.kernel import Kernel

__all__ = ["machine", "module"]
pytestmark = needs_compiler


@pytest.mark.parametrize("nulls", [0, 1, 2])
def test_the_driver_gets_grid_threads_stream_and_null_pointers(machine: FakeDriver, nulls: int) -> None:
    machine.nulls = nulls
    module = kgen.loads(TEXT)
    for stream in (0, 0x7F0012345678, 7):
        machine.streams[0] = stream
        x = integers(200, 8)
        module.scaled(x, backend="cuda")
        told, program = machine.seen[-1], scheduled(module, x)
        grid = (-(-200 // program.schedule.rows), 1, 1)
        assert (told.grid, told.block) == (grid, (program.schedule.threads, 1, 1))
        assert (told.shared, told.stream, told.attributes) == (program.shared_bytes, stream, 0)
        assert told.nulls == [None] * nulls


def test_scalars_of_16_bits(module: kgen.KernelModule) -> None:
    x = torch.ones(4)
    for _ in range(2):
        for h, b in ((0.1, 0.1), (2.0, -3.0), (1e9, 1.0)):
            expected = x * torch.tensor(h, dtype=torch.float16) + torch.tensor(b, dtype=torch.bfloat16)
            assert torch.equal(module.half_scalar(x, h, b, backend="cuda"), expected.float())


def test_the_plan_takes_other_memory(module: kgen.KernelModule) -> None:
    plan = module.scaled.prepare(integers(4, 8), integers(8), backend="cuda").plan
    assert plan is not None
    for _ in range(3):
        x, w = integers(4, 8), integers(8)
        assert torch.equal(plan(x, w, 3.0, 1.0, 2, x.data_ptr(), w.data_ptr()), (3 * x + 3) * w)


def test_another_device_is_made_current_for_the_launch(machine: FakeDriver, module: kgen.KernelModule) -> None:
    x = integers(4, 8)
    module.scaled(x, backend="cuda")
    machine.device, machine.entered[:] = 1, []
    for _ in range(3):
        assert torch.equal(module.scaled(x, backend="cuda"), 2 * x)
    assert machine.entered == [0, 0, 0] and machine.device == 1


def test_a_thread_without_a_context(machine: FakeDriver, module: kgen.KernelModule) -> None:
    x, results = integers(4, 8), []
    module.scaled(x, backend="cuda")

    def run() -> None:
        machine.contextless.add(threading.get_ident())
        results.extend(module.scaled(x, backend="cuda") for _ in range(3))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(results) == 3 and all(torch.equal(y, 2 * x) for y in results)


def test_an_error_of_the_driver_is_told_and_does_not_last(machine: FakeDriver, module: kgen.KernelModule) -> None:
    x = integers(4, 8)
    module.scaled(x, backend="cuda")
    machine.code = 700
    for _ in range(2):
        with pytest.raises(kgen.BackendError, match=r"the launch of 1 programs failed: error of the fake driver 700"):
            module.scaled(x, backend="cuda")
    machine.code = 0
    assert torch.equal(module.scaled(x, backend="cuda"), 2 * x)


def test_threads_share_no_frame(machine: FakeDriver, module: kgen.KernelModule) -> None:
    """All threads are inside the driver's call at once, before it reads the arguments."""
    count = 4
    tensors = [integers(4, 8) + 100 * k for k in range(count)]
    module.scaled(tensors[0], backend="cuda")
    meet = threading.Barrier(count)
    machine.before = lambda: meet.wait(10)
    results: dict[int, list[torch.Tensor]] = {}

    def run(k: int) -> None:
        results[k] = [module.scaled(tensors[k], a=float(k + j), backend="cuda") for j in range(5)]

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(count):
        assert all(torch.equal(y, (k + j) * tensors[k]) for j, y in enumerate(results[k]))


def test_a_call_inside_a_launch_has_a_frame_of_its_own(machine: FakeDriver, module: kgen.KernelModule) -> None:
    x, z, inner = integers(4, 8), integers(4, 8), []
    module.scaled(x, backend="cuda")

    def before() -> None:  # as a finaliser may, at any time
        machine.before = lambda: None
        inner.append(module.scaled(z, a=-1.0, backend="cuda"))

    machine.before = before
    assert torch.equal(module.scaled(x, a=4.0, backend="cuda"), 4 * x)
    assert torch.equal(inner[0], -z)


def test_threads_that_find_new_signatures_at_once(module: kgen.KernelModule) -> None:
    failures: list[str] = []

    def run(seed: int) -> None:
        r = random.Random(seed)
        for _ in range(60):
            x = integers(r.randint(1, 9), 8)
            if not torch.equal(module.scaled(x, a=3.0, backend="cuda"), 3 * x):
                failures.append(str(x.shape))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_the_configuration_has_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(LaunchConfig) == driver._CONFIG.size
    assert LaunchConfig.hStream.offset == driver.STREAM


def test_the_text_in_the_docstring_is_what_is_written(
    module: kgen.KernelModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    before = unrolled._compiled
    monkeypatch.setattr(unrolled, "_compiled", lambda text: written.append(text) or before(text))
    norm = kgen.load_packaged("rms_norm.kdsl").rms_norm
    made = Kernel(norm.module, "rms_norm")
    for _ in range(UNKNOWN):
        made(torch.randn(4, 8), torch.randn(8), backend="cuda")
    (guarded,) = (text for text in written if "admits" in text)
    made(torch.randn(4, 8).requires_grad_(), torch.randn(8).requires_grad_(), backend="cuda")
    (recording,) = (text for text in written if "def call(ctx" in text)
    shown = [line.strip() for line in (unrolled.__doc__ or "").split("\n") if line.startswith("    ")]
    real = [line.strip() for text in (guarded, recording) for line in text.split("\n")[1:-2]]
    assert real == [line for line in shown if line]
