"""What a random host program computes by its meaning and by every executor, compared bit for bit.

The tensors of `host_random` hold small integers. Where no value and no partial sum exceeds what a dtype counts exactly,
its roundings are none, in whatever order sums are taken and however they are held: the bound of the error is zero.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kgen
from kgen.codegen.host.reference import Execution
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir as tiles
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host import ir
from kgen.dsl.host.check import elaborate_op, source_of
from kgen.dsl.host.scope import HostSpecialization
from kgen.dsl.parser import parse_text

ROWS, COLUMNS = 7, 3
# The largest whole number up to which all are exact.
EXACT = {"f16": 2.0**11, "bf16": 2.0**8, "f32": 2.0**24}
# 1, 2, 3 chunks and one for each row, as the runtime cuts them; and uneven ones, which mean the same.
CHUNKS = (7, 4, 3, 1)
PARTITIONS = ((7,), (4, 3), (3, 3, 1), (1,) * 7, (1, 5, 1))


def arguments(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """Whole numbers from -2 to 2 for the parameters."""
    return _integers({"x": (rows, COLUMNS), "w": (COLUMNS, COLUMNS), "v": (COLUMNS,)}, seed)


def upstream(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """The same for the gradients of the outputs."""
    return _integers({"y": (rows, COLUMNS), "s": (COLUMNS, COLUMNS)}, seed + 1)


def _integers(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randint(-2, 3, s, generator=g).double() for n, s in shapes.items()}


# All random programs call the same kernels.
_KERNELS: dict[Hashable, tiles.Kernel] = {}


@dataclass
class Meaning:
    """Outputs and gradients of one program in float64, and the largest magnitude on the way."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    largest: float


def settled(text: str, wanted: Sequence[str]) -> ir.Program:
    """The op of `text` with these gradients wanted, of those that it gives then."""
    module = parse_text(text, "random.kdsl")
    spec = HostSpecialization({}, frozenset(), frozenset(wanted))
    return elaborate_op(source_of(module), "f", spec)


def meaning(
    p: ir.Program,
    seed: int,
    partition: Sequence[int],
    wanted: Sequence[str],
    kernels: dict[Hashable, tiles.Kernel] = _KERNELS,
) -> Meaning:
    """What `p` computes of random integers by the reference interpreter."""
    rows = sum(partition)
    dims = {"B": rows, "N": COLUMNS}
    run = Execution(p, {"T": DTYPES["f32"]}, dims, arguments(seed, rows), {}, {"B": partition}, kernels)
    outputs = run.forward()
    gradients = run.backward(upstream(seed, rows)) if wanted else {}
    return Meaning(outputs, {n: gradients[n] for n in wanted}, run.largest)


def called(op: Any, seed: int, rows: int, dtype: str, wanted: Sequence[str], **options: Any) -> Meaning:
    """What the op gives for them."""
    tensors = {n: t.to(TORCH[DTYPES[dtype]]) for n, t in arguments(seed, rows).items()}
    for n in wanted:
        tensors[n].requires_grad_()
    given = upstream(seed, rows)
    outputs = dict(zip(given, op(**tensors, **options), strict=True))
    gradients: dict[str, torch.Tensor] = {}
    if wanted:
        up = [t.to(outputs[n].dtype) for n, t in given.items()]
        found = torch.autograd.grad(list(outputs.values()), [tensors[n] for n in wanted], up)
        gradients = dict(zip(wanted, found, strict=True))
    return Meaning({n: t.detach() for n, t in outputs.items()}, gradients, 0.0)


def differences(a: Meaning, b: Meaning) -> list[str]:
    """The results that are not equal in every element, of those that both have."""
    return [
        f"{name}: {mine[k].double().tolist()} beside {theirs[k].double().tolist()}"
        for mine, theirs in ((a.outputs, b.outputs), (a.gradients, b.gradients))
        for k, name in ((k, k if mine is a.outputs else f"d_{k}") for k in mine if k in theirs)
        if not torch.equal(mine[k].double(), theirs[k].double())
    ]


def wishes(text: str) -> list[tuple[str, ...]]:
    """Sets of gradients to want: none, all that the op gives then, and each alone that it gives alone."""
    found: list[tuple[str, ...]] = [()]
    for names in (("x", "w", "v"), ("x",), ("w",), ("v",)):
        given = tuple(n for n in names if n in settled(text, names).gradients)
        given = tuple(n for n in given if n in settled(text, given).gradients)
        if given not in found:
            found.append(given)
    return found


def faults(text: str, seed: int, backends: Sequence[str], calls: int, rows: int = ROWS) -> Iterator[str]:
    """Where what `text` means depends on the chunks or on the gradients that are wanted, and where an executor computes
    anything else, in `calls` random calls of each backend and set of gradients. `rows` is the size of B, or 0."""
    rng = random.Random(seed)
    op: Any = kgen.loads(text, "random.kdsl").f
    partitions = PARTITIONS if rows else ((),)
    first: Meaning | None = None
    for wanted in wishes(text):
        p = settled(text, wanted)
        found = [meaning(p, seed, part, wanted) for part in partitions]
        for part, m in zip(partitions, found, strict=True):
            for d in differences(m, found[0]):
                yield f"chunks {part}, wanted {wanted}: {d}"
        first = first or found[0]
        for d in differences(found[0], first):
            yield f"wanted {wanted}: {d}"
        first.gradients.update(found[0].gradients)
        largest = max(m.largest for m in found)
        dtypes = [d for d, limit in EXACT.items() if largest <= limit]
        for backend in backends if dtypes else ():
            for _ in range(calls):
                options = {
                    "dtype": rng.choice(dtypes),
                    "chunk": rng.choice(CHUNKS),
                    "accumulate": rng.choice(("param", "f32", "auto")),
                }
                got = called(op, seed, rows, wanted=wanted, backend=backend, **options)
                for d in differences(got, found[0]):
                    yield f"{backend}, {options}, wanted {wanted}: {d}"
