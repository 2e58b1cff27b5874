"""Generated sources that stand alone: how is a kernel launched by someone who has no kgen?

The `.cu` gets a comment that says it; the `_triton.py` gets a host function that does it, and that refuses tensors
which the kernel was not compiled for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kgen.codegen.names import Names
from kgen.codegen.program import Arg, Program
from kgen.codegen.templating import render
from kgen.codegen.torch_dtypes import TORCH
from kgen.codegen.triton.reserved import RESERVED
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.dtypes import I32
from kgen.runtime.ahead import Target
from kgen.runtime.errors import ArgumentError

# Rows that a 32-bit row index counts, less those that the last program may count beyond the end.
MAX_POINTS = 2**31 - 1 - 2**20
_NEGATED = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_HELPERS = frozenset(("torch", "_checked", "_rank"))


def known_dims(target: Target) -> dict[str, int]:
    """Sizes that are compiled in: dimensions of the variant and const integers."""
    consts = {n: int(v) for n, v in target.kernel.consts if isinstance(v, int) and not isinstance(v, bool)}
    return consts | dict(target.layout.variant.dims)


def derived_dims(target: Target) -> dict[str, Poly]:
    """Sizes of merged indices, in terms of the signature's dimensions that are not compiled in."""
    known = known_dims(target)
    out: dict[str, Poly] = {}
    for m in target.merges:
        out[m.dim] = m.extent.substitute(known | out)
    return out


def points(target: Target) -> Poly:
    """The number of rows: the product of the parallel extents, in dimensions that are not compiled in."""
    total = Poly.const(1)
    for a in target.layout.kernel.parallel:
        total = total * a.extent.substitute(known_dims(target) | derived_dims(target))
    return total


