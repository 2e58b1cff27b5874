"""`kgen build` of kernels that sum over programs: several launches in one file, launched by someone who has no kgen.

The manifest drives the `.cu` files: what it says of launches, grids, workspaces and arguments is all that is known.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_build import clean, run

import kgen
from kgen.cli.files import read
from kgen.codegen.cuda import host_source
from kgen.codegen.program import Program
from kgen.codegen.schedule import Schedule
from kgen.codegen.tolerance import compare
from kgen.dsl.affine import Poly
from kgen.dsl.parser import parse_text
from kgen.runtime import build as building
from kgen.runtime import launches
from kgen.runtime.ahead import Choices, target
from kgen.runtime.backends.base import programs
from kgen.runtime.differential import ask
from kgen.runtime.host_executor import compile_host
from kgen.runtime.nvrtc import Resources
from kgen.runtime.stages import stage_layouts

ROOT = Path(__file__).resolve().parents[1]
SUMS = ROOT / "tests" / "kernels" / "sums.kdsl"
ROWS = (0, 1, 131, 133)
CACHE = ROOT / "build" / "host-cache"
CTYPES = {
    "pointer": ctypes.c_void_p,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
TORCH = {"f32": torch.float32, "f64": torch.float64, "i32": torch.int32, "i64": torch.int64}

# What Python, C and the files themselves use as names; partial sums that do not fit registers, and in a workspace.
HOSTILE = """
kernel launch_1(SPLITS: f32[*multiprocessors, N]) -> (grid: f32[N], launch_1_finish: f32[]):
    parallel torch in multiprocessors
    tile split in N
    grid[split] += SPLITS[torch, split]
    launch_1_finish[] += max(SPLITS[torch, split], split)

kernel wide(x: f32[*M, K]) -> (y: f32[K]):
    parallel m in M
    tile k in K
    y[k] += x[m, k] - mean(x[m, k], k)

kernel chunked(x: f32[*M, N]) -> (y: f32[N]):
    parallel m in M
    tile n in N
    schedule cuda: chunk[n] = 8
    schedule triton: chunk[n] = 8
    y[n] += x[m, n] - mean(x[m, n], n)

kernel clustered(x: f32[*M, L]) -> (y: f32[*M, L], s: f32[L]):
    parallel m in M
    tile l in L
    y[m, l] = x[m, l] - mean(x[m, l], l)
    s[l] += x[m, l] * max(x[m, l], l)
