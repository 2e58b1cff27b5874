"""Reductions: how is a block folded along some of its dimensions, at once or chunk by chunk?

A looped reduction keeps one partial result a lane and folds the lanes once, after the loop; all partial results start
at the identity. The order of combination is fixed by the shape of the block, so the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.codegen.online import largest
from kgen.codegen.schedule import Finish, Partial
from kgen.codegen.triton.blocks import Blocks, Value, align
from kgen.codegen.triton.intrinsics import TYPES, identity, spell
from kgen.codegen.triton.text import Text, binary, call, literal, method
from kgen.dsl import ir
from kgen.dsl.dtypes import BOOL, I32

_HELPER = {"prod": "_prod", "max": "_maximum", "min": "_minimum", "argmax": "_argmax", "argmin": "_argmin"}


def reduced(e: ir.Reduce, arg: Value, blocks: Blocks, position: Text | None) -> Value:
    """`arg` folded over `e.over`. `position`, of the shape of `arg`, is the index along an argmax or argmin."""
    out, dims = arg.text, arg.dims
    if e.kind in ("any", "all"):
        out = method(out, "to", "tl.int32") if e.arg.dtype == BOOL else out
    for axis in sorted((dims.index(a) for a in e.over), reverse=True):
        out = _fold(e, out, axis, position)
        dims = dims[:axis] + dims[axis + 1 :]
    if e.kind in ("any", "all"):
        out = binary("!=", out, literal(0))
    elif e.kind in ("argmax", "argmin"):
        out = method(Text(f"{out}[1]"), "to", "tl.int64")
    return Value(out, dims)


def finished(e: Finish, arg: Value) -> Value:
    """The partial results `arg`, one a thread, folded."""
    return Value(_fold(e, arg.text, 0, None), ())


def _fold(e: ir.Reduce, arg: Text, axis: int, position: Text | None) -> Text:
    if e.kind == "sum":
        return call("tl.sum", arg, axis=str(axis))
    if e.kind in ("any", "all"):
        return call("tl.max" if e.kind == "any" else "tl.min", arg, axis=str(axis))
    if e.kind in ("argmax", "argmin"):
        return call("tl.reduce", f"({arg}, {position})", str(axis), _HELPER[e.kind])
    if e.kind in ("max", "min") and e.dtype.kind != "float":
        return call(f"tl.{e.kind}", arg, axis=str(axis))
    return call("tl.reduce", arg, str(axis), _HELPER[e.kind])


def masked(e: ir.Reduce, arg: Value, condition: Text | None) -> Value:
    """`arg` with the lanes outside `condition` (of the shape of `arg`, or None) replaced by the identity."""
    if condition is None:
        return arg
    neutral = literal(identity(e.kind, e.arg.dtype))
    return Value(call("tl.where", condition, arg.text, neutral), arg.dims)


@dataclass(frozen=True)
class Accumulator:
    """The partial results of one looped reduction: a block `name` of `dims`, and `position` beside it for argmax."""

    e: ir.Reduce
    name: str
    position: str | None
    dims: tuple[str, ...]

    def start(self, blocks: Blocks) -> list[str]:
        """The statements before the loop."""
        shape = blocks.shape(self.dims)
        kind, dtype = self.e.kind, self.e.arg.dtype
        held = I32 if kind in ("any", "all") else dtype
        neutral = literal(_neutral(self.e))
        out = [f"{self.name} = {call('tl.full', shape, neutral, TYPES[held.name])}"]
        if self.position is not None:
            out.append(f"{self.position} = {call('tl.full', shape, str(2**31 - 1), 'tl.int32')}")
        return out

    def step(self, arg: Value, index: Value, blocks: Blocks) -> list[str]:
        """The statements that take in a chunk: `arg` with its masked lanes neutral, `index` along the looped axis."""
        text, have, kind = align(arg, self.dims), Text(self.name), self.e.kind
        if kind == "sum":
            return [f"{self.name} += {text}"]
        if kind == "prod":
            return [f"{self.name} *= {text}"]
        if kind in ("any", "all"):
            return [f"{self.name} {'|' if kind == 'any' else '&'}= {method(text, 'to', 'tl.int32')}"]
        if kind in ("argmax", "argmin"):
            where = align(index, self.dims)
            return [f"{self.name}, {self.position} = {call(_HELPER[kind], have, str(self.position), text, where)}"]
        function = _HELPER[kind] if self.e.dtype.kind == "float" else f"tl.{kind}imum"
        return [f"{self.name} = {call(function, have, text)}"]

    def finish(self, blocks: Blocks) -> Value:
        """The value after the loop."""
        position = None if self.position is None else Text(self.position)
        out, dims = Text(self.name), self.dims
        for axis in sorted((dims.index(a) for a in self.e.over), reverse=True):
            out = _fold(self.e, out, axis, position)
            dims = dims[:axis] + dims[axis + 1 :]
        if self.e.kind in ("any", "all"):
            out = binary("!=", out, literal(0))
        elif self.e.kind in ("argmax", "argmin"):
            out = method(Text(f"{out}[1]"), "to", "tl.int64")
        return Value(out, dims)


@dataclass(frozen=True)
class Running:
    """A partial reduction of a loop: for each thread what it has of all chunks so far, in the block `name`.

    A thread holds `lanes` consecutive elements of a chunk at a time, `slots` times: seen as a block of
    `[slots, threads, lanes]` it is folded along the first and last dimension without a word to other threads. For a sum
    of exponentials `against` is the block of the shifts that its terms were taken against so far.
    """

    e: Partial
    name: str
    against: str | None
    slots: int
    threads: int
    lanes: int

    def start(self) -> list[str]:
        """The statements before the loop."""
        dtype = self.e.dtype
        shape = f"[{self.threads}]"
        out = [f"{self.name} = {call('tl.full', shape, literal(_neutral(self.e)), TYPES[dtype.name])}"]
        if self.against is not None:
            lowest = call("tl.full", shape, literal(-largest(dtype)), TYPES[dtype.name])
            out.append(f"{self.against} = {lowest}  # what the sum so far is taken against")
        return out

    def view(self, arg: Text) -> Text:
        """The chunk `arg` as a block of `[slots, threads, lanes]`."""
        return call("tl.reshape", arg, f"[{self.slots}, {self.threads}, {self.lanes}]")

    def larger(self, chunk: Text) -> str:
        """The statement that takes the block `chunk` of `[slots, threads, lanes]` into a maximum."""
        return f"{self.name} = {call(_HELPER['max'], self.name, self._folded(chunk))}"

    def add_exponentials(self, chunk: Text, shift: Text, terms: str) -> list[str]:
        """The statements that add `exp(chunk - shift)`, which is called `terms`, to the sum."""
        dtype = self.e.dtype
        factor = spell("exp", [Text(f"{self.against} - {shift}")], dtype, dtype)
        return [
            f"{terms} = {spell('exp', [Text(f'{chunk} - {shift}[None, :, None]')], dtype, dtype)}",
            f"{self.name} *= {factor}  # the sum so far, against the maximum as it is now",
            f"{self.name} += {self._folded(Text(terms))}",
            f"{self.against} = {shift}",
        ]

    def _folded(self, block: Text) -> Text:
        return _fold(self.e, _fold(self.e, block, 2, None), 0, None)


def _neutral(e: ir.Reduce) -> float | int:
    value = identity(e.kind, e.arg.dtype)
    return int(value) if isinstance(value, bool) else value
