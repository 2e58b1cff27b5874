"""What is loaded only where it is needed, rather than held across reductions?

Normal form has loads first, so that all are under way at once. Weights, which every row reads, come from the caches:
they are soon there. A program of Triton that holds them in registers while its threads meet again and again has fewer
programs beside it. So what would be held across several reductions is loaded behind them; across one, it makes no
difference, and CUDA's text has a way of its own (`kgen.codegen.cuda.waiting`).
"""

from __future__ import annotations

from dataclasses import replace

from kgen.codegen.ladders import HELD_ACROSS
from kgen.codegen.phases import refs
from kgen.codegen.schedule import Loop, Step
from kgen.dsl import ir


def weights_late(kernel: ir.Kernel, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`steps` of `kernel`, weights in front of their first use where that is behind several reductions."""
    return tuple(step if isinstance(step, Loop) else replace(step, body=_late(kernel, step.body)) for step in steps)


def _late(kernel: ir.Kernel, body: tuple[ir.Stmt, ...]) -> tuple[ir.Stmt, ...]:
    out = list(body)
    for load in body:
        if not isinstance(load, ir.Let) or not _weights(kernel, load.value):
            continue
        at = out.index(load)
        use = next((i for i in range(at + 1, len(out)) if load.name in refs(out[i].value)), at)
        between = out[at + 1 : use]
        if sum(isinstance(s.value, ir.Reduce) for s in between) > HELD_ACROSS:
            out[at:use] = [*between, load]
    return tuple(out)


def _weights(kernel: ir.Kernel, e: ir.Expr) -> bool:
    """Whether `e` is a load of tiles that all rows read, and none writes."""
    tiles, rows = ({a.name for a in axes} for axes in (kernel.tiles, kernel.parallel))
    return (
        isinstance(e, ir.Load)
        and kernel.tensor(e.tensor).role == "in"
        and not refs(e)
        and bool(e.axes & tiles)
        and not e.axes & rows
    )
