"""Scales that are measured for int8: which they are, and what they add to the error."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import CalibratedPlan, Calibration
from amp_fx.instruments.calibration.ranges import Ranges, extremes, fitted, requantised, sampled
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.sensitivity import ADDED, INPUT, MEASURED, MEASURED_WEIGHT, as_number
from support.models.calibrated import PROFILE, calibrated, compiled, images, wrong
from support.models.small import Parts
from support.tracing.captured_graphs import without_inductor


def test_a_range_has_zero_in_it_and_one_sided_values_have_all_bytes() -> None:
    x = torch.rand(4096)
    scale, zero = fitted(x, 0.0, 1.0)
    assert zero == 0
    assert math.isclose(scale, 1 / 255)
    assert fitted(-x, -1.0, 0.0)[1] == 255
    assert requantised(torch.zeros(3), fitted(x - 0.3, -0.3, 0.7)).tolist() == [0.0] * 3


def test_few_values_that_are_far_out_saturate_where_that_adds_less() -> None:
    x = torch.randn(8192)
    low, high = (each.item() for each in x.aminmax())
    by_extremes = (high - low) / 255
    assert math.isclose(fitted(x, low, high)[0], by_extremes, rel_tol=0.3)
    scale, _ = fitted(x, low, 10 * high)
    assert scale < 0.5 * (10 * high - low) / 255
    # not where they are many, or far enough to count
    x[::16] *= 40
    assert fitted(x, *(each.item() for each in x.aminmax()))[0] > 10 * by_extremes


@pytest.mark.parametrize("share", [0.0, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("map_", [torch.relu, nn.functional.gelu, torch.exp, lambda x: x - 0.3, torch.round])
def test_no_range_of_those_that_are_tried_has_a_smaller_error(
    map_: Callable[[Tensor], Tensor], share: float
) -> None:
    """``share`` of the values are far out."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(40_000, generator=g)
    x = map_(torch.where(torch.rand(40_000, generator=g) < share, 8 * x, x).clamp(-20, 20))
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)

    def far(by: tuple[float, int]) -> float:
        return (requantised(x, by) - x).square().sum().item()

    tenths = [each / 10 for each in range(1, 11)]
    ranges = [(low * a, high * b) for a in tenths for b in tenths]
    scales = [((b - a) / 255, a) for a, b in ranges]
    assert far(fitted(x, low, high)) <= min(far((scale, round(-a / scale))) for scale, a in scales) * 1.001


def test_what_is_kept_of_a_value_is_a_copy() -> None:
    ranges, x = Ranges(), torch.randn(64, 16)
    ranges.observe((0, "call"), x)
    [before] = ranges.scales().values()
    x.mul_(1000)
    assert [*ranges.scales().values()] == [before]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_a_value_is_sampled_in_the_order_of_its_dimensions_however_it_lies(order: tuple[int, ...]) -> None:
    x = torch.randn(4, 9, 32, 8).permute(order)
    assert extremes(x) == (x.min().item(), x.max().item())
    for stride in (1, 7):
        assert torch.equal(sampled(x, stride), x.flatten()[::stride])


def test_every_linear_and_convolution_has_a_scale_and_what_it_adds(cal: Calibration) -> None:
    [graph] = cal.sensitivity.graphs
    rows = {graph.outline.node(call.name).module_path: call for call in graph.calls if call.scales}
    assert list(rows) == ["stem", "depth", "point", "up", "down", "head"]
    assert all(call.scales[INPUT][1] == 0 for path, call in rows.items() if path in ("depth", "point"))
    for path, call in rows.items():
        # its largest channels may be divided in other ways
        operands = set(call.roles["forward"]) - {MEASURED_WEIGHT}
        more = {INPUT} if path in ("up", "down", "head") else {ADDED} if path == "point" else set()
        assert operands == {MEASURED, "weight"} | more


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("budget", [1.5, 100])
def test_the_error_on_other_batches_is_the_predicted_one(
    model: Any, cal: Calibration, budget: float, tmp_path: Path
) -> None:
    plan = cal.plan(budget=budget, verify=False)
    rows = [row for row in plan.plans[0].nodes if row.op in ("linear", "conv2d")]
    static = [row.module_path for row in rows if row.scales]
    assert static == ["stem", "depth", "point", "up", "down"] if budget == 100 else 0 < len(static) < 5
    assert math.isclose(cal.predict(plan), plan.point.error)
    plan.save(tmp_path / "plan.json")
    x = images()
    with torch.inference_mode():
        got = compiled(model, tmp_path / "plan.json")(x)
    assert plan.point.error / 1.3 < wrong(got, model, x) < plan.point.error * 1.3


