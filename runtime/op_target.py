"""An op to be ejected: its plan, and the kernels that the plan launches, each compiled for how it is called there.

Rows may be any number in a call, and any number in a chunk. So a kernel is compiled for sizes of rows that nothing
divides and for slices that begin anywhere; all other sizes come from the user or the op's `example`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from kgen.codegen.host import plan, sizing
from kgen.codegen.host.lower import lower
from kgen.codegen.shapes import ShapeError, bind_dims
from kgen.dsl import ast
from kgen.dsl import ir as tiles
from kgen.dsl.affine import Poly
from kgen.dsl.check import Signature, Specialization, TensorParam, elaborate, example_sizes, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES, F32, DType
from kgen.dsl.host import ast as host
from kgen.dsl.host import ir
from kgen.dsl.host.check import header
from kgen.runtime.ahead import Choices, Target, contiguous, placed, specialization
from kgen.runtime.errors import ArgumentError
from kgen.runtime.host.ahead import settled
from kgen.runtime.layouts import Layout, Memory, layout

_IMPORTED = ("torch", "triton")  # by the files of an ejected op
# Rows of a call and of a chunk that stand for any number: prime, so that nothing is proved of them.
_ROWS, _CHUNK = 1021, 509


@dataclass(frozen=True)
class Called:
    """A launch of the plan: the kernel compiled for it, and its tensors by name."""

    step: plan.Launch
    target: Target
    views: Mapping[str, plan.View]


@dataclass(frozen=True)
class OpTarget:
    """An op with everything chosen that its generated code depends on.

    spec: dtypes, constants, optional tensors. program: what the plan is made of. dims: the sizes of dimensions. rows:
    those that are any number in a call; of `unsized` no size is known. accumulate: how sums over chunks are held,
    `param` or `f32`; capped: no more than `sizing.ROUNDINGS` chunks are added up in 16 bits.
    """

    op: host.Op
    signature: Signature
    spec: Specialization
    program: ir.Program
    plan: plan.Plan
    dims: Mapping[str, int]
    rows: frozenset[str]
    unsized: frozenset[str]
    accumulate: str
    capped: bool

    @property
    def name(self) -> str:
        """The op's name."""
        return self.op.name

    def dtype(self, name: str) -> DType:
        """What a dtype or dtype variable of the op is."""
        return DTYPES[name] if name in DTYPES else self.spec.dtypes[name]

    @cached_property
    def chunks(self) -> dict[str, plan.Loop]:
        """The loops by the symbol of their chunk."""
        return {loop.chunk: loop for loop in sizing.loops(self.plan)}

    @cached_property
    def header(self) -> tiles.Kernel:
        """The signature as a kernel's: the tensors that are there, with their dtypes."""
        own = header(self.op)
        tensors = tuple(
            replace(t, dtype=self.dtype(p.dtype))
            for t, p in zip(own.tensors, self.signature.tensors, strict=True)
            if not t.optional or t.name in self.spec.present
        )
        used = {n for t in tensors for d in t.shape for n in d.symbols}
        consts = tuple(sorted(self.spec.consts.items()))
        return replace(own, tensors=tensors, dims=tuple(d for d in own.dims if d in used), consts=consts)

    def buffer(self, name: str) -> tuple[DType, tuple[Poly, ...]]:
        """Dtype and shape of a buffer, a parameter or the gradient of an output."""
        if name in self.plan.buffers:
            b = self.plan.buffers[name]
            return b.dtype, b.shape
        t = self.program.tensors[name]
        return self.dtype(t.dtype), t.shape

    # -- kernels -------------------------------------------------------------------------------------------------
    @cached_property
    def calls(self) -> tuple[Called, ...]:
        """Every launch of the plan, in order. Raises ArgumentError for a kernel that no fixed code can be."""
        fixed: frozenset[str] = frozenset()
        while True:
            found = [self._called(s, fixed) for s in launches(self.plan)]
            compiled = frozenset[str]().union(*(self._compiled(c) for c in found)) & self.rows
            for d in sorted(compiled & self.unsized):
                raise ArgumentError(
                    f"{self.name}: no size is known for {d}, which is compiled into a kernel; give it (--dim {d}=...), "
                    f"or write an `example` statement into the op"
                )
            if compiled <= fixed:
                return tuple(found)
            fixed |= compiled

    @cached_property
    def compiled(self) -> dict[str, int]:
        """The dimensions whose sizes are in some kernel's code."""
        used = frozenset[str]().union(*(self._compiled(c) for c in self.calls))
        return {d: self.dims[d] for d in self.header.dims if d in used}

    def _compiled(self, c: Called) -> frozenset[str]:
        """The op's dimensions that are compiled into the kernel of a launch."""
        known = dict(c.target.layout.variant.dims)
        out: set[str] = set()
        for t in c.target.kernel.tensors:
            shape = self.shape(c.views[t.name])
            lead = len(shape) - len(t.shape) + 1 if t.star else 1  # dimensions behind the first of the kernel's
            for i, p in enumerate(t.shape):
                if p.symbols & known.keys():
                    own = shape[:lead] if i == 0 else shape[lead + i - 1 : lead + i]
                    out |= frozenset[str]().union(*(q.symbols for q in own))
        chunk = next(iter(sorted(out & self.chunks.keys())), None)
        if chunk is not None:
            raise ArgumentError(
                f"{self.name}: the rows of a chunk of {self.chunks[chunk].dim} are compiled into the kernel "
                f"{c.step.kernel}, which has them as a tile; an ejected op has chunks of any size. Make them a "
                f"parallel index there"
            )
        return frozenset(out)

    def elaborated(self, s: plan.Launch) -> tuple[ir.KernelRef, Signature, tiles.Kernel, Mapping[str, plan.View]]:
        """The kernel that a launch calls, specialised to its arguments, and its tensors by name."""
        ref = self.plan.kernels[s.kernel]
        declared = next(k for k in ref.module.kernels if k.name == ref.name)
        signature = signature_of(declared, Diagnostics())
        given = dict(s.arguments)
        views = {n: a for n, a in given.items() if isinstance(a, plan.View)}
        views |= {p.name: v for p, v in zip(signature.outputs, s.results, strict=True)}
        return ref, signature, elaborate(ref.module, ref.name, self._specialized(signature, given, views)), views

    def _called(self, s: plan.Launch, fixed: frozenset[str]) -> Called:
        ref, signature, kernel, views = self.elaborated(s)
        exact, any_rows = self._layout(kernel, views, self.rows), self._layout(kernel, views, fixed)
        wide = exact.variant.wide or any_rows.variant.wide
        where = replace(any_rows, variant=replace(any_rows.variant, wide=wide))
        return Called(s, placed(ref.module, signature, kernel, where), views)

    def _specialized(
        self, signature: Signature, given: Mapping[str, object], views: Mapping[str, plan.View]
    ) -> Specialization:
        dtypes = {v: F32 if F32 in allowed else allowed[0] for v, allowed in signature.dtype_vars.items()}
        consts: dict[str, int | float | bool] = {}
        for p in (*signature.params, *signature.outputs):
            if isinstance(p, TensorParam):
                if p.name in views and p.dtype not in DTYPES:
                    dtypes[p.dtype] = self.buffer(views[p.name].buffer)[0]
            elif p.const:
                value = self.scalar(given.get(p.name))
                value = p.default if value is None else value
                assert value is not None and not isinstance(value, str)  # the checker asks for it
                consts[p.name] = float(value) if DTYPES[p.dtype].kind == "float" else value
        present = frozenset(t.name for t in signature.tensors if t.optional and t.name in views)
        return Specialization(dtypes, consts, present)

    def scalar(self, a: object) -> int | float | bool | str | None:
        """What is passed for a scalar: a number, the name of a run-time scalar of the op, or None for the default."""
        if isinstance(a, ir.ConstArg):
            return a.value
        if isinstance(a, ir.ScalarArg):
            return self.spec.consts.get(a.name, a.name)
        return None

    def _layout(self, kernel: tiles.Kernel, views: Mapping[str, plan.View], fixed: frozenset[str]) -> Layout:
        """The layout of a launch where all rows are any number but those in `fixed`."""
        sizes = {d: _ROWS if d in self.rows - fixed else n for d, n in self.dims.items()}
        sizes |= dict.fromkeys(self.chunks, _CHUNK)
        memory = {t.name: self._memory(views[t.name], sizes) for t in kernel.tensors}
        try:
            dims = bind_dims(kernel, {n: m.shape for n, m in memory.items()})
        except ShapeError as error:
            raise ArgumentError(f"{self.name}: {error}") from None
        return layout(kernel, dims, memory)

    def _memory(self, v: plan.View, sizes: Mapping[str, int]) -> Memory:
        dtype, shape = self.buffer(v.buffer)
        whole = tuple(p.evaluate(sizes) for p in shape)
        strides = contiguous(whole)
        residue = 0
        own = list(whole)
        for axis, chunk in v.chunks:  # a slice begins a whole number of steps behind the tensor's begin
            own[axis] = sizes[chunk]
            residue = gcd(residue, strides[axis] * dtype.itemsize)
        if v.transposed:
            return Memory(tuple(reversed(own)), tuple(reversed(strides)), dtype.itemsize, residue % 16)
        return Memory(tuple(own), strides, dtype.itemsize, residue % 16)

    def shape(self, v: plan.View) -> tuple[Poly, ...]:
        """The shape of a view, in dimensions and the symbols of chunks."""
        _, shape = self.buffer(v.buffer)
        chunked = dict(v.chunks)
        own = tuple(Poly.sym(chunked[i]) if i in chunked else p for i, p in enumerate(shape))
        return tuple(reversed(own)) if v.transposed else own


