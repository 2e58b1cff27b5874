"""Kernels on chunks: those that are taken to treat rows one by one, or to sum over them, do; those that are refused do
not. Each is run on all rows and on two chunks, in float64 on small integers, which is exact."""

from __future__ import annotations

import re

import pytest
import torch
from host_kit import checked

from kgen.codegen.interpret import in_float64, interpret
from kgen.dsl import ir
from kgen.dsl.check import Specialization, elaborate
from kgen.dsl.dtypes import F32
from kgen.dsl.host.rows import Mixes, rows_of

ROWS = "x: T[M, N], w: T[N], p: T[K, N], t: i64[M]"

# The body of a kernel with these parameters and outputs, and the outputs that are sums over rows.
TAKEN = {
    "each by itself": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = x[m, n] * w[n]"),
    "reduced": ("y: T[M]", "parallel m in M", "tile n in N", "a = x[m, n] - max(x[m, n], n)", "y[m] = sum(a, n)"),
    "summed": ("s: T[N]", "parallel m in M, n in N", "s[n] += x[m, n]"),
    "both": ("y: T[M, N], s: T[N]", "parallel m in M", "tile n in N", "y[m, n] = x[m, n]", "s[n] += x[m, n]"),
    "their number": ("s: T[N]", "parallel m in M, n in N", "s[n] += w[n]"),
    "nothing of them": ("y: T[M, N], r: T[N]", "tile m in M", "parallel n in N", "y[m, n] = x[m, n]", "r[n] = w[n]"),
    "looked up": ("y: T[M, N]", "parallel m in M, n in N", "k = t[m]", "y[m, n] = p[k, n]"),
    "chosen": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = where(t[m] > 1, x[m, n], w[n])"),
    "along n": ("y: T[M, N]", "parallel m in M", "tile n in N", "y[m, n] = x[m, N - 1 - n] * softmax(w[n], n)"),
    "a size of its own": ("y: T[M, N]", "parallel m in M", "tile n in N", "y[m, n] = x[m, n] - sum(w[n], n) / N"),
    "functions": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = twice(x[m, n])"),
}  # fmt: skip
MIXED = {
    "a mean of rows": ("y: T[M, N]", "tile m in M, n in N", "y[m, n] = x[m, n] - mean(x[m, n], m)", "rows by mean"),
    "the largest row": ("s: T[N]", "tile m in M", "parallel n in N", "s[n] = max(x[m, n], m)", "over rows by max"),
    "by a function": ("y: T[M, N]", "tile m in M", "parallel n in N", "y[m, n] = top(x[m, n], m)", "over rows by top"),
    "the number of a row": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = x[m, n] + m", "uses the number of"),
    "as a float": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = x[m, n] * f32(m)", "uses the number of a row"),
    "as a T": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = x[m, n] * T(m)", "uses the number of a row"),
    "of two": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = x[m, n] * maximum(m, 1)", "the number of a row"),
    "a row of another": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = x[M - 1 - m, n]", "takes other rows"),
    "a row at hand": ("y: T[M, N]", "parallel m in M, n in N", "y[m, n] = x[t[m], n]", "takes other rows"),
    "how many there are": ("s: T[N]", "parallel m in M, n in N", "s[n] += x[m, n] / M", "uses the number of r"),
    "stored elsewhere": ("y: T[M, N]", "parallel m in M, n in N", "y[M - 1 - m, n] = x[m, n]", "takes other rows"),
    "pairs": ("s: T[N]", "parallel m in M, j in M, n in N", "s[n] += x[m, n] * x[j, n]", "sums over pairs"),
    "all for each": ("y: T[M, N]", "parallel m in M, j in M, n in N", "y[m, n] += x[j, n]", "for each row"),
    "halves": ("s: T[N]", "require M % 2 == 0", "parallel m in M, n in N", "s[n] += x[m, n]", "requires something"),
    "an index over half": ("s: T[N]", "parallel h in M // 2, n in N", "s[n] += x[h, n]", "has an index over M // 2"),
}  # fmt: skip
# As far as one can see these are sums: what the numbers are is only known when they are.
UNSEEN = {"halves"}


def text(outputs: str, body: tuple[str, ...]) -> str:
    """A file with one kernel."""
    head = f"fn twice(a) = a + a\nfn top(a, i) = max(a, i)\nkernel k({ROWS}) -> ({outputs}):\n"
    return head + "".join(f"    {line}\n" for line in body)


def outcomes(source: str) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The outputs for all rows, and for two chunks of them."""
    kernel: ir.Kernel = in_float64(elaborate(checked(source), "k", Specialization({"T": F32})))
    g = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=g).double()

    x, t = numbers(8, 4), torch.randint(0, 4, (8,), generator=g)
    fixed = {"w": numbers(4), "p": numbers(5, 4)}

    def of(rows: slice) -> dict[str, torch.Tensor]:
        return interpret(kernel, {"x": x[rows], "t": t[rows], **fixed}, {}, precision="f64")

    return of(slice(0, 8)), [of(slice(0, 4)), of(slice(4, 8))]


def agree(source: str, summed: frozenset[int]) -> bool:
    """Whether the chunks, one behind another or added up, give what all rows do."""
    whole, parts = outcomes(source)
    for k, (name, value) in enumerate(whole.items()):
        found = [p[name] for p in parts]
        if k in summed:
            together = found[0] + found[1]
        elif value.shape[0] == 8:
            together = torch.cat(found)
        else:
            together = found[0] if torch.equal(*found) else torch.full_like(value, torch.nan)
        if not torch.equal(together, value):
            return False
    return True


@pytest.mark.parametrize("name", TAKEN)
def test_kernels_that_mix_no_rows(name: str) -> None:
    outputs, *body = TAKEN[name]
    source = text(outputs, tuple(body))
    found = rows_of(checked(source).kernels[0], frozenset({"M"}))
    assert found.summed == {k for k, o in enumerate(re.findall(r"\w+(?=:)", outputs)) if o == "s"}
    assert agree(source, found.summed)


@pytest.mark.parametrize("name", MIXED)
def test_kernels_that_mix_rows(name: str) -> None:
    outputs, *body, says = MIXED[name]
    source = text(outputs, tuple(body))
    with pytest.raises(Mixes, match=says):
        rows_of(checked(source).kernels[0], frozenset({"M"}))
    if name not in UNSEEN:
        # However its outputs are taken, some of the ways to put chunks together gives something else.
        assert not agree(source, frozenset()) and not agree(source, frozenset({0}))


def test_an_output_that_is_a_sum_by_some_choices_only() -> None:
    source = (
        "kernel k(x: T[M, N], w: T[N], f: const bool = false) -> (s: T[N]):\n    parallel n in N\n"
        "    if f:\n        s[n] = w[n]\n    else:\n        parallel m in M\n        s[n] += x[m, n]\n"
    )
    with pytest.raises(Mixes, match="is a sum over rows by some of its choices"):
        rows_of(checked(source).kernels[0], frozenset({"M"}))
