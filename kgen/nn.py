"""`torch.nn` modules on kgen's kernels: see `kgen.ops.nn`."""

from kgen.ops.nn import CrossEntropyLoss, GeGLU, LayerNorm, RMSNorm, RotaryEmbedding, SwiGLU

__all__ = ["CrossEntropyLoss", "GeGLU", "LayerNorm", "RMSNorm", "RotaryEmbedding", "SwiGLU"]
