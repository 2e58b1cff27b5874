"""Maxima and minima of 16-bit values that a thread holds packed: two at a time, as they lie in memory.

The maximum of what is loaded as f16 or bf16 is one of the values, so nothing is rounded: sm_80 has instructions that
take it of two pairs at once, where a value that is unpacked first takes two or three.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.codegen.cuda.context import Context, Holder
from kgen.codegen.cuda.expr import extreme
from kgen.codegen.cuda.reduce import Accumulator, define, for_each
from kgen.codegen.cuda.text import CExpr
from kgen.dsl import ir
from kgen.dsl.dtypes import BF16, F16

SINCE = 80  # compute capability
# Two infinities, as they lie in memory.
_IDENTITY = {
    ("max", F16): "0xfc00fc00",
    ("max", BF16): "0xff80ff80",
    ("min", F16): "0x7c007c00",
    ("min", BF16): "0x7f807f80",
}


@dataclass(frozen=True)
class Paired:
    """A reduction that takes packs: `values`, what is loaded in them, and `pair`, the variable of what the slots of a
    nest have at even and at odd places."""

    acc: Accumulator
    values: Holder
    pair: Holder

    @property
    def _kind(self) -> str:
        return self.acc.reduce.kind

    @property
    def _type(self) -> str:
        assert self.values.pack is not None  # as `paired` looked
        return self.values.pack.dtype.name

    def declare(self, ctx: Context) -> None:
        """In front of the nest."""
        assert self.values.pack is not None
        start = _IDENTITY[self._kind, self.values.pack.dtype]
        infinity = "-inf" if self._kind == "max" else "inf"
        ctx.lines.add(f"// {self.acc.holder.name}, two values at a time, from {infinity} on.")
        define(ctx, self.pair, CExpr(start, "unsigned"))

    def take(self, ctx: Context) -> str:
        """The statement that takes in the pack of a slot."""
        name = self.pair.name + "".join(f"[{ctx.slot(a)}]" for a in self.pair.slots)
        values = self.values.name + "".join(f"[{ctx.slot(a)}]" for a in self.values.slots)
        return f"{name} = {ctx.helper(f'{self._kind}_pair_{self._type}')}({name}, {values}.word);"

    def finish(self, ctx: Context) -> None:
        """Behind the nest: the reduction takes in what its slots have."""
        fn = "maximum" if self._kind == "max" else "minimum"
        acc = self.acc.holder

        def line(where: str) -> None:
            own = CExpr(f"{self._kind}_of_pair_{self._type}({self.pair.name}{where})", "float")
            both = extreme(fn, CExpr(f"{acc.name}{where}", acc.type), own, self.acc.dtype, ctx)
            ctx.lines.add(f"{acc.name}{where} = {both};")

        for_each(ctx, acc, line)


def paired(ctx: Context, let: ir.Let, acc: Accumulator, lane_axis: str | None) -> Paired | None:
    """How `let`, a reduction, takes the packs of `lane_axis` that its argument is loaded in; None where it takes its
    values one by one."""
    e = let.value
    assert isinstance(e, ir.Reduce)  # the caller looked
    if ctx.scheduled.capability < SINCE or e.kind not in ("max", "min") or lane_axis not in e.over:
        return None
    values = ctx.holders.get(e.arg.name) if isinstance(e.arg, ir.Ref) else None
    if values is None or values.pack is None or values.pack.dtype not in (F16, BF16) or values.in_range is not None:
        return None
    return Paired(acc, values, Holder(ctx.names.fresh(f"{acc.holder.name}_pair"), "unsigned", acc.holder.slots))
