"""Calls that an earlier process made ready: what finds them, and what must not. On the CUDA driver of `driver_kit`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver_kit import FakeDriver, machine, needs_compiler

import kgen
from kgen.runtime import checked_modules, events, generator, injection, installation, stored, tuned
from kgen.runtime.backends import driver
from kgen.runtime.cache import CACHE

__all__ = ["machine"]
pytestmark = needs_compiler

TEXT = """
from others import twice

kernel scaled(x: T[*M, N], w: T[N]?, factor: f32 = 2.0, negate: const bool = false) -> (y: T[*M, N]):
    parallel m in M
    tile n in N
    if negate:
        a = -twice(x[m, n])
    else:
        a = twice(x[m, n])
    if w:
        y[m, n] = factor * a * w[n]
    else:
        y[m, n] = factor * a

kernel totals(x: T[M, N]) -> (y: f32[N]):
    parallel m in M
    tile n in N
    y[n] += x[m, n]

kernel shifted(x: inout T[N], step: f32):
    parallel n in N
    x[n] = x[n] + step
"""
OTHERS = "fn twice(a) = a + a\n"

Call = Callable[[kgen.KernelModule], Any]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: FakeDriver) -> Path:
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "_kept", 0)
    stored.forget()
    CACHE.clear_memory()
    (tmp_path / "own.kdsl").write_text(TEXT)
    (tmp_path / "others.kdsl").write_text(OTHERS)
    return tmp_path / "own.kdsl"


def planned(path: Path, call: Call) -> tuple[Any, int]:
    """The result of `call` on the file loaded anew, as another process would, and how many plans were made for it."""
    CACHE.clear_memory()
    before = events.counts()["plan"]
    result = call(kgen.load(path))
    return result, events.counts()["plan"] - before


def scaled(x: torch.Tensor, *rest: Any, **more: Any) -> Call:
    return lambda m: m.scaled(x, *rest, backend="cuda", **more)


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


CALLS: dict[str, tuple[Call, torch.Tensor]] = {
    "one launch": (scaled(whole(3, 8)), 4 * whole(3, 8)),
    "all arguments": (scaled(whole(3, 8), whole(8), 3.0, True), -6 * whole(3, 8) * whole(8)),
    "strides": (scaled(whole(8, 3).t()), 4 * whole(8, 3).t()),
    "16 bits": (scaled(whole(3, 8, dtype=torch.bfloat16)), 4 * whole(3, 8, dtype=torch.bfloat16)),
    "workspaces": (lambda m: m.totals(whole(40, 8), backend="cuda"), whole(40, 8).sum(0)),
    "in place": (lambda m: m.shifted(whole(5), 1.0, backend="cuda"), whole(5) + 1),
    "given": (lambda m: m.scaled(whole(3, 8), backend="cuda", out=torch.empty(3, 8)), 4 * whole(3, 8)),
    "like": (lambda m: m.scaled(whole(3, 8), backend="cuda", like=(torch.empty(8, 3).t(),)), 4 * whole(3, 8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_process_makes_no_plan(path: Path, name: str) -> None:
    call, expected = CALLS[name]
    first, plans = planned(path, call)
    assert torch.equal(first, expected) and plans == 1
    for _ in range(2):
        again, plans = planned(path, call)
        assert torch.equal(again, expected) and again.stride() == first.stride() and plans == 0


def test_a_stored_call_goes_on_with_other_values_and_keeps_its_checks(path: Path) -> None:
    planned(path, scaled(whole(3, 8), None, 2.0))
    module = kgen.load(path)
    for factor in (2.0, 3.0, 5):
        assert torch.equal(module.scaled(whole(3, 8), None, factor, backend="cuda"), 2 * factor * whole(3, 8))
    with pytest.raises(kgen.ArgumentError, match="'factor' must be a number"):
        module.scaled(whole(3, 8), None, "much", backend="cuda")
    given, x = torch.empty(3, 8), whole(5)
    planned(path, lambda m: m.scaled(given, backend="cuda", out=torch.empty(3, 8)))
    with pytest.raises(kgen.ArgumentError, match="shares memory"):
        planned(path, lambda m: m.scaled(given, backend="cuda", out=given))
    planned(path, lambda m: m.shifted(x, 1.0, backend="cuda"))
    version = x._version
    planned(path, lambda m: m.shifted(x, 1.0, backend="cuda"))
    assert x._version == version + 1 and torch.equal(x, whole(5) + 2)


@pytest.mark.parametrize(
    "other",
    [
        scaled(whole(4, 8)),
        scaled(whole(3, 16)),
        scaled(whole(24).reshape(3, 8).t().contiguous().t()),
        scaled(whole(25)[1:].reshape(3, 8)),
        scaled(whole(3, 8, dtype=torch.float16)),
        scaled(whole(3, 8), whole(8)),
        scaled(whole(3, 8), negate=True),
        scaled(whole(3, 8), out=torch.empty(3, 8)),
        scaled(whole(3, 8), like=(torch.empty(8, 3).t(),)),
        lambda m: m.totals(whole(3, 8), backend="cuda"),
    ],
)
def test_another_call_is_another_entry(path: Path, other: Call) -> None:
    planned(path, scaled(whole(3, 8)))
    assert planned(path, other)[1] == 1
    assert planned(path, other)[1] == planned(path, scaled(whole(3, 8)))[1] == 0


def test_a_changed_source_is_compiled_again(path: Path) -> None:
    call = scaled(whole(3, 8))
    planned(path, call)
    others = path.with_name("others.kdsl")
    for file, old, new, factor in (
        (others, "a + a", "a + a + a", 6),
        (path, "= factor * a\n", "= factor * a * 2.0\n", 12),
    ):
        file.write_text(file.read_text().replace(old, new))
        result, plans = planned(path, call)
        assert torch.equal(result, factor * whole(3, 8)) and plans == 1
    path.write_text(TEXT)
    others.write_text(OTHERS)
    result, plans = planned(path, call)
    assert torch.equal(result, 4 * whole(3, 8)) and plans == 0


@pytest.mark.parametrize("what", ["generator", "torch", "triton", "nvrtc", "tuned", "interpreter", "ptxas"])
def test_another_environment_compiles_again(path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    call = scaled(whole(3, 8))
    planned(path, call)
    assert planned(path, call)[1] == 0
    if what == "generator":
        monkeypatch.setattr(generator, "version", lambda *parts: "another" if "codegen" in parts else "same")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    elif what == "triton":
        monkeypatch.setattr(installation, "triton_version", lambda: "99.0")
    elif what == "nvrtc":
        monkeypatch.setattr(installation, "nvrtc_installation", lambda: ("99.0",))
    elif what == "tuned":
        results = path.parent / "tuned"
        results.mkdir()
        monkeypatch.setenv("KGEN_TUNED", str(results))
        stored.forget()
        planned(path, call)
        (results / "cpu.json").write_text("{}")
    elif what == "ptxas":
        # That of torch is named by torch.compile in mid-process, and is nobody's choice.
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(Path(torch.__file__).parent / "bin" / "ptxas"))
        stored.forget()
        assert planned(path, call)[1] == 0
        monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    stored.forget()
    assert planned(path, call)[1] == 1
    assert planned(path, call)[1] == 0


def test_a_device_that_runs_another_number_of_clusters_has_other_shares(path: Path, machine: FakeDriver) -> None:
    x = whole(9, 30000)

    def call(module: kgen.KernelModule) -> torch.Tensor:
        return module.totals(x, backend="cuda")

    for resident, plans in ((5, 1), (5, 0), (3, 1), (3, 0), (1000, 1)):
        machine.clusters = resident
        driver.loaded.clear()
        result, made = planned(path, call)
        assert torch.equal(result, x.sum(0)) and made == plans
        sums, finish = machine.seen[-2:]
        assert sums.grid == (4 * min(resident, 9), 1, 1)
        assert {min(resident, 9)} <= {*sums.arguments} & {*finish.arguments}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of the generator, of which the fixture `restarted` makes another process."""
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "kgen" / "codegen" / "cuda" / "emit.py"
    file.parent.mkdir(parents=True)
    file.write_text("# the first\n")
    (tmp_path / "kgen" / "dsl").mkdir()
    (tmp_path / "kgen" / "dsl" / "parser.py").write_text("# no change\n")
    monkeypatch.setattr(generator, "_ROOT", tmp_path / "kgen")
    restarted()
    yield file
    monkeypatch.undo()
    restarted()


