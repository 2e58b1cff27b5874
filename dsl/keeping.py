"""Where the language keeps for other processes what takes long to make. It has no such place itself: whoever puts kgen
together gives it one (`kgen/__init__.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class Store(Protocol):
        """Entries that hold what was put there or are not there at all, whatever happens to files."""

        def get(self, key: str) -> bytes | None:
            """The entry `key`, None where there is none."""
            ...

        def put(self, key: str, payload: bytes, *, told: bool = True) -> None:
            """Keep an entry, if there is a way to; `told`: whoever waits is warned where there is none."""
            ...


def _nowhere() -> Store | None:
    return None


store: Callable[[], Store | None] = _nowhere
