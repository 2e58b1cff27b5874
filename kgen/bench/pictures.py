"""Pictures of a result: a roofline, time against width, and the linear cross entropy's time against memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kgen.bench.peers import PEERS
from kgen.bench.result import of_floor, timed
from kgen.bench.work import BACKENDS
from kgen.dsl.errors import KgenError

Record = dict[str, Any]
COLORS = {
    "cuda": "tab:green", "triton": "tab:blue", "eager": "tab:gray", "torch.compile": "tab:orange", "Liger": "tab:red",
    "QuACK": "tab:purple", "cut-cross-entropy": "tab:brown",
}  # fmt: skip
# One for each op and direction of a whole run; the last is a star of four points.
MARKS = (*"osD^vPX*<>hdp", (4, 1, 45))
TICKS = [0.9, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 6, 8, 12, 16]


def missing() -> str | None:
    """Why there can be no pictures, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "pictures need matplotlib: pip install 'kgen[plot]'"
    return None


def draw(value: Record, folder: Path) -> list[Path]:
    """Write the pictures that `value` has figures for into `folder`, which is made where it is not there. Raises
    KgenError for a trial, which has none, and where `folder` cannot be made."""
    if value["trial"]:
        raise KgenError("a trial on a CPU has no times to draw")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KgenError(f"cannot make the folder {folder}: {error.strerror}") from None
    pictures: dict[str, Callable[[Record], Any]] = {"roofline": roofline, "widths": widths, "linear": linear}
    written: list[Path] = []
    for name, picture in pictures.items():
        figure = picture(value)
        if figure is not None:
            figure.tight_layout()
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=110, metadata={"Software": None})
            written.append(path)
    return written


def _figure(columns: int, rows: int = 1, width: float = 5.2, height: float = 4.4) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows))
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _by_op(rows: list[Record]) -> dict[str, list[Record]]:
    out: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        out[f"{row['op']} {row['direction']}"].append(row)
    return out


def _times_axis(axis: Any) -> None:
    """Multiples of the floor."""
    from matplotlib import ticker

    axis.set_yscale("log")
    axis.axhline(1.0, color="0.6", linewidth=0.8)
    low, high = axis.get_ylim()
    apart = math.log(high / low) / 20  # labels of so many to an axis have room beside each other
    ticks = [1.0]
    for tick in sorted(TICKS, key=lambda t: abs(math.log(t))):
        if low <= tick <= high and all(abs(math.log(tick / t)) > apart for t in ticks):
            ticks.append(tick)
    axis.yaxis.set_major_locator(ticker.FixedLocator(ticks))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.grid(alpha=0.3, which="both")


def roofline(value: Record) -> Any:
    """Operations a second against operations a byte, under what a copy and, where timed, matrix products reach."""
    from matplotlib import ticker

    rows = [r for r in value["rows"] if r["bytes"] and timed(r, r["floor"])]
    if not rows:
        return None
    figure, (axis,) = _figure(1, width=9.5, height=5.5)
    copies = [r["bytes"] / r["results"]["copy"]["median_us"] / 1e6 for r in rows]  # TB/s
    best = max(copies)
    intensities = [r["flops"] / r["bytes"] for r in rows]
    products = [
        r["flops"] / r["results"]["gemms"]["median_us"] / 1e6
        for r in value["rows"]
        if r["floor"] == "gemms" and timed(r, "gemms")
    ]
    ends = [min(intensities) / 1.5, max(intensities) * 1.5]
    # The view is that of the kernels: where all of them are far below what products reach, that is no part of it.
    ceiling = max((p for p in products if p <= 3 * best * ends[1]), default=None)
    corner = min(ends[1], ceiling / best) if ceiling is not None else ends[1]
    line = [(x, min(best * x, ceiling or best * x)) for x in (ends[0], corner, ends[1])]
    axis.plot(*zip(*line, strict=True), color="0.3", linewidth=1.2, label=f"copy, {best:.2f} TB/s")
    if ceiling is not None:
        axis.axhline(ceiling, color="0.3", linestyle=":", linewidth=1, label=f"matrix products, {ceiling:.0f} TFLOP/s")
    for k, (name, mine) in enumerate(_by_op(rows).items()):
        for backend in BACKENDS:
            points = [
                (r["flops"] / r["bytes"], r["flops"] / t["median_us"] / 1e6)
                for r in mine
                if (t := timed(r, backend)) is not None
            ]
            if points:
                axis.plot(
                    *zip(*points, strict=True), marker=MARKS[k % len(MARKS)], linestyle="none", markersize=5,
                    color=COLORS[backend], fillstyle="full" if backend == "cuda" else "none",
                    label=f"{name}, {backend}",
                )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    for part in (axis.xaxis, axis.yaxis):
        part.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        part.set_major_formatter("{x:g}")
        part.set_minor_formatter(ticker.NullFormatter())
    axis.set_xlabel("floating-point operations a byte that must move")
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"Roofline, measured on {value['machine'].get('device', '')}")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))  # beside the plot, where no point is
    return figure


def widths(value: Record) -> Any:
    """Multiples of a copy against the last size, a panel for each op that has several."""
    panels = {
        name: rows
        for name, rows in _by_op([r for r in value["rows"] if r["floor"] == "copy"]).items()
        if len({_width(r) for r in rows if timed(r, "copy")}) > 1
    }
    if not panels:
        return None
    columns = min(3, len(panels))
    figure, axes = _figure(columns, -(-len(panels) // columns))
    for axis, (name, rows) in zip(axes, panels.items(), strict=False):
        ordered = sorted(rows, key=_width)
        for way in (*BACKENDS, *PEERS):
            points = [(_width(r), s) for r in ordered if (s := of_floor(r, way)) is not None]
            if not points:
                continue
            at = [w for w, _ in points]
            axis.plot(at, [s.value for _, s in points], "o-", color=COLORS[way], markersize=4, label=way)
            axis.fill_between(
                at, [s.low for _, s in points], [s.high for _, s in points], color=COLORS[way], alpha=0.15, linewidth=0
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        _times_axis(axis)
        axis.set_title(name)
        axis.set_xlabel("width")
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("time, multiple of a copy of the same bytes")
    return figure


def _width(row: Record) -> int:
    return int(row["shape"].split("x")[-1])


def linear(value: Record) -> Any:
    """Multiples of three matrix products against the peak of memory, a panel a shape."""
    shapes: dict[str, list[Record]] = defaultdict(list)
    for row in value["rows"]:
        if row["floor"] == "gemms" and timed(row, "gemms"):
            shapes[row["shape"]].append(row)
    if not shapes:
        return None
    figure, axes = _figure(len(shapes))
    for axis, (shape, rows) in zip(axes, shapes.items(), strict=True):
        axis.axvline(rows[0]["gradients_mib"], color="0.6", linestyle=":", label="both gradients alone")
        for way in (*BACKENDS, *PEERS):
            points = sorted(
                {(t["peak_bytes"] / 2**20, t["of_floor"]) for r in rows if (t := timed(r, way)) and "peak_bytes" in t}
            )
            if points:
                style = "o-" if way in BACKENDS else "D"
                axis.plot(*zip(*points, strict=True), style, color=COLORS[way], markersize=5, label=way)
        bars = sorted({(r["cap_mib"], bar) for r in rows if "cap_mib" in r for bar in r["bars"].values()})
        if bars:
            axis.plot(*zip(*bars, strict=True), "k+", markersize=10, linestyle="none", label="bar")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        _times_axis(axis)
        axis.set_title(f"linear cross entropy {shape}")
        axis.set_xlabel("peak above the inputs, MiB")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("time, multiple of three matrix products")
    return figure
