"""Cross entropy of a linear layer whose classes are shared out over ranks: loss and gradients of the whole, in bounds.

Bounds are those of tests/linear_loss_kit.py for the whole weight. They hold for shards: a sum over classes is one of
sums over shards, at most P - 1 additions more, for which `classes + 16` and `classes + 64` roundings have room; and
exp(x - own) * exp(own - top), as own <= top, is off by the roundings of exp(x - top) and two more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from linear_loss_kit import Case, Judged, case, excess, judge, randn
from ranks_kit import Job, Outcome, Ranks, captured, outcome, outcome_on_gpu, shared_out, twice, without_chunk

from kgen import ops
from kgen.runtime.errors import ArgumentError
from kgen.runtime.loading import load_packaged

ROWS, WIDTH, CLASSES = 17, 12, 37
SHARDS = {2: (19, 18), 4: (10, 9, 9, 9)}
EVERYTHING = {
    "label_smoothing": 0.1,
    "z_loss": 0.02,
    "softcap": 2.5,
    "token_weight": randn(ROWS, seed=10),
    "class_weight": randn(CLASSES, seed=9).abs() + 0.25,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes on a CPU."""
    found = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def workspace(c: Case, jobs: list[Job], chunks: int) -> float:
    """A budget in MiB for so many chunks, of logits of an equal share of the classes."""
    rows = -(-c.target.numel() // chunks)
    return (rows + 0.5) * -(-jobs[0].classes // len(jobs)) * c.x.element_size() / 2**20


def run(ranks: Ranks, jobs: list[Job], chunks: int = 1, **more: Any) -> list[Outcome]:
    """The outcomes of all ranks, which have one loss and, unless it is left to the caller, one gradient of x."""
    more["workspace_mb"] = workspace(jobs[0].case, jobs, chunks)
    for job in jobs:
        job.more = {**job.more, **more}
    found: list[Any] = ranks.run(outcome, jobs)
    assert all(isinstance(o, Outcome) for o in found), found
    for o in found[1:]:
        assert torch.equal(o.loss.nan_to_num(), found[0].loss.nan_to_num())
        assert torch.equal(o.loss.isnan(), found[0].loss.isnan())
        if "x" in o.gradients and more.get("reduce_input_gradient", True):
            assert torch.equal(o.gradients["x"].nan_to_num(), found[0].gradients["x"].nan_to_num())
    return found


def joined(found: list[Outcome]) -> list[torch.Tensor]:
    """The loss, and the gradients of x, of the whole weight and of the whole bias."""
    out = [found[0].loss, found[0].gradients["x"]]
    return out + [torch.cat([o.gradients[n] for o in found]) for n in ("w", "bias") if n in found[0].gradients]


def hold(found: list[Outcome], right: Judged) -> None:
    """What came is right."""
    for name, a, e, b in zip(("loss", "x", "w", "bias"), joined(found), right.expected, right.bound, strict=False):
        assert excess(a, e, b) <= 1.0, (name, excess(a, e, b))


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_agree_with_the_whole(ranks: Ranks, dtype: torch.dtype, count: int) -> None:
    for chunks, bias, reduction in ((1, 5.0, "mean"), (3, 0.0, "sum"), (3, 1.0, "none")):
        c = case(ROWS, WIDTH, CLASSES, dtype, bias=bias, reduction=reduction)
        upstream = randn(ROWS, seed=8) if reduction == "none" else torch.tensor(3.7)
        right = judge(c, upstream)
        for backend in ("reference", "cuda"):
            jobs = shared_out(c, SHARDS[count], upstream=upstream)
            found = run(ranks, jobs, chunks, backend=backend)
            hold(found, right)
            # Two exchanges a chunk, and one for the gradient of x where it is made.
            assert {o.met for o in found} == {(2 * chunks, 1) if reduction == "none" else (2 * chunks + 1, 0)}


def test_every_option_and_triton(ranks: Ranks, backend: str) -> None:
    for reduction, upstream in (("mean", torch.tensor(1.0)), ("none", randn(ROWS, seed=8))):
        c = case(ROWS, WIDTH, CLASSES, torch.bfloat16, bias=1.0, reduction=reduction, **EVERYTHING)
        found = run(ranks, shared_out(c, SHARDS[4], upstream=upstream), 3, backend=backend)
        hold(found, judge(c, upstream))


@pytest.mark.parametrize("chosen", [*((n,) for n in EVERYTHING), ("label_smoothing", "class_weight")], ids="+".join)
def test_some_options(ranks: Ranks, chosen: tuple[str, ...]) -> None:
    for dtype, reduction in ((torch.float32, "mean"), (torch.float16, "mean"), (torch.float32, "none")):
        c = case(ROWS, WIDTH, CLASSES, dtype, bias=1.0, reduction=reduction, **{n: EVERYTHING[n] for n in chosen})
        up = torch.ones(ROWS) if reduction == "none" else torch.tensor(1.0)
        hold(run(ranks, shared_out(c, SHARDS[4], upstream=up), 3, backend="reference"), judge(c, up))


def test_f16_gradients_do_not_overflow(ranks: Ranks) -> None:
    # tests/test_linear_cross_entropy.py says why they could; the heavy class is one of the last shard.
    for options in (
        {"label_smoothing": 0.9},
        {"z_loss": 10.0},
        {"label_smoothing": 0.9, "z_loss": 10.0, "softcap": 30.0},
    ):
        for size, backend in ((1.0, "reference"), (4e4, "cuda")):
            c = case(ROWS, WIDTH, CLASSES, torch.float16, bias=1.0, class_weight=torch.ones(CLASSES), **options)
            c.bias[CLASSES - 1], c.options["class_weight"][CLASSES - 1] = size, 1e4
            c.target[c.target == CLASSES - 1] = 6
            upstream = torch.tensor(2.0**-12)
            found = run(ranks, shared_out(c, SHARDS[2], upstream=upstream), 3, backend=backend)
            assert all(t.isfinite().all() for t in joined(found))
            hold(found, judge(c, upstream))
            c.options["reduction"] = "none"
            upstream = 2.0**-12 * randn(ROWS, seed=8)
            hold(run(ranks, shared_out(c, SHARDS[2], upstream=upstream), 3, backend=backend), judge(c, upstream))


@pytest.mark.parametrize("accumulate", ["param", "f32", "auto"])
def test_any_number_of_chunks_and_shards_of_any_size(ranks: Ranks, accumulate: str) -> None:
    # Ranks whose shares differ would make different chunks of one budget, and wait for each other for ever.
    for dtype, chunks in ((torch.float32, 17), (torch.bfloat16, 6)):
        c = case(ROWS, WIDTH, CLASSES, dtype)
        jobs = shared_out(c, (1, 20, 3, 13))
        hold(run(ranks, jobs, chunks, backend="cuda", accumulate=accumulate), judge(c, torch.tensor(1.0)))


def test_shards_whose_logits_are_far_apart(ranks: Ranks) -> None:
    # Against anything but the largest logit of all shards, exponentials overflow or vanish.
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    for shift in (-200.0, 200.0):
        far = Case(c.x, c.w, c.target, c.bias + shift + 60.0 * torch.arange(CLASSES).ge(19), {})
        for backend in ("reference", "cuda"):
            hold(run(ranks, shared_out(far, SHARDS[4]), backend=backend), judge(far, torch.tensor(1.0)))


def test_one_rank_has_all_shards(ranks: Ranks) -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    found = run(ranks, shared_out(c, (CLASSES,)), 3, backend="cuda")
    hold(found, judge(c, torch.tensor(1.0)))
    assert found[0].met == (0, 0)
    here = outcome(None, shared_out(c, (CLASSES,), more={"backend": "cuda"})[0])  # no process group at all
    hold([here], judge(c, torch.tensor(1.0)))


def test_leading_dimensions_and_no_tokens(ranks: Ranks) -> None:
    c = case(12, WIDTH, CLASSES, bias=1.0)
    shaped = Case(c.x.view(2, 6, WIDTH), c.w, c.target.view(2, 6), c.bias, {})
    hold(run(ranks, shared_out(shaped, SHARDS[2]), 2, backend="cuda"), judge(shaped, torch.tensor(1.0)))
    empty = Case(torch.zeros(0, WIDTH), c.w, torch.zeros(0, dtype=torch.int64), c.bias, {"reduction": "sum"})
    loss, dx, dw, db = joined(run(ranks, shared_out(empty, SHARDS[2]), backend="cuda"))
    assert loss == 0 and dx.shape == (0, WIDTH) and not dw.any() and not db.any()


def test_autocast(ranks: Ranks) -> None:
    for low in (torch.bfloat16, torch.float16):
        c = case(ROWS, WIDTH, CLASSES, bias=1.0)
        rounded = Case(c.x.to(low).float(), c.w, c.target, c.bias, {})
        right = judge(rounded, torch.tensor(1.0), low)
        # The gradient of x was one of the low dtype before autograd converted it.
        right.bound[1] = right.bound[1] + 4 * {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[low] * (
            right.expected[1].abs()
        )
        found = run(ranks, shared_out(c, SHARDS[2], autocast=low), backend="reference")
        hold(found, right)
        assert found[0].gradients["w"].dtype == torch.float32


# ---- labels and padding ----------------------------------------------------------------------------------------------


def test_labels_of_one_shard_and_the_last_class(ranks: Ranks) -> None:
    for low, high in ((0, 10), (10, 19), (28, 37), (36, 37)):
        c = case(ROWS, WIDTH, CLASSES, label_smoothing=0.1)
        c.target[c.target >= 0] = torch.arange(low, high).repeat(ROWS)[: int((c.target >= 0).sum())]
        hold(run(ranks, shared_out(c, SHARDS[4]), backend="cuda"), judge(c, torch.tensor(1.0)))


def test_an_ignored_class(ranks: Ranks) -> None:
    c = case(ROWS, WIDTH, CLASSES, ignore_index=12)
    c.target[c.target < 0] = 12
    hold(run(ranks, shared_out(c, SHARDS[4]), backend="cuda"), judge(c, torch.tensor(1.0)))


def test_all_labels_ignored(ranks: Ranks) -> None:
    for dtype, reduction in (
        (torch.float32, "mean"),
        (torch.float16, "mean"),
        (torch.float32, "sum"),
        (torch.float32, "none"),
    ):
        c = case(ROWS, WIDTH, CLASSES, dtype, bias=1.0, reduction=reduction, **EVERYTHING)
        c.target[:] = -100
        loss, *gradients = joined(run(ranks, shared_out(c, SHARDS[4]), backend="reference"))
        assert loss.isnan() if reduction == "mean" else not loss.any()
        assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("label", [CLASSES, CLASSES + 5, -1, 2**31 + 3, -(2**40)])
def test_a_label_out_of_range_is_never_a_plausible_number(ranks: Ranks, label: int) -> None:
    c = case(ROWS, WIDTH, CLASSES)
    c.target[2] = label
    for backend in ("reference", "cuda"):
        # The last shard has rows of padding, which the label must not find.
        padded = Case(c.x, torch.cat([c.w, randn(7, WIDTH)]), c.target, None, {})
        for jobs in (shared_out(c, SHARDS[2]), shared_out(padded, (19, 25), CLASSES)):
            loss, dx, dw = joined(run(ranks, jobs, 3, backend=backend))
            assert loss.isnan() and dw.isnan().any()
            assert dx.isnan().all(-1).tolist() == [i == 2 for i in range(ROWS)]
        loss, dx, _ = joined(run(ranks, shared_out(c, SHARDS[2]), 3, backend=backend, reduction="none"))
        assert loss.isnan().tolist() == dx.isnan().all(-1).tolist() == [i == 2 for i in range(ROWS)]


def test_a_label_in_two_shards_or_in_none(ranks: Ranks) -> None:
    c = case(ROWS, WIDTH, CLASSES)
    c.target[:] = torch.arange(10, 10 + ROWS)
    for shift, wrong in ((-1, [18]), (1, [19])):
        jobs = shared_out(c, SHARDS[2])
        jobs[1].first += shift
        loss, dx, _ = joined(run(ranks, jobs, backend="reference"))
        assert loss.isnan() and dx.isnan().all(-1).tolist() == [t in wrong for t in c.target.tolist()]


def test_padding_takes_no_part(ranks: Ranks) -> None:
    for extra, shards in ((3, (10, 10, 10, 10)), (23, (15, 15, 15, 15)), (8, (10, 10, 17, 8))):
        several: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1}, EVERYTHING]
        for options in several:
            c = case(ROWS, WIDTH, CLASSES, bias=1.0, **options)
            more = 50.0 + randn(extra, seed=5).abs()  # of logits that would win
            padded = Case(c.x, torch.cat([c.w, randn(extra, WIDTH)]), c.target, torch.cat([c.bias, more]), options)
            backend = "cuda" if extra == 23 else "reference"  # two shards of which are padding in part and alone
            found = run(ranks, shared_out(padded, shards, CLASSES), 2, backend=backend)
            loss, dx, dw, db = joined(found)
            right = judge(c, torch.tensor(1.0))
            for a, e, b in zip((loss, dx, dw[:CLASSES], db[:CLASSES]), right.expected, right.bound, strict=True):
                assert excess(a, e, b) <= 1.0
            assert not dw[CLASSES:].any() and not db[CLASSES:].any()


# ---- values that are none --------------------------------------------------------------------------------------------


def test_a_shard_of_impossible_classes(ranks: Ranks) -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    c.bias[10:19] = -torch.inf
    c.target[:] = torch.arange(ROWS) % 10
    whole = [t.double().requires_grad_() for t in (c.x, c.w, c.bias)]
    loss = torch.nn.functional.cross_entropy(torch.addmm(whole[2], whole[0], whole[1].T), c.target)
    expected = [loss.detach(), *torch.autograd.grad(loss, whole)]
    # Where all are possible the bounds are those of fewer classes.
    kept = torch.cat([torch.arange(10), torch.arange(19, CLASSES)])
    right = judge(Case(c.x, c.w[kept], c.target, c.bias[kept], {}), torch.tensor(1.0))
    for backend in ("reference", "cuda"):
        found = joined(run(ranks, shared_out(c, SHARDS[4]), backend=backend))
        for i, (a, e, b) in enumerate(zip(found, expected, right.bound, strict=True)):
            if i >= 2:
                assert not a[10:19].any()
                a, e = a[kept], e[kept]
            assert excess(a, e, b) <= 1.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_makes_its_row_nan_on_every_rank(ranks: Ranks, value: float) -> None:
    for at in (0, 36):
        c = case(ROWS, WIDTH, CLASSES, bias=1.0)
        c.x[4, 0] = 1.0
        c.w[at, 0] = value
        c.target[:] = 20
        for o in run(ranks, shared_out(c, SHARDS[4]), backend="cuda"):
            assert o.loss.isnan()


# ---- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(), ("x",), ("w",), ("bias",), ("w", "bias"), ("x", "bias")])
def test_only_wanted_gradients_are_made_and_exchanged(ranks: Ranks, wanted: tuple[str, ...]) -> None:
    c = case(ROWS, WIDTH, CLASSES, bias=1.0)
    right = judge(c, torch.tensor(1.0))
    expected: dict[str, Any] = dict(
        zip(("x", "w", "bias"), zip(right.expected[1:], right.bound[1:], strict=True), strict=True)
    )
    found = run(ranks, shared_out(c, SHARDS[2], wanted=wanted), 3, backend="reference")
    assert excess(found[0].loss, right.expected[0], right.bound[0]) <= 1.0
    assert {o.met for o in found} == {(6 + ("x" in wanted), 0)}
    for name in wanted:
        parts = [o.gradients[name] for o in found]
        assert excess(parts[0] if name == "x" else torch.cat(parts), *expected[name]) <= 1.0


def test_the_input_gradient_left_to_the_caller(ranks: Ranks) -> None:
    for dtype, reduction in ((torch.float32, "mean"), (torch.float16, "mean"), (torch.float32, "none")):
        c = case(ROWS, WIDTH, CLASSES, dtype, bias=1.0, reduction=reduction)
        right = judge(c, torch.ones(ROWS) if reduction == "none" else torch.tensor(1.0))
        found = run(ranks, shared_out(c, SHARDS[4]), 2, backend="reference", reduce_input_gradient=False)
        assert {o.met for o in found} == {(4, 0)}
        shares = torch.stack([o.gradients["x"].double() for o in found])
        # Each share is rounded by itself.
        rounding = {torch.float32: 2.0**-24, torch.float16: 2.0**-11}[dtype] * shares.abs().sum(0)
        assert excess(shares.sum(0), right.expected[1], right.bound[1] + rounding + 4 * 2.0**-25) <= 1.0
        assert excess(shares[0], right.expected[1], right.bound[1]) > 100.0
        assert excess(joined(found)[2], right.expected[2], right.bound[2]) <= 1.0


def test_two_backward_passes(ranks: Ranks) -> None:
    for dtype, reduction in ((torch.float32, "mean"), (torch.float16, "mean"), (torch.float32, "none")):
        c = case(ROWS, WIDTH, CLASSES, dtype, reduction=reduction)
        jobs = shared_out(c, SHARDS[2], more={"backend": "reference"})
        right = [judge(c, torch.full((ROWS,) if reduction == "none" else (), u)) for u in (1.0, 2.0)]
        found = ranks.run(twice, jobs)
        for k in (0, 1):
            assert excess(found[0][2 * k], right[k].expected[1], right[k].bound[1]) <= 1.0
            dw = torch.cat([f[2 * k + 1] for f in found])
            assert excess(dw, right[k].expected[2], right[k].bound[2]) <= 1.0


# ---- mistakes of callers ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told(ranks: Ranks) -> None:
    x, w, t = randn(3, 4), randn(5, 4), torch.zeros(3, dtype=torch.int64)
    good: dict[str, Any] = {"first_class": 0, "num_classes": 5}
    for arguments, options, message in [
        ((x, w.bfloat16(), t), {}, "must have one dtype.*torch.autocast"),
        ((x.double(), w.double(), t), {}, "input must be f32, bf16 or f16"),
        ((x, w.T, t), {}, r"weight_shard \[V, H\]"),
        ((x, w[:0], t), {}, "at least one row"),
        ((x, w, t.float()), {}, "integer labels"),
        ((x, w, t[:2]), {}, r"target must have the shape \(3,\)"),
        ((None, w, t), {}, "input must be a tensor"),
        ((x, w, t), {"bias_shard": x}, r"bias_shard must have the shape \(5,\)"),
        ((x, w, t), {"token_weight": 1.0}, "token_weight must be a tensor or None"),
        ((x, w, t), {"reduction": "max"}, "reduction must be"),
        ((x, w, t), {"first_class": -1}, "first_class must be an integer"),
        ((x, w, t), {"num_classes": 5.0}, "num_classes must be an integer"),
        ((x, w, t), {"accumulate": "f64"}, "accumulate must be one of"),
        ((x, w, t), {"workspace_mb": 0}, "workspace_mb must be a positive"),
        ((x, w, t), {"group": "tp"}, "not initialised"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            ops.vocab_parallel_linear_cross_entropy(*arguments, **{**good, **options})
    other = load_packaged("fused_linear_cross_entropy.kdsl").fused_linear_cross_entropy
    with pytest.raises(ArgumentError, match="group= is for ops that have collectives"):
        other(x, w, t, group="tp")
    found = ranks.run(without_chunk, [Job(Case(x, w, t, None, {}), 0, 10)] * 2)
    assert all("pass chunk=" in text for text in found)


def test_torch_compile_is_refused_in_words() -> None:
    c = case(ROWS, WIDTH, CLASSES)
    op = load_packaged("parallel_linear_cross_entropy.kdsl").parallel_linear_cross_entropy

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.vocab_parallel_linear_cross_entropy(x, w, c.target, first_class=0, num_classes=CLASSES)

    def itself(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return op(x, w, c.target, first=0, classes=CLASSES)

    for step, message in ((function, "which torch.compile does not take"), (itself, "torch.compile does not take ops")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=re.escape(message)):
            torch.compile(step, backend="eager", fullgraph=True)(c.x, c.w)


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes with a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = Ranks(2, tmp_path_factory.mktemp("gpus"), "cuda")
    yield found
    found.close()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_two_gpus(gpus: Ranks, dtype: torch.dtype, backend: str) -> None:
    rows, classes = 261, 1003
    every = {**EVERYTHING, "token_weight": randn(rows, seed=3), "class_weight": randn(classes).abs()}
    several: list[dict[str, Any]] = [{}, every, {"reduction": "none"}]
    for options in several:
        c = case(rows, 64, classes, dtype, bias=2.0, **options)
        single = "reduction" in options
        upstream = randn(rows, seed=8) if single else torch.tensor(1.0)
        jobs = shared_out(c, (502, 501), upstream=upstream)
        for chunks in (1, 3):
            for job in jobs:
                job.more = {"backend": backend, "workspace_mb": workspace(c, jobs, chunks)}
            found: list[Any] = gpus.run(outcome_on_gpu, jobs)
            assert all(isinstance(o, Outcome) for o in found), found
            assert {o.met for o in found} == {(2 * chunks, 1) if single else (2 * chunks + 1, 0)}
            assert torch.equal(found[0].loss, found[1].loss)
            hold(found, judge(c, upstream))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_call_on_two_gpus_is_captured_and_waits_for_nothing(gpus: Ranks, backend: str) -> None:
    c = case(261, 64, 1003, torch.bfloat16, label_smoothing=0.1)
    jobs = shared_out(c, (502, 501))
    for job in jobs:
        job.more = {"backend": backend, "workspace_mb": workspace(c, jobs, 3)}
    for replayed, eager in gpus.run(captured, jobs):
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
