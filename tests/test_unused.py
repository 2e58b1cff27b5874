"""Warnings about names that nothing uses: what earns one and what does not, and `kgen check` with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kgen.cli import app
from kgen.dsl.check import check_module
from kgen.dsl.check.unused import WARNING_CODES
from kgen.dsl.codes import EXAMPLE_FILES, Code
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.host.unused import unused
from kgen.dsl.modules import load

ROOT = Path(__file__).resolve().parents[1]


def warnings(folder: Path, text: str) -> list[str]:
    """Code and name of each warning about a file of `text`, which has no mistakes."""
    for name, content in EXAMPLE_FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    file = folder / "case.kdsl"
    file.write_text(text)
    module = load(file).module
    diagnostics = Diagnostics()
    check_module(module, diagnostics)
    diagnostics.raise_if_errors()
    found = unused(module)
    assert all(d.help and d.render().startswith(f"warning[{d.code}]: ") for d in found)
    return [f"{d.code} {d.message.split(chr(39))[-2]}" for d in found]


@pytest.mark.parametrize("code", WARNING_CODES, ids=lambda c: c.code)
def test_code_examples(code: Code, tmp_path: Path) -> None:
    assert [w[:5] for w in warnings(tmp_path, code.wrong)] == [code.code]
    assert warnings(tmp_path, code.right) == []


CASES: dict[str, tuple[str, list[str]]] = {
    "all that there is": (
        """
from activations import relu

fn g(a, b) = a

kernel f(x: T[M, N], w: T[N]?, k: const i32 = 2, e: f32 = 0.5) -> (y: T[M, N]):
    parallel m in M
    tile n in N, j in M
    s, t = x[m, n], 1.0
    y[m, n] = s
""",
        ["W0103 relu", "W0102 g", "W0105 b", "W0105 w", "W0105 k", "W0105 e", "W0104 j", "W0101 t"],
    ),
    "an underscore means it": (
        """
fn _g(_a) = 1.0

kernel f(x: T[N], _e: f32 = 0.5) -> (y: T[N]):
    parallel n in N
    tile _j in N
    _s = x[n]
    y[n] = x[n]
""",
        [],
    ),
    "a value that is made in two branches is told once": (
        """
kernel f(x: T[N], c: const bool = true) -> (y: T[N]):
    parallel n in N
    if c:
        s = 1.0
    else:
        s = 2.0
    y[n] = x[n]
""",
        ["W0101 s"],
    ),
    "one branch uses it": (
        """
kernel f(x: T[N], w: T[N]?, k: const i32 = 2, e: f32 = 0.5) -> (y: T[N]):
    parallel n in N
    s = x[n] + e
    if k == 2:
        y[n] = s
    elif w:
        y[n] = w[n]
    else:
        y[n] = x[n]
""",
        [],
    ),
    "a condition, an extent and a requirement use it": (
        """
kernel f(x: T[N], c: const bool = true, d: const i32 = 2, r: const i32 = 1) -> (y: T[N]):
    require N >= r
    parallel n in N
    tile i in d
    t = i + 1
    if c:
        y[n] = x[n] * sum(1.0 * t, i)
    else:
        y[n] = x[n]
""",
        [],
    ),
    "a shape uses it": (
        """
kernel f(x: T[N], d: const i32 = 2) -> (y: T[d, N]):
    parallel n in N
    tile i in 2
    require d == 2
    y[i, n] = x[n]
""",
        [],
    ),
    "a reduction uses an index": (
        """
kernel f(x: T[M, N]) -> (y: f32[M]):
    parallel m in M
    tile j in N
    y[m] = sum(x[m, j], j)
""",
        [],
    ),
    "a tensor that tells a size": (
        """
kernel f(x: T[N], model: T[K]) -> (y: T[N, K]):
    parallel n in N, k in K
    y[n, k] = x[n]
""",
        [],
    ),
    "a size that another tells": (
        """
kernel f(x: T[N], model: T[N]) -> (y: T[N]):
    parallel n in N
    y[n] = x[n]
""",
        ["W0105 model"],
    ),
    "a size that only an optional tensor tells beside it": (
        """
kernel f(model: T[M], w: T[M]?) -> (y: f32[M]):
    parallel m in M
    if w:
        y[m] = w[m]
    else:
        y[m] = 1.0
""",
        [],
    ),
    "two that tell one size": (
        """
kernel f(a: T[M], b: T[M]) -> (y: f32[M]):
    parallel m in M
    y[m] = 1.0
""",
        ["W0105 a"],
    ),
    "a tensor that is only written in place": (
        """
kernel f(x: T[N], z: inout T[N]) -> (y: T[N]):
    parallel n in N
    z[n] = x[n]
    y[n] = x[n]
""",
        [],
    ),
    "functions that call one another": (
        """
from activations import relu

fn a(v) = relu(v)

fn b(v) = a(v)

kernel f(x: T[N]) -> (y: T[N]):
    parallel n in N
    y[n] = b(x[n])
""",
        [],
    ),
    "a file of functions": ("from activations import relu\n\nfn a(v) = relu(v)\n\nfn b(v) = a(v)\n", []),
    "a value for the backward to save, and an optional tensor that says which calls it is for": (
        """
