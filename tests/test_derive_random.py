"""Random kernels, derived and compared with torch.autograd: expressions over rows, columns and their reductions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from derive_kit import autograd, call, derived_of, gradients, worst

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


@pytest.mark.parametrize("seed", range(60))
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
