"""Calls of ops that no one planned: values and gradients on every executor, autograd, torch.compile, and refusals.

Bounds: a product of n terms in f32 is off by at most n roundings of the sum of their sizes; two products and an
elementwise function follow each other here, so that `close` allows 4 * (n + 16) roundings of the largest result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_kit import ATTEND, GROWN, MLP
from linear_loss_kit import HALF_UNIT, randn
from torch.utils._python_dispatch import TorchDispatchMode

import kgen
from kgen.runtime import events
from kgen.runtime.errors import ArgumentError

MODULE = kgen.loads(MLP, "mlp.kdsl")
SOFTMAX = kgen.loads(ATTEND, "attend.kdsl")


def mlp(x: Any, up: Any, down: Any) -> Any:
    """The formula of the op of that name."""
    return torch.nn.functional.silu(x @ up.T) @ down.T


def attend(x: Any, w: Any, bias: Any = None) -> Any:
    """The formula of the op of that name."""
    return (x @ w.T + (0.0 if bias is None else bias)).softmax(-1)


def close(a: torch.Tensor, e: torch.Tensor, n: int, dtype: torch.dtype | None = None) -> None:
    """`a` within `n` roundings of `dtype` and one of its own of `e`."""
    assert a.shape == e.shape
    bound = 4 * (n + 16) * HALF_UNIT[dtype or torch.float32] * e.abs().max() + HALF_UNIT[a.dtype] * e.abs()
    assert (a.double() - e).abs().le(bound).all(), ((a - e).abs() / bound).max()


def both(
    op: Callable[..., Any], formula: Callable[..., Any], tensors: list[torch.Tensor], n: int, **options: Any
) -> None:
    """Results and gradients of an op against its formula in float64."""
    given = [t.clone().requires_grad_() for t in tensors]
    right = [t.detach().double().requires_grad_() for t in tensors]
    y, e = op(*given, **options), formula(*right)
    up = randn(*y.shape, seed=50).to(y.dtype)
    unit = tensors[0].dtype
    close(y, e, n if unit == torch.float32 else 1, unit)
    for a, b in zip(torch.autograd.grad(y, given, up), torch.autograd.grad(e, right, up.double()), strict=True):
        close(a, b, n if unit == torch.float32 else 4, unit)


TENSORS = [randn(2, 5, 8), randn(12, 8, seed=1), randn(8, 12, seed=2)]


@pytest.mark.parametrize("chunk", [None, 1, 3, 10])
def test_an_mlp_in_chunks(backend: str, chunk: int | None) -> None:
    both(MODULE.mlp, mlp, TENSORS, 12, backend=backend, chunk=chunk)


def test_sums_in_bf16(backend: str) -> None:
    for accumulate in ("auto", "param", "f32"):
        both(MODULE.mlp, mlp, [t.bfloat16() for t in TENSORS], 12, backend=backend, chunk=3, accumulate=accumulate)


@pytest.mark.parametrize("biased", [False, True])
def test_dtypes_that_differ(backend: str, biased: bool) -> None:
    for x, w, b in (
        (torch.float32,) * 3,
        (torch.bfloat16, torch.float32, torch.float16),
        (torch.float32,) * 2 + (torch.bfloat16,),
    ):
        tensors = [randn(7, 8).to(x), (randn(9, 8, seed=1) / 3).to(w)] + ([randn(9, seed=2).to(b)] if biased else [])
        given = [t.clone().requires_grad_() for t in tensors]
        y = SOFTMAX.attend(*given, backend=backend)
        assert y.dtype == x
        gradients = torch.autograd.grad(y, given, torch.ones_like(y).cumsum(-1))
        assert [g.dtype for g in gradients] == [t.dtype for t in tensors]
        right = [t.detach().to(x).double().requires_grad_() for t in tensors]
        e = attend(*right)
        close(y, e, 8 if x == torch.float32 else 2, x)
        expected = torch.autograd.grad(e, right, torch.ones_like(e).cumsum(-1))
        for a, b in zip(gradients, expected, strict=True):
            close(a, b, 64, x)


def test_an_output_that_is_saved_is_nobody_elses() -> None:
    # The softmax is an output and what its gradient is made of: autograd finds that the caller changed it.
    x, w = randn(4, 8).requires_grad_(), randn(5, 8, seed=1)
    y = SOFTMAX.attend(x, w, backend="cuda")
    expected = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
    with torch.no_grad():
        y.mul_(2.0)
    try:
        again = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        raise AssertionError(f"a wrong gradient: {again} beside {expected}")


def test_an_argument_that_was_modified_is_found() -> None:
    x, up, down = (t.clone().requires_grad_() for t in TENSORS)
    y = MODULE.mlp(x, up, down)
    with torch.no_grad():
        up.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_rows(backend: str) -> None:
    x, up, down = torch.zeros(0, 8, requires_grad=True), TENSORS[1].clone().requires_grad_(), TENSORS[2]
    y = MODULE.mlp(x, up, down, backend=backend)
    y.sum().backward()
    assert y.shape == (0, 8) and up.grad is not None and torch.equal(up.grad, torch.zeros_like(up))


def test_only_what_is_wanted_is_computed() -> None:
    x, up, down = (t.clone() for t in TENSORS)
    up.requires_grad_()
    with events.launches() as seen:
        MODULE.mlp(x, up, down, backend="cuda").sum().backward()
    assert [e.kernel for e in seen].count("mlp: @") == 2 + 3
    assert [e.kernel for e in seen].count("silu_") == 1


def test_compiled() -> None:
    torch._dynamo.reset()

    def f(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return SOFTMAX.attend(MODULE.mlp(x, up, down, backend="cuda", chunk=3).sin(), w, backend="cuda")

    g = torch.compile(f, fullgraph=True, backend="aot_eager")
    for rows in (2, 1):
        found = []
        for each in (f, g):
            given = [t.clone().requires_grad_() for t in (TENSORS[0][:rows], *TENSORS[1:], randn(5, 8, seed=7))]
            y = each(*given)
            found.append([y, *torch.autograd.grad(y, given, randn(*y.shape, seed=3))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_several_outputs_and_gradients_that_do_not_arrive() -> None:
    module = kgen.loads(
        "op two(x: T[B, H], w: T[V, H]) -> (y: T[B, V], s: f32[H, H]):\n"
        "    forward:\n        y = x @ w.T\n        s += x.T @ x\n"
        "    backward(d_y, d_s):\n        d_w = d_y.T @ x\n        d_x = x @ T(d_s) + d_x0\n".replace(" + d_x0", "")
    )
    x, w = randn(4, 3).requires_grad_(), randn(5, 3, seed=1).requires_grad_()
    y, s = module.two(x, w)
    close(s.detach(), (x.double().T @ x.double()).detach(), 4)
    dx, dw = torch.autograd.grad(y.sum(), [x, w])
    assert torch.equal(dx, torch.zeros_like(x))
    close(dw, (torch.ones(4, 5).double().T @ x.double()).detach(), 4)
    x, w = x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()
    y, s = module.two(x, w)
    assert s.dtype == torch.float32
    dx, dw = torch.autograd.grad(s.sum(), [x, w])
    close(dx, x.detach().double().sum(-1, keepdim=True).expand(4, 3), 4, torch.bfloat16)
    assert torch.equal(dw, torch.zeros_like(w))


def test_transformations_that_do_not_reach_in() -> None:
    x, up, down = TENSORS
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ArgumentError, match="'x' carries a tangent"):
        MODULE.mlp(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), up, down)
    with pytest.raises(ArgumentError, match="vmap does not reach into an op"):
        torch.func.jacrev(lambda x: MODULE.mlp(x, up, down))(x)
    for _ in range(2):  # the second behind a call of the same sizes
        for f in (MODULE.mlp, torch.func.grad(lambda x, *w: MODULE.mlp(x, *w).sum())):
            with pytest.raises(ArgumentError, match="vmap does not reach into an op"):
                torch.func.vmap(f, in_dims=(0, None, None))(x[None], up, down)
        MODULE.mlp(x, up, down)
    of_x = torch.func.grad(lambda x: MODULE.mlp(x, up, down, backend="cuda").square().sum())(x)
    own = x.clone().requires_grad_()
    assert torch.equal(of_x, torch.autograd.grad(MODULE.mlp(own, up, down, backend="cuda").square().sum(), own)[0])


def test_a_tensor_without_memory_is_refused() -> None:
    class Other(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("dispatched")

    x, up, down = TENSORS
    MODULE.mlp(x, up, down)
    odd = torch.Tensor._make_wrapper_subclass(Other, up.shape, dtype=up.dtype)
    with pytest.raises(ArgumentError, match="argument 'up' is a Other that has no memory of its own"):
        MODULE.mlp(x, odd, down)


def test_copies_and_pickles() -> None:
    import copy
    import pickle

    op = MODULE.mlp
    assert copy.deepcopy(op) is op and copy.copy(op) is op
    again = pickle.loads(pickle.dumps(op))
    assert again is not op and torch.equal(again(*TENSORS), op(*TENSORS))


def test_what_is_refused() -> None:
    x, up, down = TENSORS
    forward_only = kgen.loads("op f(x: T[B, H], w: T[V, H]) -> (y: T[B, V]):\n    forward:\n        y = x @ w.T\n").f
    assert forward_only(randn(2, 3), randn(4, 3)).shape == (2, 4)
    for call, message in [
        (lambda: MODULE.mlp(x, up), "missing argument 'down'"),
        (lambda: MODULE.mlp(x, up, up), r"argument 'down' must have shape \[H, F\]"),
        (lambda: MODULE.mlp(x, up, down.bfloat16()), "argument 'down' has dtype bf16"),
        (lambda: MODULE.mlp(x, up, down, chunk=0), "chunk must be a positive whole number of rows"),
        (lambda: MODULE.mlp(x, up, down, accumulate="f64"), "accumulate must be one of auto, param, f32"),
        *[
            (
                lambda o=option, v=value: MODULE.mlp(x, up, down, **{o: v}),
                f"mlp: {option} must be a positive .* or None",
            )
            for option, values in (
                ("workspace_mb", ("3", True, float("nan"), float("inf"), -1.0, 0, [1.0], torch.tensor(1.0))),
                ("chunk", ("3", True, 2.0, -1, [1], float("nan"))),
            )
            for value in values
        ],
        (lambda: MODULE.mlp(x, up, down, accumulate=3), "accumulate must be one of auto, param, f32, got 3"),
        (lambda: MODULE.mlp(x, up, [1.0]), "argument 'down' must be a torch.Tensor"),
        (lambda: forward_only(randn(2, 3).requires_grad_(), randn(4, 3)), "has no backward section; detach it"),
        (lambda: SOFTMAX.attend(randn(2, 3), randn(0, 3)), "requires V >= 1"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(AttributeError, match="did you mean 'mlp'"):
        MODULE.mlb  # noqa: B018
    assert "mlp" in dir(MODULE) and "mlp" in MODULE and list(MODULE) == ["silu_", "silu_gradient_", "mlp"]


REBOUND = """
kernel colsum(z: T[*M, N]) -> (s: f32[N]):
    parallel m in M, n in N
    s[n] += z[m, n]

