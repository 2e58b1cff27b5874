"""Gradients of kernel calls: values on every executor, and what autograd promises its users.

Values are judged twice. Against the derived backward in float64 on the very arguments of the call, within the bound
that `kgen.codegen.tolerance` derives; and against torch's gradient of an independent float64 formula. There residuals,
which are f32, differ as well: by the roundings of a sum over n elements, so (n + 64) units of 2**-24 of the largest
gradient are allowed. Gradients of outputs are random, never all ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from unplanned_cases import CASES, Case

import kgen
from kgen import ops
from kgen.codegen.derive import DeriveError
from kgen.codegen.tolerance import compare
from kgen.dsl.check import TensorParam
from kgen.runtime import autograd, events
from kgen.runtime.differential import ask
from kgen.runtime.kernel import Kernel
from kgen.runtime.loading import load_packaged

UNPLANNED = kgen.load(Path(__file__).parent / "kernels" / "unplanned.kdsl")
BACKENDS = ("reference", "cuda", "triton")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that can run on this machine's CPU."""
    status = {s.name: s for s in kgen.backends("cpu")}[request.param]
    if not status.available:
        pytest.skip(status.reason or "")
    return request.param


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same, as a tensor that requires grad."""
    return randn(*shape, dtype=dtype, seed=seed).requires_grad_()


def as_tuple(x: Any) -> tuple[Any, ...]:
    """One result or several, as several."""
    return x if isinstance(x, tuple) else (x,)


def seeds_for(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """A random gradient for each output."""
    return [randn(*o.shape, dtype=o.dtype, seed=70 + i) for i, o in enumerate(outputs)]


def worst(actual: torch.Tensor, expected: torch.Tensor, n: int) -> float:
    """The largest error in units of the bound for a gradient that a sum over `n` elements enters."""
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return 0.0
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
    own = min(2.0**-24, unit[actual.dtype])
    bound = unit[actual.dtype] * expected.abs() + (n + 64) * own * expected.abs().max().clamp(min=1e-6)
    return ((actual.double() - expected).abs() / bound).max().item()


def check(
    kernel: Kernel, arguments: dict[str, Any], formula: Callable[..., Any], backend: str, constant: tuple[str, ...] = ()
) -> None:
    """Every gradient of a call of `kernel` but those of `constant`, against both judges."""
    floats = wanted(arguments, constant)
    given = {n: v.clone().requires_grad_() if n in floats else v for n, v in arguments.items()}
    results = as_tuple(kernel(**given, backend=backend))
    carrying = [r for r in results if r.requires_grad]
    seeds = seeds_for(tuple(carrying))
    found = dict(zip(floats, torch.autograd.grad(carrying, [given[n] for n in floats], seeds), strict=True))

    values = kernel._binder.bind((), given)
    t = autograd.training(kernel, values, autograd.requiring(kernel, values))
    with torch.no_grad():
        made = as_tuple(t.forward(*(values[i] for i in t.inputs), backend=backend))
    for mine, again in zip(results, made, strict=False):
        assert torch.equal(mine, again)
    names = [o.name for o in t.forward.signature.outputs]
    known = arguments | dict(zip(names, made, strict=True))
    at = iter(seeds)
    known |= {f"d_{n}": next(at) for n, r in zip(names, results, strict=False) if r.requires_grad}
    known = {p.name: known[p.name] for p in t.backward.signature.params if p.name in known}
    question = ask(t.backward, known)
    for name, g in found.items():
        own = t.derived.gradients[name]
        assert compare(g, question.expected[own], question.bound[own]).ok, name

    taken = inspect.signature(formula).parameters
    plain = {n: v.detach().double() if n in wanted(given) else v for n, v in given.items() if n in taken}
    doubles = {n: v.requires_grad_() if n in floats else v for n, v in plain.items()}
    theirs = as_tuple(formula(**doubles))
    reached = [(o, s) for o, r in zip(theirs, results, strict=True) if r.requires_grad for s in [next_(seeds)]]
    expected = torch.autograd.grad(
        [o for o, _ in reached], [doubles[n] for n in floats], [s.double() for _, s in reached]
    )
    size = max(v.numel() for v in arguments.values() if isinstance(v, torch.Tensor))
    for name, e in zip(floats, expected, strict=True):
        assert worst(found[name], e, size) <= 1.0, name


def wanted(arguments: dict[str, Any], constant: tuple[str, ...] = ()) -> list[str]:
    """The arguments that can have a gradient."""
    floats = [n for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return [n for n in floats if n not in constant]


def next_(seeds: list[torch.Tensor]) -> torch.Tensor:
    """The first of the seeds, which goes to the end."""
    seeds.append(seeds.pop(0))
    return seeds[-1]


# ---- shipped ops -----------------------------------------------------------------------------------------------------


def packaged(file: str, name: str) -> Kernel:
    """A shipped kernel."""
    return load_packaged(f"{file}.kdsl")[name]


def _rms(x, w=None, eps=1e-6, offset=0.0, round_first=False):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if w is None else y * (w + offset)


def _ln(x, w=None, b=None):
    width = (x.shape[-1],)
    return F.layer_norm(x, width, w, b, 1e-5)


def _rope(q, k, cos, sin, interleaved=False):
    def turn(x):
        r = cos.shape[-1]
        c, s = cos[None, : x.shape[1], None], sin[None, : x.shape[1], None]
        lo, hi = (x[..., 0:r:2], x[..., 1:r:2]) if interleaved else (x[..., : r // 2], x[..., r // 2 : r])
        half = r // 2
        at = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
        if interleaved:
            a, b = lo * c[..., at[0]] - hi * s[..., at[0]], hi * c[..., at[0]] + lo * s[..., at[0]]
            rotated = torch.stack([a, b], -1).flatten(-2)
        else:
            rotated = torch.cat([lo * c[..., at[0]] - hi * s[..., at[0]], hi * c[..., at[1]] + lo * s[..., at[1]]], -1)
        return torch.cat([rotated, x[..., r:]], -1)

    return turn(q), turn(k)


SHIPPED: dict[str, tuple[Kernel, Callable[[int, torch.dtype], dict[str, Any]], Callable[..., Any]]] = {
    "rms_norm": (
        packaged("rms_norm", "rms_norm"),
        lambda n, d: {"x": randn(3, n, dtype=d), "w": randn(n, seed=1)},
        _rms,
    ),
    "rms_norm-gemma": (
        packaged("rms_norm", "rms_norm"),
        lambda n, d: {"x": randn(3, n, dtype=d), "w": randn(n, dtype=d, seed=1), "offset": 1.0},
        _rms,
    ),
    "rms_norm-llama": (
        packaged("rms_norm", "rms_norm"),
        lambda n, d: {"x": randn(3, n), "w": randn(n, seed=1), "round_first": True},
        _rms,
    ),
    "rms_norm-plain": (packaged("rms_norm", "rms_norm"), lambda n, d: {"x": randn(2, 2, n, dtype=d)}, _rms),
    "layer_norm": (
        packaged("layer_norm", "layer_norm"),
        lambda n, d: {"x": randn(4, n, dtype=d), "w": randn(n, seed=1), "b": randn(n, seed=2)},
        _ln,
    ),
    "layer_norm-weight": (
        packaged("layer_norm", "layer_norm"),
        lambda n, d: {"x": randn(4, n, dtype=d), "w": randn(n, seed=1)},
        _ln,
    ),
    "swiglu": (
        packaged("swiglu", "swiglu"),
        lambda n, d: {"gate": randn(3, n, dtype=d), "up": randn(3, n, dtype=d, seed=1)},
        lambda gate, up: F.silu(gate) * up,
    ),
    "geglu": (
        packaged("swiglu", "geglu"),
        lambda n, d: {"gate": randn(3, n, dtype=d), "up": randn(3, n, dtype=d, seed=1)},
        lambda gate, up: F.gelu(gate) * up,
    ),
    "geglu_tanh": (
        packaged("swiglu", "geglu_tanh"),
        lambda n, d: {"gate": randn(3, n, dtype=d), "up": randn(3, n, dtype=d, seed=1)},
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    ),
    "softmax": (packaged("softmax", "softmax"), lambda n, d: {"x": randn(3, n, dtype=d)}, lambda x: x.softmax(-1)),
    "log_softmax": (
        packaged("softmax", "log_softmax"),
        lambda n, d: {"x": randn(3, n, dtype=d)},
        lambda x: x.log_softmax(-1),
    ),
    "rope": (
        packaged("rope", "rope"),
        lambda n, d: {
            "q": randn(2, 3, 2, 2 * n, dtype=d), "k": randn(2, 3, 1, 2 * n, dtype=d, seed=1),
            "cos": randn(5, 2 * n, seed=2), "sin": randn(5, 2 * n, seed=3),
        },
        _rope,
    ),
    "rope-interleaved": (
        packaged("rope", "rope"),
        lambda n, d: {
            "q": randn(2, 3, 2, 2 * n + 3, dtype=d), "k": randn(2, 3, 1, 2 * n + 3, dtype=d, seed=1),
            "cos": randn(5, 2 * n, seed=2), "sin": randn(5, 2 * n, seed=3), "interleaved": True,
        },
        _rope,
    ),
}  # fmt: skip


# Tables whose even and odd columns are read one by one: their gradient is not derived (K0505).
CONSTANT = {"rope-interleaved": ("cos", "sin")}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_kernels_in_f32(name: str, backend: str) -> None:
    kernel, make, formula = SHIPPED[name]
    # g++ takes a second for each variant. Rows of one and two elements are left out: their gradients cancel.
    for n in (33,) if backend == "cuda" else (7, 33, 64):
        check(kernel, make(n, torch.float32), formula, backend, CONSTANT.get(name, ()))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_kernels_in_bf16(name: str) -> None:
    kernel, make, formula = SHIPPED[name]
    check(kernel, make(33, torch.bfloat16), formula, "triton", CONSTANT.get(name, ()))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_kernels_pass_gradcheck(name: str) -> None:
    kernel, make, _ = SHIPPED[name]
    arguments = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in make(3, torch.float64).items()}
    tensors = {n: arguments[n].requires_grad_() for n in wanted(arguments, CONSTANT.get(name, ()))}
    rest = {n: v for n, v in arguments.items() if n not in tensors}

    def run(*given: torch.Tensor) -> Any:
        return kernel(**dict(zip(tensors, given, strict=True)), **rest, backend="reference")

    assert torch.autograd.gradcheck(run, tuple(tensors.values()))


def test_softmax_along_another_dimension() -> None:
    x, g = leaf(3, 5, 4), randn(3, 5, 4, seed=9)
    y = ops.softmax(x, 1)
    assert y.stride() == x.stride()
    (got,) = torch.autograd.grad(y, x, g)
    xd = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(xd.softmax(1), xd, g.double())
    assert worst(got, expected, 5) <= 1.0


# ---- unplanned kernels -----------------------------------------------------------------------------------------------

# Several programs may read one row of a table: not derived (K0503).
DIFFERENTIABLE = [c for c in CASES if c.differentiable and c.kernel != "two_gathers"]
HANDFUL = ("group_norm", "standardize", "kl_rows", "pick", "bilinear", "row_and_column_sums", "template")


def _fits(case: Case) -> bool:
    return torch.float32 in case.dtypes


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=f"{i}-{c.kernel}") for i, c in enumerate(DIFFERENTIABLE) if _fits(c)]
)
def test_unplanned_kernels(case: Case) -> None:
    size = case.sizes[min(2, len(case.sizes) - 1)]
    arguments = case.make(*size, torch.float32, torch.Generator().manual_seed(1))
    check(UNPLANNED[case.kernel], arguments, case.formula, "reference")


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.kernel) for c in DIFFERENTIABLE if c.kernel in HANDFUL])
def test_a_handful_on_the_other_executors(case: Case, backend: str) -> None:
    arguments = case.make(*case.sizes[-1], torch.float32, torch.Generator().manual_seed(1))
    check(UNPLANNED[case.kernel], arguments, case.formula, backend)


# ---- layouts ---------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.cat([t, t], -1)[:, : t.shape[1]],
    "odd offset": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "expanded": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("of_x", ["contiguous", "transposed", "expanded rows"])
@pytest.mark.parametrize("of_g", LAYOUTS)
def test_layouts_of_inputs_and_gradients(of_x: str, of_g: str, backend: str) -> None:
    x, w, g = LAYOUTS[of_x](randn(4, 33)), randn(33, seed=1), LAYOUTS[of_g](randn(4, 33, seed=2))
    xs, ws = x.requires_grad_(), w.requires_grad_()
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    before = g.clone()
    got = torch.autograd.grad(ops.rms_norm(xs, ws, backend=backend), (xs, ws), g)
    expected = torch.autograd.grad(_rms(xd, wd), (xd, wd), g.double())
    for a, b in zip(got, expected, strict=True):
        assert worst(a, b, 33) <= 1.0
    assert torch.equal(g, before)


def test_the_gradient_of_a_mean_is_expanded(backend: str) -> None:
    x, u = leaf(3, 20), leaf(3, 20, seed=1)
    ops.swiglu(x, u, backend=backend).mean().backward()
    xd, ud = x.detach().double().requires_grad_(), u.detach().double().requires_grad_()
    (F.silu(xd) * ud).mean().backward()
    for a, b in ((x, xd), (u, ud)):
        assert a.grad is not None and b.grad is not None
        assert worst(a.grad, b.grad, 20) <= 1.0


# ---- which gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["x", "w", "b", "xw", "xb", "wb", "xwb"])
def test_only_what_requires_grad_is_computed(which: str) -> None:
    kernel = packaged("layer_norm", "layer_norm")
    tensors = {"x": randn(3, 10), "w": randn(10, seed=1), "b": randn(10, seed=2)}
    g = randn(3, 10, seed=3)
    full = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    kernel(**full).backward(g)
    given = {n: t.clone().requires_grad_(n in which) for n, t in tensors.items()}
    y = kernel(**given)
    y.backward(g)
    for n, t in given.items():
        assert (t.grad is not None) == (n in which)
        if n in which:
            torch.testing.assert_close(t.grad, full[n].grad, rtol=1e-5, atol=1e-6)
    values = [*given.values(), 1e-5]
    t = autograd.training(kernel, values, autograd.requiring(kernel, values))
    assert [o.name for o in t.backward.signature.outputs] == [f"d_{n}" for n in which]


def test_no_grad_and_inference_mode(backend: str) -> None:
    x, w = leaf(3, 10), leaf(10, seed=1)
    expected = ops.rms_norm(x, w, backend=backend)
    assert expected.requires_grad
    with torch.no_grad(), events.launches() as seen:
        y = ops.rms_norm(x, w, backend=backend)
    with torch.inference_mode():
        z = ops.rms_norm(x, w, backend=backend)
    assert not y.requires_grad and not z.requires_grad
    assert torch.equal(y, expected) and torch.equal(z, expected)
    assert len(seen) == 1
    assert not ops.rms_norm(x.detach(), w.detach(), backend=backend).requires_grad


def test_outputs_that_get_no_gradient(backend: str) -> None:
    standardize = UNPLANNED.standardize
    for used in range(3):
        x = leaf(3, 9)
        y = standardize(x, backend=backend)[used]
        g = randn(*y.shape, seed=5)
        y.backward(g)
        xd = x.detach().double().requires_grad_()
        mu, var = xd.mean(-1), xd.var(-1, correction=0)
        ((xd - mu[..., None]) / (var[..., None] + 1e-3).sqrt(), mu, var)[used].backward(g.double())
        assert x.grad is not None and xd.grad is not None
        assert worst(x.grad, xd.grad, 9) <= 1.0


SOURCE = """
kernel apart(a: f32[*M, N], b: f32[*M, N]) -> (p: f32[*M, N], q: f32[*M, N]):
    parallel m in M, n in N
    p[m, n] = a[m, n] * a[m, n]
    q[m, n] = exp(b[m, n])

