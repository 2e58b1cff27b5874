"""The functional API: torch's argument names and conventions on top of the packaged kernels."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import torch

from kgen.runtime.errors import ArgumentError
from kgen.runtime.loading import load_packaged

if TYPE_CHECKING:
    from kgen.runtime.kernel import Kernel

is_dynamo_compiling = torch.compiler.is_dynamo_compiling

# The casting modes of `rms_norm`: whether the normalised row is rounded before the weight, and the default offset.
_CASTING = {"none": (False, 0.0), "llama": (True, 0.0), "gemma": (False, 1.0)}


@cache
def _loaded(file: str, name: str) -> Kernel:
    """A packaged kernel, parsed and checked once."""
    return getattr(load_packaged(f"{file}.kdsl"), name)


def _kernel(file: str, name: str) -> Kernel:
    if is_dynamo_compiling():
        from kgen.runtime.library import packaged  # imports torch.compile's machinery

        return packaged(f"{file}.kdsl", name)
    return _loaded(file, name)


def in_words_of_the_caller(error: ArgumentError, **names: str) -> ArgumentError:
    """`error` with the names of a kernel's arguments, the keys, replaced by those of the function that called it."""
    return type(error)(re.sub(r"'(\w+)'", lambda m: f"'{names.get(m[1], m[1])}'", str(error)))


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: str = "none",
    offset: float | None = None,
    backend: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x / sqrt(mean(x**2) + eps) * (offset + weight)` over the last dimension.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    x: `[..., N]` in f16, bf16, f32 or f64; weight: `[N]`, of any of these dtypes. Returns `[..., N]` in x's dtype.
    casting: `none` computes in f32 and rounds once, as `torch.nn.functional.rms_norm`; `llama` rounds the normalised
    row to x's dtype before it is multiplied by the weight; `gemma` is `none` with an offset of 1. `offset` overrides
    the mode's own.
    """
    round_first, shift = casting_arguments("rms_norm", weight is not None, casting, offset)
    try:
        return _kernel("rms_norm", "rms_norm").ordered((x, weight, eps, shift, round_first), backend, out)
    except ArgumentError as error:
        raise in_words_of_the_caller(error, w="weight") from None


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: str = "none",
    offset: float | None = None,
    backend: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`h = x + residual` and `rms_norm(h, weight)` in one kernel.

    x, residual: `[..., N]`; they may differ in dtype. Returns the norm in x's dtype and `h`, the next residual, in the
    residual's; the norm is that of the rounded `h`. The other arguments are those of `rms_norm`.
    """
    round_first, shift = casting_arguments("add_rms_norm", weight is not None, casting, offset)
    try:
        kernel = _kernel("add_rms_norm", "add_rms_norm")
        return kernel.ordered((x, residual, weight, eps, shift, round_first), backend, out)
    except ArgumentError as error:
        raise in_words_of_the_caller(error, w="weight") from None


def casting_arguments(op: str, weighted: bool, casting: str, offset: float | None) -> tuple[bool, float]:
    """The kernel arguments `round_first` and `offset` of a casting mode; ArgumentError for what does not fit."""
    if casting not in _CASTING:
        raise ArgumentError(f"{op}: casting must be one of {', '.join(_CASTING)}, got {casting!r}")
    round_first, default = _CASTING[casting]
    if not weighted and offset is not None:
        raise ArgumentError(f"{op}: offset is added to the weight, and no weight is given")
    return round_first and weighted, default if offset is None else offset


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    x: `[..., N]`; weight, bias: `[N]`, of one dtype. Computed in f32 (f64 for f64), the variance from the deviations.
    Returns `[..., N]` in x's dtype.
    """
    try:
        return _kernel("layer_norm", "layer_norm").ordered((x, weight, bias, eps), backend, out)
    except ArgumentError as error:
        raise in_words_of_the_caller(error, w="weight", b="bias") from None


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, backend: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`silu(gate) * up`, both `[..., N]`, in f32 and rounded once (Shazeer 2020, arXiv:2002.05202).

    The halves of one tensor may be passed as they come from `chunk`: their strides are used, nothing is copied.
    """
    return _kernel("swiglu", "swiglu").ordered((gate, up), backend, out)


def geglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    approximate: str = "none",
    backend: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gelu(gate) * up`, both `[..., N]`. approximate: `none` for the exact GELU, `tanh` for its approximation."""
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"geglu: approximate must be none or tanh, got {approximate!r}")
    name = "geglu" if approximate == "none" else "geglu_tanh"
    return _kernel("swiglu", name).ordered((gate, up), backend, out)


def softmax(
    x: torch.Tensor, dim: int = -1, *, backend: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax of x along `dim`, in x's dtype. A row that is all -inf, or holds NaN or +inf, is NaN, as in torch."""
    return _along("softmax", x, dim, backend, out)


