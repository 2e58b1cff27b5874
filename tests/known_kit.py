"""The shipped ops in one table: how each is called on tensors of a given width, and its formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from autograd_kit import as_tuple, randn, worst

from kgen import ops

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TARGET = torch.tensor([[1, -100, 0], [2, 2, 1]])
ANGLES = torch.arange(5.0, dtype=torch.float64)[:, None] * 10.0 ** -torch.arange(3.0, dtype=torch.float64)
TABLES = {True: ANGLES.repeat_interleave(2, -1), False: torch.cat([ANGLES, ANGLES], -1)}


@dataclass(frozen=True)
class Op:
    """`call` takes tensors of `shapes(width)` by name, and `backend`; `formula` the same in float64."""

    call: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: Callable[[int], dict[str, tuple[int, ...]]]

    def tensors(self, width: int, dtype: torch.dtype = torch.float32) -> Tensors:
        """Normal values for a call."""
        return {n: randn(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(self.shapes(width).items())}


def _rows(*names: str, **vectors: int) -> Callable[[int], dict[str, tuple[int, ...]]]:
    return lambda n: dict.fromkeys(names, (2, 3, n)) | dict.fromkeys(vectors, (n,))


def _rms(x: Any, w: Any, offset: float = 0.0) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (offset + w)


def _add_rms(x: Any, residual: Any, w: Any) -> Any:
    # The norm is that of the sum rounded to the residual's dtype; a rounding has the identity for its derivative.
    h = x + residual
    return _rms(h + (h.detach().to(_add_rms.dtype).double() - h.detach()), w), h


_add_rms.dtype = torch.float32


def _turned(x: Any, interleaved: bool) -> Any:
    angle = TABLES[interleaved][: x.shape[1], None]
    part = x[..., :6]
    if interleaved:
        other = torch.stack([-part[..., 1::2], part[..., 0::2]], -1).flatten(-2)
    else:
        other = torch.cat([-part[..., 3:], part[..., :3]], -1)
    # The tables that the op is given are f32.
    cos, sin = angle.cos().float().double(), angle.sin().float().double()
    return torch.cat([part * cos + other * sin, x[..., 6:]], -1)


def _rope(interleaved: bool) -> Op:
    cos, sin = (f(TABLES[interleaved]).float() for f in (torch.cos, torch.sin))
    return Op(
        lambda q, k, **kw: ops.rope(q, k, cos, sin, interleaved=interleaved, **kw),
        lambda q, k: (_turned(q, interleaved), _turned(k, interleaved)),
        lambda n: {"q": (2, 3, 2, n + 5), "k": (2, 3, 1, n + 5)},
    )


def _loss(logits: Any) -> Any:
    return F.cross_entropy(logits.movedim(-1, 1), TARGET, reduction="none")


OPS: dict[str, Op] = {
    "rms_norm": Op(lambda x, w, **kw: ops.rms_norm(x, w, **kw), _rms, _rows("x", w=1)),
    "rms_norm-gemma": Op(
        lambda x, w, **kw: ops.rms_norm(x, w, casting="gemma", **kw), lambda x, w: _rms(x, w, 1.0), _rows("x", w=1)
    ),
    "layer_norm": Op(
        lambda x, w, b, **kw: ops.layer_norm(x, w, b, **kw),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        _rows("x", w=1, b=1),
    ),
    "add_rms_norm": Op(
        lambda x, residual, w, **kw: ops.add_rms_norm(x, residual, w, **kw), _add_rms, _rows("x", "residual", w=1)
    ),
    "softmax": Op(lambda x, **kw: ops.softmax(x, **kw), lambda x: x.softmax(-1), _rows("x")),
    "log_softmax": Op(lambda x, **kw: ops.log_softmax(x, **kw), lambda x: x.log_softmax(-1), _rows("x")),
    "swiglu": Op(lambda a, b, **kw: ops.swiglu(a, b, **kw), lambda a, b: F.silu(a) * b, _rows("a", "b")),
    "geglu": Op(lambda a, b, **kw: ops.geglu(a, b, **kw), lambda a, b: F.gelu(a) * b, _rows("a", "b")),
    "geglu-tanh": Op(
        lambda a, b, **kw: ops.geglu(a, b, approximate="tanh", **kw),
        lambda a, b: F.gelu(a, approximate="tanh") * b,
        _rows("a", "b"),
    ),
    "rope": _rope(False),
    "rope-interleaved": _rope(True),
    "cross_entropy": Op(
        lambda logits, **kw: ops.cross_entropy(logits, TARGET, reduction="none", **kw),
        _loss,
        lambda n: {"logits": (2, 3, max(n, 3))},
    ),
}


def outcome(op: Op, tensors: Tensors, seeds: list[torch.Tensor] | None = None, **kwargs: Any) -> list[torch.Tensor]:
    """Results and gradients of all tensors that require grad, for gradients `seeds` of the results (else random)."""
    results = as_tuple(op.call(**tensors, **kwargs))
    if seeds is None:
        seeds = [randn(*r.shape, dtype=r.dtype, seed=70 + i) for i, r in enumerate(results)]
    wanted = [t for t in tensors.values() if t.requires_grad]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, wanted, seeds)]


def expected(op: Op, tensors: Tensors, seeds: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same by the formula, in float64."""
    dtype = next(iter(tensors.values())).dtype
    doubles = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in tensors.items()}
    _add_rms.dtype = dtype
    results = as_tuple(op.formula(**doubles))
    wanted = [t for t in doubles.values() if t.requires_grad]
    return [*(r.detach() for r in results), *torch.autograd.grad(results, wanted, [s.double() for s in seeds])]


def agree(actual: list[torch.Tensor], wanted: list[torch.Tensor], terms: int, bound: float = 1.0) -> None:
    """Every tensor within `bound` times what sums over `terms` elements and one rounding allow (`autograd_kit`)."""
    assert len(actual) == len(wanted)
    for i, (a, e) in enumerate(zip(actual, wanted, strict=True)):
        ratio = worst(a, e, terms)
        assert ratio <= bound, f"result or gradient {i} is off by {ratio:.3g} times the bound"
