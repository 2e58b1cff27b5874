"""Warm calls: what recognises them, what is written out for them, and what the driver is told.

On a GPU's launch path without a GPU (`driver_kit`): what the driver is told is run on the CPU, so that a call that is
taken for another computes something else.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from driver_kit import machine, needs_compiler
from launch_kit import integers, module, scaled, scheduled
from recent_kit import UNKNOWN, looked_up

import kgen
from kgen.runtime import events, recent
from kgen.runtime.kernel import MAX_RECENT

__all__ = ["looked_up", "machine", "module"]
pytestmark = needs_compiler


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


def test_a_call_that_came_twice_is_recognised(module: kgen.KernelModule, looked_up: list[str]) -> None:
    for _ in range(5):
        module.scaled(integers(4, 8), integers(8), a=3.0, backend="cuda")
    assert looked_up == ["scaled"] * UNKNOWN


def test_calls_that_come_once_take_the_place_of_none(module: kgen.KernelModule, looked_up: list[str]) -> None:
    """As those of prompts, each of its own length, between the steps of generation."""
    for rows in range(1, 4 * MAX_RECENT):
        module.scaled(integers(1, 8), integers(8), backend="cuda")
        module.scaled(integers(rows, 16), integers(16), backend="cuda")
    once = 4 * MAX_RECENT - 1
    assert len(looked_up) == UNKNOWN + once


def test_other_scalars_are_no_other_call(module: kgen.KernelModule, looked_up: list[str]) -> None:
    x = integers(4, 8)
    for a in (1.0, 2.5, -1.0, 3):
        assert torch.equal(module.scaled(x, a=a, backend="cuda"), scaled(x, None, a, 0.0, 0, False))
    assert len(looked_up) == UNKNOWN
    with pytest.raises(kgen.ArgumentError, match="scalar argument 'a' must be a number"):
        module.scaled(x, a="much", backend="cuda")
    with pytest.raises(kgen.ArgumentError, match="must fit i32"):
        module.scaled(x, n=2**31, backend="cuda")
    t = torch.tensor(2.0)  # another value under the same name
    assert torch.equal(module.scaled(x, a=t, backend="cuda"), scaled(x, None, 2.0, 0.0, 0, False))
    t.fill_(5.0)
    assert torch.equal(module.scaled(x, a=t, backend="cuda"), scaled(x, None, 5.0, 0.0, 0, False))
    assert len(looked_up) == UNKNOWN


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
    assert len(looked_up) == UNKNOWN * MAX_RECENT
    for _ in range(4):  # one more than are remembered: looked up, and right
        for rows in range(1, MAX_RECENT + 2):
            x = integers(rows, 8)
            assert torch.equal(module.scaled(x, backend="cuda"), scaled(x, None, 2.0, 0.0, 0, False))


def test_two_outputs_given_outputs_and_layouts(module: kgen.KernelModule, looked_up: list[str]) -> None:
    for _ in range(4):
        x, z = integers(4, 8), integers(4, 8)
        y, d = module.both(x, z, backend="cuda")
        assert torch.equal(y, x + z) and torch.equal(d, x - z)
    assert len(looked_up) == UNKNOWN
    for k in range(4):
        x, z = integers(4, 8), integers(4, 8)
        out = (torch.empty(4, 8), torch.empty(8, 4).t())
        y, d = module.both(x, z, backend="cuda", out=out)
        assert y is out[0] and d is out[1]
        assert torch.equal(y, x + z) and torch.equal(d, x - z), k
    assert len(looked_up) == 2 * UNKNOWN
    x, z = integers(4, 8), integers(4, 8)
    out = (torch.empty(4, 8), torch.empty(8, 4).t())
    with pytest.raises(kgen.ArgumentError, match="shares memory with argument"):
        module.both(x, z, backend="cuda", out=(x, out[1]))
    refused = 1
    for _ in range(4):
        x, z = integers(8, 4).t(), integers(4, 8)
        y, d = module.both(x, z, backend="cuda", like=(x, z))
        assert y.stride() == x.stride() and d.stride() == z.stride()
        assert torch.equal(y, x + z) and torch.equal(d, x - z)
    assert len(looked_up) == 3 * UNKNOWN + refused
    for like in ((z, x), (x, z), (x, x), (integers(8, 4).t(), integers(4, 8))):  # the same arguments, other models
        y, d = module.both(x, z, backend="cuda", like=like)
        assert (y.stride(), d.stride()) == (like[0].stride(), like[1].stride())


def test_the_same_layout_at_an_address_that_is_not_aligned(module: kgen.KernelModule, looked_up: list[str]) -> None:
    """The host executor refuses an access of 16 bytes that is not aligned."""
    for bad in range(2):
        for _ in range(3):
            module.both(integers(4, 8), integers(4, 8), backend="cuda")
        x, z = (LAYOUTS["misaligned" if k == bad else "plain"](torch.float32) for k in range(2))
        y, d = module.both(x, z, backend="cuda")
        assert torch.equal(y, x + z) and torch.equal(d, x - z)
    for _ in range(3):
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
    assert len(looked_up) == UNKNOWN
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
    assert len(looked_up) == UNKNOWN


def test_wrong_calls_after_right_ones(module: kgen.KernelModule) -> None:
    x, w = integers(4, 8), integers(8)
    for _ in range(3):
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
            for _ in range(UNKNOWN + 1):
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
    for _ in range(UNKNOWN + 1):
        module.scaled(x, backend="cuda")
    for _ in range(2):
        names.clear()
        with Seen():
            module.scaled(x, backend="cuda")
        assert any("empty" in n for n in names)
