"""Kernels that are legal and unusual: names that a backend keeps for itself, index arithmetic beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

import kgen

_ROWS = "(x: T[*M, N]) -> (y: T[*M, N]):\n    parallel m in M\n"


@pytest.mark.parametrize(
    "text",
    [
        # A kernel may be called as one of its dimensions, or a type of the backend.
        f"kernel N{_ROWS}    tile n in N\n    y[m, n] = x[m, n] + max(x[m, n], n)\n",
        f"kernel int{_ROWS}    tile n in N\n    y[m, n] = x[m, n] + max(x[m, n], n)\n",
        # Names that begin with an underscore belong to the C implementation.
        "kernel __k_(x: T[*M, N]) -> (_Bool: T[*M, N]):\n    parallel _Complex in M\n    tile _ in N\n"
        "    __ = max(x[_Complex, _], _)\n    _Bool[_Complex, _] = x[_Complex, _] + __\n",
        # Names that differ in case or by an underscore only.
        "kernel k(x: T[*M, N]) -> (X: T[*M, N]):\n    parallel m in M\n    tile n in N\n"
        "    x_ = max(x[m, n], n)\n    X_ = x[m, n]\n    X[m, n] = X_ + x_\n",
    ],
)
def test_names(backend: str, text: str) -> None:
    module = kgen.loads(text)
    (name,) = module
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    assert torch.equal(module[name](x, backend=backend), x + x.amax(-1, keepdim=True))


def test_index_values_are_64_bits(backend: str) -> None:
    module = kgen.loads("""
kernel powers(x: T[*M, N]) -> (c: i64[*M, N], f: f64[*M, N], s: i64[*M], b: bool[*M, N]):
    parallel m in M
    tile n in N
    c[m, n] = n * n * n + m * N * N * N
    f[m, n] = f64(n * n * n * n) + N * N * N
    s[m] = sum(n * n * m, n)
    b[m, n] = n * n * n > N * N * m
""")
    rows, columns = 60, 5000
    m, n = torch.arange(rows)[:, None], torch.arange(columns)
    c, f, s, b = module.powers(torch.zeros(rows, columns), backend=backend)
    assert torch.equal(c, n**3 + m * columns**3)
    assert torch.equal(f, (n**4).double().expand(rows, -1) + float(columns) ** 3)
    assert torch.equal(s, (n * n * m).sum(-1))
    assert torch.equal(b, n**3 > columns**2 * m)


def test_const_values_that_make_no_sense(backend: str) -> None:
    head = "kernel k(x: T[N], K: const i32) -> (y: T[K]):\n    require N >= 1\n    parallel i in K\n"
    short = kgen.loads(head + "    y[i] = x[0]\n").k
    with pytest.raises(kgen.KgenError, match=r"'y'.*-4"):
        short(torch.ones(3), -4, backend=backend)
    head = "kernel k(x: T[N], K: const i32) -> (y: T[N // K]):\n    require N % K == 0\n    parallel i in N // K\n"
    strided = kgen.loads(head + "    y[i] = x[i * K]\n").k
    assert torch.equal(strided(torch.arange(6.0), 2, backend=backend), torch.tensor([0.0, 2.0, 4.0]))
    with pytest.raises(kgen.KgenError, match="K0226"):
        strided(torch.ones(6), 0, backend=backend)


def test_a_const_given_as_a_tensor_is_read_at_each_call(backend: str) -> None:
    text = "kernel k(x: T[N], K: const i32) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n] * K\n"
    k, x, factor = kgen.loads(text).k, torch.ones(3), torch.tensor(2)
    assert torch.equal(k(x, factor, backend=backend), 2 * x)
    factor.fill_(5)
    assert torch.equal(k(x, factor, backend=backend), 5 * x)


def test_casts_to_narrow_integers(backend: str) -> None:
    module = kgen.loads("""
kernel narrow(x: i32[*M, N]) -> (a: i32[*M, N], b: i32[*M, N], c: i32[*M, N], s: i32[*M], f: f32[*M, N]):
    parallel m in M
    tile n in N
    a[m, n] = u8(x[m, n]) // 2 + 1
    b[m, n] = i8(x[m, n]) % 5
    c[m, n] = maximum(i16(x[m, n]), u8(x[m, n])) - sign(i8(x[m, n]))
    s[m] = sum(u8(x[m, n]), n)
    f[m, n] = u8(x[m, n]) / 2
""")
    x = torch.randint(-(2**31), 2**31, (3, 200), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    u8, i8, i16 = x.to(torch.uint8).to(torch.int32), x.to(torch.int8).to(torch.int32), x.to(torch.int16).to(torch.int32)
    a, b, c, s, f = module.narrow(x, backend=backend)
    assert torch.equal(a, u8 // 2 + 1)
    assert torch.equal(b, i8 % 5)
    assert torch.equal(c, torch.maximum(i16, u8) - i8.sign())
    assert torch.equal(s, u8.sum(-1).to(torch.int32))
    assert torch.equal(f, u8 / 2)


def test_a_dimension_that_only_an_absent_tensor_has(backend: str) -> None:
    module = kgen.loads("""
kernel k(x: T[N], w: W[K]?) -> (y: T[N]):
    parallel n in N
    if w:
        tile j in K
        y[n] = x[n] * sum(w[j], j)
    else:
        y[n] = x[n]
""")
    x, w = torch.arange(5.0), torch.ones(7)
    assert torch.equal(module.k(x, backend=backend), x)
    assert torch.equal(module.k(x, w, backend=backend), 7 * x)


def test_large_literals_meet_indices(backend: str) -> None:
    module = kgen.loads("""
kernel k(x: T[*M, N]) -> (s: i64[*M], b: bool[*M, N]):
    parallel m in M
    tile n in N
    s[m] = sum(n * 100000 * 100000, n)
    b[m, n] = where(n * 65537 * 65536 > 65536 * 65536, true, m > 0)
""")
    s, b = module.k(torch.zeros(2, 40), backend=backend)
    n = torch.arange(40)
    assert s.tolist() == [n.sum().item() * 10**10] * 2
    assert torch.equal(b, torch.stack([n > 0, torch.ones(40, dtype=torch.bool)]))


def test_positions_of_integers_and_constants_that_wrap(backend: str) -> None:
    module = kgen.loads("""
kernel k(x: i32[*M, N]) -> (p: i64[*M], q: i64[*M], r: i32[*M], c: i32[*M, N]):
    parallel m in M
    tile n in N
    p[m] = argmax(n * (n - 40), n)
    q[m] = argmin(i8(x[m, n]), n)
    r[m] = max(i8(x[m, n]), n)
    c[m, n] = i8(300) + u8(-7) + x[m, n]
""")
    x = torch.randint(-1000, 1000, (3, 130), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    narrow = x.to(torch.int8)
    p, q, r, c = module.k(x, backend=backend)
    assert p.tolist() == [129] * 3
    assert q.tolist() == [row.index(min(row)) for row in narrow.tolist()]
    assert torch.equal(r, narrow.amax(-1).to(torch.int32))
    assert torch.equal(c, 44 + 249 + x)
