"""Several launches in one `.cu` file: typedefs, helpers and packs once, then each kernel with its constants inside.

Constants of the launches have the same names and other values, so none of them is the file's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kgen.codegen.cuda.emit import _BEGIN, _END, _Emitter
from kgen.codegen.cuda.prelude import Pack, prelude
from kgen.codegen.schedule import Scheduled
from kgen.codegen.templating import render


def bundle(scheduled: Scheduled) -> str:
    """The text of a file with the kernels of `scheduled` and of all launches behind it, in their order."""
    used: set[str] = set()
    packs: dict[Pack, tuple[bool, bool]] = {}
    typedefs: set[str] = set()
    kernels: list[tuple[list[str], str]] = []
    entries: set[str] = set()
    for stage in (scheduled, *scheduled.then):
        emitter = _Emitter(stage)
        program = emitter.program()
        assert program.entry not in entries  # the stages of a kernel have names of their own
        entries.add(program.entry)
        ctx = emitter.ctx
        used |= ctx.helpers
        for pack, (reads, writes) in ctx.packs.items():
            read, written = packs.get(pack, (False, False))
            packs[pack] = (read or reads, written or writes)
        typedefs |= {a.dtype.name for a in ctx.args} & {"f16", "bf16"}
        about = program.source[: program.source.index("\n\n")].split("\n")
        kernels.append((about, _own(program.source, ctx.constants)))
    primitives, helpers = prelude(used, packs, scheduled.capability)
    return render(
        "cuda/bundle.cu.j2",
        typedefs=typedefs,
        primitives=primitives,
        primitives_begin=_BEGIN,
        primitives_end=_END,
        helpers=helpers,
        kernels=[{"about": about, "text": text} for about, text in kernels],
    )


def _own(source: str, constants: Mapping[str, tuple[str, str]]) -> str:
    """The kernel of a file, with the file's constants that it uses."""
    text = source[source.index('\nextern "C"') + 1 :].strip("\n")
    head, _, body = text.partition("\n{\n")
    for name, (value, _) in constants.items():
        first, rest = head.split("\n", 1)  # the launch bounds stand in front of the parameters
        head = re.sub(rf"\b{name}\b", value, first) + "\n" + rest
    words = set(re.findall(r"\w+", body))
    lines = []
    for name, (value, remark) in reversed(list(constants.items())):
        if name in words:
            words |= set(re.findall(r"\w+", value))
            lines.insert(0, f"    constexpr int {name} = {value};" + (f"  // {remark}" if remark else ""))
    return "\n".join([head, "{", *lines, body])
