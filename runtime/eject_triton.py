"""The `_triton.py` that stands alone: the kernels, and a host function that launches them.

The function refuses tensors which the kernels were not compiled for; that is what the binding of a call does in kgen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kgen.codegen.names import Names
from kgen.codegen.origins import file_name
from kgen.codegen.program import Arg, Program
from kgen.codegen.templating import render
from kgen.codegen.torch_dtypes import TORCH
from kgen.codegen.triton.reserved import RESERVED
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import I32
from kgen.runtime.ahead import Target
from kgen.runtime.eject import MAX_POINTS, assumptions, signature_text
from kgen.runtime.eject_sizes import Sizes, literal, tuple_text
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
from kgen.runtime.triton_compile import options

_HELPERS = frozenset(("torch", "_checked", "_rank", "_multiprocessors"))
_CEIL = "triton.cdiv({}, {})"
_IMPORTS = "\nimport triton\n"  # every module of the emitter has the line
_LIBDEVICE = "from triton.language.extra import libdevice\n"


def triton_source(target: Target, launches: Sequence[Program]) -> str:
    """The `_triton.py` file: the kernels, and a host function `launch_<kernel>` that needs torch and triton alone."""
    return HostFunction(target, launches).source()


def module(sources: Sequence[str]) -> tuple[str, str]:
    """(comment, code) of one module with the kernels of several, each helper once."""
    if len(sources) == 1:
        head, _, tail = sources[0].partition(_IMPORTS)
        return head, f"import triton\n{tail.rstrip()}"
    functions: list[str] = []
    libdevice = False
    for source in sources:
        about, _, code = source.partition(_IMPORTS)
        libdevice |= _LIBDEVICE in code
        *helpers, kernel = (f.strip() for f in re.split(r"^(?=@triton\.jit)", code, flags=re.MULTILINE)[1:])
        functions += [h for h in helpers if h not in functions]
        functions.append(f"{about}\n{kernel}")
    imports = "import triton\nimport triton.language as tl\n" + (_LIBDEVICE if libdevice else "")
    return "", imports + "\n\n" + "\n\n\n".join(functions)


@dataclass(frozen=True)
class _Check:
    """The line of the host function that checks one tensor and gives it the shape that the kernel subscripts."""

    name: str
    label: str
    dtype: str
    shape: str
    into: str
    keywords: str
    rank: int
    star: bool


class HostFunction:
    """The host function of one kernel. `names` is how it spells tensors, scalars and sizes."""

    def __init__(self, target: Target, launches: Sequence[Program]) -> None:
        self.target, self.launches = target, launches
        self.program = replace(launches[0], then=tuple(launches[1:]))
        self.kernel = target.kernel
        self.known = known_dims(target)
        self.shares = shares(target, self.program)
        self.workspaces = workspaces(target, self.program)
        dims = [d for d in self.kernel.dims if d not in self.known]
        own = [*(w.tensor.name for w in self.workspaces), *(s.dim for s in self.shares)]
        users = [*(t.name for t in self.kernel.tensors), *(s.name for s in self.kernel.scalars), *dims, *own]
        self.name = f"launch_{launches[0].entry}"
        self.names = Names(users, RESERVED | _HELPERS | {p.entry for p in launches} | {self.name})
        self.sizes = Sizes(self.kernel, self.known, dims, self.names, (s.dim for s in self.shares))

    def source(self) -> str:
        """The whole file."""
        target, names = self.target, self.names
        head, code = module([p.source for p in self.launches])
        if not head:
            file = file_name(self.kernel.span)
            head = f"# {self.kernel.name} of {file}: {len(self.launches)} launches, which {self.name} makes in order."
        tensors = [names[t.name] for t in self.kernel.tensors]
        scalars = [names[s.name] + ("" if s.default is None else f"={literal(s.default)}") for s in self.kernel.scalars]
        several = names.fresh(device_word(target))
        host = render(
            "triton/eject.py.j2",
            launch=self.name,
            name=self.kernel.name,
            signature=signature_text(self.kernel, self.known),
            writes=", ".join(names[t.name] for t in self.kernel.tensors if t.role != "in"),
            assumptions=assumptions(target),
            tensors=tensors,
            scalars=[*scalars, f"{several}=None"] if self.shares else scalars,
            bindings=self.sizes.bindings(),
            checks=[self._check(t) for t in self.kernel.tensors],
            conditions=self._conditions(),
            first=tensors[0],
            grid=names.fresh("grid"),
            multiprocessors=several,
            built_for=multiprocessors(self.program) if self.shares else 0,
            shares=[(names[s.dim], s.text(several, self.sizes.text, _CEIL)) for s in self.shares],
            workspaces=[
                {
                    "name": names[w.tensor.name],
                    "shape": tuple_text(self.sizes.text(p) for p in w.shape),
                    "dtype": str(TORCH[w.tensor.dtype]),
                    "zeroed": w.zeroed,
                    "bytes": w.bytes,
                }
                for w in self.workspaces
            ],
            launches=[self._launch(p) for p in self.launches],
        )
        return f"{head}\nimport torch\n{code}\n\n\n{host}"

    def _launch(self, p: Program) -> dict[str, object]:
        own = grid(self.target, p)
        return {
            "entry": p.entry,
            "programs": own.text(self.sizes.text, _CEIL, None if own.split is None else self.names[own.split]),
            # The number of shares is never 0.
            "guarded": own.blocks.constant in (None, 0),
            "arguments": [self._argument(a) for a in p.args],
            "warps": p.schedule.threads // 32,
            "registers": options(p).get("maxnreg"),
        }

    # -- checks --------------------------------------------------------------------------------------------------
    def _check(self, t: ir.Tensor) -> _Check:
        merged = self.target.layout.kernel.tensor(t.name)
        derived = derived_dims(self.target)
        c = self.target.layout.variant.tensor(t.name)
        keywords = f", align={c.align}" if c.align > 1 else ""
        if not c.unit:
            keywords += ", unit=False"
        if t.star:
            keywords += ", star=True"
        strides = {a for p in self.launches for a in p.args if a.kind == "stride" and a.name == t.name}
        narrow = sorted(a.axis for a in strides if a.dtype == I32)
        if narrow:
            keywords += f", narrow={tuple_text(map(str, narrow))}"
        return _Check(
            self.names[t.name],
            t.name,
            str(TORCH[t.dtype]),
            tuple_text(self.sizes.text(p) for p in t.shape),
            tuple_text(self.sizes.text(p.substitute(self.known | derived)) for p in merged.shape),
            keywords,
            len(t.shape),
            t.star,
        )

    def _conditions(self) -> list[tuple[str, str]]:
        """What is refused: (Python condition, sentence)."""
        variant, derived = self.target.layout.variant, derived_dims(self.target)
        out: list[tuple[str, str]] = []
        for d, n in variant.multiples:
            if n > 1:
                out.append(self.sizes.multiple(derived.get(d, Poly.sym(d)).substitute(self.known), n))
        out += self.sizes.requirements()
        if not variant.wide and not points(self.target).is_constant:
            total = points(self.target)
            out.append((f"{self.sizes.text(total)} > {MAX_POINTS}", f"{total} must be at most {MAX_POINTS}"))
        return [*out, *self.sizes.one_device()]

    def _argument(self, a: Arg) -> str:
        if a.kind == "stride":
            return f"{self.names[a.name]}.stride({a.axis})"
        if a.kind == "dim":
            merged = derived_dims(self.target).get(a.name)
            return self.sizes.text(merged if merged is not None else Poly.sym(a.name))
        return self.names[a.name]