def grid_formula(target: Target, program: Program) -> str:
    """The number of programs, for people: `ceil(M / 4)`."""
    total, rows = points(target), program.schedule.rows
    if total.is_constant:
        return str(-(-total.constant // rows))
    return str(total) if rows == 1 else f"ceil({total} / {rows})"


def signature_text(kernel: ir.Kernel, known: dict[str, int] | None = None) -> str:
    """`rms_norm(x: bf16[*M, 4096], eps: f32) -> (y: bf16[*M, 4096])`."""
    inputs = [_tensor_text(t, known or {}) for t in kernel.tensors if t.role != "out"]
    inputs += [f"{s.name}: {s.dtype}" for s in kernel.scalars]
    outputs = [_tensor_text(t, known or {}) for t in kernel.tensors if t.role == "out"]
    return f"{kernel.name}({', '.join(inputs)})" + (f" -> ({', '.join(outputs)})" if outputs else "")


def _tensor_text(t: ir.Tensor, known: dict[str, int]) -> str:
    shape = ", ".join(("*" if t.star and i == 0 else "") + str(p.substitute(known)) for i, p in enumerate(t.shape))
    return f"{t.name}: {'inout ' if t.role == 'inout' else ''}{t.dtype}[{shape}]"


def assumptions(target: Target) -> list[str]:
    """What the code relies on, one sentence each."""
    kernel, variant, known = target.kernel, target.layout.variant, known_dims(target)
    out = []
    facts = [f"{n} = {d}" for n, d in kernel.dtypes] + [f"{n} = {_literal(v)}" for n, v in kernel.consts]
    facts += [f"{d} = {n}" for d, n in variant.dims]
    if facts:
        out.append(", ".join(facts))
    unit = [n for n, c in variant.tensors if c.unit and kernel.tensor(n).shape]
    if unit:
        out.append(f"innermost stride 1: {', '.join(unit)}")
    for align in sorted({c.align for _, c in variant.tensors if c.align > 1}, reverse=True):
        names = [n for n, c in variant.tensors if c.align == align]
        out.append(f"address and other strides multiples of {align} bytes: {', '.join(names)}")
    merged: dict[str, list[str]] = {}
    for m in target.merges:
        extents = " and ".join(str(kernel.axis(a).extent) for a in m.axes)
        merged.setdefault(extents, []).extend(name for name, _ in m.places)
    for extents, names in merged.items():
        out.append(f"{extents} lie without gaps, one stride serves both: {', '.join(names)}")
    within = {name for m in target.merges for name, place in m.places if place == 0}
    starred = [t.name for t in kernel.tensors if t.star and t.name not in within]
    if starred:
        out.append(f"one stride serves all leading dimensions: {', '.join(starred)}")
    derived = derived_dims(target)
    for d, n in variant.multiples:
        if n > 1:
            out.append(f"{derived.get(d, Poly.sym(d))} is a multiple of {n}")
    for r in kernel.requires:
        left, right = r.left.substitute(known), r.right.substitute(known)
        if not (left.is_constant and right.is_constant):
            out.append(f"{left} {r.op} {right}")
    if not variant.wide and not points(target).is_constant:
        out.append(f"{points(target)} <= {MAX_POINTS}")
    return out


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def cuda_source(target: Target, program: Program) -> str:
    """The `.cu` file: how to launch the kernel, then the kernel."""
    derived = derived_dims(target)
    return render(
        "cuda/eject.cu.j2",
        signature=signature_text(target.kernel, known_dims(target)),
        grid=grid_formula(target, program),
        threads=program.schedule.threads,
        shared=program.shared_bytes,
        arguments=_columns(
            (a_name, argument_text(target, a)) for a, a_name in zip(program.args, _c_names(program), strict=True)
        ),
        stars=star_texts(target),
        derived=[f"{name} = {value}" for name, value in derived.items()],
        assumptions=assumptions(target),
        source=program.source,
    )


def _c_names(program: Program) -> list[str]:
    """The parameters' names as the emitter spelled them."""
    head = program.source.index("\n" + program.entry + "(")
    text = program.source[head + len(program.entry) + 2 : program.source.index("\n{\n", head)]
    return [p.strip().rstrip(",)").split()[-1] for p in text.strip().split("\n") if p.strip().rstrip(")")]


def argument_text(target: Target, a: Arg) -> str:
    """What an argument is, in words."""
    known = known_dims(target) | derived_dims(target)
    if a.kind == "tensor":
        t = target.kernel.tensor(a.name)
        return f"data of {_tensor_text(t, known_dims(target))}"
    if a.kind == "dim":
        value = derived_dims(target).get(a.name)
        return f"{a.dtype}, the dimension {a.name}" + (f" = {value}" if value is not None else "")
    if a.kind == "stride":
        t = target.layout.kernel.tensor(a.name)
        label = str(t.shape[a.axis].substitute(known))
        star = "*" if t.star and a.axis == 0 else ""
        return f"{a.dtype}, stride in elements of dimension {a.axis} ({star}{label}) of {a.name}"
    default = next(s.default for s in target.kernel.scalars if s.name == a.name)
    return f"{a.dtype}, the scalar {a.name}" + (f", by default {_literal(default)}" if default is not None else "")


def star_texts(target: Target) -> list[str]:
    """`M = product of the dimensions of x but the last 1`, for every starred dimension at run time."""
    out: dict[str, str] = {}
    for t in target.kernel.tensors:
        dim = t.shape[0].as_symbol if t.star else None
        if dim is not None and dim not in known_dims(target):
            rest = len(t.shape) - 1
            text = f"product of all dimensions of {t.name} but the last" + (f" {rest}" if rest > 1 else "")
            out.setdefault(dim, f"{dim} = {text if rest else f'number of elements of {t.name}'}")
    return list(out.values())


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max((len(a) for a, _ in rows), default=0)
    return [f"{a:{width}}  {b}" for a, b in rows]


# ---- Triton --------------------------------------------------------------------------------------------------------


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


def triton_source(target: Target, program: Program) -> str:
    """The `_triton.py` file: the kernel, and a host function `launch_<kernel>` that needs torch and triton alone."""
    return _Host(target, program).source()


class _Host:
    def __init__(self, target: Target, program: Program) -> None:
        self.target, self.program = target, program
        self.kernel = target.kernel
        self.known = known_dims(target)
        dims = [d for d in self.kernel.dims if d not in self.known]
        users = [*(t.name for t in self.kernel.tensors), *(s.name for s in self.kernel.scalars), *dims]
        launch = f"launch_{program.entry}"
        self.names = Names(users, RESERVED | _HELPERS | {program.entry, launch})
        self.launch = launch
        self.dims = dims
        self.spelled = {d: Poly.sym(self.names[d]) for d in dims}

    def source(self) -> str:
        target, program, names = self.target, self.program, self.names
        head, found, tail = program.source.partition("\nimport triton\n")
        assert found  # every module of the emitter has the line
        total = self._poly(points(target))
        rows = program.schedule.rows
        tensors = [names[t.name] for t in self.kernel.tensors]
        host = render(
            "triton/eject.py.j2",
            launch=self.launch,
            entry=program.entry,
            name=self.kernel.name,
            signature=signature_text(self.kernel, self.known),
            writes=", ".join(names[t.name] for t in self.kernel.tensors if t.role != "in"),
            assumptions=assumptions(target),
            tensors=tensors,
            scalars=[
                names[s.name] + ("" if s.default is None else f"={self._value(s.default)}") for s in self.kernel.scalars
            ],
            bindings=self._bindings(),
            checks=[self._check(t) for t in self.kernel.tensors],
            conditions=self._conditions(),
            first=tensors[0],
            grid=names.fresh("grid"),
            programs=total if rows == 1 else f"triton.cdiv({total}, {rows})",
            arguments=[self._argument(a) for a in program.args],
            warps=program.schedule.threads // 32,
        )
        return f"{head}\nimport torch\nimport triton\n{tail.rstrip()}\n\n\n{host}"

    def _poly(self, p: Poly) -> str:
        return str(p.substitute(self.known).substitute(self.spelled)).replace("*", " * ")

    @staticmethod
    def _value(value: float | int | bool) -> str:
        text = repr(value)
        return f'float("{text}")' if text in ("inf", "-inf", "nan") else text

    # -- sizes ---------------------------------------------------------------------------------------------------
    def _bindings(self) -> list[str]:
        """Assignments of the run-time dimensions, each from the first shape that tells it."""
        bound: set[str] = set()
        out: list[str] = []
        ranked: set[str] = set()
        for linear in (False, True):
            for _ in self.dims:
                for t in self.kernel.tensors:
                    for axis, poly in enumerate(t.shape):
                        line = self._binding(t, axis, poly.substitute(self.known), bound, linear)
                        if line is None:
                            continue
                        if t.name not in ranked:
                            ranked.add(t.name)
                            name, star = self.names[t.name], ", star=True" if t.star else ""
                            out.append(f'_rank("{t.name}", {name}, {len(t.shape)}{star})')
                        out.append(line)
        missing = [d for d in self.dims if d not in bound]
        if missing:
            raise ArgumentError(
                f"{self.kernel.name}: {', '.join(missing)} does not follow from the shapes of its tensors, so no host "
                f"function can be written for it; give it a dimension of its own in one of them"
            )
        return out

    def _binding(self, t: ir.Tensor, axis: int, poly: Poly, bound: set[str], linear: bool) -> str | None:
        unknown = poly.symbols - bound
        if len(unknown) != 1:
            return None
        (dim,) = unknown
        name, rank = self.names[t.name], len(t.shape)
        if t.star and axis == 0:
            size = f"{name}.shape[:{1 - rank}].numel()" if rank > 1 else f"{name}.numel()"
        else:
            size = f"{name}.shape[{axis - rank if t.star else axis}]"
        if poly.as_symbol == dim:
            bound.add(dim)
            return f"{self.names[dim]} = {size}"
        factor = poly.coefficient(dim)
        if not linear or factor is None:
            return None
        bound.add(dim)
        rest = poly.substitute({dim: 0})
        over = size if rest == Poly.const(0) else f"({size} - ({self._poly(rest)}))"
        return f"{self.names[dim]} = {over} // ({self._poly(factor)})"

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
        narrow = [a.axis for a in self.program.args if a.kind == "stride" and a.name == t.name and a.dtype == I32]
        if narrow:
            keywords += f", narrow={_tuple(map(str, narrow))}"
        return _Check(
            self.names[t.name],
            t.name,
            str(TORCH[t.dtype]),
            _tuple(self._poly(p) for p in t.shape),
            _tuple(self._poly(p.substitute(self.known | derived)) for p in merged.shape),
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
                p = derived.get(d, Poly.sym(d)).substitute(self.known)
                text = self._poly(p)
                simple = text.isidentifier()
                out.append((f"{text if simple else f'({text})'} % {n} != 0", f"{p} must be a multiple of {n}"))
        for r in self.kernel.requires:
            left, right = r.left.substitute(self.known), r.right.substitute(self.known)
            if not (left.is_constant and right.is_constant):
                out.append(
                    (f"{self._poly(left)} {_NEGATED[r.op]} {self._poly(right)}", f"{left} {r.op} {right} is required")
                )
        if not variant.wide and not points(self.target).is_constant:
            total = points(self.target)
            out.append((f"{self._poly(total)} > {MAX_POINTS}", f"{total} must be at most {MAX_POINTS}"))
        if len(self.kernel.tensors) > 1:
            devices = ", ".join(f"{self.names[t.name]}.device" for t in self.kernel.tensors)
            out.append((f"len({{{devices}}}) > 1", "all tensors must be on one device"))
        return out

    def _argument(self, a: Arg) -> str:
        if a.kind == "stride":
            return f"{self.names[a.name]}.stride({a.axis})"
        if a.kind == "dim":
            merged = derived_dims(self.target).get(a.name)
            return self._poly(merged if merged is not None else Poly.sym(a.name))
        return self.names[a.name]


def _tuple(items: Iterable[str]) -> str:
    items = list(items)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
