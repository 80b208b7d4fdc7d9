"""Calibrated steps run op by op, but for those of slow tests, which are about code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from amp_fx import CalibratedPlan, Calibration
from support.models.calibrated import calibrated, convnet, images
from support.tracing.captured_graphs import op_by_op


@pytest.fixture(autouse=True)
def _without_code(request: pytest.FixtureRequest) -> Iterator[None]:
    is_slow = request.node.get_closest_marker("slow") is not None
    with contextlib.nullcontext() if is_slow or "code" in request.fixturenames else op_by_op():
        yield


@pytest.fixture
def code() -> None:
    """Steps and calls of the test run as Inductor compiles them."""


@pytest.fixture(scope="module")
def model() -> Any:
    return convnet()


@pytest.fixture(scope="module")
def cal(model: Any) -> Calibration:
    torch.manual_seed(1)
    return calibrated(model, [images() for _ in range(4)])


@pytest.fixture
def plan(cal: Calibration) -> CalibratedPlan:
    """All in int8 that may be."""
    return cal.plan(budget=100, verify=False)
