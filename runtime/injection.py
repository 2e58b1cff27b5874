"""Mistakes put into generated source on purpose, to see that the differential tester finds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kgen.codegen.program import Program


@dataclass(frozen=True)
class Mutation:
    """A mistake: for each backend patterns (multi-line) with their replacement and how many occurrences it changes
    (0: all)."""

    what: str
    edits: dict[str, tuple[tuple[str, str, int], ...]]


# None of them strays further from a tensor than the guard around it is wide (`kgen.runtime.placement`).
MUTATIONS: dict[str, Mutation] = {
    "mask": Mutation(
        "the mask of a reduction is dropped",
        {
            # Only where the guarded block accumulates: it has no store.
            "cuda": ((r"if \(\w+ < \w+\) (\{\s*(?:#pragma unroll\s*)?(?:for [^\n]*\n\s*)?(?:[^{}]*?)(?:\+=|maximum\())", r"\1", 0),),
            "triton": (
                (r"tl\.where\(mask_[\w\[\]:, &]+?, (.+), (?:0\.0|1\.0|float\(\"-?inf\"\))\)", r"\1", 0),
                (r"other=float\(\"-inf\"\)", "other=1e30", 0),
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
            ),
        },
    ),
    "short": Mutation(
        "the last element is left out",
        {
            "cuda": ((r"(if \((?:live && )?\w+ < [A-Za-z_]\w*)\) \{", r"\1 - 1) {", 0),),
            "triton": ((r"^(\s+mask_\w+ = \w+ < .+)$", r"\1 - 1", 0),),
        },
    ),
    "long": Mutation(
        "one element too many is written",
        {
            "cuda": ((r"(if \((?:live && )?\w+ < [A-Za-z_]\w*)\) \{", r"\1 + 1) {", 0),),
            "triton": ((r"^(\s+mask_\w+ = \w+ < (?:\d+|.+ \* \d+))$", r"\1 + 1", 0),),
        },
    ),
    "term": Mutation(
        "a factor or term is left out",
        {
            "cuda": ((r"^(\s+(?:const float \w+|\w+_out\[\w+\]|\w+) \+?= \w+) [-+*/] (?:\w+|\([^()]*\));$", r"\1;", 1),),
            "triton": ((r"^(\s+\w+ = \w+) [-+*/] [\w\[\]:, ]+$", r"\1", 1),),
        },
    ),
    "barrier": Mutation(
        "a barrier is missing",
        {"cuda": ((r"^\s*__syncthreads\(\);\n", "", 0),)},
    ),
}


@dataclass
class Injected:
    """How many generated programs were changed, by backend."""

    programs: dict[str, int] = field(default_factory=dict)


@contextmanager
def injected(name: str) -> Iterator[Injected]:
    """Inside, every program generated in this process has mutation `name` where it has what that changes.

    Compiled kernels that exist already are not touched: load files anew. Not for use by several threads.
    """
    import kgen.codegen.cuda as cuda
    import kgen.codegen.triton.emit as triton

    mutation, done = MUTATIONS[name], Injected()

    def wrap(backend: str, emit: Any) -> Any:
        def mutated(*args: Any, **kwargs: Any) -> Program:
            program = emit(*args, **kwargs)
            source = program.source
            for pattern, new, count in mutation.edits.get(backend, ()):
                source = re.sub(pattern, new, source, count=count, flags=re.MULTILINE)
            if source != program.source:
                done.programs[backend] = done.programs.get(backend, 0) + 1
            return replace(program, source=source)

        return mutated

    saved = cuda.emit, triton.emit
    cuda.emit, triton.emit = wrap("cuda", cuda.emit), wrap("triton", triton.emit)
    try:
        yield done
    finally:
        cuda.emit, triton.emit = saved
