"""What is written and never used: values, functions, imports, indices, parameters. Warnings (W01xx), not mistakes.

Read is the syntax tree of a file without mistakes, so a name that one branch of a compile-time choice uses is used. A
tensor that is read for its size alone is used. A name that begins with `_` is meant to be unused.

Not looked at here: the statements of ops (`kgen.dsl.host.unused`), and whether another file imports a function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from kgen.dsl import ast
from kgen.dsl.check.backward import SAVED
from kgen.dsl.codes import Code
from kgen.dsl.diagnostics import Diagnostic
from kgen.dsl.host import ast as host
from kgen.dsl.source import Span

_TWICE = "kernel twice(x: T[N]) -> (y: T[N]):\n    parallel n in N\n"

WARNING_CODES: tuple[Code, ...] = (
    Code(
        "W0101",
        "a value that nothing uses",
        _TWICE + "    half = 0.5 * x[n]\n    y[n] = x[n] + x[n]\n",
        _TWICE + "    y[n] = x[n] + x[n]\n",
    ),
    Code(
        "W0102",
        "a function that nothing in its file calls",
        "fn half(a) = 0.5 * a\n\n" + _TWICE + "    y[n] = x[n] + x[n]\n",
        "fn double(a) = a + a\n\n" + _TWICE + "    y[n] = double(x[n])\n",
    ),
    Code(
        "W0103",
        "an import that nothing uses",
        "from activations import relu, silu\n\n" + _TWICE + "    y[n] = relu(x[n]) + relu(x[n])\n",
        "from activations import relu\n\n" + _TWICE + "    y[n] = relu(x[n]) + relu(x[n])\n",
    ),
    Code(
        "W0104",
        "an index that nothing uses",
        _TWICE + "    tile k in N\n    y[n] = x[n] + x[n]\n",
        _TWICE + "    y[n] = x[n] + x[n]\n",
    ),
    Code(
        "W0105",
        "a parameter that nothing uses",
        "kernel twice(x: T[N], scale: f32 = 1.0) -> (y: T[N]):\n    parallel n in N\n    y[n] = x[n] + x[n]\n",
        "kernel twice(x: T[N], scale: f32 = 1.0) -> (y: T[N]):\n    parallel n in N\n"
        "    y[n] = scale * (x[n] + x[n])\n",
    ),
)


def kernels_unused(module: ast.Module) -> list[Diagnostic]:
    """A warning for each name in `module`, but for those of ops, that nothing uses."""
    found = [*_imports_and_functions(module)]
    saved = {k.name: set[str]() for k in module.kernels}
    headers = {k.name: k for k in module.kernels}
    for b in module.backwards:
        saved.setdefault(b.name, set()).update(p.name.removeprefix(SAVED) for p in b.params)
        optional = {p.name for p in headers[b.name].params if isinstance(p.type, ast.TensorType) and p.type.optional}
        found += _kernel(b, set(), optional)  # that an optional tensor is there says which calls the backward is for
    for k in module.kernels:
        found += _kernel(k, saved[k.name], set())
    return found


def warning(code: str, what: str, name: str, span: Span, help: str = "remove it") -> Iterator[Diagnostic]:
    """That `name`, a `what`, is never used; nothing for a name that says so itself."""
    if not name.startswith("_"):
        yield Diagnostic(code, f"{what} '{name}' is never used", span, help=f"{help}, or begin its name with '_'")


def _imports_and_functions(module: ast.Module) -> Iterator[Diagnostic]:
    imported = {name for i in module.imports for name in i.names}
    own = [f for f in module.functions if f.name not in imported and "." not in f.name]
    used = {name for node in (*own, *module.kernels, *module.backwards, *module.ops) for name in uses(node)}
    for i in module.imports:
        for name, span in zip(i.names, i.name_spans, strict=True):
            if name not in used:
                yield Diagnostic("W0103", f"import '{name}' is never used", span, help="remove it")
    for f in own:
        # A file of functions alone is for others to import.
        if f.name not in used and (module.kernels or module.ops):
            yield from warning("W0102", "function", f.name, f.name_span)
        inside = set(uses(f.body))
        for p in f.params:
            if p not in inside:
                yield from warning("W0105", f"parameter of '{f.name}'", p, f.name_span)


def _kernel(kernel: ast.Kernel, saved: set[str], optional: set[str]) -> Iterator[Diagnostic]:
    used = set(uses(kernel.body))
    seen = saved | set(used)
    for s in _statements(kernel.body):
        if isinstance(s, ast.Assign):
            for t in s.targets:
                if isinstance(t, ast.Name) and t.id not in seen:
                    seen.add(t.id)
                    yield from warning("W0101", "value", t.id, t.span)
        elif isinstance(s, ast.Bind):
            for b in s.bindings:
                if b.index not in used:
                    yield from warning("W0104", "index", b.index, b.span)
    stored = {t.tensor for t in _targets(kernel.body)}
    sizes = {p.name: set(uses(p.type)) for p in (*kernel.params, *kernel.outputs)}
    needed = used.union(*(sizes[o.name] for o in kernel.outputs))
    yield from unused_parameters(kernel.params, used | stored | optional, needed, sizes)


def unused_parameters(
    params: tuple[ast.Param, ...], used: set[str], needed: set[str], sizes: dict[str, set[str]]
) -> Iterator[Diagnostic]:
    """Parameters that are not `used` and that tell no size which is `needed`; `sizes` are the names in the type of each
    parameter and output."""
    # What tells a size at every call: an optional tensor may be absent.
    telling = [p.name for p in params if isinstance(p.type, ast.TensorType) and not p.type.optional]
    for p in params:
        if p.name in used:
            continue
        if isinstance(p.type, ast.ScalarType):
            useless = not any(p.name in of for of in sizes.values())
        else:
            told = set[str]().union(*(sizes[name] for name in telling if name != p.name))
            useless = p.type.optional or sizes[p.name] & needed <= told
        if useless:
            telling = [name for name in telling if name != p.name]
            yield from warning("W0105", "parameter", p.name, p.span)


def _statements(body: tuple[ast.Stmt, ...]) -> Iterator[ast.Stmt]:
    for s in body:
        yield s
        if isinstance(s, ast.If):
            yield from _statements((*s.body, *s.orelse))
        elif isinstance(s, ast.For):
            yield from _statements(s.body)


def _targets(body: tuple[ast.Stmt, ...]) -> Iterator[ast.Subscript]:
    for s in _statements(body):
        targets = s.targets if isinstance(s, ast.Assign) else (s.target,) if isinstance(s, ast.Accumulate) else ()
        yield from (t for t in targets if isinstance(t, ast.Subscript))


def uses(node: Any) -> Iterator[str]:
    """The names that are read in any part of a syntax tree: names, tensors that are loaded, what is called."""
    if isinstance(node, tuple):
        for part in node:  # pyright: ignore[reportUnknownVariableType]
            yield from uses(part)
    elif isinstance(node, ast.Assign):
        for t in node.targets:
            yield from uses(t.indices) if isinstance(t, ast.Subscript) else ()
        yield from uses(node.values)
    elif isinstance(node, ast.Accumulate):
        yield from uses((node.target.indices, node.value))
    elif isinstance(node, host.Assign | host.Accumulate):  # whose slices name chunks
        targets = node.targets if isinstance(node, host.Assign) else (node.target,)
        yield from uses((*(t.indices for t in targets if isinstance(t, ast.Subscript)), node.value))
    elif is_dataclass(node) and not isinstance(node, Span):
        for attribute in ("id", "tensor", "func"):
            if isinstance(name := getattr(node, attribute, None), str):
                yield name
        for field in fields(node):
            yield from uses(getattr(node, field.name))
