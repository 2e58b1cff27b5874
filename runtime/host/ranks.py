"""The process group of a call: which ranks its collectives go over."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from kgen.runtime.errors import ArgumentError

# In the environment of a walk: the group, None where there is nothing to reduce. No name of a program has a space.
GROUP = "process group"


def resolved(name: str, group: Any) -> Any:
    """The group of a call of op `name` with `group=`: None is the default one. None where it has a single rank, or
    torch.distributed is not initialised. Raises ArgumentError for what is no group of this process."""
    if not distributed.is_available() or not distributed.is_initialized():
        if group is not None:
            raise ArgumentError(f"{name}: group= is given, and torch.distributed is not initialised in this process")
        return None
    found = distributed.group.WORLD if group is None else group
    if not isinstance(found, distributed.ProcessGroup):
        hint = "this process is not in that group" if found is distributed.GroupMember.NON_GROUP_MEMBER else "pass None"
        raise ArgumentError(
            f"{name}: group must be a torch.distributed.ProcessGroup or None, got a {type(found).__name__}; {hint}"
        )
    return found if found.size() > 1 else None


def size(group: Any) -> int:
    """The ranks of what `resolved` gave."""
    return 1 if group is None else group.size()


def all_reduce(t: torch.Tensor, kind: str, group: Any) -> None:
    """`t` becomes the `kind` (`max`, `sum`) over the ranks of `group`, on torch's current stream."""
    if not t.numel():
        return
    op = distributed.ReduceOp.MAX if kind == "max" else distributed.ReduceOp.SUM
    if t.is_contiguous():
        distributed.all_reduce(t, op, group=group)
        return
    whole = t.contiguous()
    distributed.all_reduce(whole, op, group=group)
    t.copy_(whole)
