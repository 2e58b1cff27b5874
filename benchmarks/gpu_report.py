"""What `gpu_check.py` leaves: a line for each kernel and backend, failures, and the page in Markdown."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass

import gpu_cases as cases
from gpu_calls import BACKENDS, Record

# Columns of the table. Counts are calls; a crash of the check itself is listed with the failures.
HEAD = [
    "kernel", "backend", "forward ok", "gradient ok", "wrong", "crashed", "refused", "worst forward", "worst gradient",
    "free",
]  # fmt: skip
BAD = ("wrong", "crashed", "check failed")
STATUSES = ("ok", "refused", *BAD)

WHAT = (
    "Each call is held against float64 under a derived bound (`codegen/tolerance.py`), and what surrounds inputs and "
    "outputs in memory must not change. A gradient call is the training form with what it saves, the derived backward "
    "on that, and the same through autograd, which must give the same bits; in f32 at middling widths it is also held "
    "against torch's derivative of a formula. Layouts of gradients are those of the inputs, with those of the "
    "gradients that come in (`scalar`: of a sum)."
)
COLUMNS = (
    "Counts are calls; where the backend is `both`, each has these numbers. `worst` is the largest error over its "
    "bound of the calls that passed: an output that rounds to nearest reaches 1. `free` elements have no bound (an "
    "overflow or a NaN on the way). A refusal is an error that says what cannot be done."
)


def table(records: list[Record]) -> list[list[str]]:
    """One line for each target and backend: calls that were right in each direction, what went wrong, worst ratios."""
    rows = []
    by: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        if r["backend"] in BACKENDS:
            by[r["target"], r["backend"]].append(r)
    place = {t.name: i for i, t in enumerate(cases.targets())}
    for target, backend in sorted(by, key=lambda key: (place.get(key[0], -1), key[1])):
        each = by[target, backend]
        count = Counter(r["status"] for r in each)
        good = {d: [r for r in each if r["status"] == "ok" and r["direction"] == d] for d in cases.DIRECTIONS}
        worst = {d: f"{max(r['ratio'] for r in g):.3f}" if g else "" for d, g in good.items()}
        both = [r for g in good.values() for r in g]
        free = sum(r["free"] for r in both) / max(1, sum(r["total"] for r in both))
        rows.append([
            target, backend, *(str(len(good[d])) for d in cases.DIRECTIONS), str(count["wrong"]), str(count["crashed"]),
            str(count["refused"]), *(worst[d] for d in cases.DIRECTIONS), f"{free:.1%}",
        ])  # fmt: skip
    return rows


def not_reached(records: list[Record], queue: list[cases.Task], found: list[cases.Target]) -> list[str]:
    """Kernels and directions of which no call was right on some backend, for want of time or otherwise."""
    good = {(r["target"], r["direction"], r["backend"]) for r in records if r["status"] == "ok"}
    asked = sorted({(t.target, t.direction) for t in queue})
    return [
        f"{found[i].name}, {direction}, {backend}"
        for i, direction in asked
        for backend in BACKENDS
        if (found[i].name, direction, backend) not in good
    ]


def failures(records: list[Record]) -> list[Record]:
    """What must not be: wrong values, crashes, and checks that could not be made."""
    return [r for r in records if r["status"] in BAD]


@dataclass(frozen=True)
class Group:
    """Failures of one kernel and direction, of one kind and with one message but for its numbers."""

    each: tuple[Record, ...]

    @property
    def title(self) -> str:
        """Which kernel, direction, backends and dtypes, and how many calls."""
        first = self.each[0]
        return f"{first['target']}, {first['direction']}, {self._all('backend')}, {self._all('dtype')}: {self.count}"

    @property
    def count(self) -> str:
        """How many calls failed how."""
        return f"{len(self.each)} {self.each[0]['status']}"

    @property
    def where(self) -> str:
        """At which widths and in which layouts."""
        return f"widths {self._all('width')} ({self._all('layout')})"

    @property
    def first(self) -> str:
        """The first of the calls. One whose process ended has no rows."""
        r = self.each[0]
        of = f", of {r['of']}" if "of" in r else ""
        rows = f"[{r['rows']}, {r['width']}]" if r["rows"] >= 0 else f"width {r['width']}"
        return f"{rows}, {r['backend']}, {r['dtype']}, {r['layout']}, {r['values'] or 'some'} values{of}"

    @property
    def message(self) -> str:
        """What the first of them said, on one line."""
        return " ".join(self.each[0]["message"].split())

    def _all(self, key: str, most: int = 12) -> str:
        values = sorted({e[key] for e in self.each})
        return ", ".join(map(str, values[:most])) + (f" and {len(values) - most} more" if len(values) > most else "")


def grouped(records: list[Record]) -> list[Group]:
    """The failures, those that are alike together."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for r in failures(records):
        alike = re.sub(r"-?\d[\d.]*(e[-+]?\d+)?", "#", r["message"])
        groups[r["target"], r["direction"], r["status"], alike].append(r)
    return [Group(tuple(each)) for each in groups.values()]


