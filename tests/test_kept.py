"""Loads that L2 is to give up last: which they are, and what they become in CUDA and Triton."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import cuda_kit
import pytest
import torch
import triton_kit
from cuda_kit import call

from kgen.codegen.derive.pair import module_of
from kgen.codegen.derive.written import gradients_of
from kgen.dsl import ir
from kgen.dsl.modules import load
from kgen.dsl.parser import parse_text
from kgen.runtime.ahead import Choices, Target, binary, target

OPS = Path(__file__).resolve().parent.parent / "ops"
BACKENDS = pytest.mark.parametrize("backend", ["cuda", "triton"])

# By name: the tensors that are kept, and the kernel.
KERNELS = {
    # The rows of a table come again behind all others.
    "table": ("t", "x: T[B, S, D], t: T[S, D]) -> (y: T[B, S, D])", "b in B, s in S", "x[b, s, d] + t[s, d]"),
    "heads": ("t", "x: T[B, S, H, D], t: T[S, D]) -> (y: T[B, S, H, D])", "b in B, s in S, h in H",
              "x[b, s, h, d] * t[s, d]"),
    # ... or at once, or from rows next to each other.
    "next": ("", "x: T[S, B, D], t: T[S, D]) -> (y: T[S, B, D])", "s in S, b in B", "x[s, b, d] + t[s, d]"),
    "weight": ("", "x: T[B, S, D], w: T[D]) -> (y: T[B, S, D])", "b in B, s in S", "x[b, s, d] * w[d]"),
    "few": ("", "x: T[B, 3, D], t: T[3, D]) -> (y: T[B, 3, D])", "b in B, s in 3", "x[b, s, d] + t[s, d]"),
    # One value a row is little, beside what rows stream.
    "single": ("", "x: T[B, S, D], t: T[S]) -> (y: T[B, S, D])", "b in B, s in S", "x[b, s, d] * t[s]"),
    # As much as streams by, and more.
    "wide": ("", "x: T[B, S, D], t: f32[S, D]) -> (y: T[B, S, D])", "b in B, s in S", "x[b, s, d] + t[s, d]"),
    "product": ("", "x: T[B, D], w: T[S, D]) -> (y: T[B, S])", "b in B, s in S", "sum(x[b, d] * w[s, d], d)"),
    # Rows of a table that the data chooses: narrow ones only.
    "positions": ("t", "x: T[M, H, D], at: i32[M], t: T[P, D]) -> (y: T[M, H, D])", "m in M",
                  "x[m, h, d] * t[at[m], d]"),
    "embedding": ("", "x: T[M, D], at: i32[M], t: T[P, D]) -> (y: T[M, D])", "m in M", "x[m, d] + t[at[m], d]"),
    "apart": ("", "x: T[M, H, D], at: i32[M, D], t: T[P, D]) -> (y: T[M, H, D])", "m in M",
              "x[m, h, d] * t[at[m, d], d]"),
    "pages": ("", "x: T[B, S, H, D], at: i32[B, S], t: T[B, P, D]) -> (y: T[B, S, H, D])", "b in B, s in S",
              "x[b, s, h, d] * t[b, at[b, s], d]"),
    "element": ("", "x: T[M, D], at: i32[M, D], t: T[P]) -> (y: T[M, D])", "m in M", "x[m, d] + t[at[m, d]]"),
    # A table whose size is known.
    "large": ("", "x: T[B, S, D], t: T[S, D], u: T[S]) -> (y: T[B, S, D])", "b in B, s in S",
              "x[b, s, d] + t[s, d] + sum(u[k], k)"),
}  # fmt: skip
FLAT = """
kernel bias(x: T[B, H, S, D], t: T[H, S, D]) -> (y: T[B, H, S, D]):
    parallel b in B, h in H, s in S, d in D
    y[b, h, s, d] = x[b, h, s, d] + t[h, s, d]

kernel columns(x: T[M, N], w: T[N]) -> (y: T[M, N]):
    parallel m in M, n in N
    y[m, n] = x[m, n] * w[n]

