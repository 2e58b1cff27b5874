"""Shipped kernels, broken on purpose: what a test says of them shows whether it can fail.

Inside one of these contexts `kgen.ops` (and `kgen.nn`, which is made of it) calls kernels that are loaded anew and
carry a mistake: in their `.kdsl` text, in the text of their derived backward, in the printed CUDA or Triton, or in what
the runtime passes to them. Behind it all is as before. Not for use by several threads.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kgen.codegen.derive import Derived
from kgen.codegen.program import Program
from kgen.dsl import ast
from kgen.dsl.check import Specialization, elaborate
from kgen.dsl.modules import load_source
from kgen.dsl.parser import parse_text
from kgen.dsl.source import SourceFile, Span
from kgen.ops import functional
from kgen.runtime import autograd, injection, preparing, stored
from kgen.runtime.kernel import Kernel
from kgen.runtime.layouts import Layout, Memory
from kgen.runtime.stages import Workspace

OPS = Path(functional.__file__).parent
Edits = tuple[tuple[str, str], ...]


def edited(text: str, edits: Edits, what: str) -> str:
    """`text` with every edit applied wherever it fits; an edit that fits nowhere is a mistake of the test."""
    for old, new in edits:
        if old not in text:
            raise LookupError(f"{what} has no {old!r}:\n{text}")
        text = text.replace(old, new)
    return text


@contextmanager
def fresh(changes: Mapping[str, Edits] | None = None) -> Iterator[None]:
    """`kgen.ops` on kernels that share nothing with those of other tests; `changes` are edits by file of `ops/`."""
    loaded: dict[tuple[str, str], Kernel] = {}

    def load(file: str, name: str) -> Kernel:
        if (file, name) not in loaded:
            path = OPS / f"{file}.kdsl"
            text = edited(path.read_text("utf-8"), (changes or {}).get(file, ()), path.name)
            loaded[file, name] = Kernel(load_source(SourceFile(str(path), text)).module, name)
        return loaded[file, name]

    with stored.suspended(), patch.object(functional, "_loaded", load):
        yield


@contextmanager
def source(file: str, *edits: tuple[str, str]) -> Iterator[None]:
    """The text of `ops/<file>.kdsl` with edits."""
    with fresh({file: edits}):
        yield


@contextmanager
def backward(kernel: str, *edits: tuple[str, str]) -> Iterator[None]:
    """The derived backwards of kernels called `kernel` with edits of their texts, where these fit; one must."""
    original, changed = autograd._training, 0

    def training(*args: Any) -> autograd.Training:
        nonlocal changed
        made = original(*args)
        text = made.derived.backward_text
        if made.kernel.name != kernel or not all(old in text for old, _ in edits):
            return made
        changed += 1
        name = made.derived.backward.name
        return replace(made, backward=Kernel(parse_text(edited(text, edits, kernel), f"{name}.kdsl"), name))

    with fresh(), patch.object(autograd, "_training", training):
        yield
    if not changed:
        raise LookupError(f"no backward of {kernel} has {edits}")


def with_text(derived: Derived, text: str) -> Derived:
    """`derived` with another text of its backward kernel. Raises DslError where it does not check."""
    module = parse_text(text, derived.backward.name + ".kdsl")
    return replace(derived, backward=elaborate(module, derived.backward.name, Specialization({}, {}, frozenset())))


@contextmanager
def printed(backend: str, pattern: str, new: str) -> Iterator[None]:
    """Every launch that `backend` prints with every match of a pattern (multi-line) replaced; some must have one."""
    # By name: the packages have a function `emit` that hides the module of that name.
    places = [importlib.import_module(f"kgen.codegen.{backend}{m}") for m in ("", ".emit")]
    original, changed = places[0].emit, 0

    def edit(program: Program) -> Program:
        nonlocal changed
        source, count = re.subn(pattern, new, program.source, flags=re.MULTILINE)
        changed += count
        return replace(program, source=source, then=tuple(edit(p) for p in program.then))

    def emit(*args: Any, **kwargs: Any) -> Program:
        return edit(original(*args, **kwargs))

    with fresh(), ExitStack() as stack:
        for module in places:
            stack.enter_context(patch.object(module, "emit", emit))
        yield
    if not changed:
        raise LookupError(f"no {backend} program has {pattern!r}")


@contextmanager
def injected(name: str) -> Iterator[None]:
    """Mutation `name` of `kgen.runtime.injection` in every printed program that has what it changes."""
    with fresh(), injection.injected(name) as done:
        yield
    if not done.programs:
        raise LookupError(f"no program has what {name!r} changes")


@contextmanager
def memory(change: Callable[[str, Memory, Mapping[str, Memory]], Memory]) -> Iterator[None]:
    """What a kernel is told of the memory of each of its tensors, changed: `change(name, its memory, all)`."""
    original = preparing.layout

    def layout(kernel: Any, dims: Any, told: Mapping[str, Memory]) -> Layout:
        return original(kernel, dims, {n: change(n, m, told) for n, m in told.items()})

    with fresh(), patch.object(preparing, "layout", layout):
        yield


@contextmanager
def running(change: Callable[[autograd.Training, Callable[[list[Any]], Any], list[Any]], Any]) -> Iterator[None]:
    """Calls of backward kernels as `change(training, run, arguments)`; `run` calls the right one."""
    original = autograd._run_backward

    def run(t: autograd.Training, choice: str, arguments: list[Any]) -> Any:
        return change(t, lambda given: original(t, choice, given), arguments)

    with fresh(), patch.object(autograd, "_run_backward", run):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value, and fresh kernels."""
    with fresh(), patch.object(owner, name, value):
        yield


@contextmanager
def poisoned(zeroed: bool = True) -> Iterator[None]:
    """Workspaces of sums hold NaN, unless they are asked to be zero (and without `zeroed` even then)."""

    def allocate(self: Workspace, device: torch.device) -> torch.Tensor:
        poison = float("nan") if self.dtype.is_floating_point else 10**8
        fill = 0 if self.zeroed and zeroed else poison
        return torch.full(self.shape, fill, dtype=self.dtype, device=device)

    with fresh(), patch.object(Workspace, "allocate", allocate):
        yield


# ---- one operand at a time -------------------------------------------------------------------------------------------


def without_an_operand(text: str) -> Iterator[tuple[str, str]]:
    """Each text in which one `+ - * /` of a computed value has lost one of its two operands, with what was done.

    Subscripts and what is compared are left alone.
    """
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)

    def at(span: Span) -> slice:
        return slice(starts[span.line - 1] + span.column - 1, starts[span.end_line - 1] + span.end_column - 1)

    for node in _arithmetic(parse_text(text, "backward.kdsl").kernels[0].body):
        where = at(node.span)
        for kept in (node.left, node.right):
            child = text[at(kept.span)]
            yield f"{text[where]} -> {child}", f"{text[: where.start]}({child}){text[where.stop :]}"


def _arithmetic(body: tuple[ast.Stmt, ...]) -> Iterator[ast.Binary]:
    def values(e: ast.Expr) -> Iterator[ast.Expr]:
        yield e
        if isinstance(e, ast.Unary):
            yield from values(e.operand)
        elif isinstance(e, ast.Binary) and e.op in "+-*/":
            yield from values(e.left)
            yield from values(e.right)
        elif isinstance(e, ast.Call):
            for a in e.args[1:] if e.func == "where" else e.args:
                yield from values(a)

    for s in body:
        for e in s.values if isinstance(s, ast.Assign) else (s.value,) if isinstance(s, ast.Accumulate) else ():
            yield from (v for v in values(e) if isinstance(v, ast.Binary) and v.op in "+-*/")
