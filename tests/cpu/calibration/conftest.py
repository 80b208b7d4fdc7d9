"""Calibrated steps run op by op, but for those of slow tests, which are about code; targets have one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from graphs import op_by_op
from targets import one_process


@pytest.fixture(autouse=True)
def _without_code(request: pytest.FixtureRequest) -> Iterator[None]:
    is_slow = request.node.get_closest_marker("slow") is not None
    with contextlib.nullcontext() if is_slow or "code" in request.fixturenames else op_by_op():
        yield


@pytest.fixture
def code() -> None:
    """Steps and calls of the test run as Inductor compiles them."""


@pytest.fixture(autouse=True, scope="module")
def _one_process() -> Iterator[None]:
    with one_process():
        yield
