"""Exact integer index arithmetic: polynomials over dimensions and indices, with floor division and modulo.

A `Poly` is kept in canonical form, so two spellings of one subscript (`2*d + 1`, `1 + d + d`) are equal values, and
`(g*128 + i) // 128` folds where it provably may. Everything here is about meaning; how an index expression
is spelled in CUDA or Triton is the emitters' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd


@dataclass(frozen=True)
class Sym:
    """A dimension, an index or a compile-time integer, by name."""

    name: str

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:  # which terms are sorted by: that of a dataclass takes four times as long
        return f"Sym(name={self.name!r})"


@dataclass(frozen=True)
class FloorDiv:
    """`num // den`, floored as in Python, where it does not simplify to a polynomial."""

    num: Poly
    den: Poly

    def __str__(self) -> str:
        return f"{_operand(self.num)} // {_operand(self.den)}"


@dataclass(frozen=True)
class Mod:
    """`num % den` with the sign of `den`, as in Python, where it does not simplify."""

    num: Poly
    den: Poly

    def __str__(self) -> str:
        return f"{_operand(self.num)} % {_operand(self.den)}"


Atom = Sym | FloorDiv | Mod
Monomial = tuple[Atom, ...]  # a product of atoms, sorted; () is the constant term


def _operand(p: Poly) -> str:
    text = str(p)
    return text if p.is_constant or p.as_symbol is not None else f"({text})"


@dataclass(frozen=True)
class Poly:
    """A polynomial with integer coefficients. Build with `Poly.const`, `Poly.sym` and operators, not directly."""

    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def const(value: int) -> Poly:
        """The constant `value`."""
        return Poly((((), value),) if value else ())

    @staticmethod
    @lru_cache(maxsize=4096)
    def sym(name: str) -> Poly:
        """The dimension or index called `name`."""
        return Poly((((Sym(name),), 1),))

    @staticmethod
    def _of(terms: Mapping[Monomial, int]) -> Poly:
        kept = [(m, c) for m, c in terms.items() if c]
        if len(kept) > 1:
            kept.sort(key=lambda t: (-len(t[0]), str(t[0])))
        return Poly(tuple(kept))

    # -- queries -------------------------------------------------------------------------------------------------
    @property
    def is_constant(self) -> bool:
        return not self.terms or (len(self.terms) == 1 and self.terms[0][0] == ())

    @property
    def constant(self) -> int:
        """The constant term."""
        return dict(self.terms).get((), 0)

    @property
    def as_symbol(self) -> str | None:
        """The name, if the polynomial is exactly one dimension or index."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            atom = self.terms[0][0][0]
            return atom.name if isinstance(atom, Sym) else None
        return None

    @cached_property
    def symbols(self) -> frozenset[str]:
        """Every name that occurs, inside floor divisions and modulos too."""
        return frozenset(self._symbols())

    def _symbols(self) -> Iterator[str]:
        for mono, _ in self.terms:
            for atom in mono:
                if isinstance(atom, Sym):
                    yield atom.name
                else:
                    yield from atom.num._symbols()
                    yield from atom.den._symbols()

    def coefficient(self, name: str) -> Poly | None:
        """`a` where this is `a*name + b` with neither `a` nor `b` mentioning `name`; None if it is not of that form."""
        out: dict[Monomial, int] = {}
        for mono, c in self.terms:
            rest = tuple(a for a in mono if a != Sym(name))
            if len(mono) - len(rest) > 1 or any(name in _atom_symbols(a) for a in rest):
                return None
            if len(rest) != len(mono):
                out[rest] = out.get(rest, 0) + c
        return Poly._of(out)

    def evaluate(self, env: Mapping[str, int]) -> int:
        """The value with every name bound by `env`.

        Raises KeyError for a name that is not bound, ZeroDivisionError for a division by 0.
        """
        total = 0
        for mono, c in self.terms:
            value = c
            for atom in mono:
                if isinstance(atom, Sym):
                    value *= env[atom.name]
                elif isinstance(atom, FloorDiv):
                    value *= atom.num.evaluate(env) // atom.den.evaluate(env)
                else:
                    value *= atom.num.evaluate(env) % atom.den.evaluate(env)
            total += value
        return total

    def substitute(self, env: Mapping[str, Poly | int]) -> Poly:
        """This with names replaced; names that `env` lacks stay."""
        total = Poly.const(0)
        for mono, c in self.terms:
            value = Poly.const(c)
            for atom in mono:
                if isinstance(atom, Sym):
                    new = env.get(atom.name, Poly.sym(atom.name))
                    value = value * (Poly.const(new) if isinstance(new, int) else new)
                elif isinstance(atom, FloorDiv):
                    value = value * atom.num.substitute(env).floordiv(atom.den.substitute(env))
                else:
                    value = value * atom.num.substitute(env).mod(atom.den.substitute(env))
            total = total + value
        return total

    @property
    def divides_by_zero(self) -> bool:
        """Whether a floor division or modulo in it has the divisor 0."""
        divisions = [a for mono, _ in self.terms for a in mono if not isinstance(a, Sym)]
        return any(a.den == Poly.const(0) or a.num.divides_by_zero or a.den.divides_by_zero for a in divisions)

    # -- arithmetic ----------------------------------------------------------------------------------------------
    def __add__(self, other: Poly | int) -> Poly:
        other = _poly(other)
        if not self.terms or not other.terms:  # checking a file adds to nothing more often than to anything else
            return other if not self.terms else self
        out = dict(self.terms)
        for mono, c in other.terms:
            out[mono] = out.get(mono, 0) + c
        return Poly._of(out)

    def __neg__(self) -> Poly:
        return Poly(tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: Poly | int) -> Poly:
        return self + -_poly(other)

    def __mul__(self, other: Poly | int) -> Poly:
        other = _poly(other)
        for a, b in ((self, other), (other, self)):
            if len(a.terms) == 1 and a.terms[0][0] == ():  # a constant moves no term
                return b if a.terms[0][1] == 1 else Poly(tuple((m, a.terms[0][1] * c) for m, c in b.terms))
        out: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                mono = tuple(sorted(m1 + m2, key=str))
                out[mono] = out.get(mono, 0) + c1 * c2
        return Poly._of(out)

    def floordiv(self, den: Poly | int) -> Poly:
        """`self // den`: terms that are exact multiples of `den` leave the division, common factors cancel, and the
        rest stays an atom.

        A division by the constant 0 is left as an atom: it is an error of evaluation, not of construction.
        """
        whole, rest, den, _, _ = self._reduced(_poly(den))
        if den == Poly.const(1):
            return whole + rest
        if not rest.terms and den.terms:
            return whole
        if rest.is_constant and den.is_constant and den.constant:
            return whole + rest.constant // den.constant
        # (a // b + c) // d is (a + b*c) // (b*d) for d > 0.
        inner = [mono[0] for mono, c in rest.terms if len(mono) == 1 and c == 1 and isinstance(mono[0], FloorDiv)]
        if den.is_constant and den.constant > 0 and len(inner) == 1 and inner[0].den.is_constant:
            atom = inner[0]
            if rest == Poly((((atom,), 1),)) + rest.constant:
                return whole + (atom.num + atom.den * rest.constant).floordiv(atom.den * den)
        return whole + Poly((((FloorDiv(rest, den),), 1),))

    def mod(self, den: Poly | int) -> Poly:
        """`self % den`, with exact multiples of `den` dropped and common factors taken out."""
        _, rest, den, factor, left = self._reduced(_poly(den))
        if den == Poly.const(1):
            return left
        if not rest.terms and den.terms:
            return left
        if rest.is_constant and den.is_constant and den.constant:
            return factor * (rest.constant % den.constant) + left
        return factor * Poly((((Mod(rest, den),), 1),)) + left

    def _reduced(self, den: Poly) -> tuple[Poly, Poly, Poly, Poly, Poly]:
        """(whole, rest, den', factor, left) with `self // den == whole + rest // den'` and
        `self % den == factor * (rest % den') + left`."""
        zero, one = Poly.const(0), Poly.const(1)
        if den == one:
            return zero, self, den, one, zero
        whole, rest = self.divide_terms(den)
        if not rest.terms or not den.terms:
            return whole, rest, den, one, zero
        # (g*a + k) // (g*b) is a // b where 0 <= k < g and b > 0, or where k is 0.
        left = 0
        content = gcd(*(c for mono, c in rest.terms if mono), *(c for _, c in den.terms))
        if den.is_constant and den.constant > 0 and not rest.is_constant:
            left = rest.constant % content
        elif rest.constant:
            content = gcd(content, rest.constant)
        shared = list(min((mono for mono, _ in (*rest.terms, *den.terms)), key=len)) if not left else []
        common: list[Atom] = []
        for atom in dict.fromkeys(shared):
            power = min(mono.count(atom) for mono, _ in (*rest.terms, *den.terms))
            common += [atom] * power
        factor = Poly(((tuple(common), content),))
        rest, den = (rest - left).divide_terms(factor)[0], den.divide_terms(factor)[0]
        return whole, rest, den, factor, Poly.const(left)

    def divide_terms(self, den: Poly) -> tuple[Poly, Poly]:
        """(q, r) with self == q*den + r, taking into q each term that is a multiple of the single-term `den`.

        Where `den` is 0 or has several terms, q is 0.
        """
        if len(den.terms) != 1 or (den.is_constant and den.constant == 0):
            return Poly.const(0), self
        den_mono, den_c = den.terms[0]
        whole: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for mono, c in self.terms:
            left = list(mono)
            ok = c % den_c == 0
            for atom in den_mono:
                if atom in left:
                    left.remove(atom)
                else:
                    ok = False
            if ok:
                whole[tuple(left)] = whole.get(tuple(left), 0) + c // den_c
            else:
                rest[mono] = c
        return Poly._of(whole), Poly._of(rest)

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        out = ""
        for mono, c in self.terms:
            sign, mag = ("-" if c < 0 else "+"), abs(c)
            # A floor division or modulo is parenthesised unless it stands alone: `a * (b // c)`.
            lone = len(self.terms) == 1 and len(mono) == 1 and c == 1
            factors = [str(a) if isinstance(a, Sym) or lone else f"({a})" for a in mono]
            body = "*".join(([str(mag)] if mag != 1 or not mono else []) + factors)
            out += (f"-{body}" if sign == "-" else body) if not out else f" {sign} {body}"
        return out


def _poly(value: Poly | int) -> Poly:
    return Poly.const(value) if isinstance(value, int) else value


def _atom_symbols(atom: Atom) -> frozenset[str]:
    return frozenset((atom.name,)) if isinstance(atom, Sym) else atom.num.symbols | atom.den.symbols
