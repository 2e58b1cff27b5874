"""Warm calls: what recognises them, what is written out for them, and what the driver is told.

On a GPU's launch path without a GPU (`driver_kit`): what the driver is told is run on the CPU, so that a call that is
taken for another computes something else.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from driver_kit import FakeDriver, LaunchConfig, machine, needs_compiler

import kgen
from kgen.codegen.program import Program
from kgen.runtime import events, recent, unrolled
from kgen.runtime.backends import driver
from kgen.runtime.kernel import MAX_RECENT, Kernel

__all__ = ["machine"]
pytestmark = needs_compiler

TEXT = """
kernel scaled(x: T[*M, N], w: W[N]?, a: f32 = 2.0, b: f64 = 0.0, n: i32 = 0, flip: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n_ in N
    v = T(x[m, n_] * a + b + n)
    if w:
        v2 = v * w[n_]
    else:
        v2 = v
    if flip:
        y[m, n_] = -v2
    else:
        y[m, n_] = v2

kernel both(x: T[*M, N], z: T[*M, N]) -> (y: T[*M, N], d: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] + z[m, n]
    d[m, n] = x[m, n] - z[m, n]

kernel halve(x: inout T[*M, N]):
    parallel m in M
    tile n in N
    x[m, n] = x[m, n] * 0.5

kernel total(x: f32[M, N]) -> (y: f32[N]):
    parallel m in M
    tile n in N
    y[n] += x[m, n]

kernel half_scalar(x: f32[N], h: f16 = 1.0, b: bf16 = 1.0) -> (y: f32[N]):
    parallel n in N
    y[n] = x[n] * h + b
"""


@pytest.fixture
def module(machine: FakeDriver) -> kgen.KernelModule:
    return kgen.loads(TEXT)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that no guard recognised."""
    seen: list[str] = []
    before = Kernel._looked_up

    def counted(self: Kernel, *arguments: Any) -> Any:
        seen.append(self.name)
        return before(self, *arguments)

    monkeypatch.setattr(Kernel, "_looked_up", counted)
    return seen


def scaled(x: torch.Tensor, w: torch.Tensor | None, a: float, b: float, n: int, flip: bool) -> torch.Tensor:
    """What the kernel computes, rounded where it rounds: exact for the small integers of these tests."""
    y = x.double() * a + b + n
    y = y * w.double() if w is not None else y
    return (-y if flip else y).to(x.dtype)


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-8, 8, shape).to(dtype)


def scheduled(module: kgen.KernelModule, x: torch.Tensor) -> Program:
    """What runs."""
    program = module.scaled.prepare(x, backend="cuda").program
    assert program is not None
    return program


# ---- recognised or looked up: the same result ------------------------------------------------------------------------

# Each makes a tensor of 4 x 8 elements, in other memory at each call.
LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "plain": lambda d: integers(4, 8, dtype=d),
    "transposed": lambda d: integers(8, 4, dtype=d).t(),
    "slice of columns": lambda d: integers(4, 16, dtype=d)[:, :8],
    "misaligned": lambda d: integers(33, dtype=d)[1:].view(4, 8),
    "every other column": lambda d: integers(4, 16, dtype=d)[:, ::2],
    "one row for all": lambda d: integers(1, 8, dtype=d).expand(4, 8),
    "three dimensions": lambda d: integers(2, 2, 8, dtype=d),
    "fewer rows": lambda d: integers(3, 8, dtype=d),
    "shorter rows": lambda d: integers(4, 4, dtype=d),
    "no rows": lambda d: integers(0, 8, dtype=d),
    "lazily negated": lambda d: recent._negated(integers(4, 8, dtype=d)),
    "parameter": lambda d: torch.nn.Parameter(integers(4, 8, dtype=d), requires_grad=False),
    "wants a gradient": lambda d: integers(4, 8, dtype=d).requires_grad_(),
    "inference": lambda d: _inference(d),
}


