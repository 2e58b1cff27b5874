"""What every tensor of a host program holds at a point of its elaboration, and what may be done with it there.

Two rules make a program mean the same whatever the number of chunks is, and read nothing that was not written:

* A tensor that a loop fills by chunks, changes by chunks or sums over chunks is whole behind the loop. Inside of it
  only the chunk at hand can be read of the first two, nothing of the third; and what is read whole in the loop is not
  written by it. Tensors that are made inside of a loop are anew in each iteration, and free of this.
* In a loop a value is `FIXED` (made of nothing that has chunks), made of `ROWS` (its shape has the chunk), or a `PART`
  of a sum over chunks: made of rows, and without their dimension. A part can only be added up.

The state changes statement by statement of the program (`State.apply`) and knows nothing of syntax. What must not be is
a `Fault`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from kgen.dsl.affine import Poly
from kgen.dsl.host import ir
from kgen.dsl.host.rows import Mixes, Rows
from kgen.dsl.source import Span

ONE_OR_THE_OTHER = "write += everywhere, or use a name for each"


class Fault(Exception):
    """Why a statement cannot stand where it stands: code, message, place, help and notes of the error."""

    def __init__(self, code: str, message: str, span: Span, help: str, notes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code, self.message, self.span, self.help, self.notes = code, message, span, help, notes


class Extent(Enum):
    """What a value in a loop is made of; outside of loops all are FIXED."""

    FIXED = "fixed"
    ROWS = "rows"
    PART = "part"


@dataclass
class _InLoop:
    """What the loop that is being elaborated has done so far with a tensor from outside of it."""

    read: bool = False  # as a whole
    peeked: bool = False  # by the chunk
    filled: bool = False  # by the chunk: stored, added to or changed in place
    summed: bool = False  # added to as a whole


@dataclass
class Holding:
    """The state of one tensor.

    loop: the chunk of the loop that makes it in each iteration, "" for what is made outside of loops. written: it
    holds a value, as a whole. summed: the value is a sum, which `+=` may go on with. extent: of the value, in the loop
    that made it. version: how often the value was changed; `changed`: through what name last, and where.
    """

    loop: str
    written: bool = False
    summed: bool = False
    extent: Extent = Extent.FIXED
    version: int = 0
    changed: tuple[str, Span] | None = None
    here: _InLoop = field(default_factory=_InLoop)


Saved = list[tuple[str, str, bool, bool, Extent, int, tuple[str, Span] | None]]  # by tensor all but what a loop does


class State:
    """The holdings of all tensors by name."""

    def __init__(self) -> None:
        self.holdings: dict[str, Holding] = {}
        self.loop = ""  # the chunk of the loop that is being elaborated
        self.index = ""  # and its index as it is written

    def save(self) -> Saved:
        """What is known between two statements that stand in no loop, for `restored`."""
        return [(n, h.loop, h.written, h.summed, h.extent, h.version, h.changed) for n, h in self.holdings.items()]

    @staticmethod
    def restored(saved: Saved) -> State:
        """A state like the one that was saved."""
        made = State()
        made.holdings = {
            n: Holding(loop, written, summed, extent, version, changed)
            for n, loop, written, summed, extent, version, changed in saved
        }
        return made

    def new(self, tensor: str, *, written: bool, inside: bool = True) -> None:
        """A tensor appears. `inside`: it belongs to the loop around, if there is one."""
        self.holdings[tensor] = Holding(self.loop if inside else "", written)

    def assume(self, tensor: str) -> None:
        """Take it for written after a mistake, so that one mistake is reported once."""
        self.holdings[tensor].written = True

    def written(self, tensor: str) -> bool:
        """Whether it holds a value as a whole."""
        return self.holdings[tensor].written

    def summed(self, tensor: str) -> bool:
        """Whether it is a sum."""
        return self.holdings[tensor].summed

    def touched(self, tensor: str) -> bool:
        """Whether anything is stored in it."""
        h = self.holdings[tensor]
        return h.written or h.here.filled or h.here.summed

    def outer(self, tensor: str) -> bool:
        """Whether it is from outside of the loop around."""
        return self.loop != "" and self.holdings[tensor].loop != self.loop

    # -- loops ---------------------------------------------------------------------------------------------------
    def enter(self, chunk: str, index: str) -> None:
        """A loop begins."""
        self.loop, self.index = chunk, index

    def leave(self) -> None:
        """The loop ends: what it filled or summed is whole, what it made is gone."""
        self.holdings = {n: h for n, h in self.holdings.items() if h.loop != self.loop}
        for h in self.holdings.values():
            h.written = h.written or h.here.filled or h.here.summed
            h.here = _InLoop()
        self.loop = self.index = ""

    # -- statements ----------------------------------------------------------------------------------------------
    def apply(self, s: ir.Stmt, *, floats: bool = True, rows: Rows | Mixes | None = None) -> None:
        """Go behind a statement, which is no loop. `floats`: what it stores is floating point. `rows`: what a kernel
        does with those of the chunk, if it is given any. Raises Fault; the state is then of no use for the tensors of
        the statement."""
        for v, how in ir.views(s):
            if how == "read" or (how == "update" and isinstance(s, ir.Launch)):
                self._read(v)
        match s:
            case ir.Launch():
                self._launch(s, rows)
            case ir.Product():
                made = self._product(s)
                self._add(s.target, made) if s.add else self._store(s.target, made)
            case ir.Sum():
                self._add(s.target, self.extent(s.source))
            case ir.Convert():
                if not floats:
                    self._no_part([s.source])
                self._store(s.target, self._made(s.target, [s.source]))
            case ir.AllReduce():
                if s.kind != "sum":
                    self._no_part([s.source])
                self._store(s.target, self._made(s.target, [s.source]))
            case ir.Loop():
                raise AssertionError("loops are entered and left")

    def _launch(self, s: ir.Launch, rows: Rows | Mixes | None) -> None:
        self._no_part([a for _, a in s.arguments if isinstance(a, ir.View)])
        if isinstance(rows, Mixes):
            raise Fault(
                "K0618",
                f"'{s.kernel}' {rows.reason}, and gets the rows of one chunk alone here",
                s.span,
                "call it on all rows before or after the loop, or let it sum over them with +=",
                (f"at {rows.span}",),
            )
        for name, v in s.arguments:
            if name in s.updated and isinstance(v, ir.View):
                self._update(v)
        for k, v in enumerate(s.results):
            part = rows is not None and k in rows.summed
            self._store(v, Extent.ROWS if self._has_chunk(v.shape) else Extent.PART if part else Extent.FIXED)

    def _product(self, s: ir.Product) -> Extent:
        """What a product is made of. It is linear, so that parts may be factors and summands."""
        found = self._made(s.target, [s.left, s.right])
        if self.loop and self.loop in s.left.shape[1].symbols:
            found = Extent.PART
        for v in (s.left, s.right):
            if self.loop and sum(self.loop in d.symbols for d in v.shape) > 1:
                raise Fault(
                    "K0618",
                    f"'{name_of(v)}' has a value for each pair of rows of one chunk: what is summed over them depends "
                    f"on how many chunks there are",
                    v.span,
                    f"use all rows on one side, as x[{self.index}] @ x.T does",
                )
        factors = [v for v in (s.left, s.right) if self.extent(v) is Extent.PART]
        if len(factors) == 2 or (factors and Extent.ROWS in (self.extent(s.left), self.extent(s.right))):
            self._no_part(factors)
        if s.plus is not None:
            plus = self.extent(s.plus)
            if found is Extent.PART and plus is not Extent.PART:
                raise Fault(
                    "K0618",
                    f"'{s.plus.span.text}' would be added for each chunk, so that the sum has it times their number",
                    s.plus.span,
                    "add it once, before or after the loop",
                )
            if found is not Extent.PART:
                self._no_part([s.plus])
        return found

    def _no_part(self, views: Sequence[ir.View]) -> None:
        for v in views:
            if self.extent(v) is Extent.PART:
                raise Fault(
                    "K0618",
                    f"'{name_of(v)}' is what this chunk adds to a sum: what is made of it depends on how many chunks "
                    f"there are",
                    v.span,
                    "add it up first, as in total += ..., and use the sum after the loop",
                )

    # -- what values are made of ---------------------------------------------------------------------------------
    def extent(self, v: ir.View) -> Extent:
        """What `v` is made of, in the loop around."""
        if self._has_chunk(v.shape):
            return Extent.ROWS
        h = self.holdings[v.tensor]
        return h.extent if self.loop and h.loop == self.loop else Extent.FIXED

    def _has_chunk(self, shape: Iterable[Poly]) -> bool:
        return self.loop != "" and any(self.loop in d.symbols for d in shape)

    def _made(self, target: ir.View, operands: Sequence[ir.View]) -> Extent:
        """What a value of the shape of `target` is made of, that is computed from `operands`."""
        if self._has_chunk(target.shape):
            return Extent.ROWS
        found = {self.extent(v) for v in operands}
        return Extent.FIXED if found <= {Extent.FIXED} else Extent.PART

    # -- what is done with a tensor ------------------------------------------------------------------------------
    def _sliced(self, v: ir.View) -> bool:
        return any(c == self.loop for _, c in v.chunks)

    def _read(self, v: ir.View) -> None:
        h, name = self.holdings[v.tensor], name_of(v)
        if h.here.summed:
            raise Fault("K0606", f"'{name}' is still being summed in this loop", v.span, "use the sum after the loop")
        if h.here.filled and not self._sliced(v):
            raise Fault(
                "K0606",
                f"'{name}' is filled or changed chunk by chunk in this loop, and read as a whole",
                v.span,
                f"read the chunk, as in {name}[{self.index}], or all of it after the loop",
            )
        if not h.written and not h.here.filled:
            raise unwritten(name, v.span)
        if self._sliced(v):
            h.here.peeked = True
        elif self.loop:
            h.here.read = True

    def _store(self, v: ir.View, extent: Extent) -> None:
        h, name = self.holdings[v.tensor], name_of(v)
        if h.summed:
            raise Fault("K0607", f"'{name}' is a sum and is also assigned", v.span, ONE_OR_THE_OTHER)
        if self._sliced(v):
            self._fill(v)
            return
        if self.outer(v.tensor):
            raise whole_in_loop(name, v.span, self.index)
        h.written, h.extent = True, extent

    def _update(self, v: ir.View) -> None:
        if self._sliced(v):
            self._fill(v)
        elif self.outer(v.tensor):
            name = name_of(v)
            raise Fault(
                "K0618",
                f"'{name}' is from outside of this loop, and changed as a whole for each chunk",
                v.span,
                f"change it before or after the loop, or one chunk of it: {name}[{self.index}]",
            )

    def _fill(self, v: ir.View) -> None:
        h, name = self.holdings[v.tensor], name_of(v)
        if self.outer(v.tensor) and (h.here.read or h.here.summed):
            raise Fault(
                "K0618",
                f"'{name}' is stored chunk by chunk in this loop, and {'summed' if h.here.summed else 'read'} as a "
                f"whole",
                v.span,
                "use a name for each, or two loops",
            )
        h.here.filled = True

    def _add(self, v: ir.View, extent: Extent) -> None:
        h, name = self.holdings[v.tensor], name_of(v)
        if self.touched(v.tensor) and not h.summed:
            raise Fault("K0607", f"'{name}' is assigned and also summed", v.span, ONE_OR_THE_OTHER)
        h.summed = True
        if self._sliced(v):
            self._fill(v)
        elif h.here.filled:
            raise Fault(
                "K0618", f"'{name}' is changed by chunks in this loop, and added to as a whole", v.span,
                "use a name for each",
            )  # fmt: skip
        elif self.outer(v.tensor):
            self._sum(v, extent)
        elif h.written and h.extent is not extent:
            raise Fault(
                "K0618",
                f"'{name}' would be a sum of what this chunk has and of what is the same for every chunk",
                v.span,
                "add up over the loop what each chunk has, and the rest after it",
            )
        else:
            h.written, h.extent = True, extent

    def _sum(self, v: ir.View, extent: Extent) -> None:
        h, name = self.holdings[v.tensor], name_of(v)
        if h.here.read or h.here.peeked:
            raise Fault("K0606", f"'{name}' is read in the loop that it is summed in", v.span,
                        "use the sum after the loop")  # fmt: skip
        if extent is not Extent.PART:
            raise Fault(
                "K0618",
                f"what is added to '{name}' is the same for every chunk, so that the sum is it times their number",
                v.span,
                "add it once, before or after the loop",
            )
        h.here.summed = True

    # -- names ---------------------------------------------------------------------------------------------------
    def change(self, v: ir.View) -> int:
        """What the tensor of `v` holds becomes another value; its version from now on."""
        h = self.holdings[v.tensor]
        h.version += 1
        h.changed = (name_of(v), v.span)
        return h.version


def name_of(v: ir.View) -> str:
    """What the program calls the tensor of `v` where it stands; of a value without a name the expression."""
    text = v.span.text
    return _name(text) or (text if len(text) < 40 else v.tensor)


@lru_cache(maxsize=1024)
def _name(text: str) -> str | None:
    found = re.fullmatch(r"(\w+)(\[\w+\])?(\.T)*", text)
    return found[1] if found else None


def unwritten(name: str, span: Span) -> Fault:
    """A name is used whose tensor holds nothing."""
    return Fault(
        "K0606",
        f"'{name}' is used before anything is stored in it",
        span,
        f"assign it first, or add to it with {name} += ...",
    )


def whole_in_loop(name: str, span: Span, index: str) -> Fault:
    """A name from outside of a loop is assigned as a whole in it."""
    return Fault(
        "K0618",
        f"'{name}' is from outside of this loop, and assigned as a whole for each chunk",
        span,
        f"store the chunk, {name}[{index}] = ..., add up what chunks have, {name} += ..., or take another name",
    )
