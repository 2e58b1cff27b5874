"""`kgen tune OP`: which algorithm is the fastest for the matrix products of an op, at given sizes, on this device?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.codegen.host import plan
from kgen.codegen.torch_dtypes import TORCH
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.errors import KgenError
from kgen.runtime.products import multiply
from kgen.runtime.products.cublaslt import Library, Product, Unsupported
from kgen.runtime.products.problem import Problem
from kgen.runtime.products.table import Measured
from kgen.runtime.tune_measure import MakeTimer, device_timer
from kgen.runtime.tune_search import search

_CHECKED = 64  # rows of the result that are held against float64
_AT_ONCE = 1 << 26  # values of the right factor at once, in float64
# A sum of k terms in f32 by a tensor core, which adds at least 8 side by side, and what is around it.
_LANES, _FEW = 8, 1e2
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_SMALLEST = 2.0**-24  # of f16, whose subnormals are rounded to multiples of it


@dataclass(frozen=True)
class Outcome:
    """What became of a product: `result`, or `failed`, why there is none. wrong: algorithms that are off, which are
    bugs. figures: each algorithm with its median in microseconds."""

    problem: Problem
    result: Measured | None
    failed: str = ""
    wrong: tuple[str, ...] = ()
    figures: tuple[dict[str, Any], ...] = ()


# ---- which products ------------------------------------------------------------------------------------------------


Shapes = Callable[[plan.View], tuple[Any, tuple[Any, ...]]]
"""Of a view: its dtype and its shape, in polynomials."""


def products_of(p: plan.Plan, sizes: Mapping[str, int], shapes: Shapes) -> list[Problem]:
    """The products of the plan `p` that other algorithms than torch's choice are known for, at sizes of dimensions and
    chunks. Those of a last chunk that is smaller are left to the nearest."""
    found: dict[Problem, None] = {}
    for s in _matmuls((*p.forward, *p.backward)):
        for accumulate in {s.accumulate, s.accumulate and s.first is None}:
            problem = _problem(s, sizes, shapes, accumulate)
            if problem is not None and s.plus is None:
                found[problem] = None
    return list(found)


def _matmuls(steps: Sequence[plan.Step]) -> Iterator[plan.Matmul]:
    for s in steps:
        if isinstance(s, plan.Matmul):
            yield s
        elif isinstance(s, plan.Loop):
            yield from _matmuls(s.body)


def _problem(s: plan.Matmul, sizes: Mapping[str, int], shapes: Shapes, accumulate: bool) -> Problem | None:
    """By tensors that have a shape alone: how they lie is what a call has, contiguous."""
    made = []
    for v in (s.out, s.left, s.right):
        dtype, shape = shapes(v)
        rows, columns = (d.evaluate(sizes) for d in shape)
        if v.transposed:
            made.append(torch.empty(columns, rows, dtype=TORCH[dtype], device="meta").t())
        else:
            made.append(torch.empty(rows, columns, dtype=TORCH[dtype], device="meta"))
    return Problem.of(made[0], made[1], made[2], accumulate)


# ---- which algorithm -----------------------------------------------------------------------------------------------


@dataclass
class Operands:
    """Random matrices of one problem on a device: normal values."""

    out: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def of(p: Problem, device: torch.device) -> Operands:
        """Of the problem's sizes, dtypes and transposes, with rows as far apart as they are."""
        g = torch.Generator(device).manual_seed(0)

        def matrix(rows: int, columns: int, transposed: bool, leading: int, dtype: str) -> torch.Tensor:
            down, along = (columns, rows) if transposed else (rows, columns)
            whole = torch.empty(down, leading, dtype=TORCH[DTYPES[dtype]], device=device)
            for block in whole.split(max(1, (1 << 27) // leading)):  # normal values are made in f32
                block.copy_(torch.randn(block.shape, generator=g, device=device))
            part = whole[:, :along]
            return part.t() if transposed else part

        k, (left, right, out) = p.kind, p.leading
        return Operands(
            matrix(p.rows, p.columns, False, out, k.out),
            matrix(p.rows, p.inner, k.transposed[0], left, k.dtype),
            matrix(p.inner, p.columns, k.transposed[1], right, k.dtype),
        )

    def off(self, product: Callable[[], object], accumulate: bool) -> float:
        """Run it: the largest error of some rows of the result in units of its bound; infinite where one is NaN."""
        rows = torch.randperm(len(self.left), device=self.left.device)[:_CHECKED]
        before = self.out[rows].double() if accumulate else torch.zeros_like(self.out[rows], dtype=torch.float64)
        if not accumulate:
            self.out.fill_(float("nan"))
        product()
        left, worst = self.left[rows].double(), 0.0
        terms = (self.left.shape[1] / _LANES + _FEW) * _ROUNDING[torch.float32]
        columns = max(1, _AT_ONCE // self.right.shape[0])
        for i in range(0, self.right.shape[1], columns):
            c = slice(i, i + columns)
            right = self.right[:, c].double()
            made, size = left @ right, before[:, c].abs() + left.abs() @ right.abs()
            ref = before[:, c] + made
            # The library may round a product to the dtype of the result before it is added.
            rounded = ref.abs() + made.abs() if accumulate else ref.abs()
            bound = rounded * _ROUNDING[self.out.dtype] + size * terms + _SMALLEST
            ratio = (self.out[rows][:, c].double() - ref).abs() / bound
            worst = max(worst, float(ratio.nan_to_num(math.inf, math.inf).max()))
        return worst


def measure(
    p: Problem,
    library: Library,
    device: torch.device,
    driver: str,
    *,
    until: float = math.inf,
    timer: MakeTimer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Time every algorithm for `p` beside torch's choice, those with right results.

    One of them is the result where its median is below torch's by more than measurements vary. Raises KgenError where
    torch's own product is off, or the matrices and what checks them do not fit the device.
    """
    try:
        return _measure(p, library, device, driver, until, timer, clock)
    except torch.OutOfMemoryError:
        raise KgenError("the matrices, and what checks them, do not fit the memory of the device") from None


def _measure(
    p: Problem,
    library: Library,
    device: torch.device,
    driver: str,
    until: float,
    timer: MakeTimer | None,
    clock: Callable[[], float],
) -> Outcome:
    operands = Operands.of(p, device)
    out, left, right, accumulate = operands.out, operands.left, operands.right, p.kind.accumulate

    def by_torch() -> None:
        multiply.by_torch(out, left, right, None, accumulate)

    if not (off := operands.off(by_torch, accumulate)) <= 1:
        raise KgenError(f"torch's own product is off by {off:.3g} times its bound")
    try:
        algorithms = library.algorithms(p)
    except Unsupported as error:
        return Outcome(p, None, str(error))
    runs: list[Callable[[], object]] = [by_torch]
    configs: list[Mapping[str, int]] = [{}]
    wrong: list[str] = []
    for a in algorithms:
        run = _run(library.product(p, a), operands)
        try:
            off = operands.off(run, accumulate)
        except Unsupported:
            continue
        if off <= 1:
            runs.append(run)
            configs.append(a.config)
        else:
            wrong.append(f"{dict(a.config)} is WRONG: off by {off:.3g} times the bound")
    if accumulate:
        out.zero_()
    found = search(len(runs), (timer or device_timer(device))(runs, lambda: None), until=until, clock=clock)
    result = Measured(
        p.kind, p.sizes, configs[found.best], found.us, found.default_us, found.spread_us, len(runs), driver,
        library.version,
    )  # fmt: skip
    figures = [{"algorithm": dict(configs[i]), "us": round(us, 3)} for i, us in found.medians.items()]
    return Outcome(p, result, wrong=tuple(wrong), figures=tuple(sorted(figures, key=lambda f: f["us"])))


def _run(product: Product, o: Operands) -> Callable[[], None]:
    def run() -> None:
        if not product(o.out, o.left, o.right):
            raise Unsupported("the library does not take it")

    return run
