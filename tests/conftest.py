"""Shared pytest configuration."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BACKENDS = ("reference", "cuda", "triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # here, because it takes seconds to import and most runs of one file do not need it

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is false")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that can run on this machine's CPU, by name."""
    import kgen

    status = {s.name: s for s in kgen.backends("cpu")}[request.param]
    if not status.available:
        pytest.skip(status.reason or "")
    return request.param


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests of a session keep what the host executor compiles."""
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def tuned_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own, below which tuned schedules are kept and looked for."""
    from kgen.runtime import tuned

    monkeypatch.setenv("KGEN_TUNED", str(tmp_path / "tuned"))
    tuned.reload()
    yield tmp_path
    tuned.reload()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Tensors that torch allocates and nothing fills hold NaN (integers: their largest value).

    Otherwise an element that a kernel fails to write may have the right value by chance, left there by an earlier call.
    """
    import torch

    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill
