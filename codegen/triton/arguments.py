"""Arguments: what are the parameters of a generated function called, and what are they?

A stride is called after the index that runs over its dimension, if it is but one; the parts of a starred dimension are
numbered, and multiplied where the whole of it is asked for.
"""

from __future__ import annotations

from kgen.codegen.abi import kernel_args
from kgen.codegen.names import Names
from kgen.codegen.program import Arg
from kgen.codegen.triton.index import Definition
from kgen.codegen.triton.intrinsics import TYPES
from kgen.codegen.variant import Variant
from kgen.dsl import ir


class Arguments:
    """The arguments of a kernel, in the order of `kernel_args`, and what they are called: tensors by name, strides by
    (tensor, dimension, part of it), starred dimensions by (name, part). A stride that is 1 or not needed has no entry.
    """

    def __init__(self, kernel: ir.Kernel, variant: Variant, names: Names) -> None:
        self.kernel, self.variant, self.names = kernel, variant, names
        self.all = kernel_args(kernel, variant)
        self.pointer: dict[str, str] = {}
        self.stride: dict[tuple[str, int, int], str] = {}
        self.part: dict[tuple[str, int], str] = {}
        for a in self.all:
            if a.kind == "tensor":
                self.pointer[a.name] = names.fresh(f"{a.name}_ptr")
            elif a.kind == "stride":
                suffix = f"_{a.part}" if self._parts(a) > 1 else ""
                label = self._dimension_label(a.name, a.axis)
                self.stride[a.name, a.axis, a.part] = names.fresh(f"stride_{a.name}_{label}{suffix}")
            elif a.kind == "dim" and variant.star_rank(a.name) > 1:
                self.part[a.name, a.part] = names.fresh(f"{a.name}_{a.part}")

    def identifier(self, a: Arg) -> str:
        """What `a` is called."""
        if a.kind == "tensor":
            return self.pointer[a.name]
        if a.kind == "stride":
            return self.stride[a.name, a.axis, a.part]
        if a.kind == "dim" and (a.name, a.part) in self.part:
            return self.part[a.name, a.part]
        return self.names[a.name]

    def parameters(self) -> list[str]:
        """The parameters of the function, in order."""
        names = [self.identifier(a) for a in self.all]
        typed = zip(names, self.all, strict=True)
        return [n if a.kind == "tensor" else f"{n}: {TYPES[a.dtype.name]}" for n, a in typed]

    def sizes(self) -> list[Definition]:
        """The starred dimensions, which are products of their parts."""
        out: list[Definition] = []
        for dim in sorted({d for d, _ in self.part}):
            sizes = [v for (d, _), v in self.part.items() if d == dim]
            out.append(Definition(self.names[dim], " * ".join(sizes)))
        return out

    def _parts(self, a: Arg) -> int:
        t = self.kernel.tensor(a.name)
        dim = t.shape[0].as_symbol if t.star and a.axis == 0 else None
        return self.variant.star_rank(dim) if dim is not None else 1

    def _dimension_label(self, tensor: str, axis: int) -> str:
        """What to call a dimension: the index that runs over it if there is but one, its position otherwise."""
        found = {
            s.as_symbol if not isinstance(s := access.at[axis], ir.Expr) else None
            for access in ir.accesses(self.kernel.body)
            if access.tensor == tensor
        }
        label = next(iter(found)) if len(found) == 1 else None
        return label if label is not None and label in {a.name for a in self.kernel.axes} else str(axis)
