"""`kgen show --stage cost`: what a kernel or an op moves and computes, as tables and as plain data."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kgen.cli.app import UsageError
from kgen.dsl.knobs import WARP

if TYPE_CHECKING:
    from kgen.codegen.cost import Cost
    from kgen.codegen.machines import Machine
    from kgen.dsl.affine import Poly
    from kgen.runtime.cost import Floor, KernelCost, LaunchCost
    from kgen.runtime.host.cost import OpCost

_NAMES = {
    "add": "additions", "mul": "multiplications", "division": "divisions", "special": "special functions",
    "other": "comparisons, choices, others", "integer": "on integers and bools",
}  # fmt: skip
_BINDS = {
    "memory": "memory", "special": "special-function units", "f32": "f32 units", "f64": "f64 units",
    "matrix": "matrix units",
}  # fmt: skip


_STEP = 64  # the most of a step's text that is shown


def machine_of(gpu: str | None, arch: str, arch_given: bool) -> Machine:
    """The machine called `gpu`; where none is named, the first of the table that has the architecture `arch`.

    Raises UsageError for a name that is not in the table, and for an architecture that is not the named machine's.
    """
    from kgen.codegen.machines import MACHINES

    if gpu is None:
        found = next((m for m in MACHINES.values() if m.arch == arch.rstrip("af")), None)
        if found is None:
            raise UsageError(f"--arch {arch}: no machine with it is known; name one: --gpu {', '.join(MACHINES)}")
        return found
    if gpu.lower() not in MACHINES:
        raise UsageError(f"--gpu: there is no machine '{gpu}' here; they are {', '.join(MACHINES)}")
    found = MACHINES[gpu.lower()]
    if arch_given and arch.rstrip("af") != found.arch:
        raise UsageError(f"--arch {arch}: {found.title} is {found.arch}; leave --arch out, or name another --gpu")
    return found


# ---- text ----------------------------------------------------------------------------------------------------------


def kernel_text(c: KernelCost) -> str:
    """The cost of a kernel: what it must do, its floor, and a column for each launch of each backend."""
    out = [*_head(c.kernel.name, c.dims, c.machine), "", *_must(c.cost, c.dims), ""]
    out += [*_floor_lines(c.floor, c.machine), ""]
    compiled = {b: found for b, found in c.backends.items() if not isinstance(found, str)}
    if any(len(found) > 1 for found in compiled.values()):  # a table each, so that they fit a terminal
        out += [f"{_launch_table([(b, la) for la in found])}\n" for b, found in compiled.items()]
    elif compiled:
        out.append(_launch_table([(b, la) for b, found in compiled.items() for la in found]))
    out += [f"{b}: {found}" for b, found in c.backends.items() if isinstance(found, str)]
    return "\n".join(out)


def op_text(c: OpCost) -> str:
    """The cost of an op: a line for each step, and the sum."""
    rows = [
        (
            _short(s.text),
            str(s.times),
            _bytes(s.moved),
            _count(s.flops),
            _seconds(s.floor.seconds),
            _BINDS[s.floor.bound],
        )
        for s in c.steps
    ]
    total = ("together", "", _bytes(c.moved), _count(c.flops), _seconds(c.seconds), "")
    table = _table(("step", "times", "bytes", "FLOPs", "floor", "bound by"), [*rows, total], right=(1, 2, 3, 4))
    matrix = f"matrix products: {_count(c.matrix_flops)} FLOPs, {_seconds(c.matrix_seconds)} of the floor"
    chunks = [f"# {chunk}: {n} rows" for chunk, n in c.chunks.items()]
    return "\n".join([*_head(c.name, c.dims, c.machine), *chunks, "", table, "", matrix])


def _short(text: str) -> str:
    return text if len(text) <= _STEP else text[: _STEP - 3] + "..."


def _head(name: str, dims: Mapping[str, int], machine: Machine) -> list[str]:
    sizes = ", ".join(f"{d} = {n}" for d, n in dims.items())
    return [f"# {name}{f' for {sizes}' if sizes else ''}", f"# {machine.title}, {machine.arch}: {_rate(machine)}"]


def _rate(m: Machine) -> str:
    sheet = f"{m.bandwidth / 1e12:.2f} TB/s"
    rate = f"{m.achievable / 1e12:.2f} TB/s measured of {sheet}" if m.achievable else f"{sheet} by its data sheet"
    return f"{m.multiprocessors} multiprocessors, {rate}"


def _must(own: Cost, dims: Mapping[str, int]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for m in own.moved:
        part = "" if m.whole else "  (a part of it)"
        for what, p in (("read", m.read), ("written", m.written)):
            if p.terms:
                rows.append((f"{m.tensor.name} {what}", _bytes(p.evaluate(dims)), f"{p}{part}"))
    rows.append(("together", _bytes(own.bytes.evaluate(dims)), str(own.bytes)))
    moved = _table(("bytes that must move", "", ""), rows, right=(1,))
    w = own.work
    found: list[tuple[str, ...]] = []
    for kind, p in w.counts.items():
        if p.terms:
            found.append((_NAMES[kind], _count(p.evaluate(dims)), str(p)))
            if kind == "special":
                found += [(f"  {fn}", _count(q.evaluate(dims)), str(q)) for fn, q in w.functions.items()]
            if kind == "add" and w.fused.terms:
                found.append(("  fused with a product", _count(w.fused.evaluate(dims)), str(w.fused)))
    flops = w.flops
    found.append(("FLOPs", _count(flops.evaluate(dims)), str(flops)))
    flops_a_byte = flops.evaluate(dims) / max(1, own.bytes.evaluate(dims))
    found.append(("FLOPs a byte", f"{flops_a_byte:.2f}", ""))
    return [moved, "", _table(("operations", "", ""), found, right=(1,))]


def _floor_lines(f: Floor, m: Machine) -> list[str]:
    rest = ", ".join(f"{_BINDS[what]} {_seconds(t)}" for what, t in f.times.items() if what != f.bound)
    how = "measured copies" if m.copies else "its data sheet's rate, which no kernel reaches"
    return [f"floor {_seconds(f.seconds)}: bound by {_BINDS[f.bound]} ({rest}); memory by {how}"]


def _launch_table(launches: Sequence[tuple[str, LaunchCost]]) -> str:
    several = len(launches) > len({b for b, _ in launches})
    head = ("", *(f"{b}: {la.asked.name}" if several else b for b, la in launches))
    columns = [_column(b, la) for b, la in launches]
    rows = [(what, *(c[what] for c in columns)) for what in columns[0]]
    return _table(head, rows, right=range(1, len(head)))


def _column(backend: str, la: LaunchCost) -> dict[str, str]:
    s, used, fits, a = la.schedule, la.used, la.occupancy, la.asked
    threads = str(s.threads) if s.cluster == 1 else f"{s.threads} in each of {s.cluster} blocks"
    threads += f" ({s.threads // WARP} warps)" if backend == "triton" else ""
    chunks = (
        "".join(f", {axis} by {n}" for axis, n in s.chunks)
        + (", held" if s.held else "")
        + (f", {s.stages} in flight" if s.stages > 1 else "")
    )
    again = sum(r.again for r in a.requests)
    passes = max((r.passes for r in a.requests), default=0)
    spills = used.spill_store_bytes + used.spill_load_bytes
    blocks = "" if s.cluster == 1 else " block" if fits.programs == 1 else " blocks"
    by = ", ".join(fits.limited_by) if fits.programs else "one program does not fit"
    return {
        "schedule": f"{s.name}{chunks}" if s.name else "given",
        "chosen by": s.by,
        "threads a program": threads,
        "rows a program": f"{s.rows} points" if s.name == "flat" else str(s.rows),
        "programs": f"{a.programs:_}".replace("_", " "),
        "loads": _bytes(a.read),
        "of that again": _bytes(again),
        "stores": _bytes(a.written),
        "passes over a row": str(passes),
        "registers a thread": str(used.registers),
        "spilled bytes a thread": str(spills),
        "shared memory": f"{used.shared_bytes} B static + {la.dynamic_shared} B dynamic",
        "programs a multiprocessor": f"{fits.programs}{blocks} ({fits.share:.0%} of its warps)",
        "limited by": by,
        "waves": f"{la.waves:.2f}",
        "bytes in flight": f"{_bytes(la.in_flight)} of {_bytes(round(la.machine.in_flight))} needed",
        "memory": _seconds(la.floor.times["memory"]),
        **{_BINDS[what]: _seconds(t) for what, t in la.floor.times.items() if what != "memory"},
        "floor": f"{_seconds(la.floor.seconds)}, {_BINDS[la.floor.bound]}",
    }


def _table(head: Iterable[str], rows: Iterable[tuple[str, ...]], right: Iterable[int]) -> str:
    from rich.console import Console
    from rich.table import Table

    ends = set(right)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="", show_edge=False)
    for i, title in enumerate(head):
        table.add_column(title, justify="right" if i in ends else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    text = io.StringIO()
    Console(file=text, width=10_000, color_system=None, highlight=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().split("\n"))


def _bytes(n: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.4g} {unit}" if n < 1000 * size else f"{n / size:.0f} {unit}"
    return f"{n} B"


def _count(n: int) -> str:
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return str(n)


def _seconds(t: float) -> str:
    return f"{t * 1e3:.4g} ms" if t >= 1e-3 else f"{t * 1e6:.3g} us"


# ---- data ----------------------------------------------------------------------------------------------------------


def kernel_data(c: KernelCost) -> dict[str, Any]:
    """The cost of a kernel for a program to read: bytes, operations and seconds as numbers, and polynomials as text."""
    own, w = c.cost, c.cost.work
    return {
        "kernel": c.kernel.name,
        "dims": dict(c.dims),
        "machine": _machine_data(c.machine),
        "bytes": {
            "tensors": {
                m.tensor.name: {"read": _pair(m.read, c.dims), "written": _pair(m.written, c.dims), "whole": m.whole}
                for m in own.moved
            },
            "read": _pair(own.read, c.dims),
            "written": _pair(own.written, c.dims),
            "moved": _pair(own.bytes, c.dims),
        },
        "operations": {
            **{kind: _pair(p, c.dims) for kind, p in w.counts.items()},
            "fused": _pair(w.fused, c.dims),
            "functions": {fn: _pair(p, c.dims) for fn, p in w.functions.items()},
            "flops": _pair(w.flops, c.dims),
        },
        "floor": _floor_data(c.floor),
        "backends": {
            b: {"unavailable": found} if isinstance(found, str) else {"launches": [_launch_data(la) for la in found]}
            for b, found in c.backends.items()
        },
    }


def op_data(c: OpCost) -> dict[str, Any]:
    """The cost of an op for a program to read."""
    return {
        "op": c.name,
        "dims": dict(c.dims),
        "chunks": dict(c.chunks),
        "machine": _machine_data(c.machine),
        "steps": [
            {"step": s.text, "direction": s.direction, "times": s.times, "bytes": s.moved, "flops": s.flops}
            | {"floor": _floor_data(s.floor)}
            for s in c.steps
        ],
        "bytes": c.moved,
        "flops": c.flops,
        "matrix_flops": c.matrix_flops,
        "matrix_seconds": c.matrix_seconds,
        "seconds": c.seconds,
    }


def _machine_data(m: Machine) -> dict[str, Any]:
    return {
        "name": m.name,
        "title": m.title,
        "arch": m.arch,
        "multiprocessors": m.multiprocessors,
        "bandwidth": m.bandwidth,
        "achievable_bandwidth": m.achievable,
        "in_flight_needed": m.in_flight,
    }


def _pair(p: Poly, dims: Mapping[str, int]) -> dict[str, Any]:
    return {"value": p.evaluate(dims), "formula": str(p)}


def _floor_data(f: Floor) -> dict[str, Any]:
    return {"seconds": f.seconds, "bound": f.bound, "times": dict(f.times)}


def _launch_data(la: LaunchCost) -> dict[str, Any]:
    s, used, fits = la.schedule, la.used, la.occupancy
    return {
        "name": la.asked.name,
        "schedule": {
            "name": s.name,
            "by": s.by,
            "threads": s.threads,
            "rows": s.rows,
            "vector": s.vector,
            "chunks": dict(s.chunks),
            "stages": s.stages,
            "cluster": s.cluster,
            "peeled": s.peeled,
            "held": s.held,
        },
        "programs": la.asked.programs,
        "requests": {
            r.tensor: {"read": r.read, "written": r.written, "again": r.again, "passes": r.passes}
            for r in la.asked.requests
        },
        "registers": used.registers,
        "spill_bytes": used.spill_store_bytes + used.spill_load_bytes,
        "static_shared_bytes": used.shared_bytes,
        "dynamic_shared_bytes": la.dynamic_shared,
        "programs_per_multiprocessor": fits.programs,
        "occupancy": fits.share,
        "limits": dict(fits.limits),
        "limited_by": list(fits.limited_by),
        "waves": la.waves,
        "in_flight_bytes": la.in_flight,
        "floor": _floor_data(la.floor),
    }
