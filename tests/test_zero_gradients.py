"""An output whose gradient is zero by algebra requires grad, as in torch: zeros arrive at the inputs."""

from __future__ import annotations

import pytest
import torch

import kgen

SOURCE = """
kernel mass(x: T[M, N], w: T[N]) -> (s: T[M], y: T[M, N], k: i64[M], c: T[M]):
    parallel m in M
    tile n in N
    p = softmax(x[m, n], n)
    s[m] = sum(p, n)
    y[m, n] = w[n] * w[n]
    k[m] = argmax(x[m, n], n)
    c[m] = floor(sum(x[m, n], n))

kernel nothing(x: T[N]) -> (y: T[N]):
    tile n in N
    y[n] = 0.0 * x[n]
"""


@pytest.fixture(scope="module")
def module() -> kgen.KernelModule:
    return kgen.loads(SOURCE)


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("backend", ["reference", "cuda", "triton"])
def test_alone(module: kgen.KernelModule, backend: str) -> None:
    x = leaf(3, 5)
    s, y, k, c = module.mass(x, leaf(5).detach(), backend=backend)
    assert [t.requires_grad for t in (s, y, k, c)] == [True, False, False, False]
    s.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(3, 5))
    for _ in range(2):  # the second call is recognised
        x = leaf(7)
        (found,) = torch.autograd.grad(module.nothing(x, backend=backend).sum(), [x])
        assert torch.equal(found, torch.zeros(7))


def test_beside_an_output_that_has_one(module: kgen.KernelModule) -> None:
    x, w = leaf(3, 5), leaf(5, seed=1)
    s, y, _, _ = module.mass(x, w)
    assert s.requires_grad and y.requires_grad
    # Whichever of the two arrives, and both.
    for outputs in ([s], [y], [s, y]):
        d_x, d_w = torch.autograd.grad(outputs, [x, w], [torch.ones_like(o) for o in outputs], retain_graph=True)
        assert not d_x.any()
        assert torch.allclose(d_w, 6 * w.detach() if any(o is y for o in outputs) else torch.zeros(5))


def test_in_a_compiled_function(module: kgen.KernelModule) -> None:
    x = leaf(3, 5)
    w = leaf(5).detach()
    compiled = torch.compile(lambda x: module.mass(x, w)[0] * 2.0, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(3, 5))


def test_transforms(module: kgen.KernelModule) -> None:
    w = leaf(5).detach()
    assert not torch.func.grad(lambda x: module.mass(x, w)[0].sum())(leaf(3, 5).detach()).any()
