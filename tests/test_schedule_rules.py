"""`schedule` statements: what they say, what they may not say, and that they change no result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_accumulate import randn
from typer.testing import CliRunner

import kgen
from kgen.cli import app
from kgen.codegen.derive import derive
from kgen.codegen.derive.written import gradients_of
from kgen.codegen.schedule import Schedule, ScheduleError
from kgen.dsl.check import check_module
from kgen.dsl.diagnostics import Diagnostics
from kgen.dsl.format import format_source
from kgen.dsl.parser import parse, parse_text
from kgen.dsl.printing import module_text
from kgen.dsl.source import SourceFile
from kgen.runtime.ahead import Choices, target
from kgen.runtime.differential import answer, ask

BACKENDS = ("cuda", "triton")
BODY = """    parallel m in M
    tile n in N
    r = rsqrt(sum(x[m, n] * x[m, n], n) / N)
    y[m, n] = x[m, n] * r * w[n]
"""
HEAD = "kernel norm(x: T[*M, N], w: T[N]) -> (y: T[*M, N]):\n    example M = 64, N = 4096\n"


def norm(*rules: str) -> str:
    return HEAD + "".join(f"    {rule}\n" for rule in rules) + BODY


def schedule(text: str, backend: str = "cuda", **choices) -> Schedule:
    module = parse_text(text, "k.kdsl")
    return target(module, module.kernels[0], Choices(**choices)).scheduled(backend).schedule


def problems(text: str) -> list[tuple[str, str]]:
    """Code and message of each mistake."""
    diagnostics = Diagnostics()
    module = parse(SourceFile("k.kdsl", text), diagnostics)
    check_module(module, diagnostics)
    return [(d.code, d.message) for d in diagnostics.sorted()]


# ---- the statement -------------------------------------------------------------------------------------------------


def test_printing_and_formatting() -> None:
    text = norm(
        "schedule   cuda when N<=4096 and T==bf16:threads=256,rows=1", "schedule triton:chunk[ n ]=1024 ,warps=8"
    )
    want = norm(
        "schedule cuda when N <= 4096 and T == bf16: threads = 256, rows = 1",
        "schedule triton: chunk[n] = 1024, warps = 8",
    )
    assert format_source(text) == want == format_source(want)
    assert module_text(parse_text(text, "k.kdsl")) == want
    whole = norm("schedule triton: chunk[n] = whole")
    assert module_text(parse_text(whole, "k.kdsl")) == whole


def test_neither_word_is_reserved() -> None:
    text = (
        "kernel schedule(when: f32[schedule]) -> (cuda: f32[schedule]):\n    parallel m in schedule\n"
        "    schedule_2 = when[m]\n    cuda[m] = schedule_2\n"
    )
    assert problems(text) == []
    module = kgen.loads(
        "kernel k(x: f32[N]) -> (y: f32[N]):\n    parallel n in N\n    schedule = x[n]\n    y[n] = schedule\n"
    )
    x = torch.randn(5)
    assert torch.equal(module["k"](x, backend="reference"), x)


def test_behind_the_colon_of_a_branch() -> None:
    text = (
        "kernel k(x: f32[N], w: f32[N]?) -> (y: f32[N]):\n    parallel n in N\n"
        "    if w: schedule cuda: threads = 64\n    y[n] = x[n]\n"
    )
    assert problems(text) == []
    assert "    if w:\n        schedule cuda: threads = 64\n" in format_source(text)


def test_a_schedule_without_its_backend() -> None:
    ((code, message),) = problems(norm("schedule: threads = 64"))
    assert (code, message) == ("K0110", "expected a backend, found ':'")


@pytest.mark.parametrize(
    "line",
    ["schedule cuda", "schedule cuda:", "schedule cuda threads = 4", "schedule cuda when: threads = 64",
     "schedule cuda when N > 1 threads = 64", "schedule cuda: threads", "schedule cuda: threads = N + 1",
     "schedule cuda: chunk[] = 4", "schedule cuda: threads == 64"],
)  # fmt: skip
def test_lines_that_are_no_statement_are_one_mistake_with_a_caret(line: str) -> None:
    found = problems(norm(line))
    assert len(found) == 1 and found[0][0] in ("K0110", "K0123"), found


# ---- which counts --------------------------------------------------------------------------------------------------


def test_the_first_whose_condition_holds_counts() -> None:
    text = norm(
        "schedule cuda when N <= 1024: threads = 64",
        "schedule cuda when N % 512 == 0 and N < 8192: threads = 256",
        "schedule cuda when T != bf16: threads = 512",
        "schedule triton when N > 2048: warps = 16",
    )
    for n, dtype, threads in ((1024, "bf16", 64), (4096, "bf16", 256), (4096, "f32", 256), (8192, "f32", 512)):
        got = schedule(text, dims={"N": n}, dtype=dtype)
        assert got.threads == threads and got.by.startswith("the schedule at k.kdsl:"), (n, dtype)
    assert schedule(text, dims={"N": 8192}, dtype="bf16") == schedule(norm(), dims={"N": 8192}, dtype="bf16")
    assert schedule(text, "triton", dims={"N": 4096}).threads == 512
    assert schedule(text, "triton", dims={"N": 2048}).by == "ladders"


def test_what_is_not_set_stays_as_the_ladders_have_it() -> None:
    was, got = schedule(norm()), schedule(norm("schedule cuda: threads = 64"))
    assert (got.threads, got.rows, got.vector, got.chunks) == (64, was.rows, was.vector, was.chunks)


def test_chunks_and_whole_rows() -> None:
    text = norm("schedule cuda when N < 8192: chunk[n] = 512", "schedule cuda: threads = 1024, chunk[n] = whole")
    assert schedule(text).chunks == (("n", 512),)
    assert schedule(norm(), dims={"N": 1 << 19}, dtype="f32").chunks
    assert schedule(text, dims={"N": 1 << 19}, dtype="f32").chunks == ()


def test_inside_a_compile_time_branch() -> None:
    text = (
        "kernel k(x: T[*M, N], w: T[N]?, K: const i64 = 2) -> (y: T[*M, N]):\n    example M = 8, N = 4096\n"
        "    parallel m in M\n    tile n in N\n    s = sum(x[m, n], n)\n"
        "    if w:\n        schedule cuda when K * N > 8192: threads = 64\n        schedule cuda: threads = 32\n"
        "        y[m, n] = x[m, n] * w[n] * s * K\n    else:\n        y[m, n] = x[m, n] * s * K\n"
        "    schedule cuda: threads = 1024\n"
    )
    assert problems(text) == []
    assert schedule(text).threads == 32 and schedule(text, consts={"K": "3"}).threads == 64
    assert schedule(text, without=frozenset("w")).threads == 1024


def test_sizes_that_do_not_fit_a_call_name_the_line() -> None:
    pair = (
        "kernel k(x: inout T[*M, N]):\n    example M = 8, N = 4096\n    parallel m in M\n    tile n in N\n"
        "    schedule cuda: chunk[n] = 512\n    x[m, n] = x[m, N - 1 - n]\n"
    )
    with pytest.raises(ScheduleError, match=r"leave n whole; it is set by the schedule at k\.kdsl:5:5"):
        schedule(pair)


def test_what_is_not_set_suits_what_is() -> None:
    flat = "kernel k(x: T[N]) -> (y: T[N]):\n    example N = 64\n    parallel n in N\n    {}\n    y[n] = x[n]\n"
    was = schedule(flat.format("require N >= 1"), dtype="f32")
    assert (was.threads, was.vector) == (256, 4)
    for rule, sizes in {
        "rows = 8192": (256, 8192, 4), "rows = 512": (128, 512, 4), "rows = 64": (32, 64, 2), "rows = 32": (32, 32, 1),
        "rows = 512, threads = 512": (512, 512, 1), "rows = 64, vector = 1": (64, 64, 1),
        "rows = 512, threads = 256, vector = 4": (256, 512, 2),
    }.items():  # fmt: skip
        got = schedule(flat.format(f"schedule cuda: {rule}"), dtype="f32")
        assert (got.threads, got.rows, got.vector) == sizes, rule
    got = schedule(norm("schedule cuda: rows = 1024"), dims={"N": 64})
    assert (got.threads, got.rows) == (1024, 1024)


def test_registers_are_told_to_the_compiler() -> None:
    text = norm("schedule triton when N > 4096: registers = 40", "schedule triton: warps = 8")
    assert schedule(text, "triton", dims={"N": 8192}).registers == 40
    assert schedule(text, "triton", dims={"N": 4096}).registers == 0


def test_stages_are_of_the_rows_that_are_taken_in_chunks() -> None:
    text = norm("schedule triton when N > 4096: stages = 4, chunk[n] = 2048", "schedule triton: stages = 4")
    assert schedule(text, "triton", dims={"N": 4096}).stages == 1
    assert schedule(text, "triton", dims={"N": 8192}).stages == 4
    sums = SUMS.format("schedule triton: stages = 3")
    assert schedule(sums, "triton", dims={"M": 64, "N": 512}).stages == 3


# ---- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "code", "message"),
    [
        (["schedule cud: threads = 64"], "K0240", "there is no backend 'cud'"),
        (["schedule cuda: warps = 4"], "K0241", "'warps' is no knob of cuda"),
        (["schedule triton: vector = 4"], "K0241", "'vector' is no knob of triton"),
        (["schedule cuda: stages = 2"], "K0241", "'stages' is no knob of cuda"),
        (["schedule cuda: registers = 64"], "K0241", "'registers' is no knob of cuda"),
        (["schedule triton: registers = 16"], "K0242", "'registers' cannot be 16"),
        (["schedule triton: warps = 32, registers = 65"], "K0242", "32 warps have no 65 registers a thread"),
        (["schedule cuda: thread = 64"], "K0241", "there is no knob 'thread'"),
        (["schedule cuda: threads = 48"], "K0242", "'threads' cannot be 48"),
        (["schedule cuda: threads = 2048"], "K0242", "'threads' cannot be 2048"),
        (["schedule cuda: threads = whole"], "K0242", "'threads' is whole"),
        (["schedule cuda: threads = 64, threads = 64"], "K0242", "'threads' is set twice"),
        (["schedule cuda: threads[n] = 64"], "K0242", "'threads' has no index"),
        (["schedule cuda: threads = 32, rows = 64"], "K0242", "64 rows do not share out among 32 threads"),
        (["schedule cuda: rows = 2048"], "K0242", "2048 rows do not share out among 1024 threads"),
        (["schedule cuda: cluster = 2, rows = 4"], "K0242", "a cluster of 2 takes one row"),
        (["schedule cuda: cluster = 2, chunk[n] = 64"], "K0242", "a cluster of 2 holds a row whole"),
        (["schedule triton: stages = 2, chunk[n] = whole"], "K0242", "'stages' is for loops, and here is none"),
        (["schedule triton: chunk[n] = 1000"], "K0242", "'chunk' cannot be 1000"),
        (["schedule cuda: chunk[n] = 0"], "K0242", "'chunk' cannot be 0"),
        (["schedule cuda: blocks = 2"], "K0242", "'blocks' is for kernels that sum over programs"),
        (["schedule cuda: chunk = 64"], "K0243", "a chunk is of a tile index"),
        (["schedule cuda: chunk[m] = 64"], "K0243", "'m' is not a tile index"),
        (["schedule cuda when M < 8: rows = 1"], "K0244", "'M' is a run-time size"),
        (["schedule cuda when Q < 8: rows = 1"], "K0244", "'Q' is no size that is known"),
        (["schedule cuda when N: rows = 1"], "K0244", "a schedule's condition is a comparison"),
        (["schedule cuda when T > bf16: rows = 1"], "K0244", "compares a dtype variable with no dtype"),
        (["schedule cuda when T == i32: rows = 1"], "K0245", "T is never i32"),
        (["schedule cuda when N <= 64 and N > 128: rows = 1"], "K0245", "this never holds"),
        (["schedule cuda when N == 64 and N != 64: rows = 1"], "K0245", "this never holds"),
        (["schedule cuda: rows = 1", "schedule cuda when N > 4: rows = 2"], "K0246", "this schedule is never taken"),
        (["schedule cuda when N > 4: rows = 1", "schedule cuda when N > 8: rows = 2"], "K0246", "never taken"),
    ],
)  # fmt: skip
def test_mistakes(rules: list[str], code: str, message: str) -> None:
    (found,) = problems(norm(*rules))
    assert found[0] == code and message in found[1]


@pytest.mark.parametrize(
    "rules",
    [
        ["schedule cuda when N > 8: rows = 1", "schedule cuda when N > 4: rows = 2", "schedule cuda: rows = 1"],
        ["schedule cuda: rows = 1", "schedule triton: rows = 1"],
        ["schedule cuda when T == bf16: rows = 1", "schedule cuda: rows = 2"],
        ["schedule cuda when N % 8 == 0: rows = 1", "schedule cuda when N % 16 == 1: rows = 1"],
    ],
)
def test_what_is_no_mistake(rules: list[str]) -> None:
    assert problems(norm(*rules)) == []


def test_a_flat_kernel_has_no_sizes_to_ask_for_and_a_point_a_thread() -> None:
    flat = "kernel k(x: T[N]) -> (y: T[N]):\n    parallel n in N\n    {}\n    y[n] = x[n]\n"
    ((code, _),) = problems(flat.format("schedule cuda when N > 8: rows = 512"))
    assert code == "K0244"
    ((code, message),) = problems(flat.format("schedule cuda: threads = 256, rows = 128"))
    assert code == "K0242" and "256 threads have 128 points" in message
    ((code, message),) = problems(flat.format("schedule cuda: rows = 16"))
    assert code == "K0242" and "32 threads have 16 points" in message
    ((code, message),) = problems(flat.format("schedule cuda: cluster = 2"))
    assert code == "K0242" and "'cluster' is for kernels with tile indices" in message
    ((code, message),) = problems(flat.format("schedule triton: stages = 2"))
    assert code == "K0242" and "'stages' is for loops" in message
    ((code, message),) = problems(flat.format("schedule cuda: ahead = 2"))
    assert code == "K0242" and "'ahead' is for kernels with tile indices" in message


def helps(text: str) -> list[str | None]:
    """What each mistake says is to be done."""
    diagnostics = Diagnostics()
    check_module(parse(SourceFile("k.kdsl", text), diagnostics), diagnostics)
    return [d.help for d in diagnostics.sorted()]


@pytest.mark.parametrize(
    ("rule", "said", "instead"),
    [
        ("cuda: threads = 200", "write a power of two from 32 to 1024, such as 128 (threads of a program)", "128"),
        ("cuda: threads = 4096", "write a power of two from 32 to 1024, such as 1024", "1024"),
        ("cuda: threads = whole", "write a power of two from 32 to 1024, such as 32", "32"),
        ("triton: warps = 48", "write a power of two from 1 to 32, such as 32", "32"),
        ("triton: stages = 9", "write a whole number from 1 to 8, such as 8", "8"),
        ("cuda: peel = 2", "write 0 or 1 (1 to take whole vectors", "1"),
        ("cuda: chunk[n] = 0", "write a whole number from 1 on, such as 1, or whole", "1"),
        ("triton: chunk[n] = 1000", "write a power of two from 1 on, such as 512, or whole", "512"),
        ("triton: chunk[n] = whole, stages = 2", "write a size in place of whole, such as chunk[n] = 1024", None),
        ("triton: chunk[n] = whole, hold = 1", "write a size in place of whole, such as chunk[n] = 1024", None),
    ],
)
def test_help_says_what_to_write(rule: str, said: str, instead: str | None) -> None:
    (found,) = helps(norm(f"schedule {rule}"))
    assert found is not None and said in found
    right = rule.replace("whole", "1024") if instead is None else f"{rule.rpartition('=')[0]}= {instead}"
    assert problems(norm(f"schedule {right}")) == []


# ---- results -------------------------------------------------------------------------------------------------------

SUMS = (
    "kernel k(d_y: T[*M, N], x: T[*M, N]) -> (d_w: f32[N], d_x: T[*M, N]):\n    parallel m in M\n    tile n in N\n"
    "    {}\n    d_w[n] += d_y[m, n] * x[m, n]\n    d_x[m, n] = d_y[m, n] * max(x[m, n], n)\n"
)
FLAT = (
    "kernel k(x: T[*M, N], z: T[*M, N]) -> (y: T[*M, N]):\n    parallel m in M, n in N\n    {}\n"
    "    y[m, n] = x[m, n] * sigmoid(z[m, n])\n"
)
SOFT = (
    "kernel k(x: T[*M, N]) -> (y: T[*M, N]):\n    parallel m in M\n    tile n in N\n    {}\n"
    "    y[m, n] = softmax(x[m, n], n)\n"
)
RULES = [
    ("norm", "cuda", "threads = 64"),
    ("norm", "cuda", "threads = 512, rows = 4, vector = 2"),
    ("norm", "cuda", "chunk[n] = 100, threads = 32"),
    ("norm", "triton", "warps = 2, rows = 4"),
    ("norm", "triton", "chunk[n] = 128"),
    ("norm", "triton", "chunk[n] = 64, stages = 3"),
    ("soft", "cuda", "chunk[n] = 256, rows = 1"),
    ("soft", "cuda", "threads = 128, rows = 2, chunk[n] = 64"),
    ("soft", "triton", "chunk[n] = 64, warps = 1"),
    ("flat", "cuda", "threads = 64, vector = 1"),
    ("flat", "cuda", "threads = 128, rows = 8192"),
    ("flat", "cuda", "rows = 64"),
    ("flat", "triton", "rows = 64"),
    ("norm", "triton", "stages = 4"),
    ("sums", "cuda", "threads = 64, rows = 2, blocks = 3"),
    ("sums", "cuda", "rows = 1, chunk[n] = 96"),
    ("sums", "triton", "warps = 1, blocks = 1"),
]
TEXTS = {"norm": HEAD + "    {}\n" + BODY, "soft": SOFT, "flat": FLAT, "sums": SUMS}


@pytest.mark.parametrize(("which", "backend", "settings"), RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_the_kernel_without_it(
    which: str, backend: str, settings: str, dtype: torch.dtype
) -> None:
    """Both are held against float64 under the derived bound, on the executors of a machine without a GPU."""
    lines = {"with": f"schedule {backend}: {settings}", "without": "require N >= 1"}
    arguments = {"x": randn(7, 312, dtype=dtype)}
    arguments |= {"norm": {"w": randn(312, dtype=dtype)}, "flat": {"z": randn(7, 312, dtype=dtype)}}.get(which, {})
    arguments |= {"d_y": randn(7, 312, dtype=dtype)} if which == "sums" else {}
    outputs = {}
    for how, line in lines.items():
        kernel = kgen.loads(TEXTS[which].format(line))["norm" if which == "norm" else "k"]
        got = answer(ask(kernel, arguments), backend, repeat=True)
        assert got.status == "ok", got.message
        outputs[how] = got.outputs
    exact = ask(kernel, arguments).expected
    for name, value in outputs["without"].items():
        # Rounded differently at most: an element or two of 16 bits fall to the other side.
        torch.testing.assert_close(
            outputs["with"][name], value, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
        assert exact[name].shape == value.shape


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_the_training_form_keeps_it_and_the_derived_backward_has_none() -> None:
    text = norm(
        "schedule cuda when T == bf16: threads = 64",
        "schedule cuda when N > 8: threads = 32, chunk[n] = whole",
        "schedule triton when N > 8 and T == f32: warps = 2",
        "schedule triton: warps = 1",
    )
    module = parse_text(text, "k.kdsl")
    for dtype, kept in (
        ("bf16", ["schedule cuda: threads = 64", "schedule triton: warps = 1"]),
        ("f32", ["schedule cuda when N > 8: threads = 32, chunk[n] = whole", "schedule triton when N > 8: warps = 2",
                 "schedule triton: warps = 1"]),
    ):  # fmt: skip
        made = target(module, module.kernels[0], Choices(dtype=dtype))
        derived = derive(made.kernel, frozenset({"x", "w"}))
        lines = [line.strip() for line in derived.forward_text.splitlines()]
        assert [line for line in lines if line.startswith("schedule ")] == kept
        assert "schedule " not in derived.backward_text


def test_a_backward_by_hand_has_its_own() -> None:
    text = norm("schedule cuda: threads = 64") + (
        "\nbackward norm(x: T[*M, N], w: T[N], d_y: T[*M, N]) -> (d_x: T[*M, N], d_w: T[N]):\n    parallel m in M\n"
        "    tile n in N\n    schedule cuda: threads = 32, rows = 1, blocks = 2\n    schedule triton: chunk[n] = 64\n"
        "    d_x[m, n] = d_y[m, n] * w[n]\n    d_w[n] += d_y[m, n] * x[m, n]\n"
    )
    module = parse_text(text, "k.kdsl")
    made = target(module, module.kernels[0], Choices(dtype="f32"))
    both = gradients_of(module, made.kernel, frozenset({"x", "w"}))
    assert "schedule cuda: threads = 32, rows = 1, blocks = 2" in both.backward_text
    assert "schedule cuda: threads = 64" in both.forward_text


# ---- the command line ----------------------------------------------------------------------------------------------


def test_show_says_who_chose(tmp_path: Path) -> None:
    file = tmp_path / "k.kdsl"
    file.write_text(norm("schedule cuda when N <= 4096: threads = 64"))

    def shown(*args: object) -> str:
        result = CliRunner().invoke(app, ["show", str(file), *map(str, args)])
        assert result.exit_code == 0, result.output
        return result.output

    assert f"# set by the schedule at {file}:3:5, the rest chosen by ladders" in shown("--stage", "schedule")
    assert "# chosen by ladders" in shown("--stage", "schedule", "--dim", "N=8192")
    assert "# chosen by ladders" in shown("--stage", "schedule", "--backend", "triton")
    assert f"the schedule at {file}:3:5" in shown("--stage", "cost")
    assert CliRunner().invoke(app, ["fmt", "--check", str(file)]).exit_code == 0
