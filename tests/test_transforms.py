"""Transforms of torch.func and forward mode around a kernel: what works, and that all else is refused in words, eagerly
and under torch.compile. A derivative that cannot be had is never silently zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import kgen

MODULE = kgen.loads(
    "kernel square(x: T[*N]) -> (y: T[*N]):\n    parallel n in N\n    y[n] = x[n] * x[n]\n\n"
    "kernel whole(x: T[*N]) -> (y: i64[*N]):\n    parallel n in N\n    y[n] = i64(x[n])\n"
)
SQUARE = MODULE["square"]

TANGENT = "carries a tangent, and derivatives in forward mode are not derived; use reverse mode"
VMAP = "square: vmap does not reach into a kernel; pass tensors with a batch dimension"
NO_GRAD = (
    "square: argument 'x' belongs to a transform of torch.func, and under torch.no_grad() none reaches into a kernel"
)
TRACED = "square: torch.compile cannot trace torch.func.grad and vjp of it; compile the function itself"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()  # no test may live on what another has traced
    yield


def quietly(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return SQUARE(x)


def total(x: torch.Tensor) -> torch.Tensor:
    return SQUARE(x).sum()


def dual(f: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x))).tangent

    return run


FORWARD_MODE: dict[str, Callable[[torch.Tensor], Any]] = {
    "jvp": lambda x: jvp(SQUARE, (x,), (x,)),
    "jacfwd": jacfwd(SQUARE),
    "dual": dual(SQUARE),
    "jvp, no_grad": lambda x: jvp(quietly, (x,), (x,)),
    "jacfwd, no_grad": jacfwd(quietly),
    "dual, no_grad": dual(quietly),
}
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    **{name: (f, TANGENT) for name, f in FORWARD_MODE.items()},
    "hessian": (hessian(total), TANGENT),
    "vmap": (vmap(SQUARE), VMAP),
    "vmap, no_grad": (vmap(quietly), VMAP),
    "vmap of grad": (vmap(grad(total)), VMAP),
    "jacrev": (jacrev(SQUARE), VMAP),
    "grad, no_grad": (grad(lambda x: quietly(x).sum()), NO_GRAD),
    "grad of grad": (grad(lambda x: grad(total)(x).sum()), "second derivatives are not derived"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name: str) -> None:
    f, says = REFUSED[name]
    with pytest.raises(kgen.KgenError) as caught:
        f(torch.randn(3, 5))
    assert says in str(caught.value)
    assert str(caught.value).startswith("square: ")


@pytest.mark.parametrize("name", FORWARD_MODE)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_forward_mode_is_refused_while_tracing(name: str, fullgraph: bool) -> None:
    with pytest.raises(Exception, match=TANGENT):  # torch.compile wraps what is raised while it traces
        torch.compile(FORWARD_MODE[name], fullgraph=fullgraph, backend="aot_eager")(torch.randn(3, 5))


@pytest.mark.parametrize("f", [grad(total), lambda x: vjp(SQUARE, x)[1](x)[0], jacrev(SQUARE)])
def test_reverse_mode_transforms_are_refused_while_tracing(f: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(Exception) as caught:
        torch.compile(f, fullgraph=True, backend="aot_eager")(torch.randn(3, 5))
    assert TRACED in str(caught.value)


def test_what_works() -> None:
    x = torch.randn(3, 5)
    traced = torch.compile(SQUARE, backend="aot_eager")
    for f in (SQUARE, traced):
        assert torch.equal(f(x), x * x)
        assert torch.equal(grad(lambda x, f=f: f(x).sum())(x), 2.0 * x)
        assert torch.equal(vjp(f, x)[1](x)[0], 2.0 * x * x)
    for f in (lambda x: jvp(traced, (x,), (x,)), dual(traced)):
        with pytest.raises(kgen.ArgumentError, match=TANGENT):
            f(x)
    assert torch.equal(traced(x), x * x)
    leaf = x.clone().requires_grad_()
    traced(leaf).sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, 2.0 * x)


def test_a_level_without_tangents_and_outputs_without_derivative_are_no_mistake() -> None:
    x = torch.randn(3, 5)
    with forward_ad.dual_level():
        for context in (torch.enable_grad(), torch.no_grad()):
            with context:
                assert torch.equal(SQUARE(x), x * x)
                assert torch.equal(MODULE["whole"](forward_ad.make_dual(x, x)), x.to(torch.int64))
