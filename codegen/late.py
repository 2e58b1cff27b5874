"""What is loaded only where it is needed, rather than held across reductions?

Normal form has loads first, so that all are under way at once. Weights, which every row reads, come from the caches:
they are soon there. A program of Triton that holds them in registers while its threads meet again and again has fewer
programs beside it. So what would be held across several reductions is loaded behind them, and what is computed of
weights alone goes with them, so that it makes no difference whether `1 + w[n]` has a name; across one reduction it
makes none either, and CUDA's text has a way of its own (`kgen.codegen.cuda.waiting`).
"""

from __future__ import annotations

from dataclasses import replace

from kgen.codegen.ladders import HELD_ACROSS
from kgen.codegen.phases import refs
from kgen.codegen.schedule import Loop, Step
from kgen.dsl import ir


def weights_late(kernel: ir.Kernel, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`steps` of `kernel`, weights, and what is computed of nothing else, in front of their first use where that is
    behind several reductions."""
    return tuple(step if isinstance(step, Loop) else replace(step, body=_late(kernel, step.body)) for step in steps)


def _late(kernel: ir.Kernel, body: tuple[ir.Stmt, ...]) -> tuple[ir.Stmt, ...]:
    loads = [s for s in body if isinstance(s, ir.Let) and _weights(kernel, s.value)]
    computed: list[ir.Let] = []
    for s in body:
        if isinstance(s, ir.Let) and not isinstance(s.value, ir.Load | ir.Reduce):
            used = refs(s.value)
            if used and used <= {t.name for t in (*loads, *computed)}:
                computed.append(s)
    out = list(body)
    for s in (*reversed(computed), *loads):  # users first
        at = out.index(s)
        use = next((i for i in range(at + 1, len(out)) if s.name in refs(out[i].value)), at)
        between = out[at + 1 : use]
        if sum(isinstance(t.value, ir.Reduce) for t in between) > HELD_ACROSS:
            out[at:use] = [*between, s]
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
