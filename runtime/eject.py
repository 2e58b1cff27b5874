"""Generated sources that stand alone: what must someone know who launches a kernel and has no kgen?

Here in words, and as the comment above a `.cu` file; `kgen.runtime.eject_triton` has the host function that does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kgen.codegen.about import choices, literal_text, memory
from kgen.codegen.program import Arg, Program
from kgen.codegen.templating import render
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.runtime.ahead import Target
from kgen.runtime.launches import (
    derived_dims,
    device_word,
    grid,
    known_dims,
    multiprocessors,
    points,
    shares,
    workspaces,
)

# Rows that a 32-bit row index counts, less those that programs may count beyond the end (`kgen.runtime.layouts`).
MAX_POINTS = 2**31 - 1 - 2**23


def signature_text(kernel: ir.Kernel, known: dict[str, int] | None = None) -> str:
    """`rms_norm(x: bf16[*M, 4096], eps: f32) -> (y: bf16[*M, 4096])`."""
    inputs = [tensor_text(t, known or {}) for t in kernel.tensors if t.role != "out"]
    inputs += [f"{s.name}: {s.dtype}" for s in kernel.scalars]
    outputs = [tensor_text(t, known or {}) for t in kernel.tensors if t.role == "out"]
    return f"{kernel.name}({', '.join(inputs)})" + (f" -> ({', '.join(outputs)})" if outputs else "")


def tensor_text(t: ir.Tensor, known: dict[str, int]) -> str:
    shape = ", ".join(("*" if t.star and i == 0 else "") + str(p.substitute(known)) for i, p in enumerate(t.shape))
    return f"{t.name}: {'inout ' if t.role == 'inout' else ''}{t.dtype}[{shape}]"


def assumptions(target: Target, *, peeled: bool = False) -> list[str]:
    """What the code relies on, one sentence each. `peeled`: it has a program that peels its rows."""
    kernel, variant, known = target.kernel, target.layout.variant, known_dims(target)
    facts = choices(kernel, variant)
    out = [facts] if facts else []
    out += memory(kernel, variant, {n for n, _ in variant.tensors})
    dense = [n for n, c in variant.tensors if c.dense]
    if dense and peeled:
        out.append(f"on cuda, without gaps from an address on that is a multiple of 16 bytes: {', '.join(dense)}")
    merged: dict[str, list[str]] = {}
    for m in target.merges:
        extents = " and ".join(str(kernel.axis(a).extent) for a in m.axes)
        merged.setdefault(extents, []).extend(name for name, _ in m.places)
    for extents, names in merged.items():
        out.append(f"{extents} lie without gaps, one stride serves both: {', '.join(names)}")
    within = {name for m in target.merges for name, place in m.places if place == 0}
    starred = [t.name for t in kernel.tensors if t.star and t.name not in within]
    if starred:
        out.append(f"one stride serves all leading dimensions: {', '.join(starred)}")
    derived = derived_dims(target)
    for d, n in variant.multiples:
        if n > 1:
            out.append(f"{derived.get(d, Poly.sym(d))} is a multiple of {n}")
    for r in kernel.requires:
        left, right = r.left.substitute(known), r.right.substitute(known)
        if not (left.is_constant and right.is_constant):
            out.append(f"{left} {r.op} {right}")
    if not variant.wide and not points(target).is_constant:
        out.append(f"{points(target)} <= {MAX_POINTS}")
    return out


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def cuda_source(target: Target, launches: Sequence[Program]) -> str:
    """The `.cu` file: how to launch the kernel, then the kernel, or all of them where it is several launches."""
    first = launches[0]
    whole = replace(first, then=tuple(launches[1:]))
    return render(
        "cuda/eject.cu.j2",
        signature=signature_text(target.kernel, known_dims(target)),
        launches=[
            {
                "entry": p.entry,
                "grid": grid(target, p).text(),
                "threads": p.schedule.threads,
                "cluster": p.schedule.cluster,
                "shared": p.shared_bytes,
                "arguments": _columns(
                    (name, argument_text(target, p, a)) for a, name in zip(p.args, _c_names(p), strict=True)
                ),
            }
            for p in launches
        ],
        workspaces=workspace_texts(target, whole),
        shares=share_texts(target, whole),
        stars=star_texts(target),
        derived=[f"{name} = {value}" for name, value in derived_dims(target).items()],
        assumptions=assumptions(target, peeled=any(p.schedule.peeled for p in launches)),
        source=first.source,
    )


def workspace_texts(target: Target, program: Program) -> list[str]:
    """One line for each workspace: name, dtype, shape, bytes, what it must hold."""
    return _columns(
        (
            w.tensor.name,
            f"{w.tensor.dtype}[{', '.join(map(str, w.shape))}], {w.bytes} bytes, "
            + ("zero before the first launch" if w.zeroed else "need not be initialised"),
        )
        for w in workspaces(target, program)
    )


def share_texts(target: Target, program: Program) -> list[str]:
    """How the numbers of shares are chosen, one sentence each."""
    found = shares(target, program)
    if not found:
        return []
    word = device_word(target)
    return [
        *(f"{s.dim} = {s.text(word)}" for s in found),
        f"{word}: those of the device ({multiprocessors(program)} in the timings of the schedule). Any number of",
        "shares from 1 on is right; more than run at once take no less time. It alone decides the order of a sum.",
        *(
            f"Of {s.dim}, as many as cudaOccupancyMaxActiveClusters says are best: a cluster of {s.cluster} blocks "
            "needs multiprocessors that lie together."
            for s in found
            if s.cluster > 1
        ),
    ]


def _c_names(program: Program) -> list[str]:
    """The parameters' names as the emitter spelled them."""
    head = program.source.index("\n" + program.entry + "(")
    text = program.source[head + len(program.entry) + 2 : program.source.index("\n{\n", head)]
    return [p.strip().rstrip(",)").split()[-1] for p in text.strip().split("\n") if p.strip().rstrip(")")]


