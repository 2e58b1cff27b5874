"""Tuned schedules at run time: which knobs, and which backend, were measured to be the fastest for a call like this?

Looked up once for each launch plan. A result is found by what the kernel computes (`kgen.codegen.fingerprint`, so that
its name does not count and a changed kernel has no results), the backend, what is assumed of memory, and the sizes that
are compiled in:

* the same sizes, else
* the nearest sizes of the same *bucket* that are no smaller: each has the same power of two at or above it, and is
  divisible by the same power of two up to 16. What fits the registers in longer rows fits them in shorter ones.

Run-time sizes (batch, sequence length) take no part: a new one compiles nothing and changes no bit of a row's result.
Of results that differ in those alone the one with the most rows counts.

Results that the user measured (`kgen tune`) come before those that come with kgen; a schedule that a kernel's source
sets comes before both. KGEN_TUNED=0 switches all of this off; KGEN_TUNED=FOLDER names the folder of the user's results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from kgen.codegen.fingerprint import fingerprint
from kgen.codegen.knobs import Knobs, written
from kgen.codegen.layout import ceil_power, power_of_two_in
from kgen.runtime import stored
from kgen.runtime.installation import device_name
from kgen.runtime.layouts import Layout
from kgen.runtime.tuned_paths import read
from kgen.runtime.tuned_store import (
    Result,
    Subject,
    devices,
    driver_of,
    load,
    shipped_path,
    switched_off,
    to_knobs,
    user_path,
)

if TYPE_CHECKING:
    from kgen.runtime.backends.base import Executor

BACKENDS = ("cuda", "triton")


def subject(layout: Layout, backend: str) -> Subject:
    """What a measurement of calls of `layout` on `backend` is a measurement of."""
    kernel, variant = layout.kernel, layout.variant
    known = dict(variant.dims)
    return Subject(
        fingerprint(kernel),
        backend,
        tuple(known[d] for d in kernel.dims if d in known),
        assumed(layout),
    )


def assumed(layout: Layout) -> str:
    """What is assumed of memory, in a form in which no name occurs: for each tensor whether its last stride is 1 (`u`)
    or not (`s`), or it is dense (`d`), and its alignment in bytes; then the divisibility of run-time sizes, and of how
    many parts starred dimensions are."""
    kernel, variant = layout.kernel, layout.variant
    classes = [variant.tensor(t.name) for t in kernel.tensors]
    parts = [f"{'d' if c.dense else 'u' if c.unit else 's'}{c.align}" for c in classes]
    multiples, ranks = dict(variant.multiples), dict(variant.star_ranks)
    parts += [f"%{multiples[d]}" for d in kernel.dims if d in multiples]
    parts += [f"*{ranks[d]}" for d in kernel.dims if ranks.get(d, 1) > 1]
    return " ".join([*parts, *(["wide"] if variant.wide else [])])


def nearest(results: Iterable[Result], wanted: Subject) -> Result | None:
    """The result that counts for `wanted` among `results`, of which earlier ones come before later ones that are as
    near."""
    best: tuple[tuple[float, int], Result] | None = None
    for r in results:
        far = _distance(r.subject, wanted)
        if far is None:
            continue
        rank = (far, -r.points)
        if best is None or rank < best[0]:
            best = rank, r
    return None if best is None else best[1]


def _distance(found: Subject, wanted: Subject) -> float | None:
    """How much longer the rows of `found` are; None where it says nothing about `wanted`."""
    if (found.kernel, found.backend, found.assumed) != (wanted.kernel, wanted.backend, wanted.assumed):
        return None
    if found.sizes == wanted.sizes:
        return 0.0
    if len(found.sizes) != len(wanted.sizes):
        return None
    total = 0.0
    for a, b in zip(found.sizes, wanted.sizes, strict=True):
        if b < 1 or a < b or ceil_power(a) != ceil_power(b) or power_of_two_in(a) != power_of_two_in(b):
            return None
        total += a / b - 1
    return total


class Table:
    """The results that count on one device: the user's, then those that come with kgen."""

    def __init__(self, name: str, driver: str | None, user: list[Result] | None = None) -> None:
        """`driver`: whose results of the user count; None: of any. `user`: those, where they were read already."""
        mine = load(user_path(name)) if user is None else user
        mine = [r for r in mine if driver in (None, r.driver)]
        self._by: dict[tuple[str, str], tuple[list[Result], list[Result]]] = {}
        for k, results in enumerate((mine, load(shipped_path(name)))):
            for r in results:
                self._by.setdefault((r.subject.kernel, r.subject.backend), ([], []))[k].append(r)

    def __len__(self) -> int:
        return sum(len(u) + len(s) for u, s in self._by.values())

    def find(self, wanted: Subject) -> Result | None:
        """The result for `wanted`: of the same sizes, the user's first, else of the nearest."""
        both = self._by.get((wanted.kernel, wanted.backend))
        if both is None:
            return None
        for results in both:
            found = nearest((r for r in results if r.subject.sizes == wanted.sizes), wanted)
            if found is not None:
                return found
        return nearest((*both[0], *both[1]), wanted)

    def faster(self, layout: Layout) -> str | None:
        """The backend that was faster where both were measured for the same sizes; None where they were not."""
        found = [self.find(subject(layout, b)) for b in BACKENDS]
        known = [r for r in found if r is not None]
        if len(known) < len(BACKENDS) or len({tuple(r.dims.values()) for r in known}) > 1:
            return None
        return min(known, key=lambda r: r.us).subject.backend


