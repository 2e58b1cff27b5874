"""Overwriting: whose elements do other threads of the program still have to read before they are overwritten?"""

from __future__ import annotations

from collections.abc import Mapping

from kgen.codegen.normalize import is_gather
from kgen.codegen.phases import refs
from kgen.dsl import ir
from kgen.dsl.affine import Poly


def barriers(kernel: ir.Kernel, digits: Mapping[str, int]) -> frozenset[str]:
    """The loads of `inout` tensors of `kernel`, in normal form, that need a barrier behind them before the tensor is
    stored to, by name.

    `digits` says along which thread digit each tile axis is spread (`kgen.codegen.layout.digits`). None is needed for
    a store that each thread makes of exactly the elements that it has loaded itself.
    """
    inout = {t.name for t in kernel.tensors if t.role == "inout"}
    stores = [s for s in kernel.body if not isinstance(s, ir.Let) and s.tensor in inout]
    return frozenset(
        s.name
        for s in kernel.body
        if isinstance(s, ir.Let) and isinstance(load := s.value, ir.Load) and load.tensor in inout
        if any(not _same_thread(kernel, digits, s, store) for store in stores if store.tensor == load.tensor)
    )


def _same_thread(kernel: ir.Kernel, digits: Mapping[str, int], let: ir.Let, store: ir.Store | ir.Accumulate) -> bool:
    load = let.value
    assert isinstance(load, ir.Load)  # the caller looked
    if not is_gather(load) and any(_never_equal(kernel, r, w) for r, w in zip(load.at, store.at, strict=True)):
        return True
    # Threads along a digit that no index of the element uses all load it, but one of them stores it.
    spread = {digits[a] for a in digits if a in load.axes} == set(digits.values())
    return spread and load.at == store.at and _depends(kernel, store, let.name)


def _never_equal(kernel: ir.Kernel, read: object, write: Poly) -> bool:
    """Whether the two subscripts lie in different ranges, as `d` and `d + 64` for `d` in 0 .. 63 do."""
    if not isinstance(read, Poly):
        return False
    r, w = _range(kernel, read), _range(kernel, write)
    return r is not None and w is not None and (r[1] < w[0] or w[1] < r[0])


def _range(kernel: ir.Kernel, p: Poly) -> tuple[int, int] | None:
    """The least and greatest value of `p`, if it is a constant-coefficient sum of tile indices."""
    low = high = p.constant
    for axis in p.symbols:
        slope = p.coefficient(axis)
        if slope is None or not slope.is_constant or axis not in {a.name for a in kernel.tiles}:
            return None
        reach = slope.constant * (kernel.axis(axis).extent.constant - 1)
        low, high = low + min(0, reach), high + max(0, reach)
    return low, high


def _depends(kernel: ir.Kernel, store: ir.Store | ir.Accumulate, name: str) -> bool:
    """Whether the value that `store` writes is made from `name`: then it comes after it, however threads are laid."""
    lets = {s.name: s for s in kernel.body if isinstance(s, ir.Let)}
    stack, seen = [*refs(store.value)], set[str]()
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack.extend(refs(lets[n].value))
    return name in seen
