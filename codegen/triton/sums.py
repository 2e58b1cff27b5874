"""A sum over programs in Triton: a program's share of the summed points, the loop over it, and the blocks of sums.

A block of sums has the dimensions of its target, and those of the rows that the program takes at a time, which are
folded once behind the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kgen.codegen.schedule import Scheduled, Sums
from kgen.codegen.triton.blocks import Blocks, Value, align
from kgen.codegen.triton.index import Definition, Indices, divided, product, program_indices
from kgen.codegen.triton.intrinsics import TYPES
from kgen.codegen.triton.text import Text, binary, call, literal, method
from kgen.dsl import ir

_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Share:
    """What a program of a sum does: `definitions` of its indices, those inside the loop too, and the loop's `header`
    over `variable`. `mask` names the mask of its rows, empty where every row counts."""

    definitions: list[Definition]
    header: str
    variable: str
    mask: str


def share(
    scheduled: Scheduled, sums: Sums, indices: Indices, spelling: Callable[[str], str], fresh: Callable[[str], str],
    multiple: int,
) -> Share:  # fmt: skip
    """How a program finds its share. `multiple`: a power of two that divides the innermost extent of the row index."""
    kernel, blocks = scheduled.kernel, indices.blocks
    wide = scheduled.variant.wide or not blocks.flat
    out: list[Definition] = []
    number, first, step = Text("tl.program_id(0)"), literal(0), literal(1)
    over, rows = sums.over_axes(kernel), sums.row_axes(kernel)
    apart = sums.block_axes(kernel)
    if sums.split is not None:
        first, step = Text(spelling(sums.split)), Text(spelling(sums.dim))
        own = number
        if sums.columns or apart:
            own = binary("%", number, step)
            number = binary("//", number, step)
        out.append(Definition(str(first), str(_wide(own, wide))))
    if apart:
        if len(apart) == 1:
            out.append(Definition(spelling(apart[0].name), str(_wide(number, wide))))
        else:
            block = fresh("block")
            out.append(Definition(block, str(_wide(number, wide))))
            out += divided(indices, spelling, block, apart, [a.extent for a in apart], 1)
    points = product([indices.code(a.extent).text for a in over])
    if sums.columns or blocks.rows == 1:
        point = spelling(over[0].name) if len(over) == 1 else fresh("q" if sums.columns else "p")
        variable = point
        if sums.down:
            variable = fresh(f"{point}_done")
            note = "from the last one back: what the launch before has read last is still in the cache"
            out.append(Definition(point, str(binary("-", binary("-", points, literal(1)), Text(variable))), note))
        if len(over) > 1:
            out += divided(indices, spelling, point, over, [a.extent for a in over], 1)
    else:
        variable = fresh("group")
        points = call("tl.cdiv", points, str(blocks.rows))
    mask = ""
    if sums.columns:
        found, mask = program_indices(indices, spelling, fresh, _wide(number, wide), multiple, rows)
        out += found
    elif blocks.rows > 1:
        found, mask = program_indices(indices, spelling, fresh, Text(variable), multiple, rows)
        out += found
    bounds = f"{first}, {points}, {step}" if sums.split is not None else str(points)
    # With loops over chunks inside, it is their loads that are in flight.
    stages = 1 if scheduled.schedule.chunks else scheduled.schedule.stages
    return Share(out, f"for {variable} in {loop_range(bounds, stages)}:", variable, mask)


def loop_range(bounds: str, stages: int) -> str:
    """The range of a loop of whose iterations `stages` have their loads in flight at once."""
    return f"range({bounds})" if stages == 1 else f"tl.range({bounds}, num_stages={stages})"


def _wide(index: Text, wide: bool) -> Text:
    return method(index, "to", "tl.int64") if wide else index


@dataclass(frozen=True)
class PartialSum:
    """The block `name` of the sums of one statement: of `dims`, of which `kept` are the target's."""

    s: ir.Accumulate
    name: str
    dims: tuple[str, ...]
    kept: tuple[str, ...]

    @staticmethod
    def of(s: ir.Accumulate, name: str, blocks: Blocks) -> PartialSum:
        """The sums of `s`, under `name`."""
        axes = ir.target_symbols(s)
        kept = blocks.of(a for a in axes if a in blocks.axes)
        return PartialSum(s, name, blocks.order((*kept, *blocks.of(s.over))), kept)

    def start(self, blocks: Blocks) -> str:
        """The statement in front of the loop."""
        return f"{self.name} = {call('tl.full', blocks.shape(self.dims), '0', TYPES[self.s.value.dtype.name])}"

    def step(self, value: Value, mask: Callable[[tuple[str, ...]], Text | None], blocks: Blocks) -> str:
        """The statement that adds the value of the program's current rows; `mask` says which of them exist."""
        rows = tuple(k for k in self.dims if k not in self.kept)
        condition = mask(rows)
        if condition is None:
            return f"{self.name} += {align(value, self.dims)}"
        where = align(Value(condition, rows), self.dims)
        return f"{self.name} += {call('tl.where', where, align(value, self.dims), literal(0))}"

    def finish(self) -> list[str]:
        """The statements behind the loop: rows folded."""
        out, dims = Text(self.name), self.dims
        for k in reversed(self.dims):
            if k not in self.kept:
                out = call("tl.sum", out, axis=str(dims.index(k)))
                dims = tuple(d for d in dims if d != k)
        return [f"{self.name} = {out}"] if dims != self.dims else []


def partition(definitions: Iterable[Definition], variable: str) -> tuple[list[Definition], list[Definition]]:
    """(definitions that do not change in the loop over `variable`, those that do), each in order."""
    changing = {variable}
    still: list[Definition] = []
    moving: list[Definition] = []
    for d in definitions:
        if changing & set(_WORD.findall(d.text)):
            changing.add(d.name)
            moving.append(d)
        else:
            still.append(d)
    return still, moving