def listed(records: list[Record], most: int) -> list[str]:
    """Failures, a line for each group of them with the first in full."""
    return [f"{g.title} at {g.where}; first {g.first}: {g.message}" for g in grouped(records)[:most]]


def page(
    facts: Record, records: list[Record], queue: list[cases.Task], begun: int, timed: Record | None, seconds: float,
    limit: int,
) -> str:  # fmt: skip
    """The report in Markdown. `limit` is the most elements of a tensor."""
    lines = ["# Results on a GPU", "", "Made by `benchmarks/gpu_check.py`.", ""]
    lines += [f"- {k}: {v}" for k, v in facts.items()]
    lines += ["", *_counts(records), "", "## Failures", "", *_failures(records)]
    lines += ["", "## What was run", "", *_run(records, queue, begun, seconds)]
    lines += ["", "## What was not run", "", *_not_run(records, queue, begun, limit)]
    if timed:
        lines += _timing(timed)
    lines += ["", "## By kernel", "", _wrapped(COLUMNS), "", *_table(HEAD, _merged(table(records)))]
    return "\n".join(lines) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _wrapped(text: str, bullet: bool = False) -> str:
    first, rest = ("- ", "  ") if bullet else ("", "")
    return textwrap.fill(
        text, 120, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _counts(records: list[Record]) -> list[str]:
    """A line for each direction: how many calls ended how."""
    rows = []
    for direction in cases.DIRECTIONS:
        count = Counter(r["status"] for r in records if r["direction"] == direction and r["status"] in STATUSES)
        if count:
            rows.append([direction, str(count.total()), *(str(count[s]) for s in STATUSES)])
    return _table(["direction", "calls", *STATUSES], rows)


def _failures(records: list[Record], most: int = 100) -> list[str]:
    groups = grouped(records)
    lines = []
    for g in groups[:most]:
        lines.append(f"- **{g.title}**")
        lines += [f"  - at {g.where}", f"  - first: {g.first}", f"  - ``{g.message}``"]
    if len(groups) > most:
        lines.append(f"- and {len(groups) - most} other kinds")
    return lines or ["None."]


def _run(records: list[Record], queue: list[cases.Task], begun: int, seconds: float) -> list[str]:
    ran = [r for r in records if r["status"] != "skipped"]
    lines = [_wrapped(WHAT), ""]
    lines.append(
        _wrapped(
            f"{begun} of {len(queue)} combinations of kernel, direction, dtype, width and layouts were begun in "
            f"{seconds:.0f} s. They are drawn by lot: each width of a kernel and direction once before any a second "
            f"time. Kernels and directions share the time."
        )
    )
    lines.append("")
    for direction in cases.DIRECTIONS:
        mine = [r for r in ran if r["direction"] == direction]
        if not mine:
            continue
        pairs = {(t.target, t.width) for t in queue if t.direction == direction}
        reached = {(r["target"], r["width"]) for r in mine}

        def values(key: str, of: list[Record] = mine) -> str:
            return ", ".join(map(str, sorted({r[key] for r in of if r["rows"] >= 0})))

        layouts = ", ".join(sorted({part for r in mine for part in r["layout"].split("/")}))
        lines.append(
            _wrapped(
                f"{direction}: {len(reached)} of {len(pairs)} pairs of a kernel and a width; widths {values('width')}; "
                f"rows {values('rows')}, of which {cases.VARIED[direction]} also with NaN and infinities, large values "
                f"and zeros, and with two more calls that must give the same bits; dtypes {values('dtype')}; layouts "
                f"{layouts}.",
                bullet=True,
            )
        )
    return lines


def _not_run(records: list[Record], queue: list[cases.Task], begun: int, limit: int) -> list[str]:
    found = cases.targets()
    lines = [f"- {len(queue) - begun} combinations for lack of time."]
    lines += [f"- Not one call was right: {what}." for what in not_reached(records, queue, found)]
    skipped = [r for r in records if r["status"] == "skipped"]
    if skipped:
        later, on_cpu = min(limit, cases.LATER_MAX_ELEMENTS), min(limit, cases.CPU_MAX_ELEMENTS)
        by_rows = [
            f"{d}, " + ", ".join(f"{n} of {m} rows" for m, n in sorted(count.items()))
            for d in cases.DIRECTIONS
            if (count := Counter(r["rows"] for r in skipped if r["direction"] == d))
        ]
        lines.append(
            _wrapped(
                f"{len(skipped)} calls whose largest tensor would have had more elements than {limit} (forward, first "
                f"combination of a kernel and width), {later} (all others) or {on_cpu} (cases of the tests, whose "
                f"arguments are made on the CPU): {'; '.join(by_rows)}.",
                bullet=True,
            )
        )
    for t in (found[i] for i in sorted({t.target for t in queue})):
        if codes := {n: code for n, code in cases.derivable(t).items() if code}:  # of docs/errors.md
            named = ", ".join(f"`{n}` ({code})" for n, code in codes.items())
            lines.append(f"- {t.name}: no gradient is derived of {named}.")
    refused = Counter(
        (r["target"], r["direction"], r["backend"], r["message"][:200]) for r in records if r["status"] == "refused"
    )
    lines += [f"- Refused: {t}, {d}, {b} ({n} calls): {m}" for (t, d, b, m), n in sorted(refused.items())]
    if gaps := _gaps(records, queue, found):
        said = (
            "What was not run even once, for lack of time, or, of rows, because they pass the limit at every width run:"
        )
        lines += ["", said, "", *_table(["kernel", "direction", "widths", "rows"], gaps)]
    return lines


def _gaps(records: list[Record], queue: list[cases.Task], found: list[cases.Target]) -> list[list[str]]:
    """Kernel, direction, and the widths and row counts of them that were asked for and never run."""
    ran: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    asked: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for t in queue:
        asked[found[t.target].name, t.direction, "width"].add(t.width)
    for r in records:
        key = r["target"], r["direction"]
        asked[*key, "rows"].add(r["rows"])
        if r["status"] != "skipped":
            ran[*key, "rows"].add(r["rows"])
            ran[*key, "width"].add(r["width"])
    lines = []
    for name, direction in dict.fromkeys((found[t.target].name, t.direction) for t in sorted(queue, key=_place)):
        missing = [asked[name, direction, what] - ran[name, direction, what] for what in ("width", "rows")]
        if any(missing):
            lines.append([name, direction, *(", ".join(map(str, sorted(m))) for m in missing)])
    return lines


def _place(task: cases.Task) -> tuple[int, str]:
    return task.target, task.direction


def _merged(rows: list[list[str]]) -> list[list[str]]:
    """Lines of the table, the backends of a kernel on one where their numbers are the same."""
    out: list[list[str]] = []
    for row in rows:
        if out and out[-1][0] == row[0] and out[-1][2:] == row[2:]:
            out[-1] = [row[0], "both", *row[2:]]
        else:
            out.append(row)
    return out


def _timing(timed: Record) -> list[str]:
    lines = ["", "## RMSNorm beside a copy", ""]
    lines += [
        f"{timed['rows']} x {timed['width']} {timed['dtype']}, forward; {timed['bytes'] / 1e6:.0f} MB move; "
        f"{timed['rounds']} "
        "interleaved rounds, buffers rotated, device time of one launch by events.",
        "", "| | median, us | p10 | p90 | GB/s | speed of the copy reached |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name in ("copy", *BACKENDS):
        t = timed.get(name, {})
        if "median_us" in t:
            reached = f"{t['of_copy']:.1%}" if "of_copy" in t else ""
            lines.append(
                f"| {name} | {t['median_us']:.1f} | {t['p10_us']:.1f} | {t['p90_us']:.1f} "
                f"| {t['GB_per_s']:.0f} | {reached} |"
            )
        else:
            lines.append(f"| {name} | {t.get('error', 'not run')} | | | | |")
    return lines
