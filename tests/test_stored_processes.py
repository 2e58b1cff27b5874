"""Stored calls of several processes at once: every one is right, what was stored is whole, and a process that is killed
while it writes costs nobody more than what it did not write. On the CUDA driver of `driver_kit`."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_kit import FakeDriver, machine, needs_compiler
from test_stored import CALLS, entries, path, planned, scaled, whole
from typer.testing import CliRunner

from kgen.cli import app
from kgen.runtime import cache, stored
from kgen.runtime.backends import driver

__all__ = ["machine", "path"]
pytestmark = [
    needs_compiler,
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
FORK = multiprocessing.get_context("fork")
COUNT = 4


def forgotten(machine: FakeDriver) -> None:
    """Make the forked process like one that has just started."""
    torch.set_num_threads(1)
    cache.CACHE.clear_memory()
    driver.loaded.clear()
    machine.programs.clear()
    stored._kept = 0


def together(machine: FakeDriver, work: Callable[[int], Any], count: int = COUNT) -> list[Any]:
    """What `work(rank)` returns in each of `count` processes. Raises where one of them did."""
    cache.temporary_folder("fake")  # shared, and removed by this process
    start, found = FORK.Barrier(count), FORK.Queue()

    def run(rank: int) -> None:
        try:
            forgotten(machine)
            start.wait(60)
            found.put((rank, work(rank), None))
        except BaseException as error:
            found.put((rank, None, f"{type(error).__name__}: {error}"))

    workers = [FORK.Process(target=run, args=(rank,)) for rank in range(count)]
    for w in workers:
        w.start()
    results = sorted(found.get(timeout=120) for _ in workers)
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0] * count
    assert [error for _, _, error in results] == [None] * count
    return [result for _, result, _ in results]


def leftovers(path: Path) -> list[Path]:
    return list(path.parent.rglob(".tmp-*"))


def test_the_same_and_other_calls_at_once(path: Path, machine: FakeDriver) -> None:
    def work(rank: int) -> list[bool]:
        right: list[bool] = []
        names = list(CALLS)
        # All start with the same call; then each goes its own way through the same ones, and through some of its own.
        for name in (names[0], *names[rank:], *names[:rank]):
            call, expected = CALLS[name]
            right.append(torch.equal(planned(path, call)[0], expected))
        for rows in (10 + rank, 20):
            right.append(torch.equal(planned(path, scaled(whole(rows, 8)))[0], 4 * whole(rows, 8)))
        return right

    for right in together(machine, work):
        assert all(right)
    assert not leftovers(path) and len(entries(path.parent)) == len(CALLS) + COUNT + 1
    for call, expected in (*CALLS.values(), *((scaled(whole(n, 8)), 4 * whole(n, 8)) for n in (10, 13, 20))):
        result, plans = planned(path, call)
        assert torch.equal(result, expected) and plans == 0


def test_a_cache_that_is_emptied_meanwhile(path: Path, machine: FakeDriver) -> None:
    def work(rank: int) -> list[bool]:
        warnings.simplefilter("ignore")  # a folder that is gone when it is written to is told once
        if rank == 0:
            return [CliRunner().invoke(app, ["cache", "clear"]).exit_code == 0 for _ in range(40)]
        right: list[bool] = []
        for _ in range(4):
            for call, expected in CALLS.values():
                right.append(torch.equal(planned(path, call)[0], expected))
        return right

    for right in together(machine, work):
        assert all(right)
    call, expected = CALLS["workspaces"]
    for _ in range(2):
        result, plans = planned(path, call)
        assert torch.equal(result, expected)
    assert plans == 0


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_is_killed_while_it_writes(
    path: Path, machine: FakeDriver, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """At each file that it writes, before and after that gets its name."""
    call, expected = CALLS["workspaces"]
    cache.temporary_folder("fake")
    replace = os.replace
    for n in itertools.count():
        monkeypatch.setenv("KGEN_CACHE_DIR", str(path.parent / f"cache-{moment}-{n}"))
        ours, theirs = FORK.Pipe()

        def run(n: int = n, theirs: Any = theirs) -> None:
            forgotten(machine)
            left = itertools.count()

            def held(source: str, target: str) -> None:
                if Path(source).name.startswith(".tmp-") and next(left) == n:
                    if moment == "after":
                        replace(source, target)
                    theirs.send("writes")
                    signal.pause()
                replace(source, target)

            cache.os.replace = held
            planned(path, call)
            theirs.send("done")

        worker = FORK.Process(target=run)
        worker.start()
        assert ours.poll(60)
        said = ours.recv()
        if said == "writes":
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        worker.join(60)
        assert bool(leftovers(path)) == (said == "writes" and moment == "before")
        if said == "done":
            assert n > 2  # it has written files of the file, of the kernel and of the call, or this tests nothing
            break
        forgotten(machine)
        for attempt in range(2):
            result, plans = planned(path, call)
            assert torch.equal(result, expected) and plans <= 1 - attempt
        assert CliRunner().invoke(app, ["cache", "clear"]).exit_code == 0
        assert not leftovers(path)
