"""Random host programs: statements drawn without regard to the rules, of which those remain that the checker accepts.

So the programs are at the edge of what is accepted. All values are small integers, which f16, f32
and any order of a sum hold exactly: what an executor computes must be what the reference interpreter does.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kgen.dsl import ast
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.host.check import check_ops, source_of
from kgen.dsl.parser import parse_text

KERNELS = """\
kernel clip(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = minimum(maximum(x[m, n], -2.0), 2.0)

kernel blend(x: T[*M, N], v: T[N]) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = minimum(maximum(x[m, n] + v[n], -2.0), 2.0)

kernel turn_(x: inout T[*M, N]):
    parallel m in M, n in N
    x[m, n] = 1.0 - x[m, n]

kernel blend_(x: inout T[*M, N], v: T[N]):
    parallel m in M, n in N
    x[m, n] = minimum(maximum(v[n] - x[m, n], -2.0), 2.0)

kernel totals(x: T[*M, N]) -> (s: T[N]):
    parallel m in M, n in N
    s[n] += x[m, n]

kernel centred(x: T[*M, N]) -> (y: T[*M, N]):
    parallel n in N
    tile m in M
    y[m, n] = minimum(maximum(x[m, n] - sum(x[m, n], m), -2.0), 2.0)

kernel both(x: T[*M, N]) -> (y: T[*M, N], s: T[N]):
    parallel m in M
    tile n in N
    y[m, n] = minimum(maximum(x[m, n] - 1.0, -2.0), 2.0)
    s[n] += x[m, n]

"""
HEAD = "op f(x: T[*B, N], w: T[N, N], v: T[N]) -> (y: T[*B, N], s: T[N, N]):\n"
# Names by shape: rows of B, rows of one chunk, a matrix, a matrix in f32, a row.
ROWS, CHUNK, MATRIX, WIDE, ROW = "rows", "chunk", "matrix", "wide", "row"
DECLARED = {ROWS: "T[B, N]", MATRIX: "T[N, N]", WIDE: "f32[N, N]", ROW: "T[N]", CHUNK: "T[c, N]"}
FIRST = ("a: T[B, N]", "p: T[N, N]", "r: T[N]", "g: f32[N, N]")
# What stands in for an output that was not drawn, and the first statement of a backward section.
LAST = {"y": "y = clip(x)", "s": "s = clip(w)"}
BACK = ("d_x = d_y @ w.T", "d_w = x.T @ d_y", "d_v = totals(d_y)")
OWN = {ROWS: ["a", "b"], CHUNK: ["h", "k"], MATRIX: ["p", "q"], WIDE: ["g"], ROW: ["r", "t"]}


@dataclass
class Draw:
    """One draw of a program. `depth`: of nested expressions; `inside`: a loop is around."""

    rng: random.Random
    results: dict[str, list[str]] = field(default_factory=dict)
    given: dict[str, list[str]] = field(default_factory=dict)
    inside: bool = False
    known: set[str] = field(default_factory=set)

    def name(self, kind: str) -> str:
        """A tensor to read, one that was named before if there is any."""
        own = [n for n in (*OWN[kind], *OWN[kind], *self.results.get(kind, ())) if n in self.known]
        pool = [*self.given.get(kind, ()), *own]
        if kind == CHUNK:
            pool = [*own, *own, *(f"{n}[c]" for n in (self.name(ROWS), self.name(ROWS)))]
        return self.rng.choice(pool or OWN[kind])

    def target(self, kind: str) -> str:
        """A tensor to write."""
        pool = [*OWN[kind], *self.results.get(kind, ()), *self.results.get(kind, ())]
        return self.rng.choice(pool)

    def expression(self, kind: str, depth: int = 2) -> str:
        """A value of a shape."""
        e, pick = self.expression, self.rng.random()
        if depth == 0 or pick < 0.3:
            return self.name(kind)
        if kind in (ROWS, CHUNK):
            return self.rng.choice(
                [
                    lambda: f"clip({e(kind, depth - 1)})",
                    lambda: f"blend({e(kind, depth - 1)}, {e(ROW, depth - 1)})",
                    lambda: f"{self.name(kind)} @ {self.name(MATRIX)}",
                    lambda: f"{self.name(kind)} @ {self.name(MATRIX)} + {self.name(ROW)}",
                    lambda: f"T({self.name(kind)})",
                    lambda: f"centred({self.name(kind)})",
                ]
            )()
        rows = self.rng.choice([CHUNK, CHUNK, ROWS]) if self.inside else ROWS
        if kind == ROW:
            return self.rng.choice(
                [lambda: f"totals({e(rows, depth - 1)})", lambda: f"totals({e(MATRIX, depth - 1)})"]
            )()
        return self.rng.choice(
            [
                lambda: f"{self.name(rows)}.T @ {self.name(rows)}",
                lambda: f"{self.name(MATRIX)} @ {self.name(MATRIX)}",
                lambda: f"clip({e(MATRIX, depth - 1)})",
                lambda: f"T({self.name(WIDE)})",
                lambda: f"{self.name(MATRIX)}.T",
            ]
        )()

    def line(self) -> str:
        """A statement that is no block."""
        kinds = [ROWS, MATRIX, ROW] + ([CHUNK, CHUNK, CHUNK] if self.inside else [])
        kind = self.rng.choice(kinds)
        pick = self.rng.random()
        if pick < 0.02:
            kind = self.rng.choice([*kinds, WIDE])
            return f"{self.rng.choice(OWN[kind])}: {DECLARED[kind]}"
        if pick < 0.20:
            shown = self.name(kind) if kind == CHUNK else self.target(kind)
            shown = self.name(MATRIX) if kind == ROW else shown
            return self.rng.choice([f"turn_({shown})", f"blend_({shown}, {self.name(ROW)})"])
        if pick < 0.28:
            return f"{self.target(kind)} = {self.name(kind)}"
        if pick < 0.34:
            rows = CHUNK if self.inside else ROWS
            first = f"{self.target(ROWS)}[c]" if self.inside and self.rng.random() < 0.5 else self.target(rows)
            return f"{first}, {self.target(ROW)} = both({self.expression(rows)})"
        if pick < 0.60:
            kind = self.rng.choice(
                [MATRIX, MATRIX, WIDE, ROW, ROWS, CHUNK] if self.inside else [MATRIX, WIDE, ROW, ROWS]
            )
            if kind == ROWS and self.inside:
                return f"{self.target(ROWS)}[c] += {self.expression(CHUNK)}"
            return f"{self.target(kind)} += {self.expression(MATRIX if kind == WIDE else kind)}"
        if self.inside and pick < 0.80:
            return f"{self.target(ROWS)}[c] = {self.expression(CHUNK)}"
        return f"{self.target(kind)} = {self.expression(kind)}"


class Program:
    """A program that grows by statements that the checker accepts where they stand."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lines = ["    forward:", *("        " + line for line in FIRST)]
        self.choices = self.rng.randint(0, 2)  # the blocks under an `if` that may come yet
        self.whole = True  # every output is assigned, whatever is wanted
        self.refused: list[str] = []  # codes of what was drawn and refused
        self.draw = Draw(self.rng, {ROWS: ["y"], MATRIX: ["s"]}, {ROWS: ["x"], MATRIX: ["w"], ROW: ["v"]})
        self._grow(self.rng.randint(4, 9), 2)
        for name, last in LAST.items():
            if any(code == "K0610" and f"'{name}'" in message for _, code, message in self._found()):
                self.whole = self._try([f"        {last}"]) and self.whole
        self.lines += ["    backward(d_y, d_s):", f"        {self.rng.choice(BACK)}"]
        self.draw = Draw(self.rng, {ROWS: ["d_x"], MATRIX: ["d_w"], ROW: ["d_v"]},
                         {ROWS: ["x", "y", "d_y"], MATRIX: ["w", "s", "d_s"], ROW: ["v"]})  # fmt: skip
        self._grow(self.rng.randint(3, 8), 2)

    @property
    def text(self) -> str:
        """The file."""
        return KERNELS + self._op()

    def _op(self, extra: Sequence[str] = ()) -> str:
        return HEAD + "\n".join([*self.lines, *extra]) + "\n"

    def _found(self, extra: Sequence[str] = ()) -> list[tuple[int, str, str]]:
        return mistakes(self._op(extra))

    def _try(self, extra: list[str]) -> bool:
        """Append lines, if nothing but a missing output is wrong with the program then."""
        found = [code for _, code, _ in self._found(extra) if code != "K0610"]
        self.refused += found
        if not found:
            self.lines += extra
            self.draw.known |= {n for line in extra for n in re.findall(r"^\s*(\w+)(?=[:\[,]| =| \+=)", line)}
            self.draw.known |= {n for line in extra for n in re.findall(r", (\w+) = both", line)}
        return not found

    def _grow(self, count: int, depth: int) -> None:
        for _ in range(count):
            for _ in range(8):
                if self._statement(depth):
                    break

    def _statement(self, depth: int) -> bool:
        indent, pick = "    " * depth, self.rng.random()
        if pick < 0.3 and not self.draw.inside:
            self.draw.inside = True
            made = self._block([f"{indent}for c in chunks(B):"], self.rng.randint(2, 5), depth)
            self.draw.inside = False
            return made
        if pick < 0.36 and self.choices:
            self.choices -= 1
            condition = self.rng.choice(["d_x", "d_w", "d_x or d_v"])
            return self._block([f"{indent}if {condition}:"], self.rng.randint(1, 2), depth)
        return self._try([indent + self.draw.line()])

    def _block(self, header: list[str], count: int, depth: int) -> bool:
        """A block, begun with one statement that stands in it and then grown."""
        for _ in range(12):
            if self._try([*header, "    " * (depth + 1) + self.draw.line()]):
                self._grow(count - 1, depth + 1)
                return True
        return False


_PARSED = parse_text(KERNELS, "random.kdsl")


def module_of(text: str) -> ast.Module:
    """The module of an op with the kernels above, which are parsed once."""
    return replace(parse_text(text, "random.kdsl"), kernels=_PARSED.kernels)


def mistakes(text: str) -> list[tuple[int, str, str]]:
    """The mistakes of the ops of a file: line, code and message."""
    diagnostics = Diagnostics()
    check_ops(source_of(module_of(text)), diagnostics)
    return [(d.span.line, d.code, d.message) for d in diagnostics.sorted()]


def programs(first: int, count: int) -> list[Program]:
    """`count` programs without a mistake."""
    found: list[Program] = []
    while len(found) < count:
        p = Program(first)
        first += 1
        if p.whole:
            found.append(p)
    return found
