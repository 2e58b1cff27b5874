"""The error codes: what each means, with the smallest program that earns it and its correction.

`docs/errors.md` is made from this table, and the tests run every example.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One error code. `wrong` is a whole file that triggers it, `right` the same file corrected."""

    code: str
    title: str
    wrong: str
    right: str


_KERNEL = "kernel copy(x: T[N]) -> (y: T[N]):\n    parallel n in N\n"

# K01xx: spelling and grammar.
PARSER_CODES: tuple[Code, ...] = (
    Code("K0101", "a character or operator that the language lacks", _KERNEL + "    y[n] = x[n] @ 2\n",
         _KERNEL + "    y[n] = x[n] * 2\n"),
)  # fmt: skip

CODES: dict[str, Code] = {code.code: code for code in PARSER_CODES}
