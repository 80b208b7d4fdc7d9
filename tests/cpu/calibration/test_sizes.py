"""A plan that was made at one size is used at others, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import amp_fx
from support.checks.below_16_bits import error
from support.models.any_length import SIZED, make
from support.models.calibrated import calibrated
from support.tracing.captured_graphs import DEFAULTS

#: rows and lengths: as calibrated, and others
_MADE, _OTHERS = (2, 6), ((2, 6), (2, 9), (3, 7), (1, 1))


def _plan(name: str, path: Path) -> str:
    """The file of a plan that was made at one size."""
    plan = calibrated(make(name), SIZED[name].inputs(*_MADE), policy="autocast", profile="off").plan(
        budget=1.0, verify=False
    )
    plan.save(file := str(path / "plan.json"))
    return file


def _calls(name: str, plan: Any, dynamic: bool | None = None) -> list[float]:
    """The error of each size, beside fp64; a graph that does not follow the plan is a warning, and so an error."""
    torch._dynamo.reset()
    amp_fx.reset()
    model = make(name)
    run = torch.compile(model, backend="amp_fx", options={**DEFAULTS, "plan": plan}, dynamic=dynamic)
    found = []
    with torch.inference_mode(), amp_fx.record() as recording:
        for sizes in _OTHERS:
            args = SIZED[name].inputs(*sizes)
            wide = make(name).double()(*(a.double() if a.is_floating_point() else a for a in args))
            found.append(error(tree_leaves(run(*args)), tree_leaves(wide)))
    assert not any(each.fallback for each in recording.plans)
    assert {node.dtype for each in recording.plans for node in each.nodes} >= {torch.bfloat16}
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SIZED)
def test_a_plan_of_one_size_serves_others(name: str, dynamic: bool | None, tmp_path: Path) -> None:
    assert max(_calls(name, _plan(name, tmp_path), dynamic)) < 1e-2
