"""A result in words: compact lines, a table for the terminal, and one in Markdown."""

from __future__ import annotations

from typing import Any

from kgen.bench.peers import PEERS
from kgen.bench.result import best_peer, failures, meets, name_of, of_floor, slower_than_peer, timed
from kgen.bench.work import BACKENDS
from kgen.dsl.errors import KgenError

Record = dict[str, Any]
TRIAL = "A trial on a CPU: results were checked, times say nothing about speed."
MEANING = (
    "bf16; device time in milliseconds, median of {rounds} interleaved rounds, L2 cache cleared before each call; in "
    "brackets the time as a multiple of the floor: a copy of the same bytes (`torch.Tensor.copy_`){or_products}. Bars "
    "are such multiples, for cuda / triton. Backward rows time the derived kernel alone, and the backward pass of "
    "others through autograd. Peak: the most memory in use above the inputs, results counted; MB: what must move at "
    "least. Our results were held against float64 first."
)
BRIEF = (
    "{device}, bf16, commit {commit}: milliseconds of the floor, and times as multiples of it. The floor is a copy of "
    "the same bytes by torch{or_products}; kernels may be a few per cent faster. Backward rows time our kernel alone, "
    "and others through autograd. What cross_entropy computes in place is the loss and its gradient."
)


def ways(value: Record) -> list[str]:
    """Ours and those others that have a time or an error in some row, in a fixed order."""
    there = {name for row in value["rows"] for name in row["results"]}
    return [name for name in (*BACKENDS, *PEERS) if name in there]


def milliseconds(us: float) -> str:
    """Three digits behind the point for what is short."""
    ms = us / 1e3
    return f"{ms:.4f}" if ms < 1 else f"{ms:.3f}" if ms < 10 else f"{ms:.2f}"


def mebibytes(size: float | None) -> str:
    """Of a number of bytes."""
    if size is None:
        return "-"
    mib = size / 2**20
    return f"{mib:.0f}" if mib >= 10 else f"{mib:.2g}"


def cell(row: Record, name: str) -> str:
    """A time with its multiple of the floor, or why there is none, in a word."""
    record = row["results"].get(name)
    if record is None:
        return ""
    if "median_us" not in record:
        error = str(record.get("error", "-"))
        if not error.startswith("not installed"):
            return "failed"
        lacks = error.partition(": ")[2].removeprefix("it ")  # the package itself may well be there
        return lacks or "not installed"
    if name == row["floor"]:
        return milliseconds(record["median_us"])
    return f"{milliseconds(record['median_us'])} ({record['of_floor']:.2f}x)"


def bar_cell(row: Record) -> str:
    """The bars, cuda / triton."""
    if "below" in row:
        return f"below {row['below']}"
    return " / ".join(f"{row['bars'][b]:.2f}" for b in BACKENDS if b in row["bars"])


def verdict(row: Record, backend: str) -> str:
    """What of the bars a backend misses, in words; empty if nothing."""
    missed: list[str] = []
    if meets(row, backend) is False:
        missed.append(f"not below {row['below']}" if "below" in row else f"above the bar {row['bars'][backend]:.2f}")
    if slower_than_peer(row, backend):
        missed.append(f"slower than {best_peer(row)}")
    return ", ".join(missed)


def line(row: Record, trial: bool = False) -> str:
    """One row, compact."""
    if "error" in row:
        return f"{name_of(row)}: {row['error']}"
    floor = timed(row, row["floor"])
    parts = [f"{row['floor']} {milliseconds(floor['median_us'])}"] if floor else []
    for name in (*BACKENDS, *PEERS):
        found, record = of_floor(row, name), row["results"].get(name)
        if found is not None:
            parts.append(f"{name} {found.value:.3f}x [{found.low:.2f}-{found.high:.2f}]")
        elif record is not None and not str(record.get("error", "")).startswith("not installed"):
            parts.append(f"{name} failed")
    if trial:
        return f"{name_of(row)}: " + ", ".join(f"{b} {_checked(row, b)}" for b in BACKENDS if b in row["results"])
    text = f"{name_of(row)}: {'; '.join(parts)}"
    said = [f"{b} {v}" for b in BACKENDS if (v := verdict(row, b))]
    return text + (f"  <- {'; '.join(said)}" if said else "")


