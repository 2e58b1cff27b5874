"""GPUs as data: what a multiprocessor of an architecture holds, how many there are, how fast the memory is.

Nothing here is measured by the program that reads it. Data sheets give what no kernel reaches; where copies were
measured, their times say what one does.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.dsl.knobs import REGISTER_FILE

KIB, MIB, GB = 1 << 10, 1 << 20, 10**9
WARP = 32
# Registers of 32 bits: those of a multiprocessor of every architecture below, the most of a thread, and in how many a
# thread's are allotted. CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability"; the unit is
# that of a warp (`Architecture.register_unit`), for each of its threads. The first is what a `schedule` statement is
# held against, too.
MOST_REGISTERS = 255
REGISTER_UNIT = 8
# Compute capability of the oldest devices that code is generated for: the oldest that CUDA 12 and 13 both compile for.
OLDEST = 75


def too_old(capability: int) -> str | None:
    """Why there is no code for devices of compute capability `capability` (90 for sm_90); None where there is."""
    return f"sm_{capability} is too old: code is generated for sm_{OLDEST} and later" if capability < OLDEST else None


@dataclass(frozen=True)
class Architecture:
    """Limits and rates of one multiprocessor (SM), by compute capability.

    threads, programs: resident at most. l1: bytes of the L1 cache and shared memory together. shared: bytes of shared
    memory for all programs; program_shared: for one. reserved: bytes of it that each program takes beside its own.
    shared_unit: what shared memory is allocated in.
    f32, f64, special: operations a clock; a fused multiply-add is one.
    """

    name: str
    threads: int
    programs: int
    l1: int
    shared: int
    program_shared: int
    reserved: int
    shared_unit: int
    f32: int
    f64: int
    special: int = 16
    registers: int = REGISTER_FILE
    register_unit: int = REGISTER_UNIT * WARP  # registers, allocated to a warp at a time
    partitions: int = 4  # each has its share of the registers and of the warps


# CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability" (threads, programs, shared memory,
# registers), "Shared Memory" of the section on an architecture (l1), and "Throughput of Native Arithmetic Instructions"
# (f32, f64, special). What is reserved, and the units of allocation, are those of cuda_occupancy.h in the CUDA toolkit.
ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sm_75", 1024, 16, 96 * KIB, 64 * KIB, 64 * KIB, 0, 256, 64, 2),
        Architecture("sm_80", 2048, 32, 192 * KIB, 164 * KIB, 163 * KIB, KIB, 128, 64, 32),
        Architecture("sm_86", 1536, 16, 128 * KIB, 100 * KIB, 99 * KIB, KIB, 128, 128, 2),
        Architecture("sm_89", 1536, 24, 128 * KIB, 100 * KIB, 99 * KIB, KIB, 128, 128, 2),
        Architecture("sm_90", 2048, 32, 256 * KIB, 228 * KIB, 227 * KIB, KIB, 128, 128, 64),
        Architecture("sm_100", 2048, 32, 256 * KIB, 228 * KIB, 227 * KIB, KIB, 128, 128, 64),
        Architecture("sm_120", 1536, 24, 128 * KIB, 100 * KIB, 99 * KIB, KIB, 128, 128, 2),
    )
}


def architecture(capability: int) -> Architecture:
    """The architecture of devices of compute capability `capability`, or the last before it that is known here."""
    older = [a for a in ARCHITECTURES.values() if int(a.name.removeprefix("sm_")) <= capability]
    return older[-1] if older else next(iter(ARCHITECTURES.values()))


def thread_registers(threads: int, programs: int = 1) -> int:
    """32-bit registers that a thread may have where `programs` of `threads` each are to run on a multiprocessor at a
    time."""
    return min(MOST_REGISTERS, REGISTER_FILE // (threads * programs))


def programs_by_registers(threads: int, registers: float) -> int:
    """For how many programs of `threads`, with about so many `registers` a thread, a multiprocessor has the registers;
    0 where one does not fit. For estimates: of what a compiler says, `occupancy` counts warps and units too."""
    return int(REGISTER_FILE // (threads * registers))


@dataclass(frozen=True)
class Machine:
    """One GPU.

    device: what its driver calls it. clock: Hz, the highest. bandwidth: bytes a second of the memory, from the data
    sheet. l2: bytes. matrix: operations a second of dense matrix products in 16 bits with f32 sums, from the data
    sheet, a multiply-add being two. copies: (bytes read and written, seconds) of measured copies, in rising order;
    empty where none were measured. matrix_measured: what large products of a library were seen to reach. latency:
    seconds from a load to its value while the memory is busy.
    """

    name: str
    title: str
    device: str
    arch: str
    multiprocessors: int
    clock: float
    bandwidth: float
    l2: int
    matrix: float
    copies: tuple[tuple[int, float], ...] = ()
    matrix_measured: float | None = None
    latency: float = 0.8e-6

    @property
    def limits(self) -> Architecture:
        """What one of its multiprocessors holds."""
        return ARCHITECTURES[self.arch]

    @property
    def achievable(self) -> float | None:
        """Bytes a second of the largest copy that was measured."""
        return self.copies[-1][0] / self.copies[-1][1] if self.copies else None

    @property
    def in_flight(self) -> float:
        """Bytes that a multiprocessor must have asked for at any time to keep the memory busy (Little's law)."""
        return self.latency * self.bandwidth / self.multiprocessors

    def memory_time(self, moved: int) -> float:
        """Seconds in which `moved` bytes, read or written, can be moved: those of a measured copy of as many, or at the
        rate of the data sheet where none was measured."""
        if not self.copies:
            return moved / self.bandwidth
        if moved >= self.copies[-1][0]:
            return moved * self.copies[-1][1] / self.copies[-1][0]
        # Between two measured copies the time is between theirs; below the first as far as the first two say.
        pairs = zip(self.copies, self.copies[1:], strict=False)
        (b0, t0), (b1, t1) = next((p for p in pairs if moved <= p[1][0]), self.copies[:2])
        return t0 + (t1 - t0) * (moved - b0) / (b1 - b0)


# Every figure is for the SXM module or the card of that name.
MACHINES = {
    m.name: m
    for m in (
        Machine(
            "h200",
            "NVIDIA H200 (141 GB)",
            "NVIDIA H200",
            "sm_90",
            132,  # cudaDeviceProp.multiProcessorCount
            1.98e9,
            4.8e12,  # NVIDIA H200 data sheet, as the next but one
            50 * MIB,  # NVIDIA H100 architecture white paper: the same die
            989e12,
            # Tensor.copy_ of torch 2.11, median, L2 flushed: rows of 16384 x 1024 and 16384 x 4096 in bf16, and 2 GiB,
            # the last at 4.27 TB/s.
            ((2 * 32 * MIB, 20.2e-6), (2 * 128 * MIB, 67.1e-6), (4 << 30, (4 << 30) / 4.27e12)),
            # Three products of 8192 x 4096 x 128256 in bf16 by cuBLAS take 37.4 ms.
            matrix_measured=3 * 2 * 8192 * 4096 * 128256 / 37.4e-3,
            # 29 KB a multiprocessor are needed to keep 4.8 TB/s busy (codegen/ladders.py, FLAT_SLOTS); elsewhere the
            # same latency is assumed.
            latency=0.8e-6,
        ),
        # NVIDIA H100 data sheet and architecture white paper (SXM5, 80 GB).
        Machine(
            "h100", "NVIDIA H100 SXM (80 GB)", "NVIDIA H100 80GB HBM3", "sm_90", 132, 1.98e9, 3.35e12, 50 * MIB, 989e12
        ),
        # NVIDIA A100 data sheet (SXM4, 80 GB) and architecture white paper.
        Machine(
            "a100", "NVIDIA A100 SXM (80 GB)", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 1.41e9, 2.039e12, 40 * MIB, 312e12
        ),
        # NVIDIA A100 data sheet (SXM4, 40 GB).
        Machine(
            "a100-40gb",
            "NVIDIA A100 SXM (40 GB)",
            "NVIDIA A100-SXM4-40GB",
            "sm_80",
            108,
            1.41e9,
            1.555e12,
            40 * MIB,
            312e12,
        ),
        # NVIDIA A10 data sheet, GA102 white paper.
        Machine("a10", "NVIDIA A10", "NVIDIA A10", "sm_86", 72, 1.695e9, 600e9, 6 * MIB, 125e12),
        # NVIDIA L4 and L40S data sheets, Ada architecture white paper.
        Machine("l4", "NVIDIA L4", "NVIDIA L4", "sm_89", 58, 2.04e9, 300e9, 48 * MIB, 121e12),
        Machine("l40s", "NVIDIA L40S", "NVIDIA L40S", "sm_89", 142, 2.52e9, 864e9, 96 * MIB, 362e12),
        # NVIDIA Ada architecture white paper, appendix A.
        Machine(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            "NVIDIA GeForce RTX 4090",
            "sm_89",
            128,
            2.52e9,
            1.008e12,
            72 * MIB,
            165.2e12,
        ),
        # NVIDIA DGX B200 data sheet, an eighth of it; multiprocessors, clock and L2 as Chips and Cheese found them
        # ("Nvidia's B200", 2025).
        Machine("b200", "NVIDIA B200 (180 GB)", "NVIDIA B200", "sm_100", 148, 1.965e9, 8.0e12, 126 * MIB, 2250e12),
        # NVIDIA T4 data sheet, Turing architecture white paper; 16 bits are f16, it has no bf16.
        Machine("t4", "NVIDIA T4", "Tesla T4", "sm_75", 40, 1.59e9, 320e9, 4 * MIB, 65e12),
    )
}


@dataclass(frozen=True)
class Occupancy:
    """How many programs a multiprocessor holds at a time. `limits`: by what, as many as each allows alone."""

    programs: int
    warps: int
    of_warps: int
    limits: dict[str, int]

    @property
    def share(self) -> float:
        """Resident warps as a share of the most that there may be."""
        return self.warps / self.of_warps

    @property
    def limited_by(self) -> tuple[str, ...]:
        """What allows no more: one or several of `registers`, `shared memory`, `threads`, `programs`."""
        return tuple(what for what, n in self.limits.items() if n == self.programs)


def occupancy(arch: Architecture, threads: int, registers: int, shared: int) -> Occupancy:
    """The occupancy of a kernel with `threads` a program, `registers` a thread and `shared` bytes a program, static and
    dynamic, as CUDA's occupancy calculator has it: 0 programs where one does not fit."""
    warps = -(-threads // WARP)
    of_warp = _up(registers * WARP, arch.register_unit)
    part = arch.registers // arch.partitions
    # The warps of a program are dealt out to the partitions in turn; one program must fit with its fullest partition.
    fits = of_warp == 0 or of_warp * -(-warps // arch.partitions) <= part
    by_registers = part // of_warp * arch.partitions // warps if fits and of_warp else arch.programs if fits else 0
    own = _up(shared + arch.reserved, arch.shared_unit)
    by_shared = 0 if shared > arch.program_shared else arch.shared // own if own else arch.programs
    limits = {
        "registers": by_registers,
        "shared memory": by_shared,
        "threads": arch.threads // WARP // warps,
        "programs": arch.programs,
    }
    programs = min(limits.values())
    return Occupancy(programs, programs * warps, arch.threads // WARP, limits)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