kernel f(x: T[N], w: T[N]?) -> (y: T[N]):
    parallel n in N
    r = 2.0 * x[n]
    unsaved = r
    if w:
        y[n] = x[n] * x[n] + w[n]
    else:
        y[n] = x[n] * x[n]

backward f(w: T[N], saved_r: f32[N], d_y: T[N]) -> (d_x: T[N]):
    parallel n in N
    s = 1.0
    d_x[n] = saved_r[n] * d_y[n]
""",
        ["W0101 unsaved", "W0101 s"],
    ),
}

# Ops, behind a kernel that scales.
_SCALED = """\
kernel scaled(x: T[*M, N], s: f32 = 1.0) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = s * x[m, n]
"""
CASES |= {
    f"op: {name}": (f"{_SCALED}\n{text}", expected)
    for name, (text, expected) in {
        "values and declarations": (
            """
op f(x: T[B, H]) -> (y: T[B, H]):
    forward:
        a = scaled(x)
        b: f32[H, H]
        c: f32[H, H]
        c += x.T @ x
        _d = scaled(x)
        y = scaled(x)
""",
            ["W0101 a", "W0101 b", "W0101 c"],
        ),
        "parameters": (
            """
op f(x: T[B, H], w: T[H]?, v: T[B, H], e: f32 = 1.0, c: const bool = true) -> (y: T[B, H]):
    forward:
        y = scaled(x)
""",
            ["W0105 w", "W0105 v", "W0105 e", "W0105 c"],
        ),
        "what a choice, a loop, a size and a gradient use": (
            """
op f(x: T[B, H], like: T[V], w: T[H]?, k: const i32 = 2, flag: const bool = true) -> (y: T[B, H], z: T[V, V]):
    forward:
        a = scaled(x)
        if flag:
            b = scaled(x)
        else:
            b = scaled(x)
        for c in chunks(B):
            y[c] = scaled(x[c])
        if w:
            z = zeros(like)
        else:
            z = zeros(like)
    backward(d_y, d_z):
        if k == 2:
            d_x = scaled(a)
        else:
            d_x = scaled(b)

kernel zeros(v: T[N]) -> (y: T[N, N]):
    parallel m in N, n in N
    y[m, n] = v[m] * v[n]
""",
            [],
        ),
        "a loop that slices nothing": (
            """
op f(x: T[B, H]) -> (y: T[H, H]):
    forward:
        for c in chunks(B):
            y += x.T @ x
""",
            ["W0104 c"],
        ),
    }.items()
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_unused(name: str, tmp_path: Path) -> None:
    text, expected = CASES[name]
    assert warnings(tmp_path, text) == expected


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("ops/*.kdsl")) + sorted(ROOT.glob("examples/*.kdsl")), ids=lambda f: f.name
)
def test_nothing_that_is_shipped_is_unused(file: Path) -> None:
    assert [d.render() for d in unused(load(file).module)] == []


# ---- the command -----------------------------------------------------------------------------------------------------


def check(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    body = "(x: T[N]) -> (y: T[N]):\n    parallel n in N\n"
    (tmp_path / "a.kdsl").write_text(
        f"fn g(a) = a\n\nfn h(a) = g(a)\n\nkernel one{body}    s = x[n]\n    y[n] = x[n]\n\n"
        f"kernel two{body}    y[n] = x[n]\n"
    )
    (tmp_path / "b.kdsl").write_text(f"from a import h\n\nkernel three{body}    y[n] = h(x[n])\n")
    return tmp_path


def test_check_tells_warnings_and_ends_well(folder: Path) -> None:
    code, out, err = check(folder / "a.kdsl")
    assert (code, out) == (0, "1 file, 2 kernels: no errors, 2 warnings\n")
    assert err.startswith("warning[W0102]: function 'h' is never used\n")
    assert "warning[W0101]: value 's' is never used\n" in err
    assert "  |     ^ " not in err and "|     ^\n" in err


def test_an_import_of_another_file_is_a_use(folder: Path) -> None:
    code, out, err = check(folder)
    assert (code, out) == (0, "2 files, 3 kernels: no errors, 1 warning\n")
    assert "W0102" not in err


def test_warnings_of_a_chosen_kernel(folder: Path) -> None:
    assert check(f"{folder / 'a.kdsl'}:one")[1] == "1 file, 1 kernel: no errors, 1 warning\n"
    assert check(f"{folder / 'a.kdsl'}:two")[1:] == ("1 file, 1 kernel: no errors\n", "")


def test_warnings_beside_errors_and_as_json(folder: Path) -> None:
    (folder / "c.kdsl").write_text(
        "kernel bad(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    s = 1.0\n    y[n] = z[n]\n"
    )
    code, out, err = check(folder)
    assert (code, out) == (1, "")
    assert err.rstrip().endswith("1 error in 1 of 3 files, 1 warning")
    code, out, _ = check(folder, "--json")
    assert code == 1
    data = json.loads(out)
    assert len(data["errors"]) == 1
    ((warning),) = data["warnings"]
    assert (warning["code"], warning["line"], warning["file"]) == ("W0101", 7, str(folder / "a.kdsl"))
