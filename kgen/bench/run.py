"""All cases, one after the other; the result is kept after each, and what fails does not stop the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from kgen.bench import result
from kgen.bench.machine import machine
from kgen.bench.measure import Plan, Record, Tell, release, said
from kgen.bench.peers import versions


class Timed(Protocol):
    """What gives rows."""

    @property
    def name(self) -> str:
        """In words."""
        ...

    def blank(self) -> Record:
        """A row without results, for what fails as a whole."""
        ...

    def perform(self, plan: Plan, until: float, tell: Tell) -> list[Record]:
        """Measure."""
        ...


LEAST = 6.0  # seconds without which no case is begun


def run(
    cases: Sequence[Timed],
    plan: Plan,
    commit: str,
    *,
    seconds: float = math.inf,
    file: Path | None = None,
    tell: Tell = lambda _: None,
    begin: Callable[[str], None] = lambda _: None,
    done: Callable[[list[Record]], None] = lambda _: None,
) -> Record:
    """The result of all `cases`; see `result` for what it holds.

    `begin` is called with the name of each case, `done` with its rows, `tell` with what fails meanwhile. No case is
    begun after `seconds`. `file` has what there is so far after each.
    """
    began = time.monotonic()
    until = began + seconds
    out: Record = {
        "schema": result.SCHEMA, "machine": machine(plan.device, commit) | versions(), "rounds": plan.rounds,
        "backends": list(plan.backends), "trial": plan.device.type != "cuda", "rows": [], "not reached": [],
    }  # fmt: skip
    for case in cases:
        started = time.monotonic()
        if until - started < LEAST:
            out["not reached"].append(case.name)
            continue
        begin(case.name)
        try:
            rows = case.perform(plan, until, tell)
        except torch.cuda.OutOfMemoryError:
            rows = [case.blank() | {"error": "the memory of the GPU does not suffice"}]
        except Exception as error:  # the other cases are still worth their time
            rows = [case.blank() | {"error": said(error)}]
        release(plan.device)
        out["rows"] += rows
        out["seconds"] = round(time.monotonic() - began, 1)
        if file is not None:
            result.save(out, file)
        done(rows)
    out["seconds"] = round(time.monotonic() - began, 1)
    if file is not None:
        result.save(out, file)
    return out
