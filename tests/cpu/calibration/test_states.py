"""Several states of one model in one calibration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import Calibration, OptionsError, PlanError
from amp_fx.calibration.verifying import Verifier
from amp_fx.plans.sensitivity import CallSensitivity, as_number
from small_models import Parts

BATCH = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def net(first: float, second: float) -> nn.Module:
    """Its first layer is hard in one state, its second in the other."""

    def program(m: Any, x: Tensor) -> Tensor:
        h = m.up(x)
        h = m.down(torch.tanh(h - h.mean(0)))
        return torch.tanh(h - h.mean(0)).square().mean()

    torch.manual_seed(0)
    layers = {"up": nn.Linear(16, 16), "down": nn.Linear(16, 16)}
    for layer, bias in zip(layers.values(), (first, second), strict=True):
        nn.init.constant_(layer.bias, bias)
    return Parts(program, **layers)


@pytest.fixture(scope="module")
def states() -> tuple[Calibration, Calibration]:
    early, late = (amp_fx.calibrate(net(*biases), BATCH, profile="off") for biases in ((64, 0), (0, 64)))
    return early, late


def rows(cal: Calibration) -> dict[str, CallSensitivity]:
    return {row.name: row for graph in cal.sensitivity.graphs for row in graph.calls}


def low_linears(plan: amp_fx.CalibratedPlan) -> list[str]:
    return [row.name for row in plan.plans[0].nodes if row.op == "linear" and row.dtype is torch.bfloat16]


def test_of_each_rounding_the_largest_sensitivity_counts(states: tuple[Calibration, Calibration]) -> None:
    worst = Calibration.worst(*states)
    early, late, both = map(rows, (*states, worst))
    assert early.keys() == late.keys() == both.keys()
    for name, row in both.items():
        parts: list[tuple[Any, Any, Any]] = [(early[name], late[name], row)]
        parts += [(early[name].reads[slot], late[name].reads[slot], read) for slot, read in row.reads.items()]
        for one, other, larger in parts:
            assert as_number(larger.value) == max(as_number(one.value), as_number(other.value))
            assert as_number(larger.gradient) == max(as_number(one.gradient), as_number(other.gradient))
    assert (worst.sensitivity.states, worst.sensitivity.batches) == (2, 2)
    assert "the worst of 2 states" in str(worst)


def test_a_plan_for_several_states_keeps_its_budget_in_each(states: tuple[Calibration, Calibration]) -> None:
    limit = 0.2 * min(cal.autocast_error for cal in states)
    early, late = (cal.plan(error=limit, verify=False) for cal in states)
    both = Calibration.worst(*states).plan(error=limit, verify=False)
    assert low_linears(early) == ["linear_1"]
    assert low_linears(late) == ["linear"]
    assert low_linears(both) == []
    for cal in states:
        assert cal.predict(both) <= both.point.error <= limit * (1 + 1e-6)
        assert cal.predict(early if cal is states[1] else late) > limit


def test_plans_are_checked_in_each_state_that_is_a_module_of_its_own(
    states: tuple[Calibration, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def error(self: object, rows: object, options: object) -> float:
        seen.append(len(seen))
        return 1e-3 * len(seen)

    monkeypatch.setattr(Verifier, "_error", error)
    plan = Calibration.worst(*states).plan(error=1.0)
    assert seen == [0, 1]
    assert plan.measured == 2e-3
    assert Verifier(states[0]._steps * 2, states[0]._opts, 1.0).error([]) == 3e-3


def test_states_of_different_programs_are_told_apart(states: tuple[Calibration, Calibration]) -> None:
    other = amp_fx.calibrate(nn.Linear(16, 16), BATCH, lambda out: out.square().mean(), profile="off")
    with pytest.raises(PlanError):
        Calibration.worst(states[0], other)
    with pytest.raises(OptionsError):
        Calibration.worst()