def _inference(d: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return integers(4, 8, dtype=d)


def calls(seed: int, count: int) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Random calls: a name of the case, positional and named arguments."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    favourites = [(r.choice(list(LAYOUTS)), r.choice((torch.float32, torch.float64))) for _ in range(5)]
    for _ in range(count):
        layout, dtype = r.choice(favourites) if r.random() < 0.8 else (r.choice(list(LAYOUTS)), torch.float32)
        x = LAYOUTS[layout](dtype)
        w = r.choice((None, integers(x.shape[-1]), integers(2 * x.shape[-1])[::2]))
        scalars = {"a": r.choice((2.0, 2, -3.0)), "b": r.choice((0.0, -0.0, 1.0)), "n": r.choice((0, 5, -(2**31)))}
        flip = r.choice((False, False, True))
        yield f"{layout} {dtype} {scalars} {flip}", (x, w), {**scalars, "flip": flip}


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_calls_gives_what_each_call_gives(
    seed: int, module: kgen.KernelModule, looked_up: list[str]
) -> None:
    total = 150
    for case, args, kwargs in calls(seed, total):
        with torch.no_grad():
            y = module.scaled(*args, **kwargs, backend="cuda")
        expected = scaled(args[0].detach(), *args[1:], *kwargs.values())
        assert torch.equal(y, expected), case
        assert y.stride() == torch.empty(y.shape).stride(), case
        assert y.data_ptr() not in {t.data_ptr() for t in args if t is not None and t.numel()}, case
    assert len(looked_up) < total  # and guards did recognise calls


def test_guards_that_admit_everything_are_found_out(monkeypatch: pytest.MonkeyPatch, module: kgen.KernelModule) -> None:
    """The test above sees a call that is taken for another."""
    monkeypatch.setattr(recent, "_admits", lambda tensors: lambda *_: True)
    wrong = 0
    for _, args, kwargs in calls(0, 150):
        try:
            with torch.no_grad():
                y = module.scaled(*args, **kwargs, backend="cuda")
        except Exception:
            wrong += 1
            continue
        expected = scaled(args[0].detach(), *args[1:], *kwargs.values())
        wrong += y.shape != expected.shape or not torch.equal(y, expected)
    assert wrong


def test_without_guards_every_call_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, module: kgen.KernelModule, looked_up: list[str]
) -> None:
    monkeypatch.setattr(recent, "_trusted", lambda: False)
    for _, args, kwargs in calls(1, 40):
        with torch.no_grad():
            y = module.scaled(*args, **kwargs, backend="cuda")
        assert torch.equal(y, scaled(args[0].detach(), *args[1:], *kwargs.values()))
    assert len(looked_up) == 40


def test_torchs_guards_are_trusted_here() -> None:
    assert recent._trusted.__wrapped__()


def test_guards_that_torch_changed_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_admits", lambda tensors: lambda *_: True)
    assert not recent._trusted.__wrapped__()
    monkeypatch.setattr(recent, "_admits", lambda tensors: None)
    assert not recent._trusted.__wrapped__()


# ---- the path that is taken ------------------------------------------------------------------------------------------


def test_a_second_call_is_recognised(module: kgen.KernelModule, looked_up: list[str]) -> None:
    for _ in range(5):
        module.scaled(integers(4, 8), integers(8), a=3.0, backend="cuda")
    assert looked_up == ["scaled"]


def test_other_scalars_are_no_other_call(module: kgen.KernelModule, looked_up: list[str]) -> None:
    x = integers(4, 8)
    for a in (1.0, 2.5, -1.0, 3):
        assert torch.equal(module.scaled(x, a=a, backend="cuda"), scaled(x, None, a, 0.0, 0, False))
    assert len(looked_up) == 1
    with pytest.raises(kgen.ArgumentError, match="scalar argument 'a' must be a number"):
        module.scaled(x, a="much", backend="cuda")
    with pytest.raises(kgen.ArgumentError, match="must fit i32"):
        module.scaled(x, n=2**31, backend="cuda")
    t = torch.tensor(2.0)  # another value under the same name
    assert torch.equal(module.scaled(x, a=t, backend="cuda"), scaled(x, None, 2.0, 0.0, 0, False))
    t.fill_(5.0)
    assert torch.equal(module.scaled(x, a=t, backend="cuda"), scaled(x, None, 5.0, 0.0, 0, False))
    assert len(looked_up) == 1


def test_zero_and_minus_zero_are_two_scalars(module: kgen.KernelModule) -> None:
    x = torch.full((4, 8), -0.0)
    for b, sign in itertools.product((0.0, -0.0), (False, True)):
        y = module.scaled(x, a=1.0, b=b, flip=sign, backend="cuda")
        # -0.0 * 1 + b + 0: the sum with the integer zero is +0.0 either way.
        assert torch.equal(torch.signbit(y), torch.full((4, 8), sign))


def test_alternating_signatures_are_all_recognised(module: kgen.KernelModule, looked_up: list[str]) -> None:
    for _ in range(4):
        for rows in range(1, MAX_RECENT + 1):
            module.scaled(integers(rows, 8), backend="cuda")
    assert len(looked_up) == MAX_RECENT
    for _ in range(3):  # one more than are remembered: looked up, and right
        for rows in range(1, MAX_RECENT + 2):
            x = integers(rows, 8)
            assert torch.equal(module.scaled(x, backend="cuda"), scaled(x, None, 2.0, 0.0, 0, False))


