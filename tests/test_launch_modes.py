"""Warm calls where torch records, replaces or refuses what is done: modes, transforms, traces.

On the launch path of `driver_kit`, behind a call that was recognised: what is remembered of it must not be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from driver_kit import FakeDriver, machine, needs_compiler
from launch_kit import integers, module, scaled
from recent_kit import UNKNOWN, looked_up
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import kgen
from kgen.runtime import recent

__all__ = ["looked_up", "machine", "module"]
pytestmark = needs_compiler


def warm(module: kgen.KernelModule, x: torch.Tensor, w: torch.Tensor) -> None:
    for _ in range(UNKNOWN + 1):
        module.scaled(x, w, backend="cuda")


def inside_a_mode() -> AbstractContextManager[Any]:
    """The state of a thread while a mode does what is in place of an operator."""
    key, left_out = torch._C.DispatchKey, torch._C.DispatchKeySet
    return cast(Any, torch._C)._ExcludeDispatchKeyGuard(left_out(key.Negative) | left_out(key.ADInplaceOrView))


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "inside a mode": inside_a_mode,
    "another default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("around", AROUND)
def test_whether_guards_are_trusted_does_not_hang_on_the_first_call(around: str) -> None:
    with AROUND[around]():
        assert recent._trusted.__wrapped__()


def test_calls_inside_what_a_mode_does_are_not_recognised_by_guards_that_see_less(
    module: kgen.KernelModule, looked_up: list[str]
) -> None:
    x, w = integers(4, 8), integers(8)
    warm(module, x, w)
    for _ in range(2):
        before = len(looked_up)
        with inside_a_mode():
            for _ in range(2):
                module.scaled(x, w, backend="cuda")
            negated = module.scaled(recent._negated(x), w, backend="cuda")
        assert len(looked_up) == before + 3
        assert torch.equal(negated, scaled(-x, w, 2.0, 0.0, 0, False))
    module.scaled(x, w, backend="cuda")
    assert len(looked_up) == before + 3


def test_a_first_call_under_a_mode_asks_nothing(module: kgen.KernelModule, looked_up: list[str]) -> None:
    recent._trusted.cache_clear()
    x, w = integers(4, 8), integers(8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.scaled(x, w, backend="cuda")
    before = len(looked_up)
    warm(module, x, w)
    assert len(looked_up) == before + UNKNOWN


def test_selective_checkpointing_is_no_recognised_call(module: kgen.KernelModule, looked_up: list[str]) -> None:
    """torch's guards do not see the mode."""
    x, w = integers(4, 8), integers(8)
    warm(module, x, w)
    before = len(looked_up)
    with create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)[0]:
        module.scaled(x, w, backend="cuda")
    assert len(looked_up) > before


def test_make_fx_records_kernels(module: kgen.KernelModule) -> None:
    x, w = integers(4, 8), integers(8)
    warm(module, x, w)

    def plain(a: torch.Tensor) -> torch.Tensor:
        return module.scaled(a, w, backend="cuda") + 1

    def given(a: torch.Tensor) -> torch.Tensor:
        return module.scaled(a, w, out=torch.empty(4, 8), backend="cuda") + 1

    def in_place(a: torch.Tensor) -> torch.Tensor:
        b = a.clone()
        module.halve(b, backend="cuda")
        return b

    def gradient(a: torch.Tensor) -> torch.Tensor:
        b = a.detach().requires_grad_()
        y = module.scaled(b, w, backend="cuda")
        return torch.autograd.grad((y * y).sum(), b)[0]

    for f in (plain, given, in_place, gradient):
        graph = make_fx(f)(x)
        other = integers(4, 8)
        assert torch.equal(graph(other), f(other)), f.__name__


def test_make_fx_records_ops() -> None:
    from kgen import ops

    w, target = torch.randn(5, 8), torch.arange(4)

    def loss(a: torch.Tensor) -> torch.Tensor:
        return ops.linear_cross_entropy(a, w, target, backend="cuda")

    graph = make_fx(loss)(torch.randn(4, 8))
    other = torch.randn(4, 8)
    assert torch.equal(graph(other), loss(other))


def test_fake_tensors_around_real_ones(module: kgen.KernelModule) -> None:
    x, w = integers(4, 8), integers(8)
    warm(module, x, w)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = module.scaled(x, w, backend="cuda")
    assert isinstance(y, FakeTensor) and y.shape == (4, 8)
    assert torch.equal(module.scaled(x, w, backend="cuda"), scaled(x, w, 2.0, 0.0, 0, False))


