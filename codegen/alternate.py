"""Passes over the same axis that follow one another, each in the direction opposite to the one before.

A pass that reads what the pass before has read finds in the caches what was read last. A cache that gives up what was
used longest ago, and is smaller than what all programs read, has nothing left for a pass that begins where the one
before began; one that begins where it ended finds as much as the cache holds.
"""

from __future__ import annotations

from dataclasses import replace

from kgen.codegen.schedule import Loop, Step
from kgen.dsl import ir


def alternated(kernel: ir.Kernel, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`steps`, where a pass that reads again runs down if the pass before ran up, and up if it ran down."""
    out: list[Step] = []
    down: dict[str, bool] = {}  # by axis: the direction of the last pass
    read: dict[str, set[str]] = {}  # by axis: tensors that were read in passes so far
    for step in steps:
        if isinstance(step, Loop):
            loads = {load.tensor for load in _loads(step)}
            again = loads & read.setdefault(step.axis, set())
            several = step.chunk < kernel.axis(step.axis).extent.constant
            if again and several and not down.get(step.axis, False) and _any_order(kernel, step):
                step = replace(step, down=True)
            down[step.axis] = step.down
            read[step.axis] |= loads
        out.append(step)
    return tuple(out)


def _loads(step: Loop) -> list[ir.Load]:
    """What is loaded chunk by chunk."""
    return [s.value for s in step.body if isinstance(s.value, ir.Load) and step.axis in s.value.axes]


def _any_order(kernel: ir.Kernel, step: Loop) -> bool:
    """Whether the chunks may be taken from the last to the first.

    Of equal values, argmax and argmin keep the first. What is overwritten must be read in the same chunk, and by the
    same subscripts: phases refuse only what a *later* chunk would miss.
    """
    if any(isinstance(s.value, ir.Reduce) and s.value.kind in ("argmax", "argmin") for s in step.body):
        return False
    inout = {t.name for t in kernel.tensors if t.role == "inout"}
    stored = [(s.tensor, s.at) for s in step.body if not isinstance(s, ir.Let) and s.tensor in inout]
    return all(load.at == at for load in _loads(step) for tensor, at in stored if tensor == load.tensor)
