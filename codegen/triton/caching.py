"""Which loads does the text mark as those that the caches are to give up last?

What programs far on read again (`kgen.codegen.kept`), and what a program's rows have to themselves. A program of Triton
cannot ask for the rows that come next, as one of CUDA does, and what it streams has to take the place of what the
device did before, of which the lines that were written go to memory first. Rows that are marked do not wait for that.

Times as multiples of a copy of the same bytes, with rows marked and, in brackets, without: RMSNorm of 16384x4096 0.98
(1.03), of 8192x8192 1.00 (1.04), of 4096x16384 1.02 (1.04), of 2048x65536 1.10 (1.16); of the sum with a residual,
16384x4096, 0.99 (1.04); softmax of 8192x32000 1.03 (1.09); the cross entropy of 8192x50304 in place 1.25 (1.26). With
rows marked as those to give up first, RMSNorm takes 1.04 to 1.10. Where a kernel reads what was just written, or its
output is read next, it and its neighbours take the same with as without.
"""

from __future__ import annotations

from kgen.codegen.rows import own_loads
from kgen.codegen.schedule import Scheduled
from kgen.dsl import ir


def given_up_last(scheduled: Scheduled) -> frozenset[str]:
    """The loads of `scheduled`, by name."""
    kernel, found = scheduled.kernel, scheduled.kept
    if scheduled.sums is None:
        found = found.union(own_loads(kernel, kernel.body, {a.name for a in kernel.tiles}))
    return found | _weights(kernel) if scheduled.held else found


def _weights(kernel: ir.Kernel) -> frozenset[str]:
    """The loads of tiles that all rows share."""
    rows, tiles = {a.name for a in kernel.parallel}, {a.name for a in kernel.tiles}
    loads = (s for s in kernel.body if isinstance(s, ir.Let) and isinstance(s.value, ir.Load))
    return frozenset(s.name for s in loads if s.value.axes & tiles and not s.value.axes & rows)
