"""The Triton emitter: a scheduled kernel to a Python module that needs only torch and triton."""

from kgen.codegen.triton.emit import emit
from kgen.codegen.triton.reserved import RESERVED

__all__ = ["RESERVED", "emit"]
