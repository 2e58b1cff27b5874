"""Random kernels, derived and compared with torch.autograd: expressions over rows, columns and their reductions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from derive_kit import autograd, call, derived_of, gradients, worst

from kgen.codegen.derive import DeriveError
from kgen.dsl.parser import parse_text

TOLERANCE = 1e-8

Env = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Value:
    """An expression as text, what torch computes for it (shape [M or 1, N or 1]) and the indices it carries."""

    text: str
    torch: Callable[[Env], torch.Tensor]
    axes: frozenset[str]


LEAVES = (
    Value("x[m, n]", lambda e: e["x"], frozenset("mn")),
    Value("x[m, N - 1 - n]", lambda e: e["x"].flip(1), frozenset("mn")),
    Value("w[n]", lambda e: e["w"][None], frozenset("n")),
    Value("s[m]", lambda e: e["s"][:, None], frozenset("m")),
    Value("x[m, t[m]]", lambda e: e["x"].gather(1, e["t"][:, None]), frozenset("m")),
    Value("0.7", lambda e: torch.full((1, 1), 0.7, dtype=torch.float64), frozenset()),
)

# Each keeps its argument in a range where the function and its derivative are of ordinary size.
UNARY: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("sin({})", torch.sin),
    ("tanh({})", torch.tanh),
    ("sigmoid({})", torch.sigmoid),
    ("-{}", torch.neg),
    ("abs({})", torch.abs),
    ("exp(tanh({}))", lambda a: a.tanh().exp()),
    ("log(1.5 + tanh({}))", lambda a: (1.5 + a.tanh()).log()),
    ("rsqrt(1.5 + tanh({}))", lambda a: (1.5 + a.tanh()).rsqrt()),
    ("sqrt(1.5 + tanh({}))", lambda a: (1.5 + a.tanh()).sqrt()),
    ("(1.5 + tanh({})) ** 2.5", lambda a: (1.5 + a.tanh()) ** 2.5),
)
BINARY: tuple[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], ...] = (
    ("({} + {})", torch.add),
    ("({} - {})", torch.sub),
    ("({} * {})", torch.mul),
    ("{} / (2.0 + tanh({}))", lambda a, b: a / (2 + b.tanh())),
    ("maximum({}, {})", torch.maximum),
    ("minimum({}, {})", torch.minimum),
    ("where({0} < 0.1, {1}, {0})", lambda a, b: torch.where(a < 0.1, b, a)),
)
REDUCE: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("sum({}, n)", lambda a: a.sum(1, keepdim=True)),
    ("mean({}, n)", lambda a: a.mean(1, keepdim=True)),
    ("var({}, n)", lambda a: a.var(1, keepdim=True, correction=0)),
    ("max({}, n)", lambda a: a.amax(1, keepdim=True)),
    ("logsumexp({}, n)", lambda a: a.logsumexp(1, keepdim=True)),
    ("softmax({}, n)", lambda a: a.softmax(1)),
)


def grown(rng: random.Random, pool: list[Value]) -> Value:
    """A new value of those in `pool`."""
    kind = rng.random()
    a, b = rng.choice(pool), rng.choice(pool)
    if kind < 0.3 and "n" in a.axes:
        text, fn = rng.choice(REDUCE)
        axes = a.axes if text.startswith("softmax") else a.axes - {"n"}
        return Value(text.format(a.text), lambda e: fn(a.torch(e)), axes)
    if kind < 0.6:
        text, one = rng.choice(UNARY)
        return Value(text.format(a.text), lambda e: one(a.torch(e)), a.axes)
    text, two = rng.choice(BINARY)
    return Value(text.format(a.text, b.text), lambda e: two(a.torch(e), b.torch(e)), a.axes | b.axes)


def program(seed: int) -> tuple[str, Callable[..., tuple[torch.Tensor, ...]]]:
    """A kernel with two outputs of named values that use one another, and its formula."""
    rng = random.Random(seed)
    pool = list(LEAVES)
    lines = []
    for i in range(6):
        v = grown(rng, pool)
        lines.append(f"    v{i} = {v.text}")
        pool.append(Value(f"v{i}", v.torch, v.axes))
    row = next((v for v in reversed(pool) if v.axes <= {"m"}), pool[-1])
    lines += [f"    y[m, n] = {pool[-1].text} * x[m, n] + {pool[-2].text} * w[n] + s[m]", f"    r[m] = {row.text}"]
    head = (
        "kernel f(x: T[*M, N], w: T[N], s: T[*M], t: i64[*M]) -> (y: T[*M, N], r: T[*M]):\n"
        "    parallel m in M\n    tile n in N\n"
    )

    def formula(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        env = {"x": x, "w": w, "s": s, "t": t}
        y = pool[-1].torch(env) * x + pool[-2].torch(env) * w + s[:, None]
        return y, row.torch(env).expand(x.shape[0], 1)[:, 0]

    return head + "\n".join(lines) + "\n", formula


SUBSCRIPTS: tuple[tuple[str, Callable[[Env, torch.Tensor], torch.Tensor]], ...] = (
    ("n", lambda e, n: n),
    ("N - 1 - n", lambda e, n: 6 - n),
    ("(n + 2) % N", lambda e, n: (n + 2) % 7),
    ("(3 - n) % N", lambda e, n: (3 - n) % 7),
    ("n // 2", lambda e, n: n // 2),
    ("(2 * n) % N", lambda e, n: (2 * n) % 7),
    ("0", lambda e, n: 0 * n),
    ("N - 1", lambda e, n: 0 * n + 6),
    ("t[m]", lambda e, n: e["t"][:, None] + 0 * n),
    ("order[n]", lambda e, n: e["order"].long() + 0 * n),
    ("(t[m] + n) % N", lambda e, n: (e["t"][:, None] + n) % 7),
)


@pytest.mark.parametrize("kind", ["tile", "parallel"])
@pytest.mark.parametrize("seed", range(24))
def test_random_subscripts(seed: int, kind: str) -> None:
    """Right, or refused because several programs would add to one element."""
    rng = random.Random(seed)
    chosen = rng.sample(SUBSCRIPTS, rng.randint(1, 3))
    columns = ["N - 1 - n", "n", "n"]
    loads = " + ".join(f"sin({i + 2}.0 * x[m, {s}]) * w[{columns[i]}]" for i, (s, _) in enumerate(chosen))
    text = (
        "kernel f(x: T[*M, N], w: T[N], t: i64[*M], order: i32[N]) -> (y: T[*M, N]):\n    require N >= 1\n"
        f"    parallel m in M\n    {kind} n in N\n    y[m, n] = {loads}\n"
    )

    def formula(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor]:
        n = torch.arange(7)
        env = {"t": t, "order": order}
        y = torch.zeros_like(x)
        for i, (_, at) in enumerate(chosen):
            picked = x.gather(1, at(env, n).expand(x.shape))
            y = y + torch.sin((i + 2) * picked) * (w if i else w.flip(0))
        return (y,)

    g = torch.Generator().manual_seed(seed)
    arguments = {
        "x": torch.randn(3, 7, generator=g),
        "w": torch.randn(7, generator=g),
        "t": torch.randint(0, 7, (3,), generator=g),
        "order": torch.randint(0, 7, (7,), generator=g).to(torch.int32),
    }
    c = call(parse_text(text, "test.kdsl"), "f", arguments)
    for wanted in (frozenset("x"), frozenset("w")):
        try:
            derived = derived_of(c, wanted)
        except DeriveError as refused:
            assert kind == "parallel" and {d.code for d in refused.diagnostics} <= {"K0503", "K0505"}, str(refused)
            continue
        mine, seeds = gradients(c, derived)
        theirs = autograd(formula, c, arguments, wanted, seeds)
        for name in mine:
            assert worst(mine[name], theirs[name]) < TOLERANCE, f"{name}\n{text}\n{derived.backward_text}"


@pytest.mark.parametrize("seed", range(40))
def test_random_kernels(seed: int) -> None:
    text, formula = program(seed)
    module = parse_text(text, f"random{seed}.kdsl")
    g = torch.Generator().manual_seed(seed)
    arguments = {
        "x": torch.randn(3, 5, generator=g),
        "w": torch.randn(5, generator=g),
        "s": torch.randn(3, generator=g),
        "t": torch.randint(0, 5, (3,), generator=g),
    }
    c = call(module, "f", arguments)
    derived = derived_of(c)
    mine, seeds = gradients(c, derived)
    theirs = autograd(formula, c, arguments, frozenset("xws"), seeds)
    for name in mine:
        assert worst(mine[name], theirs[name]) < TOLERANCE, f"{name}\n{text}\n{derived.backward_text}"
