"""Which values a host program computes, by how they are made: does a result depend on the gradients that are wanted?

Every value has a number, and two values have one number where the same calls, products and sums make them of the same
operands. A loop over chunks leaves no trace in it, as what a program means does not depend on chunks. What is assigned
in all branches of a choice by gradients counts as one value: there the author says two ways to the same. That is said
of the name: whatever else has the same tensor, a parameter or a value from above, is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from kgen.dsl import ast
from kgen.dsl.host import ast as host
from kgen.dsl.host import ir
from kgen.dsl.signature import Signature, TensorParam
from kgen.dsl.source import Span

Key = tuple[object, ...]


@dataclass
class Numbers:
    """The numbers of values, shared by all ways through an op. A key has the numbers of operands as `Operand`s."""

    keys: list[Key] = field(default_factory=list)
    numbers: dict[Key, int] = field(default_factory=dict)

    def number(self, *key: object) -> Operand:
        """The value that is made as `key` says."""
        if key not in self.numbers:
            self.numbers[key] = len(self.keys)
            self.keys.append(key)
        return Operand(self.numbers[key])

    def within(self, value: Operand) -> set[int]:
        """The numbers of all that a value is made of, its own among them."""
        found: set[int] = set()
        left = [value.number]
        while left:
            n = left.pop()
            if n not in found:
                found.add(n)
                left += [o.number for o in _operands(self.keys[n])]
        return found


@dataclass(frozen=True)
class Operand:
    """A value, by its number."""

    number: int


def _operands(key: Key) -> Iterator[Operand]:
    for part in key:
        if isinstance(part, Operand):
            yield part
        elif isinstance(part, tuple):
            yield from _operands(part)


class Values:
    """What the tensors of one way through an op hold. `made` are the values that were stored under a choice by
    gradients, with the statements that did. `meant` are the values that names have from such a choice, by the tensor
    that they stand for and by choice and name, until the tensor is written again."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.held: dict[str, Operand] = {}
        self.made: list[tuple[Operand, Span]] = []
        self.meant: dict[str, dict[str, Operand]] = {}
        self.choices = 0  # by gradients, that stand around

    def copy(self) -> Values:
        """One that changes by itself, of the same numbers."""
        other = Values(self.numbers)
        other.held, other.made, other.choices = dict(self.held), list(self.made), self.choices
        other.meant = {tensor: dict(by) for tensor, by in self.meant.items()}
        return other

    def give(self, tensor: str, *key: object) -> None:
        """The tensor holds a value that is made as `key` says."""
        self.held[tensor] = self.numbers.number(*key)

    def either(self, v: ir.View, choice: str, name: str) -> ir.View:
        """`v`, which `name` stands for on this way, as the one value that it has behind `choice` on every way."""
        key = f"{name} at {choice}"
        value = self._turned(self.numbers.number("either", choice, name), v)
        self.meant.setdefault(v.tensor, {})[key] = self._spread(value, v)
        return replace(v, meant=key)

    def of(self, v: ir.View) -> Operand:
        """What `v` shows."""
        number = self.numbers.number
        found = self.meant.get(v.tensor, {}).get(v.meant) or self.held.get(v.tensor) or number("nothing")
        for axis, _ in v.chunks:
            key = self.numbers.keys[found.number]
            found = (
                key[2] if key[:2] == ("rows", axis) and isinstance(key[2], Operand) else number("chunk", axis, found)
            )
        return self._turned(found, v)

    def _turned(self, value: Operand, v: ir.View) -> Operand:
        """`value`, or its transpose where `v` is one."""
        key = self.numbers.keys[value.number]
        if not v.transposed:
            return value
        return (
            key[1] if key[0] == "transpose" and isinstance(key[1], Operand) else self.numbers.number("transpose", value)
        )

    def _spread(self, value: Operand, v: ir.View) -> Operand:
        """What a tensor holds in which `v` shows `value`, by chunks if `v` is one."""
        for axis, _ in v.chunks:
            value = self.numbers.number("rows", axis, value)
        return value

    def apply(self, s: ir.Stmt, dim: str) -> None:
        """Go behind a statement, which is no loop; `dim` is the dimension of the loop around, "" outside of loops."""
        number = self.numbers.number
        match s:
            case ir.Product():
                plus = None if s.plus is None else self.of(s.plus)
                found = number("@", s.target.dtype, self.of(s.left), self.of(s.right), plus)
                self._add(s.target, found, dim, s.span) if s.add else self._store(s.target, found, s.span)
            case ir.Sum():
                self._add(s.target, self.of(s.source), dim, s.span)
            case ir.Convert():
                source = self.of(s.source)
                same = s.target.dtype == s.source.dtype
                self._store(s.target, source if same else number("to", s.target.dtype, source), s.span)
            case ir.AllReduce():
                self._store(s.target, number("all", s.kind, self.of(s.source)), s.span)
            case ir.Launch():
                arguments = tuple((n, self.of(a) if isinstance(a, ir.View) else a) for n, a in s.arguments)
                call = number("call", s.kernel, arguments)
                for name, v in s.arguments:
                    if name in s.updated and isinstance(v, ir.View):
                        self._store(v, number("changed", name, call), s.span)
                for k, v in enumerate(s.results):
                    self._store(v, number("result", k, call), s.span)
            case ir.Loop():
                raise AssertionError("loops leave no trace")

    def _store(self, v: ir.View, value: Operand, span: Span) -> None:
        value = self._spread(value, v)
        self.held[v.tensor] = value
        self.meant.pop(v.tensor, None)
        if self.choices:
            self.made.append((value, span))

    def _add(self, v: ir.View, value: Operand, dim: str, span: Span) -> None:
        if dim and not v.chunks:
            value = self.numbers.number("over", dim, value)
        self._store(v, self.numbers.number("+", self.of(v), value), span)


