"""`kgen build` of ops: choices, refusals, sizes that are compiled in, and ranks. No GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ejected_kit import load
from linear_loss_kit import randn
from test_build import clean, run

ROOT = Path(__file__).resolve().parents[1]
LINEAR = ROOT / "ops" / "fused_linear_cross_entropy.kdsl"

TILED = """
kernel means(x: T[M, N]) -> (y: T[N]):
    parallel n in N
    tile m in M
    y[n] = mean(x[m, n], m)

kernel doubled(x: T[M, N]) -> (y: T[M, N]):
    parallel n in N
    tile m in M
    y[m, n] = 2.0 * x[m, n]

op chunked(x: T[B, H]) -> (y: T[B, H]):
    example B = 64
    forward:
        for c in chunks(B):
            y[c] = doubled(x[c])

op whole(x: T[*B, H], w: T[H, V]) -> (y: T[V]):
    forward:
        y = means(x @ w)
"""


def test_what_cannot_be_ejected_is_said(tmp_path: Path) -> None:
    file = tmp_path / "tiled.kdsl"
    file.write_text(TILED)
    out = ("--backend", "triton", "--out", tmp_path / "out")
    code, _, err = run("build", f"{file}:chunked", "--dim", "H=16", *out)
    assert code == 1
    assert "chunked: the rows of a chunk of B are compiled into the kernel doubled" in err
    code, _, err = run("build", f"{file}:chunked", *out)
    assert code == 1
    assert "chunked: no size is known for H; give it (--dim H=...)" in err
    code, _, err = run("build", f"{file}:whole", "--dim", "H=16,V=16", *out)
    assert code == 1
    assert "whole: no size is known for B, which is compiled into a kernel; give it (--dim B=...)" in err
    code, _, err = run("build", f"{file}:whole", "--backend", "cuda", "--out", tmp_path / "out")
    assert code == 2
    assert "whole is an op, whose file launches Triton kernels" in err
    code, _, err = run("build", f"{LINEAR}:fused_linear_cross_entropy", "--gradients", "x,target", *out)
    assert code == 1
    assert "there is no tensor 'target' that may have a gradient; there is x, w, bias, class_weight" in err
    code, _, err = run("build", f"{LINEAR}:fused_linear_cross_entropy", "--gradients", "class_weight", *out)
    assert code == 1
    assert "the op gives no gradient of 'class_weight'" in err
    code, _, err = run("build", ROOT / "ops" / "rms_norm.kdsl", "--gradients", "x", *out)
    assert code == 2
    assert "--gradients is for ops" in err
    (tmp_path / "torch.kdsl").write_text(RANKS.replace("shared", "torch"))
    code, _, err = run("build", tmp_path / "torch.kdsl", "--dim", "K=8,V=8", *out)
    assert code == 1
    assert "torch: a file torch.py would be imported in place of the package; rename the op" in err
    code, _, err = run("build", f"{LINEAR}:fused_linear_cross_entropy", "--accumulate", "f64", *out)
    assert code == 2
    assert "'f64' is none of auto, param, f32" in err
    assert not (tmp_path / "out").exists()


def test_a_dimension_that_a_kernel_holds_whole_is_compiled_in(tmp_path: Path) -> None:
    file = tmp_path / "tiled.kdsl"
    file.write_text(TILED)
    args = ("--dim", "B=24,H=16,V=16", "--dtype", "f32", "--out", tmp_path)
    code, out, err = run("build", f"{file}:whole", *args)
    assert code == 0, err
    assert "whole_forward" in out
    made = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    assert made["op"]["dims"] == {
        "compiled": {"B": 24},
        "run_time": ["H", "V"],
        "built_for": {"B": 24, "H": 16, "V": 16},
    }
    assert made["op"]["gradients"] == []
    assert (tmp_path / "whole" / "means.cu").exists()  # both backends' kernels, where none is chosen
    m = load(tmp_path / "whole" / "whole.py")
    x, w = randn(2, 12, 16), randn(16, 16)
    torch.testing.assert_close(m.whole_forward(x, w), (x @ w).flatten(0, 1).mean(0))
    with pytest.raises(ValueError, match="B, the leading dimensions of x together, must be 24"):
        m.whole_forward(x[:, :11], w)
    with pytest.raises(ValueError, match=r"w must have dtype torch\.float32, got torch\.float64"):
        m.whole_forward(x, w.double())


RANKS = """
op shared(x: f32[B, K], w: f32[V, K]) -> (y: f32[B, V], top: f32[B, V]):
    forward:
        for c in chunks(B):
            z = x[c] @ w.T
            top[c] = all_max(z)
            y[c] = all_sum(z)
"""


def test_collectives_go_over_the_ranks_of_a_group(tmp_path: Path) -> None:
    file = tmp_path / "shared.kdsl"
    file.write_text(RANKS)
    code, _, err = run("build", file, "--dim", "K=8,V=6", "--out", tmp_path)
    assert code == 0, err
    script = """
import multiprocessing, sys, torch
from torch import distributed
sys.path.insert(0, "shared")
from shared import shared_forward
torch.manual_seed(0)
xs, w = torch.randn(2, 7, 8), torch.randn(6, 8)
z = xs @ w.T
y, top = shared_forward(xs[0], w)
assert torch.equal(y, top)
torch.testing.assert_close(y, z[0])
def rank(r):
    distributed.init_process_group("gloo", init_method="file://" + sys.argv[-1], rank=r, world_size=2)
    try:
        shared_forward(xs[r], w)
    except ValueError as error:
        assert "chunk must be given" in str(error)
    else:
        raise SystemExit("chunks of a budget")
    y, top = shared_forward(xs[r], w, chunk=3)
    torch.testing.assert_close(y, z.sum(0))
    torch.testing.assert_close(top, z.amax(0))
    y, _ = shared_forward(xs[r], w, chunk=3, group=distributed.group.WORLD)
    torch.testing.assert_close(y, z.sum(0))
    distributed.destroy_process_group()
both = [multiprocessing.get_context("fork").Process(target=rank, args=(r,)) for r in (0, 1)]
for p in both:
    p.start()
for p in both:
    p.join(100)
print([p.exitcode for p in both])
""".replace("sys.argv[-1]", repr(str(tmp_path / "store")))
    assert clean(script, tmp_path) == "[0, 0]\n"


def test_ops_are_left_out_where_only_cuda_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "tiled.kdsl"
    file.write_text(TILED)
    code, _, err = run("build", file, "--dim", "M=64,N=16", "--backend", "cuda", "--out", tmp_path / "out")
    assert code == 0, err
    assert "left out: chunked, whole" in err
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".cu", ".cubin", ".ptx", ".json"}
