"""Passes that make a choice once a row, or store the element of a label apart: with and without, and what they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import cuda_kit
import pytest
import torch
import triton_kit
from cuda_kit import Call

from kgen.codegen import pipeline
from kgen.codegen.pipeline import schedule_kernel
from kgen.codegen.schedule import Choice, Schedule, Scheduled, Step

KITS = {"cuda": cuda_kit, "triton": triton_kit}


def looped(backend: str, axis: str, chunk: int, threads: int = 32, vector: int = 1) -> Schedule:
    """One row a program, `axis` in chunks."""
    return Schedule(threads, 1, vector if backend == "cuda" else 1, ((axis, chunk),))


def scheduled(c: Call, backend: str, schedule: Schedule | None) -> Scheduled:
    """The call's kernel with `schedule` applied."""
    where, _ = cuda_kit.prepare(c)
    return schedule_kernel(where.kernel, where.variant, backend, override=schedule)


def kinds(steps: Sequence[Step]) -> str:
    """The steps as words, the branches of a choice in brackets."""
    words = (f"[{kinds(s.yes)} | {kinds(s.no)}]" if isinstance(s, Choice) else type(s).__name__.lower() for s in steps)
    return " ".join(words)


@contextmanager
def left_alone() -> Iterator[None]:
    """Passes as they are without either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "unswitched", lambda kernel, schedule, steps: steps)
        patch.setattr(pipeline, "labels_apart", lambda kernel, schedule, steps: (kernel, steps))
        yield


def equal(c: Call, backend: str, schedule: Schedule, seeds: Sequence[int] = (1, 2)) -> dict[str, torch.Tensor]:
    """The outputs of the call, which are the same bits as without either; on CUDA whichever thread comes first."""
    run = KITS[backend].run
    with left_alone():
        expected = run(c, schedule)
    got = [run(c, schedule)]
    if backend == "cuda":
        got += [cuda_kit.run(c, schedule, seed) for seed in seeds]
    for outputs in got:
        for name, want in expected.items():
            same = (outputs[name] == want) & (outputs[name].signbit() == want.signbit())
            same |= outputs[name].isnan() & want.isnan()
            assert same.all(), f"{name} differs at {(~same).nonzero().tolist()[:8]}"
    return got[0]
