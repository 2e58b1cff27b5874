"""`kgen build`: files that stand alone, a manifest that tells the truth, and clear refusals. No GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from typer.testing import CliRunner

from kgen.cli import app
from kgen.runtime import build as building
from kgen.runtime.cache import CACHE
from kgen.runtime.nvrtc import Resources

ROOT = Path(__file__).resolve().parents[1]
OPS = ROOT / "ops"

# Names that Python, Triton, C++ and the host function itself use; three kinds of sizes; merged and starred dimensions.
HOSTILE = """
kernel print(lambda: T[*torch, triton], grid: T[triton], float: f32 = 2.0) -> (_checked: T[*torch, triton]):
    example torch = 24, triton = 40
    parallel int in torch
    tile tl in triton
    _checked[int, tl] = float * lambda[int, tl] + grid[tl] * max(lambda[int, tl], tl)

kernel halves(x: T[B, 2 * D], scale: f32) -> (y: T[B, D]):
    example B = 5, D = 24
    require D >= 2
    parallel b in B
    tile d in D
    y[b, d] = scale * (x[b, d] - x[b, d + D])

kernel flip(x: inout T[N], s: f64 = 0.5):
    example N = 1000
    parallel n in N
    x[n] = x[n] * s
"""


def run(*args: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `kgen args`."""
    result = CliRunner().invoke(app, [str(a) for a in args], prog_name="kgen")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception  # a mistake in kgen, which writes nothing to standard error
    return result.exit_code, result.stdout, result.stderr


def clean(script: str, folder: Path, **environment: str) -> str:
    """Run `script` in a process where kgen cannot be imported; its output."""
    guard = "import sys; sys.modules['kgen'] = None\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", guard + script],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_CACHE_DIR", cache)
    monkeypatch.setenv("TRITON_CACHE_DIR", f"{cache}/triton-own")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    """The shipped ops and the hostile file, built for both backends."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "hostile.kdsl").write_text(HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_CACHE_DIR", cache)
        patch.setenv("TRITON_CACHE_DIR", f"{cache}/triton-own")
        small = ("--dim", "M=96", "--dim", "N=64", "--dtype", "f32")
        code, _, err = run("build", OPS / "rms_norm.kdsl", OPS / "swiglu.kdsl", *small, "--out", folder)
        assert code == 0, err
        code, _, err = run("build", folder / "hostile.kdsl", "--dtype", "f32", "--out", folder / "hostile")
        assert code == 0, err
    return folder


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


# ---- files ---------------------------------------------------------------------------------------------------------


def test_each_kernel_leaves_sources_binaries_and_a_place_in_the_manifest(built: Path) -> None:
    assert {p.name for p in (built / "rms_norm").iterdir()} == {
        "rms_norm.cu", "rms_norm.sm_90.cubin", "rms_norm.sm_90.ptx",
        "rms_norm_triton.py", "rms_norm_triton.sm_90.cubin", "rms_norm_triton.sm_90.ptx", "manifest.json",
    }  # fmt: skip
    assert set(manifest(built / "swiglu")["kernels"]) == {"swiglu", "geglu", "geglu_tanh"}
    for cubin in built.rglob("*.cubin"):
        assert cubin.read_bytes()[:4] == b"\x7fELF"
    for ptx in built.rglob("*.ptx"):
        assert ".target sm_90" in ptx.read_text()


def test_manifest_says_how_to_launch(built: Path) -> None:
    m = manifest(built / "rms_norm")
    k = m["kernels"]["rms_norm"]
    assert m["source"]["file"] == "rms_norm.kdsl"
    assert len(m["source"]["sha256"]) == 64
    assert set(m["compilers"]) == {"cuda", "triton"}
    assert k["dtypes"] == {"T": "f32", "W": "f32"}
    assert k["consts"] == {"round_first": False}
    assert k["optional"] == {"w": True}
    assert k["dims"]["compiled"] == {"N": 64}
    assert k["dims"]["run_time"] == ["M"]
    for backend in ("cuda", "triton"):
        (b,) = k["backends"][backend]["launches"]
        assert [a["name"] for a in b["arguments"]] == ["x", "w", "y", "M", "x", "y", "eps", "offset"]
        assert b["block"] == b["schedule"]["threads"] == b["launch_bounds"]
        rows = b["schedule"]["rows"]
        assert b["grid"] == ("M" if rows == 1 else f"ceil(M / {rows})")
        (figures,) = b["binaries"].values()
        assert figures["registers"] > 0
        assert figures["spill_store_bytes"] == figures["local_bytes"] == 0
        text = (built / "rms_norm" / figures["ptx"]).read_text()
        assert f".maxntid {b['block']}" in text or f".reqntid {b['block']}" in text
    assert str(built) not in (built / "rms_norm" / "manifest.json").read_text()


def test_manifest_names_what_vectors_and_merged_dimensions_assume(built: Path) -> None:
    k = manifest(built / "swiglu")["kernels"]["swiglu"]
    assert k["dims"]["derived"] == {"MN": "M*N"}
    assert k["dims"]["multiples"] == {"MN": 16}
    assert "M*N is a multiple of 16" in k["assumes"]


def test_another_ptxas_may_be_named_to_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch.compile does with the one of torch, which may be newer than Triton's own, for the rest of the process.
    newer = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(newer))
    for place in ("new", "from the cache of Triton"):
        monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / place))
        CACHE.clear_memory()
        code, _, err = run("build", OPS / "rms_norm.kdsl", "--dim", "M=96,N=64", "--dtype", "f32", "--out", tmp_path)
        assert code == 0, err
        text = (tmp_path / "rms_norm_triton.sm_90.ptx").read_text()
        assert re.search(r"^\.version 9\.", text, re.M), text[:200]  # else this tests nothing
        (launch,) = manifest(tmp_path)["kernels"]["rms_norm"]["backends"]["triton"]["launches"]
        assert launch["binaries"]["sm_90"]["registers"] > 0
        # Triton asks for the version that names its entries once a process.
        monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)


# ---- standing alone ------------------------------------------------------------------------------------------------


def test_cu_files_compile_alone(built: Path) -> None:
    names = sorted(str(p.relative_to(built)) for p in built.rglob("*.cu"))
    assert len(names) == 7
    script = f"""
