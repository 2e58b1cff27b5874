"""Derivatives that are not derived: the errors that say so, and the functions of torch's autograd that raise them.

Kernels and ops have one derivative, a gradient in reverse mode. Whatever else torch asks for must end in an error:
torch takes what it is told nothing of for a derivative of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kgen.dsl.errors import KgenError
from kgen.runtime.errors import ArgumentError


class Called(Protocol):
    """A kernel or an op, as errors tell of it."""

    name: str
    noun: str  # "a kernel"


class Subject(Protocol):
    """What the functions below are given first."""

    @property
    def called(self) -> Called:
        """The kernel or op that is differentiated."""
        ...


def no_forward_mode(name: str, what: str) -> ArgumentError:
    """The error for `what` of a call of kernel or op `name`, which carries a tangent."""
    return ArgumentError(
        f"{name}: {what} carries a tangent, and derivatives in forward mode are not derived; use reverse mode "
        f"(backward, torch.autograd.grad)"
    )


def second_derivative(name: str) -> KgenError:
    """The error for the gradient of a gradient of the kernel or op `name`."""
    return KgenError(f"{name}: a gradient of its gradient is asked for, and second derivatives are not derived")


def no_vmap(name: str, noun: str = "a kernel") -> ArgumentError:
    """The error for a tensor inside torch.func.vmap."""
    return ArgumentError(f"{name}: vmap does not reach into {noun}; pass tensors with a batch dimension")


class ReverseOnly(torch.autograd.Function):
    """A function in the form that torch.func takes, whose derivatives other than in reverse mode are refused.

    `apply` takes a `Subject` first.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0].called.name

    @staticmethod
    def vmap(_: Any, __: Any, subject: Subject, *rest: Any) -> Any:
        raise no_vmap(subject.called.name, subject.called.noun)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise no_forward_mode(ctx.name, "an argument")


class Once(ReverseOnly):
    """What computes gradients, and has none itself: `apply(subject, run, *arguments)` is `run(*arguments)`."""

    @staticmethod
    def forward(_: Subject, run: Callable[..., Any], *arguments: Any) -> Any:
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise second_derivative(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise no_forward_mode(ctx.name, "an argument of its gradient")
