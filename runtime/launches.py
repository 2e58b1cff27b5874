"""The launches of a kernel in formulas: grids, shares of sums and workspaces, for someone who has no kgen.

What `kgen.codegen.abi` and `kgen.runtime.stages` compute for the sizes of one call, here in terms of the dimensions
that are not compiled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from kgen.codegen.names import fresh, taken_names
from kgen.codegen.program import Program, Stage
from kgen.codegen.schedule import Sums
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.runtime.ahead import Target

Spell = Callable[[Poly], str]


def known_dims(target: Target) -> dict[str, int]:
    """Sizes that are compiled in: dimensions of the variant and const integers."""
    consts = {n: int(v) for n, v in target.kernel.consts if isinstance(v, int) and not isinstance(v, bool)}
    return consts | dict(target.layout.variant.dims)


def derived_dims(target: Target) -> dict[str, Poly]:
    """Sizes of merged indices, in terms of the signature's dimensions that are not compiled in."""
    known = known_dims(target)
    out: dict[str, Poly] = {}
    for m in target.merges:
        out[m.dim] = m.extent.substitute(known | out)
    return out


def points(target: Target) -> Poly:
    """The number of rows: the product of the parallel extents, in dimensions that are not compiled in."""
    return _product(target, target.layout.kernel.parallel)


def _product(target: Target, axes: Iterable[ir.Axis]) -> Poly:
    extents = (a.extent.substitute(known_dims(target) | derived_dims(target)) for a in axes)
    return prod(extents, start=Poly.const(1))


@dataclass(frozen=True)
class Count:
    """`ceil(of / per)`."""

    of: Poly
    per: int = 1

    @property
    def constant(self) -> int | None:
        """The number, where it does not depend on a call."""
        return -(-self.of.constant // self.per) if self.of.is_constant else None

    def text(self, spell: Spell = str, ceil: str = "ceil({} / {})") -> str:
        """The number as an expression; `spell` writes a polynomial, `ceil` has places for dividend and divisor."""
        if self.constant is not None:
            return str(self.constant)
        return spell(self.of) if self.per == 1 else ceil.format(spell(self.of), self.per)


@dataclass(frozen=True)
class Share:
    """Among how many programs a sum is shared out: the run-time dimension `dim`.

    steps: the loop over all summed points has so many, and no more programs have work. blocks: programs that each share
    takes, for the elements that are kept. resident: programs that a multiprocessor holds at a time; where a program is
    a `cluster` of blocks, blocks.
    """

    dim: str
    steps: Count
    blocks: Count
    resident: int
    cluster: int = 1

    def text(self, multiprocessors: str, spell: Spell = str, ceil: str = "ceil({} / {})", floor: str = "//") -> str:
        """As many as fill the device: `max(1, min(8 * multiprocessors, ceil(M / 8)))`."""
        most = f"{self.resident} * {multiprocessors}"
        if self.cluster > 2 * self.resident:
            # A cluster lies in one part of the chip, and what is left there serves no other: of clusters of 4, 132
            # multiprocessors run 33 at a time or, on an H200 whose parts are cut otherwise, 30. A formula cannot ask
            # the driver, so it leaves an eighth: a share that had to wait would double the time of all.
            most = f"{self.resident} * (7 * {multiprocessors} {floor} 8)"
        if self.cluster > 1:
            most += f" {floor} {self.cluster}"
        if self.blocks.constant is None:
            most += f" {floor} max(1, {self.blocks.text(spell, ceil)})"
        elif self.blocks.constant > 1:
            most += f" {floor} {self.blocks.constant}"
        return f"max(1, min({most}, {self.steps.text(spell, ceil)}))"


@dataclass(frozen=True)
class Grid:
    """The number of blocks of a launch: `blocks`, times the shares where it makes partial sums."""

    blocks: Count
    split: str | None = None

    @property
    def constant(self) -> int | None:
        """The number, where it does not depend on a call."""
        return self.blocks.constant if self.split is None else None

    def text(self, spell: Spell = str, ceil: str = "ceil({} / {})", split: str | None = None) -> str:
        """The number as an expression; `split` is how the number of shares is spelled."""
        own = self.blocks.text(spell, ceil)
        if self.split is None:
            return own
        name = split or self.split
        if own == "1":
            return name
        many = self.blocks.constant is None and self.blocks.per == 1 and len(self.blocks.of.terms) > 1
        return f"{name} * ({own})" if many else f"{name} * {own}"


@dataclass(frozen=True)
class Workspace:
    """A contiguous tensor that the launches share; `zeroed`: it must be zero before the first."""

    tensor: ir.Tensor
    shape: tuple[Poly, ...]
    zeroed: bool

    @property
    def bytes(self) -> Poly:
        """Its size in bytes."""
        return prod(self.shape, start=Poly.const(self.tensor.dtype.itemsize))


def grid(target: Target, program: Program) -> Grid:
    """How many blocks a launch of `target` has: one for each program, or those of its cluster."""
    stage, cluster = program.stage, program.schedule.cluster
    sums = None if stage is None else stage.sums
    if stage is None or sums is None:
        programs = Count(points(target), program.schedule.rows)
    else:
        programs = _programs(target, program, stage, sums)
    blocks = Count(programs.of * Poly.const(cluster), programs.per) if cluster > 1 else programs  # of one row each
    return Grid(blocks, sums.dim if sums is not None and sums.split is not None else None)


def _programs(target: Target, program: Program, stage: Stage, sums: Sums) -> Count:
    if sums.columns:
        return Count(_product(target, sums.row_axes(stage.kernel)), program.schedule.rows)
    return Count(_product(target, sums.block_axes(stage.kernel)))


def shares(target: Target, program: Program) -> list[Share]:
    """The numbers that a caller chooses before the first launch, in order of the launches."""
    out: list[Share] = []
    for p in program.launches:
        sums = None if p.stage is None else p.stage.sums
        if p.stage is not None and sums is not None and sums.split is not None:
            over = _product(target, sums.over_axes(p.stage.kernel))
            steps = Count(over) if sums.columns else Count(over, p.schedule.rows)
            each = _programs(target, p, p.stage, sums)
            out.append(Share(sums.dim, steps, each, sums.blocks, p.schedule.cluster))
    return out


def device_word(target: Target) -> str:
    """What the formulas of `target` call the number of multiprocessors: no name of the kernel is called so."""
    return fresh("multiprocessors", taken_names(target.kernel) | taken_names(target.layout.kernel))


def multiprocessors(program: Program) -> int:
    """Those of the device that the schedules of a kernel with sums were chosen for."""
    return max(s.multiprocessors for s in _sums(program))


def _sums(program: Program) -> list[Sums]:
    """How the sums of each launch that makes some are spread."""
    return [p.stage.sums for p in program.launches if p.stage is not None and p.stage.sums is not None]


def workspaces(target: Target, program: Program) -> list[Workspace]:
    """What is allocated for a call, in the order of the arguments."""
    if program.stage is None:
        return []
    sizes: Mapping[str, Poly | int] = known_dims(target) | derived_dims(target)
    zeroed = {name for s in _sums(program) for name in s.zeroed}
    own = program.stage.kernel.tensors[len(target.layout.kernel.tensors) :]
    return [Workspace(t, tuple(p.substitute(sizes) for p in t.shape), t.name in zeroed) for t in own]
