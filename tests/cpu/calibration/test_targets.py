"""Calibration on the CPU, plans for a GPU that is not there."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx import Calibration, Plan
from amp_fx.instruments.targets import find_target
from amp_fx.instruments.targets.process import TargetProcess
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.sensitivity import Sensitivity
from amp_fx.precision.policy.levels import ROLES
from support.checks.below_16_bits import MLP
from support.models.small import GPT, Parts, tokens, train
from support.tracing.captured_graphs import known


@pytest.fixture
def _without_code() -> None:
    """Op by op, a plan's harmless roundings, which fused kernels leave out, are more than one test here allows."""


BATCH = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))

Pair = tuple[Calibration, Calibration]


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Here and there: ``softplus`` is on CUDA's fp32 list, not on that of the CPU."""
    torch.manual_seed(0)
    layers = {"up": nn.Linear(64, 256), "down": nn.Linear(256, 64)}
    net = Parts(lambda m, x: m.down(F.softplus(m.up(x))).square().mean(), **layers)
    return amp_fx.calibrate(net, BATCH, profile="off"), amp_fx.calibrate(net, BATCH, target="cuda:h100")


def dtypes(plan: Plan) -> dict[str, torch.dtype | None]:
    return {row.name: row.dtype for row in plan.nodes}


def explained(model: nn.Module, *batch: Tensor, target: str = "cuda:h100", **options: Any) -> amp_fx.Report:
    return amp_fx.explain(model, *batch, target=target, options={"strict": True, **options})


def test_a_targets_op_lists_and_rates_count(pair: Pair) -> None:
    here, there = (known(cal, "autocast") for cal in pair)
    assert dtypes(here.plan.plans[0])["softplus"] is torch.bfloat16
    assert dtypes(there.plan.plans[0])["softplus"] is torch.float32
    assert here.time is None
    assert there.time is not None
    # no kernel of an H100 is started in less
    assert there.time > find_target("cuda:h100").profile.launch
    assert there.plan.plans[0].profile == ""
    assert pair[1].plan(verify=False).plans[0].profile == find_target("cuda:h100").profile.name


def test_what_was_measured_is_the_same_wherever_it_is_planned_for(pair: Pair) -> None:
    here, there = ({row.name: row for row in cal.sensitivity.graphs[0].calls} for cal in pair)
    assert here == there


def charged(cal: Calibration) -> set[tuple[str, str]]:
    """(call, operand) whose gradient is rounded on the way back."""
    terms = [term for part in cal.cuts.parts for term in part.priced.terms]
    return {(term.call, term.slot) for term in terms if term.backward and term.slot}


def test_gradients_of_weights_that_leave_their_matmul_in_fp32_are_not_charged(pair: Pair) -> None:
    weights = {("linear", "weight"), ("linear_1", "weight")}
    assert weights <= charged(pair[0])
    assert not weights & charged(pair[1])
    assert ("linear_1", "input") in charged(pair[1])


def test_gradients_of_a_weight_with_two_readers_are_added_and_charged() -> None:
    layer = nn.Linear(64, 64, bias=False)
    tied = Parts(lambda m, x: m.layer(torch.tanh(m.layer(x))).square().mean(), layer=layer)
    cal = amp_fx.calibrate(tied, BATCH, target="cuda:h100")
    assert {("linear", "weight"), ("linear_1", "weight")} <= charged(cal)


@pytest.fixture(scope="module")
def gpt() -> tuple[nn.Module, Calibration]:
    torch.manual_seed(0)
    model = train(GPT(layers=1), tokens, 5)
    return model, amp_fx.calibrate(model, tokens(0), target="cuda:h100")


@pytest.mark.slow
def test_a_plan_for_a_target_is_replayed_there_and_its_sensitivity_serves_explain(
    gpt: tuple[nn.Module, Calibration], tmp_path: Path
) -> None:
    (model, cal), batch = gpt, tokens(0)
    plan = cal.plan(1.0, verify=False)
    plan.save(tmp_path / "plan.json")
    cal.save(tmp_path / "sensitivity.json")
    options = {"plan": str(tmp_path / "plan.json"), "strict": True}
    report = amp_fx.explain(model, *batch, target="cuda:h100", options=options, sensitivity=cal)
    assert dtypes(report.plan) == dtypes(plan.plans[0])
    assert report.sensitivities[report.plan.graph]
    # the same file under a policy: the cut is solved in the process that compiles
    policy = {"base": "autocast", "sensitivity": str(tmp_path / "sensitivity.json"), "budget": 1.0}
    assert dtypes(explained(model, *batch, policy=policy).plan) == dtypes(plan.plans[0])
    assert Sensitivity.load(tmp_path / "sensitivity.json") == cal.sensitivity


