"""All tests of targets share a process for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from targets import one_process


@pytest.fixture(autouse=True, scope="module")
def _one_process() -> Iterator[None]:
    with one_process():
        yield
