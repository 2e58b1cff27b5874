"""How does the gradient of a tensor reach memory: which statements write each of its elements exactly once?

The adjoint of a load is a store with the load's subscripts, `+=` where they lack a parallel index. That is the answer
where those stores are proved to meet nowhere and to cover the tensor. Otherwise, in this order: one end of a dimension
that no load reads gets a zero; a load whose subscript is turned around (a rotation, a reversal) is evaluated at the
place where the element is used, as is one that is shifted (`where(v >= 1, g, 0)` of `n + 1`); a gather, or a subscript
without inverse, is compared with a tile index over the dimension: `where(v == t, g, 0)`. What is left is an error.

Loads along several indices of one extent are brought to one of them. A gradient stands for all values of its indices,
whatever these are called: where it has the chosen one already, the two change places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kgen.codegen.derive.adjoints import Write
from kgen.codegen.derive.codes import DeriveError, error
from kgen.codegen.derive.graph import Graph, Node
from kgen.dsl import ir
from kgen.dsl.affine import Mod, Poly
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.lexing import KEYWORDS
from kgen.dsl.proofs import prove_kernel
from kgen.dsl.source import Span

Subscript = Poly | Node
ZERO, ONE = Poly.const(0), Poly.const(1)


@dataclass(frozen=True)
class Part:
    """A gradient `value` that belongs to the elements `at` of a tensor, which `span` loads."""

    at: tuple[Subscript, ...]
    value: Node
    span: Span


class _NoStoresError(Exception):
    """The gradient of `part` cannot be stored."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.part = part


