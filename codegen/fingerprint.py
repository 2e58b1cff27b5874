"""Which kernel is this, whatever it and its names are called? A digest of the tile IR, for tables of measurements.

Kernels that differ in names, comments and layout of the source alone have one digest; any other change gives another.
Names become positions in order of declaration, so that neither the alphabet nor the order of their use counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Mod, Poly, Sym

_DIGITS = 20  # of 40: 80 bits, far more than tables have entries


def fingerprint(kernel: ir.Kernel) -> str:
    """The digest of `kernel`, specialised, in normal form or not: hexadecimal digits."""
    return hashlib.sha256("\n".join(_Writer(kernel).lines()).encode()).hexdigest()[:_DIGITS]


class _Writer:
    def __init__(self, kernel: ir.Kernel) -> None:
        self.kernel = kernel
        # Names of index arithmetic, of tensors, of scalars and of values are apart in the IR too.
        numbers = ((n, v) for n, v in kernel.consts if isinstance(v, int) and not isinstance(v, bool))
        self.sizes = {
            **{n: str(v) for n, v in numbers},
            **{n: f"d{i}" for i, n in enumerate(kernel.dims)},
            **{a.name: f"i{i}" for i, a in enumerate(kernel.axes)},
        }
        self.tensors = {t.name: f"t{i}" for i, t in enumerate(kernel.tensors)}
        self.scalars = {s.name: f"s{i}" for i, s in enumerate(kernel.scalars)}
        self.values: dict[str, str] = {}

    def lines(self) -> list[str]:
        kernel = self.kernel
        out = [
            f"tensor {t.role} {t.dtype} {'*' if t.star else ''}[{', '.join(map(self.poly, t.shape))}]"
            for t in kernel.tensors
        ]
        out += [f"scalar {s.dtype}" for s in kernel.scalars]
        out += [f"{a.kind} {self.poly(a.extent)}" for a in kernel.axes]
        out += sorted(f"require {self.poly(r.left)} {r.op} {self.poly(r.right)}" for r in kernel.requires)
        for s in kernel.body:
            out.append(self.statement(s))
        return out

    def statement(self, s: ir.Stmt) -> str:
        value = self.expression(s.value)
        if isinstance(s, ir.Let):
            self.values[s.name] = f"v{len(self.values)}"
            return f"let {value}"
        target = f"{self.tensors[s.tensor]}[{', '.join(map(self.poly, s.at))}]"
        if isinstance(s, ir.Store):
            return f"store {target} {value}"
        return f"sum {target} over {self.indices(s.over)} {value}"

    def indices(self, names: tuple[str, ...]) -> str:
        return " ".join(sorted(self.sizes[n] for n in names))

    def expression(self, e: ir.Expr) -> str:
        if isinstance(e, ir.Const):
            return f"({type(e.value).__name__} {e.value!r} {e.dtype})"
        if isinstance(e, ir.Scalar):
            return self.scalars[e.name]
        if isinstance(e, ir.IndexValue):
            return f"(index {self.poly(e.index)} {e.dtype})"
        if isinstance(e, ir.Ref):
            return self.values[e.name]
        if isinstance(e, ir.Load):
            at = ", ".join(self.poly(s) if isinstance(s, Poly) else self.expression(s) for s in e.at)
            return f"{self.tensors[e.tensor]}[{at}]"
        if isinstance(e, ir.Op):
            return f"({e.fn} {' '.join(map(self.expression, e.args))} {e.dtype})"
        if isinstance(e, ir.Cast):
            return f"(cast {e.to} {self.expression(e.arg)} {e.dtype})"
        return f"({e.kind} over {self.indices(e.over)} {self.expression(e.arg)} {e.dtype})"

    def poly(self, p: Poly) -> str:
        # Terms and factors are kept in the order of their names, which must not show.
        return poly_text(p, self.sizes)


def poly_text(p: Poly, names: Mapping[str, str]) -> str:
    """`p` with other names, in an order that depends on those alone."""

    def atom(a: Sym | FloorDiv | Mod) -> str:
        if isinstance(a, Sym):
            return names[a.name]
        sign = "//" if isinstance(a, FloorDiv) else "%"
        return f"({poly_text(a.num, names)} {sign} {poly_text(a.den, names)})"

    return " + ".join(sorted(" * ".join([str(c), *sorted(map(atom, mono))]) for mono, c in p.terms)) or "0"
