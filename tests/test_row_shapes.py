"""How shipped kernels take their rows by default, at widths where that was measured, and that nothing spills there: all
of the CUDA programs, and those of Triton that did once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import kgen.ops
from kgen.codegen.schedule import Schedule
from kgen.dsl.modules import load
from kgen.runtime import nvrtc
from kgen.runtime.ahead import Choices, Target, target
from kgen.runtime.derived import gradient_targets
from kgen.runtime.triton_compile import compile_triton

OPS = Path(kgen.ops.__file__).parent
PLAIN = frozenset(("weight", "z_scale"))


def made(name: str, n: int, dtype: str, consts: Mapping[str, str] | None = None) -> Target:
    """The kernel `name`, `n` elements in a row."""
    file = {"log_softmax": "softmax", "cross_entropy_": "cross_entropy"}.get(name, name)
    module = load(OPS / f"{file}.kdsl").module
    dims = {"V" if file == "cross_entropy" else "N": n}
    without = PLAIN if name == "cross_entropy_" else frozenset[str]()
    kernel = next(k for k in module.kernels if k.name == name)
    return target(module, kernel, Choices(dims=dims, dtype=dtype, without=without, consts=consts or {}))


def spilled(t: Target, folder: Path) -> int:
    """Bytes for sm_90 that the largest of Triton's programs spills."""
    parts = t.program("triton").launches
    where = [p.stage.variant if p.stage is not None else t.layout.variant for p in parts]
    return max(compile_triton(p, v, 90, folder).resources.local_bytes for p, v in zip(parts, where, strict=True))


def chunk(s: Schedule) -> int:
    """Elements that are taken at a time; 0 for the whole row."""
    return s.chunks[0][1] if s.chunks else 0


CUDA = [
    # of short rows, threads with two vectors each
    ("layer_norm", 768, "bf16", (64, 2, 1, 0)),
    ("layer_norm", 1600, "bf16", (64, 1, 1, 0)),
    ("rms_norm", 1024, "f32", (128, 1, 1, 0)),
    # two programs a multiprocessor with a row each
    ("layer_norm", 20480, "bf16", (512, 1, 1, 0)),
    ("rms_norm", 32000, "bf16", (512, 1, 1, 0)),
    ("add_rms_norm", 8192, "bf16", (512, 1, 1, 0)),
    ("add_rms_norm", 20480, "bf16", (1024, 1, 1, 0)),
    # exponentials beside a narrower row: passes; beside one that is as wide: whole
    ("softmax", 32000, "bf16", (1024, 1, 1, 32000)),
    ("softmax", 40960, "bf16", (512, 1, 1, 32768)),
    ("softmax", 50257, "bf16", (512, 1, 1, 32768)),
    ("softmax", 65536, "bf16", (1024, 1, 1, 32768)),
    ("softmax", 16384, "f32", (512, 1, 1, 0)),
    ("softmax", 30720, "f32", (512, 1, 1, 0)),
    ("softmax", 50304, "f32", (256, 1, 2, 0)),
    # clusters, where no exponential is stored
    ("log_softmax", 100352, "bf16", (256, 1, 2, 0)),
    ("log_softmax", 128256, "bf16", (256, 1, 4, 0)),
    ("softmax", 128256, "bf16", (1024, 1, 1, 32768)),
    ("layer_norm", 131072, "bf16", (256, 1, 8, 0)),
    # 8 bytes were spilled here
    ("log_softmax", 65544, "bf16", (256, 1, 2, 0)),
    ("log_softmax", 102400, "bf16", (256, 1, 4, 0)),
    ("layer_norm", 114688, "bf16", (256, 1, 8, 0)),
    ("rms_norm", 131072, "bf16", (1024, 1, 2, 0)),
    ("cross_entropy_", 128256, "bf16", (1024, 1, 1, 65536)),
]