from cupy_backends.cuda.libs import nvrtc
for name in {names!r}:
    text = open(name).read()
    assert "#include" not in text, name
    program = nvrtc.createProgram(text, name, (), ())
    nvrtc.compileProgram(program, ("--std=c++17", "--gpu-architecture=sm_80"))
    assert nvrtc.getCUBIN(program)[:4] == b"\\x7fELF"
    print(name)
"""
    assert clean(script, built).split() == names


def test_cu_header_says_how_to_launch(built: Path) -> None:
    text = (built / "hostile" / "print.cu").read_text()
    head = text.split("\n\n")[0]
    assert all(line.startswith("//") for line in head.split("\n"))
    (b,) = manifest(built / "hostile")["kernels"]["print"]["backends"]["cuda"]["launches"]
    assert f"//   grid    {b['grid']} blocks" in head
    assert f"//   block   {b['block']} threads" in head
    assert "// where torch = product of all dimensions of lambda but the last" in head
    signature = text[text.index("extern") :]
    listed = [line.split()[1] for line in head.split("// Arguments\n")[1].split("\n//\n")[0].split("\n")]
    declared = signature[signature.index("(\n") + 2 : signature.index(")\n{")].split("\n")
    assert listed == [line.strip().rstrip(",").split()[-1] for line in declared]


def test_triton_files_run_alone_and_agree_with_torch(built: Path) -> None:
    script = """
