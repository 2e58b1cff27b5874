"""kgen: a block-level kernel language and a generator that emits readable CUDA C and Triton kernels."""

from importlib.metadata import version as _version

__version__ = _version("kgen")
