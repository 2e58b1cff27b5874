"""Calls of any kernel, made from its signature: sizes at boundaries, layouts, dtypes, kinds of values.

A `Trial` says everything about a call, so that it can be saved, repeated and made smaller.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import torch

from kgen.codegen.normalize import required_dims
from kgen.codegen.shapes import ShapeError, bind_dims, constants
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir
from kgen.dsl.check import Specialization, TensorParam
from kgen.dsl.diagnostics import DslError
from kgen.dsl.dtypes import DTYPES
from kgen.runtime.differential import Question, ask
from kgen.runtime.gradients import GradientQuestion, ask_gradients, derivable
from kgen.runtime.kernel import Kernel
from kgen.runtime.placement import LAYOUTS

DIRECTIONS = ("forward", "backward")
VALUES = ("normal", "special", "large", "small", "zeros")

# One element; around a vector, a warp, several warps and a block of threads; primes.
WIDTHS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 509, 512, 1000, 1023, 1024, 1025, 2049)
QUICK_WIDTHS = (1, 3, 8, 17, 33, 64, 129, 1025)
# Of gradients, which compile three times as much, about half as many.
GRADIENT_WIDTHS = (1, 3, 8, 31, 32, 33, 64, 127, 129, 512, 1025)
QUICK_GRADIENT_WIDTHS = (1, 8, 33, 129)
# `scalar`: one element everywhere, as the gradient of a sum.
INCOMING = (*LAYOUTS, "scalar")
ROWS = (1, 2, 3, 4, 5, 8)


@dataclass(frozen=True)
class Trial:
    """One call: sizes of dimensions (a starred one is the product of its leading dimensions), a dtype for each dtype
    variable, constants, the optional tensors that are given, a layout and a kind of values. Of a call that records
    gradients, the inputs that they are `wanted` of, and the layout of the gradients that come in."""

    dims: Mapping[str, int]
    dtypes: Mapping[str, str]
    consts: Mapping[str, float | int | bool] = field(default_factory=dict)
    present: tuple[str, ...] = ()
    layout: str = "contiguous"
    values: str = "normal"
    seed: int = 0
    wanted: tuple[str, ...] = ()
    incoming: str = "contiguous"

    def __str__(self) -> str:
        parts = [f"{n}={v}" for n, v in (*self.dims.items(), *self.dtypes.items(), *self.consts.items())]
        parts += [*(f"with {n}" for n in self.present), self.layout, self.values]
        if self.wanted:
            parts.append(f"gradients of {', '.join(self.wanted)} from {self.incoming}")
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain data, for `Trial.from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Trial:
        """The trial that `to_json` wrote. Raises TypeError or KeyError for other data."""
        return Trial(**{**data, "present": tuple(data["present"]), "wanted": tuple(data.get("wanted", ()))})


# ---- which ---------------------------------------------------------------------------------------------------------


def trials(
    kernel: Kernel,
    *,
    direction: str = "forward",
    dtypes: tuple[str, ...] = (),
    quick: bool = False,
    seed: int = 0,
    max_elements: int = 1 << 17,
) -> list[Trial]:
    """A few dozen trials of `kernel` (`quick`: about a dozen; of gradients about half as many), boundary sizes first,
    then zero rows, layouts, values.

    `direction` is `forward` or `backward`: calls that record the gradients of some of the inputs that have one, all of
    them first. `dtypes` are taken in turn for every dtype variable that may stand for them. No tensor has more than
    `max_elements` elements. Sizes fulfil the kernel's `require`s; where none that do are found, or nothing has a
    gradient, the list is empty.
    """
    lot = random.Random(f"{kernel.name} {seed}")
    backward = direction == "backward"
    options = list(_options(kernel))
    if backward:
        # Such outputs need out=, and then a call records nothing.
        told = {t.dtype for t in kernel.signature.tensors if t.role != "out"}
        if any(t.dtype in kernel.signature.dtype_vars and t.dtype not in told for t in kernel.signature.outputs):
            return []
        options = [o for o in options if derivable(kernel, kernel.specialize(o.spec))[0]]
    if not options:
        return []
    out: list[Trial] = []

    def add(width: int, *, layout: str = "contiguous", values: str = "normal", rows: int | None = None) -> None:
        i = len(out)
        option = options[i % len(options)]
        variables = enumerate(kernel.signature.dtype_vars)
        # A variable that no given argument has is left to the runtime.
        chosen = {v: _dtype(kernel, v, dtypes, i // len(options) + k) for k, v in variables}
        start = Trial({}, chosen, option.consts, option.present, layout, values, seed * 1000 + i)
        if backward:
            start = _with_gradients(kernel, start, i, i // len(options), lot)
            if start is None:
                return
        found = _sized(kernel, start, width, rows, lot, max_elements)
        if found is not None and found not in out:
            out.append(found)

    turn = LAYOUTS[1:]
    most, few = (GRADIENT_WIDTHS, QUICK_GRADIENT_WIDTHS) if backward else (WIDTHS, QUICK_WIDTHS)
    for k, width in enumerate(few if quick else most):
        add(width, layout="contiguous" if k % 2 == 0 else turn[k // 2 % len(turn)])
    add(33, rows=0)
    for layout in turn if not quick else turn[:2]:
        add(40, layout=layout)
    for values in VALUES[1:]:
        add(67, values=values)
    return out


def _with_gradients(kernel: Kernel, trial: Trial, turn: int, round_: int, lot: random.Random) -> Trial | None:
    """`trial` with inputs whose gradients are wanted, all in every second round, else one after the other and then some
    by lot; None where no input has one."""
    # Which have one is the same for all dtypes of a kind.
    first = {v: _first(choices).name for v, choices in kernel.signature.dtype_vars.items()}
    dtypes = {v: first[v] if DTYPES[first[v]].kind == DTYPES[d].kind else d for v, d in trial.dtypes.items()}
    inputs, _ = derivable(kernel, specialization(kernel, replace(trial, dtypes=dtypes)))
    if not inputs:
        return None
    wanted = inputs
    if round_ % 2:
        some = lot.sample(inputs, lot.randint(1, len(inputs)))
        alone = inputs[round_ // 2 : round_ // 2 + 1]
        wanted = alone or tuple(name for name in inputs if name in some)
    return replace(trial, wanted=wanted, incoming=INCOMING[turn % len(INCOMING)])


def without_gradient(kernel: Kernel) -> dict[str, DslError]:
    """The floating-point inputs of `kernel` whose gradient some way of calling it does not have, and why not."""
    out: dict[str, DslError] = {}
    for option in _options(kernel):
        out = {**derivable(kernel, kernel.specialize(option.spec))[1], **out}
    return out


@dataclass(frozen=True)
class _Option:
    """Constants and optional tensors that go together."""

    consts: dict[str, float | int | bool]
    present: tuple[str, ...]
    spec: Specialization


def _options(kernel: Kernel) -> Iterator[_Option]:
    """Constants and optional tensors that elaborate, at most eight ways."""
    signature = kernel.signature
    consts = [s for s in signature.scalars if s.const]
    optional = [t.name for t in signature.tensors if t.optional]
    choices: list[list[Any]] = []
    for s in consts:
        if s.dtype == "bool":
            choices.append([bool(s.default), not s.default])
        else:
            numbers = [2, 3, 1] if s.default is None else [s.default, 2]
            choices.append(list(dict.fromkeys(numbers)))
    subsets = [tuple(optional), ()] if optional else [()]
    if len(optional) > 1:
        subsets += [(n,) for n in optional]
    count = 0
    for values, present in product(product(*choices), subsets):
        given = dict(zip((s.name for s in consts), values, strict=True))
        spec = Specialization({v: _first(c) for v, c in signature.dtype_vars.items()}, given, frozenset(present))
        try:
            kernel.specialize(spec)
        except DslError:  # a combination that the kernel does not allow
            continue
        count += 1
        yield _Option(given, present, spec)
        if count == 8:
            return


def _first(choices: tuple[Any, ...]) -> Any:
    return DTYPES["f32"] if DTYPES["f32"] in choices else choices[0]


def _dtype(kernel: Kernel, var: str, wanted: tuple[str, ...], turn: int) -> str:
    allowed = [d.name for d in kernel.signature.dtype_vars[var]]
    usable = [d for d in wanted or ("f32", "bf16", "f16") if d in allowed] or allowed
    return usable[turn % len(usable)]


def specialization(kernel: Kernel, trial: Trial) -> ir.Kernel:
    """The tile IR that `trial` calls. Raises DslError where it does not elaborate."""
    dtypes = {v: DTYPES[name] for v, name in trial.dtypes.items()}
    return kernel.specialize(Specialization(dtypes, dict(trial.consts), frozenset(trial.present)))


def _sized(
    kernel: Kernel, trial: Trial, width: int, rows: int | None, lot: random.Random, max_elements: int
) -> Trial | None:
    """`trial` with sizes: one dimension that sizes a tile (or any) has `width`, the others are small or near it."""
    body = specialization(kernel, trial)
    names = [d for d in kernel.signature.dims if d not in trial.consts]
    tiles = [d for d in required_dims(body) if d in names]
    focus = tiles or names
    others = [d for d in names if d not in tiles]
    for attempt in range(400):
        if not names:
            return trial
        at = focus[attempt % len(focus)] if attempt < 100 else lot.choice(focus)
        near = (*ROWS, width // 2, width - 1, width - width % 2, 2 * width) if attempt >= 20 else ROWS
        dims = {d: max(1, lot.choice(near)) for d in names}
        dims[at] = width if attempt < 300 else max(1, width + lot.choice((-3, -2, -1, 1, 2, 3)))
        if rows is not None:
            if not others:
                return None
            dims[others[0]] = rows
        candidate = replace(trial, dims=dims)
        if fits(kernel, candidate, max_elements):
            return candidate
    return None


def fits(kernel: Kernel, trial: Trial, max_elements: int = 1 << 62) -> bool:
    """Whether the sizes of `trial` fulfil every `require`, and no tensor is larger than `max_elements`."""
    body = specialization(kernel, trial)
    shapes = {n: s for n, (s, _) in _shapes(kernel, trial).items()}
    if any(s < 0 for shape in shapes.values() for s in shape):
        return False
    given = {t.name for t in body.tensors if t.role != "out"}
    try:
        dims = constants(body) | bind_dims(body, {n: s for n, s in shapes.items() if n in given})
        sizes = [math.prod(p.evaluate(dims) for p in t.shape) for t in body.tensors]
    except ShapeError:
        return False
    return max(sizes) <= max_elements


# ---- arguments -----------------------------------------------------------------------------------------------------


def _shapes(kernel: Kernel, trial: Trial) -> dict[str, tuple[tuple[int, ...], TensorParam]]:
    """The shape of each tensor argument that is given; a starred dimension is one or two dimensions."""
    known = dict(trial.dims) | {n: int(v) for n, v in trial.consts.items()}
    out = {}
    for p in kernel.signature.params:
        if not isinstance(p, TensorParam) or (p.optional and p.name not in trial.present):
            continue
        sizes = [s.evaluate(known) for s in p.shape]
        if p.star:
            lead = [2, sizes[0] // 2] if sizes[0] % 2 == 0 and trial.seed % 2 else [sizes[0]]
            sizes[:1] = lead
        out[p.name] = (tuple(sizes), p)
    return out


def arguments(kernel: Kernel, trial: Trial, device: torch.device) -> dict[str, Any]:
    """The arguments of the call, by name; tensors contiguous (`differential.ask` lays them out)."""
    g = torch.Generator().manual_seed(trial.seed)
    largest = max(trial.dims.values(), default=1)
    out: dict[str, Any] = dict(trial.consts)
    for name, (shape, p) in _shapes(kernel, trial).items():
        dtype = DTYPES[trial.dtypes.get(p.dtype, p.dtype)]
        out[name] = _tensor(shape, TORCH[dtype], trial.values, largest, g).to(device)
    for s in kernel.signature.scalars:
        if not s.const and s.default is None:
            kind = DTYPES[s.dtype].kind if s.dtype in DTYPES else "float"
            out[s.name] = {"float": 0.75, "int": 3, "bool": True}[kind]
    return out


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, values: str, largest: int, g: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.6
    if not dtype.is_floating_point:
        # Positions, some of them out of range, and divisors: never 0, as division by it has no meaning.
        t = torch.randint(1, max(2, min(largest + 2, torch.iinfo(dtype).max)), shape, generator=g)
        signed = torch.iinfo(dtype).min < 0
        return torch.where(torch.rand(shape, generator=g) < 0.15, -t, t).to(dtype) if signed else t.to(dtype)
    if values == "zeros":
        return torch.zeros(shape, dtype=dtype)
    t = torch.randn(shape, generator=g)
    info = torch.finfo(dtype)
    if values == "large":
        return (t * math.sqrt(info.max) / 4).to(dtype)
    if values == "small":
        return (t * 1e-3).to(dtype)
    t = t.to(dtype)
    if values == "special" and t.numel():
        kinds = torch.tensor(
            [math.nan, math.inf, -math.inf, 0.0, -0.0, info.max, info.min, info.tiny / 4], dtype=torch.float64
        ).to(dtype)
        flat = t.reshape(-1)
        # Few, so that rows without any remain.
        for i in range(min(len(kinds), 1 + flat.numel() // 64)):
            flat[int(torch.randint(0, flat.numel(), (1,), generator=g))] = kinds[
                (i + int(g.initial_seed())) % len(kinds)
            ]
    return t


def question(kernel: Kernel, trial: Trial, device: torch.device) -> Question | GradientQuestion:
    """What `trial` asks of a backend. Raises KgenError where its arguments do not fit the kernel."""
    given = arguments(kernel, trial, device)
    if not trial.wanted:
        return ask(kernel, given, trial.layout, body=specialization(kernel, trial))

    def incoming(shape: tuple[int, ...], dtype: torch.dtype, at: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(trial.seed + 70 + at)
        return _tensor(shape, dtype, trial.values, 1, g).to(device)

    return ask_gradients(kernel, given, trial.wanted, incoming, layout=trial.layout, incoming_layout=trial.incoming)


# ---- smaller -------------------------------------------------------------------------------------------------------


def smaller(kernel: Kernel, trial: Trial) -> Iterator[Trial]:
    """Simpler trials of the same kind, the boldest first: fewer rows, half the size, one less, an ordinary layout."""
    for name, size in trial.dims.items():
        for less in dict.fromkeys((1, size // 2, size - 1)):
            if 0 < less < size:
                candidate = replace(trial, dims={**trial.dims, name: less})
                if fits(kernel, candidate):
                    yield candidate
    for name in trial.wanted if len(trial.wanted) > 1 else ():
        yield replace(trial, wanted=tuple(n for n in trial.wanted if n != name))
    if trial.layout != "contiguous":
        yield replace(trial, layout="contiguous")
    if trial.incoming != "contiguous":
        yield replace(trial, incoming="contiguous")
    if trial.values != "normal":
        yield replace(trial, values="normal")
