"""The commands that need no compiler: check, fmt, new, show, doctor, cache, and how errors end them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kgen
from kgen.cli import app
from kgen.dsl.parser import parse_text

ROOT = Path(__file__).resolve().parents[1]
RMS_NORM = ROOT / "ops" / "rms_norm.kdsl"
SWIGLU = ROOT / "ops" / "swiglu.kdsl"

# Ten kernels, each with one mistake, all different.
TEN = """
kernel a(x: T[N]) -> (y: T[N]):
    parallel n in N
    y[n] = xx[n]
kernel b(x: T[N]) -> (y: T[N]):
    parallel n in N
    y[n] = expp(x[n])
kernel c(x: T[M, N]) -> (y: T[M]):
    parallel m in M
    tile n in N
    y[m] = x[m, n] * 2.0
kernel d(x: T[N]) -> (y: T[N]):
    parallel n in N
    y[n] = x[n, n]
kernel e(x: T[N]) -> (y: T[N]):
    parallel n in N
    y[n] = sum(x[n], n)
kernel f(x: T[N]) -> (y: T[N]):
    parallel n in N
    y[n] = x[n] // 2.0
kernel g(x: T[N]) -> (y: T[N]):
    parallel n in N
    y[n] = x[n + 1]
kernel h(x: T[M, N]) -> (y: T[N]):
    parallel m in M, n in N
    y[n] = x[m, n]
kernel i(x: T[N]):
    parallel n in N
    z = x[n]
kernel j(x: T[M, N]) -> (y: T[M]):
    parallel m in M
    tile n in N
    y[m] = sum(x[m, 0], n)
"""


def run(*args: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `kgen args`."""
    result = CliRunner().invoke(app, [str(a) for a in args], prog_name="kgen")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


# ---- the program ---------------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert run("--version")[:2] == (0, f"kgen {kgen.__version__}\n")
    code, out, _ = run("--help")
    assert code == 0
    for command in ("check", "fmt", "new", "show", "build", "doctor", "cache"):
        assert command in out
        assert run(command, "--help")[0] == 0


@pytest.mark.parametrize("args", [["frobnicate"], ["show"], ["check"], ["build", "--jobs", "-1", "x.kdsl"]])
def test_wrong_usage_ends_with_2(args: list[str]) -> None:
    assert run(*args)[0] == 2


def test_the_module_runs_as_a_program_without_traceback(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kgen.cli", "check", "nowhere.kdsl"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no file nowhere.kdsl\n"


def test_an_unexpected_exception_is_one_sentence_and_debug_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(sys.modules["kgen.cli.check"], "read", broken)
    code, out, err = run("check", RMS_NORM)
    assert code == 2
    assert out == ""
    assert err.startswith("internal error:")
    assert err.count("\n") == 1
    assert "report" in err and "--debug" in err
    code, _, err = run("check", RMS_NORM, "--debug")
    assert code == 2
    assert "Traceback" in err and "ZeroDivisionError: oh" in err


# ---- check ---------------------------------------------------------------------------------------------------------


def test_check_accepts_every_shipped_file() -> None:
    code, out, err = run("check", ROOT / "ops", ROOT / "examples")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"\d+ files, \d+ kernels, \d+ ops: no errors\n", out)


def test_check_reports_ten_mistakes_in_one_run(here: Path) -> None:
    (here / "ten.kdsl").write_text(TEN)
    code, out, err = run("check", "ten.kdsl")
    assert (code, out) == (1, "")
    places = re.findall(r"--> ten\.kdsl:(\d+):", err)
    assert len(places) == 10
    assert places == sorted(places, key=int)
    assert len(set(re.findall(r"error\[(K\d{4})\]", err))) >= 8
    assert err.endswith("10 errors in 1 of 1 file\n")
    assert "\x1b" not in err


def test_check_goes_on_to_the_next_file(here: Path) -> None:
    (here / "one.kdsl").write_text("kernel a(:\n")
    (here / "two.kdsl").write_text(TEN)
    (here / "three.kdsl").write_bytes(b"# \xff\n")
    code, _, err = run("check", here)
    assert code == 1
    assert {Path(p).name for p in re.findall(r"--> (\S+?\.kdsl):", err)} == {"one.kdsl", "two.kdsl", "three.kdsl"}


