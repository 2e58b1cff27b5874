"""The disk cache: shared by any number of processes, damaged entries are none, and no file system stops the work."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import stat
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from kgen.dsl import parser
from kgen.runtime import events, host_executor, triton_compile
from kgen.runtime.ahead import Choices, target
from kgen.runtime.backends import triton
from kgen.runtime.cache import CACHE, Cache, cache_key, default_root
from kgen.runtime.flight import SingleFlight

KEY = cache_key("cuda", "source")


def test_a_key_depends_on_every_part_and_on_its_bounds() -> None:
    keys = {cache_key("ab", "c"), cache_key("a", "bc"), cache_key("abc"), cache_key("ab", "c", "")}
    assert len(keys) == 4
    assert cache_key("ab", b"c") == cache_key("ab", "c")


def test_a_second_cache_on_the_folder_builds_nothing(tmp_path: Path) -> None:
    assert Cache(tmp_path / "c").get_or_build(KEY, lambda: b"binary") == b"binary"
    assert Cache(tmp_path / "c").get_or_build(KEY, pytest.fail) == b"binary"


def test_touched_and_copied_entries_hit(tmp_path: Path) -> None:
    Cache(tmp_path / "a").put(KEY, b"binary")
    os.rename(tmp_path / "a", tmp_path / "b")
    os.utime(Cache(tmp_path / "b").path(KEY), (1, 1))
    assert Cache(tmp_path / "b").get(KEY) == b"binary"


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d[:-1],
        lambda d: b"",
        lambda d: d[:-1] + bytes([d[-1] ^ 1]),
        lambda d: d + b"x",
        lambda d: b"\0" * len(d),
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path: Path, damage: Any) -> None:
    Cache(tmp_path).put(KEY, b"binary")
    path = Cache(tmp_path).path(KEY)
    path.write_bytes(damage(path.read_bytes()))
    assert Cache(tmp_path).get(KEY) is None
    assert Cache(tmp_path).get_or_build(KEY, lambda: b"again") == b"again"
    assert Cache(tmp_path).get(KEY) == b"again"


def test_the_folder_is_private(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "deep" / "kgen")
    cache.put(KEY, b"binary")
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    assert cache.folder("host") == cache.root / "host"


def test_a_failing_build_keeps_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_build(KEY, lambda: bytes(1 // 0))
    assert cache.get_or_build(KEY, lambda: b"binary") == b"binary"


def _unusable(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("no folder")
    return tmp_path / "file" / "cache"


def test_a_folder_that_cannot_be_made_is_told_once_and_memory_serves(tmp_path: Path) -> None:
    cache = Cache(_unusable(tmp_path))
    with pytest.warns(RuntimeWarning, match="KGEN_CACHE_DIR") as caught:
        assert cache.get_or_build(KEY, lambda: b"one") == b"one"
        assert cache.get_or_build(cache_key("other"), lambda: b"two") == b"two"
        assert cache.folder("host") is None
    assert len(caught) == 1
    assert cache.get_or_build(KEY, pytest.fail) == b"one"


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EPERM])
def test_errors_of_writing_are_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    cache = Cache(tmp_path)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(RuntimeWarning):
        assert cache.get_or_build(KEY, lambda: b"binary") == b"binary"
    assert list(tmp_path.rglob(".tmp-*")) == []
    assert cache.get(KEY) == b"binary"


def test_a_temporary_file_that_stays_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.warns(RuntimeWarning):
        Cache(tmp_path).put(KEY, b"binary")


def test_replacing_an_entry_that_is_being_read_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).put(KEY, b"binary")  # the other process was faster

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "in use")

    monkeypatch.setattr(os, "replace", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cache(tmp_path).put(KEY, b"binary")


def test_an_entry_that_may_not_be_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).put(KEY, b"binary")

    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "in use")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert Cache(tmp_path).get(KEY) is None


def test_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KGEN_CACHE_DIR", str(tmp_path / "a b;'%"))
    assert default_root() == tmp_path / "a b;'%"
    cache = Cache()
    cache.put(KEY, b"binary")
    assert Cache().get(KEY) == b"binary"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("kgen.runtime.cache.default_root", homeless)
    with pytest.warns(RuntimeWarning):
        assert Cache().get_or_build(KEY, lambda: b"memory") == b"memory"


def test_a_symbolic_link_as_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    Cache(tmp_path / "link").put(KEY, b"binary")
    assert Cache(tmp_path / "real").get(KEY) == b"binary"


def _round(root: str, barrier: Any, rounds: int, failures: Any) -> None:
    cache = Cache(Path(root))
    for i in range(rounds):
        payload = bytes([i]) * 200_000
        barrier.wait()
        if cache.get_or_build(cache_key(str(i)), lambda p=payload: p) != payload:
            failures.put(i)
        cache.clear_memory()
        if cache.get(cache_key(str(i))) != payload:
            failures.put(i)


def test_sixteen_processes_share_an_empty_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, failures = context.Barrier(16), context.Queue()
    workers = [context.Process(target=_round, args=(str(tmp_path), barrier, 20, failures)) for _ in range(16)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0] * 16
    assert failures.empty()
    assert list(tmp_path.rglob(".tmp-*")) == []


# ---- one build in a process ----------------------------------------------------------------------------------------


def _together(n: int, work: Any) -> list[object]:
    results: list[object] = [None] * n
    start = threading.Barrier(n)

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = work()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return results


def test_sixteen_threads_build_one_cold_key_once() -> None:
    flight: SingleFlight[str, object] = SingleFlight()
    built = []

    def build() -> object:
        built.append(1)
        time.sleep(0.05)
        return object()

    results = _together(16, lambda: flight.get_or_build("k", build))
    assert len(built) == 1
    assert len(set(results)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_is_forked_while_others_work_waits_for_none_of_them() -> None:
    flight: SingleFlight[str, str] = SingleFlight()
    building, done = threading.Event(), threading.Event()
    held = [flight._lock, events._lock, CACHE._lock, triton_compile._lock, host_executor._runtime_lock, parser._lock]

    def build() -> str:
        with contextlib.ExitStack() as stack:
            for each in held:
                stack.enter_context(each)
            building.set()
            done.wait(60)
        return "the parent's"

    thread = threading.Thread(target=lambda: flight.get_or_build("k", build))
    thread.start()
    assert building.wait(60)

    def work() -> None:
        assert flight.get_or_build("k", lambda: "the child's") == "the child's"
        for each in held:
            assert each.acquire(timeout=5)
            each.release()

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join(30)
    stuck = worker.is_alive()
    if stuck:
        worker.kill()
    done.set()
    thread.join()
    assert not stuck and worker.exitcode == 0
    assert flight.get("k") == "the parent's"


def test_a_failure_is_shared_and_then_tried_again() -> None:
    flight: SingleFlight[str, str] = SingleFlight()
    built = []

    def fail() -> str:
        built.append(1)
        time.sleep(0.2)
        raise ValueError("no")

    results = _together(16, lambda: flight.get_or_build("k", fail))
    assert all(isinstance(r, ValueError) for r in results)
    assert len(built) == 1
    assert flight.get_or_build("k", lambda: "now") == "now"


def test_programs_of_one_text_and_two_dtypes_have_an_entry_each(tmp_path: Path) -> None:
    """What loads widen, and a store of f32, do not tell f16 from bf16."""
    cache, found = Cache(tmp_path), {}
    for dtype in ("f16", "bf16"):
        text = f"kernel square(x: {dtype}[*M]) -> (y: f32[*M]):\n    parallel m in M\n    y[m] = x[m] * x[m]\n"
        module = parser.parse_text(text, "square.kdsl")
        made = target(module, module.kernels[0], Choices(dims={"M": 64}))
        program = made.program("triton")
        binary = triton.compiled(program, made.layout.variant, 90, cache)
        found[dtype] = program.source, binary.key, binary.cubin
    (one, key, cubin), (other, other_key, other_cubin) = found.values()
    assert one == other
    assert key != other_key and cubin != other_cubin
