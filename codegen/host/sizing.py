"""How many rows does a chunk have, and in what dtype are sums over chunks held?

The budget is for what grows with a chunk: the buffers whose shape mentions it. Results, and sums held in f32, come on
top. Fewer, larger chunks cost less time: a matrix product fills the device from some 1024 rows on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from kgen.codegen.host import plan
from kgen.dsl.dtypes import F32

DEFAULT_MB = 512.0
# The most products that `auto` sums in a narrow dtype. Rounded after each of n equal ones, the sum is off by about
# sqrt(n / 2) roundings, as they average out: by two here, and no more however many chunks there are.
ROUNDINGS = 8
# Rows of a chunk are a multiple of what the tiles of a library's matrix product divide, or of what its instructions
# take, of the largest that leaves a last chunk of half the rows.
GRANULES = (128, 64, 32, 16, 8)


@dataclass(frozen=True)
class Sizes:
    """Rows of a chunk by the symbol of its loop, and how sums are held: `param` or `f32`."""

    chunks: dict[str, int]
    accumulate: str


def sizes(p: plan.Plan, dims: Mapping[str, int], budget: float, accumulate: str, rows: int | None = None) -> Sizes:
    """The chunks of every loop of `p`, a plan whose sums are held in their own dtype.

    budget: bytes for what grows with a chunk. accumulate: `param`, `f32`, or `auto`, which takes whichever of wider
    chunks and f32 sums needs less memory where there would be more than `ROUNDINGS` chunks. rows: fixes the chunks.
    """
    extra = sum(F32.itemsize * _elements(p.buffers[n], dims) for n in p.sums)
    chunks: dict[str, int] = {}
    wide = accumulate == "f32"
    for loop in loops(p):
        extent = dims[loop.dim]
        most = max(1, extent)
        limit = min(most, rows) if rows is not None else _fitting(p, loop, dims, most, budget)
        chunk = limit if rows is not None else even(extent, limit)
        if accumulate == "auto" and p.sums and _adds(p, loop) and -(-extent // chunk) > ROUNDINGS:
            larger = -(-extent // ROUNDINGS)
            more = chunk_bytes(p, loop, dims, larger) - chunk_bytes(p, loop, dims, chunk)
            if rows is None and more <= extra:
                chunk = larger
            else:
                wide = True
        chunks[loop.chunk] = chunk
    return Sizes(chunks, "f32" if wide else "param")


def even(extent: int, limit: int) -> int:
    """The rows of a chunk, at most `limit`, so that all but the last are equal and the last is not small."""
    if extent <= limit:
        return max(1, extent)
    count = -(-extent // limit)
    rows = -(-extent // count)
    for granule in GRANULES:
        rounded = -(-rows // granule) * granule
        if rounded <= limit and 2 * (extent - (count - 1) * rounded) >= rounded:
            return rounded
    return rows


def loops(p: plan.Plan) -> Iterator[plan.Loop]:
    """Every loop of both directions."""
    return (s for s in (*p.forward, *p.backward) if isinstance(s, plan.Loop))


def chunk_bytes(p: plan.Plan, loop: plan.Loop, dims: Mapping[str, int], rows: int) -> int:
    """Bytes of what grows with a chunk, for one of so many rows."""
    at = {**dims, loop.chunk: rows}
    return sum(b.dtype.itemsize * _elements(b, at) for b in grown(p, loop))


def grown(p: plan.Plan, loop: plan.Loop) -> Iterator[plan.Buffer]:
    """The buffers whose shape mentions the chunk of a loop."""
    return (b for b in p.buffers.values() if any(loop.chunk in d.symbols for d in b.shape))


def _fitting(p: plan.Plan, loop: plan.Loop, dims: Mapping[str, int], most: int, budget: float) -> int:
    """The most rows whose buffers fit the budget, 1 at least: shapes grow with the chunk, but not always in
    proportion."""
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chunk_bytes(p, loop, dims, middle) <= budget else (low, middle)
    return low


def _elements(b: plan.Buffer, dims: Mapping[str, int]) -> int:
    return prod(d.evaluate(dims) for d in b.shape)


def _adds(p: plan.Plan, loop: plan.Loop) -> bool:
    """Whether the loop adds to a sum in a narrow dtype."""
    return any(isinstance(s, plan.Matmul | plan.Add) and s.accumulate and s.out.buffer in p.sums for s in loop.body)