def test_a_mistake_of_an_imported_file_is_told_once(here: Path) -> None:
    (here / "f.kdsl").write_text("fn f(a) = a *\n")
    for name in ("p", "q"):
        (here / f"{name}.kdsl").write_text(
            f"from f import f\nkernel {name}(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = f(x[n])\n"
        )
    code, out, _ = run("check", here, "--json")
    assert code == 1
    found = json.loads(out)["errors"]
    assert [Path(e["file"]).name for e in found] == ["f.kdsl"]


def test_check_json(here: Path) -> None:
    (here / "ten.kdsl").write_text(TEN)
    code, out, err = run("check", "ten.kdsl", "--json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert (found["files"], len(found["errors"])) == (1, 10)
    first = found["errors"][0]
    assert (first["code"], first["file"], first["line"], first["column"]) == ("K0201", "ten.kdsl", 4, 12)


def test_check_names_a_file_that_may_be_meant(here: Path) -> None:
    (here / "scale.kdsl").write_text("")
    assert "did you mean scale.kdsl?" in run("check", "scal.kdsl")[2]
    assert "did you mean scale.kdsl?" in run("check", "scale")[2]
    (here / "empty").mkdir()
    assert run("check", "empty")[0] == 2


# ---- new, fmt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["elementwise", "row"])
def test_new_writes_a_file_that_checks_and_is_in_its_layout(here: Path, kind: str) -> None:
    code, out, _ = run("new", "mine", "--kind", kind)
    assert code == 0
    assert "kgen check mine.kdsl" in out
    assert run("check", "mine.kdsl")[0] == 0
    assert run("fmt", "--check", "mine.kdsl")[0] == 0
    assert run("show", "mine.kdsl", "--stage", "cuda,triton")[0] == 0


def test_new_refuses_what_it_should(here: Path) -> None:
    (here / "kept.kdsl").write_text("mine")
    code, _, err = run("new", "kept")
    assert code == 2
    assert "exists already" in err
    assert (here / "kept.kdsl").read_text() == "mine"
    for name in ("2nd", "a-b", "tile", "größe", "lambda"):
        assert run("new", name)[0] == 2, name
        assert not (here / f"{name}.kdsl").exists()
    assert run("new", "fine", "--kind", "matrix")[0] == 2


def test_fmt_changes_only_what_it_must(here: Path) -> None:
    path = here / "a.kdsl"
    path.write_text("kernel a(x:T[N])->(y:T[N]):\n    parallel n in N   # all\n    y[n]=x[n]*2\n")
    before = path.read_text()
    code, out, _ = run("fmt", "--check", path)
    assert code == 1
    assert "would change" in out
    assert path.read_text() == before
    assert run("fmt", path)[0] == 0
    assert "y[n] = x[n] * 2" in path.read_text()
    assert "# all" in path.read_text()
    code, out, _ = run("fmt", "--check", path)
    assert (code, out) == (0, "0 would change, 1 unchanged\n")


def test_fmt_leaves_a_file_with_mistakes(here: Path) -> None:
    path = here / "a.kdsl"
    path.write_text("kernel a(:\n")
    code, _, err = run("fmt", path)
    assert code == 1
    assert "error[K01" in err
    assert path.read_text() == "kernel a(:\n"


# ---- show ----------------------------------------------------------------------------------------------------------


def test_show_gives_each_stage() -> None:
    code, out, err = run("show", RMS_NORM, "--stage", "source,ast,ir,schedule,cuda,triton", "--json")
    assert (code, err) == (0, "")
    texts = json.loads(out)
    assert list(texts) == ["source", "ast", "ir", "schedule", "cuda", "triton"]
    assert texts["source"].startswith("kernel rms_norm(")
    assert texts["source"].endswith("y[m, n] = x[m, n] * r * (offset + w[n])")
    assert "Param(name='eps')" in texts["ast"]
    assert "r = rsqrt((sum(x[m, n] * x[m, n], n) / f32(N)) + eps)" in texts["ir"]
    assert all("r_sum = sum(x_mn * x_mn, n)" in texts["schedule"][backend] for backend in ("cuda", "triton"))
    assert "__global__ void" in texts["cuda"]
    assert "@triton.jit" in texts["triton"]


def test_show_takes_sizes_dtypes_constants_and_optional_tensors() -> None:
    _, out, _ = run("show", RMS_NORM, "-s", "schedule", "--dim", "N=1_024", "--dtype", "f32", "--dtype", "W=f16")
    assert "x: f32[*M, 1024]" in out
    assert "w: f16[1024]" in out
    assert "w: " not in run("show", RMS_NORM, "-s", "ir", "--without", "w")[1]
    assert "bf16(x[m, n] * r)" in run("show", RMS_NORM, "-s", "ir", "--const", "round_first=true")[1]


def test_show_picks_a_kernel() -> None:
    code, out, _ = run("show", f"{SWIGLU}:geglu", "-s", "source")
    assert code == 0
    assert out.startswith("kernel geglu(")
    assert "kernel geglu_tanh" not in out
    code, _, err = run("show", SWIGLU, "-s", "ir")
    assert code == 2
    assert "3 kernels" in err
    code, out, _ = run("show", SWIGLU, "-s", "source")
    assert out == SWIGLU.read_text()
    assert "did you mean 'geglu'" in run("show", f"{SWIGLU}:gegl", "-s", "ir")[2]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--stage", "cudo"], 2, "there is no stage 'cudo'"),
        (["--dim", "K=3"], 2, "no dimension 'K'; there is M, N"),
        (["--dim", "N"], 2, "write it as --dim N=4096"),
        (["--dim", "N=big"], 2, "a whole number"),
        (["--dim", "N=-1"], 2, "cannot be negative"),
        (["--dim", "N=0", "--stage", "ptx"], 1, "every result is empty with M = 16384, N = 0"),
        (["--dtype", "bf61"], 2, "there is no dtype 'bf61'"),
        (["--dtype", "i8"], 1, "stands for one of f16, bf16, f32, f64"),
        (["--const", "round=true"], 2, "did you mean 'round_first'?"),
        (["--const", "round_first=maybe"], 1, "must be true or false"),
        (["--without", "x"], 2, "no optional tensor 'x'"),
        (["--with", "w", "--without", "w"], 2, "both --with and --without"),
        (["--arch", "hopper", "--stage", "ptx"], 2, "write sm_90"),
        (["--backend", "metal"], 2, "neither cuda nor triton"),
    ],
)
def test_show_explains_wrong_options(args: list[str], code: int, text: str) -> None:
    got, out, err = run("show", RMS_NORM, *args)
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert text in err


