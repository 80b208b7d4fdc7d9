"""Tests share a process for each target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.programs.target_process import one_process


@pytest.fixture(autouse=True, scope="session")
def _one_process() -> Iterator[None]:
    with one_process():
        yield
