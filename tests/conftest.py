"""What every test needs: fresh compilers and seeds, and GPU tests only where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import amp_fx


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
