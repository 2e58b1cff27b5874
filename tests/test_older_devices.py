"""Devices before sm_80: what they have no instruction for is written out, and what is too old is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from executor_kit import body, int64, pointer
from test_build import run
from test_shipped_cubins import KERNELS, kernel_of

from kgen.cli.doctor import _gpu
from kgen.codegen.cuda.prelude import PRIMITIVES, prelude
from kgen.codegen.machines import OLDEST
from kgen.codegen.program import Program
from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, Target, binary, target
from kgen.runtime.backends import cuda, triton
from kgen.runtime.backends.base import Executor
from kgen.runtime.backends.driver import Binary
from kgen.runtime.cache import Cache
from kgen.runtime.host_executor import available, compile_host

runs = pytest.mark.skipif(available() is not None, reason=str(available()))
DTYPES = ("bf16", "f16", "f32")
DEVICE = torch.device("cuda", 0)
# Those at their example sizes, and rows so wide that what all of them read is to stay in L1.
CASES = [*((file, name, {}) for file, name in KERNELS), ("layer_norm.kdsl", "layer_norm", {"N": 32768})]

# Every rounding to 16 bits: of f64 and f32, one value at a time and two, stored and in the middle of a computation.
NARROWED = """
kernel narrowed(x: f64[M, N], y: f32[M, N]) -> (a: bf16[M, N], b: f16[M, N], c: bf16[M, N], d: f16[M, N]):
    parallel m in M
    tile n in N
    a[m, n] = bf16(x[m, n])
    b[m, n] = f16(x[m, n])
    c[m, n] = maximum(bf16(y[m, n] * 3.0), exp(y[m, n]))
    d[m, n] = minimum(f16(y[m, n] * 3.0), erf(y[m, n]))
