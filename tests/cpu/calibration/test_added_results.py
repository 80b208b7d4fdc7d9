"""Results of convolutions that are added, rounded to uint8 as well: onnxruntime convolves in integers only then."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import CalibratedPlan, Calibration, PlanError
from amp_fx.precision.plans.sensitivity import ADDED, INPUT, MEASURED, as_number
from amp_fx.precision.policy.levels import FORWARD
from support.models.calibrated import calibrated, compiled, wrong
from support.models.small import Parts

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
#: calls in the order of the program: of these the results are added
SUMMED = [False, False, True, False, True, True]


def residual() -> Any:
    """A stem, a block that adds its input, and one that adds another convolution of it."""

    def program(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x).relu()
        h = m.norm_b(m.b(m.norm_a(m.a(x)).relu()))
        h += x
        x = h.relu()
        x = (m.norm_d(m.d(m.c(x).relu())) + m.short(x)).relu()
        return m.head(m.last(x).relu().mean((2, 3)))

    torch.manual_seed(0)
    convolutions = {name: nn.Conv2d(16, 16, 3, padding=1, bias=name == "c") for name in "abcd"}
    norms = {f"norm_{name}": nn.BatchNorm2d(16) for name in "abd"}
    ends = {"stem": nn.Conv2d(3, 16, 3), "short": nn.Conv2d(16, 16, 1), "last": nn.Conv2d(16, 16, 1)}
    net = Parts(program, **convolutions, **norms, **ends, head=nn.Linear(16, 8))
    net(X)
    return net.eval()


@pytest.fixture(scope="module")
def net() -> Any:
    return residual()


@pytest.fixture(scope="module")
def found(net: Any) -> Calibration:
    return calibrated(net, [X], dtype="float16")


@pytest.fixture(scope="module")
def plan(found: Calibration) -> CalibratedPlan:
    return found.plan(budget=100, engine="onnxruntime")


def _convolutions(plan: CalibratedPlan) -> list[Any]:
    return [row for row in plan.plans[0].nodes if row.op == "conv2d"]


def test_what_rounding_a_result_adds_is_measured_and_is_in_plans_for_onnxruntime_alone(
    found: Calibration, plan: CalibratedPlan
) -> None:
    (graph,) = found.sensitivity.graphs
    calls = [call for call in graph.calls if call.name.startswith("conv2d")]
    assert [ADDED in call.scales for call in calls] == [*SUMMED, False]
    for call in calls:
        assert (ADDED in call.roles[FORWARD]) == (ADDED in call.scales)
        # the result is rounded to as many steps as the value
        assert as_number(call.roles[FORWARD].get(ADDED, 0.0)) < 100 * as_number(call.roles[FORWARD][MEASURED])
    assert [ADDED in row.scales for row in _convolutions(plan)] == [*SUMMED, False]
    for engine in (None, "openvino"):
        other = found.plan(budget=100, verify=False, engine=engine)
        assert all(row.scales.keys() == {INPUT} for row in _convolutions(other))
        assert other.point.error < plan.point.error
    # the prediction follows what a plan says
    assert found.predict(plan) == pytest.approx(plan.point.error)


def test_a_compiled_step_rounds_as_the_plan_says(net: Any, plan: CalibratedPlan) -> None:
    assert plan.measured is not None
    assert 0.5 * plan.point.error < plan.measured < 1.3 * plan.point.error
    with torch.inference_mode():
        got = compiled(net, plan, dtype="float16")(X)
    assert wrong(got, net, X) == pytest.approx(plan.measured, rel=0.1)


def test_onnxruntime_convolves_in_integers_and_adds_bytes(
    net: Any, plan: CalibratedPlan, tmp_path: Path
) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    program = amp_fx.export_onnx(net, (X,), path, plan=plan, engine="onnxruntime")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "run.onnx"), 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ops = Counter(node.op_type for node in onnx.load(tmp_path / "run.onnx").graph.node)
    # the result of the last one is rounded by nobody
    assert [ops["QLinearConv"], sum(count for op, count in ops.items() if op.endswith("Conv"))] == [6, 7]
    assert ops["QLinearAdd"] == 2
    got = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0])
    with torch.no_grad():
        own = wrong(program.module()(X), net, X)
    assert wrong(got, net, X) < 1.1 * own
    assert own < 1.3 * plan.point.error


@pytest.mark.usefixtures("without_inductor")
def test_a_plan_with_a_scale_of_a_result_that_is_none_is_refused(net: Any, found: Calibration) -> None:
    plan = found.plan(budget=100, verify=False, engine="onnxruntime")
    row = next(row for row in _convolutions(plan) if ADDED in row.scales)
    row.scales[ADDED] = (0.0, 3)
    with pytest.raises(PlanError, match=r"'result': \(a positive number"), torch.no_grad():
        amp_fx.export(net, (X,), plan=plan, dtype="float16")
