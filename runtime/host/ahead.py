"""The plan of an op without a call: dtypes, constants and sizes are chosen as for a kernel (`kgen.runtime.ahead`)."""

from __future__ import annotations

from collections.abc import Iterable

from kgen.codegen.host import plan, sizing
from kgen.codegen.host.lower import lower
from kgen.codegen.host.text import plan_text
from kgen.dsl import ast
from kgen.dsl.check import Signature, Specialization, TensorParam, example_sizes, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host import ast as host
from kgen.dsl.host import ir
from kgen.dsl.host.check import elaborate_op, source_of
from kgen.dsl.host.scope import HostSpecialization
from kgen.runtime.ahead import Choices, specialization
from kgen.runtime.errors import ArgumentError


def settled(
    module: ast.Module, op: host.Op, signature: Signature, spec: Specialization, gradients: Iterable[str] | None
) -> tuple[ir.Program, frozenset[str]]:
    """The program of `op` with the gradients of the parameters `gradients`, None: of all that have one; and whose these
    are. Raises ArgumentError for what has none."""
    there = [p for p in signature.params if isinstance(p, TensorParam) and (not p.optional or p.name in spec.present)]
    floats = frozenset(
        p.name for p in there if (DTYPES[p.dtype] if p.dtype in DTYPES else spec.dtypes[p.dtype]).kind == "float"
    )
    asked = floats if gradients is None else frozenset(gradients)
    names = ", ".join(p.name for p in there if p.name in floats)
    for name in sorted(asked - floats):
        raise ArgumentError(f"{op.name}: there is no tensor '{name}' that may have a gradient; there is {names}")
    source = source_of(module)
    program = elaborate_op(source, op.name, HostSpecialization(spec.consts, spec.present, asked))
    wanted = asked & program.gradients.keys()
    for name in sorted(asked - wanted) if gradients is not None else ():
        raise ArgumentError(f"{op.name}: the op gives no gradient of '{name}'")
    if wanted != asked:  # conditions ask what is wanted
        program = elaborate_op(source, op.name, HostSpecialization(spec.consts, spec.present, wanted))
    return program, wanted


def planned(
    module: ast.Module,
    op: host.Op,
    choices: Choices,
    gradients: Iterable[str] | None = None,
    workspace_mb: float = sizing.DEFAULT_MB,
    accumulate: str = "auto",
) -> tuple[plan.Plan, sizing.Sizes | None]:
    """The plan of `op` with the gradients of the parameters `gradients`, None: of all that have one, and its chunks
    under a budget of so many MiB where all sizes are known, with sums held as `accumulate` says.

    Raises ArgumentError for a choice that does not fit the signature.
    """
    signature = signature_of(op.header, Diagnostics())
    example = example_sizes(op.header)
    spec = specialization(signature, choices, example)
    program, wanted = settled(module, op, signature, spec, gradients)
    found = lower(program, spec.dtypes, wanted, "param")
    dims = {**example, **choices.dims, **{n: v for n, v in spec.consts.items() if type(v) is int}}
    if any(d not in dims for d in signature.dims):
        return found, None
    sizes = sizing.sizes(found, dims, workspace_mb * 2**20, accumulate)
    return (found if sizes.accumulate == "param" else lower(program, spec.dtypes, wanted, "f32")), sizes


def text(module: ast.Module, op: host.Op, choices: Choices, gradients: Iterable[str] | None = None) -> str:
    """The plan as text, headed by the chunks that a budget of the default size gives."""
    p, sizes = planned(module, op, choices, gradients)
    if sizes is None or not sizes.chunks:
        return plan_text(p)
    dims = {**example_sizes(op.header), **choices.dims}
    at = ", ".join(f"{d} = {dims[d]}" for d in sorted({loop.dim for loop in sizing.loops(p)}))
    rows = ", ".join(f"{c} of {n} rows" for c, n in sizes.chunks.items())
    return f"# {at}, {sizing.DEFAULT_MB:g} MiB: {rows}\n{plan_text(p)}"
