"""The knobs of a schedule: which sizes a `schedule` statement may set, for whom, and how large they may be."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS = ("cuda", "triton")
WARP = 32  # threads
REGISTER_FILE = 64 << 10  # 32-bit registers of a multiprocessor; see `kgen.codegen.machines`
CHUNK = "chunk"
WHOLE = "whole"  # in place of the size of a chunk


@dataclass(frozen=True)
class Knob:
    """A size from `least` to `most`, on `backends`; `power`: a power of two."""

    name: str
    backends: tuple[str, ...]
    least: int
    most: int
    power: bool
    meaning: str


KNOBS = {
    k.name: k
    for k in (
        Knob("threads", ("cuda",), WARP, 1024, True, "threads of a program"),
        Knob("warps", ("triton",), 1, 1024 // WARP, True, "warps of a program"),
        Knob("rows", BACKENDS, 1, 1 << 20, True, "rows that a program takes; points, where there is no tile index"),
        Knob("vector", ("cuda",), 1, 16, True, "the most elements that a thread moves at once"),
        Knob("blocks", BACKENDS, 1, 32, False, "of a sum over programs: programs that a multiprocessor is to hold"),
        Knob("cluster", ("cuda",), 1, 8, True, "thread blocks of a program, which share one row (sm_90 and later)"),
        Knob("stages", ("triton",), 1, 8, False, "iterations of a loop whose loads are in flight"),
        Knob("peel", ("cuda",), 0, 1, False, "1 to take whole vectors of rows that begin at any address, 0 not to"),
        Knob("hold", ("triton",), 0, 1, False, "1 to hold the chunks of a row from pass to pass, 0 to load them again"),
        Knob("registers", ("triton",), WARP, 255, False, "the most registers a thread that the compiler may use"),
        Knob("ahead", ("cuda",), 0, 32, False, "how far on the row is that a program asks L2 for"),
        Knob(CHUNK, BACKENDS, 1, 1 << 62, False, "elements of a tile index that are taken at a time"),
    )
}


def power_of_two(n: int) -> bool:
    """Whether `n` is 1, 2, 4, ..."""
    return n >= 1 and not n & (n - 1)
