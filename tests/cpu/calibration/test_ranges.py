"""Scales that are measured for int8: which they are, what they add to the error, and what runs by them."""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import amp_fx
from amp_fx import CalibratedPlan, Calibration
from amp_fx.calibration.ranges import Ranges, fitted, requantised
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.label import Kind
from amp_fx.plans.sensitivity import INPUT, MEASURED
from graphs import without_inductor
from levels import error, exact
from small_models import Parts

#: int8 pays wherever it may run
PROFILE = DeviceProfile(
    "test", "cpu", {"float32": 1e9, "bfloat16": 2e9, "float16": 2e9, "int8": 8e9}, 1e12, 0.0
)


@pytest.fixture(scope="module")
def model() -> Any:
    """Convolutions with norms, in-place activations, pooling and a residual addition, then linears."""

    def program(m: Any, x: Tensor) -> Tensor:
        x = m.pool(m.relu(m.norm(m.stem(x))))
        x = (x + m.point(m.relu(m.depth(x)))).flatten(2).mT
        return m.head(m.down(nn.functional.gelu(m.up(x))))

    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {"stem": nn.Conv2d(3, 16, 3, 2, bias=False), "norm": nn.BatchNorm2d(16)}
    parts |= {"depth": nn.Conv2d(16, 16, 3, padding="same", groups=16), "point": nn.Conv2d(16, 16, 1)}
    parts |= {"up": nn.Linear(16, 64), "down": nn.Linear(64, 32), "head": nn.Linear(32, 8)}
    net = Parts(program, **parts, relu=nn.ReLU(inplace=True), pool=nn.MaxPool2d(3, 2, 1))
    net(images(16))
    return net.eval()


def calibrated(model: nn.Module, batches: Any, **given: Any) -> Calibration:
    return amp_fx.calibrate(model, batches, of="outputs", **{"policy": "int8", "profile": PROFILE, **given})


def images(rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, 17, 17)


@pytest.fixture(scope="module")
def cal(model: Any) -> Calibration:
    torch.manual_seed(1)
    return calibrated(model, [images() for _ in range(4)])


@pytest.fixture
def plan(cal: Calibration) -> CalibratedPlan:
    """All in int8 that may be."""
    return cal.plan(budget=100, verify=False)


def wrong(got: Tensor, model: nn.Module, x: Tensor) -> float:
    """Relative distance from fp64."""
    return error([got.detach()], [exact(model, x)])


def compiled(model: nn.Module, plan: Any, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="amp_fx", options={"plan": plan, "strict": True, **options})


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


def test_every_linear_and_convolution_has_a_scale_and_what_it_adds(cal: Calibration) -> None:
    [graph] = cal.sensitivity.graphs
    rows = {graph.outline.node(call.name).module_path: call for call in graph.calls if call.scales}
    assert list(rows) == ["stem", "depth", "point", "up", "down", "head"]
    assert all(call.scales[INPUT][1] == 0 for path, call in rows.items() if path in ("depth", "point"))
    for path, call in rows.items():
        operands = set(call.roles["forward"])
        assert operands == {MEASURED, "weight"} | ({INPUT} if path in ("up", "down", "head") else set())


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
    assert "spoiled reads values from" in caplog.text
    assert "no scale fits" in caplog.text


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
    added = sum(value or 0.0 for operands in found for value in operands.values())
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


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("weights", ["auto", "cache", "freeze", "stored low"])
@pytest.mark.parametrize("dynamic", [None, True])
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


def test_without_kept_weights_scales_are_found_in_each_call(model: Any, plan: CalibratedPlan) -> None:
    (first,), x = plan.plans, images()
    rows = [row if row.op == "linear" else replace(row, levels={}, scales={}) for row in first.nodes]
    with amp_fx.record() as recording, torch.no_grad():
        got = compiled(model, replace(first, nodes=rows), weights="cast")(x)
    assert wrong(got, model, x) < 0.03
    reasons = [reason for row in recording.plans[0].nodes for reason in row.reasons]
    assert [r.values["level"] for r in reasons if r.kind is Kind.LEVEL_PLANNED] == ["int8_signed"] * 2