"""
WIDE, CLUSTERED = 150001, 20001


def pasted(file: str, *options: str) -> str:
    """The backward of a shipped kernel as a kernel of its own."""
    args = ("--stage", "backward", "--dtype", "f32", "--dim", "M=64,N=96", *options)
    code, out, err = run("show", ROOT / "ops" / file, *args)
    assert code == 0, err
    return out.replace("backward ", "kernel d_", 1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    cache = str(tmp_path_factory.mktemp("cache"))
    (folder / "pasted.kdsl").write_text(pasted("rms_norm.kdsl") + "\n" + pasted("layer_norm.kdsl"))
    (folder / "hostile.kdsl").write_text(HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_CACHE_DIR", cache)
        patch.setenv("TRITON_CACHE_DIR", f"{cache}/triton-own")
        # 133 divides by no power of two: no number of rows is refused.
        small = ("--dtype", "f32", "--dim", "M=133")
        for file, dims in ((SUMS, "N=96,G=3,B=5,S=7,H=3,D=16"), (folder / "pasted.kdsl", "N=96")):
            code, _, err = run("build", file, *small, "--dim", dims, "--out", folder / file.stem)
            assert code == 0, err
        code, _, err = run(
            "build", folder / "hostile.kdsl", "--dim", f"N=33,K={WIDE},L={CLUSTERED}", "--out", folder / "hostile"
        )
        assert code == 0, err
    return folder


def entry(built: Path, file: str, kernel: str) -> dict[str, Any]:
    return json.loads((built / file / "manifest.json").read_text())["kernels"][kernel]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def cases(rows: int) -> list[tuple[str, str, dict[str, torch.Tensor]]]:
    """(file, kernel, inputs) of every kernel with `rows` rows."""
    x, d_y, w = randn(rows, 96), randn(rows, 96) + 0.5, randn(96)
    saved = torch.rsqrt((x * x).mean(-1) + 1e-6)
    return [
        ("pasted", "d_rms_norm", {"x": x, "w": w, "saved_r": saved, "d_y": d_y}),
        ("pasted", "d_layer_norm", {"x": x, "w": w, "d_y": d_y}),
        ("sums", "rms_norm_grad", {"d_y": d_y, "x": x, "w": w, "rstd": saved}),
        ("sums", "affine_grad", {"d_y": d_y, "x": x}),
        ("sums", "column_sums", {"x": randn(rows, 96)}),
        ("sums", "total", {"x": randn(rows)}),
        ("sums", "group_sums", {"x": randn(3, rows, 96)}),
        ("sums", "mixed", {"x": randn(3, rows)}),
        ("sums", "counts", {"t": torch.arange(rows) % 7, "n": torch.arange(rows, dtype=torch.int32)}),
        ("sums", "head_sums", {"x": randn(rows, 7, 3, 16)}),
        ("hostile", "launch_1", {"SPLITS": randn(rows, 33)}),
        ("hostile", "wide", {"x": randn(min(rows, 3), WIDE)}),
        ("hostile", "chunked", {"x": randn(rows, 33)}),
        ("hostile", "clustered", {"x": randn(min(rows, 5), CLUSTERED)}),
    ]


def judge(built: Path, file: str, kernel: str, inputs: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """`found` lies within the derived bound of float64; sums of nothing are 0."""
    path = SUMS if file == "sums" else built / f"{file}.kdsl"
    if not all(t.numel() for t in inputs.values()):
        for name, t in found.items():
            assert torch.equal(t, torch.zeros_like(t)), name
        return
    question = ask(kgen.load(path)[kernel], inputs)
    for name, t in found.items():
        c = compare(t, question.expected[name], question.bound[name])
        assert c.ok, f"{kernel}.{name}: {c}"


def outputs(described: dict[str, Any], inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """New outputs, filled with NaN or a large number."""
    sizes = sizes_of(described, inputs)
    out = {}
    for t in described["tensors"]:
        if t["name"] not in inputs:
            shape = [eval(s.lstrip("*"), {}, dict(sizes)) for s in t["shape"]]
            dtype = TORCH[t["dtype"]]
            out[t["name"]] = torch.full(shape, float("nan") if dtype.is_floating_point else 10**6, dtype=dtype)
    return out


def sizes_of(described: dict[str, Any], inputs: dict[str, torch.Tensor]) -> dict[str, int]:
    """The dimensions of the signature, as the shapes have them, and those derived of them."""
    sizes = dict(described["dims"]["compiled"])
    for t in described["tensors"]:
        if t["name"] in inputs:
            sizes |= {s.lstrip("*"): n for s, n in zip(t["shape"], inputs[t["name"]].shape, strict=True)}
    return sizes | {d: eval(f, {}, sizes) for d, f in described["dims"]["derived"].items()}


# ---- CUDA ----------------------------------------------------------------------------------------------------------


Arguments = list[tuple[str, int | float]]  # dtype (`pointer`) and value


def on_host(folder: Path, own: dict[str, Any], launch: dict[str, Any], grid: int, arguments: Arguments) -> None:
    """One launch of the ejected `.cu` on the host executor."""
    bare = Program("cuda", launch["entry"], (folder / own["file"]).read_text(), (), Schedule(32, 1), 0, ())
    compiled = compile_host(host_source(bare), launch["entry"], cache_dir=CACHE)
    args = [CTYPES[dtype](value) for dtype, value in arguments]
    compiled.launch((grid, 1, 1), (launch["block"], 1, 1), 0, args)


def on_gpu(folder: Path, own: dict[str, Any], launch: dict[str, Any], grid: int, arguments: Arguments) -> None:
    """One launch of the cubin by CuPy."""
    import cupy

    function = cupy.RawModule(path=str(folder / launch["binaries"]["sm_90"]["cubin"])).get_function(launch["entry"])
    kinds = {"pointer": int, "i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}
    function((grid,), (launch["block"],), tuple(kinds[dtype](value) for dtype, value in arguments))


def launch_all(
    built: Path,
    file: str,
    kernel: str,
    inputs: dict[str, torch.Tensor],
    multiprocessors: int,
    start: Callable[..., None] = on_host,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """The outputs of an ejected kernel, launched as the manifest says by `start`."""
    described = entry(built, file, kernel)
    own = described["backends"]["cuda"]
    tensors = {n: t.to(device) for n, t in (inputs | outputs(described, inputs)).items()}
    sizes: dict[str, Any] = sizes_of(described, inputs)
    names = {"ceil": math.ceil, "max": max, "min": min, "__builtins__": {}}
    for share in own["shares"]:
        sizes[share["dim"]] = eval(share["programs"], names, sizes | {share["multiprocessors"]: multiprocessors})
    for w in own["workspaces"]:
        shape = [eval(s, names, sizes) for s in w["shape"]]
        dtype = TORCH[w["dtype"]]
        poison = float("nan") if dtype.is_floating_point else 10**6
        tensors[w["name"]] = torch.full(shape, 0 if w["zeroed"] else poison, dtype=dtype, device=device)
        assert tensors[w["name"]].nbytes == eval(w["bytes"], names, sizes)
    defaults = {s["name"]: s["default"] for s in described["scalars"]}
    for launch in own["launches"]:
        args: Arguments = []
        for a in launch["arguments"]:
            if a["kind"] == "tensor":
                args.append(("pointer", tensors[a["name"]].data_ptr()))
                continue
            if a["kind"] == "stride":
                t = tensors[a["name"]]
                merged = t.ndim - len(described["dims"]["derived"]) if a["name"] in inputs else t.ndim
                value = t.stride(a["axis"] + t.ndim - merged)
            else:
                value = sizes[a["name"]] if a["kind"] == "dim" else defaults[a["name"]]
            args.append((a["dtype"], value))
        grid = eval(launch["grid"], names, sizes)
        if grid:
            start(built / file, own, launch, grid, args)
    return {t["name"]: tensors[t["name"]].cpu() for t in described["tensors"] if t["role"] != "in"}


@pytest.mark.parametrize("rows", ROWS)
def test_cu_files_agree_with_float64_when_launched_as_the_manifest_says(built: Path, rows: int) -> None:
    for file, kernel, inputs in cases(rows):
        judge(built, file, kernel, inputs, launch_all(built, file, kernel, inputs, 2))


def test_any_number_of_programs_gives_the_sums(built: Path) -> None:
    for file, kernel, inputs in cases(131)[:2]:
        for multiprocessors in (1, 5, 132):
            judge(built, file, kernel, inputs, launch_all(built, file, kernel, inputs, multiprocessors))


def test_one_cubin_holds_all_kernels_of_a_cu(built: Path) -> None:
    own = entry(built, "sums", "affine_grad")["backends"]
    cuda = [launch["binaries"]["sm_90"] for launch in own["cuda"]["launches"]]
    assert {b["cubin"] for b in cuda} == {"affine_grad.sm_90.cubin"}
    assert len({b["registers"] for b in cuda}) > 1  # each has its own figures
    text = (built / "sums" / cuda[0]["ptx"]).read_text()
    for launch in own["cuda"]["launches"]:
        assert f".entry {launch['entry']}(" in text
    triton = [launch["binaries"]["sm_90"] for launch in own["triton"]["launches"]]
    assert [b["cubin"] for b in triton] == [
        "affine_grad_triton.sm_90.cubin",
        "affine_grad_finish_triton.sm_90.cubin",
        "affine_grad_finish_2_triton.sm_90.cubin",
    ]
    for launch, b in zip(own["triton"]["launches"], triton, strict=True):
        assert f".entry {launch['entry']}(" in (built / "sums" / b["ptx"]).read_text()


def test_cu_files_compile_alone_and_say_how_to_launch(built: Path) -> None:
    names = sorted(str(p.relative_to(built)) for p in built.rglob("*.cu"))
    assert len(names) == 14
    script = f"""