def restarted() -> str:
    """The version of the generator, as a process that starts now says it."""
    CACHE.clear_memory()
    generator._at_start.cache_clear()
    generator._at_start(generator._ROOT)
    generator.version.cache_clear()
    stored.forget()
    return generator.version("codegen")


def test_a_changed_file_of_the_generator_changes_its_version(sources: Path) -> None:
    seen = set[str]()
    for text in ("a", "b", "c" * 100):
        sources.write_text(text)
        seen |= {restarted(), restarted()}
    (sources.parent / "new.j2").write_text("")
    seen.add(restarted())
    assert len(seen) == 4


def test_a_file_that_changes_while_a_process_runs_changes_the_version_of_the_next(sources: Path) -> None:
    before = restarted()
    assert not generator.changed()
    text = sources.read_text()
    sources.write_text(text.replace("first", "other"))
    assert generator.changed() and generator.version("codegen") == before
    generator.version.cache_clear()
    assert generator.version("codegen") == before  # what the process started with is known
    now = restarted()
    assert now != before
    # It is not where nobody has asked before the change: then no other process has this version.
    sources.write_text("# new")
    generator._at_start.cache_clear()
    generator._at_start(generator._ROOT)
    sources.write_text("# newer")
    generator.version.cache_clear()
    own = generator.version("codegen")
    assert own not in (before, now, restarted())


