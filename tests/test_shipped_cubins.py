"""The machine code of every shipped kernel for sm_90: nothing spills, and aligned rows move in vectors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_build import run

from kgen.dsl import ast
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, binary, target

OPS = Path(__file__).resolve().parent.parent / "ops"
KERNELS = [(path.name, kernel.name) for path in sorted(OPS.glob("*.kdsl")) for kernel in load(path).module.kernels]


def kernel_of(file: str, name: str) -> tuple[ast.Module, ast.Kernel]:
    """A shipped kernel."""
    module = load(OPS / file).module
    return module, next(k for k in module.kernels if k.name == name)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("file", "name"), KERNELS)
def test_at_example_sizes(file: str, name: str, dtype: str, backend: str) -> None:
    module, kernel = kernel_of(file, name)
    compiled = target(module, kernel, Choices(dtype=dtype))
    program = compiled.program(backend)
    for part in (program, *program.then):
        made = binary(compiled, part, "sm_90")
        assert made.resources.local_bytes == 0, made.resources
        assert "LDL" not in made.sass
    sass = binary(compiled, program, "sm_90").sass
    arrays = [t for t in compiled.kernel.tensors if t.shape]
    reads = any(t.role != "out" for t in arrays)
    # Of a row that is held in small chunks, so that it fits, what a thread has of a chunk.
    chunks = [size for _, size in program.schedule.chunks] if program.schedule.held else []
    bits = min([128, *(int(dtype.strip("bf")) * size // program.schedule.threads for size in chunks)])
    assert not reads or re.search(rf"LDG\.E\.(\w+\.)*{bits}", sass), "rows that are aligned are read in vectors"
    # Of a row in several dtypes the widest is stored so too.
    widest = max((t.dtype.bits for t in arrays if len(t.shape) > 1), default=0)
    stores_rows = any(len(t.shape) > 1 and t.dtype.bits == widest for t in arrays if t.role != "in")
    assert not stores_rows or re.search(rf"STG\.E\.(\w+\.)*{bits}", sass)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(
    "width", [1, 2, 3, 17, 64, 127, 1000, 1024, 1025, 8192, 28001, 32000, 32001, 50257, 65536, 65537, 131072]
)
def test_norms_and_softmax_at_any_width(width: int, backend: str) -> None:
    for file, name in (
        ("rms_norm.kdsl", "rms_norm"), ("layer_norm.kdsl", "layer_norm"), ("softmax.kdsl", "softmax"),
        ("softmax.kdsl", "log_softmax"), ("cross_entropy.kdsl", "cross_entropy"),
        ("cross_entropy.kdsl", "cross_entropy_"),
    ):  # fmt: skip
        module, kernel = kernel_of(file, name)
        dim = "V" if name.startswith("cross") else "N"
        compiled = target(module, kernel, Choices(dims={dim: width}, dtype="bf16"))
        made = binary(compiled, compiled.program(backend), "sm_90")
        assert made.resources.local_bytes == 0, f"{name}: {made.resources}"


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("width", [8192, 16384, 20001, 32768, 65536, 131072])
@pytest.mark.parametrize("file", ["rms_norm.kdsl", "layer_norm.kdsl", "add_rms_norm.kdsl"])
def test_backward_of_norms_at_any_width(file: str, width: int, dtype: str) -> None:
    """Rows in one block, in the several of a cluster, and in none."""
    code, text, err = run("show", OPS / file, "--stage", "backward", "--dtype", dtype, "--dim", f"N={width}")
    assert code == 0, err
    module = parse_text(text.replace("backward ", "kernel d_", 1), file)
    compiled = target(module, module.kernels[-1], Choices(dims={"N": width}, dtype=dtype))
    program = compiled.program("cuda")
    for part in (program, *program.then):
        made = binary(compiled, part, "sm_90")
        assert made.resources.local_bytes == 0, f"{part.entry}: {made.resources}"


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("width", [3, 17, 33, 40])
def test_backward_of_cross_entropy_over_few_classes(width: int, dtype: str) -> None:
    """Many values a row, each of them in all threads that share the row, and many short rows a program."""
    code, text, err = run(
        "show", f"{OPS / 'cross_entropy.kdsl'}:cross_entropy", "--stage", "backward", "--dtype", dtype
    )
    assert code == 0, err
    module = parse_text(text.replace("backward ", "kernel d_", 1), "cross_entropy.kdsl")
    compiled = target(module, module.kernels[-1], Choices(dims={"V": width}, dtype=dtype))
    made = binary(compiled, compiled.program("triton"), "sm_90")
    assert made.resources.local_bytes == 0, made.resources