from cupy_backends.cuda.libs import nvrtc
for name in {names!r}:
    text = open(name).read()
    assert "#include" not in text, name
    program = nvrtc.createProgram(text, name, (), ())
    arch = "sm_90" if "__cluster_dims__" in text else "sm_80"
    nvrtc.compileProgram(program, ("--std=c++17", "--gpu-architecture=" + arch))
    print(name)
"""
    assert clean(script, built).split() == names
    head = (built / "sums" / "affine_grad.cu").read_text().split("\n\n")[0]
    own = entry(built, "sums", "affine_grad")["backends"]["cuda"]
    for i, launch in enumerate(own["launches"]):
        at = head.index(f"// Launch {i + 1}: {launch['entry']}\n//   grid    {launch['grid']} blocks")
        listed = head[head.index(f"// Arguments of {launch['entry']}\n", at) :].split("\n//\n")[0].split("\n")[1:]
        assert len(listed) == len(launch["arguments"])
    for w in own["workspaces"]:
        assert f"//   {w['name']}" in head
        assert f"{w['dtype']}[{', '.join(w['shape'])}], {w['bytes']} bytes" in head
    assert f"SPLITS = {own['shares'][0]['programs']}" in head
    in_clusters = entry(built, "hostile", "clustered")["backends"]["cuda"]
    assert in_clusters["launches"][0]["schedule"]["cluster"] == in_clusters["shares"][0]["blocks_per_program"] == 4
    head = (built / "hostile" / "clustered.cu").read_text().split("\n\n")[0]
    assert "//   grid    SPLITS * 4 blocks" in head and "//   cluster 4 blocks, which is compiled in" in head
    assert "SPLITS = max(1, min(2 * multiprocessors // 4, M))" in head and "cudaOccupancyMaxActiveClusters" in head
    zeroed = entry(built, "hostile", "chunked")["backends"]["cuda"]["workspaces"]
    assert [w["zeroed"] for w in zeroed] == [True]
    assert "zero before the first launch" in (built / "hostile" / "chunked.cu").read_text()
    by_elements = entry(built, "hostile", "wide")["backends"]["cuda"]
    assert [launch["entry"] for launch in by_elements["launches"]] == ["wide", "wide_elements", "wide_finish"]
    assert [w["shape"] for w in by_elements["workspaces"]] == [["M"], ["SPLITS", str(WIDE)]]


@pytest.mark.parametrize(
    ("blocks", "cluster", "shares"),
    [(1, 1, 132), (2, 1, 264), (1, 2, 66), (2, 4, 66), (2, 8, 28), (1, 4, 28), (1, 8, 14)],
)
def test_formulas_leave_room_for_clusters_that_find_no_place(blocks: int, cluster: int, shares: int) -> None:
    """More than two multiprocessors that lie together are not everywhere to be had; a call asks the driver instead."""
    one = launches.Count(Poly.const(1))
    share = launches.Share("SPLITS", launches.Count(Poly.sym("M")), one, blocks, cluster)
    assert eval(share.text("132"), {"max": max, "min": min, "M": 2048}) == shares
    assert eval(share.text("132"), {"max": max, "min": min, "M": 3}) == 3


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("rows", [1, 131, 100_000])
def test_formulas_give_what_a_call_through_kgen_takes(backend: str, rows: int) -> None:
    module, hostile = read(SUMS).module, parse_text(HOSTILE, "hostile.kdsl")
    names = {"ceil": math.ceil, "max": max, "min": min, "__builtins__": {}}
    choices = Choices(
        {"M": rows, "N": 96, "G": 3, "B": rows, "S": 7, "H": 3, "D": 16, "K": WIDE, "L": CLUSTERED}, "f32"
    )
    others = [k for k in hostile.kernels if k.name in ("wide", "clustered")]
    for declared in (*module.kernels, *others):
        made = target(hostile if declared in others else module, declared, choices)
        program = made.program(backend)
        layouts, allocated = stage_layouts(program, made.layout)
        sizes: dict[str, Any] = {**made.layout.dims, **choices.dims}
        for share in launches.shares(made, program):
            sizes[share.dim] = eval(share.text("132"), names, sizes)
            assert sizes[share.dim] == layouts[0].dims[share.dim], declared.name
        for w, there in zip(launches.workspaces(made, program), allocated, strict=True):
            assert tuple(eval(str(p), names, sizes) for p in w.shape) == there.shape, declared.name
        for p, where in zip(program.launches, layouts, strict=True):
            grid = eval(launches.grid(made, p).text(), names, sizes)
            assert grid == programs(p, where) * p.schedule.cluster, p.entry


# ---- Triton --------------------------------------------------------------------------------------------------------


def test_triton_files_run_alone_and_agree_with_float64(built: Path, tmp_path: Path) -> None:
    todo = []
    for rows in ROWS:
        for file, kernel, inputs in cases(rows):
            described = entry(built, file, kernel)
            all_tensors = inputs | outputs(described, inputs)
            order = [t["name"] for t in described["tensors"]]
            own = described["backends"]["triton"]
            word = own["shares"][0]["multiprocessors"]
            todo.append((f"{file}/{own['file']}", own["host_function"], [all_tensors[n] for n in order], word))
    torch.save(todo, tmp_path / "todo.pt")
    script = f"""
