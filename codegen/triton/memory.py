"""Memory: where is an element, which lanes may touch it, and what is proved about its alignment?

An address is `pointer + row offset + offset inside the row`. The row offset is 64-bit and carries the proved alignment
as `tl.multiple_of`; the offset inside the row is 32-bit unless the variant is wide, and is contiguous where the
innermost stride is 1, in which case no multiplication by it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kgen.codegen.again import Again
from kgen.codegen.triton.arguments import Arguments
from kgen.codegen.triton.blocks import Blocks, Value, align, power_of_two_factor
from kgen.codegen.triton.index import Indices
from kgen.codegen.triton.intrinsics import TYPES, lowest, stored
from kgen.codegen.triton.text import ATOM, Text, binary, call, literal, method
from kgen.codegen.variant import Variant
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import DType

_LINE = 106  # columns, beside the four of the function's indentation


@dataclass
class _Offset:
    """A sum of subscripts times strides, in terms of the row (with a power of two that divides them) and inside it."""

    row: list[Value] = field(default_factory=list)
    inside: list[Value] = field(default_factory=list)
    multiple: int = 16
    gathers: list[Value] = field(default_factory=list)  # conditions under which gathered subscripts are in range


class Memory:
    """Prints loads and stores. `value` prints an expression; `masks` names the mask of each ragged block dimension."""

    def __init__(
        self,
        kernel: ir.Kernel,
        variant: Variant,
        blocks: Blocks,
        indices: Indices,
        args: Arguments,
        value: Callable[[ir.Expr], Value],
        masks: dict[str, str],
        fresh: Callable[[str], str],
    ) -> None:
        self.kernel, self.variant = kernel, variant
        self.blocks, self.indices = blocks, indices
        self.args, self.value, self.masks, self.fresh = args, value, masks, fresh
        self.rows: dict[tuple[str, str], str] = {}  # (tensor, address) to the name of a row pointer

    # -- masks ---------------------------------------------------------------------------------------------------
    def mask(self, dims: tuple[str, ...], only: frozenset[str] | None = None) -> Text | None:
        """The condition under which the lanes of a block of `dims` count; None if all do. `only` restricts it to some
        of the dimensions."""
        out: Text | None = None
        for k in dims:
            if self.blocks.dims[k].ragged and (only is None or k in only):
                term = align(Value(Text(self.masks[k]), (k,)), dims)
                out = term if out is None else binary("&", out, term)
        return out

    # -- statements ----------------------------------------------------------------------------------------------
    def load(
        self,
        name: str,
        e: ir.Load,
        other: float | int | bool | None,
        *,
        given_up_last: bool = False,
        widened: bool = True,
    ) -> tuple[list[str], tuple[str, ...]]:
        """The lines of `name = tl.load(...)`, `widened` to the compute type, and the dimensions of its block; masked
        lanes hold `other`, or anything if it is None. `given_up_last`: by the caches."""
        tensor = self.kernel.tensor(e.tensor)
        offset = self._offset(tensor, e.at)
        pointer = self._pointer(tensor, offset)
        condition = self.mask(pointer.dims)
        for g in offset.gathers:
            term = align(g, pointer.dims)
            condition = term if condition is None else binary("&", condition, term)
        keywords: dict[str, Text] = {}
        if condition is not None:
            keywords["mask"] = condition
            if offset.gathers:
                keywords["other"] = literal(_out_of_range(tensor.dtype))
            elif other is not None:
                keywords["other"] = literal(other)
        if given_up_last:
            keywords["eviction_policy"] = Text('"evict_last"')
        if isinstance(e, Again):
            # What loads do anyway; with it, the compiler does not take this one for the same as the one before.
            keywords["cache_modifier"] = Text('".ca"')
        suffix = self.widening(e) if widened else ""
        arguments = [str(pointer.text), *(f"{k}={v}" for k, v in keywords.items())]
        return _call_lines(f"{name} = tl.load(", arguments, f"){suffix}"), pointer.dims

    def widening(self, e: ir.Load) -> str:
        """What makes the compute type of what `e` loads: `.to(...)`, or nothing."""
        dtype = self.kernel.tensor(e.tensor).dtype
        return "" if dtype == dtype.compute else f".to({TYPES[dtype.compute.name]})"

    def store(self, s: ir.Store, *, streamed: bool = False) -> list[str]:
        """The lines of `tl.store(...)`, which rounds once to the tensor's type. `streamed`: what is stored is not read
        again, so that the caches may give it up first."""
        tensor = self.kernel.tensor(s.tensor)
        pointer = self._pointer(tensor, self._offset(tensor, s.at))
        text = align(self.value(s.value), pointer.dims)
        if not text.literal:
            text = stored(text, s.value.dtype, tensor.dtype)
        condition = self.mask(pointer.dims)
        arguments = [str(pointer.text), str(text), *([] if condition is None else [f"mask={condition}"])]
        if streamed:
            arguments.append('cache_modifier=".cs"')
        return _call_lines("tl.store(", arguments, ")")

    def store_element(self, s: ir.Store, axis: str, label: ir.Expr) -> list[str]:
        """The lines that store one element: that with `label`, an index or -1, which is none, for the subscript
        `axis`."""
        tensor, i = self.kernel.tensor(s.tensor), s.at.index(Poly.sym(axis))
        row = self._pointer(tensor, self._offset(tensor, (*s.at[:i], Poly.const(0), *s.at[i + 1 :])))
        index = self.value(label)
        place = self._sum([row, self._times(index, self.args.stride.get((tensor.name, i, 0)))])
        value = self.value(s.value).text
        text = value if value.literal else stored(value, s.value.dtype, tensor.dtype)
        there = binary(">=", index.text, literal(0))
        return _call_lines("tl.store(", [str(place.text), str(text), f"mask={there}"], ")")

    # -- addresses -----------------------------------------------------------------------------------------------
    def _pointer(self, tensor: ir.Tensor, offset: _Offset) -> Value:
        start = Value(Text(self.args.pointer[tensor.name]))
        if offset.row:
            row = self._aligned(self._sum(offset.row), tensor, offset.multiple)
            start = self._sum([start, row])
            if not offset.gathers and not self.blocks.flat and not self.blocks.looped & set(start.dims):
                start = self._row_pointer(tensor, start)
        return self._sum([start, *offset.inside])

    def _aligned(self, offset: Value, tensor: ir.Tensor, multiple: int) -> Value:
        """`offset`, of which `multiple` is a divisor, with the part of it that the tensor's alignment can use."""
        multiple = min(multiple, self.variant.tensor(tensor.name).align // tensor.dtype.itemsize)
        if multiple < 2 or len(offset.dims) > 1 or offset.text.strength == ATOM:
            return offset
        return Value(call("tl.multiple_of", offset.text, str(multiple)), offset.dims)

    def _row_pointer(self, tensor: ir.Tensor, start: Value) -> Value:
        """A name for the address of the program's rows of a tensor, the same wherever they are touched."""
        key = tensor.name, start.text.text
        if key not in self.rows:
            self.rows[key] = self.fresh(f"{tensor.name}_row")
        return Value(Text(self.rows[key]), start.dims)

    def _sum(self, terms: list[Value]) -> Value:
        have, out = terms[0].dims, terms[0].text
        for t in terms[1:]:
            union = self.blocks.order((*have, *t.dims))
            out = binary("+", align(Value(out, have), union), align(t, union))
            have = union
        return Value(out, have)

    def _offset(self, tensor: ir.Tensor, at: tuple[Poly | ir.Expr, ...]) -> _Offset:
        out = _Offset()
        for axis, s in enumerate(at):
            star = tensor.shape[0].as_symbol if tensor.star and axis == 0 else None
            rank = self.variant.star_rank(star) if star is not None else 1
            if not isinstance(s, Poly):
                index = self.value(s)
                if s.dtype.bits < 64:
                    index = Value(method(index.text, "to", "tl.int64"), index.dims)
                out.gathers.append(self._in_range(index, tensor.shape[axis], star if rank > 1 else None))
                self._gathered(out, tensor, axis, index, star, rank)
            elif rank > 1 and star is not None:
                self._gathered(out, tensor, axis, self.indices.code(s), star, rank)
            else:
                self._affine(out, tensor, axis, s)
        return out

    def _affine(self, out: _Offset, tensor: ir.Tensor, axis: int, s: Poly) -> None:
        if not s.terms:
            return
        stride = self.args.stride.get((tensor.name, axis, 0))
        row, inside = self.indices.split(s)
        if row.terms:
            out.row.append(self._times(self.indices.code(row), stride))
            # The proved alignment covers every stride but the innermost; that one is 1 or not used for vectors.
            factor = power_of_two_factor(row, self.variant)
            out.multiple = min(out.multiple, 16 if stride is not None and axis < len(tensor.shape) - 1 else factor)
        if inside.terms:
            term = self._times(self.indices.code(inside), stride)
            strided = stride is not None and axis < len(tensor.shape) - 1
            out.inside.append(self._aligned(term, tensor, 16) if strided else term)

    def _gathered(self, out: _Offset, tensor: ir.Tensor, axis: int, index: Value, star: str | None, rank: int) -> None:
        """A subscript that is a value, or the flattened index of a starred dimension that memory holds in parts."""
        if rank == 1 or star is None:
            stride = self.args.stride.get((tensor.name, axis, 0))
            out.row.append(self._times(index, stride))
            out.multiple = min(out.multiple, 16 if stride is not None and axis < len(tensor.shape) - 1 else 1)
            return
        sizes = [Text(self.args.part[star, i]) for i in range(rank)]
        for i in range(rank):
            part = index.text
            for j in range(rank - 1, i, -1):
                part = binary("//", part, sizes[j])
            if i > 0:
                part = binary("%", part, sizes[i])
            stride = self.args.stride.get((tensor.name, axis, i))
            out.row.append(self._times(Value(part, index.dims), stride))
            if stride is None:
                out.multiple = 1

    def _in_range(self, index: Value, extent: Poly, parts_of: str | None) -> Value:
        if parts_of is None:
            limit = self.indices.code(extent).text
        else:
            sizes = [v for (dim, _), v in self.args.part.items() if dim == parts_of]
            limit = Text(" * ".join(sizes), 7)
        low = binary(">=", index.text, literal(0))
        return Value(binary("&", low, binary("<", index.text, limit)), index.dims)

    @staticmethod
    def _times(index: Value, stride: str | None) -> Value:
        return index if stride is None else Value(binary("*", index.text, Text(stride)), index.dims)


def _call_lines(start: str, arguments: list[str], end: str) -> list[str]:
    """A call on one line, or with an argument a line where that would be long."""
    line = start + ", ".join(arguments) + end
    return [line] if len(line) <= _LINE else [start, *(f"    {a}," for a in arguments), end]


def _out_of_range(dtype: DType) -> float | int | bool:
    """What a gather reads where its subscript is out of range."""
    return float("nan") if dtype.kind == "float" else lowest(dtype)