kernel rows(x: T[B, M, N], w: T[M]) -> (y: T[B, M, N]):
    parallel b in B, m in M, n in N
    y[b, m, n] = x[b, m, n] * w[m]
"""
SUMS = """
kernel gradient(x: T[B, S, D], dy: T[B, S, D], t: T[S, D]) -> (d_w: f32[D]):
    parallel b in B, s in S
    tile d in D
    d_w[d] += x[b, s, d] * dy[b, s, d] * t[s, d]

kernel table_gradient(x: T[B, S, D], dy: T[B, S, D], t: T[S, D]) -> (d_t: f32[S, D]):
    parallel b in B, s in S
    tile d in D
    d_t[s, d] += x[b, s, d] * dy[b, s, d] * max(t[s, d], d)
"""
SIZES = {"B": 4, "S": 4096, "H": 8, "D": 256, "M": 64, "N": 64, "P": 512}


def text_of(name: str) -> str:
    """The kernel `name` of KERNELS."""
    _, head, rows, value = KERNELS[name]
    tiles = [
        "d in D",
        *(["h in H"] if name in ("positions", "apart", "pages") else []),
        *(["k in S"] if name == "large" else []),
    ]
    to = re.search(r"y: T\[(.*?)\]", head)
    assert to is not None
    at = to[1].replace("3", "S").lower()
    return f"kernel {name}({head}:\n    parallel {rows}\n    tile {', '.join(tiles)}\n    y[{at}] = {value}\n"


def made_of(text: str, name: str, **dims: int) -> Target:
    """The kernel `name` of `text` in bf16."""
    module = parse_text(text)
    kernel = next(k for k in module.kernels if k.name == name)
    return target(module, kernel, Choices(dims={**SIZES, **dims}, dtype="bf16"))


def tensors(made: Target, backend: str) -> str:
    """The tensors of which loads are kept."""
    stages = made.scheduled(backend)
    found = {
        s.value.tensor
        for stage in (stages, *stages.then)
        for s in stage.kernel.body
        if isinstance(s, ir.Let) and isinstance(s.value, ir.Load) and s.name in stage.kept
    }
    if backend == "cuda":
        marked = any("load_kept" in p.source for p in made.program(backend).launches)
        assert marked == bool(found), "what is kept is marked, and nothing else"
    else:
        assert found <= given_up_last(made)
    return " ".join(sorted(found))


def given_up_last(made: Target) -> set[str]:
    """The tensors of which Triton's text says so."""
    calls = [
        n for p in made.program("triton").launches for n in ast.walk(ast.parse(p.source)) if isinstance(n, ast.Call)
    ]
    marked = [call.args[0] for call in calls if any(k.arg == "eviction_policy" for k in call.keywords)]
    pointers = (re.search(r"\w+?(?=_(?:row|ptr)\b)", ast.unparse(pointer)) for pointer in marked)
    return {pointer[0] for pointer in pointers if pointer is not None}


# By file: the tensors of which rows have something to themselves, in each kernel that takes its rows in tiles.
ROWS = {
    "rms_norm": {"x"}, "layer_norm": {"x"}, "add_rms_norm": {"x", "residual"}, "softmax": {"x"},
    "cross_entropy": {"logits"}, "rope": {"q", "k", "cos", "sin"},
}  # fmt: skip


@pytest.mark.parametrize("file", ROWS)
def test_rows_are_given_up_last_in_triton(file: str) -> None:
    module = load(OPS / f"{file}.kdsl").module
    for kernel in module.kernels:
        made = target(module, kernel, Choices(dtype="bf16"))
        weights = {t.name for t in made.kernel.tensors if t.role == "in"} - ROWS[file]
        # Of a row that is held, all that passes load again is weights.
        assert given_up_last(made) == ROWS[file] | (weights if made.program("triton").schedule.held else set())
        assert "load_kept" not in made.program("cuda").source or file == "rope"


