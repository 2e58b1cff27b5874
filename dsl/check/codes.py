"""The checker's error codes (K02xx), each with a program that earns it and its correction."""

from __future__ import annotations

from kgen.dsl.codes import Code


def _kernel(*lines: str, header: str = "kernel f(x: T[M, N], w: W[N]) -> (y: T[M, N]):") -> str:
    """A file of one kernel with the given statements under `header`."""
    return header + "\n" + "".join(f"    {line}\n" for line in lines)


def _squares(*lines: str, header: str = "backward f(x: T[N], d_y: T[N]) -> (d_x: T[N]):") -> str:
    """A kernel that squares, with a backward of the given header and statements."""
    forward = _kernel("parallel n in N", "y[n] = x[n] * x[n]", header="kernel f(x: T[N]) -> (y: T[N]):")
    return forward + "\n" + _kernel("parallel n in N", *(lines or ("d_x[n] = 2.0 * x[n] * d_y[n]",)), header=header)


def _quotients(header: str, statement: str) -> str:
    """A kernel that names a value of a row's elements, with a backward."""
    forward = _kernel(*_IDX, "a = x[m, n] + 1.0", "y[m, n] = 1.0 / a", header="kernel f(x: T[*M, N]) -> (y: T[*M, N]):")
    return forward + "\n" + _kernel(*_IDX, statement, header=header)


def _constant(header: str) -> str:
    """A kernel that multiplies by a const parameter, with a backward."""
    forward = _kernel("parallel n in N", "y[n] = x[n] * K", header="kernel f(x: T[N], K: const i32) -> (y: T[N]):")
    return forward + "\n" + _kernel("parallel n in N", "d_x[n] = d_y[n] * 2", header=header)


_IDX = ("parallel m in M", "tile n in N")
_COPY = "y[m, n] = x[m, n]"
_ROW = "kernel f(x: T[M, N]) -> (y: T[M]):"


def _code(code: str, title: str, wrong: str, right: str) -> Code:
    return Code(code, title, wrong, right)


