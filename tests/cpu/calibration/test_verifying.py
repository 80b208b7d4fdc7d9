"""How plans are checked: by steps that are equal or not at all, in fp8 as it is emulated, in each state of a model."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx import Calibration, OptionsError, PlanError
from amp_fx.compiler.settings import Options
from amp_fx.instruments.calibration.verifying import Verifier
from amp_fx.instruments.step import Step, relative_error
from amp_fx.precision.plans.sensitivity import CallSensitivity, as_number
from support.checks.below_16_bits import FP8_CPU, MLP, emulating_blocks, error, exact_gradients, gradients
from support.models.small import Parts

Map = Callable[[Tensor], Tensor]


def net(hidden: Map = lambda h: h, given: Map = lambda x: x) -> Any:
    layers = {"up": nn.Linear(32, 64), "down": nn.Linear(64, 8)}
    return Parts(lambda m, x: m.down(hidden(F.gelu(m.up(given(x))))), **layers)


def noisy(h: Tensor) -> Tensor:
    """Draws random numbers in the graph."""
    return F.dropout(h, 0.3) + 0.1 * torch.randn_like(h)


def noisy_loss(out: Tensor) -> Tensor:
    """Draws from every generator of the process."""
    target = torch.randn_like(out) + torch.from_numpy(np.random.randn(*out.shape)).to(out)
    return (out * (1 + random.random()) - target).square().mean()


def square(out: Tensor) -> Tensor:
    return out.square().mean()


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]  # a tuple


def test_dropout_and_random_losses_are_the_same_in_all_steps_that_are_compared() -> None:
    model = net(noisy)
    before = generators()
    cal = amp_fx.calibrate(model, [X, X + 1], noisy_loss, profile="off")
    plan = cal.plan()
    assert generators() == before
    assert plan.measured is not None
    assert not plan.unverified
    assert plan.point.error == pytest.approx(plan.measured, rel=0.25)
    # what is drawn in between changes nothing
    random.random()
    torch.rand(1)
    assert cal.plan().measured == pytest.approx(plan.measured, rel=1e-6)


def test_a_loss_that_differs_from_run_to_run_is_told_and_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator()

    def loss(out: Tensor) -> Tensor:
        return square(out - torch.randn(out.shape, generator=generator))

    cal = amp_fx.calibrate(net(), X, loss, profile="off")
    monkeypatch.setattr(Verifier, "state_error", lambda *_: pytest.fail("something is compiled"))
    plan = cal.plan()
    assert plan.measured is None
    assert plan.unverified
    assert plan.unverified in " ".join(str(plan).split())
    assert plan.unverified in caplog.text
    # what was predicted holds for the step that was measured
    assert 0 < plan.point.error <= cal.autocast_error * (1 + 1e-6)


def test_compiled_code_that_differs_from_the_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cal = amp_fx.calibrate(net(), X, square, profile="off")
    found = mock.Mock(return_value=0.6)
    monkeypatch.setattr(Verifier, "state_error", found)
    plan = cal.plan()
    assert plan.measured is None
    assert "6.0e-01" in plan.unverified
    assert not plan.tried
    assert found.call_count == 2


def test_a_program_that_does_not_run_in_fp64_is_judged_in_fp32() -> None:
    def own(x: Tensor) -> Tensor:
        h = torch.zeros(64, 32)
        h[:32] = x[:32]
        return h

    step = Step(net(given=own), ((X,), {}), square)
    with pytest.raises(RuntimeError, match="dtype"):
        step.exact()
    ((judged,),) = Verifier([step], Options(), 1.0).states
    assert (judged.exact, judged.apart) == (None, 0)


def test_scales_of_blocks_are_measured_and_cannot_be_checked_on_a_cpu() -> None:
    model, x = MLP(32, 64, 64, 16), torch.randn(64, 32)
    cal = amp_fx.calibrate(model, x, policy="fp8", fp8="mxfp8", profile=FP8_CPU)
    with pytest.raises(OptionsError, match=r"cpu .*'mxfp8', .*verify=False"):
        cal.plan(100)
    plan = cal.plan(100, verify=False)
    assert sum(len(row.levels_below) for row in plan.plans[0].nodes) == 5
    with emulating_blocks():
        found = gradients(model, [x], {"plan": plan.plans, "strict": True}, generate=True)
    found = error(found, exact_gradients(model, [x]))
    assert plan.point.error == pytest.approx(found, rel=0.25)


@pytest.mark.slow
def test_the_check_of_a_plan_compiles_its_fp8() -> None:
    model, x = MLP(32, 64, 64, 16), torch.randn(64, 32)
    for profile in ("off", FP8_CPU):
        cal = amp_fx.calibrate(model, x, policy="fp8", profile=profile)
        plan = cal.plan(100)
        assert "5 matmuls below 16 bits" in str(plan)
        assert plan.measured is not None
        assert plan.point.error == pytest.approx(plan.measured, rel=0.2)
        assert plan.measured > 5 * cal.autocast_error


# --- several states of one model ---


def two_layers(first: float, second: float) -> nn.Module:
    """Its first layer is hard in one state, its second in the other."""

    def program(m: Any, x: Tensor) -> Tensor:
        h = m.up(x)
        h = m.down(torch.tanh(h - h.mean(0)))
        return torch.tanh(h - h.mean(0)).square().mean()

    torch.manual_seed(0)
    model: Any = Parts(program, up=nn.Linear(32, 16), down=nn.Linear(16, 16))
    nn.init.constant_(model.up.bias, first)
    nn.init.constant_(model.down.bias, second)
    return model


States = tuple[Calibration, Calibration]


@pytest.fixture(scope="module")
def states() -> States:
    early, late = (amp_fx.calibrate(two_layers(*to), X, profile="off") for to in ((64, 0), (0, 64)))
    return early, late


def rows(cal: Calibration) -> dict[str, CallSensitivity]:
    return {row.name: row for graph in cal.sensitivity.graphs for row in graph.calls}


def low_linears(plan: amp_fx.CalibratedPlan) -> list[str]:
    return [row.name for row in plan.plans[0].nodes if row.op == "linear" and row.dtype is torch.bfloat16]


def test_of_each_rounding_the_largest_sensitivity_counts(states: States) -> None:
    worst = Calibration.worst(*states)
    early, late, both = map(rows, (*states, worst))
    assert early.keys() == late.keys() == both.keys()
    for name, row in both.items():
        parts: list[tuple[Any, Any, Any]] = [(early[name], late[name], row)]
        parts += [(early[name].reads[slot], late[name].reads[slot], read) for slot, read in row.reads.items()]
        for what in ("value", "gradient"):
            numbers = [[as_number(getattr(each, what)) for each in part] for part in parts]
            assert all(larger == max(one, other) for one, other, larger in numbers)
    assert (worst.sensitivity.states, worst.sensitivity.batches) == (2, 2)
    assert "the worst of 2 states" in str(worst)


def test_a_plan_for_several_states_keeps_its_budget_in_each(states: States) -> None:
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
    states: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = mock.Mock(side_effect=(1e-3, 2e-3, 3e-3))
    monkeypatch.setattr(Verifier, "state_error", found)
    plan = Calibration.worst(*states).plan(error=1.0)
    assert found.call_count == 2
    assert plan.measured == 2e-3
    assert Verifier([Step(net(), ((X,), {}), square)] * 2, Options(), 1.0).error([]) == 3e-3


def test_states_of_different_programs_are_told_apart(states: States) -> None:
    other = amp_fx.calibrate(nn.Linear(32, 16), X, square, profile="off")
    with pytest.raises(PlanError):
        Calibration.worst(states[0], other)
    with pytest.raises(OptionsError):
        Calibration.worst()


def test_only_the_first_batch_runs_in_fp64_where_fp32_is_far_surer_than_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, exact = [], Step.exact
    monkeypatch.setattr(Step, "exact", lambda step: runs.append(step) or exact(step))
    model, batches = net().eval(), [(torch.randn(64, 32),) for _ in range(3)]
    plan = amp_fx.calibrate(model, batches, of="outputs", profile="off").plan()
    assert len(runs) == 1
    options = {"plan": plan.plans, "weights": "cache"}
    compiled = torch.compile(model, backend="amp_fx", options=options)
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        errors = [relative_error({"y": compiled(x)}, {"y": wide(x.double())}) for (x,) in batches]
    found = math.sqrt(sum(each**2 for each in errors) / 3)
    assert plan.measured == pytest.approx(found, rel=1e-3)


def test_each_batch_runs_in_fp64_where_the_plan_is_as_sure_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, exact = [], Step.exact
    monkeypatch.setattr(Step, "exact", lambda step: runs.append(step) or exact(step))
    batches = [(torch.randn(64, 32),) for _ in range(3)]
    plan = amp_fx.calibrate(net().eval(), batches, of="outputs", profile="off").plan(error=1e-6)
    assert len(runs) == 3
    assert plan.measured is not None
    assert plan.measured < 1e-6


def test_numbers_that_a_later_batch_alone_draws_are_the_same_in_compiled_code() -> None:
    model = net(given=lambda x: x if len(x) == 64 else F.dropout(x, 0.3))
    batches = [(torch.randn(rows, 32),) for rows in (64, 48)]
    plan = amp_fx.calibrate(model, batches, of="outputs", profile="off").plan()
    assert plan.measured == pytest.approx(plan.point.error, rel=0.35)
