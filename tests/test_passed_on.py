"""Whether an optional tensor is there is no question of a check where an op only passes it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kgen.ops
from kgen.dsl.check.scope import Choices
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.host import check as host_check
from kgen.dsl.host.check import check_ops, source_of
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text

OPS = Path(kgen.ops.__file__).parent
KERNELS = """
kernel may(x: T[M, N], w: W[N]?) -> (y: T[M, N]):
    parallel m in M, n in N
    if w:
        y[m, n] = x[m, n] * w[n]
    else:
        y[m, n] = x[m, n]

kernel must(x: T[M, N], w: W[N]) -> (y: T[M, N]):
    parallel m in M, n in N
    y[m, n] = x[m, n] * w[n]

kernel dtype(x: T[M], w: W[M]?) -> (y: W[M]):
    parallel m in M
    y[m] = x[m]

kernel size(x: T[M], w: T[N]?) -> (y: T[N]):
    parallel n in N
    y[n] = 1.0

kernel sizes(x: T[M], w: T[N]?, v: T[2 * N]) -> (y: T[M]):
    parallel m in M
    y[m] = x[m]

kernel both(x: T[M], w: W[M]?, v: W[M]?) -> (y: T[M]):
    parallel m in M
    y[m] = x[m]

kernel rows(x: T[*M, N], w: T[*M]?) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = x[m, n]

kernel lies(x: T[M, N], w: T[*M]?) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = x[m, n]
"""


def op(body: str, backward: str = "", parameters: str = "w: T[N]?") -> str:
    text = f"\nop f[T: f16 | f32](x: T[B, N], v: T[N], t: T[2 * N], {parameters}) -> (y: T[B, N]):\n    forward:\n"
    text += "".join(f"        {line}\n" for line in body.split("; "))
    if backward:
        text += "    backward(d_y):\n" + "".join(f"        {line}\n" for line in backward.split("; "))
    return KERNELS + text


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ways through ops that are checked; None for one with a mistake."""
    made: list[Any] = []
    before = host_check._elaborate

    def kept(*arguments: Any) -> Any:
        made.append(before(*arguments))
        return made[-1]

    monkeypatch.setattr(host_check, "_elaborate", kept)
    return made


def told(text: str) -> set[tuple[str, str]]:
    """The codes of all mistakes of the ops in a text, with the lines they are in."""
    diagnostics = Diagnostics()
    check_ops(source_of(parse_text(text)), diagnostics)
    return {(d.code, d.span.source.lines[d.span.line - 1].strip()) for d in diagnostics.items}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (op("y = may(x, w)"), 1),
        (op("y = may(x, w=w)"), 1),
        (op("z = may(x, w); y = may(z, w)"), 1),
        (op("z = may(may(x, w), w); y = must(z, v)"), 1),
        (op("for c in chunks(B):;     y[c] = may(x[c], w)"), 1),
        (op("y = may(x, w)", parameters="w: T[N]?, u: U[N]?"), 1),
        (op("z = may(x, w); y = may(z, u)", parameters="w: T[N]?, u: U[N]?"), 1),
        (op("y = rows(x, w)", parameters="w: T[B]?"), 1),
        # Asked for, by itself or by its gradient.
        (op("if w:;     y = may(x, w); else:;     y = may(x)"), 2),
        (op("z = may(x, w); if w:;     y = must(z, w); else:;     y = may(z)"), 2),
        (op("y = may(x, w)", "if d_w:;     d_x = may(d_y); else:;     d_x = must(d_y, v)"), 3),
        # From which something follows.
        (op("y = may(x, v); z = dtype(v, w)"), 2),
        (op("y = may(x, v); z = size(v, w)"), 2),
        (op("y = may(x, v); z = sizes(v, w, t)"), 2),
        (op("y = may(x, v); z = both(v, w, v)"), 2),
        (op("y = lies(x, w)", parameters="w: T[B]?"), 2),
    ],
)
def test_paths(text: str, number: int, paths: list[Any]) -> None:
    told(text)
    assert len(paths) == number


@pytest.mark.parametrize(
    "text",
    [
        op("y = must(x, w)"),
        op("y = may(x, T(w))"),
        op("z = w; y = may(x, z)"),
        op("y = may(w, x)"),
        op("y = may(x, w)", parameters="w: T[B]?"),
        op("y = may(x, w)", parameters="w: i32[N]?"),
        op("y = x @ w", parameters="w: T[N, N]?"),
        op("for c in chunks(B):;     y[c] = rows(x[c], w[c])", parameters="w: T[B]?"),
        op("y = may(x, v); z = dtype(v, w)"),
        op("y = may(x, v); z: T[N]; z = size(v, w)"),
        op("y = may(x, v); z = sizes(v, w, t)"),
        op("y = may(x, v); z = both(v, w, v)", parameters="w: f16[N]?"),
        op("y = may(x, w)", "d_x = may(d_y, w); d_w = size(v, w)"),
        op("z = may(x, w); if d_x:;     y = may(x); else:;     y = may(x, w)", "d_x = may(d_y, w)"),
        op("if d_x:;     y = may(x, w); else:;     y = may(x, v)", "d_x = may(d_y, w)"),
        op("if d_x:;     z = may(x, w); y = may(x, w)", "if d_x:;     d_x = may(z)"),
    ],
)
def test_nothing_goes_untold(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told is what following each path tells."""
    found = told(text)
    monkeypatch.setattr(host_check, "passed_on", lambda *_: frozenset())
    assert found == told(text)


def test_there_are_mistakes_among_them() -> None:
    assert told(op("y = must(x, w)")) == {("K0612", "y = must(x, w)")}
    assert told(op("y = may(x, v); z = dtype(v, w)")) == {("K0605", "z = dtype(v, w)")}
    assert told(op("y = may(x, w)", parameters="w: T[B]?")) == {("K0604", "y = may(x, w)")}


def test_the_shipped_ops_are_followed_along_all_paths(paths: list[Any]) -> None:
    for path in sorted(OPS.glob("*.kdsl")):
        module = load(path).module
        for one in module.ops:
            paths.clear()
            diagnostics = Diagnostics()
            check_ops(host_check.replace(source_of(module), ops=(one,)), diagnostics)
            assert diagnostics.items == []
            assert 0 < len(paths) < Choices.MAX_PATHS
