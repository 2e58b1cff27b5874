"""Sums over programs in Triton: as many programs are started as a multiprocessor holds, with enough rows in flight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kgen.codegen import ladders
from kgen.codegen.knobs import Knobs
from kgen.codegen.machines import ARCHITECTURES, occupancy
from kgen.codegen.resident import bytes_in_flight, least_shared, resident, staged_bytes
from kgen.codegen.schedule import Schedule, Scheduled
from kgen.codegen.words import tight
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, Target, binary, target
from kgen.runtime.derived import gradient_targets
from kgen.runtime.triton_compile import options

OPS = Path(__file__).resolve().parent.parent / "ops"
NORMS = ("rms_norm", "layer_norm", "add_rms_norm")
SM_90 = ARCHITECTURES["sm_90"]
# Rows that are reduced only before anything is stored, and one that is half as many bytes as it is elements.
PLAIN = """kernel plain(x: T[*M, N], d_y: T[*M, N]) -> (d_w: T[N]):
    parallel m in M
    tile n in N
    d_w[n] += x[m, n] * d_y[m, n] * mean(x[m, n], n)
"""
# An exact quotient of every element, and two of which one is reduced.
QUOTIENTS = {
    "quotient": """kernel quotient(x: T[*M, N], d_y: T[*M, N]) -> (d_w: f32[N]):
    parallel m in M
    tile n in N
    d_w[n] += d_y[m, n] * mean(d_y[m, n] / (1.0 + x[m, n] * x[m, n]), n)
""",
    "quotients": """kernel quotients(x: T[*M, N], d_y: T[*M, N]) -> (d_w: f32[N]):
    parallel m in M
    tile n in N
    d_w[n] += d_y[m, n] / (1.0 + x[m, n]) * mean(x[m, n] / (2.0 + d_y[m, n]), n)
