"""What every test needs: fresh compilers and seeds, and GPU tests only where there is a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import amp_fx
from holding import Held


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported lives as long as the tests: whoever collects garbage need not look at it, which takes 0.5 s."""
    # when it is imported, it looks for what refers to some objects
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture
def held() -> Held:
    """Bytes of the copies and constants that the test's models hold."""
    return Held()


@pytest.fixture(name="op_by_op")
def _op_by_op() -> Iterator[None]:
    """Inductor's passes run, and no code is generated."""
    from graphs import op_by_op

    with op_by_op():
        yield


@pytest.fixture(name="without_inductor")
def _without_inductor() -> Iterator[None]:
    """No code is generated: for what is decided before."""
    from graphs import without_inductor

    with without_inductor():
        yield


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Each test starts with nothing compiled, a fixed seed, and must leave the ambient autocast as it was."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # weights of other tests, and graphs that wait for an optimizer to warn of missing loss scaling
    amp_fx.reset()
    yield
    for device in ("cpu", "cuda"):
        assert not torch.is_autocast_enabled(device), f"the test left torch.autocast({device!r}) on"
    # while it is not zero, autocast keeps its casts of weights: eager code would go on with old ones
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    assert depth == 0, f"the test left {depth} of autocast's regions open"
