"""What sizes do the dimensions of a kernel have in one call, and do the arguments agree on them?

Shared by every executor, so that a wrong shape is told in the same words whoever runs the kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.errors import KgenError

Shape = tuple[int, ...]

_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class ShapeError(KgenError):
    """The shapes of a call's tensors do not fit the kernel's signature."""


def signature_shape(tensor: ir.Tensor) -> str:
    """The shape as the signature writes it, for example `[*M, N]`."""
    parts = [str(p) for p in tensor.shape]
    if tensor.star:
        parts[0] = "*" + parts[0]
    return "[" + ", ".join(parts) + "]"


def constants(kernel: ir.Kernel) -> dict[str, int]:
    """The kernel's integer compile-time parameters by name."""
    return {name: int(v) for name, v in kernel.consts if isinstance(v, int) and not isinstance(v, bool)}


def bind_dims(kernel: ir.Kernel, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The value of every dimension of `kernel`, found from the shapes of its tensors.

    `shapes` holds the shape of every `in` and `inout` tensor; those of `out` tensors may be given and are then checked.
    A starred dimension is the product of the leading dimensions behind it. A dimension is taken from where it stands
    alone (`N`) or in a linear form (`2*N + 1`); other shapes (`D // 2`) are only checked. Sizes may be torch's symbolic
    integers, and dimensions are then too.

    Raises ShapeError naming the argument with the expected and the found shape: an absent or unknown argument, a wrong
    rank, sizes that disagree, leading dimensions that differ, a `require` that is not met, a dimension that no
    argument determines.
    """
    known = {t.name for t in kernel.tensors}
    for name in shapes:
        if name not in known:
            raise ShapeError(f"{kernel.name}: there is no tensor argument '{name}'; it takes {_listing(known)}")
    flat: dict[str, Shape] = {}
    for t in kernel.tensors:
        if t.name in shapes:
            flat[t.name] = _flattened(kernel, t, tuple(shapes[t.name]))
        elif t.role != "out":
            raise ShapeError(f"{kernel.name}: tensor argument '{t.name}' of shape {signature_shape(t)} is missing")
    leading_shapes(kernel, shapes)

    env = constants(kernel)
    source: dict[str, str] = {}
    given = [t for t in kernel.tensors if t.name in flat]
    # Sizes that stand alone first, so that a mismatch is reported against the plainest place.
    for linear in (False, True):
        for _ in kernel.dims:
            for t in given:
                for poly, size in zip(t.shape, flat[t.name], strict=True):
                    found = _solve(poly, size, env, linear)
                    if found is not None:
                        env[found[0]] = found[1]
                        source[found[0]] = t.name
    for dim in kernel.dims:
        if dim not in env:
            for t in given:
                if any(p.symbols - env.keys() == {dim} and p.coefficient(dim) for p in t.shape):
                    raise ShapeError(
                        f"{kernel.name}: argument '{t.name}' must have shape {signature_shape(t)} for a whole number "
                        f"{dim} >= 0, got shape {tuple(shapes[t.name])}"
                    )
            raise ShapeError(
                f"{kernel.name}: dimension {dim} does not follow from the shapes of the tensor arguments; "
                f"it must be a dimension of its own in at least one of them"
            )
    for t in given:
        _check(kernel, t, flat[t.name], tuple(shapes[t.name]), env, source)
    for r in kernel.requires:
        left, right = _value(kernel, r.left, env), _value(kernel, r.right, env)
        if not _COMPARE[r.op](left, right):
            used = sorted((r.left.symbols | r.right.symbols) & set(kernel.dims))
            at = ", ".join(f"{d} = {env[d]}" for d in used)
            raise ShapeError(
                f"{kernel.name}: requires {r.left} {r.op} {r.right}, but the arguments give {left} and {right}"
                + (f" ({at})" if at else "")
            )
    return {dim: env[dim] for dim in kernel.dims}


def leading_shapes(kernel: ir.Kernel, shapes: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
    """The dimensions behind each starred dimension: `{"M": (2, 3)}` where `x: T[*M, N]` has shape (2, 3, N).

    Raises ShapeError where two tensors with the same starred dimension differ in it.
    """
    out: dict[str, Shape] = {}
    first: dict[str, str] = {}
    for t in kernel.tensors:
        if not t.star or t.name not in shapes:
            continue
        shape = tuple(shapes[t.name])
        key = str(t.shape[0])
        lead = shape[: len(shape) - len(t.shape) + 1]
        if out.setdefault(key, lead) != lead:
            raise ShapeError(
                f"{kernel.name}: argument '{t.name}' of shape {signature_shape(t)} must have leading dimensions "
                f"{out[key]} as '{first[key]}' has, got shape {shape}"
            )
        first.setdefault(key, t.name)
    return out


def full_shape(tensor: ir.Tensor, dims: Mapping[str, int], leading: Mapping[str, Shape]) -> Shape:
    """The shape of `tensor` in a call, with the caller's leading dimensions for a starred one.

    `dims` must also hold the kernel's integer constants where shapes mention them. A starred dimension that no
    argument has (`leading` lacks it) stays flat.
    """
    flat = flat_shape(tensor, dims)
    return (*leading.get(str(tensor.shape[0]), flat[:1]), *flat[1:]) if tensor.star else flat


def flat_shape(tensor: ir.Tensor, dims: Mapping[str, int]) -> Shape:
    """The shape of `tensor` in a call with a starred dimension flattened."""
    return tuple(p.evaluate(dims) for p in tensor.shape)


def _listing(names: set[str]) -> str:
    return ", ".join(f"'{n}'" for n in sorted(names))


def _flattened(kernel: ir.Kernel, t: ir.Tensor, shape: Shape) -> Shape:
    rank = len(t.shape)
    if t.star:
        if len(shape) < rank - 1:
            raise ShapeError(
                f"{kernel.name}: argument '{t.name}' must have at least {_count(rank - 1)} for "
                f"{signature_shape(t)}, got shape {shape}"
            )
        cut = len(shape) - rank + 1
        product = 1
        for s in shape[:cut]:
            product *= s
        return (product, *shape[cut:])
    if len(shape) != rank:
        raise ShapeError(
            f"{kernel.name}: argument '{t.name}' must have {_count(rank)} for {signature_shape(t)}, got shape {shape}"
        )
    return shape


def _count(rank: int) -> str:
    return f"{rank} dimension" + ("" if rank == 1 else "s")


def _solve(poly: Poly, size: int, env: Mapping[str, int], linear: bool) -> tuple[str, int] | None:
    """The one unknown dimension of `poly == size` and its value; None if there is not exactly one, or no such value."""
    name = poly.as_symbol
    if not linear:
        return (name, size) if name is not None and name not in env else None
    unknown = [s for s in poly.symbols if s not in env]
    if len(unknown) != 1:
        return None
    name = unknown[0]
    factor = poly.coefficient(name)
    if factor is None:
        return None
    try:
        slope = factor.evaluate(env)
        rest = size - poly.substitute({name: 0}).evaluate(env)
    except ZeroDivisionError:
        return None
    if slope == 0 or rest % slope or rest // slope < 0:
        return None
    return name, rest // slope


def _value(kernel: ir.Kernel, poly: Poly, env: Mapping[str, int]) -> int:
    try:
        return poly.evaluate(env)
    except ZeroDivisionError:
        at = ", ".join(f"{d} = {env[d]}" for d in sorted(poly.symbols))
        raise ShapeError(f"{kernel.name}: {poly} divides by zero with {at}") from None


def _check(
    kernel: ir.Kernel, t: ir.Tensor, flat: Shape, shape: Shape, env: Mapping[str, int], source: Mapping[str, str]
) -> None:
    expected = tuple(_value(kernel, p, env) for p in t.shape)
    if expected == flat:
        return
    i = next(i for i, (a, b) in enumerate(zip(expected, flat, strict=True)) if a != b)
    because = [
        f"{d} = {env[d]} by '{source[d]}'" for d in sorted(t.shape[i].symbols) if source.get(d, t.name) != t.name
    ]
    sizes = [str(e) for e in expected]
    if t.star:
        sizes[0] = "*" + sizes[0]
    raise ShapeError(
        f"{kernel.name}: argument '{t.name}' must have shape {signature_shape(t)} = [{', '.join(sizes)}]"
        + (f" ({', '.join(because)})" if because else "")
        + f", got shape {shape}"
    )
