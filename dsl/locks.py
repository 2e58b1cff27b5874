"""Locks that a process which was forked finds free.

A fork copies the memory and one thread. A lock that another thread held at that moment would be held in the copy for
good, as with the workers of a data loader that are started while a thread compiles.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_all: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """A lock."""
    made = threading.Lock()
    _all.add(made)
    return made


def rlock() -> Any:
    """A lock that its holder may take again."""
    made = threading.RLock()
    _all.add(made)
    return made


def _forked() -> None:
    for each in tuple(_all):
        each._at_fork_reinit()  # as the standard library does with its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
