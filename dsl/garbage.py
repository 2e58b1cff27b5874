"""Python's collector of cyclic garbage rests while the compiler works: `collected_later`.

A compiler makes many objects at a time, which has collections run all the while, and each full one walks through all
that torch has made: that takes longer than to check the largest file. What is left in cycles meanwhile, a few megabytes
for all packaged files, goes with the first collection behind.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_resting: set[object] = set()  # the spans that switch the collector on again when they end


@contextmanager
def collected_later() -> Iterator[None]:
    """As a decorator or in `with`: no collection by itself inside, in any thread.

    Spans may nest, and overlap in several threads: whoever found the collector at work sets it to work again, so one
    that was off before all of them stays off, and one that was on is on behind the last, whatever is raised.
    """
    if not gc.isenabled():
        yield
        return
    span = object()
    try:
        _resting.add(span)
        gc.disable()
        yield
    finally:
        _resting.discard(span)
        gc.enable()


def _forked() -> None:
    """A child process has none of the threads whose spans would end."""
    if _resting:
        _resting.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
