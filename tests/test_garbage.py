"""The collector of cyclic garbage rests while the compiler works, and only then."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import kgen.ops
from kgen.dsl.check import check_module
from kgen.dsl.diagnostics import Diagnostics, DslError
from kgen.dsl.garbage import collected_later
from kgen.dsl.host.check import check_ops, source_of
from kgen.dsl.modules import load, load_source
from kgen.dsl.source import SourceFile
from kgen.runtime.ahead import BACKENDS, Choices, target

OPS = Path(kgen.ops.__file__).parent
WRONG = "kernel f(x: T[N]) -> (y: T[N]):\n    tile n in N\n    y[n] = "


@pytest.fixture(autouse=True, params=[True, False], ids=["on", "off"])
def collector(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the collector is at work around a test; it must be the same behind."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    after = gc.isenabled()
    (gc.enable if before else gc.disable)()
    assert after == request.param


def test_off_inside(collector: bool) -> None:
    with collected_later():
        assert not gc.isenabled()
        with collected_later():
            assert not gc.isenabled()
        assert not gc.isenabled()


def test_errors_leave_it_as_it_was(collector: bool) -> None:
    with suppress(ZeroDivisionError), collected_later():
        _ = 1 // 0
    assert gc.isenabled() == collector
    with pytest.raises(DslError):
        load_source(SourceFile("f.kdsl", WRONG))


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_spans_that_overlap(first_ends_first: bool) -> None:
    # As two threads have them.
    first, second = ExitStack(), ExitStack()
    first.enter_context(collected_later())
    second.enter_context(collected_later())
    for span in (first, second) if first_ends_first else (second, first):
        span.close()


def test_two_threads_that_both_found_it_on(collector: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # One is interrupted between its question and its answer.
    first, second = ExitStack(), ExitStack()
    first.enter_context(collected_later())
    with monkeypatch.context() as m:
        m.setattr(gc, "isenabled", lambda: collector)
        second.enter_context(collected_later())
    first.close()
    second.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_is_in_no_span(collector: bool) -> None:
    with collected_later():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() == collector else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()


def test_a_compiler_is_not_interrupted() -> None:
    """Neither reading nor checking nor printing a file of many kernels is."""
    module = _quiet(lambda: load(OPS / "parallel_linear_cross_entropy.kdsl")).module
    _quiet(lambda: check_module(module, Diagnostics()))
    _quiet(lambda: check_ops(source_of(module), Diagnostics()))
    kernels = [target(module, k, Choices(dtype="bf16")) for k in module.kernels[:2]]
    for backend in BACKENDS:
        kernels[0].program(backend)  # imports what prints it
        for one in kernels:
            _quiet(lambda one=one, backend=backend: one.program(backend))


def _quiet(work: Callable[[], Any]) -> Any:
    """What `work` gives. A span that ends leaves objects behind which one collection looks at."""
    gc.collect()
    seen: list[str] = []
    often = gc.get_threshold()

    def heard(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    gc.callbacks.append(heard)
    gc.set_threshold(100, *often[1:])
    try:
        return work()
    finally:
        gc.callbacks.remove(heard)
        gc.set_threshold(*often)
        assert seen.count("start") <= 3
