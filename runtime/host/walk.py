"""Takes the steps of a plan: torch for memory and matrix products, kernels for the rest.

A walk is made once for a plan and its sizes; each step is then a function of the buffers. It decides nothing: what is
computed is the program's, what is kept and freed the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kgen.codegen.host import plan
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl.affine import Poly
from kgen.dsl.check import TensorParam
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host.ir import ConstArg, ScalarArg
from kgen.runtime import events
from kgen.runtime.host import ranks
from kgen.runtime.kernel import Kernel
from kgen.runtime.products import multiply
from kgen.runtime.products.multiply import store

# The tensors and scalars of a call by name.
Env = dict[str, Any]
# A step, or what gives a tensor: of the buffers, the first row of the chunk and its number of rows.
Step = Callable[[Env, int, int], None]
Get = Callable[[Env, int, int], torch.Tensor]


class Walk:
    """The steps of one direction of `p` for sizes `dims` and chunks of `chunks` rows, on `device` by `backend`.

    `backend` is one of cuda, triton and reference; the reference multiplies matrices in float64.
    """

    def __init__(
        self,
        p: plan.Plan,
        steps: Sequence[plan.Step],
        dims: Mapping[str, int],
        chunks: Mapping[str, int],
        device: torch.device,
        backend: str,
        kernels: Mapping[str, Kernel],
    ) -> None:
        self.plan = p
        self.dims = {**dims, **chunks}
        self.device = device
        self.backend = backend
        self.kernels = kernels
        made = events.Launch(f"{p.name}: @", "library", str(device), 0)
        self._count = events.recorder(made)
        self.steps = [self._step(s) for s in steps]

    def run(self, env: Env, *, donated: bool) -> None:
        """Take all steps. `donated`: what was saved by the forward pass may be changed and handed out."""
        env[_DONATED] = donated
        if torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):  # the plan says what is converted
                self._take(env)
        else:
            self._take(env)

    def _take(self, env: Env) -> None:
        for step in self.steps:
            step(env, 0, 0)

    # -- steps ---------------------------------------------------------------------------------------------------
    def _step(self, s: plan.Step) -> Step:
        match s:
            case plan.Alloc():
                return self._alloc(s.buffer)
            case plan.Free():
                return lambda env, _, __: env.__delitem__(s.buffer)
            case plan.Own():
                return _own(s)
            case plan.Zero():
                out = self._get(s.out)
                return lambda env, i, n: _zero(out(env, i, n))
            case plan.Convert():
                return self._convert(s)
            case plan.Matmul():
                return self._matmul(s)
            case plan.Add():
                return self._add(s)
            case plan.Launch():
                return self._launch(s)
            case plan.AllReduce():
                return self._all_reduce(s)
            case plan.Loop():
                return self._loop(s)

    def _alloc(self, b: plan.Buffer) -> Step:
        shape, dtype, device, name = tuple(d.evaluate(self.dims) for d in b.shape), TORCH[b.dtype], self.device, b.name

        def step(env: Env, _: int, __: int) -> None:
            env[name] = torch.empty(shape, dtype=dtype, device=device)

        return step

    def _get(self, v: plan.View) -> Get:
        name, buffer = v.buffer, self.plan.buffers.get(v.buffer)
        # Axes that grow with a chunk: the buffer is as large as for the largest.
        own = [
            (k, d.evaluate(self.dims), self._of_chunk(d))
            for k, d in enumerate(buffer.shape if buffer is not None else ())
            if d.symbols & self._chunks()
        ]
        axes = [k for k, _ in v.chunks]
        transposed = v.transposed
        if not own and not axes:
            return (lambda env, _, __: env[name].t()) if transposed else (lambda env, _, __: env[name])

        def get(env: Env, start: int, count: int) -> torch.Tensor:
            t = env[name]
            for k in axes:
                t = t.narrow(k, start, count)
            for k, size, of in own:
                n = of(count)
                if n != size:
                    t = t.narrow(k, 0, n)
            return t.t() if transposed else t

        return get

    def _of_chunk(self, d: Poly) -> Callable[[int], int]:
        """The size `d`, of the rows of a chunk."""
        if d.as_symbol is not None:
            return lambda count: count
        (chunk,) = d.symbols & self._chunks()  # loops do not nest
        return lambda count: d.evaluate({**self.dims, chunk: count})

    def _chunks(self) -> set[str]:
        return {loop.chunk for loop in _loops(self.plan)}

    def _convert(self, s: plan.Convert) -> Step:
        out, source = self._get(s.out), self._get(s.source)
        return lambda env, i, n: store(out(env, i, n), source(env, i, n))

    def _matmul(self, s: plan.Matmul) -> Step:
        out, left, right = self._get(s.out), self._get(s.left), self._get(s.right)
        plus = None if s.plus is None else self._get(s.plus)
        product = multiply.exact if self.backend == "reference" else multiply.library
        accumulate, first, count = s.accumulate, s.first is not None, self._count

        def step(env: Env, i: int, n: int) -> None:
            c = None if plus is None else plus(env, i, n)
            product(out(env, i, n), left(env, i, n), right(env, i, n), c, accumulate and not (first and i == 0))
            count()

        return step

    def _add(self, s: plan.Add) -> Step:
        out, source = self._get(s.out), self._get(s.source)
        accumulate, first = s.accumulate, s.first is not None

        def step(env: Env, i: int, n: int) -> None:
            if accumulate and not (first and i == 0):
                out(env, i, n).add_(source(env, i, n))
            else:
                store(out(env, i, n), source(env, i, n))

        return step

    def _launch(self, s: plan.Launch) -> Step:
        kernel, backend = self.kernels[s.kernel], self.backend
        given = dict(s.arguments)
        arguments = [self._argument(given.get(p.name), p) for p in kernel.signature.params]
        results = [self._get(r) for r in s.results]

        def step(env: Env, i: int, n: int) -> None:
            out = tuple([r(env, i, n) for r in results]) if results else None
            kernel(*[a(env, i, n) for a in arguments], backend=backend, out=out)

        return step

    def _all_reduce(self, s: plan.AllReduce) -> Step:
        out, kind = self._get(s.out), s.kind
        count = events.recorder(events.Launch(f"{self.plan.name}: all_{kind}", "library", str(self.device), 0))

        def step(env: Env, i: int, n: int) -> None:
            group = env[ranks.GROUP]
            if group is not None:
                ranks.all_reduce(out(env, i, n), kind, group)
                count()

        return step

    def _argument(self, a: Any, p: Any) -> Callable[[Env, int, int], Any]:
        if isinstance(a, plan.View):
            return self._get(a)
        if isinstance(a, ScalarArg):
            name = a.name
            return lambda env, _, __: env[name]
        value = a.value if isinstance(a, ConstArg) else None if isinstance(p, TensorParam) else p.default
        if isinstance(value, int) and not isinstance(p, TensorParam) and DTYPES[p.dtype].kind == "float":
            value = float(value)
        return lambda _, __, ___: value

    def _loop(self, s: plan.Loop) -> Step:
        extent, rows = self.dims[s.dim], self.dims[s.chunk]
        body, empty = [self._step(b) for b in s.body], [self._step(b) for b in s.empty]

        def step(env: Env, _: int, __: int) -> None:
            for start in range(0, extent, rows):
                for inner in body:
                    inner(env, start, min(rows, extent - start))
            if extent == 0:
                for inner in empty:
                    inner(env, 0, 0)

        return step


_DONATED = "may change what was saved"  # no name of a program has a space


def _loops(p: plan.Plan) -> list[plan.Loop]:
    return [s for s in (*p.forward, *p.backward) if isinstance(s, plan.Loop)]


def _own(s: plan.Own) -> Step:
    def step(env: Env, _: int, __: int) -> None:
        if s.shared or not env[_DONATED]:
            env[s.buffer] = env[s.buffer].clone()

    return step


def _zero(out: torch.Tensor) -> None:
    out.zero_()
