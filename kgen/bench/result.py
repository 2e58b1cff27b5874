"""The file that a benchmark leaves, and what follows from its rows: spreads, bars, the best peer.

A result has `machine`, `rounds`, `trial` (true: on a CPU, its times say nothing), `rows` and the names `not reached`. A
row has `op`, `direction`, `shape`, `moves`, `bytes`, `floor` (`copy` or `gemms`: what times are a multiple of), `bars`
by backend, and `results` by name of the call: `median_us`, `p10_us`, `p90_us`, `host_us`, `calls`, `of_floor`,
`peak_bytes` above the inputs with results counted, or `error`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kgen.bench.peers import PEERS
from kgen.bench.work import BACKENDS
from kgen.dsl.errors import KgenError

SCHEMA = 1
Record = dict[str, Any]


def save(value: Record, file: Path) -> None:
    """Write, in whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(value, indent=1), "utf-8")
    os.replace(part, file)


def load(file: Path) -> Record:
    """Read a result. Raises KgenError for a file that is none."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise KgenError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise KgenError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA or not isinstance(value.get("rows"), list):
        raise KgenError(f"{file} is not a result of this version of kgen bench (schema {SCHEMA})")
    return value


def name_of(row: Record) -> str:
    """What tells a row from all others."""
    return f"{row['op']} {row['direction']} {row['shape']}"


def timed(row: Record, name: str) -> Record | None:
    """The record of a call that has a time."""
    record = row["results"].get(name)
    return record if record is not None and "median_us" in record else None


@dataclass(frozen=True)
class Span:
    """A time as a multiple of something, with the deciles of its calls."""

    value: float
    low: float
    high: float

    def apart(self, other: Span) -> bool:
        """Whether the two differ by more than both scatter."""
        return self.low > other.high or self.high < other.low


def span(record: Record, per: float = 1.0) -> Span:
    """The median of a call and its deciles, in microseconds over `per`."""
    return Span(record["median_us"] / per, record["p10_us"] / per, record["p90_us"] / per)


def of_floor(row: Record, name: str) -> Span | None:
    """A time as a multiple of the floor in the same rounds."""
    record, floor = timed(row, name), timed(row, row["floor"])
    return None if record is None or floor is None else span(record, floor["median_us"])


def meets(row: Record, backend: str) -> bool | None:
    """Whether the median is within the bar, and the peak within the row's `cap_mib`; None without a bar or a time.

    The bar of a row with `below` is the time of the peer that it names.
    """
    found = of_floor(row, backend)
    bar = row["bars"].get(backend)
    if (peer := row.get("below")) is not None:
        of_peer = of_floor(row, peer)
        bar = None if of_peer is None else of_peer.value
    if bar is None or found is None:
        return None
    peak = row["results"][backend].get("peak_bytes")
    fits = peak is None or "cap_mib" not in row or peak <= row["cap_mib"] * 2**20
    return fits and found.value <= bar


def best_peer(row: Record) -> str | None:
    """The fastest of the others."""
    there = [(r["median_us"], name) for name in PEERS if (r := timed(row, name)) is not None]
    return min(there)[1] if there else None


def slower_than_peer(row: Record, backend: str) -> bool | None:
    """Whether a backend is slower than the best peer by more than both scatter; None where one of them has no time."""
    peer = best_peer(row)
    if peer is None or (own := timed(row, backend)) is None:
        return None
    ours, theirs = span(own), span(row["results"][peer])
    return ours.value > theirs.value and ours.apart(theirs)


def failures(value: Record) -> list[str]:
    """What of ours could not be timed, and why."""
    out = [f"{name_of(r)}: {r['error']}" for r in value["rows"] if "error" in r]
    for row in value["rows"]:
        for backend in BACKENDS:
            error = row["results"].get(backend, {}).get("error")
            if error is not None:
                out.append(f"{name_of(row)}, {backend}: {error}")
    return out