def test_what_has_no_memory_is_refused_behind_the_same_with_memory(module: kgen.KernelModule) -> None:
    """Its address is 0, and as aligned as any."""
    x, w = integers(4, 8), integers(8)
    warm(module, x, w)
    with torch.no_grad(), pytest.raises(kgen.ArgumentError, match="functionalize does not reach into a kernel"):
        torch.func.functionalize(lambda a: module.scaled(a, w, backend="cuda"))(x)


def without_storage(t: torch.Tensor) -> torch.Tensor:
    t.untyped_storage().resize_(0)
    return t


FREED: dict[str, tuple[str, Callable[[kgen.KernelModule, torch.Tensor, torch.Tensor], Any]]] = {
    "x": ("x", lambda m, freed, whole: m.scaled(freed, integers(8), backend="cuda")),
    "x, to record gradients": (
        "x", lambda m, freed, whole: m.scaled(freed.requires_grad_(), integers(8), backend="cuda")
    ),
    "x, of two": ("x", lambda m, freed, whole: m.scaled(freed, integers(8), backend="cuda", out=torch.empty(4, 8))),
    "y": ("y", lambda m, freed, whole: m.scaled(whole, integers(8), backend="cuda", out=freed)),
    "in place": ("x", lambda m, freed, whole: m.halve(freed, backend="cuda")),
}  # fmt: skip


@pytest.mark.parametrize("name", FREED)
def test_what_was_freed_is_refused_behind_the_same_with_memory(
    module: kgen.KernelModule, name: str, looked_up: list[str], machine: FakeDriver
) -> None:
    """Its address is 0 too."""
    argument, call = FREED[name]
    for _ in range(UNKNOWN):
        call(module, integers(4, 8), integers(4, 8))
    before = len(looked_up)
    call(module, integers(4, 8), integers(4, 8))
    assert len(looked_up) == before  # it was recognised
    launched = len(machine.seen)
    with pytest.raises(kgen.ArgumentError, match=f"'{argument}' has elements but no memory: its storage was freed"):
        call(module, without_storage(integers(4, 8)), integers(4, 8))
    assert len(machine.seen) == launched


def test_a_tensor_without_elements_is_recognised_without_memory(
    module: kgen.KernelModule, looked_up: list[str]
) -> None:
    """Its address is 0 as well, and right."""
    calls: list[Callable[[], Any]] = [
        lambda: module.scaled(torch.empty(0, 8), integers(8), backend="cuda"),
        lambda: module.scaled(torch.empty(0, 8), integers(8), backend="cuda", out=torch.empty(0, 8)),
    ]
    for call in calls:
        for _ in range(UNKNOWN):
            call()
        before = len(looked_up)
        assert call().shape == (0, 8) and len(looked_up) == before


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_script_traces_are_refused(module: kgen.KernelModule) -> None:
    x, w = integers(4, 8), integers(8)
    warm(module, x, w)
    with pytest.raises(kgen.ArgumentError, match=r"torch\.jit\.trace does not record kernels"):
        torch.jit.trace(lambda a: module.scaled(a, w, backend="cuda"), (x,), check_trace=False)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (3, "must be one tensor for each output (y), got a int"),
        ((), "must be one tensor for each output (y), got 0 tensors"),
        ((torch.ones(4, 8), torch.ones(4, 8)), "must be one tensor for each output (y), got 2 tensors"),
        ([None], "must be tensors, got a NoneType"),
    ],
)
def test_layouts_that_are_none(like: Any, message: str, module: kgen.KernelModule) -> None:
    for _ in range(2):
        with pytest.raises(kgen.ArgumentError) as error:
            module.scaled(integers(4, 8), like=like, backend="cuda")
        assert f"like= {message}" in str(error.value)


def test_one_tensor_is_a_layout(module: kgen.KernelModule) -> None:
    x, like = integers(4, 8), integers(8, 4).t()
    for _ in range(2):
        assert module.scaled(x, like=like, backend="cuda").stride() == like.stride()


def test_an_integer_beyond_all_floats(module: kgen.KernelModule) -> None:
    with pytest.raises(kgen.ArgumentError, match="the integer given is larger than any float"):
        module.scaled(integers(4, 8), a=10**400, backend="cuda")
