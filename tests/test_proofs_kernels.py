"""Bounds, races, coverage and in-place order on kernels as a user writes them: which are refused, and by which code."""

from __future__ import annotations

import pytest

from kgen.dsl.check import check_module
from kgen.dsl.codes import Code
from kgen.dsl.diagnostics import Diagnostic, Diagnostics
from kgen.dsl.parser import parse_text
from kgen.dsl.proofs.codes import PROOF_CODES


def findings(source: str) -> list[Diagnostic]:
    """The mistakes of `source`, which parses."""
    diagnostics = Diagnostics()
    check_module(parse_text(source), diagnostics)
    return diagnostics.sorted()


def kernel(signature: str, *body: str) -> str:
    """A kernel `k` with that signature and those lines as its body."""
    return "\n".join([f"kernel k({signature}):", *(f"    {line}" for line in body), ""])


SOUND = {
    "copy": kernel("x: T[N]) -> (y: T[N]", "parallel n in N", "y[n] = x[n]"),
    "reverse": kernel("x: T[*M, K]) -> (y: T[*M, K]", "parallel m in M", "tile k in K", "y[m, k] = x[m, K - 1 - k]"),
    "transpose": kernel("x: T[M, N]) -> (y: T[N, M]", "parallel m in M, n in N", "y[n, m] = x[m, n]"),
    "diagonal": kernel("x: T[N, N]) -> (y: T[N]", "parallel n in N", "y[n] = x[n, n]"),
    "neighbours": kernel(
        "x: T[*M, N]) -> (y: T[*M, N - 1]", "parallel m in M", "tile n in N - 1", "y[m, n] = x[m, n + 1] - x[m, n]"
    ),
    "window": kernel(
        "x: T[N], w: T[K]) -> (y: T[N - K + 1]",
        "parallel n in N - K + 1",
        "tile k in K",
        "y[n] = sum(x[n + k] * w[k], k)",
    ),
    "strided window": kernel(
        "x: T[(N - 1) * S + K], w: T[K]) -> (y: T[N]",
        "parallel n in N",
        "tile k in K",
        "y[n] = sum(x[n * S + k] * w[k], k)",
    ),
    "first": kernel("x: T[*M, N]) -> (y: T[*M]", "require N >= 1", "parallel m in M", "y[m] = x[m, 0] + x[m, N - 1]"),
    "first of own row": kernel("x: T[*M, N]) -> (y: T[*M, N]", "parallel m in M, n in N", "y[m, n] = x[m, n]"),
    "flat heads": kernel(
        "x: T[S, H * D]) -> (y: T[S, H, D]", "parallel s in S, h in H", "tile d in D", "y[s, h, d] = x[s, h * D + d]"
    ),
    "to flat heads": kernel(
        "x: T[S, H, D]) -> (y: T[S, H * D]", "parallel s in S, h in H", "tile d in D", "y[s, h * D + d] = x[s, h, d]"
    ),
    "flat everything": kernel(
        "x: T[B, S, H, D]) -> (y: T[B * S * H * D]",
        "parallel b in B, s in S, h in H",
        "tile d in D",
        "y[((b * S + s) * H + h) * D + d] = x[b, s, h, d]",
    ),
    "grouped heads": kernel(
        "q: T[B, HQ, D], k: T[B, HK, D]) -> (y: T[B, HQ]",
        "require HQ % HK == 0",
        "parallel b in B, h in HQ",
        "tile d in D",
        "y[b, h] = sum(q[b, h, d] * k[b, h // (HQ // HK), d], d)",
    ),
    "blocks of 128": kernel(
        "x: T[*M, C]) -> (y: T[*M, C], s: f32[*M, C // 128]",
        "require C % 128 == 0",
        "parallel m in M, g in C // 128",
        "tile i in 128",
        "a = max(abs(x[m, g * 128 + i]), i)",
        "s[m, g] = a",
        "y[m, g * 128 + i] = x[m, g * 128 + i] / a",
    ),
    "groups": kernel(
        "x: T[B, C, L]) -> (y: T[B, C, L]",
        "require C % G == 0",
        "parallel b in B, g in G",
        "tile i in C // G, l in L",
        "y[b, g * (C // G) + i, l] = x[b, g * (C // G) + i, l] - mean(x[b, g * (C // G) + i, l], i, l)",
    ).replace("x: T[B, C, L])", "x: T[B, C, L], G: const i64)"),
    "halves": kernel(
        "x: T[*M, 2 * N]) -> (y: T[*M, N]", "parallel m in M, n in N", "y[m, n] = x[m, n] * sigmoid(x[m, n + N])"
    ),
    "pairs": kernel(
        "x: T[*M, D]) -> (y: T[*M, D]",
        "require D % 2 == 0",
        "parallel m in M",
        "tile d in D // 2",
        "y[m, 2 * d] = x[m, 2 * d + 1]",
        "y[m, 2 * d + 1] = x[m, 2 * d]",
    ),
    "odd tail": kernel(
        "x: T[*M, D]) -> (y: T[*M, D]",
        "parallel m in M",
        "tile d in D // 2, t in D % 2",
        "y[m, d] = x[m, d + D // 2]",
        "y[m, d + D // 2] = x[m, d]",
        "y[m, 2 * (D // 2) + t] = x[m, 2 * (D // 2) + t]",
    ),
    "repeat": kernel(
        "x: T[*M, N]) -> (y: T[*M, 2 * N]", "parallel m in M", "tile n in 2 * N", "y[m, n] = x[m, n // 2]"
    ),
    "split by 2": kernel("x: T[2 * N]) -> (y: T[N, 2]", "parallel n in 2 * N", "y[n // 2, n % 2] = x[n]"),
    "permute": kernel(
        "x: T[J * K]) -> (y: T[J * K]", "require K >= 1", "parallel n in J * K", "y[(n % K) * J + n // K] = x[n]"
    ),
    "column sum": kernel("x: T[*M, N]) -> (s: f32[N]", "parallel m in M", "tile n in N", "s[n] += x[m, n]"),
    "total": kernel("x: T[*M, N]) -> (s: f32", "parallel m in M", "tile n in N", "s[] += sum(x[m, n], n)")
    .replace("s[]", "s[0]")
    .replace("s: f32)", "s: f32[1])")
    .replace("s: f32:", "s: f32[1]:"),
    "gather": kernel("x: T[*M, V], t: i64[*M]) -> (y: T[*M]", "parallel m in M", "y[m] = x[m, t[m]]"),
    "in place": kernel("y: inout T[*M, N]", "parallel m in M, n in N", "y[m, n] = y[m, n] * 2.0"),
    "softmax in place": kernel("y: inout T[*M, N]", "parallel m in M", "tile n in N", "y[m, n] = softmax(y[m, n], n)"),
    "reverse in place": kernel("y: inout T[*M, N]", "parallel m in M", "tile n in N", "y[m, n] = y[m, N - 1 - n]"),
    "gather in place": kernel(
        "y: inout T[*M, N], p: i64[*M, N]", "parallel m in M", "tile n in N", "y[m, n] = y[m, p[m, n]]"
    ),
    "swap halves in place": kernel(
        "y: inout T[*M, D]",
        "parallel m in M",
        "tile d in D // 2",
        "lo, hi = y[m, d], y[m, d + D // 2]",
        "y[m, d] = hi",
        "y[m, d + D // 2] = lo",
    ),
    "half in place": kernel("y: inout T[*M, D]", "parallel m in M", "tile d in D // 2", "y[m, d] = y[m, d + D // 2]"),
    "two stores at once": kernel(
        "x: T[*M, N]) -> (y: T[*M, 2 * N]", "parallel m in M", "tile n in N", "y[m, n], y[m, n + N] = x[m, n], -x[m, n]"
    ),
    "flat pairs": kernel(
        "x: T[M, 2]) -> (y: T[2 * M]", "parallel m in M", "y[2 * m] = x[m, 0]", "y[2 * m + 1] = x[m, 1]"
    ),
    "flat halves": kernel(
        "x: T[M, D]) -> (y: T[M * D]",
        "require R <= D".replace("R", "2"),
        "parallel m in M",
        "tile d in 2, t in D - 2",
        "y[m * D + d] = x[m, d]",
        "y[m * D + 2 + t] = x[m, 2 + t]",
    ),
    "one program": kernel("x: T[N]) -> (y: T[1]", "parallel o in 1", "tile n in N", "y[0] = sum(x[n], n)"),
    "pad": kernel(
        "x: T[*M, N]) -> (y: T[*M, N + 3]",
        "parallel m in M",
        "tile n in N, p in 3",
        "y[m, n] = x[m, n]",
        "y[m, N + p] = 0.0",
    ),
    "ragged chunks": kernel(
        "x: T[N]) -> (y: T[(N + 127) // 128]",
        "parallel c in (N + 127) // 128",
        "tile n in N",
        "y[c] = sum(where(n // 128 == c, x[n], 0.0), n)",
    ),
    "causal": kernel(
        "x: T[B, S, S]) -> (y: T[B, S, S]",
        "parallel b in B, i in S",
        "tile j in S",
        "y[b, i, j] = where(j <= i, x[b, i, j], 0.0)",
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_kernels_pass(name: str) -> None:
    assert [f.render() for f in findings(SOUND[name])] == []


UNSOUND = {
    "one too far": ("K0301", kernel("x: T[N]) -> (y: T[N]", "parallel n in N", "y[n] = x[n + 1]")),
    "one too low": ("K0301", kernel("x: T[N]) -> (y: T[N]", "parallel n in N", "y[n] = x[n - 1]")),
    "two dimensions": ("K0301", kernel("x: T[K], z: T[N]) -> (y: T[N]", "parallel n in N", "y[n] = x[n]")),
    "store too far": ("K0301", kernel("x: T[N]) -> (y: T[N - 1]", "parallel n in N", "y[n] = x[n]")),
    "empty row": ("K0301", kernel("x: T[*M, N]) -> (y: T[*M]", "parallel m in M", "y[m] = x[m, 0]")),
    "odd half": (
        "K0301",
        kernel("x: T[D]) -> (y: T[(D + 1) // 2]", "parallel d in (D + 1) // 2", "y[d] = x[d + D // 2 + 1]"),
    ),
    "ragged blocks": (
        "K0301",
        kernel(
            "x: T[C]) -> (y: T[C]", "parallel g in (C + 127) // 128", "tile i in 128", "y[g * 128 + i] = x[g * 128 + i]"
        ),
    ),
    "rotated beyond": ("K0301", kernel("x: T[D], c: T[R]) -> (y: T[R]", "parallel d in R", "y[d] = x[d] * c[d]")),
    "flattened rows": (
        "K0302",
        kernel("x: T[*M, N], t: i64[L]) -> (y: T[L]", "parallel l in L", "require N >= 1", "y[l] = x[t[l], 0]"),
    ),
    "divisor": ("K0303", kernel("x: T[N], w: T[K]) -> (y: T[N]", "parallel n in N", "y[n] = w[n % K]")),
    "row written by columns": ("K0401", kernel("x: T[M, N]) -> (y: T[M]", "parallel m in M, n in N", "y[m] = 0.0")),
    "halved index": ("K0402", kernel("x: T[N]) -> (y: T[N]", "parallel n in N", "y[n // 2] = x[n]")),
    "sum of indices": (
        "K0402",
        kernel("x: T[N, K]) -> (y: T[N + K]", "parallel n in N, k in K", "y[n + k] = x[n, k]"),
    ),
    "overlapping blocks": (
        "K0402",
        kernel(
            "x: T[C]) -> (y: T[C + 1]",
            "require C % 128 == 0",
            "parallel g in C // 128",
            "tile i in 129",
            "y[g * 128 + i] = 0.0",
        ),
    ),
    "remainder only": (
        "K0402",
        kernel("x: T[N]) -> (y: T[4]", "parallel n in N", "y[n % 4] = x[n]"),
    ),
    "written twice": ("K0403", kernel("x: T[N]) -> (y: T[N]", "parallel n in N", "y[n] = x[n]", "y[n] = -x[n]")),
    "written twice in one corner": (
        "K0403",
        kernel("x: T[N]) -> (y: T[N]", "require N >= 1", "parallel n in N", "y[n] = x[n]", "y[N - 1 - n] = 1.0"),
    ),
    "meeting parts": (
        "K0403",
        kernel(
            "x: T[*M, D]) -> (y: T[*M, D]",
            "parallel m in M",
            "tile d in (D + 1) // 2",
            "y[m, d] = x[m, d]",
            "y[m, D - 1 - d] = x[m, d]",
        ),
    ),
    "summed twice": (
        "K0403",
        kernel("x: T[M, N]) -> (s: f32[N]", "parallel m in M", "tile n in N", "s[n] += x[m, n]", "s[n] += 1.0"),
    ),
    "output read": ("K0404", kernel("x: T[N]) -> (y: T[N], z: T[N]", "parallel n in N", "y[n] = x[n]", "z[n] = y[n]")),
    "never written": ("K0405", kernel("x: T[N]) -> (y: T[N], z: T[N]", "parallel n in N", "y[n] = x[n]")),
    "inout never written": ("K0405", kernel("x: inout T[N]) -> (y: T[N]", "parallel n in N", "y[n] = x[n]")),
    "odd last element": (
        "K0406",
        kernel("x: T[D]) -> (y: T[D]", "parallel d in D // 2", "y[d] = x[d]", "y[d + D // 2] = x[d]"),
    ),
    "one column": ("K0406", kernel("x: T[M]) -> (y: T[M, 2]", "parallel m in M", "y[m, 0] = x[m]")),
    "ragged groups": (
        "K0406",
        kernel("x: T[C]) -> (y: T[C]", "parallel g in C // 128", "tile i in 128", "y[g * 128 + i] = x[g * 128 + i]"),
    ),
    "mixed": (
        "K0407",
        kernel("x: T[N]) -> (y: f32[2 * N]", "parallel n in N", "y[n] = x[n]", "y[N + n] += x[n]"),
    ),
    "read after store": ("K0411", kernel("y: inout T[N]) -> (z: T[N]", "parallel n in N", "y[n] = 1.0", "z[n] = y[n]")),
    "swap without names": (
        "K0411",
        kernel("y: inout T[M, 2]", "parallel m in M", "y[m, 0] = y[m, 1]", "y[m, 1] = y[m, 0]"),
    ),
    "other program's element": (
        "K0412",
        kernel("y: inout T[N]", "parallel n in N", "y[n] = y[N - 1 - n]"),
    ),
    "next row": ("K0412", kernel("y: inout T[M + 1, N]", "parallel m in M", "tile n in N", "y[m, n] = y[m + 1, n]")),
    "first row": (
        "K0412",
        kernel("y: inout T[M, N]", "parallel m in M", "tile n in N", "y[m, n] = y[m, n] - y[0, n]"),
    ),
    "gathered row": (
        "K0412",
        kernel("y: inout T[M, N], p: i64[M]", "parallel m in M", "tile n in N", "y[m, n] = y[p[m], n]"),
    ),
    "gather along a parallel index": (
        "K0412",
        kernel("y: inout T[M, N], p: i64[M, N]", "parallel m in M, n in N", "y[m, n] = y[m, p[m, n]]"),
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_kernels_are_refused(name: str) -> None:
    code, source = UNSOUND[name]
    found = findings(source)
    assert [f.code for f in found] == [code], "\n\n".join(f.render() for f in found)
    assert found[0].help


@pytest.mark.parametrize("code", PROOF_CODES, ids=lambda c: c.code)
def test_code_examples(code: Code) -> None:
    wrong = findings(code.wrong)
    assert {d.code for d in wrong} == {code.code}, "\n".join(d.render() for d in wrong)
    right = findings(code.right)
    assert not right, "\n".join(d.render() for d in right)
