"""Transforms of torch.func and forward mode around a kernel: what works, and that all else is refused in words, eagerly
and under torch.compile. A derivative that cannot be had is never silently zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import kgen
from kgen import ops

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


SCALED = kgen.loads(
    "kernel scaled(x: T[*N], s: f32, c: const f32 = 1.0) -> (y: T[*N]):\n    parallel n in N\n    y[n] = x[n] * s * c\n"
)["scaled"]
DOUBLE = kgen.loads(
    "kernel scaled_(x: inout T[N, M], s: f32):\n    parallel n in N, m in M\n    x[n, m] = x[n, m] * s\n\n"
    "op double(x: T[N, M], s: f32) -> (y: T[N, M]):\n    forward:\n        a = x @ x.T\n        y = a @ x\n"
    "        scaled_(y, s=s)\n"
)["double"]
# Calls with a scalar whose gradient is asked for, and where x asks for one too.
SCALARS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "scalar": lambda x, s: SCALED(x, s.requires_grad_()),
    "scalar, x": lambda x, s: SCALED(x.requires_grad_(), s.requires_grad_()),
    "const": lambda x, s: SCALED(x, 1.0, s.requires_grad_()),
    "const, x": lambda x, s: SCALED(x.requires_grad_(), 1.0, s.requires_grad_()),
    "grad": lambda x, s: grad(lambda s: SCALED(x, s).sum())(s),
    "grad, x": lambda x, s: grad(lambda x, s: SCALED(x, s).sum(), (0, 1))(x, s),
    "grad, const, x": lambda x, s: grad(lambda x, s: SCALED(x, 1.0, s).sum(), (0, 1))(x, s),
    "grad, no_grad": lambda x, s: grad(torch.no_grad()(lambda s: SCALED(x, s).sum()))(s),
    "rms_norm": lambda x, s: ops.rms_norm(x, eps=s.requires_grad_()),
    "z_loss": lambda x, s: ops.cross_entropy(x, LABELS, z_loss=s.requires_grad_()),
    "label_smoothing": lambda x, s: ops.cross_entropy(x.requires_grad_(), LABELS, label_smoothing=s.requires_grad_()),
    "op": lambda x, s: ops.linear_cross_entropy(x, torch.ones(7, 5), LABELS, z_loss=s.requires_grad_()),
    "op, x": lambda x, s: DOUBLE(x.requires_grad_(), s.requires_grad_()),
}  # fmt: skip
LABELS = torch.tensor([0, 3, 4])
SCALAR = "requires grad, and gradients of scalars are not derived; pass a number, or "


@pytest.mark.parametrize("name", SCALARS)
def test_the_gradient_of_a_scalar_is_refused(name: str) -> None:
    x, s = torch.randn(3, 5), torch.tensor(0.25)
    with pytest.raises(kgen.ArgumentError, match=SCALAR):
        SCALARS[name](x, s)


def test_transforms_of_a_scalar_alone_are_refused() -> None:
    x, s = torch.randn(3, 5), torch.tensor(0.25)
    with pytest.raises(kgen.ArgumentError, match=f"scaled: argument 's' {TANGENT}"):
        jvp(lambda s: SCALED(x, s), (s,), (s,))
    with pytest.raises(kgen.ArgumentError, match="scaled: vmap does not reach into a kernel"):
        vmap(lambda s: SCALED(x, s))(s.expand(2))


def test_a_scalar_whose_gradient_is_not_asked_for_is_a_number() -> None:
    x, s = torch.randn(3, 5), torch.tensor(0.25, requires_grad=True)
    assert torch.equal(SCALED(x, s.detach()), x * 0.25)
    with torch.no_grad():
        assert torch.equal(SCALED(x.requires_grad_(), s), x * 0.25)
    SCALED(x, s.detach()).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 0.25))


def test_tensors_for_a_const_are_told_apart_to_the_last_digit() -> None:
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        for value in (0.123411, 0.123409):  # torch prints both as 0.1234
            assert torch.equal(SCALED(x, 1.0, torch.tensor(value)), torch.full((3,), value))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_gradient_of_a_scalar_is_refused_while_tracing(fullgraph: bool) -> None:
    x, s = torch.randn(3, 5), torch.tensor(0.25)
    traced = torch.compile(lambda x, s: SCALED(x, s), fullgraph=fullgraph, backend="aot_eager")
    norm = torch.compile(lambda x, s: ops.rms_norm(x, eps=s), fullgraph=fullgraph, backend="aot_eager")
    loss = torch.compile(lambda x, s: DOUBLE(x, s), fullgraph=fullgraph, backend="aot_eager")
    for f in (traced, norm, loss):
        with pytest.raises(Exception, match=SCALAR):
            f(x, s.clone().requires_grad_())
    if not fullgraph:
        for f, expected in ((traced, x * 0.25), (norm, ops.rms_norm(x, eps=0.25)), (loss, DOUBLE(x, 0.25))):
            assert torch.equal(f(x, s), expected)


@pytest.mark.parametrize("how", ["jacobian", "grads"])
def test_many_gradients_at_once_are_refused(how: str) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    with pytest.raises(kgen.ArgumentError, match=r"many gradients at once .* are a vmap"):
        if how == "jacobian":
            torch.autograd.functional.jacobian(SQUARE, x, vectorize=True)
        else:
            torch.autograd.grad(SQUARE(x), x, torch.randn(4, 3, 5), is_grads_batched=True)


def test_jacobians_row_by_row() -> None:
    x = torch.randn(3, 5)
    expected = torch.diag_embed(2.0 * x.flatten()).view(3, 5, 3, 5)
    for create_graph in (False, True):
        assert torch.equal(torch.autograd.functional.jacobian(SQUARE, x, create_graph=create_graph), expected)
    assert torch.equal(jacrev(SQUARE, chunk_size=1)(x), expected)


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


# ---- ops -------------------------------------------------------------------------------------------------------------

WEIGHT = torch.linspace(-1, 1, 35).reshape(7, 5)


def loss(x: torch.Tensor) -> torch.Tensor:
    return ops.linear_cross_entropy(x, WEIGHT, LABELS)


def silently(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return loss(x)


def of_its_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    with forward_ad.dual_level():
        (g,) = torch.autograd.grad(loss(x), x, forward_ad.make_dual(torch.ones(()), torch.ones(())), create_graph=True)
        tangent = forward_ad.unpack_dual(g).tangent
    assert tangent is not None
    return tangent


OP_REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "jvp": (lambda x: jvp(loss, (x,), (x,)), TANGENT),
    "jvp, no_grad": (lambda x: jvp(silently, (x,), (x,)), TANGENT),
    "dual, no_grad": (dual(silently), TANGENT),
    "jvp of grad": (lambda x: jvp(grad(loss), (x,), (x,)), TANGENT),
    "hessian": (hessian(loss), TANGENT),
    "of its gradient": (of_its_gradient, f"an argument of its gradient {TANGENT}"),
    "vmap of grad": (lambda x: vmap(grad(loss))(x[None]), "vmap does not reach into an op; pass tensors with"),
    "grad of grad": (grad(lambda x: grad(loss)(x).sum()), "second derivatives are not derived"),
}


@pytest.mark.parametrize("name", OP_REFUSED)
def test_derivatives_of_an_op_are_refused_in_words(name: str) -> None:
    f, says = OP_REFUSED[name]
    with pytest.raises(kgen.KgenError) as caught:
        f(torch.randn(3, 5))
    assert says in str(caught.value)
    assert str(caught.value).startswith("fused_linear_cross_entropy: ")


def test_transforms_of_an_op_are_refused_while_tracing() -> None:
    for f, says in ((lambda x: jvp(loss, (x,), (x,)), TANGENT), (grad(loss), "torch.compile cannot trace torch.func")):
        with pytest.raises(Exception, match=says):
            torch.compile(f, fullgraph=True, backend="aot_eager")(torch.randn(3, 5))
    x = torch.randn(3, 5)
    assert torch.equal(grad(torch.compile(loss, backend="aot_eager"))(x), grad(loss)(x))


# ---- make_fx ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("f", [total, loss])
def test_a_traced_gradient(f: Callable[[torch.Tensor], torch.Tensor], mode: Any) -> None:
    # What is no argument of the traced function must not meet its fake tensors, whatever is called.
    def called(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ops.linear_cross_entropy(x, weight, labels) if f is loss else total(x)

    def pulled(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return vjp(lambda x: called(x, *rest), x)[1](torch.tensor(2.0))[0]

    x, other = torch.randn(3, 5), torch.randn(3, 5)
    rest = (WEIGHT, LABELS)
    for factor, g in ((1.0, grad(called)), (2.0, pulled)):
        if mode == "real" or g is not pulled:  # which makes a tensor of its own
            graph = make_fx(g, tracing_mode=mode)(x, *rest)
            names = {str(n.target) for n in graph.graph.nodes if str(n.target).startswith("kgen.")}
            assert len(names) == 2 and any("_training" in n for n in names), names
            assert torch.equal(graph(other, *rest), factor * grad(f)(other))


@pytest.mark.parametrize("f", [total, loss])
def test_what_is_refused_of_a_traced_gradient(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    name = "square" if f is total else "fused_linear_cross_entropy"
    for g, says in (
        (grad(lambda x: grad(f)(x).sum()), "second derivatives are not derived"),
        (lambda x: jvp(f, (x,), (x,)), TANGENT),
        (lambda x: vmap(grad(f))(x[None]), "vmap does not reach into"),
    ):
        with pytest.raises(kgen.KgenError) as caught:
            make_fx(g)(torch.randn(3, 5))
        assert str(caught.value).startswith(f"{name}: ") and says in str(caught.value)
