"""The CUDA C emitter: a scheduled kernel to one `.cu` text that NVRTC compiles without any include."""

from kgen.codegen.cuda.emit import emit, host_source

__all__ = ["emit", "host_source"]
