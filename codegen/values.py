"""How much is a value of a kernel in normal form? Elements, 32-bit words of each, and how many are alive at once.

Whether a program's values fit its registers is estimated before there is machine code, each time for an end of its own.
These are the facts that the estimates share; where they stand, and what they are for:

* `registers`: a CUDA thread, by the rules of the emitter, which decides what lies where. It says whether a row is held.
* `words`: all tiles of a Triton program together, an element at a time, against the largest blocks that its compiler
  was seen not to spill. It says whether a row without chunks is held, whatever order the compiler computes in.
* `resident`: a Triton thread between the statements of a row of sums, held against machine code. It says how many
  programs a multiprocessor runs, for which a few registers matter; `words` tells only what spills.
* `hold`: a Triton thread of 64 registers with its row in unrolled chunks, of kernels that are as simple as a norm.
* `candidates`: how schedules rank, whatever they are of. What it says decides what is measured, and in which order.

Their limits are in `kgen.codegen.ladders`, each with its measurement; those of a multiprocessor, whatever the kernel,
in `kgen.codegen.machines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from kgen.codegen.layout import ceil_power, elements, held, vector_limit
from kgen.codegen.normalize import statement_axes
from kgen.codegen.operations import DIVISIONS
from kgen.codegen.schedule import Schedule
from kgen.codegen.variant import Variant
from kgen.dsl import ir

WORD = 4  # bytes of a register


def value_words(e: ir.Expr) -> int:
    """Registers of an element of `e` as it is computed with: one for a bool too."""
    return max(1, e.dtype.itemsize // WORD)


def packed_words(kernel: ir.Kernel, e: ir.Load) -> float:
    """Registers of an element of `e` as memory has it: half of one for 16 bits, two of which share one."""
    return kernel.tensor(e.tensor).dtype.itemsize / WORD


def padded(kernel: ir.Kernel, schedule: Schedule) -> dict[str, int]:
    """`layout.held`, padded to powers of two: the lanes of Triton's blocks."""
    return {a: ceil_power(n) for a, n in held(kernel, schedule).items()}


def largest_block(kernel: ir.Kernel, extents: Mapping[str, int]) -> int:
    """Elements of the largest block of one row."""
    return max((elements(statement_axes(s), extents) for s in kernel.body), default=1)


def one_by_one(kernel: ir.Kernel, variant: Variant) -> bool:
    """Whether a row is moved an element at a time, along any of its tile indices: each has an address and a mask."""
    return any(vector_limit(kernel, variant, a.name) == 1 for a in kernel.tiles)


def quotients(body: Iterable[ir.Stmt], along: Set[str]) -> Iterator[ir.Op]:
    """The divisions in `body` of elements along some of the indices `along`. They are exact, which takes registers of
    their own."""
    for s in body:
        for e in ir.walk(s.value):
            if isinstance(e, ir.Op) and e.fn in DIVISIONS and e.axes & along:
                yield e


def most_alive(spans: Iterable[tuple[int, int, float]]) -> float:
    """The most that is alive at once. Each of `spans` is the number of the statement behind which something is alive,
    that of the last one that uses it, and how much it is: the last use makes room for what is made there."""
    changes: dict[int, float] = {}
    for first, last, size in spans:
        changes[first] = changes.get(first, 0) + size
        changes[last] = changes.get(last, 0) - size
    most = now = 0.0
    for at in sorted(changes):
        now += changes[at]
        most = max(most, now)
    return most
