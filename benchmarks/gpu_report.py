"""What `gpu_check.py` leaves: a line for each kernel and backend, failures, and the page in Markdown."""

from __future__ import annotations

import datetime
import platform
from collections import Counter, defaultdict
from pathlib import Path

import gpu_cases as cases
import torch
from gpu_calls import BACKENDS, Record


def machine(device: torch.device, commit: str) -> Record:
    """What this ran on."""
    facts: Record = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("triton", "cupy"):
        try:
            facts[name] = __import__(name).__version__
        except ImportError:
            facts[name] = "not installed"
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        from cupy_backends.cuda.api import runtime  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        from cupy_backends.cuda.libs import nvrtc

        facts["driver (CUDA)"] = runtime.driverGetVersion()
        facts["NVRTC"] = ".".join(map(str, nvrtc.getVersion()))
        try:
            facts["driver"] = Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
        except OSError:
            facts["driver"] = "not told"
    else:
        facts["device"] = "CPU: host executor and Triton interpreter"
    return facts


# Columns of the table. Counts are calls; a crash of the check itself is listed with the failures.
HEAD = [
    "kernel", "backend", "forward ok", "gradient ok", "wrong", "crashed", "refused", "worst forward", "worst gradient",
    "free",
]  # fmt: skip

GRADIENTS = (
    "A gradient call is the training form with what it saves, the derived backward on that, and the same through "
    "autograd, which must give the same bits; in f32 at middling widths it is also held against torch's "
    "derivative of a formula. Layouts of gradients are those of the inputs, with those of the gradients that come"
    " in (`scalar`: of a sum)."
)
COLUMNS = (
    "`worst` is the largest error over its bound of the calls that passed: a 16-bit output that rounds to nearest"
    " reaches 1. `free` elements have no bound (an overflow or a NaN on the way). A refusal is a KgenError that "
    "says what cannot be done."
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
    return [r for r in records if r["status"] in ("wrong", "crashed", "check failed")]


def listed(records: list[Record], most: int) -> list[str]:
    """Failures, those of one kernel, direction, backend and kind together with the first of them in full."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for r in failures(records):
        groups[r["target"], r["direction"], r["backend"], r["status"], r["dtype"]].append(r)
    lines = []
    for (target, direction, backend, status, dtype), each in groups.items():
        r = each[0]
        widths = ", ".join(map(str, sorted({e["width"] for e in each})[:12]))
        layouts = ", ".join(sorted({e["layout"] for e in each})[:8])
        of = f" of {r['of']}" if "of" in r else ""
        lines.append(
            f"{target}, {direction}, {backend}, {dtype}: {len(each)} {status} at widths {widths} ({layouts}); first "
            f"[{r['rows']}, {r['width']}] {r['layout']} {r['values']}{of}: {r['message']}"
        )
    return lines[:most]


def page(
    facts: Record, records: list[Record], queue: list[cases.Task], begun: int, timed: Record | None, seconds: float
) -> str:
    """The report in Markdown."""
    lines = ["# Results on a GPU", "", "Made by `benchmarks/gpu_check.py`.", ""]
    lines += [f"- {k}: {v}" for k, v in facts.items()]
    lines += ["", "## What ran", ""]
    lines += [
        f"{begun} of {len(queue)} combinations of kernel, direction, dtype, width and layouts in {seconds:.0f} s."
    ]
    for direction in cases.DIRECTIONS:
        mine = [r for r in records if r["direction"] == direction and r["backend"] in BACKENDS]
        count = Counter(r["status"] for r in mine)
        rows = ", ".join(map(str, sorted({r["rows"] for r in mine if r["rows"] >= 0})))
        if mine:
            lines.append(
                f"- {direction}: {len(mine)} calls, {', '.join(f'{v} {k}' for k, v in count.items())}; rows {rows}, "
                f"with {cases.VARIED[direction]} also NaN and infinities, large values and zeros, and a second call "
                f"that must give the same bits."
            )
    lines += ["", GRADIENTS, ""]
    lines += [f"Widths: {', '.join(str(w) for w in sorted({r['width'] for r in records}))}."]
    lines += [f"Layouts: {', '.join(sorted({part for r in records for part in r['layout'].split('/')}))}."]
    lines += [f"Dtypes: {', '.join(sorted({r['dtype'] for r in records}))}.", "", COLUMNS, ""]
    lines += ["| " + " | ".join(HEAD) + " |", "| " + " | ".join("---" for _ in HEAD) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in table(records)]
    skipped: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for r in records:
        if r["status"] == "skipped":
            skipped[r["target"], r["direction"]][r["rows"]] += 1
    found = cases.targets()
    lines += ["", "## What was not run", "", f"- {len(queue) - begun} combinations for lack of time."]
    lines += [f"- Not one call was right: {what}." for what in not_reached(records, queue, found)]
    lines += [
        f"- {t}, {d}: calls that pass the limit of elements, "
        + ", ".join(f"{n} of {m} rows" for m, n in sorted(c.items()))
        for (t, d), c in sorted(skipped.items())
    ]
    lines += [
        f"- {t.name}: no gradient of " + ", ".join(f"{n} ({code})" for n, code in cases.derivable(t).items() if code)
        for t in (found[i] for i in sorted({t.target for t in queue}))
        if any(cases.derivable(t).values())
    ]
    refused = Counter(
        (r["target"], r["direction"], r["backend"], r["message"][:200]) for r in records if r["status"] == "refused"
    )
    lines += ["", "## Refused", ""] + [f"- {t}, {d}, {b} ({n}): {m}" for (t, d, b, m), n in sorted(refused.items())]
    bad = [f"- {line}" for line in listed(records, 200)]
    lines += ["", "## Wrong", "", *(bad or ["None."])]
    return "\n".join([*lines, *(_timing(timed) if timed else [])]) + "\n"


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