class Planner:
    """Finds the stores of one kernel's gradients; `axes` grows by the indices that they need."""

    def __init__(self, graph: Graph, kernel: ir.Kernel, axes: Sequence[ir.Axis], taken: set[str]) -> None:
        self.graph = graph
        self.kernel = kernel
        self.axes = {a.name: a for a in axes}
        self._taken = taken
        self._made: list[ir.Axis] = []

    @property
    def parallel(self) -> frozenset[str]:
        return frozenset(a.name for a in self.axes.values() if a.kind == "parallel")

    def plan(self, tensor: ir.Tensor, gradient: str, loads: Iterable[tuple[Node, Node]]) -> list[Write]:
        """The stores of `gradient`, the gradient of `tensor`, whose `loads` are given with what each receives.

        Raises DeriveError where there are none.
        """
        parts = [Part(load.at, value, load.span) for load, value in loads]
        target = replace(tensor, name=gradient, role="out", optional=False)
        found = self._direct(target, parts)
        try:
            # The second time every dimension has an index over all of it: what no load reads compares with none.
            for whole in (False, True):
                if found is None:
                    found = self._direct(target, self._turned(tensor, parts, whole=whole))
        except _NoStoresError as failure:
            raise self._cannot(target, tensor, parts, failure.part) from None
        if found is None:
            raise self._cannot(target, tensor, parts, parts[-1])
        return found

    def _cannot(self, target: ir.Tensor, tensor: ir.Tensor, parts: Sequence[Part], shown: Part) -> DeriveError:
        """The error for loads that have no stores, at one of them. What stands in the way is an index over programs:
        each would have to write to elements of others."""
        stores = self._stores(target, parts)
        label = "its subscripts name an element more than once, or meet another load's"
        help = f"give every load of '{tensor.name}' subscripts that tell its elements apart"
        if stores is not None and self._problems(target, stores) == {"K0406"}:
            label = "some elements are not named by it, and no program would store their gradient"
            spread = [
                a for a in self.axes.values() if a.kind == "parallel" and a.name in _axes_at(self.graph, shown.at)
            ]
            ways = [f"make '{a.name}' a tile index" for a in spread if a.extent not in tensor.shape]
            for a in spread:
                known = ir.Requirement(">=", a.extent, ZERO, shown.span)
                kernel = replace(self.kernel, requires=(*self.kernel.requires, known))
                if Planner(self.graph, kernel, list(self.axes.values()), self._taken)._direct(target, parts):
                    least = -a.extent.constant
                    ways.insert(0, f"add `require {a.extent + least} >= {least}`")
            help = ", or ".join(ways) or help
        return error(
            "K0505",
            f"the loads of '{tensor.name}' cannot be turned into stores of its gradient",
            shown.span,
            f"{help}, or ask for no gradient of it",
            label=label,
        )

    # -- stores with the subscripts of the loads -------------------------------------------------------------------
    def _direct(self, target: ir.Tensor, parts: Sequence[Part]) -> list[Write] | None:
        writes = self._stores(target, parts)
        if writes is None:
            return None
        problems = self._problems(target, writes)
        if not problems:
            return writes
        return self._filled(target, writes) if problems == {"K0406"} else None

    def _stores(self, target: ir.Tensor, parts: Sequence[Part]) -> list[Write] | None:
        """A store for each subscript, unproved; None where one is a value."""
        merged: dict[tuple[Poly, ...], Part] = {}
        for part in parts:
            at = tuple(s for s in part.at if isinstance(s, Poly))
            if len(at) < len(part.at):
                return None
            old = merged.get(at)
            merged[at] = part if old is None else replace(part, value=self.graph.add(old.value, part.value))
        summed = any(self.parallel - self._names(at) for at in merged)
        return [Write(target.name, at, p.value, summed, p.span) for at, p in merged.items()]

    def _filled(self, target: ir.Tensor, writes: list[Write]) -> list[Write] | None:
        """`writes` and a zero for the elements that none of them reaches, if those are one end of one dimension."""
        zero = self.graph.const(0.0, target.dtype.compute)
        for position, extent in enumerate(target.shape):
            subscripts = {w.at[position] for w in writes}
            # Side by side along this dimension, or all over the same part of it and side by side along others.
            used = sum(map(self._length, subscripts), ZERO)
            others = {(*w.at[:position], ZERO, *w.at[position + 1 :]) for w in writes}
            if len(others) > 1 and len(subscripts) > 1:
                continue
            axis, made = self._rest_axis(extent - used)
            for start in (used, ZERO):
                fills = []
                for at in sorted(others, key=str):
                    place = (*at[:position], Poly.sym(axis.name) + start, *at[position + 1 :])
                    fills.append(Write(target.name, place, zero, False, writes[0].span))
                summed = writes[0].summed or any(self.parallel - self._names(f.at) for f in fills)
                both = [replace(w, summed=summed) for w in (*writes, *fills)]
                if not self._problems(target, both):
                    return both
            if made:
                self._drop(axis)
        return None

    def _length(self, p: Poly) -> Poly:
        """How many places a one-to-one subscript names."""
        return math.prod((self.axes[n].extent for n in self._names((p,))), start=ONE)

    def _problems(self, target: ir.Tensor, writes: Iterable[Write]) -> set[str]:
        """The codes of what is not proved about these stores."""
        body: list[ir.Stmt] = []
        for w in writes:
            value = ir.Const(0.0, target.dtype.compute, w.span)
            over = tuple(n for n in self.axes if n in self.parallel - self._names(w.at))
            if w.summed:
                body.append(ir.Accumulate(w.tensor, w.at, value, over, w.span))
            else:
                body.append(ir.Store(w.tensor, w.at, value, w.span))
        inputs = tuple(t for t in self.kernel.tensors if t.role == "in")
        kernel = replace(self.kernel, tensors=(*inputs, target), axes=tuple(self.axes.values()), body=tuple(body))
        found = Diagnostics()
        prove_kernel(kernel, found)
        return {d.code for d in found.items}

    # -- loads turned around, or compared --------------------------------------------------------------------------
    def _turned(self, tensor: ir.Tensor, parts: Sequence[Part], *, whole: bool) -> list[Part]:
        """The same gradients at subscripts that are shared by all: one index for each dimension that needs one. With
        `whole` a dimension needs one where a part of it has no gradient."""
        kept: frozenset[str] = frozenset()
        for position, extent in enumerate(tensor.shape):
            first = parts[0].at[position]
            shared = isinstance(first, Poly) and all(p.at[position] == first for p in parts)
            if (
                shared
                and isinstance(first, Poly)
                and not self._names((first,)) & kept
                and self._alone(first, extent, whole)
            ):
                kept |= self._names((first,))
                continue
            parts = self._at_one_index(tensor, list(parts), position)
        return list(parts)

    def _alone(self, p: Poly, extent: Poly, whole: bool) -> bool:
        """Whether a subscript that all loads share names each place of its dimension at most once, or just once."""
        line = ir.Tensor("line", self.kernel.tensors[0].dtype, (extent,), "out", False, False, self.kernel.span)
        return self._problems(line, [Write("line", (p,), self.graph.index(p), True, line.span)]) <= (
            set() if whole else {"K0406"}
        )

    def _at_one_index(self, tensor: ir.Tensor, parts: list[Part], position: int) -> list[Part]:
        extent = tensor.shape[position]
        turned = [self._inverse(p, position, extent) for p in parts]
        chosen = self._index_for(parts, turned, position, extent)
        if chosen is None:
            raise _NoStoresError(parts[-1])
        here = Poly.sym(chosen)
        out = []
        for part, turn in zip(parts, turned, strict=True):
            self.graph.span = part.span
            if turn is None:
                at = (*part.at[:position], here, *part.at[position + 1 :])
                out.append(self._compared(tensor, part, position, at))
            else:
                out.append(self._moved(part, position, turn, chosen))
        return out

    def _index_for(
        self, parts: list[Part], turned: list[tuple[str, Poly] | None], position: int, extent: Poly
    ) -> str | None:
        """The index that all `parts` can have at this position: one that they have there, else one that they lack."""
        plain = [s.as_symbol for p in parts if isinstance(s := p.at[position], Poly)]
        spread = [t[0] for t in turned if t is not None and t[0] in self.parallel]
        own = [n for n in plain if n in self.axes and self.axes[n].extent == extent]
        others = [a.name for a in self.axes.values() if a.kind == "tile" and a.extent == extent]
        others = [n for n in others if all(n not in _axes_of(self.graph, p) for p in parts)]
        for name in dict.fromkeys((*spread, *own, *others)):
            if all(self._takes(p, t, name) for p, t in zip(parts, turned, strict=True)):
                return name
        return None if spread else self._new_axis(_index_name(extent), extent).name

    def _takes(self, part: Part, turn: tuple[str, Poly] | None, chosen: str) -> bool:
        """Whether `part` can have the index `chosen` at the place that `turn` tells of, or be compared with it."""
        free = _axes_of(self.graph, part) | self.parallel
        if turn is None:
            return chosen not in free
        # Every program has its gradient: an index over programs can only change places with one that is there.
        return chosen == turn[0] or chosen in free or turn[0] not in self.parallel

    def _moved(self, part: Part, position: int, turn: tuple[str, Poly], chosen: str) -> Part:
        """`part` with `chosen` at this position. Where it has that index already the two change places: a part stands
        for all values of its indices, whatever they are called."""
        graph = self.graph
        old, place = turn
        here = Poly.sym(chosen)
        env = {old: place.substitute({"?": here})}
        if chosen != old and chosen in _axes_of(graph, part) | self.parallel:
            env[chosen] = Poly.sym(old)
        at = [
            graph.fold(s.substitute(env)) if isinstance(s, Poly) else graph.at_index(s, env, self._spare)
            for s in part.at
        ]
        at[position] = here
        moved = replace(part, at=tuple(at), value=graph.at_index(part.value, env, self._spare))
        if chosen in self.parallel and old not in self.parallel and old not in _axes_at(graph, at):
            # What all programs added to one element is now along a tile.
            moved = replace(moved, value=graph.sum(moved.value, (old,)))
        return moved

    def _spare(self, extent: Poly, preferred: tuple[str, ...], avoided: frozenset[str]) -> str:
        """A tile index of this extent, none of those `avoided`; a new one where there is none."""
        for name in (*preferred, *self.axes):
            axis = self.axes.get(name)
            if axis is not None and axis.kind == "tile" and axis.extent == extent and name not in avoided:
                return name
        return self._new_axis(_index_name(extent), extent).name

    def _compared(self, tensor: ir.Tensor, part: Part, position: int, at: tuple[Subscript, ...]) -> Part:
        """A gather: the element that is not the one named by the subscript receives 0."""
        graph = self.graph
        sub = part.at[position]
        here = at[position]
        assert isinstance(here, Poly)
        shifted = self._shifted(part, position, at)
        if shifted is not None:
            return shifted
        node = graph.index(sub) if isinstance(sub, Poly) else sub
        kept = _axes_at(graph, at)
        if node.axes & self.parallel - kept:
            if isinstance(sub, Poly):
                raise _NoStoresError(part)
            index = min(node.axes & self.parallel - kept)
            raise error(
                "K0503",
                f"the gradient of '{tensor.name}' needs a scatter over programs",
                part.span,
                f"ask for no gradient of '{tensor.name}', or write its backward by hand",
                label=f"different values of parallel index '{index}' may read the same element",
            )
        zero = graph.const(0.0, part.value.dtype)
        value = graph.where(graph.compare("eq", graph.index(here), node), part.value, zero)
        lost = (node.axes - kept) - self.parallel
        return replace(part, at=at, value=graph.sum(value, lost))

    def _shifted(self, part: Part, position: int, at: tuple[Subscript, ...]) -> Part | None:
        """A subscript `c + n` or `c - n` with a tile index that no other has: the value at the place where the element
        is used, 0 where there is none, and summed over what else `c` has. None for any other subscript."""
        graph = self.graph
        sub, here = part.at[position], at[position]
        if not isinstance(sub, Poly):
            return None
        assert isinstance(here, Poly)
        lost = self._names((sub,)) - _axes_at(graph, at)
        found = [n for n in self.axes if n in lost and sub.coefficient(n) in (ONE, -ONE)]
        if not found or lost & self.parallel:
            return None
        name = min(found, key=lambda n: self.axes[n].extent.is_constant)  # a number is the shorter sum
        slope = sub.coefficient(name) or ONE
        start, count = sub.substitute({name: 0}), self.axes[name].extent
        low = start if slope == ONE else start - count + 1
        value = graph.at_index(part.value, {name: (here - start) * slope}, self._spare)
        zero = graph.const(0.0, value.dtype)
        if low + count != self.axes[here.as_symbol or ""].extent:
            value = graph.where(graph.compare("lt", graph.index(here), graph.index(low + count)), value, zero)
        if low != ZERO:
            value = graph.where(graph.compare("ge", graph.index(here), graph.index(low)), value, zero)
        return replace(part, at=at, value=graph.sum(value, lost - {name}))

    def _inverse(self, part: Part, position: int, extent: Poly) -> tuple[str, Poly] | None:
        """(a, p): the subscript is a one-to-one map of index `a` onto the dimension, and place `?` is a == p."""
        sub = part.at[position]
        if not isinstance(sub, Poly):
            return None
        names = self._names((sub,))
        if len(names) != 1:
            return None
        (name,) = names
        elsewhere = [s for i, s in enumerate(part.at) if i != position]
        if self.axes[name].extent != extent or name in _axes_at(self.graph, elsewhere):
            return None
        here = Poly.sym("?")
        atoms = [mono[0] for mono, c in sub.terms if len(mono) == 1 and c == 1]
        wraps = len(sub.terms) == 1 and len(atoms) == 1 and isinstance(atoms[0], Mod) and atoms[0].den == extent
        inside = atoms[0].num if wraps and isinstance(atoms[0], Mod) else sub
        slope = inside.coefficient(name)
        if slope not in (ONE, -ONE):
            return None
        start = inside.substitute({name: 0})
        back = (here - start) * slope
        if wraps:
            return name, back.mod(extent)
        return (name, back) if start == (ZERO if slope == ONE else extent - 1) else None

    # -- indices ---------------------------------------------------------------------------------------------------
    def _names(self, at: Iterable[Poly]) -> frozenset[str]:
        return frozenset(n for p in at for n in p.symbols if n in self.axes)

    def _new_axis(self, hint: str, extent: Poly) -> ir.Axis:
        name, n = hint, 1
        while name in self._taken or name in self.axes:
            n += 1
            name = f"{hint}_{n}"
        axis = ir.Axis(name, extent, "tile", self.kernel.span)
        self.axes[name] = axis
        self.graph.extents[name] = extent
        return axis

    def _rest_axis(self, extent: Poly) -> tuple[ir.Axis, bool]:
        """An index over what is left of a dimension, and whether it is new: gradients of a kind share one."""
        for a in self._made:
            if a.extent == extent and a.name in self.axes:
                return a, False
        self._made.append(self._new_axis("rest", extent))
        return self._made[-1], True

    def _drop(self, axis: ir.Axis) -> None:
        del self.axes[axis.name], self.graph.extents[axis.name]


def _index_name(extent: Poly) -> str:
    """A name for an index over a dimension: `v` for V."""
    name = extent.as_symbol or "i"
    return name.lower() if name.lower() not in (name, *KEYWORDS) else f"{name}_i"


def _axes_of(graph: Graph, part: Part) -> frozenset[str]:
    return part.value.axes | _axes_at(graph, part.at)


def _axes_at(graph: Graph, at: Iterable[Subscript]) -> frozenset[str]:
    return frozenset[str]().union(*(graph.names(s) if isinstance(s, Poly) else s.axes for s in at))
