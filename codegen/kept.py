"""Which loads are to stay in L2, since programs far on read the same again when much else has streamed by?

Programs run about in the order of their rows. A row index that a load does not have, with one that it has varying
faster, brings it back to the same elements a sweep of the faster indices later: `cos[s, d]` under `parallel b, s` for
every b, when all that is loaded and stored for one b has passed the caches. Where every row reads the same (a weight
`w[n]`), or only neighbouring rows do, it is in the caches anyway. In a flat kernel the fastest index runs along what
would be a row's tile, and is a row index only where it stands for several.

Extents of parallel indices are known when a kernel runs, so neither the size of a table nor that of the sweep is: what
is told from the text is the share that a row has of either. A sweep that is known to be short, a table known to be
large, single elements of a row and what is overwritten are not kept. A load that gathers its whole row (`cos[p, d]`
with p a position) is read again as the data has it, and its table may be of any size: it has to be narrower still.
"""

from __future__ import annotations

from math import prod

from kgen.codegen import ladders
from kgen.codegen.layout import tile_bytes
from kgen.codegen.schedule import Sums
from kgen.dsl import ir
from kgen.dsl.affine import Poly


def kept(kernel: ir.Kernel, sums: Sums | None) -> frozenset[str]:
    """The loads of `kernel`, in normal form, that are to stay in L2, by name. `sums`: how its sums are spread."""
    return _Kept(kernel, sums).names()


class _Kept:
    def __init__(self, kernel: ir.Kernel, sums: Sums | None) -> None:
        self.kernel = kernel
        self.indices = {a.name for a in kernel.axes}
        order = list(kernel.parallel)
        if sums is not None:
            # A program has one point of the slower ones; a flat one meets what it reads again in its own loop.
            order = [*sums.block_axes(kernel), *sums.over_axes(kernel)] if kernel.tiles else []
        self.rows = order if kernel.tiles or (order and order[-1].merged) else order[:-1]
        self.inner = {a.name for a in kernel.tiles or order[-1:]}

    def names(self) -> frozenset[str]:
        """The loads, by name: all that come into question, if what rows have of them is little."""
        streamed = self._streamed()
        share: dict[str, int] = {}
        for s in self.kernel.body:
            if isinstance(s, ir.Let) and isinstance(s.value, ir.Load):
                least = self._least_share(s.value, streamed)
                if least:
                    share[s.name] = least * self._bytes(s.value.tensor, s.value.axes)
        return frozenset(share) if sum(share.values()) <= streamed else frozenset()

    def _streamed(self) -> int:
        """Bytes of a row that no other row has: in a flat kernel, of one of its elements."""
        rows = {a.name for a in self.rows}
        moved: dict[tuple[str, str, bool], int] = {}
        for e in ir.accesses(self.kernel.body):
            axes = e.axes if isinstance(e, ir.Load) else self._own(e.at)
            if rows <= axes and not isinstance(e, ir.Accumulate):
                moved[e.tensor, str(e.at), isinstance(e, ir.Load)] = self._bytes(e.tensor, axes)
        return sum(moved.values())

    def _least_share(self, e: ir.Load, streamed: int) -> int:
        """How many times the bytes of `e` a row must stream for it to be kept; 0 where it is not."""
        own = self._own(e.at)
        if self.kernel.tensor(e.tensor).role != "in" or not own & self.inner or self._large(e.tensor):
            return 0
        rows = {a.name for a in self.rows}
        looked_up = frozenset[str]().union(*(s.axes for s in e.at if not isinstance(s, Poly)))
        if looked_up:
            found = bool(looked_up & rows) and not own & rows and not looked_up & self.inner
            return ladders.KEPT_GATHERED_SHARE if found else 0
        return ladders.KEPT_SHARE if self._again(own, streamed) else 0

    def _again(self, own: frozenset[str], streamed: int) -> bool:
        """Whether rows far on read elements with the indices `own` again, as far as is known."""
        for i in range(len(self.rows) - 1):
            faster = self.rows[i + 1 :]
            if self.rows[i].name not in own and faster[0].name in own:
                sweep = prod((a.extent for a in faster), start=Poly.const(streamed))
                if not sweep.is_constant or sweep.constant > ladders.KEPT_BEYOND:
                    return True
        return False

    def _large(self, tensor: str) -> bool:
        """Whether the tensor is known not to fit beside what streams by."""
        t = self.kernel.tensor(tensor)
        size = prod(t.shape, start=Poly.const(t.dtype.itemsize))
        return size.is_constant and size.constant > ladders.KEPT_LARGEST

    def _own(self, at: tuple[Poly | ir.Expr, ...]) -> frozenset[str]:
        """The indices that say where an element is without a value being looked up."""
        return ir.subscript_symbols(at) & self.indices

    def _bytes(self, tensor: str, axes: frozenset[str]) -> int:
        """Bytes of what a row has of an access with these indices; nothing of what a flat kernel has one of a row."""
        t = self.kernel.tensor(tensor)
        if not self.kernel.tiles:
            return t.dtype.itemsize if axes & self.inner else 0
        return tile_bytes(t, axes, {a.name: a.extent.constant for a in self.kernel.tiles})
