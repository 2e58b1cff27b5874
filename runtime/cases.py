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
from kgen.runtime.kernel import Kernel
from kgen.runtime.placement import LAYOUTS

VALUES = ("normal", "special", "large", "small", "zeros")

# One element; around a vector, a warp, several warps and a block of threads; primes.
WIDTHS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 509, 512, 1000, 1023, 1024, 1025, 2049)
QUICK_WIDTHS = (1, 3, 8, 17, 33, 64, 129, 1025)
ROWS = (1, 2, 3, 4, 5, 8)


@dataclass(frozen=True)
class Trial:
    """One call: sizes of dimensions (a starred one is the product of its leading dimensions), a dtype for each dtype
    variable, constants, the optional tensors that are given, a layout and a kind of values."""

    dims: Mapping[str, int]
    dtypes: Mapping[str, str]
    consts: Mapping[str, float | int | bool] = field(default_factory=dict)
    present: tuple[str, ...] = ()
    layout: str = "contiguous"
    values: str = "normal"
    seed: int = 0

    def __str__(self) -> str:
        parts = [f"{n}={v}" for n, v in (*self.dims.items(), *self.dtypes.items(), *self.consts.items())]
        return " ".join([*parts, *(f"with {n}" for n in self.present), self.layout, self.values])

    def to_json(self) -> dict[str, Any]:
        """Plain data, for `Trial.from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Trial:
        """The trial that `to_json` wrote. Raises TypeError or KeyError for other data."""
        return Trial(**{**data, "present": tuple(data["present"])})


# ---- which ---------------------------------------------------------------------------------------------------------


def trials(
    kernel: Kernel, *, dtypes: tuple[str, ...] = (), quick: bool = False, seed: int = 0, max_elements: int = 1 << 17
) -> list[Trial]:
    """A few dozen trials of `kernel` (`quick`: about a dozen), boundary sizes first, then zero rows, layouts,
    values.

    `dtypes` are taken in turn for every dtype variable that may stand for them. No tensor has more than `max_elements`
    elements. Sizes fulfil the kernel's `require`s; where none that do are found the list is empty.
    """
    lot = random.Random(f"{kernel.name} {seed}")
    options = list(_options(kernel))
    if not options:
        return []
    out: list[Trial] = []

    def add(width: int, *, layout: str = "contiguous", values: str = "normal", rows: int | None = None) -> None:
        i = len(out)
        consts, present, names = options[i % len(options)]
        chosen = {v: _dtype(kernel, v, dtypes, i // len(options) + k) for k, v in enumerate(names)}
        start = Trial({}, chosen, consts, present, layout, values, seed * 1000 + i)
        found = _sized(kernel, start, width, rows, lot, max_elements)
        if found is not None and found not in out:
            out.append(found)

    turn = LAYOUTS[1:]
    for k, width in enumerate(QUICK_WIDTHS if quick else WIDTHS):
        add(width, layout="contiguous" if k % 2 == 0 else turn[k // 2 % len(turn)])
    add(33, rows=0)
    for layout in turn if not quick else turn[:2]:
        add(40, layout=layout)
    for values in VALUES[1:]:
        add(67, values=values)
    return out


def _options(kernel: Kernel) -> Iterator[tuple[dict[str, float | int | bool], tuple[str, ...], list[str]]]:
    """Constants, optional tensors and dtype variables that elaborate, at most eight ways."""
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
        # A variable that no given argument has is left to the runtime.
        yield given, present, list(signature.dtype_vars)
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


# ---- smaller -------------------------------------------------------------------------------------------------------


def smaller(kernel: Kernel, trial: Trial) -> Iterator[Trial]:
    """Simpler trials of the same kind, the boldest first: fewer rows, half the size, one less, an ordinary layout."""
    for name, size in trial.dims.items():
        for less in dict.fromkeys((1, size // 2, size - 1)):
            if 0 < less < size:
                candidate = replace(trial, dims={**trial.dims, name: less})
                if fits(kernel, candidate):
                    yield candidate
    if trial.layout != "contiguous":
        yield replace(trial, layout="contiguous")
    if trial.values != "normal":
        yield replace(trial, values="normal")
