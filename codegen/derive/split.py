"""Which indices does a load divide (`x[n // 3]`), so that several of their values read one element?

Such an index of extent 3*N is written as two, `3*n + i` with `n in N` and a tile `i in 3`: what the gradient of x[n]
collects is then a sum over a tile. Nothing is done where the extent is no multiple of the divisor, or where a position
along the index is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Mod, Poly, Sym


@dataclass(frozen=True)
class Split:
    """`axes` of the kernel with divided ones split; `places` has each old index in terms of the new ones and `parts`
    their names."""

    axes: tuple[ir.Axis, ...]
    places: dict[str, Poly]
    parts: dict[str, tuple[str, ...]]


def split_axes(kernel: ir.Kernel) -> Split:
    """The indices of `kernel`, split where its loads divide one by a constant."""
    divisors: dict[str, set[int]] = {}
    positions: set[str] = set()
    for s in kernel.body:
        for e in ir.walk(s.value):
            if isinstance(e, ir.Reduce) and e.kind in ("argmax", "argmin"):
                positions.update(e.over)
            if isinstance(e, ir.Load):
                for name, den in (d for p in e.at if isinstance(p, Poly) for d in _divisions(p)):
                    divisors.setdefault(name, set()).add(den)
    names = {a.name for a in kernel.axes} | {t.name for t in kernel.tensors} | {s.name for s in kernel.scalars}
    names |= {*kernel.dims, *(s.name for s in kernel.body if isinstance(s, ir.Let))}
    axes: list[ir.Axis] = []
    places: dict[str, Poly] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for a in kernel.axes:
        axes.append(a)
        if a.name in positions or len(divisors.get(a.name, ())) != 1:
            continue
        (den,) = divisors[a.name]
        outer, rest = a.extent.divide_terms(Poly.const(den))
        if rest.terms or den < 2:
            continue
        inner = f"{a.name}_in"
        while inner in names:
            inner += "_"
        names.add(inner)
        axes[-1:] = [replace(a, extent=outer), ir.Axis(inner, Poly.const(den), "tile", a.span)]
        places[a.name] = Poly.sym(a.name) * den + Poly.sym(inner)
        parts[a.name] = (a.name, inner)
    return Split(tuple(axes), places, parts)


def _divisions(p: Poly) -> Iterator[tuple[str, int]]:
    """Each symbol that is divided by a constant in `p`, with the constant."""
    for mono, _ in p.terms:
        for atom in mono:
            if isinstance(atom, FloorDiv | Mod) and atom.den.is_constant and len(atom.num.terms) == 1:
                name = atom.num.as_symbol
                if name is not None and isinstance(atom.num.terms[0][0][0], Sym):
                    yield name, atom.den.constant
