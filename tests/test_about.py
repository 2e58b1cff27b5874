"""What stands above generated code: what it was compiled for, what it relies on, how it is launched."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kgen.cli import app
from kgen.codegen.abi import grid_size, sum_grid
from kgen.codegen.program import Program
from kgen.dsl.modules import load
from kgen.runtime.ahead import Choices, Target, target
from kgen.runtime.derived import gradient_targets

OPS = Path(__file__).resolve().parents[1] / "ops"
# File, kernel, sizes: rows, rows in chunks, a cluster, points, several parallel indices, columns that are summed.
KERNELS = [
    ("softmax", "softmax", {"M": 4096, "N": 20480}),
    ("rms_norm", "rms_norm", {"M": 100, "N": 131072}),
    ("rms_norm", "rms_norm", {"M": 7, "N": 100}),
    ("swiglu", "swiglu", {"M": 100, "N": 1000}),
    ("rope", "rope", {}),
    ("cross_entropy", "cross_entropy", {}),
]


def made(file: str, name: str, dims: dict[str, int]) -> Target:
    module = load(OPS / f"{file}.kdsl").module
    return target(module, next(k for k in module.kernels if k.name == name), Choices(dims=dims, dtype="bf16"))


def targets() -> list[Target]:
    first = [made(*k) for k in KERNELS]
    return [*first, gradient_targets(first[2]).backward, gradient_targets(first[5]).backward]


def head(p: Program) -> list[str]:
    """The comment lines at the top, without their signs."""
    sign = "// " if p.backend == "cuda" else "# "
    lines = p.source.split("\n")
    return [line.removeprefix(sign) for line in lines[: next(i for i, x in enumerate(lines) if not x.startswith(sign))]]


def facts(p: Program) -> list[str]:
    lines = head(p)
    (launch,) = [i for i, line in enumerate(lines) if line.startswith("Launch: ")]
    return [line for line in lines[:launch] if re.match("Compiled for|Innermost|Address|Multiples", line)]


@pytest.mark.parametrize("t", targets(), ids=lambda t: f"{t.name} {dict(t.layout.variant.dims)}")
def test_both_backends_say_what_the_code_relies_on_in_the_same_words(t: Target) -> None:
    cuda, triton = (facts(t.program(backend)) for backend in ("cuda", "triton"))
    assert cuda == triton and len(cuda) >= 3
    dims = dict(t.layout.variant.dims)
    for d, n in dims.items():
        assert re.search(rf"\b{d} = {n}\b", cuda[0])
    for p in t.program("cuda").launches:
        assert facts(p)


@pytest.mark.parametrize("t", targets(), ids=lambda t: f"{t.name} {dict(t.layout.variant.dims)}")
def test_the_grid_is_that_of_the_launch(t: Target) -> None:
    """The expression above the code, evaluated, is the number of blocks that the runtime launches."""
    known = {**t.layout.dims, "SPLITS": 5, "ceil": math.ceil}
    for backend, pattern in (("cuda", r"Launch: grid (.*), block (\d+)(?:, clusters of (\d+) blocks, which are "
                                      r"compiled in)?, no dynamic shared memory\."),
                             ("triton", r"Launch: grid \((.*),\), num_warps=(\d+)(?:, maxnreg=\d+)?\.")):  # fmt: skip
        for p in t.program(backend).launches:
            (line,) = [x for x in head(p) if x.startswith("Launch: ")]
            found = re.fullmatch(pattern, line)
            assert found is not None, line
            text = re.sub(r"triton\.cdiv\((.*), (\d+)\)", r"ceil((\1) / \2)", found[1])
            sums = p.stage.sums if p.stage is not None else None
            if p.stage is not None and sums is not None:
                programs = sum_grid(p.stage.kernel, p.schedule, sums, {**t.layout.dims, "SPLITS": 5})
            else:
                kernel, variant = (t.layout.kernel, t.layout.variant) if p.stage is None else (
                    p.stage.kernel, p.stage.variant
                )  # fmt: skip
                programs = grid_size(kernel, variant, p.schedule, t.layout.dims)
            assert eval(text, {}, known) == programs * p.schedule.cluster  # the cluster's blocks are blocks of the grid
            assert int(found[2]) * (1 if backend == "cuda" else 32) == p.schedule.threads
            if backend == "cuda":
                assert int(found[3] or 1) == p.schedule.cluster


def test_one_of_them_is_a_cluster_and_one_a_sum() -> None:
    found = [p for t in targets() for p in t.program("cuda").launches]
    assert any(p.schedule.cluster > 1 for p in found) and any(p.stage is not None and p.stage.sums for p in found)


def test_what_is_shown_is_what_is_built(tmp_path: Path) -> None:
    args = [
        "build",
        str(OPS / "softmax.kdsl") + ":softmax",
        "--dim",
        "N=20480",
        "--out",
        str(tmp_path),
        "--dtype",
        "bf16",
    ]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    lines = [
        "Compiled for T = bf16, N = 20480.",
        "Innermost stride 1: x, y.",
        "Address and other strides multiples of 16 bytes: x, y.",
    ]
    for file, stage, sign, launch in (
        ("softmax.cu", "cuda", "//", "grid M, block 1024, no dynamic shared memory"),
        ("softmax_triton.py", "triton", "#", "grid (M,), num_warps=16, maxnreg=64"),
    ):
        want = "\n".join(f"{sign} {line}" for line in (*lines, f"Launch: {launch}."))
        shown = CliRunner().invoke(app, ["show", "softmax", "-s", stage, "--dim", "N=20480", "--dtype", "bf16"]).stdout
        assert want in shown and want in (tmp_path / file).read_text()
