"""A kernel with a hand-written backward, and what the checker says of a text."""

from __future__ import annotations

from kgen.dsl.check import check_module
from kgen.dsl.diagnostics import Diagnostics, DslError
from kgen.dsl.parser import parse_text

NORM = """
kernel norm(x: T[*M, N], w: W[N]?, eps: f32 = 1e-6, plain: const bool = true) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    r = rsqrt(mean(x[m, n] * x[m, n], n) + eps)
    a = x[m, n] * r
    if w and plain:
        y[m, n] = a * w[n]
    elif w:
        y[m, n] = a * (1.0 + w[n])
    else:
        y[m, n] = a
"""

# Right but for `SCALE`, which the tests set: an edit that must show.
NORM_BACKWARD = """
backward norm(
    x: T[*M, N], w: W[N]?, saved_r: f32[*M], d_y: T[*M, N], plain: const bool
) -> (d_x: T[*M, N], d_w: W[N]):
    parallel m in M
    tile n in N
    r = saved_r[m]
    if w:
        if plain:
            g = d_y[m, n] * w[n]
        else:
            g = d_y[m, n] * (1.0 + w[n])
        d_w[n] += SCALE * d_y[m, n] * x[m, n] * r
    else:
        g = d_y[m, n]
    d_x[m, n] = r * g - sum(g * x[m, n], n) * r * r * r / N * x[m, n]
"""


def norm(scale: float = 1.0, *edits: tuple[str, str]) -> str:
    """The kernel with its backward, edited; the gradient of w that it gives is `scale` times the right one."""
    text = NORM_BACKWARD.replace("SCALE", str(scale))
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return NORM + text


def mistakes(text: str) -> list[tuple[str, str, str]]:
    """Code, text under the caret and message of everything that is wrong in a file; each with help."""
    diagnostics = Diagnostics()
    try:
        check_module(parse_text(text, "f.kdsl"), diagnostics)
    except DslError as error:
        diagnostics.items = list(error.diagnostics)
    assert all(d.help for d in diagnostics.items)
    return [(d.code, d.span.text, f"{d.message}; {d.help}") for d in diagnostics.sorted()]
