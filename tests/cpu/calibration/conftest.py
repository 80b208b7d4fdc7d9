"""Calibrated steps run op by op, but for those of slow tests, which are about code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from graphs import op_by_op


@pytest.fixture(autouse=True)
def _without_code(request: pytest.FixtureRequest) -> Iterator[None]:
    is_slow = request.node.get_closest_marker("slow") is not None
    with contextlib.nullcontext() if is_slow or "code" in request.fixturenames else op_by_op():
        yield


@pytest.fixture
def code() -> None:
    """Steps and calls of the test run as Inductor compiles them."""
