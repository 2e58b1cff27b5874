"""Any strides give the right values without copies, and what a variant claims about memory is true."""

from __future__ import annotations

import pytest
import torch

import kgen
from kgen.codegen.collapse import candidates, collapse
from kgen.codegen.variant import TensorClass
from kgen.dsl.check import Specialization
from kgen.dsl.dtypes import BF16, F32
from kgen.runtime.layouts import Layout, Memory, layout

SOURCE = """
kernel product(a: T[*M, N], b: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M, n in N
    y[m, n] = a[m, n] * b[m, n]

kernel outer(a: T[M], b: T[N]) -> (y: T[M, N]):
    parallel m in M, n in N
    y[m, n] = a[m] * b[n]

kernel numbered(a: T[M, N]) -> (y: T[M, N]):
    parallel m in M, n in N
    y[m, n] = a[m, n] + n

kernel three(a: T[A, B, C], s: T[C]) -> (y: T[A, B, C]):
    parallel i in A, j in B, k in C
    y[i, j, k] = a[i, j, k] * s[k]

kernel centred(x: T[*M, N]) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    y[m, n] = x[m, n] - mean(x[m, n], n)

kernel shifted(x: T[M, N]) -> (y: T[M, N]):
    parallel m in M, n in N
    y[m, n] = x[m, N - 1 - n]
"""
M = kgen.loads(SOURCE, "layouts.kdsl")


def _layout(name: str, dtype: torch.dtype = torch.float32, **tensors: torch.Tensor) -> Layout:
    """The layout of a call with these tensors; an output is contiguous and aligned."""
    kernel = M[name].specialize(Specialization({"T": {torch.float32: F32, torch.bfloat16: BF16}[dtype]}))
    from kgen.codegen.shapes import bind_dims, full_shape, leading_shapes

    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    dims, leading = bind_dims(kernel, shapes), leading_shapes(kernel, shapes)
    for t in kernel.tensors:
        if t.name not in tensors:
            tensors[t.name] = torch.empty(full_shape(t, dims, leading), dtype=dtype)
    memory = {
        n: Memory(tuple(t.shape), t.stride(), t.itemsize, int(t.storage_offset()) * t.itemsize % 16)
        for n, t in tensors.items()
    }
    return layout(kernel, dims, memory)


def test_contiguous_elementwise_kernels_have_one_flat_index() -> None:
    x = torch.empty(4, 6, 10)
    lay = _layout("product", a=x, b=x)
    assert [a.name for a in lay.kernel.parallel] == ["mn"]
    assert [(t.name, [str(d) for d in t.shape], t.star) for t in lay.kernel.tensors] == [
        ("a", ["MN"], False), ("b", ["MN"], False), ("y", ["MN"], False)
    ]  # fmt: skip
    assert lay.dims["MN"] == 240
    assert dict(lay.variant.multiples) == {"MN": 16}
    assert lay.variant.star_ranks == ()
    assert all(t == TensorClass(True, 16) for _, t in lay.variant.tensors)


def test_halves_of_a_buffer_keep_their_rows() -> None:
    a, b = torch.empty(4, 6, 20).chunk(2, -1)
    lay = _layout("product", a=a, b=b)
    assert [x.name for x in lay.kernel.parallel] == ["m", "n"]
    assert dict(lay.variant.star_ranks) == {"M": 1}  # the leading dimensions are one all the same
    assert lay.strides["a"] == ((20,), (1,))
    assert lay.variant.tensor("a") == TensorClass(True, 16)
    assert lay.variant.tensor("b") == TensorClass(True, 8)  # starts 40 bytes in
    assert dict(lay.variant.multiples) == {"N": 2}


def test_leading_dimensions_merge_only_where_every_tensor_allows() -> None:
    a = torch.empty(4, 6, 8)
    b = torch.empty(6, 4, 8).transpose(0, 1)
    lay = _layout("centred", x=b)
    assert dict(lay.variant.star_ranks) == {"M": 2}
    assert lay.parts == {"M": (4, 6)}
    assert lay.strides["x"] == ((8, 32), (1,))
    assert lay.strides["y"] == ((48, 8), (1,))
    assert dict(_layout("centred", x=a).variant.star_ranks) == {"M": 1}
    lay = _layout("centred", x=torch.empty(2, 3, 4, 8)[:, :, :2])  # the first two of three merge
    assert lay.parts == {"M": (6, 2)}
    assert lay.strides["x"] == ((32, 8), (1,))


def test_dimensions_of_size_one_do_not_matter() -> None:
    x = torch.empty(6, 8)
    odd = torch.as_strided(x, (1, 6, 1, 8), (3, 8, 2**31, 1))
    assert _layout("centred", x=odd).variant == _layout("centred", x=x).variant
    one = torch.empty(5, 2)[:, :1]  # N == 1: stride 2 along m, and n does not move
    lay = _layout("centred", x=one)
    assert lay.variant.tensor("x") == TensorClass(True, 8)
    assert lay.strides["x"] == ((2,), (0,))
    assert dict(_layout("centred", x=torch.empty(8)).variant.star_ranks) == {"M": 1}


