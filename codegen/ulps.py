"""How far from the true value may a backend's scalar function be? The budgets of the numerics contract, with reasons.

A budget is in units in the last place of f32, 2**-23 relative to the result; a rounding to nearest is half of one.
Every backend must keep within it, so it is also what the tests of a backend measure against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Beyond this magnitude the f32 exponential is 0 or infinite whatever its argument's rounding.
_EXP_RANGE = 128.0


@dataclass(frozen=True)
class Budget:
    """`ulps` is a number or a function of the ends `(lo, hi)` of the argument's interval, as float64 tensors."""

    ulps: float | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    reason: str

    def at(self, lo: torch.Tensor, hi: torch.Tensor) -> float | torch.Tensor:
        """The budget for an argument between `lo` and `hi`."""
        return self.ulps if isinstance(self.ulps, float | int) else self.ulps(lo, hi)


def _magnitude(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    return torch.maximum(lo.abs(), hi.abs()).clamp(max=_EXP_RANGE)


def _exp(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    return 2 + 0.625 * _magnitude(lo, hi)


def _sigmoid(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    return 2 + _exp(lo, hi) * (1 - torch.sigmoid(lo))


ULPS: dict[str, Budget | None] = {
    # None: the result is exact, or is rounded once to nearest even; no budget beyond that.
    **dict.fromkeys(("add", "sub", "mul", "div", "sqrt")),
    **dict.fromkeys(("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "maximum", "minimum")),
    "exp": Budget(
        _exp,
        "2**(x * log2(e)): rounding the product moves the result by |x| half ulps, the f32 constant by 0.22 of that; "
        "the hardware exponential adds 2, and makes 0 of what is below 2**-126",
    ),
    "exp2": Budget(2.0, "the hardware exponential: at most 2**-22 relative, and 0 for what is below 2**-126"),
    "expm1": Budget(2.0, "1 in CUDA's table; doubled for other libraries"),
    "log": Budget(2.0, "1 in CUDA's table; doubled for other libraries"),
    "log2": Budget(2.0, "1 in CUDA's table; doubled for other libraries"),
    "log1p": Budget(2.0, "1 in CUDA's table; doubled for other libraries"),
    "rsqrt": Budget(2.0, "2**-22.9 relative in hardware; a square root and a division round twice"),
    "sigmoid": Budget(
        _sigmoid,
        "1 / (1 + exp(-x)): the error of exp counts by its share of the denominator, 1 - sigmoid(x); "
        "the addition and the division round once each, and 1 more for a division by reciprocal",
    ),
    "tanh": Budget(2.0, "2 in CUDA's table"),
    "erf": Budget(1.0, "0.83 measured at every f32 (codegen/erf.py), whatever the hardware's exponential does"),
    "sin": Budget(2.0, "2 in CUDA's table, with its full-range argument reduction"),
    "cos": Budget(2.0, "2 in CUDA's table, with its full-range argument reduction"),
    "pow": Budget(8.0, "4 in CUDA's table; doubled for other libraries"),
}
