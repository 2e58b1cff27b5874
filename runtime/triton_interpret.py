"""Run a generated Triton module on CPU tensors, by Triton's own semantics over numpy.

`TRITON_INTERPRET=1` decides at import time what every `@triton.jit` in the process is, and its interpreter replaces
functions of `triton.language` while it runs. Here the module's imports are answered with stand-ins instead: the same
functions of `triton.language`, bound to Triton's semantic analysis over a numpy builder of our own. Nothing outside is
touched, and any number of threads may run at once.

The builder differs from Triton's where that departs from the GPU: bf16 is rounded to nearest even (Triton's interpreter
truncates), floats saturate when they become integers, `tl.maximum` ignores NaN unless told otherwise, and libdevice is
there. Lanes of a masked load that were given no value hold poison, so that a kernel that uses one is found out.
"""

from __future__ import annotations

import builtins
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kgen.codegen.program import Arg, Program
from kgen.dsl.dtypes import BF16
from kgen.dsl.errors import KgenError


class TritonInterpretError(KgenError):
    """Triton is not installed, or its semantic analysis refused generated code."""


def run(program: Program, grid: int, values: Sequence[torch.Tensor | float | int | bool]) -> None:
    """Execute `grid` programs of `program`. `values` are its arguments in order: CPU tensors (any view; the address of
    their first element is what counts) and numbers, which are rounded to the type of their parameter.

    Raises TritonInterpretError where Triton is missing or refuses the module.
    """
    language = _language()
    kernel = _load(program.source, program.entry)
    # Tensors stay referenced by `values` while their addresses are in use.
    arguments = [language.argument(a, v) for a, v in zip(program.args, values, strict=True)]
    try:
        with np.errstate(all="ignore"):
            for index in range(grid):
                language.builder.position.index = index
                kernel(*arguments)
    except Exception as error:  # whatever numpy or Triton raise on code that should not have been generated
        raise TritonInterpretError(f"the Triton interpreter failed in {program.entry}: {error}") from error


@cache
def _load(source: str, entry: str) -> Callable[..., None]:
    """The function `entry` of the module `source`, its imports answered by the stand-ins."""
    language = _language()
    answers = {"triton": language.triton, "triton.language": language.tl, "triton.language.extra": language.extra}

    def answer(name: str, _globals: Any = None, _locals: Any = None, names: Any = (), _level: int = 0) -> Any:
        # `import a.b as c` and `import a` ask without names and get the top, `from a.b import c` asks with them.
        return answers[name] if names else answers[name.split(".")[0]]

    scope: dict[str, Any] = {
        "__builtins__": {**vars(builtins), "__import__": answer, "range": language.range},
        "__name__": f"<interpreted {entry}>",
    }
    exec(compile(source, f"<generated {entry}>", "exec"), scope)
    return scope[entry]


@cache
def _language() -> _Language:
    try:
        import triton.runtime.interpreter  # noqa: F401  # whether this Triton has what is needed
    except ImportError as error:
        raise TritonInterpretError(f"Triton is missing ({error}); install it with: pip install triton") from None
    return _Language()


