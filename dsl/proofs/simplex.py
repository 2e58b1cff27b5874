"""How large can a linear objective be over non-negative variables? An exact simplex method, for small proofs.

The problems have tens of rows and are solved over `Fraction`, so that an answer is a proof and not a rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

# A proof needs a few dozen pivots; a problem that needs more is given up on, and the proof fails.
MAX_PIVOTS = 300

Row = dict[int, Fraction]


def maximise(
    rows: Sequence[Mapping[int, int]], rhs: Sequence[int], objective: Mapping[int, int], enough: Fraction
) -> bool:
    """Whether some x >= 0 with `rows @ x == rhs` has `objective @ x > enough`.

    `rows` and `objective` are sparse: column -> coefficient. False also means that the search was given up.
    """
    table: list[Row] = []
    right: list[Fraction] = []
    for row, b in zip(rows, rhs, strict=True):
        sign = -1 if b < 0 else 1
        table.append({j: Fraction(sign * c) for j, c in row.items() if c})
        right.append(Fraction(sign * b))
    columns = 1 + max((j for row in (*table, objective) for j in row), default=-1)

    # Start from the columns that occur in one row only; a row without such a column gets an artificial variable.
    uses: dict[int, int] = {}
    for row in table:
        for j in row:
            uses[j] = uses.get(j, 0) + 1
    basis: list[int] = []
    artificial = columns
    for row in table:
        own = next((j for j, c in row.items() if uses[j] == 1 and c > 0 and j not in objective), None)
        if own is None:
            own = artificial
            row[own] = Fraction(1)
            artificial += 1
        scale = row[own]
        if scale != 1:
            for j in row:
                row[j] /= scale
            right[len(basis)] /= scale
        basis.append(own)

    solver = _Solver(table, right, basis)
    if artificial > columns:
        feasible = solver.climb({j: Fraction(-1) for j in range(columns, artificial)}, Fraction(0), strict=False)
        if not feasible:
            return False
        solver.drop_from(columns)
    return solver.climb({j: Fraction(c) for j, c in objective.items()}, enough, strict=True)


class _Solver:
    """The tableau: `rows` in terms of a basis, one basic column a row."""

    def __init__(self, rows: list[Row], right: list[Fraction], basis: list[int]) -> None:
        self.rows, self.right, self.basis = rows, right, basis
        self.pivots = 0

    def climb(self, objective: Row, goal: Fraction, *, strict: bool) -> bool:
        """Pivot until the objective is above `goal` (or reaches it, if not `strict`); True if it does."""
        cost = dict(objective)
        value = Fraction(0)
        for row, b, j in zip(self.rows, self.right, self.basis, strict=True):
            c = cost.get(j, Fraction(0))
            if c:
                _subtract(cost, row, c)
                value += c * b
        while True:
            if value > goal or (value == goal and not strict):
                return True
            # Bland's rule, the lowest column that improves, cannot cycle.
            enter = min((j for j, c in cost.items() if c > 0), default=None)
            if enter is None or self.pivots >= MAX_PIVOTS:
                return False
            leave: int | None = None
            best: tuple[Fraction, int] | None = None
            for i, row in enumerate(self.rows):
                a = row.get(enter)
                if a is not None and a > 0 and (best is None or (self.right[i] / a, self.basis[i]) < best):
                    best, leave = (self.right[i] / a, self.basis[i]), i
            if leave is None:
                return True  # unbounded
            self._pivot(leave, enter)
            c = cost[enter]
            _subtract(cost, self.rows[leave], c)
            value += c * self.right[leave]

    def drop_from(self, column: int) -> None:
        """Remove the columns from `column` on, which are all zero in the present solution."""
        for i in range(len(self.rows)):
            if self.basis[i] >= column:
                enter = min((j for j in self.rows[i] if j < column), default=None)
                if enter is not None:
                    self._pivot(i, enter)
        keep = [i for i in range(len(self.rows)) if self.basis[i] < column]
        self.rows = [{j: c for j, c in self.rows[i].items() if j < column} for i in keep]
        self.right = [self.right[i] for i in keep]
        self.basis = [self.basis[i] for i in keep]

    def _pivot(self, leave: int, enter: int) -> None:
        self.pivots += 1
        row = self.rows[leave]
        scale = row[enter]
        if scale != 1:
            for j in row:
                row[j] /= scale
            self.right[leave] /= scale
        for i, other in enumerate(self.rows):
            if i != leave and (c := other.get(enter)):
                _subtract(other, row, c)
                self.right[i] -= c * self.right[leave]
        self.basis[leave] = enter


def _subtract(target: Row, row: Row, factor: Fraction) -> None:
    """`target -= factor * row`, dropping what becomes zero."""
    for j, c in row.items():
        value = target.get(j, Fraction(0)) - factor * c
        if value:
            target[j] = value
        else:
            target.pop(j, None)