import importlib.util, torch
def load(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_")[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
def agree(got, want):
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-6, atol=2e-6)
torch.manual_seed(0)
for lead in ((3,), (2, 5), (), (1, 4, 1), (0, 3)):
    x, w = torch.randn(*lead, 64), torch.randn(64)
    y = torch.full_like(x, float("nan"))
    load("rms_norm/rms_norm_triton.py").launch_rms_norm(x, w, y, eps=1e-5, offset=1.0)
    agree(y, torch.nn.functional.rms_norm(x.double(), (64,), w.double() + 1, 1e-5))
rows = torch.randn(6, 96)[:, :64]
y = torch.empty(6, 64)
load("rms_norm/rms_norm_triton.py").launch_rms_norm(rows, w, y)
agree(y, torch.nn.functional.rms_norm(rows.double(), (64,), w.double(), 1e-6))
gate, up = torch.randn(2, 3, 48), torch.randn(2, 3, 48)
y = torch.full_like(up, float("nan"))
load("swiglu/swiglu_triton.py").launch_swiglu(gate, up, y)
agree(y, torch.nn.functional.silu(gate.double()) * up.double())
a, g = torch.randn(2, 7, 40), torch.randn(40)
y = torch.full_like(a, float("nan"))
m = load("hostile/print_triton.py")
(launch,) = [getattr(m, n) for n in dir(m) if n.startswith("launch_")]
launch(a, g, y)
agree(y, 2 * a.double() + g.double() * a.double().amax(-1, keepdim=True))
x, y = torch.randn(5, 48), torch.full((5, 24), float("nan"))
load("hostile/halves_triton.py").launch_halves(x, y, scale=3.0)
agree(y, 3 * (x[:, :24].double() - x[:, 24:].double()))
x = torch.randn(1000)
want = x.double() / 2
load("hostile/flip_triton.py").launch_flip(x)
agree(x, want)
print("done")
"""
    assert clean(script, built, TRITON_INTERPRET="1") == "done\n"


def test_host_functions_refuse_what_they_were_not_compiled_for(built: Path) -> None:
    script = """
