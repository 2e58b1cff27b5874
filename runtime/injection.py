"""Mistakes put into generated source on purpose, to see that the differential tester finds them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kgen.codegen.program import Program
from kgen.codegen.schedule import Scheduled
from kgen.runtime import stored


@dataclass(frozen=True)
class Mutation:
    """A mistake: for each backend patterns (multi-line) with their replacement and how many occurrences it changes
    (0: all)."""

    what: str
    edits: dict[str, tuple[tuple[str, str, int], ...]]


_MASK = r"mask_\w+(?:\[[^\]]*\])?(?: & mask_\w+(?:\[[^\]]*\])?)*"
# A guard of CUDA statements over elements: `if (n < N) {`, `if (live && n < N) {`.
_GUARD = r"(if \((?:live && )?\w+ < [A-Za-z_]\w*)\) \{"
# Triton source with one range: its mask is that of single elements, not of rows.
_OTHER = r"(?:(?!tl\.arange)[\s\S])*"
_FLAT = rf"\A({_OTHER}tl\.arange{_OTHER}?mask_\w+ = \w+ < [^\n]+)({_OTHER})\Z"

# None of them strays further from a tensor than the guard around it is wide (`kgen.runtime.placement`).
MUTATIONS: dict[str, Mutation] = {
    "mask": Mutation(
        "the mask of a reduction is dropped",
        {
            # Only where the guarded block accumulates: it has no store.
            "cuda": (
                (
                    r"if \(\w+ < \w+\) (\{\s*(?:#pragma unroll\s*)?(?:for [^\n]*\n\s*)?(?:[^{}]*?)(?:\+=|maximum\())",
                    r"\1",
                    0,
                ),
            ),
            "triton": (
                (rf"tl\.where\({_MASK}, (.+), (?:0\.0|1\.0|float\(\"-?inf\"\))\)", r"\1", 0),
                (r",\s*other=float\(\"-?inf\"\)", "", 0),
                (r",\s*other=0\.0", "", 0),
            ),
        },
    ),
    "identity": Mutation(
        "a reduction starts from the wrong value",
        {
            "cuda": (
                (r"(\w+_(?:sum|mean\w*)) = 0\.0f;", r"\1 = 1.0f;", 0),
                (r" = -INFINITY;", " = 1000.0f;", 0),
            ),
            "triton": (
                (r", 0\.0\), axis", ", 1.0), axis", 0),
                (r"other=float\(\"-inf\"\)", "other=1000.0", 0),
                (r"other=0\.0", "other=1.0", 0),
            ),
        },
    ),
    "short": Mutation(
        "the last element is left out",
        {
            "cuda": ((_GUARD, r"\1 - 1) {", 0),),
            "triton": ((r"^(\s+mask_\w+ = \w+ < .+)$", r"\1 - 1", 0),),
        },
    ),
    "long": Mutation(
        "one element too many is written",
        {
            "cuda": ((_GUARD, r"\1 + 1) {", 0),),
            "triton": ((r"^(\s+mask_\w+ = \w+ < \d+)$", r"\1 + 1", 0), (_FLAT, r"\1 + 1\2", 0)),
        },
    ),
    "term": Mutation(
        "a factor or term is left out",
        {
            "cuda": (
                (
                    r"^(\s+(?:const float \w+|\w+\[[^\]=]*\]|[a-z]\w*) \+?= [^=;\n]+) [-+*/] (?:\w+|\([^()]*\));$",
                    r"\1;",
                    1,
                ),
            ),
            "triton": (
                (r"^(\s+(?!mask_|stride_)\w+ = (?:[a-z]\w*)(?:\[[\w:, ]+\])?) [-+*/] [\w\[\]:, ]+$", r"\1", 1),
                (r"^(\s+)\((\w+(?:\[[\w:, ]+\])?) [-+*/] .+\)(\.to\(tl\.\w+\),)$", r"\1(\2)\3", 1),
            ),
        },
    ),
    "barrier": Mutation(
        "a barrier is missing",
        {"cuda": ((r"^\s*(?:__syncthreads|cluster_barrier)\(\);\n", "", 0),)},
    ),
    "rows": Mutation(
        "rows past the last one enter a sum over programs",
        {
            "cuda": ((r"if \(live\) (?=\w[^\n]* \+= )", "", 0),),
            "triton": ((rf"\+= tl\.where\({_MASK}, (.+), 0\)$", r"+= \1", 0),),
        },
    ),
    "partial": Mutation(
        "the first partial sum is left out where those of programs are added up",
        {
            "cuda": ((r"int split = 0; split < SPLITS;", "int split = 1; split < SPLITS;", 0),),
            "triton": ((r"for split in range\(SPLITS\)", "for split in range(1, SPLITS)", 0),),
        },
    ),
}


@dataclass
class Injected:
    """By backend, how many generated programs were changed, and the most launches that one program had."""

    programs: dict[str, int] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)


@contextmanager
def injected(name: str, *, kernel: str | None = None, launch: int | None = None) -> Iterator[Injected]:
    """Inside, every program generated in this process has mutation `name` where it has what that changes.

    `kernel` limits it to kernels of that name, `launch` to one launch of a kernel that is several (counted from 0).
    Compiled kernels that exist already are not touched: load files anew. Not for use by several threads.
    """
    # By name: the packages have a function `emit` that hides the module of that name.
    places = {b: [importlib.import_module(f"kgen.codegen.{b}{m}") for m in ("", ".emit")] for b in ("cuda", "triton")}
    mutation, done = MUTATIONS[name], Injected()
    inside = False

    def changed(backend: str, program: Program) -> Program:
        source = program.source
        for pattern, new, count in mutation.edits.get(backend, ()):
            source = re.sub(pattern, new, source, count=count, flags=re.MULTILINE)
        if source != program.source:
            done.programs[backend] = done.programs.get(backend, 0) + 1
        return replace(program, source=source, then=())

    def wrap(backend: str, emit: Any) -> Any:
        def mutated(scheduled: Scheduled) -> Program:
            nonlocal inside
            if inside:  # a launch of the kernel being emitted: it is changed with the others
                return emit(scheduled)
            inside = True
            try:
                program = emit(scheduled)
            finally:
                inside = False
            if kernel is not None and scheduled.kernel.name != kernel:
                return program
            done.launches[backend] = max(done.launches.get(backend, 0), len(program.launches))
            first, *rest = [
                changed(backend, p) if launch in (None, i) else replace(p, then=())
                for i, p in enumerate(program.launches)
            ]
            return replace(first, then=tuple(rest))

        return mutated

    saved = [(module, backend, module.emit) for backend, each in places.items() for module in each]
    for module, backend, emit in saved:
        module.emit = wrap(backend, emit)  # type: ignore[attr-defined]  # taken back below
    try:
        with stored.suspended():
            yield done
    finally:
        for module, _, emit in saved:
            module.emit = emit  # type: ignore[attr-defined]  # as it was
