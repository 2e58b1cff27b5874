"""What a call of an op may choose without changing what is computed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from kgen.codegen.host import sizing
from kgen.runtime.errors import ArgumentError

ACCUMULATE = ("auto", "param", "f32")


@dataclass(frozen=True)
class Options:
    """What a call may choose without changing what is computed: see `HostOp.__call__`."""

    workspace_mb: float
    accumulate: str
    chunk: int | None

    @staticmethod
    def of(name: str, workspace_mb: float | None, accumulate: str, chunk: int | None) -> Options:
        """Checked, with the defaults filled in. Raises ArgumentError, which names the argument."""
        if not isinstance(accumulate, str) or accumulate not in ACCUMULATE:
            raise ArgumentError(f"{name}: accumulate must be one of {', '.join(ACCUMULATE)}, got {accumulate!r}")
        if workspace_mb is None:
            workspace_mb = _workspace_from_environment()
        elif not _is(workspace_mb, Real) or not workspace_mb > 0.0 or not math.isfinite(workspace_mb):
            raise ArgumentError(f"{name}: workspace_mb must be a positive number of MiB or None, got {workspace_mb!r}")
        if chunk is not None and (not _is(chunk, Integral) or chunk < 1):
            raise ArgumentError(f"{name}: chunk must be a positive whole number of rows or None, got {chunk!r}")
        return Options(float(workspace_mb), accumulate, None if chunk is None else int(chunk))


def _is(value: Any, kind: type) -> bool:
    """Whether `value` is a number of that kind: True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _workspace_from_environment() -> float:
    text = os.environ.get("KGEN_WORKSPACE_MB", "")
    try:
        value = float(text) if text else sizing.DEFAULT_MB
    except ValueError:
        value = 0.0
    if not value > 0.0 or not math.isfinite(value):
        raise ArgumentError(f"KGEN_WORKSPACE_MB must be a positive number, got {text!r}")
    return value
