"""torch.compile of functions built from kernels, fullgraph, against eager: values, gradients, new sizes, mutation.

Most graphs go through `aot_eager`, which traces and differentiates as inductor does and compiles nothing.
"""

from __future__ import annotations

import copy
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_kit import Model, batch, outcome

import kgen
from kgen import ops
from kgen.runtime import autograd, events, library
from kgen.runtime.loading import load_packaged

UNPLANNED = kgen.load(Path(__file__).parent / "kernels" / "unplanned.kdsl")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()  # no test may live on what another has traced
    yield


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compiled(f: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    """`f` in one graph."""
    return torch.compile(f, fullgraph=True, backend=backend, **options)


def both(f: Callable[..., Any], g: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """`f` and `g` must give the same results and gradients to the bit, and leave their arguments alone."""
    found = []
    for each in (f, g):
        given = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        results = each(*given)
        results = results if isinstance(results, tuple) else (results,)
        seeds = [randn(*r.shape, dtype=r.dtype, seed=50 + i) for i, r in enumerate(results)]
        leaves = [t for t in given if t.requires_grad]
        found.append([*results, *torch.autograd.grad(results, leaves, seeds)])
        assert all(torch.equal(a, b) for a, b in zip(given, tensors, strict=True))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


class Block(torch.nn.Module):
    """What models make of these ops: norm, gated unit, norm, softmax."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(randn(n, seed=1))
        self.bias = torch.nn.Parameter(randn(n, seed=2))
        self.up = torch.nn.Linear(n, 2 * n, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[..., N]`, the result too."""
        gate, up = self.up(ops.rms_norm(x, self.scale, casting="gemma")).chunk(2, -1)
        h = x + ops.swiglu(gate, up)
        return ops.log_softmax(ops.layer_norm(h, self.scale, self.bias))


def steps(module: torch.nn.Module, f: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """The result and every gradient of one pass."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = f(x)
    y.backward(randn(*y.shape, seed=9))
    grads = [p.grad for p in (x, *module.parameters())]
    assert all(g is not None for g in grads)
    return [y.detach(), *(g.clone() for g in grads if g is not None)]


def test_a_module_forward_and_backward_at_new_sizes() -> None:
    torch.manual_seed(0)
    module = Block(12)
    f = compiled(module)
    for rows, tokens in ((2, 5), (3, 7), (4, 9), (1, 6)):
        x = randn(rows, tokens, 12, seed=rows)
        for a, b in zip(steps(module, f, x), steps(module, module, x), strict=True):
            torch.testing.assert_close(a, b)


def test_a_new_batch_size_compiles_no_kernel_and_no_graph() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(ops.swiglu(x, x, backend="triton"), w, backend="triton")

    g = torch.compile(f, fullgraph=True, backend=backend, dynamic=True)
    w = randn(16, seed=1).requires_grad_()
    for rows in (4, 6):  # one variant, as both are even
        before = events.counts()["plan"]
        x = randn(rows, 3, 16).requires_grad_()
        g(x, w).backward(randn(rows, 3, 16, seed=2))
        plans = events.counts()["plan"] - before
    assert plans == 0
    assert len(graphs) == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_model_of_every_module_at_a_new_batch_and_length(backend: str, dynamic: bool | None) -> None:
    with kgen.backend(backend):
        model = Model()
        f = compiled(model, dynamic=dynamic)
        for rows, tokens in ((2, 8), (4, 12)):
            before = events.counts()["plan"]
            x, labels = batch(rows, tokens, seed=rows)
            got = outcome(f, model, x, labels)
            plans = events.counts()["plan"] - before
            for a, b in zip(got, outcome(model, model, x, labels), strict=True):
                assert torch.equal(a, b)
    assert plans == 0


def test_a_table_of_positions_that_is_too_short_grows_under_compile() -> None:
    f, model = compiled(Model(rows=2)), Model()
    x, labels = batch(2, 8)
    assert torch.equal(f(x, labels), model(x, labels))


TABLES = randn(2, 3, 8, seed=2), randn(2, 3, 8, seed=3)
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, casting="llama"), (randn(3, 8), randn(8, seed=1))),
    "rms_norm-plain": (lambda x: ops.rms_norm(x), (randn(3, 8),)),
    "layer_norm": (ops.layer_norm, (randn(3, 8), randn(8, seed=1), randn(8, seed=2))),
    "layer_norm-bias": (lambda x, b: ops.layer_norm(x, None, b), (randn(3, 8), randn(8, seed=1))),
    "swiglu": (ops.swiglu, (randn(3, 8), randn(3, 8, seed=1))),
    "geglu": (lambda a, b: ops.geglu(a, b, approximate="tanh"), (randn(3, 8), randn(3, 8, seed=1))),
    "softmax": (lambda x: ops.softmax(x, 0), (randn(3, 8),)),
    "log_softmax": (ops.log_softmax, (randn(3, 8, dtype=torch.bfloat16),)),
    "rope": (
        lambda q, k, c, s: ops.rope(q, k, c, s),
        (randn(2, 3, 2, 8), randn(2, 3, 1, 8, seed=1), randn(4, 8, seed=2), randn(4, 8, seed=3)),
    ),
    "rope-tokens": (
        lambda q, k: ops.rope(q, k, TABLES[0], TABLES[1][:1]),
        (randn(2, 3, 2, 8), randn(2, 3, 1, 8, seed=1)),
    ),
    "group_norm": (
        lambda x, w, b: UNPLANNED.group_norm(x, w, b, G=3, eps=1e-3),
        (randn(2, 6, 5), randn(6, seed=1), randn(6, seed=2)),
    ),
    "standardize": (UNPLANNED.standardize, (randn(3, 9),)),
    "pick": (lambda x, t: UNPLANNED.pick(x, t), (randn(2, 3, 9), torch.tensor([[0, 8, 1], [3, 3, 2]]))),
    "row_and_column_sums": (UNPLANNED.row_and_column_sums, (randn(2, 6, 5),)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_op_forward_and_backward(name: str) -> None:
    f, tensors = CASES[name]
    both(lambda *t: f(*t), compiled(lambda *t: f(*t)), *tensors)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_backend_is_chosen_while_tracing(backend: str) -> None:
    if not {s.name: s for s in kgen.backends("cpu")}[backend].available:
        pytest.skip("the backend cannot run here")
    f = compiled(lambda x: ops.softmax(x))
    x, g = randn(3, 8).requires_grad_(), randn(3, 8, seed=1)
    with kgen.backend(backend):
        f(x)
    with events.launches() as seen:
        f(x).backward(g)
    assert len(seen) == 2
    assert all(e.executor.startswith(backend) for e in seen)


def test_frozen_inputs_are_not_differentiated() -> None:
    f = compiled(lambda x, w: ops.rms_norm(x, w))
    x, w = randn(3, 8).requires_grad_(), randn(8, seed=1)
    f(x, w).backward(randn(3, 8, seed=2))
    assert x.grad is not None and w.grad is None
    with torch.no_grad():
        assert torch.equal(f(x, w), ops.rms_norm(x, w))
    assert not f(x.detach(), w).requires_grad


def test_kernels_that_write_given_tensors() -> None:
    def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        UNPLANNED.adamw_(p, g * 2, m, v, lr=0.1)
        return p + 1

    eager = [randn(7), randn(7, seed=1), randn(7, seed=2), randn(7, seed=3).square()]
    traced = [t.clone() for t in eager]
    assert torch.equal(update(*eager), compiled(update)(*traced))
    for a, b in zip(eager, traced, strict=True):
        assert torch.equal(a, b)

    def into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ops.softmax(x * 2, out=out)
        return out.clone()

    x, out = randn(3, 8), torch.full((3, 8), torch.nan)
    assert torch.equal(compiled(into)(x, out), ops.softmax(x * 2))
    assert torch.equal(out, ops.softmax(x * 2))


def test_what_cannot_be_derived_is_named_while_tracing() -> None:
    f = compiled(lambda w, p, a, b: UNPLANNED.two_gathers(w, p, a, b))
    words, places = randn(11, 4).requires_grad_(), randn(5, 4, seed=1)
    at, place = torch.tensor([1, 1, 7]), torch.tensor([0, 4, 2], dtype=torch.int32)
    with pytest.raises(Exception, match="K0503"):  # torch.compile wraps what is raised while it traces
        f(words, places, at, place)
    assert torch.equal(f(words.detach(), places, at, place), UNPLANNED.two_gathers(words.detach(), places, at, place))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ with g++")
def test_inductor() -> None:
    torch.manual_seed(0)
    module = Block(12)
    x = randn(2, 5, 12)
    for a, b in zip(steps(module, compiled(module, "inductor"), x), steps(module, module, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_export() -> None:
    torch.manual_seed(0)
    module, x = Block(12), randn(4, 5, 12)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: rows},))
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert sum(t.startswith("kgen.") for t in targets) == 4
    other = randn(7, 5, 12, seed=1)
    torch.testing.assert_close(program.module()(other), module(other))


def test_opcheck() -> None:
    kernel = load_packaged("rms_norm.kdsl")["rms_norm"]
    x, w = randn(2, 3, 8), randn(8, seed=1)
    plain = getattr(torch.ops.kgen, library.define(kernel)).default
    torch.library.opcheck(plain, (x, w, 1e-6, 0.0, False, "reference"))
    torch.library.opcheck(plain, (x, None, 1e-6, 0.0, False, "reference"))
    values = [x.requires_grad_(), w.requires_grad_(), 1e-6, 0.0, False]
    name = library.define_training(autograd.training(kernel, values, (0, 1)))
    torch.library.opcheck(getattr(torch.ops.kgen, name).default, (x, w, 1e-6, 0.0, "reference"))
    mutating = getattr(torch.ops.kgen, library.define(UNPLANNED.scale_)).default
    torch.library.opcheck(mutating, (randn(3, 4), 1.5, "reference"))


def test_names_of_operators_tell_files_apart() -> None:
    text = "kernel f(x: T[*M]) -> (y: T[*M]):\n    parallel m in M\n    y[m] = x[m] * {}\n"
    one, same, other = (kgen.loads(text.format(k), "a b-c.kdsl").f for k in ("2.0", "2.0", "3.0"))
    assert library.define(one) == library.define(same) != library.define(other)
    assert library.define(one).startswith("a_b_c_f_")
    x = randn(5)
    assert torch.equal(compiled(lambda x: one(x))(x), 2 * x)
    assert torch.equal(compiled(lambda x: other(x))(x), 3 * x)


# ---- what a trace knows a kernel by ----------------------------------------------------------------------------------

SCALE = "kernel f(x: T[*M]) -> (y: T[*M]):\n    parallel m in M\n    y[m] = x[m] * {}\n"
PLAIN = (str, int, float, bool, torch.dtype, type(None))


def plain(value: object) -> bool:
    """Whether every torch's trace takes `value` for a constant."""
    return all(map(plain, value)) if type(value) is tuple else type(value) in PLAIN


def test_functions_of_the_trace_are_given_plain_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 refuses any object among the arguments of a function whose result it takes as a constant; later ones
    do not, so the arguments are looked at."""
    seen: dict[str, list[object]] = {}

    def watched(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, []).extend([*args, *kwargs.values()])
            return f(*args, **kwargs)

        return torch.compiler.assume_constant_result(record)

    for module in [m for n, m in sys.modules.items() if n.startswith("kgen.")]:
        for name, f in list(vars(module).items()):
            if getattr(f, "_dynamo_marked_constant", False):
                monkeypatch.setattr(module, name, watched(name, f))
    model = Model()
    x, labels = batch(2, 8)
    compiled(model, dynamic=True)(x, labels)
    f = compiled(lambda x, w, b, g: UNPLANNED.group_norm(x, w, b, G=g, eps=1e-3), dynamic=True)
    f(randn(2, 6, 5).requires_grad_(), randn(6), randn(6), 3)
    compiled(lambda x: ops.softmax(x, backend="reference", out=torch.empty_like(x)))(randn(3, 8))
    assert set(seen) == {"_operator", "_form", "_choice", "_put_on_shelf", "_refuse_transforms"}
    strange = {name: [v for v in values if not plain(v)] for name, values in seen.items()}
    assert not any(strange.values()), strange


HOLDER = {"kernel": kgen.loads(SCALE.format("2.0")).f}


class Holds(torch.nn.Module):
    """A kernel as an attribute."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: `[...]`; the same shape."""
        return self.kernel(x)


def test_another_kernel_in_the_same_place_is_traced_anew() -> None:
    x, by3, by4 = randn(5), kgen.loads(SCALE.format("3.0")).f, kgen.loads(SCALE.format("4.0")).f
    module = Holds(by3)
    kernel = by3
    held = {"attribute": compiled(module), "closure": compiled(lambda x: kernel(x))}
    held["container"] = compiled(lambda x: HOLDER["kernel"](x))
    held["argument"] = lambda x, f=compiled(lambda x, k: k(x)): f(x, kernel)
    HOLDER["kernel"] = by3
    for name, f in held.items():
        assert torch.equal(f(x), 3 * x), name
    module.kernel = HOLDER["kernel"] = kernel = by4
    for name, f in held.items():
        assert torch.equal(f(x), 4 * x), name
    g = torch.ones(5)
    y = held["closure"](x.requires_grad_())
    assert torch.equal(torch.autograd.grad(y, x, g)[0], 4 * g)


def test_a_copy_of_a_kernel_is_the_kernel_and_a_pickled_one_another() -> None:
    kernel = kgen.loads(SCALE.format("3.0")).f
    module = Holds(kernel)
    assert copy.copy(kernel) is copy.deepcopy(kernel) is copy.deepcopy(module).kernel is kernel
    again = pickle.loads(pickle.dumps(module))
    assert again.kernel.serial != kernel.serial
    x = randn(5)
    assert torch.equal(again(x), 3 * x)
    assert torch.equal(compiled(again)(x), 3 * x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_time_numbers_that_are_arguments_of_the_graph(dynamic: bool) -> None:
    f = compiled(lambda x, w, b, g: UNPLANNED.group_norm(x, w, b, G=g, eps=1e-3), dynamic=dynamic)
    x, w, b = randn(2, 6, 5), randn(6, seed=1), randn(6, seed=2)
    for groups in (3, 2, 6):
        assert torch.equal(f(x, w, b, groups), UNPLANNED.group_norm(x, w, b, G=groups, eps=1e-3))
    h = compiled(lambda x, w, on: UNPLANNED.affine(x, w, negate=on > 1.5), dynamic=dynamic)
    for on in (1.0, 2.0):
        assert torch.equal(h(x[0], b[:5], on), UNPLANNED.affine(x[0], b[:5], negate=on > 1.5))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loss_that_overwrites_its_logits(dynamic: bool) -> None:
    def step(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
        mine = logits * 1.0
        count = ops.kept_weight(labels)
        loss = ops.cross_entropy_(mine, labels, 1.0 / count, label_smoothing=smoothing, z_loss=0.1)
        return loss.sum() / count, mine

    f = compiled(step, dynamic=dynamic)
    for rows, smoothing in ((3, 0.0), (5, 0.1)):
        _, labels = batch(rows, 4)
        logits = randn(rows, 4, 12)
        for a, b in zip(f(logits, labels, smoothing), step(logits, labels, smoothing), strict=True):
            assert torch.equal(a, b)


def test_the_operator_of_the_forward_pass_tells_that_of_the_backward_pass() -> None:
    """Inductor's cache on disk finds a compiled backward by the forward graph; it must not find one that calls an
    operator which is no longer there."""
    x = randn(5).requires_grad_()
    kernel = kgen.loads(SCALE.format("3.0")).f
    t = autograd.training(kernel, [x], (0,))
    name = library.define_training(t)
    other = kgen.loads(t.derived.backward_text.replace("3.0", "5.0"))
    assert name == library.define_training(t)
    object.__setattr__(t, "backward", other[t.backward.name])
    assert name != library.define_training(t)


@pytest.mark.parametrize("shape", [(3,), (1, 4)])
def test_labels_that_do_not_fit_are_named_behind_a_break_of_the_graph(shape: tuple[int, ...]) -> None:
    """As the error leaves the graph, torch runs the function eagerly, and traces what that calls."""
    with pytest.raises(kgen.ArgumentError, match=r"cross_entropy: target must have the shape of logits .*\(4,\)"):
        torch.compile(ops.cross_entropy, backend="aot_eager")(
            randn(4, 8), torch.zeros(shape, dtype=torch.int64), backend="reference"
        )
