"""What is known about the integers of a kernel, and is `p >= 0` a consequence?

`Facts` turns what holds while a statement runs (dimensions are not negative, an index lies within its extent, the
`require`s hold) into polynomial inequalities over variables that are all >= 0, and proves others from them. The
prover is sound and incomplete: `False` means "not shown", never "false".

How it works. A floor division `a // b` with b >= 1 is a fresh variable q with a = b*q + r and 0 <= r <= b - 1 (and
`a % b` is r); where `a` is a single variable it is replaced by b*q + r everywhere. Lower bounds and orders become
substitutions (N >= 1 is N = 1 + N', R <= D is D = R + D'), the rest are inequalities. An index that occurs linearly
is eliminated exactly by going to the ends of its range. What is left is a polynomial over dimensions: it is >= 0 if
all its coefficients are, or if it is a non-negative combination of known inequalities times monomials, which is a
linear programme. As all values are whole numbers, a lower bound above -1 is enough.

It does not know anything about values in tensors, and it does not reason by cases.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, lcm

from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Mod, Monomial, Poly, Sym
from kgen.dsl.proofs.combine import is_combination

ZERO, ONE = Poly.const(0), Poly.const(1)

# Divisors of one name are brought to a common multiple (D // 2 and D // 4 to 4) as long as it stays this small.
MAX_COMMON_DIVISOR = 1 << 16


@dataclass
class _Division:
    """num == den*quotient + remainder, 0 <= remainder < den (nothing is known where den may be < 1)."""

    num: Poly
    den: Poly
    quotient: Poly
    remainder: Poly


class Facts:
    """What holds while a statement with the given indices runs.

    `indices` maps each index in scope to its extent, which is then at least 1. `about` lists the polynomials that
    will be asked about: their divisions are prepared together. `paired` adds a second, independent copy of every
    index (`prime` renames to it), for questions about two programs or two elements.
    """

    def __init__(
        self,
        kernel: ir.Kernel,
        indices: Mapping[str, Poly] | None = None,
        about: Iterable[Poly] = (),
        *,
        paired: bool = False,
        requires: Iterable[ir.Requirement] = (),
    ) -> None:
        indices = dict(indices or {})
        about = list(about)
        all_requires = (*kernel.requires, *requires)
        shapes = [s for t in kernel.tensors for s in t.shape]
        sides = [p for r in all_requires for p in (r.left, r.right)]
        self._definitions: dict[str, Poly] = {}
        self._facts: list[Poly] = []
        self._equal: list[Poly] = []
        self._signed: set[str] = set()
        self._impossible = False
        self._box: dict[str, Poly] = {}  # an index, whole: its largest value
        self._within: dict[str, Poly] = {}  # quotients and remainders of an index that was split: the same
        self._varying: set[str] = set(indices)  # everything that depends on an index
        self._primed: frozenset[str] = frozenset()
        self._divisions: list[_Division] = []
        self._atoms: dict[tuple[Poly, Poly], _Division] = {}  # by numerator and denominator as the user wrote them
        self._memo: dict[Poly, bool] = {}
        self._normal: dict[Poly, Poly] = {}
        self._fresh = 0

        extents = list(indices.values())
        everything = [*about, *extents, *shapes, *sides]
        self._use_divisibility(all_requires)
        self._split_by_common_divisors(everything, without=indices)
        # A caller's condition that divides by G has been evaluated, so G is not 0.
        for p in sides:
            for _, den in divisions(p):
                if all(c >= 0 for _, c in den.terms) and not _has_division(den):
                    self._assume(den - 1)
        for r in all_requires:
            if r.op == "==":
                self._equate(self.normalise(r.left) - self.normalise(r.right))
        for extent in extents:
            if not _has_division(extent):
                self._assume(extent - 1)
        for extent in extents:
            self._assume(self.normalise(extent) - 1)
        for r in all_requires:
            if r.op in ("<", "<=", ">", ">="):
                low, high = (r.left, r.right) if r.op[0] == "<" else (r.right, r.left)
                self._assume(self.normalise(high - low - (0 if r.op.endswith("=") else 1)))
        for s in shapes:
            self._assume(self.normalise(s))
        for r in all_requires:
            if r.op == "!=":
                difference = self.normalise(r.left - r.right)
                for d in (difference, -difference):
                    if self.prove_nonneg(d):
                        self._assume(d - 1)
        for name, extent in indices.items():
            high = self.normalise(extent) - 1
            self._box = {v: self._resolve(h) for v, h in self._box.items()} | {name: high}
        self._split_by_common_divisors(everything, only=indices)
        for p in about:
            self.normalise(p)
        if paired:
            self._pair()

    # -- questions -----------------------------------------------------------------------------------------------
    def prove_nonneg(self, p: Poly) -> bool:
        """Whether p >= 0 follows."""
        return self._prove(self.normalise(p))

    def prove_positive(self, p: Poly) -> bool:
        """Whether p >= 1 follows."""
        return self.prove_nonneg(p - 1)

    def prove_equal(self, a: Poly, b: Poly) -> bool:
        """Whether a == b follows."""
        difference = self.normalise(a - b)
        return not difference.terms or (self._prove(difference) and self._prove(-difference))

    def normalise(self, p: Poly) -> Poly:
        """`p` over the prover's own variables: no floor division or modulo is left."""
        found = self._normal.get(p)
        if found is None:
            found = self._normalised(p)
            self._normal[p] = found  # behind the divisions, which may have changed what was known
        return found

    def _normalised(self, p: Poly) -> Poly:
        total = ZERO
        for mono, c in p.terms:
            value = Poly.const(c)
            for atom in mono:
                if isinstance(atom, Sym):
                    factor = Poly.sym(atom.name)
                else:
                    division = self._atoms.get((atom.num, atom.den))
                    if division is None:
                        division = self._divide(self.normalise(atom.num), self.normalise(atom.den))
                        self._atoms[atom.num, atom.den] = division
                    factor = self._resolve(division.quotient if isinstance(atom, FloorDiv) else division.remainder)
                value = value * factor
            total = total + value
        # A later division may have replaced a variable of an earlier one.
        return self._resolve(total)

    def parts(self, index: str) -> tuple[str, ...]:
        """The variables that stand for an index: itself, or the quotients and remainders it was split into."""
        mine = self._box.keys() | self._within.keys()
        return tuple(sorted(self._resolve(Poly.sym(index)).symbols & mine))

    def highest(self, part: str) -> Poly:
        """The largest value of a variable that `parts` gave; the smallest is 0."""
        return self._box[part] if part in self._box else self._within[part]

    @property
    def index_parts(self) -> frozenset[str]:
        """All variables that depend on indices, second copies included."""
        return frozenset(self._box.keys() | self._within.keys())

    def prime(self, p: Poly) -> Poly:
        """`p` (normalised) with each index replaced by its second copy. Needs `paired=True`."""
        return p.substitute({v: Poly.sym(v + "'") for v in p.symbols if v in self._primed})

    # -- collecting facts ----------------------------------------------------------------------------------------
    def _resolve(self, p: Poly) -> Poly:
        return p.substitute(self._definitions) if p.symbols & self._definitions.keys() else p

    def _new(self, kind: str) -> Poly:
        self._fresh += 1
        return Poly.sym(f"{kind}#{self._fresh}")

    def _define(self, name: str, value: Poly) -> None:
        """Replace the variable `name` by `value` everywhere."""
        env = {name: value}
        self._memo.clear()
        self._normal.clear()
        self._definitions = {n: p.substitute(env) for n, p in self._definitions.items()} | env
        self._box = {n: p.substitute(env) for n, p in self._box.items()}
        self._within = {n: p.substitute(env) for n, p in self._within.items()}
        for d in self._divisions:
            d.num, d.den = d.num.substitute(env), d.den.substitute(env)
            d.quotient, d.remainder = d.quotient.substitute(env), d.remainder.substitute(env)
        facts = [p.substitute(env) for p in self._facts]
        self._facts = [p for p in facts if not self._nonneg_terms(p)]
        self._impossible |= any(p.is_constant for p in self._facts)
        equal = [p.substitute(env) for p in self._equal]
        self._equal = [p for p in equal if p.terms]

    def _nonneg_terms(self, p: Poly) -> bool:
        """Whether each term of `p` is >= 0 by itself."""
        return all(c > 0 for _, c in p.terms) and not (self._signed and p.symbols & self._signed)

    def _fact(self, p: Poly) -> None:
        """Record p >= 0 as it stands."""
        if not self._nonneg_terms(p) and p not in self._facts:
            self._memo.clear()
            self._facts.append(p)
            self._impossible |= p.is_constant

    def _assume(self, p: Poly) -> None:
        """Record p >= 0, by a substitution where that says it all."""
        p = self._resolve(p)
        varying = [(mono, c) for mono, c in p.terms if mono]
        if self._nonneg_terms(p) or not varying or p.symbols & (self._signed | self._varying):
            self._fact(p)
        elif len(varying) == 1 and varying[0][1] > 0:
            # c*a*b >= k > 0: each of a, b is at least 1, and a alone at least k/c.
            mono, c = varying[0]
            if len(mono) == 1:
                self._define(str(mono[0]), self._new(str(mono[0])) - p.constant // c)
            else:
                self._at_least_one(p, Poly(((mono, 1),)).symbols)
        elif p.constant < 0 and (common := _common_symbols([m for m, c in varying if c > 0])):
            # Were one of these 0, p would be negative.
            self._at_least_one(p, common)
        elif not p.constant and all(c < 0 for _, c in varying):
            for mono, _ in varying:
                self._equate(Poly(((mono, 1),)))
        else:
            # v >= e with e >= 0 by its terms: v = e + slack.
            for mono, c in varying:
                rest = Poly(((mono, 1),)) - p
                name = Poly(((mono, 1),)).as_symbol
                if c == 1 and name and name not in rest.symbols and self._nonneg_terms(rest):
                    self._define(name, rest + self._new(name))
                    return
            self._fact(p)

    def _at_least_one(self, p: Poly, names: Iterable[str]) -> None:
        """Record that each of `names` is >= 1, and then p >= 0."""
        for name in sorted(names):
            self._define(name, self._new(name) + 1)
        self._assume(p)

    def _equate(self, p: Poly) -> None:
        """Record p == 0, by solving for a variable where one has the coefficient 1 or -1."""
        p = self._resolve(p)
        if not p.terms:
            return
        if p.is_constant:
            self._impossible = True
            return
        p = _quotient(p, gcd(*(c for _, c in p.terms)))
        candidates: list[tuple[bool, str, Poly]] = []
        for mono, c in p.terms:
            name = Poly(((mono, 1),)).as_symbol
            if name and abs(c) == 1 and name not in self._varying:
                value = Poly.sym(name) - p * c
                if not value.symbols & (self._varying | {name}):
                    candidates.append((not self._nonneg_terms(value), name, value))
        if not candidates:
            self._memo.clear()
            self._equal.append(p)
            return
        _, name, value = min(candidates, key=lambda t: (t[0], t[1]))
        self._define(name, value)
        if name not in self._signed:
            self._assume(value)

    def _use_divisibility(self, requires: Iterable[ir.Requirement]) -> None:
        """Write each name that is required to be a multiple of constants as L*q, L their common multiple."""
        multiples: dict[str, int] = {}
        for r in requires:
            for side, other in ((r.left, r.right), (r.right, r.left)):
                for num, den in divisions(side):
                    name = num.as_symbol
                    if r.op == "==" and not other.terms and side == num.mod(den) and name and den.is_constant:
                        multiples[name] = lcm(multiples.get(name, 1), den.constant)
        for name, common in sorted(multiples.items()):
            if common:
                self._define(name, self._new(name) * common)

    def _split_by_common_divisors(
        self, polys: Iterable[Poly], *, without: Container[str] = (), only: Container[str] | None = None
    ) -> None:
        """Write each name that is divided by constants as L*q + r, L their common multiple."""
        divisors: dict[str, int] = {}
        for num, den in (d for p in polys for d in divisions(p)):
            name = num.as_symbol
            if name and name not in without and (only is None or name in only) and den.is_constant:
                common = lcm(divisors.get(name, 1), max(den.constant, 1))
                if common <= MAX_COMMON_DIVISOR:
                    divisors[name] = common
        for name, den in sorted(divisors.items()):
            if den > 1:
                self._divide(Poly.sym(name), Poly.const(den))

    # -- division ------------------------------------------------------------------------------------------------
    def _divide(self, num: Poly, den: Poly) -> _Division:
        num, den = self._resolve(num), self._resolve(den)
        if not self._prove(den - 1):
            return self._known(num, den) or self._opaque(num, den)
        whole, rest = _multiples(num, den)
        if not rest.terms:
            return _Division(num, den, whole, ZERO)
        # (g*a + k) // (g*b) is a // b where 0 <= k < g.
        g = gcd(*(c for mono, c in rest.terms if mono), *(c for _, c in den.terms))
        if g > 1:
            k = rest.constant % g
            inner = self._divide(_quotient(rest - k, g), _quotient(den, g))
            return _Division(num, den, self._resolve(whole + inner.quotient), self._resolve(inner.remainder * g + k))
        found = self._known(rest, den)
        if found is None:
            for k in (0, -1, 1):
                remainder = rest - den * k
                if self._prove(remainder) and self._prove(den - 1 - remainder):
                    return _Division(num, den, whole + k, remainder)
            found = self._split(rest, den)
        return _Division(num, den, self._resolve(whole + found.quotient), found.remainder)

    def _known(self, num: Poly, den: Poly) -> _Division | None:
        return next((d for d in self._divisions if d.num == num and d.den == den), None)

    def _split(self, num: Poly, den: Poly) -> _Division:
        """Introduce num == den*q + r. A variable `num` is replaced by that; for a sum it is an equality."""
        self._refuse_if_paired(num, den)
        q, r = self._new("q"), self._new("r")
        q_name, r_name = str(q), str(r)
        division = _Division(num, den, q, r)
        self._divisions.append(division)
        if num.symbols & self._varying or den.symbols & self._varying:
            self._varying |= {q_name, r_name}
        name = num.as_symbol
        if name is None or name in self._signed:
            if not self._prove(num):
                self._signed.add(q_name)
            self._fact(den - 1 - r)
            self._memo.clear()
            self._equal.append(den * q + r - num)
        elif name in self._box or name in self._within:
            # An index: q and r have ranges of their own, and together stay below its extent.
            high = self.highest(name)
            most = self._divide(high, den).quotient
            high, most, den = self._resolve(high), self._resolve(most), self._resolve(den)
            self._box.pop(name, None)
            self._within.pop(name, None)
            self._within[q_name], self._within[r_name] = most, den - 1
            for fact in (high - den * q - r, most - q, den - 1 - r):
                self._fact(fact)
            self._define(name, den * q + r)
        else:
            self._fact(den - 1 - r)
            self._define(name, den * q + r)
        return division

    def _opaque(self, num: Poly, den: Poly) -> _Division:
        """A division about which nothing is known."""
        self._refuse_if_paired(num, den)
        q, r = self._new("q"), self._new("r")
        names = q.symbols | r.symbols
        self._signed |= names
        if num.symbols & self._varying or den.symbols & self._varying:
            self._varying |= names
        self._divisions.append(_Division(num, den, q, r))
        return self._divisions[-1]

    def _refuse_if_paired(self, num: Poly, den: Poly) -> None:
        """A division that comes after the second copies were made would have none, and be taken for a constant."""
        if self._primed and (num.symbols | den.symbols) & self._varying:
            raise ValueError(f"({num}) // ({den}) was not among the polynomials that these facts are about")

    def _pair(self) -> None:
        """Add a second copy of every variable that depends on an index, with copies of the facts about it."""
        self._memo.clear()
        self._primed = frozenset(self._varying)
        self._varying |= {v + "'" for v in self._primed}
        self._signed |= {v + "'" for v in self._signed & self._primed}
        self._facts += [self.prime(p) for p in self._facts if p.symbols & self._primed]
        self._equal += [self.prime(p) for p in self._equal if p.symbols & self._primed]
        self._box |= {v + "'": high for v, high in self._box.items()}
        self._within |= {v + "'": high for v, high in self._within.items()}

    # -- proof ---------------------------------------------------------------------------------------------------
    def _prove(self, p: Poly) -> bool:
        if self._impossible or self._nonneg_terms(p):
            return True
        if p.is_constant:
            return False
        if p not in self._memo:
            self._memo[p] = self._search(p)
        return self._memo[p]

    def _search(self, p: Poly) -> bool:
        # An index that occurs linearly: the least value is at an end of its range.
        for name in sorted(p.symbols & self._box.keys()):
            slope = p.coefficient(name)
            if slope is None:
                continue
            ends = [ZERO, self._box[name]]
            if self._nonneg_terms(slope):
                ends = ends[:1]
            elif self._nonneg_terms(-slope):
                ends = ends[1:]
            return all(self._prove(p.substitute({name: end})) for end in ends)
        return self._combine(p)

    def _combine(self, p: Poly) -> bool:
        related = p.symbols.union(*(e.symbols for e in (*self._equal, *self._facts)))
        ranges = [self._box[v] - Poly.sym(v) for v in sorted(related & self._box.keys())]
        return is_combination(p, [*self._facts, *ranges], self._equal, self._signed)


def divisions(p: Poly) -> Iterator[tuple[Poly, Poly]]:
    """Numerator and denominator of every floor division and modulo in `p`, inner ones first."""
    for mono, _ in p.terms:
        for atom in mono:
            if isinstance(atom, FloorDiv | Mod):
                yield from divisions(atom.num)
                yield from divisions(atom.den)
                yield atom.num, atom.den


def _has_division(p: Poly) -> bool:
    return any(True for _ in divisions(p))


def _common_symbols(monos: list[Monomial]) -> frozenset[str]:
    """The names that occur in each of `monos`."""
    return frozenset.intersection(*(Poly(((m, 1),)).symbols for m in monos)) if monos else frozenset()


def _quotient(p: Poly, divisor: int) -> Poly:
    """`p / divisor`, each coefficient being a multiple of it."""
    return Poly(tuple((mono, c // divisor) for mono, c in p.terms))


def _multiples(num: Poly, den: Poly) -> tuple[Poly, Poly]:
    """(whole, rest) with num == den*whole + rest; a constant `den` leaves coefficients in [0, den)."""
    if den.is_constant:
        d = den.constant
        whole = Poly(tuple((m, c // d) for m, c in num.terms if c // d))
        return whole, num - whole * d
    if len(den.terms) == 1:
        return num.divide_terms(den)
    # Several terms, such as G + 1: take out the multiples of the leading one while that removes it.
    whole, rest = ZERO, num
    for _ in range(len(num.terms)):
        q, _ = rest.divide_terms(Poly(den.terms[:1]))
        if not q.terms:
            break
        whole, rest = whole + q, rest - den * q
    return whole, rest
