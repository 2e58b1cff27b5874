"""The reference interpreter of host programs: what a checked `ir.Program` means, executed without a plan.

It is the oracle of everything below the language: floats are float64 and never rounded, kernels are what
`kgen.codegen.interpret` makes of their tile IR, and a loop goes over whatever chunks it is told. It keeps for every
element whether anything was stored there, and so finds a program that reads what no statement wrote.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kgen.codegen.interpret import in_float64, interpret, to_integer
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl import ir as tiles
from kgen.dsl.check import Specialization, TensorParam, elaborate, signature_of
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES, F32, DType
from kgen.dsl.errors import KgenError
from kgen.dsl.host import ir

Number = int | float | bool


class Unwritten(KgenError):
    """A statement reads an element that nothing was stored to."""


@dataclass
class Memory:
    """A tensor of the program: float64, or integers, and which elements hold a value."""

    data: torch.Tensor
    there: torch.Tensor


@dataclass
class Execution:
    """One execution of `program`; `forward`, then `backward` as often as wanted, each on what forward left.

    dtypes: of the op's dtype variables. dims: the size of every dimension. tensors: the parameters, starred dimensions
    as one. scalars: all that the program passes on. chunks: for the dimensions of loops the rows of each chunk in
    order, together the size of the dimension; a dimension that is left out is one chunk. kernels: those made so far,
    for executions of programs of one file to share.
    """

    program: ir.Program
    dtypes: Mapping[str, DType]
    dims: Mapping[str, int]
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Number] = field(default_factory=dict)
    chunks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    kernels: dict[Hashable, tiles.Kernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory: dict[str, Memory] = {}
        self.largest = 0.0  # the largest magnitude of what was stored, and of the partial sums on the way, in any order
        self._homes = ir.homes(self.program)
        self._rows: dict[str, tuple[int, int]] = {}  # chunk of the loops that run -> first row and number of rows
        for name, t in self.tensors.items():
            self._put(name, t)

    def forward(self) -> dict[str, torch.Tensor]:
        """The outputs by name. Raises Unwritten."""
        self._take(self.program.forward)
        return {n: self._whole(t, n) for n, t in self.program.outputs.items()}

    def backward(self, upstream: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients by parameter, of the gradients of all outputs. Raises Unwritten."""
        before = {n: Memory(m.data.clone(), m.there.clone()) for n, m in self.memory.items()}
        for name, t in upstream.items():
            self._put(self.program.upstream[name], t)
        self._take(self.program.backward)
        found = {n: self._whole(t, f"d_{n}") for n, t in self.program.gradients.items()}
        self.memory = before
        return found

    def _put(self, name: str, t: torch.Tensor) -> None:
        kept = t.detach().to(torch.float64) if t.is_floating_point() else t.detach()
        self.memory[name] = Memory(kept.clone(), torch.ones_like(kept, dtype=torch.bool))

    def _whole(self, tensor: str, name: str) -> torch.Tensor:
        held = self._held(tensor)
        if not held.there.all():
            raise Unwritten(f"{self.program.name}: '{name}' is not whole")
        return held.data.clone()

    # -- statements ----------------------------------------------------------------------------------------------
    def _take(self, body: Sequence[ir.Stmt]) -> None:
        for s in body:
            match s:
                case ir.Loop():
                    self._loop(s)
                case ir.Product():
                    self._product(s)
                case ir.Convert() | ir.AllReduce():  # a rank alone has everything
                    self._store(s.target, self._read(s.source))
                case ir.Sum():
                    self._add(s.target, self._read(s.source))
                case ir.Launch():
                    self._launch(s)

    def _loop(self, s: ir.Loop) -> None:
        for target in _summed(s.body):
            # A sum over no chunks is zero.
            if self._homes.get(target.tensor) != s.chunk and not target.chunks:
                self._begun(target)
        start = 0
        for rows in self.chunks.get(s.dim, (self.dims[s.dim],)):
            self._rows[s.chunk] = start, rows
            for name, home in self._homes.items():
                if home == s.chunk:
                    self.memory.pop(name, None)
            self._take(s.body)
            start += rows
        self._rows.pop(s.chunk, None)
        assert start == self.dims[s.dim], f"chunks of {s.dim} have {start} rows of {self.dims[s.dim]}"

    def _product(self, s: ir.Product) -> None:
        left, right = self._read(s.left), self._read(s.right)
        found, size = left @ right, left.abs() @ right.abs()
        if s.plus is not None:
            plus = self._read(s.plus)
            found, size = found + plus, size + plus.abs()
        self._seen(size)
        (self._add if s.add else self._store)(s.target, found)

    def _launch(self, s: ir.Launch) -> None:
        ref = self.program.kernels[s.kernel]
        signature = signature_of(next(k for k in ref.module.kernels if k.name == ref.name), Diagnostics())
        given = dict(s.arguments)
        dtypes = {v: F32 if F32 in allowed else allowed[0] for v, allowed in signature.dtype_vars.items()}
        views = {n: a for n, a in given.items() if isinstance(a, ir.View)}
        results = {o.name: v for o, v in zip(signature.outputs, s.results, strict=True)}
        scalars: dict[str, Number] = {}
        consts: dict[str, Number] = {}
        for p in (*signature.params, *signature.outputs):
            if isinstance(p, TensorParam):
                view = views.get(p.name) or results.get(p.name)
                if view is not None and p.dtype not in DTYPES:
                    dtypes[p.dtype] = self._dtype(view.dtype)
            elif p.const or p.name in given:
                value = self._scalar(given[p.name]) if p.name in given else p.default
                assert value is not None and not isinstance(value, str)
                (consts if p.const else scalars)[p.name] = value
        present = frozenset(t.name for t in signature.tensors if t.optional and t.name in views)
        key = (s.kernel, tuple(sorted(dtypes.items())), tuple(sorted((n, repr(v)) for n, v in consts.items())), present)
        if key not in self.kernels:
            self.kernels[key] = in_float64(elaborate(ref.module, ref.name, Specialization(dtypes, consts, present)))
        kernel = self.kernels[key]
        found = interpret(kernel, {n: self._read(v) for n, v in views.items()}, scalars, precision="f64")
        for name in s.updated:
            self._store(views[name], found[name])
        for name, view in results.items():
            self._store(view, found[name])

    def _scalar(self, a: ir.Argument) -> Number:
        if isinstance(a, ir.ConstArg):
            return a.value
        assert isinstance(a, ir.ScalarArg)
        return self.scalars[a.name]

    # -- memory --------------------------------------------------------------------------------------------------
    def _dtype(self, name: str) -> DType:
        return DTYPES[name] if name in DTYPES else self.dtypes[name]

    def _held(self, tensor: str) -> Memory:
        """The memory of a tensor, which holds nothing where no statement stored anything."""
        if tensor not in self.memory:
            t = self.program.tensors[tensor]
            sizes = {**self.dims, **{c: rows for c, (_, rows) in self._rows.items()}}
            shape = tuple(d.evaluate(sizes) for d in t.shape)
            dtype = self._dtype(t.dtype)
            empty = torch.zeros(shape, dtype=torch.float64 if dtype.kind == "float" else TORCH[dtype])
            self.memory[tensor] = Memory(empty, torch.zeros(shape, dtype=torch.bool))
        return self.memory[tensor]

    def _view(self, v: ir.View) -> Memory:
        held = self._held(v.tensor)
        data, there = held.data, held.there
        for axis, chunk in v.chunks:
            start, rows = self._rows[chunk]
            data, there = data.narrow(axis, start, rows), there.narrow(axis, start, rows)
        return Memory(data.t(), there.t()) if v.transposed else Memory(data, there)

    def _read(self, v: ir.View) -> torch.Tensor:
        seen = self._view(v)
        if not seen.there.all():
            raise Unwritten(f"{self.program.name}: {v.span}: '{v.tensor}' is read where nothing was stored")
        return seen.data.clone()

    def _store(self, v: ir.View, value: torch.Tensor) -> None:
        seen = self._view(v)
        if seen.data.is_floating_point():
            seen.data.copy_(value)
            self._seen(value)
        else:
            seen.data.copy_(to_integer(value, self._dtype(self.program.tensors[v.tensor].dtype)))
        seen.there.fill_(True)

    def _seen(self, value: torch.Tensor) -> None:
        if value.numel():
            self.largest = max(self.largest, float(value.abs().max()))

    def _begun(self, v: ir.View) -> None:
        """Zero where nothing is that could be added to."""
        seen = self._view(v)
        seen.data.masked_fill_(~seen.there, 0)
        seen.there.fill_(True)

    def _add(self, v: ir.View, value: torch.Tensor) -> None:
        self._begun(v)
        held = self._view(v).data
        self._seen(held.abs() + value.abs())
        self._store(v, held + value)


def _summed(body: Sequence[ir.Stmt]) -> Iterator[ir.View]:
    for s in body:
        if isinstance(s, ir.Sum) or (isinstance(s, ir.Product) and s.add):
            yield s.target
