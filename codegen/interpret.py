"""The reference interpreter: what a kernel of the tile IR means, executed with torch on any device.

It is the oracle of the tests and the `reference` backend. It takes the checker's invariants as given, but never
touches memory outside a tensor even where they are broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from kgen.codegen.execute import Executor, ScalarValue
from kgen.codegen.space import Block, floordiv, modulo
from kgen.codegen.torch_dtypes import TORCH, rounded
from kgen.dsl import ir
from kgen.dsl.dtypes import F64, DType

# Elements of the largest value held at once: 128 MiB in float64.
MAX_ELEMENTS = 1 << 24
# The same where torch records operations, and so keeps what they read: 32 MiB.
MAX_RECORDED = 1 << 22


def _sign(a: torch.Tensor) -> torch.Tensor:
    s = torch.sign(a)
    return torch.where(torch.isnan(a), a, s) if a.is_floating_point() else s  # torch gives 0 for NaN


def _sqrt(a: torch.Tensor) -> torch.Tensor:
    # torch's own of f32 is off by a unit in the last place on some CPUs; rounded from double precision none is.
    return torch.sqrt(a.to(torch.float64)).to(a.dtype)


OPS: dict[str, Callable[..., torch.Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log1p": torch.log1p,
    "sqrt": _sqrt,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "pow": torch.pow,
    "abs": torch.abs,
    "sign": _sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "where": torch.where,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": floordiv,
    "mod": modulo,
    "neg": torch.neg,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
}


def interpret(
    kernel: ir.Kernel,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, ScalarValue],
    *,
    precision: str,
    max_elements: int = MAX_ELEMENTS,
) -> dict[str, torch.Tensor]:
    """Execute `kernel` and return its `out` and `inout` tensors by name; no argument is modified.

    `tensors` holds the inputs, of any strides, all on one device, with a starred dimension as any number of leading
    dimensions; outputs come back with the same leading dimensions. `scalars` may leave out those with a default.

    precision "f32" follows the numerics contract: f16 and bf16 widen to f32, arithmetic is f32 (f64 where an operand
    is), `T(e)` rounds, a store rounds once to the tensor's dtype. precision "f64" computes every float in float64,
    takes `T(e)` to a float type as the identity and returns floats as float64, unrounded: the oracle. Integers are the
    same in both. Scalar arguments are rounded to their declared dtype in both, as any call would.

    Elements of an output that no statement writes are NaN (integers 0). The index space is executed in parts when a
    value would exceed `max_elements`; only sums over parallel indices depend on that, in their last bits.

    Raises ShapeError or ArgumentError, naming the argument.
    """
    run = Interpreter(kernel, tensors, scalars, exact=precision == "f64", max_elements=max_elements)
    run.run()
    return run.results()


def interpreted_gradients(
    kernel: ir.Kernel,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, ScalarValue],
    wanted: Sequence[str],
    incoming: Mapping[str, torch.Tensor],
    *,
    max_elements: int = MAX_RECORDED,
) -> dict[str, torch.Tensor]:
    """The gradients of the inputs `wanted`, by name, in float64 and of their shapes: what torch.autograd makes of this
    interpreter of `kernel` at precision "f64", where nothing that derives kernels has a part.

    Arguments as for `interpret`; no tensor is `inout`. `incoming` has the gradients of outputs by name, in any
    floating-point dtype; an output that it lacks has none. Torch differentiates the operations of the interpreter, and
    so also says what counts where there is no derivative: half for each of two equal operands of `maximum` and
    `minimum`, equal shares for all elements that attain a `max` or `min`, 0 for `abs` at 0, and 0 for steps.
    Conversions to a floating-point dtype are the identity there, as derivation takes them.
    """
    floats = {n: t.detach().to(torch.float64).contiguous() for n, t in tensors.items() if t.is_floating_point()}
    leaves = {n: t.requires_grad_(n in wanted) for n, t in floats.items()}
    run = _Differentiated(in_float64(kernel), {**tensors, **leaves}, scalars, wanted, incoming, max_elements)
    with torch.enable_grad():
        run.run()
    return run.gradients()


def in_float64(kernel: ir.Kernel) -> ir.Kernel:
    """`kernel` with tensors of float64 in the place of all others of floats; what it computes is as it was."""
    return replace(
        kernel, tensors=tuple(replace(t, dtype=F64) if t.dtype.kind == "float" else t for t in kernel.tensors)
    )


class Interpreter(Executor[torch.Tensor]):
    """Values are tensors, in float64 throughout where `exact`."""

    def __init__(
        self,
        kernel: ir.Kernel,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, ScalarValue],
        *,
        exact: bool,
        max_elements: int,
    ) -> None:
        super().__init__(kernel, tensors, scalars, max_elements)
        self.double = exact
        self.stored: dict[str, torch.Tensor] = {}
        self.sums: dict[str, torch.Tensor] = {}
        accumulated = {s.tensor for s in kernel.body if isinstance(s, ir.Accumulate)}
        for t in self.outputs:
            dtype = torch.float64 if exact and t.dtype.kind == "float" else TORCH[t.dtype]
            if t.role == "inout":
                self.stored[t.name] = self.flat[t.name].to(dtype, copy=True).contiguous()
            elif t.name in accumulated:
                self.stored[t.name] = torch.zeros(self.flat_shape(t), dtype=dtype, device=self.device)
            else:
                empty = math.nan if dtype.is_floating_point else 0
                self.stored[t.name] = torch.full(self.flat_shape(t), empty, dtype=dtype, device=self.device)

    def torch_dtype(self, dtype: DType) -> torch.dtype:
        """The torch type in which compute dtype `dtype` is held."""
        return torch.float64 if self.double and dtype.kind == "float" else TORCH[dtype]

    def const(self, e: ir.Const) -> torch.Tensor:
        return self.block.full(e.value, self.torch_dtype(e.dtype))

    def exact(self, t: torch.Tensor, dtype: DType) -> torch.Tensor:
        return t.to(self.torch_dtype(dtype))

    def integers(self, v: torch.Tensor) -> torch.Tensor:
        return v

    def loaded(self, e: ir.Load, v: torch.Tensor, subscripts: list[torch.Tensor]) -> torch.Tensor:
        return v

    def op(self, e: ir.Op, args: list[torch.Tensor]) -> torch.Tensor:
        return OPS[e.fn](*args).to(self.torch_dtype(e.dtype))

    def cast(self, e: ir.Cast, v: torch.Tensor) -> torch.Tensor:
        if e.to.kind == "float":
            if self.double:
                return v.to(torch.float64)
            return (rounded(v, e.to) if v.is_floating_point() else v.to(TORCH[e.to])).to(TORCH[e.dtype])
        return to_integer(v, e.to).to(TORCH[e.dtype])

    def reduce(self, e: ir.Reduce, v: torch.Tensor, over: list[int]) -> torch.Tensor:
        return reduce_tensor(e.kind, self.block.spread(v, over), over, self.torch_dtype(e.dtype))

    def store(self, s: ir.Store, v: torch.Tensor) -> None:
        target = self.kernel.tensor(s.tensor)
        self.block.write(self.stored[s.tensor], s.at, self._converted(v, target.dtype))

    def accumulate(self, s: ir.Accumulate, v: torch.Tensor) -> None:
        over = [self.block.position(a) for a in s.over]
        v = reduce_tensor("sum", self.block.spread(v, over), over, v.dtype)
        if s.tensor not in self.sums:
            self.sums[s.tensor] = torch.zeros_like(self.stored[s.tensor], dtype=v.dtype)
        self.block.write(self.sums[s.tensor], s.at, v, add=True)

    def _converted(self, v: torch.Tensor, dtype: DType) -> torch.Tensor:
        if dtype.kind != "float":
            return to_integer(v, dtype)
        if self.double:
            return v.to(torch.float64)
        return rounded(v, dtype) if v.is_floating_point() else v.to(TORCH[dtype])

    def results(self) -> dict[str, torch.Tensor]:
        """The outputs by name, in the caller's shape."""
        for name, total in self.sums.items():
            dtype = self.kernel.tensor(name).dtype
            held = self.stored[name].to(self.torch_dtype(dtype.compute))
            self.stored[name] = self._converted(held + total, dtype)
        return {t.name: self.stored[t.name].reshape(self.full_shape(t)) for t in self.outputs}