def test_two_outputs_given_outputs_and_layouts(module: kgen.KernelModule, looked_up: list[str]) -> None:
    for _ in range(3):
        x, z = integers(4, 8), integers(4, 8)
        y, d = module.both(x, z, backend="cuda")
        assert torch.equal(y, x + z) and torch.equal(d, x - z)
    assert len(looked_up) == 1
    for k in range(3):
        x, z = integers(4, 8), integers(4, 8)
        out = (torch.empty(4, 8), torch.empty(8, 4).t())
        y, d = module.both(x, z, backend="cuda", out=out)
        assert y is out[0] and d is out[1]
        assert torch.equal(y, x + z) and torch.equal(d, x - z), k
    assert len(looked_up) == 2
    x, z = integers(4, 8), integers(4, 8)
    out = (torch.empty(4, 8), torch.empty(8, 4).t())
    with pytest.raises(kgen.ArgumentError, match="shares memory with argument"):
        module.both(x, z, backend="cuda", out=(x, out[1]))
    for _ in range(3):
        x, z = integers(8, 4).t(), integers(4, 8)
        y, d = module.both(x, z, backend="cuda", like=(x, z))
        assert y.stride() == x.stride() and d.stride() == z.stride()
        assert torch.equal(y, x + z) and torch.equal(d, x - z)
    assert len(looked_up) == 4
    for like in ((z, x), (x, z), (x, x), (integers(8, 4).t(), integers(4, 8))):  # the same arguments, other models
        y, d = module.both(x, z, backend="cuda", like=like)
        assert (y.stride(), d.stride()) == (like[0].stride(), like[1].stride())


def test_the_same_layout_at_an_address_that_is_not_aligned(module: kgen.KernelModule, looked_up: list[str]) -> None:
    """The host executor refuses an access of 16 bytes that is not aligned."""
    for bad in range(2):
        for _ in range(2):
            module.both(integers(4, 8), integers(4, 8), backend="cuda")
        x, z = (LAYOUTS["misaligned" if k == bad else "plain"](torch.float32) for k in range(2))
        y, d = module.both(x, z, backend="cuda")
        assert torch.equal(y, x + z) and torch.equal(d, x - z)
    for _ in range(2):
        out = (torch.empty(4, 8), torch.empty(4, 8))
        module.both(integers(4, 8), integers(4, 8), backend="cuda", out=out)
    out = (torch.empty(4, 8), LAYOUTS["misaligned"](torch.float32))
    x, z = integers(4, 8), integers(4, 8)
    module.both(x, z, backend="cuda", out=out)
    assert torch.equal(out[0], x + z) and torch.equal(out[1], x - z)


def test_one_tensor_for_two_arguments(module: kgen.KernelModule) -> None:
    for _ in range(3):
        x = integers(4, 8)
        y, d = module.both(x, x, backend="cuda")
        assert torch.equal(y, 2 * x) and torch.equal(d, 0 * x)


def test_in_place(module: kgen.KernelModule, looked_up: list[str]) -> None:
    for _ in range(3):
        x = integers(4, 8)
        expected, version = x * 0.5, x._version
        assert module.halve(x, backend="cuda") is x
        assert torch.equal(x, expected) and x._version == version + 1
    assert len(looked_up) == 1
    x = integers(4, 8).requires_grad_()
    for _ in range(2):
        with pytest.raises(kgen.ArgumentError, match="written in place but requires grad"):
            module.halve(x, backend="cuda")
    with torch.no_grad():
        module.halve(x, backend="cuda")


def test_sums_over_programs(module: kgen.KernelModule, looked_up: list[str]) -> None:
    for _ in range(3):
        x = integers(40, 8)
        assert torch.equal(module.total(x, backend="cuda"), x.sum(0))
    assert len(looked_up) == 1


