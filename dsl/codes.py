"""The error codes: what each means, with the smallest program that earns it and its correction.

`docs/errors.md` is made from this table, and the tests run every example. Codes K01xx are about spelling and grammar,
K02xx about names, types and index sets, K03xx about bounds, K04xx about races and in-place updates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One error code. `wrong` is a whole file that triggers it, `right` the same file corrected.

    For the codes of imports the examples are read beside the files of `EXAMPLE_FILES`.
    """

    code: str
    title: str
    wrong: str
    right: str


# Files that the examples of the import codes find beside them.
EXAMPLE_FILES = {
    "activations.kdsl": "fn silu(a) = a * sigmoid(a)\nfn relu(a) = maximum(a, 0)\n",
    "circle.kdsl": "from circle import area\nfn area(r) = 3.14159 * r * r\n",
    "latin.kdsl": b"# caf\xe9\nfn one(a) = a\n",
    "broken.kdsl": "fn broken(a) = a *\n",
}

_HEAD = "kernel copy(x: T[N]) -> (y: T[N]):\n"
_KERNEL = _HEAD + "    parallel n in N\n"


def _statement(code: str, title: str, wrong: str, right: str) -> Code:
    """A code shown by one line (or several) in the body of a kernel."""
    return Code(code, title, _KERNEL + wrong, _KERNEL + right)


PARSER_CODES: tuple[Code, ...] = (
    _statement(
        "K0101", "character or operator that the language lacks", "    y[n] = x[n] @ 2\n", "    y[n] = x[n] * 2\n"
    ),
    _statement("K0102", "misspelt number", "    y[n] = x[n] * 1__0\n", "    y[n] = x[n] * 1_0\n"),
    _statement("K0103", "number out of range", "    y[n] = x[n] * 1e999\n", "    y[n] = x[n] * 1e9\n"),
    _statement(
        "K0104",
        "name with characters outside ASCII",
        "    größe = x[n]\n    y[n] = größe\n",
        "    size = x[n]  # die Größe\n    y[n] = size\n",
    ),
    Code(
        "K0105",
        "unclosed docstring, or quoted text",
        "'Activation functions.'\nfn relu(a) = maximum(a, 0)\n",
        '"""Activation functions."""\nfn relu(a) = maximum(a, 0)\n',
    ),
    _statement("K0106", "unbalanced bracket", "    y[n] = (x[n] + 1\n", "    y[n] = (x[n] + 1)\n"),
    _statement("K0107", "inconsistent indentation", "  y[n] = x[n]\n", "    y[n] = x[n]\n"),
    _statement("K0108", "unexpected indentation", "        y[n] = x[n]\n", "    y[n] = x[n]\n"),
    Code("K0109", "empty block", _HEAD, _KERNEL + "    y[n] = x[n]\n"),
    _statement("K0110", "unexpected word or sign", "    y[n] = 2 x[n]\n", "    y[n] = 2 * x[n]\n"),
    Code(
        "K0111",
        "keyword used as a name",
        "kernel tile(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n]\n",
        "kernel tiled(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n]\n",
    ),
    _statement(
        "K0112",
        "chained comparison",
        "    y[n] = where(0 < x[n] < 1, x[n], 0)\n",
        "    y[n] = where(0 < x[n] and x[n] < 1, x[n], 0)\n",
    ),
    _statement("K0113", "target that cannot be assigned to", "    2 * y[n] = x[n]\n", "    y[n] = x[n] / 2\n"),
    _statement(
        "K0114",
        "different numbers of targets and values",
        "    a, b = x[n]\n    y[n] = a + b\n",
        "    a, b = x[n], 1\n    y[n] = a + b\n",
    ),
    _statement("K0115", "expression without effect", "    x[n] * 2\n", "    y[n] = x[n] * 2\n"),
    _statement(
        "K0116",
        "'+=' on something that is not a tensor element",
        "    a = x[n]\n    a += 1\n    y[n] = a\n",
        "    a = x[n]\n    b = a + 1\n    y[n] = b\n",
    ),
    _statement(
        "K0117",
        "misplaced docstring",
        '    """Copies x."""\n    y[n] = x[n]\n',
        "    # copies x\n    y[n] = x[n]\n",
    ),
    Code(
        "K0118",
        "line outside a kernel that begins no item",
        _HEAD + "    parallel n in N\n    y[n] = x[n]\nz = 1\n",
        _HEAD + "    parallel n in N\n    y[n] = x[n]\n",
    ),
    Code(
        "K0120",
        "too deeply nested",
        "fn long(a) = " + " + ".join(["a"] * 250) + "\n",
        "fn long(a) = 250 * a\n",
    ),
    Code(
        "K0121",
        "default value that is not a literal",
        "kernel scale(x: T[N], s: f32 = 1 / 3) -> (y: T[N]):\n    parallel n in N\n    y[n] = s * x[n]\n",
        "kernel scale(x: T[N], s: f32 = 0.3333333) -> (y: T[N]):\n    parallel n in N\n    y[n] = s * x[n]\n",
    ),
    _statement(
        "K0122",
        "'elif' or 'else' without 'if'",
        "    y[n] = x[n]\n    else:\n        y[n] = 0\n",
        "    if N > 1:\n        y[n] = x[n]\n    else:\n        y[n] = 0\n",
    ),
    Code(
        "K0123",
        "block without ':'",
        "kernel copy(x: T[N]) -> (y: T[N])\n    parallel n in N\n    y[n] = x[n]\n",
        _KERNEL + "    y[n] = x[n]\n",
    ),
    Code(
        "K0124",
        "const, inout or ? on a type that cannot have it",
        "kernel scale(x: T[N], s: f32?) -> (y: T[N]):\n    parallel n in N\n    y[n] = s * x[n]\n",
        "kernel scale(x: T[N], s: f32 = 1.0) -> (y: T[N]):\n    parallel n in N\n    y[n] = s * x[n]\n",
    ),
    _statement(
        "K0125",
        "item inside a kernel",
        "    y[n] = twice(x[n])\n    fn twice(a) = 2 * a\n",
        "    y[n] = twice(x[n])\nfn twice(a) = 2 * a\n",
    ),
    _statement("K0126", "unknown statement", "    return x[n]\n", "    y[n] = x[n]\n"),
)

# Found by dsl/modules.py.
IMPORT_CODES: tuple[Code, ...] = (
    Code("K0151", "imported file not found", "from activation import silu\n", "from activations import silu\n"),
    Code("K0152", "imported name not found", "from activations import swish\n", "from activations import silu\n"),
    Code("K0153", "import cycle", "from circle import area\n", "fn area(r) = 3.14159 * r * r\n"),
    Code(
        "K0154",
        "name imported twice, or also defined here",
        "from activations import relu\nfn relu(a) = maximum(a, 0)\n",
        "from activations import relu\n",
    ),
    Code("K0155", "file that is not UTF-8", "from latin import one\n", "fn one(a) = a\n"),
)

CODES: dict[str, Code] = {code.code: code for code in (*PARSER_CODES, *IMPORT_CODES)}