def argument_text(target: Target, program: Program, a: Arg) -> str:
    """What an argument of a launch is, in words."""
    known = known_dims(target) | derived_dims(target)
    kernel = target.layout.kernel if program.stage is None else program.stage.kernel
    given = {t.name for t in target.kernel.tensors}
    if a.kind == "tensor":
        if a.name not in given:
            return f"the workspace {a.name}"
        return f"data of {tensor_text(target.kernel.tensor(a.name), known_dims(target))}"
    if a.kind == "dim" and a.name not in target.layout.kernel.dims:
        return f"{a.dtype}, {a.name}"
    if a.kind == "dim":
        value = derived_dims(target).get(a.name)
        return f"{a.dtype}, the dimension {a.name}" + (f" = {value}" if value is not None else "")
    if a.kind == "stride":
        t = kernel.tensor(a.name)
        label = str(t.shape[a.axis].substitute(known))
        star = "*" if t.star and a.axis == 0 else ""
        return f"{a.dtype}, stride in elements of dimension {a.axis} ({star}{label}) of {a.name}"
    default = next(s.default for s in target.kernel.scalars if s.name == a.name)
    return f"{a.dtype}, the scalar {a.name}" + (f", by default {literal_text(default)}" if default is not None else "")


def star_texts(target: Target) -> list[str]:
    """`M = product of the dimensions of x but the last 1`, for every starred dimension at run time."""
    out: dict[str, str] = {}
    for t in target.kernel.tensors:
        dim = t.shape[0].as_symbol if t.star else None
        if dim is not None and dim not in known_dims(target):
            rest = len(t.shape) - 1
            text = f"product of all dimensions of {t.name} but the last" + (f" {rest}" if rest > 1 else "")
            out.setdefault(dim, f"{dim} = {text if rest else f'number of elements of {t.name}'}")
    return list(out.values())


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max((len(a) for a, _ in rows), default=0)
    return [f"{a:{width}}  {b}" for a, b in rows]
