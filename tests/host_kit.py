"""Host programs that no shipped op is made of, and how they are checked and lowered."""

from __future__ import annotations

from kgen.codegen.host import plan
from kgen.codegen.host.lower import lower
from kgen.dsl import ast
from kgen.dsl.check import check_module
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.dtypes import DTYPES
from kgen.dsl.host import ir
from kgen.dsl.host.check import check_ops, elaborate_op, source_of
from kgen.dsl.host.scope import HostSpecialization
from kgen.dsl.parser import parse_text

# A multilayer perceptron whose hidden layer is never there as a whole: made again in the backward section.
MLP = '''\
"""An MLP over chunks of rows."""

kernel silu_(z: inout T[*M, N]):
    parallel m in M, n in N
    z[m, n] = z[m, n] * sigmoid(z[m, n])

kernel silu_gradient_(g: inout T[*M, N], z: T[*M, N]):
    parallel m in M, n in N
    s = sigmoid(z[m, n])
    g[m, n] = g[m, n] * (s * (1.0 + z[m, n] * (1.0 - s)))

op mlp(x: T[*B, H], up: T[F, H], down: T[H, F]) -> (y: T[*B, H]):
    forward:
        for c in chunks(B):
            a = x[c] @ up.T
            silu_(a)
            y[c] = a @ down.T
    backward(d_y):
        for c in chunks(B):
            z = x[c] @ up.T
            a = x[c] @ up.T
            silu_(a)
            d_down += d_y[c].T @ a
            d_a = d_y[c] @ down
            silu_gradient_(d_a, z)
            d_up += d_a.T @ x[c]
            d_x[c] = d_a @ up
'''

# A gradient that is made in the forward pass, and a softmax of a linear layer with a bias.
ATTEND = '''\
"""Softmax of a linear layer."""

kernel rows(z: T[*M, N]) -> (p: T[*M, N]):
    parallel m in M
    tile n in N
    p[m, n] = softmax(z[m, n], n)

kernel rows_gradient(p: T[*M, N], d_p: T[*M, N]) -> (d_z: T[*M, N]):
    parallel m in M
    tile n in N
    d_z[m, n] = p[m, n] * (d_p[m, n] - sum(p[m, n] * d_p[m, n], n))

kernel columns(z: T[*M, N]) -> (s: f32[N]):
    parallel m in M
    tile n in N
    s[n] += z[m, n]

op attend(x: T[*B, H], w: W[V, H], bias: U[V]?) -> (p: T[*B, V]):
    require V >= 1
    forward:
        wide = T(w)
        if bias:
            z = x @ wide.T + T(bias)
        else:
            z = x @ wide.T
        p = rows(z)
    backward(d_p):
        d_z = rows_gradient(p, d_p)
        d_x = d_z @ T(w)
        d_w = d_z.T @ x
        if bias:
            d_bias = U(columns(d_z))
'''

# Kernels on values with more dimensions than theirs, and memory that a chunk takes twice, and squared.
GROWN = """
kernel scaled(x: T[*M, N], s: f32[*M]) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = s[m] * x[m, n]

kernel means(x: T[*M, N]) -> (y: T[*M]):
    parallel m in M
    tile n in N
    y[m] = mean(x[m, n], n)

kernel twice(a: T[M, N]) -> (b: T[2 * M, N]):
    parallel m in M, n in N
    b[m, n] = a[m, n]
    b[m + M, n] = 2.0 * a[m, n]

kernel diagonal(g: T[M, M], x: T[M, N]) -> (y: T[M, N]):
    parallel m in M, n in N
    y[m, n] = g[m, m] * x[m, n]

op heads(x: T[B, S, H], s: f32[B, S]) -> (y: T[B, S, H], m: T[B, S]):
    forward:
        y = scaled(x, s)
        m = means(y)

op in_chunks(x: T[B, S, H], s: f32[B, S]) -> (y: T[B, S, H], m: T[B, S]):
    forward:
        for c in chunks(B):
            z = scaled(x[c], s[c])
            y[c] = T(z)
            m[c] = means(z)

op of_columns(x: T[B, S, H], s: f32[B, S]) -> (y: T[B, S, H], m: T[B, S]):
    forward:
        for c in chunks(S):
            z = scaled(x[c], s[c])
            y[c] = T(z)
            m[c] = means(z)

op doubled(x: T[B, H], w: T[V, H]) -> (y: T[B, V], s: T[H, V]):
    forward:
        for c in chunks(B):
            z = twice(x[c])
            a: T[2 * c, V]
            a = z @ w.T
            s += z.T @ a
            y[c] = x[c] @ w.T

op squared(x: T[B, H]) -> (y: T[B, H]):
    forward:
        for c in chunks(B):
            g = x[c] @ x[c].T
            y[c] = diagonal(g, x[c])
"""


def checked(text: str) -> ast.Module:
    """The module of `text`, which has no mistake."""
    module = parse_text(text)
    diagnostics = Diagnostics()
    check_module(module, diagnostics)
    check_ops(source_of(module), diagnostics)
    diagnostics.raise_if_errors()
    return module


