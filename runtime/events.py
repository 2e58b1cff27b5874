"""What the runtime has done so far: counters and a hook, for tests and tools that must prove that a kernel ran.

Counted are `launch:<executor>` (one for each kernel execution, none for a call with nothing to do), `compile:cuda` and
`compile:triton` (NVRTC or Triton was asked to compile), `load:cuda` and `load:triton` (a binary was taken from the disk
cache) and `plan` (a launch plan was made). Executors are those of `kgen.backends()`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kgen.dsl.locks import lock


class Launch(NamedTuple):
    """One execution: which kernel, on which executor (such as "cuda-host") and device, and its number of programs.

    `programs` is 0 for the reference, which does not divide the work.
    """

    kernel: str
    executor: str
    device: str
    programs: int


_lock = lock()
_counts: Counter[str] = Counter()
# Launches are counted by drawing from an iterator, one uninterruptible step: no lock on the path of every call.
_launches: dict[str, itertools.count[int]] = {}
# Those who listen now; looked at by whoever would spare a call.
listeners: tuple[Callable[[Launch], None], ...] = ()


def count(event: str, n: int = 1) -> None:
    """Add `n` to the counter of `event`."""
    with _lock:
        _counts[event] += n


def counts() -> Counter[str]:
    """A copy of all counters of this process. An event that has not happened counts 0."""
    with _lock:
        out = Counter(_counts)
        for executor, drawn in _launches.items():
            # "count(5)": the only way to read such an iterator that neither advances it nor is deprecated.
            out[f"launch:{executor}"] = int(repr(drawn).removeprefix("count(").removesuffix(")"))
    return out


def drawer(launch: Launch) -> Callable[[], int]:
    """A function that counts one execution of `launch` at each call."""
    with _lock:
        return _launches.setdefault(launch.executor, itertools.count()).__next__


def recorder(launch: Launch) -> Callable[[], None]:
    """A function that records one execution of `launch` at each call."""
    draw = drawer(launch)
    return lambda: record(launch, draw)


def record(launch: Launch, draw: Callable[[], int]) -> None:
    """Count one execution of `launch`, which `drawer` gave `draw` for, and tell it."""
    draw()
    tell(launch)


def tell(launch: Launch) -> None:
    """Tell those who listen of one execution."""
    for listener in listeners:
        listener(launch)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Collect the executions inside the `with` block, of all threads, in order.

    >>> with launches() as seen:
    ...     module.vec_add(a, b, backend="cuda")
    >>> assert [l.executor for l in seen] == ["cuda-host"]
    """
    global listeners
    seen: list[Launch] = []
    listener = seen.append
    with _lock:
        listeners = (*listeners, listener)
    try:
        yield seen
    finally:
        with _lock:
            listeners = tuple(each for each in listeners if each is not listener)
