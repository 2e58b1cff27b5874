"""The cost of a kernel on a machine: what it must move and compute, what its two programs ask for, and what of the
machine those occupy. Compiled here, without the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.codegen import traffic
from kgen.codegen.cost import Cost, cost
from kgen.codegen.machines import Machine, Occupancy, occupancy
from kgen.codegen.operations import Instructions
from kgen.codegen.schedule import Schedule
from kgen.codegen.shapes import constants
from kgen.dsl.dtypes import F64
from kgen.dsl.ir import Kernel
from kgen.runtime.ahead import BACKENDS, Target, binary, capability
from kgen.runtime.errors import BackendError
from kgen.runtime.nvrtc import Resources
from kgen.runtime.tuned import measured


@dataclass(frozen=True)
class Floor:
    """Seconds below which no kernel stays, by what it waits for: `memory` (every byte once), the `special`-function
    units, the units for multiply-add (`f32`, of an f64 kernel `f64`), the `matrix` units."""

    times: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The longest of them."""
        return max(self.times.values())

    @property
    def bound(self) -> str:
        """What takes longest."""
        return max(self.times, key=lambda what: self.times[what])


@dataclass(frozen=True)
class LaunchCost:
    """One launch of a backend's program, with the schedule that a call takes on the machine. `floor`: of what it does,
    where L2 keeps what it asks for again."""

    asked: traffic.Launch
    schedule: Schedule
    used: Resources
    dynamic_shared: int
    occupancy: Occupancy
    machine: Machine
    floor: Floor

    @property
    def resident(self) -> int:
        """Programs (of a cluster: its blocks) on a multiprocessor at a time: as many as it holds, fewer where there are
        not so many."""
        return min(self.occupancy.programs, -(-self._blocks // self.machine.multiprocessors))

    @property
    def waves(self) -> float:
        """How often the machine is filled with programs."""
        return self._blocks / max(1, self.occupancy.programs * self.machine.multiprocessors)

    @property
    def in_flight(self) -> int:
        """Bytes that a multiprocessor has asked for at a time, if all its programs do at once."""
        return self.resident * self.asked.in_flight // self.schedule.cluster

    @property
    def _blocks(self) -> int:
        return self.asked.programs * self.schedule.cluster


@dataclass(frozen=True)
class KernelCost:
    """A kernel for sizes `dims`: its cost and its floor, and for each backend its launches, or why there are none."""

    kernel: Kernel
    dims: Mapping[str, int]
    machine: Machine
    cost: Cost
    floor: Floor
    backends: Mapping[str, tuple[LaunchCost, ...] | str]


def kernel_cost(made: Target, machine: Machine, backends: tuple[str, ...] = BACKENDS) -> KernelCost:
    """The cost of `made` on `machine`. A backend whose compiler is missing, or does not know the machine, says so."""
    dims = {d: made.layout.dims[d] for d in (*made.kernel.dims, *constants(made.kernel))}
    found: dict[str, tuple[LaunchCost, ...] | str] = {}
    for backend in backends:
        try:
            found[backend] = _launches(made, machine, backend)
        except BackendError as error:
            found[backend] = str(error)
    own = cost(made.kernel, dims)
    return KernelCost(made.kernel, dims, machine, own, floor(made.kernel, own, dims, machine), found)


def floor(kernel: Kernel, own: Cost, dims: Mapping[str, int], machine: Machine) -> Floor:
    """The floor of a kernel that costs `own`."""
    return _floor(kernel, own.bytes.evaluate(dims), own.work.instructions(dims), machine)


def _floor(kernel: Kernel, moved: int, instructions: Instructions, machine: Machine) -> Floor:
    a = machine.limits
    ticks = machine.multiprocessors * machine.clock
    times = {"memory": machine.memory_time(moved)}
    if any(t.dtype == F64 for t in kernel.tensors):  # its special functions are made of multiply-adds
        return Floor(times | {"f64": instructions.f32 / (a.f64 * ticks)})
    return Floor(
        times | {"special": instructions.special / (a.special * ticks), "f32": instructions.f32 / (a.f32 * ticks)}
    )


def _launches(made: Target, machine: Machine, backend: str) -> tuple[LaunchCost, ...]:
    knobs = measured(made.layout, backend, machine.device)
    asked_of = (backend, machine.multiprocessors, knobs, capability(machine.arch))
    scheduled, program = made.scheduled(*asked_of), made.program(*asked_of)
    out: list[LaunchCost] = []
    for asked, p in zip(traffic.traffic(scheduled, made.layout.dims), program.launches, strict=True):
        b = binary(made, p, machine.arch)
        fits = occupancy(
            machine.limits, p.schedule.threads, b.resources.registers, b.resources.shared_bytes + b.shared_bytes
        )
        own = _floor(made.kernel, asked.once, asked.instructions, machine)
        out.append(LaunchCost(asked, p.schedule, b.resources, b.shared_bytes, fits, machine, own))
    return tuple(out)