kernel steps(x: f32[*M], y: f32[*M]) -> (z: f32[*M]):
    parallel m in M
    z[m] = floor(x[m]) + y[m]
"""


def test_outputs_that_no_gradient_reaches_do_not_require_it() -> None:
    apart = kgen.loads(SOURCE).apart
    a, b = leaf(2, 3), leaf(2, 3, seed=1)
    p, q = apart(a, b.detach())
    assert p.requires_grad and not q.requires_grad
    p, q = apart(a, b)
    g = randn(2, 3, seed=2)
    da, db = torch.autograd.grad(p, (a, b), g, allow_unused=True)
    torch.testing.assert_close(da, 2 * a.detach() * g)
    assert db is None or not db.any()


def test_outputs_of_integers_carry_none() -> None:
    best, gap = UNPLANNED.argmax_and_gap(leaf(3, 7))
    assert not best.requires_grad and gap.requires_grad
    results = UNPLANNED.flags(leaf(3, 7), -0.5)
    assert not any(r.requires_grad for r in results)


# ---- what must not happen --------------------------------------------------------------------------------------------


def test_inputs_stay_as_they_are(backend: str) -> None:
    x, w = leaf(3, 17), leaf(17, seed=1)
    copies, versions = (x.detach().clone(), w.detach().clone()), (x._version, w._version)
    y = ops.rms_norm(x, w, backend=backend)
    y.backward(randn(3, 17, seed=2))
    assert torch.equal(x, copies[0]) and torch.equal(w, copies[1])
    assert (x._version, w._version) == versions


def test_an_input_modified_in_between_is_noticed() -> None:
    x = leaf(3, 5)
    h = x * 1.0
    y = ops.softmax(h)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(randn(3, 5))


def test_the_same_tensor_twice(backend: str) -> None:
    x = leaf(4, 19)
    h = torch.exp(x)
    g = randn(4, 19, seed=1)
    ops.swiglu(h, h, backend=backend).backward(g)
    xd = x.detach().double().requires_grad_()
    hd = torch.exp(xd)
    (F.silu(hd) * hd).backward(g.double())
    assert x.grad is not None and xd.grad is not None
    assert worst(x.grad, xd.grad, 19) <= 1.0


def test_two_backwards_with_other_scales(backend: str) -> None:
    x, w, g = leaf(3, 12), leaf(12, seed=1), randn(3, 12, seed=2)
    y = ops.layer_norm(x, w, backend=backend)
    first = torch.autograd.grad(y, (x, w), g, retain_graph=True)
    kept = [t.clone() for t in first]
    second = torch.autograd.grad(y, (x, w), 4 * g, retain_graph=True)
    none = torch.autograd.grad(y, (x, w), 0 * g)
    for a, b, k, z in zip(first, second, kept, none, strict=True):
        assert torch.equal(a, k)
        assert torch.equal(b, 4 * k)  # a power of two is exact
        assert not z.any()


def test_zero_rows_give_zero_gradients_of_parameters(backend: str) -> None:
    for rows, width in ((0, 8), (2, 0)):
        x, w, b = leaf(rows, width), leaf(width, seed=1), leaf(width, seed=2)
        ops.layer_norm(x, w, b, backend=backend).backward(torch.empty(rows, width))
        for t in (x, w, b):
            assert t.grad is not None and t.grad.shape == t.shape
            assert not t.grad.any()


def test_the_backward_runs_where_the_forward_ran() -> None:
    x = leaf(3, 11)
    with kgen.backend("triton"):
        y = ops.softmax(x)
    with kgen.backend("reference"), events.launches() as seen:
        y.backward(randn(3, 11))
    assert [(e.kernel, e.executor) for e in seen] == [("softmax_backward", "triton-interpreter")]


def test_checkpointing_recomputes() -> None:
    x, w, g = leaf(3, 8), leaf(8, seed=1), randn(3, 8, seed=2)
    expected = torch.autograd.grad(ops.rms_norm(ops.swiglu(x, x), w), (x, w), g)

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(ops.swiglu(x, x), w)

    y = checkpoint(block, x, w, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    for a, b in zip(torch.autograd.grad(y, (x, w), g), expected, strict=True):
        assert torch.equal(a, b)


def test_training_changes_every_parameter() -> None:
    x, target = randn(16, 8), randn(16, 8, seed=1)
    weights = [leaf(8, 16, seed=2), leaf(8, 8, seed=3), leaf(8, seed=4), leaf(8, seed=5)]
    start = [w.detach().clone() for w in weights]
    optimizer = torch.optim.SGD(weights, lr=0.05)
    losses = []
    for _ in range(20):
        gate, up = (x @ weights[0]).chunk(2, -1)
        y = ops.layer_norm(ops.swiglu(gate, up) @ weights[1], weights[2], weights[3])
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(w, s) for w, s in zip(weights, start, strict=True))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused() -> None:
    x, g = leaf(3, 8), leaf(3, 8, seed=1)
    (dx,) = torch.autograd.grad(ops.softmax(x), x, g, create_graph=True)
    (expected,) = torch.autograd.grad(ops.softmax(x), x, g)
    assert torch.equal(dx, expected)
    with pytest.raises(kgen.KgenError, match="softmax: a gradient of its gradient is asked for"):
        dx.square().sum().backward()


def test_what_cannot_be_derived_is_named_at_the_call() -> None:
    words, places = leaf(11, 4), randn(5, 4, seed=1)
    word, place = torch.tensor([1, 1, 7]), torch.tensor([0, 4, 2], dtype=torch.int32)
    with pytest.raises(DeriveError, match=r"K0503"):
        UNPLANNED.two_gathers(words, places, word, place)
    with torch.no_grad():
        y = UNPLANNED.two_gathers(words, places, word, place)
    assert torch.equal(y, words.detach()[word] + places[place.long()])
    steps = kgen.loads(SOURCE).steps
    with pytest.raises(DeriveError, match="no output of 'steps' has a derivative with respect to 'x'"):
        steps(leaf(3), randn(3))
    assert steps(randn(3), leaf(3)).requires_grad


def test_writing_to_given_tensors_records_nothing_and_says_so() -> None:
    p, g, m, v = randn(6), leaf(6, seed=1), torch.zeros(6), torch.zeros(6)
    with pytest.raises(DeriveError, match="overwritten in place, so the kernel cannot be derived"):
        UNPLANNED.adamw_(p, g, m, v, lr=0.1)
    with torch.no_grad():
        UNPLANNED.adamw_(p, g, m, v, lr=0.1)
    x = leaf(3, 4)
    with pytest.raises(
        kgen.ArgumentError, match="a call with out= records no gradient, but argument 'x' requires grad"
    ):
        ops.softmax(x, out=torch.empty(3, 4))


def test_mistakes_are_told_in_the_words_of_the_kernel() -> None:
    x = leaf(3, 8)
    with pytest.raises(kgen.KgenError, match=r"^rms_norm: argument 'w' must have shape \[N\]"):
        ops.rms_norm(x, leaf(7))
    with pytest.raises(kgen.ArgumentError, match=r"^rms_norm: argument 'w' must be a torch\.Tensor, got a list"):
        ops.rms_norm(x, [1.0])  # pyright: ignore[reportArgumentType]  # the mistake under test
    with pytest.raises(kgen.ArgumentError, match=r"^rms_norm: scalar argument 'eps' must be a number"):
        ops.rms_norm(x, eps="no")  # pyright: ignore[reportArgumentType]  # the mistake under test
    at = torch.tensor([0, 9])
    with pytest.raises(kgen.KgenError, match=r"unplanned\.kdsl:.*reads x"):
        UNPLANNED.pick(leaf(2, 3), at, check=True)


def test_functional_transforms() -> None:
    x, w, g = randn(3, 8), randn(8, seed=1), randn(3, 8, seed=2)
    got = torch.func.grad(lambda x, w: (ops.rms_norm(x, w) * g).sum(), argnums=(0, 1))(x, w)
    xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
    for a, b in zip(got, torch.autograd.grad(ops.rms_norm(xs, ws), (xs, ws), g), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(kgen.ArgumentError, match="vmap does not reach into a kernel"):
        torch.func.vmap(lambda x: ops.rms_norm(x, ws))(x)


# ---- the tests can fail ----------------------------------------------------------------------------------------------


def test_a_dropped_term_is_far_outside_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = load_fresh("rms_norm")
    x, w, g = leaf(4, 33), leaf(33, seed=1), randn(4, 33, seed=2)
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    expected = torch.autograd.grad(_rms(xd, wd), (xd, wd), g.double())
    right = torch.autograd.grad(kernel(x, w), (x, w), g)
    assert all(worst(a, e, 33) <= 0.5 for a, e in zip(right, expected, strict=True))
    t = autograd.training(kernel, [x, w, 1e-6, 0.0, False], (0, 1))
    text = t.derived.backward_text
    broken = text.replace("saved_r[m] * t - t_2", "saved_r[m] * t").replace("(x[m, n] * saved_r[m])", "x[m, n]")
    assert broken != text
    monkeypatch.setattr(autograd.Training, "backward", None, raising=False)
    wrong = kgen.loads(broken)["rms_norm_backward"]
    object.__setattr__(t, "backward", wrong)
    for a, e in zip(torch.autograd.grad(kernel(x, w), (x, w), g), expected, strict=True):
        assert worst(a, e, 33) > 5.0


def load_fresh(name: str) -> Kernel:
    """A shipped kernel that shares nothing with the one that other tests use."""
    folder = Path(inspect.getfile(ops)).parent
    return kgen.load(folder / f"{name}.kdsl")[name]


def test_parameters_of_training_forms_are_in_order() -> None:
    kernel = packaged("rms_norm", "rms_norm")
    values = [leaf(2, 8), leaf(8), 1e-6, 0.0, False]
    t = autograd.training(kernel, values, (0, 1))
    assert [kernel.signature.params[i].name for i in t.inputs] == ["x", "w", "eps", "offset"]
    assert t.reached == {0} and set(t.gradients) == {0, 1}
    assert all(isinstance(p, TensorParam) for p in t.backward.signature.outputs)