def test_show_names_the_sizes_that_are_missing(here: Path) -> None:
    (here / "a.kdsl").write_text(
        "kernel a(x: T[B, H, W]) -> (y: T[B, H]):\n    parallel b in B, h in H\n    tile w in W\n"
        "    y[b, h] = sum(x[b, h, w], w)\n"
    )
    code, _, err = run("show", "a.kdsl")
    assert code == 1
    assert "no size is known for H, W" in err
    assert "--dim H=... --dim W=..." in err
    assert run("show", "a.kdsl", "--dim", "H=3,W=64")[0] == 0


def test_what_comes_with_kgen_is_named_by_its_name(here: Path) -> None:
    assert run("show", "rms_norm", "-s", "source") == run("show", f"{RMS_NORM}:rms_norm", "-s", "source")
    assert run("show", "geglu", "-s", "source")[1].startswith("kernel geglu(")
    assert run("check", "geglu", "rms_norm") == (0, "2 files, 2 kernels: no errors\n", "")
    for args, says in {
        ("show", "rms_nrm"): "there is no file rms_nrm; did you mean 'rms_norm', which comes with kgen?",
        ("check", "gegl"): "there is no file gegl; did you mean 'geglu', which comes with kgen?",
        ("fmt", "geglu"): "there is no file geglu; 'geglu' comes with kgen, in ",
        ("show", "elsewhere/geglu"): "there is no file elsewhere/geglu\n",
        ("show", "swiglu.kdsl:geglu"): "its kernels go by their names alone, geglu, geglu_tanh, swiglu\n",
        ("show", "elsewhere/swiglu.kdsl"): "there is no file elsewhere/swiglu.kdsl\n",
    }.items():
        code, _, err = run(*args)
        assert code == 2 and says in err, err
    (here / "geglu.kdsl").write_text("kernel")  # nobody should take the one for the other
    assert run("show", "geglu")[2] == "error: there is no file geglu; did you mean geglu.kdsl?\n"