def test_who_reads_what_the_product_before_does_not_write_waits_for_a_kernel() -> None:
    def scaled(model: nn.Module, size: int, *rules: Any) -> list[str]:
        given = {"policy": {"base": "int8", "rules": rules}, "profile": replace(PROFILE, launch=23e-6)}
        plan = calibrated(model.eval(), torch.randn(64, size), **given).plan(budget=100, verify=False)
        return [row.module_path for row in plan.plans[0].nodes if row.scales]

    # 8.5 launches are gained, and a call with a measured scale takes 8; a norm rounds by itself
    for before in (nn.LayerNorm(16), nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU())):
        model = nn.Sequential(before, nn.Linear(16, 256), nn.Linear(256, 16))
        found = scaled(model, 16, {"module": "0", "precision": "low"})
        assert found == ["1"] * isinstance(before, nn.LayerNorm)
    # 7.5 are enough beside another product that reads bytes
    parts = {"up": nn.Linear(16, 256), "one": nn.Linear(256, 16), "other": nn.Linear(256, 14)}
    two = Parts(
        lambda m, x: m.head(torch.cat([m.one(y := m.up(x)), m.other(y)], -1)), head=nn.Linear(30, 8), **parts
    )
    assert scaled(two, 16) == ["up", "one", "other"]
    assert scaled(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 14), nn.Linear(14, 8)), 256) == []


def test_what_is_added_as_it_is_convolved_costs_what_both_readings_do() -> None:
    parts = {"stem": nn.Conv2d(3, 16, 3), "point": nn.Conv2d(16, 16, 1), "head": nn.Conv2d(16, 8, 1)}
    net: Any = Parts(lambda m, x: m.head((y := m.stem(x).relu()) + 0.01 * m.point(y)), **parts)
    batch = images()
    [graph] = calibrated(net, batch).sensitivity.graphs
    [row] = [call for call in graph.calls if graph.outline.node(call.name).module_path == "point"]
    with torch.no_grad():
        x = net.stem(batch).relu()
        rounded = requantised(x, row.scales[INPUT])
        want, got = (net.head(each + 0.01 * net.point(each)) for each in (x, rounded))
    added = row.roles["forward"][MEASURED]
    assert added is not None
    assert math.isclose(added, ((got - want).norm() / want.norm()) ** 2, rel_tol=0.3)


@pytest.mark.parametrize("spoil", [0.0, math.inf, math.nan, 1e-35])
def test_a_value_that_is_zero_or_not_finite_has_no_scale_and_that_is_said(spoil: float, caplog: Any) -> None:
    ranges = Ranges()
    for value in (spoil * torch.ones(3), torch.zeros(3) if spoil < 1 else torch.randn(3)):
        ranges.observe((0, "spoiled"), value)
        ranges.observe((0, "sound"), torch.randn(3))
    assert list(ranges.scales()) == [(0, "sound")]
    assert "spoiled" in caplog.text
    assert "sound" not in caplog.text


