"""Operators of torch.library that write nothing they are given.

`torch.library.custom_op` puts four Python functions around each call, which take longer than a small kernel's launch
(they check what the results share memory with, ask whether the implementation for a device was disabled, dispatch a
second time behind autograd). Here a call on plain tensors that records no gradient, as all of a compiled graph are,
goes from the dispatcher to the implementation. Any other goes the way that `custom_op` goes: what is differentiated,
what modes, transforms and wrappers see, lazy negation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._library.autograd import Info, make_autograd_impl
from torch._library.utils import _c_check_aliasing_constraint

_is_grad_enabled = torch.is_grad_enabled
_library = torch.library.Library("kgen", "FRAGMENT")


# What the dispatcher has left to do behind autograd for plain tensors. Versions of what is written are counted there
# too, which is nothing here.
_BEHIND: int = torch._C._after_autograd_keyset.raw_repr()
_PLAIN = frozenset(
    (torch._C.DispatchKeySet(device) | counting).raw_repr()
    for device in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
    for counting in (torch._C.DispatchKeySet(device), torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))
)


class Operator:
    """The operator `kgen::<name>`.

    `schema` are its parameters and results. `run` computes, with the grad mode off, and writes no argument; `fake`
    makes results without values. No result may share memory with an argument or another result: where `run` does not
    make each of them itself (`fresh`), a call that breaks this raises RuntimeError. Where an argument requires grad,
    going backward through a result raises RuntimeError until a gradient is registered.
    """

    def __init__(
        self, name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, fresh: bool
    ) -> None:
        self._gradient = Info(None, None)
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        qualified = f"kgen::{name}"
        torch.library.register_fake(qualified, fake, lib=_library)
        recorded = make_autograd_impl(getattr(torch.ops.kgen, name).default, self._gradient)

        if not fresh:
            run = _checked(name, run)

        def dispatched(keys: Any, *arguments: Any) -> Any:
            if not _is_grad_enabled() and keys.raw_repr() & _BEHIND in _PLAIN:
                return run(*arguments)
            return recorded(keys, *arguments)

        def computed(*arguments: Any) -> Any:
            if not _is_grad_enabled():
                return run(*arguments)
            with torch.no_grad():  # gradients are the dispatcher's business
                return run(*arguments)

        # They may be called where dynamo traces what is called, as between two graphs of one function.
        _library.impl(name, _disable_dynamo(computed), "CompositeExplicitAutograd")
        _library.impl(name, _disable_dynamo(dispatched), "Autograd", with_keyset=True)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    ) -> None:
        """The gradient, as `torch.library.register_autograd` takes it."""
        self._gradient._backward_fn, self._gradient._setup_context_fn = backward, setup_context


def _checked(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any) -> Any:
        results = run(*arguments)
        _c_check_aliasing_constraint(name, arguments, {}, results)
        return results

    return checked
