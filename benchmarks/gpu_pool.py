"""Worker processes of `gpu_check.py`, and how the time is shared out among kernels and directions."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import gpu_cases as cases
import torch
from gpu_calls import Options, Record, perform

from kgen.runtime.injection import injected


def work(pipe: Connection, device_name: str, options: Options, inject: str | None, big: Any) -> None:
    """Say "ready", answer a task with records, and again, until told None.

    A CUDA error that leaves the process unusable ends it, after "broken".
    """
    torch.set_num_threads(1)
    device = torch.device(device_name)
    found = cases.targets()
    with injected(inject) if inject else contextlib.nullcontext():
        pipe.send("ready")
        while (task := pipe.recv()) is not None:
            for record in perform(found[task.target], task, device, options, big):
                pipe.send(record)
                # As torch, CuPy and Triton name it.
                if record["status"] != "refused" and "CUDA" in record.get("message", ""):
                    pipe.send("broken")
                    os._exit(1)
            pipe.send("ready")


@dataclass
class Group:
    """The tasks of one kernel in one direction, in order, and the worker seconds that they have taken."""

    tasks: list[cases.Task]
    weight: float
    begun: int = 0
    ended: int = 0
    spent: float = 0.0

    @property
    def due(self) -> float:
        """Seconds over the weight, those under way counted as the others took; the least is next."""
        each = self.spent / self.ended if self.ended else 1.0
        return (self.spent + (self.begun - self.ended) * max(each, 0.05)) / self.weight


class Shares:
    """Which task is next: one of the group that has had the least of the time, for its weight."""

    def __init__(self, queue: list[cases.Task], found: list[cases.Target]) -> None:
        sorted_out: dict[tuple[int, str], list[cases.Task]] = defaultdict(list)
        for task in queue:
            sorted_out[task.target, task.direction].append(task)
        # Packaged kernels have twice the share, as each stands for many calls of models.
        self.groups = {key: Group(tasks, 1.0 if found[key[0]].on_cpu else 2.0) for key, tasks in sorted_out.items()}

    def next(self) -> cases.Task | None:
        """A task to begin, None where all have been."""
        open_ = [g for g in self.groups.values() if g.begun < len(g.tasks)]
        if not open_:
            return None
        group = min(open_, key=lambda g: g.due)
        group.begun += 1
        return group.tasks[group.begun - 1]

    def ended(self, task: cases.Task, seconds: float) -> None:
        """Count a task that was begun."""
        group = self.groups[task.target, task.direction]
        group.ended += 1
        group.spent += seconds

    @property
    def begun(self) -> int:
        """How many tasks have been begun."""
        return sum(g.begun for g in self.groups.values())


class Pool:
    """Worker processes, each with one task at a time; None is that of one which is starting."""

    def __init__(self, count: int, devices: list[str], options: Options, inject: str | None) -> None:
        self.context = mp.get_context("spawn")
        self.devices = itertools.cycle(devices)
        self.arguments = (options, inject, self.context.Semaphore(2 * len(devices)))
        self.workers: dict[Connection, Any] = {}
        self.busy: dict[Connection, tuple[cases.Task | None, float]] = {}
        for _ in range(count):
            self.start()

    def start(self) -> None:
        """Add a worker."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(theirs, next(self.devices), *self.arguments), daemon=True)
        process.start()
        theirs.close()
        self.workers[ours] = process
        self.busy[ours] = (None, time.time())

    def drop(self, pipe: Connection) -> None:
        """End a worker."""
        process = self.workers.pop(pipe)
        self.busy.pop(pipe, None)
        process.kill()
        process.join()
        pipe.close()

    def run(
        self, queue: list[cases.Task], found: list[cases.Target], seconds: float, patience: float
    ) -> tuple[list[Record], int]:
        """Records, and how many tasks were begun: none later than `seconds` after the first worker was ready."""
        records: list[Record] = []
        told, until = time.time(), float("inf")
        shares = Shares(queue, found)
        while True:
            for pipe in list(self.workers):
                if pipe not in self.busy and time.time() < until and (task := shares.next()) is not None:
                    pipe.send(task)
                    self.busy[pipe] = (task, time.time())
            if not self.busy or time.time() > until + patience:
                return records, shares.begun
            for pipe in wait(list(self.busy), timeout=1.0):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    message = "broken"
                if message == "ready":
                    task, since = self.busy.pop(pipe)
                    until = min(until, time.time() + seconds)
                    if task is not None:
                        shares.ended(task, time.time() - since)
                elif message == "broken":
                    self.lost(pipe, records, found, shares, "the process ended")
                else:
                    records.append(message)
            for pipe, (_, since) in list(self.busy.items()):
                if time.time() - since > patience:
                    self.lost(pipe, records, found, shares, f"no end after {patience:.0f} s")
            if time.time() - told > 30:
                told = time.time()
                count = Counter(r["status"] for r in records)
                print(f"{shares.begun} of {len(queue)} tasks begun; {dict(count)}", flush=True)

    def lost(
        self, pipe: Connection, records: list[Record], found: list[cases.Target], shares: Shares, why: str
    ) -> None:
        """Note the task of a worker that is gone, and start another worker."""
        task, since = self.busy[pipe]
        if task is None:
            raise RuntimeError(f"a worker process did not start: {why}")
        shares.ended(task, time.time() - since)
        records.append({
            "target": found[task.target].name, "direction": task.direction, "dtype": task.dtype, "width": task.width,
            "layout": task.layout, "rows": -1, "values": "", "backend": "both", "status": "crashed", "message": why,
        })  # fmt: skip
        self.drop(pipe)
        self.start()

    def close(self) -> None:
        """End all workers."""
        for pipe in list(self.workers):
            self.drop(pipe)
