"""The shipped ops as functions of torch tensors. The kernels behind them are the `.kdsl` files in this folder.

Every function takes tensors with any strides on a CPU or CUDA device, launches on torch's current stream, never
modifies an input (but `cross_entropy_` its logits), and takes `backend=` (`cuda`, `triton`, `reference`, `auto`) like a
kernel that `kgen.load` gives; most take `out=`. All raise `kgen.KgenError` for an argument that does not fit. Results
carry the gradients of every tensor argument that requires grad, except with `out=`; torch.compile takes them without a
graph break, all but `vocab_parallel_linear_cross_entropy`, in the middle of which ranks meet.
"""

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
