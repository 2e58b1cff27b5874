"""`kgen tune` of an op: the matrix products of its program."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kgen.cli.app import INTERRUPTED, UsageError, err, out, write_json
from kgen.cli.files import split_kernel
from kgen.dsl.errors import KgenError

if TYPE_CHECKING:
    from kgen.dsl.host import ast as host
    from kgen.runtime.ahead import Choices
    from kgen.runtime.host.op import HostOp
    from kgen.runtime.products.cublaslt import Library
    from kgen.runtime.products.problem import Problem
    from kgen.runtime.products.table import Measured
    from kgen.runtime.products.tune import Outcome
    from kgen.runtime.tune import Machine


@dataclass(frozen=True)
class OpTask:
    """An op to tune at sizes, with the rows of a chunk that a budget gives, in MiB, and sums over chunks held in a way
    of `kgen.runtime.host.options.ACCUMULATE`."""

    op: HostOp
    how: Choices
    workspace_mb: float
    accumulate: str


def op_of(text: str) -> tuple[HostOp, tuple[dict[str, Any], ...]] | None:
    """The op that `FILE:OP`, or the name of one that comes with kgen, names, and the usual sizes of such a one; None
    where it names no op."""
    import importlib.resources

    from kgen.runtime.host.op import HostOp as Made
    from kgen.runtime.loading import load, load_packaged

    path, name = split_kernel(text)
    if name is not None and path.is_file():
        module = load(path)
        found = module.get(name)
        return (found, ()) if isinstance(found, Made) else None
    if not text.isidentifier() or path.exists():
        return None
    folder = importlib.resources.files("kgen.ops")
    usual = [u for u in json.loads((folder / "tuned_sizes.json").read_text("utf-8")) if u.get("op") == text]
    for file in sorted(f.name for f in folder.iterdir() if f.name.endswith(".kdsl")):
        module = load_packaged(file)
        if text in module and isinstance(module[text], Made):
            return module[text], tuple(usual)
    return None


def declared(op: HostOp) -> host.Op:
    """`op` as its file has it."""
    return next(o for o in op.module.ops if o.name == op.name)


def tasks_of(
    op: HostOp,
    usual: Sequence[Mapping[str, Any]],
    how: Choices,
    sizes: Sequence[Mapping[str, int]],
    workspace_mb: Sequence[float],
    accumulate: str | None,
) -> list[OpTask]:
    """What to tune of `op`: at `sizes`, else at its usual ones, else at those of its example."""
    from kgen.codegen.host.sizing import DEFAULT_MB

    if usual and not sizes and not how.dims:
        return [
            OpTask(
                op, replace(how, dims=u["dims"], dtype=how.dtype or u.get("dtype"), without=_absent(how, u)), mb,
                accumulate or held,
            )
            for u in usual
            for held, budgets in u["workspace_mb"].items()
            for mb in workspace_mb or budgets
        ]  # fmt: skip
    # Of an op that comes with kgen, optional tensors that are not usual are absent here too.
    how = replace(how, without=_absent(how, usual[0] if usual else {}))
    return [
        OpTask(op, replace(how, dims={**how.dims, **dims}), mb, accumulate or "auto")
        for dims in sizes or ({},)
        for mb in workspace_mb or (DEFAULT_MB,)
    ]


def _absent(how: Choices, usual: Mapping[str, Any]) -> frozenset[str]:
    return (how.without | frozenset(usual.get("without", ()))) - how.given


def problems_of(task: OpTask) -> list[Problem]:
    """The matrix products of a task. Raises UsageError where a size is missing."""
    from kgen.runtime.host.ahead import planned
    from kgen.runtime.op_target import op_target
    from kgen.runtime.products.tune import products_of

    module, op = task.op.module, declared(task.op)
    found, sizes = planned(module, op, task.how, workspace_mb=task.workspace_mb, accumulate=task.accumulate)
    if sizes is None:
        raise UsageError(f"{task.op.name}: give the size of every dimension, as in --sizes B=8192,H=4096,V=128256")
    made = replace(op_target(module, op, task.how, None, sizes.accumulate), plan=found)
    return products_of(found, {**made.dims, **sizes.chunks}, lambda v: (made.buffer(v.buffer)[0], made.shape(v)))


def run(
    tasks: Sequence[OpTask],
    machine: Machine,
    seconds: float | None,
    again: bool,
    export: Path | None = None,
    json_file: Path | None = None,
) -> bool:
    """Tune the products of `tasks`, telling what comes out of each; each result is kept as soon as it is there. Whether
    all went well."""
    from kgen.runtime.products import table
    from kgen.runtime.products.cublaslt import library

    found = library(machine.device.index or 0)
    if found is None:
        raise KgenError("cuBLASLt, which torch brings, cannot be loaded here")
    ends = math.inf if seconds is None else time.monotonic() + seconds
    here = machine.driver, found.version
    known = {(r.kind, r.sizes): r for r in table.load(table.user_path(machine.name)) if (r.driver, r.version) == here}
    outcomes: list[Outcome] = []
    problems = list(dict.fromkeys(p for t in tasks for p in problems_of(t)))
    if not problems:
        out().print("torch alone makes these products: rows that are no multiples of 16 bytes, or no 16-bit factors")
    try:
        for p in problems:
            before = known.get((p.kind, p.sizes))
            if before is not None and not again:
                out().print(f"{_head(p)}: {_said(before)} (known)", markup=False)
                continue
            if time.monotonic() > ends:
                out().print(f"{_head(p)}: out of time", markup=False)
                continue
            outcomes.append(_measured(p, found, machine, ends))
            for line in _lines(outcomes[-1]):
                out().print(line, markup=False)
    except KeyboardInterrupt:
        err().print(INTERRUPTED)
        raise
    finally:
        if json_file is not None:
            data = {"device": machine.name, "driver": machine.driver, "products": _plain(outcomes)}
            write_json(json_file, data)
        if export is not None:
            _export(machine.name, export)
    if any(o.result is not None for o in outcomes):
        err().print(f"kept in {table.user_path(machine.name)}; KGEN_TUNED=0 does without", markup=False)
    return not any(o.failed or o.wrong for o in outcomes)


def _export(device: str, path: Path) -> None:
    from kgen.runtime.products import table

    results = table.load(table.user_path(device))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.text_of(device, results), "utf-8")
    err().print(f"{len(results)} results written to {path}", markup=False)


def show(device: str) -> None:
    """List the matrix products that are known of the device of this name."""
    from rich.table import Table

    from kgen.runtime.products import table

    for path in (table.user_path(device), table.shipped_path(device)):
        results = table.load(path)
        if not results:
            continue
        out().print(f"{path}: {len(results)} matrix products", markup=False)
        shown = Table(box=None, pad_edge=False)
        for head in ("product", "rows", "inner", "columns", "us", "torch", "cuBLASLt", "algorithm"):
            shown.add_column(head, justify="left" if head in ("product", "algorithm") else "right")
        for r in results:
            rows, columns, inner = r.sizes
            said = ", ".join(f"{n}={v}" for n, v in r.config.items() if n in ("tile", "stages", "cluster")) or "torch's"
            shown.add_row(
                str(r.kind),
                str(rows),
                str(inner),
                str(columns),
                f"{r.us:.1f}",
                f"{r.default_us:.1f}",
                str(r.version),
                said,
            )
        out().print(shown)


def _measured(p: Problem, found: Library, machine: Machine, ends: float) -> Outcome:
    import torch

    from kgen.runtime.products import table
    from kgen.runtime.products.tune import Outcome as Made
    from kgen.runtime.products.tune import measure

    try:
        outcome = measure(p, found, machine.device, machine.driver, until=ends)
    except KgenError as error:
        return Made(p, None, str(error))
    finally:
        torch.cuda.empty_cache()
    if outcome.result is not None:
        table.keep(machine.name, [outcome.result])
    return outcome


def _head(p: Problem) -> str:
    return f"{p.kind}, {p.rows}x{p.inner}x{p.columns}"


def _said(r: Measured) -> str:
    if not r.config:
        return f"{r.us:.1f} us, torch's choice stays ({r.tried} tried)"
    return f"{r.us:.1f} us, {r.default_us / r.us:.3f} times as fast as torch's choice ({r.tried} tried)"


def _lines(o: Outcome) -> Iterator[str]:
    yield (
        f"{_head(o.problem)}: {_said(o.result)}" if o.result is not None else f"{_head(o.problem)}: FAILED: {o.failed}"
    )
    yield from (f"  {w}" for w in o.wrong)


def _plain(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Every measurement as plain data."""
    return [
        {
            **o.problem.kind.data(), "sizes": list(o.problem.sizes), "failed": o.failed, "wrong": list(o.wrong),
            "result": None if o.result is None else o.result.data(), "algorithms": list(o.figures),
        }
        for o in outcomes
    ]  # fmt: skip