def test_a_generator_that_changed_while_the_process_runs_keeps_nothing(path: Path, sources: Path) -> None:
    call, known = scaled(whole(3, 8)), scaled(whole(2, 8))
    planned(path, known)
    sources.write_text("# new")
    assert [planned(path, call)[1] for _ in range(2)] == [1, 1]
    assert planned(path, known)[1] == 0
    path.write_text(TEXT + "\n")  # a file that was not checked before
    assert [planned(path, known)[1] for _ in range(2)] == [1, 1]
    sources.write_text("# the first\n")
    restarted()
    assert CACHE.get(checked_modules._key(path) or "") is None
    for was_known in (False, True):
        assert [planned(path, c)[1] for c in (call, known)] == [1, 1 - was_known]
        assert [planned(path, c)[1] for c in (call, known)] == [0, 0]
        path.write_text(TEXT)


def test_results_of_another_process_count_from_the_next_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has read the old ones, for a name or for schedules, chooses and stores by them."""
    results = path.parent / "tuned"
    results.mkdir()
    file = results / "cpu.json"
    monkeypatch.setenv("KGEN_TUNED", str(results))
    states = ("one", "two")  # read by a Table as they are, which they are no text of
    read: list[bytes | None] = []
    monkeypatch.setattr(tuned, "load", lambda path, data=None: read.append(data) or [])
    for first in (lambda: planned(path, scaled(whole(3, 8))), lambda: tuned.table(torch.device("cpu"))):
        tuned.reload()
        read.clear()
        file.write_text(states[0])
        first()
        file.write_text(states[1])
        planned(path, scaled(whole(len(file.name), 8)))
        tuned.table(torch.device("cpu"))
        old = stored._environment(torch.device("cpu"))
        assert states[0].encode() in read and states[1].encode() not in read
        file.write_text(states[0])
        tuned.reload()
        assert stored._environment(torch.device("cpu")) == old
        file.write_text(states[1])
        tuned.reload()
        assert stored._environment(torch.device("cpu")) != old
    tuned.reload()


@pytest.mark.parametrize("what", ["name", "major", "minor", "multi_processor_count", "driver"])
def test_another_device_is_another_environment(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    device = {"name": "GPU", "major": 9, "minor": 0, "multi_processor_count": 132}
    driver_is = "570.1"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**device))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device["name"])
    monkeypatch.setattr(installation, "driver_version", lambda: driver_is)
    seen = [stored._environment.__wrapped__(torch.device("cuda", i)) for i in (0, 1)]
    assert seen[0] == seen[1]  # the key of the call has the index
    if what == "driver":
        driver_is = "580.1"
    else:
        device[what] = "Other" if what == "name" else 1
    assert stored._environment.__wrapped__(torch.device("cuda", 0)) != seen[0]


def entries(folder: Path) -> list[Path]:
    """The files of stored calls in a cache."""
    found = [p for p in (folder / "cache").rglob("*") if p.is_file() and b'"launches":' in p.read_bytes()]
    assert found
    return found


def test_a_damaged_or_foreign_entry_is_none(path: Path) -> None:
    call, expected = CALLS["workspaces"]
    planned(path, call)
    (entry,) = entries(path.parent)
    whole_entry = entry.read_bytes()
    entry.write_bytes(whole_entry[:-3])
    assert planned(path, call)[1] == 1  # which writes it again
    key = entry.parent.name + entry.name
    good = json.loads(CACHE.get(key) or b"")
    for wrong in ([], {}, {**good, "device": "moon"}, {**good, "launches": [{}]}, {**good, "arguments": [[1]]}):
        CACHE.put(key, json.dumps(wrong).encode())
        result, plans = planned(path, call)
        assert torch.equal(result, expected) and plans == 1
    for part in good["launches"]:
        CACHE.path(part["binary"]).unlink()
    driver.loaded.clear()
    CACHE.put(key, json.dumps(good).encode())
    assert planned(path, call)[1] == 1


def test_what_breaks_the_generator_meets_no_stored_call(path: Path) -> None:
    x, out = whole(3, 9), torch.empty(3, 9)
    call = scaled(x, out=out)
    out.fill_(torch.nan)  # an element that is not written is not right by chance
    with injection.injected("short") as done:
        broken, plans = planned(path, call)
    assert done.programs and plans == 1 and not torch.equal(broken, 4 * x)
    result, plans = planned(path, call)
    assert torch.equal(result, 4 * x) and plans == 1  # the broken one was not kept
    with injection.injected("short") as done:
        planned(path, call)
    assert done.programs  # a program was made, though there is a stored call for the one without the mistake


def test_a_kernel_that_a_changed_generator_has_made_is_kept_at_no_size(path: Path) -> None:
    def call(rows: int) -> Call:  # into memory that is not right by chance
        return scaled(whole(rows, 9), out=torch.full((rows, 9), torch.nan))

    module = kgen.load(path)
    with injection.injected("short") as done:
        call(3)(module)
    assert done.programs
    assert not torch.equal(call(5)(module), 4 * whole(5, 9))  # of the same plan
    result, plans = planned(path, call(5))
    assert torch.equal(result, 4 * whole(5, 9)) and plans == 1


def test_switched_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = scaled(whole(3, 8))
    monkeypatch.setenv("KGEN_STORED_CALLS", "0")
    assert [planned(path, call)[1] for _ in range(2)] == [1, 1]
    monkeypatch.delenv("KGEN_STORED_CALLS")
    assert [planned(path, call)[1] for _ in range(2)] == [1, 0]


def test_a_text_without_a_file_and_executors_of_the_cpu_are_not_stored(path: Path) -> None:
    module = kgen.loads("kernel f(x: T[*N]) -> (y: T[*N]):\n    parallel n in N\n    y[n] = x[n]\n")
    module.f(whole(3), backend="cuda")
    planned(path, lambda m: m.scaled(whole(3, 8), backend="reference"))
    assert stored._kept == 0


def test_a_process_keeps_no_more_than_it_may(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_KEPT", 2)
    for rows in (1, 2, 3):
        planned(path, scaled(whole(rows, 8)))
    assert [planned(path, scaled(whole(rows, 8)))[1] for rows in (1, 2, 3)] == [0, 0, 1]


def test_another_size_of_a_stored_call_loads_nothing(path: Path, machine: FakeDriver) -> None:
    """As a capture needs it, which can record launches only."""
    planned(path, scaled(whole(3, 8)))
    driver.loaded.clear()
    CACHE.clear_memory()
    module = kgen.load(path)
    module.scaled(whole(3, 8), backend="cuda")
    assert module.scaled.restored and len(driver.loaded) == 1
    assert torch.equal(module.scaled(whole(5, 8), backend="cuda"), 4 * whole(5, 8))
    assert len(driver.loaded) == 1


def test_many_threads_at_once(path: Path) -> None:
    call, results = scaled(whole(3, 8)), []

    def run() -> None:
        results.append(call(kgen.load(path)))

    for _ in range(2):
        threads = [threading.Thread(target=run) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        CACHE.clear_memory()
    assert len(results) == 16 and all(torch.equal(r, 4 * whole(3, 8)) for r in results)
    assert planned(path, call)[1] == 0


_PROCESS = """
import ctypes, gc, json, sys, time
import torch
x, w = torch.ones(4, 8), torch.ones(8)
x * w
before = set(sys.modules)
collected = gc.get_stats()
began = time.perf_counter()
from kgen import ops
from kgen.runtime.backends import driver