"""


def shipped(file: str, name: str, dtype: str, **dims: int) -> Target:
    """A shipped kernel, at its example sizes where `dims` has no others."""
    return target(*kernel_of(file, name), Choices(dims=dims, dtype=dtype))


def narrowed(columns: int) -> Target:
    """The kernel of NARROWED."""
    module = parse_text(NARROWED, "narrowed.kdsl")
    return target(module, module.kernels[0], Choices(dims={"M": 4, "N": columns}))


def primitives(source: str) -> set[str]:
    """The device primitives that a text defines."""
    inside = source.partition("// ---- device primitives ----")[2].partition("// ---- end of device primitives ----")[0]
    return set(re.findall(r"^__device__.* (\w+)\(", inside, re.M))


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("file", "name", "dims"), CASES)
def test_shipped_kernels_compile_and_spill_no_more(file: str, name: str, dims: dict[str, int], dtype: str) -> None:
    made = shipped(file, name, dtype, **dims)
    for older, newer in zip(*(made.program("cuda", capability=c).launches for c in (75, 80)), strict=True):
        found = binary(made, older, "sm_75")
        assert ".target sm_75" in found.ptx
        if found.resources.local_bytes:
            assert found.resources.local_bytes <= binary(made, newer, "sm_80").resources.local_bytes


@pytest.mark.parametrize("columns", [4096, 33])
def test_every_rounding_compiles(columns: int) -> None:
    made = narrowed(columns)
    program = made.program("cuda", capability=75)
    assert {"cvt_bf16_f64", "cvt_f16_f64", "cvt_bf16_f32", "cvt_f16_f32"} <= primitives(program.source)
    assert binary(made, program, "sm_75").resources.local_bytes == 0


POLICIES = {"kept_policy", "load_resident"}
PAIRS = {"max_f16x2", "min_f16x2", "max_bf16x2", "min_bf16x2"}


def test_these_kernels_use_every_primitive() -> None:
    """Those aside that newer devices alone have: clusters, loads with a policy, and extremes of pairs."""
    seen = set[str]()
    for made in (*(shipped(f, n, dtype, **dims) for f, n, dims in CASES for dtype in DTYPES), narrowed(4096)):
        for part in made.program("cuda", capability=75).launches:
            assert "__CUDA_ARCH__" not in part.source and "createpolicy" not in part.source
            seen |= primitives(part.source)
    newer = {n for n in PRIMITIVES if n.startswith(("cluster_", "store_to_block_", "load_kept"))} | POLICIES | PAIRS
    assert seen == {n for n in PRIMITIVES - newer if " " not in n}


def test_text_is_decided_when_it_is_emitted() -> None:
    for file, name in (("rope.kdsl", "rope"), ("rms_norm.kdsl", "rms_norm")):
        made = shipped(file, name, "bf16")
        newer = [made.program("cuda", capability=c).source for c in (80, 86, 89, 90, 100)]
        assert len(set(newer)) == 1 and "__CUDA_ARCH__" not in newer[0]
        assert "evict_last" in newer[0] and "cvt.rn.bf16x2" in newer[0]
        older = made.program("cuda", capability=75).source
        assert "L2::evict_last" not in older and "cvt.rn.bf16" not in older and "policy" not in older


def test_a_file_for_several_architectures_suits_the_oldest(tmp_path: Path) -> None:
    args = ("build", "ops/rms_norm.kdsl", "--backend", "cuda", "--dtype", "bf16", "--json")
    code, out, err = run(*args, "--arch", "sm_75,sm_90", "--out", tmp_path)
    assert code == 0, err
    (manifest,) = json.loads(out).values()
    (launch,) = manifest["kernels"]["rms_norm"]["backends"]["cuda"]["launches"]
    assert list(launch["binaries"]) == ["sm_75", "sm_90"]
    assert "cvt.rn.bf16" not in (tmp_path / "rms_norm.cu").read_text()


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_compiles_for_them(dtype: str) -> None:
    made = shipped("rms_norm.kdsl", "rms_norm", dtype)
    found = binary(made, made.program("triton", capability=75), "sm_75")
    assert ".target sm_75" in found.ptx and found.resources.local_bytes == 0


# ---- right -----------------------------------------------------------------------------------------------------------

# The one intrinsic of the emitted text that the simulation of a device lacks.
TOWARD_ZERO = """
inline float __double2float_rz(double x) {
    const float near = (float)x;
    return fabs((double)near) > fabs(x) ? __uint_as_float(__float_as_uint(near) - 1) : near;
}
"""
# NaN as instructions of newer devices give it, whatever NaN they are given.
NAN = 0x7FFF


def emitted(*names: str) -> str:
    """What is emitted for `names` before sm_80, but for what is one instruction there too."""
    definitions = re.findall(r"^__device__.*?^}\n", "".join(prelude({*names}, {}, 75)), re.M | re.S)
    return f"namespace emitted {{\n{TOWARD_ZERO}{''.join(d for d in definitions if 'asm' not in d)}}}\n"


def each(cache_dir: Path, names: set[str], statement: str, x: np.ndarray, out: np.ndarray) -> None:
    """`statement`, which makes out[i] of x[i] with what is emitted for `names`, for every i."""
    kinds = {"float32": "float", "float64": "double", "uint16": "unsigned short", "uint32": "unsigned"}
    x_type, out_type = kinds[x.dtype.name], kinds[out.dtype.name]
    text = body(
        "each",
        f"const {x_type}* x, {out_type}* out, long long n",
        f"using namespace emitted;\nfor (long long i = 0; i < n; ++i) {{ {statement} }}",
    )
    kernel = compile_host(emitted(*names) + text, "each", cache_dir=cache_dir)
    kernel.launch((1, 1, 1), (1, 1, 1), 0, [pointer(x), pointer(out), int64(out.size)])


def floats() -> np.ndarray:
    """Of each upper half the float that has nothing below, those around the tie, the tie, and the last: with NaNs,
    infinities, subnormals and zeros of both signs, and what rounds up to infinity."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | lower).reshape(-1).view(np.float32)


def bits_of(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """`x` as torch converts it."""
    there = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16).copy()
    there[np.isnan(x)] = NAN
    return there


@runs
def test_f32_to_bf16_is_rounded_as_torch_does(cache_dir: Path) -> None:
    x = floats()
    found = np.zeros(x.size, np.uint16)
    each(cache_dir, {"cvt_bf16_f32"}, "out[i] = emitted::cvt_bf16_f32(x[i]);", x, found)
    assert np.array_equal(found, bits_of(x, torch.bfloat16))


