"""One tensor loaded along several indices of one extent: what a name means changes with the place it is moved to."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from derive_kit import autograd, call, cotangents, derived_of, gradients, kernel_of, worst

from kgen.codegen.derive import DeriveError, derive, differentiable
from kgen.codegen.derive.graph import Graph, Node
from kgen.codegen.interpret import interpret, interpreted_gradients
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import F32
from kgen.dsl.parser import parse_text
from kgen.dsl.source import NOWHERE

# Both sides compute in float64; a few hundred roundings of terms that partly cancel.
TOLERANCE = 1e-8

Formula = Callable[..., torch.Tensor]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square(body: str, params: str, head: str = "tile i in N, j in N", y: str = "T[N, N]") -> str:
    return f"kernel f({params}) -> (o: {y}):\n    {head}\n    {body}\n"


def error(text: str, formula: Formula, arguments: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of any gradient, against autograd of `formula` and of the interpreter."""
    c = call(parse_text(text, "test.kdsl"), "f", arguments)
    derived = derived_of(c)
    mine, seeds = gradients(c, derived)
    wanted = differentiable(c.kernel)
    theirs = autograd(lambda **leaves: (formula(**leaves),), c, arguments, wanted, seeds)
    read = interpreted_gradients(c.kernel, c.tensors, c.scalars, sorted(wanted), seeds)
    assert all(worst(read[n], theirs[n]) < TOLERANCE for n in read)
    return max(worst(mine[n], theirs[n]) for n in mine)


X, Z, A, T = randn(5), randn(5, 5, seed=1), randn(3, 5, seed=2), torch.tensor([0, 0, 3, 4, 1])
ONE, TWO, WITH = "x: T[N]", "z: T[N, N]", "x: T[N], z: T[N, N]"
CASES: dict[str, tuple[str, Formula, dict[str, torch.Tensor]]] = {
    "pair": (square("o[i, j] = x[i] * 2.0 + x[j]", ONE), lambda x: x[:, None] * 2 + x, {"x": X}),
    "distance": (
        square("o[i, j] = exp(-(x[i] - x[j]) * (x[i] - x[j]))", ONE),
        lambda x: (-(x[:, None] - x).square()).exp(), {"x": X},
    ),
    "transposed": (square("o[i, j] = z[i, j] + z[j, i] * z[i, j]", TWO), lambda z: z + z.T * z, {"z": Z}),
    "diagonal beside rows": (
        square("o[i, j] = z[i, j] * z[j, j] * z[i, i]", TWO),
        lambda z: z * z.diagonal() * z.diagonal()[:, None], {"z": Z},
    ),
    "softmax of an outer product": (
        square("o[i, j] = softmax(x[i] * x[j], j)", ONE), lambda x: (x[:, None] * x).softmax(1), {"x": X},
    ),
    "turned along both": (
        square("o[i, j] = z[i, j] * x[(i + 1) % N] + x[N - 1 - i] * x[j]", WITH),
        lambda x, z: z * x.roll(-1)[:, None] + x.flip(0)[:, None] * x, {"x": X, "z": Z},
    ),
    "gathered along one": (
        square("o[i, j] = x[t[i]] * 2.0 + x[j]", "x: T[N], t: i64[N]"),
        lambda x, t: x[t][:, None] * 2 + x, {"x": X, "t": T},
    ),
    "a reduction inside a reduction": (
        square("o[i, j] = x[i] * sum(z[i, j] * x[j] * sum(z[j, i] * x[i], i), j) + x[j]", WITH),
        lambda x, z: (x * (z * x * (z @ x)).sum(1))[:, None] + x, {"x": X, "z": Z},
    ),
    "positions of extremes": (
        square("o[i, j] = x[i] * argmax(z[i, j], j) + x[j] * argmax(z[j, i], i) + z[j, i]", WITH),
        lambda x, z: (x * z.argmax(1))[:, None] + x * z.argmax(1) + z.T, {"x": X, "z": Z},
    ),
    "gram": (
        square("o[i, j] = sum(a[i, n] * a[j, n], n)", "a: T[M, N]", "tile i in M, j in M, n in N", "T[M, M]"),
        lambda a: a @ a.T, {"a": A},
    ),
    "batches": (
        square(
            "o[b, i, j] = x[b, i] - sin(x[b, j])", "x: T[B, N]", "tile b in B, i in N, j in N", "T[B, N, N]"
        ),
        lambda x: x[:, :, None] - x[:, None].sin(), {"x": A},
    ),
    "three indices": (
        square(
            "o[i, j, k] = z[i, j] * z[j, k] + z[k, i]", TWO, "tile i in N, j in N, k in N", "T[N, N, N]"
        ),
        lambda z: z[:, :, None] * z + z.T[:, None], {"z": Z},
    ),
}  # fmt: skip


