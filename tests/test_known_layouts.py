"""Layouts that kernels of this kind are known to get wrong: any strides of inputs, weights, outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autograd_kit import as_tuple, randn, worst
from known_kit import DTYPES, OPS, agree, expected, outcome
from torch.utils._python_dispatch import TorchDispatchMode

import kgen
from kgen import ops
from kgen.runtime.placement import LAYOUTS, place

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDTHS = (3, 17, 33, 64, 127)


def laid_out(name: str, of_inputs: int, of_gradients: int, backend: str) -> None:
    """One op with its tensors in layouts from `of_inputs` on, the gradients of its results from `of_gradients` on."""
    op, turn = OPS[name], of_inputs + of_gradients
    width, dtype = WIDTHS[turn % len(WIDTHS)], DTYPES[of_gradients % len(DTYPES)]
    placed = {
        n: place(t, LAYOUTS[(of_inputs + i) % len(LAYOUTS)], keep=True)
        for i, (n, t) in enumerate(op.tensors(width, dtype).items())
    }
    tensors = {n: p.tensor.detach().requires_grad_() for n, p in placed.items()}
    with torch.no_grad():
        shapes = [(r.shape, r.dtype) for r in as_tuple(op.call(**tensors, backend="reference"))]
    seeds = [
        place(randn(*s, dtype=d, seed=70 + i), LAYOUTS[(of_gradients + i) % len(LAYOUTS)], keep=True)
        for i, (s, d) in enumerate(shapes)
    ]
    given = [s.tensor for s in seeds]
    agree(outcome(op, tensors, given, backend=backend), expected(op, tensors, given), 6 * width)
    assert all(p.unchanged() for p in [*placed.values(), *seeds]), "an input or a gradient was overwritten"


@pytest.mark.parametrize("name", OPS)
def test_layouts_of_inputs_times_layouts_of_gradients(name: str) -> None:
    for of_inputs in range(len(LAYOUTS)):
        for of_gradients in range(len(LAYOUTS)):
            laid_out(name, of_inputs, of_gradients, "reference")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_layouts_on_the_generated_kernels(name: str, backend: str) -> None:
    """Over all ops every layout of a gradient meets others of inputs; a layout costs a run of g++."""
    turn = list(OPS).index(name)
    for step in range(3 if backend == "cuda" else 6):
        laid_out(name, (turn + step) % 6, (2 * turn + 5 * step + 1) % 6, backend)


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_a_sum_and_a_mean(name: str, backend: str) -> None:
    """torch sends one element seen from everywhere: strides of 0."""
    op = OPS[name]
    tensors = {n: t.requires_grad_() for n, t in op.tensors(33).items()}
    doubles = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    for reduce in (torch.Tensor.sum, torch.Tensor.mean):

        def total(results: Any, reduce: Any = reduce) -> torch.Tensor:
            return torch.stack([reduce(r) * (i + 1) for i, r in enumerate(as_tuple(results))]).sum()

        found = torch.autograd.grad(total(op.call(**tensors, backend=backend)), list(tensors.values()))
        wanted = torch.autograd.grad(total(op.formula(**doubles)), list(doubles.values()))
        # Where a gradient vanishes, as that of the sum of a normalised row, its terms are those of 1 / count.
        scale = max(4.0 if reduce is torch.Tensor.sum else 4.0 / (6 * 33), *(e.abs().max().item() for e in wanted))
        for a, e in zip(found, wanted, strict=True):
            assert (a - e).abs().max() <= (6 * 33 + 64) * 2.0**-24 * scale


VIEWS: dict[str, Any] = {
    "every second": lambda n, seed: randn(2 * n, seed=seed)[::2],
    "expanded": lambda n, seed: randn(1, seed=seed).expand(n),
    "offset": lambda n, seed: randn(n + 3, seed=seed)[3:],
    "column": lambda n, seed: randn(n, 5, seed=seed)[:, 2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_weights_of_any_stride(view: str, backend: str) -> None:
    n = 40
    x, w, b = randn(4, n), VIEWS[view](n, 1), VIEWS[view](n, 2)
    xd, wd, bd = x.double(), w.double(), b.double()
    agree(
        [
            ops.layer_norm(x, w, b, backend=backend),
            ops.rms_norm(x, w, backend=backend),
            ops.add_rms_norm(x, x, w, backend=backend)[0],
            ops.cross_entropy(x, torch.tensor([0, 39, 7, 20]), w.abs(), label_smoothing=0.1, backend=backend),
        ],
        [
            F.layer_norm(xd, (n,), wd, bd),
            F.rms_norm(xd, (n,), wd, 1e-6),
            F.rms_norm(2 * xd, (n,), wd, 1e-6),
            F.cross_entropy(xd, torch.tensor([0, 39, 7, 20]), wd.abs(), label_smoothing=0.1),
        ],
        n,
    )


@pytest.mark.parametrize("view", ["every second", "expanded", "column"])
def test_gradients_of_strided_weights(view: str, backend: str) -> None:
    x, w, b, g = randn(4, 40), VIEWS[view](40, 1), VIEWS[view](40, 2), randn(4, 40, seed=3)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    doubles = [t.detach().double().requires_grad_() for t in (x, w, b)]
    mine = ops.layer_norm(leaves[0], leaves[1], leaves[2], backend=backend)
    theirs = F.layer_norm(doubles[0], (40,), doubles[1], doubles[2])
    agree(list(torch.autograd.grad(mine, leaves, g)), list(torch.autograd.grad(theirs, doubles, g.double())), 40)


def test_tables_and_positions_of_any_stride(backend: str) -> None:
    q, k = randn(2, 3, 2, 8), randn(2, 3, 1, 8, seed=1)
    cos, sin = randn(6, 12, seed=2).t()[:, 1:], randn(24, 10, seed=3)[::2, 2::2][:, :4].repeat(1, 2)[:, :5]
    cos, sin = cos[:, :4], sin[:, :4]
    positions = torch.tensor([[0, 11], [4, 4], [7, 1]]).t()
    got = ops.rope(q, k, cos, sin, positions=positions, backend=backend)
    for y, x in zip(got, (q, k), strict=True):
        c, s = (t.double()[positions][:, :, None] for t in (cos, sin))
        lo, hi = x.double()[..., :2], x.double()[..., 2:4]
        wanted = torch.cat([lo * c[..., :2] - hi * s[..., :2], hi * c[..., 2:] + lo * s[..., 2:], x[..., 4:]], -1)
        assert worst(y, wanted, 8) <= 1.0


# ---- no copies, nothing that waits -----------------------------------------------------------------------------------

COPIES = {"clone", "copy_", "_to_copy", "contiguous", "cat", "index_select"}
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item"}


class Recorded(TorchDispatchMode):
    """The names of all operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPS)
