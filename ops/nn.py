"""Modules on the packaged kernels: torch's constructor arguments and state dicts, so either loads the other's.

`RMSNorm`, `LayerNorm` and `CrossEntropyLoss` are subclasses of torch's modules of these names. Options that torch does
not have are keyword arguments. All take `backend` from `kgen.backend(...)` and its like at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kgen.ops import functional, linear_losses, losses
from kgen.runtime.errors import ArgumentError

__all__ = [
    "CrossEntropyLoss",
    "GeGLU",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
]


class RMSNorm(nn.RMSNorm):
    """`kgen.ops.rms_norm` over the trailing dimensions `normalized_shape`, with a weight where `elementwise_affine`.

    eps: None takes the machine epsilon of the dtype that is computed in (f32; f64 for f64), as torch.
    casting, offset: see `kgen.ops.rms_norm`. The weight starts at 1, or at 0 where the offset is 1 (Gemma).
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        casting: str = "none",
        offset: float | None = None,
    ) -> None:
        # Set before torch's constructor, which calls reset_parameters.
        self.casting = casting
        self.offset = functional.casting_arguments("RMSNorm", elementwise_affine, casting, offset)[1]
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """The weight such that `offset + weight` is 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[..., *normalized_shape]`; the same shape and dtype."""
        rows = _rows("RMSNorm", x, self.normalized_shape)
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        weight = self.weight.flatten() if self.elementwise_affine else None
        offset = self.offset if self.elementwise_affine else None
        return functional.rms_norm(rows, weight, eps, casting=self.casting, offset=offset).view(x.shape)

    def extra_repr(self) -> str:
        """torch's, and the options that are not at their defaults."""
        extra = f", casting={self.casting!r}" if self.casting != "none" else ""
        default = 1.0 if self.casting == "gemma" else 0.0
        return super().extra_repr() + extra + (f", offset={self.offset}" if self.offset != default else "")


class LayerNorm(nn.LayerNorm):
    """`kgen.ops.layer_norm` over the trailing dimensions `normalized_shape`; arguments and state dict are torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: `[..., *normalized_shape]`; the same shape and dtype."""
        rows = _rows("LayerNorm", input, self.normalized_shape)
        weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        return functional.layer_norm(rows, weight, bias, self.eps).view(input.shape)


