"""The shipped ops as functions of torch tensors. The kernels behind them are the `.kdsl` files in this folder.

Every function takes tensors with any strides on a CPU or CUDA device, launches on torch's current stream, never
modifies an input (but `cross_entropy_` its logits), and takes `backend=` (`cuda`, `triton`, `reference`, `auto`) like a
kernel that `kgen.load` gives; most take `out=`. All raise `kgen.KgenError` for an argument that does not fit. Results
carry the gradients of every tensor argument that requires grad, except with `out=`; torch.compile takes them without a
graph break, all but `vocab_parallel_linear_cross_entropy`, in the middle of which ranks meet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kgen.ops.functional import (
        add_rms_norm,
        geglu,
        layer_norm,
        log_softmax,
        rms_norm,
        rope,
        softmax,
        swiglu,
    )
    from kgen.ops.linear_losses import linear_cross_entropy
    from kgen.ops.losses import cross_entropy, cross_entropy_, kept_weight
    from kgen.ops.parallel_losses import vocab_parallel_linear_cross_entropy

__all__ = [
    "add_rms_norm",
    "cross_entropy",
    "cross_entropy_",
    "geglu",
    "kept_weight",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
    "vocab_parallel_linear_cross_entropy",
]

# Where each is. A module is imported at its first use: the losses of linear layers bring the planner of host programs.
_PLACES = dict.fromkeys(__all__, "functional") | {
    "cross_entropy": "losses",
    "cross_entropy_": "losses",
    "kept_weight": "losses",
    "linear_cross_entropy": "linear_losses",
    "vocab_parallel_linear_cross_entropy": "parallel_losses",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        globals()[name] = found = getattr(importlib.import_module(f"kgen.ops.{_PLACES[name]}"), name)
        return found
    if name in ("functional", "linear_losses", "losses", "nn", "parallel_losses"):
        return importlib.import_module(f"kgen.ops.{name}")
    raise AttributeError(f"module 'kgen.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
