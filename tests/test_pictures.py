"""Pictures of a result of `kgen bench`."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_kit import norm, result, whole
from typer.testing import CliRunner

from kgen.bench import pictures
from kgen.bench.result import save
from kgen.cli import app

pytest.importorskip("matplotlib")


def test_pictures_have_what_was_timed(tmp_path: Path) -> None:
    assert [p.name for p in pictures.draw(whole(), tmp_path)] == ["roofline.png", "widths.png", "linear.png"]
    assert all((tmp_path / f"{n}.png").stat().st_size > 10_000 for n in ("roofline", "widths", "linear"))
    assert pictures.draw(result([norm(100.0)]), tmp_path) == [tmp_path / "roofline.png"]
    lines = {line.get_label(): line.get_xydata() for line in pictures.widths(whole()).axes[0].lines}
    assert lines["cuda"].tolist() == [[4096, 1.02], [8192, 1.0], [16384, 1.04]]
    assert lines["triton"].tolist() == [[4096, 1.04], [16384, 1.04]]
    points = {line.get_label(): line.get_xydata() for line in pictures.linear(whole()).axes[0].lines}
    assert points["cuda"].tolist() == [[1500.0, 1.04], [1500.0, 1.09]] and points["bar"].tolist() == [[1600.0, 1.08]]
    marks = {line.get_label(): line.get_xydata() for line in pictures.roofline(whole()).axes[0].lines}
    assert marks["rms_norm forward, cuda"][0].tolist() == pytest.approx([1.0, 4e8 / 102.0 / 1e6])
    slow = result([norm(100.0), {**norm(1200.0), "shape": "16384x8192"}])
    (near,), (far,) = (pictures.widths(r).axes[:1] for r in (whole(), slow))
    assert (
        1.05 in near.get_yticks()
        and {1.05, 1.1} & set(far.get_yticks()) == set()
        and {1, 4, 12} <= set(far.get_yticks())
    )


def test_no_point_of_the_roofline_is_behind_its_legend() -> None:
    """With as many ops as are timed, each has a mark of its own, and the legend is beside the plot."""
    rows = []
    for i in range(7):
        for direction in ("forward", "backward"):
            one = {**norm(100.0 + i), "op": f"op{i}", "direction": direction, "flops": 10**9 * (i + 1)}
            rows.append(one)
    figure = pictures.roofline(result(rows))
    figure.tight_layout()
    figure.draw_without_rendering()
    (axis,) = figure.axes
    legend, plot = axis.get_legend().get_window_extent(), axis.get_window_extent()
    assert not legend.overlaps(plot)
    assert legend.x1 <= figure.bbox.x1 and legend.y0 >= 0 and legend.y1 <= figure.bbox.y1  # and whole
    assert len(axis.get_legend().get_texts()) == 1 + 2 * len(rows)
    marks = [(line.get_marker(), line.get_color()) for line in axis.lines if line.get_marker() != "None"]
    assert len(set(marks)) == 2 * len(rows)


def test_the_folder_of_pictures_is_made(tmp_path: Path) -> None:
    file, folder = tmp_path / "bench.json", tmp_path / "new" / "pictures"
    save(whole(), file)
    done = CliRunner().invoke(app, ["bench", "--read", str(file), "--pictures", str(folder)])
    assert done.exit_code == 0, done.output
    assert {p.name for p in folder.iterdir()} == {"roofline.png", "widths.png", "linear.png"}
    done = CliRunner().invoke(app, ["bench", "--read", str(file), "--pictures", str(file / "pictures")])
    assert done.exit_code == 2 and f"--pictures: {file} is no folder" in " ".join(done.output.split())