def test_what_has_no_rows_of_its_own_or_is_a_sum_is_not() -> None:
    module = load(OPS / "swiglu.kdsl").module
    assert not given_up_last(target(module, module.kernels[0], Choices(dtype="bf16")))
    assert given_up_last(made_of(SUMS, "gradient")) == {"t"}
    # An operand that a sum is taken of, for rows that share it.
    assert given_up_last(made_of(text_of("product"), "product")) == set()
    assert given_up_last(made_of(text_of("next"), "next")) == {"x"}


@BACKENDS
@pytest.mark.parametrize("name", KERNELS)
def test_what_rows_far_on_read_again_is_kept(name: str, backend: str) -> None:
    dims = {"S": 8192, "D": 2048} if name == "large" else {}
    assert tensors(made_of(text_of(name), name, **dims), backend) == KERNELS[name][0]


@BACKENDS
def test_what_is_known_of_a_table_decides_at_either_end(backend: str) -> None:
    def kept(rows: int) -> str:
        return tensors(made_of(text_of("large"), "large", S=rows, D=2048), backend)

    assert kept(1024) == ""  # 8 MB pass between two uses
    assert kept(1025) == "t"
    assert kept(6144) == "t"  # a table of 24 MB
    assert kept(6145) == ""


@BACKENDS
@pytest.mark.parametrize(("name", "expected"), [("bias", "t"), ("columns", ""), ("rows", "")])
def test_the_fastest_index_of_a_flat_kernel_runs_along_a_row(name: str, expected: str, backend: str) -> None:
    assert tensors(made_of(FLAT, name), backend) == expected


@BACKENDS
def test_in_a_sum_a_program_meets_its_own_point_again_at_once(backend: str) -> None:
    assert tensors(made_of(SUMS, "gradient"), backend) == "t"
    assert tensors(made_of(SUMS, "table_gradient"), backend) == ""


@BACKENDS
@pytest.mark.parametrize("without", [frozenset[str](), frozenset({"positions"})])
def test_the_tables_of_rotary_embedding_are_kept_in_both_directions(without: frozenset[str], backend: str) -> None:
    module = load(OPS / "rope.kdsl").module
    made = target(module, module.kernels[0], Choices(dtype="bf16", without=without))
    assert tensors(made, backend) == "cos sin"
    backward = module_of(gradients_of(made.module, made.kernel, frozenset({"q", "k"})).backward)
    made = target(backward, backward.kernels[0], Choices(dims=made.layout.dims))
    assert not made.scheduled(backend).then and tensors(made, backend) == "cos sin"


@BACKENDS
@pytest.mark.parametrize("file", ["rms_norm", "layer_norm", "add_rms_norm", "softmax", "cross_entropy", "swiglu"])
def test_shipped_kernels_of_one_row_index_keep_nothing(file: str, backend: str) -> None:
    module = load(OPS / f"{file}.kdsl").module
    for kernel in module.kernels:
        made = target(module, kernel, Choices(dtype="bf16"))
        assert tensors(made, backend) == ""


def test_the_text() -> None:
    made = made_of(text_of("table"), "table", D=4096)
    (cuda,) = (line.strip() for line in made.program("cuda").source.split("\n") if "load_kept((" in line)
    assert cuda == "t_sd_raw[d_slot] = load_kept((const bf16x8*)(t_row + d), policy);"
    assert "x_bsd_raw[d_slot] = *(const bf16x8*)(x_row + d);" in made.program("cuda").source
    x, y = (line.strip() for line in made.program("triton").source.split("\n") if "evict_last" in line)
    assert x == 'x_bsd = tl.load(x_row + d, eviction_policy="evict_last").to(tl.float32)'
    assert y == 't_sd = tl.load(t_row + d, eviction_policy="evict_last").to(tl.float32)'


def test_names_of_the_policy_are_for_users_too() -> None:
    text = re.sub(r"\bx\b", "policy", re.sub(r"\bt\b", "kept_policy", text_of("table")))
    g = torch.Generator().manual_seed(3)
    x, t = (torch.randn(*shape, 8, generator=g).to(torch.bfloat16) for shape in ((2, 5), (5,)))
    c = call(text, "table", policy=x, kept_policy=t)
    assert "const unsigned long long policy_2 = kept_policy();" in cuda_kit.compiled(c).source
    cuda_kit.check(c)