class _Gated(nn.Module):
    def _pair(self, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if up is not None:
            return gate, up
        if not isinstance(gate, torch.Tensor) or gate.dim() == 0 or gate.shape[-1] % 2:
            got = tuple(gate.shape) if isinstance(gate, torch.Tensor) else type(gate).__name__
            raise ArgumentError(
                f"{type(self).__name__}: one tensor must hold gate and up, in a last dimension of even size; got {got}"
            )
        first, second = gate.chunk(2, -1)
        return first, second


class SwiGLU(_Gated):
    """`silu(gate) * up`: of two tensors `[..., N]`, or of the halves of one `[..., 2 * N]`, the gate first."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., N]`."""
        return functional.swiglu(*self._pair(gate, up))


class GeGLU(_Gated):
    """`gelu(gate) * up`: of two tensors `[..., N]`, or of the halves of one `[..., 2 * N]`, the gate first.

    approximate: `none` for the exact GELU, `tanh` for its approximation, as `torch.nn.GELU`.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ArgumentError(f"GeGLU: approximate must be none or tanh, got {approximate!r}")
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., N]`."""
        return functional.geglu(*self._pair(gate, up), approximate=self.approximate)

    def extra_repr(self) -> str:
        """The form of GELU."""
        return f"approximate={self.approximate!r}"


class RotaryEmbedding(nn.Module):
    """Queries and keys rotated by position (`kgen.ops.rope`), with tables of sines and cosines that it keeps.

    dim: rotated features, even, at most those of a head. max_position: positions in the tables at first. base: the
    wavelengths are `2 * pi * base**(2 * d / dim)` positions. interleaved: pairs are features (2d, 2d + 1) instead of
    (d, d + dim/2). The tables, `cos` and `sin`, are `[positions, dim]` in f32 whatever the module is converted to; they
    are not in the state dict.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        dim: int,
        max_position: int = 2048,
        base: float = 10000.0,
        interleaved: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ArgumentError(f"RotaryEmbedding: dim must be a positive even number, got {dim}")
        if max_position < 0:
            raise ArgumentError(f"RotaryEmbedding: max_position must not be negative, got {max_position}")
        if not base > 0.0:
            raise ArgumentError(f"RotaryEmbedding: base must be positive, got {base}")
        self.dim, self.base, self.interleaved = dim, base, interleaved
        place = torch.get_default_device() if device is None else torch.device(device)
        self._tabulate(max_position, place)

    @property
    def max_position(self) -> int:
        """Positions in the tables."""
        return self.cos.shape[0]

    def reserve(self, count: int) -> None:
        """Let the tables have at least `count` positions."""
        if count > self.max_position:
            self._tabulate(count, self.cos.device)

    @torch.inference_mode(False)  # tables made in inference mode could not serve training later
    def _tabulate(self, count: int, device: torch.device) -> None:
        # Angles in float64: a position of 1e5 radians has an error of 4e-3 in f32.
        at = {"dtype": torch.float64, "device": device}
        frequency = self.base ** (-torch.arange(0, self.dim, 2, **at) / self.dim)
        angle = torch.arange(count, **at)[:, None] * frequency
        angle = angle.repeat_interleave(2, -1) if self.interleaved else torch.cat([angle, angle], -1)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryEmbedding:
        # Conversions to a narrower dtype would spoil the tables, and `to_empty` leaves them undefined.
        moved = super()._apply(fn, recurse)
        self._tabulate(self.max_position, self.cos.device)
        return moved

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: `[B, S, HQ, D]`, k: `[B, S, HK, D]`; positions: `[B, S]` int64, without it token s is at s.

        The tables grow to S positions, and to the largest of `positions` where these are on the CPU. On a GPU that
        would make the host wait: there, `reserve` what is needed; a position beyond the tables gives NaN.
        """
        if not isinstance(q, torch.Tensor) or q.dim() != 4 or q.shape[-1] < self.dim:
            got = tuple(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
            raise ArgumentError(f"RotaryEmbedding: q must be [B, S, H, D] with D at least {self.dim}, got {got}")
        if positions is None:
            self._grow(q.shape[1])
        elif not isinstance(positions, torch.Tensor) or positions.dtype != torch.int64:
            got = positions.dtype if isinstance(positions, torch.Tensor) else f"a {type(positions).__name__}"
            raise ArgumentError(f"RotaryEmbedding: positions must be an int64 tensor [B, S] or None, got {got}")
        elif positions.device.type == "cpu" and positions.numel():
            low, high = (int(p) for p in positions.aminmax())
            if low < 0:
                raise ArgumentError(f"RotaryEmbedding: positions must not be negative, got {low}")
            self._grow(high + 1)
        return functional.rope(q, k, self.cos, self.sin, positions=positions, interleaved=self.interleaved)

    def _grow(self, count: int) -> None:
        # By half at least, so that a sequence that grows token by token does not tabulate at each.
        if count > self.max_position:
            self.reserve(max(count, self.max_position * 3 // 2))

    def extra_repr(self) -> str:
        """Arguments of the constructor, with the present size of the tables."""
        return f"{self.dim}, max_position={self.max_position}, base={self.base}, interleaved={self.interleaved}"


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`kgen.ops.cross_entropy` with torch's arguments; the classes are the last dimension of the logits.

    z_loss, softcap: see `kgen.ops.cross_entropy`. The state dict holds `weight`, where given, as torch's does.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        losses.check_reduction("CrossEntropyLoss", self.reduction)
        losses.options_of("CrossEntropyLoss", label_smoothing, z_loss, softcap)
        self.z_loss, self.softcap = z_loss, softcap

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """input: `[..., V]` logits; target: `[...]` integer labels. A scalar, or `[...]` without reduction, in f32."""
        return losses.cross_entropy(
            input,
            target,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )

    def extra_repr(self) -> str:
        """The options that are not at their defaults (torch prints none)."""
        defaults = {
            "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None,
        }  # fmt: skip
        return ", ".join(f"{k}={v!r}" for k, d in defaults.items() if (v := getattr(self, k)) != d)


class LinearCrossEntropyLoss(nn.Module):
    """`kgen.ops.linear_cross_entropy`: of hidden states and the weight of the layer that makes logits of them.

    The weight is an argument of each call, as it belongs to that layer, whose own forward is not called. The options
    are those of the function. The state dict holds `class_weight`, where given.
    """

    class_weight: torch.Tensor | None

    def __init__(
        self,
        class_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        accumulate: str = "auto",
        workspace_mb: float | None = None,
    ) -> None:
        super().__init__()
        name = "LinearCrossEntropyLoss"
        losses.check_reduction(name, reduction)
        losses.options_of(name, label_smoothing, z_loss, softcap)
        linear_losses.check_options(name, accumulate, workspace_mb)
        self.register_buffer("class_weight", class_weight)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "accumulate": accumulate,
            "workspace_mb": workspace_mb,
        }

    def forward(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        token_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input: `[..., H]`; weight: `[V, H]`; target, token_weight: `[...]`; bias: `[V]`. A scalar, or `[...]` without
        reduction, in f32."""
        return linear_losses.linear_cross_entropy(
            input, weight, target, bias, self.class_weight, token_weight=token_weight, **self.options
        )

    def extra_repr(self) -> str:
        """The options that are not at their defaults."""
        defaults = {
            "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None,
            "accumulate": "auto", "workspace_mb": None,
        }  # fmt: skip
        return ", ".join(f"{k}={self.options[k]!r}" for k, d in defaults.items() if self.options[k] != d)


def _rows(module: str, x: torch.Tensor, normalized_shape: tuple[int, ...]) -> torch.Tensor:
    """x with the dimensions that are normalised together as one."""
    count = len(normalized_shape)
    if not isinstance(x, torch.Tensor) or count == 0 or tuple(x.shape[-count:]) != tuple(normalized_shape):
        got = tuple(x.shape) if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise ArgumentError(f"{module}: the last dimensions of x must be {tuple(normalized_shape)}, got {got}")
    return x if count == 1 else x.flatten(-count)
