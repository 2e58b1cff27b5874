"""What `linear_bars.py` leaves: tables, bars, a picture; and the part of docs/linear-cross-entropy.md that has figures.

    python benchmarks/linear_report.py benchmarks/results/linear-bars-HASH.json

fills the page from a result and draws its picture; `--check` only says whether the page is current.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "linear-cross-entropy.md"
PICTURE = DOC.with_suffix(".png")
NO_RUN = "no run on a GPU yet"
PART = re.compile(r"(<!-- generated: benchmarks/linear_report\.py, from )([^\n]*?)( -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = [
    "", "workspace_mb", "accumulate", "tokens in a chunk", "peak MiB", "ms", "x products", "error of dx", "error of dw",
]  # fmt: skip
MEANING = (
    "Device time in milliseconds, median of interleaved rounds, L2 cache cleared before each call; `x products` is the "
    "time as a multiple of three `torch.mm` of the same operands in the same rounds. Peak: the most memory in use above"
    " the inputs, gradients counted. Errors: the norm of what a gradient is off by, over its norm, against float64; "
    "ours are also held to bounds of each element first. Forward and backward, bf16, mean, all labels kept."
)
TITLES = {
    "bars": "Settings", "accumulate": "Ways to accumulate, and the forward pass alone", "chunks": "Sizes of chunks",
    "peers": "Others",
}  # fmt: skip
TICKS = [0.9, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 6, 8]
COLORS = {"cuda": "tab:green", "triton": "tab:blue"}
Record = dict[str, Any]


def label(row: Record) -> str:
    """A row in words."""
    if row["backend"] is None:
        return row["name"]
    budget = "default" if row["workspace_mb"] is None else f"{row['workspace_mb']:.4g} MiB"
    return f"{row['name']}, {row['backend']}, {budget}, {row['accumulate']}"


def mebibytes(value: float) -> str:
    """To a tenth; small values, of a trial, to three digits."""
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def timed(group: Record) -> list[Record]:
    """The rows that have a time."""
    return [r for r in group["rows"] if "median_us" in r]


# ---- bars ----------------------------------------------------------------------------------------------------------


def verdict(groups: list[Record], shape: str, mib: float, limit: float | None, backend: str) -> Record:
    """Whether a backend meets a bar: `met`, and `found` in words."""
    group = next((g for g in groups if g["shape"] == shape and g["group"] == "bars"), None)
    if group is None:
        return {"met": None, "found": "not reached"}
    asked = next((r for r in group["rows"] if r["backend"] == backend and mib in r["caps"]), None)
    if asked is None:
        return {"met": None, "found": "no setting"}
    if "median_us" not in asked:
        return {"met": None, "found": f"not timed: {asked.get('error', '')}"}
    ms, peak, ratio = asked["median_us"] / 1e3, asked["peak_mib"], asked["of_gemms"]
    found = f"{ratio:.3f}x, {ms:.2f} ms, {mebibytes(peak)} MiB"
    if limit is not None:
        return {"met": peak <= mib and ratio <= limit, "found": found}
    other = next((r for r in timed(group) if r["name"] == "Liger"), None)
    if other is None:
        return {"met": None, "found": f"{found}; no time of Liger"}
    found = f"{found}; Liger {other['median_us'] / 1e3:.2f} ms"
    return {"met": peak <= mib and ms < other["median_us"] / 1e3, "found": found}


def bar_rows(result: Record) -> list[list[str]]:
    """A line for each bar and backend."""
    words = {True: "yes", False: "**no**", None: "not told"}
    return [
        [
            b["shape"], f"{b['mib']:.4g}", "below Liger" if b["limit"] is None else f"{b['limit']}x", b["backend"],
            words[b["met"]], b["found"],
        ]
        for b in result["bars"]
    ]  # fmt: skip


BAR_HEAD = ["tokens x hidden x vocab", "at most MiB", "at most", "backend", "met", "found"]

# ---- tables --------------------------------------------------------------------------------------------------------


def cells(row: Record) -> list[str]:
    """One line of a table; what did not run has its reason in the list behind it."""
    own = row["backend"] is not None
    budget = row["workspace_mb"]
    return [
        f"{row['name']}, {row['backend']}" if own else row["name"],
        ("" if not own else "default" if budget is None else f"{budget:.4g}"),
        row["accumulate"] or "",
        f"{row['chunk']}" if own and "chunk" in row else "",
        mebibytes(row["peak_mib"]) if "peak_mib" in row else "-",
        f"{row['median_us'] / 1e3:.2f}" if "median_us" in row else "-",
        f"{row['of_gemms']:.3f}" if "of_gemms" in row else "-",
        *(f"{row[k]:.2e}" if k in row else "-" for k in ("dx_error", "dw_error")),
    ]


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def tables(result: Record, depth: str) -> list[str]:
    """All that was measured, headings of that depth."""
    lines = [MEANING, ""]
    if result["bars"]:
        lines += [f"{depth} Bars", "", *markdown(BAR_HEAD, bar_rows(result)), ""]
    for g in sorted(result["groups"], key=lambda g: list(TITLES).index(g["group"])):
        products = g["gemms"]
        lines += [
            f"{depth} {TITLES[g['group']]}, {g['shape']}", "",
            f"Three products: {products['median_us'] / 1e3:.2f} ms ({products['p10_us'] / 1e3:.2f} to "
            f"{products['p90_us'] / 1e3:.2f}, {products['calls']} calls). Both gradients alone: "
            f"{mebibytes(g['gradients_mib'])} MiB.", "",
            *markdown(HEAD, [cells(r) for r in g["rows"]]), "",
        ]  # fmt: skip
    failed = [f"- {g['shape']}, {label(r)}: {r['error']}" for g in result["groups"] for r in g["rows"] if "error" in r]
    missing = [*failed, *(f"- {what}" for what in result["not reached"])]
    return [*lines, f"{depth} Not timed", "", *(missing or ["None."]), ""]


def page(result: Record) -> str:
    """The report in Markdown."""
    facts = [f"- {k}: {v}" for k, v in result["machine"].items()]
    head = ["# Linear cross entropy on a GPU", "", "Made by `benchmarks/linear_bars.py`.", "", *facts, ""]
    return "\n".join([*head, *tables(result, "##")])


def summary(result: Record) -> list[str]:
    """For a terminal: times, then bars, then what is missing."""
    lines: list[str] = []
    for g in result["groups"]:
        lines.append(f"{g['shape']}, {g['group']}: three products {g['gemms']['median_us'] / 1e3:.2f} ms")
        table = [HEAD, *(cells(r) for r in g["rows"])]
        sizes = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["  " + "  ".join(c.ljust(n) for c, n in zip(row, sizes, strict=True)).rstrip() for row in table]
    lines += [" ".join(("bar", *row)) for row in bar_rows(result)]
    return lines + [f"not reached: {what}" for what in result["not reached"]]


# ---- the picture ---------------------------------------------------------------------------------------------------


def picture(result: Record, path: Path) -> str:
    """Draw time against memory, a panel a shape; what hinders it in words, or nothing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
        from matplotlib import ticker
    except ImportError:
        return "no picture: matplotlib is not installed (pip install 'kgen[plot]')"
    shapes = list(dict.fromkeys(g["shape"] for g in result["groups"]))
    if not shapes:
        return "no picture: nothing was timed"
    figure, axes = plt.subplots(1, len(shapes), figsize=(5.2 * len(shapes), 4.4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        mine = [g for g in result["groups"] if g["shape"] == shape]
        axis.axvline(mine[0]["gradients_mib"], color="0.6", linestyle=":", label="both gradients alone")
        axis.axhline(1.0, color="0.6", linewidth=0.8)
        for backend, color in COLORS.items():
            rows = [r for g in mine for r in timed(g) if r["backend"] == backend and not r["forward"]]
            line = sorted((r["peak_mib"], r["of_gemms"]) for r in rows if r["accumulate"] == "param")
            if line:
                axis.plot(
                    *zip(*line, strict=True), "o-", color=color, markersize=4, label=f"kgen, {backend}, dw in bf16"
                )
            usual = next((r for r in rows if r["workspace_mb"] is None and r["accumulate"] == "auto"), None)
            if usual is not None:
                axis.plot(usual["peak_mib"], usual["of_gemms"], "*", color=color, markersize=11,
                          label=f"kgen, {backend}, default")  # fmt: skip
        for k, r in enumerate(r for g in mine for r in timed(g) if r["backend"] is None and "peak_mib" in r):
            axis.plot([r["peak_mib"]], [r["of_gemms"]], "sD^vPX"[k % 6], color="tab:red", markersize=5, label=r["name"])
        limits = {(b["mib"], b["limit"]) for b in result["bars"] if b["shape"] == shape and b["limit"] is not None}
        if limits:
            axis.plot(*zip(*sorted(limits), strict=True), "k+", markersize=10, linestyle="none", label="bar")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(ticker.FixedLocator(TICKS))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.set_title(shape)
        axis.set_xlabel("peak above the inputs, MiB")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("time, multiple of three matrix products")
    figure.suptitle(f"Linear cross entropy, forward and backward, bf16 ({result['machine'].get('device', '')})")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return ""


# ---- the page of the documentation ---------------------------------------------------------------------------------


def generated(source: str) -> str:
    """The part of the page that comes from a result file, a path from the root; `NO_RUN`: there is none."""
    if source == NO_RUN:
        return "No run on a GPU is recorded yet.\n"
    result = json.loads((ROOT / source).read_text("utf-8"))
    if result["trial"]:
        raise ValueError(f"{source} is a trial on a CPU, whose figures mean nothing")
    facts = [f"- {k}: {v}" for k, v in result["machine"].items()]
    head = [f"From [{Path(source).name}](../{source}), made by `benchmarks/linear_bars.py`.", "", *facts, ""]
    image = [f"![Time against peak memory, by size of chunks]({PICTURE.name})", ""]
    return "\n".join([*head, *image, *tables(result, "###")])


def fill(text: str, source: str | None = None) -> str:
    """The page with its generated part made anew, from `source` or the result that it names."""
    return PART.sub(lambda m: f"{m[1]}{source or m[2]}{m[3]}{generated(source or m[2])}{m[4]}", text)


def main(arguments: list[str]) -> int:
    """0 where the page is current or was made so, 1 where `--check` finds that it is not."""
    old = DOC.read_text("utf-8")
    if arguments == ["--check"]:
        return int(fill(old) != old)
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print(f"usage: {Path(__file__).name} RESULT.json | --check", file=sys.stderr)
        return 2
    path = Path(arguments[0]).resolve()
    if not path.is_relative_to(ROOT):
        print(f"{path} is not in the repository: put it into benchmarks/results first", file=sys.stderr)
        return 2
    DOC.write_text(fill(old, path.relative_to(ROOT).as_posix()), "utf-8")
    if hindered := picture(json.loads(path.read_text("utf-8")), PICTURE):
        print(hindered, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