@pytest.mark.parametrize(("name", "n", "dtype", "expected"), CUDA)
def test_cuda(name: str, n: int, dtype: str, expected: tuple[int, int, int, int]) -> None:
    program = made(name, n, dtype).program("cuda")
    s = program.schedule
    assert (s.threads, s.rows, s.cluster, chunk(s)) == expected
    assert nvrtc.compile_cuda(program.source, program.entry, "sm_90").resources.local_bytes == 0


def test_rows_ask_ahead_by_all_that_is_loaded_of_them() -> None:
    """Two rows of 24 KB are more than L2 has ready for all programs that run."""
    assert made("rms_norm", 12288, "bf16").program("cuda").schedule.ahead
    assert made("add_rms_norm", 8192, "bf16").program("cuda").schedule.ahead
    assert not made("add_rms_norm", 12288, "bf16").program("cuda").schedule.ahead


TRITON = [
    ("layer_norm", 768, "bf16", (2, 2, 0, False)),
    ("layer_norm", 1280, "bf16", (2, 1, 0, False)),
    ("rms_norm", 2560, "bf16", (4, 1, 0, False)),
    ("rms_norm", 4096, "bf16", (8, 1, 0, False)),
    # in place: by bytes, so that rows stay in L2
    ("cross_entropy_", 16384, "bf16", (8, 1, 0, False)),
    ("cross_entropy_", 16384, "f32", (8, 1, 8192, False)),
    ("cross_entropy_", 32000, "bf16", (8, 1, 8192, False)),
    ("cross_entropy_", 32000, "f32", (16, 1, 16384, False)),
    ("cross_entropy_", 128256, "bf16", (32, 1, 32768, False)),
    ("cross_entropy_", 128256, "f32", (32, 1, 16384, False)),
    # 16 bits one by one
    ("cross_entropy_", 50257, "bf16", (16, 1, 4096, False)),
    ("cross_entropy_", 50257, "f32", (16, 1, 8192, False)),
    ("softmax", 50257, "bf16", (32, 1, 8192, False)),
    # wide
    ("softmax", 90000, "bf16", (16, 1, 16384, False)),
    ("softmax", 128256, "bf16", (32, 1, 32768, False)),
    ("layer_norm", 131072, "bf16", (32, 1, 16384, False)),
]


@pytest.mark.parametrize(("name", "n", "dtype", "expected"), TRITON)
def test_triton(name: str, n: int, dtype: str, expected: tuple[int, int, int, bool]) -> None:
    s = made(name, n, dtype).program("triton").schedule
    assert (s.threads // 32, s.rows, chunk(s), s.held) == expected


@pytest.mark.parametrize(
    ("name", "n", "dtype", "consts"),
    [
        ("cross_entropy", 262144, "bf16", {"smoothed": "true"}),
        ("cross_entropy_", 128256, "bf16", {"capped": "true"}),
        ("softmax", 128256, "f32", {}),
        ("softmax", 128256, "bf16", {}),
    ],
)
def test_wide_rows_of_triton_spill_nothing(
    name: str, n: int, dtype: str, consts: dict[str, str], tmp_path: Path
) -> None:
    assert spilled(made(name, n, dtype, consts), tmp_path) == 0


@pytest.mark.parametrize(
    ("name", "n", "dtype"), [("softmax", 46, "f32"), ("softmax", 33, "bf16"), ("rms_norm", 20, "bf16")]
)
def test_short_rows_of_a_backward_spill_nothing(name: str, n: int, dtype: str, tmp_path: Path) -> None:
    """As many of them as 128 threads have registers for."""
    assert spilled(gradient_targets(made(name, n, dtype)).backward, tmp_path) == 0


@pytest.mark.parametrize("consts", [{"capped": "true"}, {"smoothed": "true"}, {}])
def test_passes_that_do_more_have_more_threads(consts: dict[str, str]) -> None:
    program = made("cross_entropy", 29338, "bf16", consts).program("cuda")
    assert program.schedule.threads == (1024 if consts else 512)
    assert nvrtc.compile_cuda(program.source, program.entry, "sm_90").resources.local_bytes == 0