CHECKER_CODES: tuple[Code, ...] = (
    _code(
        "K0200",
        "a name is declared twice, or hides something else",
        _kernel("parallel m in M", "tile m in N", "y[m, m] = x[m, m]"),
        _kernel(*_IDX, _COPY),
    ),
    _code("K0201", "a name that nothing declares", _kernel(*_IDX, "y[m, n] = xx"), _kernel(*_IDX, _COPY)),
    _code(
        "K0202",
        "a function that nothing declares",
        _kernel(*_IDX, "y[m, n] = expp(x[m, n])"),
        _kernel(*_IDX, "y[m, n] = exp(x[m, n])"),
    ),
    _code(
        "K0203",
        "a stored value carries an index that its target lacks",
        _kernel(*_IDX, "y[m] = x[m, n] * 2.0", header=_ROW),
        _kernel(*_IDX, "y[m] = sum(x[m, n] * 2.0, n)", header=_ROW),
    ),
    _code(
        "K0204",
        "not a dtype",
        _kernel(*_IDX, _COPY, header="kernel f(x: float32[M, N]) -> (y: float32[M, N]):"),
        _kernel(*_IDX, _COPY, header="kernel f(x: f32[M, N]) -> (y: f32[M, N]):"),
    ),
    _code(
        "K0205",
        "the wrong number of arguments",
        _kernel(*_IDX, "y[m, n] = maximum(x[m, n])"),
        _kernel(*_IDX, "y[m, n] = maximum(x[m, n], 0)"),
    ),
    _code(
        "K0206",
        "a reduction over something that is no index of the value",
        _kernel(*_IDX, "y[m] = sum(2.0, n)", header=_ROW),
        _kernel(*_IDX, "y[m] = sum(2.0 * x[m, n], n)", header=_ROW),
    ),
    _code(
        "K0207",
        "a reduction over an index that is spread over programs",
        _kernel("parallel m in M, n in N", "y[m] = sum(x[m, n], n)", header=_ROW),
        _kernel(*_IDX, "y[m] = sum(x[m, n], n)", header=_ROW),
    ),
    _code(
        "K0208",
        "an operand of the wrong kind",
        _kernel(*_IDX, "y[m, n] = x[m, n] // 2"),
        _kernel(*_IDX, "y[m, n] = floor(x[m, n] / 2)"),
    ),
    _code("K0209", "the wrong number of subscripts", _kernel(*_IDX, "y[m, n] = x[m]"), _kernel(*_IDX, _COPY)),
    _code(
        "K0210",
        "a tensor without a subscript, or a subscript on something that is no tensor",
        _kernel(*_IDX, "y[m, n] = x * 2.0"),
        _kernel(*_IDX, "y[m, n] = x[m, n] * 2.0"),
    ),
    _code(
        "K0211",
        "a store into an input",
        _kernel(*_IDX, "x[m, n] = 0.0", _COPY),
        _kernel(*_IDX, "y[m, n] = 0.0"),
    ),
    _code(
        "K0212",
        "an optional tensor is used where it may be absent",
        _kernel(*_IDX, "y[m, n] = x[m, n] * w[n]", header="kernel f(x: T[M, N], w: W[N]?) -> (y: T[M, N]):"),
        _kernel(
            *_IDX,
            "if w:",
            "    y[m, n] = x[m, n] * w[n]",
            "else:",
            "    y[m, n] = x[m, n]",
            header="kernel f(x: T[M, N], w: W[N]?) -> (y: T[M, N]):",
        ),
    ),
    _code(
        "K0213",
        "a condition that must be known at compile time is not",
        _kernel(*_IDX, "if x[m, n] > 0:", "    y[m, n] = x[m, n]", "else:", "    y[m, n] = 0.0"),
        _kernel(*_IDX, "y[m, n] = where(x[m, n] > 0, x[m, n], 0.0)"),
    ),
    _code(
        "K0214",
        "a subscript that is not an integer",
        _kernel(*_IDX, "y[m, n] = x[m, w[n]]"),
        _kernel(*_IDX, "y[m, n] = x[m, i64(w[n])]"),
    ),
    _code(
        "K0215",
        "a store whose target is not affine in the indices",
        _kernel(*_IDX, "y[m, i64(w[n])] = x[m, n]"),
        _kernel(*_IDX, "y[m, n] = x[m, i64(w[n])]"),
    ),
    _code(
        "K0216",
        "a store that would change the kind of a value",
        _kernel(*_IDX, "y[m, n] = x[m, n] * 2.0", header="kernel f(x: T[M, N]) -> (y: i32[M, N]):"),
        _kernel(*_IDX, "y[m, n] = i32(x[m, n] * 2.0)", header="kernel f(x: T[M, N]) -> (y: i32[M, N]):"),
    ),
    _code(
        "K0218",
        "an output's dimension that no input determines",
        _kernel("parallel m in M, k in K", "y[m, k] = x[m]", header="kernel f(x: T[M]) -> (y: T[M, K]):"),
        _kernel("parallel m in M, k in K", "y[m, k] = x[m]", header="kernel f(x: T[M], K: const i32) -> (y: T[M, K]):"),
    ),
    _code(
        "K0219",
        "a shape or extent that is not integer arithmetic over dimensions",
        _kernel("parallel m in M", "tile n in N / 2", _COPY),
        _kernel("parallel m in M", "tile n in N", _COPY),
    ),
    _code(
        "K0220",
        "a star in the wrong place",
        _kernel(*_IDX, _COPY, header="kernel f(x: T[M, *N]) -> (y: T[M, *N]):"),
        _kernel(*_IDX, _COPY, header="kernel f(x: T[*M, N]) -> (y: T[*M, N]):"),
    ),
    _code(
        "K0221",
        "a recursive function",
        "fn g(a) = g(a) + 1.0\n\n" + _kernel(*_IDX, "y[m, n] = g(x[m, n])"),
        "fn g(a) = a + 1.0\n\n" + _kernel(*_IDX, "y[m, n] = g(x[m, n])"),
    ),
    _code(
        "K0222",
        "a sequential loop, which this version does not lower",
        _kernel("parallel m in M", "for n in N by 64:", "    y[m, n] = x[m, n]"),
        _kernel(*_IDX, _COPY),
    ),
    _code(
        "K0223",
        "a default value that does not fit its parameter",
        _kernel(*_IDX, _COPY, header="kernel f(x: T[M, N], n_max: i32 = 1.5) -> (y: T[M, N]):"),
        _kernel(*_IDX, _COPY, header="kernel f(x: T[M, N], n_max: i32 = 1) -> (y: T[M, N]):"),
    ),
    _code(
        "K0224",
        "an assignment to a name that is no value",
        _kernel(*_IDX, "n = x[m, n]", "y[m, n] = n"),
        _kernel(*_IDX, "a = x[m, n]", "y[m, n] = a"),
    ),
    _code(
        "K0225",
        "outputs that are missing or of the wrong form",
        _kernel(*_IDX, "a = x[m, n]", header="kernel f(x: T[M, N]):"),
        _kernel(*_IDX, "x[m, n] = 2.0 * x[m, n]", header="kernel f(x: inout T[M, N]):"),
    ),
    _code(
        "K0227",
        "function calls that expand without measure",
        "fn f0(a) = a * a\n"
        + "".join(f"fn f{i}(a) = f{i - 1}(a) * f{i - 1}(a + 1.0)\n" for i in range(1, 14))
        + "\n"
        + _kernel(*_IDX, "y[m, n] = f13(x[m, n])"),
        "fn f0(a) = a * a\n\n" + _kernel(*_IDX, "y[m, n] = f0(f0(x[m, n]))"),
    ),
    _code(
        "K0226",
        "a constant that cannot be computed",
        _kernel(*_IDX, "y[m, n] = x[m, n] * (1 // 0)"),
        _kernel(*_IDX, "y[m, n] = x[m, n] * (1 // 2)"),
    ),
    _code(
        "K0228",
        "a sum over programs that has no index to sum over",
        _kernel(*_IDX, "y[m, n] += x[m, n]"),
        _kernel(*_IDX, "y[n] += x[m, n]", header="kernel f(x: T[M, N]) -> (y: T[N]):"),
    ),
    _code(
        "K0230",
        "a backward whose kernel is not there, or can have none",
        _squares(header="backward g(x: T[N], d_y: T[N]) -> (d_x: T[N]):"),
        _squares(),
    ),
    _code(
        "K0231",
        "a parameter or output of a backward that means nothing in its kernel",
        _squares("d_x[n] = 2.0 * x[n] * grad[n]", header="backward f(x: T[N], grad: T[N]) -> (d_x: T[N]):"),
        _squares(),
    ),
    _code(
        "K0232",
        "a parameter or output of a backward of another dtype or shape than its kernel has",
        _squares(header="backward f(x: T[N], d_y: T[N]) -> (d_x: f32[N]):"),
        _squares(),
    ),
    _code(
        "K0233",
        "a value that the forward kernel cannot save for a backward",
        _quotients(
            "backward f(saved_a: f32[*M], d_y: T[*M, N]) -> (d_x: T[*M, N]):",
            "d_x[m, n] = -d_y[m, n] / (saved_a[m] * saved_a[m])",
        ),
        _quotients(
            "backward f(y: T[*M, N], d_y: T[*M, N]) -> (d_x: T[*M, N]):",
            "d_x[m, n] = -d_y[m, n] * y[m, n] * y[m, n]",
        ),
    ),
    _code(
        "K0234",
        "a backward that does not say which calls it serves, or serves none",
        _constant("backward f(d_y: T[N]) -> (d_x: T[N]):"),
        _constant("backward f[K: 2](d_y: T[N]) -> (d_x: T[N]):"),
    ),
    _code(
        "K0235",
        "a parameter with the name of an option of every call",
        _kernel(*_IDX, "y[m, n] = check * x[m, n]", header="kernel f(x: T[*M, N], check: f32 = 1.0) -> (y: T[*M, N]):"),
        _kernel(*_IDX, "y[m, n] = scale * x[m, n]", header="kernel f(x: T[*M, N], scale: f32 = 1.0) -> (y: T[*M, N]):"),
    ),
    _code(
        "K0240",
        "a schedule of a backend that has none",
        _kernel("schedule cudda: threads = 256", *_IDX, _COPY),
        _kernel("schedule cuda: threads = 256", *_IDX, _COPY),
    ),
    _code(
        "K0241",
        "a knob that a schedule does not have",
        _kernel("schedule triton: threads = 256", *_IDX, _COPY),
        _kernel("schedule triton: warps = 8", *_IDX, _COPY),
    ),
    _code(
        "K0242",
        "a size of a schedule that cannot be, or not beside the others",
        _kernel("schedule cuda: threads = 200", *_IDX, _COPY),
        _kernel("schedule cuda: threads = 256", *_IDX, _COPY),
    ),
    _code(
        "K0243",
        "a chunk of something that is no tile index",
        _kernel("schedule cuda: chunk[m] = 1024", *_IDX, _COPY),
        _kernel("schedule cuda: chunk[n] = 1024", *_IDX, _COPY),
    ),
    _code(
        "K0244",
        "a schedule's condition on something that is not known when the kernel is compiled",
        _kernel("schedule cuda when M <= 64: threads = 32", *_IDX, _COPY),
        _kernel("schedule cuda when N <= 64: threads = 32", *_IDX, _COPY),
    ),
    _code(
        "K0245",
        "a schedule's condition that never holds",
        _kernel("schedule cuda when N > 64 and N <= 32: threads = 32", *_IDX, _COPY),
        _kernel("schedule cuda when N > 32 and N <= 64: threads = 32", *_IDX, _COPY),
    ),
    _code(
        "K0246",
        "a schedule that another one always comes before",
        _kernel("schedule cuda: threads = 256", "schedule cuda when N <= 64: threads = 32", *_IDX, _COPY),
        _kernel("schedule cuda when N <= 64: threads = 32", "schedule cuda: threads = 256", *_IDX, _COPY),
    ),
)