def test_strided_calls_copy_nothing_and_wait_for_nothing(name: str) -> None:
    """Forward and backward, with strided tensors: the host asks for no value and makes no copy. (On the executor of
    CUDA C, which takes addresses as a GPU does.)"""
    op = OPS[name]
    tensors = {n: place(t, "sliced").tensor.requires_grad_() for n, t in op.tensors(33).items()}
    results = as_tuple(op.call(**tensors, backend="cuda"))
    seeds = [place(randn(*r.shape), "sliced").tensor for r in results]
    torch.autograd.grad(results, list(tensors.values()), seeds, retain_graph=True)  # all is compiled
    with Recorded() as seen:
        results = as_tuple(op.call(**tensors, backend="cuda"))
        torch.autograd.grad(results, list(tensors.values()), seeds)
    assert not (COPIES | WAITS) & set(seen.names), seen.names


def test_a_reduced_loss_waits_for_nothing() -> None:
    logits, target = randn(4, 9).requires_grad_(), torch.tensor([0, -100, 8, 3])
    weight = randn(9, seed=1).abs()
    with Recorded() as seen:
        for reduction in ("mean", "sum"):
            loss = ops.cross_entropy(logits, target, weight, reduction=reduction, z_loss=0.1, backend="cuda")
            (loss * 3.7).backward()
        ops.cross_entropy_(logits.detach().clone(), target, 0.25, weight, backend="cuda")
    assert not WAITS & set(seen.names), seen.names


def test_halves_of_one_buffer(backend: str) -> None:
    """Gate and up as `chunk` gives them, forward and backward, and gradients in halves of one buffer."""
    for function, formula in ((ops.swiglu, F.silu), (ops.geglu, F.gelu)):
        h = randn(3, 2, 62).requires_grad_()
        g = randn(3, 2, 62, seed=1).chunk(2, -1)[1]
        y = function(*h.chunk(2, -1), backend=backend)
        (found,) = torch.autograd.grad(y, h, g)
        hd = h.detach().double().requires_grad_()
        gate, up = hd.chunk(2, -1)
        yd = formula(gate) * up
        (wanted,) = torch.autograd.grad(yd, hd, g.double())
        agree([y.detach(), found], [yd.detach(), wanted], 1)