class _Differentiated(Interpreter):
    """Instead of being stored, values meet the gradients that arrive at them. Each block of the index space is
    differentiated by itself, so that no more than two are held."""

    def __init__(
        self,
        kernel: ir.Kernel,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, ScalarValue],
        wanted: Sequence[str],
        incoming: Mapping[str, torch.Tensor],
        max_elements: int,
    ) -> None:
        super().__init__(kernel, tensors, scalars, exact=True, max_elements=max_elements)
        self.leaves = {name: tensors[name] for name in wanted}
        self.flat = {name: tensors[name].reshape(t.shape) for name, t in self.flat.items()}
        self.incoming = {
            name: g.detach().to(torch.float64).reshape(self.flat_shape(kernel.tensor(name)))
            for name, g in incoming.items()
        }
        self.found = {name: torch.zeros_like(t, requires_grad=False) for name, t in self.leaves.items()}
        self._products: list[torch.Tensor] = []
        self._of: Block | None = None

    def store(self, s: ir.Store, v: torch.Tensor) -> None:
        self._receive(s, v)

    def accumulate(self, s: ir.Accumulate, v: torch.Tensor) -> None:
        self._receive(s, self.block.spread(v, [self.block.position(a) for a in s.over]))

    def _receive(self, s: ir.Store | ir.Accumulate, v: torch.Tensor) -> None:
        if self._of is not self.block:
            self._differentiate()
            self._of = self.block
        if s.tensor in self.incoming and v.requires_grad:
            self._products.append((v * self.block.read(self.incoming[s.tensor], s.at, 0.0)).sum())

    def _differentiate(self) -> None:
        if self._products:
            parts = torch.autograd.grad(self._products, list(self.leaves.values()), allow_unused=True)
            for name, g in zip(self.leaves, parts, strict=True):
                if g is not None:
                    self.found[name] += g
        self._products.clear()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of the inputs that are wanted, by name, when all has run."""
        self._differentiate()
        return self.found


def to_integer(v: torch.Tensor, dtype: DType) -> torch.Tensor:
    """`v` as the integer or bool type `dtype`, in that type's torch dtype.

    Floats truncate toward zero, saturate at the range of i32 (i64 for i64) and give 0 for NaN, as the hardware
    conversion does; integers, and those to narrower types, wrap.
    """
    if dtype.kind == "bool":
        return v != 0
    if v.is_floating_point():
        held = TORCH[dtype.compute]
        info = torch.iinfo(held)
        # -2**31 and 2**63 are exact in every float type, 2**63 - 1 is not: compare with the power of two.
        limit = 2.0 ** (dtype.compute.bits - 1)
        inside = (v >= -limit) & (v < limit)
        whole = torch.where(inside, v, torch.zeros_like(v)).to(held)
        whole = torch.where(v >= limit, torch.full_like(whole, info.max), whole)
        v = torch.where(v < -limit, torch.full_like(whole, info.min), whole)
    return v.to(TORCH[dtype])


def reduce_tensor(kind: str, v: torch.Tensor, over: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Reduce dimensions `over` of `v`, keeping them with size 1; the result has type `dtype`.

    Over no elements: sum 0, prod 1, max the lowest and min the highest value (infinite for floats), any False,
    all True, argmax and argmin 0.
    """
    if not over:
        return v.to(dtype)
    if kind == "sum":
        return v.sum(over, keepdim=True, dtype=dtype)
    if kind == "prod":
        for d in over:
            v = v.prod(d, keepdim=True, dtype=dtype)
        return v.to(dtype)
    if kind in ("any", "all"):
        f = torch.any if kind == "any" else torch.all
        for d in over:
            v = f(v, d, keepdim=True)
        return v.to(dtype)
    empty = math.prod(v.shape[d] for d in over) == 0
    if kind in ("max", "min"):
        if empty:
            shape = [1 if i in over else s for i, s in enumerate(v.shape)]
            return torch.full(
                shape, _lowest(v.dtype) if kind == "max" else _highest(v.dtype), dtype=dtype, device=v.device
            )
        return (torch.amax if kind == "max" else torch.amin)(v, over, keepdim=True).to(dtype)
    (d,) = over
    shape = [1 if i == d else s for i, s in enumerate(v.shape)]
    if empty:
        return torch.zeros(shape, dtype=dtype, device=v.device)
    extreme = (torch.amax if kind == "argmax" else torch.amin)(v, d, keepdim=True)
    hit = v == extreme
    if v.is_floating_point():
        hit = hit | torch.isnan(v)  # if any is NaN, `extreme` is, and only those hit
    iota = torch.arange(v.shape[d], device=v.device).reshape([-1 if i == d else 1 for i in range(v.dim())])
    return torch.where(hit, iota, v.shape[d]).amin(d, keepdim=True).to(dtype)


def _lowest(dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max