@pytest.mark.usefixtures("without_inductor")
def test_a_report_says_why_a_convolution_stays_low(model: Any, plan: CalibratedPlan) -> None:
    def why(**options: Any) -> str:
        torch._dynamo.reset()
        with torch.inference_mode():
            return amp_fx.explain(model, images(), options=options).why("conv2d")

    assert "its scale was not measured" in why(policy="int8", profile="off")
    assert "int8, int8_measured, as the plan has it" in why(plan=plan)
    assert "weights of which copies are kept" in why(plan=plan, weights="cast")


@pytest.mark.parametrize("scale", [(0.0, 3), (math.nan, 3), (math.inf, 3), (0.1, 256)])
@pytest.mark.usefixtures("without_inductor")
def test_a_plan_with_a_scale_that_is_none_is_refused(model: Any, plan: CalibratedPlan, scale: Any) -> None:
    next(row for row in plan.plans[0].nodes if row.scales).scales = {INPUT: scale}
    run = compiled(model, plan.plans[0], strict=False)
    with pytest.raises(Exception, match="the plan has scales") as caught, torch.no_grad():
        run(images())
    assert "amp_fx.calibrate" in str(caught.value)


@pytest.mark.parametrize("int8_range", [pytest.param("full", marks=pytest.mark.int8), "reduced"])
def test_an_exported_program_has_the_scales_and_runtimes_read_them(
    model: Any, int8_range: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("amp_fx.exporting.onnx_file.multiplies_int8", lambda: False)
    plan = calibrated(model, images(16), dtype="float16").plan(budget=100, verify=False)
    x, path, is_full = images(), tmp_path / "model.onnx", int8_range == "full"
    program = amp_fx.export_onnx(model, (x,), path, plan=plan, dtype="float16", int8_range=int8_range)
    # without VNNI onnxruntime clamps sums of products of the full range
    assert ("was not run" in caplog.text) == is_full
    largest = {int(w.abs().max()) for w in program.state_dict.values() if w.dtype is torch.int8}
    assert largest == {127 if is_full else 64}
    ops = [str(node.target) for node in program.graph.nodes]
    assert ops.count("quantized_decomposed.quantize_per_tensor.default") == 6
    got = program.module()(x)
    assert wrong(got, model, x) < (1.3 if is_full else 2) * plan.point.error
    torch.export.save(program, tmp_path / "model.pt2")
    # torch has the ops once this was imported
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), got)
    onnx = pytest.importorskip("onnx")
    names = [node.op_type for node in onnx.load(path).graph.node]
    # of what five products read and of what is pooled; of five weights, too
    assert (names.count("QuantizeLinear"), names.count("DequantizeLinear")) == (6, 11)
    # norms are folded into weights, which are stored in int8: nothing looks for their scales in a call
    assert not {"BatchNormalization", "ReduceMax"} & {*names}
    stem = [(name, value.dtype) for name, value in program.state_dict.items() if "stem" in name]
    kept = {name.removeprefix("stem.weight_int8"): dtype for name, dtype in stem}
    assert kept == {"": torch.int8, "_scale": torch.float32, "_zero_point": torch.int64}
    assert program.state_dict["norm.bias_folded"].dtype is torch.float32
    assert "norm.weight" not in program.state_dict
    # the activation between two products has no casts around it, so that runtimes make one call of three
    relu = next(node for node in program.graph.nodes if node.name.startswith("relu__1"))
    assert relu.meta["val"].dtype is torch.float32
    rows = amp_fx.Plan.from_json(amp_fx.extra_files(program)["amp_fx.json"])
    assert rows.node("relu__1").dtype is torch.float32
    assert [str(user.target) for user in relu.users] == ["quantized_decomposed.quantize_per_tensor.default"]
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    [onnx_result] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.from_numpy(onnx_result) - got).norm() < 0.01 * got.norm()