def spread(text: str, *names: str) -> str:
    """`text` with the indices `names` over programs."""
    lines = []
    for line in text.splitlines():
        if line.startswith("    tile "):
            axes = [axis.split(" in ") for axis in line.removeprefix("    tile ").split(", ")]
            lines += [f"    {'parallel' if name in names else 'tile'} {name} in {extent}" for name, extent in axes]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    text, formula, arguments = CASES[name]
    assert error(text, formula, arguments) < TOLERANCE


# No reduction runs over an index of programs, and no element of a diagonal or gather is compared with one.
SPREAD = [
    *((name, index) for name in CASES for index in "ij" if name not in (
        "a reduction inside a reduction", "positions of extremes", "gathered along one", "diagonal beside rows",
        "softmax of an outer product",
    )),
    ("softmax of an outer product", "i"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "index"), SPREAD)
def test_one_index_over_programs(name: str, index: str) -> None:
    text, formula, arguments = CASES[name]
    assert error(spread(text, index), formula, arguments) < TOLERANCE


@pytest.mark.parametrize("name", ["pair", "distance", "transposed", "batches", "gram"])
def test_both_indices_over_programs(name: str) -> None:
    text, formula, arguments = CASES[name]
    assert error(spread(text, "i", "j"), formula, arguments) < TOLERANCE


def test_what_is_printed() -> None:
    text, _, _ = CASES["pair"]
    for shown in (text, spread(text, "i")):  # over programs no sum crosses them
        lines = derive(kernel_of(shown), frozenset("x")).backward_text.splitlines()
        assert "    d_x[i] = 2.0 * sum(d_o[i, j], j) + sum(d_o[j, i], j)" in lines


# ---- substitution by itself ------------------------------------------------------------------------------------------


def test_substitution_captures_nothing() -> None:
    n, m = Poly.sym("N"), Poly.sym("M")
    g = Graph({"i": n, "j": n, "k": m, "fresh": n}, NOWHERE)
    i, j, k = (Poly.sym(s) for s in "ijk")
    asked: list[tuple[Poly, tuple[str, ...], frozenset[str]]] = []

    def spare(extent: Poly, preferred: tuple[str, ...], avoided: frozenset[str]) -> str:
        asked.append((extent, preferred, avoided))
        return next(s for s in (*preferred, "fresh") if g.extents[s] == extent and s not in avoided)

    def at(a: Node, **env: Poly) -> Node:
        return g.at_index(a, env, spare)

    z = g.load("z", (i, j), F32)
    over_j = g.reduce("max", z, ("j",))
    # What is bound gives way, and takes the name that has become free.
    assert at(over_j, i=j) is g.reduce("max", g.load("z", (j, i), F32), ("i",))
    assert asked.pop() == (n, ("i",), frozenset("j"))
    # A name that stays in use is not taken.
    w = g.reduce("max", g.load("w", (i, j, i + 1), F32), ("j",))
    assert at(w, i=i + j) is g.reduce("max", g.load("w", (i + j, Poly.sym("fresh"), i + j + 1), F32), ("fresh",))
    # What is bound is not what has that name outside.
    assert at(over_j, j=k) is over_j
    both = g.op("mul", over_j, g.load("x", (j,), F32))
    assert at(both, j=i) is g.op("mul", over_j, g.load("x", (i,), F32))
    # At once, not one after the other.
    assert at(z, i=j, j=i) is g.load("z", (j, i), F32)
    # What a reduction takes with it is renamed in reductions inside as well.
    x = g.load("x", (i,), F32)
    nested = g.reduce("max", g.op("add", g.reduce("max", g.op("add", z, x), ("j",)), g.load("y", (k, i), F32)), ("i",))
    inside = g.reduce("max", g.op("add", g.load("z", (j, i), F32), g.load("x", (j,), F32)), ("i",))
    asked.clear()
    assert not at(nested, k=Poly.const(0)).axes and not asked
    moved = at(g.op("mul", x, nested), i=j, k=i)
    assert moved.axes == frozenset("ij") and moved.args[1].reduction == ("max", ("fresh",))
    assert at(nested.args[0].args[0], i=j) is inside


