"""The report opens with predicted time and memory; bytes come second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.precision.placement.profile import DeviceProfile

WIDTH, ROWS = 256, 64
BANDWIDTH, LAUNCH = 1e10, 1e-6
PEAK = {"float32": 1e10, "bfloat16": 1e12}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    DeviceProfile("a made-up CPU", "cpu", PEAK, BANDWIDTH, LAUNCH).save(tmp_path / "rates.json")
    return {"profile": str(tmp_path / "rates.json")}


def test_time_is_that_of_the_cost_model_and_autocast_casts_the_weight_in_each_call(
    options: dict[str, str],
) -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(ROWS, WIDTH)
    with torch.inference_mode():
        report = amp_fx.explain(model, x, options=options)
    (plan,) = report.plans
    cast = WIDTH * WIDTH * (4 + 2) / BANDWIDTH + LAUNCH
    assert plan.seconds["torch.autocast"] - plan.seconds["amp_fx"] == pytest.approx(cast)
    flops = 2 * ROWS * WIDTH * WIDTH
    assert plan.seconds["fp32"] > flops / PEAK["float32"]
    assert flops / PEAK["bfloat16"] < plan.seconds["amp_fx"] < plan.seconds["fp32"]
    heading, first, second, *_ = str(report).splitlines()
    milliseconds = f"{1e3 * plan.seconds['amp_fx']:.3g} ms"
    assert first.startswith(f"Predicted time {milliseconds}, with torch.autocast ")
    assert "a made-up CPU" in first
    assert "traffic" in second
    # without gradients nothing is kept for them
    assert "backward" not in heading + first


def test_what_is_kept_for_the_backward_is_in_it_and_weights_are_not(options: dict[str, str]) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()), torch.randn(ROWS, WIDTH)
    report = amp_fx.explain(model, x, options=options)
    found = report.costs["amp_fx"].saved, report.costs["torch.autocast"].saved
    # the input in bf16, and the tanh's result in fp32; autocast's tanh is of bf16, and so is what it keeps
    assert found[0] in {2 * ROWS * WIDTH + size * ROWS * WIDTH for size in (2, 4)}
    assert found[1] is not None
    assert found[1] <= found[0]
    assert "Kept for the backward" in str(report)
    assert amp_fx.Report.from_dict(report.to_dict()).costs == report.costs


def test_nothing_is_predicted_without_rates_or_below_16_bits() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    rules = [{"op": "linear", "precision": "int8"}]
    with torch.no_grad():
        for policy in ("autocast", {"base": "int8", "rules": rules}):
            report = amp_fx.explain(model, x, options={"profile": "off", "policy": policy})
            assert not report.plan.seconds
            assert "Predicted" not in str(report)
