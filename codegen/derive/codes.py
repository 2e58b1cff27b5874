"""The error codes of derivation (K05xx), each with a kernel that earns it and its correction.

The examples are derived for all inputs of a floating-point dtype, those of K0506 for all inputs.
"""

from __future__ import annotations

from kgen.dsl.codes import Code
from kgen.dsl.diagnostics import Diagnostic, DslError
from kgen.dsl.source import Span

DERIVE_CODES: tuple[Code, ...] = (
    Code(
        "K0501",
        "a kernel without a floating-point output has no gradient",
        "kernel f(x: T[*M, N]) -> (best: i64[*M]):\n    parallel m in M\n    tile n in N\n"
        "    best[m] = argmax(x[m, n], n)\n",
        "kernel f(x: T[*M, N]) -> (best: T[*M]):\n    parallel m in M\n    tile n in N\n"
        "    best[m] = max(x[m, n], n)\n",
    ),
    Code(
        "K0502",
        "a kernel that overwrites an argument cannot be derived",
        "kernel f(x: inout T[N]):\n    parallel n in N\n    x[n] = 2.0 * x[n]\n",
        "kernel f(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = 2.0 * x[n]\n",
    ),
    Code(
        "K0503",
        "a gather whose gradient several programs would add to one element",
        "kernel f(table: T[V, N], word: i64[M]) -> (y: T[M, N]):\n    parallel m in M\n    tile n in N\n"
        "    y[m, n] = table[word[m], n]\n",
        "kernel f(table: T[M, V], word: i64[M]) -> (y: T[M]):\n    parallel m in M\n    y[m] = table[m, word[m]]\n",
    ),
    Code(
        "K0504",
        "an input that reaches no output through values that have a derivative",
        "kernel f(x: T[*M, N]) -> (y: f32[*M]):\n    parallel m in M\n    tile n in N\n"
        "    y[m] = f32(argmax(x[m, n], n))\n",
        "kernel f(x: T[*M, N]) -> (y: f32[*M]):\n    parallel m in M\n    tile n in N\n    y[m] = max(x[m, n], n)\n",
    ),
    Code(
        "K0505",
        "loads whose subscripts cannot be turned into stores of the gradient",
        "kernel f(x: T[N]) -> (y: T[N]):\n    require N >= 2\n    parallel n in N\n    y[n] = x[n] * x[n // 2]\n",
        "kernel f(x: T[N]) -> (y: T[N]):\n    require N >= 2\n    parallel n in N\n    y[n] = x[n] * x[N - 1 - n]\n",
    ),
    Code(
        "K0506",
        "a gradient is asked for something that is no floating-point input",
        "kernel f(x: T[N], k: i32[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n] * k[n]\n",
        "kernel f(x: T[N], k: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n] * k[n]\n",
    ),
    Code(
        "K0507",
        "a gradient is asked for that the hand-written backward does not compute",
        "kernel f(x: T[N], w: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n] * w[n]\n\n"
        "backward f(w: T[N], d_y: T[N]) -> (d_x: T[N]):\n    parallel n in N\n    d_x[n] = w[n] * d_y[n]\n",
        "kernel f(x: T[N], w: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n] * w[n]\n\n"
        "backward f(x: T[N], w: T[N], d_y: T[N]) -> (d_x: T[N], d_w: T[N]):\n    parallel n in N\n"
        "    d_x[n] = w[n] * d_y[n]\n    d_w[n] = x[n] * d_y[n]\n",
    ),
)


class DeriveError(DslError):
    """A kernel that has no derivative, or none that can be written as a kernel; names the construct."""


def error(code: str, message: str, span: Span, help: str, label: str = "") -> DeriveError:
    """The error of one construct."""
    return DeriveError([Diagnostic(code, message, span, label, help)])
