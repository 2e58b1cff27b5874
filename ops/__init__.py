"""The shipped ops as functions of torch tensors. The kernels behind them are the `.kdsl` files in this folder.

Every function takes tensors with any strides on a CPU or CUDA device, launches on torch's current stream, never
modifies an input, and takes `backend=` (`cuda`, `triton`, `reference`, `auto`) and `out=` like a kernel that
`kgen.load` gives. All raise `kgen.KgenError` for an argument that does not fit. Forward only: results carry no
gradient.
"""

from kgen.ops.functional import (
    geglu,
    layer_norm,
    log_softmax,
    rms_norm,
    rope,
    softmax,
    swiglu,
)

__all__ = ["geglu", "layer_norm", "log_softmax", "rms_norm", "rope", "softmax", "swiglu"]