def naive(self: Graph, a: Node, env: Mapping[str, Poly], spare: Any) -> Node:
    """Substitution that heeds no reduction."""
    if not a.axes & env.keys():
        return a
    args = tuple(naive(self, x, env, spare) for x in a.args)
    if a.kind == "index":
        assert isinstance(a.data, Poly)
        return self.index(a.data.substitute(env))
    if a.kind == "load":
        gathers = iter(args)
        at = [p.substitute(env) if isinstance(p, Poly) else next(gathers) for p in a.at]
        return self.load(a.tensor, at, a.dtype, a.span)
    return self.rebuild(a, args)


@pytest.mark.parametrize("name", ["pair", "distance", "batches", "gram"])
def test_captured_on_purpose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, formula, arguments = CASES[name]
    monkeypatch.setattr(Graph, "at_index", naive)
    assert error(text, formula, arguments) > 1e-4


def test_a_sum_over_programs_lost_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all programs add to one element is a sum along a tile where the element has a program of its own."""
    text = spread(CASES["pair"][0], "i")
    assert error(text, *CASES["pair"][1:]) < TOLERANCE
    plain = Graph.sum
    monkeypatch.setattr(Graph, "sum", lambda g, a, over: a if tuple(over) == ("j",) else plain(g, a, over))
    with pytest.raises(DeriveError):  # a value with an index that its store lacks
        error(text, *CASES["pair"][1:])


# ---- random ----------------------------------------------------------------------------------------------------------

SIZES = {"N": 4, "K": 3}
EXTENT = {"i": "N", "j": "N", "l": "N", "k": "K"}
LEAVES = (
    "x[{a}]", "x[N - 1 - {a}]", "x[({a} + 1) % N]", "x[t[{a}]]", "z[{a}, {b}]", "z[{b}, {a}]", "z[{a}, {a}]",
    "z[N - 1 - {b}, {a}]", "z[{a}, t[{b}]]", "u[k, {a}]", "v[{a}, k]", "u[k, ({a} + 2) % N]",
)  # fmt: skip
UNARY = ("sin({})", "tanh({})", "exp(tanh({}))", "abs({})", "-{}", "rsqrt(1.5 + tanh({}))")
BINARY = (
    "({} + {})", "({} - {})", "({} * {})", "maximum({}, {})", "{} / (2.0 + tanh({}))", "where({0} < 0.1, {1}, {0})",
)  # fmt: skip
REDUCE = ("sum", "mean", "max", "min", "logsumexp", "prod", "softmax")


def program(rng: random.Random, kinds: Mapping[str, str]) -> str:
    """A kernel over the indices of `kinds`, each `tile` or `parallel`: loads of the same tensors along all of them,
    named values that use one another, reductions, and two outputs."""
    square_ = [n for n in kinds if EXTENT[n] == "N"]
    tiles = [n for n in kinds if kinds[n] == "tile"]
    pool: list[tuple[str, frozenset[str]]] = []
    for leaf in LEAVES:
        for _ in range(2):
            a, b = rng.sample(square_, 2)
            text = leaf.format(a=a, b=b)
            axes = {a} | ({b} if "{b}" in leaf else set()) | ({"k"} if "k" in leaf else set())
            if axes <= kinds.keys():
                pool.append((text, frozenset(axes)))
    lines = []
    for number in range(5):
        # What was made last comes up more often.
        a, b = (rng.choice(pool[-4:] if rng.random() < 0.4 else pool) for _ in range(2))
        over = [n for n in tiles if n in a[1]]
        roll = rng.random()
        if roll < 0.35 and over:
            index, kind = rng.choice(over), rng.choice(REDUCE)
            inner = f"tanh({a[0]})" if kind == "prod" else a[0]
            made = f"{kind}({inner}, {index})", a[1] if kind == "softmax" else a[1] - {index}
        elif roll < 0.55:
            made = rng.choice(UNARY).format(a[0]), a[1]
        else:
            made = rng.choice(BINARY).format(a[0], b[0]), a[1] | b[1]
        lines.append(f"    v{number} = {made[0]}")
        pool.append((f"v{number}", made[1]))
    outputs = []
    for name in ("o", "p"):
        at = [n for n in kinds if kinds[n] == "parallel" or rng.random() < 0.6]
        rng.shuffle(at)
        a, b = pool[-1 if name == "o" else -2], rng.choice(pool)
        text = f"{a[0]} * sin({b[0]}) + {rng.choice(pool[:8])[0]}"
        axes = a[1] | b[1] | frozenset(n for n in kinds if f"{n}]" in text or f"{n}," in text or f"[{n}" in text)
        axes |= frozenset(n for n in kinds if any(n in pool_axes for t, pool_axes in pool if t in text))
        over = [n for n in tiles if n in axes and n not in at]
        value = f"sum({text}, {', '.join(over)})" if over else text
        outputs.append(f"{name}: T[{', '.join(EXTENT[n] for n in at)}]")
        lines.append(f"    {name}[{', '.join(at)}] = {value}")
    head = "kernel f(x: T[N], z: T[N, N], u: T[K, N], v: T[N, K], t: i64[N])"
    axes = "".join(f"    {kind} {n} in {EXTENT[n]}\n" for n, kind in kinds.items())
    return f"{head} -> ({', '.join(outputs)}):\n    require N >= 1\n{axes}" + "\n".join(lines) + "\n"


def judge(text: str, seed: int) -> bool:
    """Whether gradients of all inputs that reach an output are right; False if one of them is refused."""
    g = torch.Generator().manual_seed(seed)
    n, k = SIZES["N"], SIZES["K"]
    arguments = {
        "x": torch.randn(n, generator=g), "z": torch.randn(n, n, generator=g), "u": torch.randn(k, n, generator=g),
        "v": torch.randn(n, k, generator=g), "t": torch.randint(0, n, (n,), generator=g),
    }  # fmt: skip
    c = call(parse_text(text, "test.kdsl"), "f", arguments)
    for wanted in ("x", "z", "u", "v"):
        outputs = interpret(c.kernel, c.tensors, c.scalars, precision="f64")
        seeds = {name: torch.randn(o.shape, generator=g, dtype=torch.float64) for name, o in outputs.items()}
        right = interpreted_gradients(c.kernel, c.tensors, c.scalars, [wanted], seeds)[wanted]
        try:
            derived = derived_of(c, frozenset((wanted,)))
        except DeriveError as refused:
            (found,) = refused.diagnostics
            if found.code == "K0504":
                assert not right.any(), text
                continue
            assert found.code in ("K0503", "K0505") and "parallel" in text, f"{refused}\n{text}"
            return False
        mine, _ = gradients(c, derived, {name: seeds[name] for name in cotangents(outputs, derived)})
        assert worst(mine[wanted], right) < TOLERANCE, f"{wanted}\n{text}\n{derived.backward_text}"
    return True


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("indices", ["ij", "ijk", "ijl"])
def test_random_tiles(indices: str, seed: int) -> None:
    assert judge(program(random.Random(f"{indices} {seed}"), dict.fromkeys(indices, "tile")), seed)


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_and_tiles(seed: int) -> None:
    rng = random.Random(seed)
    judge(program(rng, {n: rng.choice(("tile", "parallel")) for n in ("ij", "ijk")[seed % 2]}), seed)
