"""`kgen build` of ops: a forward and a backward function that stand alone and do what the op does through kgen."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ejected_kit import load
from host_kit import ATTEND, GROWN, MLP
from test_build import clean, run

import kgen
from kgen.cli.files import read
from kgen.codegen.host import sizing
from kgen.runtime.ahead import Choices
from kgen.runtime.eject_op import kernel_files, op_source
from kgen.runtime.op_target import op_target

ROOT = Path(__file__).resolve().parents[1]
LINEAR = ROOT / "ops" / "fused_linear_cross_entropy.kdsl"

# Names that Python, torch and the file itself use; two outputs, one that is saved and handed out; two loops; a kernel
# in several variants; a slice along the second dimension; numbers for scalars.
HOSTILE = '''\
"""Ops with names that are taken."""

kernel scaled(torch: T[*M, N], device: f32 = 1.0) -> (n: T[*M, N]):
    parallel m in M, int in N
    n[m, int] = torch[m, int] * device

kernel shifted_(z: inout T[*M, N], keep_saved: f32, flip: const bool = false):
    parallel m in M, i in N
    if flip:
        z[m, i] = keep_saved - z[m, i]
    else:
        z[m, i] = z[m, i] + keep_saved

op hostile(
    saved: T[chunk, lambda],
    range: T[saved_rows, lambda],
    helpers: f32 = 2.0,
) -> (device: T[chunk, saved_rows], x: T[chunk]):
    forward:
        a = saved @ range.T
        device = scaled(a, device=helpers)
        shifted_(a, 0.5)
        shifted_(a, 3, flip=true)
        x = ones(a)
    backward(d_device, d_x):
        b = scaled(d_device, device=helpers)
        for c in chunks(chunk):
            d_saved[c] = b[c] @ range
        for c in chunks(saved_rows):
            d_range[c] = b[c].T @ saved

kernel ones(z: T[M, N]) -> (x: T[M]):
    parallel m in M
    tile n in N
    x[m] = sum(z[m, n], n)
'''

# What is saved is changed in place and handed out; a sum that is held in f32; f64 rounded to 16 bits.
SUMS = '''\
"""Sums over chunks."""

kernel halved_(z: inout T[M, N]):
    parallel m in M, n in N
    z[m, n] = z[m, n] * 0.5

kernel wide(z: T[M, N]) -> (y: f64[N]):
    parallel m in M, n in N
    y[n] += f64(z[m, n])

op gram(x: T[B, H]) -> (g: T[H, H], narrow: T[H]):
    forward:
        k: T[B, H]
        for c in chunks(B):
            g += x[c].T @ x[c]
            k[c] = x[c] @ first(x)
        narrow = T(wide(x))
    backward(d_g, d_narrow):
        if d_x:
            halved_(k)
            d_x = k

kernel first(x: T[B, H]) -> (y: T[H, H]):
    parallel i in H, j in H
    require B >= H
    y[i, j] = x[i, j]
'''


@dataclass
class Case:
    """One op as it is built, and one call of it. `seeds`: gradients of the outputs."""

    label: str
    text: str
    op: str
    build: tuple[str, ...]
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any] = field(default_factory=dict)
    consts: dict[str, Any] = field(default_factory=dict)
    chunk: int | None = None
    accumulate: str = "param"
    wanted: tuple[str, ...] | None = None


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def labels(rows: int, classes: int) -> torch.Tensor:
    target = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(3))
    target[1::4] = -100
    return target


def linear(rows: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> dict[str, torch.Tensor]:
    out = {"x": randn(rows, 64, dtype=dtype), "w": (randn(96, 64) / 8).to(dtype), "target": labels(rows, 96)}
    return out | ({"bias": randn(96, dtype=dtype)} if bias else {})


SMALL = ("--dim", "H=64,V=96")
PLAIN = ("--without", "class_weight,token_weight")
BF16 = torch.bfloat16
CASES = [
    Case(
        "linear",
        "",
        "fused_linear_cross_entropy",
        (*SMALL, "--dtype", "f32", "--const", "smoothed=true"),
        {**linear(21), "class_weight": randn(96).abs(), "token_weight": randn(21).abs()},
        {"label_smoothing": 0.125, "z_loss": 1e-3, "ignore_index": -100},
        {"smoothed": True},
        chunk=8,
    ),
    Case(
        "linear of bf16, sums in f32",
        "",
        "fused_linear_cross_entropy",
        (*SMALL, *PLAIN, "--without", "bias", "--dtype", "bf16", "--accumulate", "f32"),
        linear(37, BF16, bias=False),
        chunk=5,
        accumulate="f32",
    ),
    Case(
        "linear of f16",
        "",
        "fused_linear_cross_entropy",
        (*SMALL, *PLAIN, "--dtype", "f16", "--const", "narrow=true"),
        linear(19, torch.float16),
        consts={"narrow": True},
        chunk=7,
    ),
    Case(
        "linear, the gradient of x",
        "",
        "fused_linear_cross_entropy",
        (*SMALL, *PLAIN, "--dtype", "f32", "--gradients", "x"),
        linear(9),
        wanted=("x",),
    ),
    Case(
        "linear without gradients",
        "",
        "fused_linear_cross_entropy",
        (*SMALL, *PLAIN, "--dtype", "f32", "--gradients", "none"),
        linear(9),
        wanted=(),
        chunk=4,
    ),
    Case(
        "rows",
        "",
        "fused_linear_cross_entropy_rows",
        (*SMALL, "--dtype", "f32", "--without", "class_weight"),
        {**linear(23), "token_weight": randn(23).abs()},
        chunk=6,
    ),
    Case("rows, none", "", "fused_linear_cross_entropy_rows", (*SMALL, *PLAIN, "--dtype", "f32"), linear(0)),
    Case(
        "mlp",
        MLP,
        "mlp",
        ("--dim", "B=64,H=48,F=80", "--dtype", "bf16"),
        {"x": randn(3, 11, 48, dtype=BF16), "up": randn(80, 48, dtype=BF16), "down": randn(48, 80, dtype=BF16)},
        chunk=9,
    ),
    Case(
        "mlp, sums in f32",
        MLP,
        "mlp",
        ("--dim", "H=48,F=80", "--dtype", "bf16", "--accumulate", "f32"),
        {"x": randn(33, 48, dtype=BF16), "up": randn(80, 48, dtype=BF16), "down": randn(48, 80, dtype=BF16)},
        chunk=4,
        accumulate="f32",
    ),
    Case(
        "attend",
        ATTEND,
        "attend",
        ("--dim", "H=32,V=40", "--dtype", "T=bf16,W=f32,U=f32"),
        {"x": randn(2, 7, 32, dtype=BF16), "w": randn(40, 32), "bias": randn(40)},
    ),
    Case(
        "hostile",
        HOSTILE,
        "hostile",
        ("--dim", "lambda=16,saved_rows=32", "--dtype", "f32"),
        {"saved": randn(21, 16), "range": randn(32, 16)},
        {"helpers": 3.0},
        chunk=5,
    ),
    Case(
        "values of three dimensions",
        GROWN,
        "in_chunks",
        ("--dim", "S=5,H=16", "--dtype", "f32"),
        {"x": randn(7, 5, 16), "s": randn(7, 5)},
        chunk=3,
    ),
    Case(
        "twice the rows of a chunk",
        GROWN,
        "doubled",
        ("--dim", "H=16,V=8", "--dtype", "bf16"),
        {"x": randn(50, 16, dtype=BF16), "w": randn(8, 16, dtype=BF16)},
        chunk=20,
    ),
    Case("gram", SUMS, "gram", ("--dim", "H=16", "--dtype", "bf16"), {"x": randn(50, 16, dtype=BF16)}, chunk=20),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case in a folder with its number."""
    folder = tmp_path_factory.mktemp("ops")
    cache = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KGEN_CACHE_DIR", cache)
        patch.setenv("TRITON_CACHE_DIR", f"{cache}/triton-own")
        for i, c in enumerate(CASES):
            path = file_of(folder, c)
            code, _, err = run("build", f"{path}:{c.op}", *c.build, "--backend", "triton", "--out", folder / f"n{i}")
            assert code == 0, f"{c.label}: {err}"
    return folder


