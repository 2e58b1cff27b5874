"""A checked run: is every gathered subscript in range?

The reference interpreter runs the kernel, and stops at the first subscript that a plain run would answer with NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kgen.codegen.interpret import MAX_ELEMENTS, Interpreter
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.errors import KgenError


class CheckError(KgenError):
    """A gather out of range in a checked call. The text names kernel, line, subscript and value."""


def check_gathers(
    kernel: ir.Kernel, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float | int | bool]
) -> None:
    """Raise CheckError if a gathered subscript of `kernel` is out of range for these arguments. Modifies none of them.

    Synchronises with the device.
    """
    with torch.no_grad():
        _Checked(kernel, tensors, scalars, exact=False, max_elements=MAX_ELEMENTS).run()


class _Checked(Interpreter):
    def _load(self, e: ir.Load) -> torch.Tensor:
        for axis, (s, size) in enumerate(zip(e.at, self.flat[e.tensor].shape, strict=True)):
            if isinstance(s, Poly):
                continue
            index = self.eval(s)
            bad = (index < 0) | (index >= size)
            if bool(bad.any()):
                value = int(index[bad].reshape(-1)[0].item())
                dim = self.kernel.tensor(e.tensor).shape[axis]
                raise CheckError(
                    f"{e.span}: kernel {self.kernel.name} reads {e.span.text} with subscript {axis} = {value}, "
                    f"out of range for dimension {dim} of size {size}"
                )
        return super()._load(e)
