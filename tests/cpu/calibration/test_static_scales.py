"""What runs by measured scales: compiled, replayed, exported to ONNX."""

from __future__ import annotations

import copy
import importlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import amp_fx
from amp_fx import CalibratedPlan
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.sensitivity import INPUT
from support.models.calibrated import PROFILE, calibrated, compiled, images, wrong


def test_without_kept_weights_scales_are_found_in_each_call(model: Any, plan: CalibratedPlan) -> None:
    (first,), x = plan.plans, images()
    rows = [row if row.op == "linear" else replace(row, levels={}, scales={}) for row in first.nodes]
    with amp_fx.record() as recording, torch.no_grad():
        got = compiled(model, replace(first, nodes=rows), weights="cast")(x)
    assert wrong(got, model, x) < 0.03
    reasons = [reason for row in recording.plans[0].nodes for reason in row.reasons]
    assert [r.values["level"] for r in reasons if r.kind is ReasonKind.LEVEL_PLANNED] == ["int8_signed"] * 2


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
    monkeypatch.setattr("amp_fx.exporting.onnx_check.multiplies_int8", lambda: False)
    plan = calibrated(model, images(16), dtype="float16").plan(budget=100, verify=False)
    x, path, is_full = images(), tmp_path / "model.onnx", int8_range == "full"
    program = amp_fx.export_onnx(model, (x,), path, plan=plan, dtype="float16", int8_range=int8_range)
    # without VNNI onnxruntime clamps sums of products of the full range
    assert ("not as it is" in caplog.text) == is_full
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


@pytest.mark.slow
@pytest.mark.usefixtures("code")
def test_values_in_fp16_are_rounded_where_onednn_does_not_multiply_bytes(monkeypatch: Any) -> None:
    monkeypatch.setattr("amp_fx.compiler.compiling.multiplies_int8", lambda: False)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(6, 16)
    plan = calibrated(net, x, dtype="float16").plan(budget=100, verify=False)
    with torch.inference_mode():
        assert wrong(compiled(net, plan, dtype="float16")(x), net, x) < 1.3 * plan.point.error


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
        # the stem for the pooling, and the depthwise convolution for the one behind it; a kernel divides what is
        # behind gelu, where that is equalised
        assert re.findall(r"\d, torch\.uint8, '(\w+)'", code) == ["relu", "relu"]
        assert len(re.findall(r"\d, torch\.bfloat16, 'gelu'", code)) == 1
        assert any(row.equalisation for row in plan.plans[0].nodes)
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
