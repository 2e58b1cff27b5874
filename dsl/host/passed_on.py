"""Which optional tensors does an op only pass on? Whether one of these is there is no question of a check.

Where kernels take it as optional too, and nothing else follows from it, a call with it has every mistake of one without
it. So a check takes it to be there, and has half of the paths for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from kgen.dsl import ast
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host import ast as host
from kgen.dsl.host.scope import GRADIENT
from kgen.dsl.signature import Signature, TensorParam
from kgen.dsl.source import Span


def passed_on(op: host.Op, signature: Signature, kernels: Mapping[str, Signature]) -> frozenset[str]:
    """The optional tensors of `op` that stand nowhere but as an argument of a kernel that may lack it. A gradient of a
    tensor tells whether it is there as well as its name."""
    spare = {name: _spare(kernel) for name, kernel in kernels.items()}
    used = set(chain.from_iterable(_words(s.body, kernels, spare) for s in op.sections))
    optional = {t.name for t in signature.tensors if t.optional}
    return frozenset(n for n in optional if n not in used and GRADIENT + n not in used)


def _spare(kernel: Signature) -> frozenset[str]:
    """The optional tensors of a kernel from which no dtype and no size of another tensor follows."""
    needed = [t for t in kernel.tensors if t.role != "out" and not t.optional]
    known = {p.name for p in kernel.scalars}.union(*(_told(t) for t in needed))
    return frozenset(
        t.name
        for t in kernel.tensors
        if t.optional and (_of(t) - known).isdisjoint(chain.from_iterable(_of(o) for o in kernel.tensors if o is not t))
    )


def _told(t: TensorParam) -> set[str]:
    """What a call knows by a tensor: its dtype variable, and the dimensions that stand alone."""
    alone = [d for d in t.shape if d.as_symbol is not None]
    return {n for n in _of(t) if n == t.dtype or n.startswith("*") or any(d.as_symbol == n for d in alone)}


def _of(t: TensorParam) -> set[str]:
    """What the dtype and the shape of a tensor are made of; a starred dimension also as `*M`, for the dimensions that
    lie behind it."""
    stars = {f"*{t.shape[0]}"} if t.star else set[str]()
    return stars.union({t.dtype} - DTYPES.keys(), *(d.symbols for d in t.shape))


def _words(part: Any, kernels: Mapping[str, Signature], spare: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """All words of a part of a syntax tree but what is passed on."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for inner in part:  # pyright: ignore[reportUnknownVariableType]
            yield from _words(inner, kernels, spare)
    elif isinstance(part, host.Call) and part.func in kernels:
        names = [p.name for p in kernels[part.func].params]
        given = [*zip(names, part.args, strict=False), *((k.name, k.value) for k in part.keywords)]
        for name, value in given:
            if not (isinstance(value, ast.Name) and name in spare[part.func]):
                yield from _words(value, kernels, spare)
    elif hasattr(part, "__dict__") and not isinstance(part, Span):
        yield from _words(tuple(vars(part).values()), kernels, spare)
