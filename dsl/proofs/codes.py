"""The error codes of the proofs (K03xx bounds, K04xx races and in-place order), each with a program that earns it and
its correction."""

from __future__ import annotations

from kgen.dsl.codes import Code


def _kernel(signature: str, *lines: str) -> str:
    """A file of one kernel."""
    return f"kernel f({signature}):\n" + "".join(f"    {line}\n" for line in lines)


_ROWS = "x: T[M, N]) -> (y: T[M, N]"
_INPLACE = "x: inout T[M, N]"
_INDICES = ("parallel m in M", "tile n in N")
_COPY = "y[m, n] = x[m, n]"

PROOF_CODES: tuple[Code, ...] = (
    Code(
        "K0301",
        "a subscript may be out of bounds",
        _kernel("x: T[M, N]) -> (y: T[M, N]", *_INDICES, "y[m, n] = x[m, n + 1]"),
        _kernel("x: T[M, N]) -> (y: T[M, N - 1]", "parallel m in M", "tile n in N - 1", "y[m, n] = x[m, n + 1]"),
    ),
    Code(
        "K0302",
        "a gather along flattened leading dimensions",
        _kernel("x: T[*M, N], i: i64[L]) -> (y: T[L, N]", "parallel l in L", "tile n in N", "y[l, n] = x[i[l], n]"),
        _kernel("x: T[M, N], i: i64[L]) -> (y: T[L, N]", "parallel l in L", "tile n in N", "y[l, n] = x[i[l], n]"),
    ),
    Code(
        "K0303",
        "a divisor that may be 0",
        _kernel("x: T[N], w: T[K]) -> (y: T[N]", "parallel n in N", "y[n] = x[n] * w[n % K]"),
        _kernel("x: T[N], w: T[K]) -> (y: T[N]", "require K >= 1", "parallel n in N", "y[n] = x[n] * w[n % K]"),
    ),
    Code(
        "K0401",
        "programs race: the target lacks a parallel index",
        _kernel("x: T[M, N]) -> (y: T[N]", *_INDICES, "y[n] = 0.0"),
        _kernel("x: T[M, N]) -> (y: T[N]", *_INDICES, "y[n] += x[m, n]"),
    ),
    Code(
        "K0402",
        "a store that may write one element more than once",
        _kernel("x: T[N, K]) -> (y: T[N * K]", "parallel n in N, k in K", "y[n + k] = x[n, k]"),
        _kernel("x: T[N, K]) -> (y: T[N * K]", "parallel n in N, k in K", "y[n * K + k] = x[n, k]"),
    ),
    Code(
        "K0403",
        "two stores that may write the same element",
        _kernel(_ROWS, *_INDICES, _COPY, "y[m, N - 1 - n] = 0.0"),
        _kernel(_ROWS, *_INDICES, _COPY),
    ),
    Code(
        "K0404",
        "an output is read",
        _kernel("x: T[N]) -> (y: T[N], z: T[N]", "parallel n in N", "y[n] = exp(x[n])", "z[n] = y[n] + 1"),
        _kernel("x: T[N]) -> (y: T[N], z: T[N]", "parallel n in N", "e = exp(x[n])", "y[n] = e", "z[n] = e + 1"),
    ),
    Code(
        "K0405",
        "an output is never written",
        _kernel("x: T[N]) -> (y: T[N], z: T[N]", "parallel n in N", "y[n] = x[n]"),
        _kernel("x: T[N]) -> (y: T[N]", "parallel n in N", "y[n] = x[n]"),
    ),
    Code(
        "K0406",
        "an output may be written only in part",
        _kernel("x: T[D]) -> (y: T[D]", "parallel d in D // 2", "y[d] = x[d]", "y[d + D // 2] = -x[d]"),
        _kernel(
            "x: T[D]) -> (y: T[D]",
            "require D % 2 == 0",
            "parallel d in D // 2",
            "y[d] = x[d]",
            "y[d + D // 2] = -x[d]",
        ),
    ),
    Code(
        "K0407",
        "an output is both stored to and summed into",
        _kernel("x: T[N]) -> (y: f32[N]", "parallel n in N", "y[n] = x[n]", "y[n] += 1.0"),
        _kernel("x: T[N]) -> (y: f32[N]", "parallel n in N", "y[n] = x[n] + 1.0"),
    ),
    Code(
        "K0411",
        "an inout tensor is read after it was overwritten",
        _kernel("x: inout T[M, 2]", "parallel m in M", "x[m, 0] = x[m, 1]", "x[m, 1] = x[m, 0]"),
        _kernel("x: inout T[M, 2]", "parallel m in M", "a, b = x[m, 0], x[m, 1]", "x[m, 0] = b", "x[m, 1] = a"),
    ),
    Code(
        "K0412",
        "a read that another program may have overwritten",
        _kernel(_INPLACE, "parallel m in M, n in N", "x[m, n] = x[m, N - 1 - n]"),
        _kernel(_INPLACE, *_INDICES, "x[m, n] = x[m, N - 1 - n]"),
    ),
)
