"""Accelerate keeps its state in singletons: each test starts without. What trainers do with graphs needs no code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _fresh_accelerate(op_by_op: None) -> Iterator[None]:
    # takes seconds, which collecting the tests does not need
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