def file_of(folder: Path, c: Case) -> Path:
    if not c.text:
        return LINEAR
    path = folder / f"{c.op}.kdsl"
    path.write_text(c.text)
    return path


def entry(folder: Path, i: int) -> dict[str, Any]:
    return json.loads((folder / f"n{i}" / CASES[i].op / "manifest.json").read_text())


def through_kgen(folder: Path, i: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, the gradients that they are given, and the gradients of the parameters that have one."""
    c = CASES[i]
    wanted = entry(folder, i)["op"]["gradients"]
    tensors = {n: t.clone().requires_grad_(n in wanted) for n, t in c.tensors.items()}
    op = kgen.load(file_of(folder, c))[c.op]
    found = op(**tensors, **c.scalars, **c.consts, backend="triton", chunk=c.chunk, accumulate=c.accumulate)
    outputs = list(found) if isinstance(found, tuple) else [found]
    seeds = [randn(*o.shape).to(o) + 0.5 for o in outputs]
    carrying = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
    if not wanted:
        return outputs, seeds, []
    roots, given = zip(*carrying, strict=True)
    gradients = torch.autograd.grad(roots, [tensors[n] for n in wanted], given)
    return outputs, seeds, list(gradients)


def as_list(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def fitting(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in options.items() if n in inspect.signature(function).parameters}


@pytest.mark.parametrize("i", range(len(CASES)), ids=[c.label for c in CASES])
def test_ejected_ops_do_bit_for_bit_what_the_op_does(built: Path, i: int) -> None:
    c, own = CASES[i], entry(built, i)["op"]
    expected, seeds, wanted = through_kgen(built, i)
    given = {f"d_{n}": s for n, s in zip(own["outputs"], seeds, strict=True)}
    options = {} if c.chunk is None else {"chunk": c.chunk}
    inputs = [t.clone() for t in c.tensors.values()]
    m = load(built / f"n{i}" / c.op / own["file"])
    forward, *rest = (getattr(m, n) for n in own["functions"])
    outputs = as_list(forward(*inputs, **c.scalars, **fitting(forward, options)))
    assert bool(rest) == bool(own["gradients"])
    gradients: list[torch.Tensor] = []
    if rest:
        (backward,) = rest
        saved = outputs.pop()
        before = [o.clone() for o in outputs]
        upstream = fitting(backward, given)
        options = fitting(backward, options)
        gradients = as_list(backward(saved, *upstream.values(), keep_saved=True, **options))
        again = as_list(backward(saved, *upstream.values(), **options))
        for a, b in zip(gradients, again, strict=True):
            assert torch.equal(a, b)
            assert not a.numel() or a.data_ptr() != b.data_ptr()
        with pytest.raises(ValueError, match="was used up by an earlier call"):
            backward(saved, *upstream.values(), **options)
        assert all(torch.equal(a, b) for a, b in zip(outputs, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, c.tensors.values(), strict=True))
    names = [*own["outputs"], *(f"d_{n}" for n in own["gradients"])]
    for name, got, want in zip(names, [*outputs, *gradients], [*expected, *wanted], strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.detach().nan_to_num(7.0)), name
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert got.isfinite().all() or not c.tensors["x"].numel(), name


@pytest.mark.parametrize("accumulate", ["auto", "param"])
def test_chunks_are_those_of_the_op(tmp_path: Path, accumulate: str) -> None:
    """Rows of a chunk for the budget of a call; rounded sums over chunks are no more than eight by default."""
    op = next(o for o in read(LINEAR).module.ops if o.name == "fused_linear_cross_entropy")
    choices = Choices({"H": 64, "V": 1000}, "bf16", without=frozenset(("class_weight", "token_weight")))
    made = op_target(read(LINEAR).module, op, choices, None, accumulate)
    assert made.accumulate == "param"
    (tmp_path / "op.py").write_text(op_source(made, kernel_files(made)))
    found = chunk_rows(tmp_path / "op.py")
    (loop,) = made.chunks
    for rows in (0, 1, 127, 128, 129, 1000, 4096, 8191, 70_000):
        for mb in (0.0001, 0.5, 8.0, 512.0):
            sizes = sizing.sizes(made.plan, {**made.dims, "B": rows}, mb * 2**20, "param")
            want = sizes.chunks[loop]
            if accumulate == "auto":
                want = max(want, -(-rows // sizing.ROUNDINGS))
            assert found(rows, mb, None) == want, (rows, mb)
        fixed = sizing.sizes(made.plan, {**made.dims, "B": rows}, 2**20, "param", 300)
        assert found(rows, 1.0, 300) == fixed.chunks[loop]


def test_chunks_whose_memory_grows_with_their_square(tmp_path: Path) -> None:
    (tmp_path / "op.kdsl").write_text(GROWN)
    module = read(tmp_path / "op.kdsl").module
    op = next(o for o in module.ops if o.name == "squared")
    made = op_target(module, op, Choices({"H": 4}, "f32"), None, "auto")
    (tmp_path / "op.py").write_text(op_source(made, kernel_files(made)))
    found = chunk_rows(tmp_path / "op.py")
    (loop,) = made.chunks
    for rows, mb in itertools.product((0, 1, 100, 1000), (0.0001, 0.01, 0.5, 8.0)):
        sizes = sizing.sizes(made.plan, {**made.dims, "B": rows}, mb * 2**20, "auto")
        assert found(rows, mb, None) == sizes.chunks[loop], (rows, mb)


def chunk_rows(path: Path) -> Any:
    """How an ejected op chooses the rows of its only chunk: of extent, budget and what is fixed."""
    text = path.read_text()
    (call,) = {line.split(" = ", 1)[1] for line in text.splitlines() if " = _chunk_rows(" in line}
    scope: dict[str, Any] = {}
    exec(text[text.index("def _chunk_rows") :].split("\n\n\n")[0], scope)
    return lambda rows, mb, chunk: eval(call, scope, {"B": rows, "workspace_mb": mb, "chunk": chunk})


def test_ejected_ops_import_neither_kgen_nor_a_package(built: Path) -> None:
    """Both ways to import an ejected op, where kgen is not there; one that needs no libdevice runs on Triton's own
    interpreter, which has none."""
    for path in built.rglob("*.py"):
        lines = path.read_text().splitlines()
        imports = [line.split() for line in lines if line.lstrip().startswith(("import ", "from "))]
        near = {p.stem for p in path.parent.glob("*.py")}
        assert all(words[1].lstrip(".").split(".")[0] in {"torch", "triton", *near} for words in imports), path
    i = next(i for i, c in enumerate(CASES) if c.label == "hostile")
    names = [f"n{k}.{c.op}.{c.op}" for k, c in enumerate(CASES)]
    script = f"""
import importlib, sys, torch
sys.path.insert(0, ".")
for name in {names!r}:
    importlib.import_module(name)
package = importlib.import_module({names[i]!r})
sys.path.insert(0, "n{i}/hostile")
import hostile as alone
torch.manual_seed(0)
saved, range = torch.randn(21, 16), torch.randn(32, 16)
found = [m.hostile_forward(saved, range, helpers=3.0) for m in (package, alone)]
for device, x, kept in found:
    torch.testing.assert_close(device, 3.0 * (saved @ range.T))
print("done")
"""
    assert clean(script, built, TRITON_INTERPRET="1") == "done\n"


# Kernels without reductions, whose bits do not depend on how a compiler spreads them.
EXACT = [i for i, c in enumerate(CASES) if c.op in ("mlp", "hostile", "gram")]


@pytest.mark.gpu
@pytest.mark.parametrize("i", EXACT, ids=[CASES[i].label for i in EXACT])
def test_ejected_ops_do_on_a_gpu_what_the_op_does(built: Path, i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    c, own = CASES[i], entry(built, i)["op"]
    monkeypatch.setattr(c, "tensors", {n: t.cuda() for n, t in c.tensors.items()})
    expected, seeds, wanted = through_kgen(built, i)
    given = {f"d_{n}": s for n, s in zip(own["outputs"], seeds, strict=True)}
    options = {} if c.chunk is None else {"chunk": c.chunk}
    monkeypatch.syspath_prepend(str(built))
    m = importlib.import_module(f"n{i}.{c.op}.{c.op}")
    forward, backward = (getattr(m, n) for n in own["functions"])
    *outputs, saved = forward(*c.tensors.values(), **c.scalars, **fitting(forward, options))
    gradients = as_list(backward(saved, *fitting(backward, given).values(), **fitting(backward, options)))
    for got, want in zip([*outputs, *gradients], [*expected, *wanted], strict=True):
        assert torch.equal(got, want.detach())
