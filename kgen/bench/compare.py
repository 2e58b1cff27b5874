"""Two results beside each other: what became slower or faster by more than the calls scatter.

Times are compared as multiples of the floor, which both results have from their own rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kgen.bench.result import Span, name_of, of_floor
from kgen.bench.work import BACKENDS
from kgen.dsl.errors import KgenError

Record = dict[str, Any]
SLOWER, FASTER, SAME, LOST = "slower", "faster", "", "no longer timed"


@dataclass(frozen=True)
class Change:
    """One backend of one row. `ratio` is the new time over the old one; None where only the old result has a time."""

    row: str
    backend: str
    old: Span
    new: Span | None

    @property
    def ratio(self) -> float | None:
        """Above 1: slower."""
        return None if self.new is None else self.new.value / self.old.value

    @property
    def kind(self) -> str:
        """`slower` or `faster` where the deciles of the calls do not overlap, else nothing; or `no longer timed`."""
        if self.new is None:
            return LOST
        if not self.new.apart(self.old):
            return SAME
        return SLOWER if self.new.value > self.old.value else FASTER

    def fails(self, percent: float) -> bool:
        """Whether this is a regression of more than so many percent, beyond what the calls scatter."""
        ratio = self.ratio
        return ratio is None or (self.kind == SLOWER and ratio > 1 + percent / 100)


def changes(new: Record, old: Record) -> list[Change]:
    """A change for each backend and row that `new` has tried and `old` has a time of, in order of `new`.

    Raises KgenError where one of them is a trial, whose times say nothing.
    """
    for which, value in (("new", new), ("old", old)):
        if value["trial"]:
            raise KgenError(f"the {which} result is a trial on a CPU; its times cannot be compared")
    before = {name_of(row): row for row in old["rows"]}
    out: list[Change] = []
    for row in new["rows"]:
        name = name_of(row)
        for backend in BACKENDS:
            then = of_floor(before[name], backend) if name in before else None
            if then is not None and backend in new["backends"]:
                out.append(Change(name, backend, then, of_floor(row, backend)))
    return out


def unlike(new: Record, old: Record) -> list[str]:
    """In what the two machines differ, in words."""
    a, b = new["machine"], old["machine"]
    return [
        f"{key}: {b.get(key, 'not told')}, now {a.get(key, 'not told')}"
        for key in ("device", "driver", "torch", "triton", "cupy", "NVRTC")
        if a.get(key) != b.get(key)
    ]


def line(change: Change) -> str:
    """In words."""
    if change.new is None:
        return f"{change.row}, {change.backend}: {change.old.value:.3f}x -> {LOST}"
    text = f"{change.row}, {change.backend}: {change.old.value:.3f}x -> {change.new.value:.3f}x, {change.ratio:.3f}"
    return f"{text} {change.kind}".rstrip()
