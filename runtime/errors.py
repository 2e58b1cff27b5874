"""Mistakes of a call, as opposed to mistakes of a source file: what was passed, and who should run it."""

from __future__ import annotations

from kgen.dsl.errors import KgenError


class ArgumentError(KgenError):
    """An argument of a kernel call that does not fit the kernel's signature. The text names kernel and argument."""


class BackendError(KgenError):
    """A backend that is unknown, cannot run here, or failed to run. The text says what to install or to change."""