def test_calls_of_equal_names_in_two_graphs_have_scales_of_their_own() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        torch._dynamo.graph_break()
        return m.second(100 * x)

    broken = Parts(program, first=nn.Linear(32, 32), second=nn.Linear(32, 32))
    policy = {"base": "int8", "rules": [{"op": "linear", "precision": "int8"}]}
    cal = calibrated(broken, torch.randn(8, 32), policy=policy)
    plan = cal.plan(budget=100, verify=False)
    scales = [row.scales[INPUT][0] for each in plan.plans for row in each.nodes if row.op == "linear"]
    assert scales[1] > 20 * scales[0]
    plan.plans[1].nodes = [replace(row, scales={}) for row in plan.plans[1].nodes]
    # the second finds its scales in each call, the first does not
    rows = {each.outline.graph: each.calls for each in cal.sensitivity.graphs}
    calls = [next(call for call in rows[each.graph] if call.scales) for each in plan.plans]
    found = [call.operands("forward", measured=not at) for at, call in enumerate(calls)]
    bare = ([replace(row, levels={}, scales={}) for row in each.nodes] for each in plan.plans)
    low = cal.predict([replace(each, nodes=rows) for each, rows in zip(plan.plans, bare, strict=True)])
    # they are rounded at once from fp32
    slots = {MEASURED_WEIGHT: "weight", MEASURED: "input"}
    added = sum(
        as_number(value) - as_number(call.reads[slots.get(operand, operand)].value)
        for call, operands in zip(calls, found, strict=True)
        for operand, value in operands.items()
    )
    assert math.isclose(cal.predict(plan.plans) ** 2, low**2 + added, rel_tol=1e-6)


def test_ranges_and_errors_are_of_all_batches_whatever_their_sizes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    batches = torch.randn(16, 32), 100 * torch.randn(12, 32)
    cal = calibrated(net, [*batches])
    # the seeds of the two batches
    alone = [calibrated(net, batch, seed=seed) for seed, batch in enumerate(batches)]
    assert math.isclose(
        cal.autocast_error**2, sum(each.autocast_error**2 for each in alone) / 2, rel_tol=1e-6
    )
    plan = cal.plan(error=10.0, verify=False)
    [scale], [other] = ([row.scales[INPUT] for row in each.nodes if row.scales] for each in plan.plans)
    assert scale == other
    with torch.inference_mode():
        for rows in (16, 14, 12):
            x = 100 * torch.randn(rows, 32)
            # few batches: a value may lie beyond what they had
            assert wrong(compiled(net, plan)(x), net, x) < 0.1