def test_expanded_tensors() -> None:
    lay = _layout("product", a=torch.empty(8).expand(5, 8), b=torch.empty(5, 8))
    assert [x.name for x in lay.kernel.parallel] == ["m", "n"]
    assert lay.strides["a"] == ((0,), (1,))
    assert lay.variant.tensor("a") == TensorClass(True, 16)
    scalar = torch.empty(()).expand(5, 8)
    lay = _layout("product", a=scalar, b=scalar)
    assert lay.variant.tensor("a") == TensorClass(False, 16)


@pytest.mark.parametrize(
    ("offset", "row", "align"), [(0, 8, 16), (1, 8, 4), (2, 8, 8), (4, 8, 16), (0, 6, 8), (0, 5, 4), (3, 4, 4)]
)
def test_alignment_is_that_of_address_and_strides(offset: int, row: int, align: int) -> None:
    x = torch.empty(200)[offset : offset + 8 * row].view(8, row)[:, :4]
    assert _layout("centred", x=x).variant.tensor("x") == TensorClass(True, align)


def test_wide_goes_by_the_furthest_element() -> None:
    def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        return torch.empty_strided(shape, strides, device="meta")  # a layout without memory

    far = strided((2, 4), (8, 2**30))
    lay = _layout("centred", x=far)
    assert lay.variant.wide
    assert not lay.variant.tensor("x").unit
    assert not _layout("centred", x=strided((2, 4), (2**40, 1))).variant.wide  # rows are 64-bit anyway
    assert not _layout("centred", x=strided((2, 2), (8, 2**31 - 1))).variant.wide
    assert _layout("centred", x=strided((2, 2), (8, 2**31))).variant.wide
    many = strided((2**16, 2**15), (0, 0))
    assert _layout("product", a=many, b=many, y=many).variant.wide


def test_a_new_batch_size_is_no_new_variant() -> None:
    variants = {_layout("centred", x=torch.empty(m, 64)).variant for m in (1, 2, 3, 7, 16, 100)}
    assert len(variants) == 1


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("product", (("m", "n"),)),
        ("outer", ()),
        ("numbered", ()),
        ("three", (("i", "j"),)),
        ("centred", ()),
        ("shifted", ()),
    ],
)
def test_which_indices_may_be_one(name: str, pairs: tuple[tuple[str, str], ...]) -> None:
    assert candidates(M[name].specialize(Specialization({"T": F32}))) == pairs


def test_names_of_merged_indices_are_new() -> None:
    k = kgen.loads("kernel f(mn: T[M, N]) -> (MN: T[M, N]):\n    parallel m in M, n in N\n    MN[m, n] = mn[m, n]\n")
    kernel, (merge,) = collapse(k.f.specialize(Specialization({"T": F32})), [("m", "n")])
    assert (merge.axis, merge.dim) == ("mn_2", "MN_2")
    assert kernel.dims == ("M", "N", "MN_2")
    x = torch.randn(3, 4)
    assert torch.equal(k.f(x, backend="cuda"), x)


# ---- values --------------------------------------------------------------------------------------------------------

VIEWS = {
    "contiguous": lambda m, n: torch.randn(m, n),
    "transposed": lambda m, n: torch.randn(n, m).T,
    "every second column": lambda m, n: torch.randn(m, 2 * n)[:, ::2],
    "every second row": lambda m, n: torch.randn(2 * m, n)[::2],
    "chunk": lambda m, n: torch.randn(m, 2 * n).chunk(2, -1)[1],
    "expanded rows": lambda m, n: torch.randn(n).expand(m, n),
    "expanded columns": lambda m, n: torch.randn(m, 1).expand(m, n),
    "expanded scalar": lambda m, n: torch.randn(()).expand(m, n),
    "odd offset": lambda m, n: torch.randn(m * n + 1)[1:].view(m, n),
}


@pytest.mark.parametrize("backend", ["reference", "cuda", "triton"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("n", [8, 17])
def test_values_of_any_view(view: str, n: int, backend: str) -> None:
    x = VIEWS[view](5, n)
    other = torch.randn(5, n)
    assert torch.equal(M.product(x, other, backend=backend), x * other)
    expected = x.double() - x.double().mean(-1, keepdim=True)
    # A float32 sum of n terms, each at most max|x|, and a subtraction.
    bound = (n + 2) * 2.0**-24 * 2 * x.abs().max().item()
    assert (M.centred(x, backend=backend).double() - expected).abs().max() <= bound


@pytest.mark.parametrize("backend", ["reference", "cuda", "triton"])
@pytest.mark.parametrize("view", [v for v in VIEWS if "expanded" not in v])
def test_outputs_of_any_strides(view: str, backend: str) -> None:
    out = VIEWS[view](5, 8).fill_(torch.nan)
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    assert M.product(a, b, out=out, backend=backend) is out
    assert torch.equal(out, a * b)


@pytest.mark.parametrize("backend", ["reference", "cuda", "triton"])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3, 8).transpose(0, 1),
        torch.randn(2, 3, 4, 8)[:, :, :2],
        torch.randn(8),
        torch.randn(1, 1, 8),
        torch.randn(3, 1),
    ],
)
def test_leading_dimensions_of_any_strides(x: torch.Tensor, backend: str) -> None:
    y = torch.randn(x.shape)
    assert torch.equal(M.product(x, y, backend=backend), x * y)