# What one load moves, by width of a row and dtype of the table.
WIDTHS = [(24, "bf16", 16), (4, "bf16", 8), (2, "bf16", 4), (3, "bf16", 2), (5, "i8", 1), (3, "f64", 8), (2, "f64", 16)]


def table(width: int, dtype: str) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The kernel with a table of `dtype`, x, and the table."""
    whole = {"i8": torch.int8, "f64": torch.float64, "bf16": torch.bfloat16}[dtype]
    text = text_of("table").replace("t: T", f"t: {dtype}")
    g = torch.Generator().manual_seed(width)
    x = torch.randn(3, 5, width, generator=g, dtype=torch.float64 if dtype == "f64" else torch.bfloat16)
    return text, x, (torch.randn(5, width, generator=g) * 10).to(whole)


@pytest.mark.parametrize(("width", "dtype", "bytes"), WIDTHS)
def test_values_are_those_of_other_loads(width: int, dtype: str, bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.codegen.ladders.KEPT_SHARE", 1)  # so that what is as wide as x is kept
    text, x, t = table(width, dtype)
    c = call(text, "table", x=x, t=t)
    source = cuda_kit.compiled(c).source
    assert f"BYTES == {bytes})" in source and source.count("BYTES == ") == 1
    assert "evict_last" in triton_kit.emitted(c).source
    cuda_kit.check(c)
    triton_kit.check(c)


@pytest.mark.parametrize(("width", "dtype", "bytes"), WIDTHS)
def test_the_machine_code_has_the_policy_of_l2(width: int, dtype: str, bytes: int) -> None:
    text = text_of("table").replace("t: T", f"t: {dtype}")
    module = parse_text(text)
    dtypes = {"T": "f64" if dtype == "f64" else "f32"}
    made = target(module, module.kernels[0], Choices(dims={**SIZES, "D": width}, dtypes=dtypes))
    program = made.program("cuda")
    found = binary(made, program, "sm_90")
    size = {16: "v4.u32", 8: "v2.u32", 4: "u32", 2: "u16", 1: "u8"}[bytes if dtype != "bf16" or width < 24 else 8]
    assert re.findall(r"ld\.global\.L2::cache_hint\.(\S+)", found.ptx) == [size]
    assert found.ptx.count("createpolicy.fractional.L2::evict_last.b64") == 1


def test_the_policy_costs_one_pair_of_uniform_registers_and_no_width() -> None:
    module = load(OPS / "rope.kdsl").module
    made = target(module, module.kernels[0], Choices(dtype="bf16", without=frozenset({"positions"})))
    found = binary(made, made.program("cuda"), "sm_90")
    assert "createpolicy.fractional.L2::evict_last.b64" in found.ptx
    assert found.ptx.count("ld.global.L2::cache_hint.v4.u32") == 4
    assert found.resources.local_bytes == 0
    # An access names the pair that holds its policy: that of all others is the default one.
    pairs = re.findall(r"LDG\.E\.128\S* \w+, desc\[(UR\d+)\]", found.sass)
    stores = set(re.findall(r"STG\.E\.128 desc\[(UR\d+)\]", found.sass))
    assert len(pairs) == 10 and len(stores) == 1
    assert sum(pair not in stores for pair in pairs) == 4
    # All loads of a row are under way before anything is stored.
    assert found.sass.rindex("LDG.E") < found.sass.index("STG.E")


def test_triton_makes_it_a_policy_of_l2_too() -> None:
    made = made_of(text_of("weight"), "weight")
    ptx = binary(made, made.program("triton"), "sm_90").ptx
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    marked = [line for line in loads if ".L2::cache_hint." in line]
    assert marked and len(marked) < len(loads), "all of x, nothing of the weight"
    assert "createpolicy.fractional.L2::evict_last.b64" in ptx


def test_devices_without_policies_load_as_ever() -> None:
    made = made_of(text_of("table").replace("T[", "f32["), "table")
    assert "cache_hint" not in binary(made, made.program("cuda", capability=75), "sm_75").ptx
