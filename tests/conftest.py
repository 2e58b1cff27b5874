"""Shared pytest configuration."""

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
