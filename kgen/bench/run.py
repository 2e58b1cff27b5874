"""All cases, one after the other; the result is kept after each, and what fails does not stop the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kgen.bench import result
from kgen.bench.case import Case
from kgen.bench.machine import machine
from kgen.bench.measure import Plan, Record, Tell, perform, release, said
from kgen.bench.peers import versions

LEAST = 6.0  # seconds without which no case is begun


def run(
    cases: Sequence[Case],
    plan: Plan,
    commit: str,
    *,
    seconds: float = math.inf,
    file: Path | None = None,
    tell: Tell = lambda _: None,
    done: Callable[[Record], None] = lambda _: None,
) -> Record:
    """The result of all `cases`; see `result` for what it holds. `done` is called with each row."""
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
        try:
            row = perform(case, plan, until, tell)
        except torch.cuda.OutOfMemoryError:
            row = _failed(case, "the memory of the GPU does not suffice")
        except Exception as error:  # the other cases are still worth their time
            row = _failed(case, said(error))
        row["seconds"] = round(time.monotonic() - started, 3)
        release(plan.device)
        out["rows"].append(row)
        out["seconds"] = round(time.monotonic() - began, 1)
        if file is not None:
            result.save(out, file)
        done(row)
    out["seconds"] = round(time.monotonic() - began, 1)
    if file is not None:
        result.save(out, file)
    return out


def _failed(case: Case, error: str) -> Record:
    return {
        "op": case.op, "direction": case.direction, "shape": case.size, "moves": case.moves, "floor": "copy",
        "bars": dict(case.bars), "bytes": None, "results": {}, "error": error,
    }  # fmt: skip
