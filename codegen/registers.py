"""How many registers does a CUDA thread fill with tiles? An estimate by the rules of the emitter, which decides what
lies where: for whoever chooses a schedule, and for the emitter where it asks what room is left.

What is sharper at the ends of a step than here, `kgen.codegen.cuda.plan` settles when a step is emitted; that is too
late to choose by.
"""

from __future__ import annotations

from kgen.codegen import ladders
from kgen.codegen.layout import Layout, layout
from kgen.codegen.normalize import statement_axes
from kgen.codegen.online import paired, steps_of
from kgen.codegen.operations import CHEAP
from kgen.codegen.phases import refs
from kgen.codegen.schedule import Loop, Schedule, Step, usual
from kgen.codegen.values import WORD, most_alive, quotients, value_words
from kgen.codegen.variant import Variant
from kgen.dsl import ir

# So much arithmetic is done again rather than its result held: a register across a barrier is dearer than two of CHEAP.
RECOMPUTE_LIMIT = 2


def sum_registers(kernel: ir.Kernel, lay: Layout) -> int:
    """32-bit registers of the sums over programs that a thread holds from the first row to the last. Along an axis in
    chunks they are loaded beside each chunk."""
    added = (s for s in kernel.body if isinstance(s, ir.Accumulate))
    return sum(lay.elements(statement_axes(s)) * value_words(s.value) for s in added)


def other_registers(variant: Variant) -> int:
    """32-bit registers that a thread has beside its tiles: twice as many where indices have 64 bits."""
    return ladders.OTHER_REGISTERS * (2 if variant.wide else 1)


def trial_registers(kernel: ir.Kernel, variant: Variant, schedule: Schedule) -> int:
    """`tile_registers` of a schedule that is only tried, whose steps nobody has made yet."""
    kernel = paired(kernel, schedule)
    return tile_registers(kernel, variant, steps_of(kernel, schedule), layout(kernel, variant, schedule))


def tile_registers(kernel: ir.Kernel, variant: Variant, steps: tuple[Step, ...], lay: Layout) -> int:
    """About how many 32-bit registers a thread fills with tiles at the worst point.

    A load counts as it lies in memory, packed, or a register an element where elements come one by one, and one more
    where rows are peeled; a value that is used once is taken to be computed where it is used. The last use of a value
    makes room for what is made of it.
    """
    steps = usual(steps)
    used: dict[str, int] = {}
    for s in {id(s): s for step in steps for s in step.body}.values():
        for name in refs(s.value):
            used[name] = used.get(name, 0) + 1
    carried = sum_registers(kernel, lay)
    waiting = _waiting(kernel, variant, steps, lay, carried)
    again = _computed_again(steps)
    # A name computed in several passes is a value of its own in each.
    where: dict[str, int] = {}
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    size: dict[tuple[str, int], int] = {}
    at = 0
    for i, step in enumerate(steps):
        for s in step.body:
            for name in refs(s.value):
                last[(name, where[name])] = at
            if isinstance(s, ir.Let):
                key = (s.name, i)
                where[s.name], first[key], last[key] = i, at, at
                size[key] = 0 if s.name in waiting | again else _registers(kernel, variant, s, lay, used.get(s.name, 0))
            at += 1
        if isinstance(step, Loop):
            # Accumulators are carried through the whole pass.
            for s in step.body:
                if isinstance(s, ir.Let) and step.axis not in s.value.axes:
                    last[(s.name, i)] = max(last[(s.name, i)], at)
    return carried + int(most_alive((first[k], last[k], size[k]) for k in size))


def waiting_registers(kernel: ir.Kernel, variant: Variant, steps: tuple[Step, ...], lay: Layout) -> int:
    """32-bit registers of weights that a thread loads ahead of their use, which `tile_registers` leaves out."""
    found = _waiting(kernel, variant, steps, lay, sum_registers(kernel, lay))
    return ladders.WAITING_WORDS if found else 0


def pass_registers(kernel: ir.Kernel) -> int:
    """32-bit registers that passes over large chunks take beside what `tile_registers` counts: for exact quotients of
    elements, and where elements of 16 bits are unpacked for a maximum and again for what is summed against it."""
    tiles = {a.name for a in kernel.tiles}
    loads = {s.name for s in kernel.body if isinstance(s, ir.Let) and isinstance(s.value, ir.Load)}
    narrow = any(t.dtype.itemsize < WORD for t in kernel.tensors if t.role == "inout")
    maxima = (e for s in kernel.body if isinstance(e := s.value, ir.Reduce) and e.kind == "max")
    unpacked = narrow and any(not refs(e.arg) <= loads for e in maxima)
    return ladders.PASS_REGISTERS if unpacked or any(quotients(kernel.body, tiles)) else 0


def _waiting(kernel: ir.Kernel, variant: Variant, steps: tuple[Step, ...], lay: Layout, carried: int) -> set[str]:
    """Loads of what is the same in all rows, which are made slot by slot where registers are short, as far as can be
    told before `kgen.codegen.cuda.plan` decides it. That compares raw tiles alone with the same limit; here those that
    come an element at a time have their addresses beside them, and rows that are almost too large count as such."""
    parallel = {a.name for a in kernel.parallel}
    out = set[str]()
    for step in usual(steps):
        lets = (s for s in step.body if isinstance(s, ir.Let) and isinstance(s.value, ir.Load))
        loads = {s.name: s for s in lets if not ir.children(s.value)}
        words = sum(_registers(kernel, variant, s, lay, 1) for s in loads.values())
        if words + carried > ladders.PREFETCH_WORDS:
            out |= {name for name, s in loads.items() if s.value.axes and not s.value.axes & parallel}
    return out


def _computed_again(steps: tuple[Step, ...]) -> set[str]:
    """Values that are cheaper to compute again from loads than to hold."""
    out = set[str]()
    for step in steps:
        loads = {s.name for s in step.body if isinstance(s, ir.Let) and isinstance(s.value, ir.Load)}
        tiles = {s.name for s in step.body if isinstance(s, ir.Let) and not isinstance(s.value, ir.Reduce)}
        for s in step.body:
            if not isinstance(s, ir.Let) or isinstance(s.value, ir.Load | ir.Reduce):
                continue
            ops = [e.fn for e in ir.walk(s.value) if isinstance(e, ir.Op)]
            if len(ops) <= RECOMPUTE_LIMIT and CHEAP.issuperset(ops) and refs(s.value) & tiles <= loads:
                out.add(s.name)
    return out


def _registers(kernel: ir.Kernel, variant: Variant, s: ir.Let, lay: Layout, uses: int) -> int:
    """Registers of a thread for `s`, which is used so many times."""
    elements = lay.elements(s.value.axes)
    if isinstance(s.value, ir.Load):
        tensor = kernel.tensor(s.value.tensor)
        size = tensor.dtype.itemsize
        width = max([a.width(tensor, s.value.at, variant) for a in lay.axes], default=1)
        edge = sum(a.peel is not None for a in lay.axes if a.name in s.value.axes)
        if width == 1:  # each with an address and a mask of its own
            return elements * 3 // 2 + edge
        return (-(-elements * size // WORD) if width * size >= WORD else elements) + edge
    if uses == 1 and not isinstance(s.value, ir.Reduce):
        return 0
    return elements * value_words(s.value)
