"""The modules of kgen.nn beside torch's: results and gradients, constructors, state dicts, copies and text."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kgen
from kgen import ops

# f32 arithmetic over rows of some dozens: a hundred roundings of terms of size 1 to 10.
RTOL, ATOL = 100 * 2.0**-24, 1000 * 2.0**-24


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shaken(module: nn.Module) -> nn.Module:
    """The module with every parameter at values of its own."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(randn(*p.shape, seed=50 + i))
    return module


def outcome(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of float inputs and of parameters, for a random gradient of the result."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = module(*leaves)
    wanted = [x for x in leaves if x.requires_grad] + list(module.parameters())
    upstream = randn(*y.shape, seed=9).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, wanted, upstream)]


NORMS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("RMSNorm", (24,), {"eps": 1e-5}),
    ("RMSNorm", (24,), {}),
    ("RMSNorm", ((4, 6),), {}),
    ("RMSNorm", (24, 1e-3, False), {}),
    ("LayerNorm", (24,), {}),
    ("LayerNorm", ([4, 6], 1e-3), {}),
    ("LayerNorm", (24,), {"bias": False}),
    ("LayerNorm", (24, 1e-5, False), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), NORMS)
def test_norms_are_torchs(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    theirs = shaken(getattr(nn, name)(*args, **kwargs))
    mine = getattr(kgen.nn, name)(*args, **kwargs)
    assert isinstance(mine, type(theirs))
    mine.load_state_dict(theirs.state_dict())
    shape = (2, 3, 4, 6) if isinstance(args[0], list | tuple) else (2, 3, 24)
    double = copy.deepcopy(theirs).double()
    setattr(double, "eps", torch.finfo(torch.float32).eps if theirs.eps is None else theirs.eps)  # noqa: B010 a Module
    expected = outcome(double, randn(*shape).double())
    assert len(expected) == 2 + len(list(mine.parameters()))
    for a, b in zip(outcome(mine, randn(*shape)), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=RTOL, atol=ATOL)
    # And the other way.
    back = getattr(nn, name)(*args, **kwargs)
    back.load_state_dict(mine.state_dict())
    assert repr(mine) == repr(theirs)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norms_start_as_torchs(name: str) -> None:
    mine, theirs = (getattr(n, name)(5, device="cpu", dtype=torch.float64) for n in (kgen.nn, nn))
    for (a, p), (b, q) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert a == b
        assert p.dtype == q.dtype
        assert torch.equal(p, q)
    x = randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_epsilon_of_narrow_dtypes(dtype: torch.dtype) -> None:
    x = torch.full((1, 8), 2.0**-13, dtype=dtype)  # its square is an eighth of the machine epsilon of f32
    torch.testing.assert_close(kgen.nn.RMSNorm(8, dtype=dtype)(x), nn.RMSNorm(8, dtype=dtype)(x), rtol=2**-7, atol=0)


def test_rms_norm_options() -> None:
    x = randn(3, 16, dtype=torch.bfloat16)
    gemma = kgen.nn.RMSNorm(16, 1e-6, casting="gemma", dtype=torch.bfloat16)
    assert torch.equal(gemma.weight, torch.zeros_like(gemma.weight))
    assert torch.equal(gemma(x), ops.rms_norm(x, gemma.weight, casting="gemma"))
    assert torch.equal(gemma(x), ops.rms_norm(x))
    llama = kgen.nn.RMSNorm(16, 1e-6, casting="llama", dtype=torch.bfloat16)
    shaken(llama)
    assert torch.equal(llama(x), ops.rms_norm(x, llama.weight, casting="llama"))
    assert not torch.equal(llama(x), ops.rms_norm(x, llama.weight))
    shifted = kgen.nn.RMSNorm(16, offset=0.5)
    assert torch.equal(shifted.weight, torch.full((16,), 0.5))
    assert repr(gemma) == "RMSNorm((16,), eps=1e-06, elementwise_affine=True, casting='gemma')"
    assert repr(shifted) == "RMSNorm((16,), eps=None, elementwise_affine=True, offset=0.5)"
    with pytest.raises(kgen.ArgumentError, match="casting"):
        kgen.nn.RMSNorm(16, casting="gpt")
    with pytest.raises(kgen.ArgumentError, match="offset"):
        kgen.nn.RMSNorm(16, elementwise_affine=False, offset=1.0)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norms_name_a_shape_that_does_not_fit(name: str) -> None:
    for x in (randn(3, 5), torch.tensor(1.0)):
        with pytest.raises(kgen.ArgumentError, match=rf"{name}: the last dimensions .*\(4,\)"):
            getattr(kgen.nn, name)(4)(x)


@pytest.mark.parametrize(
    ("module", "formula"),
    [
        (lambda: kgen.nn.SwiGLU(), lambda g, u: F.silu(g) * u),
        (lambda: kgen.nn.GeGLU(), lambda g, u: F.gelu(g) * u),
        (lambda: kgen.nn.GeGLU("tanh"), lambda g, u: F.gelu(g, approximate="tanh") * u),
    ],
)
def test_gated_units(module: Any, formula: Any) -> None:
    class Formula(nn.Module):
        def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return formula(gate, up)

    gate, up = randn(2, 3, 10), randn(2, 3, 10, seed=1)
    for a, b in zip(outcome(module(), gate, up), outcome(Formula(), gate.double(), up.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=RTOL, atol=ATOL)
    # One tensor: the gate is its first half.
    both = torch.cat([gate, up], -1)
    y, d = outcome(module(), both)
    assert torch.equal(y, module()(gate, up))
    torch.testing.assert_close(d, torch.cat(outcome(module(), gate, up)[1:], -1), rtol=0, atol=0)
    assert not torch.allclose(module()(gate, up), module()(up, gate))
    with pytest.raises(kgen.ArgumentError, match="even"):
        module()(randn(2, 7))


def test_geglu_arguments() -> None:
    assert repr(kgen.nn.GeGLU("tanh")) == "GeGLU(approximate='tanh')"
    assert repr(kgen.nn.SwiGLU()) == "SwiGLU()"
    with pytest.raises(kgen.ArgumentError, match="approximate"):
        kgen.nn.GeGLU("erf")


def rotated(x: torch.Tensor, positions: torch.Tensor, dim: int, base: float, interleaved: bool) -> torch.Tensor:
    """Rotation of pairs of features as complex numbers, in float64."""
    x = x.double()
    angle = positions.double()[..., None] * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turn = torch.polar(torch.ones_like(angle), angle)[:, :, None]
    part = x[..., :dim]
    if interleaved:
        z = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn
        y = torch.view_as_real(z).flatten(-2)
    else:
        z = torch.complex(part[..., : dim // 2], part[..., dim // 2 :]) * turn
        y = torch.cat([z.real, z.imag], -1)
    return torch.cat([y, x[..., dim:]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("positions", [None, torch.tensor([[0, 5, 300], [31, 2, 2]])])
def test_rotary_embedding(interleaved: bool, positions: torch.Tensor | None) -> None:
    rope = kgen.nn.RotaryEmbedding(8, max_position=32, base=500.0, interleaved=interleaved)
    q, k = randn(2, 3, 4, 10).requires_grad_(), randn(2, 3, 2, 10, seed=1).requires_grad_()
    where = torch.arange(3).expand(2, 3) if positions is None else positions
    for i, x in enumerate((q, k)):
        y = rope(q, k, positions)[i]
        leaf = x.detach().double().requires_grad_()
        expected = rotated(leaf, where, 8, 500.0, interleaved)
        torch.testing.assert_close(y.double(), expected, rtol=RTOL, atol=ATOL)
        upstream = randn(*y.shape, seed=3)
        (mine,) = torch.autograd.grad(y, x, upstream)
        (theirs,) = torch.autograd.grad(expected, leaf, upstream.double())
        torch.testing.assert_close(mine.double(), theirs, rtol=RTOL, atol=ATOL)
    assert rope.max_position == (32 if positions is None else 301)


def test_rotary_tables_grow_and_stay_exact() -> None:
    rope = kgen.nn.RotaryEmbedding(4, max_position=2)
    with torch.inference_mode():
        rope(randn(1, 7, 1, 4), randn(1, 7, 1, 4))
    assert rope.max_position == 7
    rope(randn(1, 8, 1, 4), randn(1, 8, 1, 4))
    assert rope.max_position == 10, "half as much again"
    rope.reserve(3)
    assert rope.max_position == 10
    exact = rope.cos.clone(), rope.sin.clone()

    def unchanged() -> bool:
        same = torch.equal(rope.cos, exact[0]) and torch.equal(rope.sin, exact[1])
        return rope.cos.dtype == torch.float32 and same

    rope.bfloat16()
    assert unchanged()
    nn.Sequential(rope).double()
    assert unchanged()
    rope.to("meta").to_empty(device="cpu")
    assert unchanged()
    # A table made in inference mode serves training.
    q = randn(1, 7, 1, 4).requires_grad_()
    rope(q, q)[0].sum().backward()
    assert not rope.state_dict()
    assert repr(rope) == "RotaryEmbedding(4, max_position=10, base=10000.0, interleaved=False)"
    at = rope.cos[9, 1].item(), torch.tensor(9.0 / 100.0, dtype=torch.float64).cos().float().item()
    assert at[0] == at[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kgen.nn.RotaryEmbedding(7), "dim"),
        (lambda: kgen.nn.RotaryEmbedding(0), "dim"),
        (lambda: kgen.nn.RotaryEmbedding(8, -1), "max_position"),
        (lambda: kgen.nn.RotaryEmbedding(8, base=0.0), "base"),
        (lambda: kgen.nn.RotaryEmbedding(8)(randn(1, 2, 3, 6), randn(1, 2, 3, 6)), "at least 8"),
        (lambda: kgen.nn.RotaryEmbedding(8)(randn(2, 3, 8), randn(2, 3, 8)), r"\[B, S, H, D\]"),
        (
            lambda: kgen.nn.RotaryEmbedding(8)(randn(1, 1, 1, 8), randn(1, 1, 1, 8), torch.tensor([[-1]])),
            "positions must not be negative",
        ),
        (lambda: kgen.nn.RotaryEmbedding(8)(randn(1, 1, 1, 8), randn(1, 1, 1, 8), torch.ones(1, 1)), "positions"),
        (lambda: kgen.nn.RotaryEmbedding(8)(*[randn(1, 2, 1, 8)] * 2, [0, 1]), "positions must be .* got a list"),
        (lambda: kgen.nn.RotaryEmbedding(8)(*[randn(1, 2, 1, 8)] * 2, torch.ones(1, 2).int()), "positions .*int32"),
        (lambda: kgen.nn.CrossEntropyLoss(reduction="avg"), "reduction"),
        (lambda: kgen.nn.CrossEntropyLoss(label_smoothing=2.0), "label_smoothing"),
        (lambda: kgen.nn.CrossEntropyLoss(softcap=-1.0), "softcap"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(kgen.ArgumentError, match=message):
        call()


LOSSES: list[dict[str, Any]] = [
    {},
    {"ignore_index": 2, "label_smoothing": 0.1},
    {"weight": randn(9, seed=2).abs(), "reduction": "none"},
    {"weight": randn(9, seed=2).abs(), "size_average": False},
]


@pytest.mark.parametrize("kwargs", LOSSES)
@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")  # torch's own, of an argument under test
def test_cross_entropy_loss(kwargs: dict[str, Any]) -> None:
    mine, theirs = kgen.nn.CrossEntropyLoss(**kwargs), nn.CrossEntropyLoss(**kwargs).double()
    assert isinstance(mine, nn.CrossEntropyLoss)
    target = torch.tensor([0, 2, 8, 4, -100 if mine.ignore_index == -100 else 2])
    expected = outcome(theirs, randn(5, 9).double(), target)
    for a, b in zip(outcome(mine, randn(5, 9), target), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=RTOL, atol=ATOL)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())


def test_cross_entropy_loss_options() -> None:
    logits, target = randn(2, 3, 9), torch.tensor([[0, 2, 8], [4, 5, 5]])
    module = kgen.nn.CrossEntropyLoss(z_loss=1e-2, softcap=2.0)
    assert torch.equal(module(logits, target), ops.cross_entropy(logits, target, z_loss=1e-2, softcap=2.0))
    assert repr(module) == "CrossEntropyLoss(z_loss=0.01, softcap=2.0)"
    assert repr(kgen.nn.CrossEntropyLoss()) == "CrossEntropyLoss()"


def everything() -> nn.ModuleDict:
    """One module of each kind, at values of their own."""
    return nn.ModuleDict(
        {
            "rms": shaken(kgen.nn.RMSNorm(8, 1e-6, casting="llama")),
            "layer": shaken(kgen.nn.LayerNorm(8)),
            "swiglu": kgen.nn.SwiGLU(),
            "geglu": kgen.nn.GeGLU("tanh"),
            "rope": kgen.nn.RotaryEmbedding(4, max_position=3, interleaved=True),
            "loss": kgen.nn.CrossEntropyLoss(randn(8).abs(), ignore_index=3, z_loss=0.1),
        }
    )


def run(m: nn.ModuleDict) -> torch.Tensor:
    """A scalar that every module takes part in."""
    x = m["layer"](m["rms"](randn(2, 5, 8)))
    x = m["swiglu"](torch.cat([x, x.flip(-1)], -1)) + m["geglu"](x, x)
    q, k = m["rope"](x.view(2, 5, 2, 4), x.view(2, 5, 2, 4).flip(1))
    return m["loss"]((q + k).view(2, 5, 8), torch.tensor([[0, 3, 1, 2, 7], [7, 6, 5, 4, 3]]))


def _saved(m: nn.ModuleDict) -> nn.ModuleDict:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved])
@pytest.mark.parametrize("used", [False, True])
def test_copies_stand_alone(copied: Any, used: bool) -> None:
    m = everything()
    if used:
        run(m).backward()
    other = copied(m)
    assert repr(other) == repr(m)
    before = run(m)
    assert torch.equal(run(other), before)
    with torch.no_grad():
        other["rms"].weight.mul_(2.0)
        other["layer"].bias.add_(1.0)
    assert torch.equal(run(m), before)
    assert not torch.equal(run(other), before)
    run(other).backward()
    assert all(p.grad is not None and p.grad.any() for p in other.parameters())


def test_modules_train() -> None:
    m = everything()
    start = [p.detach().clone() for p in m.parameters()]
    optimizer = torch.optim.SGD(m.parameters(), 0.05)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = run(m)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, s) for p, s in zip(m.parameters(), start, strict=True))


def test_the_package_offers_nn_without_importing_torch() -> None:
    code = "import kgen, sys; assert 'torch' not in sys.modules; kgen.nn.RMSNorm; from kgen.nn import LayerNorm"
    subprocess.run([sys.executable, "-c", code], check=True)