def remarks(layout: Layout, backend: str) -> list[str]:
    """A line for each device that there are results of which count for calls of `layout` on `backend`, of any
    driver."""
    out: list[str] = []
    for name in devices():
        known = Table(name, None)
        r = known.find(subject(layout, backend))
        if r is None:
            continue
        sizes = ", ".join(f"{d} = {n}" for d, n in r.dims.items())
        knobs = r.words or "the default schedule"
        faster = known.faster(layout)
        auto = f"; auto takes {faster}" if faster is not None else ""
        out.append(f"{name}, measured with {sizes}: {knobs}, {r.us:.1f} us, default {r.default_us:.1f} us{auto}")
    return out


def measured(layout: Layout, backend: str, device: str) -> Knobs | None:
    """The knobs that a call of `layout` takes on the GPU called `device`, whether it is here or not: those measured
    with any driver. None for the default schedule, and where the source sets one."""
    if switched_off() or written(layout.kernel, layout.variant, backend) is not None:
        return None
    result = Table(device, None).find(subject(layout, backend))
    return None if result is None else to_knobs(result, layout.kernel)


@functools.cache
def table(device: torch.device) -> Table | None:
    """The results that count on `device`; None where there are none, or KGEN_TUNED=0. Read once a process."""
    if switched_off():
        return None
    name = device_name(device)
    path = user_path(name)
    data = read(path)
    found = Table(name, driver_of(device), [] if data is None else load(path, data))
    return found if len(found) else None


def reload() -> None:
    """Read the results anew when they are next asked for. Plans that are made already stay."""
    table.cache_clear()
    stored.forget()


def choose(layout: Layout, choice: str, executor: Executor, device: torch.device) -> tuple[Executor, Knobs | None]:
    """The executor and the knobs for calls of `layout`, where the backend `choice` was resolved to `executor`.

    Of `auto` on a GPU it is the executor of the backend that was measured to be faster, if that is known. Knobs are
    None for the default schedule.
    """
    known = table(device)
    if known is None or executor.general:
        return executor, None
    if choice == "auto" and device.type == "cuda":
        faster = known.faster(layout)
        if faster is not None and faster != executor.backend:
            from kgen.runtime.registry import executor_for

            other = executor_for(faster, device)
            executor = other if other.why_unavailable(device) is None else executor
    if written(layout.kernel, layout.variant, executor.backend) is not None:
        return executor, None
    result = known.find(subject(layout, executor.backend))
    return executor, None if result is None else to_knobs(result, layout.kernel)