def log_softmax(
    x: torch.Tensor, dim: int = -1, *, backend: str | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Logarithm of the softmax of x along `dim`, in x's dtype."""
    return _along("log_softmax", x, dim, backend, out)


def _along(name: str, x: torch.Tensor, dim: int, backend: str | None, out: torch.Tensor | None) -> torch.Tensor:
    """A kernel over the last dimension, applied along `dim` of `x` without a copy."""
    if not isinstance(dim, int):
        raise ArgumentError(f"{name}: dim must be an integer, got {dim!r}")
    rank = x.dim() if isinstance(x, torch.Tensor) else 0
    if not -rank <= dim < rank:
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ArgumentError(f"{name}: dim {dim} is not a dimension of x, got {shape}")
    if dim in (-1, rank - 1):
        return _kernel("softmax", name).ordered((x,), backend, out)
    rows = x.movedim(dim, -1)
    if out is not None:
        _kernel("softmax", name).ordered((rows,), backend, out.movedim(dim, -1))
        return out
    return _kernel("softmax", name).ordered((rows,), backend, None, (rows,)).movedim(-1, dim)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys rotated by position (Su et al. 2021, arXiv:2104.09864); one kernel for both.

    q: `[B, S, HQ, D]`, k: `[B, S, HK, D]`, any strides (transpose a `[B, H, S, D]` tensor to pass it). cos, sin:
    `[P, R]`, one row a position, R <= D even; or one row a token, each `[B, S, R]` or `[1, S, R]` (both `[1, P, R]`:
    the first S rows serve). The first R features are rotated and the rest pass through. positions: `[B, S]` int64 rows
    of `[P, R]` tables; without it token s takes row s.
    interleaved: pairs are features (2d, 2d + 1) instead of (d, d + R/2).
    Returns the rotated q and k, laid out in memory as they came (under torch.compile: contiguous).
    """
    has_rows = getattr(cos, "ndim", 0) == 3 or getattr(sin, "ndim", 0) == 3
    if has_rows and (_rank(cos) == 3 or _rank(sin) == 3):  # of tensors, which takes longer to ask
        if positions is not None:
            raise ArgumentError("rope: positions select rows of [P, R] tables, and cos and sin have one row a token")
        cos, sin, positions = _rows_of_tokens(q, cos, sin)
    return _kernel("rope", "rope").ordered((q, k, cos, sin, positions, interleaved), backend, None, (q, k))


def _rank(t: torch.Tensor) -> int | None:
    return t.dim() if isinstance(t, torch.Tensor) else None


def _rows_of_tokens(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tables with one row a token as tables [P, R], and the row of each token, None where token s has row s."""
    if _rank(q) != 4:
        got = tuple(q.shape) if isinstance(q, torch.Tensor) else f"a {type(q).__name__}"
        raise ArgumentError(f"rope: argument 'q' must have shape [B, S, HQ, D], got {got}")
    batch, tokens = q.shape[:2]
    if _rank(cos) == 3 and _rank(sin) == 3 and cos.shape[2] == sin.shape[2]:
        if cos.shape[0] == 1 == sin.shape[0] and cos.shape[1] == sin.shape[1] >= tokens:
            return cos[0], sin[0], None
        if all(t.shape[0] in (1, batch) and t.shape[1] == tokens for t in (cos, sin)):
            if batch and all(t.shape[0] == 1 or t.stride(0) == 0 for t in (cos, sin)):
                return cos[0], sin[0], None
            cos, sin = (t.expand(batch, -1, -1).flatten(0, 1) for t in (cos, sin))
            return cos, sin, torch.arange(batch * tokens, device=q.device).view(batch, tokens)
    got = " and ".join(str(tuple(t.shape)) if isinstance(t, torch.Tensor) else type(t).__name__ for t in (cos, sin))
    raise ArgumentError(
        f"rope: cos and sin must have one row a token, [B, S, R] or [1, S, R] with [B, S] = [{batch}, {tokens}] by q, "
        f"or both one row a position, [P, R]; got {got}"
    )
