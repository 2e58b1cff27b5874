"""Rows: what does a program have of one, what does it do with it, and along which indices are there chunks?

Facts of a kernel in normal form, which the choice of a schedule rests on whatever the backend is.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from kgen.codegen.layout import accesses, elements, held, tile_bytes
from kgen.codegen.normalize import statement_axes
from kgen.codegen.online import pair
from kgen.codegen.phases import phases
from kgen.codegen.schedule import Loop, Schedule, ScheduleError
from kgen.dsl import ir


def in_place(kernel: ir.Kernel) -> bool:
    """Whether a program stores along tile axes only to what it has read."""
    tiles = {a.name for a in kernel.tiles}
    stored = [a.tensor.role for a in accesses(kernel) if a.tensor.role != "in" and a.axes & tiles]
    return bool(stored) and all(role == "inout" for role in stored)


def exponentials(kernel: ir.Kernel) -> bool:
    """Whether a row's sum of exponentials and its maximum would be taken in one pass over chunks."""
    return any(pair(kernel, a.name) is not kernel for a in kernel.tiles)


def narrow_rows(kernel: ir.Kernel) -> bool:
    """Whether some of a row lies in memory in less than the 32 bits in which it is computed with."""
    loads = row_loads(kernel, kernel.body, {a.name for a in kernel.tiles}).values()
    return any(kernel.tensor(e.tensor).dtype.itemsize < 4 for e in loads)


def stores_exponentials(kernel: ir.Kernel) -> bool:
    """Whether what is stored along a row is computed by exponentials of its elements."""
    tiles = {a.name for a in kernel.tiles}
    values = {s.name: s.value for s in kernel.body if isinstance(s, ir.Let) and not isinstance(s.value, ir.Reduce)}
    pending = [s.value for s in kernel.body if not isinstance(s, ir.Let) and ir.target_symbols(s) & tiles]
    seen: set[str] = set()
    while pending:
        for e in ir.walk(pending.pop()):
            if isinstance(e, ir.Op) and e.fn in ("exp", "exp2") and e.axes & tiles:
                return True
            if isinstance(e, ir.Ref) and e.name in values and e.name not in seen:
                seen.add(e.name)
                pending.append(values[e.name])
    return False


def met(kernel: ir.Kernel) -> int:
    """How many times the threads of a row meet."""
    return sum(isinstance(s, ir.Let) and isinstance(s.value, ir.Reduce) for s in kernel.body)


def row_loads(kernel: ir.Kernel, body: Iterable[ir.Stmt], along: Set[str]) -> dict[str, ir.Load]:
    """The loads of `body` along some of the tile indices `along` that depend on every row index, by name, those too
    that look up where their row is: what a program has a tile of for each row, wherever in memory it lies."""
    rows = {a.name for a in kernel.parallel}
    loads = {s.name: s.value for s in body if isinstance(s, ir.Let) and isinstance(s.value, ir.Load)}
    return {n: e for n, e in loads.items() if rows <= e.axes and e.axes & along}


def own_loads(kernel: ir.Kernel, body: Iterable[ir.Stmt], along: Set[str]) -> dict[str, ir.Load]:
    """Those of `row_loads` whose subscripts alone say so: most often of what no two rows share. A row that is looked up
    may be that of many programs, for whom the caches are to do what they do; it is a program's to hold nevertheless."""
    rows = {a.name for a in kernel.parallel}
    symbols = {n: (e, ir.subscript_symbols(e.at)) for n, e in row_loads(kernel, body, along).items()}
    return {n: e for n, (e, named) in symbols.items() if rows <= named and named & along}


def stores_rows(kernel: ir.Kernel) -> int:
    """How many statements store along tile indices, or sum along them."""
    tiles = {a.name for a in kernel.tiles}
    return sum(bool(ir.target_symbols(s) & tiles) for s in kernel.body if not isinstance(s, ir.Let))


def read_once(kernel: ir.Kernel) -> bool:
    """Whether one pass over the chunks of a row is all that its elements are for: they need not be held for another."""
    chunks = tuple((a.name, 1) for a in kernel.tiles)
    if len(chunks) != 1 or kernel.tiles[0].extent.constant == 1:
        return False
    if stores_rows(kernel) or exponentials(kernel) or not legal(kernel, dict(chunks)):
        return False
    passes = [s for s in phases(kernel, Schedule(32, 1, chunks=chunks)) if isinstance(s, Loop)]
    return len(passes) == 1


def ordered(kernel: ir.Kernel, chunks: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """`chunks` as a `Schedule` has them."""
    return tuple((a.name, chunks[a.name]) for a in kernel.tiles if a.name in chunks)


def beside(kernel: ir.Kernel, axis: str, extents: dict[str, int]) -> int:
    """The most elements that stand beside one element of `axis` in a statement."""
    return max(
        (elements(axes - {axis}, extents) for axes in map(statement_axes, kernel.body) if axis in axes),
        default=1,
    )


def legal(kernel: ir.Kernel, chunks: dict[str, int]) -> bool:
    """Whether the tile indices that `chunks` names can be taken in chunks."""
    try:
        phases(kernel, Schedule(32, 1, chunks=ordered(kernel, chunks)))
    except ScheduleError:
        return False
    return True


def whole_row_bytes(kernel: ir.Kernel) -> int:
    """`row_bytes` of the tile axes as they are."""
    return row_bytes(kernel, held(kernel, Schedule(32, 1)))


def loaded_row_bytes(kernel: ir.Kernel) -> int:
    """Bytes that a program has of a row before the threads of the row meet: all that it loads of the row's own. Where
    they never meet, or that is less, `whole_row_bytes`."""
    return max(whole_row_bytes(kernel), own_row_bytes(kernel) if met(kernel) else 0)


def own_row_bytes(kernel: ir.Kernel) -> int:
    """Bytes of all that is loaded of a row which no other has."""
    tiles = held(kernel, Schedule(32, 1))
    loads = own_loads(kernel, kernel.body, tiles.keys()).values()
    return sum(tile_bytes(kernel.tensor(e.tensor), e.axes, tiles) for e in loads)


def row_bytes(kernel: ir.Kernel, extents: dict[str, int]) -> int:
    """Bytes of the tensor that has most in one row: of all its distinct accesses, for `extents` of the tile axes."""
    found: dict[str, dict[object, int]] = {}
    for access in accesses(kernel):
        size = tile_bytes(access.tensor, access.axes, extents)
        found.setdefault(access.tensor.name, {})[str(access.at)] = size
    return max((sum(sizes.values()) for sizes in found.values()), default=0)
