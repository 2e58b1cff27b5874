"""The coefficients of `codegen/erf.py`: fitted, and measured at every f32.

    python benchmarks/fit_erf.py          # prints the coefficients, from the highest power down
    python benchmarks/fit_erf.py --check  # the largest errors of those in codegen/erf.py, in a few minutes

A fit is the best in the maximum norm, relative to erf, by Lawson's iteration (least squares whose weights follow the
error). The coefficient of the lowest power is rounded to f32 first, the others are fitted again beside it, and so on
upwards: each makes up for the rounding of those before.

The check computes with FMA as the kernels do: f64 holds the product exactly, and its sum is rounded to f32. The
hardware's exponential may be off by 2**-22 relative, so it is moved by that either way. Errors count in units of
2**-23 of the result, as in `codegen/ulps.py`, in units in the last place, and absolutely.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mpmath
import numpy as np
import torch

from kgen.codegen.erf import ABOVE, BELOW, SPLIT

DEGREE_BELOW, DEGREE_ABOVE = 6, 5
POINTS = 1500
ITERATIONS = 300
# From here on 1 - erf is below half a unit in the last place of 1, by far.
END = 3.95
EXP2_ERROR = 2.0**-22
CHUNK = 1 << 22

Array = np.ndarray


def lawson(basis: Array, values: Array, weights: Array) -> Array:
    """The coefficients for which `weights * (basis @ coefficients - values)` has the least maximum."""
    share = np.full(len(values), 1 / len(values))
    least, best = np.inf, np.zeros(basis.shape[1])
    for _ in range(ITERATIONS):
        scale = np.sqrt(share) * weights
        found = np.linalg.lstsq(basis * scale[:, None], values * scale, rcond=None)[0]
        error = np.abs(basis @ found - values) * weights
        if error.max() < least:
            least, best = error.max(), found
        share = share * error
        share /= share.sum()
    return best


def rounded_fit(x: Array, values: Array, weights: Array, degree: int) -> list[float]:
    """Coefficients in f32 of the powers of `x` from the highest down."""
    powers = np.vander(x, degree + 1, increasing=True)
    held: list[float] = []
    for k in range(degree + 1):
        rest = values - powers[:, :k] @ np.array(held)
        held.append(float(np.float32(lawson(powers[:, k:], rest, weights)[0])))
    return held[::-1]


def mapped(f: Callable[[Any], Any], x: Array) -> Array:
    """`f` of each element, in more digits than f64 has on the way."""
    return np.array([float(f(mpmath.mpf(float(v)))) for v in x])


def fit() -> tuple[list[float], list[float]]:
    """(`BELOW`, `ABOVE`)."""
    unit = 0.5 * (1 - np.cos(np.pi * (np.arange(POINTS) + 0.5) / POINTS))
    x = SPLIT * unit[unit > 1e-4]
    ratio = mapped(lambda v: mpmath.erf(v) / v, x)
    below = rounded_fit(x * x, ratio - 1, 1 / ratio, DEGREE_BELOW)
    x = SPLIT + unit * (END - SPLIT)
    rest = mapped(mpmath.erfc, x)
    exponent = mapped(lambda v: mpmath.log(mpmath.erfc(v), 2), x)
    return below, rounded_fit(x, exponent, rest * np.log(2) / (1 - rest), DEGREE_ABOVE)


def fma(a: torch.Tensor, b: torch.Tensor, c: float | torch.Tensor) -> torch.Tensor:
    """`a * b + c` of f32 held in f64, rounded to f32."""
    return (a * b + c).float().double()


def horner(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """The polynomial at `x`."""
    out = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        out = fma(out, x, c)
    return out


def erf(x: torch.Tensor, off: float) -> torch.Tensor:
    """What the helpers compute of `x >= 0`, f32 held in f64; the exponential is off by `off` relative."""
    below = fma(horner(BELOW, (x * x).float().double()), x, x)
    above = 1 - (torch.exp2(horner(ABOVE, x)) * (1 + off)).float().double()
    return torch.where(x < SPLIT, below, above.float().double())


def chunks(first: float, last: float) -> Iterator[torch.Tensor]:
    """Every f32 from `first` up to and without `last`, in f64."""
    low, high = (int(np.float32(v).view(np.int32)) for v in (first, last))
    for start in range(low, high, CHUNK):
        bits = torch.arange(start, min(start + CHUNK, high), dtype=torch.int32)
        yield bits.view(torch.float32).double()


def check() -> None:
    """Prints the largest errors below `SPLIT` and above it."""
    tiny = float(np.finfo(np.float32).tiny)
    for first, last in ((tiny, SPLIT), (SPLIT, 8.0)):
        worst = {"2**-23": (0.0, 0.0), "ulp": (0.0, 0.0), "absolute": (0.0, 0.0)}
        largest = 0.0
        for x in chunks(first, last):
            exact = torch.erf(x)
            ulp = torch.exp2(torch.floor(torch.log2(exact.float().double())) - 23)
            for off in (0.0,) if last <= SPLIT else (-EXP2_ERROR, 0.0, EXP2_ERROR):
                got = erf(x, off)
                largest = max(largest, float(got.max()))
                error = (got - exact).abs()
                for name, e in (("2**-23", error / exact * 2**23), ("ulp", error / ulp), ("absolute", error)):
                    at = int(e.argmax())
                    worst[name] = max(worst[name], (float(e[at]), float(x[at])))
        print(f"{first:g} to {last:g}, largest result {largest:.9g}")
        for name, (error, at) in worst.items():
            print(f"    {name:10}{error:.4g} at {at:.9g}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="measure instead of fitting")
    if parser.parse_args().check:
        check()
        return
    for name, found in zip(("BELOW", "ABOVE"), fit(), strict=True):
        print(f"{name} = ({', '.join(f'{c:.9g}' for c in found)})")


if __name__ == "__main__":
    main()
