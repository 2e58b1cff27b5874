"""Mistakes made on purpose, and the calls of tests that must fail under them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import break_kit as broken
import pytest
import runtime_mistakes as mistakes
import torch

from kgen.runtime import autograd

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
RED = (AssertionError, pytest.fail.Exception)  # what `assert` and a missing error raise


@dataclass(frozen=True)
class Seen:
    """A call of a test that fails under the mistake, by raising one of `error`."""

    test: Callable[..., None]
    args: tuple[Any, ...] = ()
    error: tuple[type[BaseException], ...] = RED


@dataclass(frozen=True)
class Break:
    """A mistake and what sees it."""

    made: Callable[[], AbstractContextManager[None]]
    seen: tuple[Seen, ...]


def by(test: Callable[..., None], *args: Any, error: type[BaseException] | None = None) -> Seen:
    """The call `test(*args)`, which must fail."""
    return Seen(test, args, RED if error is None else (error,))


def text(file: str, *edits: tuple[str, str]) -> Callable[[], AbstractContextManager[None]]:
    """Edits of a shipped `.kdsl`."""
    return functools.partial(broken.source, file, *edits)


def derived(kernel: str, *edits: tuple[str, str]) -> Callable[[], AbstractContextManager[None]]:
    """Edits of a derived backward."""
    return functools.partial(broken.backward, kernel, *edits)


def printed(backend: str, pattern: str, new: str) -> Callable[[], AbstractContextManager[None]]:
    """Edits of generated code."""
    return functools.partial(broken.printed, backend, pattern, new)


def told(change: mistakes.Told) -> Callable[[], AbstractContextManager[None]]:
    """A wrong word on the memory of tensors."""
    return functools.partial(broken.memory, change)


def running(
    change: Callable[[autograd.Training, mistakes.Run, list[Any]], Any],
) -> Callable[[], AbstractContextManager[None]]:
    """Another way to run backward kernels."""
    return functools.partial(broken.running, change)


def swapped(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    """Another attribute of a module or class."""
    return functools.partial(broken.replaced, owner, name, value)


def seen_under(b: Break) -> None:
    """Make the calls that see a mistake: they pass without it, and fail with it."""
    for seen in b.seen:
        seen.test(*seen.args)
    with b.made():
        for seen in b.seen:
            with pytest.raises(seen.error):
                seen.test(*seen.args)
