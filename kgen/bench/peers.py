"""What runs beside ours: eager torch, `torch.compile`, Liger, QuACK, cut-cross-entropy, where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from kgen.bench.work import Run

EAGER, COMPILED, LIGER, QUACK, CUT = "eager", "torch.compile", "Liger", "QuACK", "cut-cross-entropy"
PEERS = (EAGER, COMPILED, LIGER, QUACK, CUT)
_PACKAGES = {LIGER: "liger-kernel", QUACK: "quack-kernels", CUT: "cut-cross-entropy"}
_MODULES = {LIGER: "liger_kernel", QUACK: "quack", CUT: "cut_cross_entropy"}

Function = Callable[..., Any]


class NotInstalled(ImportError):
    """A peer that is not here, or lacks what it needs."""


def attribute(peer: str, module: str, name: str) -> Any:
    """`name` of a module of a peer. Raises NotInstalled, or AttributeError for a version that has no such name."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        missing, own = error.name or "", _MODULES[peer]
        if missing in ("", own):
            raise NotInstalled("not installed") from error
        lacks = f"this version has no {missing}" if missing.startswith(f"{own}.") else f"it needs {missing}"
        raise NotInstalled(f"not installed: {lacks}") from error


def versions() -> dict[str, str]:
    """Of the peers that are packages of their own."""
    out: dict[str, str] = {}
    for package in _PACKAGES.values():
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out


def fresh(function: Function, *, again: bool = False) -> Function:
    """`torch.compile` of `function` for the shapes of its first call alone, with nothing left of earlier compiles.

    again: the backward pass will run more than once through one graph, whose memory it then must leave alone.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1  # one kernel at a time: a pool of workers starts slower
    functorch_config.donated_buffer = not again
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def forward(function: Function, inputs: Sequence[torch.Tensor]) -> Run:
    """The call of `function`, recording no gradients."""

    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return Run(call)


def gradient(
    function: Function, inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], restore: bool = False
) -> Run:
    """The backward pass of `function` at `inputs`, through autograd; `restore`: it overwrites what it is given."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    given = [t.clone() for t in cotangents] if restore else list(cotangents)
    results = function(*leaves)
    results = tuple(results) if isinstance(results, tuple | list) else (results,)

    def put_back() -> None:
        for leaf, t in zip(leaves, inputs, strict=True):
            leaf.data.copy_(t)  # not an operation that autograd would count as a change of what it saved
        for d, t in zip(given, cotangents, strict=True):
            d.copy_(t)

    return Run(lambda: torch.autograd.grad(results, leaves, given, retain_graph=True), put_back if restore else None)


def torchs(
    plain: Function, inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor] | None = None
) -> dict[str, Callable[[], Run]]:
    """Eager torch and a fresh `torch.compile` of `plain`: forward, or with `cotangents` the backward pass."""

    def make(function: Function) -> Run:
        return forward(function, inputs) if cotangents is None else gradient(function, inputs, cotangents)

    return {EAGER: lambda: make(plain), COMPILED: lambda: make(fresh(plain, again=cotangents is not None))}