import importlib.util, torch
def load(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_")[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
norm = load("rms_norm/rms_norm_triton.py").launch_rms_norm
glu = load("swiglu/swiglu_triton.py").launch_swiglu
E = torch.empty
cases = [
    (norm, (E(3, 64).half(), E(64), E(3, 64)), "x must have dtype torch.float32"),
    (norm, (E(3, 65), E(65), E(3, 65)), "x must have shape (3, 64), got (3, 65)"),
    (norm, (E(3, 64), E(64), E(4, 64)), "y must have shape (3, 64)"),
    (norm, (E(3, 64), E(1, 64), E(3, 64)), "w must have 1 dimensions"),
    (norm, (E(64, 3).T, E(64), E(3, 64)), "the innermost stride of x must be 1"),
    (norm, (E(3, 66)[:, :64], E(64), E(3, 64)), "multiples of 16 bytes"),
    (norm, (E(3 * 64 + 1)[1:].view(3, 64), E(64), E(3, 64)), "multiples of 16 bytes"),
    (norm, (E(4, 3, 64).transpose(0, 1), E(64), E(3, 4, 64)), "x must be contiguous"),
    (glu, (E(3, 5), E(3, 5), E(3, 5)), "M*N must be a multiple of 16"),
    (glu, (E(16), E(16), E(16, device="meta")), "all tensors must be on one device"),
]
for function, args, text in cases:
    try:
        function(*args)
    except ValueError as error:
        assert text in str(error), (text, str(error))
    else:
        raise SystemExit(f"not refused: {text}")
print(len(cases))
"""
    assert clean(script, built, TRITON_INTERPRET="1") == "10\n"


# ---- what it refuses, what it leaves -------------------------------------------------------------------------------


def test_a_kernel_that_spills_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = building.binary

    def spilling(*args: Any) -> Any:
        return replace(real(*args), resources=Resources(255, 64, 48, 52, 0))

    monkeypatch.setattr(building, "binary", spilling)
    args = ("build", OPS / "rms_norm.kdsl", "--backend", "cuda", "--dim", "N=64", "--out", tmp_path / "out")
    code, out, err = run(*args)
    assert (code, out) == (1, "")
    assert "rms_norm: the cuda kernel for sm_90 spills registers (48 bytes stored, 52 bytes loaded" in err
    assert "--allow-spills" in err
    assert not (tmp_path / "out").exists()
    code, out, _ = run(*args, "--allow-spills")
    assert code == 0
    assert "64 bytes of local memory" in out


def test_several_architectures_and_one_backend(tmp_path: Path) -> None:
    args = ("--arch", "sm_80,sm_90", "--backend", "cuda", "--out", tmp_path, "--json")
    code, out, _ = run("build", ROOT / "examples" / "vec_add.kdsl", *args)
    assert code == 0
    (m,) = json.loads(out).values()
    assert m == manifest(tmp_path)
    (launch,) = m["kernels"]["vec_add"]["backends"]["cuda"]["launches"]
    assert list(launch["binaries"]) == ["sm_80", "sm_90"]
    assert not list(tmp_path.glob("*.py"))


def test_a_second_build_compiles_nothing_and_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("build", f"{OPS / 'swiglu.kdsl'}:swiglu", "--dim", "M=64,N=64")
    assert run(*args, "--out", tmp_path / "a")[0] == 0
    from kgen.runtime import nvrtc, triton_compile
    from kgen.runtime.cache import CACHE

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled again")

    CACHE.clear_memory()
    monkeypatch.setattr(nvrtc, "compile_cuda", forbidden)
    monkeypatch.setattr(triton_compile, "compile_triton", forbidden)
    assert run(*args, "--out", tmp_path / "b")[0] == 0
    files = {p.name for p in (tmp_path / "a").iterdir()}
    assert files == {p.name for p in (tmp_path / "b").iterdir()}
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_build_explains_itself(tmp_path: Path) -> None:
    (tmp_path / "a.kdsl").write_text("kernel a(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n]\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.kdsl").write_text((tmp_path / "a.kdsl").read_text())
    out = ("--out", tmp_path / "out")
    code, _, err = run("build", tmp_path / "a.kdsl", *out)
    assert code == 1
    assert "a: no size is known for N" in err
    code, _, err = run("build", tmp_path / "a.kdsl", tmp_path / "b" / "a.kdsl", "--dim", "N=16", *out)
    assert code == 2
    assert "would both be built into" in err
    code, _, err = run("build", tmp_path / "a.kdsl", "--dim", "N=16", "--arch", "sm_10", *out)
    assert code == 2
    assert "--arch: sm_10 is too old: code is generated for sm_75 and later" in err
    code, _, err = run("build", tmp_path / "a.kdsl", "--dim", "N=16", "--arch", "sm_99", "--backend", "cuda", *out)
    assert code == 2
    assert "cannot compile for sm_99; it knows sm_75, " in err
    code, _, err = run("build", tmp_path / "a.kdsl", "--dim", "N=16", "--backend", "cuda", "--out", tmp_path / "a.kdsl")
    assert code == 1
    assert err.startswith("error: cannot write")
    assert not (tmp_path / "out").exists()


def test_build_without_a_home_to_write_to(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": "/proc", "KGEN_CACHE_DIR": "/proc/kgen"}
    for name in ("TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "TRITON_HOME"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "kgen.cli", "build", str(OPS / "rms_norm.kdsl"), "--dim=N=128", f"--out={tmp_path}"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: kgen cannot keep compiled kernels on disk")
    assert done.stderr.count("\n") == 1
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_a_missing_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    code, _, err = run("build", ROOT / "examples" / "vec_add.kdsl", "--backend", "cuda", "--out", tmp_path)
    assert code == 2
    assert "pip install 'kgen[cuda13]'" in err
    assert "Traceback" not in err
