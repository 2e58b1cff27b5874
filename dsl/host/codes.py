"""The error codes of host programs (K06xx), each with a file that earns it and its correction."""

from __future__ import annotations

from kgen.dsl.codes import Code

_KERNELS = """\
kernel scaled(x: T[*M, N], s: f32 = 1.0) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = s * x[m, n]

kernel scale_(x: inout T[*M, N], s: f32 = 1.0):
    parallel m in M, n in N
    x[m, n] = s * x[m, n]

"""
_HEAD = "op f(x: T[B, H], w: T[V, H], bias: T[V]?) -> (y: T[B, V]):"


def _op(*lines: str, header: str = _HEAD) -> str:
    """A file with the kernels `scaled` and `scale_` and one op of the given lines."""
    return _KERNELS + header + "\n" + "".join(f"    {line}\n" for line in lines)


def _forward(*lines: str, header: str = _HEAD) -> str:
    return _op("forward:", *(f"    {line}" for line in lines), header=header)


_RIGHT = _forward("y = x @ w.T")
_BOTH = (
    "forward:",
    "    y = x @ w.T",
    "backward(d_y):",
    "    d_x = d_y @ w",
)

HOST_CODES: tuple[Code, ...] = (
    Code("K0601", "an unknown name in an op", _forward("y = x @ weight.T"), _RIGHT),
    Code(
        "K0602",
        "a call of something that is no kernel",
        _forward("z = scale(x)", "y = z @ w.T"),
        _forward("z = scaled(x)", "y = z @ w.T"),
    ),
    Code(
        "K0603",
        "arguments or targets that do not fit a kernel's signature",
        _forward("z = scaled(x, factor=2.0)", "y = z @ w.T"),
        _forward("z = scaled(x, s=2.0)", "y = z @ w.T"),
    ),
    Code("K0604", "shapes that do not agree", _forward("y = x @ w"), _RIGHT),
    Code(
        "K0605",
        "dtypes that do not agree",
        _forward("y = x @ w.T", header="op f(x: T[B, H], w: W[V, H]) -> (y: T[B, V]):"),
        _forward("y = x @ T(w).T", header="op f(x: T[B, H], w: W[V, H]) -> (y: T[B, V]):"),
    ),
    Code(
        "K0606",
        "a tensor that is read before it holds its value",
        _forward("g: T[B, V]", "y = scaled(g)"),
        _forward("g: T[B, V]", "g = x @ w.T", "y = scaled(g)"),
    ),
    Code(
        "K0607",
        "a store to what an op may not change",
        _forward("scale_(x)", "y = x @ w.T"),
        _forward("z = scaled(x)", "y = z @ w.T"),
    ),
    Code(
        "K0608",
        "a statement that reads what it writes",
        _forward("y = x @ w.T", "g: T[B, B]", "g += x @ x.T", "g += g @ g"),
        _forward("y = x @ w.T", "g: T[B, B]", "g += x @ x.T", "h = g @ g"),
    ),
    Code(
        "K0609", "a section that is missing, unknown or of the wrong form", _op("forwards:", "    y = x @ w.T"), _RIGHT
    ),
    Code("K0610", "an output that is never assigned", _forward("z = x @ w.T"), _RIGHT),
    Code(
        "K0611",
        "a loop or slice that does not go over chunks of a dimension",
        _forward("for c in chunks(B):", "    y[c] = x[c] @ w[c].T"),
        _forward("for c in chunks(B):", "    y[c] = x[c] @ w.T"),
    ),
    Code(
        "K0612",
        "an optional tensor is used where it may be absent",
        _forward("y = x @ w.T + bias"),
        _forward("if bias:", "    y = x @ w.T + bias", "else:", "    y = x @ w.T"),
    ),
    Code(
        "K0613",
        "a condition that is not known before the program runs",
        _forward("if x:", "    y = x @ w.T", "else:", "    y = x @ w.T"),
        _forward("if d_x:", "    y = x @ w.T", "else:", "    y = x @ w.T"),
    ),
    Code(
        "K0614",
        "an expression that an op cannot have",
        _forward("y = x @ w.H"),
        _RIGHT,
    ),
    Code(
        "K0615",
        "a name that is taken",
        _op(*_BOTH, header="op f(x: T[B, H], w: T[V, H], d_x: T[B, H]) -> (y: T[B, V]):"),
        _op(*_BOTH, header="op f(x: T[B, H], w: T[V, H]) -> (y: T[B, V]):"),
    ),
    Code(
        "K0616",
        "a collective of what is no whole value of the op's own",
        _forward("y = all_sum(x) @ w.T", header="op f(x: f32[B, H], w: f32[V, H]) -> (y: f32[B, V]):"),
        _forward("a = x @ w.T", "y = all_sum(a)", header="op f(x: f32[B, H], w: f32[V, H]) -> (y: f32[B, V]):"),
    ),
    Code(
        "K0617",
        "a parameter with the name of an option of every call",
        _forward("y = scaled(x, s=chunk)", header="op f(x: T[B, H], chunk: f32 = 1.0) -> (y: T[B, H]):"),
        _forward("y = scaled(x, s=factor)", header="op f(x: T[B, H], factor: f32 = 1.0) -> (y: T[B, H]):"),
    ),
    Code(
        "K0618",
        "a statement in a loop whose result would depend on the number of chunks",
        _forward("z = scaled(x)", "for c in chunks(B):", "    scale_(z, s=2.0)", "    y[c] = z[c] @ w.T"),
        _forward("z = scaled(x)", "for c in chunks(B):", "    scale_(z[c], s=2.0)", "    y[c] = z[c] @ w.T"),
    ),
    Code(
        "K0619",
        "a name whose value was changed through another name",
        _forward("z = scaled(x)", "a = z", "scale_(a)", "y = z @ w.T"),
        _forward("z = scaled(x)", "a = T(z)", "scale_(a)", "y = z @ w.T"),
    ),
    Code(
        "K0620",
        "a result that depends on which gradients are wanted",
        _op("forward:", "    z = scaled(x)", "    if d_x:", "        scale_(z)", "    y = z @ w.T", *_BOTH[2:]),
        _op("forward:", "    z = scaled(x)", "    y = z @ w.T", "    if d_x:", "        scale_(z)", *_BOTH[2:]),
    ),
    Code(
        "K0621",
        "a gradient that is not assigned wherever it may be wanted",
        _op(*_BOTH[:3], "    if d_w:", "        d_x = d_y @ w", "        d_w = d_y.T @ x"),
        _op(*_BOTH[:3], "    if d_x:", "        d_x = d_y @ w", "    d_w = d_y.T @ x"),
    ),
)
