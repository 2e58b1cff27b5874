"""What is checked once is not checked again: paths that go on from where they part, proofs, kernels of several files.

Counted is work, as times would be flaky; and what is told must be what is told without any of it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kgen.ops
from kgen.dsl import check, parser, proofs
from kgen.dsl.check import check_module
from kgen.dsl.check.scope import Choices
from kgen.dsl.check.statements import Statements
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.host import check as host_check
from kgen.dsl.host.check import check_ops, source_of
from kgen.dsl.host.statements import Statements as HostStatements
from kgen.dsl.modules import load, load_source
from kgen.dsl.proofs import claims
from kgen.dsl.source import SourceFile

OPS = Path(kgen.ops.__file__).parent


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((check, "_sound"), (proofs, "_proved"), (parser, "_parsed"), (claims, "_known")):
        monkeypatch.setattr(owner, name, {})


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many statements of kernels and of ops were elaborated, how many kernels proved, how many files parsed."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str, of: Any = lambda *_: 1) -> None:
        before = getattr(owner, name)

        def counting(*arguments: Any) -> Any:
            counted[what] += of(*arguments)
            return before(*arguments)

        monkeypatch.setattr(owner, name, counting)

    count(Statements, "block", "kernel statements", lambda _, statements: len(statements))
    count(HostStatements, "block", "op statements", lambda _, statements: len(statements))
    count(proofs, "check_bounds", "proofs")
    count(parser, "logical_lines", "files")
    return counted


def told(module: Any) -> list[str]:
    diagnostics = Diagnostics()
    check_module(module, diagnostics)
    check_ops(source_of(module), diagnostics)
    return [d.render() for d in diagnostics.sorted()]


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on each path is elaborated from its beginning, and nothing is known of others."""
    monkeypatch.setattr(Choices, "mark", lambda *_: None)
    monkeypatch.setattr(proofs, "MAX_PROVED", 0)
    monkeypatch.setattr(check, "MAX_SOUND", 0)
    for owner, name in ((check, "_sound"), (proofs, "_proved")):
        monkeypatch.setattr(owner, name, _Forgetful())


class _Forgetful(dict[Any, Any]):
    def __contains__(self, key: object) -> bool:
        return False


def test_the_shipped_ops_take_a_bounded_amount_of_work(work: Counter[str]) -> None:
    for path in sorted(OPS.glob("*.kdsl")):
        assert told(load(path).module) == []
    # A fifth more than it is: a proof for each set of subscripts, and of each path what is behind the answer that tells
    # it from the one before.
    assert work["files"] == len(list(OPS.glob("*.kdsl")))
    assert work["proofs"] <= 180, work
    assert work["op statements"] <= 2450, work
    assert work["kernel statements"] <= 4200, work


def test_paths_go_on_from_where_they_part(work: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = OPS / "parallel_linear_cross_entropy.kdsl"
    told(load(path).module)
    shared = Counter(work)
    work.clear()
    whole(monkeypatch)
    told(load(path).module)
    assert shared["op statements"] < 0.4 * work["op statements"]
    assert shared["kernel statements"] < 0.4 * work["kernel statements"]
    assert shared["proofs"] < 0.2 * work["proofs"]


def test_the_programs_of_all_paths_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def keep(owner: Any) -> None:
        before = owner._elaborate

        def kept(*arguments: Any) -> Any:
            made.append(before(*arguments))
            return made[-1]

        monkeypatch.setattr(owner, "_elaborate", kept)

    keep(host_check)
    keep(check)
    module = load_source(SourceFile("f.kdsl", SOUND)).module
    assert told(module) == []
    shared, made[:] = list(made), []
    whole(monkeypatch)
    assert told(module) == []
    assert len(made) > 20 and shared == made and repr(shared) == repr(made)


SOUND = """
kernel f(x: T[*M, N], w: T[N]?, a: const bool = false, b: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    if a:
        s = sum(x[m, n], n)
    else:
        s = 1.0
    t = x[m, n] * s
    if b and w:
        u = w[n] * t
    elif b:
        u = t * t
    else:
        u = t
    y[m, n] = u

kernel total(x: T[M, N]) -> (y: f32[N]):
    parallel m in M
    tile n in N
    y[n] += x[m, n]

op g[T: f16 | f32](x: T[B, H], w: T[H]?, a: const bool = false, b: const bool = false) -> (y: T[B, H]):
    forward:
        v = f(x, w, a=a, b=b)
        if a:
            z = f(v, a=b)
        else:
            z = v
        for c in chunks(B):
            if b:
                y[c] = f(z[c], w)
            else:
                y[c] = f(z[c])
        if d_w:
            sums = total(x)
    backward(d_y):
        if d_x:
            d_x = f(d_y, a=a)
        if d_w:
            d_w = T(sums)
"""

MISTAKES = {
    "on one path": """
kernel f(x: T[*M, N], w: T[N]?, a: const bool = false, b: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    if a:
        s = sum(x[m, n], n)
    else:
        s = 1.0
    if b:
        t = x[m, n + 1]
    else:
        t = x[m, n]
    if w:
        u = w[n] * s
    else:
        u = x[m, n] * unknown
    y[m, n] = t * u
""",
    "a name that only one path binds": """
kernel f(x: T[*M, N], a: const bool = false, b: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    v = x[m, n]
    if a:
        s = v
    if b:
        t = s
    else:
        t = v
    y[m, n] = t
""",
    "subscripts that differ on paths": """
kernel f(x: T[*M, N], a: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    if a:
        y[m, n] = x[m, n]
    else:
        y[m, n // 2] = x[m, n]
""",
    "an op": """
kernel double(x: T[*M]) -> (y: T[*M]):
    parallel m in M
    y[m] = 2.0 * x[m]

op f[T: f16 | f32](x: T[B, H], w: T[H]?, a: const bool = false) -> (y: T[B, H]):
    forward:
        if a:
            z = double(x)
        if w:
            v = double(w)
        else:
            v = double(missing)
        if d_x:
            y = double(x)
        else:
            y = double(z)
    backward(d_y):
        d_x = double(d_y)
        if w:
            d_w = double(d_y)
""",
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_in_the_same_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_source(SourceFile("f.kdsl", MISTAKES[name])).module
    shared = told(module)
    again = told(module)
    whole(monkeypatch)
    assert shared == again == told(module)
    assert shared


def test_a_kernel_of_another_text_is_checked_by_itself(work: Counter[str]) -> None:
    text = MISTAKES["on one path"].replace("n + 1", "n").replace("unknown", "2.0")
    assert told(load_source(SourceFile("f.kdsl", text)).module) == []
    done = Counter(work)
    assert told(load_source(SourceFile("other.kdsl", text)).module) == []
    assert work["kernel statements"] == done["kernel statements"]  # the same text elsewhere
    assert told(load_source(SourceFile("f.kdsl", text.replace("x[m, n] * 2.0", "x[m, N] * 2.0"))).module)
    assert told(load_source(SourceFile("f.kdsl", text.replace("= 2.0 *", "= 3.0 *"))).module) == []


def test_a_mistake_is_never_taken_for_proved() -> None:
    module = load_source(SourceFile("f.kdsl", MISTAKES["subscripts that differ on paths"])).module
    first = Diagnostics()
    check_module(module, first)
    check_module(module, first)  # which tells nothing new
    assert [d.code for d in first.items] == ["K0402"]
    second = Diagnostics()
    check_module(module, second)
    assert [d.render() for d in second.items] == [d.render() for d in first.items]