def test_what_is_symbolic_needs_no_sizes(here: Path) -> None:
    (here / "k.kdsl").write_text(
        "kernel k(x: T[M, N]) -> (y: T[M, N]):\n    parallel m in M\n    tile n in N\n"
        "    y[m, n] = softmax(x[m, n], n)\n"
    )
    code, out, _ = run("show", "k.kdsl", "--stage", "source,ir,training,backward", "--json")
    assert code == 0
    texts = json.loads(out)
    assert texts["training"].startswith("kernel k_forward(x: bf16[M, N]")
    assert texts["backward"].startswith("backward k(x: bf16[M, N]") and texts["ir"].startswith("kernel k\n")
    code, _, err = run("show", "k.kdsl", "--stage", "backward,cuda")
    assert code == 1 and "no size is known for N" in err
    assert run("show", "k.kdsl", "--stage", "backward,cuda", "--dim", "N=64")[0] == 0


# ---- doctor, cache -------------------------------------------------------------------------------------------------


def test_doctor_says_what_is_there(here: Path) -> None:
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["kgen"] == kgen.__version__
    assert {p["name"] for p in found["parts"]} == {
        "Python", "torch", "triton", "cupy", "nvrtc", "g++", "GPU", "cache", "tuned"
    }  # fmt: skip
    assert {(b["name"], b["available"]) for b in found["backends"] if b["device"] == "cpu"} >= {("reference", True)}
    code, out, _ = run("doctor")
    assert code == 0
    assert "backend reference on cpu" in out


def test_doctor_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("KGEN_CACHE_DIR", "/proc/nowhere/cache")
    code, out, _ = run("doctor", "--json")
    parts = {p["name"]: p for p in json.loads(out)["parts"]}
    assert code == 0
    assert "pip install triton" in parts["triton"]["advice"]
    assert "install g++" in parts["g++"]["advice"]
    assert "KGEN_CACHE_DIR" in parts["cache"]["advice"]


def test_cache_info_and_clear_touch_only_the_cache(here: Path) -> None:
    from kgen.runtime.cache import Cache, cache_key

    Cache(here / "cache").put(cache_key("a"), b"12345")
    (here / "cache" / "letters").mkdir()
    (here / "cache" / "letters" / "mine.txt").write_text("keep")
    (here / "cache" / "mine.txt").write_text("keep")
    code, out, _ = run("cache", "info", "--json")
    assert code == 0
    assert json.loads(out)["files"] == 1
    code, out, _ = run("cache", "clear")
    assert code == 0
    assert "removed 1 files" in out
    assert sorted(p.name for p in (here / "cache").rglob("*.txt")) == ["mine.txt", "mine.txt"]
    assert json.loads(run("cache", "info", "--json")[1])["files"] == 0


def test_every_folder_that_a_tool_is_given_is_cleared() -> None:
    from kgen.cli.cache import TOOL_FOLDERS

    texts = "".join(p.read_text("utf-8") for p in (ROOT / "runtime").rglob("*.py"))
    assert set(re.findall(r"(?:cache|CACHE)\.folder\(\"(\w+)\"\)", texts)) == set(TOOL_FOLDERS)


def test_the_page_of_errors_is_current() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_errors", ROOT / "docs" / "make_errors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text("utf-8") == module.page(), "run python docs/make_errors.py"


def test_show_gives_the_derived_kernels() -> None:
    code, out, err = run("show", RMS_NORM, "--stage", "training,backward", "--json")
    assert (code, err) == (0, "")
    texts = json.loads(out)
    assert list(texts) == ["training", "backward"]
    assert "d_w[n] +=" in texts["backward"]
    for text in texts.values():
        parse_text(text)  # it can be pasted and edited
