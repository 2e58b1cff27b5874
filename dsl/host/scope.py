"""What names mean at a point of a host program, and how mistakes in it are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kgen.dsl.affine import FloorDiv, Poly, Sym
from kgen.dsl.check.scope import Choices
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES, VARIABLE_DTYPES, DType
from kgen.dsl.host import ir
from kgen.dsl.host.rows import Mixes, Rows, rows_of
from kgen.dsl.host.state import Fault, State, name_of, unwritten
from kgen.dsl.host.state import Saved as Holdings
from kgen.dsl.host.values import Numbers, Values
from kgen.dsl.signature import ScalarParam, Signature, TensorParam
from kgen.dsl.source import Span

GRADIENT = "d_"  # before the name of a parameter: its gradient


@dataclass(frozen=True)
class HostSpecialization:
    """What a program is settled to: values of const parameters, the optional tensors that are there, and the parameters
    whose gradients are wanted."""

    consts: Mapping[str, int | float | bool]
    present: frozenset[str]
    wanted: frozenset[str]


class Stop(Exception):
    """A mistake was reported; the rest of the statement has no meaning."""


@dataclass(frozen=True)
class Callee:
    """A kernel that may be called: where it is, and its header."""

    ref: ir.KernelRef
    signature: Signature
    known: dict[frozenset[str], Rows | Mixes] = field(default_factory=dict, compare=False)

    def rows(self, dims: frozenset[str]) -> Rows | Mixes:
        """What the kernel does with rows, whose dimensions are `dims`."""
        if dims not in self.known:
            try:
                self.known[dims] = rows_of(next(k for k in self.ref.module.kernels if k.name == self.ref.name), dims)
            except Mixes as mixes:
                self.known[dims] = mixes
        return self.known[dims]


@dataclass
class Loop:
    """A loop that is being elaborated: the index as written, its symbol and the dimension it goes over."""

    index: str
    chunk: str
    dim: str


@dataclass(frozen=True)
class Saved:
    """What a `Scope` knows between two statements."""

    tensors: dict[str, ir.Tensor]
    names: dict[str, ir.View]
    results: dict[str, TensorParam]
    seen: dict[str, int]
    storage: dict[str, str]
    state: Holdings
    values: Values
    asked: dict[str, bool]
    failed: set[str]
    body: list[ir.Stmt]
    used: set[str]
    taken: set[str]
    broken: bool


@dataclass
class Scope:
    """The state of one elaboration. `spec` is None where a file is checked along all of its `choices`."""

    signature: Signature
    callees: Mapping[str, Callee]
    diagnostics: Diagnostics
    spec: HostSpecialization | None
    choices: Choices
    ops: frozenset[str] = frozenset()  # of the file
    tensors: dict[str, ir.Tensor] = field(default_factory=dict)
    names: dict[str, ir.View] = field(default_factory=dict)  # the user's name -> what it stands for now
    results: dict[str, TensorParam] = field(default_factory=dict)  # outputs and gradients that may be assigned
    seen: dict[str, int] = field(default_factory=dict)  # name -> the version of its tensor that it stands for
    storage: dict[str, str] = field(default_factory=dict)  # output or gradient -> the tensor that is made for it
    state: State = field(default_factory=State)
    values: Values = field(default_factory=lambda: Values(Numbers()))
    asked: dict[str, bool] = field(default_factory=dict)  # the gradients that a choice asked for, d_x and so on
    failed: set[str] = field(default_factory=set)
    loops: list[Loop] = field(default_factory=list)
    body: list[ir.Stmt] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # kernels that are called
    taken: set[str] = field(default_factory=set)
    broken: bool = False

    # -- paths ---------------------------------------------------------------------------------------------------
    def save(self) -> Saved:
        """What is known between two statements that stand in no loop and no branch, for `restore`."""
        return Saved(
            dict(self.tensors),
            dict(self.names),
            dict(self.results),
            dict(self.seen),
            dict(self.storage),
            self.state.save(),
            self.values.copy(),
            dict(self.asked),
            set(self.failed),
            list(self.body),
            set(self.used),
            set(self.taken),
            self.broken,
        )

    def restore(self, s: Saved) -> None:
        """Go on from what was saved, which stays as it is."""
        self.tensors, self.results, self.seen, self.storage = (
            dict(s.tensors),
            dict(s.results),
            dict(s.seen),
            dict(s.storage),
        )
        self.names.clear()  # which may be more than a dictionary
        self.names.update(s.names)
        self.state, self.values = State.restored(s.state), s.values.copy()
        self.asked, self.failed, self.body = dict(s.asked), set(s.failed), list(s.body)
        self.used, self.taken, self.broken = set(s.used), set(s.taken), s.broken

    # -- mistakes ------------------------------------------------------------------------------------------------
    def fail(
        self, code: str, message: str, span: Span, help: str, *, label: str = "", notes: tuple[str, ...] = ()
    ) -> Stop:
        """Report a mistake; raise what comes back to leave the statement."""
        self.broken = True
        optional = {t.name for t in self.signature.tensors if t.optional}
        taken = self.choices.describe(optional) if self.spec is None else ()
        if taken:
            notes = (*notes, f"this is so when {' and '.join(taken)}")
        self.diagnostics.error(code, message, span, label=label, help=help, notes=notes)
        return Stop()

    def fault(self, fault: Fault) -> Stop:
        """Report what the state of a tensor forbids; raise what comes back."""
        return self.fail(fault.code, fault.message, fault.span, fault.help, notes=fault.notes)

    # -- parameters ----------------------------------------------------------------------------------------------
    @cached_property
    def scalars(self) -> dict[str, ScalarParam]:
        """The scalar parameters by name."""
        return {s.name: s for s in self.signature.scalars}

    @cached_property
    def inputs(self) -> dict[str, TensorParam]:
        """The tensor parameters by name."""
        return {p.name: p for p in self.signature.params if isinstance(p, TensorParam)}

    def const(self, name: str) -> int | float | bool | None:
        """The value of a const parameter, where it is known."""
        return None if self.spec is None else self.spec.consts.get(name)

    def is_present(self, p: TensorParam) -> bool:
        """Whether an optional tensor is there."""
        if not p.optional:
            return True
        if self.spec is not None:
            return p.name in self.spec.present
        return bool(self.choices.known[p.name]) if p.name in self.choices.known else self.choices.decide(p.name)

    def is_wanted(self, name: str) -> bool:
        """Whether the gradient of parameter `name` is wanted."""
        found = name in self.spec.wanted if self.spec is not None else self.choices.decide(GRADIENT + name)
        self.asked[GRADIENT + name] = found
        return found

    def dim(self, name: str) -> Poly | None:
        """A dimension, a const integer or the extent of a chunk; None for any other name."""
        for loop in self.loops:
            if loop.index == name:
                return Poly.sym(loop.chunk)
        if name in self.signature.dims:
            return Poly.sym(name)
        scalar = self.scalars.get(name)
        if scalar is not None and scalar.const and DTYPES[scalar.dtype].kind == "int":
            value = self.const(name)
            return Poly.sym(name) if value is None else Poly.const(int(value))
        return None

    def shape(self, p: TensorParam) -> tuple[Poly, ...]:
        """The shape of a parameter, with the const integers that are known put in."""
        if self.spec is None:
            return p.shape
        ints = {k: int(v) for k, v in self.spec.consts.items() if isinstance(v, int) and not isinstance(v, bool)}
        return tuple(d.substitute(ints) for d in p.shape)

    def dtypes(self, name: str) -> tuple[DType, ...]:
        """The dtypes that a dtype or a dtype variable may be."""
        return (DTYPES[name],) if name in DTYPES else self.signature.dtype_vars.get(name, VARIABLE_DTYPES)

    # -- tensors -------------------------------------------------------------------------------------------------
    def unique(self, hint: str) -> str:
        """`hint`, or `hint_2`, `hint_3`, ... if it is taken; the name is taken from now on."""
        name, n = hint, 2
        while name in self.taken or name in self.signature.dims:
            name, n = f"{hint}_{n}", n + 1
        self.taken.add(name)
        return name

    def tensor(
        self, hint: str, dtype: str, shape: tuple[Poly, ...], role: str, span: Span, *, inside: bool = True
    ) -> ir.View:
        """A new tensor, as a view of the whole; `inside`: of the loop around, if there is one."""
        for p in shape:
            for loop in self.loops:
                if not _grows(p, loop.chunk):
                    raise self.fail(
                        "K0604",
                        f"the size {self.shown((p,))[1:-1]} may shrink where chunk '{loop.index}' grows",
                        span,
                        "memory is taken for the largest chunk: make its shape grow with the chunk",
                    )
        name = self.unique(hint)
        self.tensors[name] = ir.Tensor(name, dtype, shape, role, span)
        self.state.new(name, written=role != "value", inside=inside)
        return ir.View(name, (), False, dtype, shape, span)

    def shown(self, shape: tuple[Poly, ...]) -> str:
        """A shape as the user would write it here: the rows of a chunk by its index."""
        indices = {loop.chunk: Poly.sym(loop.index) for loop in self.loops}
        return shape_text(tuple(p.substitute(indices) for p in shape))

    def emit(self, s: ir.Stmt, dims: Mapping[str, Poly] | None = None) -> None:
        """Append a statement to the program, where the state of its tensors lets it stand. `dims`: of a launch, what
        the kernel's dimensions are here."""
        kinds = {d.kind for v, how in ir.views(s) if how != "read" for d in self.dtypes(v.dtype)}
        try:
            self.state.apply(s, floats=kinds <= {"float"}, rows=self._rows(s, dims or {}))
        except Fault as fault:
            raise self.fault(fault) from None
        self.body.append(s)
        self.values.apply(s, self.loops[-1].dim if self.loops else "")
        for v, how in ir.views(s):
            if how != "read":
                version, name = self.state.change(v), name_of(v)
                if name in self.names and self.names[name].tensor == v.tensor:
                    self.seen[name] = version

    def _rows(self, s: ir.Stmt, dims: Mapping[str, Poly]) -> Rows | Mixes | None:
        """What a kernel does with the rows of the chunk around; None where it is given none."""
        chunk = self.state.loop
        over = frozenset(n for n, d in dims.items() if chunk and chunk in d.symbols)
        return self.callees[s.kernel].rows(over) if isinstance(s, ir.Launch) and over else None

    # -- names ---------------------------------------------------------------------------------------------------
    def bind(self, name: str, v: ir.View) -> None:
        """From here on `name` stands for what `v` shows."""
        self.names[name] = v
        self.seen[name] = self.state.holdings[v.tensor].version
        self.failed.discard(name)

    def current(self, name: str, v: ir.View, span: Span) -> ir.View:
        """`v`, which is what `name` stands for. Raises Stop if it was changed in place through another name since."""
        h = self.state.holdings[v.tensor]
        if h.changed is not None and self.seen.get(name, 0) != h.version:
            via, where = h.changed
            self.failed.add(name)
            raise self.fail(
                "K0619",
                f"'{name}' stands for a value that was changed through another name, '{via}'",
                span,
                f"use '{via}' for the new value, or keep the old one by a copy before the change: "
                f"{name} = {v.dtype}(...)",
                notes=(f"changed at {where}",),
            )
        return v

    def holding(self, name: str, v: ir.View, span: Span) -> ir.View:
        """The same, where it also holds something."""
        if not self.state.touched(v.tensor):
            raise self.fault(unwritten(name, span))
        return self.current(name, v, span)

    def kind(self, name: str) -> str | None:
        """What a name that cannot be a value means."""
        if name in self.scalars or name in self.inputs:
            return "a parameter"
        if name in self.signature.dims:
            return "a dimension"
        if any(loop.index == name for loop in self.loops):
            return "a chunk"
        return None


def _grows(p: Poly, name: str) -> bool:
    """Whether it is plain that `p` does not shrink where the dimension `name` grows."""
    for atoms, factor in p.terms:
        found = [a for a in atoms if name in Poly((((a,), 1),)).symbols]
        if not found:
            continue
        divided = [a for a in found if isinstance(a, FloorDiv)]
        plain = [a for a in found if a == Sym(name)]
        if factor < 0 or len(plain) + len(divided) < len(found):
            return False
        if any(not a.den.is_constant or a.den.constant < 1 or not _grows(a.num, name) for a in divided):
            return False
    return True


def shape_text(shape: tuple[Poly, ...]) -> str:
    """A shape as it is written."""
    return "[" + ", ".join(map(str, shape)) + "]"
