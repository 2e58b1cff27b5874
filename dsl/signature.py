"""What a kernel's header says, as data: what a call needs to know of a kernel that was checked.

`kgen.dsl.check` makes these of a syntax tree. They stand apart from it so that a process which finds them in a cache
needs no checker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import DType
from kgen.dsl.source import Span

# What a caller passes by keyword besides the parameters, with the defaults: to every kernel, and to every op. No
# parameter has one of these names.
KERNEL_OPTIONS: Mapping[str, object] = {"backend": None, "out": None, "like": None, "check": False}
OP_OPTIONS: Mapping[str, object] = {
    "backend": None, "workspace_mb": None, "accumulate": "auto", "chunk": None, "group": None,
}  # fmt: skip


class TensorParam(NamedTuple):
    """A tensor argument. `dtype` is a dtype name or a dtype variable; `shape` is over dimensions and const ints.

    `follows` is set in a backward for the gradient of an optional tensor: the one whose presence it shares.
    """

    name: str
    dtype: str
    shape: tuple[Poly, ...]
    star: bool
    role: str  # "in" | "out" | "inout"
    optional: bool
    span: Span
    follows: str = ""


class ScalarParam(NamedTuple):
    """A scalar argument; `const` ones are compile-time. `default` is None where the caller must give it."""

    name: str
    dtype: str
    const: bool
    default: int | float | bool | None
    span: Span


@dataclass(frozen=True)
class Signature:
    """The header of a kernel. `dims` are its dimension symbols in order of first appearance, `star_dims` those
    written `*M`; `dtype_vars` maps each dtype variable to what it may stand for."""

    name: str
    doc: str
    params: tuple[TensorParam | ScalarParam, ...]
    outputs: tuple[TensorParam, ...]
    dims: tuple[str, ...]
    star_dims: frozenset[str]
    dtype_vars: dict[str, tuple[DType, ...]]

    @cached_property
    def tensors(self) -> tuple[TensorParam, ...]:
        """Every tensor argument: inputs in order, then outputs."""
        return tuple(p for p in self.params if isinstance(p, TensorParam)) + self.outputs

    @cached_property
    def scalars(self) -> tuple[ScalarParam, ...]:
        """Every scalar argument, const ones too."""
        return tuple(p for p in self.params if isinstance(p, ScalarParam))


@dataclass(frozen=True)
class Specialization:
    """What a kernel is specialised to: a dtype for each dtype variable, a value for each const parameter, and the
    names of the optional tensors that are there."""

    dtypes: Mapping[str, DType]
    consts: Mapping[str, int | float | bool] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