kernel copy(a: T[*M, N]) -> (b: T[*M, N]):
    parallel m in M, n in N
    b[m, n] = a[m, n]

op f(x: f32[B, N]) -> (y: f32[N], z: f32[B, N], t: f32[N]):
    forward:
        s = colsum(x)
        a = x
        for c in chunks(B):
            s = colsum(x[c])
            a = x[c]
            z[c] = copy(a)
        y = s
        t = colsum(a)
"""


@pytest.mark.parametrize("chunk", [3, 10])
def test_what_a_loop_names_anew_means_what_it_did_behind_it(backend: str, chunk: int) -> None:
    x = torch.arange(30.0).reshape(10, 3)
    y, z, t = kgen.loads(REBOUND).f(x, chunk=chunk, backend=backend)
    assert torch.equal(y, x.sum(0))
    assert torch.equal(z, x)
    assert torch.equal(t, x.sum(0))


@pytest.mark.parametrize("op", ["heads", "in_chunks", "of_columns"])
def test_starred_dimensions_of_kernels_keep_what_is_behind_them(op: str, backend: str) -> None:
    x, s = randn(5, 3, 8), randn(5, 3, seed=1)
    for chunk in (None, 2, 3):
        y, m = kgen.loads(GROWN)[op](x, s, backend=backend, **({} if op == "heads" else {"chunk": chunk}))
        expected = s.double()[..., None] * x.double()
        close(y, expected, 1)
        close(m, expected.mean(-1), 8)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("chunk", [1, 3, 7, 10])
def test_memory_that_is_a_multiple_of_a_chunk(chunk: int, backend: str) -> None:
    x, w = randn(10, 6), randn(5, 6, seed=1)
    y, s = kgen.loads(GROWN).doubled(x, w, chunk=chunk, backend=backend)
    close(y, x.double() @ w.double().T, 6)
    close(s, 5.0 * x.double().T @ x.double() @ w.double().T, 32)


def test_memory_that_grows_with_the_square_of_a_chunk_keeps_to_the_budget() -> None:
    x = randn(200, 4)
    for rows in (1, 7, 50, 99, 200):
        seen = Allocated()
        with seen:
            kgen.loads(GROWN).squared(x, workspace_mb=(rows * rows + 0.5) * 4 / 2**20, backend="cuda")
        largest = max(s[0] for s in seen.shapes if len(s) == 2 and s[0] == s[1])
        assert -(-200 // largest) == -(-200 // rows) and largest <= rows


class Allocated(TorchDispatchMode):
    """The shapes of the memory that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.empty:
            self.shapes.append(tuple(result.shape))
        return result