import importlib.util, torch
def load(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_")[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
todo = torch.load({str(tmp_path / "todo.pt")!r})
real = torch.empty
def poisoned(*args, **kwargs):
    t = real(*args, **kwargs)
    return t.fill_(float("nan") if t.is_floating_point() else 10**6)
torch.empty = poisoned
for path, function, tensors, word in todo:
    getattr(load(path), function)(*tensors, **{{word: 2}})
torch.save(todo, {str(tmp_path / "done.pt")!r})
"""
    clean(script, built, TRITON_INTERPRET="1")
    done = iter(torch.load(tmp_path / "done.pt"))
    for rows in ROWS:
        for file, kernel, inputs in cases(rows):
            described = entry(built, file, kernel)
            _, _, tensors, _ = next(done)
            order = [t["name"] for t in described["tensors"]]
            found = {n: t for n, t in zip(order, tensors, strict=True) if n not in inputs}
            judge(built, file, kernel, inputs, found)


def test_without_a_choice_the_sums_are_shared_out_as_the_file_was_built_for(built: Path, tmp_path: Path) -> None:
    script = """
import importlib.util, torch
spec = importlib.util.spec_from_file_location("m", "pasted/d_rms_norm_triton.py")
m = importlib.util.module_from_spec(spec)
spec.loader.exec_module(m)
torch.manual_seed(0)
x, w, r, d_y = torch.randn(300, 96), torch.randn(96), torch.rand(300), torch.randn(300, 96)
def run(**choice):
    d_x, d_w = torch.empty(300, 96), torch.empty(96)
    m.launch_d_rms_norm(x, w, r, d_y, d_x, d_w, **choice)
    return d_w
assert torch.equal(run(), run(multiprocessors=132))
assert torch.equal(run(multiprocessors=2), run(multiprocessors=2))
assert not torch.equal(run(multiprocessors=1), run(multiprocessors=132))  # another order
print("done")
"""
    assert clean(script, built, TRITON_INTERPRET="1") == "done\n"


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*ROWS, 5003])
def test_cubins_agree_with_float64_when_launched_as_the_manifest_says(built: Path, rows: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the binaries are for sm_90")
    for file, kernel, inputs in cases(rows):
        for multiprocessors in (1, torch.cuda.get_device_properties(0).multi_processor_count):
            found = launch_all(built, file, kernel, inputs, multiprocessors, on_gpu, "cuda")
            judge(built, file, kernel, inputs, found)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [*ROWS, 5003])
def test_triton_files_agree_with_float64_on_a_gpu(built: Path, rows: int) -> None:
    for file, kernel, inputs in cases(rows):
        described = entry(built, file, kernel)
        own = described["backends"]["triton"]
        tensors = {n: t.cuda() for n, t in (inputs | outputs(described, inputs)).items()}
        spec = importlib.util.spec_from_file_location(Path(own["file"]).stem, built / file / own["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, own["host_function"])(*(tensors[t["name"]] for t in described["tensors"]))
        judge(built, file, kernel, inputs, {n: t.cpu() for n, t in tensors.items() if n not in inputs})


# ---- refusals ------------------------------------------------------------------------------------------------------


def test_each_launch_is_refused_if_it_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = building.binary

    def spilling(target: Any, program: Program, arch: str) -> Any:
        made = real(target, program, arch)
        spilled = Resources(255, 64, 48, 52, 0)
        from dataclasses import replace

        return replace(made, resources=spilled) if program.entry.endswith("_finish") else made

    monkeypatch.setattr(building, "binary", spilling)
    args = ("build", f"{SUMS}:rms_norm_grad", "--dim", "N=64", "--out", tmp_path / "out")
    for backend in ("cuda", "triton"):
        code, out, err = run(*args, "--backend", backend)
        assert (code, out) == (1, "")
        assert f"rms_norm_grad: the {backend} kernel rms_norm_grad_finish for sm_90 spills registers" in err
    assert not (tmp_path / "out").exists()