class _Language:
    """The stand-ins for `triton`, `triton.language` and libdevice."""

    def __init__(self) -> None:
        import triton.language as tl
        from triton.language.semantic import TritonSemantic
        from triton.runtime.interpreter import TensorHandle

        language = self
        self._real = tl
        self._handle = TensorHandle
        self.builder = _builder()

        class Tensor(tl.tensor):
            """A block or scalar whose operators know the builder without being told."""

            def __bool__(self) -> bool:
                # The condition of an `if` is a scalar; Triton's own code asks whether an optional block is there.
                return len(self.shape) > 0 or bool(self.handle.data.item())

        self.tensor = Tensor
        semantic_class: Any = type("Semantic", (TritonSemantic,), {"tensor": Tensor})
        self._semantic = semantic_class(self.builder)
        for name, member in inspect.getmembers(tl.tensor):
            if tl.core.is_builtin(member):
                setattr(Tensor, name, self._bind(member))

        self.tl = SimpleNamespace()
        for name, member in inspect.getmembers(tl):
            if tl.core.is_builtin(member):
                setattr(self.tl, name, self._bind(member))
            elif not isinstance(member, tl.core.JITCallable):
                setattr(self.tl, name, member)
        # These are jit functions in Triton, and a program of ours is not inside a jit function.
        self.tl.multiple_of = _multiple_of
        self.tl.reduce = self._reduce
        self.tl.range = lambda *bounds, num_stages=None: language.range(*bounds)
        self.tl.static_range = language.range
        self.tl.sum = lambda x, axis: language._reduce(x, axis, lambda a, b: a + b)
        self.tl.max = lambda x, axis: language._reduce(x, axis, language.tl.maximum)
        self.tl.min = lambda x, axis: language._reduce(x, axis, language.tl.minimum)
        self.tl.cdiv = lambda a, b: (a + b - 1) // b
        self.tl.inline_asm_elementwise = lambda asm, _constraints, args, **_options: language._elementwise(
            _INSTRUCTIONS[asm]
        )(*args)
        self.tl.sigmoid = lambda x: 1 / (1 + language.tl.exp(-x))
        self.extra = SimpleNamespace(
            libdevice=SimpleNamespace(**{n: self._elementwise(f) for n, f in _LIBDEVICE.items()})
        )
        self.tl.extra = self.extra
        self.triton = SimpleNamespace(jit=_jit, language=self.tl, cdiv=lambda a, b: -(-a // b))

    def range(self, *bounds: Any) -> Iterator[Any]:
        """`range` of a loop, whose bounds and index may be scalars of the language."""
        tensor = self._real.tensor
        scalars = [b for b in bounds if isinstance(b, tensor)]
        numbers = builtins.range(*(int(b.handle.data.flat[0]) if isinstance(b, tensor) else b for b in bounds))
        if not scalars:
            yield from numbers
            return
        dtype = max((b.dtype for b in scalars), key=lambda d: d.primitive_bitwidth)
        for i in numbers:
            yield self._make(np.array([i], _numpy(dtype)).reshape(()), dtype)

    # -- values --------------------------------------------------------------------------------------------------
    def argument(self, a: Arg, value: torch.Tensor | float | int | bool) -> Any:
        """A kernel argument as the scalar or pointer that its parameter is."""
        from kgen.codegen.triton.intrinsics import TYPES

        dtype = getattr(self._real, TYPES[a.dtype.name].removeprefix("tl."))
        if a.kind == "tensor":
            assert isinstance(value, torch.Tensor)  # the caller pairs values with arguments
            pointer = self._real.pointer_type(dtype)
            return self.tensor(self._handle(np.array([value.data_ptr()], np.uint64), pointer), pointer)
        if a.dtype == BF16:
            data = _bf16_bits(np.array([float(value)], np.float64))
        else:
            data = np.array([value], _numpy(dtype))
        return self.tensor(self._handle(data, dtype), dtype)

    def _bind(self, member: Callable[..., Any]) -> Callable[..., Any]:
        def bound(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("_semantic", None)
            return self._own(member(*args, **kwargs, _semantic=self._semantic))

        return bound

    def _own(self, value: Any) -> Any:
        """`value` as a tensor of ours: some functions of `triton.language` make its plain ones."""
        if type(value) is not self._real.tensor:
            return value
        kind: Any = value.type
        return self.tensor(value.handle, kind)

    def _make(self, data: np.ndarray, dtype: Any) -> Any:
        if data.ndim == 0:
            return self.tensor(self._handle(data.reshape(1), dtype), dtype)
        return self.tensor(self._handle(data, dtype), self._real.block_type(dtype, list(data.shape)))

    def _elementwise(self, function: Callable[..., np.ndarray]) -> Callable[..., Any]:
        def apply(*args: Any) -> Any:
            operands = [self._semantic.to_tensor(a) for a in args]
            if len(operands) == 2:
                operands = list(self._semantic.binary_op_type_checking_impl(*operands))
            first = operands[0]
            data = function(*(o.handle.data for o in operands)).astype(first.handle.data.dtype)
            return self.tensor(self._handle(data, first.dtype), first.type)

        return apply

    def _reduce(self, x: Any, axis: int, combine: Callable[..., Any]) -> Any:
        """Combine the halves of the axis until one element is left, as the threads of a program do."""
        parts = x if isinstance(x, tuple) else (x,)
        dtypes = [p.dtype for p in parts]
        blocks = [np.moveaxis(np.asarray(p.handle.data).reshape([int(s) for s in p.shape]), axis, 0) for p in parts]
        while blocks[0].shape[0] > 1:
            half = blocks[0].shape[0] // 2
            halves = [[self._make(b[i], d) for b, d in zip(blocks, dtypes, strict=True)]
                      for i in (slice(0, half), slice(half, None))]  # fmt: skip
            out = combine(*halves[0], *halves[1])
            blocks = [o.handle.data for o in (out if isinstance(out, tuple) else (out,))]
        results = [self._make(b[0], d) for b, d in zip(blocks, dtypes, strict=True)]
        return tuple(results) if isinstance(x, tuple) else results[0]


def _jit(function: Callable[..., Any] | None = None, **_options: object) -> Any:
    return function if function is not None else lambda f: f


def _multiple_of(x: Any, value: int) -> Any:
    """On the GPU a promise that nothing checks; here it is checked."""
    if np.any(x.handle.data % value):
        raise ValueError(f"a value is promised to be a multiple of {value} and is not")
    return x


def _erf(x: np.ndarray) -> np.ndarray:
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _flushed(x: np.ndarray) -> np.ndarray:
    """0 for what is too small to be normal."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


_LIBDEVICE: dict[str, Callable[..., np.ndarray]] = {
    "copysign": np.copysign, "cos": np.cos, "erf": _erf, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "log2": np.log2, "pow": np.power, "rint": np.rint, "sin": np.sin, "tanh": np.tanh, "trunc": np.trunc,
}  # fmt: skip

# By the text of `tl.inline_asm_elementwise`.
_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "ex2.approx.ftz.f32 $0, $1;": lambda x: _flushed(np.exp2(x)),
    "mov.b32 $0, $1;": lambda x: x,
}


# ---- the numpy builder ---------------------------------------------------------------------------------------------


def _numpy(dtype: Any) -> np.dtype:
    from triton.runtime.interpreter import _get_np_dtype

    return _get_np_dtype(dtype)


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    """f32 or f64 rounded once to bf16, as uint16."""
    from kgen.codegen.torch_dtypes import rounded

    t = rounded(torch.from_numpy(np.ascontiguousarray(x)), BF16)
    return t.view(torch.int16).numpy().view(np.uint16)


def _saturated(x: np.ndarray, target: np.dtype) -> np.ndarray:
    """Floats as integers of type `target`: toward zero, clamped to its range, NaN as 0."""
    info = np.iinfo(target)
    # -2**31 and 2**63 are exact in every float type, 2**63 - 1 is not: compare with the power of two.
    limit = 2.0 ** (info.bits - (info.min < 0))
    inside = (x >= float(info.min)) & (x < limit)
    whole = np.where(inside, x, 0).astype(target)
    return np.where(x >= limit, info.max, np.where(x < float(info.min), info.min, whole)).astype(target)


_POISON = 0x5A


def _builder() -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

    class Builder(InterpreterBuilder):
        """Triton's numpy builder with the GPU's rounding; the only state is the program index of each thread."""

        def __init__(self) -> None:
            super().__init__()
            self.options = InterpreterOptions(sanitize_overflow=False)
            self.position = threading.local()

        def create_get_program_id(self, axis: int) -> Any:
            return TensorHandle(np.array([self.position.index if axis == 0 else 0], np.int32), tl.int32)

        def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
            if other is None:
                dtype = ptrs.get_element_ty()
                held = _numpy(dtype)
                if held.kind == "f":
                    poison = np.full(ptrs.data.shape, np.nan, held)
                elif dtype == tl.bfloat16:
                    poison = np.full(ptrs.data.shape, 0x7FC0, held)
                else:
                    poison = np.full(ptrs.data.shape, _POISON, held)
                other = TensorHandle(poison, dtype)
            return super().create_masked_load(ptrs, mask, other, *rest)

        def cast_impl(self, src: Any, dst_type: Any) -> Any:
            source, target = src.dtype.scalar, dst_type.scalar
            data = src.data
            if source == tl.bfloat16:
                data = (data.astype(np.uint32) << 16).view(np.float32)
            if target == tl.bfloat16:
                wide = data if data.dtype in (np.float32, np.float64) else data.astype(np.float32)
                return TensorHandle(_bf16_bits(wide), target)
            held = _numpy(target)
            if data.dtype.kind == "f" and held.kind in "iu":
                return TensorHandle(_saturated(data, held), target)
            return TensorHandle(data.astype(held), target)

        def create_int_cast(self, src: Any, dst_type: Any, is_signed: bool) -> Any:
            data = src.data
            if not is_signed and data.dtype.kind == "i":
                # Triton's types have no sign in the IR: it is the cast that says how a value widens.
                data = data.view(np.dtype(f"u{data.dtype.itemsize}"))
            return self.cast_impl(TensorHandle(data, src.dtype), dst_type)

        def create_splat(self, ret_ty: Any, arg: Any) -> Any:
            # Of a comparison the base class gives the type of what was compared; what it has computed are booleans.
            return TensorHandle(np.full(ret_ty.shape, arg.data.flat[0], arg.data.dtype), arg.dtype.scalar)

        def create_fma(self, x: Any, y: Any, z: Any) -> Any:
            # Rounded once: the product of two f32 is exact in f64. Of two f64 it is not.
            exact = x.data.astype(np.float64) * y.data + z.data
            return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

        def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
            return self.binary_op(lhs, rhs, np.fmax)

        def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
            return self.binary_op(lhs, rhs, np.fmin)

    return Builder()
