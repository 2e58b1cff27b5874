"""`kgen tune` without a GPU: candidates run on the CPU's executors, and times are made up."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_kit import CPU, Clock, machine, norm, outcomes

from kgen.codegen.program import Program
from kgen.runtime import tune, tuned
from kgen.runtime.ahead import Choices
from kgen.runtime.backends.launch import Built
from kgen.runtime.errors import ArgumentError, BackendError
from kgen.runtime.loading import load_packaged
from kgen.runtime.tune import Job, Machine
from kgen.runtime.tune_cases import Case, case
from kgen.runtime.tune_compile import Compilers, Order
from kgen.runtime.tune_measure import Run
from kgen.runtime.tune_search import Timer
from kgen.runtime.tuned_store import load, user_path

command = importlib.import_module("kgen.cli.tune")  # the package has the function by that name
pytestmark = pytest.mark.usefixtures("tuned_folder")


# ---- from a search to a call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "training", "backward"])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_fastest_is_kept_and_calls_take_it(direction: str, backend: str) -> None:
    c = norm(direction)
    ran: list[int] = []
    (done,) = outcomes([Job(c, backend)], machine(ran=ran))
    assert done.state == "tuned" and done.result is not None and not done.problems
    assert done.result.knobs and done.result.us < done.result.default_us == 10.0
    assert set(ran) == set(range(done.result.tried)) and done.result.tried > 2
    assert [f["us"] for f in done.figures] == sorted(f["us"] for f in done.figures)
    best = done.figures[0]["schedule"]
    tuned.reload()
    # A call of another batch size, through autograd where the direction says so.
    kernel = load_packaged.__wrapped__("rms_norm.kdsl")["rms_norm"]
    x, w = torch.randn(5, 256, requires_grad=direction != "forward"), torch.randn(256, requires_grad=True)
    with torch.set_grad_enabled(direction != "forward"):
        y = kernel(x, w, backend=backend)
    used = kernel
    if direction != "forward":
        y.backward(torch.ones_like(y))
        (training,) = kernel.trainings._values.values()
        used = training.forward if direction == "training" else training.backward
        torch.testing.assert_close(x.grad, _gradient(x, w))
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (256,), w, 1e-6))
    (built,) = used.plans._values.values()
    assert built.program is not None
    assert (built.program.schedule.threads, built.program.schedule.rows) == (best["threads"], best["rows"])
    assert built.program.schedule.by == "tuned"


def _gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    torch.nn.functional.rms_norm(x, (256,), w.detach(), 1e-6).sum().backward()
    assert x.grad is not None
    return x.grad


def test_the_default_stays_where_nothing_is_faster() -> None:
    (done,) = outcomes([Job(norm(), "cuda")], machine(lambda i: 10.0 + i))
    assert done.result is not None and done.result.knobs == {} and done.result.us == 10.0
    assert load(user_path("cpu"))[0].knobs == {}


def test_both_backends_are_measured_and_the_faster_is_known() -> None:
    c = norm()
    for us, name in ((5.0, "triton"), (50.0, "cuda")):
        found = outcomes([Job(c, "cuda")], machine(lambda i: 10.0), again=True)
        found += outcomes([Job(c, "triton")], machine(lambda i, us=us: us), again=True)
        assert [o.state for o in found] == ["tuned", "tuned"]
        assert tuned.Table("cpu", "").faster(c.where) == name


# ---- what is not kept ------------------------------------------------------------------------------------------------


def breaking(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Program], bool]) -> None:
    """Programs that `wrong` picks spoil one element of what they write."""
    right = tune.load_candidate

    class Spoiled(Built):
        def __init__(self, built: Built) -> None:
            self.built, self.program = built, built.program

        def prepare(self, layout: Any) -> Any:
            launch, grid = self.built.prepare(layout)

            def run(tensors: Any, scalars: Any, addresses: Any) -> None:
                launch(tensors, scalars, addresses)
                tensors[-1].view(-1)[-1] += 0.5

            return run, grid

    def load_candidate(*given: Any) -> Built:
        built = right(*given)
        assert built.program is not None
        return Spoiled(built) if wrong(built.program) else built

    monkeypatch.setattr(tune, "load_candidate", load_candidate)


def test_a_candidate_that_is_wrong_is_told_and_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    c = norm()
    (before,) = outcomes([Job(c, "cuda")], keep=False)
    fastest = before.figures[0]["schedule"]
    breaking(monkeypatch, lambda p: shown(p) == fastest)
    (done,) = outcomes([Job(c, "cuda")])
    assert done.state == "tuned" and done.result is not None
    assert len(done.problems) == 1 and "is WRONG" in done.problems[0] and "rms_norm on cuda" in done.problems[0]
    assert done.result.tried == before.result.tried - 1  # type: ignore[union-attr]
    assert done.result.skipped == {"wrong": 1}
    left = [f for f in done.figures if "left out" in f]
    assert [f["schedule"] for f in left] == [fastest]


def shown(p: Program) -> dict[str, Any]:
    s = p.schedule
    return {"threads": s.threads, "rows": s.rows, "chunks": dict(s.chunks), "programs": s.programs, "vector": s.vector}


def test_a_wrong_default_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    breaking(monkeypatch, lambda p: p.schedule.by == "ladders")
    (done,) = outcomes([Job(norm(), "cuda")])
    assert done.state == "failed" and "the default schedule is WRONG" in done.problems[0]
    assert load(user_path("cpu")) == []


def test_a_candidate_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tune.load_candidate

    def load_candidate(executor: Any, program: Program, *rest: Any) -> Built:
        if program.schedule.by != "ladders":
            raise BackendError("too much shared memory")
        return right(executor, program, *rest)

    monkeypatch.setattr(tune, "load_candidate", load_candidate)
    (done,) = outcomes([Job(norm(), "cuda")])
    assert done.result is not None and done.result.tried == 1 and done.result.skipped == {"refused": 3}
    assert "too much shared memory" in str(done.figures)


def test_in_place_kernels_start_from_the_same_values_each_time() -> None:
    seen: list[float] = []
    c = case(load_packaged("cross_entropy.kdsl")["cross_entropy_"],
             Choices({"M": 6, "V": 64}, "f32", without=frozenset({"weight", "z_scale"})))  # fmt: skip

    def make(runs: Sequence[Run], reset: Run) -> Timer:
        def measure(which: Sequence[int], rounds: int) -> dict[int, list[float]]:
            for i in which:
                reset()
                seen.append(float(logits[0].double().sum()))
                runs[i]()
                assert float(logits[0].double().sum()) != seen[-1]
            return {i: [1.0] * rounds for i in which}

        return measure

    logits: list[torch.Tensor] = []
    whole = Case.arguments

    def arguments(self: Case, *given: Any, **more: Any) -> Any:
        made = whole(self, *given, **more)
        logits[:] = [made.tensors[0]]
        return made

    on = Machine(CPU, "cpu", "", 4, timer=make, compilers=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "arguments", arguments)
        outcomes([Job(c, "cuda")], on)
    assert len(seen) > 3 and len(set(seen)) == 1


# ---- time, and what is known already ---------------------------------------------------------------------------------


def test_a_second_run_measures_nothing_and_again_does() -> None:
    jobs = [Job(norm(), "cuda"), Job(norm(width=512), "cuda")]
    ran: list[int] = []
    outcomes(jobs[:1], machine(ran=ran))
    first = len(ran)
    found = outcomes(jobs, machine(ran=ran))
    assert [o.state for o in found] == ["known", "tuned"] and found[0].result is not None
    assert len(ran) == 2 * first
    assert [o.state for o in outcomes(jobs, machine(ran=ran), again=True)] == ["tuned", "tuned"]
    assert len(load(user_path("cpu"))) == 2


def test_an_interrupted_run_goes_on_where_it_stopped() -> None:
    jobs = [Job(norm(width=w), "cuda") for w in (64, 128, 256)]
    count = 0

    def us(i: int) -> float:
        nonlocal count
        count += 1
        if len(load(user_path("cpu"))) == 1:
            raise KeyboardInterrupt
        return 10.0 - i

    with pytest.raises(KeyboardInterrupt):
        outcomes(jobs, machine(us))
    assert len(load(user_path("cpu"))) == 1
    assert [o.state for o in outcomes(jobs)] == ["known", "tuned", "tuned"]


def test_time_is_shared_and_what_is_left_over_is_told() -> None:
    jobs = [Job(norm(width=w), "cuda") for w in (64, 128, 256, 512)]
    clock = Clock(step=1.0)
    found = outcomes(jobs, seconds=20.0, clock=clock)
    states = [o.state for o in found]
    assert states[0] == "tuned" and states[-1] == "out of time"
    assert [o.job for o in found] == jobs
    assert len(load(user_path("cpu"))) == states.count("tuned")


def test_what_time_did_not_suffice_for_is_done_again() -> None:
    jobs = [Job(norm(width=w), "cuda") for w in (64, 128)]
    found = outcomes(jobs, seconds=9.0, clock=Clock(step=1.0))
    short = [o.result for o in found if o.result is not None and not o.result.complete]
    assert short and all(o.state == "tuned" for o in found)
    assert [r.complete for r in load(user_path("cpu"))].count(False) == len(short)
    again = outcomes(jobs)
    assert [o.state for o in again].count("tuned") == len(short)
    assert all(r.complete for r in load(user_path("cpu")))


def test_a_training_form_that_is_the_kernel_itself_is_measured_once() -> None:
    kernel = load_packaged("swiglu.kdsl")["swiglu"]
    cases = [case(kernel, Choices({"M": 8, "N": 64}), d) for d in ("forward", "training", "backward")]
    assert [j.case.name for j in tune.unique([Job(c, "cuda") for c in cases])] == ["swiglu", "swiglu.backward"]


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_arguments_are_those_that_such_a_call_has() -> None:
    kernel = load_packaged("cross_entropy.kdsl")["cross_entropy"]
    c = case(kernel, Choices({"M": 400, "V": 50}))
    given = dict(zip((t.name for t in c.body.tensors), c.arguments(CPU).tensors, strict=True))
    assert given["target"].min() >= 0 and given["target"].max() == 49
    assert given["logits"].dtype == torch.bfloat16 and given["loss"].shape == (400,)
    again = c.arguments(CPU).tensors[0]
    assert torch.equal(given["logits"], again) and given["logits"].data_ptr() != again.data_ptr()


def test_a_backward_kernel_gets_what_its_forward_gives() -> None:
    c = norm("backward")
    given = dict(zip((t.name for t in c.body.tensors), c.arguments(CPU).tensors, strict=True))
    x = given["x"].double()
    (residual,) = (t for t in given.values() if t.shape == (24,))
    torch.testing.assert_close(residual.double(), (x.square().mean(-1) + 1e-6).rsqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_call_that_is_checked_has_the_same_program_and_fewer_rows(direction: str) -> None:
    c = norm(direction, rows=4096)
    small = c.smaller(20_000)
    assert small.elements <= 20_000 < c.elements and small.dims["N"] == c.dims["N"]
    assert small.where.variant == c.where.variant and small.dims["M"] % 2
    flat = case(load_packaged("swiglu.kdsl")["swiglu"], Choices({"M": 512, "N": 512}))
    assert flat.smaller(2000).where.variant == flat.where.variant
    assert flat.smaller(2000).elements < flat.elements
    assert norm(rows=4).smaller(10).dims == norm(rows=4).dims


def test_gradients_that_are_not_there() -> None:
    kernel = load_packaged("rms_norm.kdsl")["rms_norm"]
    with pytest.raises(ArgumentError, match="no input 'v'"):
        case(kernel, Choices({"M": 8, "N": 64}), "backward", ("v",))


# ---- other processes -------------------------------------------------------------------------------------------------


def test_other_processes_compile_for_a_gpu_that_is_not_there() -> None:
    """Both compilers, and a candidate that spills: the default counts all the same."""
    c = norm("forward", width=4096)
    orders = [Order(c.where.kernel, c.where.variant, b, 132, 90, most=4) for b in ("cuda", "triton")]
    with Compilers(orders, workers=2, wave=2) as pool:
        for i in range(2):
            taken = None
            while not pool.ready(i):
                pass
            taken = pool.take(i, 0.0)
            assert taken is not None
            made, late = taken
            assert late == 0 and len(made) == 4
            assert made[0].planned.knobs is None and not made[0].problem
            assert all(m.resources and m.resources[0].registers > 10 for m in made if not m.problem)


STARTS = """
import time
from kgen.runtime.ahead import Choices
from kgen.runtime.loading import load_packaged
from kgen.runtime.tune_cases import case
from kgen.runtime.tune_compile import Compilers, Order

if __name__ == "__main__":
    c = case(load_packaged("rms_norm.kdsl")["rms_norm"], Choices({"M": 8, "N": 64}))
    with Compilers([Order(c.where.kernel, c.where.variant, "cuda", 132, 90, most=2)], workers=1) as pool:
        while not pool.ready(0):
            time.sleep(0.01)
        print(*pool._pool._processes, flush=True)
        time.sleep(60)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "starts.py")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    (pid,) = parent.stdout.readline().split()
    parent.kill()
    parent.wait()

    def there() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    ends = time.monotonic() + 10
    while there() and time.monotonic() < ends:
        time.sleep(0.05)
    assert not there()


def test_a_candidate_that_does_not_compile_is_told() -> None:
    from dataclasses import replace

    from kgen.runtime.tune_compile import Planned, compile_program, plan

    c = norm()
    order = Order(c.where.kernel, c.where.variant, "cuda", 132, 90, most=2)
    good = plan(order)[1]
    bad = Planned(good.knobs, replace(good.program, source=good.program.source.replace("{", "{{", 1)))
    assert "does not compile" in compile_program(order, bad).problem
