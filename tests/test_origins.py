"""What comments of generated code cite: a line that a user has, and the statement that stands there as a whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kgen.codegen.origins import LONGEST, cited, file_name
from kgen.dsl.parser import parse_text
from kgen.dsl.source import SourceFile, Span
from kgen.runtime.ahead import Choices, Target, target
from kgen.runtime.derived import gradient_targets
from kgen.runtime.eject_op import kernel_files, op_source
from kgen.runtime.op_target import op_target

OPS = Path(__file__).resolve().parents[1] / "ops"
SEVERAL = '''\
"""Brackets ( and # that are none, and
a second line."""

fn gated(a, b) = (
    a * sigmoid(a)  # the (gate
    * b
)

kernel k(x: T[*M, N], w: T[N]) -> (y: T[*M, N], z: T[*M, N]):
    schedule cuda: threads = 64
    parallel m in M
    tile n in N
    r = rsqrt(
        mean(
            x[m, n] * x[m, n],  # squares
            n,
        )
        + 1e-6
    )
    y[m, n] = (
        gated(x[m, n] * r, w[n])
        - w[n]
    )
    z[m, n] = (x[m, n] + r) * (
        w[n] + r
    )
'''
R = "k.kdsl:13: r = rsqrt(mean(x[m, n] * x[m, n], n) + 1e-6)"
Y = "k.kdsl:20: y[m, n] = gated(x[m, n] * r, w[n]) - w[n]"
Z = "k.kdsl:24: z[m, n] = (x[m, n] + r) * (w[n] + r)"
# A comment that cites a line, in CUDA C or in Python.
CITED = re.compile(r"\s*(?://|#) (\S+\.kdsl):(\d+)((?:, \w+)?): (.*)")


def made(text: str = SEVERAL, **dims: int) -> Target:
    module = parse_text(text, "some/where/k.kdsl")
    return target(module, module.kernels[0], Choices(dims=dims or {"M": 8, "N": 256}, dtype="f32"))


def comments(t: Target, backend: str) -> set[tuple[str, int, str, str]]:
    """File, line, role and text of each comment that cites a line."""
    lines = [line for p in t.launches(backend) for line in p.source.split("\n")]
    return {(m[1], int(m[2]), m[3], m[4]) for line in lines if (m := CITED.fullmatch(line))}


def shown(t: Target, backend: str) -> set[str]:
    return {f"{file}:{line}{role}: {text}" for file, line, role, text in comments(t, backend)}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_statements_of_several_lines_are_cited_on_one(backend: str) -> None:
    assert shown(made(), backend) == {R, Y, Z}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_what_is_derived_cites_what_it_is_derived_from(backend: str) -> None:
    derived = gradient_targets(made())
    found = comments(derived.backward, backend)
    assert {line for _, line, _, _ in found} <= {4, 13, 20, 24} and {role for *_, role, _ in found} == {", backward"}
    assert {file for file, *_ in found} == {"k.kdsl"}
    stored = [text for *_, text in found if text.startswith("d_x[m, n] = ")]
    assert stored, found
    training = shown(derived.training, backend)
    assert "k.kdsl:13, training: saved_r[m] = r" in training and Z in training
    for t in (derived.training, derived.backward):
        for p in t.launches(backend):
            assert "_backward.kdsl" not in p.source and "_forward.kdsl" not in p.source
            assert f"{'generated from' if backend == 'cuda' else ' of'} k.kdsl" in p.source
    assert derived.training.scheduled("cuda").schedule.by == "the schedule at k.kdsl:10"


def test_comments_of_a_derived_kernel_name_lines_and_show_statements() -> None:
    derived = gradient_targets(made()).derived
    above = {
        line: before.strip()
        for before, line in zip(derived.forward_text.split("\n"), derived.forward_text.split("\n")[1:], strict=False)
    }
    assert above["    r = rsqrt(sum(x[m, n] * x[m, n], n) / N + 1e-6)"] == f"# {R}"
    assert above["    z[m, n] = (x[m, n] + r) * (w[n] + r)"] == "# k.kdsl:24"  # which is the statement below
    assert above["    schedule cuda: threads = 64"] == "# k.kdsl:10"


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax", "swiglu", "rope", "cross_entropy"])
def test_shipped_backwards_cite_lines_of_their_files(name: str, backend: str) -> None:
    from kgen.cli.files import kernel_of, read

    module = read(OPS / f"{name}.kdsl").module
    without = frozenset({"positions", "weight", "class_weight", "token_weight"})
    declared = kernel_of(module, name)
    known = {p.name for p in declared.params}
    derived = gradient_targets(target(module, declared, Choices(without=without & known)))
    for t in (derived.training, derived.backward):
        found = comments(t, backend)
        assert found
        for file, line, _, _ in found:
            text = (OPS / file).read_text("utf-8").split("\n")[line - 1]
            assert re.match(r"fn | +\S.*=", text), (file, line, text)


def test_an_ejected_op_cites_whole_statements() -> None:
    text = (
        "kernel k(x: T[*M, N], s: f32 = 1.0) -> (y: T[*M, N]):\n    parallel m in M, n in N\n"
        "    y[m, n] = s * x[m, n]\n\n"
        "op f(x: f32[B, H], w: f32[V, H]) -> (y: f32[B, V]):\n    forward:\n        z = k(\n            x,\n"
        "            s=2.0,  # twice\n        )\n        y = z @ w.T\n"
    )
    module = parse_text(text, "f.kdsl")
    op = op_target(module, module.ops[0], Choices(dims={"B": 8, "H": 16, "V": 4}), (), "auto")
    assert "# f.kdsl:7: z = k(x, s=2.0)\n" in op_source(op, kernel_files(op))


def test_long_statements_are_cut_and_no_comment_goes_on() -> None:
    source = SourceFile("a\\b/c.kdsl", f"{'x' * 200} = 1\ny = 1 \\\n\n\x07z = 2  # c\n")
    spans = [Span(source, k, 1, k, 2) for k in (1, 2, 3, 4, 99)]
    long, slash, empty, bell, nowhere = map(cited, spans)
    assert long == f"c.kdsl:1: {'x' * (LONGEST - 4)} ..." and slash == "c.kdsl:2: y = 1"
    assert (empty, bell, nowhere) == ("", "c.kdsl:4:  z = 2", "") and file_name(spans[0]) == "c.kdsl"
