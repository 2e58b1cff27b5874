"""`torch.nn` modules on kgen's kernels: see `kgen.ops.nn`."""

from kgen.ops.nn import (
    CrossEntropyLoss,
    GeGLU,
    LayerNorm,
    LinearCrossEntropyLoss,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)

__all__ = [
    "CrossEntropyLoss",
    "GeGLU",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
]
