"""W0106: matrix products that a kernel writes as sums, and sums of products that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kgen.cli import app
from kgen.dsl.check.products import PRODUCT_CODES, products
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text

ROOT = Path(__file__).resolve().parents[1]
HEAD = "kernel f(a: T[M, K], b: T[K, N], s: T[M], g: T[K], d: T[M, K], flag: const bool = false) -> (c: T[M, N]):\n"
ALL = "    parallel m in M\n    tile k in K, n in N\n"

PRODUCTS = {
    "a product": ["c[m, n] = sum(a[m, k] * b[k, n], k)"],
    "a mean": ["c[m, n] = mean(b[k, n] * a[m, k], k)"],
    "named and converted": ["p = f32(T(a[m, k] * b[k, n]))", "q = p", "c[m, n] = sum(q, k)"],
    "with scales": ["c[m, n] = sum(g[k] * a[m, k] * 2.0 * (s[m] * b[k, n]), k)"],
    "of computed operands": ["c[m, n] = sum(exp(a[m, k] - max(a[m, k], k)) * b[k, n], k)"],
    "in one branch": ["if flag:", "    c[m, n] = sum(a[m, k] * b[k, n], k)", "else:", "    c[m, n] = s[m]"],
}
OTHERS = {
    "dot products of rows": ["r = sum(a[m, k] * d[m, k], k)", "c[m, n] = r"],
    "a row and a matrix": ["c[m, n] = s[m] * sum(g[k] * b[k, n], k)"],
    "a sum that both factors are outside of": ["c[m, n] = sum(a[m, k], k) * sum(b[k, n], k)"],
    "distances": ["c[m, n] = sum((a[m, k] - b[k, n]) * (a[m, k] - b[k, n]), k)"],
    "weighted by a mask of both": ["c[m, n] = sum(a[m, k] * b[k, n] * where(a[m, k] > b[k, n], 1.0, 0.0), k)"],
    "a maximum": ["c[m, n] = max(a[m, k] * b[k, n], k)"],
}


def found(body: list[str], head: str = HEAD, indices: str = ALL) -> list[tuple[str, str, int]]:
    module = parse_text(head + indices + "".join(f"    {line}\n" for line in body), "f.kdsl")
    return [(d.code, d.message, d.span.line) for d in products(module)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_told_once(name: str) -> None:
    (one,) = found(PRODUCTS[name])
    line = next(i for i, text in enumerate(PRODUCTS[name], 4) if "c[m, n]" in text)
    assert one[0] == "W0106" and one[2] == line and "'m'" in one[1] and "'n'" in one[1]


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_are_not(name: str) -> None:
    assert found(OTHERS[name]) == []


def test_rows_of_parallel_indices_and_sums_over_programs() -> None:
    assert found(["c[m, n] = sum(a[m, k] * b[k, n], k)"], indices="    parallel m in M, n in N\n    tile k in K\n")
    head = "kernel f(d_y: T[M, N], x: T[M, K]) -> (d_w: f32[N, K]):\n"
    indices = "    parallel m in M\n    tile n in N, k in K\n"
    assert found(["d_w[n, k] += d_y[m, n] * x[m, k]"], head, indices)
    assert not found(["d_w[n, k] += d_y[m, n] + x[m, k]"], head, indices)


def test_no_shipped_kernel_is_one() -> None:
    for path in (*(ROOT / "ops").glob("*.kdsl"), *(ROOT / "examples").glob("*.kdsl")):
        assert products(load(path).module) == []


def test_the_command_tells_and_refuses_nothing(tmp_path: Path) -> None:
    (code,) = PRODUCT_CODES
    for text, warned in ((code.wrong, True), (code.right, False)):
        (tmp_path / "f.kdsl").write_text(text)
        done = CliRunner().invoke(app, ["check", str(tmp_path / "f.kdsl")])
        assert done.exit_code == 0 and ("warning[W0106]: a matrix product: " in done.output) == warned, done.output
        assert ("no errors, 1 warning\n" in done.output) == warned
