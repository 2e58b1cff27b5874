"""One build for each key, however many threads ask for it at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from kgen.dsl.locks import lock

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_all: WeakSet[SingleFlight[Any, Any]] = WeakSet()


class SingleFlight(Generic[K, V]):
    """A dictionary whose missing values are built once.

    The first thread to ask for a key builds; those that ask meanwhile wait for it and share its value or its exception.
    A failure is not kept: the next to ask after it builds again. A process that is forked meanwhile has not the thread
    that builds, and builds for itself.
    """

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._flights: dict[K, Future[V]] = {}
        self._lock = lock()
        _all.add(self)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value of `key` if it is there already."""
        return self._values.get(key)

    def get_or_build(self, key: K, build: Callable[[], V]) -> V:
        """The value of `key`, from `build()` where it is missing. `build` must not ask for the same key."""
        found = self._values.get(key)
        if found is not None:
            return found
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                return found
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if not leads:
            return flight.result()
        try:
            value = build()
        except BaseException as error:
            with self._lock:
                self._flights.pop(key, None)
            flight.set_exception(error)
            raise
        with self._lock:
            self._values[key] = value
            self._flights.pop(key, None)
        flight.set_result(value)
        return value

    def clear(self) -> None:
        """Forget every value; builds in progress finish for those who wait."""
        with self._lock:
            self._values.clear()


def _forked() -> None:
    for each in tuple(_all):
        each._flights.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
