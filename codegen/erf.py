"""How is the error function computed in f32? Its polynomials, which the helpers of both backends evaluate.

Below `SPLIT`, `erf(x) = x + x * p(x * x)`, and above it `erf(x) = 1 - 2 ** q(x)`; both are computed and one is chosen.
The libraries' own function chooses between coefficients, one by one, which takes a third more instructions. The sign is
put back at the end, so erf is odd to the last bit; what is large is 1, zeros, infinities and NaN are what they must be.

`benchmarks/fit_erf.py` makes the coefficients and measures the function at every f32.
"""

from __future__ import annotations

SPLIT = 1.125

# p(t) = erf(sqrt(t)) / sqrt(t) - 1, from the highest power of t down.
BELOW = (7.06354185e-05, -0.000776580535, 0.00516025955, -0.0268392228, 0.112832561, -0.376126021, 0.128379166)

# q(x) = log2(1 - erf(x)), from the highest power of x down. The first is negative: nothing large becomes small again.
ABOVE = (-0.00149344234, 0.0199282654, -0.123305678, -0.951570034, -1.60633159, -0.00564907957)
