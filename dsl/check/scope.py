"""Names in force while a kernel is elaborated, and the compile-time choices made on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from kgen.dsl import ast, ir
from kgen.dsl.affine import Poly
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES, DType
from kgen.dsl.signature import ScalarParam, Signature, Specialization, TensorParam
from kgen.dsl.source import Span

# Up to this step each is marked; beyond it marks are further apart, so that a body of any length takes linear time.
_STEPS = 64


class Choices:
    """Answers to compile-time questions: from a specialisation, or, when a file is checked, every combination in turn.

    A check runs the elaboration once for each path of answers; `next_path` moves to the next one. `known` are const
    parameters, and whether optional tensors are there, that are no questions on any path.

    Paths part at one statement and are the same before it. An elaboration that tells where it stands (`mark`) goes on
    from there on the next path (`resume`): it does again what is behind the answer that changed.
    """

    MAX_PATHS = 256

    def __init__(self, known: Mapping[str, int | float | bool] | None = None) -> None:
        self.known = dict(known or {})
        self._path: list[bool] = []
        self._memo: dict[Hashable, bool] = {}
        self._runs = 1
        self._marks: list[_Mark] = []  # of this path, each with more answers than the one before
        self._marked = 0  # the step that was marked last

    def decide(self, key: Hashable) -> bool:
        """The answer to an open question on this path; the same question gets the same answer."""
        if key not in self._memo:
            cursor = len(self._memo)
            if cursor == len(self._path):
                self._path.append(True)
            self._memo[key] = self._path[cursor]
        return self._memo[key]

    def answers(self) -> dict[Hashable, bool]:
        """The answers given on this path."""
        return dict(self._memo)

    def describe(self, optional: Collection[str]) -> tuple[str, ...]:
        """The answers given on this path, in words: of an `optional` tensor, whether it is given."""
        words = {True: ("given", "true"), False: ("absent", "false")}
        return tuple(f"{key} is {words[value][key not in optional]}" for key, value in self._memo.items())

    def next_path(self) -> bool:
        """Move on; False when every path has been taken (or too many have)."""
        self._memo.clear()
        self._marked = 0
        self._runs += 1
        while self._path and not self._path[-1]:
            self._path.pop()
        if not self._path or self._runs > self.MAX_PATHS:
            return False
        self._path[-1] = False
        while self._marks and len(self._marks[-1].answers) >= len(self._path):
            self._marks.pop()
        return True

    def mark(self, position: int, save: Callable[[], Any]) -> None:
        """The elaboration stands before its step `position`; `save` gives all that it knows there, in time that may
        grow with the position."""
        if position - self._marked < position // _STEPS:
            return
        self._marked = position
        if self._marks and len(self._marks[-1].answers) == len(self._memo):
            self._marks.pop()
        self._marks.append(_Mark(position, dict(self._memo), save()))

    def resume(self, restore: Callable[[Any], None]) -> int:
        """The step that this path begins with: the last one marked before it leaves the path that was taken before.
        `restore` is given what was known there. 0 where none was marked."""
        if not self._marks:
            return 0
        mark = self._marks[-1]
        self._memo, self._marked = dict(mark.answers), mark.position
        restore(mark.state)
        return mark.position


@dataclass(frozen=True)
class _Mark:
    """What an elaboration knew before a step, and the answers that had led there."""

    position: int
    answers: dict[Hashable, bool]
    state: Any


class Scope:
    """Everything a name can mean at a point of a kernel body, and the statements emitted so far.

    `spec` is None when a file is checked without a specialisation: const parameters are then open (`choices`), const
    integers are symbols like dimensions, and dtype variables stand for `assumed`.
    """

    def __init__(
        self,
        signature: Signature,
        functions: Mapping[str, ast.Function],
        diagnostics: Diagnostics,
        spec: Specialization | None,
        choices: Choices,
        assumed: DType | None = None,
    ) -> None:
        self.signature = signature
        self.functions = functions
        self.diagnostics = diagnostics
        self.spec = spec
        self.choices = choices
        self.assumed = assumed
        self.tensors: dict[str, TensorParam] = {t.name: t for t in signature.tensors}
        self.scalars: dict[str, ScalarParam] = {s.name: s for s in signature.scalars}
        self.axes: dict[str, ir.Axis] = {}
        self.values: dict[str, ir.Expr] = {}  # user's name -> a reference to its latest binding, or index arithmetic
        self.broken = False  # whether a mistake was found, even one that was reported before
        self.failed: set[str] = set()  # names whose assignment was in error: their uses are not reported again
        self.body: list[ir.Stmt] = []
        self.requires: list[ir.Requirement] = []
        self.schedules: list[tuple[ast.Schedule, bool]] = []  # with whether no compile-time `if` stands around it
        self._last: dict[str, int] = {}  # the last number given to a hint
        self._taken = {*self.tensors, *self.scalars, *signature.dims}

    # -- paths -------------------------------------------------------------------------------------------------------
    def save(self) -> tuple[Any, ...]:
        """What is known between two statements of a body, for `restore`."""
        return (
            dict(self.axes), dict(self.values), set(self.failed), list(self.body), list(self.requires),
            list(self.schedules), dict(self._last), set(self._taken), self.broken,
        )  # fmt: skip

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go on from what was saved, which stays as it is."""
        axes, values, failed, body, requires, schedules, last, taken, self.broken = saved
        self.axes, self.values, self.failed, self.body = dict(axes), dict(values), set(failed), list(body)
        self.requires, self.schedules = list(requires), list(schedules)
        self._last, self._taken = dict(last), set(taken)

    # -- dtypes, dimensions, constants -----------------------------------------------------------------------------
    def dtype(self, name: str) -> DType | None:
        """The dtype that `name` stands for here, or None if it is no dtype name or variable of this kernel."""
        if name in DTYPES:
            return DTYPES[name]
        choices = self.signature.dtype_vars.get(name)
        if choices is None:
            return None
        if self.spec is not None:
            return self.spec.dtypes[name]
        return self.assumed if self.assumed in choices else choices[0]

    def const(self, name: str) -> int | float | bool | None:
        """The value of const parameter `name`, where it is known."""
        return (self.choices.known if self.spec is None else self.spec.consts).get(name)

    def poly_name(self, name: str) -> Poly | None:
        """The polynomial for a dimension, an index or a const integer; None for any other name."""
        if name in self.axes or name in self.signature.dims:
            return Poly.sym(name)
        scalar = self.scalars.get(name)
        if scalar is not None and scalar.const and DTYPES[scalar.dtype].kind == "int":
            value = self.const(name)
            return Poly.sym(name) if value is None else Poly.const(int(value))
        return None

    def shape(self, tensor: TensorParam) -> tuple[Poly, ...]:
        """A tensor's shape with const integers that are known put in."""
        known = self.choices.known if self.spec is None else self.spec.consts
        ints = {k: int(v) for k, v in known.items() if isinstance(v, int) and not isinstance(v, bool)}
        return tuple(p.substitute(ints) for p in tensor.shape)

    def is_present(self, tensor: TensorParam) -> bool:
        """Whether an optional tensor is there on this path."""
        if not tensor.optional:
            return True
        name = tensor.follows or tensor.name
        if self.spec is not None:
            return name in self.spec.present
        return bool(self.choices.known[name]) if name in self.choices.known else self.choices.decide(name)

    # -- values ------------------------------------------------------------------------------------------------------
    def is_taken(self, name: str) -> bool:
        """Whether `name` means something other than a value."""
        return name in self.axes or name in self.tensors or name in self.scalars or name in self.signature.dims

    def bind(self, name: str, value: ir.Expr, span: Span) -> ir.Ref:
        """Emit `name = value` under a name that is unique in the kernel and return a reference to it."""
        unique = self.unique(name)
        let = ir.Let(unique, value, span)
        self.body.append(let)
        return self.ref(let, span)

    def assign(self, name: str, value: ir.Expr, span: Span) -> None:
        """Bind the user's name `name`; a second assignment shadows the first.

        Index arithmetic (`p = s + 1`) stays what it is, so that it can still be an affine subscript.
        """
        self.failed.discard(name)
        self.values[name] = value if isinstance(value, ir.IndexValue) else self.bind(name, value, span)

    def unique(self, hint: str) -> str:
        """`hint`, or `hint_2`, `hint_3`, ... if it is taken; the name is taken from now on."""
        # Counting on from the last number of this hint keeps a name that is assigned thousands of times linear.
        n = self._last.get(hint, 1)
        name = hint if n == 1 else f"{hint}_{n}"
        while name in self._taken or name in self.axes:
            n += 1
            name = f"{hint}_{n}"
        self._last[hint] = n
        self._taken.add(name)
        return name

    @staticmethod
    def ref(let: ir.Let, span: Span) -> ir.Ref:
        """A use of `let` at `span`."""
        return ir.Ref(let.name, let.value.dtype, let.value.axes, span)

    def path_notes(self) -> tuple[str, ...]:
        """For a message: which choices lead here, when there were any."""
        optional = {t.follows or t.name for t in self.signature.tensors if t.optional}
        taken = self.choices.describe(optional) if self.spec is None else ()
        return (f"this is so when {' and '.join(taken)}",) if taken else ()
