"""Every way in which an argument of a call can be wrong is one ArgumentError that names it; everything legal works."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kgen
from kgen.runtime.binding import scalar_converter
from kgen.runtime.checked import CheckError

SOURCE = """
kernel scale[T: f32 | bf16](x: T[*M, N], w: W[N]?, a: f32, k: i32 = 2, flip: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    v = x[m, n] * a * k
    if flip:
        u = -v
    else:
        u = v
    if w:
        y[m, n] = u * w[n]
    else:
        y[m, n] = u

kernel halves(x: f32[M, N]) -> (lo: f32[M, N // 2], hi: f32[M, N // 2]):
    require N % 2 == 0
    parallel m in M
    tile n in N // 2
    lo[m, n] = x[m, n]
    hi[m, n] = x[m, n + N // 2]

kernel add_in_place(x: inout f32[M], y: f32[M]):
    parallel m in M
    x[m] = x[m] + y[m]

kernel column_sum(x: f32[M, N]) -> (s: f32[N]):
    parallel m in M
    tile n in N
    s[n] += x[m, n]

kernel pick(x: f32[M, N], at: i64[M]) -> (y: f32[M]):
    parallel m in M
    y[m] = x[m, at[m]]
"""


@pytest.fixture(scope="module")
def m() -> kgen.KernelModule:
    return kgen.loads(SOURCE, "case.kdsl")


X = torch.arange(6.0).reshape(2, 3)

BAD = {
    "missing": (lambda f: f(X), "missing argument 'a'"),
    "missing two": (lambda f: f(), "missing arguments 'x', 'a'"),
    "too many": (lambda f: f(X, None, 1.0, 2, False, 3), "takes 5 arguments"),
    "unknown": (lambda f: f(X, a=1.0, b=2), "no argument 'b'"),
    "output by name": (lambda f: f(X, a=1.0, y=X), "pass outputs as out="),
    "twice": (lambda f: f(X, a=1.0, x=X), "argument 'x' is given twice"),
    "no tensor": (lambda f: f([1.0], a=1.0), "'x' must be a torch.Tensor, got a list"),
    "None for a required one": (lambda f: f(None, a=1.0), "'x' must be a torch.Tensor, got None"),
    "numpy array": (lambda f: f(np.ones((2, 3), np.float32), a=1.0), "'x' must be a torch.Tensor, got a ndarray"),
    "rank": (lambda f: f(torch.tensor(1.0), a=1.0), "'x' must have at least 1 dimension"),
    "rank of w": (lambda f: f(X, X, 1.0), "'w' must have 1 dimension for [N], got shape (2, 3)"),
    "size": (lambda f: f(X, torch.ones(4), 1.0), "'w' must have shape [N] = [3] (N = 3 by 'x'), got shape (4,)"),
    "dtype not allowed": (lambda f: f(X.double(), a=1.0), "'x' has dtype f64, but T stands for one of f32, bf16"),
    "dtype without a name": (lambda f: f(X.to(torch.complex64), a=1.0), "'x' has dtype torch.complex64"),
    "meta": (lambda f: f(X.to("meta"), a=1.0), "'x' must be on a CPU or CUDA device, got meta"),
    "sparse": (lambda f: f(X.to_sparse(), a=1.0), "'x' must be a dense tensor, got layout torch.sparse_coo"),
    "scalar is text": (lambda f: f(X, a="1"), "scalar argument 'a' must be a number (f32), got str '1'"),
    "scalar is None": (lambda f: f(X, a=None), "scalar argument 'a' must be a number (f32), got NoneType None"),
    "scalar is a tensor": (lambda f: f(X, a=X), "scalar argument 'a' must be a number, got a tensor of shape (2, 3)"),
    "integer is a float": (lambda f: f(X, a=1.0, k=1.5), "scalar argument 'k' must be an integer (i32), got float 1.5"),
    "integer too large": (lambda f: f(X, a=1.0, k=2**31), "scalar argument 'k' must fit i32"),
    "const bool": (lambda f: f(X, a=1.0, flip="yes"), "scalar argument 'flip' must be a bool"),
    "out is no tensor": (lambda f: f(X, a=1.0, out=3), "out= must be one tensor for each output (y), got a int"),
    "too many outs": (lambda f: f(X, a=1.0, out=(X, X)), "out= must be one tensor for each output (y), got 2 tensors"),
    "shape of out": (lambda f: f(X, a=1.0, out=torch.empty(2, 4)), "'y' must have shape"),
    "leading shape of out": (lambda f: f(X, a=1.0, out=torch.empty(1, 2, 3)), "'y' of shape [*M, N] must have leading"),
    "dtype of out": (lambda f: f(X, a=1.0, out=X.bfloat16()), "'y' has dtype bf16, but T is f32 by argument 'x'"),
    "out is the input": (lambda f: f(X, a=1.0, out=X), "'y', which is written, shares memory with argument 'x'"),
    "out meets itself": (lambda f: f(X, a=1.0, out=torch.empty(1, 3).expand(2, 3)), "elements share memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_argument_is_named(m: kgen.KernelModule, case: str) -> None:
    call, message = BAD[case]
    for _ in range(3):  # no call must find a remembered one
        with pytest.raises(kgen.ArgumentError) as error:
            call(m.scale)
        assert str(error.value).startswith("scale: ")
        assert message in str(error.value)


def test_two_dtypes_for_one_variable_name_both_arguments() -> None:
    k = kgen.loads("kernel f(x: T[M], y: T[M]) -> (z: T[M]):\n    parallel m in M\n    z[m] = x[m] + y[m]\n")
    with pytest.raises(kgen.ArgumentError, match=r"'y' has dtype bf16, but T is f32 by argument 'x'"):
        k.f(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))


def test_a_require_that_is_not_met_is_told_with_the_sizes(m: kgen.KernelModule) -> None:
    with pytest.raises(kgen.ArgumentError, match=r"halves: requires .*N = 3"):
        m.halves(X)


def test_an_error_does_not_spoil_later_calls(m: kgen.KernelModule) -> None:
    with pytest.raises(kgen.ArgumentError):
        m.scale(X, torch.ones(4), 1.0)
    assert torch.equal(m.scale(X, a=1.5), X * 3)


def test_binding_by_position_and_name(m: kgen.KernelModule) -> None:
    w = torch.tensor([1.0, 2.0, 3.0])
    expected = X * 1.5 * 4 * w
    assert torch.equal(m.scale(X, w, 1.5, 4), expected)
    assert torch.equal(m.scale(k=4, a=1.5, w=w, x=X), expected)
    assert torch.equal(m.scale(X, w, a=1.5, k=4, flip=True), -expected)
    assert torch.equal(m.scale(X, w, 1.5, 4, False), expected)  # True == 1 == 1.0 must not be mixed up


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2.0), torch.tensor([2])]
)
def test_numbers_of_any_kind_are_scalars(m: kgen.KernelModule, value: object) -> None:
    assert torch.equal(m.scale(X, a=value), X * 4)


@pytest.mark.parametrize("value", [3, np.int8(3), torch.tensor(3), True + 2])
def test_integers_of_any_kind_are_integer_scalars(m: kgen.KernelModule, value: object) -> None:
    assert torch.equal(m.scale(X, a=1.0, k=value), X * 3)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("i8", -128, 127),
        ("u8", 0, 255),
        ("i16", -(2**15), 2**15 - 1),
        ("i32", -(2**31), 2**31 - 1),
        ("i64", -(2**63), 2**63 - 1),
    ],
)
def test_the_range_of_integer_scalars(name: str, low: int, high: int) -> None:
    from kgen.dsl.dtypes import DTYPES

    convert = scalar_converter("f", "a", DTYPES[name])
    assert (convert(low), convert(high)) == (low, high)
    for value in (low - 1, high + 1):
        with pytest.raises(kgen.ArgumentError, match="must fit"):
            convert(value)


def test_a_float_scalar_that_rounds_to_infinity_is_infinite() -> None:
    from kgen.dsl.dtypes import BF16, F16, F32

    for dtype, torch_dtype in ((F16, torch.float16), (BF16, torch.bfloat16), (F32, torch.float32)):
        convert = scalar_converter("f", "a", dtype)
        largest = torch.finfo(torch_dtype).max
        for value in (largest, -largest):
            assert convert(value) == value
        assert convert(largest * 1.01) == float("inf")
        assert convert(-largest * 1.01) == -float("inf")
        # Where torch rounds float64 to this type, the boundary is the same.
        edge = largest * (1 + 2 ** -{"f16": 12, "bf16": 9, "f32": 25}[dtype.name])
        for value in (np.nextafter(edge, 0), edge, np.nextafter(edge, np.inf)):
            assert (
                np.isinf(convert(float(value)))
                == torch.tensor(float(value), dtype=torch.float64).to(torch_dtype).isinf()
            )


def test_outputs_have_the_dtype_of_their_variable_and_the_callers_shape(m: kgen.KernelModule) -> None:
    y = m.scale(torch.ones(2, 1, 4, 3, dtype=torch.bfloat16), a=1.0)
    assert y.shape == (2, 1, 4, 3)
    assert y.dtype == torch.bfloat16
    lo, hi = m.halves(torch.arange(8.0).reshape(2, 4))
    assert lo.tolist() == [[0, 1], [4, 5]]
    assert hi.tolist() == [[2, 3], [6, 7]]


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3), (2, 2, 3)])
def test_a_starred_dimension_is_any_number_of_dimensions(m: kgen.KernelModule, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(m.scale(x, a=1.0, k=1), x)


def test_out_is_written_and_returned(m: kgen.KernelModule) -> None:
    out = torch.full((3, 2), torch.nan).T  # transposed
    version = out._version
    y = m.scale(X, a=0.5, out=out)
    assert y is out
    assert torch.equal(out, X)
    assert out._version > version
    lo, hi = torch.empty(2, 2), torch.empty(2, 2)
    assert m.halves(torch.ones(2, 4), out=(lo, hi)) == (lo, hi) or lo.equal(torch.ones(2, 2))


def test_out_beside_an_input_in_one_buffer_is_no_overlap(m: kgen.KernelModule) -> None:
    buffer = torch.arange(12.0).reshape(2, 6)
    x, out = buffer.chunk(2, -1)  # their memory is interleaved, but no element is shared
    expected = x * 3
    assert torch.equal(m.scale(x, a=1.5, out=out), expected)
    with pytest.raises(kgen.ArgumentError, match="shares memory"):
        m.scale(x, a=1.5, out=buffer[:, 2:5])  # the same strides, one column further


def test_in_place(m: kgen.KernelModule) -> None:
    x, y = torch.ones(4), torch.arange(4.0)
    version = x._version
    assert m.add_in_place(x, y) is x
    assert x.tolist() == [1, 2, 3, 4]
    assert x._version > version
    with pytest.raises(kgen.ArgumentError, match="'x', which is written, shares memory with argument 'y'"):
        m.add_in_place(x, x)
    leaf = torch.ones(4, requires_grad=True)
    with pytest.raises(kgen.ArgumentError, match="'x' is written in place but requires grad"):
        m.add_in_place(leaf, y)
    with torch.no_grad():
        m.add_in_place(leaf, y)
    assert leaf.tolist() == [1, 2, 3, 4]
    with torch.inference_mode():
        assert m.add_in_place(torch.ones(4), y).tolist() == [1, 2, 3, 4]


def test_inputs_that_require_grad(m: kgen.KernelModule) -> None:
    x = X.clone().requires_grad_()
    assert m.scale(x, a=0.5).requires_grad
    with pytest.raises(kgen.ArgumentError, match="a call with out= records no gradient, but argument 'x' requires"):
        m.scale(x, a=0.5, out=torch.empty_like(X))
    with torch.no_grad():
        y = m.scale(x, a=0.5)
    assert not y.requires_grad
    assert torch.equal(y, X)


def test_a_lazily_negated_view_has_its_sign(m: kgen.KernelModule) -> None:
    x = torch.tensor([[1 + 2j, 3 - 4j, 5j]]).conj().imag
    assert x.is_neg()
    assert m.scale(x, a=1.0, k=1).tolist() == [[-2.0, 4.0, -5.0]]


@pytest.mark.parametrize("backend", ["reference", "cuda", "triton"])
def test_calls_without_work(m: kgen.KernelModule, backend: str) -> None:
    from kgen.runtime import events

    with events.launches() as seen:
        assert m.scale(torch.ones(3, 0, 5), a=1.0, backend=backend).shape == (3, 0, 5)
        assert m.column_sum(torch.ones(0, 3), backend=backend).tolist() == [0, 0, 0]
        out = torch.full((3,), torch.nan)
        assert m.column_sum(torch.ones(0, 3), backend=backend, out=out).tolist() == [0, 0, 0]
        assert m.scale(torch.ones(0, 3), a=1.0, out=torch.empty(0, 3), backend=backend).shape == (0, 3)
    assert seen == []


def test_subclasses_without_memory_are_refused(m: kgen.KernelModule) -> None:
    m.scale(X, a=1.0)  # what is remembered of a plain tensor must not serve others
    with pytest.raises(kgen.ArgumentError, match="vmap does not reach into a kernel"):
        torch.func.vmap(lambda x: m.scale(x, a=1.0))(X)
    assert torch.equal(m.scale(torch.nn.Parameter(X), a=0.5), X)


def test_fake_tensors_give_fake_results(m: kgen.KernelModule) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    m.scale(X, a=1.0)  # what is remembered of a plain tensor must not serve others
    with FakeTensorMode():
        y = m.scale(torch.empty(2, 3), a=1.0)
        lo, hi = m.halves(torch.empty(2, 6))
    assert isinstance(y, FakeTensor) and y.shape == (2, 3)
    assert isinstance(lo, FakeTensor) and lo.shape == hi.shape == (2, 3)


def test_a_checked_call_names_line_and_value(m: kgen.KernelModule) -> None:
    at = torch.tensor([0, 3])
    assert torch.isnan(m.pick(X, at)[1])
    with pytest.raises(
        CheckError, match=r"case.kdsl:\d+:\d+: kernel pick reads x\[m, at\[m\]\] with subscript 1 = 3, .*N of size 3"
    ):
        m.pick(X, at, check=True)
    assert m.pick(X, torch.tensor([2, 0]), check=True).tolist() == [2, 3]


def test_modules_show_their_kernels(m: kgen.KernelModule) -> None:
    assert list(m) == ["scale", "halves", "add_in_place", "column_sum", "pick"]
    assert m["scale"] is m.scale
    assert "scale" in dir(m)
    with pytest.raises(AttributeError, match="did you mean 'scale'"):
        _ = m.scael
    with pytest.raises(KeyError, match="has no kernel 'nothing'"):
        m["nothing"]