@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
def test_onnxruntime_multiplies_linears_in_integers(shape: tuple[int, ...], tmp_path: Path) -> None:
    layers = nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8)
    net, x, path = nn.Sequential(*layers).eval(), torch.rand(shape), tmp_path / "model.onnx"
    plan = calibrated(net, x, dtype="float16").plan(budget=100, verify=False)
    program = amp_fx.export_onnx(net, (x,), path, plan=plan, dtype="float16", int8_range="reduced")
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(tmp_path / "run.onnx")
    [found] = runtime.InferenceSession(path, options).run(None, {"input": x.numpy()})
    assert (torch.from_numpy(found) - (got := program.module()(x))).norm() < 0.01 * got.norm()
    kinds = [node.op_type for node in importlib.import_module("onnx").load(tmp_path / "run.onnx").graph.node]
    measured = sum(bool(row.scales) for row in plan.plans[0].nodes)
    assert measured == sum(kind in ("QGemm", "MatMulIntegerToFloat") for kind in kinds) > 0


@pytest.mark.int8
@pytest.mark.usefixtures("code")
def test_no_convolution_rounds_a_silu() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 8, 3)).eval()
    plan = calibrated(net, x := images()).plan(budget=100, verify=False)
    with torch.inference_mode():
        got, [code] = run_and_get_code(compiled(net, plan, cpp_wrapper=False), x)
    assert wrong(got, net, x) < 0.02
    assert re.findall(r"\d, torch\.(\w+), '(\w+)'", code) == [("bfloat16", "swish")]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_a_convolution_in_int8_costs_the_kernel_of_a_gelu(activation: type[nn.Module]) -> None:
    layers = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), activation(), nn.Conv2d(16, 8, 1)
    net = nn.Sequential(*layers).eval()
    cal = calibrated(net, torch.randn(4, 16, 17, 17), profile=replace(PROFILE, bandwidth=5e8))
    [plan] = cal.plan(budget=100, verify=False).plans
    assert any(row.scales for row in plan.nodes) is (activation is nn.ReLU)


@pytest.mark.int8
@pytest.mark.usefixtures("code")
def test_layers_share_the_kernels_that_round_what_they_read() -> None:
    layers: list[nn.Module] = []
    for number in range(4):
        layers += [nn.Linear(32, 32), norm := nn.LayerNorm(32)]
        # so that no two scales are equal
        norm.weight.data.mul_(1.0 + number)
    net, x = nn.Sequential(*layers, nn.Linear(32, 4)).eval(), torch.randn(16, 32)
    plan = calibrated(net, x).plan(budget=100, verify=False)
    assert len({row.scales[INPUT] for row in plan.plans[0].nodes if row.scales}) == 4
    with torch.inference_mode():
        _, [code] = run_and_get_code(compiled(net, plan, cpp_wrapper=False), x)
    # of the input, of three norms, and of the last norm, whose reader is in 16 bits
    assert code.count("async_compile.cpp") == 4


@pytest.mark.int8
@pytest.mark.usefixtures("code")
def test_compiled_products_write_integers_follow_weights_and_come_from_the_cache(
    model: Any, plan: CalibratedPlan
) -> None:
    net, x = copy.deepcopy(model), images()
    with torch.inference_mode(), fresh_cache():
        run = compiled(net, plan)
        # the same calls of kernels, in Python
        got, [code] = run_and_get_code(compiled(net, plan, cpp_wrapper=False), x)
        assert torch.equal(got, run(x))
        assert wrong(got, net, x) < 0.02
        assert len(re.findall(r"torch\.ops\.onednn\.q\w+\.\w+\(", code)) == 5
        # the stem for the pooling, the depthwise convolution for the one behind it, and the linear behind gelu
        assert re.findall(r"\d, torch\.uint8, '(\w+)'", code) == ["relu", "relu", "gelu"]
        # bytes are pooled, and what is added becomes part of the pointwise convolution
        assert code.count("torch.ops.quantized.max_pool2d.default(") == 1
        assert code.count("torch.ops.onednn.qconv2d_pointwise.binary") == 1
        # biases are in fp32, as oneDNN wants them, but that of the last linear
        low = re.findall(r"rand_strided\(\((\d+), \), \(1, \), device='cpu', dtype=torch.bfloat16", code)
        assert low == ["8"]
        with torch.no_grad():
            # within the ranges that were measured
            net.down.weight.mul_(1.5)
            net.stem.weight.mul_(0.9)
        assert wrong(run(x), net, x) < 0.02
        again = compiled(net, plan)
        counters.clear()
        assert torch.equal(again(x), run(x))
        assert counters["inductor"]["fxgraph_cache_hit"] == 1