def launches(p: plan.Plan) -> Iterator[plan.Launch]:
    """Every launch of both directions, in order."""
    for s in (*p.forward, *p.backward):
        if isinstance(s, plan.Loop):
            yield from (b for b in s.body if isinstance(b, plan.Launch))
        elif isinstance(s, plan.Launch):
            yield s


def op_target(
    module: ast.Module, op: host.Op, choices: Choices, gradients: Iterable[str] | None, accumulate: str
) -> OpTarget:
    """The op `op` of the checked `module` under `choices`, with the gradients of the parameters `gradients`; None: of
    all that have one. `accumulate` is one of `kgen.runtime.host.options.ACCUMULATE`.

    Raises ArgumentError for a choice that does not fit the signature, and for a dimension without a size.
    """
    signature = signature_of(op.header, Diagnostics())
    example = example_sizes(op.header)
    spec = specialization(signature, choices, example)
    there = [p for p in signature.params if isinstance(p, TensorParam) and (not p.optional or p.name in spec.present)]
    if op.name in _IMPORTED:
        raise ArgumentError(f"{op.name}: a file {op.name}.py would be imported in place of the package; rename the op")
    program, wanted = settled(module, op, signature, spec, gradients)
    dims = {**example, **choices.dims, **{n: v for n, v in spec.consts.items() if type(v) is int}}
    narrow = lower(program, spec.dtypes, wanted, "param")
    rows = {loop.dim for loop in sizing.loops(narrow)}
    for t in there:
        if t.star and t.shape[0].as_symbol is not None:
            rows.add(t.shape[0].as_symbol)
    used = {n for t in there for d in t.shape for n in d.symbols}
    missing = [d for d in signature.dims if d in used and d not in dims and d not in rows]
    if missing:
        options = " ".join(f"--dim {d}=..." for d in missing)
        raise ArgumentError(
            f"{op.name}: no size is known for {', '.join(missing)}; give {'it' if len(missing) == 1 else 'them'} "
            f"({options}), or write an `example` statement into the op"
        )
    unsized = frozenset(rows - dims.keys())
    dims |= dict.fromkeys(unsized, _ROWS)
    held = sizing.sizes(narrow, dims, sizing.DEFAULT_MB * 2**20, accumulate).accumulate
    p = narrow if held == "param" else lower(program, spec.dtypes, wanted, "f32")
    capped = accumulate == "auto" and held == "param" and bool(p.sums)
    return OpTarget(op, signature, spec, program, p, dims, frozenset(rows), unsized, held, capped)
