"""Other engines compute what the model does."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks.arms import ARMS, prepare
from benchmarks.workloads import build_workload, linears


# theirs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [arm.name for arm in ARMS.values() if arm.engine])
def test_an_engine_returns_what_the_model_returns(name: str) -> None:
    arm = ARMS[name]
    missing = [library for library in arm.needs if not importlib.util.find_spec(library)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    workload = build_workload("linears", linears, batch=4, width=32, layers=2)
    found = prepare(workload, arm, "inference").forward()
    wanted = workload.model(**workload.batch)
    assert found.dtype is torch.float32
    assert (found - wanted).norm() / wanted.norm() < 0.05