class Current:
    def __init__(self, index): pass
    def __enter__(self): pass
    def __exit__(self, *_): pass

launched = []
class Library:
    def __getattr__(self, name):
        took = {"cuLaunchKernelEx": 4, "cuModuleLoadData": 2, "cuModuleGetFunction": 3, "cuFuncSetAttribute": 3}
        def run(*a):
            if name == "cuLaunchKernelEx":
                launched.append(a[1])
            elif name in ("cuModuleLoadData", "cuModuleGetFunction"):
                ctypes.c_void_p.from_address(a[0]).value = 1
            return 0
        kinds = [ctypes.c_void_p] * took.get(name, 1)
        made = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(run)
        setattr(self, name, made)
        return made

stub = driver.Driver(Library())
driver.driver, driver.current = lambda: stub, Current
driver.current_device, driver.current_stream = lambda: 0, lambda index: 0
ops.rms_norm(x, w, backend="cuda")
took = (time.perf_counter() - began) * 1e3
print(json.dumps({
    "launched": len(launched),
    "modules": sorted(set(sys.modules) - before),
    "collections": [b["collections"] - a["collections"] for a, b in zip(collected, gc.get_stats())],
    "ms": took,
}))
"""


def test_a_stored_first_call_imports_no_compiler(path: Path) -> None:
    from kgen.ops import functional

    functional._loaded.cache_clear()  # as the kernels of earlier tests know other executors
    functional.load_packaged.cache_clear()
    functional.rms_norm(torch.ones(4, 8), torch.ones(8), backend="cuda")
    done = subprocess.run([sys.executable, "-c", _PROCESS], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found, os.environ["KGEN_CACHE_DIR"])
    assert found["launched"] == 1
    own = [m for m in found["modules"] if m.startswith("kgen")]
    unwanted = [m for m in own if m.startswith(("kgen.dsl.check", "kgen.dsl.host", "kgen.dsl.proofs", "kgen.codegen."))]
    assert unwanted == ["kgen.codegen.torch_dtypes"]
    assert not {"kgen.dsl.ast", "kgen.dsl.ir", "kgen.dsl.parser", "kgen.runtime.preparing"} & set(own)
    assert not [m for m in found["modules"] if m.split(".")[0] in ("lark", "jinja2", "triton", "cupy", "filelock")]
    # A module takes about half a millisecond, and a collection of all that torch has made a hundred.
    assert len(own) <= 45 and found["collections"][2] == 0, found