def _checked(row: Record, backend: str) -> str:
    record = row["results"][backend]
    return "failed" if "error" in record else f"right (worst error {record['worst']:.2f} of its bound)"


def summary(value: Record) -> str:
    """How many bars are met, and how often the best of the others is faster, in a line."""
    met = [m for row in value["rows"] for b in BACKENDS if (m := meets(row, b)) is not None]
    beside = [s for row in value["rows"] for b in BACKENDS if (s := slower_than_peer(row, b)) is not None]
    said = [f"{sum(met)} of {len(met)} bars are met"] if met else []
    if beside:
        said.append(f"{sum(beside)} of {len(beside)} are slower than the fastest other by more than both scatter")
    return "; ".join(said)


def head(value: Record) -> list[str]:
    """Of the table."""
    return ["op", "shape", "floor, ms", "bar", *ways(value), "peak MiB", "MB", "GB/s"]


def cells(value: Record, row: Record) -> list[str]:
    """One line of the table; the peak and GB/s are those of the first backend that was timed."""
    own = next((r for b in BACKENDS if (r := timed(row, b)) is not None), None)
    moved = f"{row['bytes'] / 1e6:.4g}" if row["bytes"] else ""
    speed = f"{row['bytes'] / own['median_us'] / 1e3:.0f}" if own and row["bytes"] and row["floor"] == "copy" else ""
    return [
        f"{row['op']} {row['direction']}", row["shape"], cell(row, row["floor"]), bar_cell(row),
        *(cell(row, name) for name in ways(value)),
        mebibytes(own.get("peak_bytes")) if own else "-", moved, speed,
    ]  # fmt: skip


def markdown(value: Record) -> str:
    """The whole result: on what it ran, all rows, and what could not be timed."""
    lines = ["Made by `kgen bench`.", "", *(f"- {k}: {v}" for k, v in value["machine"].items())]
    meaning = MEANING.format(rounds=value["rounds"], or_products=_or_products(value))
    lines += ["", TRIAL if value["trial"] else meaning, ""]
    lines += table(value)
    missing = failures(value) + [f"{name}: not reached in the time given" for name in value["not reached"]]
    return "\n".join([*lines, "", "## Not timed", "", *([f"- {m}" for m in missing] or ["None."])]) + "\n"


def table(value: Record) -> list[str]:
    """The rows in Markdown."""
    return _markdown(head(value), [cells(value, row) for row in value["rows"]])


def brief(value: Record) -> str:
    """For a front page: ours and the fastest of the others. Raises KgenError for a trial, which has no times."""
    if value["trial"]:
        raise KgenError("a trial on a CPU has no times to tell")
    facts = value["machine"]
    rows: list[list[str]] = []
    for row in value["rows"]:
        peer = best_peer(row)
        times = [_multiple(row, b) for b in BACKENDS]
        rows.append([
            f"{row['op']} {row['direction']}", row["shape"], cell(row, row["floor"]) or "-", *times,
            f"{_multiple(row, peer)} {peer}" if peer else "-",
        ])  # fmt: skip
    said = BRIEF.format(
        device=facts.get("device", "not told"), commit=facts.get("commit", "not told"), or_products=_or_products(value)
    )
    return "\n".join([said, "", *_markdown(["", "shape", "floor, ms", *BACKENDS, "fastest other"], rows)]) + "\n"


def _or_products(value: Record) -> str:
    """What else a floor is, where rows have it."""
    there = any(row.get("floor") == "gemms" for row in value["rows"])
    return ", or, for the linear cross entropy, three `torch.mm` of the same operands" if there else ""


def _multiple(row: Record, name: str) -> str:
    found = of_floor(row, name)
    return "-" if found is None else f"{found.value:.2f}x"


def _markdown(names: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (names, ["---"] * len(names), *rows)]
