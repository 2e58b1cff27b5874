"""A result on a terminal: progress while it is made, then a table in colour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kgen.bench import report
from kgen.bench.compare import FASTER, Change
from kgen.bench.result import meets, name_of, slower_than_peer
from kgen.bench.work import BACKENDS

Record = dict[str, Any]


class Steps:
    """What `run` tells, as lines on `results` and `errors`, under a bar where the latter is a terminal."""

    def __init__(self, results: Console, errors: Console, trial: bool) -> None:
        self._results, self._errors, self._trial = results, errors, trial
        self._bar: Progress | None = None

    @contextmanager
    def shown(self, total: int) -> Iterator[Steps]:
        """With a bar for so many cases."""
        if not self._errors.is_terminal:
            yield self
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._errors, transient=True) as self._bar:
            self._bar.add_task("", total=total)
            try:
                yield self
            finally:
                self._bar = None

    def begin(self, name: str) -> None:
        """A case begins."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=escape(name))

    def tell(self, text: str) -> None:
        """Something of a case failed."""
        self._errors.print(f"  {text}", markup=False)

    def done(self, rows: list[Record]) -> None:
        """A case has these rows."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
        if self._bar is None or self._trial:  # on a terminal the table has them in the end
            for row in rows:
                self._results.print(report.line(row, self._trial), markup=False)


def table(value: Record) -> Table:
    """All rows: green within the bar, red above it, yellow where the best peer is faster by more than both scatter."""
    found = Table(title=f"{value['machine'].get('device', '')}, {value['machine'].get('commit', '')}", title_style="")
    for k, name in enumerate(report.head(value)):
        found.add_column(name, justify="left" if k < 2 else "right", overflow="fold", no_wrap=name == "shape")
    for row in value["rows"]:
        names = report.head(value)
        found.add_row(*(_styled(row, n, c) for n, c in zip(names, report.cells(value, row), strict=True)))
    return found


def _styled(row: Record, name: str, text: str) -> str:
    safe = escape(text)
    if name not in BACKENDS:
        return safe
    if meets(row, name) is False:
        return f"[red]{safe}[/red]"
    if slower_than_peer(row, name):
        return f"[yellow]{safe}[/yellow]"
    return f"[green]{safe}[/green]" if meets(row, name) else safe


def changed(found: list[Change]) -> Table:
    """A line for each change, old to new."""
    out = Table("row", "backend", "old", "new", "new / old", "")
    for c in found:
        new, ratio = ("-", "-") if c.new is None else (f"{c.new.value:.3f}x", f"{c.ratio:.3f}")
        kind = f"[{'green' if c.kind == FASTER else 'red'}]{c.kind}[/]" if c.kind else ""
        out.add_row(escape(c.row), c.backend, f"{c.old.value:.3f}x", new, ratio, kind)
    return out


def verdicts(value: Record) -> list[str]:
    """What misses its bar or is slower than a peer, a line for each."""
    return [
        f"{name_of(row)}, {backend}: {said}"
        for row in value["rows"]
        for backend in BACKENDS
        if (said := report.verdict(row, backend))
    ]