def test_wrong_calls_after_right_ones(module: kgen.KernelModule) -> None:
    x, w = integers(4, 8), integers(8)
    for _ in range(2):
        module.scaled(x, w, backend="cuda")
        module.scaled(x, w, flip=True, backend="cuda")
        for args, kwargs, message in (
            ((), {}, "missing argument 'x'"),
            ((x, integers(7)), {}, r"argument 'w' must have shape"),
            ((x, w, 1.0), {"a": 2.0}, "given twice"),
            ((x, w), {"c": 2.0}, "there is no argument 'c'"),
            ((x.to("meta"), w), {}, "must be on a CPU or CUDA device"),
            ((x.to_sparse(), w), {}, "must be a dense tensor"),
            ((x.long(), w), {}, "stands for one of"),
            ((x, w), {"flip": 1}, "must be a bool"),
            (("x", w), {}, "must be a torch.Tensor"),
        ):
            with pytest.raises(kgen.ArgumentError, match=message):
                module.scaled(*args, **kwargs, backend="cuda")
        with pytest.raises(kgen.BackendError, match="backends are"):
            module.scaled(x, w, backend="none")


def test_launches_are_counted_and_told(module: kgen.KernelModule) -> None:
    x = integers(200, 8)
    programs = -(-200 // scheduled(module, x).schedule.rows)
    assert programs > 1
    module.scaled(x, backend="cuda")
    before = events.counts()["launch:cuda-fake"]
    with events.launches() as seen:
        module.scaled(x, backend="cuda")
    module.scaled(x, backend="cuda")
    assert [(s.kernel, s.executor, s.programs) for s in seen] == [("scaled", "cuda-fake", programs)]
    assert events.counts()["launch:cuda-fake"] == before + 2


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_calls_with_and_without_gradients_take_turns(module: kgen.KernelModule, looked_up: list[str]) -> None:
    for k in range(4):
        x, w = integers(4, 8), integers(8)
        for x_wants, w_wants in itertools.product((False, True), repeat=2):
            a, b = x.clone().requires_grad_(x_wants), w.clone().requires_grad_(w_wants)
            y = module.scaled(a, b, a=3.0, backend="cuda")
            assert torch.equal(y, 3 * x * w)
            assert y.requires_grad == (x_wants or w_wants), k
            with torch.no_grad():
                assert not module.scaled(a, b, a=3.0, backend="cuda").requires_grad
            if y.requires_grad:
                y.backward(torch.ones_like(y))
            assert (a.grad is not None, b.grad is not None) == (x_wants, w_wants)
            if a.grad is not None:
                assert torch.equal(a.grad, (3 * w).expand(4, 8))
            if b.grad is not None:
                assert torch.equal(b.grad, (3 * x).sum(0))
        if k == 0:
            first = len(looked_up)
    assert len(looked_up) <= first + 8  # inside a graph no guard admits what was remembered outside


def test_a_recognised_call_records_what_a_new_one_records(module: kgen.KernelModule) -> None:
    def grads() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        x, w = integers(4, 8).requires_grad_(), integers(8).requires_grad_()
        y = module.scaled(x, w, a=3.0, n=1, backend="cuda")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z = module.scaled(x, w, backend="cuda")
            with torch.no_grad():
                w.add_(0.0)
            z.sum().backward()
        (2 * module.scaled(x, w, a=3.0, n=1, backend="cuda")).sum().backward()
        assert x.grad is not None and w.grad is not None
        return y.detach(), x.grad, w.grad

    first = grads()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first, grads(), strict=True))


def test_forward_mode_is_refused_after_recognised_calls(module: kgen.KernelModule) -> None:
    import torch.autograd.forward_ad as forward_ad

    x = integers(4, 8)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            module.scaled(x, backend="cuda")
            module.scaled(x, backend="cuda")
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, torch.ones_like(x))
                with pytest.raises(kgen.ArgumentError, match="carries a tangent"):
                    module.scaled(dual, backend="cuda")
                module.scaled(x, backend="cuda")


def test_results_in_inference_mode(module: kgen.KernelModule) -> None:
    x = integers(4, 8)
    for _ in range(3):
        assert not module.scaled(x, backend="cuda").is_inference()
        with torch.inference_mode():
            assert module.scaled(x, backend="cuda").is_inference()


def test_a_dispatch_mode_sees_the_allocation(module: kgen.KernelModule) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    x, names = integers(4, 8), []
    module.scaled(x, backend="cuda")
    module.scaled(x, backend="cuda")
    for _ in range(2):
        names.clear()
        with Seen():
            module.scaled(x, backend="cuda")
        assert any("empty" in n for n in names)


# ---- what the driver is told -----------------------------------------------------------------------------------------


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
    made(torch.randn(4, 8), torch.randn(8), backend="cuda")
    shown = [line.strip() for line in (unrolled.__doc__ or "").split("\n") if line.startswith("    ")]
    real = [line.strip() for text in written if "admits" in text for line in text.split("\n")[1:-2]]
    assert real == [line for line in shown if line]