# ---- ways through an op --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way through an op: the answers to its questions, those about gradients apart; and of each output and each
    gradient that it assigns the value, and where it got it."""

    answers: Mapping[str, bool]
    wanted: Mapping[str, bool]
    outputs: Mapping[str, tuple[Operand, Span]]
    gradients: Mapping[str, tuple[Operand, Span]]
    made: Sequence[tuple[Operand, Span]]

    def beside(self, other: Way) -> bool:
        """Whether only the gradients that are wanted tell the two apart."""
        return all(other.answers.get(k, v) == v for k, v in self.answers.items())


@dataclass(frozen=True)
class Difference:
    """A result that two ways make differently, or that only one of them makes. `span`: a statement that is why;
    `when`: the answers on a way where it stands, or is missing."""

    name: str
    missing: bool
    span: Span
    when: tuple[str, ...]


def differences(ways: Sequence[Way], numbers: Numbers) -> Iterator[Difference]:
    """Where results depend on the gradients that are wanted; each result once."""
    told: set[str] = set()
    for a, b in _beside(ways):
        if a.wanted == b.wanted:
            continue
        for name in a.outputs:
            if name in b.outputs and name not in told and a.outputs[name][0] != b.outputs[name][0]:
                told.add(name)
                yield _difference(name, a.outputs[name], b.outputs[name], a, b, numbers)
        for name in dict.fromkeys([*a.gradients, *b.gradients]):
            if name in told or not (a.wanted.get(name, True) and b.wanted.get(name, True)):
                continue
            mine, theirs = a.gradients.get(name), b.gradients.get(name)
            if mine is None or theirs is None:
                there, without = (b, a) if mine is None else (a, b)
                told.add(name)
                yield Difference(name, True, there.gradients[name][1], _words(without, there))
            elif mine[0] != theirs[0]:
                told.add(name)
                yield _difference(name, mine, theirs, a, b, numbers)


def _beside(ways: Sequence[Way]) -> Iterator[tuple[Way, Way]]:
    """The pairs that only the gradients that are wanted tell apart."""
    alike: dict[tuple[tuple[str, bool], ...], list[Way]] = {}
    for w in ways:
        alike.setdefault(tuple(sorted(w.answers.items())), []).append(w)
    for group in alike.values():
        yield from combinations(group, 2)
    for one, other in combinations(alike.values(), 2):
        if one[0].beside(other[0]):
            yield from product(one, other)


def _difference(
    name: str, mine: tuple[Operand, Span], theirs: tuple[Operand, Span], a: Way, b: Way, numbers: Numbers
) -> Difference:
    """The first statement under a choice by gradients that one of the two values hangs on, and not the other."""
    inside = (numbers.within(mine[0]), numbers.within(theirs[0]))
    for way, own, others, other in ((a, *inside, b), (b, *inside[::-1], a)):
        for value, span in way.made:
            if value.number in own and value.number not in others:
                return Difference(name, False, span, _words(way, other))
    return Difference(name, False, mine[1], _words(a, b))


def _words(way: Way, other: Way) -> tuple[str, ...]:
    """The answers about gradients that lead that way and not the other."""
    told = {k: v for k, v in way.wanted.items() if other.wanted.get(k) != v}
    return tuple(f"{name} is {'wanted' if answer else 'not wanted'}" for name, answer in told.items())


def assigned(body: Sequence[host.Stmt], signatures: Mapping[str, Signature]) -> set[str]:
    """The names that statements assign, store in, add to or change in place, whatever their own choices. `signatures`
    are those of kernels by name."""
    found: set[str] = set()
    for s in body:
        match s:
            case host.Assign():
                found |= {_base(t) for t in s.targets}
                found |= _updated(s.value, signatures)
            case host.Accumulate():
                found.add(_base(s.target))
            case host.Perform():
                found |= _updated(s.call, signatures)
            case host.Chunks():
                found |= assigned(s.body, signatures)
            case host.If():
                found |= assigned(s.body, signatures) & assigned(s.orelse, signatures)
            case _:
                pass
    return found


def _base(t: host.Target) -> str:
    return t.id if isinstance(t, ast.Name) else t.tensor


def _updated(e: host.Expr, signatures: Mapping[str, Signature]) -> set[str]:
    """The tensors that a call writes in place."""
    if not isinstance(e, host.Call) or e.func not in signatures:
        return set()
    params = signatures[e.func].params
    given = {p.name: a for p, a in zip(params, e.args, strict=False)} | {k.name: k.value for k in e.keywords}
    inout = [given.get(p.name) for p in params if isinstance(p, TensorParam) and p.role == "inout"]
    return {_base(a) for a in inout if isinstance(a, ast.Name | ast.Subscript)}
