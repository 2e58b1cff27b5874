"""Operators of kernels as torch's dispatcher calls them: what goes straight to the launch, and what must not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kgen import ops
from kgen.runtime import library
from kgen.runtime.binding import is_fake
from kgen.runtime.kernel import Kernel
from kgen.runtime.loading import load_packaged
from kgen.runtime.operators import Operator


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels of calls that were not among the recent ones."""
    found: list[str] = []
    look_up = Kernel._looked_up

    def watched(self: Kernel, *args: Any) -> Any:
        found.append(self.name)
        return look_up(self, *args)

    monkeypatch.setattr(Kernel, "_looked_up", watched)
    return found


def softmax() -> Any:
    """The operator of a kernel that writes nothing; it takes the tensor and the backend."""
    return getattr(torch.ops.kgen, library.define(load_packaged("softmax.kdsl")["softmax"])).default


def rows() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def expected(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return ops.softmax(x.detach(), backend="reference")


def test_operators_say_what_they_are() -> None:
    op = softmax()
    assert torch.Tag.pt2_compliant_tag in op.tags
    assert not op._schema.is_mutable


def test_calls_are_recognised(looked_up: list[str]) -> None:
    x = rows()
    f = torch.compile(lambda x: ops.softmax(x, backend="reference"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for call in (lambda: f(x), lambda: softmax()(x, "reference")):
            for _ in range(2):  # the first run of a graph is one that traces
                assert torch.equal(call(), expected(x))
            looked_up.clear()
            assert torch.equal(call(), expected(x))
            assert not looked_up


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_results_of_plain_calls_carry_no_gradient(mode: Callable[[], Any]) -> None:
    x = rows()
    with mode():
        y = softmax()(x, "reference")
        assert torch.equal(y, expected(x)) and not y.requires_grad
        assert y.is_inference() == torch.is_inference_mode_enabled()
    with torch.no_grad():
        assert not softmax()(x.requires_grad_(), "reference").requires_grad


def test_without_a_gradient_of_its_own_an_operator_refuses_to_be_differentiated() -> None:
    x = rows().requires_grad_()
    y = softmax()(x, "reference")
    assert torch.equal(y, expected(x)) and y.requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        y.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_no_plain_tensor_goes_through_the_dispatcher(grad: bool) -> None:
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    op, x = softmax(), rows()
    with torch.set_grad_enabled(grad):
        with Watch():
            assert torch.equal(op(x, "reference"), expected(x))
        assert seen.count(op) == 1
        negated = torch._neg_view(x)  # pyright: ignore[reportPrivateImportUsage]
        assert torch.equal(op(negated, "reference"), expected(-x))
        with FakeTensorMode():
            assert is_fake(op(torch.empty(3, 8), "reference"))


def test_results_that_share_memory_are_refused() -> None:
    x = rows()
    results: dict[str, Callable[..., Any]] = {
        "view": lambda t: (t[:1], t + 1), "twice": lambda t: (x, x), "own": lambda t: (t + 1, t + 2),
    }  # fmt: skip
    for name, run in results.items():
        fake = lambda t: (torch.empty_like(t), torch.empty_like(t))  # noqa: E731
        Operator(f"shares_{name}", "(Tensor t) -> (Tensor, Tensor)", run, fake, fresh=False)
        op = getattr(torch.ops.kgen, f"shares_{name}")
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                if name == "own":
                    assert torch.equal(op(x)[1], x + 2)
                else:
                    with pytest.raises(RuntimeError, match="may not alias"):
                        op(x)


def test_nothing_inside_an_operator_is_traced() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    op, x = softmax(), rows()
    between: Any = torch.compiler.disable(lambda x: op(x, "reference"), recursive=False)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            f: Any = torch.compile(lambda x: between(x), backend=backend)
            assert torch.equal(f(x), expected(x))
    assert not graphs


def test_of_a_kernel_a_trace_guards_what_it_is_known_by() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, w)

    torch.compile(f, fullgraph=True, backend="eager")(rows(), torch.ones(8))
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(f)
    guards = str(entry.guard_manager)
    assert set(re.findall(r"\.rms_norm_rms_norm\.(\w+)", guards)) == {"serial", "__dict__"}
    assert " is G[" not in guards  # two names of one module, which are compared in Python