def indexing(m: Any, x: Tensor) -> Tensor:
    """What Python does to tensors, literal numbers, and a norm whose kernel torch looks for on the device."""
    q, k, v = m.qkv(x).reshape(4, 8, 3, 2, 16).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 8, 32)
    y = m.norm(y)[torch.tensor([0, 2, 1])] * torch.tensor([0.5, 2.0] * 16)
    y[:, 0] = 0
    return m.head(y[..., 2:, :] * torch.tensor(1.5)).square().mean() + y[:, 1].mean()


@pytest.mark.slow
def test_programs_that_index_and_unpack_are_planned_for_a_target() -> None:
    parts = {"qkv": nn.Linear(32, 96), "norm": nn.BatchNorm1d(8), "head": nn.Linear(32, 8)}
    model, x = Parts(indexing, **parts), torch.randn(4, 8, 32)
    cal = amp_fx.calibrate(model, x, target="cuda:h100")
    plan = cal.plan(error=1e-12)
    # a compiled step on the CPU, which follows the target's plan
    assert plan.measured is not None
    assert plan.measured < 1e-5
    assert cal.predict(plan) == 0
    autocast = known(cal, "autocast")
    assert autocast.error > 1e-4
    assert dtypes(explained(model, x, plan=autocast.plan.plans).plan) == dtypes(autocast.plan.plans[0])


def test_a_graph_with_other_calls_on_the_target_is_refused() -> None:
    model = Parts(lambda m, x: m.cell(x)[0].square().mean(), cell=nn.LSTMCell(16, 16))
    with pytest.raises(amp_fx.TargetError, match="target"):
        amp_fx.calibrate(model, torch.randn(4, 16), target="cuda:h100")


@pytest.mark.slow
def test_the_process_of_a_target_ends_with_what_uses_it() -> None:
    process = TargetProcess("cuda:h100")
    system = process.child
    assert system.poll() is None
    del process
    gc.collect()
    assert system.poll() is not None


@pytest.mark.slow
def test_a_plan_with_fp8_for_a_target_is_followed_there() -> None:
    model, x = MLP(16, 4096, 4096, 16), torch.randn(2048, 16)
    cal = amp_fx.calibrate(model, x, policy="fp8", target="cuda:h100")
    # what an H100 is best at
    assert cal.sensitivity.level == "rowwise"
    autocast, fp8 = known(cal, "autocast"), known(cal, "fp8")
    assert autocast.time is not None
    assert fp8.time is not None
    assert fp8.time < autocast.time
    plan = cal.plan(10, verify=False)
    # the first contracts too little
    placed = [(*row.levels_below,) for row in plan.plans[0].nodes if row.op == "linear"]
    assert placed == [(), ROLES, ()]
    report = explained(model, x, plan=plan.plans)
    assert [(*row.levels_below,) for row in report.plan.nodes if row.op == "linear"] == placed
    assert report.shares()["float8_e4m3fn"]["flops"] > 0.95
    with pytest.raises(amp_fx.AmpFxError, match=r"cuda sm_80 \(A100\)"):
        explained(model, x, target="cuda:a100", plan=plan.plans)
    with pytest.raises(amp_fx.OptionsError, match=r"cuda sm_80 \(A100\) .*fp8"):
        amp_fx.calibrate(model, x, policy="fp8", target="cuda:a100")


def wide(plan: Plan) -> set[str]:
    return {row.name for row in plan.nodes if row.is_because(ReasonKind.WIDE_RESULT)}


@pytest.mark.slow
@pytest.mark.usefixtures("op_by_op")
def test_a_budget_buys_results_in_fp32_where_they_are_cheap(gpt: Any, tmp_path: Path) -> None:
    (model, cal), batch = gpt, tokens(0)
    plans = ((budget, cal.plan(budget, minimise="bytes", verify=False)) for budget in (1.0, 0.8, 0.6, 0.4))
    budget, plan = next((budget, plan) for budget, plan in plans if wide(plan.plans[0]))
    assert plan.point.error <= budget * cal.autocast_error
    # saved, loaded, followed; and by the process that compiles for the target
    plan.save(tmp_path / "plan.json")
    assert cal.predict(tmp_path / "plan.json") == pytest.approx(plan.point.error)
    assert wide(explained(model, *batch, plan=plan).plan) == wide(plan.plans[0])
    # a CPU has no such kernel: what is checked there is more exact
    checked = cal.plan(budget, minimise="bytes")
    assert checked.measured is not None
    assert checked.measured < 1.3 * plan.point.error