""",
}
TEXTS = {"plain": PLAIN, **QUOTIENTS}


def backward(name: str, n: int, dtype: str = "bf16") -> Target:
    """What adds up the gradients of weights."""
    module = load(OPS / f"{name}.kdsl").module
    kernel = next(k for k in module.kernels if k.name == name)
    return gradient_targets(target(module, kernel, Choices(dims={"N": n, "M": 4096}, dtype=dtype))).backward


def plain(n: int, dtype: str = "bf16", text: str = PLAIN) -> Target:
    module = parse_text(text)
    return target(module, module.kernels[0], Choices(dims={"N": n, "M": 4096}, dtype=dtype))


def blocks_of(s: Scheduled) -> int:
    assert s.sums is not None
    return s.sums.blocks


def in_flight(s: Scheduled, schedule: Schedule) -> int:
    return bytes_in_flight(s.kernel, schedule, resident(s.kernel, s.variant, schedule, 90))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("name", "n"),
    [(name, n) for name in (*NORMS, *TEXTS) for n in (512, 1024, 2048, 3072, 4096, 5120, 8192)]
    + [("rms_norm", 1001), ("layer_norm", 1001)],
)
def test_what_is_started_is_what_fits(name: str, n: int, dtype: str) -> None:
    """Of machine code for sm_90, within one, and where one fits one is started. Fewer may be started where they have
    enough in flight."""
    made = plain(n, dtype, TEXTS[name]) if name in TEXTS else backward(name, n, dtype)
    program = made.program("triton")
    assert program.stage is not None and program.stage.sums is not None
    asked, threads = program.stage.sums.blocks, program.schedule.threads
    assert program.schedule.programs == 132 * asked
    used = binary(made, program, "sm_90")
    shared = used.resources.shared_bytes + used.shared_bytes
    fits = min(occupancy(SM_90, threads, used.resources.registers, shared).programs, ladders.SUM_THREADS // threads)
    s = made.scheduled("triton")
    enough = bytes_in_flight(s.kernel, s.schedule, asked) >= ladders.TRITON_SUM_FLIGHT
    assert fits >= 1 and asked <= fits + 1 and (enough or asked >= fits - 1), used.resources
    assert fits > 1 or asked == 1
    if s.schedule.stages > 1:
        planned = staged_bytes(s.kernel, s.schedule)
        assert shared <= planned + ladders.TRITON_SCRATCH
        assert tight(s.kernel, s.schedule) or planned <= shared


@pytest.mark.parametrize("n", [1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, 8192])
@pytest.mark.parametrize("name", NORMS)
def test_rows_in_flight_are_enough_and_no_more_staged_than_need_be(name: str, n: int) -> None:
    s = backward(name, n).scheduled("triton")
    assert in_flight(s, s.schedule) >= ladders.TRITON_SUM_FLIGHT
    for fewer in range(1, s.schedule.stages):
        assert in_flight(s, replace(s.schedule, stages=fewer)) < ladders.TRITON_SUM_FLIGHT


@pytest.mark.parametrize(
    ("name", "n", "threads", "stages", "blocks"),
    [
        ("rms_norm", 1024, 128, 3, 8),  # short rows have fewer warps each, not several rows a program
        ("rms_norm", 4096, 256, 3, 2),
        ("rms_norm", 8192, 512, 3, 1),
        ("layer_norm", 3072, 256, 4, 2),
        ("add_rms_norm", 2048, 256, 1, 4),  # four tensors a row: four programs have enough in flight
        ("add_rms_norm", 5120, 512, 3, 1),
        ("rms_norm", 12288, 512, 1, 1),  # rows that take most registers of a multiprocessor
        ("rms_norm", 16384, 512, 1, 1),
    ],
)
def test_schedules(name: str, n: int, threads: int, stages: int, blocks: int) -> None:
    s = backward(name, n).scheduled("triton")
    assert (s.schedule.threads, s.schedule.rows, s.schedule.stages) == (threads, 1, stages)
    assert blocks_of(s) == blocks


def test_a_program_alone_has_stages_whatever_it_holds() -> None:
    """8192 columns of four tensors are 64 KB, but nothing is in flight while the only program works on them."""
    s = backward("add_rms_norm", 8192).scheduled("triton")
    assert s.schedule.stages == 2 and blocks_of(s) == 1
    assert bytes_in_flight(s.kernel, replace(s.schedule, stages=1), 1) == 0
    assert bytes_in_flight(s.kernel, replace(s.schedule, stages=1), 2) == 128 << 10


def test_staged_rows_take_shared_memory_of_other_programs() -> None:
    """For sm_90: three stages of five tensors of 4096 columns fit twice, four fit once (122956 bytes each)."""
    s = backward("add_rms_norm", 4096).scheduled("triton")
    held = [resident(s.kernel, s.variant, replace(s.schedule, stages=n), 90) for n in (1, 3, 4)]
    assert held == [2, 2, 1]


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120, 121])
@pytest.mark.parametrize("n", [4096, 5120, 8192])
@pytest.mark.parametrize("name", NORMS)
def test_stages_fit_the_device(name: str, n: int, capability: int) -> None:
    """Whoever chose the rows: of twice as many there are fewer stages."""
    made = backward(name, n)
    arch = ARCHITECTURES[f"sm_{min(capability, 120)}"]
    for knobs in (None, Knobs(rows=1, threads=256), Knobs(rows=2)):
        s = made.scheduled("triton", knobs=knobs, capability=capability)
        assert s.schedule.stages == 1 or staged_bytes(s.kernel, s.schedule) < arch.program_shared
    assert made.scheduled("triton", knobs=Knobs(stages=5)).schedule.stages == 5


def test_a_file_for_several_devices_fits_the_smallest() -> None:
    made = backward("rms_norm", 5120)
    assert least_shared([90, 80]) == 80 and least_shared([90, 120]) == 120 and least_shared([]) == 86
    alone, both, any_device = (made.launches("triton", a)[0].schedule for a in (["sm_90"], ["sm_90", "sm_89"], []))
    assert (alone.stages, both.stages, any_device.stages) == (5, 3, 3)


def test_elements_one_by_one_are_not_staged() -> None:
    """Their addresses and masks are in registers: fewer programs fit."""
    for dtype in ("bf16", "f32"):
        odd, even = (backward("rms_norm", n, dtype).scheduled("triton") for n in (1001, 1024))
        assert odd.schedule.stages == 1
        assert blocks_of(odd) < blocks_of(even)


@pytest.mark.parametrize(
    ("name", "n", "dtype"),
    [("rms_norm", 2304, "f32"), ("rms_norm", 3840, "f32"), ("layer_norm", 1280, "f16"), ("layer_norm", 2048, "f16")],
)
def test_staged_rows_do_not_spill(name: str, n: int, dtype: str) -> None:
    """Left alone, the compiler takes 64 or 80 registers of these and spills 8 bytes."""
    made = backward(name, n, dtype)
    program = made.program("triton")
    assert program.schedule.stages > 1 and "maxnreg" in options(program)
    assert binary(made, program, "sm_90").resources.local_bytes == 0


def test_what_was_asked_for_is_compiled_as_it_was() -> None:
    """Sixteen programs of 256 threads would have 16 registers a thread."""
    made = backward("rms_norm", 4096)
    assert options(made.program("triton"))["maxnreg"] == 128
    assert "maxnreg" not in options(made.program("triton", knobs=Knobs(blocks=8)))
    assert options(made.program("triton", knobs=Knobs(blocks=8, registers=96)))["maxnreg"] == 96
    assert "maxnreg" not in options(made.program("triton").then[0])
    first, last = (p.source for p in made.launches("triton"))
    assert "num_warps=8, maxnreg=128." in first and "maxnreg" not in last
