"""The element of a row's label, which is stored behind the pass over the row."""

from __future__ import annotations

from kgen.codegen.cuda.context import Context, Holder
from kgen.codegen.cuda.expr import expression
from kgen.codegen.cuda.memory import element_at, narrowed
from kgen.codegen.cuda.text import compute_type
from kgen.codegen.schedule import Element
from kgen.dsl import ir


def emit_element(ctx: Context, step: Element) -> None:
    """The barrier behind the pass, then what a single thread computes and stores, if the row has a label."""
    ctx.lines.gap()
    ctx.lines.span = None
    ctx.lines.add("// The element of the label, which the pass has stored as any other.")
    ctx.barrier()
    ctx.prologue.add("#tid")
    label = expression(step.label, ctx)
    with ctx.block(f"if ({ctx.temporary('tid')} == 0 && {label} >= 0)"):
        for s in step.body:
            ctx.lines.comment(s.span)
            value = expression(s.value, ctx)
            if isinstance(s, ir.Let):
                type = compute_type(s.value.dtype)
                ctx.holders[s.name] = Holder(ctx.names[s.name], type)
                ctx.lines.add(f"const {type} {ctx.names[s.name]} = {value};")
            else:
                tensor = ctx.kernel.tensor(s.tensor)
                place = element_at(ctx, tensor, s.at, step.axis, label)
                ctx.lines.add(f"{place.element} = {narrowed(ctx, s.value, tensor.dtype)};")
