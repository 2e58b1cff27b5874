"""Index arithmetic: how are subscripts, extents and the program's own indices computed in the generated kernel?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kgen.codegen.triton.blocks import LANE, ROW, Blocks, Value, align
from kgen.codegen.triton.text import PRODUCT, SUM, Text, binary, call, method
from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Mod, Monomial, Poly, Sym


@dataclass(frozen=True)
class Definition:
    """`name = text`, printed only if something uses the name. `note` is a comment above it."""

    name: str
    text: str
    note: str = ""


class Indices:
    """Prints polynomials over the indices and dimensions of one kernel."""

    def __init__(self, kernel: ir.Kernel, blocks: Blocks, spelling: Callable[[str], str]) -> None:
        self.kernel = kernel
        self.blocks = blocks
        self.spelling = spelling
        self._axes = {a.name: a for a in kernel.axes}

    def code(self, p: Poly, wide: bool = False) -> Value:
        """`p` as Python, its operands broadcast against each other; `wide`: every product and sum is of 64 bits."""
        if not p.terms:
            return Value(Text("0", literal=True))
        dims = self.blocks.of(s for s in p.symbols if s in self._axes)
        out: Text | None = None
        for mono, c in sorted(p.terms, key=self._row_first):
            term = align(self._term(mono, abs(c), wide), dims)
            if out is None:
                out = Text(f"-{term.within(PRODUCT + 1)}", PRODUCT + 1) if c < 0 else term
            else:
                out = binary("-" if c < 0 else "+", out, term)
        assert out is not None
        if p.is_constant:
            out = Text(out.text, out.strength, literal=True)
        return Value(out, dims)

    def split(self, p: Poly) -> tuple[Poly, Poly]:
        """`p` as (over the whole block's rows, inside a row): terms with a tile index or the lanes of a vector stay
        inside, and constants with them."""
        inside = {a.name for a in self.kernel.tiles}
        if self.blocks.flat and self.kernel.parallel:
            inside.add(self.kernel.parallel[-1].name)
        row, rest = Poly.const(0), Poly.const(0)
        for mono, c in p.terms:
            term = Poly(((mono, c),))
            if not mono or term.symbols & inside:
                rest = rest + term
            else:
                row = row + term
        return (row + rest, Poly.const(0)) if rest.is_constant else (row, rest)

    def non_negative(self, p: Poly) -> bool:
        """Whether `p` is never negative, by the signs of its terms alone: indices and dimensions are not negative."""
        return all(c >= 0 and all(self._atom_non_negative(a) for a in mono) for mono, c in p.terms)

    def bound(self, p: Poly) -> int | None:
        """An upper bound of `abs(p)` where extents are compile-time constants; None otherwise."""
        total = 0
        for mono, c in p.terms:
            value = abs(c)
            for atom in mono:
                limit = self._atom_bound(atom)
                if limit is None:
                    return None
                value *= limit
            total += value
        return total

    def _atom_bound(self, atom: Sym | FloorDiv | Mod) -> int | None:
        if isinstance(atom, Sym):
            axis = self._axes.get(atom.name)
            return axis.extent.constant if axis is not None and axis.extent.is_constant else None
        if not atom.den.is_constant or atom.den.constant == 0:
            return None
        if isinstance(atom, Mod):
            return abs(atom.den.constant)
        limit = self.bound(atom.num)
        return None if limit is None else limit // abs(atom.den.constant) + 1

    def _atom_non_negative(self, atom: Sym | FloorDiv | Mod) -> bool:
        return isinstance(atom, Sym) or (self.non_negative(atom.num) and self.non_negative(atom.den))

    def _row_first(self, term: tuple[Monomial, int]) -> tuple[bool, bool, int]:
        """Sort key: positive terms first, rows before tiles, constants last."""
        mono, c = term
        tiles = {a.name for a in self.kernel.tiles}
        symbols = Poly(((mono, 1),)).symbols
        return (not mono, c < 0, 1 if symbols & tiles else 0)

    def _term(self, mono: Monomial, c: int, wide: bool) -> Value:
        dims = self.blocks.of(s for s in Poly(((mono, 1),)).symbols if s in self._axes)
        out: Text | None = Text(str(c), literal=True) if c != 1 or not mono else None
        for atom in mono:
            factor = align(self._atom(atom, wide), dims)
            out = factor if out is None else binary("*", out, factor)
        assert out is not None
        return Value(out, dims)

    def _atom(self, atom: Sym | FloorDiv | Mod, wide: bool) -> Value:
        if isinstance(atom, Sym):
            dims = self.blocks.of([atom.name]) if atom.name in self._axes else ()
            text = Text(self.spelling(atom.name))
            return Value(method(text, "to", "tl.int64") if wide else text, dims)
        num, den = self.code(atom.num, wide), self.code(atom.den, wide)
        dims = self.blocks.order((*num.dims, *den.dims))
        left, right = align(num, dims), align(den, dims)
        floor = isinstance(atom, FloorDiv)
        if self._atom_non_negative(atom):
            return Value(binary("//" if floor else "%", left, right), dims)
        return Value(call("_floordiv" if floor else "_mod", left, right), dims)


def program_indices(
    indices: Indices,
    spelling: Callable[[str], str],
    fresh: Callable[[str], str],
    start: Text,
    multiple: int,
    axes: tuple[ir.Axis, ...],
) -> tuple[list[Definition], str]:
    """How a program finds the parallel indices `axes`, and the name of the mask of its rows (empty where all count).

    `start`: the number of the program's block. `multiple`: a power of two that divides the innermost extent.
    """
    blocks = indices.blocks
    if not axes:
        return [], ""
    out: list[Definition] = []
    lanes = blocks.vector
    per_program = blocks.rows // lanes
    extents = [a.extent for a in axes]
    if lanes > 1:
        extents[-1] = extents[-1].floordiv(lanes)

    flat_index = spelling(axes[0].name) if len(axes) == 1 else fresh("v" if lanes > 1 else "p")
    if blocks.rows > 1:
        start = binary("+", binary("*", start, Text(str(per_program))), Text(f"tl.arange(0, {per_program})"))
    note = f"{per_program} vectors of {lanes} points a program" if lanes > 1 else ""
    out.append(Definition(flat_index, str(start), note))

    mask = ""
    if ROW in blocks.dims and blocks.dims[ROW].ragged:
        mask = fresh(f"mask_{flat_index}")
        count = product([indices.code(e).text for e in extents])
        note = ""
        if blocks.flat and len(axes) == 1 and multiple > 1 and not extents[0].is_constant:
            # An argument cannot carry the hint, a product can: masks are then known to be alike within a vector.
            count = binary("*", binary("//", count, Text(str(multiple))), Text(str(multiple)))
            note = f"the extent is a multiple of {multiple}; spelled out, it lets Triton use wide accesses"
        out.append(Definition(mask, f"{flat_index} < {count.within(SUM)}", note))
    if len(axes) > 1:
        out += divided(indices, spelling, flat_index, axes, extents, lanes)
    return out, mask


def divided(
    indices: Indices,
    spelling: Callable[[str], str],
    flat_index: str,
    axes: tuple[ir.Axis, ...],
    extents: list[Poly],
    lanes: int,
) -> list[Definition]:
    """The indices `axes` from the flattened one, the last fastest. `extents`: theirs, the last in vectors of
    `lanes`."""
    out: list[Definition] = []
    texts = [indices.code(e).text for e in extents]
    for i, a in enumerate(axes):
        value = Text(flat_index)
        if i + 1 < len(texts):
            value = binary("//", value, product(texts[i + 1 :]))
        if i > 0:
            value = binary("%", value, texts[i])
        if lanes > 1 and i + 1 == len(texts):
            vectors = align(Value(binary("*", value, Text(str(lanes))), (ROW,)), (ROW, LANE))
            value = binary("+", vectors, align(Value(Text(f"tl.arange(0, {lanes})"), (LANE,)), (ROW, LANE)))
        out.append(Definition(spelling(a.name), str(value)))
    return out


def product(factors: list[Text]) -> Text:
    out = factors[0]
    for f in factors[1:]:
        out = binary("*", out, f)
    return out
