"""Sizes in generated Python that needs no kgen: how dimensions follow from shapes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kgen.codegen.names import Names
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.runtime.errors import ArgumentError

_NEGATED = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}


class Sizes:
    """The run-time dimensions `dims` of a signature; those in `known` are compiled in.

    `extra` are dimensions that are no part of the signature. `names` spells all of them, and the tensors.
    """

    def __init__(
        self, kernel: ir.Kernel, known: Mapping[str, int], dims: Sequence[str], names: Names, extra: Iterable[str] = ()
    ) -> None:
        self.kernel, self.known, self.dims, self.names = kernel, known, dims, names
        self.spelled: dict[str, Poly | int] = {d: Poly.sym(names[d]) for d in (*dims, *extra)}

    def text(self, p: Poly) -> str:
        """`p` as a Python expression."""
        return str(p.substitute(dict(self.known)).substitute(self.spelled)).replace("*", " * ")

    def bindings(self) -> list[str]:
        """Assignments of the dimensions, each from the first shape that tells it; `_rank` looks before that.

        Raises ArgumentError for a dimension that does not follow from the shapes.
        """
        bound: set[str] = set()
        out: list[str] = []
        ranked: set[str] = set()
        for linear in (False, True):
            for _ in self.dims:
                for t in self.kernel.tensors:
                    for axis, poly in enumerate(t.shape):
                        line = self._binding(t, axis, poly.substitute(dict(self.known)), bound, linear)
                        if line is None:
                            continue
                        if t.name not in ranked:
                            ranked.add(t.name)
                            name, star = self.names[t.name], ", star=True" if t.star else ""
                            out.append(f'_rank("{t.name}", {name}, {len(t.shape)}{star})')
                        out.append(line)
        missing = [d for d in self.dims if d not in bound]
        if missing:
            raise ArgumentError(
                f"{self.kernel.name}: {', '.join(missing)} does not follow from the shapes of its tensors, so no host "
                f"function can be written for it; give it a dimension of its own in one of them"
            )
        return out

    def _binding(self, t: ir.Tensor, axis: int, poly: Poly, bound: set[str], linear: bool) -> str | None:
        unknown = poly.symbols - bound
        if len(unknown) != 1:
            return None
        (dim,) = unknown
        name, rank = self.names[t.name], len(t.shape)
        if t.star and axis == 0:
            size = f"{name}.shape[:{1 - rank}].numel()" if rank > 1 else f"{name}.numel()"
        else:
            size = f"{name}.shape[{axis - rank if t.star else axis}]"
        if poly.as_symbol == dim:
            bound.add(dim)
            return f"{self.names[dim]} = {size}"
        factor = poly.coefficient(dim)
        if not linear or factor is None:
            return None
        bound.add(dim)
        rest = poly.substitute({dim: 0})
        over = size if rest == Poly.const(0) else f"({size} - ({self.text(rest)}))"
        return f"{self.names[dim]} = {over} // ({self.text(factor)})"

    def multiple(self, p: Poly, n: int) -> tuple[str, str]:
        """What refuses a `p` that is no multiple of `n`: (Python condition, sentence)."""
        text = self.text(p)
        return f"{text if text.isidentifier() else f'({text})'} % {n} != 0", f"{p} must be a multiple of {n}"

    def requirements(self) -> list[tuple[str, str]]:
        """What refuses sizes that the kernel's requirements exclude."""
        out: list[tuple[str, str]] = []
        for r in self.kernel.requires:
            left, right = r.left.substitute(dict(self.known)), r.right.substitute(dict(self.known))
            if not (left.is_constant and right.is_constant):
                condition = f"{self.text(left)} {_NEGATED[r.op]} {self.text(right)}"
                out.append((condition, f"{left} {r.op} {right} is required"))
        return out

    def one_device(self) -> list[tuple[str, str]]:
        """What refuses tensors on several devices."""
        if len(self.kernel.tensors) < 2:
            return []
        devices = ", ".join(f"{self.names[t.name]}.device" for t in self.kernel.tensors)
        return [(f"len({{{devices}}}) > 1", "all tensors must be on one device")]


def literal(value: float | int | bool) -> str:
    """A number in Python."""
    text = repr(value)
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


def tuple_text(items: Iterable[str]) -> str:
    """A tuple in Python."""
    items = list(items)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
