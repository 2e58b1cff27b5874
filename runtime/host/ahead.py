"""The plan of an op without a call: dtypes, constants and sizes are chosen as for a kernel (`kgen.runtime.ahead`)."""

from __future__ import annotations

from kgen.codegen.host import plan, sizing
from kgen.codegen.host.lower import lower
from kgen.codegen.host.text import plan_text
from kgen.dsl import ast
from kgen.dsl.check import TensorParam, example_sizes, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host import ast as host
from kgen.dsl.host.check import elaborate_op, source_of
from kgen.dsl.host.scope import HostSpecialization
from kgen.runtime.ahead import Choices, specialization


def planned(module: ast.Module, op: host.Op, choices: Choices) -> tuple[plan.Plan, sizing.Sizes | None]:
    """The plan of `op` with the gradients of everything that has one, and its chunks where all sizes are known.

    Raises ArgumentError for a choice that does not fit the signature.
    """
    signature = signature_of(op.header, Diagnostics())
    example = example_sizes(op.header)
    spec = specialization(signature, choices, example)
    floats = frozenset(
        p.name
        for p in signature.params
        if isinstance(p, TensorParam)
        and (not p.optional or p.name in spec.present)
        and (DTYPES[p.dtype] if p.dtype in DTYPES else spec.dtypes[p.dtype]).kind == "float"
    )
    source = source_of(module)
    program = elaborate_op(source, op.name, HostSpecialization(spec.consts, spec.present, floats))
    wanted = floats & program.gradients.keys()
    if wanted != floats:  # conditions ask what is wanted
        program = elaborate_op(source, op.name, HostSpecialization(spec.consts, spec.present, wanted))
    found = lower(program, spec.dtypes, wanted, "param")
    dims = {**example, **choices.dims, **{n: v for n, v in spec.consts.items() if type(v) is int}}
    if any(d not in dims for d in signature.dims):
        return found, None
    sizes = sizing.sizes(found, dims, sizing.DEFAULT_MB * 2**20, "auto")
    return (found if sizes.accumulate == "param" else lower(program, spec.dtypes, wanted, "f32")), sizes


def text(module: ast.Module, op: host.Op, choices: Choices) -> str:
    """The plan as text, headed by the chunks that a budget of the default size gives."""
    p, sizes = planned(module, op, choices)
    if sizes is None or not sizes.chunks:
        return plan_text(p)
    dims = {**example_sizes(op.header), **choices.dims}
    at = ", ".join(f"{d} = {dims[d]}" for d in sorted({loop.dim for loop in sizing.loops(p)}))
    rows = ", ".join(f"{c} of {n} rows" for c, n in sizes.chunks.items())
    return f"# {at}, {sizing.DEFAULT_MB:g} MiB: {rows}\n{plan_text(p)}"
