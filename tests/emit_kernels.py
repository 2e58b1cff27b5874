"""Small kernels that the tests of both emitters go through: rows, flat points, grids of two tiles, gathers."""

NORM = """kernel norm(x: T[*M, N], w: W[N], eps: f32 = 1e-6, offset: f32 = 0.0) -> (y: T[*M, N], r: f32[*M]):
    parallel m in M
    tile n in N
    s = rsqrt(mean(x[m, n] * x[m, n], n) + eps)
    r[m] = s
    y[m, n] = x[m, n] * s * (offset + w[n])
"""

SOFTMAX = """kernel soft(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = softmax(x[m, n], n)
"""

GATE = """kernel gate_up(gate: T[*M, N], up: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = gate[m, n] * sigmoid(gate[m, n]) * up[m, n]
"""

SCALED = """kernel scaled(g: inout T[*M, N], s: f32[]) -> (y: f32[*M, N]):
    parallel m in M, n in N
    y[m, n] = g[m, n] + s[]
    g[m, n] = g[m, n] * s[]
"""

GRID = """kernel grid(x: T[*M, I, J], w: W[J]) -> (r: f32[*M, I], c: f32[*M, J], d: T[*M, I, J]):
    parallel m in M
    tile i in I, j in J
    r[m, i] = sum(x[m, i, j] * w[j], j)
    c[m, j] = max(x[m, i, j], i)
    d[m, i, j] = x[m, i, j] - sum(x[m, i, j], i, j) / (I * J)
"""

PICK = """kernel pick(x: T[*M, V], rows: T[P, V], t: i64[*M]) -> (one: f32[*M], row: T[*M, V], best: i64[*M]):
    parallel m in M
    tile v in V
    one[m] = x[m, t[m]]
    row[m, v] = x[m, v] + rows[t[m], v]
    best[m] = argmax(x[m, v], v)
"""