class Turn(nn.Module):
    """Its number makes a graph of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.up, self.down = number, nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x * 100**self.number)
        return self.down(y.relu())


def test_equal_blocks_that_are_compiled_apart_have_their_own_scales_whatever_was_compiled_before(
    tmp_path: Path,
) -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x

    torch.manual_seed(0)
    net = Parts(program, blocks=nn.ModuleList([Turn(0), Turn(1)])).eval()
    found, x = calibrated(net, torch.randn(16, 32)).plan(error=10.0, verify=False), torch.randn(16, 32)
    found.save(tmp_path / "plan.json")
    scales = [row.scales[INPUT][0] for each in found.plans for row in each.nodes if row.scales]
    assert len(scales) == 2
    assert max(scales) > 10 * min(scales)
    run = compiled(net, tmp_path / "plan.json")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    with torch.inference_mode():
        assert wrong(run(x), net, x) < 0.1


@pytest.mark.quick_rows("3-2-0")
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 2, 0), (2, 2, 0), (3, 2, 1), (4, 3, 1), (5, 4, 2)]
)
def test_a_pool_whose_sizes_are_rounded_up_has_them_when_it_is_compiled(
    kernel: int, stride: int, padding: int
) -> None:
    pool = nn.MaxPool2d(kernel, stride, padding, ceil_mode=True)
    last = nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 1)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.PReLU(16), pool, *last).eval()
    x = torch.randn(2, 3, 20, 24)
    plan = calibrated(net, x).plan(budget=100, verify=False)
    assert [row for row in plan.plans[0].nodes if row.op == "conv2d"][1].scales
    with torch.inference_mode():
        found = wrong(compiled(net, plan)(x), net, x)
    assert plan.point.error / 1.3 < found < plan.point.error * 1.3


def test_a_convolution_with_a_weight_that_was_turned_stays_low(caplog: pytest.LogCaptureFixture) -> None:
    parts = {"kernel": nn.Conv2d(8, 8, 3), "head": nn.Linear(8, 4)}
    turned = Parts(lambda m, x: m.head(nn.functional.conv2d(x, m.kernel.weight.mT).flatten(2).mT), **parts)
    [plan] = calibrated(turned, torch.randn(2, 8, 6, 6)).plan(budget=100, verify=False).plans
    assert [row.levels for row in plan.nodes if row.op == "conv2d"] == [{}]


def test_a_single_row_has_no_measured_scales() -> None:
    linears = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    (plan,) = calibrated(linears, torch.randn(1, 64)).plan(budget=100, verify=False).plans
    assert {name for row in plan.nodes for name in row.levels.values()} == {"int8"}
    assert not any(row.scales for row in plan.nodes)


@pytest.mark.quick_rows("freeze-None")
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(
    ("weights", "dynamic"),
    [("auto", None), ("cache", None), ("freeze", None), ("stored low", None), ("auto", True)],
)
def test_batches_of_other_sizes_are_multiplied_by_the_same_scales(
    model: Any, plan: CalibratedPlan, weights: str, dynamic: bool | None
) -> None:
    net = copy.deepcopy(model)
    if weights == "stored low":
        amp_fx.store_low(net, images(), options={"policy": "int8"})
        weights = "auto"
    options: Any = {"plan": plan, "weights": weights, "strict": True}
    run = torch.compile(net, backend="amp_fx", options=options, dynamic=dynamic)
    with torch.inference_mode():
        for x in (images(4), images(6), images(9)):
            assert wrong(run(x), model, x) < 0.02


@pytest.mark.usefixtures("op_by_op")
def test_a_number_of_rows_that_only_the_data_know_is_priced_and_may_be_none() -> None:
    parts = {"up": nn.Linear(16, 64), "down": nn.Linear(64, 16)}
    model, x = Parts(lambda m, x: m.down(m.up(x[x[:, 0] > 0])), **parts).eval(), torch.randn(32, 16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        plan = calibrated(model, x).plan(budget=100, verify=False)
        assert [[*row.levels.values()] for row in plan.plans[0].nodes if row.op == "linear"] == [["int8"], []]
        run = compiled(model, plan)
        for rows in (x, -x.abs()):
            with torch.inference_mode():
                torch.testing.assert_close(run(rows), model(rows), rtol=0.05, atol=0.05)


def test_products_by_measured_scales_are_rounded_to_fp16_where_that_is_the_low_dtype() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(32, 64)
    plan = calibrated(model, x, dtype="float16").plan(budget=100, verify=False)
    options = {"plan": plan, "dtype": "float16", "strict": True}
    with without_inductor(), torch.inference_mode(), amp_fx.record() as recording:
        compiled = torch.compile(model, backend="amp_fx", options=options)
        assert 1e-3 < wrong(compiled(x), model, x) < 0.03
    assert any(node.levels_below for node in recording.plans[0].nodes)


@pytest.mark.usefixtures("without_inductor")
def test_a_report_says_why_a_convolution_stays_low(model: Any, plan: CalibratedPlan) -> None:
    def why(**options: Any) -> set[ReasonKind]:
        torch._dynamo.reset()
        with torch.inference_mode():
            [plan] = amp_fx.explain(model, images(), options=options).plans
        return {reason.kind for row in plan.nodes if row.op == "conv2d" for reason in row.reasons}

    assert ReasonKind.NO_SCALE in why(policy="int8", profile="off")
    assert ReasonKind.LEVEL_PLANNED in why(plan=plan)
    assert ReasonKind.NO_COPY in why(plan=plan, weights="cast")
