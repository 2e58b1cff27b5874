"""Which calls of kernels were recognised."""

from __future__ import annotations

from typing import Any

import pytest

from kgen.runtime.kernel import Kernel

# Calls of one signature that no guard knows: it is prepared at the first, and guards are made at the second.
UNKNOWN = 2


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that no guard recognised."""
    seen: list[str] = []
    before = Kernel._looked_up

    def counted(self: Kernel, *arguments: Any) -> Any:
        seen.append(self.name)
        return before(self, *arguments)

    monkeypatch.setattr(Kernel, "_looked_up", counted)
    return seen
