"""All cases, with the bars: at most so many times a copy of the same bytes, on one H200."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from kgen.bench import gated, losses, norms, rotary
from kgen.bench.linear_rows import OP as LINEAR
from kgen.bench.linear_rows import LinearCase, linear_cases
from kgen.bench.measure import Case
from kgen.bench.work import BACKENDS, Make, Shape

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Listed:
    """One direction of an op: its shapes with the bars of each, cuda then triton."""

    op: str
    direction: str
    reads: int
    writes: int
    operations: int  # see `Case`
    make: Make
    shapes: dict[Shape, tuple[float, float]]
    small: Shape  # of a trial on a CPU

    def case(self, shape: Shape) -> Case:
        """At a shape; one that is not listed has no bars."""
        bars = dict(zip(BACKENDS, self.shapes[shape], strict=True)) if shape in self.shapes else {}
        return Case(self.op, self.direction, shape, self.reads, self.writes, self.operations, self.make, bars)


_GATED = {(8192, 14336): (1.02, 1.03)}
_ROPE = {(4, 4096, 32, 8, 128): (1.05, 1.08)}
_SMALL_ROW = (6, 96)

LISTED: tuple[Listed, ...] = (
    Listed(
        "rms_norm", FORWARD, 1, 1, 4, norms.rms_norm,
        {
            (16384, 1024): (1.06, 1.10), (16384, 4096): (1.03, 1.05), (8192, 8192): (1.03, 1.05),
            (4096, 16384): (1.03, 1.05), (2048, 65536): (1.05, 1.6),
        },
        _SMALL_ROW,
    ),
    Listed(
        "rms_norm", BACKWARD, 2, 1, 10, norms.rms_norm_backward,
        {
            (16384, 1024): (1.45, 1.6), (16384, 4096): (1.20, 1.30), (8192, 8192): (1.20, 1.30),
            (4096, 16384): (1.35, 1.8), (2048, 65536): (1.35, 1.8),
        },
        _SMALL_ROW,
    ),
    Listed("layer_norm", FORWARD, 1, 1, 7, norms.layer_norm, {(16384, 4096): (1.05, 1.08)}, _SMALL_ROW),
    Listed("add_rms_norm", FORWARD, 2, 2, 5, norms.add_rms_norm, {(16384, 4096): (1.05, 1.08)}, _SMALL_ROW),
    *(
        listed
        for gate in (gated.SWIGLU, gated.GEGLU, gated.GEGLU_TANH)
        for listed in (
            Listed(gate.kernel, FORWARD, 2, 1, gate.operations[0], partial(gated.gated, gate), _GATED, _SMALL_ROW),
            Listed(
                gate.kernel, BACKWARD, 3, 2, gate.operations[1], partial(gated.gated_backward, gate), _GATED, _SMALL_ROW
            ),
        )
    ),
    Listed("rope", FORWARD, 1, 1, 3, rotary.rope, _ROPE, (1, 4, 2, 1, 16)),
    Listed("rope", BACKWARD, 1, 1, 3, rotary.rope_backward, _ROPE, (1, 4, 2, 1, 16)),
    Listed("softmax", FORWARD, 1, 1, 5, losses.softmax, {(8192, 32000): (1.08, 1.15)}, (6, 125)),
    Listed(
        "cross_entropy", "in place", 1, 1, 6, losses.cross_entropy,
        {(8192, 32000): (1.15, 1.25), (8192, 50304): (1.45, 1.6), (4096, 128256): (1.40, 1.55)},
        (6, 125),
    ),
)  # fmt: skip

OPS: tuple[str, ...] = (*dict.fromkeys(listed.op for listed in LISTED), LINEAR)


def cases(
    ops: Iterable[str] = OPS, shapes: list[Shape] | None = None, *, small: bool = False
) -> list[Case | LinearCase]:
    """What there is of `ops`, in order of the list. `shapes` replace those of the list where they have as many sizes;
    `small`: one tiny shape each, without bars."""
    wanted = set(ops)
    out: list[Case | LinearCase] = []
    for listed in LISTED:
        if listed.op not in wanted:
            continue
        if small and shapes is None:
            out.append(replace(listed.case(listed.small), bars={}))
            continue
        rank = len(listed.small)
        out += [listed.case(s) for s in (listed.shapes if shapes is None else shapes) if len(s) == rank]
    return out + (linear_cases(shapes, trial=small) if LINEAR in wanted else [])
