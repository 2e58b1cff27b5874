"""What a kernel must move and compute, against counts by hand and by enumeration."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kgen.codegen.cost import Cost, cost
from kgen.codegen.machines import ARCHITECTURES, MACHINES, occupancy
from kgen.codegen.operations import DIVISION, SPECIAL, Instructions
from kgen.codegen.shapes import constants
from kgen.codegen.traffic import traffic
from kgen.dsl import ir
from kgen.dsl.affine import Poly
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, Target, binary, target
from kgen.runtime.cost import floor, kernel_cost
from kgen.runtime.derived import gradient_targets

OPS = Path(__file__).resolve().parent.parent / "ops"
SHIPPED = [(path.name, kernel.name) for path in sorted(OPS.glob("*.kdsl")) for kernel in load(path).module.kernels]


def shipped(file: str, name: str, **choices) -> Target:
    module = load(OPS / file).module
    return target(module, next(k for k in module.kernels if k.name == name), Choices(**{"dtype": "bf16", **choices}))


def of(text: str, **choices) -> Target:
    module = parse_text(text, "k.kdsl")
    return target(module, module.kernels[0], Choices(**choices))


def cost_of(made: Target) -> Cost:
    return cost(made.kernel, made.layout.dims)


def moved(made: Target) -> int:
    return cost_of(made).bytes.evaluate(made.layout.dims)


# ---- bytes ---------------------------------------------------------------------------------------------------------

# By hand, in bf16, with every optional tensor: what is read and written of each tensor of the signature.
BY_HAND: dict[str, Callable[..., int]] = {
    "rms_norm": lambda M, N: 2 * M * N + 2 * N + 2 * M * N,
    "layer_norm": lambda M, N: 2 * M * N + 2 * N + 2 * N + 2 * M * N,
    "add_rms_norm": lambda M, N: 2 * (2 * M * N) + 2 * N + 2 * (2 * M * N),
    "softmax": lambda M, N: 2 * M * N + 2 * M * N,
    "log_softmax": lambda M, N: 2 * M * N + 2 * M * N,
    "swiglu": lambda M, N: 3 * 2 * M * N,
    "geglu": lambda M, N: 3 * 2 * M * N,
    "geglu_tanh": lambda M, N: 3 * 2 * M * N,
    # The tables are gathered from by position, more often than they have rows; positions are i64.
    "rope": lambda B, S, HQ, HK, D, P, R: 2 * (2 * B * S * (HQ + HK) * D) + 2 * (2 * P * R) + 8 * B * S,
    # logits, labels; the weight of the label alone is read; loss and z in f32.
    "cross_entropy": lambda M, V: 2 * M * V + 8 * M + 2 * min(M, V) + 4 * M + 4 * M,
    # ... and logits overwritten, scale and z_scale.
    "cross_entropy_": lambda M, V: 2 * (2 * M * V) + 8 * M + 2 * min(M, V) + 2 * (4 * M) + 4 * M + 4 * M,
    "kept_mass": lambda M, V: 8 * M + 2 * min(M, V) + 4 * M + 4 + 4,
    "row_factors": lambda M: 4 + 4 + 4 * M + 4 * M + 4 * M,  # target tells a size and is not read
    "mean_magnitude": lambda V: 2 * V + 4,
    # Without smoothing `spread` is not read.
    "fourth_powers": lambda M, V: 8 * M + 4 + 4 + 2 * min(M, V) + 4 * M + 8 + 4,
    "narrow_token_scales": lambda M: 4 * M + 8 + 4 * M,
    "narrow_row_factors": lambda M: 4 + 4 + 8 + 4 * M + 4 * M + 4 * M,
    "shared_factor": lambda: 4 + 8 + 4 + 4,
    "loss_totals": lambda M: 4 * M + 4 * M + 8 * M + 4 * M + 4 + 4,
    "reduced_loss": lambda: 5 * 4,
    "token_losses": lambda M: 4 * M + 4 * M + 8 * M + 4 * M + 4 * M,
    "token_scales": lambda M: 3 * 4 * M,
    "column_totals": lambda M, N: 2 * M * N + 4 * N,
    "times_": lambda M, N: 2 * (2 * M * N) + 4,
    "times_both_": lambda M, N: 2 * (2 * M * N) + 4 + 4,
    "times_both": lambda M, N: 4 * M * N + 4 + 4 + 2 * M * N,
    "times_rounded": lambda M, N: 4 * M * N + 4 + 2 * M * N,
    # Of a shard: logits, labels; five results of 4 bytes a row.
    "shard_row": lambda M, V, K: 2 * M * V + 8 * M + 5 * 4 * M,
    "shard_parts": lambda M: 6 * 4 * M + 4 * 4 * M,  # own and five of all ranks; four parts a row
    "joined_row": lambda M, K: 4 * M + 3 * 4 * M + 8 * M + 2 * min(M, K) + 2 * 4 * M,  # three of four parts
    "shard_gradients_": lambda M, V, K: 2 * (2 * M * V) + 4 * M + 2 * 4 * M + 8 * M + 2 * 4 * M + 2 * min(M, K),
}


@pytest.mark.parametrize(("file", "name"), SHIPPED)
def test_bytes_of_every_shipped_kernel(file: str, name: str) -> None:
    made = shipped(file, name)
    dims = {d: made.layout.dims[d] for d in made.kernel.dims}
    assert moved(made) == BY_HAND[name](**dims)


def test_optional_tensors_that_are_absent_cost_nothing() -> None:
    whole, without = shipped("rms_norm.kdsl", "rms_norm"), shipped("rms_norm.kdsl", "rms_norm", without=frozenset("w"))
    assert moved(whole) - moved(without) == 2 * 4096
    assert str(cost_of(without).bytes) == "4*M*N"


def test_a_table_is_read_as_far_as_it_is_used() -> None:
    made = shipped("rope.kdsl", "rope", without=frozenset({"positions"}))
    read = {m.tensor.name: m for m in cost_of(made).moved}
    assert str(read["cos"].read) == "2*R*S" and not read["cos"].whole  # of P rows, the first S
    assert read["q"].whole and str(read["q"].read) == "2*B*D*HQ*S"  # in halves, and a rest of no elements


def test_the_backward_of_rms_norm_reads_two_rows_and_writes_one() -> None:
    made = gradient_targets(shipped("rms_norm.kdsl", "rms_norm")).backward
    assert str(cost_of(made).bytes) == "6*M*N + 4*M + 4*N"


TOUCHES = [
    ("a", "x: f32[M, N]", "y: f32[M]", "y[m] = sum(x[m, n], n)", "n in N"),
    ("a part", "x: f32[M, 2*N]", "y: f32[M, N]", "y[m, n] = x[m, n] + x[m, n]", "n in N"),
    ("two parts", "x: f32[M, 3*N]", "y: f32[M, N]", "y[m, n] = x[m, n] + x[m, 2*N + n]", "n in N"),
    ("every other", "x: f32[M, 2*N]", "y: f32[M, N]", "y[m, n] = x[m, 2*n + 1]", "n in N"),
    ("backwards", "x: f32[M, N]", "y: f32[M, N]", "y[m, n] = x[m, N - 1 - n] + x[m, n]", "n in N"),
    ("half of the rows, twice", "x: f32[2*M, N]", "y: f32[M, N]", "y[m, n] = x[m, n] + x[m, N - 1 - n]", "n in N"),
    ("a column", "x: f32[M, N]", "y: f32[M]", "require N >= 1\n    y[m] = x[m, 0]", ""),
    ("shared", "x: f32[M, N], w: f32[N]", "y: f32[M, N]", "y[m, n] = x[m, n] * w[n]", "n in N"),
    ("in place", "x: inout f32[M, N], w: f32[N]", "", "x[m, n] = x[m, n] * w[n]", "n in N"),
    ("overwritten", "x: inout f32[M, N], w: f32[M]", "", "x[m, n] = w[m]", "n in N"),
]


@pytest.mark.parametrize(("_what", "inputs", "outputs", "statement", "tile"), TOUCHES, ids=[t[0] for t in TOUCHES])
def test_bytes_against_every_element_that_is_touched(
    _what: str, inputs: str, outputs: str, statement: str, tile: str
) -> None:
    tile = f"    tile {tile}\n" if tile else ""
    out = f" -> ({outputs})" if outputs else ""
    made = of(f"kernel k({inputs}){out}:\n    parallel m in M\n{tile}    {statement}\n", dims={"M": 5, "N": 7})
    dims = made.layout.dims
    for m in cost_of(made).moved:
        size = m.tensor.dtype.itemsize
        for accesses, counted in ((_loads(made.kernel), m.read), (_stores(made.kernel), m.written)):
            assert counted.evaluate(dims) == size * len(_elements(made.kernel, m.tensor.name, accesses, dims))


def _loads(kernel: ir.Kernel) -> list[tuple[str, tuple[Poly, ...]]]:
    loads = [a for a in ir.accesses(kernel.body) if isinstance(a, ir.Load)]
    return [(a.tensor, tuple(p for p in a.at if isinstance(p, Poly))) for a in loads]


def _stores(kernel: ir.Kernel) -> list[tuple[str, tuple[Poly, ...]]]:
    return [(a.tensor, a.at) for a in ir.accesses(kernel.body) if not isinstance(a, ir.Load)]


def _elements(kernel: ir.Kernel, tensor: str, accesses, dims) -> set[tuple[int, ...]]:
    """Every element that some index touches."""
    names = [a.name for a in kernel.axes]
    ranges = [range(a.extent.evaluate(dims)) for a in kernel.axes]
    return {
        tuple(p.evaluate({**dims, **dict(zip(names, values, strict=True))}) for p in at)
        for name, at in accesses
        if name == tensor
        for values in itertools.product(*ranges)
    }


# ---- operations ----------------------------------------------------------------------------------------------------

HEAD = "kernel k(x: f32[M, N], w: f32[N]) -> (y: f32[M, N]):\n    parallel m in M\n    tile n in N\n"
# The statements, and by hand: additions, of them fused, multiplications, divisions, special functions, others.
COUNTED = [
    ("y[m, n] = x[m, n] + w[n]", "M*N", "0", "0", "0", "0", "0"),
    ("y[m, n] = x[m, n] * w[n] + 1.0", "M*N", "M*N", "M*N", "0", "0", "0"),
    # The product has two uses: it is there to be used again.
    ("p = x[m, n] * w[n]\n    y[m, n] = (p + 1.0) * p", "M*N", "0", "2*M*N", "0", "0", "0"),
    # What has no index m is done once for all of them.
    ("y[m, n] = x[m, n] * (w[n] + 1.0)", "N", "0", "M*N", "0", "0", "0"),
    ("y[m, n] = x[m, n] * (w[n] * w[n] + 1.0)", "N", "N", "M*N + N", "0", "0", "0"),
    ("s = sum(x[m, n] * x[m, n], n)\n    y[m, n] = x[m, n] * s", "M*N - M", "M*N - M", "2*M*N", "0", "0", "0"),
    ("y[m, n] = x[m, n] - max(x[m, n], n)", "M*N", "0", "0", "0", "0", "M*N - M"),
    # Equal expressions are one.
    ("y[m, n] = exp(x[m, n]) + exp(x[m, n])", "M*N", "0", "0", "0", "M*N", "0"),
    ("y[m, n] = x[m, n] / sqrt(sum(x[m, n], n))", "M*N - M", "0", "0", "M*N", "M", "0"),
    ("y[m, n] = where(x[m, n] > 0.0, x[m, n], 0.0) * w[n]", "0", "0", "M*N", "0", "0", "2*M*N"),
    # What no store needs is not done.
    ("_t = exp(x[m, n])\n    y[m, n] = x[m, n] + w[n]", "M*N", "0", "0", "0", "0", "0"),
]


@pytest.mark.parametrize(("body", "add", "fused", "mul", "division", "special", "other"), COUNTED)
def test_operations_by_hand(body: str, add: str, fused: str, mul: str, division: str, special: str, other: str) -> None:
    w = cost_of(of(f"{HEAD}    {body}\n", dims={"M": 5, "N": 64})).work
    got = {kind: str(p) for kind, p in w.counts.items()}
    want = {"add": add, "mul": mul, "division": division, "special": special, "other": other, "integer": "0"}
    assert got == want and str(w.fused) == fused


def test_sums_over_programs_are_additions() -> None:
    text = "kernel k(x: f32[M, N]) -> (y: f32[N]):\n    parallel m in M, n in N\n    y[n] += x[m, n] * x[m, n]\n"
    w = cost_of(of(text, dims={"M": 5, "N": 64})).work
    assert (str(w.counts["add"]), str(w.fused), str(w.counts["mul"])) == ("M*N - N", "M*N - N", "M*N")
    assert str(w.flops) == "2*M*N - N"


def test_integers_are_counted_apart() -> None:
    text = "kernel k(x: i64[N], z: i64[N]) -> (y: i64[N]):\n    parallel n in N\n    y[n] = x[n] * z[n] + 1\n"
    counts = cost_of(of(text, dims={"N": 64})).work.counts
    assert str(counts["integer"]) == "2*N" and not counts["add"].terms


def test_instructions_of_softmax() -> None:
    made = shipped("softmax.kdsl", "softmax")
    m, n = 8192, 32000
    # An exponential an element, a reciprocal a row; x - max, the sum, e * (1 / total), and what is inside of them.
    assert cost_of(made).work.instructions(made.layout.dims) == Instructions(
        m * n + m, (2 * m * n - m) + m * n + SPECIAL["exp"].f32 * m * n + DIVISION.f32 * m
    )


def _machine_code(fn: str, backend: str) -> Counter[str]:
    """How many instructions of each kind an element takes, by name: of a product alone, 1 FMUL."""
    value = {"div": "x[n] / z[n]", "pow": "x[n] ** z[n]"}.get(fn, f"{fn}(x[n]) * z[n]")
    text = f"kernel k(x: f32[N], z: f32[N]) -> (y: f32[N]):\n    parallel n in N\n    y[n] = {value}\n"
    made = of(text, dims={"N": (1 << 20) + 1})
    program = made.program(backend)
    elements = program.schedule.rows // program.schedule.threads
    found = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9]+)", binary(made, program, "sm_90").sass, re.M
    )
    return Counter({name: n // elements for name, n in Counter(found).items()} | {"each": elements})


@pytest.mark.parametrize("fn", [*SPECIAL, "div"])
def test_special_functions_take_what_the_table_says(fn: str) -> None:
    """In the machine code, ranges that are treated apart included: no more than that, and no less than two thirds."""
    said = DIVISION if fn == "div" else SPECIAL[fn]
    own = 0 if fn in ("div", "pow") else 1  # the product beside it
    codes = [_machine_code(fn, backend) for backend in ("cuda", "triton")]
    assert min(c["MUFU"] for c in codes) == said.special
    least = min(sum(c[name] for name in ("FFMA", "FMUL", "FADD")) for c in codes) - own
    assert 2 / 3 * (least - 1) <= said.f32 <= least + 2


# ---- machines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "programs", "by"),
    [
        # What the occupancy calculator says: registers come in units of 256 a warp, in four partitions.
        ("sm_90", 1024, 32, 0, 2, ("registers", "threads")),
        ("sm_90", 1024, 33, 0, 1, ("registers",)),
        ("sm_90", 1024, 64, 0, 1, ("registers",)),
        ("sm_90", 1024, 65, 0, 0, ("registers",)),
        ("sm_90", 256, 40, 0, 6, ("registers",)),
        ("sm_90", 32, 16, 0, 32, ("programs",)),
        ("sm_90", 128, 16, 99 * 1024, 2, ("shared memory",)),
        ("sm_90", 128, 16, 227 * 1024, 1, ("shared memory",)),
        ("sm_90", 128, 16, 228 * 1024, 0, ("shared memory",)),
        ("sm_80", 256, 32, 20 * 1024, 7, ("shared memory",)),
        ("sm_86", 256, 64, 0, 4, ("registers",)),
        ("sm_75", 1024, 32, 0, 1, ("threads",)),
        ("sm_89", 64, 200, 16_888, 4, ("registers",)),
        ("sm_89", 64, 168, 16_888, 5, ("shared memory",)),
        ("sm_120", 512, 64, 20_000, 2, ("registers",)),
        ("sm_120", 64, 16, 40_000, 2, ("shared memory",)),
        ("sm_120", 64, 128, 0, 8, ("registers",)),
    ],
)
def test_occupancy(arch: str, threads: int, registers: int, shared: int, programs: int, by: tuple[str, ...]) -> None:
    got = occupancy(ARCHITECTURES[arch], threads, registers, shared)
    assert (got.programs, got.limited_by) == (programs, by)
    assert got.share == programs * threads / ARCHITECTURES[arch].threads


def test_times_of_copies() -> None:
    h200, a100 = MACHINES["h200"], MACHINES["a100"]
    for rows, columns, seconds in ((16384, 1024, 20.2e-6), (16384, 4096, 67.1e-6)):
        assert h200.memory_time(2 * rows * columns * 2) == pytest.approx(seconds, rel=1e-9)
    # Between and beyond the measured copies, against others: 8192 x 32000 both ways 0.248 ms, 16384 x 4096 three times
    # 0.098 ms, 8192 x 14336 three times 0.168 ms.
    for moves, seconds in ((4 * 8192 * 32000, 248e-6), (6 * 16384 * 4096, 98.3e-6), (6 * 8192 * 14336, 168e-6)):
        assert h200.memory_time(moves) == pytest.approx(seconds, rel=0.02)
    assert h200.memory_time(8 << 30) == 2 * h200.memory_time(4 << 30)
    assert h200.achievable == pytest.approx(4.27e12) and round(h200.in_flight, -3) == 29_000
    assert a100.achievable is None and a100.memory_time(2039 * 10**9) == pytest.approx(1.0)


@pytest.mark.parametrize("name", MACHINES)
def test_peaks_agree_with_data_sheets(name: str) -> None:
    m = MACHINES[name]
    sheet = {
        "h200": 67, "h100": 67, "a100": 19.5, "a100-40gb": 19.5, "a10": 31.2, "l4": 30.3, "l40s": 91.6,
        "rtx4090": 82.6, "b200": 75, "t4": 8.1,
    }  # fmt: skip
    assert 2e-12 * m.limits.f32 * m.multiprocessors * m.clock == pytest.approx(sheet[name], rel=0.01)


def test_the_floor_of_rms_norm_is_a_copy() -> None:
    made, h200 = shipped("rms_norm.kdsl", "rms_norm"), MACHINES["h200"]
    got = floor(made.kernel, cost_of(made), made.layout.dims, h200)
    assert got.bound == "memory" and got.seconds == pytest.approx(67.1e-6, rel=1e-3)
    small = shipped("rms_norm.kdsl", "rms_norm", dims={"N": 1024})
    assert floor(small.kernel, cost_of(small), small.layout.dims, h200).seconds == pytest.approx(20.2e-6, rel=1e-3)


def test_special_functions_may_bind() -> None:
    """Eight exponentials an element of two bytes: 16 a clock and multiprocessor are slower than the memory."""
    terms = " + ".join(f"exp(x[n] * {i}.0)" for i in range(1, 9))
    made = of(f"kernel k(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    y[n] = {terms}\n", dims={"N": 1 << 26})
    got = floor(made.kernel, cost_of(made), made.layout.dims, MACHINES["h200"])
    assert got.bound == "special"
    assert got.seconds == pytest.approx(8 * 2**26 / (16 * 132 * 1.98e9))


def test_f64_is_bound_by_its_units() -> None:
    terms = " * ".join(f"(x[n] + {i}.0)" for i in range(1, 65))
    made = of(f"kernel k(x: f64[N]) -> (y: f64[N]):\n    parallel n in N\n    y[n] = {terms}\n", dims={"N": 1 << 20})
    got = floor(made.kernel, cost_of(made), made.layout.dims, MACHINES["rtx4090"])
    assert got.bound == "f64" and got.seconds == pytest.approx(127 * 2**20 / (2 * 128 * 2.52e9))


# ---- schedules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_passes_ask_for_a_row_again(backend: str) -> None:
    made = shipped("cross_entropy.kdsl", "cross_entropy_")
    (launch,) = traffic(made.scheduled(backend), made.layout.dims)
    m, v = 8192, 32000
    logits = next(r for r in launch.requests if r.tensor == "logits")
    # Two passes, and the logit of the label, which is stored again behind the second.
    assert (logits.passes, logits.read, logits.written) == (2, 2 * (2 * m * v) + 2 * m, 2 * m * v + 2 * m)
    assert logits.once == 2 * (2 * m * v) and logits.again == 2 * m * v + 2 * (2 * m)
    assert launch.programs == m
    # Online, and once more for the gradient that is stored.
    assert 2 * m * v <= launch.instructions.special <= 2.05 * m * v


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_whole_row_is_read_once_and_weights_by_every_program(backend: str) -> None:
    made = shipped("rms_norm.kdsl", "rms_norm")
    (launch,) = traffic(made.scheduled(backend), made.layout.dims)
    by = {r.tensor: r for r in launch.requests}
    m, n = 16384, 4096
    assert (by["x"].read, by["w"].read, by["y"].written) == (2 * m * n, 2 * n * launch.programs, 2 * m * n)
    assert launch.once == moved(made) and launch.in_flight == 2 * n


def test_a_load_that_waits_for_another_is_not_in_flight_with_it() -> None:
    text = (
        "kernel k(x: f32[V, N], t: i64[M], z: f32[M, N]) -> (y: f32[M, N]):\n    example V = 9, M = 8, N = 64\n"
        "    parallel m in M\n    tile n in N\n    y[m, n] = z[m, n] + x[t[m], n]\n"
    )
    made = of(text)
    (launch,) = traffic(made.scheduled("cuda"), made.layout.dims)
    rows = made.scheduled("cuda").schedule.rows
    assert launch.in_flight in (8 * rows, (8 + 4 * 64) * rows)  # z may be asked for before x is, or behind it


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_sums_over_programs_write_shares_and_read_them(backend: str) -> None:
    made = gradient_targets(shipped("rms_norm.kdsl", "rms_norm")).backward
    first, finish = traffic(made.scheduled(backend, 108), made.layout.dims)
    n = 4096
    assert first.programs % 108 == 0
    shares = {r.tensor: r for r in first.requests}["d_w_partial"]
    assert shares.written == 4 * n * first.programs and shares.read == 0
    assert {r.tensor: (r.read, r.written) for r in finish.requests} == {
        "d_w": (0, 2 * n), "d_w_partial": (shares.written, 0),
    }  # fmt: skip


def test_the_cost_of_what_is_compiled() -> None:
    made = shipped("rms_norm.kdsl", "rms_norm")
    c = kernel_cost(made, MACHINES["h200"])
    for backend in ("cuda", "triton"):
        (launch,) = c.backends[backend]
        assert not isinstance(launch, str)
        program = made.program(backend)
        assert launch.used == binary(made, program, "sm_90").resources
        fits = occupancy(ARCHITECTURES["sm_90"], program.schedule.threads, launch.used.registers, 1024)
        assert launch.occupancy.programs == fits.programs
        assert launch.waves == 16384 / program.schedule.rows / (132 * fits.programs)
        assert launch.in_flight == fits.programs * program.schedule.rows * 2 * 4096
    turing = kernel_cost(shipped("rms_norm.kdsl", "rms_norm", dtype="f32"), MACHINES["t4"])
    assert set(turing.backends) == {"cuda", "triton"}


def test_dimensions_that_are_constants() -> None:
    text = (
        "kernel k(x: f32[M, 2 * K], K: const i64 = 8) -> (y: f32[M, K]):\n    parallel m in M\n    tile n in K\n"
        "    y[m, n] = x[m, n]\n"
    )
    made = of(text, dims={"M": 3})
    c = kernel_cost(made, MACHINES["h200"], ("cuda",))
    assert c.dims == {"M": 3} | constants(made.kernel) and c.cost.bytes.evaluate(c.dims) == 3 * 8 * 4 * 2
