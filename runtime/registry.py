"""Backends: which there are, whether they can run here, and which one a call takes.

A backend is what a user asks for (`cuda`, `triton`, `reference`); an executor is what it is on one kind of device. The
choice, strongest first: the `backend=` argument of the call, `with kgen.backend(...)`, `kgen.set_backend(...)`, the
environment variable KGEN_BACKEND, `auto`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from kgen.runtime.errors import BackendError

if TYPE_CHECKING:
    import torch

    from kgen.runtime.backends.base import Executor

BACKENDS = ("cuda", "triton", "reference")
CHOICES = ("auto", *BACKENDS)

_context: ContextVar[str | None] = ContextVar("kgen_backend", default=None)
_process: str | None = None  # by set_backend
_environment: str | None = None  # KGEN_BACKEND, once it has been read
_executors: dict[tuple[str, str], Executor] = {}


class BackendStatus(NamedTuple):
    """One backend on one device: the executor it stands for, and, where it cannot run, why and what to install."""

    name: str
    executor: str
    device: str
    available: bool
    reason: str | None


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Calls inside the `with` block, in this thread or task, take backend `name` unless they name one themselves.

    Raises BackendError for a name that is none of auto, cuda, triton, reference.
    """
    token = _context.set(_valid(name, "kgen.backend(...)"))
    try:
        yield
    finally:
        _context.reset(token)


def set_backend(name: str | None) -> None:
    """Make `name` the process's default; None takes that back, and KGEN_BACKEND is read again."""
    global _process, _environment
    _process = None if name is None else _valid(name, "kgen.set_backend(...)")
    if name is None:
        _environment = None


def requested(name: str | None) -> str:
    """The backend that a call with `backend=name` asks for: one of `CHOICES`."""
    if name is not None:
        return name if name in CHOICES else _valid(name, "backend=")
    return _context.get() or _process or _from_environment()


def _from_environment() -> str:
    global _environment
    if _environment is None:
        # Read once: a look into the environment costs as much as everything else in a launch.
        _environment = _valid(os.environ.get("KGEN_BACKEND") or "auto", "KGEN_BACKEND")
    return _environment


def _valid(name: object, where: str) -> str:
    if not isinstance(name, str) or name not in CHOICES:
        raise BackendError(f"{where} got {name!r}; the backends are {', '.join(CHOICES)}")
    return name


def resolve(choice: str, device: torch.device) -> Executor:
    """The executor of backend `choice` for tensors on `device`.

    `auto` is, on a GPU, the first of cuda, triton, reference that can run; on the CPU, reference. Raises BackendError
    with one sentence on what is missing where the backend that was asked for cannot run.
    """
    if choice == "auto":
        for name in BACKENDS if device.type == "cuda" else ("reference",):
            executor = executor_for(name, device)
            if executor.why_unavailable(device) is None:
                return executor
        raise BackendError(f"no backend can run on {device}")  # the reference always can where torch can
    executor = executor_for(choice, device)
    reason = executor.why_unavailable(device)
    if reason is not None:
        raise BackendError(f"backend '{choice}' cannot run on {device}: {reason}")
    return executor


def executor_for(name: str, device: torch.device) -> Executor:
    """The executor that backend `name` is on `device`, whether or not it can run."""
    key = (name, "cuda" if device.type == "cuda" else "cpu")
    found = _executors.get(key)
    if found is None:
        found = _executors.setdefault(key, _make(*key))
    return found


def _make(name: str, device: str) -> Executor:
    # Imported on demand: a missing part must not keep the others from working.
    if name == "reference":
        from kgen.runtime.backends.reference import Reference

        return Reference()
    if name == "cuda" and device == "cuda":
        from kgen.runtime.backends.cuda import Cuda

        return Cuda()
    if name == "cuda":
        from kgen.runtime.backends.host import CudaHost

        return CudaHost()
    if device == "cuda":
        from kgen.runtime.backends.triton import Triton

        return Triton()
    from kgen.runtime.backends.triton_cpu import TritonInterpreter

    return TritonInterpreter()


def backends(device: str | torch.device | None = None) -> tuple[BackendStatus, ...]:
    """Every backend on `device` (default: the current GPU, or the CPU where there is none), usable or not."""
    import torch  # here, so that choosing a backend needs no torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    out = []
    for name in BACKENDS:
        executor = executor_for(name, where)
        reason = executor.why_unavailable(where)
        out.append(BackendStatus(name, executor.name, str(where), reason is None, reason))
    return tuple(out)