@runs
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_two_at_a_time(cache_dir: Path, name: str, dtype: torch.dtype) -> None:
    x = floats()
    found = np.zeros(x.size // 2, np.uint32)
    statement = f"out[i] = emitted::cvt_{name}x2_f32(x[2 * i + 1], x[2 * i]);"
    each(cache_dir, {f"cvt_{name}x2_f32"}, statement, x, found)
    assert np.array_equal(found.view(np.uint16), bits_of(x, dtype))  # little-endian: the lower half comes first


@runs
def test_f64_to_bf16_is_rounded_once(cache_dir: Path) -> None:
    """Just beside a tie the last bit of a float does not tell on which side."""
    with np.errstate(invalid="ignore"):
        near = floats().astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        beside = [np.nextafter(near, to) for to in (-np.inf, np.inf)]
    wide = np.array([1e300, -1e300, 1e-300, -1e-300, 2.0**128, 3.4e38, 3.39e38])
    x = np.concatenate([near, *beside, wide])
    found = np.zeros(x.size, np.uint16)
    each(cache_dir, {"cvt_bf16_f64"}, "out[i] = emitted::cvt_bf16_f64(x[i]);", x, found)
    # To nearest even in binary64, where the spacing of bf16 divides without error.
    with np.errstate(invalid="ignore", over="ignore"):
        spacing = np.exp2(np.maximum(np.frexp(x)[1] - 1, -126) - 7.0)
        once = np.where(np.isfinite(x), np.rint(x / spacing) * spacing, x)
    with np.errstate(over="ignore"):
        expected = bits_of(once.astype(np.float32), torch.bfloat16)
    assert np.array_equal(found, expected)


@runs
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_the_larger_and_the_smaller(cache_dir: Path, name: str) -> None:
    of = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    a, b = (m.reshape(-1) for m in np.meshgrid(of, of))
    found = np.zeros(a.size, np.float32)
    pairs = np.ascontiguousarray(np.stack([a, b], 1)).reshape(-1)
    each(cache_dir, {f"{name}_f32"}, f"out[i] = emitted::{name}(x[2 * i], x[2 * i + 1]);", pairs, found)
    expected = getattr(np, name)(a, b)
    assert np.array_equal(found, expected, equal_nan=True) and np.isnan(expected).any()
    zeros = (a == 0) & (b == 0)
    assert np.array_equal(np.signbit(found[zeros]), np.signbit(b[zeros])), "of equals the second, as on a CPU"


# ---- at run time -----------------------------------------------------------------------------------------------------


def device_of(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """Let torch see a GPU of compute capability `capability`."""
    p = SimpleNamespace(
        name="GPU", major=capability // 10, minor=capability % 10, multi_processor_count=40, total_memory=1 << 34
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: p)


def test_calls_compile_for_the_device_they_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[Program, Binary]] = []
    monkeypatch.setattr(cuda, "Loaded", lambda program, made, device: loaded.append((program, made)))
    made = shipped("rms_norm.kdsl", "rms_norm", "bf16")
    cache = Cache(tmp_path)
    for capability in (75, 80, 86, 90):
        device_of(monkeypatch, capability)
        cuda.Cuda().build(made.kernel, made.layout, DEVICE, cache)
    older, *newer = (p.source for p, _ in loaded)
    assert len(set(newer)) == 1 and older not in newer
    assert "cvt.rn.bf16x2" in newer[0] and "cvt.rn.bf16x2" not in older
    # The text is the same, the machine code is not, nor what the cache has it under.
    assert len({b.key for _, b in loaded}) == len({b.cubin for _, b in loaded}) == 4


@pytest.mark.parametrize("executor", [cuda.Cuda(), triton.Triton()])
def test_what_is_too_old_is_told(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    device_of(monkeypatch, 70)
    assert executor.why_unavailable(DEVICE) == "sm_70 is too old: code is generated for sm_75 and later"
    device_of(monkeypatch, OLDEST)
    assert "too old" not in (executor.why_unavailable(DEVICE) or "")


def test_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device_of(monkeypatch, 70)
    assert _gpu().status == "missing"
    assert "sm_70 is too old: code is generated for sm_75 and later" in _gpu().advice
    device_of(monkeypatch, OLDEST)
    assert _gpu().status == "ok" and not _gpu().advice


@pytest.mark.parametrize("command", [("show", "--stage", "cuda"), ("build", "--backend", "triton")])
def test_no_text_for_what_is_too_old(command: tuple[str, ...], tmp_path: Path) -> None:
    out = ("--out", tmp_path) if command[0] == "build" else ()
    code, _, err = run(command[0], "ops/rms_norm.kdsl", *command[1:], "--arch", "sm_70", *out)
    assert code == 2 and "--arch: sm_70 is too old: code is generated for sm_75 and later" in err