def program(text: str, *, present: tuple[str, ...] = (), wanted: tuple[str, ...] = (), **consts: bool) -> ir.Program:
    """The only op of `text`, settled."""
    module = checked(text)
    spec = HostSpecialization(consts, frozenset(present), frozenset(wanted))
    return elaborate_op(source_of(module), module.ops[0].name, spec)


def planned(
    text: str,
    dtypes: dict[str, str],
    *,
    present: tuple[str, ...] = (),
    wanted: tuple[str, ...] = (),
    accumulate: str = "param",
    **consts: bool,
) -> plan.Plan:
    """Its plan."""
    settled = program(text, present=present, wanted=wanted, **consts)
    return lower(settled, {n: DTYPES[d] for n, d in dtypes.items()}, frozenset(wanted), accumulate)


def steps(body: tuple[plan.Step, ...]) -> list[plan.Step]:
    """All steps, those in loops too."""
    return [x for s in body for x in ([s, *steps(s.body)] if isinstance(s, plan.Loop) else [s])]


def allocated(body: tuple[plan.Step, ...]) -> list[str]:
    """The buffers that steps take memory for."""
    return [s.buffer.name for s in steps(body) if isinstance(s, plan.Alloc)]


def verify(p: plan.Plan, inputs: set[str]) -> None:
    """Every buffer is there before it is used and holds something before it is read; what is taken is given back once,
    or handed out; nothing that the caller owns is written."""
    there, full = set(inputs), set(inputs)
    _verified(p, p.forward, there, full, inputs)
    results = {b for _, b in p.outputs}
    assert there - inputs == results | set(p.saved) and results | set(p.saved) <= full
    upstream = {b for _, b in p.upstream}
    assert set(p.saved_inputs) <= inputs
    owned = {*p.saved_inputs, *upstream}
    there, full = {*owned, *p.saved}, {*owned, *p.saved}
    changeable = {s.buffer for s in p.backward if isinstance(s, plan.Own)}
    _verified(p, p.backward, there, full, {*owned, *(set(p.saved) - changeable)})
    gradients = {b for _, b in p.gradients}
    assert gradients <= full and gradients & set(p.saved) <= changeable
    assert there - owned - set(p.saved) <= gradients and not gradients & owned


def _verified(p: plan.Plan, body: tuple[plan.Step, ...], there: set[str], full: set[str], fixed: set[str]) -> None:
    for s in body:
        match s:
            case plan.Alloc():
                assert s.buffer.name not in there and p.buffers[s.buffer.name] == s.buffer
                there.add(s.buffer.name)
            case plan.Free():
                assert s.buffer in there
                there.remove(s.buffer)
                full.discard(s.buffer)
            case plan.Own():
                assert s.buffer in there
            case plan.Loop():
                # In an empty loop, what it would have filled over the chunks is empty, or is zeroed.
                zeroed = {z.out.buffer for z in s.empty if isinstance(z, plan.Zero)}
                before = set(full)
                _verified(p, s.body, there, full, fixed)
                for b in full - before - zeroed:
                    shape = {n for d in p.buffers[b].shape for n in d.symbols}
                    assert {s.dim, s.chunk} & shape or not _read_later(p, body, s, b)
            case _:
                reads, writes = _touched(p, s)
                assert reads <= full & there, (s, reads - full)
                assert writes <= there and not writes & fixed, s
                full |= writes


def _read_later(p: plan.Plan, body: tuple[plan.Step, ...], loop: plan.Loop, buffer: str) -> bool:
    after = steps(body[body.index(loop) + 1 :])
    kept = {b for _, b in (*p.outputs, *p.gradients)} | set(p.saved)
    return buffer in kept or any(
        buffer in _touched(p, s)[0] for s in after if not isinstance(s, plan.Alloc | plan.Free | plan.Own | plan.Loop)
    )


def _touched(p: plan.Plan, s: plan.Step) -> tuple[set[str], set[str]]:
    """The buffers that a step reads and writes."""
    match s:
        case plan.Zero():
            return set(), {s.out.buffer}
        case plan.Convert():
            return {s.source.buffer}, {s.out.buffer}
        case plan.Matmul():
            read = {v.buffer for v in (s.left, s.right, s.plus) if v is not None}
            return read | ({s.out.buffer} if s.accumulate and s.first is None else set()), {s.out.buffer}
        case plan.Add():
            read = {s.out.buffer} if s.accumulate and s.first is None else set()
            return {s.source.buffer} | read, {s.out.buffer}
        case plan.AllReduce():
            return {s.out.buffer}, {s.out.buffer}
        case plan.Launch():
            ref = p.kernels[s.kernel]
            declared = next(k for k in ref.module.kernels if k.name == ref.name)
            inout = {q.name for q in declared.params if isinstance(q.type, ast.TensorType) and q.type.inout}
            views = {n: a.buffer for n, a in s.arguments if isinstance(a, plan.View)}
            return set(views.values()), {v.buffer for v in s.results} | {b for n, b in views.items() if n in inout}
    return set(), set()
