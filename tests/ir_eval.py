"""Runs scheduled tile IR in float64 on NumPy arrays, chunk by chunk: what a schedule must not change the meaning of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kgen.codegen.schedule import Loop, Step
from kgen.dsl import ir
from kgen.dsl.affine import FloorDiv, Poly, Sym

Array = np.ndarray

IDENTITY = {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf}
COMBINE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
OPS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "exp": np.exp,
    "abs": np.abs, "maximum": np.maximum, "log": np.log, "isinf": np.isinf, "where": np.where, "eq": np.equal,
    "rsqrt": lambda a: 1 / np.sqrt(a), "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
}  # fmt: skip


class Machine:
    """Every program at once: parallel axes are whole, a looped axis is what the current chunk is. A value is an array
    with one dimension for each axis of the kernel, of size 1 where it lacks the axis."""

    def __init__(self, kernel: ir.Kernel, dims: Mapping[str, int], memory: dict[str, Array]) -> None:
        self.kernel, self.dims, self.memory = kernel, dims, memory
        self.names = [a.name for a in kernel.axes]
        self.index = {a.name: self._along(a.name, 0, a.extent.evaluate(dims)) for a in kernel.axes}
        self.values: dict[str, Array] = {}

    def run(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Loop):
                self._loop(step)
            else:
                for s in step.body:
                    self._statement(s)

    def _loop(self, step: Loop) -> None:
        extent = self.kernel.axis(step.axis).extent.evaluate(self.dims)
        done: dict[str, Array] = {}
        inner: set[str] = set()
        for start in range(0, extent, step.chunk):
            self.index[step.axis] = self._along(step.axis, start, min(extent, start + step.chunk))
            for s in step.body:
                self._statement(s)
                if isinstance(s, ir.Let):
                    inner.add(s.name)
                    if isinstance(s.value, ir.Reduce) and step.axis in s.value.over:
                        # Not to be used inside: the partial value is taken away.
                        part, kind = self.values.pop(s.name), s.value.kind
                        done[s.name] = COMBINE[kind](done.get(s.name, IDENTITY[kind]), part)
        for name in inner:
            self.values.pop(name, None)
        self.values |= done
        self.index[step.axis] = self._along(step.axis, 0, extent)

    def _along(self, axis: str, start: int, stop: int) -> Array:
        shape = [1] * len(self.names)
        shape[self.names.index(axis)] = -1
        return np.arange(start, stop).reshape(shape)

    def _statement(self, s: ir.Stmt) -> None:
        value = self._value(s.value)
        if isinstance(s, ir.Let):
            self.values[s.name] = value
        elif isinstance(s, ir.Store):
            at = tuple(self._poly(p) for p in s.at)
            shape = np.broadcast_shapes(value.shape, *(p.shape for p in at))
            self.memory[s.tensor][tuple(np.broadcast_to(p, shape) for p in at)] = np.broadcast_to(value, shape)
        else:
            raise NotImplementedError("accumulation over programs")

    def _value(self, e: ir.Expr) -> Array:
        match e:
            case ir.Const():
                return np.full([1] * len(self.names), e.value)
            case ir.IndexValue():
                return self._poly(e.index)
            case ir.Ref():
                return self.values[e.name]
            case ir.Load():
                at = tuple(self._poly(s) if isinstance(s, Poly) else self._value(s).astype(int) for s in e.at)
                return self.memory[e.tensor][np.broadcast_arrays(*at)[0] if len(at) == 1 else tuple(at)]
            case ir.Op():
                return OPS[e.fn](*(self._value(a) for a in e.args))
            case ir.Cast():
                return self._value(e.arg).astype(float if e.to.kind == "float" else int)
            case ir.Reduce():
                axes = tuple(self.names.index(a) for a in e.over)
                arg = self._value(e.arg)
                # A value that does not vary along an axis still counts once an index.
                shape = list(arg.shape)
                for i in axes:
                    shape[i] = self.index[self.names[i]].size
                return COMBINE[e.kind].reduce(np.broadcast_to(arg, shape), axis=axes, keepdims=True)
            case _:
                raise NotImplementedError(type(e).__name__)

    def _poly(self, p: Poly) -> Array:
        total = np.zeros([1] * len(self.names), dtype=int)
        for mono, c in p.terms:
            value: Array = np.full([1] * len(self.names), c)
            for atom in mono:
                if isinstance(atom, Sym):
                    value = value * self.index.get(atom.name, self.dims.get(atom.name))
                elif isinstance(atom, FloorDiv):
                    value = value * (self._poly(atom.num) // self._poly(atom.den))
                else:
                    value = value * (self._poly(atom.num) % self._poly(atom.den))
            total = total + value
        return total