# ---- vectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "of_x", "of_out"), [(46, 1, 0), (46, 0, 1), (1001, 3, 2), (2520, 0, 3), (2520, 2, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_addresses_that_are_not_aligned(width: int, of_x: int, of_out: int, dtype: torch.dtype, backend: str) -> None:
    """Views that begin some elements into a buffer, input and output apart: each by its own address."""

    def view(offset: int, values: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.full((3 * width + 8,), 7.0, dtype=dtype)
        part = buffer[offset : offset + 3 * width].view(3, width)
        if values is not None:
            part.copy_(values)
        return part, buffer

    x, _ = view(of_x, randn(3, width, dtype=dtype))
    up, _ = view(of_out, randn(3, width, dtype=dtype, seed=1))
    calls: list[tuple[Any, Any]] = [
        (lambda out: ops.swiglu(x, up, backend=backend, out=out), F.silu(x.double()) * up.double()),
        (lambda out: ops.softmax(x, backend=backend, out=out), x.double().softmax(-1)),
    ]
    for call, wanted in calls:
        out, around = view(of_out, None)
        call(out)
        assert worst(out, wanted, width) <= 1.0
        out.fill_(7.0)
        assert torch.equal(around, torch.full_like(around, 7.0)), "memory beside the output was written"


# ---- memory that overlaps --------------------------------------------------------------------------------------------


def test_outputs_that_overlap_an_input_are_refused(backend: str) -> None:
    buffer = randn(256)
    shifted = [(buffer[:-64], buffer[64:]), (buffer[64:], buffer[:-64]), (buffer, buffer), (buffer[:8], buffer[7:15])]
    for x, out in shifted:
        for call in (
            lambda x, out: ops.softmax(x, backend=backend, out=out),
            lambda x, out: ops.swiglu(x, x, backend=backend, out=out),
        ):
            with pytest.raises(kgen.ArgumentError, match="shares memory"):
                call(x, out)
    two = randn(2, 3, 8)
    with pytest.raises(kgen.ArgumentError, match="shares memory"):
        ops.add_rms_norm(randn(3, 8), randn(3, 8), backend=backend, out=(two[0], two[0]))
    with pytest.raises(kgen.ArgumentError, match="shares memory"):
        ops.cross_entropy_(buffer.view(4, 64), torch.tensor([0, 1, 2, 3]), buffer[:4], backend=backend)
    before = buffer.clone()
    ops.softmax(buffer[:64], backend=backend, out=buffer[64:128])  # side by side is no overlap
    assert torch.equal(buffer[:64], before[:64])
    assert worst(buffer[64:128], before[:64].double().softmax(-1), 64) <= 1.0


def test_a_row_reversed_into_itself(backend: str) -> None:
    """Declared in place: every element is read before any is written, whichever thread holds it."""
    flip = kgen.loads(
        "kernel flip(x: inout T[*M, N]):\n    parallel m in M\n    tile n in N\n    x[m, n] = x[m, N - 1 - n] * 2.0\n"
    ).flip
    for width in (1, 2, 65, 300):
        x = randn(3, width)
        wanted = 2 * x.flip(-1)
        assert torch.equal(flip(x, backend=backend), wanted)


def test_an_output_cannot_be_read_back() -> None:
    text = """
kernel k(x: T[*M, N]) -> (y: T[*M, N], z: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n]
    z[m, n] = y[m, N - 1 - n]
"""
    with pytest.raises(kgen.DslError, match=r"K0404.*output 'y' is read"):
        kgen.loads(text)


# ---- extents of one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (5, 1), (1, 5), (1, 1, 1), (1, 4, 1)])
def test_extents_of_one(shape: tuple[int, ...], backend: str) -> None:
    x, up = randn(*shape), randn(*shape, seed=1)
    # Strides that mean nothing, as along them there is one element.
    odd = torch.as_strided(x, shape, tuple(2**31 if s == 1 else st for s, st in zip(shape, x.stride(), strict=True)))
    for given in (x, odd):
        agree(
            [ops.softmax(given, backend=backend), ops.swiglu(given, up, backend=backend)],
            [x.double().softmax(-1), F.silu(x.double()) * up.double()],
            x.shape[-1],
        )
